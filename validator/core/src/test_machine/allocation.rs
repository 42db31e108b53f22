//! An allocation test of the healthy machine.

use std::collections::{BTreeMap, BTreeSet};

use super::{healthy_node, uuids_of};
use crate::facts::{
    ALLOCATION, AllocationDetail, AllocationFacts, AllocationPhase, AllocationPlan,
    AllocationSnapshot, AllocationWorker, Facts, GpuUse, KillingPhase, MeasuredWork,
    Oversubscription, Reading, RequestedWork, WorkerEnd, WorkloadRun,
};
use crate::worker_id::WorkerId;

/// Processors of a p5en.48xlarge.
const PROCESSORS: u32 = 192;
const FIRST_PID: u32 = 1000;

/// Eight healthy H200s after an allocation test with two workers each.
pub fn allocated_node() -> Facts {
    let mut facts = healthy_node();
    let uuids = uuids_of(&facts);
    let mut test = TestOfNode::default();
    for (phase, each, rate) in [
        (AllocationPhase::Steady, 2, 50),
        (AllocationPhase::ScalingAll, 1, 100),
        (AllocationPhase::Killing, 2, 50),
    ] {
        for uuid in &uuids {
            for _ in 0..each {
                test.add(uuid, phase, rate);
            }
        }
    }
    test.add(&uuids[0], AllocationPhase::ScalingOne, 100);
    test.add(&uuids[0], AllocationPhase::Oversubscription, 100);
    let asker = test.add(&uuids[0], AllocationPhase::Oversubscription, 0);
    set_detail(&mut test.runs[asker], |detail| {
        detail.operations = 0;
        detail.failures.out_of_memory = 3;
    });
    let oversubscription = Oversubscription {
        worker: test.runs[asker].id.clone(),
        requested_bytes: 141 << 30,
        free_bytes: 140 << 30,
    };
    let mut killed = 0;
    for (worker, run) in test.workers.iter_mut().zip(&mut test.runs) {
        if worker.phase == AllocationPhase::Killing && worker.id.ordinal % 2 == 0 {
            worker.killed = true;
            run.end = Reading::Value(WorkerEnd::Killed { signal: 9 });
            killed += 1;
        }
    }
    let idle = AllocationSnapshot {
        seconds: 0.0,
        gpus: uuids
            .iter()
            .map(|uuid| (uuid.clone(), idle_gpu()))
            .collect(),
        descriptors: 20,
        ..AllocationSnapshot::default()
    };
    facts.load.runs.extend(test.runs);
    facts.load.allocation = Some(Box::new(AllocationFacts {
        plan: AllocationPlan {
            gpus: uuids,
            workers: 16,
            duration_s: 60.0,
            memory_bytes: 256 << 20,
            minimum_success_percent: 100.0,
            processors: PROCESSORS,
        },
        workers: test.workers,
        before: Reading::Value(idle.clone()),
        listed: test.listed,
        view_trouble: None,
        killing: Reading::Value(KillingPhase {
            killed,
            unlisted_after_s: Some(0.3),
        }),
        oversubscription: Reading::Value(oversubscription),
        after: Reading::Value(AllocationSnapshot {
            seconds: 0.2,
            ..idle
        }),
    }));
    facts
}

/// The same, but for what the parent saw.
pub fn allocated_node_with(change: impl FnOnce(&mut AllocationFacts)) -> Facts {
    let mut facts = allocated_node();
    if let Some(allocation) = &mut facts.load.allocation {
        change(allocation);
    }
    facts
}

/// The same, but for the first steady worker of the third GPU.
pub fn allocated_node_with_run(change: impl FnOnce(&mut WorkloadRun)) -> Facts {
    let mut facts = allocated_node();
    let uuid = facts.gpus[2].uuid.value().cloned().unwrap_or_default();
    let mut runs = facts.load.runs.iter_mut();
    let run = runs.find(|it| it.id.has_gpu(&uuid));
    change(run.expect("a worker"));
    facts
}

/// Changes the detail of a worker's report.
pub fn set_detail(run: &mut WorkloadRun, change: impl FnOnce(&mut AllocationDetail)) {
    let mut detail = run.allocation().unwrap_or_default();
    change(&mut detail);
    let detail = serde_json::to_value(&detail).expect("facts are JSON");
    run.detail.insert(ALLOCATION.to_owned(), detail);
}

fn idle_gpu() -> GpuUse {
    GpuUse {
        memory_used_bytes: Some(0),
        memory_free_bytes: Some(140 << 30),
        pids: Some(BTreeSet::new()),
    }
}

#[derive(Default)]
struct TestOfNode {
    workers: Vec<AllocationWorker>,
    runs: Vec<WorkloadRun>,
    listed: BTreeMap<String, BTreeSet<u32>>,
    ordinals: BTreeMap<String, u32>,
}

impl TestOfNode {
    /// Returns the place of its run.
    fn add(&mut self, uuid: &str, phase: AllocationPhase, rate: u64) -> usize {
        const SECONDS: u64 = 60;
        let ordinal = self.ordinals.entry(uuid.to_owned()).or_default();
        let id = WorkerId::new(ALLOCATION, &[uuid], *ordinal);
        *ordinal += 1;
        let number = u32::try_from(self.workers.len()).unwrap_or_default();
        let pid = FIRST_PID + number;
        self.listed.entry(uuid.to_owned()).or_default().insert(pid);
        self.workers.push(AllocationWorker {
            id: id.clone(),
            phase,
            pid: Some(pid),
            released_s: Some(match phase {
                AllocationPhase::Steady => 0.0,
                _ => 60.0,
            }),
            killed: false,
        });
        let finished = Reading::Value(WorkerEnd::Finished);
        let mut run = WorkloadRun::empty(id, RequestedWork::default(), finished);
        run.measured = MeasuredWork {
            seconds: 60.0,
            start_ms: 900.0,
            stop_ms: None,
            passes: rate * SECONDS,
            bytes_verified: rate * SECONDS * (256 << 20),
        };
        set_detail(&mut run, |detail| {
            detail.visible_devices = vec![uuid.to_owned()];
            uuid.clone_into(&mut detail.device);
            detail.operations = rate * SECONDS;
            detail.peak_memory_bytes = 256 << 20;
        });
        self.runs.push(run);
        self.runs.len() - 1
    }
}
