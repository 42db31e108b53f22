//! GEMM results of PyTorch on every GPU equal those of the CPU.
//!
//! ## Why
//! `torch.cuda.is_available()` returned true on nodes where the first kernel failed: only a result
//! that was read back shows that the build has code for the GPU.
//!
//! ## How it is judged
//! In each environment that was started, on each GPU: a tensor is made, moved, added and read back;
//! a product of 1024 x 1024 in FP32 and, where the GPU has it, in BF16 is compared with the CPU's;
//! one step of autograd is compared with its known gradient. The operands are integers, so that
//! every product is exact in FP32, TF32 and BF16 alike.
//!
//! Skipped where no Python environment has the package, and where none was started.
//!
//! ## What to do
//! `gpu-validator environment` prints each environment with its packages, libraries and the reason.
//! The remedy names the package or driver to install.
//!
//! ## Source
//! PyTorch, numerical accuracy,
//! <https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html>

use crate::check::{Check, Judge};
use crate::environment::installed::{self, Part};
use crate::facts::{Facts, Framework};
use crate::findings::Judgement;
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "torch_gemm",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.pytorch.org/docs/stable/notes/numerical_accuracy.html",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    installed::judge_framework(facts, profile, Framework::Torch, Part::Computation)
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
        let finding = judge(vec![killed_during("gemm_fp32")], "{}");
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        assert!(finding.summary.contains("SIGSEGV"), "{}", finding.summary);
    }

    #[test]
    fn what_concerns_one_environment_of_two_is_softened_unless_it_is_demanded() {
        let mut broken = killed_during("gemm_fp32");
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
    fn a_build_whose_gpu_code_is_not_known_is_judged_by_its_toolkit() {
        let mut unknown = healthy();
        for package in &mut unknown.packages {
            package.device_code = Reading::default();
        }
        assert_eq!(judge(vec![unknown], "{}").verdict, Verdict::Pass);
    }
}
