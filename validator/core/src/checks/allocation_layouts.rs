//! A user's own command uses the GPUs that it is given, under every layout, and ends well.
//!
//! ## Why
//! Launchers of experiments number GPUs themselves, ignore `CUDA_VISIBLE_DEVICES`, hang when they
//! have one GPU, fall back to the CPU without notice, and leave processes. That shows in the
//! command itself and not in a test program.
//!
//! ## How it is judged
//! `gpu-validator allocation --layouts single,all,subset,none -- COMMAND` starts the command once
//! for each layout: the last GPU, all GPUs, every other GPU, none. `CUDA_VISIBLE_DEVICES` names the
//! GPUs by UUID. While it runs, NVML's process lists are compared with the tree of its processes.
//! Fails where a process of it is on a GPU that it was not given, where its exit code is not 0, a
//! signal ends it or it exceeds the time limit, where it uses none of the GPUs that it was given
//! (CPU fall-back), and where 2 s after its end memory is in use beyond 64 MiB. Warns where it uses
//! a part of its GPUs, prints a message with a known cause, or leaves processes or shared memory
//! segments of this user. Without a GPU the command must end with exit code 0. A command that ends
//! before NVML was read three times, memory that no listed process explains on a GPU that was not
//! given, and processes of others that come meanwhile, are an error. A layout that does not apply
//! is skipped. Skipped where no such test was requested.
//!
//! ## What to do
//! The finding has the cause that the output shows, by the table of `gpu-validator environment`,
//! and its remedy. Everything else follows from the exit code, the signal, the control group's
//! OOM events, and the last line of standard error.
//!
//! ## Source
//! CUDA C++ programming guide, environment variables; the time limit of the memory is that of
//! `allocation_leaks`.

use crate::check::{Check, Judge};
use crate::facts::{Facts, LayoutFacts};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::layouts::{LayoutResult, judge_layout};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "allocation_layouts",
    stage: Stage::Load,
    level: Level::Extended,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let Some(layouts) = facts.load.layouts.as_deref() else {
        return Ok(Outcome::skip("no layouts were requested"));
    };
    if facts.interrupted.is_some() {
        let reason = "the run was stopped before the end of the layouts";
        return Err(queries::reported_by("run_complete", reason, profile));
    }
    let results: Vec<LayoutResult> = layouts
        .runs
        .iter()
        .map(|it| judge_layout(it, facts))
        .collect();
    // `Skip` is worse than `Pass` in the order of verdicts, and says less here.
    let judged = results.iter().filter(|it| it.verdict != Verdict::Skip);
    let Some(worst) = judged.clone().map(|it| it.verdict).max() else {
        return Ok(nothing_judged(layouts, &results));
    };
    let of_worst: Vec<&LayoutResult> = judged.filter(|it| it.verdict == worst).collect();
    let summary = summary(worst, &of_worst, &results);
    let lines: Vec<String> = results.iter().map(in_words).collect();
    let outcome = match worst {
        Verdict::Fail => Outcome::fail(summary),
        Verdict::Error => Outcome::error(summary),
        Verdict::Warn => Outcome::warn(summary),
        Verdict::Pass | Verdict::Skip => Outcome::pass(summary),
    };
    let outcome = outcome
        .expected("exit code 0, on the GPUs that were given and on no other")
        .observed(lines.join("\n"));
    let remedy = of_worst.iter().find_map(|it| it.remedy.clone());
    Ok(match remedy {
        Some(remedy) => outcome.remedy(remedy),
        None => outcome,
    })
}

fn nothing_judged(layouts: &LayoutFacts, results: &[LayoutResult]) -> Outcome {
    if !layouts.busy.is_empty() {
        return Outcome::busy(format!(
            "{} in use by other processes, so that no layout could be tested",
            match layouts.busy.len() {
                1 => "1 GPU is".to_owned(),
                count => format!("{count} GPUs are"),
            }
        ))
        .remedy("run again when the GPUs are free, or use --share");
    }
    let reasons: Vec<String> = results.iter().map(in_words).collect();
    Outcome::skip(format!("no layout applies: {}", reasons.join("; ")))
}

fn summary(worst: Verdict, of_worst: &[&LayoutResult], results: &[LayoutResult]) -> String {
    if worst == Verdict::Pass {
        let skipped = results.len() - of_worst.len();
        let passed = queries::counted(of_worst.len(), "layout");
        return match skipped {
            0 => format!("the command passed under {passed}"),
            count => format!("the command passed under {passed}, {count} skipped"),
        };
    }
    let first = of_worst.first().map(|it| in_words(it)).unwrap_or_default();
    match of_worst.len() {
        0 | 1 => first,
        count => format!("{first}; and {} more", count - 1),
    }
}

fn in_words(result: &LayoutResult) -> String {
    format!("{}: {}", result.layout.name(), result.summary)
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Layout, LayoutEnd, LayoutRun, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{gpu_uuid, healthy_node, judge_host_check, laid_out_node};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    /// The finding where one layout is otherwise than on the healthy machine.
    fn judge_with(layout: Layout, change: impl FnOnce(&mut LayoutRun)) -> Finding {
        let mut facts = laid_out_node();
        let layouts = facts.load.layouts.as_mut().expect("layouts");
        let run = layouts.runs.iter_mut().find(|it| it.layout == layout);
        change(run.expect("the layout"));
        judge(&facts)
    }

    #[test]
    fn passes_where_every_layout_used_its_gpus() {
        let finding = judge(&laid_out_node());
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        assert_eq!(finding.summary, "the command passed under 4 layouts");
        let observed = finding.observed.expect("a line for each layout");
        assert!(observed.contains("single: it used GPU 7 ("), "{observed}");
        assert!(observed.contains("all: it used its 8 GPUs"), "{observed}");
        assert!(observed.contains("none: it used no GPU"), "{observed}");
    }

    #[test]
    fn fails_for_a_gpu_that_was_not_given_and_names_it() {
        let finding = judge_with(Layout::Single, |run| {
            let gpu = run.gpus.entry(gpu_uuid(0)).or_default();
            gpu.own.insert(4711);
        });
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.starts_with("single: it used GPU 0 (0000:"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn memory_is_the_evidence_where_nvml_lists_no_process_of_the_command() {
        let finding = judge_with(Layout::Single, |run| {
            for gpu in run.gpus.values_mut() {
                gpu.own.clear();
            }
        });
        assert_eq!(finding.verdict, Verdict::Pass);
        let observed = finding.observed.expect("a line for each layout");
        assert!(observed.contains("by the GPUs' memory"), "{observed}");
        // It may be a foreign process.
        let finding = judge_with(Layout::None, |run| {
            run.gpus.entry(gpu_uuid(2)).or_default().peak_bytes = 500 << 20;
        });
        assert_eq!(finding.verdict, Verdict::Error);
        assert!(
            finding
                .summary
                .starts_with("none: memory was taken on GPU 2 ("),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn each_bad_end_has_its_text() {
        for (end, text) in [
            (
                LayoutEnd::Exited { status: 3 },
                "all: it exited with status 3: it printed nothing",
            ),
            (
                LayoutEnd::Killed { signal: 11 },
                "all: it was ended by signal 11 (SIGSEGV): it printed nothing",
            ),
            (
                LayoutEnd::TimedOut { seconds: 600.0 },
                "all: it did not end within 600 s, and was ended: it printed nothing",
            ),
            (
                LayoutEnd::NotStarted {
                    reason: "x: not found".to_owned(),
                },
                "all: it could not be started: x: not found",
            ),
        ] {
            let finding = judge_with(Layout::All, |run| run.end = Reading::Value(end));
            assert_eq!(finding.verdict, Verdict::Fail);
            assert_eq!(finding.summary, text);
            assert!(finding.remedy.is_some());
        }
    }

    #[test]
    fn the_reason_of_a_bad_end_is_the_control_group_then_a_known_message_then_the_last_line() {
        let end = |run: &mut LayoutRun| {
            run.end = Reading::Value(LayoutEnd::Exited { status: 1 });
            run.stderr = "Traceback\nKeyError: 'x'\n".to_owned();
        };
        let finding = judge_with(Layout::All, end);
        assert!(finding.summary.ends_with("status 1: KeyError: 'x'"));
        let finding = judge_with(Layout::All, |run| {
            end(run);
            run.messages = vec!["RuntimeError: CUDA out of memory. Tried".to_owned()];
        });
        assert!(finding.summary.contains("the GPU's memory is in use"));
        assert!(finding.remedy.expect("one").contains("end the other"));
        let finding = judge_with(Layout::All, |run| {
            end(run);
            run.oom_kills = Reading::Value(1);
        });
        assert!(finding.summary.contains("for want of host memory"));
    }

    #[test]
    fn a_command_that_uses_none_of_its_gpus_fell_back_to_the_cpu() {
        let unused = |run: &mut LayoutRun| run.gpus.clear();
        let finding = judge_with(Layout::Subset, unused);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "subset: it was given 4 GPUs and used none: it computed on the CPU"
        );
        // Not known where NVML was not read, or not often enough, or others came.
        let trouble = judge_with(Layout::Subset, |run| {
            unused(run);
            run.view_trouble = Some("no NVML".to_owned());
        });
        let short = judge_with(Layout::Subset, |run| {
            unused(run);
            run.rounds = 2;
        });
        let others = judge_with(Layout::Subset, |run| {
            unused(run);
            run.gpus.entry(gpu_uuid(1)).or_default().others.insert(7);
        });
        for finding in [trouble, short, others] {
            assert_eq!(finding.verdict, Verdict::Error, "{}", finding.summary);
        }
        // Unless the command itself reports it.
        let reported = judge_with(Layout::Subset, |run| {
            unused(run);
            run.rounds = 1;
            run.messages = vec!["No GPUs detected - falling back to CPU mode".to_owned()];
        });
        assert_eq!(reported.verdict, Verdict::Fail);
    }

    #[test]
    fn the_message_of_a_fall_back_is_expected_without_a_gpu_alone() {
        let message = |run: &mut LayoutRun| {
            run.messages = vec!["No GPUs detected - falling back to CPU mode".to_owned()];
        };
        assert_eq!(judge_with(Layout::None, message).verdict, Verdict::Pass);
        let at_once = judge_with(Layout::None, |run| {
            message(run);
            run.rounds = 0;
        });
        assert_eq!(at_once.verdict, Verdict::Pass, "{}", at_once.summary);
        assert_eq!(judge_with(Layout::All, message).verdict, Verdict::Warn);
    }

    #[test]
    fn warns_of_unused_gpus_and_of_processes_that_stay_and_fails_for_memory() {
        let part = judge_with(Layout::All, |run| {
            run.gpus.remove(&gpu_uuid(3));
        });
        assert_eq!(part.verdict, Verdict::Warn);
        assert_eq!(part.summary, "all: it used 7 of its 8 GPUs");
        let survivors = judge_with(Layout::All, |run| run.survivors = 2);
        assert_eq!(survivors.summary, "all: it left 2 processes when it ended");
        let segments = judge_with(Layout::All, |run| {
            run.shared_memory_left = ["psm_1".to_owned(), "psm_2".to_owned()].into();
        });
        assert_eq!(
            segments.summary,
            "all: it left 2 segments in /dev/shm, first psm_1"
        );
        let memory = judge_with(Layout::All, |run| {
            run.gpus.entry(gpu_uuid(3)).or_default().left_bytes = Some(300 << 20);
        });
        assert_eq!(memory.verdict, Verdict::Fail);
        assert!(memory.summary.contains("300 MiB more than before"));
    }

    #[test]
    fn a_skipped_layout_does_not_hide_the_others_and_nothing_judged_is_no_pass() {
        let skipped = |run: &mut LayoutRun| run.skipped = Some("one GPU has no subset".to_owned());
        let finding = judge_with(Layout::Subset, skipped);
        assert_eq!(
            finding.summary,
            "the command passed under 3 layouts, 1 skipped"
        );
        let mut facts = laid_out_node();
        let layouts = facts.load.layouts.as_mut().expect("layouts");
        layouts.runs.iter_mut().for_each(skipped);
        assert_eq!(judge(&facts).verdict, Verdict::Skip);
        let layouts = facts.load.layouts.as_mut().expect("layouts");
        layouts.busy.push(gpu_uuid(0));
        let finding = judge(&facts);
        assert_eq!((finding.verdict, finding.busy), (Verdict::Error, true));
    }

    #[test]
    fn is_skipped_where_it_was_not_requested_or_was_stopped_and_an_error_where_not_followed() {
        let mut stopped = laid_out_node();
        stopped.interrupted = Some("SIGINT".to_owned());
        for facts in [healthy_node(), stopped] {
            assert_eq!(judge(&facts).verdict, Verdict::Skip);
        }
        let finding = judge_with(Layout::All, |run| {
            run.end = Reading::NotRead("x".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }
}
