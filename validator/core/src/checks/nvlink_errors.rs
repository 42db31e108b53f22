//! NVLinks carry data without errors.
//!
//! ## Why
//! A link that has to retrain loses traffic for milliseconds and often kills the job; one that
//! replays a lot is slow and will go down next.
//!
//! ## How it is judged
//! The counters of every active link since the driver was loaded: recoveries (the link was
//! retrained), replays, and effective errors on NVLink 5 (not corrected by the link's error
//! correction). Any is a `warn`, never a `fail`: these are counts of a lifetime, which healthy GPUs
//! collect too, and nodes were drained for them in vain. With `policy.nvlink_errors_maximum`, more
//! than that of one kind on one link is a `fail`, and fewer pass.
//!
//! CRC errors are repaired by sending again, and a healthy link collects some (33 to 229 a link
//! were counted on eight H200s four minutes after boot): a link is a `warn` with more than 10,000
//! where that is more than a hundred times the median of all active links of this model in the
//! machine, and otherwise they are reported and not judged. Symbol errors are what error correction
//! is there for.
//!
//! A counter that some active links of the GPU have and others lack is an `error`. GPUs without
//! NVLink, or without an active one, are skipped, and so are those whose driver keeps no such
//! counters, unless the profile sets a maximum: then that is an `error`.
//!
//! ## What to do
//! Reset all GPUs of the board together or reboot, and run again after a load. A link that
//! collects errors again is a hardware fault: have board and connectors inspected. See Xid 74 in
//! the kernel log for the link's own words.
//!
//! ## Source
//! `nvmlDeviceGetNvLinkErrorCounter`, <https://docs.nvidia.com/deploy/nvml-api/group__NvLink.html>.
//! DCGM's health watch objects to any NVLink error; that this drained healthy H100s is why none
//! fails here: <https://github.com/aws/eks-node-monitoring-agent/pull/261>. The numbers for CRC errors
//! are this project's own: healthy links of one machine differ by a factor of seven.

use crate::check::{Check, Judge, JudgeGpu};
use crate::facts::{Facts, GpuFacts, NvLink};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::siblings::Sorted;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "nvlink_errors",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__NvLink.html",
};

const REMEDY: &str = "reset all GPUs of the board together or reboot; if errors return under load, have the hardware inspected";

/// One kind of error that a link counts.
struct Kind {
    name: &'static str,
    count: fn(&NvLink) -> Option<u64>,
}

const JUDGED: [Kind; 3] = [
    Kind {
        name: "recoveries",
        count: |link| link.recovery_errors,
    },
    Kind {
        name: "replays",
        count: |link| link.replay_errors,
    },
    Kind {
        name: "effective errors",
        count: |link| link.effective_errors,
    },
];

/// This project's own choice: a rate that nothing but one link's own lanes explains. Healthy links
/// of eight H200s have 33 to 229, a factor of seven.
const CRC_ERRORS_MINIMUM: u64 = 10_000;
const CRC_ERRORS_OF_THE_MEDIAN: u64 = 100;

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let crc_errors_of_all = Sorted::of(facts, |gpu| {
        let links = gpu.nvlinks.value().into_iter().flatten();
        links.filter(|it| it.active).filter_map(crc_errors)
    });
    Box::new(move |gpu| judge(gpu, profile, &crc_errors_of_all))
}

fn judge(gpu: &GpuFacts, profile: &Profile, crc_errors_of_all: &Sorted<'_, u64>) -> Judgement {
    let links = gpu.nvlinks.applicable("NVLink")?;
    let active: Vec<&NvLink> = links.iter().filter(|it| it.active).collect();
    if active.is_empty() {
        return Ok(Outcome::skip(
            "no NVLink is active; nvlink_state judges whether one should be",
        ));
    }
    let kept: Vec<&Kind> = JUDGED
        .iter()
        .filter(|kind| active.iter().any(|link| (kind.count)(link).is_some()))
        .collect();
    let maximum = profile.policy.nvlink_errors_maximum;
    if kept.is_empty() {
        let text = format!(
            "this GPU or driver keeps no error counters of its {} active NVLinks",
            active.len()
        );
        return Ok(match maximum {
            Some(_) => Outcome::error(format!("{text}, the profile limits them")),
            None => Outcome::skip(text),
        });
    }
    let names: Vec<&str> = kept.iter().map(|kind| kind.name).collect();
    let limit = maximum.map_or_else(String::new, |it| format!(" above {it}"));
    let right = Outcome::pass(format!(
        "no {}{limit} on {} active NVLinks{}",
        names.join(", "),
        active.len(),
        crc_errors_in_words(&active)
    ));
    let objections = kept.iter().flat_map(|kind| {
        [
            judge_completeness(kind, &active),
            judge_count(kind, &active, maximum),
        ]
    });
    let objections = objections
        .flatten()
        .chain(judge_crc_errors(&active, crc_errors_of_all.alike(gpu)));
    worst_of(std::iter::once(right).chain(objections).map(Ok))
}

fn crc_errors(link: &NvLink) -> Option<u64> {
    link.crc_flit_errors.max(link.crc_data_errors)
}

/// Links that have far more CRC errors than the others of this model in the machine.
fn judge_crc_errors(active: &[&NvLink], counts: &[u64]) -> Option<Outcome> {
    let median = *counts.get(counts.len() / 2)?;
    let limit = CRC_ERRORS_MINIMUM.max(median.saturating_mul(CRC_ERRORS_OF_THE_MEDIAN));
    let bad: Vec<String> = active
        .iter()
        .filter_map(|link| Some((link.link, crc_errors(link)?)))
        .filter(|(_, count)| *count > limit)
        .map(|(link, count)| format!("link {link}: {count}"))
        .collect();
    if bad.is_empty() {
        return None;
    }
    let bad = bad.join(", ");
    Some(
        Outcome::warn(format!(
            "NVLink CRC errors since the driver was loaded, where the median of this model's links here is {median}: {bad}"
        ))
        .expected(format!("at most {limit} CRC errors on a link"))
        .observed(bad)
        .remedy(REMEDY),
    )
}

/// A counter that only some links have was not read on the others.
fn judge_completeness(kind: &Kind, links: &[&NvLink]) -> Option<Outcome> {
    let without: Vec<String> = links
        .iter()
        .filter(|link| (kind.count)(link).is_none())
        .map(|link| link.link.to_string())
        .collect();
    (!without.is_empty()).then(|| {
        Outcome::error(format!(
            "NVLink {} could not be read on active links {}, others report them",
            kind.name,
            without.join(", ")
        ))
    })
}

/// The objection to one kind of error, naming every link that has too many.
fn judge_count(kind: &Kind, links: &[&NvLink], maximum: Option<u64>) -> Option<Outcome> {
    let limit = maximum.unwrap_or(0);
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
    let outcome = match maximum {
        Some(_) => Outcome::fail(text),
        None => Outcome::warn(text),
    };
    Some(
        outcome
            .expected(format!("at most {limit} {} on a link", kind.name))
            .observed(bad)
            .remedy(REMEDY),
    )
}

/// `; CRC errors are reported only: at most 229 on a link`; nothing where no link had one.
fn crc_errors_in_words(links: &[&NvLink]) -> String {
    links
        .iter()
        .filter_map(|link| crc_errors(link))
        .max()
        .filter(|most| *most > 0)
        .map_or_else(String::new, |most| {
            format!("; CRC errors are reported only: at most {most} on a link")
        })
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
    fn warns_of_every_lifetime_counter_and_names_the_link() {
        let finding = with("{}", |links| links[11].recovery_errors = Some(1));
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(finding.observed.as_deref(), Some("link 11: 1"));
        let finding = with("{}", |links| links[2].replay_errors = Some(1));
        assert_eq!(finding.verdict, Verdict::Warn);
        let finding = with("{}", |links| {
            for link in links.iter_mut() {
                link.effective_errors = Some(0);
            }
            links[2].effective_errors = Some(1);
        });
        assert_eq!(finding.verdict, Verdict::Warn);
    }

    #[test]
    fn crc_errors_like_those_of_other_links_are_reported_only() {
        for profile in ["{}", "policy: {nvlink_errors_maximum: 0}"] {
            let finding = with(profile, |links| {
                links[0].crc_flit_errors = Some(10_000);
                links[3].crc_data_errors = Some(229);
            });
            assert_eq!(finding.verdict, Verdict::Pass);
            assert!(
                finding.summary.ends_with("at most 10000 on a link"),
                "{}",
                finding.summary
            );
        }
    }

    #[test]
    fn a_link_with_a_hundred_times_the_crc_errors_of_the_others_warns() {
        let mut facts = healthy_node();
        let mut set = |of: u64, one: u64| {
            for gpu in &mut facts.gpus {
                if let Reading::Value(links) = &mut gpu.nvlinks {
                    for link in links.iter_mut() {
                        link.crc_data_errors = Some(of);
                    }
                    links[7].crc_flit_errors = Some(one);
                }
            }
            judge_check(&CHECK, &facts, "{}").swap_remove(0)
        };
        let finding = set(229, 500_000);
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert_eq!(finding.observed.as_deref(), Some("link 7: 500000"));
        assert_eq!(set(229, 22_900).verdict, Verdict::Pass);
        assert_eq!(set(229, 22_901).verdict, Verdict::Warn);
        // All links of the machine alike are the traffic's doing.
        assert_eq!(set(500_000, 700_000).verdict, Verdict::Pass);
    }

    #[test]
    fn the_pass_names_the_kinds_that_were_judged() {
        let finding = with("{}", |_| {});
        assert_eq!(
            finding.summary,
            "no recoveries, replays on 18 active NVLinks"
        );
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
        let four = with(profile, |links| links[0].replay_errors = Some(4));
        assert_eq!(four.verdict, Verdict::Fail);
    }

    #[test]
    fn errs_when_an_active_link_lacks_a_counter_that_others_have() {
        let without_any = with("{}", |links| {
            links[4] = NvLink {
                link: 4,
                active: true,
                ..NvLink::default()
            };
        });
        assert_eq!(without_any.verdict, Verdict::Error);
        let without_one = with("{}", |links| {
            links[4].recovery_errors = None;
            links[9].recovery_errors = None;
        });
        assert_eq!(without_one.verdict, Verdict::Error);
        assert_eq!(
            without_one.summary,
            "NVLink recoveries could not be read on active links 4, 9, others report them"
        );
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
        let without_counters = |profile| {
            with(profile, |links| {
                for link in links {
                    *link = NvLink {
                        link: link.link,
                        active: true,
                        ..NvLink::default()
                    };
                }
            })
            .verdict
        };
        assert_eq!(without_counters("{}"), Verdict::Skip);
        let limited = "policy: {nvlink_errors_maximum: 5}";
        assert_eq!(without_counters(limited), Verdict::Error);
    }
}
