//! `ami.json`: the contents of an image and the reports by which it was found fit, next to those
//! reports.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use xshell::cmd;

use xtask::workspace;

/// The file's name in a build's folder.
pub const NAME: &str = "ami.json";
/// The folder of the validation's reports below a build's folder, as the template names it.
pub const REPORTS: &str = "gpu-validation";

/// The result for an image that was registered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Image {
    pub(super) id: String,
    pub(super) region: String,
}

/// The exit code of the first level that did not pass, as the build's reports have it; `None` where
/// all passed or none was written.
pub(super) fn failed_level(build: &Path) -> anyhow::Result<Option<(String, u8)>> {
    for level in ["standard", "image"] {
        let path = build.join(REPORTS).join(format!("{level}.exit-code"));
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        let code = text.trim().parse::<u8>().with_context(|| {
            format!("{} holds {:?}, expected an exit code", path.display(), text)
        })?;
        if code != 0 {
            return Ok(Some((level.to_owned(), code)));
        }
    }
    Ok(None)
}

/// Reads Packer's manifest and the reports, and writes `ami.json`. Fails when they do not show that
/// the image passed.
pub(super) fn write(
    build: &Path,
    template: &str,
    validator_version: &str,
) -> anyhow::Result<Image> {
    let packers = read_json(&build.join("manifest.json"))?;
    let image = image_of(&packers)?;
    let mut levels = BTreeMap::new();
    for level in ["standard", "image"] {
        let path = build.join(REPORTS).join(format!("{level}.json"));
        if path.exists() {
            levels.insert(level, verdict_of(&read_json(&path)?, level)?);
        }
    }
    ensure!(
        levels.contains_key("image"),
        "the image {} was registered without a report of level image; deregister it",
        image.id
    );
    let manifest = json!({
        "format": 1,
        "template": template,
        "ami": image.id,
        "region": image.region,
        "validator_version": validator_version,
        "verdict": "pass",
        "levels": levels,
        "reports": checksums(build)?,
    });
    let path = build.join(NAME);
    std::fs::write(&path, format!("{manifest:#}\n"))
        .with_context(|| format!("{} could not be written", path.display()))?;
    Ok(image)
}

/// `us-west-2:ami-…` of the newest build in Packer's manifest.
fn image_of(packers: &Value) -> anyhow::Result<Image> {
    let artifact = packers["builds"]
        .as_array()
        .and_then(|builds| builds.last())
        .and_then(|build| build["artifact_id"].as_str())
        .context("packer's manifest names no artifact")?;
    let (region, id) = artifact
        .split_once(':')
        .filter(|(_, id)| id.starts_with("ami-") && !id.contains(','))
        .with_context(|| format!("packer's manifest names {artifact:?}, expected one AMI"))?;
    Ok(Image {
        id: id.to_owned(),
        region: region.to_owned(),
    })
}

/// The report's own words, where they are those of a pass of a real machine.
fn verdict_of(report: &Value, level: &str) -> anyhow::Result<Value> {
    let verdict = report["verdict"].as_str().unwrap_or("none");
    ensure!(
        verdict == "pass",
        "the report of level {level} says {verdict}, and yet the image was registered; deregister it"
    );
    ensure!(
        report["level"] == level,
        "the report of level {level} is one of level {}",
        report["level"]
    );
    if let Some(scenario) = report["simulated"].as_str() {
        bail!("the report of level {level} is simulated ({scenario}); deregister the image");
    }
    Ok(json!({
        "profile": report["profile"],
        "collected_at": report["collected_at"],
        "counts": report["counts"],
        "machine": report["machine"],
    }))
}

/// SHA-256 by file name, so that a report cannot be exchanged later without being noticed.
fn checksums(build: &Path) -> anyhow::Result<BTreeMap<String, String>> {
    let shell = workspace::shell()?;
    shell.change_dir(build);
    let mut sums = BTreeMap::new();
    for file in shell.read_dir(REPORTS)? {
        let line = cmd!(shell, "sha256sum --binary {file}").quiet().read()?;
        let sum = line.split_whitespace().next().unwrap_or_default();
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        sums.insert(format!("{REPORTS}/{name}"), sum.to_owned());
    }
    Ok(sums)
}

/// What is published: the image of a manifest whose reports are still those that it names.
pub(super) fn read(path: &Path) -> anyhow::Result<Image> {
    let manifest = read_json(path)?;
    ensure!(
        manifest["verdict"] == "pass",
        "{} does not say that the image passed",
        path.display()
    );
    let build = path.parent().context("the manifest lies in no folder")?;
    let wanted = manifest["reports"]
        .as_object()
        .filter(|it| !it.is_empty())
        .with_context(|| format!("{} names no report", path.display()))?;
    let found = checksums(build)?;
    for (name, sum) in wanted {
        ensure!(
            found.get(name).map(String::as_str) == sum.as_str(),
            "{name} is not the report that {} names",
            path.display()
        );
    }
    let text = |key: &str| {
        manifest[key]
            .as_str()
            .map(str::to_owned)
            .with_context(|| format!("{} has no `{key}`", path.display()))
    };
    Ok(Image {
        id: text("ami")?,
        region: text("region")?,
    })
}

/// The manifest of the newest build of `builds`, whose folders are named by their times.
pub(super) fn newest(builds: &Path) -> anyhow::Result<PathBuf> {
    let mut manifests: Vec<PathBuf> = std::fs::read_dir(builds)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join(NAME))
        .filter(|path| path.exists())
        .collect();
    manifests.sort();
    manifests.pop().with_context(|| {
        format!(
            "no image that passed is in {}; build one first, or name its manifest with --manifest",
            builds.display()
        )
    })
}

fn read_json(path: &Path) -> anyhow::Result<Value> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("{} could not be read", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not JSON", path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{image_of, verdict_of};

    #[test]
    fn the_image_is_that_of_the_last_build() {
        let manifest = |artifact: &str| json!({"builds": [{"artifact_id": "us-west-2:ami-1"}, {"artifact_id": artifact}]});
        let image = image_of(&manifest("eu-west-1:ami-2")).expect("an image");
        assert_eq!((&*image.region, &*image.id), ("eu-west-1", "ami-2"));
        for nonsense in [
            "",
            "ami-2",
            "us-west-2:snap-1",
            "us-west-2:ami-1,eu-west-1:ami-2",
        ] {
            assert!(image_of(&manifest(nonsense)).is_err(), "{nonsense}");
        }
        assert!(image_of(&json!({"builds": []})).is_err());
    }

    #[test]
    fn only_a_pass_of_a_real_machine_counts() {
        let report = |verdict: &str, simulated: Option<&str>| json!({"verdict": verdict, "level": "image", "simulated": simulated});
        assert!(verdict_of(&report("pass", None), "image").is_ok());
        assert!(verdict_of(&report("pass", None), "standard").is_err());
        assert!(verdict_of(&report("not_judged", None), "image").is_err());
        assert!(verdict_of(&report("pass", Some("h200x8")), "image").is_err());
        assert!(verdict_of(&json!({}), "image").is_err());
    }
}
