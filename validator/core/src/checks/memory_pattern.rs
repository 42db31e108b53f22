//! Every GPU's free memory returns the pattern that was written to it.
//!
//! ## Why
//! A faulty cell, address line or channel returns another value than was written. ECC covers the
//! cells and not the whole path, is off on some machines and absent on others, and counts only what
//! something reads. The products of the burn reuse a part of the memory; this test writes all of
//! what is free and compares every word on the device.
//!
//! ## How it is judged
//! One process for each GPU allocates nearly all free memory, writes a pseudo-random word that
//! depends on its address, reads all of it back, and repeats that with every bit inverted, so that
//! each bit holds both values and no two words are alike. One wrong word fails. A CUDA error fails;
//! a process that crashed or timed out, and memory that was not read back in time, are errors. A
//! GPU that others use is busy. Judged at level `extended`; skipped where no load was requested.
//!
//! ## What to do
//! Take the node out of service and keep the report: the addresses are of the process, so that a
//! repeated run may show others. Read `nvidia-smi -q -d ECC,ROW_REMAPPER`, and run NVIDIA's field
//! diagnostic.
//!
//! ## Source
//! The kernel and the pattern are part of this project; NVIDIA's documentation of GPU memory
//! errors, <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>.

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts, MemoryMismatch, Reading, WorkerEnd, WorkloadRun};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::reference::explain_cuda_error;

pub(crate) const CHECK: Check = Check {
    id: "memory_pattern",
    stage: Stage::Load,
    level: Level::Extended,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
};

const WORKLOAD: &str = "memory";

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let is_planned = facts.load.runs.iter().any(|it| it.id.workload == WORKLOAD);
    if !is_planned {
        if facts.interrupted.is_some() {
            let text = "the run was stopped before the memory test";
            return Err(queries::reported_by("run_complete", text, profile));
        }
        return Ok(Outcome::skip("no memory test was requested"));
    }
    let uuid = gpu.uuid.required("UUID of the GPU")?;
    let mut runs = facts.load.runs_of(WORKLOAD, uuid);
    let Some(run) = runs.next() else {
        return Ok(Outcome::skip("no memory test of this GPU was requested"));
    };
    Ok(judge_run(run))
}

fn judge_run(run: &WorkloadRun) -> Outcome {
    // A wrong value is wrong, however the process ended.
    if run.mismatches > 0 {
        return wrong_values(run);
    }
    let end = match &run.end {
        Reading::Value(end) => end,
        Reading::NotRead(reason) => {
            return Outcome::error(format!("the memory test did not run: {reason}"));
        }
        Reading::NotSupported => {
            return Outcome::error("the memory test did not run: not supported on this GPU");
        }
    };
    let mib = |bytes: u64| bytes >> 20;
    let (verified, used) = (run.measured.bytes_verified, run.memory.used_bytes);
    // Every pass verifies all of the memory: a launch that compared nothing leaves less.
    let passes = run.measured.passes.max(1);
    match end {
        WorkerEnd::Finished if used == 0 => {
            Outcome::error("the memory test ended, but no memory was tested")
        }
        WorkerEnd::Finished if verified < used.saturating_mul(passes) => Outcome::error(format!(
            "the memory test verified {} of {} MiB in {:.1} s",
            mib(verified),
            mib(used.saturating_mul(passes)),
            run.measured.seconds
        )),
        WorkerEnd::Finished => Outcome::pass(format!(
            "{} of {} MiB of free memory hold both values of every bit",
            mib(verified),
            mib(run.memory.free_bytes)
        )),
        WorkerEnd::Busy(reason) => Outcome::busy(format!(
            "the GPU is in use, so its memory was not tested: {reason}"
        ))
        .remedy("run again when the GPU is free"),
        WorkerEnd::CudaError { call, code, name } => {
            let observed = format!("{call}: {name} ({code})");
            let text = format!("the memory test failed in {observed}");
            match explain_cuda_error(*code) {
                Some(it) => {
                    Outcome::fail(format!("{text}: {}", it.meaning)).remedy(it.remedy.clone())
                }
                None => Outcome::fail(text)
                    .remedy("read the kernel log at that time: dmesg | grep NVRM"),
            }
            .expected("CUDA_SUCCESS (0)")
            .observed(observed)
        }
        WorkerEnd::Exited { status, stderr } => Outcome::error(format!(
            "the process of the memory test exited with status {status}: {}",
            stderr.lines().last().unwrap_or("no output")
        ))
        .observed(stderr),
        WorkerEnd::Killed { signal } => Outcome::error(format!(
            "the process of the memory test was ended by signal {signal}"
        ))
        .remedy("search the kernel log for Xids and the out-of-memory killer: dmesg"),
        WorkerEnd::TimedOut { step, seconds } => Outcome::error(format!(
            "the memory test did not answer within {seconds:.1} s, in {step}"
        ))
        .remedy("search the kernel log for Xids: dmesg | grep NVRM; reset the GPU"),
    }
}

fn wrong_values(run: &WorkloadRun) -> Outcome {
    let text = |it: &MemoryMismatch| {
        format!(
            "address {}: {} instead of {}",
            it.address, it.observed, it.expected
        )
    };
    let first = run.first_mismatches.first();
    let first = first.map_or(String::new(), |it| format!(", first {}", text(it)));
    let all: Vec<String> = run.first_mismatches.iter().map(text).collect();
    let words = match run.mismatches {
        // The counter is in the memory that is at fault.
        count if count > words_compared(run) => {
            "words, so many that their count is wrong itself,".to_owned()
        }
        1 => "1 word".to_owned(),
        count => format!("{count} words"),
    };
    Outcome::fail(format!(
        "{words} of the GPU's memory did not hold what was written{first}"
    ))
    .expected("every word as it was written")
    .observed(all.join("\n"))
    .remedy("take the node out of service and have the GPU inspected; keep this report")
}

/// The most words of 8 bytes that can differ: each is compared with a pattern and its complement in
/// every pass, of which the last may not have ended.
fn words_compared(run: &WorkloadRun) -> u64 {
    let comparisons = 2 * (run.measured.passes + 1);
    (run.memory.used_bytes / 8).saturating_mul(comparisons)
}

#[cfg(test)]
mod tests {
    use crate::facts::{
        Facts, MeasuredWork, MemoryMismatch, Reading, RequestedWork, WorkerEnd, WorkloadMemory,
        WorkloadRun,
    };
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_check};
    use crate::worker_id::WorkerId;

    fn judge(facts: &Facts) -> Vec<Finding> {
        judge_check(&super::CHECK, facts, "{}")
    }

    /// The healthy machine with a good run on every GPU, but for the third one's.
    fn node_with(change: impl FnOnce(&mut WorkloadRun)) -> Facts {
        let mut facts = healthy_node();
        for gpu in &facts.gpus {
            let uuid = gpu.uuid.value().expect("a UUID");
            facts.load.runs.push(WorkloadRun {
                measured: MeasuredWork {
                    bytes_verified: 134 << 30,
                    seconds: 0.5,
                    ..MeasuredWork::default()
                },
                memory: WorkloadMemory {
                    free_bytes: 140 << 30,
                    used_bytes: 134 << 30,
                },
                ..WorkloadRun::empty(
                    WorkerId::new("memory", &[uuid], 0),
                    RequestedWork::default(),
                    Reading::Value(WorkerEnd::Finished),
                )
            });
        }
        change(&mut facts.load.runs[2]);
        facts
    }

    #[test]
    fn passes_where_every_word_was_right() {
        let findings = judge(&node_with(|_| {}));
        assert_eq!(findings.len(), 8);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        assert_eq!(
            findings[0].summary,
            "137216 of 143360 MiB of free memory hold both values of every bit"
        );
    }

    #[test]
    fn a_count_that_cannot_be_is_not_reported_as_a_number() {
        let facts = node_with(|run| run.mismatches = u64::MAX);
        let summary = &judge(&facts)[2].summary;
        assert!(summary.starts_with("words, so many"), "{summary}");
    }

    #[test]
    fn one_wrong_word_fails_however_the_process_ended() {
        for end in [WorkerEnd::Finished, WorkerEnd::Killed { signal: 9 }] {
            let facts = node_with(|run| {
                run.end = Reading::Value(end);
                run.mismatches = 1;
                run.first_mismatches = vec![MemoryMismatch {
                    address: "0x7f0000001008".to_owned(),
                    expected: "0x1".to_owned(),
                    observed: "0x3".to_owned(),
                    ..MemoryMismatch::default()
                }];
            });
            let findings = judge(&facts);
            assert_eq!(findings[2].verdict, Verdict::Fail);
            assert_eq!(
                findings[2].summary,
                "1 word of the GPU's memory did not hold what was written, first address \
                 0x7f0000001008: 0x3 instead of 0x1"
            );
            assert_eq!(findings[1].verdict, Verdict::Pass);
        }
    }

    #[test]
    fn what_was_not_tested_is_no_pass() {
        let unverified = node_with(|run| run.measured.bytes_verified = 1 << 30);
        let unused = node_with(|run| run.memory.used_bytes = 0);
        let unread = node_with(|run| run.end = Reading::NotRead("the GPU is lost".to_owned()));
        let unsupported = node_with(|run| run.end = Reading::NotSupported);
        for facts in [unverified, unused, unread, unsupported] {
            assert_eq!(judge(&facts)[2].verdict, Verdict::Error);
        }
    }

    #[test]
    fn every_end_has_its_verdict() {
        for (end, verdict, busy) in [
            (WorkerEnd::Busy("a job".to_owned()), Verdict::Error, true),
            (WorkerEnd::Killed { signal: 11 }, Verdict::Error, false),
            (
                WorkerEnd::Exited {
                    status: 101,
                    stderr: String::new(),
                },
                Verdict::Error,
                false,
            ),
            (
                WorkerEnd::TimedOut {
                    step: "cuCtxSynchronize".to_owned(),
                    seconds: 30.0,
                },
                Verdict::Error,
                false,
            ),
            (
                WorkerEnd::CudaError {
                    call: "cuCtxSynchronize".to_owned(),
                    code: 214,
                    name: "CUDA_ERROR_ECC_UNCORRECTABLE".to_owned(),
                },
                Verdict::Fail,
                false,
            ),
        ] {
            let finding = &judge(&node_with(|run| run.end = Reading::Value(end)))[2];
            assert_eq!((finding.verdict, finding.busy), (verdict, busy));
        }
    }

    #[test]
    fn is_skipped_where_it_was_not_requested() {
        let findings = judge(&healthy_node());
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
        let mut facts = node_with(|_| {});
        facts.load.runs.remove(2);
        assert_eq!(judge(&facts)[2].verdict, Verdict::Skip);
        assert_eq!(judge(&facts)[3].verdict, Verdict::Pass);
    }

    #[test]
    fn a_stopped_run_is_reported_once() {
        let mut facts = healthy_node();
        facts.interrupted = Some("SIGTERM".to_owned());
        let findings = judge(&facts);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
        assert!(findings[0].summary.contains("run_complete"));
    }
}
