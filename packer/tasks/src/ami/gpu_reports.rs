//! Whether an image was judged on a GPU before it is published.
//!
//! Level image judges the files of an image. What its driver does with a GPU is known from a run on
//! one: on the build instance, where that had a GPU, or on an instance of the image.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;

/// Runs at these levels work the GPUs.
const LEVELS: [&str; 2] = ["standard", "extended"];

/// JSON reports in files and folders; what else lies in a folder is left out.
pub(super) fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<(PathBuf, Value)>> {
    let mut reports = Vec::new();
    let mut left: Vec<PathBuf> = paths.to_vec();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(&path)
                .with_context(|| format!("{} cannot be listed", path.display()))?;
            for entry in entries {
                left.push(entry?.path());
            }
        } else if let Some(report) = report(&path)? {
            reports.push((path, report));
        } else {
            ensure!(
                !paths.contains(&path),
                "{} is no JSON report of gpu-validator",
                path.display()
            );
        }
    }
    Ok(reports)
}

/// `None` for another file.
fn report(path: &Path) -> anyhow::Result<Option<Value>> {
    if path.extension().is_none_or(|it| it != "json") {
        return Ok(None);
    }
    let text = std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
    let Ok(report) = serde_json::from_slice::<Value>(&text) else {
        return Ok(None);
    };
    let is_report = report["exit_code"].is_u64() && report["machine"].is_object();
    Ok(is_report.then_some(report))
}

/// `levels` is the image's tag. Reports of other images are no evidence for this one.
pub(super) fn ensure_judged(
    image: &str,
    levels: &str,
    reports: &[(PathBuf, Value)],
) -> anyhow::Result<()> {
    let mut passes = 0;
    for (path, report) in reports {
        if report["machine"]["ec2_ami_id"] != image {
            continue;
        }
        ensure!(
            report["exit_code"] == 0,
            "{} of this image: {}",
            path.display(),
            report["verdict_text"].as_str().unwrap_or("no pass")
        );
        let gpus = report["machine"]["gpus"].as_array().map_or(0, Vec::len);
        let worked = report["level"]
            .as_str()
            .is_some_and(|it| LEVELS.contains(&it));
        let is_whole = report["simulated"].is_null() && report["incomplete"].is_null();
        passes += usize::from(worked && is_whole && gpus > 0);
    }
    let on_the_build_instance = levels.split('+').any(|it| LEVELS.contains(&it));
    ensure!(
        on_the_build_instance || passes > 0,
        "no GPU was judged with {image}: its build instance had none, and no report of level {} that is \
         complete and not simulated names it; run `cargo xtask validate-ami --ami {image}` and name the folder \
         of its reports by --gpu-reports",
        LEVELS.join(" or ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report() -> Value {
        json!({
            "exit_code": 0, "level": "standard", "simulated": null, "incomplete": null,
            "verdict_text": "node is ready",
            "machine": {"ec2_ami_id": "ami-1", "gpus": [{}]},
        })
    }

    fn judged(levels: &str, report: Value) -> Result<(), String> {
        ensure_judged("ami-1", levels, &[(PathBuf::from("report.json"), report)])
            .map_err(|it| it.to_string())
    }

    #[test]
    fn an_image_is_judged_by_its_own_complete_run_on_a_gpu_alone() {
        judged("image", report()).expect("a run on an instance");
        ensure_judged("ami-1", "image+standard", &[]).expect("a run on the build instance");
        ensure_judged("ami-1", "image", &[]).expect_err("no run");
        for (pointer, value) in [
            ("/level", json!("quick")),
            ("/simulated", json!("h200x8")),
            ("/incomplete", json!("stopped")),
            ("/machine/gpus", json!([])),
            ("/machine/ec2_ami_id", json!("ami-2")),
            ("/machine/ec2_ami_id", Value::Null),
        ] {
            let mut wrong = report();
            *wrong.pointer_mut(pointer).expect("there") = value;
            let error = judged("image", wrong).expect_err(pointer);
            assert!(error.contains("no GPU was judged with ami-1"), "{error}");
        }
    }

    #[test]
    fn a_failed_run_outweighs_a_pass_of_the_build_instance() {
        let mut failed = report();
        failed["exit_code"] = json!(1);
        failed["verdict_text"] = json!("GPU 0 fails");
        let error = judged("image+standard", failed).expect_err("it failed");
        assert_eq!(error, "report.json of this image: GPU 0 fails");
    }
}
