//! Statistics of the allocation test: shares, fairness, scaling, and what is left. Pure.

use std::collections::BTreeSet;

use crate::facts::{
    AllocationDetail, AllocationFacts, AllocationPhase, AllocationSnapshot, AllocationWorker,
    Facts, GpuUse, Reading, WorkerEnd, WorkloadRun,
};

/// Memory by which a GPU's use may differ after the test. The driver keeps some MiB of its own
/// after the first contexts; a context that is left takes 0.3 to 0.6 GiB.
// Source: contexts: BENCHMARKS.md; the limit is this project's choice, below any context.
pub const MEMORY_TOLERANCE_BYTES: u64 = 64 << 20;

/// Jain's fairness index of the shares of `n` workers: from 1/n, where one has everything, to 1,
/// where all have the same. `None` where all values are zero.
// Source: R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness and Discrimination",
// DEC-TR-301, 1984.
pub fn jain_index(shares: &[f64]) -> Option<f64> {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|it| it * it).sum();
    #[expect(clippy::cast_precision_loss, reason = "a number of workers")]
    let count = shares.len() as f64;
    let index = sum * sum / (count * squares);
    index.is_finite().then_some(index)
}

/// `steady`, `one GPU`, …
pub fn phase_name(phase: AllocationPhase) -> &'static str {
    match phase {
        AllocationPhase::Steady => "steady",
        AllocationPhase::ScalingOne => "one GPU",
        AllocationPhase::ScalingAll => "all GPUs",
        AllocationPhase::Oversubscription => "oversubscription",
        AllocationPhase::Killing => "killing",
    }
}

/// A worker with its own report.
#[derive(Clone, Debug)]
pub struct TestedWorker<'f> {
    pub worker: &'f AllocationWorker,
    pub run: &'f WorkloadRun,
    /// `None` where it reported nothing.
    pub detail: Option<AllocationDetail>,
}

impl TestedWorker<'_> {
    /// Verified operations a second, over its own time.
    pub fn operations_per_s(&self) -> f64 {
        let operations = self.detail.as_ref().map_or(0, |it| it.operations);
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = operations as f64 / self.run.measured.seconds;
        if rate.is_finite() { rate } else { 0.0 }
    }

    /// Every allocation that it requested was refused, and nothing else failed.
    pub fn was_only_refused(&self) -> bool {
        let Some(detail) = &self.detail else {
            return false;
        };
        let failures = &detail.failures;
        let only = failures.cuda_error + failures.wrong_result + failures.wrong_gpu == 0;
        only && failures.out_of_memory > 0
            && detail.operations == 0
            && self.run.end == Reading::Value(WorkerEnd::Finished)
    }

    /// Why it did not succeed, as a lowercase fragment; `None` for one that did. A `refusable`
    /// worker may be refused memory.
    pub fn failure(&self, refusable: bool) -> Option<String> {
        let detail = self.detail.clone().unwrap_or_default();
        let failures = &detail.failures;
        if failures.wrong_gpu > 0 {
            return Some(format!(
                "CUDA showed it {}",
                listed(&detail.visible_devices)
            ));
        }
        let count = |count: u64, text: &str| (count > 0).then(|| format!("{count} {text}"));
        let wrong = count(failures.wrong_result, "operations with wrong results");
        if let Some(wrong) = wrong {
            return Some(wrong);
        }
        match &self.run.end {
            Reading::NotRead(reason) => return Some(format!("it did not run: {reason}")),
            Reading::NotSupported => return Some("it did not run".to_owned()),
            Reading::Value(WorkerEnd::Finished) => {}
            Reading::Value(end) => return Some(end_in_words(end)),
        }
        let refused = count(failures.out_of_memory, "allocations refused: out of memory");
        if let Some(refused) = refused.filter(|_| !refusable) {
            return Some(refused);
        }
        count(failures.cuda_error, "CUDA errors").or_else(|| {
            let has_done_nothing = detail.operations == 0 && failures.out_of_memory == 0;
            has_done_nothing.then(|| "no operation was verified".to_owned())
        })
    }
}

fn listed(uuids: &[String]) -> String {
    if uuids.is_empty() {
        "no GPU".to_owned()
    } else {
        uuids.join(", ")
    }
}

/// The end of a process, as a lowercase fragment.
pub fn end_in_words(end: &WorkerEnd) -> String {
    match end {
        WorkerEnd::Finished => "finished".to_owned(),
        WorkerEnd::CudaError { call, code, name } => format!("{call} returned {name} ({code})"),
        WorkerEnd::Busy(reason) => format!("the GPU is in use: {reason}"),
        WorkerEnd::Exited { status, stderr } => format!(
            "exited with status {status}: {}",
            stderr.lines().last().unwrap_or("no output")
        ),
        WorkerEnd::Killed { signal } => format!("ended by signal {signal}"),
        WorkerEnd::TimedOut { step, seconds } => {
            format!("hung in {step}: no answer within {seconds:.1} s")
        }
    }
}

/// The workers of a phase with their reports.
pub fn workers_of(facts: &Facts, phase: AllocationPhase) -> Vec<TestedWorker<'_>> {
    let Some(allocation) = &facts.load.allocation else {
        return Vec::new();
    };
    let workers = allocation.workers.iter().filter(|it| it.phase == phase);
    workers
        .filter_map(|worker| {
            let run = facts.load.runs.iter().find(|it| it.id == worker.id)?;
            Some(TestedWorker {
                worker,
                run,
                detail: run.allocation(),
            })
        })
        .collect()
}

/// The processes of the test: workers, the process that reads NVML, and the parent.
const PROCESSES_BESIDE_WORKERS: u32 = 2;

/// Whether the host has a processor for each process of a phase. Where it has not, rates show the
/// host's scheduler.
pub fn has_processors_for(allocation: &AllocationFacts, workers: usize) -> bool {
    let needed = u32::try_from(workers).unwrap_or(u32::MAX);
    allocation.plan.processors >= needed.saturating_add(PROCESSES_BESIDE_WORKERS)
}

/// Throughput of one GPU and of several.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    pub gpus: usize,
    /// Operations a second of one worker on one GPU.
    pub one: f64,
    /// Of one worker on each GPU, together.
    pub all: f64,
}

impl Scaling {
    /// How many times one GPU all of them are.
    pub fn factor(&self) -> f64 {
        self.all / self.one
    }
}

/// `None` where the phases did not run.
pub fn scaling(facts: &Facts) -> Option<Scaling> {
    let rate = |phase| -> (usize, f64) {
        let workers = workers_of(facts, phase);
        let rates = workers.iter().map(TestedWorker::operations_per_s);
        (workers.len(), rates.sum())
    };
    let (_, one) = rate(AllocationPhase::ScalingOne);
    let (gpus, all) = rate(AllocationPhase::ScalingAll);
    (gpus > 1 && one > 0.0).then_some(Scaling { gpus, one, all })
}

/// The factor that GPUs must reach together: 1.8, 3.5 and 6 for 2, 4 and 8 GPUs, and straight lines
/// between them.
// Source: this project's requirement.
pub fn expected_factor(gpus: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a number of GPUs")]
    let count = gpus as f64;
    match gpus {
        0..=2 => count * 0.9,
        3..=4 => 1.8 + (count - 2.0) * 0.85,
        5..=8 => 3.5 + (count - 4.0) * 0.625,
        _ => count * 0.75,
    }
}

/// Something that the test left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// Memory of a GPU beyond what was in use before.
    Memory { gpu: String, bytes: u64 },
    /// Workers that NVML still lists.
    Listed { gpu: String, pids: BTreeSet<u32> },
    /// Workers that still run.
    Processes(BTreeSet<u32>),
    /// Workers that were not reaped.
    Zombies(BTreeSet<u32>),
    /// Open descriptors of the parent beyond those before.
    Descriptors(u64),
    /// Shared memory segments of this user that were not there before.
    SharedMemory(BTreeSet<String>),
    /// References to `nvidia_uvm` beyond those before.
    UvmReferences(u64),
}

impl Leftover {
    /// UUID of the GPU; `None` for what the host has.
    pub fn gpu(&self) -> Option<&str> {
        match self {
            Self::Memory { gpu, .. } | Self::Listed { gpu, .. } => Some(gpu),
            Self::Processes(_)
            | Self::Zombies(_)
            | Self::Descriptors(_)
            | Self::SharedMemory(_)
            | Self::UvmReferences(_) => None,
        }
    }

    /// Whether processes that are not the test's may have made it: segments of the same user and
    /// references of the whole node.
    pub fn may_be_of_others(&self) -> bool {
        matches!(self, Self::SharedMemory(_) | Self::UvmReferences(_))
    }
}

impl std::fmt::Display for Leftover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = |pids: &BTreeSet<u32>| {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            pids.join(", ")
        };
        match self {
            Self::Memory { bytes, .. } => write!(f, "{} MiB of memory", bytes >> 20),
            Self::Listed { pids, .. } => write!(f, "processes {} on the GPU", text(pids)),
            Self::Processes(pids) => write!(f, "processes {}", text(pids)),
            Self::Zombies(pids) => write!(f, "zombies {}", text(pids)),
            Self::Descriptors(count) => write!(f, "{count} open file descriptors"),
            Self::SharedMemory(names) => {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                write!(f, "shared memory {}", names.join(", "))
            }
            Self::UvmReferences(count) => write!(f, "{count} references to nvidia_uvm"),
        }
    }
}

/// What is left of the workers with these process IDs.
pub fn leftovers(
    before: &AllocationSnapshot,
    after: &AllocationSnapshot,
    workers: &BTreeSet<u32>,
) -> Vec<Leftover> {
    let mut left = Vec::new();
    for (uuid, now) in &after.gpus {
        let then = before.gpus.get(uuid).cloned().unwrap_or_default();
        let listed = now.pids.iter().flatten().copied();
        let pids: BTreeSet<u32> = listed.filter(|it| workers.contains(it)).collect();
        if !pids.is_empty() {
            let gpu = uuid.clone();
            left.push(Leftover::Listed { gpu, pids });
        }
        let used = |it: &GpuUse| it.memory_used_bytes;
        if let (Some(then), Some(now)) = (used(&then), used(now))
            && now.saturating_sub(then) > MEMORY_TOLERANCE_BYTES
        {
            left.push(Leftover::Memory {
                gpu: uuid.clone(),
                bytes: now - then,
            });
        }
    }
    let running: BTreeSet<u32> = after
        .processes
        .difference(&after.zombies)
        .copied()
        .collect();
    if !running.is_empty() {
        left.push(Leftover::Processes(running));
    }
    if !after.zombies.is_empty() {
        left.push(Leftover::Zombies(after.zombies.clone()));
    }
    if let Some(more) = after
        .descriptors
        .checked_sub(before.descriptors)
        .filter(|it| *it > 0)
    {
        left.push(Leftover::Descriptors(more));
    }
    if let (Some(then), Some(now)) = (&before.shared_memory, &after.shared_memory) {
        let names: BTreeSet<String> = now.difference(then).cloned().collect();
        if !names.is_empty() {
            left.push(Leftover::SharedMemory(names));
        }
    }
    if let (Some(then), Some(now)) = (before.uvm_references, after.uvm_references)
        && now > then
    {
        left.push(Leftover::UvmReferences(now - then));
    }
    left
}

/// Process IDs of every worker.
pub fn pids(allocation: &AllocationFacts) -> BTreeSet<u32> {
    allocation.workers.iter().filter_map(|it| it.pid).collect()
}

/// Whether NVML listed any worker. In another PID namespace than the driver's it lists none, and
/// its lists show nothing of where workers ran.
pub fn lists_workers(allocation: &AllocationFacts) -> bool {
    let pids = pids(allocation);
    let mut listed = allocation.listed.values().flatten();
    listed.any(|it| pids.contains(it))
}

/// Processes of others that came to this GPU while the test ran.
pub fn newcomers(allocation: &AllocationFacts, uuid: &str) -> BTreeSet<u32> {
    let before = allocation.before.value();
    let before = before.and_then(|it| it.gpus.get(uuid)?.pids.as_ref());
    let own = pids(allocation);
    let listed = allocation.listed.get(uuid).into_iter().flatten();
    listed
        .filter(|it| !own.contains(it) && !before.is_some_and(|before| before.contains(it)))
        .copied()
        .collect()
}

/// Memory of a worker's context, in addition to what it allocates.
// Source: 0.3 to 0.6 GiB, BENCHMARKS.md.
const CONTEXT_BYTES: u64 = 600 << 20;

/// Whether the planned workers of this GPU need more memory than was free before the first; `None`
/// where that was not read.
pub fn is_oversubscribed(allocation: &AllocationFacts, uuid: &str) -> Option<bool> {
    let free = allocation
        .before
        .value()?
        .gpus
        .get(uuid)?
        .memory_free_bytes?;
    let steady = |it: &&AllocationWorker| it.phase == AllocationPhase::Steady && it.gpu() == uuid;
    let workers = allocation.workers.iter().filter(steady).count() as u64;
    let each = allocation.plan.memory_bytes.saturating_add(CONTEXT_BYTES);
    Some(workers.saturating_mul(each) > free)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fairness_is_between_one_of_n_and_one() {
        assert_eq!(jain_index(&[5.0, 5.0, 5.0, 5.0]), Some(1.0));
        assert_eq!(jain_index(&[8.0, 0.0, 0.0, 0.0]), Some(0.25));
        // One of twenty starves, as Jain's paper has it.
        let mut shares = vec![1.0; 19];
        shares.push(0.0);
        let index = jain_index(&shares).expect("an index");
        assert!((index - 0.95).abs() < 1e-9, "{index}");
        assert_eq!(jain_index(&[0.0, 0.0]), None);
        assert_eq!(jain_index(&[]), None);
    }

    #[test]
    fn the_expected_factor_goes_through_the_required_figures() {
        for (gpus, factor) in [(2, 1.8), (3, 2.65), (4, 3.5), (8, 6.0), (16, 12.0)] {
            let expected = expected_factor(gpus);
            assert!((expected - factor).abs() < 1e-9, "{gpus}: {expected}");
        }
    }

    fn state(used_mib: u64, pids: &[u32], descriptors: u64) -> AllocationSnapshot {
        let gpu = GpuUse {
            memory_used_bytes: Some(used_mib << 20),
            memory_free_bytes: None,
            pids: Some(pids.iter().copied().collect()),
        };
        AllocationSnapshot {
            gpus: [("GPU-a".to_owned(), gpu)].into(),
            descriptors,
            ..AllocationSnapshot::default()
        }
    }

    #[test]
    fn what_was_there_before_is_not_left_and_everything_else_is() {
        let workers = BTreeSet::from([7, 8]);
        let before = state(100, &[5], 10);
        assert_eq!(leftovers(&before, &before, &workers), []);
        // Within the tolerance, and a process of others.
        assert_eq!(leftovers(&before, &state(164, &[5, 6], 9), &workers), []);
        let mut after = state(165, &[5, 7], 12);
        after.processes = [7, 8].into();
        after.zombies = [8].into();
        let left = leftovers(&before, &after, &workers);
        let texts: Vec<String> = left.iter().map(Leftover::to_string).collect();
        assert_eq!(
            texts,
            [
                "processes 7 on the GPU",
                "65 MiB of memory",
                "processes 7",
                "zombies 8",
                "2 open file descriptors"
            ]
        );
        assert_eq!(left[0].gpu(), Some("GPU-a"));
        assert_eq!(left[3].gpu(), None);
        assert!(!left.iter().any(Leftover::may_be_of_others));
    }

    #[test]
    fn segments_and_references_count_where_both_states_have_them() {
        let with = |names: &[&str], references| AllocationSnapshot {
            shared_memory: Some(names.iter().map(|&it| it.to_owned()).collect()),
            uvm_references: references,
            ..state(100, &[], 10)
        };
        let before = with(&["a", "b"], Some(4));
        let left = leftovers(&before, &with(&["b", "psm_1"], Some(6)), &BTreeSet::new());
        let texts: Vec<String> = left.iter().map(Leftover::to_string).collect();
        assert_eq!(texts, ["shared memory psm_1", "2 references to nvidia_uvm"]);
        assert!(left.iter().all(Leftover::may_be_of_others));
        let unread = with(&["b"], None);
        assert_eq!(leftovers(&before, &unread, &BTreeSet::new()), []);
        assert_eq!(leftovers(&unread, &before, &BTreeSet::new()).len(), 1);
    }
}
