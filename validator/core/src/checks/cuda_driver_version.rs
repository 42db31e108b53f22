//! The driver offers the CUDA version that the profile requires.
//!
//! ## Why
//! `cuDriverGetVersion` is the newest CUDA whose programs run on this driver without limits. Jobs
//! that were built for a newer one fail, or run without what is new in it.
//!
//! ## How it is judged
//! The version that the CUDA driver library offers must be at least `cuda.driver_minimum` of the
//! profile. Skipped when the profile requires none; what toolkits on the machine need is judged by
//! `cuda_toolkits`.
//!
//! ## What to do
//! Install a newer driver, or where the GPU allows it the `cuda-compat` package of that CUDA
//! version.
//!
//! ## Source
//! CUDA Compatibility, <https://docs.nvidia.com/deploy/cuda-compatibility/>

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::{CudaVersion, Profile};
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "cuda_driver_version",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/cuda-compatibility/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let offered = offered_version(facts, profile)?;
    let Some(minimum) = profile.cuda.driver_minimum else {
        return Ok(Outcome::skip(format!(
            "no CUDA version is configured in the profile (the driver offers {offered})"
        )));
    };
    // A driver offers a major and minor version; updates of a toolkit are not its matter.
    let summary =
        format!("the driver offers CUDA {offered}, the profile requires at least {minimum}");
    if (offered.major, offered.minor) >= (minimum.major, minimum.minor) {
        return Ok(Outcome::pass(summary));
    }
    Ok(Outcome::fail(summary)
        .expected(format!("at least {minimum}"))
        .observed(offered)
        .remedy(format!(
            "install a driver that offers CUDA {minimum}, or cuda-compat-{}-{} where the GPUs allow it",
            minimum.major, minimum.minor
        )))
}

fn offered_version(facts: &Facts, profile: &Profile) -> Result<CudaVersion, Outcome> {
    let version = &facts.cuda.driver_version;
    if version.value().is_none() {
        queries::loaded_driver(facts, profile)?;
        if !queries::cuda_initialised(facts) {
            return Err(queries::reported_by(
                "cuda_driver_library",
                "the CUDA driver library gives no version",
                profile,
            ));
        }
    }
    let number = *version.required("CUDA version of the driver")?;
    // cuDriverGetVersion answers 0 where there is no driver (CUDA Driver API reference).
    if number == 0 {
        return Err(Outcome::error(
            "the CUDA driver library reports that there is no driver",
        ));
    }
    Ok(CudaVersion::from_driver_number(number))
}

#[cfg(test)]
mod tests {
    use crate::facts::{CudaResult, Reading};
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_node, judge_host_check};

    #[test]
    fn compares_with_the_minimum() {
        for (minimum, verdict) in [
            ("12.8", Verdict::Pass),
            ("13.0", Verdict::Pass),
            ("13.0.2", Verdict::Pass),
            ("13.1", Verdict::Fail),
        ] {
            let profile = format!("cuda: {{driver_minimum: '{minimum}'}}");
            let finding = judge_host_check(&super::CHECK, &healthy_node(), &profile);
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn skips_when_nothing_is_asked_for() {
        let finding = judge_host_check(&super::CHECK, &healthy_node(), "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        for reading in [Reading::NotRead("time-out".to_owned()), Reading::Value(0)] {
            let mut facts = healthy_node();
            facts.cuda.driver_version = reading;
            let finding = judge_host_check(&super::CHECK, &facts, "cuda: {driver_minimum: '12.8'}");
            assert_eq!(finding.verdict, Verdict::Error);
        }
    }

    #[test]
    fn leaves_a_library_that_does_not_initialise_to_its_own_check() {
        let mut facts = healthy_node();
        facts.cuda.driver_version = Reading::NotRead("cuInit failed".to_owned());
        facts.cuda.init = Reading::Value(CudaResult {
            code: 999,
            name: "CUDA_ERROR_UNKNOWN".to_owned(),
        });
        let finding = judge_host_check(&super::CHECK, &facts, "cuda: {driver_minimum: '12.8'}");
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(finding.summary.contains("cuda_driver_library"));
    }
}
