//! ECC is on, and stays on after the next reset.
//!
//! ## Why
//! Without ECC a flipped bit in GPU memory is an undetected wrong result. With a change pending,
//! the mode that was tested is not the mode that the next boot will have.
//!
//! ## How it is judged
//! The current mode must equal the profile's (`gpus.ecc`), on by default. Where the profile has no
//! value, ECC off is a `fail` on a data center GPU and a `warn` elsewhere (workstation GPUs ship
//! with it off). A different pending mode is a `warn` when the current one is right. GPUs that know
//! no ECC are skipped, unless the reference table lists the model with it.
//!
//! ## What to do
//! `nvidia-smi --ecc-config=1` on the GPU, then reset it or reboot.
//!
//! ## Source
//! DCGM reports disabled ECC as a configuration error; NVIDIA GPU Memory Error Management,
//! <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>.

use crate::check::{Check, Judge};
use crate::expect;
use crate::expect::model_has;
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "ecc_mode",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
};

fn judge(gpu: &GpuFacts, _: &Facts, profile: &Profile) -> Judgement {
    let expected = expect::ecc(gpu, profile);
    let known_to_have_it = profile.gpus.ecc == Some(true) || model_has(gpu, |model| model.ecc);
    let mode = gpu.ecc_mode.required_if(known_to_have_it, "ECC mode")?;
    let wanted = expected.as_ref().is_none_or(|it| it.value);
    let word = |on| if on { "on" } else { "off" };
    let remedy = format!(
        "nvidia-smi --ecc-config={} on this GPU, then reset it or reboot",
        u8::from(wanted)
    );
    if mode.current != wanted {
        let pending = if mode.pending == wanted {
            " and waits for a reset"
        } else {
            ""
        };
        let summary = format!(
            "ECC is {}, {} is expected{pending}",
            word(mode.current),
            word(wanted)
        );
        let outcome = if expected.is_some() {
            Outcome::fail(summary)
        } else {
            Outcome::warn(summary)
        };
        return Ok(outcome
            .expected(word(wanted))
            .observed(word(mode.current))
            .remedy(remedy));
    }
    if mode.pending != mode.current {
        return Ok(Outcome::warn(format!(
            "ECC is {} now but will be {} after the next reset",
            word(mode.current),
            word(mode.pending)
        ))
        .expected(format!("{} pending", word(wanted)))
        .observed(format!("{} pending", word(mode.pending)))
        .remedy(remedy));
    }
    Ok(Outcome::pass(format!("ECC is {}", word(mode.current))))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{EccMode, GpuFacts, Reading};
    use crate::findings::Verdict;
    use crate::test_machine::{
        healthy_t4, judge_gpu, judge_healthy, judge_only_gpu, make_model_unknown,
    };

    fn set(gpu: &mut GpuFacts, current: bool, pending: bool) {
        gpu.ecc_mode = Reading::Value(EccMode { current, pending });
    }

    #[test]
    fn passes_when_on() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_when_off_on_a_data_center_gpu() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| set(gpu, false, false));
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(finding.summary, "ECC is off, on is expected");
    }

    #[test]
    fn warns_when_off_on_an_unknown_gpu() {
        let mut gpu = healthy_t4();
        make_model_unknown(&mut gpu);
        set(&mut gpu, false, false);
        assert_eq!(judge_only_gpu(&CHECK, "{}", gpu).verdict, Verdict::Warn);
    }

    #[test]
    fn fails_when_off_and_says_that_a_reset_is_missing() {
        let finding = judge_gpu(&CHECK, "gpus: {ecc: true}", |gpu| set(gpu, false, true));
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.contains("waits for a reset"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn warns_when_it_will_be_off() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| set(gpu, true, false));
        assert_eq!(finding.verdict, Verdict::Warn);
    }

    #[test]
    fn a_profile_may_want_it_off() {
        assert_eq!(
            judge_gpu(&CHECK, "gpus: {ecc: false}", |_| {}).verdict,
            Verdict::Fail
        );
        let finding = judge_gpu(&CHECK, "gpus: {ecc: false}", |gpu| set(gpu, false, false));
        assert_eq!(finding.verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_a_gpu_that_has_ecc_answers_not_supported() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| gpu.ecc_mode = Reading::NotSupported);
        assert_eq!(finding.verdict, Verdict::Error);
        let mut gpu = healthy_t4();
        make_model_unknown(&mut gpu);
        gpu.ecc_mode = Reading::NotSupported;
        assert_eq!(
            judge_only_gpu(&CHECK, "gpus: {ecc: true}", gpu).verdict,
            Verdict::Error
        );
    }

    #[test]
    fn skips_where_the_gpu_has_none() {
        let mut gpu = healthy_t4();
        make_model_unknown(&mut gpu);
        gpu.ecc_mode = Reading::NotSupported;
        assert_eq!(judge_only_gpu(&CHECK, "{}", gpu).verdict, Verdict::Skip);
    }

    #[test]
    fn a_virtual_gpu_may_answer_not_supported() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.virtualization_mode = Reading::Value("vgpu".to_owned());
            gpu.ecc_mode = Reading::NotSupported;
        });
        assert_eq!(finding.verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.ecc_mode = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }
}
