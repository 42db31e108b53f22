//! The GPU has not degraded since earlier runs.
//!
//! ## Why
//! A GPU that fails slowly stays within every limit of a single run: it loses throughput, remaps
//! rows and corrects more errors each week, until a job fails on it.
//!
//! ## How it is judged
//! Against the figures that earlier runs of this node kept of the same GPU (`--history`). `warn`
//! when:
//! - the throughput is more than 4 % below the median of at least three earlier runs with the same
//!   precision, kernels, driver and power limit;
//! - rows were remapped since the last run;
//! - more than 10,000 correctable ECC errors were counted since the last run;
//! - heat or power supply held the clocks down since the last run for more than a second and for
//!   more than one per cent of that time.
//!
//! Skipped where no history is kept and where it has no run of this GPU. What one run alone judges
//! is judged by `gemm_throughput`, `row_remapping`, `ecc_errors` and `throttle_history`.
//!
//! ## What to do
//! Compare the runs (`gpu-validator diff`), check cooling and power supply, and plan the
//! replacement of a GPU that goes on to degrade. After a change that explains the difference,
//! such as another position in the rack, remove the files of the history.
//!
//! ## Source
//! Eight healthy H200s lie within 4 % (BENCHMARKS.md). NVIDIA GPU Memory Error Management,
//! <https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/>: a row is remapped for an error of the
//! memory. The limit of correctable errors is azurehpc-health-checks' for SRAM, those of clocks are
//! the limits of `throttle_history`.

use crate::cause::CauseKind;
use crate::check::{Check, Judge};
use crate::facts::{EarlierRun, Facts, GpuFacts, GpuFigures};
use crate::findings::{Judgement, Outcome};
use crate::history::{THROUGHPUT_NOISE, figures_of_gpu};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "trend",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/",
};

/// This project's own choice: the median of three is not moved by one run.
const RUNS_MINIMUM: usize = 3;
/// azurehpc-health-checks' threshold of correctable SRAM errors.
const CORRECTABLE_ERRORS_MAXIMUM: u64 = 10_000;
/// As in `throttle_history`: shorter is noise (NVIDIA/DCGM issue 242).
const SLOWDOWN_MAXIMUM_S: f64 = 1.0;
/// As in `throttle_history`.
const SLOWDOWN_SHARE_MAXIMUM: f64 = 0.01;

const REMEDY: &str = "compare the runs (gpu-validator diff), check cooling and power supply, and plan the replacement of a GPU that goes on to degrade";

fn judge(gpu: &GpuFacts, facts: &Facts, _: &Profile) -> Judgement {
    let Some(history) = &facts.history else {
        return Err(Outcome::skip("no history of earlier runs is kept"));
    };
    let history = history.required("the history of earlier runs")?;
    let uuid = gpu.uuid.required("the UUID")?;
    let earlier: Vec<Earlier> = history
        .iter()
        .filter(|run| run.simulated == facts.simulated.is_some())
        .filter_map(|run| Some((run, run.gpus.get(uuid)?)))
        .collect();
    let Some(last) = earlier.last() else {
        return Err(Outcome::skip("no earlier run of this GPU is kept"));
    };
    let now = figures_of_gpu(gpu, facts);
    let driver = facts.nvml.driver_version.value();
    let comparable: Vec<&GpuFigures> = earlier
        .iter()
        .filter(|(run, _)| run.driver_version.as_ref() == driver)
        .map(|(_, figures)| *figures)
        .filter(|it| it.power_limit_mw == now.power_limit_mw)
        .collect();
    let rates = now.tflops.iter();
    let parts = rates
        .filter_map(|(name, rate)| judge_throughput(name, *rate, &comparable))
        .chain(judge_rows(&now, last))
        .chain(judge_correctable_errors(&now, last))
        .chain(judge_slowdown(&now, last, facts));
    let parts: Vec<Judgement> = parts.map(Ok).collect();
    if parts.is_empty() {
        return Err(Outcome::skip("no figure of this GPU is in both runs"));
    }
    worst_of(parts)
}

type Earlier<'f> = (&'f EarlierRun, &'f GpuFigures);

fn judge_throughput(name: &str, rate: f64, earlier: &[&GpuFigures]) -> Option<Outcome> {
    let mut rates: Vec<f64> = earlier
        .iter()
        .filter_map(|it| it.tflops.get(name).copied())
        .collect();
    if rates.len() < RUNS_MINIMUM {
        return None;
    }
    rates.sort_by(f64::total_cmp);
    let median = rates[rates.len() / 2];
    let change = (rate / median - 1.0) * 100.0;
    let text = format!(
        "{name}: {rate:.1} TFLOP/s, {change:+.1} % against the median of {} earlier runs",
        rates.len()
    );
    Some(if rate < median * (1.0 - THROUGHPUT_NOISE) {
        Outcome::warn(text)
            .expected(format!(
                "at least {:.1} TFLOP/s",
                median * (1.0 - THROUGHPUT_NOISE)
            ))
            .observed(format!("{rate:.1} TFLOP/s"))
            .remedy(REMEDY)
    } else {
        Outcome::pass(text)
    })
}

fn judge_rows(now: &GpuFigures, (run, last): &Earlier) -> Option<Outcome> {
    let (before, now) = (last.remapped_rows?, now.remapped_rows?);
    Some(if now > before {
        Outcome::warn(format!(
            "{} rows were remapped since {}",
            now - before,
            run.collected_at
        ))
        .expected(format!("{before} remapped rows"))
        .observed(format!("{now} remapped rows"))
        .remedy(REMEDY)
        .caused_by(CauseKind::GpuMemory)
    } else {
        Outcome::pass(format!("no row was remapped since {}", run.collected_at))
    })
}

fn judge_correctable_errors(now: &GpuFigures, (run, last): &Earlier) -> Option<Outcome> {
    let grown = now
        .correctable_errors?
        .saturating_sub(last.correctable_errors?);
    let text = format!("{grown} correctable ECC errors since {}", run.collected_at);
    Some(if grown > CORRECTABLE_ERRORS_MAXIMUM {
        Outcome::warn(text)
            .expected(format!("at most {CORRECTABLE_ERRORS_MAXIMUM}"))
            .observed(grown)
            .remedy(REMEDY)
            .caused_by(CauseKind::GpuMemory)
    } else {
        Outcome::pass(text)
    })
}

/// The counters begin at zero when the driver is loaded, as the uptime does at boot.
fn judge_slowdown(now: &GpuFigures, (run, last): &Earlier, facts: &Facts) -> Option<Outcome> {
    let (before, now) = (last.slowdown_ns?, now.slowdown_ns?);
    let uptime_s = *facts.host.uptime_s.value()?;
    let window_s = Some(uptime_s - run.uptime_s?).filter(|it| *it > 0.0);
    let window_s = window_s.unwrap_or(uptime_s);
    #[expect(clippy::cast_precision_loss, reason = "a share needs no last digit")]
    let slowdown_s = now.checked_sub(before).unwrap_or(now) as f64 / 1e9;
    let text = format!(
        "heat or power supply held the clocks down for {slowdown_s:.1} s of {window_s:.0} s since {}",
        run.collected_at
    );
    let is_long = slowdown_s > SLOWDOWN_MAXIMUM_S && slowdown_s > SLOWDOWN_SHARE_MAXIMUM * window_s;
    Some(if is_long {
        Outcome::warn(text)
            .expected("less than one per cent of the time since the last run")
            .observed(format!("{slowdown_s:.1} s of {window_s:.0} s"))
            .remedy(REMEDY)
            .caused_by(CauseKind::PowerAndThermal)
    } else {
        Outcome::pass(text)
    })
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Facts, GpuFacts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::history::figures_of;
    use crate::test_machine::{burned_node, judge_check};

    /// A node with three earlier runs that were as it is, a day apart.
    fn node() -> Facts {
        let mut facts = burned_node();
        facts.host.uptime_s = Reading::Value(4.0 * 86_400.0);
        let runs = (1..4_u8).map(|day| {
            let mut run = figures_of(&facts);
            run.collected_at = format!("2026-11-0{day}T03:04:05Z");
            run.uptime_s = Some(f64::from(day) * 86_400.0);
            run
        });
        facts.history = Some(Reading::Value(runs.collect()));
        facts
    }

    fn third(facts: &Facts) -> Finding {
        judge_check(&CHECK, facts, "{}").swap_remove(2)
    }

    fn with(change: impl FnOnce(&mut GpuFacts)) -> Finding {
        let mut facts = node();
        change(&mut facts.gpus[2]);
        third(&facts)
    }

    fn with_rate(factor: f64, change: impl FnOnce(&mut Facts)) -> Finding {
        let mut facts = node();
        let uuid = facts.gpus[2].uuid.value().cloned().unwrap_or_default();
        let Some(Reading::Value(run)) = facts.load.burn.get_mut(&uuid) else {
            panic!("the node was burned");
        };
        run.precisions.iter_mut().for_each(|it| it.tflops *= factor);
        change(&mut facts);
        third(&facts)
    }

    #[test]
    fn a_gpu_as_before_passes_and_one_without_history_is_skipped() {
        let mut facts = node();
        let finding = third(&facts);
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        for says in [
            "+0.0 % against the median of 3 earlier runs",
            "no row was remapped since 2026-11-03T03:04:05Z",
            "0 correctable ECC errors since",
            "for 0.0 s of 86400 s since",
        ] {
            assert!(finding.summary.contains(says), "{}", finding.summary);
        }
        facts.gpus[2].uuid = Reading::Value("GPU-new".to_owned());
        assert_eq!(third(&facts).verdict, Verdict::Skip);
        facts.history = None;
        assert_eq!(third(&facts).verdict, Verdict::Skip);
        facts.history = Some(Reading::NotRead("other users can write to it".to_owned()));
        assert_eq!(third(&facts).verdict, Verdict::Error);
    }

    #[test]
    fn throughput_below_the_noise_warns() {
        let finding = with_rate(0.95, |_| {});
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert!(
            finding.summary.contains("-5.0 % against"),
            "{}",
            finding.summary
        );
        assert_eq!(with_rate(0.97, |_| {}).verdict, Verdict::Pass);
        assert_eq!(with_rate(1.2, |_| {}).verdict, Verdict::Pass);
    }

    #[test]
    fn only_runs_of_the_same_kind_are_compared() {
        let not_compared = |change: fn(&mut Facts)| with_rate(0.5, change).verdict;
        let runs = |facts: &mut Facts, change: fn(&mut crate::facts::EarlierRun)| {
            if let Some(Reading::Value(runs)) = &mut facts.history {
                change(&mut runs[1]);
            }
        };
        assert_eq!(not_compared(|_| {}), Verdict::Warn);
        for verdict in [
            // Two of three runs are no median.
            with_rate(0.5, |facts| runs(facts, |run| run.driver_version = None)).verdict,
            with_rate(0.5, |facts| runs(facts, |run| run.simulated = true)).verdict,
            not_compared(|facts| {
                if let Reading::Value(power) = &mut facts.gpus[2].power {
                    power.limit_mw /= 2;
                }
            }),
        ] {
            assert_eq!(verdict, Verdict::Pass);
        }
    }

    #[test]
    fn rows_that_were_remapped_since_the_last_run_warn() {
        let finding = with(|gpu| {
            if let Reading::Value(rows) = &mut gpu.row_remapping {
                rows.correctable_rows += 2;
            }
        });
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        let says = "2 rows were remapped since 2026-11-03T03:04:05Z";
        assert_eq!(finding.summary, says);
    }

    #[test]
    fn growth_of_correctable_errors_warns_above_the_limit() {
        let grown = |by: u64| {
            with(|gpu| {
                if let Reading::Value(errors) = &mut gpu.ecc_aggregate {
                    errors.total_correctable = Some(by);
                }
            })
        };
        assert_eq!(grown(10_000).verdict, Verdict::Pass);
        let finding = grown(10_001);
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
    }

    #[test]
    fn slowdown_is_judged_over_the_time_since_the_last_run() {
        let held = |seconds: u64| {
            with(|gpu| {
                if let Reading::Value(times) = &mut gpu.violations {
                    times.hw_thermal_ns = Some(seconds * 1_000_000_000);
                }
            })
        };
        // One per cent of a day.
        assert_eq!(held(860).verdict, Verdict::Pass);
        let finding = held(870);
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert!(
            finding.summary.contains("870.0 s of 86400 s"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn counters_that_began_anew_are_judged_from_zero() {
        let mut facts = node();
        facts.host.uptime_s = Reading::Value(1_000.0);
        if let Some(Reading::Value(runs)) = &mut facts.history {
            for figures in runs.iter_mut().flat_map(|it| it.gpus.values_mut()) {
                figures.slowdown_ns = Some(u64::MAX);
            }
        }
        if let Reading::Value(times) = &mut facts.gpus[2].violations {
            times.hw_thermal_ns = Some(20_000_000_000);
        }
        let finding = third(&facts);
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert!(
            finding.summary.contains("20.0 s of 1000 s"),
            "{}",
            finding.summary
        );
    }
}
