//! Memory and caches have no uncorrectable ECC errors.
//!
//! ## Why
//! An uncorrectable (double-bit) error destroyed data and killed the work that used it. A GPU that
//! had one since the driver was loaded is likely to have the next one.
//!
//! ## How it is judged
//! - Uncorrectable errors since the driver was loaded (volatile): `fail` above
//!   `policy.ecc_volatile_uncorrectable_maximum`, 0 by default.
//! - Uncorrectable errors over the GPU's life (aggregate): `fail` above
//!   `policy.ecc_aggregate_uncorrectable_maximum` when the profile sets it; otherwise any is a
//!   `warn`, because remapping may long have repaired the place.
//! - The driver's flag that SRAM errors exceed the threshold of NVIDIA's field diagnostic: `fail`.
//! - Correctable errors since the driver was loaded: `warn` above
//!   `policy.ecc_volatile_correctable_maximum`; without it, above 20,000,000 in DRAM or 10,000 in
//!   SRAM.
//!
//! Skipped where ECC is off (the counters stand still then). A GPU with ECC whose counters cannot
//! be read is an `error`, and so is one of an unknown model where the profile sets a maximum.
//!
//! ## What to do
//! Drain the node and reset the GPU, so that rows are remapped; see `row_remapping`. If errors
//! return, or the SRAM threshold is exceeded, run NVIDIA's field diagnostic and return the GPU.
//!
//! ## Source
//! NVIDIA GPU Memory Error Management, <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>;
//! the flag is `bThresholdExceeded` of `nvmlEccSramErrorStatus_v1_t`. The thresholds of correctable
//! errors are those of azurehpc-health-checks (`check_gpu_ecc 20000000 10000`).

use crate::check::{Check, Judge};
use crate::diagnosis::RecommendedAction;
use crate::expect::{model_has, model_may_have};
use crate::facts::{EccErrors, Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::{Policy, Profile};
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "ecc_errors",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
};

/// Uncorrectable errors since the driver was loaded: DCGM objects to any.
const VOLATILE_UNCORRECTABLE_MAXIMUM: u64 = 0;
/// azurehpc-health-checks' threshold of correctable DRAM errors.
const DRAM_CORRECTABLE_MAXIMUM: u64 = 20_000_000;
/// azurehpc-health-checks' threshold of SRAM errors.
const SRAM_CORRECTABLE_MAXIMUM: u64 = 10_000;

const REMEDY: &str = "drain the node and reset the GPU; if errors return, run NVIDIA's field diagnostic and return the GPU";

fn judge(gpu: &GpuFacts, _: &Facts, profile: &Profile) -> Judgement {
    if gpu.ecc_mode.value().is_some_and(|mode| !mode.current) {
        return Ok(Outcome::skip(
            "ECC is off, so errors are not counted; ecc_mode judges that",
        ));
    }
    let policy = &profile.policy;
    worst_of([
        judge_volatile(gpu, policy),
        judge_aggregate(gpu, policy),
        judge_sram_threshold(gpu),
        judge_correctable(gpu, policy),
    ])
}

/// ECC is on, or the model is known to have it: then the counters must be there.
fn counts_errors(gpu: &GpuFacts) -> bool {
    gpu.ecc_mode.value().is_some_and(|mode| mode.current) || model_has(gpu, |model| model.ecc)
}

/// The profile limits these errors, on a GPU that is not known to be without ECC.
fn must_count(gpu: &GpuFacts, maximum: Option<u64>) -> bool {
    counts_errors(gpu) || (maximum.is_some() && model_may_have(gpu, |model| model.ecc))
}

fn judge_volatile(gpu: &GpuFacts, policy: &Policy) -> Judgement {
    let what = "ECC errors since the driver was loaded";
    let must_tell = must_count(gpu, policy.ecc_volatile_uncorrectable_maximum);
    let errors = gpu.ecc_volatile.required_if(must_tell, what)?;
    let count = uncorrectable(errors).ok_or_else(|| no_counter(what))?;
    let maximum = policy
        .ecc_volatile_uncorrectable_maximum
        .unwrap_or(VOLATILE_UNCORRECTABLE_MAXIMUM);
    let text = format!("uncorrectable ECC errors since the driver was loaded: {count}");
    if count > maximum {
        return Ok(Outcome::fail(format!("{text}, at most {maximum} allowed"))
            .expected(format!("at most {maximum} since the driver was loaded"))
            .observed(in_words(errors))
            .remedy(REMEDY));
    }
    Ok(Outcome::pass(text))
}

fn judge_aggregate(gpu: &GpuFacts, policy: &Policy) -> Judgement {
    let what = "ECC errors over the GPU's life";
    let must_tell = must_count(gpu, policy.ecc_aggregate_uncorrectable_maximum);
    let errors = gpu.ecc_aggregate.required_if(must_tell, what)?;
    let count = uncorrectable(errors).ok_or_else(|| no_counter(what))?;
    let text = format!("uncorrectable ECC errors over the GPU's life: {count}");
    match policy.ecc_aggregate_uncorrectable_maximum {
        Some(maximum) if count > maximum => Ok(Outcome::fail(format!(
            "{text}, the profile allows {maximum}"
        ))
        .expected(format!("at most {maximum} over the GPU's life"))
        .observed(in_words(errors))
        .remedy(REMEDY)),
        None if count > 0 => Ok(Outcome::warn(text)
            .expected("none over the GPU's life")
            .observed(in_words(errors))
            .remedy("watch this GPU; see row_remapping for whether the memory was repaired")
            .recommends(RecommendedAction::Drain)),
        Some(_) | None => Ok(Outcome::pass(text)),
    }
}

fn judge_sram_threshold(gpu: &GpuFacts) -> Judgement {
    let exceeded = *gpu
        .sram_threshold_exceeded
        .applicable("SRAM error threshold")?;
    if exceeded {
        return Ok(
            Outcome::fail("SRAM errors exceed the threshold of NVIDIA's field diagnostic")
                .expected("threshold not exceeded")
                .observed("threshold exceeded")
                .remedy("run NVIDIA's field diagnostic and return the GPU")
                .recommends(RecommendedAction::Rma),
        );
    }
    Ok(Outcome::pass("the SRAM error threshold is not exceeded"))
}

fn judge_correctable(gpu: &GpuFacts, policy: &Policy) -> Judgement {
    let what = "ECC errors since the driver was loaded";
    let must_tell = must_count(gpu, policy.ecc_volatile_correctable_maximum);
    let errors = gpu.ecc_volatile.required_if(must_tell, what)?;
    if policy.ecc_volatile_correctable_maximum.is_some() && correctable(errors).is_none() {
        return Err(no_counter("correctable ECC errors"));
    }
    let excess = match policy.ecc_volatile_correctable_maximum {
        Some(maximum) => above("", correctable(errors), maximum),
        None => too_many_correctable(errors),
    };
    Ok(match excess {
        Some((place, count, maximum)) => Outcome::warn(format!(
            "{count} correctable{place} ECC errors since the driver was loaded, more than {maximum}"
        ))
        .expected(format!("at most {maximum}"))
        .observed(count)
        .remedy("watch this GPU: many corrected errors come before uncorrectable ones")
        .recommends(RecommendedAction::Drain),
        None => Outcome::pass("few or no correctable ECC errors"),
    })
}

/// A place with a space before it, how many errors were counted there, and how many are too many.
type Excess = (&'static str, u64, u64);

/// The first place where more errors were corrected than azurehpc-health-checks accepts.
pub(super) fn too_many_correctable(errors: &EccErrors) -> Option<Excess> {
    let dram = above(" DRAM", errors.dram_correctable, DRAM_CORRECTABLE_MAXIMUM);
    let sram = || above(" SRAM", errors.sram_correctable, SRAM_CORRECTABLE_MAXIMUM);
    // GPUs that count only a total: no part of it can be larger.
    let total = || above("", errors.total_correctable, DRAM_CORRECTABLE_MAXIMUM);
    dram.or_else(sram).or_else(total)
}

fn above(place: &'static str, count: Option<u64>, maximum: u64) -> Option<Excess> {
    let count = count.filter(|it| *it > maximum)?;
    Some((place, count, maximum))
}

/// The greater of total and sum of the parts; `None` when the GPU keeps no such counter at all.
pub(super) fn uncorrectable(errors: &EccErrors) -> Option<u64> {
    greatest(
        errors.total_uncorrectable,
        errors.sram_uncorrectable,
        errors.dram_uncorrectable,
    )
}

pub(super) fn correctable(errors: &EccErrors) -> Option<u64> {
    greatest(
        errors.total_correctable,
        errors.sram_correctable,
        errors.dram_correctable,
    )
}

fn greatest(total: Option<u64>, sram: Option<u64>, dram: Option<u64>) -> Option<u64> {
    let parts = match (sram, dram) {
        (Some(sram), Some(dram)) => Some(sram.saturating_add(dram)),
        (part, None) | (None, part) => part,
    };
    total.max(parts)
}

fn no_counter(what: &str) -> Outcome {
    Outcome::error(format!("{what} could not be read: no counter has a value"))
}

fn in_words(errors: &EccErrors) -> String {
    let count = |it: Option<u64>| it.map_or("not counted".to_owned(), |it| it.to_string());
    format!(
        "SRAM {}, DRAM {}, total {}",
        count(errors.sram_uncorrectable),
        count(errors.dram_uncorrectable),
        count(errors.total_uncorrectable)
    )
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{EccErrors, EccMode, GpuFacts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_t4, judge_gpu, judge_healthy, judge_only_gpu, make_model_unknown,
    };

    fn with_volatile(profile: &str, change: impl FnOnce(&mut EccErrors)) -> Finding {
        judge_gpu(&CHECK, profile, |gpu| {
            let Reading::Value(errors) = &mut gpu.ecc_volatile else {
                panic!("the healthy GPU has counters")
            };
            change(errors);
        })
    }

    fn with_aggregate(profile: &str, change: impl FnOnce(&mut EccErrors)) -> Finding {
        judge_gpu(&CHECK, profile, |gpu| {
            let Reading::Value(errors) = &mut gpu.ecc_aggregate else {
                panic!("the healthy GPU has counters")
            };
            change(errors);
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
    fn counters_are_judged_by_kind_and_limit() {
        type Set = fn(&mut EccErrors, u64);
        type Judge = fn(&str, &mut dyn FnMut(&mut EccErrors)) -> Finding;
        let volatile: Judge = |profile, change| with_volatile(profile, change);
        let aggregate: Judge = |profile, change| with_aggregate(profile, change);
        let dram: Set = |it, count| it.dram_uncorrectable = Some(count);
        let dram_corrected: Set = |it, count| it.dram_correctable = Some(count);
        let of_sram: Set = |it, count| it.sram_correctable = Some(count);
        let both: Set = |it, count| {
            it.dram_correctable = Some(count);
            it.sram_correctable = Some(3);
        };
        let two_allowed = "policy: {ecc_volatile_uncorrectable_maximum: 2}";
        let one_in_a_life = "policy: {ecc_aggregate_uncorrectable_maximum: 1}";
        let five_corrected = "policy: {ecc_volatile_correctable_maximum: 5}";
        // The largest count that is right, and the verdict of one more.
        let cases: [(&str, Judge, &str, Set, u64, Verdict); 9] = [
            ("DRAM", volatile, "{}", dram, 0, Verdict::Fail),
            (
                "SRAM",
                volatile,
                "{}",
                |it, count| it.sram_uncorrectable = Some(count),
                0,
                Verdict::Fail,
            ),
            (
                "total",
                volatile,
                "{}",
                |it, count| it.total_uncorrectable = Some(count),
                0,
                Verdict::Fail,
            ),
            ("allowed", volatile, two_allowed, dram, 2, Verdict::Fail),
            ("lifetime", aggregate, "{}", dram, 0, Verdict::Warn),
            (
                "lifetime, allowed",
                aggregate,
                one_in_a_life,
                dram,
                1,
                Verdict::Fail,
            ),
            (
                "corrected DRAM",
                volatile,
                "{}",
                dram_corrected,
                20_000_000,
                Verdict::Warn,
            ),
            (
                "corrected SRAM",
                volatile,
                "{}",
                of_sram,
                10_000,
                Verdict::Warn,
            ),
            (
                "corrected, allowed",
                volatile,
                five_corrected,
                both,
                2,
                Verdict::Warn,
            ),
        ];
        for (name, judge, profile, set, most, verdict) in cases {
            let right = judge(profile, &mut |it| set(it, most));
            assert_eq!(right.verdict, Verdict::Pass, "{name}: {}", right.summary);
            let wrong = judge(profile, &mut |it| set(it, most + 1));
            assert_eq!(wrong.verdict, verdict, "{name}: {}", wrong.summary);
        }
        assert_eq!(
            with_volatile("{}", |it| it.total_uncorrectable = Some(1)).summary,
            "uncorrectable ECC errors since the driver was loaded: 1, at most 0 allowed"
        );
    }

    #[test]
    fn fails_when_the_sram_threshold_is_exceeded() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.sram_threshold_exceeded = Reading::Value(true);
        });
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn a_failure_outweighs_what_could_not_be_read() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.ecc_aggregate = Reading::NotRead("unknown error".to_owned());
            gpu.sram_threshold_exceeded = Reading::Value(true);
        });
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn errs_when_the_profile_limits_correctable_errors_that_nobody_counts() {
        let finding = with_volatile("policy: {ecc_volatile_correctable_maximum: 5}", |it| {
            it.sram_correctable = None;
            it.dram_correctable = None;
            it.total_correctable = None;
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn errs_when_a_counter_was_not_read() {
        let breaks: [fn(&mut GpuFacts); 5] = [
            |gpu| gpu.ecc_volatile = Reading::NotRead("unknown error".to_owned()),
            |gpu| gpu.ecc_aggregate = Reading::NotRead("unknown error".to_owned()),
            |gpu| gpu.sram_threshold_exceeded = Reading::NotRead("unknown error".to_owned()),
            |gpu| gpu.ecc_volatile = Reading::Value(EccErrors::default()),
            |gpu| gpu.ecc_aggregate = Reading::NotSupported,
        ];
        for break_it in breaks {
            assert_eq!(judge_gpu(&CHECK, "{}", break_it).verdict, Verdict::Error);
        }
    }

    #[test]
    fn skips_where_ecc_is_off_or_absent() {
        let off = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.ecc_mode = Reading::Value(EccMode {
                current: false,
                pending: false,
            });
            gpu.ecc_volatile = Reading::NotSupported;
            gpu.ecc_aggregate = Reading::NotSupported;
        });
        assert_eq!(off.verdict, Verdict::Skip);
        let mut gpu = healthy_t4();
        make_model_unknown(&mut gpu);
        gpu.ecc_mode = Reading::NotSupported;
        gpu.ecc_volatile = Reading::NotSupported;
        gpu.ecc_aggregate = Reading::NotSupported;
        gpu.sram_threshold_exceeded = Reading::NotSupported;
        let verdict = |profile: &str| judge_only_gpu(&CHECK, profile, gpu.clone()).verdict;
        assert_eq!(verdict("{}"), Verdict::Skip);
        for key in [
            "ecc_volatile_uncorrectable_maximum",
            "ecc_aggregate_uncorrectable_maximum",
            "ecc_volatile_correctable_maximum",
        ] {
            let limited = format!("policy: {{{key}: 0}}");
            assert_eq!(verdict(&limited), Verdict::Error, "{key}");
        }
    }
}
