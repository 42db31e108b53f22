//! Facts with thousands of GPUs are judged and reported in a time that grows with their number, not
//! with its square.

use rustix::time::{ClockId, clock_gettime};
use validator_core::facts::{Facts, Reading, RecoveryAction};
use validator_core::findings::{Run, Verdict};
use validator_core::profile::Profile;
use validator_core::report;
use validator_core::test_machine::burned_node_of;

/// So many GPUs that what is done once is little of the time; a report takes longer than a
/// judgement.
const FEW_JUDGED: usize = 500;
const FEW_REPORTED: usize = 100;
const TIMES_AS_MANY: usize = 4;
/// A linear time is 4, a square one 16.
const RATIO_MAXIMUM: f64 = 8.0;

/// Processor time of this thread, which the load of the machine changes little.
fn processor_time_s(work: impl FnOnce()) -> f64 {
    let now = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        std::time::Duration::new(
            u64::try_from(time.tv_sec).expect("a positive time"),
            u32::try_from(time.tv_nsec).expect("less than a second"),
        )
    };
    let before = now();
    work();
    now().saturating_sub(before).as_secs_f64()
}

fn judged(facts: &Facts) -> Run {
    Run::judged(facts.clone(), &Profile::default(), "built-in", facts.level)
}

/// The least of three: what comes in between only adds.
fn time_s(facts: &Facts, work: fn(&Run)) -> f64 {
    let once = |_| processor_time_s(|| work(&judged(facts)));
    (0..3).map(once).fold(f64::INFINITY, f64::min)
}

fn grows_with_the_number(name: &str, gpus: usize, change: fn(&mut Facts), work: fn(&Run)) {
    let [few, many] = [gpus, gpus * TIMES_AS_MANY].map(|gpus| {
        let mut facts = burned_node_of(gpus);
        change(&mut facts);
        time_s(&facts, work)
    });
    let ratio = many / few;
    println!("{name}: {few:.3} s, {TIMES_AS_MANY} times as many {many:.3} s, ratio {ratio:.1}");
    assert!(
        ratio <= RATIO_MAXIMUM,
        "{name}: {gpus} GPUs took {few:.3} s, {TIMES_AS_MANY} times as many {many:.3} s, which is {ratio:.1} times"
    );
}

#[test]
fn the_machine_is_healthy() {
    let run = judged(&burned_node_of(16));
    let of_gpus = run.findings.iter().filter(|it| it.check == "gpu_memory");
    assert!(of_gpus.clone().count() == 16 && of_gpus.clone().all(|it| it.verdict == Verdict::Pass));
    let burned = run.findings.iter().filter(|it| it.check == "gemm_numerics");
    assert!(burned.clone().count() == 16 && burned.clone().all(|it| it.verdict == Verdict::Pass));
}

#[test]
fn judging_healthy_gpus() {
    grows_with_the_number("healthy", FEW_JUDGED, |_| {}, |_| {});
}

#[test]
fn judging_gpus_with_failures_of_their_own() {
    let break_all = |facts: &mut Facts| {
        for (index, gpu) in facts.gpus.iter_mut().enumerate() {
            gpu.recovery_action = Reading::Value(RecoveryAction::GpuReset);
            gpu.persistence_mode = Reading::Value(false);
            if let Reading::Value(memory) = &mut gpu.memory {
                memory.total_bytes -= (index as u64) << 20;
            }
            if let Reading::Value(fabric) = &mut gpu.fabric {
                fabric.clique_id = u32::try_from(index).ok();
            }
        }
        for (index, run) in facts.load.burn.values_mut().enumerate() {
            if let Reading::Value(run) = run {
                for products in &mut run.precisions {
                    products.reference.checksum = format!("{index:016x}");
                    products.reference.second_engine_mismatches = Some(index as u64);
                }
            }
        }
    };
    grows_with_the_number("failing", FEW_JUDGED, break_all, |_| {});
}

#[test]
fn judging_lost_gpus() {
    let lose = |facts: &mut Facts| {
        for gpu in facts.gpus.iter_mut().step_by(2) {
            gpu.lost = Some("nvmlDeviceGetTemperature".to_owned());
        }
        let unlisted = facts.gpus.len() / 4;
        facts.gpus.truncate(facts.gpus.len() - unlisted);
    };
    grows_with_the_number("lost", FEW_JUDGED, lose, |_| {});
}

#[test]
fn reporting() {
    let report = |run: &Run| {
        let _ = report::json(run);
        let _ = report::junit(run);
        let _ = report::human(run, report::HumanStyle::default());
    };
    grows_with_the_number("reported", FEW_REPORTED, |_| {}, report);
}
