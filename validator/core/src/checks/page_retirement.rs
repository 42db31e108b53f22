//! Few memory pages are retired, and no retirement is pending.
//!
//! ## Why
//! GPUs before Ampere take faulty pages of memory out of use. A retirement takes effect only when
//! the driver is loaded anew, and a GPU with many retired pages is at the end of its life.
//!
//! ## How it is judged
//! - `fail`: a retirement is pending; more pages are retired than `policy.retired_pages_maximum`
//!   allows (62 by default, 64 is all that the hardware can keep); more than 15 pages are retired
//!   for double-bit errors.
//! - Retired pages below that are named and pass.
//!
//! DCGM applies the limit of 15 only when one of the pages was retired in the last week; NVML's
//! counts carry no date here, so this check is the stricter one. GPUs that remap rows instead are
//! skipped; an unknown model that keeps neither is an `error` where the profile sets a maximum.
//!
//! ## What to do
//! Pending: drain the node and reset the GPU or reboot. Too many: run NVIDIA's field diagnostic and
//! return the GPU.
//!
//! ## Source
//! NVIDIA Dynamic Page Retirement, <https://docs.nvidia.com/deploy/dynamic-page-retirement/>; the
//! limits are those of DCGM's deployment and health checks (63 in all, soft limit 15 for double-bit
//! errors).

use crate::check::{Check, Judge};
use crate::diagnosis::RecommendedAction;
use crate::expect::{model_has, model_may_have};
use crate::facts::{Facts, GpuFacts, RetiredPages};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "page_retirement",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/dynamic-page-retirement/",
};

/// DCGM fails a GPU with 63 or more retired pages.
const RETIRED_PAGES_MAXIMUM: u32 = 62;
/// DCGM's soft limit of pages retired for double-bit errors.
const DOUBLE_BIT_PAGES_MAXIMUM: u32 = 15;

const RETURN_IT: &str = "run NVIDIA's field diagnostic and return the GPU";

fn judge(gpu: &GpuFacts, _: &Facts, profile: &Profile) -> Judgement {
    let maximum = profile.policy.retired_pages_maximum;
    let must_tell = model_has(gpu, |model| model.ecc && !model.row_remapping)
        || (maximum.is_some()
            && model_may_have(gpu, |model| model.ecc && !model.row_remapping)
            && gpu.row_remapping.value().is_none());
    let ecc_is_off = gpu.ecc_mode.value().is_some_and(|mode| !mode.current);
    let pages = gpu
        .retired_pages
        .required_if(must_tell && !ecc_is_off, "page retirement state")?;
    let maximum = maximum.unwrap_or(RETIRED_PAGES_MAXIMUM);
    worst_of([
        Ok(judge_pending(pages)),
        Ok(judge_total(pages, maximum)),
        Ok(judge_double_bit(pages)),
    ])
}

fn judge_pending(pages: &RetiredPages) -> Outcome {
    if pages.pending {
        return Outcome::fail("a page retirement waits for a reset of the GPU")
            .expected("no pending retirement")
            .observed("a pending retirement")
            .remedy("drain the node and reset the GPU (nvidia-smi --gpu-reset) or reboot");
    }
    Outcome::pass("no page retirement is pending")
}

fn judge_total(pages: &RetiredPages, maximum: u32) -> Outcome {
    let total = pages.single_bit.saturating_add(pages.double_bit);
    if total > maximum {
        return Outcome::fail(format!(
            "{total} pages are retired, at most {maximum} allowed"
        ))
        .expected(format!("at most {maximum}"))
        .observed(total)
        .remedy(RETURN_IT)
        .recommends(RecommendedAction::Rma);
    }
    Outcome::pass(format!("{total} pages are retired"))
}

fn judge_double_bit(pages: &RetiredPages) -> Outcome {
    let count = pages.double_bit;
    if count > DOUBLE_BIT_PAGES_MAXIMUM {
        return Outcome::fail(format!(
            "{count} pages are retired for double-bit errors, at most {DOUBLE_BIT_PAGES_MAXIMUM} allowed"
        ))
        .expected(format!("at most {DOUBLE_BIT_PAGES_MAXIMUM}"))
        .observed(count)
        .remedy(RETURN_IT)
        .recommends(RecommendedAction::Rma);
    }
    Outcome::pass(format!("{count} of them for double-bit errors"))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Reading, RetiredPages, RowRemapping};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_t4, judge_healthy, judge_only_gpu, make_model_unknown};

    fn with(profile: &str, single_bit: u32, double_bit: u32, pending: bool) -> Finding {
        let mut gpu = healthy_t4();
        gpu.retired_pages = Reading::Value(RetiredPages {
            single_bit,
            double_bit,
            pending,
        });
        judge_only_gpu(&CHECK, profile, gpu)
    }

    #[test]
    fn passes_without_retired_pages_and_with_few() {
        assert_eq!(with("{}", 0, 0, false).verdict, Verdict::Pass);
        assert_eq!(with("{}", 5, 2, false).verdict, Verdict::Pass);
    }

    #[test]
    fn fails_on_pending() {
        let finding = with("{}", 0, 1, true);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "a page retirement waits for a reset of the GPU"
        );
    }

    #[test]
    fn fails_at_63_pages_of_both_kinds() {
        assert_eq!(with("{}", 52, 10, false).verdict, Verdict::Pass);
        assert_eq!(with("{}", 53, 10, false).verdict, Verdict::Fail);
    }

    #[test]
    fn fails_above_15_pages_for_double_bit_errors() {
        assert_eq!(with("{}", 0, 15, false).verdict, Verdict::Pass);
        assert_eq!(with("{}", 0, 16, false).verdict, Verdict::Fail);
    }

    #[test]
    fn the_profile_may_allow_fewer() {
        let profile = "policy: {retired_pages_maximum: 10}";
        assert_eq!(with(profile, 10, 0, false).verdict, Verdict::Pass);
        assert_eq!(with(profile, 10, 1, false).verdict, Verdict::Fail);
    }

    #[test]
    fn errs_when_it_was_not_read_or_a_gpu_that_has_it_denies_it() {
        for reading in [
            Reading::NotRead("unknown error".to_owned()),
            Reading::NotSupported,
        ] {
            let mut gpu = healthy_t4();
            gpu.retired_pages = reading;
            assert_eq!(judge_only_gpu(&CHECK, "{}", gpu).verdict, Verdict::Error);
        }
    }

    #[test]
    fn skips_where_rows_are_remapped_instead() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Skip)
        );
        let mut gpu = healthy_t4();
        make_model_unknown(&mut gpu);
        gpu.retired_pages = Reading::NotSupported;
        gpu.row_remapping = Reading::NotSupported;
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", gpu.clone()).verdict,
            Verdict::Skip
        );
        let limited = "policy: {retired_pages_maximum: 8}";
        assert_eq!(
            judge_only_gpu(&CHECK, limited, gpu.clone()).verdict,
            Verdict::Error
        );
        gpu.row_remapping = Reading::Value(RowRemapping::default());
        assert_eq!(judge_only_gpu(&CHECK, limited, gpu).verdict, Verdict::Skip);
    }
}
