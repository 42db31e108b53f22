//! NVLinks carry data without errors.
//!
//! ## Why
//! A link that has to retrain loses traffic for milliseconds and often kills the job; one that replays a lot is slow
//! and will go down next.
//!
//! ## How it is judged
//! The counters of every active link since the driver was loaded:
//! - recoveries (the link was retrained): any is a `fail`;
//! - replays, and effective errors on NVLink 5 (not corrected by the link's error correction): any is a `warn`;
//! - CRC errors: `warn` where a link has had more than 100 a second, averaged over the time since boot. They are repaired,
//!   and a healthy link collects some: 33 to 229 a link were counted on eight H200s four minutes after boot;
//! - symbol errors are not judged: they are what error correction is there for.
//!
//! With `policy.nvlink_errors_maximum`, any of these counters above it (symbol errors aside) is a `fail`, and fewer
//! pass. An active link without a single counter, while others have some, is an `error`. GPUs without NVLink, without
//! an active one, or whose driver keeps no such counters are skipped.
//!
//! ## What to do
//! Reset all GPUs of the board together or reboot, and look again after a load. A link that collects errors again is a
//! hardware fault: have board and connectors inspected. See Xid 74 in the kernel log for the link's own words.
//!
//! ## Source
//! `nvmlDeviceGetNvLinkErrorCounter`, <https://docs.nvidia.com/deploy/nvml-api/group__NvLink.html>; DCGM's health watch
//! objects to any NVLink error (`DCGM_LIMIT_MAX_NVLINK_ERROR` 1) and to CRC errors from 100 a second.

use crate::check::{Check, Judge, worst_of};
use crate::facts::{Facts, GpuFacts, NvLink};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "nvlink_errors",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__NvLink.html",
};

/// One kind of error that a link counts.
struct Kind {
    name: &'static str,
    count: fn(&NvLink) -> Option<u64>,
    limit: Limit,
    verdict: Verdict,
}

/// DCGM's limits; a profile's maximum replaces them.
#[derive(Clone, Copy)]
enum Limit {
    Total(u64),
    /// Since the driver was loaded; the time since boot is no shorter, so that the mean over it never accuses a link.
    PerSecondOfUptime(u64),
}

const KINDS: [Kind; 5] = [
    Kind {
        name: "recoveries",
        count: |link| link.recovery_errors,
        limit: Limit::Total(0),
        verdict: Verdict::Fail,
    },
    Kind {
        name: "replays",
        count: |link| link.replay_errors,
        limit: Limit::Total(0),
        verdict: Verdict::Warn,
    },
    Kind {
        name: "effective errors",
        count: |link| link.effective_errors,
        limit: Limit::Total(0),
        verdict: Verdict::Warn,
    },
    Kind {
        name: "CRC errors in flits",
        count: |link| link.crc_flit_errors,
        limit: Limit::PerSecondOfUptime(100),
        verdict: Verdict::Warn,
    },
    Kind {
        name: "CRC errors in data",
        count: |link| link.crc_data_errors,
        limit: Limit::PerSecondOfUptime(100),
        verdict: Verdict::Warn,
    },
];

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let links = gpu.nvlinks.applicable("NVLink")?;
    let active: Vec<&NvLink> = links.iter().filter(|it| it.active).collect();
    if active.is_empty() {
        return Ok(Outcome::skip(
            "no NVLink is active; nvlink_state judges whether one should be",
        ));
    }
    let without_counter: Vec<String> = active
        .iter()
        .filter(|link| KINDS.iter().all(|kind| (kind.count)(link).is_none()))
        .map(|link| link.link.to_string())
        .collect();
    if without_counter.len() == active.len() {
        return Ok(Outcome::skip(format!(
            "this GPU or driver keeps no error counters of its {} active NVLinks",
            active.len()
        )));
    }
    let readable = if without_counter.is_empty() {
        Ok(Outcome::pass(format!(
            "no errors on {} active NVLinks",
            active.len()
        )))
    } else {
        Err(Outcome::error(format!(
            "NVLink error counters could not be read: active links {} have none",
            without_counter.join(", ")
        )))
    };
    let maximum = profile.policy.nvlink_errors_maximum;
    let kinds = KINDS.iter().filter_map(|kind| {
        let limit = match total_limit(kind.limit, maximum, facts) {
            Ok(limit) => limit,
            // Without the uptime only a link that counts something is in doubt.
            Err(outcome) if active.iter().any(|link| (kind.count)(link) > Some(0)) => {
                return Some(Err(outcome));
            }
            Err(_) => return None,
        };
        judge_kind(kind, &active, limit, maximum.is_some()).map(Ok)
    });
    worst_of(std::iter::once(readable).chain(kinds))
}

/// How many errors of a kind a link may have by now.
fn total_limit(limit: Limit, maximum: Option<u64>, facts: &Facts) -> Result<u64, Outcome> {
    match (maximum, limit) {
        (Some(maximum), _) | (None, Limit::Total(maximum)) => Ok(maximum),
        (None, Limit::PerSecondOfUptime(rate)) => {
            let uptime_s = *facts
                .host
                .uptime_s
                .required("the time since boot, over which NVLink CRC errors are averaged,")?;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a saturating cast is meant"
            )]
            Ok(rate.saturating_mul(uptime_s as u64))
        }
    }
}

/// The objection to one kind of error, naming every link that has too many.
fn judge_kind(kind: &Kind, links: &[&NvLink], limit: u64, by_profile: bool) -> Option<Outcome> {
    let bad: Vec<String> = links
        .iter()
        .filter_map(|link| Some((link.link, (kind.count)(link)?)))
        .filter(|(_, count)| *count > limit)
        .map(|(link, count)| format!("link {link}: {count}"))
        .collect();
    if bad.is_empty() {
        return None;
    }
    let bad = bad.join(", ");
    let text = format!(
        "NVLink {} since the driver was loaded, more than {limit}: {bad}",
        kind.name
    );
    let outcome = if by_profile || kind.verdict == Verdict::Fail {
        Outcome::fail(text)
    } else {
        Outcome::warn(text)
    };
    Some(
        outcome
            .expected(format!("at most {limit} {} on a link", kind.name))
            .observed(bad)
            .remedy("reset all GPUs of the board together or reboot; if errors return under load, have the hardware inspected"),
    )
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{NvLink, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_node, healthy_t4, judge_check, judge_gpu, judge_healthy, judge_only_gpu,
    };

    fn with(profile: &str, change: impl FnOnce(&mut Vec<NvLink>)) -> Finding {
        judge_gpu(&CHECK, profile, |gpu| {
            let Reading::Value(links) = &mut gpu.nvlinks else {
                panic!("the healthy GPU has NVLinks")
            };
            change(links);
        })
    }

    #[test]
    fn passes_without_errors() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_on_one_recovery_and_names_the_link() {
        let finding = with("{}", |links| links[11].recovery_errors = Some(1));
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(finding.observed.as_deref(), Some("link 11: 1"));
    }

    #[test]
    fn warns_of_replays_and_effective_errors() {
        let finding = with("{}", |links| links[2].replay_errors = Some(1));
        assert_eq!(finding.verdict, Verdict::Warn);
        let finding = with("{}", |links| links[2].effective_errors = Some(1));
        assert_eq!(finding.verdict, Verdict::Warn);
    }

    #[test]
    fn warns_above_100_crc_errors_a_second_on_one_link() {
        let Reading::Value(uptime_s) = healthy_node().host.uptime_s else {
            panic!("the healthy machine tells its uptime")
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "whole seconds"
        )]
        let limit = 100 * uptime_s as u64;
        let flits = |count| with("{}", |links| links[0].crc_flit_errors = Some(count)).verdict;
        assert_eq!(flits(limit), Verdict::Pass);
        assert_eq!(flits(limit + 1), Verdict::Warn);
        let data = |count| with("{}", |links| links[0].crc_data_errors = Some(count)).verdict;
        assert_eq!(data(229), Verdict::Pass);
        assert_eq!(data(limit), Verdict::Pass);
        assert_eq!(data(limit + 1), Verdict::Warn);
    }

    #[test]
    fn errs_when_crc_errors_have_no_time_to_be_averaged_over() {
        let mut facts = healthy_node();
        facts.host.uptime_s = Reading::NotRead("permission denied".to_owned());
        assert_eq!(judge_check(&CHECK, &facts, "{}")[0].verdict, Verdict::Pass);
        let Reading::Value(links) = &mut facts.gpus[0].nvlinks else {
            panic!("the healthy GPU has NVLinks")
        };
        links[3].crc_data_errors = Some(1);
        assert_eq!(judge_check(&CHECK, &facts, "{}")[0].verdict, Verdict::Error);
    }

    #[test]
    fn symbol_errors_are_corrected() {
        let finding = with("{}", |links| links[0].symbol_errors = Some(1_000_000));
        assert_eq!(finding.verdict, Verdict::Pass);
    }

    #[test]
    fn a_profile_sets_one_limit_for_all() {
        let profile = "policy: {nvlink_errors_maximum: 3}";
        let three = with(profile, |links| links[0].recovery_errors = Some(3));
        assert_eq!(three.verdict, Verdict::Pass);
        let four = with(profile, |links| links[0].crc_flit_errors = Some(4));
        assert_eq!(four.verdict, Verdict::Fail);
    }

    #[test]
    fn errs_when_an_active_link_has_no_counter() {
        let finding = with("{}", |links| {
            links[4] = NvLink {
                link: 4,
                active: true,
                ..NvLink::default()
            };
        });
        assert_eq!(finding.verdict, Verdict::Error);
        assert!(finding.summary.contains("active links 4 have none"));
        let not_read = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.nvlinks = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(not_read.verdict, Verdict::Error);
    }

    #[test]
    fn skips_without_nvlink_or_without_an_active_one() {
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", healthy_t4()).verdict,
            Verdict::Skip
        );
        let finding = with("{}", |links| {
            for link in links {
                link.active = false;
            }
        });
        assert_eq!(finding.verdict, Verdict::Skip);
        let finding = with("{}", |links| {
            for link in links {
                *link = NvLink {
                    link: link.link,
                    active: true,
                    ..NvLink::default()
                };
            }
        });
        assert_eq!(finding.verdict, Verdict::Skip);
    }
}
