//! PyTorch starts on every GPU.
//!
//! ## Why
//! A wheel for another CUDA version, a CPU build, an old driver or a second libcuda leave a job
//! without GPUs. `nvidia-smi` is content on such a node.
//!
//! ## How it is judged
//! The framework is started in a process of its own, with a time limit and a memory limit. The
//! build's CUDA version and the architectures of its GPU code are judged against driver and GPUs; a
//! proof that succeeded outweighs the tables. A failure is a `warn` in an environment that neither
//! the profile nor a variable selects, where another environment works. The devices must be those
//! of NVML, by UUID where the release returns one. A CPU build is a `warn`.
//!
//! Skipped where no Python environment has the package, and where none was started.
//!
//! ## What to do
//! `gpu-validator environment` prints each environment with its packages, libraries and the reason.
//! The remedy names the package or driver to install.
//!
//! ## Source
//! PyTorch, get started, <https://pytorch.org/get-started/locally/>; CUDA Compatibility,
//! <https://docs.nvidia.com/deploy/cuda-compatibility/>

use crate::check::{Check, Judge};
use crate::environment::installed::{self, Part};
use crate::facts::{Facts, Framework};
use crate::findings::Judgement;
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "torch_cuda",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://pytorch.org/get-started/locally/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    installed::judge_framework(facts, profile, Framework::Torch, Part::Devices)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{EnvironmentFacts, Facts, Framework, ProofEnd, PythonEnvironment, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{framework_environment, healthy_node, judge_host_check};

    fn judge(pythons: Vec<PythonEnvironment>, profile: &str) -> Finding {
        let facts = Facts {
            environment: Some(EnvironmentFacts {
                pythons,
                ..EnvironmentFacts::default()
            }),
            ..healthy_node()
        };
        judge_host_check(&CHECK, &facts, profile)
    }

    fn healthy() -> PythonEnvironment {
        framework_environment(Framework::Torch)
    }

    /// The process was killed during this step.
    fn killed_during(step: &str) -> PythonEnvironment {
        let mut environment = healthy();
        let proof = &mut environment.proofs[0];
        let at = proof.steps.iter().position(|it| it.name == step);
        proof.steps.truncate(at.expect("a step of the proof"));
        proof.unfinished_step = Some(step.to_owned());
        proof.end = ProofEnd::Signal(11);
        environment
    }

    #[test]
    fn a_proof_that_succeeded_passes_and_nothing_installed_is_skipped() {
        let finding = judge(vec![healthy()], "{}");
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        assert_eq!(judge(Vec::new(), "{}").verdict, Verdict::Skip);
        let old = judge_host_check(&CHECK, &healthy_node(), "{}");
        assert_eq!(old.verdict, Verdict::Skip);
    }

    #[test]
    fn a_process_that_dies_fails_with_its_signal() {
        let finding = judge(vec![killed_during("import")], "{}");
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        assert!(finding.summary.contains("SIGSEGV"), "{}", finding.summary);
    }

    #[test]
    fn what_concerns_one_environment_of_two_is_softened_unless_it_is_demanded() {
        let mut broken = killed_during("import");
        broken.prefix = "/opt/broken".to_owned();
        let both = || vec![healthy(), broken.clone()];
        assert_eq!(judge(both(), "{}").verdict, Verdict::Warn);
        let demanded = "python: [{path: /opt/broken}]";
        assert_eq!(judge(both(), demanded).verdict, Verdict::Fail);
    }

    #[test]
    fn a_demanded_environment_that_was_not_started_is_an_error() {
        let mut not_started = healthy();
        not_started.proofs.clear();
        not_started.not_started = Some("the run was stopped".to_owned());
        assert_ne!(
            judge(vec![not_started.clone()], "{}").verdict,
            Verdict::Pass
        );
        let demanded = "python: [{path: /opt/venv}]";
        assert_eq!(judge(vec![not_started], demanded).verdict, Verdict::Error);
    }

    #[test]
    fn the_devices_must_be_those_of_nvml() {
        for change in [
            |it: &mut serde_json::Value| it[0]["uuid"] = serde_json::json!("GPU-of-another-node"),
            |it: &mut serde_json::Value| *it = serde_json::json!([]),
        ] {
            let mut environment = healthy();
            let step = environment.proofs[0]
                .steps
                .iter_mut()
                .find(|it| it.name == "devices");
            let results = &mut step.expect("a step").results;
            change(results.get_mut("devices").expect("a list"));
            let finding = judge(vec![environment], "{}");
            assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        }
    }

    #[test]
    fn a_cpu_build_warns_and_no_code_for_the_gpu_fails() {
        let mut environment = healthy();
        environment.packages[0].cuda = Reading::NotSupported;
        let finding = judge(vec![environment], "{}");
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert!(finding.summary.contains("CPU build"), "{}", finding.summary);

        let mut environment = healthy();
        environment.proofs.clear();
        let code = crate::test_machine::device_code(&["sm_70", "sm_75"]);
        environment.packages[0].device_code = Reading::Value(code);
        let finding = judge(vec![environment], "{}");
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        assert!(
            finding.summary.contains("no kernel image"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn a_build_whose_gpu_code_is_not_known_is_judged_by_its_toolkit() {
        let mut unknown = healthy();
        for package in &mut unknown.packages {
            package.device_code = Reading::default();
        }
        assert_eq!(judge(vec![unknown], "{}").verdict, Verdict::Pass);
    }
}
