//! The hooks of a CI runner, started as the runner starts them, on simulated nodes: jobs that leak,
//! GPUs that fail, the quarantine and GitHub's API.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::node::{Node, Said, Scratch, executable, in_place_of, said};

/// What a runner may keep a job waiting (docs/github-actions.md).
const PRE_JOB_LIMIT: Duration = Duration::from_secs(10);

/// A runner on a node: its folders outlive the node, as a machine's disk outlives a fault.
struct Runner {
    out: Scratch,
    settings: Vec<(&'static str, String)>,
}

impl Runner {
    fn new() -> Self {
        let out = Scratch::new();
        std::fs::create_dir(out.path("temp")).expect("a folder");
        Self {
            out,
            settings: Vec::new(),
        }
    }

    /// A line of the administrator's file, or of the runner's own environment.
    fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.settings.push((name, value.into()));
        self
    }

    fn state(&self) -> PathBuf {
        self.out.path("state")
    }

    /// `bash -e HOOK`, with the variables that a runner gives its hooks. Source: GitHub Actions
    /// documentation, running scripts before or after a job.
    fn hook_command(&self, node: &Node, hook: &str) -> Command {
        let script = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../workflows/hooks")
            .join(hook);
        let mut command = in_place_of(&node.validator(), "bash");
        command.arg("-e").arg(script);
        for (name, value) in [
            ("CI", "true"),
            ("GITHUB_ACTIONS", "true"),
            ("GITHUB_REPOSITORY", "acme/train"),
            ("GITHUB_RUN_ID", "17"),
            ("GITHUB_RUN_ATTEMPT", "1"),
            ("GITHUB_JOB", "train"),
            ("GITHUB_WORKFLOW", "Train"),
            ("GITHUB_SERVER_URL", "https://github.com"),
            // Nothing listens there: a hook that calls GitHub without configuration is seen.
            ("GITHUB_API_URL", "http://127.0.0.1:1"),
            ("RUNNER_NAME", "gpu-17"),
            ("RUNNER_OS", "Linux"),
            ("RUNNER_ARCH", "X64"),
        ] {
            command.env(name, value);
        }
        command
            .env("GITHUB_STEP_SUMMARY", self.out.path("summary.md"))
            .env("RUNNER_TEMP", self.out.path("temp"))
            .env("GPU_VALIDATOR_BINARY", self.binary(node))
            .envs(
                self.settings
                    .iter()
                    .filter(|it| !is_administrators(it.0))
                    .map(|it| (it.0, &it.1)),
            );
        command
    }

    /// The validator as an administrator installs it for simulated nodes: no variable accepts
    /// those, and the settings of the hooks are a file's.
    fn binary(&self, node: &Node) -> PathBuf {
        let (state, sysroot) = (self.state(), node.sysroot());
        let mut settings = format!(
            // A simulated GPU multiplies on the CPU.
            "GPU_VALIDATOR_HOOK_BURN=200ms\nGPU_VALIDATOR_HOOK_BURN_MEMORY=64MiB\n\
             GPU_VALIDATOR_HOOK_STATE={}\nGPU_VALIDATOR_HOOK_SYSROOT={}\n",
            state.display(),
            sysroot.display()
        );
        for (name, value) in self.settings.iter().filter(|it| is_administrators(it.0)) {
            settings.extend([*name, "=", value, "\n"]);
        }
        let settings = self.out.write("hook.env", settings);
        let script = format!(
            "#!/bin/sh\nexec {} \"$@\" --simulated-ok --settings {}\n",
            executable().display(),
            settings.display()
        );
        let path = self.out.write("gpu-validator", script);
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&path, mode).expect("chmod");
        path
    }

    fn pre_job(&self, node: &Node) -> Said {
        said(&mut self.hook_command(node, "pre-job.sh"))
    }

    fn post_job(&self, node: &Node) -> Said {
        said(&mut self.hook_command(node, "post-job.sh"))
    }

    fn release(&self, node: &Node, arguments: &[&str]) -> Said {
        let mut command = node.validator();
        command
            .args(["hook", "release", "--state"])
            .arg(self.state())
            .args(arguments);
        command.envs(self.settings.iter().map(|(name, value)| (*name, value)));
        said(&mut command)
    }

    fn mark(&self) -> Option<Value> {
        let text = std::fs::read(self.state().join("quarantine-gpu-17.json")).ok()?;
        Some(serde_json::from_slice(&text).expect("the mark is JSON"))
    }

    fn summary(&self) -> String {
        self.out.read("summary.md")
    }
}

fn is_administrators(name: &str) -> bool {
    name == "CUDA_VISIBLE_DEVICES"
        || (name.starts_with("GPU_VALIDATOR_") && name != "GPU_VALIDATOR_BINARY")
}

/// Without the burn, where it is not what is tested.
fn quick() -> Runner {
    Runner::new().with("GPU_VALIDATOR_HOOK_BURN", "0")
}

/// A process of the job on the GPU, which stays when the job is over.
struct LeakyJob {
    child: Child,
    pid: u32,
}

impl LeakyJob {
    fn start(node: &Node, arguments: &[&str]) -> Self {
        Self::started(in_place_of(&node.validator(), "python3"), arguments)
    }

    /// As another user than the runner's, which takes root for a moment.
    fn start_as_nobody(node: &Node) -> Self {
        let python = in_place_of(&node.validator(), "python3");
        let own = std::fs::metadata("/proc/self").expect("/proc is mounted");
        if own.uid() == 0 {
            return Self::started(python, &["nobody"]);
        }
        let mut sudo = Command::new("sudo");
        sudo.args(["--non-interactive", "env"]);
        for (name, value) in python.get_envs() {
            let Some(value) = value else { continue };
            sudo.arg([name, value].join(std::ffi::OsStr::new("=")));
        }
        sudo.arg("python3");
        Self::started(sudo, &["nobody"])
    }

    fn started(mut python: Command, arguments: &[&str]) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("leaky_job.py");
        let mut child = python
            .arg(script)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout)
            .read_line(&mut line)
            .expect("it speaks");
        let pid = line.trim().strip_prefix("ready ").expect("it is ready");
        Self {
            pid: pid.parse().expect("a number"),
            child,
        }
    }

    fn pid(&self) -> String {
        format!("pid {}", self.pid)
    }

    fn lives(&mut self) -> bool {
        self.child.try_wait().expect("asked").is_none()
    }
}

impl Drop for LeakyJob {
    fn drop(&mut self) {
        // The end of its input ends it, also where it is another user's.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
fn a_job_is_let_in_and_what_it_leaves_is_ended() {
    let node = Node::healthy("h200x1");
    let runner = Runner::new().with("GPU_VALIDATOR_HOOK_GRACE", "1");
    let (code, stdout, stderr) = runner.pre_job(&node);
    assert_eq!(code, 0, "{stdout}{stderr}");
    // One line a job; a pass needs no annotation.
    assert_eq!(
        stdout,
        "GPUs before the job: SIMULATED PASS: node is ready: 1 GPU judged, none failed\n"
    );
    let mut obedient = LeakyJob::start(&node, &[]);
    let mut stubborn = LeakyJob::start(&node, &["ignore"]);
    let (code, stdout, stderr) = runner.post_job(&node);
    assert_eq!(code, 0, "{stdout}{stderr}");
    for (job, how) in [
        (&mut obedient, "; SIGTERM ended it"),
        (&mut stubborn, "SIGKILL ended it"),
    ] {
        assert!(!job.lives());
        let line = stdout
            .lines()
            .find(|it| it.contains(&job.pid()))
            .expect("it is named");
        assert!(
            line.starts_with("::warning title=GPUs after the job::the job left python3"),
            "{line}"
        );
        assert!(line.contains("1024 MiB") && line.contains(how), "{line}");
    }
    assert!(
        stdout.ends_with("GPUs after the job: no new Xid\n"),
        "{stdout}"
    );
    assert_eq!(
        runner
            .summary()
            .matches("- **warn** the job left python3")
            .count(),
        2
    );
    // What is not there any more keeps no next job out.
    assert_eq!(runner.pre_job(&node).0, 0);
}

#[test]
fn a_leftover_of_another_user_is_named_and_left_alone() {
    for (fail_on, code) in [("never", 0), ("fail", 1)] {
        let node = Node::healthy("h200x1");
        let runner = quick()
            .with("GPU_VALIDATOR_HOOK_POST_FAIL_ON", fail_on)
            .with("GPU_VALIDATOR_HOOK_MEMORY_WAIT", "0");
        assert_eq!(runner.pre_job(&node).0, 0);
        let mut job = LeakyJob::start_as_nobody(&node);
        let (ended, stdout, stderr) = runner.post_job(&node);
        assert_eq!(ended, code, "{stdout}{stderr}");
        assert!(job.lives(), "{stdout}");
        let line = stdout.lines().find(|it| it.contains(&job.pid()));
        let line = line.expect("it is named");
        assert!(
            line.starts_with("::error title=GPUs after the job::python3"),
            "{line}"
        );
        let says = format!(
            "belongs to another user, so it was not ended: sudo kill {}",
            job.pid
        );
        assert!(line.contains(&says), "{line}");
        // It keeps the next job out, and is no fault of the runner's.
        assert_eq!(runner.pre_job(&node).0, 4);
        assert_eq!(runner.mark(), None);
    }
}

/// The hook in a PID namespace of its own, as in a container: NVML still gives the numbers of
/// outside.
fn in_own_pid_namespace(hook: &Command, before: &str) -> Command {
    let mut command = in_place_of(hook, "unshare");
    let words: Vec<_> = hook.get_args().map(|it| it.to_string_lossy()).collect();
    command
        .args([
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount-proc",
            "bash",
            "-euc",
        ])
        .arg(format!("{before}\nexec bash \"$@\""))
        .arg("bash")
        .args(words.iter().map(|it| &**it));
    command
}

#[test]
fn in_a_container_no_process_is_ended_by_a_number_of_outside() {
    const NUMBER: u32 = 20_001;
    let process = format!("processes.training-job={{gpu: 2, pid: {NUMBER}, memory: 20GiB}}");
    let (before, after) = (
        Node::healthy("h200x8"),
        Node::with("h200x8", &[], &[&process]),
    );
    let runner = quick()
        .with("GPU_VALIDATOR_HOOK_POST_FAIL_ON", "not-judged")
        .with("GPU_VALIDATOR_HOOK_MEMORY_WAIT", "0");
    let hook = |node: &Node, hook: &str, before: &str| {
        let hook = runner.hook_command(node, hook);
        said(&mut in_own_pid_namespace(&hook, before))
    };
    let (code, stdout, stderr) = hook(&before, "pre-job.sh", "");
    assert_eq!(code, 0, "{stdout}{stderr}");
    let (code, stdout, stderr) = hook(&after, "post-job.sh", "");
    assert_eq!(code, 2, "{stdout}{stderr}");
    let says = "no such process can be seen from here; search for it outside";
    let named = format!("(pid {NUMBER}, 20480 MiB)");
    assert!(stdout.contains(says) && stdout.contains(&named), "{stdout}");

    // The worst case: inside, the number is that of a process which has nothing to do with the GPU.
    let innocent = format!(
        "echo {} >/proc/sys/kernel/ns_last_pid; sleep 60 & [ $! = {NUMBER} ]\n\
         bash \"$@\" || code=$?; kill -0 $! && echo 'the innocent lives'; kill $!; exit ${{code:-0}}",
        NUMBER - 1
    );
    assert_eq!(hook(&before, "pre-job.sh", "").0, 0);
    let (code, stdout, stderr) = hook(&after, "post-job.sh", &innocent);
    assert_eq!(code, 2, "{stdout}{stderr}");
    assert!(
        stdout.contains("the process of this number does not hold the driver"),
        "{stdout}{stderr}"
    );
    assert!(stdout.ends_with("the innocent lives\n"), "{stdout}");
}

#[test]
fn in_a_container_what_is_seen_is_the_runners() {
    let node = Node::healthy("h200x1");
    let runner = || quick().with("NVIDIA_VISIBLE_DEVICES", "7");
    // On the host, number 7 is a GPU that is not there.
    let (code, stdout, _) = runner().pre_job(&node);
    assert_eq!(code, 2, "{stdout}");
    assert!(stdout.contains("no such GPU was found"), "{stdout}");
    std::fs::write(node.sysroot().join(".dockerenv"), "").expect("a file");
    let (code, stdout, stderr) = runner().pre_job(&node);
    assert_eq!(code, 0, "{stdout}{stderr}");
    // CUDA's variable comes first there, too.
    let blind = runner().with("CUDA_VISIBLE_DEVICES", "-1");
    assert_eq!(blind.pre_job(&node).0, 3);
}

#[test]
fn a_runner_of_a_mig_device_answers_for_its_gpu_alone() {
    let (first, second) = (
        "MIG-23268a25-ed91-56f3-aa91-56a6cfbcb90f",
        "MIG-31122d0c-d1e3-5c7c-a894-70a54afb75af",
    );
    let names = [
        "GPU_VALIDATOR_HOOK_GPUS",
        "NVIDIA_VISIBLE_DEVICES",
        "CUDA_VISIBLE_DEVICES",
    ];
    let healthy = Node::healthy("mig");
    for name in names {
        let (code, stdout, stderr) = quick().with(name, first).pre_job(&healthy);
        assert_eq!(code, 0, "{name}: {stdout}{stderr}");
        assert!(stdout.contains(": 1 GPU judged"), "{name}: {stdout}");
    }
    let sick = Node::with_fault("mig", "ecc-volatile-uncorrectable");
    for name in names {
        for (device, code) in [(first, 1), (second, 0)] {
            let (ended, stdout, stderr) = quick().with(name, device).pre_job(&sick);
            assert_eq!(ended, code, "{name}={device}: {stdout}{stderr}");
        }
    }
    // `GPU:DEVICE`, by numbers.
    for (value, code) in [("0:6", 1), ("1:1", 0), ("0:7", 2), ("0:x", 2)] {
        let runner = quick().with("NVIDIA_VISIBLE_DEVICES", value);
        let node = if code == 2 { &healthy } else { &sick };
        let (ended, stdout, stderr) = runner.pre_job(node);
        assert_eq!(ended, code, "{value}: {stdout}{stderr}");
    }
}

/// The best of three: other tests run at the same time, and a simulated GPU computes on the CPU.
#[test]
fn a_healthy_runner_waits_less_than_ten_seconds() {
    let node = Node::healthy("h200x1");
    let runner = Runner::new().with("GPU_VALIDATOR_HOOK_BURN", "2s");
    let mut quickest = Duration::MAX;
    for _ in 0..3 {
        let began = Instant::now();
        let (code, stdout, stderr) = runner.pre_job(&node);
        assert_eq!(code, 0, "{stdout}{stderr}");
        quickest = quickest.min(began.elapsed());
        if quickest < PRE_JOB_LIMIT {
            return;
        }
    }
    panic!("a healthy runner waits {quickest:?}");
}

#[test]
fn a_gpu_that_computes_wrongly_is_found_by_the_burn() {
    let node = Node::with(
        "h200x1",
        &[],
        &["gpu.wrong_results={kind: bit, every_launches: 5, kernel: gemm}"],
    );
    let runner = Runner::new();
    let (code, stdout, stderr) = runner.pre_job(&node);
    assert_eq!(code, 1, "{stdout}{stderr}");
    let reason = runner.mark().expect("a mark")["reason"].to_string();
    assert!(reason.contains("gemm_numerics"), "{reason}");
}

#[test]
fn a_process_of_before_the_job_is_left_alone() {
    let node = Node::healthy("h200x1");
    let runner = Runner::new().with("GPU_VALIDATOR_HOOK_FAIL_ON", "not-judged");
    let mut older = LeakyJob::start(&node, &[]);
    let (code, stdout, stderr) = runner.pre_job(&node);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(
        stdout.contains(
            "::warning title=infrastructure%3A GPU runner not fit for work::SIMULATED BUSY"
        ),
        "{stdout}"
    );
    assert!(
        stdout.contains("The job goes on, as configured by --fail-on"),
        "{stdout}"
    );
    let (code, stdout, _) = runner.post_job(&node);
    assert_eq!(code, 0);
    assert!(older.lives());
    assert!(
        stdout.contains(&format!("{}, 1024 MiB) on GPU-", older.pid())),
        "{stdout}"
    );
    assert!(
        stdout.contains("was there before the job and is left alone"),
        "{stdout}"
    );
}

#[test]
fn gpus_in_use_stop_the_job_and_quarantine_nobody() {
    let node = Node::healthy("h200x1");
    for runner in [Runner::new(), quick()] {
        let job = LeakyJob::start(&node, &[]);
        let (code, stdout, stderr) = runner.pre_job(&node);
        assert_eq!(code, 4, "{stdout}{stderr}");
        let first = stdout.lines().next().expect("a line");
        assert!(
            first.starts_with(
                "::error title=infrastructure%3A GPU runner not fit for work::SIMULATED BUSY"
            ),
            "{first}"
        );
        assert!(
            first.contains(&job.pid()) && first.contains("the GPUs are not to blame"),
            "{first}"
        );
        assert!(
            first.contains("The job did not start and is not to blame"),
            "{first}"
        );
        assert_eq!(runner.mark(), None);
        drop(job);
        assert_eq!(runner.pre_job(&node).0, 0, "free again");
    }
}

#[test]
fn a_failed_gpu_quarantines_the_runner_until_it_is_released() {
    let faulty = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
    let runner = Runner::new();
    let (code, stdout, stderr) = runner.pre_job(&faulty);
    assert_eq!(code, 1, "{stdout}{stderr}");
    let first = stdout.lines().next().expect("a line");
    assert!(first.starts_with("::error title=infrastructure%3A GPU runner not fit for work::SIMULATED FAIL: node is not ready:"), "{first}");
    let release = format!(
        "gpu-validator hook release --state {}",
        runner.state().display()
    );
    assert!(
        first.contains("This runner is quarantined from now on") && first.contains(&release),
        "{first}"
    );
    assert!(
        stdout.contains("::error title=ecc_errors"),
        "the fault itself is annotated too: {stdout}"
    );
    assert!(runner.summary().contains("GPU validation: SIMULATED FAIL"));
    let mark = runner.mark().expect("a mark");
    assert_eq!(
        mark["job"]["url"],
        "https://github.com/acme/train/actions/runs/17"
    );
    // Nothing was let in, so nothing is cleaned.
    let (code, stdout, _) = runner.post_job(&faulty);
    assert_eq!(
        (code, stdout.as_str()),
        (
            0,
            "no record of this job: no pre-job hook let it start, so nothing is cleaned after it\n"
        )
    );

    // The machine is well again, and the quarantine was not released.
    let mended = Node::healthy("h200x1");
    let (code, stdout, _) = runner.pre_job(&mended);
    assert_eq!(code, 1);
    let since = mark["since"].as_str().expect("a time");
    assert!(stdout.starts_with("::error title=infrastructure%3A GPU runner not fit for work::this runner is quarantined since "), "{stdout}");
    for part in [
        since,
        "SIMULATED FAIL",
        "https://github.com/acme/train/actions/runs/17",
        &release,
    ] {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    assert_eq!(stdout.lines().count(), 1, "nothing was read: {stdout}");

    assert_eq!(
        runner.release(&mended, &["gpu-18"]).1,
        format!(
            "gpu-18 is not quarantined (folder {})\n",
            runner.state().display()
        )
    );
    let (code, stdout, _) = runner.release(&mended, &[]);
    assert_eq!(code, 0);
    assert!(
        stdout.contains("quarantine-gpu-17.json: lifted; it held since ")
            && stdout.contains("SIMULATED FAIL"),
        "{stdout}"
    );
    assert_eq!(runner.pre_job(&mended).0, 0);
}

#[test]
fn a_person_can_quarantine_a_machine_with_a_sentence() {
    let node = Node::healthy("h200x1");
    let runner = quick();
    runner.out.write(
        "state/quarantine",
        "GPU 3 is replaced\u{1b}[31m\n::error::forged\n",
    );
    let (code, stdout, _) = runner.pre_job(&node);
    assert_eq!(code, 1);
    assert!(stdout.contains(": GPU 3 is replaced"), "{stdout}");
    assert!(
        !stdout.contains('\u{1b}') && !stdout.contains("\n::error::forged"),
        "{stdout}"
    );
    let (_, stdout, _) = runner.release(&node, &[]);
    assert!(
        !stdout.contains('\u{1b}') && !stdout.contains("\n::error::forged"),
        "{stdout}"
    );
    assert_eq!(runner.pre_job(&node).0, 0);
}

#[test]
fn a_quarantine_that_cannot_be_told_or_kept_lets_nobody_in() {
    let node = Node::healthy("h200x1");
    let runner = quick();
    // A file where the folder should be: neither there nor certainly absent.
    runner.out.write("state", "");
    let (code, stdout, _) = runner.pre_job(&node);
    assert_eq!(code, 2);
    assert!(
        stdout.contains("the quarantine of this runner could not be read"),
        "{stdout}"
    );

    // The folder cannot be made, and the GPU fails: the job is stopped, with the note that later
    // ones are not.
    let faulty = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
    let runner = quick().with("GPU_VALIDATOR_HOOK_STATE", "/proc/no-such-folder");
    let (code, stdout, _) = runner.pre_job(&faulty);
    assert_eq!(code, 1);
    assert!(
        stdout.contains("This runner could NOT be quarantined"),
        "{stdout}"
    );
}

#[test]
fn what_could_not_be_judged_stops_the_job_and_quarantines_only_on_request() {
    let node = Node::with_fault("h200x1", "kernel-log-unreadable");
    let runner = quick();
    let (code, stdout, _) = runner.pre_job(&node);
    assert_eq!(code, 2);
    assert!(stdout.contains("SIMULATED NOT JUDGED"), "{stdout}");
    assert_eq!(runner.mark(), None);
    let strict = quick().with("GPU_VALIDATOR_HOOK_QUARANTINE_ON", "not-judged");
    assert_eq!(strict.pre_job(&node).0, 2);
    assert!(strict.mark().is_some());
    let lax = quick().with("GPU_VALIDATOR_HOOK_FAIL_ON", "fail");
    assert_eq!(lax.pre_job(&node).0, 0);
    let observer = quick().with("GPU_VALIDATOR_HOOK_FAIL_ON", "never");
    let (code, stdout, _) =
        observer.pre_job(&Node::with_fault("h200x1", "ecc-volatile-uncorrectable"));
    assert_eq!(code, 0);
    assert!(
        stdout.contains(
            "::warning title=infrastructure%3A GPU runner not fit for work::SIMULATED FAIL"
        ),
        "{stdout}"
    );
    assert_eq!(
        observer.mark(),
        None,
        "what stops no job keeps no later one out"
    );
}

#[test]
fn bad_input_is_an_annotation_too() {
    let node = Node::healthy("h200x1");
    for (runner, message) in [
        (
            quick().with("CUDA_VISIBLE_DEVICES", ""),
            "this runner was given no GPU",
        ),
        (
            quick().with("NVIDIA_VISIBLE_DEVICES", "void"),
            "this runner was given no GPU",
        ),
        (
            quick().with("GPU_VALIDATOR_PROFILE", "/no/such.yaml"),
            "/no/such.yaml",
        ),
    ] {
        let (code, stdout, _) = runner.pre_job(&node);
        assert_eq!(code, 3, "{stdout}");
        assert!(
            stdout.starts_with(
                "::error title=infrastructure%3A GPU runner not fit for work::nothing was judged: "
            ),
            "{stdout}"
        );
        assert!(stdout.contains(message), "{stdout}");
        assert_eq!(runner.mark(), None);
    }
}

#[test]
fn a_missing_validator_is_said_and_lets_no_job_in() {
    let node = Node::healthy("h200x1");
    let runner = Runner::new().with("GPU_VALIDATOR_BINARY", "no-such-validator");
    let (code, stdout, _) = runner.pre_job(&node);
    assert_eq!(code, 1);
    assert!(
        stdout.starts_with(
            "::error title=infrastructure%3A GPU runner not fit for work::no gpu-validator"
        ),
        "{stdout}"
    );
    let (code, stdout, _) = runner.post_job(&node);
    assert_eq!(code, 0);
    assert!(
        stdout.starts_with("::warning title=GPUs after the job::no gpu-validator"),
        "{stdout}"
    );
}

/// The UUID of a GPU of the node by its number in NVML.
fn uuid(node: &Node, number: usize) -> String {
    let facts = node.out.path("facts.json");
    let mut command = node.validator();
    command
        .args(["collect", "--level", "quick", "--sysroot"])
        .arg(node.sysroot())
        .arg("-o")
        .arg(&facts);
    assert_eq!(said(&mut command).0, 0);
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    facts["gpus"][number]["uuid"]["value"]
        .as_str()
        .expect("a UUID")
        .to_owned()
}

#[test]
fn a_runner_answers_for_its_own_gpus_alone() {
    let healthy = Node::healthy("h200x8");
    let (sick, well) = (uuid(&healthy, 1), uuid(&healthy, 3));
    // Each breaks one GPU, and none of them the fourth.
    for fault in [
        "xid-79",
        "fallen-off-bus",
        "ecc-volatile-uncorrectable",
        "gpu-missing-device-node",
    ] {
        let node = Node::with_fault("h200x8", fault);
        let own = quick().with("CUDA_VISIBLE_DEVICES", well.clone());
        let (code, stdout, stderr) = own.pre_job(&node);
        assert_eq!(code, 0, "{fault}: {stdout}{stderr}");
        let whole = quick();
        let (code, stdout, _) = whole.pre_job(&node);
        assert_eq!(code, 1, "{fault}: {stdout}");
    }
    let node = Node::with_fault("h200x8", "xid-79");
    for (name, value, code) in [
        ("GPU_VALIDATOR_HOOK_GPUS", sick.as_str(), 1),
        ("GPU_VALIDATOR_HOOK_GPUS", well.as_str(), 0),
        ("NVIDIA_VISIBLE_DEVICES", "1", 1),
        ("NVIDIA_VISIBLE_DEVICES", "3", 0),
        ("NVIDIA_VISIBLE_DEVICES", "all", 1),
        // CUDA does not offer what fell off the bus.
        ("CUDA_VISIBLE_DEVICES", sick.as_str(), 1),
    ] {
        let (ended, stdout, stderr) = quick().with(name, value).pre_job(&node);
        assert_eq!(ended, code, "{name}={value}: {stdout}{stderr}");
    }
}

#[test]
fn a_missing_gpu_concerns_whoever_counts_by_numbers() {
    let healthy = Node::healthy("h200x8");
    let well = uuid(&healthy, 0);
    let node = Node::with_fault("h200x8", "gpu-missing-in-nvml");
    assert_eq!(
        quick()
            .with("NVIDIA_VISIBLE_DEVICES", well.clone())
            .pre_job(&node)
            .0,
        0
    );
    // Number 0 may be another GPU than it was.
    assert_eq!(
        quick().with("NVIDIA_VISIBLE_DEVICES", "0").pre_job(&node).0,
        1
    );
    let gone = quick().with(
        "GPU_VALIDATOR_HOOK_GPUS",
        "GPU-11111111-2222-3333-4444-555555555555",
    );
    let (code, stdout, _) = gone.pre_job(&healthy);
    assert_eq!(code, 2, "{stdout}");
    assert!(stdout.contains("no such GPU was found"), "{stdout}");
}

#[test]
fn the_burn_touches_no_other_runners_gpu() {
    let node = Node::healthy("h200x8");
    let own = uuid(&node, 5);
    let facts = node.out.path("facts.json");
    let runner = Runner::new()
        .with("CUDA_VISIBLE_DEVICES", own.clone())
        .with("GPU_VALIDATOR_FACTS", facts.display().to_string());
    // Another runner's job, on the first GPU.
    let mut other = LeakyJob::start(&node, &[]);
    let (code, stdout, stderr) = runner.pre_job(&node);
    assert_eq!(code, 0, "{stdout}{stderr}");
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    let burned = facts["load"]["burn"].as_object().expect("by UUID").keys();
    assert_eq!(burned.collect::<Vec<_>>(), [&own]);
    assert_eq!(facts["load"]["cuda_kernel"], serde_json::json!({}));
    assert_eq!(runner.post_job(&node).0, 0);
    assert!(other.lives(), "it is on another runner's GPU");
}

#[test]
fn an_xid_of_the_job_is_noted_and_fails_it_only_on_request() {
    for (fail_on, code) in [("never", 0), ("fail", 1)] {
        let node = Node::healthy("h200x1");
        let runner = quick().with("GPU_VALIDATOR_HOOK_POST_FAIL_ON", fail_on);
        assert_eq!(runner.pre_job(&node).0, 0);
        let lines: [&[u8]; 2] = [
            b"NVRM: Xid (PCI:0000:00:06): 13, pid=4242, name=train, Graphics Exception",
            b"NVRM: Xid (PCI:0000:00:06): 48, pid=4242, name=train, DBE",
        ];
        node.append_to_kernel_log(&lines);
        let (ended, stdout, stderr) = runner.post_job(&node);
        assert_eq!(ended, code, "{stdout}{stderr}");
        assert!(
            stdout.contains("::error title=GPUs after the job::during the job: Xid 48"),
            "{stdout}"
        );
        assert!(
            runner
                .summary()
                .contains("- **fail** during the job: Xid 48"),
            "{}",
            runner.summary()
        );
    }
    let node = Node::healthy("h200x1");
    let runner = quick().with("GPU_VALIDATOR_HOOK_POST_FAIL_ON", "not-pass");
    node.append_to_kernel_log(&[
        b"NVRM: Xid (PCI:0000:00:06): 13, pid=1, name=before, Graphics Exception",
    ]);
    assert_eq!(runner.pre_job(&node).0, 0);
    let (code, stdout, _) = runner.post_job(&node);
    assert_eq!(
        (code, stdout.as_str()),
        (0, "GPUs after the job: no new Xid\n"),
        "it was there before the job"
    );
    assert_eq!(runner.pre_job(&node).0, 0);
    node.append_to_kernel_log(&[
        b"NVRM: Xid (PCI:0000:00:06): 13, pid=4242, name=train, Graphics Exception",
    ]);
    let (code, stdout, _) = runner.post_job(&node);
    assert_eq!(code, 0, "the application's own doing");
    assert!(
        stdout.contains("during the job: ") && stdout.contains("Xid 13"),
        "{stdout}"
    );
}

#[test]
fn a_kernel_log_that_was_written_over_during_the_job_says_nothing_of_it() {
    let node = Node::healthy("h200x1");
    let runner = quick().with("GPU_VALIDATOR_HOOK_POST_FAIL_ON", "not-pass");
    assert_eq!(runner.pre_job(&node).0, 0);
    let later = "6,90000,250000000000,-;something else\n";
    std::fs::write(node.sysroot().join("dev/kmsg"), later).expect("the kernel log is written");
    let (code, stdout, _) = runner.post_job(&node);
    assert_eq!(code, 2, "{stdout}");
    let says =
        "new Xids could not be read: the kernel log was written over since it was read before";
    assert!(stdout.contains(says), "{stdout}");
}

/// The hook after the job runs on a changed node.
fn after_on(before: &Node, after: &Node, fail_on: &str) -> Said {
    let runner = quick()
        .with("GPU_VALIDATOR_HOOK_POST_FAIL_ON", fail_on)
        .with("GPU_VALIDATOR_HOOK_MEMORY_WAIT", "0");
    assert_eq!(runner.pre_job(before).0, 0);
    runner.post_job(after)
}

#[test]
fn what_a_job_did_to_the_gpus_is_told() {
    let healthy = Node::healthy("h200x8");
    for (fault, fail_on, code, says) in [
        (
            "leaked-memory",
            "fail",
            1,
            "8177 MiB of memory were not given back, without a process that uses them",
        ),
        (
            "leaked-memory",
            "never",
            0,
            "::error title=GPUs after the job::",
        ),
        ("xid-79", "fail", 1, "was lost during the job"),
        (
            "nvml-library-missing",
            "not-judged",
            2,
            "NVML does not list any more what was there before the job",
        ),
        (
            "kernel-log-unreadable",
            "not-judged",
            2,
            "new Xids could not be read",
        ),
        // A process that cannot be seen from here cannot be ended.
        (
            "foreign-process",
            "not-judged",
            2,
            "no such process can be seen from here",
        ),
    ] {
        let (ended, stdout, stderr) =
            after_on(&healthy, &Node::with_fault("h200x8", fault), fail_on);
        assert_eq!(ended, code, "{fault}: {stdout}{stderr}");
        assert!(stdout.contains(says), "{fault}: {stdout}");
    }
}

#[test]
fn a_second_hook_behind_the_same_job_does_nothing() {
    let node = Node::healthy("h200x1");
    let runner = quick();
    assert_eq!(runner.pre_job(&node).0, 0);
    assert_eq!(runner.post_job(&node).0, 0);
    let mut later = LeakyJob::start(&node, &[]);
    let (code, stdout, _) = runner.post_job(&node);
    assert_eq!(code, 0);
    assert!(stdout.contains("no record of this job"), "{stdout}");
    assert!(later.lives());
}

/// GitHub's API on loopback: answers in the order given, the last one again and again.
struct Api {
    url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

#[derive(Clone)]
enum Answer {
    Is(u16, &'static str),
    Never,
}

impl Api {
    fn answering(answers: &[Answer]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        let mut answers: VecDeque<Answer> = answers.iter().cloned().collect();
        std::thread::spawn(move || {
            let mut unanswered = Vec::new();
            for stream in listener.incoming().flatten() {
                let request = read_request(&stream);
                seen.lock().expect("held by nobody who died").push(request);
                let answer = match answers.len() {
                    1 => answers[0].clone(),
                    _ => answers.pop_front().expect("an answer"),
                };
                match answer {
                    Answer::Is(status, body) => respond(&stream, status, body),
                    Answer::Never => unanswered.push(stream),
                }
            }
        });
        Self { url, requests }
    }

    /// `METHOD path` of each request, after a check of its token.
    fn requests(&self) -> Vec<String> {
        let requests = self.requests.lock().expect("held by nobody who died");
        let first_lines = requests.iter().map(|request| {
            assert!(
                request
                    .to_lowercase()
                    .contains("\r\nauthorization: bearer s3cret-token\r\n"),
                "{request}"
            );
            let line = request.lines().next().expect("a line");
            line.rsplit_once(' ').expect("HTTP/1.1").0.to_owned()
        });
        first_lines.collect()
    }

    fn runner(&self) -> Runner {
        let runner = quick()
            .with("GITHUB_API_URL", self.url.clone())
            .with("GPU_VALIDATOR_HOOK_DEADLINE_SCALE", "0.1");
        let token = runner.out.write("token", "s3cret-token\n");
        runner.with("GPU_VALIDATOR_HOOK_TOKEN_FILE", token.display().to_string())
    }
}

fn read_request(stream: &TcpStream) -> String {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).is_ok_and(|it| it > 0) {}
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.parse().ok())?
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).expect("the body");
    head + &String::from_utf8_lossy(&body)
}

fn respond(mut stream: &TcpStream, status: u16, body: &str) {
    // The client may have gone.
    let _ = write!(
        stream,
        "HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
}

const RUNNERS: &str = r#"{"total_count": 2, "runners": [
    {"id": 4, "name": "gpu-170", "labels": [{"name": "other", "type": "custom"}]},
    {"id": 23, "name": "gpu-17", "labels": [{"name": "self-hosted", "type": "read-only"}, {"name": "gpu", "type": "custom"}, {"name": "h200", "type": "custom"}]}]}"#;
const LIST: &str = "GET /repos/acme/train/actions/runners?name=gpu-17&per_page=100";
const REMOVE: &str = "DELETE /repos/acme/train/actions/runners/23/labels";

#[test]
fn a_quarantined_runner_loses_its_labels_and_gets_them_back() {
    let api = Api::answering(&[
        Answer::Is(200, RUNNERS),
        Answer::Is(200, "{}"),
        Answer::Is(200, RUNNERS),
        Answer::Is(200, "{}"),
    ]);
    let runner = api.runner();
    let faulty = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
    let (code, stdout, stderr) = runner.pre_job(&faulty);
    assert_eq!(code, 1, "{stdout}{stderr}");
    assert!(
        stdout.contains("Its labels at GitHub were removed: gpu, h200"),
        "{stdout}"
    );
    assert_eq!(api.requests(), [LIST, REMOVE]);
    assert_eq!(
        runner.mark().expect("a mark")["labels_removed"],
        serde_json::json!(["gpu", "h200"])
    );
    // A job could have written the mark, so that its labels are reported and not acted on.
    let (code, _, stderr) = runner.release(
        &faulty,
        &[
            "gpu-17",
            "--runner-scope",
            "repos/acme/train",
            "--give-labels",
            "gpu,h200",
        ],
    );
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(
        api.requests()[2..],
        [LIST, "POST /repos/acme/train/actions/runners/23/labels"]
    );
    let requests = api.requests.lock().expect("held by nobody who died");
    assert!(
        requests[3].ends_with(r#"{"labels":["gpu","h200"]}"#),
        "{}",
        requests[3]
    );
    assert_eq!(runner.mark(), None);
}

#[test]
fn trouble_with_githubs_api_is_told_and_changes_no_verdict() {
    let faulty = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
    let cases: [(&[Answer], usize, &str); 8] = [
        (
            &[Answer::Is(401, "{}")],
            1,
            "401 Unauthorized: the token is wrong or has expired",
        ),
        (
            &[Answer::Is(403, "{}")],
            1,
            "403 Forbidden: the token may not manage runners",
        ),
        (
            &[Answer::Is(404, "{}")],
            1,
            "404 Not Found: the runner is registered elsewhere (--runner-scope)",
        ),
        (
            &[Answer::Is(200, r#"{"runners": []}"#)],
            1,
            "lists no runner gpu-17",
        ),
        (
            &[Answer::Is(200, "<html>")],
            1,
            "did not answer with a list of runners",
        ),
        (
            &[Answer::Is(502, "")],
            3,
            "answers 502 Bad Gateway, after 3 attempts",
        ),
        (
            &[Answer::Never],
            3,
            "does not answer in time, after 3 attempts",
        ),
        (
            &[Answer::Is(503, ""), Answer::Never, Answer::Is(200, RUNNERS)],
            4,
            "Its labels at GitHub were removed",
        ),
    ];
    for (answers, asked, says) in cases {
        let api = Api::answering(answers);
        let runner = api.runner();
        let (code, stdout, stderr) = runner.pre_job(&faulty);
        assert_eq!(code, 1, "{says}: {stdout}{stderr}");
        assert!(stdout.contains(says), "{says}: {stdout}");
        assert_eq!(api.requests().len(), asked, "{says}: {stdout}");
        assert!(runner.mark().is_some(), "{says}");
        assert!(
            !format!("{stdout}{stderr}{}", runner.summary()).contains("s3cret"),
            "{says}"
        );
    }
    // A token that would travel in the clear does not travel.
    let runner = quick()
        .with("GITHUB_API_URL", "http://ghe.example")
        .with("GPU_VALIDATOR_HOOK_TOKEN", "s3cret-token");
    let (code, stdout, _) = runner.pre_job(&faulty);
    assert_eq!(code, 1);
    assert!(
        stdout.contains("http://ghe.example is not https"),
        "{stdout}"
    );
}

/// TLS in front of the API, with a certificate of this test's own.
struct TlsFront {
    child: Child,
    url: String,
    certificate: String,
}

impl TlsFront {
    fn start(api: &Api, out: &Scratch) -> Self {
        let (key, certificate) = (out.path("key.pem"), out.path("certificate.pem"));
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ])
            .args([
                "-days",
                "2",
                "-subj",
                "/CN=api",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
            ])
            .args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout"])
            .arg(&key)
            .arg("-out")
            .arg(&certificate)
            .output()
            .expect("openssl can be started (Debian and Ubuntu: apt-get install openssl)");
        assert!(made.status.success(), "{made:?}");
        let port = api.url.rsplit(':').next().expect("a port");
        let mut child = Command::new("python3")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tls_front.py"))
            .arg(&certificate)
            .arg(&key)
            .arg(port)
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("it says its port");
        Self {
            child,
            url: format!("https://127.0.0.1:{}", line.trim()),
            certificate: certificate.display().to_string(),
        }
    }
}

impl Drop for TlsFront {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn labels_are_taken_over_https_and_only_from_a_server_with_a_known_certificate() {
    let faulty = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
    let api = Api::answering(&[Answer::Is(200, RUNNERS), Answer::Is(200, "{}")]);
    let out = Scratch::new();
    let front = TlsFront::start(&api, &out);
    let stranger = api.runner().with("GITHUB_API_URL", front.url.clone());
    let (code, stdout, stderr) = stranger.pre_job(&faulty);
    assert_eq!(code, 1, "{stdout}{stderr}");
    assert!(
        stdout.contains("Its labels at GitHub could not be removed")
            && stdout.contains("cannot be reached")
            && stdout.to_lowercase().contains("certificate"),
        "{stdout}"
    );
    assert!(stranger.mark().is_some());
    assert!(api.requests().is_empty(), "the token went to a stranger");

    let known = api
        .runner()
        .with("GITHUB_API_URL", front.url.clone())
        .with("SSL_CERT_FILE", front.certificate.clone());
    let (code, stdout, stderr) = known.pre_job(&faulty);
    assert_eq!(code, 1, "{stdout}{stderr}");
    assert!(
        stdout.contains("Its labels at GitHub were removed: gpu, h200"),
        "{stdout}"
    );
    assert_eq!(api.requests(), [LIST, REMOVE]);
}
