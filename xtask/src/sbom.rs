//! The software bill of materials of the binary that ships, as `CycloneDX`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use xshell::cmd;

use crate::{packages, tools, workspace};

/// The file's name in the folder that ships.
pub(crate) const NAME: &str = "gpu-validator.cdx.json";

/// Writes the list next to the binary that was built for `triple`, and adds its checksum to the
/// others.
pub(crate) fn write(folder: &Path, triple: &str) -> anyhow::Result<()> {
    let cyclonedx = tools::CARGO_CYCLONEDX.install()?;
    let shell = workspace::shell()?;
    let before = lists()?;
    ensure!(
        before.is_empty(),
        "{} is in the way; it is no file of this project",
        before
            .first()
            .map(|it| it.display().to_string())
            .unwrap_or_default()
    );
    let outcome = cmd!(
        shell,
        "{cyclonedx} cyclonedx --quiet --manifest-path validator/Cargo.toml --format json --spec-version 1.5 --describe binaries --target {triple} --no-build-deps"
    )
    .quiet()
    .run()
    .context("what the binary is made of could not be listed");
    let text =
        std::fs::read_to_string(workspace::root().join("validator/gpu-validator_bin.cdx.json"));
    // It writes one list for each binary of the workspace, next to the sources.
    for list in lists()? {
        shell.remove_path(list)?;
    }
    outcome?;
    let text = text.context("no list of gpu-validator was written")?;
    let text = without_local_paths(&text, &workspace::root());
    check(&text)?;
    shell.write_file(folder.join(NAME), text)?;
    shell.change_dir(folder);
    let name = NAME;
    let sum = cmd!(shell, "sha256sum {name}").quiet().read()?;
    let sums = shell.read_file("SHA256SUMS")?;
    shell.write_file("SHA256SUMS", format!("{sums}{sum}\n"))?;
    eprintln!("{}", folder.join(NAME).display());
    Ok(())
}

/// Lists that lie next to the sources.
fn lists() -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for package in packages::of_workspace(&workspace::shell()?)? {
        let folder = workspace::root().join(package.folder);
        for entry in folder.read_dir()?.flatten() {
            if entry.file_name().to_string_lossy().ends_with(".cdx.json") {
                found.push(entry.path());
            }
        }
    }
    Ok(found)
}

/// The builder's folder means nothing to a reader, and two builders should list the same.
fn without_local_paths(text: &str, root: &Path) -> String {
    text.replace(&root.display().to_string(), "/gpu-bringup")
}

/// A list without crates that are known to be in the binary is invalid.
fn check(text: &str) -> anyhow::Result<()> {
    let list: Value = serde_json::from_str(text).context("the list is not JSON")?;
    let components = list["components"]
        .as_array()
        .context("the list names no components")?;
    for name in ["clap", "libloading", "serde_json"] {
        ensure!(
            components.iter().any(|it| it["name"] == name),
            "the list does not name {name}, which the binary is made of"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{check, without_local_paths};

    #[test]
    fn a_list_names_no_folder_of_its_builder() {
        let text = r#"{"bom-ref": "path+file:///home/me/gpu/validator#0.1.0"}"#;
        assert_eq!(
            without_local_paths(text, Path::new("/home/me/gpu")),
            r#"{"bom-ref": "path+file:///gpu-bringup/validator#0.1.0"}"#
        );
    }

    #[test]
    fn a_list_that_lacks_what_is_there_is_refused() {
        let named = |names: &[&str]| {
            let components: Vec<_> = names
                .iter()
                .map(|it| serde_json::json!({"name": it}))
                .collect();
            check(&serde_json::json!({ "components": components }).to_string())
        };
        assert!(named(&["clap", "libloading", "serde_json", "other"]).is_ok());
        assert!(named(&["clap", "serde_json"]).is_err());
        assert!(check("{}").is_err());
    }
}
