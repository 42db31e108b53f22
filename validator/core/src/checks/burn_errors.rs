//! The burn brought no new errors.
//!
//! ## Why
//! Memory cells, links and the driver show their faults under load. An error that the GPU counts
//! while it computes is one that a job will meet.
//!
//! ## How it is judged
//! Counters before and after the burn. `fail`: an Xid of this GPU, uncorrectable ECC errors, rows
//! remapped or pages retired for uncorrectable errors, a remapping that failed, and so many
//! correctable ECC errors within the burn that they are no single weak cell: above 20,000,000, or
//! 10,000 in SRAM. `warn`: fewer correctable ECC errors, rows remapped or pages retired for them,
//! PCIe replays. `error` where a counter could be read only once, or not at all although the GPU
//! has it. Skipped where no burn was requested.
//!
//! Xids are those that the kernel log gained since the run began, and those that NVML reported as
//! events meanwhile; `error` where neither was available to the end: the log may not be read, or
//! was written over. An Xid that only events report names no process; what an application does to
//! itself is then another's if the burn ended well.
//!
//! Xids for information warn, and so do those of an application's doing where the driver names a
//! process that is not the validator's. Where it names none, and others used the GPU, it is busy
//! and not broken: an `error`, and exit code 4. `policy.xid` of the profile moves numbers between
//! `fail`, `warn` and `ignore` here, too.
//!
//! So many (seen on an H200: 12 million a second, and every product right) mean a part of the
//! memory in which nearly every access is corrected. It has nothing left to correct the next error
//! with, and that one ends the job.
//!
//! ## What to do
//! For an Xid, see `kernel_log_xid`. For ECC errors, drain the node, reset the GPU and burn again;
//! if errors return, run NVIDIA's field diagnostic and return the GPU.
//!
//! ## Source
//! NVIDIA GPU Memory Error Management, <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>.
//! The thresholds of correctable errors are those at which azurehpc-health-checks takes a node out
//! (`check_gpu_ecc 20000000 10000`), there since the driver was loaded, here within one burn.

use std::collections::BTreeSet;

use super::ecc_errors::{correctable, too_many_correctable, uncorrectable};
use crate::burned;
use crate::check::{Check, Judge};
use crate::facts::{
    EccErrors, Facts, GpuFacts, LoadCounters, Reading, SensorLog, WorkerEnd, XidOfOthers,
};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::{Profile, XidPolicy, XidSeverity};
use crate::reference::{self, XidClass};
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "burn_errors",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
};

const REMEDY: &str = "drain the node, reset the GPU and burn again; if errors return, run NVIDIA's field diagnostic and return the GPU";

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let (run, log) = burned::sensors_of(gpu, facts, profile)?;
    let (before, after) = (&log.before, &log.after);
    let ended_well = run.end == WorkerEnd::Finished;
    let xids = xids(log, ended_well, gpu, facts, &profile.policy.xid);
    if *after == LoadCounters::default() {
        let why = log.trouble.as_deref().unwrap_or("no reason was reported");
        let unread = Outcome::error(format!("no counter was read after the burn: {why}"));
        return worst_of([xids, Ok(unread)]);
    }
    worst_of([
        xids,
        compare(
            "ECC errors",
            &before.ecc_volatile,
            &after.ecc_volatile,
            by_kind,
        ),
        Ok(flood(&before.ecc_volatile, &after.ecc_volatile)),
        // A reset of the driver clears the volatile counters and not these.
        compare(
            "ECC errors in the GPU's lifetime",
            &before.ecc_aggregate,
            &after.ecc_aggregate,
            by_kind,
        ),
        compare(
            "row remapping",
            &before.row_remapping,
            &after.row_remapping,
            |it| {
                let failure = u64::from(it.failure);
                (
                    u64::from(it.uncorrectable_rows) + failure,
                    u64::from(it.correctable_rows),
                )
            },
        ),
        compare(
            "page retirement",
            &before.retired_pages,
            &after.retired_pages,
            |it| (u64::from(it.double_bit), u64::from(it.single_bit)),
        ),
        compare(
            "PCIe replays",
            &before.pcie_replays,
            &after.pcie_replays,
            |it| (0, *it),
        ),
    ])
}

/// Those of the kernel log, and of those that NVML told what the log does not have.
fn xids(
    log: &SensorLog,
    ended_well: bool,
    gpu: &GpuFacts,
    facts: &Facts,
    policy: &XidPolicy,
) -> Judgement {
    // What an application does to itself may have been done by somebody else's that was not named.
    let unless_of_others = |number: u32, judgement: Judgement| {
        if class_of(number) == Some(XidClass::Application) {
            burned::unless_others_use_it(judgement, gpu, facts)
        } else {
            judgement
        }
    };
    let own = log.xids.iter().map(|number| {
        let judgement = Ok(judge_xid(*number, &Whose::Unknown, policy));
        unless_of_others(*number, judgement)
    });
    let of_others = log
        .xids_of_others
        .iter()
        .map(|xid| Ok(judge_xid(xid.number, &Whose::Others(xid), policy)));
    let only_heard = only_heard(log).into_iter().map(|number| {
        let whose = if ended_well {
            Whose::NotTheBurns
        } else {
            Whose::Unknown
        };
        unless_of_others(number, Ok(judge_xid(number, &whose, policy)))
    });
    let nothing = std::iter::once(Ok(nothing_heard(log)));
    worst_of(nothing.chain(own).chain(of_others).chain(only_heard))
}

/// Xids that NVML told of and the kernel log does not have, each once.
fn only_heard(log: &SensorLog) -> BTreeSet<u32> {
    let of_others = log.xids_of_others.iter().map(|it| it.number);
    let in_log: BTreeSet<u32> = log.xids.iter().copied().chain(of_others).collect();
    let heard = log.xid_events.value().into_iter().flatten().copied();
    heard.filter(|number| !in_log.contains(number)).collect()
}

/// No Xid is no error only where somebody listened: the kernel log to its end, or NVML's events.
fn nothing_heard(log: &SensorLog) -> Outcome {
    match (&log.xids_trouble, &log.xid_events) {
        (None, _) | (_, Reading::Value(_)) => Outcome::pass("no new errors"),
        (Some(trouble), Reading::NotSupported) => Outcome::error(format!(
            "Xids during the burn are not known: {trouble}; this GPU or driver has no events"
        )),
        (Some(trouble), Reading::NotRead(reason)) => Outcome::error(format!(
            "Xids during the burn are not known: {trouble}; {reason}"
        )),
    }
}

fn class_of(number: u32) -> Option<XidClass> {
    reference::xid(number).map(|it| it.class)
}

/// Whose doing an Xid is, as far as that is told.
enum Whose<'a> {
    Unknown,
    /// The driver names this process.
    Others(&'a XidOfOthers),
    /// Nobody is named, but what an application does to itself ends its work on the GPU, and the
    /// burn ended well.
    NotTheBurns,
}

/// Under load a GPU has no Xid. What is told for information warns, and so does what another
/// program did to itself.
fn judge_xid(number: u32, whose: &Whose<'_>, policy: &XidPolicy) -> Outcome {
    let name = reference::xid(number).map_or("no public description", |row| row.name.as_str());
    let process = match whose {
        Whose::Others(it) => {
            let pid = it.pid.map_or(String::new(), |pid| format!(" (pid {pid})"));
            format!(" and of process {}{pid}", it.process)
        }
        Whose::Unknown | Whose::NotTheBurns => String::new(),
    };
    let text =
        format!("the driver reported Xid {number} ({name}) of this GPU{process} during the burn");
    let severity = policy.severity(number).unwrap_or(match class_of(number) {
        Some(XidClass::Informational) => XidSeverity::Warn,
        Some(XidClass::Application) if !matches!(whose, Whose::Unknown) => XidSeverity::Warn,
        _ => XidSeverity::Fail,
    });
    let outcome = match severity {
        XidSeverity::Fail => Outcome::fail(text),
        XidSeverity::Warn => Outcome::warn(text),
        XidSeverity::Ignore => return Outcome::pass("no new errors"),
    };
    outcome
        .expected("no Xid")
        .remedy("see kernel_log_xid for what this Xid means")
}

/// `bad` gives what fails and what warns when it grew.
fn compare<T>(
    what: &str,
    before: &Reading<T>,
    after: &Reading<T>,
    bad: fn(&T) -> (u64, u64),
) -> Judgement {
    if matches!(
        (before, after),
        (Reading::NotSupported, Reading::NotSupported)
    ) {
        return Ok(Outcome::skip(format!("{what} are not counted here")));
    }
    let (before, after) = (
        bad(before.required(&format!("{what} before the burn"))?),
        bad(after.required(&format!("{what} after the burn"))?),
    );
    let grew = |verdict: fn(String) -> Outcome, before: u64, after: u64| {
        verdict(format!(
            "{what} grew from {before} to {after} during the burn"
        ))
        .expected("no change during the burn")
        .remedy(REMEDY)
    };
    Ok(if after.0 > before.0 {
        grew(Outcome::fail, before.0, after.0)
    } else if after.1 > before.1 {
        grew(Outcome::warn, before.1, after.1)
    } else {
        Outcome::pass("no new errors")
    })
}

/// Correctable errors in a number that is bad in itself. Counters that were not read are what
/// [`compare`] tells of.
fn flood(before: &Reading<EccErrors>, after: &Reading<EccErrors>) -> Outcome {
    let (Some(before), Some(after)) = (before.value(), after.value()) else {
        return Outcome::skip("ECC errors were not counted twice");
    };
    let new = |count: fn(&EccErrors) -> Option<u64>| {
        Some(count(after)?.saturating_sub(count(before).unwrap_or(0)))
    };
    let errors = EccErrors {
        sram_correctable: new(|it| it.sram_correctable),
        dram_correctable: new(|it| it.dram_correctable),
        total_correctable: new(correctable),
        ..EccErrors::default()
    };
    let Some((place, count, maximum)) = too_many_correctable(&errors) else {
        return Outcome::pass("no new errors");
    };
    Outcome::fail(format!(
        "{count} correctable{place} ECC errors during the burn, more than {maximum}"
    ))
    .expected("no change during the burn")
    .remedy(REMEDY)
}

/// What fails and what warns when it grew; a counter that the GPU does not keep did not.
fn by_kind(errors: &EccErrors) -> (u64, u64) {
    let [uncorrectable, correctable] = [uncorrectable(errors), correctable(errors)];
    (uncorrectable.unwrap_or(0), correctable.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{
        EccErrors, LoadCounters, Reading, RowRemapping, SensorLog, WorkerEnd, XidOfOthers,
    };
    use crate::findings::Verdict;
    use crate::test_machine::{
        burned_node, burned_node_with_sensors, healthy_node, judge_check, python_process,
    };

    fn judge(change: impl FnOnce(&mut SensorLog)) -> Verdict {
        judge_check(&CHECK, &burned_node_with_sensors(change), "{}")[2].verdict
    }

    #[test]
    fn passes_on_every_gpu_and_skips_without_a_burn() {
        let findings = judge_check(&CHECK, &burned_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        let findings = judge_check(&CHECK, &healthy_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
    }

    #[test]
    fn an_applications_xid_may_be_that_of_others() {
        let judged = |number, others: bool| {
            let facts = burned_node_with_sensors(|log| {
                log.xids = vec![number];
                log.other_processes
                    .extend(others.then(|| python_process(600)));
            });
            judge_check(&CHECK, &facts, "{}").swap_remove(2)
        };
        assert_eq!(judged(31, false).verdict, Verdict::Fail);
        assert_eq!(judged(79, true).verdict, Verdict::Fail);
        let finding = judged(31, true);
        assert!(finding.busy, "{finding:?}");
        assert!(finding.summary.contains("python3 (pid 4242"), "{finding:?}");
    }

    #[test]
    fn an_xid_is_judged_by_its_class_and_whose_it_is() {
        let judged = |number, of_others: bool, profile: &str| {
            let facts = burned_node_with_sensors(|log| {
                if of_others {
                    log.xids_of_others.push(XidOfOthers {
                        number,
                        process: "python3".to_owned(),
                        pid: Some(2615),
                    });
                } else {
                    log.xids.push(number);
                }
            });
            judge_check(&CHECK, &facts, profile).swap_remove(2)
        };
        for (number, own, of_others) in [
            (31, Verdict::Fail, Verdict::Warn),
            (45, Verdict::Fail, Verdict::Warn),
            (94, Verdict::Fail, Verdict::Fail),
            (79, Verdict::Fail, Verdict::Fail),
            (106, Verdict::Warn, Verdict::Warn),
            (999, Verdict::Fail, Verdict::Fail),
        ] {
            let verdicts = [false, true].map(|of_others| judged(number, of_others, "{}").verdict);
            assert_eq!(verdicts, [own, of_others], "{number}");
        }
        let summary = judged(31, true, "{}").summary;
        assert_eq!(
            summary,
            "the driver reported Xid 31 (GPU memory page fault) of this GPU and of process python3 (pid 2615) during the burn"
        );
        for (list, verdict) in [
            ("fail", Verdict::Fail),
            ("warn", Verdict::Warn),
            ("ignore", Verdict::Pass),
        ] {
            for (number, of_others) in [(94, false), (31, true), (106, false)] {
                let profile = format!("policy: {{xid: {{{list}: [{number}]}}}}");
                assert_eq!(
                    judged(number, of_others, &profile).verdict,
                    verdict,
                    "{profile}"
                );
            }
        }
    }

    #[test]
    fn xids_that_only_nvml_tells_of_count() {
        let heard = |numbers: &[u32]| {
            let numbers = numbers.to_vec();
            move |log: &mut SensorLog| {
                log.xids_trouble = Some("permission denied opening /dev/kmsg".to_owned());
                log.xid_events = Reading::Value(numbers);
            }
        };
        assert_eq!(judge(heard(&[])), Verdict::Pass);
        assert_eq!(judge(heard(&[79, 79])), Verdict::Fail);
        assert_eq!(judge(heard(&[106])), Verdict::Warn);
        // The burn ended well: it was not its own.
        assert_eq!(judge(heard(&[31])), Verdict::Warn);
        let mut facts = burned_node_with_sensors(heard(&[31]));
        for run in facts.load.burn.values_mut() {
            if let Reading::Value(run) = run {
                run.end = WorkerEnd::Killed { signal: 9 };
            }
        }
        let finding = judge_check(&CHECK, &facts, "{}").swap_remove(2);
        assert_eq!(finding.verdict, Verdict::Fail);
        // What both tell of is told once, with the process.
        let finding = judge_check(
            &CHECK,
            &burned_node_with_sensors(|log| {
                log.xid_events = Reading::Value(vec![31]);
                log.xids_of_others.push(XidOfOthers {
                    number: 31,
                    process: "python3".to_owned(),
                    pid: None,
                });
            }),
            "{}",
        )
        .swap_remove(2);
        assert_eq!(
            finding.summary,
            "the driver reported Xid 31 (GPU memory page fault) of this GPU and of process python3 during the burn"
        );
    }

    #[test]
    fn no_xid_passes_only_where_somebody_listened() {
        let unread = |events: Reading<Vec<u32>>| {
            judge_check(
                &CHECK,
                &burned_node_with_sensors(|log| {
                    log.xids_trouble = Some("the kernel log was written over".to_owned());
                    log.xid_events = events;
                }),
                "{}",
            )
            .swap_remove(2)
        };
        assert_eq!(unread(Reading::Value(Vec::new())).verdict, Verdict::Pass);
        let finding = unread(Reading::NotSupported);
        assert_eq!(finding.verdict, Verdict::Error);
        assert_eq!(
            finding.summary,
            "Xids during the burn are not known: the kernel log was written over; this GPU or driver has no events"
        );
        let finding = unread(Reading::default());
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn new_errors_are_judged_by_their_kind() {
        assert_eq!(judge(|log| log.xids = vec![94]), Verdict::Fail);
        let ecc = |dram_uncorrectable, total_correctable| {
            Reading::Value(EccErrors {
                dram_uncorrectable,
                total_correctable,
                ..EccErrors::default()
            })
        };
        let verdict = judge(|log| log.after.ecc_volatile = ecc(Some(1), None));
        assert_eq!(verdict, Verdict::Fail);
        let verdict = judge(|log| log.after.ecc_volatile = ecc(None, Some(9)));
        assert_eq!(verdict, Verdict::Warn);
        let verdict = judge(|log| log.after.ecc_aggregate = ecc(Some(1), None));
        assert_eq!(verdict, Verdict::Fail);
        let remapped = RowRemapping {
            uncorrectable_rows: 1,
            ..RowRemapping::default()
        };
        let verdict = judge(|log| log.after.row_remapping = Reading::Value(remapped));
        assert_eq!(verdict, Verdict::Fail);
        let verdict = judge(|log| log.after.pcie_replays = Reading::Value(3));
        assert_eq!(verdict, Verdict::Warn);
    }

    #[test]
    fn correctable_errors_in_great_number_fail() {
        let verdict = |in_sram: u64, in_dram: u64| {
            let count = |sram, dram| {
                Reading::Value(EccErrors {
                    sram_correctable: Some(sram),
                    dram_correctable: Some(dram),
                    ..EccErrors::default()
                })
            };
            judge(|log| {
                log.before.ecc_volatile = count(5, 7);
                log.after.ecc_volatile = count(5 + in_sram, 7 + in_dram);
            })
        };
        assert_eq!(verdict(0, 0), Verdict::Pass);
        assert_eq!(verdict(0, 20_000_000), Verdict::Warn);
        assert_eq!(verdict(0, 20_000_001), Verdict::Fail);
        assert_eq!(verdict(10_000, 0), Verdict::Warn);
        assert_eq!(verdict(10_001, 0), Verdict::Fail);
    }

    #[test]
    fn what_was_read_once_is_an_error() {
        let unread = burned_node_with_sensors(|log| {
            log.after = LoadCounters::default();
            log.trouble = Some("the process that reads NVML was ended by signal 9".to_owned());
        });
        let finding = judge_check(&CHECK, &unread, "{}").swap_remove(2);
        assert_eq!(finding.verdict, Verdict::Error);
        assert_eq!(
            finding.summary,
            "no counter was read after the burn: the process that reads NVML was ended by signal 9"
        );
        let verdict = judge(|log| log.after.ecc_volatile = Reading::default());
        assert_eq!(verdict, Verdict::Error);
        assert_eq!(judge(|log| *log = SensorLog::default()), Verdict::Error);
    }
}
