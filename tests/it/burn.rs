//! The burn on simulated nodes: what happens to one GPU, to the burn's processes, and to what a
//! person reads of it.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::node::{Node, Ran, Report, said, set, texts};
use crate::processes::{Worker, environment_of, eventually, signal, suspend, workers_of};

/// Products of 512 x 512, which the host's processor multiplies for all GPUs.
const MEMORY: &str = "8MiB";
/// The node of most cases: four GPUs are enough to distinguish one from the others.
const NODE: &str = "g4dn.12xlarge";

fn command(node: &Node, arguments: &[&str]) -> Command {
    let mut all = vec!["--engine", "ptx"];
    all.extend(arguments);
    with_engine(node, &all)
}

fn with_engine(node: &Node, arguments: &[&str]) -> Command {
    let mut command = node.burn_command(&["--memory", MEMORY]);
    command.args(arguments);
    command
}

fn burn(node: &Node, arguments: &[&str]) -> Ran {
    node.finish(&mut command(node, arguments))
}

/// `check: verdict` of what is not green, by the number of the GPU; that of the host is not
/// expected.
fn not_green_by_gpu(node: &Node, report: &Report) -> BTreeMap<usize, Vec<String>> {
    let (of_host, by_gpu) = not_green(node, report);
    assert!(of_host.is_empty(), "of the host: {of_host:?}");
    by_gpu
}

/// `check: verdict` of what is not green: of the host, and by the number of the GPU.
fn not_green(node: &Node, report: &Report) -> (Vec<String>, BTreeMap<usize, Vec<String>>) {
    let mut of_host = Vec::new();
    let mut by_gpu: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for finding in report.findings() {
        let verdict = finding["verdict"].as_str().expect("text");
        if ["pass", "skip"].contains(&verdict) {
            continue;
        }
        let check = finding["check"].as_str().expect("text");
        let it = format!("{check}: {verdict}");
        let Some(uuid) = finding["subject"]["gpu"]["uuid"].as_str() else {
            of_host.push(it);
            continue;
        };
        let gpu = uuids(node).iter().position(|it| it == uuid);
        let of_gpu = by_gpu.entry(gpu.expect("a GPU of the node")).or_default();
        of_gpu.push(it);
    }
    for of_gpu in by_gpu.values_mut() {
        of_gpu.sort();
    }
    (of_host, by_gpu)
}

fn uuids(node: &Node) -> Vec<String> {
    let scenario = node.state().scenario();
    scenario.gpus.iter().map(|gpu| gpu.uuid.clone()).collect()
}

/// One finding about a GPU.
fn finding<'r>(node: &Node, report: &'r Report, check: &'r str, gpu: usize) -> &'r Value {
    let uuid = &uuids(node)[gpu];
    let mut findings = report.of_check(check);
    let found = findings.find(|it| it["subject"]["gpu"]["uuid"] == uuid.as_str());
    found.unwrap_or_else(|| panic!("no {check} of GPU {gpu}"))
}

fn summary<'r>(node: &Node, report: &'r Report, check: &'r str, gpu: usize) -> &'r str {
    let finding = finding(node, report, check, gpu);
    finding["summary"].as_str().expect("text")
}

/// Numbers of the GPUs on which every product was right.
fn verified(node: &Node, report: &Report) -> Vec<usize> {
    let count = uuids(node).len();
    let is_right = |gpu: &usize| {
        ["gemm_numerics", "burn_completed"]
            .iter()
            .all(|check| finding(node, report, check, *gpu)["verdict"] == "pass")
    };
    (0..count).filter(is_right).collect()
}

/// A burn in the background whose GPUs multiply.
struct Burning<'node> {
    node: &'node Node,
    child: Child,
}

impl<'node> Burning<'node> {
    /// Starts it and waits until these GPUs are at work.
    fn start(node: &'node Node, arguments: &[&str], gpus: &[usize]) -> Self {
        Self::of(node, command(node, arguments), gpus)
    }

    /// The same for a burn that was made ready with more than arguments.
    fn of(node: &'node Node, mut command: Command, gpus: &[usize]) -> Self {
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let burning = Self {
            node,
            child: child.expect("the validator starts"),
        };
        wait_for_load(node, gpus);
        burning
    }

    fn workers(&self) -> Vec<Worker> {
        workers_of(self.child.id())
    }

    /// The worker that burns this GPU.
    fn worker_of(&self, gpu: usize) -> u32 {
        let uuid = &uuids(self.node)[gpu];
        let workers = self.workers();
        let worker = workers
            .iter()
            .find(|it| it.task == "burn" && it.arguments.iter().any(|it| it.contains(uuid)));
        worker
            .unwrap_or_else(|| panic!("nobody burns {uuid}: {workers:?}"))
            .pid
    }

    fn end(self) -> Ran {
        let started = Instant::now();
        let output = self.child.wait_with_output().expect("it can be waited for");
        let took = started.elapsed();
        Ran::ended(texts(output), took, &self.node.out.read("report.json"))
    }
}

/// Workers report their work every half second, sensors are read five times a second.
fn wait_for_load(node: &Node, gpus: &[usize]) {
    let state = node.state();
    eventually("load on every GPU", || {
        let mut loads = gpus.iter().map(|gpu| state.state().gpu(*gpu).loaded_ns());
        loads.all(|it| it > 800_000_000)
    });
}

fn memory_in_use(node: &Node) -> u64 {
    let state = node.state();
    (0..state.scenario().gpus.len())
        .map(|gpu| state.state().gpu(gpu).memory_used())
        .sum()
}

#[test]
fn a_healthy_node_burns_and_passes() {
    let node = Node::healthy(NODE);
    let ran = burn(&node, &["--duration", "1s"]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert_eq!(verified(&node, &ran.report), [0, 1, 2, 3]);
    assert_eq!(memory_in_use(&node), 0);
    let says = "fp32: every element of ";
    let summary = summary(&node, &ran.report, "gemm_numerics", 3);
    assert!(summary.starts_with(says), "{summary}");
}

#[test]
fn a_killed_worker_is_its_gpus_trouble_alone() {
    let node = Node::healthy(NODE);
    let burning = Burning::start(&node, &["--duration", "3s"], &[0, 1, 2, 3]);
    signal(burning.worker_of(2), "KILL");
    let ran = burning.end();
    let expected = ["burn_completed: error", "gemm_numerics: error"].map(str::to_owned);
    assert_eq!(
        not_green_by_gpu(&node, &ran.report),
        BTreeMap::from([(2, expected.to_vec())])
    );
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let summary = summary(&node, &ran.report, "burn_completed", 2);
    assert!(
        summary.starts_with("the burn's process was ended by signal 9 after "),
        "{summary}"
    );
    assert_eq!(verified(&node, &ran.report), [0, 1, 3]);
    assert_eq!(memory_in_use(&node), 0);
}

/// Queues for kernels cost the driver time that all GPUs share, and a burn needs one.
#[test]
fn each_worker_is_shown_its_own_gpu_and_makes_one_queue() {
    let node = Node::healthy(NODE);
    let mut burn = command(&node, &["--duration", "60s"]);
    let injected = ["NVIDIA_TF32_OVERRIDE", "CUBLAS_EMULATE_DOUBLE_PRECISION"];
    burn.envs(injected.map(|it| (it, "1")));
    let burning = Burning::of(&node, burn, &[0, 1, 2, 3]);
    for (gpu, uuid) in uuids(&node).iter().enumerate() {
        let environment = environment_of(burning.worker_of(gpu));
        assert_eq!(environment["CUDA_VISIBLE_DEVICES"], *uuid);
        assert_eq!(environment["CUDA_DEVICE_MAX_CONNECTIONS"], "1");
        // They change what cuBLASLt computes, and would be held against the GPU.
        assert!(!injected.iter().any(|it| environment.contains_key(*it)));
    }
    signal(burning.child.id(), "INT");
    assert_eq!(burning.end().code, 2);
}

/// Without its sensors a GPU is burned all the same, and their readings are not judged.
#[test]
fn killed_sensors_cost_what_they_would_have_told() {
    let node = Node::healthy(NODE);
    let burning = Burning::start(&node, &["--duration", "2s"], &[0, 1, 2, 3]);
    let workers = burning.workers();
    let sensors = workers.iter().find(|it| it.task == "sensors");
    signal(sensors.expect("sensors are read").pid, "KILL");
    let ran = burning.end();
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert_eq!(verified(&node, &ran.report), [0, 1, 2, 3]);
    for gpu in 0..4 {
        let finding = finding(&node, &ran.report, "burn_errors", gpu);
        assert_eq!(finding["verdict"], "error", "{finding}");
        let says =
            "no counter was read after the burn: the process that reads NVML was ended by signal 9";
        assert_eq!(finding["summary"], says);
    }
}

#[test]
fn a_killed_burn_leaves_no_process_no_memory_and_no_report_that_passes() {
    let node = Node::healthy(NODE);
    let mut burning = Burning::start(&node, &["--duration", "60s"], &[0, 1, 2, 3]);
    let workers = burning.workers();
    let count = |task: &str| workers.iter().filter(|it| it.task == task).count();
    assert_eq!((count("burn"), count("sensors")), (4, 1), "{workers:?}");
    signal(burning.child.id(), "KILL");
    burning.child.wait().expect("it can be waited for");
    let deadline = Instant::now() + Duration::from_secs(1);
    while !workers.iter().all(Worker::is_gone) {
        assert!(Instant::now() < deadline, "left: {workers:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    eventually("the memory is free", || memory_in_use(&node) == 0);
    let report: Value = serde_json::from_str(&node.out.read("report.json")).expect("JSON");
    assert_eq!(report["incomplete"], "the burn did not end");
    assert_eq!(report["exit_code"], 2);
}

#[test]
fn ctrl_c_ends_a_burn_within_a_second_with_what_was_measured() {
    let node = Node::healthy(NODE);
    let burning = Burning::start(&node, &["--duration", "60s"], &[0, 1, 2, 3]);
    signal(burning.child.id(), "INT");
    let ran = burning.end();
    assert!(ran.took < Duration::from_secs(1), "{:?}", ran.took);
    assert_eq!(ran.code, 2);
    assert_eq!(ran.report.0["incomplete"], "signal 2 (SIGINT)");
    assert_eq!(memory_in_use(&node), 0);
    // One stop is one finding.
    assert_eq!(ran.report.not_green(), set(&["run_complete: error"]));
    for gpu in 0..4 {
        let summary = summary(&node, &ran.report, "burn_completed", gpu);
        let says = "the run was stopped after the burn had multiplied for ";
        assert!(
            summary.starts_with(says) && summary.ends_with(" s, which run_complete reports"),
            "{summary}"
        );
    }
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    for uuid in uuids(&node) {
        let run = &facts["load"]["burn"][&uuid]["value"];
        let verified = run["precisions"][0]["products_verified"].as_u64();
        assert!(verified.is_some_and(|it| it > 0), "{run}");
        let times = facts["load"]["sensors"][&uuid]["samples"]["time_ms"].as_array();
        assert!(times.is_some_and(|it| !it.is_empty()));
    }
}

/// When a burn is stopped: what is waited for.
#[derive(Clone, Copy, Debug)]
enum StoppedAt {
    /// A worker of this kind runs.
    Worker(&'static str),
    /// So many launches were made on the first GPU.
    Launches(u64),
}

/// Long before anything is measured (in a driver slow enough to be met at it), while cuBLASLt takes
/// seconds to load, while the engines are tried, and in the first sweeps.
const STOPS: [(&str, StoppedAt); 6] = [
    ("nvml.delay_us=10000", StoppedAt::Worker("nvml")),
    ("", StoppedAt::Worker("burn")),
    ("", StoppedAt::Launches(1)),
    ("", StoppedAt::Launches(20)),
    ("cublaslt.hang=[cublasLtCreate]", StoppedAt::Worker("burn")),
    ("cublaslt.delay_us=300000", StoppedAt::Launches(1)),
];

#[test]
fn a_burn_that_is_stopped_at_any_moment_ends_within_a_second() {
    for (number, (change, stop)) in STOPS.into_iter().enumerate() {
        let changes: Vec<&str> = Some(change)
            .filter(|it| !it.is_empty())
            .into_iter()
            .collect();
        let node = Node::with("h200x1", &[], &changes);
        let mut command = with_engine(&node, &["--engine", "auto", "--duration", "60s"]);
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let burning = Burning {
            node: &node,
            child: child.expect("the validator starts"),
        };
        eventually("the moment to stop", || match stop {
            StoppedAt::Worker(task) => burning.workers().iter().any(|it| it.task == task),
            StoppedAt::Launches(count) => launches(&node)[0] >= count,
        });
        if !change.is_empty() {
            std::thread::sleep(Duration::from_millis(700));
        }
        let workers = burning.workers();
        let signals = ["INT", "TERM"];
        signal(burning.child.id(), signals[number % 2]);
        let ran = burning.end();
        let case = format!("{change} {stop:?}: {}{}", ran.stdout, ran.stderr);
        assert!(
            ran.took < Duration::from_millis(1500),
            "{:?} {case}",
            ran.took
        );
        assert_eq!(ran.code, 2, "{case}");
        assert_eq!(
            ran.report.finding("run_complete")["verdict"],
            "error",
            "{case}"
        );
        let of_burn = ran.report.findings().iter().filter(|it| {
            let check = it["check"].as_str().expect("text");
            check.starts_with("burn_") || check.starts_with("gemm_")
        });
        for finding in of_burn {
            let verdict = finding["verdict"].as_str().expect("text");
            assert!(["skip", "pass"].contains(&verdict), "{finding} {case}");
        }
        assert!(workers.iter().all(Worker::is_gone), "{workers:?} {case}");
        assert_eq!(memory_in_use(&node), 0, "{case}");
    }
}

/// A worker that was stopped from outside stands for one that hangs in the driver: it promised to
/// report and does not.
#[test]
fn a_worker_that_goes_silent_is_given_up_long_before_a_slow_start_would_be() {
    let node = Node::healthy(NODE);
    let arguments = ["--duration", "4s", "--deadline-scale", "0.4"];
    let burning = Burning::start(&node, &arguments, &[0, 1, 2, 3]);
    signal(burning.worker_of(1), "STOP");
    let ran = burning.end();
    let expected = ["burn_completed: error", "gemm_numerics: error"].map(str::to_owned);
    assert_eq!(
        not_green_by_gpu(&node, &ran.report),
        BTreeMap::from([(1, expected.to_vec())])
    );
    let summary = summary(&node, &ran.report, "burn_completed", 1);
    let says = "the burn did not answer for 2.0 s, in fp32 products";
    assert_eq!(summary, says);
    assert_eq!(verified(&node, &ran.report), [0, 2, 3]);
    assert_eq!(memory_in_use(&node), 0);
}

/// All processes are suspended for longer than a worker may be silent: no worker counts as silent.
#[test]
fn a_burn_that_was_suspended_and_goes_on_accuses_nobody() {
    let node = Node::healthy(NODE);
    let arguments = ["--duration", "5s", "--deadline-scale", "0.4"];
    let burning = Burning::start(&node, &arguments, &[0, 1, 2, 3]);
    let processes = [burning.child.id(), burning.worker_of(1)];
    suspend(&processes, Duration::from_secs(3));
    let ran = burning.end();
    assert_eq!(verified(&node, &ran.report), [0, 1, 2, 3]);
    for check in ["burn_completed", "gemm_numerics"] {
        let says = summary(&node, &ran.report, check, 1);
        assert!(!says.contains("did not answer"), "{check}: {says}");
    }
    // What it was to do it did nevertheless.
    let says = summary(&node, &ran.report, "burn_completed", 1);
    assert!(says.contains("its process stood still for 3."), "{says}");
    let says = summary(&node, &ran.report, "burn_completed", 2);
    assert!(!says.contains("stood still"), "{says}");
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    // What the sensors' process saw meanwhile has the time at which it was seen, not that at which
    // it was heard.
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    for log in facts["load"]["sensors"]
        .as_object()
        .expect("by UUID")
        .values()
    {
        let times_ms = log["samples"]["time_ms"].as_array().expect("times");
        let times_ms: Vec<i64> = times_ms.iter().filter_map(Value::as_i64).collect();
        let longest = times_ms.windows(2).map(|it| it[1] - it[0]).max();
        assert!(longest.is_some_and(|it| it < 1500), "{}", log["samples"]);
    }
}

/// The context is made once, while the machine is read, and the load begins on the order that
/// follows.
#[test]
fn workers_are_ready_before_they_are_told_to_begin() {
    let node = Node::healthy(NODE);
    let ran = burn(&node, &["--duration", "1s"]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    for uuid in uuids(&node) {
        let startup = &facts["load"]["burn"][&uuid]["value"]["startup"];
        let names = ["spawned_ms", "context_ms", "ready_ms", "first_product_ms"];
        let times = names.map(|name| {
            startup[name]
                .as_f64()
                .unwrap_or_else(|| panic!("{startup}"))
        });
        assert!(times.is_sorted(), "{startup}");
        assert!(startup["go_ms"].as_f64() < Some(times[3]), "{startup}");
        let kernel = &facts["load"]["cuda_kernel"][&uuid]["value"];
        assert_eq!(kernel["end"], "finished", "{kernel}");
        // The check kernel was no process of its own: it ended before the burn's worker stood by.
        assert!(times[0] + kernel["wall_ms"].as_f64().expect("a time") <= times[2] + 5.0);
    }
}

/// The faults that come in the middle of a burn, the checks of the host and of GPU 2 that are then
/// not green, and a part of the summary of `burn_completed`.
const MID_BURN: [(&str, &[&str], &[&str], &str); 3] = [
    (
        "burn-hang",
        &[],
        &["burn_completed: error", "gemm_numerics: error"],
        "the burn did not answer for ",
    ),
    (
        "burn-gpu-lost",
        &["kernel_log_xid: fail"],
        &[
            "burn_completed: fail",
            "burn_errors: fail",
            "burn_throttling: error",
            "gpu_reachable: fail",
        ],
        "CUDA_ERROR_UNKNOWN (999)",
    ),
    (
        "burn-sticky-error",
        &[],
        &["burn_completed: fail"],
        "CUDA_ERROR_LAUNCH_FAILED (719)",
    ),
];

#[test]
fn what_happens_to_a_gpu_in_the_middle_is_told_and_the_others_are_judged() {
    let owned = |texts: &[&str]| -> Vec<String> { texts.iter().map(|&it| it.to_owned()).collect() };
    for (fault, of_host, of_gpu, says) in MID_BURN {
        let node = Node::with_fault(NODE, fault);
        let ran = burn(&node, &["--duration", "3.2s", "--deadline-scale", "0.4"]);
        assert_eq!(
            not_green(&node, &ran.report),
            (owned(of_host), BTreeMap::from([(2, owned(of_gpu))])),
            "{fault}: {}",
            ran.stdout
        );
        let summary = summary(&node, &ran.report, "burn_completed", 2);
        assert!(summary.contains(says), "{fault}: {summary}");
        assert_eq!(verified(&node, &ran.report), [0, 1, 3], "{fault}");
        // A busy host is still proving the reference when it comes, in a step that may take 12 s at
        // this scale.
        assert!(
            ran.took < Duration::from_secs(20),
            "{fault}: {:?}",
            ran.took
        );
        assert_eq!(memory_in_use(&node), 0, "{fault}");
    }
}

#[test]
fn a_gpu_without_free_memory_is_not_judged() {
    let change = "gpus.1.cuda_free_memory_maximum=1MiB";
    let node = Node::with(NODE, &[], &[change]);
    let ran = burn(&node, &["--duration", "1s"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let expected = ["burn_completed: error", "gemm_numerics: error"].map(str::to_owned);
    assert_eq!(
        not_green_by_gpu(&node, &ran.report),
        BTreeMap::from([(1, expected.to_vec())])
    );
    let summary = summary(&node, &ran.report, "burn_completed", 1);
    assert!(summary.contains("bytes of memory are too few"), "{summary}");
}

#[test]
fn a_gpu_in_use_is_busy_and_burned_only_when_it_is_shared() {
    let node = Node::with(
        NODE,
        &[],
        &["processes.job={gpu: 2, pid: 4000001, memory: 4GiB}"],
    );
    let ran = burn(&node, &["--duration", "1s"]);
    assert_eq!(ran.code, 4, "{}", ran.stdout);
    assert_eq!(verified(&node, &ran.report), [0, 1, 3]);
    // The check kernel takes next to nothing, and distinguishes a busy GPU from a broken one.
    assert!(launches(&node)[2] < 10);
    let summary = summary(&node, &ran.report, "gemm_numerics", 2);
    assert_eq!(
        summary,
        "the GPU is in use, so it was not burned: 1 other process(es) use it"
    );
    let ran = burn(&node, &["--duration", "1s", "--share"]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert_eq!(verified(&node, &ran.report), [0, 1, 2, 3]);
}

/// Foreign processes may come between the readings of a GPU and its burn.
#[test]
fn a_gpu_whose_memory_others_took_meanwhile_is_not_broken() {
    let node = Node::with("g4dn.12xlarge", &["burn-memory-taken"], &[]);
    let ran = burn(&node, &["--duration", "1s"]);
    assert_eq!(ran.code, 4, "{}", ran.stdout);
    assert_eq!(verified(&node, &ran.report), [0, 1, 3]);
    let summary = summary(&node, &ran.report, "burn_completed", 2);
    let others = "while unknown name (pid 4000001, 15200 MiB) used the GPU";
    assert!(summary.ends_with(others), "{summary}");
}

/// It was seen on an H100 that a job had half of: 46 % of the rate, and every product right.
#[test]
fn a_gpu_that_is_slow_because_others_use_it_is_not_broken() {
    let slow = "gpus.2.speed=0.45";
    let alone = Node::with(NODE, &[], &[slow]);
    let ran = burn(&alone, &["--duration", "2.5s", "--share"]);
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    let job = "processes.job={gpu: 2, pid: 4000001, memory: 4GiB}";
    let shared = Node::with(NODE, &[], &[slow, job]);
    let ran = burn(&shared, &["--duration", "2.5s", "--share"]);
    assert_eq!(ran.code, 4, "{}", ran.stdout);
    let summary = summary(&shared, &ran.report, "gemm_throughput", 2);
    let others = "others used the GPU meanwhile: unknown name (pid 4000001, 4096 MiB)";
    assert!(summary.ends_with(others), "{summary}");
    let finding = finding(&shared, &ran.report, "gemm_numerics", 2);
    assert_eq!(finding["verdict"], "pass", "{finding}");
}

#[test]
fn a_gpu_in_mig_mode_is_burned_through_a_slice() {
    let node = Node::healthy("mig");
    let ran = burn(&node, &["--duration", "1s"]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert_eq!(verified(&node, &ran.report), [0, 1]);
    assert_eq!(memory_in_use(&node), 0);
}

/// GPUs that a program with this `CUDA_VISIBLE_DEVICES` must leave alone are left alone.
#[test]
fn cuda_visible_devices_says_which_gpus_are_burned() {
    let node = Node::healthy(NODE);
    let all = uuids(&node);
    for (visible, expected) in [
        ("0,2".to_owned(), &[0, 2][..]),
        (format!("{},{}", all[3], all[1]), &[1, 3]),
        (all[2][..12].to_owned(), &[2]),
        // The list ends at what names nothing.
        ("1,nonsense,2".to_owned(), &[1]),
    ] {
        let before = launches(&node);
        let ran = node
            .finish(command(&node, &["--duration", "0.5s"]).env("CUDA_VISIBLE_DEVICES", &visible));
        assert_eq!(
            worked(&node, &before),
            expected,
            "{visible}: {}",
            ran.stdout
        );
        assert_eq!(verified(&node, &ran.report), expected, "{visible}");
        assert_eq!(checked(&node, &ran.report), expected, "{visible}");
    }
    let no_device = "CUDA_ERROR_NO_DEVICE (100)";
    for (visible, says, error) in [
        (
            "nonsense",
            "`nonsense` names no GPU of this machine",
            no_device,
        ),
        ("", "it is empty, so CUDA offers no GPU", no_device),
        ("-1", "CUDA_VISIBLE_DEVICES is `-1`", no_device),
        (
            "0,0",
            "`0` names a GPU for the second time",
            "CUDA_ERROR_INVALID_DEVICE (101)",
        ),
        ("7", "`7` names no GPU of this machine", no_device),
    ] {
        let before = launches(&node);
        let mut command = command(&node, &["--duration", "0.5s"]);
        let (code, stdout, stderr) = said(command.env("CUDA_VISIBLE_DEVICES", visible));
        assert_eq!(worked(&node, &before), [0; 0], "{visible}: {stdout}");
        assert_eq!(code, 1, "{visible}: {stdout}{stderr}");
        let report: Value = serde_json::from_str(&node.out.read("report.json")).expect("JSON");
        let report = Report(report);
        assert_eq!(report.not_green(), set(&["cuda_visible_devices: fail"]));
        let said = report.finding("cuda_visible_devices")["summary"].to_string();
        assert!(said.contains(says), "{visible}: {said}");
        for gpu in 0..4 {
            let said = summary(&node, &report, "gemm_numerics", gpu);
            let says =
                format!("the burn did not run: CUDA does not initialise: cuInit returned {error}");
            assert!(said.starts_with(&says), "{visible}: {said}");
        }
    }
}

/// Numbers of the GPUs that did anything since, and be it the check kernel.
fn worked(node: &Node, before: &[u64]) -> Vec<usize> {
    let launches = launches(node);
    let gpus = 0..launches.len();
    gpus.filter(|gpu| launches[*gpu] > before[*gpu]).collect()
}

/// Numbers of the GPUs on which the check kernel passed; it is skipped on the others.
fn checked(node: &Node, report: &Report) -> Vec<usize> {
    let verdict = |uuid: &String| {
        let of_gpu = |it: &&Value| it["subject"]["gpu"]["uuid"] == **uuid;
        let finding = report.of_check("cuda_kernel").find(of_gpu);
        finding.expect("a finding of each GPU")["verdict"].clone()
    };
    let verdicts: Vec<Value> = uuids(node).iter().map(verdict).collect();
    assert!(verdicts.iter().all(|it| it == "pass" || it == "skip"));
    let gpus = 0..verdicts.len();
    gpus.filter(|gpu| verdicts[*gpu] == "pass").collect()
}

/// Whether a GPU is named, by its whole UUID: then nothing can hide it, and its worker need not
/// wait for CUDA's list.
#[test]
fn a_gpu_that_is_named_by_its_uuid_gets_ready_early() {
    let node = Node::healthy(NODE);
    let all = uuids(&node);
    let context_and_go = |command: &mut Command, gpu: usize| {
        let ran = node.finish(command);
        assert_eq!(verified(&node, &ran.report), [gpu], "{}", ran.stdout);
        assert_eq!(checked(&node, &ran.report), [gpu]);
        let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
        let startup = &facts["load"]["burn"][&all[gpu]]["value"]["startup"];
        let of = |name: &str| startup[name].as_f64().expect("a time");
        (of("context_ms"), of("go_ms"))
    };
    let short = ["--duration", "0.5s"];
    let mut by_variable = command(&node, &short);
    let (context, go) = context_and_go(by_variable.env("CUDA_VISIBLE_DEVICES", &all[1]), 1);
    assert!(context < go, "{context} {go}");
    // Hidden, and named all the same.
    let mut named = command(&node, &short);
    named
        .args(["--gpu", &all[2]])
        .env("CUDA_VISIBLE_DEVICES", "0");
    let (context, go) = context_and_go(&mut named, 2);
    assert!(context < go, "{context} {go}");
}

fn launches(node: &Node) -> Vec<u64> {
    let state = node.state();
    (0..state.scenario().gpus.len())
        .map(|gpu| state.state().gpu(gpu).launches())
        .collect()
}

#[test]
fn a_gpu_is_named_by_index_uuid_or_address_and_a_wrong_name_is_bad_input() {
    let node = Node::healthy(NODE);
    let address = node.state().scenario().gpus[3].pci_address.clone();
    let ran = burn(&node, &["--duration", "0.5s", "--gpu", &address]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert_eq!(verified(&node, &ran.report), [3]);
    let ran = burn(&node, &["--duration", "0.5s", "--gpu", "2"]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert_eq!(verified(&node, &ran.report), [2]);
    let mut wrong = command(&node, &["--duration", "0.5s", "--gpu", "GPU-nonsense"]);
    let (code, _, stderr) = said(&mut wrong);
    assert_eq!(code, 3);
    assert!(
        stderr.contains("no GPU GPU-nonsense; expected an index, PCI address or UUID of: GPU 0 ("),
        "{stderr}"
    );
}

#[test]
fn a_full_disk_costs_the_report_file_and_not_the_burn() {
    let node = Node::healthy("h200x1");
    let mut burn = command(&node, &["--duration", "0.5s"]);
    burn.args(["--junit", "/dev/full"])
        .env("TMPDIR", node.folder());
    let (code, stdout, stderr) = said(&mut burn);
    assert_eq!(code, 2, "a lost report is no pass: {stdout}{stderr}");
    let json: Value = serde_json::from_str(&node.out.read("report.json")).expect("JSON");
    assert_eq!(json["exit_code"], 0, "the burn itself passed");
    let says = "the JUnit report could not be written to /dev/full: ";
    let line = stderr.lines().find(|it| it.contains(says)).expect("a line");
    let saved = line.split("; it is saved as ").nth(1).expect("its place");
    let report = std::fs::read_to_string(saved).expect("it is there");
    roxmltree::Document::parse(&report).expect("the whole report");
    assert!(report.contains("gemm_numerics"));
}

#[test]
fn injected_faults_are_found_and_are_not_the_gpus() {
    let node = Node::healthy("h200x1");
    let ran = burn(&node, &["--duration", "2s", "--inject", "20"]);
    assert_eq!(ran.report.not_green(), set(&["gemm_numerics: error"]));
    assert_eq!(ran.code, 2);
    let says = "20 bits were flipped on purpose, 20 of them were found at their element and bit";
    assert!(ran.stderr.contains(says), "{}", ran.stderr);
}

#[test]
fn a_gpu_is_burned_by_one_burn_at_a_time() {
    let node = Node::healthy(NODE);
    let all = uuids(&node);
    let first = Burning::start(&node, &["--duration", "60s", "--gpu", &all[1]], &[1]);
    let pid = first.child.id();
    let mut second = node.validator();
    second.args(["burn", "--simulated-ok", "--duration", "0.5s", "--sysroot"]);
    let (code, _, stderr) = said(second.arg(node.sysroot()));
    assert_eq!(code, 4, "{stderr}");
    let says = format!("{} is burned by process {pid} already", all[1]);
    assert!(stderr.contains(&says), "{stderr}");
    // Another GPU is free.
    let mut third = node.validator();
    third.args(["burn", "--simulated-ok", "--duration", "0.5s", "--gpu"]);
    third.args([&all[2], "--sysroot"]);
    let (code, stdout, stderr) = said(third.arg(node.sysroot()));
    assert_eq!(code, 0, "{stdout}{stderr}");
    // What a killed burn held is free.
    signal(pid, "KILL");
    let output = first
        .child
        .wait_with_output()
        .expect("it can be waited for");
    assert_eq!(output.status.code(), None);
    let ran = burn(&node, &["--duration", "0.5s", "--gpu", &all[1]]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert_eq!(verified(&node, &ran.report), [1]);
}

#[test]
fn a_burn_in_the_background_is_shown_and_stopped_from_elsewhere() {
    let node = Node::healthy(NODE);
    let (code, stdout, stderr) = said(&mut command(&node, &["--duration", "60s", "--detach"]));
    assert_eq!(code, 0, "{stdout}{stderr}");
    let pid = stdout
        .strip_prefix("process ")
        .and_then(|it| it.split_once(": "));
    let (pid, rest) = pid.unwrap_or_else(|| panic!("no process: {stdout}"));
    assert!(rest.starts_with("4 GPUs for 60 s, log "), "{stdout}");
    wait_for_load(&node, &[0, 1, 2, 3]);
    let workers = workers_of(pid.parse().expect("a number"));
    assert_eq!(workers.len(), 5, "{workers:?}");
    eventually("the progress of each GPU", || {
        let (code, stdout, _) = said(node.validator().args(["burn", "status"]));
        assert_eq!(code, 0);
        assert!(
            stdout.starts_with(&format!("process {pid}: 4 GPUs for 60 s")),
            "{stdout}"
        );
        stdout.matches("TFLOP/s").count() == 4
    });
    let started = Instant::now();
    let (code, stdout, stderr) = said(node.validator().args(["burn", "stop"]));
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(
        stdout,
        format!("process {pid} stopped, its reports are written\n")
    );
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
    // Nothing is left the moment that it returns.
    assert_eq!(memory_in_use(&node), 0);
    assert!(workers.iter().all(Worker::is_gone), "{workers:?}");
    let report: Value = serde_json::from_str(&node.out.read("report.json")).expect("JSON");
    assert_eq!(report["incomplete"], "signal 15 (SIGTERM)");
    let (code, stdout, _) = said(node.validator().args(["burn", "status"]));
    assert_eq!(code, 0);
    let last = format!("no burn is running\nlast burn: process {pid}, ended ");
    assert!(stdout.starts_with(&last), "{stdout}");
    let nothing = (0, "no burn is running\n".to_owned(), String::new());
    assert_eq!(said(node.validator().args(["burn", "stop"])), nothing);
}

#[test]
fn a_process_with_the_number_of_a_burn_that_is_gone_is_left_alone() {
    let node = Node::healthy("h200x1");
    let mut other = Command::new("sleep").arg("600").spawn().expect("sleep");
    let folder = node.folder().join("run");
    std::fs::create_dir_all(&folder).expect("a folder");
    let left = serde_json::json!({
        "pid": other.id(), "started_ticks": 1, "gpus": uuids(&node), "duration_s": 60.0, "progress": [], "log": null,
    });
    let file = folder.join(format!("burn-{}.json", other.id()));
    std::fs::write(&file, left.to_string()).expect("written");
    let nothing = (0, "no burn is running\n".to_owned(), String::new());
    assert_eq!(said(node.validator().args(["burn", "stop"])), nothing);
    assert_eq!(other.try_wait().expect("asked"), None, "it was signalled");
    assert!(!file.exists());
    // Nor does it prevent another burn.
    std::fs::write(&file, left.to_string()).expect("written");
    assert_eq!(burn(&node, &["--duration", "0.5s"]).code, 0);
    other.kill().expect("killed");
    other.wait().expect("reaped");
}

/// Long enough for every check of the burn to be judged, on every node that ships.
#[test]
#[ignore = "takes minutes: cargo test -p it -- --ignored every_node_burns"]
fn every_node_burns_for_six_seconds_and_passes() {
    let catalogue = simulator::Catalogue::shipped();
    for name in catalogue.names(simulator::Kind::Node).expect("nodes") {
        let node = Node::healthy(&name);
        let ran = burn(&node, &["--duration", "6s"]);
        assert_eq!(ran.report.not_green(), set(&[]), "{name}");
        assert_eq!(ran.code, 0, "{name}: {}", ran.stdout);
        assert_eq!(memory_in_use(&node), 0, "{name}");
    }
}
