//! The sentinel on simulated nodes: it works idle GPUs, and yields them to processes of others.

use std::fs::File;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cluster::kubelet::{Container, Kubelet, KubeletScript};
use serde_json::Value;
use simulator::state::ProcessSlot;

use crate::node::{Node, said};
use crate::processes::{eventually, signal, workers_of};

const MIB: u64 = 1 << 20;
/// Waiting times short enough for tests.
const QUICK: [&str; 6] = [
    "--grace",
    "0.1s",
    "--quiet",
    "0.3s",
    "--starts-an-hour",
    "100000",
];

fn command(node: &Node, arguments: &[&str]) -> Command {
    let mut command = node.validator();
    command
        .args(["sentinel", "--simulated-ok", "--sysroot"])
        .arg(node.sysroot())
        .args(QUICK)
        .env("GPU_VALIDATOR_SENTINEL_MEMORY", "4MiB")
        .args(arguments);
    command
}

/// `gpu-validator sentinel status` and its like.
fn ask(node: &Node, arguments: &[&str]) -> (i32, String, String) {
    said(node.validator().arg("sentinel").args(arguments))
}

/// A sentinel in the foreground, with its log lines in a file.
struct Sentinel<'n> {
    node: &'n Node,
    child: Child,
}

impl<'n> Sentinel<'n> {
    fn start(node: &'n Node, arguments: &[&str]) -> Self {
        Self::spawn(node, &mut command(node, arguments))
    }

    fn spawn(node: &'n Node, command: &mut Command) -> Self {
        let log = File::create(node.out.path("log")).expect("a file");
        let child = command
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .expect("it starts");
        Self { node, child }
    }

    fn log(&self) -> String {
        self.node.out.read("log")
    }

    fn status(&self) -> Option<Value> {
        let text = std::fs::read(self.node.folder().join("run/sentinel.json")).ok()?;
        let status: Value = serde_json::from_slice(&text).ok()?;
        // One that was killed leaves its own.
        (status["pid"] == self.child.id()).then_some(status)
    }

    /// State and status of a GPU by its number among those that are watched.
    fn gpu(&self, number: usize) -> Value {
        self.status()
            .map_or(Value::Null, |it| it["gpus"][number].clone())
    }

    fn state(&self, number: usize) -> String {
        self.gpu(number)["state"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }

    fn until(&mut self, number: usize, state: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.state(number) != state {
            let ended = self.child.try_wait().expect("asked");
            assert!(ended.is_none(), "it ended: {}", self.log());
            let (log, gpu) = (self.log(), self.gpu(number));
            assert!(Instant::now() < deadline, "no {state}: {gpu}\n{log}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn memory_used(&self, gpu: usize) -> u64 {
        self.node.state().state().gpu(gpu).memory_used()
    }

    fn launches(&self, gpu: usize) -> u64 {
        self.node.state().state().gpu(gpu).launches()
    }

    /// Stops it as Ctrl-C does; the exit code, and how long it took.
    fn interrupt(mut self) -> (i32, Duration) {
        signal(self.child.id(), "INT");
        let began = Instant::now();
        let status = self.child.wait().expect("it ends");
        (status.code().expect("no signal"), began.elapsed())
    }
}

impl Drop for Sentinel<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// This test process as another user of a GPU, until it is dropped.
struct Newcomer<'s>(&'s ProcessSlot);

impl<'s> Newcomer<'s> {
    fn with_memory(node: &'s simulator::node::Node, gpu: usize, bytes: u64) -> Self {
        let slot = node.state().gpu(gpu).attach().expect("a slot");
        slot.open_context();
        assert!(slot.take_memory(node.state().gpu(gpu), bytes, u64::MAX));
        Self(slot)
    }

    /// Of a context without memory.
    fn with_context(node: &'s simulator::node::Node, gpu: usize) -> Self {
        let slot = node.state().gpu(gpu).attach().expect("a slot");
        slot.open_context();
        Self(slot)
    }
}

impl Drop for Newcomer<'_> {
    fn drop(&mut self) {
        self.0.detach();
    }
}

#[test]
fn a_free_gpu_is_worked_with_log_lines_and_ctrl_c_frees_it() {
    let node = Node::healthy("h200x1");
    let metrics = node.out.path("sentinel.prom");
    let status_file = node.out.path("status.json");
    let arguments = [
        "--metrics-file",
        metrics.to_str().expect("text"),
        "--status-file",
        status_file.to_str().expect("text"),
    ];
    let mut sentinel = Sentinel::start(&node, &arguments);
    sentinel.until(0, "working");
    assert_eq!(sentinel.gpu(0)["memory_bytes"], 4 * MIB);
    assert!(sentinel.memory_used(0) >= 4 * MIB);
    eventually("verified memory", || {
        sentinel.gpu(0)["bytes_verified"].as_u64() > Some(8 * MIB)
    });
    let (code, text, _) = ask(&node, &["status"]);
    assert_eq!(code, 0);
    assert!(
        text.contains("GPU 0 GPU-") && text.contains(": working, "),
        "{text}"
    );
    assert!(text.contains("SIMULATED"), "{text}");
    let pid = sentinel.child.id();
    assert_eq!(
        workers_of(pid).len(),
        2,
        "one that works, one that reads NVML"
    );
    eventually("the metrics", || {
        let metrics = std::fs::read_to_string(&metrics).unwrap_or_default();
        metrics.contains(",state=\"working\"} 1")
    });
    let status: Value = serde_json::from_str(&node.out.read("status.json")).expect("JSON");
    assert_eq!(status["workload"], "memory");
    let log = sentinel.log();
    for line in [
        "watching 1 GPUs",
        "GPU 0 free, starting workload memory",
        "GPU 0 working, 4 MiB",
    ] {
        assert!(log.contains(line), "{line} in {log}");
    }
    let (code, took) = sentinel.interrupt();
    println!("Ctrl-C took {took:?}");
    assert_eq!(code, 0);
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert_eq!(node.state().state().gpu(0).memory_used(), 0);
    assert!(workers_of(pid).is_empty());
    assert!(node.out.read("log").ends_with("stopping\nstopped\n"));
    assert_eq!(ask(&node, &["status"]).0, 2, "none runs");
}

#[test]
fn a_listed_process_gets_the_gpu_and_the_others_go_on() {
    let node = Node::healthy("h200x8");
    let mut sentinel = Sentinel::start(&node, &[]);
    for gpu in 0..8 {
        sentinel.until(gpu, "working");
    }
    let state = node.state();
    let newcomer = Newcomer::with_context(&state, 3);
    sentinel.until(3, "away");
    assert_eq!(sentinel.memory_used(3), 0);
    // Its memory may be seen before the driver lists it.
    let pid = format!("(pid {}", std::process::id());
    eventually("the name of the newcomer", || {
        sentinel.gpu(3)["reason"].to_string().contains(&pid)
    });
    assert_eq!(
        sentinel.gpu(3)["pid"],
        Value::Null,
        "its context is gone, too"
    );
    std::thread::sleep(Duration::from_millis(800));
    assert_eq!(
        sentinel.state(3),
        "away",
        "for as long as the process lives"
    );
    for gpu in [0, 1, 2, 4, 5, 6, 7] {
        assert_eq!(sentinel.state(gpu), "working");
        assert_eq!(sentinel.gpu(gpu)["yields"], 0);
    }
    drop(newcomer);
    sentinel.until(3, "working");
    assert_eq!(sentinel.interrupt().0, 0);
}

/// A real CUDA process: it opens nvidia-uvm, so that all GPUs fall silent; it takes one, and the
/// other resumes.
#[test]
fn a_cuda_process_silences_all_gpus_and_takes_one() {
    let node = Node::healthy("h200x8");
    let uuids: Vec<String> = {
        let state = node.state();
        let scenario = state.scenario();
        scenario.gpus.iter().map(|it| it.uuid.clone()).collect()
    };
    let two = uuids[..2].join(",");
    let mut sentinel = Sentinel::start(&node, &["--gpu", &two]);
    sentinel.until(0, "working");
    sentinel.until(1, "working");
    // Own workers that start are no alarm.
    assert_eq!(sentinel.gpu(0)["yields"], 0, "{}", sentinel.log());
    let assignment = serde_json::json!({
        "id": {"workload": "memory", "gpus": [uuids[1]], "ordinal": 9},
        "devices": [uuids[1]],
        "memory": {"bytes": MIB},
        "requested": {"seconds": 60.0, "passes": null},
        "on_foreign_process": "report",
        "task": {"memory": {"seed": 1}},
    });
    let mut foreign = node
        .validator()
        .args(["worker", "workload", "--assignment"])
        .arg(assignment.to_string())
        .env("CUDA_VISIBLE_DEVICES", &uuids[1])
        .stdout(Stdio::null())
        .spawn()
        .expect("it starts");
    sentinel.until(1, "away");
    eventually("resumption", || {
        sentinel.state(0) == "working" && sentinel.gpu(0)["yields"] == 1
    });
    let log = sentinel.log();
    assert!(
        log.contains("GPU 0 yielding: a CUDA process started on this node"),
        "{log}"
    );
    assert_eq!(sentinel.gpu(0)["starts"], 1, "its context was kept");
    foreign.kill().expect("killed");
    foreign.wait().expect("reaped");
    sentinel.until(1, "working");
    assert_eq!(sentinel.interrupt().0, 0);
}

#[test]
fn the_reference_count_of_the_driver_is_an_alarm() {
    let node = Node::healthy("h200x1");
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "working");
    let path = node.sysroot().join("sys/module/nvidia_uvm/refcnt");
    // In place, as sysfs shows it.
    std::fs::write(&path, "3\n").expect("written");
    sentinel.until(0, "yielding");
    eventually("freed memory", || sentinel.memory_used(0) == 0);
    assert!(sentinel.gpu(0)["pid"].is_u64(), "the context is kept");
    sentinel.until(0, "working");
    assert_eq!(sentinel.status().expect("it runs")["false_alarms"], 1);
}

#[test]
fn a_reservation_holds_88_percent_in_chunks_and_computes_nothing() {
    // More than one chunk of 512 MiB.
    let node = Node::with(
        "g4dn.xlarge",
        &[],
        &["gpus.0.cuda_free_memory_maximum=2GiB"],
    );
    let capacity: u64 = 2 << 30;
    let arguments = ["--workload", "reserve", "--memory", "88%"];
    let mut sentinel = Sentinel::start(&node, &arguments);
    sentinel.until(0, "working");
    let held = sentinel.memory_used(0);
    assert!(
        (capacity / 100 * 86..=capacity / 100 * 89).contains(&held),
        "{held} of {capacity}: {} {}",
        sentinel.gpu(0),
        sentinel.log()
    );
    let launches = sentinel.launches(0);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(sentinel.launches(0), launches);
    let state = node.state();
    let newcomer = Newcomer::with_context(&state, 0);
    sentinel.until(0, "away");
    assert_eq!(sentinel.memory_used(0), 0);
    drop(newcomer);
    sentinel.until(0, "working");
    let (_, took) = sentinel.interrupt();
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[test]
fn only_the_chosen_gpus_are_worked() {
    let node = Node::healthy("h200x8");
    let uuid = node.state().scenario().gpus[5].uuid.clone();
    let by_argument = command(&node, &["--gpu", &uuid]);
    let mut by_environment = command(&node, &[]);
    by_environment.env("CUDA_VISIBLE_DEVICES", &uuid);
    for mut command in [by_argument, by_environment] {
        let mut sentinel = Sentinel::spawn(&node, &mut command);
        sentinel.until(0, "working");
        let status = sentinel.status().expect("it runs");
        assert_eq!(status["gpus"].as_array().map(Vec::len), Some(1));
        assert_eq!(status["gpus"][0]["uuid"], uuid.as_str());
        for gpu in 0..8 {
            assert_eq!(sentinel.memory_used(gpu) > 0, gpu == 5, "GPU {gpu}");
        }
        assert_eq!(sentinel.interrupt().0, 0);
    }
    let (code, _, text) = said(&mut command(&node, &["--gpu", "GPU-x"]));
    assert_eq!(code, 3);
    assert!(text.contains("no GPU GPU-x"), "{text}");
}

#[test]
fn pause_resume_opt_out_report_and_stop() {
    let node = Node::healthy("h200x8");
    let uuids: Vec<String> = {
        let scenario = node.state().scenario();
        scenario.gpus.iter().map(|it| it.uuid.clone()).collect()
    };
    // A pause holds before the sentinel starts.
    assert_eq!(ask(&node, &["pause", "--gpu", &uuids[1]]).0, 0);
    let two = uuids[..2].join(",");
    let mut sentinel = Sentinel::start(&node, &["--gpu", &two]);
    sentinel.until(0, "working");
    assert_eq!(sentinel.state(1), "withheld");
    let (code, _, text) = said(&mut command(&node, &[]));
    assert_eq!(code, 3, "a second one");
    let pid = sentinel.child.id();
    assert!(
        text.contains(&format!(
            "a sentinel runs on this machine already: process {pid}"
        )),
        "{text}"
    );
    assert_eq!(ask(&node, &["resume", "--gpu", &uuids[1]]).0, 0);
    sentinel.until(1, "working");
    let began = Instant::now();
    assert_eq!(ask(&node, &["pause", "--wait"]).0, 0);
    println!("pause --wait took {:?}", began.elapsed());
    for gpu in 0..2 {
        assert_eq!(sentinel.memory_used(gpu), 0);
        assert!(node.state().state().gpu(gpu).processes().is_empty());
    }
    assert_eq!(ask(&node, &["resume"]).0, 0);
    sentinel.until(0, "working");
    sentinel.until(1, "working");
    eventually("verified memory", || {
        let verified = |gpu| sentinel.gpu(gpu)["bytes_verified"].as_u64() > Some(0);
        verified(0) && verified(1)
    });
    let (code, report, _) = ask(&node, &["report", "--junit", "-"]);
    assert_eq!(code, 0, "{report}");
    assert_eq!(report.matches("<testcase").count(), 2, "{report}");
    assert!(
        !report.contains("<failure") && !report.contains("<skipped"),
        "{report}"
    );
    let opt_out = node.folder().join("run/no-sentinel");
    std::fs::write(&opt_out, format!("{}\n", uuids[0])).expect("written");
    sentinel.until(0, "withheld");
    assert_eq!(sentinel.state(1), "working");
    std::fs::remove_file(&opt_out).expect("removed");
    sentinel.until(0, "working");
    let (code, text, _) = ask(&node, &["stop"]);
    assert_eq!((code, text), (0, format!("process {pid} stopped\n")));
    for gpu in 0..2 {
        assert_eq!(node.state().state().gpu(gpu).memory_used(), 0);
    }
    assert_eq!(ask(&node, &["stop"]).1, "no sentinel is running\n");
}

#[test]
fn a_validation_and_a_burn_have_the_gpus_to_themselves() {
    let node = Node::healthy("h200x1");
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "working");
    let ran = node.run(&["--level", "quick"]);
    assert_eq!(ran.report.finding("foreign_processes")["verdict"], "pass");
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    sentinel.until(0, "working");
    let burned = node.finish(&mut node.burn_command(&["--duration", "0.5s"]));
    assert_eq!(burned.code, 0, "{}{}", burned.stdout, burned.stderr);
    let log = sentinel.log();
    assert!(
        log.contains("GPU 0 yielding: a validation runs (pid "),
        "{log}"
    );
    sentinel.until(0, "working");
    assert_eq!(sentinel.interrupt().0, 0);
}

#[test]
fn gpus_in_modes_without_room_are_not_worked() {
    for (node, change, reason) in [
        (
            "h200x1",
            Some("gpus.0.compute_mode=exclusive-process"),
            "compute mode ExclusiveProcess",
        ),
        (
            "h200x1",
            Some("gpus.0.compute_mode=prohibited"),
            "compute mode Prohibited",
        ),
        ("mig", None, "MIG mode"),
    ] {
        let changes: Vec<&str> = change.into_iter().collect();
        let node = Node::with(node, &[], &changes);
        let mut sentinel = Sentinel::start(&node, &[]);
        sentinel.until(0, "withheld");
        std::thread::sleep(Duration::from_millis(500));
        let gpu = sentinel.gpu(0);
        assert_eq!(gpu["state"], "withheld");
        assert_eq!(gpu["starts"], 0);
        let text = gpu["reason"].as_str().expect("text");
        assert!(text.starts_with(reason), "{text}");
    }
}

/// Changes a node while the sentinel runs on it.
fn change(node: &Node, healthy: bool, change: &[&str]) {
    let overrides: Vec<String> = change.iter().map(|&it| it.to_owned()).collect();
    let change = simulator::resolve::NodeChange {
        catalogue: &simulator::Catalogue::shipped(),
        healthy,
        faults: &[],
        overrides: &overrides,
    };
    simulator::change::change_node(node.folder(), &change).expect("changed");
}

#[test]
fn a_mode_that_is_set_while_a_worker_runs_is_noticed() {
    let node = Node::healthy("h200x1");
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "working");
    change(&node, false, &["gpus.0.compute_mode=exclusive-process"]);
    sentinel.until(0, "withheld");
    assert_eq!(sentinel.memory_used(0), 0);
    change(&node, true, &[]);
    sentinel.until(0, "working");
}

/// Every kind of newcomer that NVML can show: a process with memory, one with a context alone, a
/// display server, and memory that no list explains (a container's, or another PID namespace's).
#[test]
fn newcomers_of_each_kind_get_the_gpu_until_they_leave() {
    let node = Node::healthy("h100-pcie-2");
    let mut sentinel = Sentinel::start(&node, &[]);
    let kinds = [
        (
            "processes.job={gpu: 1, pid: 4000001, memory: 20GiB}",
            "4000001",
        ),
        (
            "processes.idle={gpu: 1, pid: 4000002, memory: 0B}",
            "4000002",
        ),
        (
            "processes.Xorg={gpu: 1, pid: 4000003, memory: 40MiB, graphics: true}",
            "4000003",
        ),
        (
            "processes.hidden={gpu: 1, pid: 4000004, memory: 8GiB, listed: false}",
            "memory",
        ),
    ];
    for (newcomer, reason) in kinds {
        sentinel.until(0, "working");
        sentinel.until(1, "working");
        change(&node, false, &[newcomer]);
        sentinel.until(1, "away");
        // Memory is polled more often than process lists: at first it belongs to no listed process.
        eventually(&format!("the reason of {newcomer}"), || {
            sentinel.gpu(1)["reason"].to_string().contains(reason)
        });
        let gpu = sentinel.gpu(1);
        assert_eq!(gpu["pid"], Value::Null, "{newcomer}: {gpu}");
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(sentinel.state(1), "away", "{newcomer}");
        change(&node, true, &[]);
    }
    sentinel.until(1, "working");
    assert_eq!(sentinel.interrupt().0, 0);
}

/// It was right until then.
#[test]
fn a_wrong_number_at_work_ends_the_work_on_that_gpu_alone() {
    let node = Node::healthy("h100-pcie-2");
    let mut sentinel = Sentinel::start(&node, &[]);
    for gpu in 0..2 {
        sentinel.until(gpu, "working");
    }
    eventually("verified memory", || {
        sentinel.gpu(1)["bytes_verified"].as_u64() > Some(0)
    });
    change(
        &node,
        false,
        &["gpus.1.wrong_results={kind: bit, kernel: memory_write}"],
    );
    sentinel.until(1, "ill");
    eventually("the end of its worker", || sentinel.gpu(1)["pid"].is_null());
    assert_eq!(sentinel.memory_used(1), 0);
    assert_eq!(sentinel.state(0), "working");
    let (code, report, _) = ask(&node, &["report", "--junit", "-"]);
    assert_eq!(code, 1);
    assert_eq!(report.matches("<failure").count(), 1, "{report}");
    assert_eq!(sentinel.interrupt().0, 1);
}

#[test]
fn a_gpu_that_is_lost_at_work_is_left_alone() {
    let node = Node::healthy("h200x1");
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "working");
    change(&node, false, &["gpus.0.lost=true"]);
    sentinel.until(0, "ill");
    eventually("the end of its worker", || sentinel.gpu(0)["pid"].is_null());
    assert_eq!(sentinel.interrupt().0, 1);
}

#[test]
fn a_gpu_that_is_lost_disturbs_no_neighbour() {
    let node = Node::healthy("h100-pcie-2");
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "working");
    sentinel.until(1, "working");
    let (pid, launches) = (sentinel.gpu(1)["pid"].clone(), sentinel.launches(1));
    change(&node, false, &["gpus.0.lost=true"]);
    sentinel.until(0, "ill");
    eventually("more work on the neighbour", || {
        sentinel.launches(1) > launches + 10
    });
    std::thread::sleep(Duration::from_millis(700));
    let neighbour = sentinel.gpu(1);
    assert_eq!(neighbour["state"], "working", "{neighbour}");
    assert_eq!(neighbour["pid"], pid, "{neighbour}");
    assert!(neighbour["finding"].is_null(), "{neighbour}");
}

#[test]
fn an_mps_daemon_and_its_end_are_noticed() {
    let node = Node::healthy("h200x1");
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "working");
    let folder = node.sysroot().join("tmp/nvidia-mps");
    std::fs::create_dir_all(&folder).expect("made");
    std::fs::write(folder.join("control"), "").expect("written");
    sentinel.until(0, "withheld");
    assert!(
        sentinel.gpu(0)["reason"]
            .to_string()
            .contains("an MPS daemon runs")
    );
    std::fs::remove_dir_all(&folder).expect("removed");
    sentinel.until(0, "working");
}

#[test]
fn a_gpu_that_computes_wrongly_is_left_alone() {
    let node = Node::with_fault("h200x1", "memory-wrong-bit");
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "ill");
    eventually("the end of its worker", || sentinel.gpu(0)["pid"].is_null());
    assert_eq!(sentinel.memory_used(0), 0);
    let finding = sentinel.gpu(0)["finding"].to_string();
    assert!(
        finding.contains("values differ from the expected ones"),
        "{finding}"
    );
    let (code, report, _) = ask(&node, &["report", "--junit", "-"]);
    assert_eq!(code, 1);
    assert!(report.contains("<failure"), "{report}");
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!(sentinel.gpu(0)["starts"], 1);
    assert_eq!(sentinel.interrupt().0, 1);
}

#[test]
fn a_status_that_cannot_be_written_delays_no_yield() {
    let node = Node::healthy("h200x1");
    let arguments = [
        "--status-file",
        "/proc/none/status",
        "--metrics-file",
        "/proc/none/m",
    ];
    let mut sentinel = Sentinel::start(&node, &arguments);
    sentinel.until(0, "working");
    let state = node.state();
    let _newcomer = Newcomer::with_memory(&state, 0, 600 * MIB);
    eventually("freed memory", || sentinel.memory_used(0) == 600 * MIB);
}

#[test]
fn a_power_cap_lowers_the_share_of_time_in_which_a_worker_computes() {
    let node = Node::healthy("h200x1");
    let mut sentinel = Sentinel::start(&node, &["--max-power", "15%"]);
    sentinel.until(0, "working");
    // Idle, an H200 draws more than a tenth of its limit: the cap is near its idle power.
    let duty = |sentinel: &Sentinel<'_>| sentinel.gpu(0)["duty"].as_f64().unwrap_or(1.0);
    eventually("a lower duty cycle", || duty(&sentinel) < 0.5);
    assert!(sentinel.gpu(0)["power_mw"].as_u64() > Some(0));
    // It still works, and what it verifies is right.
    let before = sentinel.gpu(0)["bytes_verified"].as_u64();
    eventually("verified memory", || {
        sentinel.gpu(0)["bytes_verified"].as_u64() > before
    });
    assert_eq!(sentinel.state(0), "working");
    assert_eq!(sentinel.interrupt().0, 0);
    // Without a cap it always computes.
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "working");
    std::thread::sleep(Duration::from_millis(2500));
    assert!((duty(&sentinel) - 1.0).abs() < f64::EPSILON);
    let (code, _, stderr) = said(&mut command(&node, &["--max-power", "0%"]));
    assert_eq!(code, 3, "{stderr}");
}

fn pod_with(ids: &[String]) -> Container {
    Container {
        namespace: "team-a".to_owned(),
        pod: "train-0".to_owned(),
        container: "main".to_owned(),
        resource: "nvidia.com/gpu".to_owned(),
        device_ids: ids.to_vec(),
    }
}

#[test]
fn a_gpu_that_the_kubelet_gave_to_a_pod_is_left_alone_until_it_is_taken_back() {
    let node = Node::healthy("h100-pcie-2");
    let uuids: Vec<String> = {
        let scenario = node.state().scenario();
        scenario.gpus.iter().map(|it| it.uuid.clone()).collect()
    };
    let root = node.sysroot().join("var/lib/kubelet");
    let script = |containers: Vec<Container>| KubeletScript {
        containers,
        ..KubeletScript::healthy(&uuids)
    };
    let kubelet = Kubelet::start(&root, script(vec![pod_with(&uuids[1..])]));
    let mut sentinel = Sentinel::start(&node, &[]);
    sentinel.until(0, "working");
    sentinel.until(1, "withheld");
    assert_eq!(sentinel.memory_used(1), 0);
    eventually("the name of the pod", || {
        let reason = sentinel.gpu(1)["reason"].to_string();
        reason.contains("team-a/train-0")
    });
    // No answer is no free GPU.
    drop(kubelet);
    sentinel.until(0, "withheld");
    eventually("freed memory", || sentinel.memory_used(0) == 0);
    // The pod has ended.
    let kubelet = Kubelet::start(&root, script(Vec::new()));
    sentinel.until(0, "working");
    sentinel.until(1, "working");
    drop(kubelet);
    // A replica of a time-sliced GPU is the GPU; an id of another form may be any.
    let replica = pod_with(&[format!("{}::3", uuids[0])]);
    let kubelet = Kubelet::start(&root, script(vec![replica]));
    sentinel.until(1, "working");
    sentinel.until(0, "withheld");
    drop(kubelet);
    let _kubelet = Kubelet::start(&root, script(vec![pod_with(&["nvidia0".to_owned()])]));
    sentinel.until(1, "withheld");
    sentinel.until(0, "withheld");
    assert_eq!(sentinel.interrupt().0, 0);
}

/// From the newcomer's memory to the last of ours.
#[test]
fn yield_latency_of_200_trials() {
    let node = Node::healthy("h200x8");
    let mut sentinel = Sentinel::start(&node, &[]);
    let state = node.state();
    let mut latencies = Vec::new();
    for trial in 0..200 {
        let gpu = trial % 8;
        sentinel.until(gpu, "working");
        let own = || {
            let processes = state.state().gpu(gpu).processes();
            let others = processes.iter().filter(|it| it.pid != std::process::id());
            others.map(|it| it.memory_bytes).sum::<u64>()
        };
        assert!(own() > 0);
        let newcomer = Newcomer::with_memory(&state, gpu, 600 * MIB);
        let began = Instant::now();
        while own() > 0 {
            assert!(
                began.elapsed() < Duration::from_secs(5),
                "{}",
                sentinel.gpu(gpu)
            );
            std::thread::sleep(Duration::from_micros(500));
        }
        latencies.push(began.elapsed());
        drop(newcomer);
    }
    latencies.sort();
    let (median, worst) = (latencies[100], latencies[199]);
    let of_detection = (0..8).map(|gpu| sentinel.gpu(gpu)["data_free"]["worst_ms"].as_f64());
    let freed_ms = of_detection.flatten().fold(0.0, f64::max);
    println!("yield of 200 trials: median {median:?}, worst {worst:?}");
    println!("of which from detection to freed memory: worst {freed_ms:.1} ms");
    assert!(worst < Duration::from_secs(2), "{worst:?}");
    assert!(median < Duration::from_millis(250), "{median:?}");
}

#[test]
fn killed_processes_leave_neither_orphans_nor_memory() {
    let node = Node::healthy("h200x8");
    let uuids: Vec<String> = {
        let scenario = node.state().scenario();
        scenario.gpus[..2]
            .iter()
            .map(|it| it.uuid.clone())
            .collect()
    };
    let two = uuids.join(",");
    let mut all = Vec::new();
    // The moments are spread over start, work and yields.
    for round in 0..10_u64 {
        let mut sentinel = Sentinel::start(&node, &["--gpu", &two]);
        let pid = sentinel.child.id();
        if round % 2 == 0 {
            sentinel.until(0, "working");
            // One of its workers; its GPU is worked again.
            let workers = workers_of(pid);
            let worker = workers
                .iter()
                .find(|it| it.task == "workload")
                .expect("one");
            all.push(worker.pid);
            signal(worker.pid, "KILL");
        }
        std::thread::sleep(Duration::from_millis(37 * round % 300));
        all.extend(workers_of(pid).iter().map(|it| it.pid));
        let killed = Instant::now();
        signal(pid, "KILL");
        sentinel.child.wait().expect("reaped");
        eventually("the end of its workers", || {
            workers_of(pid).is_empty() && {
                let gone = |it: &u32| {
                    std::fs::read(format!("/proc/{it}/cmdline")).map_or(true, |it| it.is_empty())
                };
                all.iter().all(gone)
            }
        });
        for gpu in 0..2 {
            assert_eq!(node.state().state().gpu(gpu).memory_used(), 0);
        }
        assert!(
            killed.elapsed() < Duration::from_secs(3),
            "{:?}",
            killed.elapsed()
        );
    }
}
