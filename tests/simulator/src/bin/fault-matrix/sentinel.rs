//! A fault that comes while the sentinel works the GPUs of a healthy node.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;
use simulator::change::change_node;
use simulator::faults::{SentinelExpectation, SentinelState};
use simulator::resolve::NodeChange;
use simulator::{Catalogue, PreparedNode};

/// Limit of each wait, for a loaded machine: yields are milliseconds.
const DEADLINE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
/// After the fault's GPUs are in their state: time in which no other GPU may leave its own.
const CALM: Duration = Duration::from_millis(500);

/// Kills the sentinel where a case ends early; its workers end with it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the sentinel on a healthy `node`, puts `fault` on it, and returns the differences from
/// `expected` on the GPUs `ill`, of all `count` of them.
///
/// # Errors
///
/// The sentinel does not start, or ends before it is stopped.
pub(crate) fn differences(
    validator: &Path,
    catalogue: &Catalogue,
    node: &PreparedNode,
    fault: &str,
    expected: &SentinelExpectation,
    (ill, count): (&[u32], usize),
) -> Result<Vec<String>> {
    let status_file = node.folder.join("sentinel.json");
    let mut running = Running(start(validator, node, expected, &status_file)?);
    let is_ill = |gpu: usize| ill.iter().any(|it| usize::try_from(*it) == Ok(gpu));
    wait(&mut running.0, &status_file, |status| {
        (0..count).all(|gpu| state(status, gpu) == "working")
    })?
    .map_err(|status| anyhow::anyhow!("not every GPU was worked before the fault: {status}"))?;
    change_node(
        &node.folder,
        &NodeChange {
            catalogue,
            healthy: false,
            faults: &[fault.to_owned()],
            overrides: &[],
        },
    )?;
    let reached = wait(&mut running.0, &status_file, |status| {
        (0..count).filter(|gpu| is_ill(*gpu)).all(|gpu| {
            let gpu = &status["gpus"][gpu];
            gpu["state"] == expected.state.word()
                && gpu["pid"].is_null()
                && cause(gpu).contains(&expected.because)
        })
    })?;
    if let Err(status) = reached {
        return Ok(vec![format!(
            "the sentinel did not reach `{}` because of `{}`: {status}",
            expected.state.word(),
            expected.because
        )]);
    }
    std::thread::sleep(CALM);
    let status = read(&status_file).unwrap_or_default();
    let mut differences = Vec::new();
    for gpu in 0..count {
        let wanted = if is_ill(gpu) {
            expected.state.word()
        } else {
            "working"
        };
        if state(&status, gpu) != wanted {
            differences.push(format!(
                "GPU {gpu} is not `{wanted}`: {}",
                status["gpus"][gpu]
            ));
        }
    }
    differences.extend(end(running, expected.state)?);
    Ok(differences)
}

fn start(
    validator: &Path,
    node: &PreparedNode,
    expected: &SentinelExpectation,
    status_file: &Path,
) -> Result<Child> {
    let log = std::fs::File::create(node.folder.join("sentinel.log")).context("create the log")?;
    Command::new(validator)
        .args([
            "sentinel",
            "--simulated-ok",
            "--workload",
            &expected.workload,
            "--memory",
            "4MiB",
        ])
        .args([
            "--grace",
            "0.1s",
            "--quiet",
            "0.3s",
            "--starts-an-hour",
            "1000",
            "--sysroot",
        ])
        .arg(&node.sysroot)
        .arg("--status-file")
        .arg(status_file)
        .envs(&node.environment)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .with_context(|| format!("start {}", validator.display()))
}

/// Polls the status until `condition` holds; the last status where it never did.
fn wait(
    sentinel: &mut Child,
    status_file: &Path,
    condition: impl Fn(&Value) -> bool,
) -> Result<std::result::Result<(), Value>> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let status = read(status_file).unwrap_or_default();
        if condition(&status) {
            return Ok(Ok(()));
        }
        if let Some(status) = sentinel.try_wait()? {
            bail!("the sentinel ended: {status}");
        }
        if Instant::now() >= deadline {
            return Ok(Err(status));
        }
        std::thread::sleep(POLL);
    }
}

fn read(status_file: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(status_file).ok()?).ok()
}

fn state(status: &Value, gpu: usize) -> &str {
    status["gpus"][gpu]["state"].as_str().unwrap_or_default()
}

fn cause(gpu: &Value) -> String {
    let text = |field: &str| gpu[field].as_str().unwrap_or_default().to_owned();
    format!("{}; {}", text("reason"), text("finding"))
}

/// Ends it as `systemctl stop` does. A finding is its exit code 1.
fn end(mut running: Running, state: SentinelState) -> Result<Option<String>> {
    let pid = i32::try_from(running.0.id())?;
    // SAFETY: a signal to a child that was not waited for yet.
    #[expect(unsafe_code, reason = "the standard library sends SIGKILL only")]
    let sent = unsafe { libc::kill(pid, libc::SIGTERM) };
    if sent != 0 {
        bail!(
            "cannot stop the sentinel: {}",
            std::io::Error::last_os_error()
        );
    }
    let code = running.0.wait()?.code();
    let wanted = Some(i32::from(state == SentinelState::Ill));
    Ok((code != wanted).then(|| format!("the sentinel ended with {code:?}, expected {wanted:?}")))
}
