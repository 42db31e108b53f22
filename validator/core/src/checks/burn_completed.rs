//! The burn ran for the requested duration.
//!
//! ## Why
//! A GPU that stops computing under full load stops jobs, too. The results of a burn that ended
//! early are judged by other checks.
//!
//! ## How it is judged
//! `fail` when a CUDA call failed. `error` when the process crashed, was killed or did not answer,
//! when nothing was multiplied, or when it multiplied for less than nine tenths of the time that
//! was requested. A GPU that others are using is busy. Skipped where no burn was requested, and
//! where the whole run was stopped, which `run_complete` reports.
//!
//! ## What to do
//! For a CUDA error, follow the finding's remedy for its code. Otherwise read the kernel log at
//! that time: `dmesg | grep NVRM`.
//!
//! ## Source
//! CUDA Driver API, <https://docs.nvidia.com/cuda/cuda-driver-api/>.

use crate::check::{Check, Judge};
use crate::facts::{BurnRun, Facts, GpuFacts, WorkerEnd};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::reference::explain_cuda_error;
use crate::{burned, queries};

pub(crate) const CHECK: Check = Check {
    id: "burn_completed",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-driver-api/",
};

/// This project's own choice: the last batch ends a little before or after the time.
const TIME_SHARE_MINIMUM: f64 = 0.9;
/// By which a run that is stopped stops its workers.
// Source: signal(7).
const SIGTERM: i32 = 15;

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let run = burned::run_of(gpu, facts, profile)?;
    Ok(match &run.end {
        end if was_stopped(end, run, facts) => stopped(run, profile),
        WorkerEnd::Finished => finished(run),
        WorkerEnd::CudaError { call, code, name } => cuda_error(call, *code, name),
        WorkerEnd::Busy(reason) => Outcome::busy(reason.clone()),
        WorkerEnd::Exited { status, stderr } => Outcome::error(format!(
            "the burn's process exited with status {status}: {}",
            stderr.lines().last().unwrap_or("it reported nothing")
        ))
        .observed(stderr),
        WorkerEnd::Killed { signal } => Outcome::error(format!(
            "the burn's process was ended by signal {signal} after {:.1} s",
            run.measured_s
        ))
        .remedy("check for Xids and the out-of-memory killer: dmesg"),
        WorkerEnd::TimedOut { step, seconds } => Outcome::error(format!(
            "the burn did not answer for {seconds:.1} s, in {step}"
        ))
        .remedy("check for Xids: dmesg | grep NVRM; reset the GPU, and take the node out of service if it hangs again"),
    })
}

/// Written so that a time that is no number is too short.
fn is_long_enough(run: &BurnRun) -> bool {
    run.measured_s >= run.requested_s * TIME_SHARE_MINIMUM
}

/// Whether it ended early because the whole run was stopped: by itself, by the signal that asks it
/// to, or by force when it was in a call of the driver that does not end within a second. What else
/// may have ended it is told as what it is.
fn was_stopped(end: &WorkerEnd, run: &BurnRun, facts: &Facts) -> bool {
    let by_the_stop = match end {
        WorkerEnd::Finished => !is_long_enough(run),
        WorkerEnd::Killed { signal } => *signal == SIGTERM,
        WorkerEnd::TimedOut { .. } => true,
        WorkerEnd::CudaError { .. } | WorkerEnd::Busy(_) | WorkerEnd::Exited { .. } => false,
    };
    facts.interrupted.is_some() && by_the_stop
}

fn stopped(run: &BurnRun, profile: &Profile) -> Outcome {
    let text = format!(
        "the run was stopped after the burn had multiplied for {:.1} s",
        run.measured_s
    );
    queries::reported_by("run_complete", &text, profile)
}

fn finished(run: &BurnRun) -> Outcome {
    let products = burned::products(run);
    if products == 0 {
        return Outcome::error("the burn ended, but nothing was multiplied");
    }
    if !is_long_enough(run) {
        return Outcome::error(format!(
            "the burn ended after {:.1} of {:.1} s",
            run.measured_s, run.requested_s
        ));
    }
    let stood_still = (run.stood_still_s > 0.0).then(|| {
        let seconds = run.stood_still_s;
        format!("; its process stood still for {seconds:.1} s meanwhile, which do not count")
    });
    let mut text = format!(
        "multiplied for {:.1} s: {products} products{}",
        run.measured_s,
        stood_still.unwrap_or_default()
    );
    for note in &run.notes {
        text.push_str("; ");
        text.push_str(note);
    }
    Outcome::pass(text)
}

fn cuda_error(call: &str, code: u32, name: &str) -> Outcome {
    let observed = format!("{call}: {name} ({code})");
    let outcome = match explain_cuda_error(code) {
        Some(explanation) => Outcome::fail(format!(
            "the burn failed in {observed}: {}",
            explanation.meaning
        ))
        .remedy(explanation.remedy.clone()),
        None => Outcome::fail(format!("the burn failed in {observed}"))
            .remedy("read the kernel log at that time: dmesg | grep NVRM"),
    };
    outcome.expected("CUDA_SUCCESS (0)").observed(observed)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{BurnPlan, BurnRun, Facts, Reading, WorkerEnd};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{burned_node, burned_node_with, healthy_node, judge_check};

    fn judge(change: impl FnOnce(&mut BurnRun)) -> Finding {
        judge_check(&CHECK, &burned_node_with(change), "{}").swap_remove(2)
    }

    #[test]
    fn time_in_which_the_worker_stood_still_is_no_time_of_the_burn() {
        let finding = judge(|run| run.stood_still_s = 5.5);
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(
            finding.summary.contains("stood still for 5.5 s meanwhile"),
            "{}",
            finding.summary
        );
        let finding = judge(|run| (run.measured_s, run.stood_still_s) = (4.5, 5.5));
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn passes_on_every_gpu() {
        let findings = judge_check(&CHECK, &burned_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
    }

    #[test]
    fn without_a_burn_it_is_skipped() {
        let findings = judge_check(&CHECK, &healthy_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
        assert_eq!(findings[0].summary, "no burn was requested");
    }

    #[test]
    fn a_cuda_error_fails() {
        let finding = judge(|run| {
            run.end = WorkerEnd::CudaError {
                call: "cuEventSynchronize".to_owned(),
                code: 719,
                name: "CUDA_ERROR_LAUNCH_FAILED".to_owned(),
            };
        });
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn what_did_not_end_well_is_an_error() {
        let ends = [
            WorkerEnd::Killed { signal: 9 },
            WorkerEnd::TimedOut {
                step: "bf16 products".to_owned(),
                seconds: 30.0,
            },
            WorkerEnd::Exited {
                status: 101,
                stderr: "panicked".to_owned(),
            },
        ];
        for end in ends {
            assert_eq!(judge(|run| run.end = end).verdict, Verdict::Error);
        }
        assert_eq!(judge(|run| run.measured_s = 3.0).verdict, Verdict::Error);
        assert_eq!(
            judge(|run| run.measured_s = f64::NAN).verdict,
            Verdict::Error
        );
        assert_eq!(judge(|run| run.precisions.clear()).verdict, Verdict::Error);
    }

    #[test]
    fn busy_is_not_broken_and_a_missing_run_is_an_error() {
        let finding = judge(|run| run.end = WorkerEnd::Busy("1 other process".to_owned()));
        assert_eq!((finding.verdict, finding.busy), (Verdict::Error, true));
        let mut facts = burned_node();
        let uuid = facts.gpus[0].uuid.value().cloned().unwrap_or_default();
        facts
            .load
            .burn
            .insert(uuid.clone(), Reading::NotRead("no process".to_owned()));
        assert_eq!(judge_check(&CHECK, &facts, "{}")[0].verdict, Verdict::Error);
        facts.load.burn.remove(&uuid);
        assert_eq!(judge_check(&CHECK, &facts, "{}")[0].verdict, Verdict::Error);
    }

    #[test]
    fn what_was_not_asked_for_is_skipped_and_what_was_stopped_errs() {
        let first = |facts: &Facts| judge_check(&CHECK, facts, "{}").swap_remove(0);
        let mut facts = burned_node();
        let uuid = facts.gpus[0].uuid.value().cloned().unwrap_or_default();
        facts.load.burn.remove(&uuid);
        let others = facts.load.burn.keys().cloned().collect();
        facts.load.burn_plan = Some(BurnPlan::On {
            duration_s: 10.0,
            precisions: Vec::new(),
            gpus: others,
        });
        assert_eq!(first(&facts).verdict, Verdict::Skip);
        facts.load.burn_plan = Some(BurnPlan::Off("--no-burn was given".to_owned()));
        let finding = first(&facts);
        assert_eq!(finding.verdict, Verdict::Skip);
        assert_eq!(finding.summary, "no burn: --no-burn was given");
        let mut stopped = healthy_node();
        stopped.interrupted = Some("signal 15 (SIGTERM)".to_owned());
        let finding = first(&stopped);
        assert_eq!(finding.verdict, Verdict::Skip);
        let says = "the run was stopped before the burn, which run_complete reports";
        assert_eq!(finding.summary, says);
    }

    #[test]
    fn one_stop_is_one_finding_and_hides_nothing_else() {
        let judged = |end: WorkerEnd, profile| {
            let mut facts = burned_node_with(|run| {
                run.measured_s = 1.5;
                run.end = end;
            });
            facts.interrupted = Some("signal 2 (SIGINT)".to_owned());
            judge_check(&CHECK, &facts, profile).swap_remove(2)
        };
        let slow_to_stop = || WorkerEnd::TimedOut {
            step: "loading cuBLASLt".to_owned(),
            seconds: 0.8,
        };
        for end in [
            WorkerEnd::Finished,
            WorkerEnd::Killed { signal: 15 },
            slow_to_stop(),
        ] {
            let finding = judged(end, "{}");
            assert_eq!(finding.verdict, Verdict::Skip);
            let says = "the run was stopped after the burn had multiplied for 1.5 s, which run_complete reports";
            assert_eq!(finding.summary, says);
        }
        assert_eq!(
            judged(WorkerEnd::Killed { signal: 9 }, "{}").verdict,
            Verdict::Error
        );
        let lost = WorkerEnd::CudaError {
            call: "cuEventSynchronize".to_owned(),
            code: 719,
            name: "CUDA_ERROR_LAUNCH_FAILED".to_owned(),
        };
        assert_eq!(judged(lost, "{}").verdict, Verdict::Fail);
        let softened = "checks: {run_complete: {severity: warn, reason: known}}";
        assert_eq!(judged(slow_to_stop(), softened).verdict, Verdict::Error);
    }

    #[test]
    fn a_gpu_that_runs_no_kernel_is_reported_once() {
        let mut facts = burned_node();
        let uuid = facts.gpus[0].uuid.value().cloned().unwrap_or_default();
        let not_run = || Reading::NotRead("the check kernel did not end well".to_owned());
        facts.load.burn.insert(uuid.clone(), not_run());
        facts.load.cuda_kernel.insert(uuid, Reading::default());
        let judged = |facts: &Facts, profile| judge_check(&CHECK, facts, profile).swap_remove(0);
        let finding = judged(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(finding.summary.ends_with(", which cuda_kernel reports"));
        let softened = "checks: {cuda_kernel: {severity: warn, reason: known}}";
        assert_eq!(judged(&facts, softened).verdict, Verdict::Error);
        facts.cuda.init = Reading::default();
        let finding = judged(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(
            finding
                .summary
                .ends_with(", which cuda_driver_library reports")
        );
    }
}
