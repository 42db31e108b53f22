//! Every GPU runs a small kernel and returns the result of the host.
//!
//! ## Why
//! Everything else in a report comes from the driver. This check uses the GPU itself: it loads a
//! program, runs it on all multiprocessors, copies the result back, and compares every value.
//!
//! ## How it is judged
//! One process for each GPU runs an embedded PTX kernel that needs nothing but the driver. Every
//! value must equal the host's own, bit for bit. A wrong value or a CUDA error fails; a process
//! that crashed, or did not answer in time, is an error, as it was not seen what the GPU computes.
//! A GPU that others are using is busy, which is not broken, and so is one that gives no memory, or
//! in mode `EXCLUSIVE_PROCESS` no access, while others have it or less than 1 GiB is free. In MIG
//! mode the kernel runs on one MIG device, and the finding states of how many. Judged at level
//! `standard` and above; skipped where CUDA does not initialise at all, and on GPUs that a `burn`
//! leaves out (`--gpu`, or hidden by `CUDA_VISIBLE_DEVICES`); `run` tests hidden GPUs, too, since
//! it judges the machine.
//!
//! ## What to do
//! Take the node out of service, and keep the report: wrong values are hardware until proven
//! otherwise. For a CUDA error, follow the finding's remedy for its code, and read the kernel log
//! at that time.
//!
//! ## Source
//! CUDA Driver API, <https://docs.nvidia.com/cuda/cuda-driver-api/>; the kernel is part of this
//! project.

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts, KernelRun, Reading, WorkerEnd};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::reference::explain_cuda_error;
use crate::{burned, queries};

pub(crate) const CHECK: Check = Check {
    id: "cuda_kernel",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-driver-api/",
};

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let uuid = gpu.uuid.required("UUID of the GPU")?;
    let run = match facts.load.cuda_kernel.get(uuid) {
        Some(Reading::Value(run)) => run,
        Some(Reading::NotSupported) => {
            return Ok(Outcome::error(
                "the check kernel did not run: not supported on this GPU",
            ));
        }
        None if burned::leaves_out(uuid, facts) => {
            return Ok(Outcome::skip("only a burn of other GPUs was requested"));
        }
        missing => {
            if !queries::cuda_initialised(facts) {
                queries::loaded_driver(facts, profile)?;
                return Err(queries::reported_by(
                    "cuda_driver_library",
                    "no kernel can run because CUDA does not initialise",
                    profile,
                ));
            }
            let reason = match missing {
                Some(Reading::NotRead(reason)) => reason,
                _ => "there is no result for this GPU",
            };
            return Ok(Outcome::error(format!(
                "the check kernel did not run: {reason}"
            )));
        }
    };
    Ok(judge_run(run, gpu))
}

fn judge_run(run: &KernelRun, gpu: &GpuFacts) -> Outcome {
    // What was seen to be wrong is wrong, however the process ended.
    if run.mismatches > 0 {
        return wrong_values(run);
    }
    match &run.end {
        WorkerEnd::Finished if run.values_compared == 0 => {
            Outcome::error("the check kernel ended, but no value was compared")
        }
        WorkerEnd::Finished => Outcome::pass(format!(
            "the check kernel computed {} values{}, all right",
            run.values_compared,
            where_it_ran(gpu)
        )),
        WorkerEnd::CudaError { call, code, name } => cuda_error(call, *code, name),
        WorkerEnd::Busy(reason) => {
            Outcome::busy(format!("the GPU is in use, so no kernel was put on it: {reason}"))
                .remedy("run again when the GPU is free")
        }
        WorkerEnd::Exited { status, stderr } => Outcome::error(format!(
            "the process that runs the check kernel exited with status {status}: {}",
            last_line(stderr)
        ))
        .observed(stderr),
        WorkerEnd::Killed { signal } => Outcome::error(format!(
            "the process that runs the check kernel was ended by signal {signal}"
        ))
        .remedy("check for Xids and the out-of-memory killer: dmesg"),
        WorkerEnd::TimedOut { step, seconds } => Outcome::error(format!(
            "the check kernel did not answer within {seconds:.1} s, in {step}"
        ))
        .remedy("check for Xids: dmesg | grep NVRM; reset the GPU, and take the node out of service if it hangs again"),
    }
}

fn wrong_values(run: &KernelRun) -> Outcome {
    let example = |it: &crate::facts::ValueMismatch| {
        format!(
            "value {}: {} instead of {}",
            it.index, it.observed, it.expected
        )
    };
    let first = run
        .examples
        .first()
        .map_or(String::new(), |it| format!(", first {}", example(it)));
    Outcome::fail(format!(
        "{} of {} values that the check kernel computed are wrong{first}",
        run.mismatches, run.values_compared
    ))
    .expected("every value equal to the host's")
    .observed(
        run.examples
            .iter()
            .map(example)
            .collect::<Vec<_>>()
            .join("\n"),
    )
    .remedy("take the node out of service and have the GPU inspected; keep this report")
}

/// In MIG mode only the first MIG device is worked.
fn where_it_ran(gpu: &GpuFacts) -> String {
    let devices = gpu.mig_devices.value().map_or(0, Vec::len);
    if gpu.mig.value().is_some_and(|mig| mig.current) && devices > 0 {
        format!(" on 1 of {}", queries::counted(devices, "MIG device"))
    } else {
        String::new()
    }
}

fn cuda_error(call: &str, code: u32, name: &str) -> Outcome {
    let observed = format!("{call}: {name} ({code})");
    let outcome = match explain_cuda_error(code) {
        Some(explanation) => Outcome::fail(format!(
            "the check kernel failed in {observed}: {}",
            explanation.meaning
        ))
        .remedy(explanation.remedy.clone()),
        None => Outcome::fail(format!("the check kernel failed in {observed}"))
            .remedy("read the kernel log at that time: dmesg | grep NVRM"),
    };
    outcome.expected("CUDA_SUCCESS (0)").observed(observed)
}

fn last_line(text: &str) -> &str {
    text.lines()
        .map(str::trim)
        .rfind(|line| !line.is_empty())
        .unwrap_or("it reported nothing")
}

#[cfg(test)]
mod tests {
    use crate::facts::{
        CudaResult, Facts, KernelRun, MigDevice, MigMode, Reading, ValueMismatch, WorkerEnd,
    };
    use crate::findings::{Finding, Verdict};
    use crate::level::Level;
    use crate::test_machine::{healthy_node, judge_check};

    fn judge(facts: &Facts) -> Vec<Finding> {
        judge_check(&super::CHECK, facts, "{}")
    }

    /// The healthy machine, but for the run on the third GPU.
    fn node_with(change: impl FnOnce(&mut KernelRun)) -> Facts {
        let mut facts = healthy_node();
        let uuid = facts.gpus[2].uuid.value().cloned().unwrap_or_default();
        match facts.load.cuda_kernel.get_mut(&uuid) {
            Some(Reading::Value(run)) => change(run),
            other => panic!("the healthy machine has a run, not {other:?}"),
        }
        facts
    }

    fn judge_end(end: WorkerEnd) -> Finding {
        let facts = node_with(|run| {
            run.end = end;
            run.values_compared = 0;
        });
        let findings = judge(&facts);
        let passed = findings
            .iter()
            .filter(|it| it.verdict == Verdict::Pass)
            .count();
        assert_eq!(passed, 7, "only the third GPU is concerned");
        findings[2].clone()
    }

    #[test]
    fn passes_on_every_gpu() {
        let findings = judge(&healthy_node());
        assert_eq!(findings.len(), 8);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        assert_eq!(
            findings[0].summary,
            "the check kernel computed 1048576 values, all right"
        );
    }

    #[test]
    fn one_wrong_value_fails() {
        let facts = node_with(|run| {
            run.mismatches = 1;
            run.examples = vec![ValueMismatch {
                index: 77,
                expected: "0x3f800000".to_owned(),
                observed: "0x3f800010".to_owned(),
            }];
        });
        let finding = &judge(&facts)[2];
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "1 of 1048576 values that the check kernel computed are wrong, first value 77: 0x3f800010 instead of 0x3f800000"
        );
    }

    #[test]
    fn wrong_values_fail_however_the_process_ended() {
        let facts = node_with(|run| {
            run.mismatches = 5;
            run.end = WorkerEnd::Killed { signal: 9 };
        });
        assert_eq!(judge(&facts)[2].verdict, Verdict::Fail);
    }

    #[test]
    fn nothing_compared_is_no_pass() {
        let finding = judge_end(WorkerEnd::Finished);
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn a_cuda_error_fails_with_its_meaning() {
        let finding = judge_end(WorkerEnd::CudaError {
            call: "cuCtxSynchronize".to_owned(),
            code: 214,
            name: "CUDA_ERROR_ECC_UNCORRECTABLE".to_owned(),
        });
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.starts_with(
                "the check kernel failed in cuCtxSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE (214): "
            ),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn busy_is_not_broken() {
        let finding = judge_end(WorkerEnd::Busy("1 process, 900 MiB".to_owned()));
        assert_eq!((finding.verdict, finding.busy), (Verdict::Error, true));
    }

    #[test]
    fn says_on_how_many_mig_devices_it_ran() {
        let mut facts = healthy_node();
        facts.gpus[0].mig = Reading::Value(MigMode {
            current: true,
            pending: true,
        });
        facts.gpus[0].mig_devices = Reading::Value(vec![MigDevice::default(); 7]);
        assert_eq!(
            judge(&facts)[0].summary,
            "the check kernel computed 1048576 values on 1 of 7 MIG devices, all right"
        );
    }

    #[test]
    fn a_process_that_died_or_hung_is_an_error() {
        for end in [
            WorkerEnd::Exited {
                status: 101,
                stderr: "thread 'main' panicked".to_owned(),
            },
            WorkerEnd::Exited {
                status: 1,
                stderr: String::new(),
            },
            WorkerEnd::Killed { signal: 11 },
            WorkerEnd::TimedOut {
                step: "cuCtxSynchronize".to_owned(),
                seconds: 30.0,
            },
        ] {
            let finding = judge_end(end);
            assert_eq!((finding.verdict, finding.busy), (Verdict::Error, false));
        }
    }

    #[test]
    fn errs_without_a_result() {
        let mut facts = healthy_node();
        facts.load.cuda_kernel.clear();
        assert!(judge(&facts).iter().all(|it| it.verdict == Verdict::Error));
        let uuid = facts.gpus[0].uuid.value().cloned().unwrap_or_default();
        for reading in [
            Reading::NotSupported,
            Reading::NotRead("could not start a process".to_owned()),
        ] {
            facts.load.cuda_kernel.insert(uuid.clone(), reading);
            assert_eq!(judge(&facts)[0].verdict, Verdict::Error);
        }
        facts.gpus[0].uuid = Reading::NotRead("unknown error".to_owned());
        assert_eq!(judge(&facts)[0].verdict, Verdict::Error);
    }

    #[test]
    fn leaves_a_cuda_that_does_not_initialise_to_its_own_check() {
        let mut facts = healthy_node();
        facts.load.cuda_kernel.clear();
        facts.cuda.init = Reading::Value(CudaResult {
            code: 802,
            name: "CUDA_ERROR_SYSTEM_NOT_READY".to_owned(),
        });
        let findings = judge(&facts);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
        assert!(findings[0].summary.contains("cuda_driver_library"));
    }

    #[test]
    fn is_not_judged_below_its_level() {
        let mut facts = healthy_node();
        facts.level = Level::Quick;
        assert!(judge(&facts).iter().all(|it| it.verdict == Verdict::Error));
    }
}
