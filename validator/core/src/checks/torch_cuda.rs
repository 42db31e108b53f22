//! PyTorch starts on every GPU.
//!
//! ## Why
//! A wheel for another CUDA version, a CPU build, an old driver or a second libcuda leave a job
//! without GPUs. `nvidia-smi` is content on such a node.
//!
//! ## How it is judged
//! In each Python environment that has it, the framework is started in a process of its own, with a
//! time limit and a memory limit. The build's CUDA version and the architectures of its GPU code
//! are judged against driver and GPUs; a proof that succeeded outweighs the tables. A failure is a
//! `warn` in an environment that neither the profile nor a variable selects, where another
//! environment works. The devices must be those of NVML, by UUID where the release returns one. A
//! CPU build is a `warn`.
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
use crate::facts::{Facts, Framework, PythonEnvironment};
use crate::findings::Judgement;
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "torch_cuda",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachEnvironment(Some(Framework::Torch), judge),
    documentation_url: "https://pytorch.org/get-started/locally/",
};

fn judge(environment: &PythonEnvironment, facts: &Facts, profile: &Profile) -> Judgement {
    installed::judge_framework(environment, facts, profile, Framework::Torch, Part::Devices)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{EnvironmentFacts, Facts, PythonEnvironment, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{device_code, healthy_node, judge_host_check, torch_environment};

    fn judge(environment: PythonEnvironment) -> Finding {
        let facts = Facts {
            environment: Some(EnvironmentFacts {
                pythons: vec![environment],
                ..EnvironmentFacts::default()
            }),
            ..healthy_node()
        };
        judge_host_check(&CHECK, &facts, "{}")
    }

    #[test]
    fn a_cpu_build_warns_and_no_code_for_the_gpu_fails() {
        let mut environment = torch_environment();
        environment.packages[0].cuda = Reading::NotSupported;
        let finding = judge(environment);
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert!(finding.summary.contains("CPU build"), "{}", finding.summary);

        let mut environment = torch_environment();
        environment.proofs.clear();
        let code = device_code(&["sm_70", "sm_75"]);
        environment.packages[0].device_code = Reading::Value(code);
        let finding = judge(environment);
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        assert!(
            finding.summary.contains("no kernel image"),
            "{}",
            finding.summary
        );
    }
}
