//! The packages of the workspace, as cargo lists them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::workspace;

#[derive(Debug)]
pub(crate) struct Package {
    /// From the root of the checkout.
    pub(crate) folder: PathBuf,
    pub(crate) targets: Vec<Target>,
    /// Folders of the packages of this checkout that it depends on, for tests and build scripts
    /// too.
    dependencies: Vec<PathBuf>,
}

#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kinds: Vec<String>,
    /// From the root of the checkout.
    pub(crate) file: PathBuf,
}

impl Target {
    pub(crate) fn is(&self, kind: &str) -> bool {
        self.kinds.iter().any(|it| it == kind)
    }
}

/// All packages of the workspace.
pub(crate) fn of_workspace(shell: &Shell) -> anyhow::Result<Vec<Package>> {
    packages(shell, "Cargo.toml")
}

/// The folders of the package of `manifest` and of everything in this checkout that it depends on.
pub(crate) fn folders(shell: &Shell, manifest: &str) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut known = of_workspace(shell)?;
    let own = Path::new(manifest).parent().unwrap_or(Path::new(""));
    if known.iter().all(|it| it.folder != own) {
        known.extend(packages(shell, manifest)?);
    }
    let mut found = BTreeSet::new();
    let mut left = vec![own.to_path_buf()];
    while let Some(folder) = left.pop() {
        let package = known.iter().find(|it| it.folder == folder);
        let package = package.with_context(|| format!("{} is no package", folder.display()))?;
        if found.insert(folder) {
            left.extend(package.dependencies.iter().cloned());
        }
    }
    Ok(found)
}

fn packages(shell: &Shell, manifest: &str) -> anyhow::Result<Vec<Package>> {
    let cargo = workspace::cargo();
    let metadata = cmd!(
        shell,
        "{cargo} metadata --no-deps --offline --format-version 1 --manifest-path {manifest}"
    )
    .quiet()
    .read()?;
    let metadata: Value = serde_json::from_str(&metadata)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let packages: Vec<Package> = packages.map(package).collect::<anyhow::Result<_>>()?;
    ensure!(!packages.is_empty(), "{manifest} names no package");
    Ok(packages)
}

fn package(package: &Value) -> anyhow::Result<Package> {
    let manifest = from_root(&package["manifest_path"])?;
    let targets = package["targets"].as_array().into_iter().flatten();
    let dependencies = package["dependencies"].as_array().into_iter().flatten();
    Ok(Package {
        folder: manifest
            .parent()
            .context("a manifest in no folder")?
            .to_path_buf(),
        targets: targets.map(target).collect::<anyhow::Result<_>>()?,
        dependencies: dependencies
            .filter(|it| it["path"].is_string())
            .map(|it| from_root(&it["path"]))
            .collect::<anyhow::Result<_>>()?,
    })
}

fn target(target: &Value) -> anyhow::Result<Target> {
    let kinds = target["kind"].as_array().into_iter().flatten();
    Ok(Target {
        name: target["name"]
            .as_str()
            .context("a target without a name")?
            .to_owned(),
        kinds: kinds
            .filter_map(|it| it.as_str().map(str::to_owned))
            .collect(),
        file: from_root(&target["src_path"])?,
    })
}

fn from_root(path: &Value) -> anyhow::Result<PathBuf> {
    let path = Path::new(path.as_str().context("cargo named no path")?);
    let below = path.strip_prefix(workspace::root());
    Ok(below
        .with_context(|| format!("{} is outside of the checkout", path.display()))?
        .to_path_buf())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{folders, of_workspace};
    use crate::workspace;

    #[test]
    fn a_packages_folders_are_those_of_everything_that_it_is_built_from() {
        let shell = workspace::shell().expect("a shell");
        let of = |manifest: &str| folders(&shell, manifest).expect(manifest);
        assert_eq!(
            of("terraform/tasks/Cargo.toml"),
            ["terraform/tasks", "xtask"].map(PathBuf::from).into()
        );
        assert!(of("tests/images/Cargo.toml").contains(&PathBuf::from("packer/tasks")));
        // A workspace of its own.
        let fuzz = of("fuzz/Cargo.toml");
        assert!(
            fuzz.iter().any(|it| it.starts_with("validator")),
            "{fuzz:?}"
        );
        assert!(!fuzz.contains(&PathBuf::from("xtask")));
        assert!(folders(&shell, "tests/Cargo.toml").is_err());
    }

    #[test]
    fn the_workspace_has_a_library_and_a_program_of_this_task() {
        let packages = of_workspace(&workspace::shell().expect("a shell")).expect("packages");
        let own = packages.iter().find(|it| it.folder == Path::new("xtask"));
        let own = own.expect("this package");
        let files: Vec<_> = own
            .targets
            .iter()
            .map(|it| (it.is("bin"), &*it.name))
            .collect();
        assert_eq!(files, [(false, "xtask"), (true, "xtask")]);
    }
}
