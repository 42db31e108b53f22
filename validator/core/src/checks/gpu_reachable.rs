//! The GPU is reachable: it is not lost, and the driver's calls return.
//!
//! ## Why
//! A GPU that has fallen off the bus, or whose firmware no longer answers, is often still counted
//! and listed. Jobs that get it hang or die, and so does every tool that queries it.
//!
//! ## How it is judged
//! `fail` when NVML reports that the GPU is lost or must be reset before it can be used. All other
//! checks of that GPU are then skipped, because no other query of it returns (they are judged if
//! the profile softens this check). `error` when a call did not return in time or crashed (it is
//! named), or when the GPU reports no UUID.
//!
//! ## What to do
//! Drain the node and reboot it; on EC2, stop and start the instance (which mostly moves it to
//! other hardware) or replace it. A GPU that is lost again needs a hardware inspection. For a hung
//! call, check the kernel log for Xid 119, 120 (GSP) and 79.
//!
//! ## Source
//! `NVML_ERROR_GPU_IS_LOST` and `NVML_ERROR_RESET_REQUIRED` in NVML's return codes,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html>; Xid 79 in
//! <https://docs.nvidia.com/deploy/xid-errors/>.

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "gpu_reachable",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/xid-errors/",
};

fn judge(gpu: &GpuFacts, _: &Facts, _: &Profile) -> Judgement {
    if let Some(answer) = &gpu.lost {
        return Ok(
            Outcome::fail(format!("the GPU is lost or must be reset: {answer}"))
                .expected("a GPU that answers")
                .observed(answer)
                .remedy(
                    "drain and reboot the node; if the GPU is lost again, have its hardware inspected",
                ),
        );
    }
    if !gpu.calls_hung.is_empty() {
        return Err(Outcome::error(format!(
            "the driver hung or crashed in {}",
            gpu.calls_hung.join(", ")
        ))
        .remedy("check the kernel log for Xid 119, 120 and 79, then reset the GPU or reboot"));
    }
    let uuid = gpu.uuid.required("UUID")?;
    Ok(Outcome::pass(format!("{uuid} answers")))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::Reading;
    use crate::findings::{Subject, Verdict};
    use crate::judge;
    use crate::level::Level;
    use crate::test_machine::{healthy_node, judge_gpu, judge_healthy};

    #[test]
    fn passes_when_all_answer() {
        let findings = judge_healthy(&CHECK);
        assert_eq!(findings.len(), 8);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
    }

    #[test]
    fn fails_when_lost_even_if_calls_hung_too() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.lost = Some("nvmlDeviceGetTemperature returned NVML_ERROR_GPU_IS_LOST".to_owned());
            gpu.calls_hung = vec!["nvmlDeviceGetPowerUsage".to_owned()];
        });
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "the GPU is lost or must be reset: nvmlDeviceGetTemperature returned NVML_ERROR_GPU_IS_LOST"
        );
    }

    #[test]
    fn errs_and_names_the_calls_that_hung() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.calls_hung = vec![
                "nvmlDeviceGetPowerUsage".to_owned(),
                "nvmlDeviceGetTemperature".to_owned(),
            ];
        });
        assert_eq!(finding.verdict, Verdict::Error);
        assert!(
            finding
                .summary
                .ends_with("in nvmlDeviceGetPowerUsage, nvmlDeviceGetTemperature"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn errs_when_the_gpu_has_no_uuid() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| gpu.uuid = Reading::NotSupported);
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn one_lost_gpu_is_one_finding() {
        let mut facts = healthy_node();
        facts.gpus[2].lost = Some("nvmlDeviceGetTemperature".to_owned());
        let profile = crate::parse_profile("{}", "test profile").unwrap();
        let of_the_gpu: Vec<_> = judge(&facts, &profile, Level::Extended)
            .into_iter()
            .filter(|it| matches!(&it.subject, Subject::Gpu(gpu) if gpu.uuid.as_ref() == facts.gpus[2].uuid.value()))
            .collect();
        let failed: Vec<_> = of_the_gpu
            .iter()
            .filter(|it| it.verdict == Verdict::Fail)
            .map(|it| it.check.as_str())
            .collect();
        assert_eq!(failed, ["gpu_reachable"]);
        let skipped = of_the_gpu
            .iter()
            .filter(|it| it.verdict == Verdict::Skip && it.summary.contains("gpu_reachable"))
            .count();
        assert_eq!(skipped, of_the_gpu.len() - 1);
    }

    #[test]
    fn a_profile_that_softens_it_does_not_make_a_lost_gpu_green() {
        for severity in ["off", "warn"] {
            let mut facts = healthy_node();
            // What a probe really leaves of a lost GPU: nothing but its name tag.
            facts.gpus[2] = crate::facts::GpuFacts {
                uuid: facts.gpus[2].uuid.clone(),
                pci_address: facts.gpus[2].pci_address.clone(),
                lost: Some("nvmlDeviceGetName".to_owned()),
                ..Default::default()
            };
            let yaml =
                format!("checks: {{gpu_reachable: {{severity: {severity}, reason: for a test}}}}");
            let profile = crate::parse_profile(&yaml, "test profile").unwrap();
            let errors = judge(&facts, &profile, Level::Extended)
                .into_iter()
                .filter(|it| matches!(&it.subject, Subject::Gpu(gpu) if gpu.uuid.as_ref() == facts.gpus[2].uuid.value()))
                .filter(|it| it.verdict == Verdict::Error)
                .count();
            assert!(errors > 0, "severity {severity}");
        }
    }
}
