//! PCIe replays are rare.
//!
//! ## Why
//! A replay is a packet that arrived damaged and was sent again. A few are normal; many cost
//! bandwidth and announce a link that will fail.
//!
//! ## How it is judged
//! Replays since the driver was loaded. With `policy.pcie_replays_maximum`: `fail` above it.
//! Without: `warn` above 80, and `fail` when there are also more than 8 for each minute since boot,
//! once that was ten minutes ago: what the first minutes count is no rate. GPUs without the counter
//! are skipped, an `error` with a maximum in the profile.
//!
//! ## What to do
//! Reseat the GPU, riser or cable, and search the kernel log for AER messages. On a cloud machine,
//! replace the instance.
//!
//! ## Source
//! DCGM: its PCIe diagnostic accepts 80 replays, its health watch 8 a minute
//! (`DCGM_LIMIT_MAX_PCIREPLAY_RATE`).

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "pcie_replays",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/dcgm/latest/user-guide/dcgm-diagnostics.html",
};

/// DCGM's PCIe diagnostic accepts so many.
const REPLAYS_WARN_ABOVE: u64 = 80;
/// DCGM's health watch accepts so many a minute.
const REPLAYS_PER_MINUTE_MAXIMUM: f64 = 8.0;
/// This project's own choice: sooner after boot a burst of replays is no rate.
const RATE_UPTIME_MINIMUM_S: f64 = 600.0;

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let maximum = profile.policy.pcie_replays_maximum;
    let count = *gpu
        .pcie_replays
        .required_if(maximum.is_some(), "PCIe replay counter")?;
    let text = format!("{count} PCIe replays since the driver was loaded");
    let limit = maximum.unwrap_or(REPLAYS_WARN_ABOVE);
    if count <= limit {
        return Ok(Outcome::pass(text));
    }
    let is_failure = maximum.is_some() || is_frequent(count, facts);
    let text = format!("{text}, more than {limit}");
    let outcome = if is_failure {
        Outcome::fail(text)
    } else {
        Outcome::warn(text)
    };
    Ok(outcome
        .expected(format!("at most {limit}"))
        .observed(count)
        .remedy("reseat the GPU, riser or cable; on a cloud machine, replace the instance"))
}

/// More than the accepted rate since boot. The driver was loaded later, so the true rate is never
/// lower.
fn is_frequent(count: u64, facts: &Facts) -> bool {
    #[expect(clippy::cast_precision_loss, reason = "a rate needs no last digit")]
    let count = count as f64;
    facts
        .host
        .uptime_s
        .value()
        .filter(|uptime_s| **uptime_s >= RATE_UPTIME_MINIMUM_S)
        .is_some_and(|uptime_s| count > REPLAYS_PER_MINUTE_MAXIMUM * uptime_s / 60.0)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::Reading;
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_check, judge_healthy};

    fn with(profile: &str, replays: Reading<u64>, uptime_s: f64) -> Finding {
        let mut facts = healthy_node();
        facts.host.uptime_s = Reading::Value(uptime_s);
        facts.gpus[0].pcie_replays = replays;
        judge_check(&CHECK, &facts, profile).swap_remove(0)
    }

    const ONE_DAY_S: f64 = 86_400.0;

    #[test]
    fn passes_without_replays() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn warns_above_80() {
        let verdict = |count| with("{}", Reading::Value(count), ONE_DAY_S).verdict;
        assert_eq!(verdict(80), Verdict::Pass);
        assert_eq!(verdict(81), Verdict::Warn);
    }

    #[test]
    fn fails_above_8_a_minute() {
        let verdict = |count| with("{}", Reading::Value(count), 3600.0).verdict;
        assert_eq!(verdict(480), Verdict::Warn);
        assert_eq!(verdict(481), Verdict::Fail);
        // What the first minutes count is no rate.
        let early = |uptime_s| with("{}", Reading::Value(5000), uptime_s).verdict;
        assert_eq!(early(599.0), Verdict::Warn);
        assert_eq!(early(600.0), Verdict::Fail);
        assert_eq!(with("{}", Reading::Value(80), 60.0).verdict, Verdict::Pass);
    }

    #[test]
    fn fails_above_what_the_profile_allows() {
        let profile = "policy: {pcie_replays_maximum: 0}";
        assert_eq!(
            with(profile, Reading::Value(0), ONE_DAY_S).verdict,
            Verdict::Pass
        );
        assert_eq!(
            with(profile, Reading::Value(1), ONE_DAY_S).verdict,
            Verdict::Fail
        );
    }

    #[test]
    fn errs_when_it_was_not_read_and_skips_where_it_is_not_counted() {
        let not_read = Reading::NotRead("unknown error".to_owned());
        assert_eq!(with("{}", not_read, ONE_DAY_S).verdict, Verdict::Error);
        assert_eq!(
            with("{}", Reading::NotSupported, ONE_DAY_S).verdict,
            Verdict::Skip
        );
        let limited = "policy: {pcie_replays_maximum: 0}";
        assert_eq!(
            with(limited, Reading::NotSupported, ONE_DAY_S).verdict,
            Verdict::Error
        );
    }
}
