//! The driver requests no recovery action.
//!
//! ## Why
//! After a fatal error the driver itself reports what the GPU needs before it can work again: a
//! reset, a reboot, or that work be drained first. Work that starts before that fails, or gives
//! wrong results.
//!
//! ## How it is judged
//! NVML's GPU recovery action must be "none"; any other, known or new, is a `fail`. Drivers that
//! keep no recovery action are skipped.
//!
//! ## What to do
//! The action that the driver reports: drain, reset the GPU (`nvidia-smi --gpu-reset`), or reboot
//! the node.
//!
//! ## Source
//! `nvmlDeviceGpuRecoveryAction_t`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html>; Xid 154 announces a
//! change of it; DCGM's deployment check fails on any.

use crate::check::{Check, Judge};
use crate::diagnosis::RecommendedAction;
use crate::facts::{Facts, GpuFacts, RecoveryAction};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "recovery_action",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html",
};

fn judge(gpu: &GpuFacts, _: &Facts, _: &Profile) -> Judgement {
    let action = *gpu.recovery_action.applicable("recovery action")?;
    let (wanted, remedy, recommended) = match action {
        RecoveryAction::None => return Ok(Outcome::pass("the driver requests no recovery action")),
        RecoveryAction::GpuReset => (
            "a reset of the GPU".to_owned(),
            "drain the node and reset the GPU: nvidia-smi --gpu-reset",
            RecommendedAction::Reset,
        ),
        RecoveryAction::NodeReboot => (
            "a reboot of the node".to_owned(),
            "drain and reboot the node",
            RecommendedAction::Reboot,
        ),
        RecoveryAction::DrainP2p => (
            "peer-to-peer work to be drained".to_owned(),
            "end the work that uses this GPU's NVLinks, then reset the GPU",
            RecommendedAction::Drain,
        ),
        RecoveryAction::DrainAndReset => (
            "work to be drained and the GPU to be reset".to_owned(),
            "end all work on this GPU, then reset it: nvidia-smi --gpu-reset",
            RecommendedAction::Reset,
        ),
        RecoveryAction::Unknown(number) => (
            format!("recovery action {number}, which this version has no name for"),
            "drain the node; nvidia-smi -q names the GPU Recovery Action",
            RecommendedAction::Drain,
        ),
    };
    Ok(Outcome::fail(format!("the driver requests {wanted}"))
        .expected("no recovery action")
        .observed(wanted)
        .remedy(remedy)
        .recommends(recommended))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Reading, RecoveryAction};
    use crate::findings::Verdict;
    use crate::test_machine::{judge_gpu, judge_healthy};

    #[test]
    fn passes_when_none_is_asked_for() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_on_every_other_action() {
        for action in [
            RecoveryAction::GpuReset,
            RecoveryAction::NodeReboot,
            RecoveryAction::DrainP2p,
            RecoveryAction::DrainAndReset,
            RecoveryAction::Unknown(9),
        ] {
            let finding = judge_gpu(&CHECK, "{}", |gpu| {
                gpu.recovery_action = Reading::Value(action);
            });
            assert_eq!(finding.verdict, Verdict::Fail, "{action:?}");
            assert!(finding.remedy.is_some());
        }
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.recovery_action = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn skips_where_the_driver_keeps_none() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.recovery_action = Reading::NotSupported;
        });
        assert_eq!(finding.verdict, Verdict::Skip);
    }
}
