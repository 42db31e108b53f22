//! The workers of one phase: started together, released together, followed to their ends.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::super::devices::device_to_use;
use super::super::workload_process::{Follower, RunFollower, WorkloadProcess, start_worker};
use super::{Gpu, planned};
use crate::interrupt::Interrupt;
use crate::plan::{AllocationOptions, AllocationProgress, MemoryShare};
use crate::probe::ProbeOptions;
use crate::probe::json::at;
use crate::worker::listener::{ReportEnd, Reported};
use crate::worker::protocol::{Message, RUN, STANDING_BY};
use crate::workload::allocation::AllocationTask;
use crate::workload::{Assignment, OnForeignProcess, Task};
use validator_core::facts::{
    ALLOCATION, AllocationPhase, AllocationWorker, Reading, RequestedWork, WorkerEnd, WorkloadRun,
};
use validator_core::worker_id::WorkerId;

/// The driver's time to start one worker, in parallel with others: it makes contexts one after
/// another.
// Source: BENCHMARKS.md, "Eight GPUs": 0.05 to 0.25 s a context; twice that.
const START_OF_A_WORKER: Duration = Duration::from_millis(500);
const SIGKILL: i32 = 9;

/// A worker that is to be started.
pub(super) struct Request {
    uuid: String,
    pub(super) memory_bytes: u64,
    /// Operations after which it ends; `None`: it works until its time is over.
    pub(super) passes: Option<u64>,
}

/// Starts workers, and numbers them.
pub(super) struct Tester<'t> {
    pub(super) interrupt: &'t Interrupt,
    probe: &'t ProbeOptions,
    memory_bytes: u64,
    gpus: Vec<Gpu>,
    seed: u64,
    /// Of random moments.
    random: u64,
    /// Workers so far, of all phases and GPUs, and by GPU.
    number: u32,
    ordinals: BTreeMap<String, u32>,
}

impl<'t> Tester<'t> {
    pub(super) fn new(
        options: &AllocationOptions,
        probe: &'t ProbeOptions,
        interrupt: &'t Interrupt,
        gpus: Vec<Gpu>,
        seed: u64,
    ) -> Self {
        Self {
            interrupt,
            probe,
            memory_bytes: options.memory_bytes,
            gpus,
            seed,
            random: seed,
            number: 0,
            ordinals: BTreeMap::new(),
        }
    }

    pub(super) fn sysroot(&self) -> Option<&'t Path> {
        self.probe.sysroot.as_deref()
    }

    /// So many workers on these GPUs, one GPU after another; none where there is no GPU.
    pub(super) fn round_robin(&self, workers: u32, uuids: &[String]) -> Vec<Request> {
        let uuids = uuids.iter().cycle().take(workers as usize);
        let request = |uuid: &String| Request {
            uuid: uuid.clone(),
            memory_bytes: self.memory_bytes,
            passes: None,
        };
        uuids.map(request).collect()
    }

    /// Starts one process for each request; they prepare and stand by.
    pub(super) fn start(
        &mut self,
        phase: AllocationPhase,
        requests: Vec<Request>,
        length: Duration,
    ) -> Crew {
        let mut probe = self.probe.clone();
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
        probe.deadlines.cuda_kernel += START_OF_A_WORKER.saturating_mul(count);
        let mut members = Vec::new();
        for request in requests {
            let requested = RequestedWork {
                seconds: length.as_secs_f64(),
                passes: request.passes,
            };
            let ordinal = self.ordinals.entry(request.uuid.clone()).or_default();
            let id = WorkerId::new(ALLOCATION, &[&request.uuid], *ordinal);
            *ordinal += 1;
            self.number += 1;
            let shared = Arc::new(Shared::default());
            let process = self.start_one(&id, &request, requested, &probe, &shared);
            members.push(Member {
                worker: planned(id, phase),
                requested,
                process,
                shared,
            });
        }
        Crew {
            phase,
            members,
            began: Instant::now(),
            length,
        }
    }

    fn start_one(
        &self,
        id: &WorkerId,
        request: &Request,
        requested: RequestedWork,
        probe: &ProbeOptions,
        shared: &Arc<Shared>,
    ) -> Result<WorkloadProcess<WorkloadRun>, String> {
        let uuid = &request.uuid;
        let (_, gpu) = self
            .gpus
            .iter()
            .find(|(it, _)| it == uuid)
            .ok_or_else(|| format!("no GPU {uuid}"))?;
        let assignment = Assignment {
            id: id.clone(),
            devices: vec![device_to_use(gpu, uuid)?.to_owned()],
            memory: MemoryShare::Bytes(request.memory_bytes),
            requested,
            on_foreign_process: OnForeignProcess::Ignore,
            stands_by: true,
            task: Task::Allocation(AllocationTask {
                seed: self.seed,
                number: self.number,
            }),
        };
        let follower = WorkerFollower {
            run: RunFollower::of(&assignment),
            shared: Arc::clone(shared),
        };
        start_worker(&assignment, gpu, probe, follower, self.interrupt)
    }

    /// Half of `count` workers, each with a moment, in the order of the moments.
    pub(super) fn random_kills(
        &mut self,
        count: usize,
        length: Duration,
    ) -> Vec<(Duration, usize)> {
        let mut order: Vec<(u64, usize)> = (0..count).map(|it| (self.next_random(), it)).collect();
        order.sort_unstable();
        let mut kills: Vec<(Duration, usize)> = order
            .into_iter()
            .take(count.div_ceil(2))
            .map(|(_, worker)| {
                let part = u32::try_from(self.next_random() % 1000).unwrap_or_default();
                (length * part / 1000, worker)
            })
            .collect();
        kills.sort_unstable();
        kills
    }

    /// `SplitMix64`.
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.random;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }
}

/// What the thread that listens to a worker has heard.
#[derive(Default)]
struct Shared {
    /// 0: no process was started.
    pid: AtomicU32,
    stands_by: AtomicBool,
    operations: AtomicU64,
    failures: AtomicU64,
}

struct WorkerFollower {
    run: RunFollower,
    shared: Arc<Shared>,
}

impl Follower for WorkerFollower {
    type Run = WorkloadRun;

    fn started(&mut self, pid: u32, _at: Instant) {
        self.shared.pid.store(pid, Ordering::Release);
    }

    fn hear(&mut self, message: &Message) {
        match message {
            Message::Step(step) if step == STANDING_BY => {
                self.shared.stands_by.store(true, Ordering::Release);
            }
            Message::Field { name, value } if name == RUN => {
                let detail = value.get("detail").and_then(|it| it.get(ALLOCATION));
                let detail = detail.unwrap_or(&serde_json::Value::Null);
                let count = |value: &serde_json::Value| value.as_u64().unwrap_or_default();
                let failures = at(detail, "/failures").as_object().into_iter().flatten();
                let failures = failures.map(|(_, value)| count(value));
                let failures = failures.fold(0, u64::saturating_add);
                let operations = count(at(detail, "/operations"));
                self.shared.operations.store(operations, Ordering::Relaxed);
                self.shared.failures.store(failures, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// A dismissed worker is one that was killed on purpose.
    fn conclude(self, reported: Reported) -> WorkloadRun {
        let is_killed = reported.end == ReportEnd::Dismissed;
        let mut run = self.run.conclude(reported);
        if is_killed {
            run.end = Reading::Value(WorkerEnd::Killed { signal: SIGKILL });
        }
        run
    }
}

struct Member {
    worker: AllocationWorker,
    requested: RequestedWork,
    /// Or why none was started.
    process: Result<WorkloadProcess<WorkloadRun>, String>,
    shared: Arc<Shared>,
}

impl Member {
    fn has_ended(&self) -> bool {
        self.process
            .as_ref()
            .map_or(true, WorkloadProcess::has_ended)
    }

    fn pid(&self) -> Option<u32> {
        Some(self.shared.pid.load(Ordering::Acquire)).filter(|it| *it != 0)
    }

    fn join(mut self) -> (AllocationWorker, WorkloadRun) {
        self.worker.pid = self.pid();
        let id = self.worker.id.clone();
        let empty =
            |reason| WorkloadRun::empty(id.clone(), self.requested, Reading::NotRead(reason));
        let run = match self.process {
            Ok(process) => process
                .join()
                .unwrap_or_else(|| empty("the thread of this worker panicked".to_owned())),
            Err(reason) => empty(reason),
        };
        (self.worker, run)
    }
}

/// The workers of one phase.
pub(super) struct Crew {
    phase: AllocationPhase,
    members: Vec<Member>,
    /// When they were released.
    began: Instant,
    /// How long they are to work.
    length: Duration,
}

impl Crew {
    pub(super) fn count(&self) -> usize {
        self.members.len()
    }

    pub(super) fn last_id(&self) -> Option<WorkerId> {
        self.members.last().map(|it| it.worker.id.clone())
    }

    /// Each stands by, or has ended.
    pub(super) fn is_ready(&self) -> bool {
        let is_ready = |it: &Member| it.shared.stands_by.load(Ordering::Acquire) || it.has_ended();
        self.members.iter().all(is_ready)
    }

    pub(super) fn go(&mut self) {
        self.began = Instant::now();
        for member in &mut self.members {
            if let Ok(process) = &mut member.process {
                process.go();
            }
        }
    }

    pub(super) fn since_go(&self) -> Duration {
        self.began.elapsed()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.members.iter().all(Member::has_ended)
    }

    /// SIGKILL for this worker's process group.
    pub(super) fn kill(&mut self, worker: usize) {
        let Some(member) = self.members.get_mut(worker) else {
            return;
        };
        if let Ok(process) = &member.process
            && !process.has_ended()
        {
            process.dismiss();
            member.worker.killed = true;
        }
    }

    pub(super) fn killed_pids(&self) -> Vec<u32> {
        let killed = self.members.iter().filter(|it| it.worker.killed);
        killed.filter_map(Member::pid).collect()
    }

    pub(super) fn killed_have_ended(&self) -> bool {
        let mut killed = self.members.iter().filter(|it| it.worker.killed);
        killed.all(Member::has_ended)
    }

    pub(super) fn progress(&self) -> AllocationProgress {
        let sum = |count: fn(&Shared) -> &AtomicU64| {
            let counts = self.members.iter().map(|it| count(&it.shared));
            counts.map(|it| it.load(Ordering::Relaxed)).sum()
        };
        AllocationProgress {
            phase: self.phase,
            workers: self.members.iter().filter(|it| !it.has_ended()).count(),
            operations: sum(|it| &it.operations),
            failures: sum(|it| &it.failures),
            left: self.length.saturating_sub(self.since_go()),
        }
    }

    /// Waits for the ends.
    pub(super) fn join(self) -> (Vec<AllocationWorker>, Vec<WorkloadRun>) {
        self.members.into_iter().map(Member::join).unzip()
    }
}
