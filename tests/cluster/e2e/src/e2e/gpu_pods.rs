//! Pods that request a GPU each, on the real API server; the test plays the scheduler and the
//! kubelet.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::kubelet::{bind, container_status, set_status, while_playing};
use super::ran::{Ran, validator};
use super::{JOBS, step};
use harness::simulate::PreparedNode;

const SELECTOR: &str = "--selector=app.kubernetes.io/name=gpu-validator-gpu-pod";
const CONTAINER: &str = "gpu-validator";
/// How long a pod may take to be made.
const MADE_WITHIN: Duration = Duration::from_mins(1);

/// What becomes of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Play {
    /// It gets a GPU of its own.
    Right,
    /// It gets the first GPU, also one in use.
    FirstGpu,
    /// It gets a GPU of another node.
    OtherNodesGpu,
    Crashes,
    ImageIsMissing,
    NoGpuIsFree,
}

/// Every way in which a pod may end, with one GPU.
pub(super) fn one_gpu(
    cluster: &Cluster<'_>,
    node: &PreparedNode,
    facts: &Value,
    kubeconfig: &Path,
) -> anyhow::Result<()> {
    let cases: [(&str, Play, &str, &str, i32); 4] = [
        (
            "pod-of-another-node",
            Play::OtherNodesGpu,
            "fail",
            "which is not on this node",
            1,
        ),
        (
            "pod-crashes",
            Play::Crashes,
            "fail",
            "exit code 2 (Error); last line of its log: CUDA driver version is insufficient",
            1,
        ),
        (
            "pod-without-image",
            Play::ImageIsMissing,
            "fail",
            "ImagePullBackOff: no such image",
            1,
        ),
        ("pod-waits", Play::NoGpuIsFree, "error", "no free GPU", 4),
    ];
    for (name, play, verdict, words, code) in cases {
        cluster.make_node(name, 1)?;
        let ran = run(cluster, node, facts, name, kubeconfig, &[play])?;
        ran.expect("gpu_pod_runs", verdict, &[words])?;
        ran.ended_with(code)?;
        step(&format!(
            "node {name}: gpu_pod_runs says {verdict}, {}",
            ran.summary("gpu_pod_runs")
        ));
    }
    stopped(cluster, node, kubeconfig)
}

/// As many pods as GPUs: each has its own, or two have the same.
pub(super) fn eight_gpus(
    cluster: &Cluster<'_>,
    node: &PreparedNode,
    facts: &Value,
    kubeconfig: &Path,
) -> anyhow::Result<()> {
    cluster.make_node("eight", 8)?;
    let ran = run(cluster, node, facts, "eight", kubeconfig, &[Play::Right; 8])?;
    ran.expect("gpu_pod_runs", "pass", &[])?;
    ran.ended_with(0)?;
    cluster.make_node("given-twice", 8)?;
    let mut plays = [Play::Right; 8];
    plays[7] = Play::FirstGpu;
    let ran = run(cluster, node, facts, "given-twice", kubeconfig, &plays)?;
    ran.expect("gpu_pod_runs", "fail", &["was given to pods"])?;
    ran.ended_with(1)?;
    step("eight pods at once get eight GPUs; a GPU that two of them see is found");
    Ok(())
}

/// One run that makes a pod for each of `plays`; none may be left.
pub(super) fn run(
    cluster: &Cluster<'_>,
    node: &PreparedNode,
    facts: &Value,
    name: &str,
    kubeconfig: &Path,
    plays: &[Play],
) -> anyhow::Result<Ran> {
    let profile = profile(cluster, name, kubeconfig, plays.len())?;
    let mut player = Player {
        cluster,
        facts,
        node: name,
        plays,
        seen: BTreeSet::new(),
    };
    let ran = while_playing(|| player.look(), || cluster.run(node, name, &profile))?;
    let left = pods(cluster)?;
    ensure!(left.is_empty(), "pods are left behind: {left:?}");
    Ok(ran)
}

fn profile(
    cluster: &Cluster<'_>,
    name: &str,
    kubeconfig: &Path,
    count: usize,
) -> anyhow::Result<std::path::PathBuf> {
    let pods = format!(
        "  gpu_pod: {{run: true, image: registry.example/gpu-validator, namespace: {JOBS}, count: {count}, deadline_s: 120}}\n"
    );
    cluster.profile(name, kubeconfig, &pods)
}

/// Pods are removed at Ctrl-C; those of a run that was killed are removed by the next.
fn stopped(cluster: &Cluster<'_>, node: &PreparedNode, kubeconfig: &Path) -> anyhow::Result<()> {
    cluster.make_node("stopped", 1)?;
    let profile = profile(cluster, "stopped", kubeconfig, 1)?;
    for (signal, left) in [("KILL", 1), ("INT", 0)] {
        let mut command = validator(node, &["run", "--level=standard"]);
        command.arg("--profile").arg(&profile).stdout(Stdio::null());
        let before: Vec<String> = names(&pods(cluster)?);
        let mut child = command.stderr(Stdio::null()).spawn()?;
        let deadline = Instant::now() + MADE_WITHIN;
        // Only a pod of this run counts: the one that the run before left is removed meanwhile.
        loop {
            let now = names(&pods(cluster)?);
            if now.iter().any(|it| !before.contains(it)) {
                ensure!(
                    now.iter().all(|it| !before.contains(it)),
                    "a pod of the run before is there beside a new one: {now:?}"
                );
                break;
            }
            ensure!(Instant::now() < deadline, "no pod was made");
            std::thread::sleep(Duration::from_millis(100));
        }
        let kill = std::process::Command::new("kill")
            .args([&format!("-{signal}"), &child.id().to_string()])
            .status()?;
        ensure!(kill.success(), "the run had ended before it was stopped");
        child.wait()?;
        let now = pods(cluster)?;
        ensure!(
            now.len() == left,
            "{} pods are left after SIG{signal}, expected {left}",
            now.len()
        );
    }
    step("a run that is killed leaves its pod, the next one removes it; Ctrl-C leaves none");
    Ok(())
}

fn pods(cluster: &Cluster<'_>) -> anyhow::Result<Vec<Value>> {
    let list = cluster.admin.json(&[
        "get",
        "pods",
        "--namespace",
        JOBS,
        SELECTOR,
        "--output=json",
    ])?;
    Ok(list["items"].as_array().cloned().unwrap_or_default())
}

fn names(pods: &[Value]) -> Vec<String> {
    let names = pods.iter().filter_map(|it| it["metadata"]["name"].as_str());
    names.map(str::to_owned).collect()
}

/// Scheduler and kubelet of the pods of one run.
struct Player<'a> {
    cluster: &'a Cluster<'a>,
    facts: &'a Value,
    node: &'a str,
    plays: &'a [Play],
    seen: BTreeSet<String>,
}

impl Player<'_> {
    /// Takes up every pod that it has not seen before.
    fn look(&mut self) -> anyhow::Result<()> {
        for name in names(&pods(self.cluster)?) {
            if self.seen.insert(name.clone()) {
                let index = self.seen.len() - 1;
                let play = self.plays.get(index).context("there are too many pods")?;
                self.play(&name, index, *play)?;
            }
        }
        Ok(())
    }

    fn play(&self, pod: &str, index: usize, play: Play) -> anyhow::Result<()> {
        let admin = &self.cluster.admin;
        let status = |status: Value| set_status(admin, JOBS, pod, &status);
        if play == Play::NoGpuIsFree {
            return status(json!({"conditions": [{
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            }]}));
        }
        bind(admin, JOBS, pod, self.node)?;
        let (phase, state) = match play {
            Play::ImageIsMissing => {
                let waiting = json!({"reason": "ImagePullBackOff", "message": "no such image"});
                ("Pending", json!({"waiting": waiting}))
            }
            Play::Crashes => {
                let text = "CUDA driver version is insufficient\n";
                self.log(pod, "?tailLines=10", text)?;
                let ended = json!({"exitCode": 2, "reason": "Error"});
                ("Failed", json!({"terminated": ended}))
            }
            Play::Right | Play::FirstGpu | Play::OtherNodesGpu | Play::NoGpuIsFree => {
                self.log(pod, "", &self.facts_of(index, play)?)?;
                ("Succeeded", json!({"terminated": {"exitCode": 0}}))
            }
        };
        status(json!({"phase": phase, "containerStatuses": container_status(CONTAINER, 0, &state)}))
    }

    fn log(&self, pod: &str, query: &str, text: &str) -> anyhow::Result<()> {
        let logs = &self.cluster.logs;
        logs.write(pod, JOBS, CONTAINER, query, text)
    }

    /// What `gpu-validator collect` prints where this GPU is all that there is.
    fn facts_of(&self, index: usize, play: Play) -> anyhow::Result<String> {
        let mut facts = self.facts.clone();
        let gpus = facts["gpus"].as_array().context("no GPUs")?;
        let which = if play == Play::FirstGpu { 0 } else { index };
        let gpu = gpus.get(which).context("more pods than GPUs")?.clone();
        let uuid = gpu["uuid"]["value"].as_str().context("no UUID")?.to_owned();
        facts["gpus"] = json!([gpu]);
        let devices = facts["cuda"]["devices"]["value"]
            .as_array_mut()
            .context("no CUDA devices")?;
        devices.retain(|it| it["uuid"] == uuid.as_str());
        let text = serde_json::to_string_pretty(&facts)?;
        Ok(if play == Play::OtherNodesGpu {
            text.replace(&uuid, "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff")
        } else {
            text
        })
    }
}
