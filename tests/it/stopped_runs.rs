//! Runs and probes that are stopped or killed from outside, and runs side by side.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::node::{Node, Ran, Report, said, set, texts, validator};
use crate::processes::{Worker, eventually, signal, suspend, workers_of};

const NVML_HANGS: &str = "nvml.hang=[nvmlDeviceGetTemperature]";
const CUDA_HANGS: &str = "cuda.hang=[cuInit]";
const KERNEL_HANGS: &str = "cuda.hang=[cuCtxSynchronize, cuStreamSynchronize, cuEventSynchronize]";

/// The check kernel is run by what stands by for the burn.
const KERNEL_WORKER: &str = "burn";

/// A run in the background that is stuck in a driver call.
struct Running<'node> {
    node: &'node Node,
    child: Option<Child>,
}

impl<'node> Running<'node> {
    /// Starts a run and waits until its reports are those after `stage`, and a worker for `task` is
    /// there.
    fn start(node: &'node Node, stage: &str, task: &str) -> Self {
        // Where CUDA does not start in the probe, each GPU's kernel would be tried all the same,
        // and hang again.
        let level = if task == "cuda" { "quick" } else { "standard" };
        let child = node
            .run_command(&["--level", level, "--junit"])
            .arg(node.out.path("report.xml"))
            .arg("--facts")
            .arg(node.out.path("facts.json"))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let running = Self {
            node,
            child: Some(child.expect("the validator starts")),
        };
        let reached = format!("the run did not get beyond its stage {stage}");
        eventually(
            &format!("the end of stage {stage}, and worker {task}"),
            || {
                let report = std::fs::read_to_string(node.out.path("report.json"));
                let report: Option<Value> =
                    report.ok().and_then(|it| serde_json::from_str(&it).ok());
                report.is_some_and(|it| it["incomplete"] == reached)
                    && workers_of(running.pid()).iter().any(|it| it.task == task)
            },
        );
        // From its start to the call in which it is stuck, a worker takes milliseconds.
        std::thread::sleep(Duration::from_millis(500));
        running
    }

    fn pid(&self) -> u32 {
        self.child.as_ref().expect("it was not waited for").id()
    }

    fn worker(&self, task: &str) -> Worker {
        let mut workers = workers_of(self.pid()).into_iter();
        let worker = workers.find(|it| it.task == task);
        worker.unwrap_or_else(|| panic!("no worker {task}"))
    }

    /// Waits for the end; the report must be that of a run that ended by itself.
    fn end(mut self) -> Ran {
        let started = Instant::now();
        let child = self.child.take().expect("it was not waited for");
        let output = child.wait_with_output().expect("it can be waited for");
        let took = started.elapsed();
        Ran::ended(texts(output), took, &self.node.out.read("report.json"))
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn a_run_that_takes_longer_than_its_profile_allows_is_ended_and_is_no_pass() {
    let node = Node::with("h200x1", &[], &[NVML_HANGS]);
    let profile = node
        .out
        .write("profile.yaml", "levels: {quick: {deadline_s: 0.5}}\n");
    let profile = profile.to_string_lossy().into_owned();
    let ran = node.run(&["--level", "quick", "--profile", &profile]);
    assert!(ran.took < Duration::from_secs(4), "{:?}", ran.took);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert_eq!(
        ran.report.0["incomplete"],
        "the profile's deadline for the whole run passed"
    );
    assert_eq!(ran.report.finding("run_complete")["verdict"], "error");
}

#[test]
fn a_signal_ends_a_run_that_is_stuck_in_the_driver_with_reports_that_say_so() {
    let cases = [
        ("INT", "signal 2 (SIGINT)", NVML_HANGS, "host", "nvml"),
        ("TERM", "signal 15 (SIGTERM)", NVML_HANGS, "host", "nvml"),
        ("TERM", "signal 15 (SIGTERM)", CUDA_HANGS, "host", "cuda"),
        (
            "INT",
            "signal 2 (SIGINT)",
            KERNEL_HANGS,
            "gpu",
            KERNEL_WORKER,
        ),
    ];
    for (name, reason, change, stage, task) in cases {
        let node = Node::with("h200x1", &[], &[change]);
        let running = Running::start(&node, stage, task);
        let workers = workers_of(running.pid());
        signal(running.pid(), name);
        let ran = running.end();
        let case = format!("{name} in {task}: {}", ran.stdout);
        assert!(ran.took < Duration::from_secs(2), "{:?}, {case}", ran.took);
        assert_eq!(ran.code, 2, "{case}");
        assert_eq!(ran.report.0["incomplete"], reason, "{case}");
        assert!(
            ran.stdout.contains(&format!("INCOMPLETE: {reason}")),
            "{case}"
        );
        let junit = node.out.read("report.xml");
        assert!(
            junit.contains("INCOMPLETE host") && junit.ends_with("</testsuites>\n"),
            "{case}"
        );
        assert_eq!(
            ran.report.finding("run_complete")["verdict"],
            "error",
            "{case}"
        );
        assert_ne!(
            ran.report.finding("cuda_kernel")["verdict"],
            "pass",
            "{case}"
        );
        // What was seen before it stopped is still there.
        assert_eq!(
            ran.report.finding("kernel_module_loaded")["verdict"],
            "pass",
            "{case}"
        );
        for worker in workers {
            assert!(worker.is_gone(), "{worker:?} is left, {case}");
        }
    }
}

#[test]
fn a_collection_that_is_stopped_writes_facts_that_never_pass() {
    let node = Node::with("h200x1", &[], &[NVML_HANGS]);
    let facts = node.out.path("facts.json");
    let mut collect = node.validator();
    collect.args(["collect", "--sysroot"]).arg(node.sysroot());
    collect.arg("-o").arg(&facts);
    let child = collect
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.expect("the validator starts");
    eventually("the NVML worker", || {
        workers_of(child.id()).iter().any(|it| it.task == "nvml")
    });
    std::thread::sleep(Duration::from_millis(500));
    let workers = workers_of(child.id());
    signal(child.id(), "TERM");
    let started = Instant::now();
    let (code, _, stderr) = texts(child.wait_with_output().expect("it can be waited for"));
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(code, 2);
    assert!(
        stderr.contains("not complete: signal 15 (SIGTERM)"),
        "{stderr}"
    );
    assert!(workers.iter().all(Worker::is_gone), "{workers:?}");
    let mut judge = validator();
    judge.arg("judge").arg(&facts);
    let (code, stdout, _) = said(&mut judge);
    assert_eq!(code, 2, "{stdout}");
    assert!(
        stdout.contains("INCOMPLETE: signal 15 (SIGTERM)"),
        "{stdout}"
    );
}

#[test]
fn a_killed_run_leaves_no_worker_and_no_report_that_passes() {
    for (name, change, stage, task) in [
        ("h200x8", NVML_HANGS, "host", "nvml"),
        ("h200x8", KERNEL_HANGS, "gpu", KERNEL_WORKER),
    ] {
        let node = Node::with(name, &[], &[change]);
        let mut running = Running::start(&node, stage, task);
        let workers = workers_of(running.pid());
        assert!(!workers.is_empty());
        signal(running.pid(), "KILL");
        let mut child = running.child.take().expect("it was not waited for");
        child.wait().expect("it can be waited for");
        let deadline = Instant::now() + Duration::from_secs(1);
        while !workers.iter().all(Worker::is_gone) {
            assert!(
                Instant::now() < deadline,
                "left after a second: {workers:?}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        let report: Value = serde_json::from_str(&node.out.read("report.json")).expect("JSON");
        assert_eq!(report["verdict"], "not_judged", "{task}");
        assert_eq!(report["exit_code"], 2, "{task}");
        assert!(
            node.out.read("report.xml").contains("INCOMPLETE host"),
            "{task}"
        );
    }
}

#[test]
fn a_killed_nvml_worker_costs_the_call_that_it_was_in() {
    let node = Node::with("h200x1", &[], &[NVML_HANGS]);
    let running = Running::start(&node, "host", "nvml");
    signal(running.worker("nvml").pid, "KILL");
    let ran = running.end();
    // The burn's sensors hang in the same call.
    assert!(ran.took < Duration::from_secs(8), "{:?}", ran.took);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let expected = [
        "burn_errors: error",
        "burn_temperature: error",
        "burn_throttling: error",
        "gpu_reachable: error",
        "nvml_library: warn",
        "temperature: error",
    ];
    assert_eq!(ran.report.not_green(), set(&expected));
    let finding = ran.report.finding("nvml_library");
    assert!(
        finding["summary"].to_string().contains("signal 9"),
        "{finding}"
    );
}

#[test]
fn a_killed_cuda_worker_is_reported_and_the_run_ends() {
    let node = Node::with("h200x1", &[], &[CUDA_HANGS]);
    let running = Running::start(&node, "host", "cuda");
    signal(running.worker("cuda").pid, "KILL");
    let ran = running.end();
    assert!(ran.took < Duration::from_secs(4), "{:?}", ran.took);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let finding = ran.report.finding("cuda_driver_library");
    assert_eq!(finding["verdict"], "error");
    assert!(
        finding["summary"]
            .to_string()
            .contains("signal 9 in cuInit"),
        "{finding}"
    );
    assert_eq!(ran.report.finding("temperature")["verdict"], "pass");
}

#[test]
fn a_killed_kernel_worker_is_an_error_on_its_gpu_only() {
    let node = Node::with("h200x8", &[], &[KERNEL_HANGS]);
    let running = Running::start(&node, "gpu", KERNEL_WORKER);
    let workers = workers_of(running.pid());
    let kernels = workers.iter().filter(|it| it.task == KERNEL_WORKER);
    assert!(
        kernels.clone().count() > 1,
        "GPUs work at the same time: {workers:?}"
    );
    for worker in kernels {
        signal(worker.pid, "KILL");
    }
    let ran = running.end();
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert_eq!(ran.report.not_green(), set(&["cuda_kernel: error"]));
    for finding in ran.report.of_check("cuda_kernel") {
        assert_eq!(finding["verdict"], "error");
        assert!(
            finding["summary"].to_string().contains("signal 9"),
            "{finding}"
        );
    }
}

#[test]
fn two_runs_at_once_are_both_right() {
    for (node, codes) in [
        (Node::healthy("h200x8"), 0),
        (Node::with_fault("h200x8", "xid-79"), 1),
    ] {
        let expected = node.run(&["--level", "standard"]).report;
        let start = |number: usize| {
            let mut command = node.validator();
            // To each run, the others are processes of others, which would be busy GPUs.
            command.args(["run", "--simulated-ok", "--burn-share", "--sysroot"]);
            command.arg(node.sysroot());
            // One file is each run's own, the other is of both.
            command
                .arg("--json")
                .arg(node.out.path(&format!("{number}.json")));
            command.arg("--junit").arg(node.out.path("both.xml"));
            command.stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().expect("the validator starts")
        };
        let running: Vec<Child> = (0..3).map(start).collect();
        for (number, child) in running.into_iter().enumerate() {
            let output = child.wait_with_output().expect("it can be waited for");
            let report = node.out.read(&format!("{number}.json"));
            let ran = Ran::ended(texts(output), Duration::ZERO, &report);
            assert_eq!(ran.code, codes, "{}", ran.stdout);
            assert_eq!(
                verdicts_but_processes(&ran.report),
                verdicts_but_processes(&expected)
            );
        }
        let junit = node.out.read("both.xml");
        roxmltree::Document::parse(&junit).expect("one whole report");
        let names = std::fs::read_dir(node.out.path("")).expect("listed");
        let left = names.filter(|it| {
            let name = it.as_ref().expect("an entry").file_name();
            name.to_string_lossy().ends_with(".tmp")
        });
        assert_eq!(left.count(), 0, "temporary files are left");
    }
}

/// To each run, the kernels of the others are processes of others on the GPU.
fn verdicts_but_processes(report: &Report) -> Vec<(String, String, String)> {
    let verdicts = report.verdicts().into_iter();
    verdicts
        .filter(|((check, _), _)| !["foreign_processes", "idle_memory"].contains(&check.as_str()))
        .map(|((check, subject), verdict)| (check, subject, verdict))
        .collect()
}

/// A run stands still for longer than a call of NVML may take: no call hung.
#[test]
fn a_run_that_was_suspended_is_judged_as_if_it_had_not_been() {
    let node = Node::with("h200x1", &[], &["nvml.delay_us=20000"]);
    let child = node
        .run_command(&["--level", "quick", "--deadline-scale", "0.4"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.expect("the validator starts");
    let mut nvml = None;
    eventually("a worker that asks NVML", || {
        let mut workers = workers_of(child.id()).into_iter();
        nvml = workers.find(|it| it.task == "nvml");
        nvml.is_some()
    });
    let nvml = nvml.expect("it was found").pid;
    std::thread::sleep(Duration::from_millis(300));
    suspend(&[child.id(), nvml], Duration::from_secs(3));
    let resumed = Instant::now();
    let output = child.wait_with_output().expect("it can be waited for");
    let ran = Ran::ended(
        texts(output),
        resumed.elapsed(),
        &node.out.read("report.json"),
    );
    assert_eq!(ran.report.not_green(), set(&[]), "{}", ran.stdout);
    assert_eq!(ran.code, 0);
}
