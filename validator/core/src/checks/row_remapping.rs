//! Row remapping succeeded and has spare rows left.
//!
//! ## Why
//! Ampere and newer data center GPUs replace faulty rows of memory by spare ones. A replacement
//! takes effect only at a reset, and once it fails, the faulty row stays in use.
//!
//! ## How it is judged
//! - `fail`: a remapping failed; a remapping waits for a reset; more rows were remapped for
//!   uncorrectable errors than `policy.remapped_rows_uncorrectable_maximum` allows (511 by
//!   default); a bank has no spare row left.
//! - `warn`: a bank has few spare rows left.
//! - Rows that were remapped in time are named and pass.
//!
//! Skipped on GPUs without row remapping, and on GPUs in MIG mode or without ECC whose driver does
//! not answer. A GPU of an unknown model that does not answer is skipped too, an `error` with a
//! maximum in the profile.
//!
//! ## What to do
//! Pending: drain the node and reset the GPU (`nvidia-smi --gpu-reset`) or reboot. Failed, 512 or
//! more, or no spare row: run NVIDIA's field diagnostic and return the GPU.
//!
//! ## Source
//! NVIDIA GPU Memory Error Management, row remapping,
//! <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>; DCGM's deployment check fails on
//! failure, on pending and on 512 or more uncorrectable remappings.

use crate::check::{Check, Judge};
use crate::diagnosis::RecommendedAction;
use crate::expect::{model_has, model_may_have};
use crate::facts::{Facts, GpuFacts, RowRemapping};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "row_remapping",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
};

/// DCGM fails a GPU with 512 or more rows remapped for uncorrectable errors.
const UNCORRECTABLE_ROWS_MAXIMUM: u32 = 511;

const RETURN_IT: &str = "run NVIDIA's field diagnostic and return the GPU";

fn judge(gpu: &GpuFacts, _: &Facts, profile: &Profile) -> Judgement {
    // NVML does not answer for a GPU whose memory belongs to MIG instances.
    let mig_is_on = gpu.mig.value().is_some_and(|mig| mig.current);
    // Without ECC nothing is remapped, and some drivers do not answer then.
    let ecc_is_off = gpu.ecc_mode.value().is_some_and(|mode| !mode.current);
    let may_answer = !mig_is_on && !ecc_is_off;
    let maximum = profile.policy.remapped_rows_uncorrectable_maximum;
    let must_tell = model_has(gpu, |model| model.row_remapping)
        || (maximum.is_some()
            && model_may_have(gpu, |model| model.row_remapping)
            && gpu.retired_pages.value().is_none());
    let rows = gpu
        .row_remapping
        .required_if(may_answer && must_tell, "row remapping state")?;
    let maximum = maximum.unwrap_or(UNCORRECTABLE_ROWS_MAXIMUM);
    worst_of([
        Ok(judge_failure(rows)),
        Ok(judge_pending(rows)),
        Ok(judge_count(rows, maximum)),
        Ok(judge_spare_rows(rows)),
    ])
}

fn judge_failure(rows: &RowRemapping) -> Outcome {
    if rows.failure {
        return Outcome::fail("a row remapping failed: faulty memory stays in use")
            .expected("no failed remapping")
            .observed("a failed remapping")
            .remedy(RETURN_IT)
            .recommends(RecommendedAction::Rma);
    }
    Outcome::pass("no row remapping failed")
}

fn judge_pending(rows: &RowRemapping) -> Outcome {
    if rows.pending {
        return Outcome::fail("a row remapping waits for a reset of the GPU")
            .expected("no pending remapping")
            .observed("a pending remapping")
            .remedy("drain the node and reset the GPU (nvidia-smi --gpu-reset) or reboot");
    }
    Outcome::pass("none is pending")
}

fn judge_count(rows: &RowRemapping, maximum: u32) -> Outcome {
    let count = rows.uncorrectable_rows;
    if count > maximum {
        return Outcome::fail(format!(
            "{count} rows were remapped for uncorrectable errors, at most {maximum} allowed"
        ))
        .expected(format!("at most {maximum}"))
        .observed(count)
        .remedy(RETURN_IT)
        .recommends(RecommendedAction::Rma);
    }
    Outcome::pass(format!(
        "{count} rows were remapped for uncorrectable errors and {} for correctable ones",
        rows.correctable_rows
    ))
}

fn judge_spare_rows(rows: &RowRemapping) -> Outcome {
    let Some(banks) = rows.histogram else {
        return Outcome::skip("the driver does not count spare rows");
    };
    if banks.none > 0 {
        return Outcome::fail(format!("{} banks have no spare row left", banks.none))
            .expected("spare rows in every bank")
            .observed(format!("{} banks without", banks.none))
            .remedy(RETURN_IT)
            .recommends(RecommendedAction::Rma);
    }
    if banks.low > 0 {
        return Outcome::warn(format!("{} banks have few spare rows left", banks.low))
            .expected("spare rows in every bank")
            .observed(format!("{} banks with few", banks.low))
            .remedy("watch this GPU and plan its replacement")
            .recommends(RecommendedAction::Rma);
    }
    Outcome::pass("every bank has spare rows")
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{EccMode, GpuFacts, MigMode, Reading, RowRemapperHistogram, RowRemapping};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_t4, judge_gpu, judge_healthy, judge_only_gpu, make_model_unknown,
    };

    fn with(profile: &str, change: impl FnOnce(&mut RowRemapping)) -> Finding {
        judge_gpu(&CHECK, profile, |gpu| {
            let Reading::Value(rows) = &mut gpu.row_remapping else {
                panic!("the healthy GPU remaps rows")
            };
            change(rows);
        })
    }

    fn histogram(low: u32, none: u32) -> RowRemapperHistogram {
        RowRemapperHistogram {
            max: 3072 - low - none,
            low,
            none,
            ..RowRemapperHistogram::default()
        }
    }

    #[test]
    fn passes_without_remapped_rows() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn judges_rows_by_failure_reset_count_and_spare_rows() {
        type Change = fn(&mut RowRemapping);
        let limited = "policy: {remapped_rows_uncorrectable_maximum: 0}";
        let cases: [(&str, Change, Verdict, &str); 12] = [
            ("{}", |_| {}, Verdict::Pass, ""),
            (
                "{}",
                |it| (it.correctable_rows, it.uncorrectable_rows) = (3, 2),
                Verdict::Pass,
                "2 rows were remapped for uncorrectable errors and 3",
            ),
            ("{}", |it| it.failure = true, Verdict::Fail, "failed"),
            ("{}", |it| it.pending = true, Verdict::Fail, "waits"),
            ("{}", |it| it.uncorrectable_rows = 511, Verdict::Pass, "511"),
            ("{}", |it| it.uncorrectable_rows = 512, Verdict::Fail, "512"),
            ("{}", |it| it.correctable_rows = 512, Verdict::Pass, "512"),
            (limited, |_| {}, Verdict::Pass, ""),
            (limited, |it| it.uncorrectable_rows = 1, Verdict::Fail, ""),
            (
                "{}",
                |it| it.histogram = Some(histogram(1, 0)),
                Verdict::Warn,
                "",
            ),
            (
                "{}",
                |it| it.histogram = Some(histogram(0, 1)),
                Verdict::Fail,
                "",
            ),
            ("{}", |it| it.histogram = None, Verdict::Pass, ""),
        ];
        for (at, (profile, change, verdict, text)) in cases.into_iter().enumerate() {
            let finding = with(profile, change);
            assert_eq!(finding.verdict, verdict, "{at}: {}", finding.summary);
            assert!(finding.summary.contains(text), "{at}: {}", finding.summary);
        }
        let without_low_banks = with("{}", |it| it.histogram = Some(histogram(0, 0)));
        assert_eq!(without_low_banks.verdict, Verdict::Pass);
    }

    #[test]
    fn names_all_that_is_wrong_with_its_remedy() {
        let finding = with("{}", |it| (it.failure, it.pending) = (true, true));
        let remedy = finding.remedy.expect("a remedy");
        for (text, of_failure, of_pending) in [
            (&finding.summary, "failed", "waits"),
            (&remedy, "return the GPU", "reset the GPU"),
        ] {
            assert!(text.contains(of_failure), "{text}");
            assert!(text.contains(of_pending), "{text}");
        }
    }

    #[test]
    fn a_gpu_that_does_not_answer() {
        let silent = |profile, change: fn(&mut GpuFacts)| {
            judge_gpu(&CHECK, profile, |gpu| {
                gpu.row_remapping = Reading::NotSupported;
                change(gpu);
            })
            .verdict
        };
        assert_eq!(silent("{}", |_| {}), Verdict::Error);
        let without_ecc = |gpu: &mut GpuFacts| gpu.ecc_mode = Reading::Value(EccMode::default());
        assert_eq!(silent("{}", without_ecc), Verdict::Skip);
        assert_eq!(silent("{}", make_model_unknown), Verdict::Skip);
        let limited = "policy: {remapped_rows_uncorrectable_maximum: 8}";
        assert_eq!(silent(limited, make_model_unknown), Verdict::Error);
        assert_eq!(
            judge_only_gpu(&CHECK, limited, healthy_t4()).verdict,
            Verdict::Skip,
            "a T4 is known to retire pages instead"
        );
    }

    #[test]
    fn counters_that_were_not_read_are_an_error_unless_the_gpu_has_none() {
        type Change = fn(&mut GpuFacts);
        let cases: [(Change, Verdict); 3] = [
            (
                |gpu| gpu.row_remapping = Reading::NotRead("unknown error".to_owned()),
                Verdict::Error,
            ),
            (
                |gpu| gpu.row_remapping = Reading::NotSupported,
                Verdict::Error,
            ),
            // NVML does not answer in MIG mode.
            (
                |gpu| {
                    gpu.row_remapping = Reading::NotSupported;
                    gpu.mig = Reading::Value(MigMode {
                        current: true,
                        pending: true,
                    });
                },
                Verdict::Skip,
            ),
        ];
        for (at, (change, verdict)) in cases.into_iter().enumerate() {
            assert_eq!(judge_gpu(&CHECK, "{}", change).verdict, verdict, "{at}");
        }
        let mut gpu = healthy_t4();
        let verdict = |gpu: &GpuFacts| judge_only_gpu(&CHECK, "{}", gpu.clone()).verdict;
        assert_eq!(verdict(&gpu), Verdict::Skip);
        make_model_unknown(&mut gpu);
        assert_eq!(verdict(&gpu), Verdict::Skip);
    }
}
