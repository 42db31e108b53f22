//! The InfoROM is valid.
//!
//! ## Why
//! The InfoROM is the small memory on the board that keeps configuration, ECC counts and remapped
//! rows. When its checksum is wrong, lifetime error counts and settings such as ECC mode can no
//! longer be trusted.
//!
//! ## How it is judged
//! `nvmlDeviceValidateInforom` must find no corruption. GPUs without an InfoROM are skipped.
//!
//! ## What to do
//! Reset the GPU or reboot, and run again. An InfoROM that stays corrupt is a hardware fault:
//! return the GPU.
//!
//! ## Source
//! `nvmlDeviceValidateInforom`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>; DCGM's deployment check
//! fails on it, and `nvidia-smi` ends with exit code 14.

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "inforom",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

fn judge(gpu: &GpuFacts, _: &Facts, _: &Profile) -> Judgement {
    let is_valid = *gpu.inforom_valid.applicable("InfoROM")?;
    let version = gpu
        .inforom_image_version
        .value()
        .map(|it| format!(" (image {it})"))
        .unwrap_or_default();
    if is_valid {
        return Ok(Outcome::pass(format!("the InfoROM is valid{version}")));
    }
    Ok(Outcome::fail(format!("the InfoROM is corrupt{version}"))
        .expected("a valid InfoROM")
        .observed("a wrong checksum")
        .remedy("reset the GPU or reboot; if the InfoROM stays corrupt, return the GPU"))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::Reading;
    use crate::findings::Verdict;
    use crate::test_machine::{judge_gpu, judge_healthy};

    #[test]
    fn passes_when_valid() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_when_corrupt() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.inforom_valid = Reading::Value(false);
        });
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "the InfoROM is corrupt (image G520.0282.02.02)"
        );
    }

    #[test]
    fn errs_when_it_was_not_read_even_if_the_version_was() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.inforom_valid = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn skips_where_there_is_none() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.inforom_valid = Reading::NotSupported;
        });
        assert_eq!(finding.verdict, Verdict::Skip);
    }
}
