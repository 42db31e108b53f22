//! MIG is on or off as expected, and a GPU in MIG mode has MIG devices.
//!
//! ## Why
//! A GPU in MIG mode without MIG devices offers CUDA nothing to work on. A mode that waits for a
//! reset makes the next boot another machine than the one that was tested.
//!
//! ## How it is judged
//! - The mode must equal the profile's (`gpus.mig`): `fail` otherwise. Without it, both modes are
//!   right.
//! - In MIG mode: no MIG device is a `fail`, and so is another number than `gpus.mig_devices`.
//! - A different pending mode is a `warn` when the current one is right.
//!
//! GPUs without MIG are skipped; one of which the profile wants MIG, or whose model has it, is an
//! `error` when it reports no mode.
//!
//! ## What to do
//! `nvidia-smi --multi-instance-gpu=0` (or 1) on the GPU, then reset it or reboot; create devices
//! with `nvidia-smi mig --create-gpu-instance <profiles> --default-compute-instance`.
//!
//! ## Source
//! NVIDIA Multi-Instance GPU User Guide,
//! <https://docs.nvidia.com/datacenter/tesla/mig-user-guide/>.

use crate::check::{Check, Judge};
use crate::expect::model_has;
use crate::facts::{Facts, GpuFacts, MigMode};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "mig_mode",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/tesla/mig-user-guide/",
};

fn judge(gpu: &GpuFacts, _: &Facts, profile: &Profile) -> Judgement {
    let known_to_have_it = profile.gpus.mig == Some(true) || model_has(gpu, |model| model.mig);
    let mode = gpu.mig.required_if(known_to_have_it, "MIG mode")?;
    worst_of([
        Ok(judge_mode(*mode, profile.gpus.mig)),
        judge_devices(*mode, gpu, profile.gpus.mig_devices),
    ])
}

fn judge_mode(mode: MigMode, wanted: Option<bool>) -> Outcome {
    let word = |on| if on { "on" } else { "off" };
    let wanted = wanted.unwrap_or(mode.current);
    let remedy = format!(
        "nvidia-smi --multi-instance-gpu={} on this GPU, then reset it or reboot",
        u8::from(wanted)
    );
    if mode.current != wanted {
        return Outcome::fail(format!(
            "MIG is {}, the profile requires {}",
            word(mode.current),
            word(wanted)
        ))
        .expected(word(wanted))
        .observed(word(mode.current))
        .remedy(remedy);
    }
    if mode.pending != mode.current {
        return Outcome::warn(format!(
            "MIG is {} now but will be {} after the next reset",
            word(mode.current),
            word(mode.pending)
        ))
        .expected(format!("{} pending", word(wanted)))
        .observed(format!("{} pending", word(mode.pending)))
        .remedy(remedy);
    }
    Outcome::pass(format!("MIG is {}", word(mode.current)))
}

fn judge_devices(mode: MigMode, gpu: &GpuFacts, wanted: Option<u32>) -> Judgement {
    if !mode.current {
        return Ok(Outcome::skip(
            "a GPU that is not in MIG mode has no MIG devices",
        ));
    }
    let count = gpu.mig_devices.required("MIG devices")?.len();
    let remedy = "create MIG devices: nvidia-smi mig -cgi <profiles> -C";
    if let Some(wanted) = wanted.filter(|it| *it as usize != count) {
        return Ok(Outcome::fail(format!(
            "the GPU has {count} MIG devices, the profile requires {wanted}"
        ))
        .expected(format!("{wanted} MIG devices"))
        .observed(format!("{count} MIG devices"))
        .remedy(remedy));
    }
    if count == 0 && wanted.is_none() {
        return Ok(
            Outcome::fail("the GPU is in MIG mode but has no MIG device to work on")
                .expected("at least one MIG device")
                .observed("none")
                .remedy(remedy),
        );
    }
    Ok(Outcome::pass(format!("{count} MIG devices")))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{GpuFacts, MigDevice, MigMode, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_t4, judge_gpu, judge_healthy, judge_only_gpu, make_model_unknown,
    };

    fn set(gpu: &mut GpuFacts, current: bool, pending: bool, devices: usize) {
        gpu.mig = Reading::Value(MigMode { current, pending });
        gpu.mig_devices = Reading::Value(vec![MigDevice::default(); devices]);
    }

    fn with(profile: &str, current: bool, pending: bool, devices: usize) -> Finding {
        judge_gpu(&CHECK, profile, |gpu| set(gpu, current, pending, devices))
    }

    #[test]
    fn passes_when_off() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn passes_when_on_with_devices_and_fails_without() {
        assert_eq!(with("{}", true, true, 7).verdict, Verdict::Pass);
        let finding = with("{}", true, true, 0);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "the GPU is in MIG mode but has no MIG device to work on"
        );
    }

    #[test]
    fn fails_when_it_is_not_what_the_profile_says() {
        let finding = with("gpus: {mig: true}", false, false, 0);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(finding.summary, "MIG is off, the profile requires on");
        assert_eq!(
            with("gpus: {mig: false}", true, true, 7).verdict,
            Verdict::Fail
        );
        assert_eq!(
            with("gpus: {mig: true}", true, true, 7).verdict,
            Verdict::Pass
        );
    }

    #[test]
    fn fails_on_another_number_of_devices() {
        let profile = "gpus: {mig: true, mig_devices: 7}";
        assert_eq!(with(profile, true, true, 7).verdict, Verdict::Pass);
        assert_eq!(with(profile, true, true, 6).verdict, Verdict::Fail);
        assert_eq!(with(profile, true, true, 8).verdict, Verdict::Fail);
    }

    #[test]
    fn warns_of_a_pending_change() {
        assert_eq!(with("{}", false, true, 0).verdict, Verdict::Warn);
        assert_eq!(with("{}", true, false, 7).verdict, Verdict::Warn);
    }

    #[test]
    fn errs_when_mode_or_devices_were_not_read() {
        let mode = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.mig = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(mode.verdict, Verdict::Error);
        let devices = judge_gpu(&CHECK, "{}", |gpu| {
            set(gpu, true, true, 0);
            gpu.mig_devices = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(devices.verdict, Verdict::Error);
        let denied = judge_gpu(&CHECK, "{}", |gpu| gpu.mig = Reading::NotSupported);
        assert_eq!(denied.verdict, Verdict::Error);
    }

    #[test]
    fn skips_where_the_gpu_has_none_unless_the_profile_wants_it() {
        let mut gpu = healthy_t4();
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", gpu.clone()).verdict,
            Verdict::Skip
        );
        make_model_unknown(&mut gpu);
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", gpu.clone()).verdict,
            Verdict::Skip
        );
        assert_eq!(
            judge_only_gpu(&CHECK, "gpus: {mig: true}", gpu).verdict,
            Verdict::Error
        );
    }
}
