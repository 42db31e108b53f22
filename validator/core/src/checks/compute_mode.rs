//! The compute mode lets jobs use the GPU.
//!
//! ## Why
//! In mode "prohibited" no CUDA program starts on the GPU. In an exclusive mode a second process
//! fails, which appears as a broken GPU to all programs that start more than one.
//!
//! ## How it is judged
//! The mode must equal the profile's (`gpus.compute_mode`): `fail` otherwise. Where the profile has
//! no value, "default" passes, an exclusive mode is a `warn`, and "prohibited" is a `fail`. Virtual
//! GPUs that know no compute mode are skipped.
//!
//! ## What to do
//! `nvidia-smi --compute-mode=DEFAULT` on the GPU, or state the wanted mode in the profile.
//!
//! ## Source
//! `nvmlComputeMode_t`, <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html>.

use crate::check::{Check, Judge};
use crate::expect::model_has;
use crate::facts::{ComputeMode, Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "compute_mode",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html",
};

fn judge(gpu: &GpuFacts, _: &Facts, profile: &Profile) -> Judgement {
    let must_tell = profile.gpus.compute_mode.is_some() || model_has(gpu, |_| true);
    let mode = *gpu.compute_mode.required_if(must_tell, "compute mode")?;
    let wanted = profile.gpus.compute_mode.unwrap_or(ComputeMode::Default);
    if mode == wanted {
        return Ok(Outcome::pass(format!("the compute mode is {mode}")));
    }
    let text = format!("the compute mode is {mode}, {wanted} is expected");
    let is_exclusive = matches!(
        mode,
        ComputeMode::ExclusiveThread | ComputeMode::ExclusiveProcess
    );
    let outcome = if is_exclusive && profile.gpus.compute_mode.is_none() {
        Outcome::warn(text)
    } else {
        Outcome::fail(text)
    };
    Ok(outcome
        .expected(wanted)
        .observed(mode)
        .remedy(format!(
            "nvidia-smi --compute-mode={} on this GPU, or state the wanted mode in the profile (gpus.compute_mode)",
            wanted.to_string().to_uppercase()
        )))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{ComputeMode, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{judge_gpu, judge_healthy};

    fn with(profile: &str, mode: ComputeMode) -> Finding {
        judge_gpu(&CHECK, profile, |gpu| {
            gpu.compute_mode = Reading::Value(mode);
        })
    }

    #[test]
    fn passes_in_default_mode() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_when_prohibited_or_unknown() {
        assert_eq!(with("{}", ComputeMode::Prohibited).verdict, Verdict::Fail);
        assert_eq!(with("{}", ComputeMode::Unknown(7)).verdict, Verdict::Fail);
    }

    #[test]
    fn warns_of_an_exclusive_mode_that_nobody_asked_for() {
        let finding = with("{}", ComputeMode::ExclusiveProcess);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(
            finding.summary,
            "the compute mode is exclusive_process, default is expected"
        );
        assert_eq!(
            with("{}", ComputeMode::ExclusiveThread).verdict,
            Verdict::Warn
        );
    }

    #[test]
    fn the_profile_decides() {
        let profile = "gpus: {compute_mode: exclusive_process}";
        assert_eq!(
            with(profile, ComputeMode::ExclusiveProcess).verdict,
            Verdict::Pass
        );
        let finding = with(profile, ComputeMode::Default);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.remedy.unwrap().contains("EXCLUSIVE_PROCESS"));
        let profile = "gpus: {compute_mode: default}";
        assert_eq!(
            with(profile, ComputeMode::ExclusiveProcess).verdict,
            Verdict::Fail
        );
    }

    #[test]
    fn a_virtual_gpu_may_know_none() {
        for (profile, verdict) in [
            ("{}", Verdict::Skip),
            ("gpus: {compute_mode: default}", Verdict::Error),
        ] {
            let finding = judge_gpu(&CHECK, profile, |gpu| {
                gpu.virtualization_mode = Reading::Value("vgpu".to_owned());
                gpu.compute_mode = Reading::NotSupported;
            });
            assert_eq!(finding.verdict, verdict, "{profile}");
        }
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.compute_mode = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }
}
