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
    fn passes_with_rows_that_were_remapped_in_time() {
        let finding = with("{}", |rows| {
            rows.correctable_rows = 3;
            rows.uncorrectable_rows = 2;
        });
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(
            finding
                .summary
                .contains("2 rows were remapped for uncorrectable errors and 3")
        );
    }

    #[test]
    fn fails_on_failure() {
        let finding = with("{}", |rows| rows.failure = true);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.remedy.unwrap().contains("return the GPU"));
    }

    #[test]
    fn fails_on_pending_with_a_reset_as_remedy() {
        let finding = with("{}", |rows| rows.pending = true);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.remedy.unwrap().contains("reset the GPU"));
    }

    #[test]
    fn fails_at_512_uncorrectable_rows_but_never_for_correctable_ones() {
        let uncorrectable = |count| with("{}", |rows| rows.uncorrectable_rows = count).verdict;
        assert_eq!(uncorrectable(511), Verdict::Pass);
        assert_eq!(uncorrectable(512), Verdict::Fail);
        let correctable = with("{}", |rows| rows.correctable_rows = 512);
        assert_eq!(correctable.verdict, Verdict::Pass);
    }

    #[test]
    fn the_profile_may_allow_fewer() {
        let profile = "policy: {remapped_rows_uncorrectable_maximum: 0}";
        assert_eq!(with(profile, |_| {}).verdict, Verdict::Pass);
        let one = with(profile, |rows| rows.uncorrectable_rows = 1);
        assert_eq!(one.verdict, Verdict::Fail);
    }

    #[test]
    fn judges_banks_by_their_spare_rows() {
        let verdict =
            |low, none| with("{}", |rows| rows.histogram = Some(histogram(low, none))).verdict;
        assert_eq!(verdict(0, 0), Verdict::Pass);
        assert_eq!(verdict(1, 0), Verdict::Warn);
        assert_eq!(verdict(0, 1), Verdict::Fail);
        assert_eq!(
            with("{}", |rows| rows.histogram = None).verdict,
            Verdict::Pass
        );
    }

    #[test]
    fn names_all_that_is_wrong() {
        let finding = with("{}", |rows| {
            rows.failure = true;
            rows.pending = true;
        });
        assert!(finding.summary.contains("failed"), "{}", finding.summary);
        assert!(finding.summary.contains("waits"), "{}", finding.summary);
    }

    #[test]
    fn errs_when_it_was_not_read_or_a_gpu_that_has_it_denies_it() {
        let not_read = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.row_remapping = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(not_read.verdict, Verdict::Error);
        let denied = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.row_remapping = Reading::NotSupported;
        });
        assert_eq!(denied.verdict, Verdict::Error);
    }

    #[test]
    fn skips_where_the_gpu_does_not_remap_rows() {
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", healthy_t4()).verdict,
            Verdict::Skip
        );
        let mut gpu = healthy_t4();
        make_model_unknown(&mut gpu);
        assert_eq!(judge_only_gpu(&CHECK, "{}", gpu).verdict, Verdict::Skip);
    }

    #[test]
    fn skips_in_mig_mode_where_nvml_does_not_answer() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.mig = Reading::Value(MigMode {
                current: true,
                pending: true,
            });
            gpu.row_remapping = Reading::NotSupported;
        });
        assert_eq!(finding.verdict, Verdict::Skip);
    }
}
