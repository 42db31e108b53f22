//! `cargo xtask k8s validate`: one node or the whole fleet, by a job of the overlay's, with the
//! reports brought here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::kubectl::Kubectl;
use super::manifests::{Manifests, Overlay};
use xtask::workspace;

const NAMESPACE: &str = "gpu-bringup";
const GPU: &str = "nvidia.com/gpu";
/// Poll interval of the job.
const LOOK_AGAIN: Duration = Duration::from_secs(3);

/// Validate one node, or all GPU nodes, by a job that gets its GPUs from the device plugin
///
/// The overlay must have been applied. The reports come to a folder here and are merged as
/// `cargo xtask fleet report` does; the exit code is that of the fleet.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true))]
pub(super) struct Arguments {
    /// A folder of manifests/kubernetes/overlays
    #[arg(value_name = "OVERLAY")]
    overlay: Overlay,
    /// This node
    #[arg(long, value_name = "NAME", group = "which")]
    node: Option<String>,
    /// Every node that is labelled nvidia.com/gpu=true
    #[arg(long, group = "which")]
    fleet: bool,
    /// How much to read
    #[arg(long, value_name = "LEVEL", default_value = "standard")]
    level: String,
    /// Give up after so many seconds, the wait for GPUs included
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    timeout_s: u64,
    /// Folder for the reports [default: target/fleet/JOB]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Leave the job in the cluster
    #[arg(long)]
    keep: bool,
    /// A context of the kubeconfig instead of its current one
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let kubectl = Kubectl::find(arguments.context.as_deref())?;
    let nodes = gpu_nodes(&kubectl, arguments.node.as_deref())?;
    let kind = if arguments.fleet { "fleet" } else { "node" };
    let manifests = Manifests::of_overlay_with_jobs(&arguments.overlay, &[kind])?;
    let template = manifests.object("Job", &format!("gpu-validator-{kind}"))?;
    profile_is_there(&kubectl, template, &arguments.overlay)?;
    let mut outcomes = Vec::new();
    for group in groups(nodes) {
        let job = job(template, &group, arguments);
        let created = kubectl.text(
            &["create", "--output=json", "--filename", "-"],
            &job.to_string(),
        )?;
        let created: Value =
            serde_json::from_str(&created).context("kubectl create printed no JSON")?;
        let name = created["metadata"]["name"]
            .as_str()
            .context("the job has no name")?
            .to_owned();
        println!(
            "job {name}: {} with {} GPUs each",
            counted(group.nodes.len(), "node"),
            group.gpus
        );
        outcomes.push(Started { name, group });
    }
    let folder = arguments
        .out
        .clone()
        .unwrap_or_else(|| workspace::target().join("fleet").join(&outcomes[0].name));
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("{} cannot be made", folder.display()))?;
    let missing = fetch_all(&kubectl, &outcomes, &folder, arguments);
    if !arguments.keep {
        for job in &outcomes {
            kubectl.text(
                &[
                    "delete",
                    "job",
                    &job.name,
                    "--namespace",
                    NAMESPACE,
                    "--ignore-not-found",
                    "--wait=false",
                ],
                "",
            )?;
        }
    }
    fleet_report(&folder, &missing?)
}

/// A node that should have reported.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Missing {
    node: String,
    reason: String,
}

/// Merges what is in `folder` with `gpu-validator fleet report`, which writes every format there.
fn fleet_report(folder: &Path, missing: &[Missing]) -> anyhow::Result<ExitCode> {
    let validator = workspace::program(&workspace::shell()?, "gpu-validator")?;
    let mut command = Command::new(&validator);
    command.args(["fleet", "report", "--out"]).arg(folder);
    for Missing { node, reason } in missing {
        let reason = reason.replace(char::is_control, " ");
        command.arg("--missing").arg(format!("{node}={reason}"));
    }
    workspace::without_cargos_library_path(&mut command);
    let status = command
        .arg(folder)
        .status()
        .with_context(|| format!("{} could not be started", validator.display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(
        code.context("the fleet's report was not finished")?,
    ))
}

/// A job that runs now.
#[derive(Debug)]
struct Started {
    name: String,
    group: Group,
}

/// Nodes with as many GPUs.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    gpus: u64,
    nodes: Vec<String>,
}

/// GPU nodes and how many GPUs pods may request there.
fn gpu_nodes(kubectl: &Kubectl, wanted: Option<&str>) -> anyhow::Result<Vec<(String, u64)>> {
    let list = match wanted {
        Some(name) => json!({"items": [kubectl.json(&["get", "node", name, "--output=json"])?]}),
        None => kubectl.json(&[
            "get",
            "nodes",
            "--selector=nvidia.com/gpu=true",
            "--output=json",
        ])?,
    };
    let nodes: Vec<(String, u64)> = list["items"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|node| {
            let name = node["metadata"]["name"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            let gpus = node["status"]["allocatable"][GPU]
                .as_str()
                .and_then(|it| it.parse().ok());
            (name, gpus.unwrap_or(0))
        })
        .collect();
    ensure!(
        !nodes.is_empty(),
        "no node is labelled nvidia.com/gpu=true; label one: kubectl label node NAME nvidia.com/gpu=true"
    );
    // A node without GPUs would leave its pod pending, and the fleet would look well without it.
    let without: Vec<&str> = nodes
        .iter()
        .filter(|(_, gpus)| *gpus == 0)
        .map(|(name, _)| name.as_str())
        .collect();
    ensure!(
        without.is_empty(),
        "these nodes offer no {GPU}: {}; look at the device plugin there: kubectl get pods -n kube-system -l name=nvidia-device-plugin-ds -o wide",
        without.join(", ")
    );
    Ok(nodes)
}

fn groups(nodes: Vec<(String, u64)>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (name, gpus) in nodes {
        match groups.iter_mut().find(|it| it.gpus == gpus) {
            Some(group) => group.nodes.push(name),
            None => groups.push(Group {
                gpus,
                nodes: vec![name],
            }),
        }
    }
    groups
}

/// Without its profile every pod would wait for the end of time.
fn profile_is_there(kubectl: &Kubectl, template: &Value, overlay: &Overlay) -> anyhow::Result<()> {
    let volumes = template["spec"]["template"]["spec"]["volumes"].as_array();
    let profile = volumes
        .into_iter()
        .flatten()
        .find_map(|it| it["configMap"]["name"].as_str())
        .context("the job mounts no profile")?;
    kubectl
        .text(&["get", "configmap", profile, "--namespace", NAMESPACE, "--output=name"], "")
        .map(drop)
        .with_context(|| {
            format!("the profile of the jobs is not in the cluster; apply it: cargo xtask k8s apply {overlay}")
        })
}

/// The template filled in: where it runs, on how many GPUs, at which level.
fn job(template: &Value, group: &Group, arguments: &Arguments) -> Value {
    let mut job = template.clone();
    let name = format!("{}-", job["metadata"]["name"].as_str().unwrap_or_default());
    job["metadata"]["generateName"] = json!(name);
    if let Some(metadata) = job["metadata"].as_object_mut() {
        metadata.remove("name");
    }
    let spec = &mut job["spec"];
    spec["activeDeadlineSeconds"] = json!(arguments.timeout_s);
    if !spec["completions"].is_null() {
        spec["completions"] = json!(group.nodes.len());
        spec["parallelism"] = json!(group.nodes.len());
    }
    let pod = &mut spec["template"]["spec"];
    // One term a node: a field takes a single value.
    let terms: Vec<Value> = group
        .nodes
        .iter()
        .map(|node| json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}))
        .collect();
    pod["affinity"]["nodeAffinity"] =
        json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
    let container = &mut pod["containers"][0];
    container["resources"]["limits"][GPU] = json!(group.gpus.to_string());
    if let Some(words) = container["args"].as_array_mut() {
        for word in words
            .iter_mut()
            .filter(|it| it.as_str().is_some_and(|it| it.starts_with("--level=")))
        {
            *word = json!(format!("--level={}", arguments.level));
        }
    }
    job
}

/// Brings every report; returns the nodes of which there is none, with the reason.
fn fetch_all(
    kubectl: &Kubectl,
    jobs: &[Started],
    folder: &Path,
    arguments: &Arguments,
) -> anyhow::Result<Vec<Missing>> {
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout_s);
    let mut missing = Vec::new();
    for job in jobs {
        wait(kubectl, &job.name, deadline)?;
        missing.extend(fetch(kubectl, job, folder)?);
    }
    Ok(missing)
}

/// Waits until the job has ended, well or not.
fn wait(kubectl: &Kubectl, name: &str, deadline: Instant) -> anyhow::Result<()> {
    loop {
        let job = kubectl.json(&[
            "get",
            "job",
            name,
            "--namespace",
            NAMESPACE,
            "--output=json",
        ])?;
        let ended = job["status"]["conditions"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|it| {
                it["status"] == "True" && matches!(it["type"].as_str(), Some("Complete" | "Failed"))
            });
        if ended {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "job {name} did not end in time; kubectl describe job {name} -n {NAMESPACE} says why"
        );
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Writes each pod's report under its node's name; returns the nodes of which there is none, with
/// the reason.
fn fetch(kubectl: &Kubectl, job: &Started, folder: &Path) -> anyhow::Result<Vec<Missing>> {
    let selector = format!("--selector=batch.kubernetes.io/job-name={}", job.name);
    let pods = kubectl.json(&[
        "get",
        "pods",
        &selector,
        "--namespace",
        NAMESPACE,
        "--output=json",
    ])?;
    let mut missing: BTreeMap<&str, String> = job
        .group
        .nodes
        .iter()
        .map(|node| (node.as_str(), "no pod of the job ran there".to_owned()))
        .collect();
    let mut unscheduled = Vec::new();
    for pod in pods["items"].as_array().into_iter().flatten() {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default();
        let Some(node) = pod["spec"]["nodeName"].as_str() else {
            unscheduled.push(format!("pod {name} waits: {}", waiting_reason(pod)));
            continue;
        };
        // A container that never started has no log.
        let log = kubectl.text(&["logs", name, "--namespace", NAMESPACE], "");
        match log.ok().as_deref().and_then(report_of_log) {
            Some(report) => {
                std::fs::write(folder.join(format!("{node}.json")), report)?;
                missing.remove(node);
            }
            None => {
                missing.insert(
                    job.group
                        .nodes
                        .iter()
                        .find(|it| *it == node)
                        .map_or("a node outside the fleet", String::as_str),
                    format!("pod {name} left no report: {}", waiting_reason(pod)),
                );
            }
        }
    }
    let reason = |reason: String| match unscheduled.first() {
        Some(waits) if reason.starts_with("no pod") => format!("{reason}; {waits}"),
        _ => reason,
    };
    Ok(missing
        .into_iter()
        .map(|(node, why)| Missing {
            node: node.to_owned(),
            reason: reason(why),
        })
        .collect())
}

/// The JSON report in a pod's log, in which standard output and standard error are one.
fn report_of_log(log: &str) -> Option<String> {
    let lines: Vec<&str> = log.lines().collect();
    let start = lines.iter().position(|line| *line == "{")?;
    let end = lines.iter().rposition(|line| *line == "}")?;
    let report = lines.get(start..=end)?.join("\n");
    serde_json::from_str::<Value>(&report).ok()?;
    Some(report)
}

/// Why a pod does not run, in Kubernetes' own words.
fn waiting_reason(pod: &Value) -> String {
    let status = &pod["status"];
    let container = &status["containerStatuses"][0]["state"];
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let unmet = conditions
        .filter(|it| it["status"] == "False")
        .find_map(|it| it["message"].as_str());
    let candidates = [
        container["waiting"]["message"].as_str(),
        container["waiting"]["reason"].as_str(),
        unmet,
        container["terminated"]["reason"].as_str(),
        status["message"].as_str(),
        status["phase"].as_str(),
    ];
    candidates
        .into_iter()
        .flatten()
        .next()
        .unwrap_or("its state is not known")
        .to_owned()
}

fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_found_among_what_a_person_reads() {
        let log = "host  node-1\n  pass  x\n\n{\n  \"format\": 1\n}\nPASS\n";
        assert_eq!(report_of_log(log).as_deref(), Some("{\n  \"format\": 1\n}"));
        for log in [
            "",
            "PASS",
            "{\n  \"format\": \n  pass x\n}",
            "{\n  \"format\": 1",
        ] {
            assert_eq!(report_of_log(log), None, "{log}");
        }
    }

    #[test]
    fn nodes_are_grouped_by_their_gpus() {
        let node = |name: &str, gpus| (name.to_owned(), gpus);
        let groups = groups(vec![node("a", 8), node("b", 1), node("c", 8)]);
        assert_eq!(
            groups[0],
            Group {
                gpus: 8,
                nodes: vec!["a".to_owned(), "c".to_owned()]
            }
        );
        assert_eq!(
            groups[1],
            Group {
                gpus: 1,
                nodes: vec!["b".to_owned()]
            }
        );
    }

    #[test]
    fn a_pod_that_does_not_run_says_why() {
        let pending = json!({"status": {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."},
        ]}});
        assert!(waiting_reason(&pending).contains("Insufficient nvidia.com/gpu"));
        let pulling = json!({"status": {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}});
        assert_eq!(waiting_reason(&pulling), "ImagePullBackOff");
    }
}
