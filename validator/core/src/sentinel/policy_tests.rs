//! The newcomers that a sentinel meets, as observations in time, and what it must order.

use super::*;

const MIB: u64 = 1 << 20;
const DATA_MIB: u64 = 2048;
const CONTEXT_MIB: u64 = 550;

fn ms(milliseconds: u64) -> Time {
    Time::from_millis(milliseconds)
}

/// A node whose workers obey within 10 ms, unless `stuck`; NVML is read each 100 ms, with lists.
struct World {
    policy: Policy,
    now: Time,
    gpus: BTreeMap<String, Simulated>,
    stuck: bool,
    reads_nvml: bool,
    orders: Vec<(Time, String, Action)>,
}

#[derive(Default)]
struct Simulated {
    context: bool,
    data: bool,
    events: Vec<(Time, WorkerEvent)>,
    foreign: Option<&'static str>,
    foreign_mib: u64,
}

impl World {
    fn new(gpus: usize) -> Self {
        Self::with(gpus, Settings::default())
    }

    fn with(gpus: usize, settings: Settings) -> Self {
        let uuids: Vec<String> = (0..gpus).map(|it| format!("GPU-{it}")).collect();
        Self {
            policy: Policy::new(settings, uuids.clone()),
            now: Time::ZERO,
            gpus: uuids
                .into_iter()
                .map(|it| (it, Simulated::default()))
                .collect(),
            stuck: false,
            reads_nvml: true,
            orders: Vec::new(),
        }
    }

    /// A node on which every GPU is worked.
    fn working(gpus: usize) -> Self {
        let mut world = Self::new(gpus);
        world.run(ms(11_000));
        assert_eq!(world.states(), vec![State::Working; gpus]);
        world.orders.clear();
        world
    }

    fn gpu(&mut self, number: usize) -> &mut Simulated {
        self.gpus.get_mut(&format!("GPU-{number}")).expect("a GPU")
    }

    fn states(&self) -> Vec<State> {
        let uuids = self.gpus.keys();
        uuids.map(|it| self.policy.state(self.now, it).0).collect()
    }

    fn reason(&self, number: usize) -> String {
        self.policy.state(self.now, &format!("GPU-{number}")).1
    }

    fn observe(&mut self, observation: Observation) -> Reaction {
        let reaction = self.policy.observe(self.now, observation);
        for (uuid, action) in &reaction.orders {
            self.orders.push((self.now, uuid.clone(), *action));
            self.obey(uuid, *action);
        }
        reaction
    }

    fn obey(&mut self, uuid: &str, action: Action) {
        let later = self.now + ms(10);
        let gpu = self.gpus.get_mut(uuid).expect("a GPU");
        if self.stuck && action != Action::Kill {
            return;
        }
        let event = match action {
            Action::Start | Action::Resume => WorkerEvent::Working {
                bytes: DATA_MIB * MIB,
            },
            Action::Silence => WorkerEvent::Silent,
            Action::End | Action::Kill => WorkerEvent::Ended(WorkerOutcome::Obeyed),
        };
        if action == Action::End {
            gpu.events.clear();
        }
        gpu.events.push((later, event));
    }

    /// 10 ms after 10 ms.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            self.now += ms(10);
            for uuid in self.gpus.keys().cloned().collect::<Vec<_>>() {
                self.deliver(&uuid);
                if self.reads_nvml && self.now.as_millis().is_multiple_of(100) {
                    self.look(&uuid);
                }
            }
            self.observe(Observation::Tick);
        }
    }

    fn deliver(&mut self, uuid: &str) {
        let now = self.now;
        let gpu = self.gpus.get_mut(uuid).expect("a GPU");
        let (due, later) = std::mem::take(&mut gpu.events)
            .into_iter()
            .partition(|(at, _)| *at <= now);
        gpu.events = later;
        for (_, event) in due {
            let gpu = self.gpus.get_mut(uuid).expect("a GPU");
            (gpu.context, gpu.data) = match &event {
                WorkerEvent::Working { .. } => (true, true),
                WorkerEvent::Silent => (true, false),
                WorkerEvent::Ended(_) => (false, false),
            };
            let gpu = uuid.to_owned();
            let is_start = matches!(event, WorkerEvent::Working { .. });
            let reaction = self.observe(Observation::Worker { gpu, event });
            assert_eq!(
                reaction.look_closely, is_start,
                "somebody may have come meanwhile"
            );
        }
    }

    fn look(&mut self, uuid: &str) -> Reaction {
        let gpu = &self.gpus[uuid];
        let own = u64::from(gpu.context) * CONTEXT_MIB + u64::from(gpu.data) * DATA_MIB;
        let look = Look {
            at: self.now,
            used: Some(Used {
                bytes: (3 + own + gpu.foreign_mib) * MIB,
                without_reserved: true,
            }),
            foreign: Some(gpu.foreign.map(str::to_owned)),
        };
        let gpu = uuid.to_owned();
        self.observe(Observation::Look { gpu, look })
    }

    fn alarm(&mut self) {
        let reaction = self.observe(Observation::Alarm { source: "test" });
        assert!(reaction.look_closely);
    }

    fn count(&self, action: Action) -> usize {
        self.orders.iter().filter(|it| it.2 == action).count()
    }

    fn withhold(&mut self, number: usize, by: Withholder, reason: Option<&str>) {
        let (gpu, reason) = (format!("GPU-{number}"), reason.map(str::to_owned));
        self.observe(Observation::Withheld { gpu, by, reason });
    }
}

#[test]
fn an_idle_gpu_is_worked_after_the_grace_time_and_not_before() {
    let mut world = World::new(2);
    world.run(ms(9_900));
    assert_eq!(world.states(), [State::Grace, State::Grace]);
    assert_eq!(world.orders, []);
    world.run(ms(500));
    assert_eq!(world.count(Action::Start), 2);
    assert_eq!(world.states(), [State::Working, State::Working]);
}

#[test]
fn nothing_is_worked_while_nvml_says_nothing() {
    let mut world = World::new(1);
    world.reads_nvml = false;
    world.run(ms(60_000));
    assert_eq!(world.states(), [State::Unknown]);
    assert_eq!(world.orders, []);
    // It stops answering while the GPU is worked: silence first, then the GPU is left.
    let mut world = World::working(1);
    world.reads_nvml = false;
    world.run(ms(3_000));
    assert_eq!(world.count(Action::Silence), 1);
    assert_eq!(world.count(Action::End), 0);
    world.run(ms(9_000));
    assert_eq!(world.count(Action::End), 1);
    assert!(world.policy.is_clear("GPU-0"));
    world.reads_nvml = true;
    world.run(ms(10_500));
    assert_eq!(world.states(), [State::Working]);
}

/// Newcomers 1 and 12 of the list: one that is listed, whether it works or only holds a context,
/// until it has gone.
#[test]
fn a_listed_process_has_the_gpu_for_as_long_as_it_lives_and_the_quiet_time() {
    let mut world = World::working(2);
    world.gpu(0).foreign = Some("python (pid 4711)");
    world.run(ms(200));
    assert_eq!(world.count(Action::End), 1);
    assert_eq!(world.states(), [State::Away, State::Working]);
    assert_eq!(world.reason(0), "python (pid 4711)");
    world.run(ms(3_600_000));
    assert_eq!(world.count(Action::Start), 0);
    world.gpu(0).foreign = None;
    world.run(ms(29_800));
    assert_eq!(world.states()[0], State::Away);
    world.run(ms(500));
    assert_eq!(world.states(), [State::Working, State::Working]);
}

/// Newcomers 6 and 8: in another container, seen by its memory alone.
#[test]
fn memory_that_nobody_explains_is_a_process() {
    let mut world = World::working(2);
    world.gpu(1).foreign_mib = 400;
    world.now += ms(100);
    let reaction = world.look("GPU-1");
    assert!(reaction.look_closely, "the lists may name it");
    assert_eq!(reaction.orders, [("GPU-1".to_owned(), Action::End)]);
    world.run(ms(60_000));
    assert_eq!(world.states(), [State::Working, State::Away]);
    assert_eq!(
        world.reason(1),
        "400 MiB of memory belong to a process that NVML does not list"
    );
    world.gpu(1).foreign_mib = 0;
    world.run(ms(31_000));
    assert_eq!(world.states(), [State::Working, State::Working]);
}

/// On a loaded host every reading for longer than the quiet time may be from before the worker's
/// end.
#[test]
fn readings_that_are_no_evidence_do_not_free_a_gpu() {
    let mut world = World::working(1);
    world.gpu(0).foreign_mib = 400;
    world.now += ms(100);
    world.look("GPU-0");
    world.reads_nvml = false;
    let read_at = world.now;
    for _ in 0..400 {
        world.run(ms(100));
        let look = Look {
            at: read_at,
            used: Some(Used {
                bytes: (3 + CONTEXT_MIB + DATA_MIB + 400) * MIB,
                without_reserved: true,
            }),
            foreign: None,
        };
        let gpu = "GPU-0".to_owned();
        world.observe(Observation::Look { gpu, look });
    }
    assert_eq!(world.count(Action::Start), 0);
    assert_eq!(world.states(), [State::Away]);
    world.gpu(0).foreign_mib = 0;
    world.reads_nvml = true;
    world.run(ms(31_000));
    assert_eq!(world.states(), [State::Working]);
}

#[test]
fn a_reading_from_before_the_worker_had_its_memory_does_not_hide_its_context() {
    let mut world = World::new(1);
    world.run(ms(9_990));
    while world.states() != [State::Working] && world.now < ms(20_000) {
        world.run(ms(10));
    }
    // Read before, observed after.
    let old = Look {
        at: world.now.saturating_sub(ms(5)),
        used: Some(Used {
            bytes: 3 * MIB,
            without_reserved: true,
        }),
        foreign: None,
    };
    let gpu = "GPU-0".to_owned();
    world.observe(Observation::Look { gpu, look: old });
    world.run(ms(5_000));
    assert_eq!(world.states(), [State::Working]);
    assert_eq!(world.count(Action::End), 0);
}

/// Newcomer 3: a CUDA process starts; all fall silent, and those on whose GPU it does not show
/// resume.
#[test]
fn an_alarm_silences_all_gpus_and_only_the_one_that_is_taken_is_left() {
    let mut world = World::working(8);
    world.alarm();
    assert_eq!(world.count(Action::Silence), 8);
    world.run(ms(300));
    assert_eq!(world.states(), [State::Yielding; 8]);
    world.gpu(3).foreign = Some("torch (pid 9)");
    world.run(ms(200));
    assert_eq!(world.count(Action::End), 1);
    world.run(ms(1_600));
    assert_eq!(world.count(Action::Resume), 7);
    world.run(ms(100));
    let mut expected = [State::Working; 8];
    expected[3] = State::Away;
    assert_eq!(world.states(), expected);
    assert_eq!(world.policy.false_alarms(), 0, "somebody came");
}

/// Newcomer 4: eight ranks on eight GPUs.
#[test]
fn all_gpus_can_be_taken_at_once() {
    let mut world = World::working(8);
    world.alarm();
    for number in 0..8 {
        world.gpu(number).foreign = Some("rank");
    }
    world.run(ms(200));
    assert_eq!(world.states(), [State::Away; 8]);
    assert_eq!(world.count(Action::End), 8);
}

/// Newcomer 11: opens the driver and sleeps. Silence, resumption, and longer silence at each
/// further one.
#[test]
fn false_alarms_cost_longer_and_longer_silence_until_the_context_is_dropped() {
    let mut world = World::working(1);
    let mut silences = Vec::new();
    for _ in 0..4 {
        world.alarm();
        let began = world.now;
        while world.states() != [State::Working] {
            world.run(ms(10));
            assert!(world.now.saturating_sub(began) < ms(100_000));
        }
        silences.push(world.now.saturating_sub(began).as_secs());
        world.run(ms(1_000));
    }
    assert_eq!(
        silences,
        [2, 4, 8, 26],
        "the last: 10 s with context, and a grace time of 10 s more"
    );
    assert_eq!(world.count(Action::End), 1);
    assert_eq!(world.policy.false_alarms(), 4);
}

/// On an H100 the reference count of `nvidia-uvm` grows for a moment as a process ends, when the
/// sentinel has left the GPU.
#[test]
fn alarms_without_a_worker_cost_no_longer_silence() {
    let mut world = World::new(1);
    for _ in 0..5 {
        world.alarm();
        world.run(ms(100));
    }
    assert_eq!(world.policy.false_alarms(), 0);
    world.run(ms(13_000));
    assert_eq!(world.states(), [State::Working]);
    assert_eq!(world.policy.false_alarms(), 0);
}

/// Newcomer 13: twenty short processes a second.
#[test]
fn short_processes_in_a_row_are_one_long_yield() {
    // Between two looks at the lists, and within one.
    for (lives, state) in [(50, State::Grace), (100, State::Away)] {
        let mut world = World::working(1);
        for _ in 0..200 {
            world.gpu(0).foreign = Some("short");
            world.alarm();
            world.run(ms(lives));
            world.gpu(0).foreign = None;
            world.run(ms(500 - lives));
        }
        assert_eq!(world.count(Action::End), 1);
        assert_eq!(world.count(Action::Start), 0);
        assert_eq!(world.states(), [state]);
    }
}

#[test]
fn starts_within_an_hour_are_bounded() {
    let settings = Settings {
        grace: ms(100),
        quiet: ms(1_000),
        starts_an_hour: 5,
    };
    let mut world = World::with(1, settings);
    for _ in 0..100 {
        world.run(ms(2_000));
        world.gpu(0).foreign = Some("job");
        world.run(ms(500));
        world.gpu(0).foreign = None;
    }
    assert_eq!(world.count(Action::Start), 5);
    assert_eq!(world.reason(0), "job");
    world.run(ms(2_000));
    assert_eq!(world.reason(0), "5 starts within an hour");
    world.run(HOUR);
    assert_eq!(world.count(Action::Start), 6);
}

/// Newcomers 15 to 17 and 25: assigned to jobs, modes, burns. What withholds one GPU does not
/// concern another.
#[test]
fn a_withheld_gpu_is_left_and_comes_back_after_the_grace_time() {
    for by in [
        Withholder::Pause,
        Withholder::OptOut,
        Withholder::Validation,
        Withholder::Scheduler,
        Withholder::Mode,
        Withholder::Nvml,
    ] {
        let mut world = World::working(2);
        world.withhold(0, by, Some("the reason"));
        assert_eq!(world.count(Action::End), 1, "at once");
        world.run(ms(100));
        assert_eq!(world.states(), [State::Withheld, State::Working]);
        assert_eq!(world.reason(0), "the reason");
        world.run(ms(100_000));
        assert_eq!(world.count(Action::Start), 0);
        world.withhold(0, by, None);
        world.run(ms(9_000));
        assert_eq!(world.states()[0], State::Grace);
        world.run(ms(1_500));
        assert_eq!(world.states()[0], State::Working);
    }
}

/// Newcomer 20: while the worker creates its context, while it falls silent, while it ends.
#[test]
fn a_newcomer_at_any_moment_gets_the_gpu() {
    for moment in (0..200).step_by(10) {
        let mut world = World::working(1);
        // A false alarm: silence, resumption after 2 s.
        world.alarm();
        world.run(ms(1_900 + moment));
        world.gpu(0).foreign = Some("newcomer");
        world.run(ms(400));
        assert_eq!(world.states(), [State::Away], "{moment}");
        assert!(world.policy.is_clear("GPU-0"), "{moment}");
        let mut world = World::new(1);
        world.run(ms(10_000 + moment));
        world.gpu(0).foreign = Some("newcomer");
        world.run(ms(400));
        assert_eq!(world.states(), [State::Away], "{moment}");
    }
}

#[test]
fn an_alarm_while_an_own_worker_starts_is_left_to_the_lists() {
    let mut world = World::new(2);
    world.run(ms(10_090));
    for _ in 0..100 {
        if world.count(Action::Start) < 2 {
            world.run(ms(10));
        }
    }
    assert_eq!(world.states(), [State::Starting; 2]);
    world.alarm();
    assert_eq!(world.count(Action::Silence) + world.count(Action::End), 0);
}

/// Newcomer 21: the worker hangs in the driver, or is stopped.
#[test]
fn a_worker_that_does_not_obey_is_killed() {
    let mut world = World::working(1);
    world.stuck = true;
    world.alarm();
    world.run(ms(490));
    assert_eq!(world.count(Action::Kill), 0);
    world.run(ms(100));
    assert_eq!(world.count(Action::Kill), 1, "it did not fall silent");
    let mut world = World::working(1);
    world.stuck = true;
    world.gpu(0).foreign = Some("newcomer");
    world.run(ms(2_000));
    assert_eq!(world.count(Action::Kill), 0);
    world.run(ms(300));
    assert_eq!(world.count(Action::Kill), 1, "it did not end");
    assert_eq!(world.states(), [State::Away]);
}

#[test]
fn an_ill_gpu_is_left_alone_for_good() {
    let mut world = World::working(2);
    let finding = "3 words of memory differ".to_owned();
    let gpu = "GPU-1".to_owned();
    world.observe(Observation::Ill { gpu, finding });
    world.run(ms(200_000));
    assert_eq!(world.states(), [State::Working, State::Ill]);
    assert_eq!(world.count(Action::End), 1);
    assert_eq!(world.count(Action::Start), 0);
    assert_eq!(world.reason(1), "3 words of memory differ");
}

#[test]
fn the_end_of_a_worker_says_what_becomes_of_the_gpu() {
    let cases = [
        (
            WorkerOutcome::Busy("killed".to_owned()),
            State::Away,
            31_000,
        ),
        (
            WorkerOutcome::NotStarted("cuInit returned 100".to_owned()),
            State::Away,
            11_000,
        ),
        (WorkerOutcome::Obeyed, State::Starting, 10_500),
    ];
    for (outcome, state, back_after) in cases {
        let mut world = World::working(1);
        let event = WorkerEvent::Ended(outcome.clone());
        world.gpu(0).context = false;
        world.gpu(0).data = false;
        let gpu = "GPU-0".to_owned();
        world.observe(Observation::Worker { gpu, event });
        assert_eq!(world.states(), [state], "{outcome:?}");
        world.run(ms(back_after));
        assert_eq!(world.states(), [State::Working], "{outcome:?}");
    }
    let mut world = World::working(1);
    let event = WorkerEvent::Ended(WorkerOutcome::Failed("cuCtxSynchronize".to_owned()));
    let gpu = "GPU-0".to_owned();
    world.observe(Observation::Worker { gpu, event });
    assert_eq!(world.states(), [State::Ill]);
}

#[test]
fn failures_to_start_are_tried_again_less_and_less_often() {
    let mut world = World::working(1);
    let mut waits = Vec::new();
    for _ in 0..4 {
        let event = WorkerEvent::Ended(WorkerOutcome::NotStarted("no driver".to_owned()));
        *world.gpu(0) = Simulated::default();
        let gpu = "GPU-0".to_owned();
        world.observe(Observation::Worker { gpu, event });
        world.orders.clear();
        let began = world.now;
        while world.count(Action::Start) == 0 {
            world.run(ms(100));
            assert!(world.now.saturating_sub(began) < ms(100_000));
        }
        waits.push(world.now.saturating_sub(began).as_secs());
    }
    assert_eq!(waits, [10, 20, 40, 80]);
}
