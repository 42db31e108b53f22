//! The CUDA compiler is on the path.
//!
//! ## Why
//! Most GPU images have a toolkit and leave its folder out of `PATH`: builds of extensions then
//! fail with "nvcc not found", and tools report that no toolkit is installed.
//!
//! ## How it is judged
//! An `nvcc` in a folder of `PATH`, or in one that `/etc/environment` or a script of
//! `/etc/profile.d` names, passes. One that is elsewhere is a `warn` with the line to add; never
//! more, because no verdict of this program needs a toolkit. Skipped without a toolkit and below a
//! sysroot, whose shells have another `PATH`.
//!
//! ## What to do
//! Add the line of the remedy to `/etc/profile.d/cuda.sh`.
//!
//! ## Source
//! CUDA Installation Guide for Linux, post-installation actions,
//! <https://docs.nvidia.com/cuda/cuda-installation-guide-linux/#post-installation-actions>

use crate::check::{Check, Judge};
use crate::environment::installed;
use crate::facts::{CudaToolkit, CudaToolkitKind, Facts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "toolkit_on_path",
    stage: Stage::Host,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-installation-guide-linux/#post-installation-actions",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let seen = installed::seen(facts, profile)?;
    let with_compiler: Vec<&CudaToolkit> = seen
        .toolkits
        .iter()
        .filter(|it| it.nvcc.is_some())
        .collect();
    if with_compiler.is_empty() {
        return Err(Outcome::skip(
            "no toolkit with nvcc was found; the GPUs are judged without one",
        ));
    }
    let on_path = match seen.nvcc_on_path.applicable("PATH of its shells") {
        Ok(on_path) => on_path,
        Err(unread) if unread.not_applicable => {
            return Err(Outcome::skip(
                "PATH of the shells of this tree is not known",
            ));
        }
        Err(unread) => return Err(unread.into()),
    };
    if let Some(nvcc) = on_path {
        return Ok(Outcome::pass(format!("nvcc is on the path: {nvcc}")));
    }
    // Only a toolkit of the machine belongs on every user's path.
    let of_machine = |it: &&&CudaToolkit| it.kind == CudaToolkitKind::Toolkit;
    let Some(best) = with_compiler
        .iter()
        .filter(of_machine)
        // Of equal versions the first, which is in the more usual place.
        .rev()
        .max_by_key(|it| version_of(it))
    else {
        return Ok(Outcome::pass(format!(
            "nvcc is part of {}, which selects it itself",
            with_compiler[0].path
        )));
    };
    let path = best
        .links
        .iter()
        .min_by_key(|it| it.len())
        .unwrap_or(&best.path);
    let version = best.version.value().map_or("of unknown version", |it| it);
    Ok(Outcome::warn(format!(
        "nvcc {version} is installed in {path}/bin, which is not on the path"
    ))
    .expected("nvcc on the path")
    .observed(path)
    .remedy(format!("export PATH={path}/bin:$PATH")))
}

fn version_of(toolkit: &CudaToolkit) -> Vec<u32> {
    let version = toolkit.version.value().map_or("", |it| it);
    version.split('.').map_while(|it| it.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{CudaToolkit, CudaToolkitKind, EnvironmentFacts, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn toolkit(path: &str, version: &str, kind: CudaToolkitKind) -> CudaToolkit {
        CudaToolkit {
            path: path.to_owned(),
            version: Reading::Value(version.to_owned()),
            kind,
            nvcc: Some(format!("{path}/bin/nvcc")),
            links: Vec::new(),
        }
    }

    fn judge(toolkits: Vec<CudaToolkit>, on_path: Reading<Option<String>>) -> Finding {
        let facts = Facts {
            environment: Some(EnvironmentFacts {
                toolkits,
                nvcc_on_path: on_path,
                ..EnvironmentFacts::default()
            }),
            ..healthy_node()
        };
        judge_host_check(&CHECK, &facts, "{}")
    }

    #[test]
    fn off_the_path_is_a_warning_with_the_line_to_add() {
        let mut linked = toolkit("/usr/local/cuda-12.8", "12.8.1", CudaToolkitKind::Toolkit);
        linked.links.push("/usr/local/cuda".to_owned());
        let older = toolkit("/usr/local/cuda-9.2", "9.2", CudaToolkitKind::Toolkit);
        let finding = judge(vec![older, linked], Reading::Value(None));
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(
            finding.remedy.as_deref(),
            Some("export PATH=/usr/local/cuda/bin:$PATH")
        );
        assert!(
            finding.summary.contains("nvcc 12.8.1"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn on_the_path_passes() {
        let toolkits = vec![toolkit("/opt/cuda", "13.0", CudaToolkitKind::Toolkit)];
        let on_path = Reading::Value(Some("/usr/bin/nvcc".to_owned()));
        assert_eq!(judge(toolkits, on_path).verdict, Verdict::Pass);
    }

    #[test]
    fn a_conda_environment_selects_its_own() {
        let toolkits = vec![toolkit("/opt/conda", "12.4", CudaToolkitKind::Conda)];
        assert_eq!(judge(toolkits, Reading::Value(None)).verdict, Verdict::Pass);
    }

    #[test]
    fn nothing_to_judge_is_skipped_and_unread_is_an_error() {
        assert_eq!(
            judge(Vec::new(), Reading::Value(None)).verdict,
            Verdict::Skip
        );
        let toolkits = || vec![toolkit("/opt/cuda", "13.0", CudaToolkitKind::Toolkit)];
        assert_eq!(
            judge(toolkits(), Reading::NotSupported).verdict,
            Verdict::Skip
        );
        assert_eq!(
            judge(toolkits(), Reading::default()).verdict,
            Verdict::Error
        );
        let before = judge_host_check(&CHECK, &healthy_node(), "{}");
        assert_eq!(before.verdict, Verdict::Skip);
    }
}
