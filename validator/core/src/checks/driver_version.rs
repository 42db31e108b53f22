//! The driver has the version that the profile requires.
//!
//! ## Why
//! Images and jobs are built for a driver; an older one lacks features and fixes, another branch
//! behaves differently.
//!
//! ## How it is judged
//! The version of the loaded kernel module against `driver.minimum` and `driver.branch` of the
//! profile, compared by number. Skipped when the profile requires neither. Whether a driver is new
//! enough for the CUDA toolkits on the machine is judged by `cuda_toolkits`, and for its GPUs by
//! `gpu_architecture_supported`.
//!
//! ## What to do
//! Install a driver that meets the profile, and reboot or reload the modules.
//!
//! ## Source
//! NVIDIA data center driver releases, <https://docs.nvidia.com/datacenter/tesla/>

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "driver_version",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/tesla/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let driver = queries::driver_version(facts, profile)?;
    let mut tally = Tally::default();
    let mut expected = Vec::new();
    if let Some(minimum) = &profile.driver.minimum {
        expected.push(format!("at least {minimum}"));
        if driver >= *minimum {
            tally.pass(format!(
                "driver is {driver}, the profile requires at least {minimum}"
            ));
        } else {
            tally.fail(format!(
                "driver is {driver}, the profile requires at least {minimum}"
            ));
        }
    }
    if let Some(branch) = profile.driver.branch {
        expected.push(format!("branch {branch}"));
        if driver.branch() == branch {
            tally.pass(format!(
                "driver is {driver}, the profile requires branch {branch}"
            ));
        } else {
            tally.fail(format!(
                "driver is {driver}, the profile requires branch {branch}"
            ));
        }
    }
    let failed = tally.worst() == Some(Verdict::Fail);
    let outcome = tally.outcome(Outcome::skip(format!(
        "no driver version is configured in the profile (the driver is {driver})"
    )));
    if !failed {
        return Ok(outcome);
    }
    Ok(outcome
        .expected(expected.join(", "))
        .observed(&driver)
        .remedy(format!(
            "install a driver that is {} and reboot",
            expected.join(" and of ")
        )))
}

#[cfg(test)]
mod tests {
    use crate::facts::Reading;
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_node, judge_host_check, unload_driver};

    fn judge(profile: &str) -> crate::findings::Finding {
        judge_host_check(&super::CHECK, &healthy_node(), profile)
    }

    #[test]
    fn compares_with_the_minimum_by_number() {
        for (minimum, verdict) in [
            ("580.65.06", Verdict::Pass),
            ("580.159.04", Verdict::Pass),
            ("580.159.05", Verdict::Fail),
            ("590.44.01", Verdict::Fail),
        ] {
            let finding = judge(&format!("driver: {{minimum: {minimum}}}"));
            assert_eq!(finding.verdict, verdict, "{minimum}");
        }
        assert_eq!(
            judge("driver: {minimum: 590.44.01}").summary,
            "driver is 580.159.04, the profile requires at least 590.44.01"
        );
    }

    #[test]
    fn compares_with_the_branch() {
        assert_eq!(judge("driver: {branch: 580}").verdict, Verdict::Pass);
        assert_eq!(judge("driver: {branch: 570}").verdict, Verdict::Fail);
        assert_eq!(
            judge("driver: {minimum: 570.26, branch: 570}").verdict,
            Verdict::Fail
        );
    }

    #[test]
    fn skips_when_nothing_is_asked_for() {
        assert_eq!(judge("{}").verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_it_was_not_read_or_makes_no_sense() {
        let mut facts = healthy_node();
        facts.nvml.driver_version = Reading::NotRead("unknown error".to_owned());
        for reading in [
            Reading::NotRead("permission denied".to_owned()),
            Reading::Value("unknown".to_owned()),
        ] {
            if let Reading::Value(modules) = &mut facts.host.kernel_modules {
                modules.nvidia_version = reading;
            }
            let finding = judge_host_check(&super::CHECK, &facts, "driver: {branch: 580}");
            assert_eq!(finding.verdict, Verdict::Error);
        }
    }

    #[test]
    fn leaves_a_missing_module_to_its_own_check() {
        let mut facts = healthy_node();
        unload_driver(&mut facts);
        let judge = |profile| judge_host_check(&super::CHECK, &facts, profile);
        let finding = judge("driver: {branch: 580}");
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(
            finding.summary.contains("kernel_module_loaded"),
            "{}",
            finding.summary
        );
        let softened = judge(
            "{driver: {branch: 580}, checks: {kernel_module_loaded: {severity: off, reason: test}}}",
        );
        assert_eq!(softened.verdict, Verdict::Error);
    }
}
