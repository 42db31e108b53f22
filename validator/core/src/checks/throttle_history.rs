//! No prolonged clock throttling by the hardware.
//!
//! ## Why
//! A GPU that overheats or whose power supply brakes it under load appears healthy at idle. The
//! driver keeps the time that was lost to each cause.
//!
//! ## How it is judged
//! `warn` when, since the driver was loaded, hardware thermal slowdown, the power brake or thermal
//! limits held the clocks down for more than one per cent of the time since boot and for more than
//! a second, or for more than an hour, or for more than a second between the two readings of this
//! run, the time of the burn aside, which `burn_throttling` judges. Time at the power limit is not judged: a GPU under full load
//! is meant to be there.
//!
//! ## What to do
//! Thermal: check cooling, fans and neighbours. Power brake: check power supplies and their cables.
//! See the load checks for how far the GPU falls back.
//!
//! ## Source
//! `nvmlDeviceGetViolationStatus`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>. Events are reported by
//! duration because a single count is noise: DCGM's diagnostic once failed GPUs for a thermal
//! violation of 0.0 s (NVIDIA/DCGM issue 242).

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts, ViolationTimes};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "throttle_history",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

const REMEDY: &str =
    "check cooling, power supplies and their cables; on a cloud machine, replace the instance";
/// This project's own choice: what costs less than one per cent of the time is lost in the spread
/// between GPUs.
const SHARE_MAXIMUM: f64 = 0.01;
/// Shorter is noise (NVIDIA/DCGM issue 242).
const SECONDS_MAXIMUM: f64 = 1.0;

/// This project's own choice: an hour is more than a passing cause, and a long uptime does not
/// dilute it.
const LONG_S: f64 = 3_600.0;

fn judge(gpu: &GpuFacts, facts: &Facts, _: &Profile) -> Judgement {
    let times = gpu.violations.applicable("clock violation times")?;
    let uptime_s = *facts.host.uptime_s.required("uptime")?;
    let since_boot = causes(times)
        .into_iter()
        .map(|(cause, time_ns)| Ok(judge_cause(cause, time_ns, uptime_s)));
    let in_this_run = judge_run(gpu, times, facts);
    worst_of(since_boot.chain(in_this_run.into_iter().map(Ok)))
}

/// The objection to what the counters gained from the first reading to the second, without what
/// they gained during the burn.
fn judge_run(gpu: &GpuFacts, before: &ViolationTimes, facts: &Facts) -> Option<Outcome> {
    let gpus = facts.after_load.as_ref()?.gpus.value()?;
    let after = gpus
        .iter()
        .find(|it| it.uuid.value().is_some() && it.uuid == gpu.uuid)?
        .violations
        .value()?;
    let burn = facts.load.sensors.get(gpu.uuid.value()?);
    let of_the_burn = burn.and_then(|log| {
        let before = log.before.violations.value()?;
        Some(gained(before, log.after.violations.value()?))
    });
    let worst = gained(before, after)
        .into_iter()
        .enumerate()
        .filter_map(|(index, (cause, seconds))| {
            let burned = of_the_burn.and_then(|it| it[index].1);
            Some((cause, seconds? - burned.unwrap_or(0.0)))
        })
        .filter(|(_, seconds)| *seconds > SECONDS_MAXIMUM)
        .max_by(|one, other| one.1.total_cmp(&other.1));
    let (cause, seconds) = worst?;
    Some(
        Outcome::warn(format!(
            "{cause} held the clocks down for {seconds:.1} s during this run, apart from the burn"
        ))
        .expected(format!("at most {SECONDS_MAXIMUM:.0} s"))
        .observed(format!("{seconds:.1} s"))
        .remedy(REMEDY),
    )
}

/// Seconds by which heat and the power supply held the clocks down from one reading to a later one;
/// `None` where a reading has no time. A counter that began again counts from zero.
fn gained(before: &ViolationTimes, after: &ViolationTimes) -> [(&'static str, Option<f64>); 3] {
    let (before, after) = (causes(before), causes(after));
    std::array::from_fn(|index| {
        let (cause, time_ns) = after[index];
        let gained_ns = time_ns.zip(before[index].1).map(|(after, before)| {
            let began_again = after < before;
            if began_again { after } else { after - before }
        });
        (cause, gained_ns.map(seconds_of))
    })
}

fn causes(times: &ViolationTimes) -> [(&'static str, Option<u64>); 3] {
    [
        ("hardware thermal slowdown", times.hw_thermal_ns),
        ("thermal limits", times.thermal_ns),
        ("power brake", times.hw_power_brake_ns),
    ]
}

#[expect(clippy::cast_precision_loss, reason = "a share needs no last digit")]
fn seconds_of(time_ns: u64) -> f64 {
    time_ns as f64 / 1e9
}

fn judge_cause(cause: &str, time_ns: Option<u64>, uptime_s: f64) -> Outcome {
    let Some(time_ns) = time_ns else {
        return Outcome::skip(format!("the driver keeps no time for {cause}"));
    };
    let seconds = seconds_of(time_ns);
    let text =
        format!("{cause} held the clocks down for {seconds:.1} s since the driver was loaded");
    if seconds > LONG_S {
        return Outcome::warn(format!("{text}, however long the machine is up"))
            .expected(format!("at most {LONG_S:.0} s since the driver was loaded"))
            .observed(format!("{seconds:.1} s"))
            .remedy(REMEDY);
    }
    if seconds > SECONDS_MAXIMUM && seconds > SHARE_MAXIMUM * uptime_s {
        return Outcome::warn(format!("{text}, the machine is up for {uptime_s:.0} s"))
            .expected("less than one per cent of the time since boot")
            .observed(format!("{seconds:.1} s of {uptime_s:.0} s"))
            .remedy(REMEDY);
    }
    Outcome::pass(text)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{NodeState, Reading, ViolationTimes};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{burned_node_with_sensors, healthy_node, judge_check};

    const SECOND_NS: u64 = 1_000_000_000;

    fn with(uptime: Reading<f64>, times: Reading<ViolationTimes>) -> Finding {
        let mut facts = healthy_node();
        facts.host.uptime_s = uptime;
        facts.gpus[0].violations = times;
        judge_check(&CHECK, &facts, "{}").swap_remove(0)
    }

    fn thermal(uptime_s: f64, time_ns: u64) -> Verdict {
        let times = ViolationTimes {
            hw_thermal_ns: Some(time_ns),
            ..ViolationTimes::default()
        };
        with(Reading::Value(uptime_s), Reading::Value(times)).verdict
    }

    #[test]
    fn passes_without_violations() {
        assert_eq!(thermal(600.0, 0), Verdict::Pass);
    }

    #[test]
    fn warns_above_one_per_cent_of_the_time_and_one_second() {
        assert_eq!(thermal(600.0, 6 * SECOND_NS), Verdict::Pass);
        assert_eq!(thermal(600.0, 6 * SECOND_NS + 1), Verdict::Warn);
        // Eight hours in forty days.
        assert_eq!(thermal(3_456_000.0, 28_800 * SECOND_NS), Verdict::Warn);
        assert_eq!(thermal(10.0, SECOND_NS), Verdict::Pass);
        assert_eq!(thermal(10.0, SECOND_NS + 1), Verdict::Warn);
    }

    #[test]
    fn warns_of_each_cause_but_not_of_the_power_limit() {
        let long = Some(3600 * SECOND_NS);
        let causes = [
            ViolationTimes {
                thermal_ns: long,
                ..ViolationTimes::default()
            },
            ViolationTimes {
                hw_power_brake_ns: long,
                ..ViolationTimes::default()
            },
        ];
        for times in causes {
            let finding = with(Reading::Value(7200.0), Reading::Value(times));
            assert_eq!(finding.verdict, Verdict::Warn);
        }
        let times = ViolationTimes {
            power_ns: long,
            hw_thermal_ns: Some(0),
            ..ViolationTimes::default()
        };
        let finding = with(Reading::Value(7200.0), Reading::Value(times));
        assert_eq!(finding.verdict, Verdict::Pass);
    }

    /// The counter of hardware thermal slowdown at the first reading, before and after the burn, and
    /// at the second reading, in milliseconds.
    fn in_a_run(times: [u64; 4]) -> Finding {
        let times = times.map(|it| {
            Reading::Value(ViolationTimes {
                hw_thermal_ns: Some(it * 1_000_000),
                ..ViolationTimes::default()
            })
        });
        let [first, before, after, second] = times;
        let mut facts = burned_node_with_sensors(|log| {
            log.before.violations = before;
            log.after.violations = after;
        });
        facts.gpus[2].violations = first;
        let mut gpus = facts.gpus.clone();
        gpus[2].violations = second;
        facts.after_load = Some(Box::new(NodeState {
            gpus: Reading::Value(gpus),
            ..NodeState::default()
        }));
        judge_check(&CHECK, &facts, "{}").swap_remove(2)
    }

    #[test]
    fn warns_of_what_the_counters_gained_during_the_run_apart_from_the_burn() {
        let finding = in_a_run([0, 0, 0, 1_001]);
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        for times in [
            [0, 0, 0, 1_000],
            [5_000, 5_000, 5_000, 5_500],
            // All of it during the burn, which burn_throttling judges.
            [0, 0, 9_000, 9_900],
            // The driver was loaded again, and its counters began at zero.
            [60_000, 60_000, 60_000, 900],
        ] {
            let finding = in_a_run(times);
            assert_eq!(
                finding.verdict,
                Verdict::Pass,
                "{times:?}: {}",
                finding.summary
            );
        }
        assert_eq!(in_a_run([0, 400, 400, 1_500]).verdict, Verdict::Warn);
    }

    #[test]
    fn errs_when_times_or_uptime_were_not_read() {
        let not_read = || "unknown error".to_owned();
        let times = with(Reading::Value(600.0), Reading::NotRead(not_read()));
        assert_eq!(times.verdict, Verdict::Error);
        let uptime = with(
            Reading::NotRead(not_read()),
            Reading::Value(ViolationTimes::default()),
        );
        assert_eq!(uptime.verdict, Verdict::Error);
    }

    #[test]
    fn skips_where_no_time_is_kept() {
        let finding = with(
            Reading::Value(600.0),
            Reading::Value(ViolationTimes::default()),
        );
        assert_eq!(finding.verdict, Verdict::Skip);
        let finding = with(Reading::Value(600.0), Reading::NotSupported);
        assert_eq!(finding.verdict, Verdict::Skip);
    }
}
