//! The allocation test: many worker processes share GPUs, some are killed, one requests too much,
//! and nothing may be left.
//!
//! Phases run one after another: steady work of all workers, one GPU against all, a request above
//! what is free, and SIGKILL at random moments. A GPU whose steady workers did not all end well and
//! right takes no part in the later phases: it would only fail or hang again, for as long.

mod crew;
mod host_state;
mod layouts;
mod leftovers;
mod view;

use std::time::{Duration, Instant};

use super::worked_gpus::{cuda_does_not_work, is_worked, why_not_worked};
use crate::interrupt::Interrupt;
use crate::plan::{AllocationOptions, AllocationProgress, BurnOptions, random_seed};
use crate::probe::ProbeOptions;
use crew::{Crew, Request, Tester};
pub(crate) use layouts::test_layouts;
use leftovers::{await_nothing_left, snapshot};
use validator_core::facts::{
    ALLOCATION, AllocationFacts, AllocationPhase, AllocationPlan, AllocationWorker, ComputeMode,
    Facts, GpuFacts, KillingPhase, Oversubscription, Reading, RequestedWork, WorkerEnd,
    WorkloadRun,
};
use validator_core::worker_id::WorkerId;
use view::View;

/// Workers for each GPU where no number is given: the fewest that share it.
const WORKERS_A_GPU: u32 = 2;
/// The later phases take a part of the steady phase each, within these limits: long enough for some
/// hundred operations, and short enough to be a part of a run.
const LATER_PHASE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
const PARTS_OF_STEADY: u32 = 6;
/// What an oversubscribing request exceeds the free memory by. More than a context frees when it
/// ends (0.3 to 0.6 GiB, BENCHMARKS.md), so that the end of a process does not make it one that
/// fits.
const EXCESS_BYTES: u64 = 1 << 30;
/// Requests of the worker that oversubscribes.
const EXCESSIVE_REQUESTS: u64 = 3;
/// Part of the phase in which workers are killed, so that all of them still work when their moment
/// comes.
const KILLED_BY: f64 = 0.8;
/// Time limit in which everything is back to what was before.
// Source: this project's requirement; the driver frees the memory of a killed process within 1 s.
const TIME_TO_RECOVER: Duration = Duration::from_secs(2);
/// Where the run is stopped the person waits at most a second.
const TIME_TO_RECOVER_INTERRUPTED: Duration = Duration::from_millis(100);

/// Runs the test and adds what was seen to `facts.load`.
pub(crate) fn test_allocation(
    options: &AllocationOptions,
    probe: &ProbeOptions,
    facts: &mut Facts,
    interrupt: &Interrupt,
    on_progress: &mut dyn FnMut(&AllocationProgress),
) {
    let (gpus, refused) = gpus_to_test(options, facts);
    let uuids: Vec<String> = gpus.iter().map(|(uuid, _)| uuid.clone()).collect();
    let count = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    let workers = options
        .workers
        .unwrap_or(count.saturating_mul(WORKERS_A_GPU));
    let mut seen = AllocationFacts {
        plan: AllocationPlan {
            gpus: uuids.clone(),
            workers,
            duration_s: options.duration.as_secs_f64(),
            memory_bytes: options.memory_bytes,
            minimum_success_percent: options.minimum_success_percent,
            processors: processors(),
        },
        ..AllocationFacts::default()
    };
    let mut runs = Vec::new();
    for (uuid, end) in refused {
        let id = WorkerId::new(ALLOCATION, &[&uuid], 0);
        seen.workers
            .push(planned(id.clone(), AllocationPhase::Steady));
        runs.push(WorkloadRun::empty(id, RequestedWork::default(), end));
    }
    if !gpus.is_empty() && interrupt.signal().is_none() {
        let tester = Tester::new(options, probe, interrupt, gpus, random_seed());
        let mut test = Test {
            tester,
            view: View::start(probe, &uuids),
            seen,
            runs,
            first_release: None,
            on_progress,
        };
        test.run(workers, &uuids, options.duration);
        (seen, runs) = (test.seen, test.runs);
    }
    facts.load.runs.extend(runs);
    facts.load.allocation = Some(Box::new(seen));
    facts.interrupted = facts.interrupted.take().or(interrupt.reason());
}

fn planned(id: WorkerId, phase: AllocationPhase) -> AllocationWorker {
    AllocationWorker {
        id,
        phase,
        pid: None,
        released_s: None,
        killed: false,
    }
}

/// A GPU and its UUID.
type Gpu = (String, GpuFacts);

/// The GPUs that are tested, and those that are not with the reason.
fn gpus_to_test(
    options: &AllocationOptions,
    facts: &Facts,
) -> (Vec<Gpu>, Vec<(String, Reading<WorkerEnd>)>) {
    let (mut gpus, mut refused) = usable_gpus(&options.gpus, options.share, facts);
    // A second process would be refused, which is what the mode is for.
    let is_exclusive = |uuid: &String| {
        let mode = facts.gpu(uuid).and_then(|it| it.compute_mode.value());
        mode == Some(&ComputeMode::ExclusiveProcess)
    };
    gpus.retain(|(uuid, _)| !is_exclusive(uuid));
    refused.retain(|(uuid, _)| !is_exclusive(uuid));
    (gpus, refused)
}

/// Of the chosen GPUs those that can be worked, and the others with the reason.
fn usable_gpus(
    chosen: &[String],
    share: bool,
    facts: &Facts,
) -> (Vec<Gpu>, Vec<(String, Reading<WorkerEnd>)>) {
    let load = BurnOptions {
        gpus: chosen.to_vec(),
        share,
        ..BurnOptions::lasting(Duration::ZERO)
    };
    let no_cuda = cuda_does_not_work(facts);
    let (mut gpus, mut refused) = (Vec::new(), Vec::new());
    for gpu in &facts.gpus {
        let Some(uuid) = gpu.uuid.value().filter(|it| is_worked(it, &load)) else {
            continue;
        };
        let kernel = facts.load.cuda_kernel.get(uuid);
        match why_not_worked(gpu, &load, no_cuda.as_deref(), kernel) {
            Some(end) => refused.push((uuid.clone(), end)),
            None => gpus.push((uuid.clone(), gpu.clone())),
        }
    }
    (gpus, refused)
}

/// By affinity and cgroup.
fn processors() -> u32 {
    let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// The test while it runs.
struct Test<'t> {
    tester: Tester<'t>,
    view: View,
    seen: AllocationFacts,
    runs: Vec<WorkloadRun>,
    /// When the first workers began.
    first_release: Option<Instant>,
    on_progress: &'t mut dyn FnMut(&AllocationProgress),
}

impl Test<'_> {
    fn run(&mut self, workers: u32, uuids: &[String], duration: Duration) {
        let sysroot = self.tester.sysroot();
        self.view.await_round(self.tester.interrupt);
        self.seen.before = snapshot(&self.view, &self.seen.workers, sysroot, Duration::ZERO);
        let later = (duration / PARTS_OF_STEADY).clamp(LATER_PHASE.0, LATER_PHASE.1);
        let requests = self.tester.round_robin(workers, uuids);
        self.timed_phase(AllocationPhase::Steady, requests, duration);
        let good = self.good_gpus(uuids);
        if good.len() > 1 {
            let requests = self.tester.round_robin(1, &good);
            self.timed_phase(AllocationPhase::ScalingOne, requests, later);
            let count = u32::try_from(good.len()).unwrap_or(u32::MAX);
            let requests = self.tester.round_robin(count, &good);
            self.timed_phase(AllocationPhase::ScalingAll, requests, later);
        }
        self.seen.oversubscription = self.oversubscribe(&good, later);
        self.seen.killing = self.kill(workers, &good, later);
        let limit = if self.is_stopped() {
            TIME_TO_RECOVER_INTERRUPTED
        } else {
            TIME_TO_RECOVER
        };
        let before = self.seen.before.value();
        self.seen.after =
            await_nothing_left(&self.view, &self.seen.workers, sysroot, before, limit);
        let (listed, trouble) = self.view.finish();
        self.seen.listed = listed;
        self.seen.view_trouble = trouble;
    }

    fn is_stopped(&self) -> bool {
        self.tester.interrupt.signal().is_some()
    }

    /// GPUs that had workers, all of which ended well and without a wrong result.
    fn good_gpus(&self, uuids: &[String]) -> Vec<String> {
        let of = |uuid: &String| self.runs.iter().filter(|it| it.id.has_gpu(uuid)).count();
        let ended_well = |uuid: &String| {
            let mut runs = self.runs.iter().filter(|it| it.id.has_gpu(uuid));
            let finished = Some(&WorkerEnd::Finished);
            runs.all(|it| it.end.value() == finished && it.mismatches == 0)
        };
        let good = uuids.iter().filter(|it| of(it) > 0 && ended_well(it));
        good.cloned().collect()
    }

    /// Workers that all begin at the same time, and end by themselves. Returns the last one's id.
    fn timed_phase(
        &mut self,
        phase: AllocationPhase,
        requests: Vec<Request>,
        length: Duration,
    ) -> Option<WorkerId> {
        if self.is_stopped() || requests.is_empty() {
            return None;
        }
        let mut crew = self.tester.start(phase, requests, length);
        let last = crew.last_id();
        self.begin(&mut crew);
        while !crew.has_ended() {
            self.progress(&crew);
        }
        self.take(crew);
        last
    }

    fn begin(&mut self, crew: &mut Crew) {
        while !crew.is_ready() {
            self.progress(crew);
        }
        crew.go();
        self.first_release.get_or_insert_with(Instant::now);
    }

    fn progress(&mut self, crew: &Crew) {
        const PERIOD: Duration = Duration::from_millis(20);
        (self.on_progress)(&crew.progress());
        std::thread::sleep(PERIOD);
    }

    fn take(&mut self, crew: Crew) {
        let since_go = crew.since_go();
        let released = self
            .first_release
            .map(|it| it.elapsed().saturating_sub(since_go).as_secs_f64());
        let (mut workers, runs) = crew.join();
        for worker in workers.iter_mut().filter(|it| it.pid.is_some()) {
            worker.released_s = released;
        }
        self.seen.workers.extend(workers);
        self.runs.extend(runs);
    }

    /// One worker works, another one on the same GPU requests more than is free.
    fn oversubscribe(&mut self, good: &[String], length: Duration) -> Reading<Oversubscription> {
        if self.is_stopped() {
            return Reading::NotRead("the run was interrupted".to_owned());
        }
        let Some(uuid) = good.first() else {
            return Reading::NotRead("no GPU worked well until then".to_owned());
        };
        let before = self.view.gpu(uuid);
        let Some(free_bytes) = before.and_then(|it| it.memory_free_bytes) else {
            return Reading::NotRead("the free memory of the GPU was not read".to_owned());
        };
        let requested_bytes = free_bytes + EXCESS_BYTES;
        let mut requests = self.tester.round_robin(2, std::slice::from_ref(uuid));
        if let Some(excessive) = requests.last_mut() {
            excessive.memory_bytes = requested_bytes;
            excessive.passes = Some(EXCESSIVE_REQUESTS);
        }
        let worker = self.timed_phase(AllocationPhase::Oversubscription, requests, length);
        let reason = || "the worker was not started".to_owned();
        worker.map_or_else(
            || Reading::NotRead(reason()),
            |worker| {
                Reading::Value(Oversubscription {
                    worker,
                    requested_bytes,
                    free_bytes,
                })
            },
        )
    }

    /// SIGKILL for half of the workers, at random moments before they end by themselves.
    fn kill(&mut self, workers: u32, good: &[String], length: Duration) -> Reading<KillingPhase> {
        let requests = self.tester.round_robin(workers, good);
        if self.is_stopped() {
            return Reading::NotRead("the run was interrupted".to_owned());
        }
        if requests.is_empty() {
            return Reading::NotRead("no GPU worked well until then".to_owned());
        }
        let mut crew = self
            .tester
            .start(AllocationPhase::Killing, requests, length);
        self.begin(&mut crew);
        let kills = self
            .tester
            .random_kills(crew.count(), length.mul_f64(KILLED_BY));
        for (moment, worker) in kills {
            while crew.since_go() < moment && !self.is_stopped() {
                self.progress(&crew);
            }
            if !self.is_stopped() {
                crew.kill(worker);
            }
        }
        let killed = crew.killed_pids();
        let unlisted = self.await_unlisted(&crew);
        while !crew.has_ended() {
            self.progress(&crew);
        }
        self.take(crew);
        if self.is_stopped() {
            return Reading::NotRead("the run was interrupted".to_owned());
        }
        Reading::Value(KillingPhase {
            killed: u32::try_from(killed.len()).unwrap_or(u32::MAX),
            unlisted_after_s: unlisted.map(|it| it.as_secs_f64()),
        })
    }

    /// Time until NVML lists no killed worker.
    fn await_unlisted(&mut self, crew: &Crew) -> Option<Duration> {
        let began = Instant::now();
        let killed = crew.killed_pids();
        while !self.is_stopped() {
            let is_listed = killed.iter().any(|pid| self.view.is_listed_now(*pid));
            if crew.killed_have_ended() && !is_listed {
                return Some(began.elapsed());
            }
            if began.elapsed() > TIME_TO_RECOVER {
                return None;
            }
            self.progress(crew);
        }
        None
    }
}
