//! The tasks that talk to a cluster, as whole commands: what a user types, against the real API
//! server.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::kubelet::{Logs, bind, container_status, set_status, while_playing};
use super::ran::{Ran, validator};
use super::server::{ADMIN_TOKEN, Server};
use super::{JOBS, create, step};
use harness::simulate::Simulator;
use kubernetes_tasks::kubectl::Kubectl;
use kubernetes_tasks::manifests::{self, Manifests, Overlay};
use xtask::tools::go::HELM;
use xtask::workspace;

/// The exit code of a task that could not do its work, where 1 is a verdict.
const BAD_INPUT: i32 = xtask::EXIT_CODE_BAD_INPUT as i32;
const RUNNERS: &str = "gpu-runners";
/// The folders of GitHub's charts in the repository of the controller.
const RUNNER_CHART: &str = "gha-runner-scale-set";
const CONTROLLER_CHART: &str = "gha-runner-scale-set-controller";

/// This task's own program, with the pinned kubectl and helm, as the administrator of the server's
/// cluster.
#[derive(Debug)]
pub(super) struct Commands<'a> {
    server: &'a Server,
    admin: Kubectl,
    path: OsString,
    kubeconfig: PathBuf,
}

impl<'a> Commands<'a> {
    pub(super) fn new(server: &'a Server) -> anyhow::Result<Commands<'a>> {
        let helm = HELM.install()?;
        let folders = [Some(server.kubectl_folder()), helm.parent()];
        let old = std::env::var_os("PATH").unwrap_or_default();
        let folders = folders.into_iter().flatten().map(Path::to_owned);
        Ok(Commands {
            path: std::env::join_paths(folders.chain(std::env::split_paths(&old)))?,
            kubeconfig: server.kubeconfig("admin", &json!({"token": ADMIN_TOKEN}))?,
            admin: server.kubectl(ADMIN_TOKEN),
            server,
        })
    }

    /// Runs `cargo xtask` with these arguments, which must end with `code` and print `words`;
    /// returns its output.
    fn xtask(&self, arguments: &[&str], code: i32, words: &[&str]) -> anyhow::Result<String> {
        // The program of `cargo xtask k8s`.
        let program = workspace::program(&workspace::shell()?, "kubernetes-tasks")?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env("PATH", &self.path)
            .env("KUBECONFIG", &self.kubeconfig)
            // helm keeps its cache and its registry's logins below these.
            .env("HELM_CACHE_HOME", self.server.folder().join("helm"))
            .env("HELM_CONFIG_HOME", self.server.folder().join("helm"))
            .env("HELM_DATA_HOME", self.server.folder().join("helm"));
        let output = command.output().context("xtask does not start")?;
        let (shown, said) = (arguments.join(" "), said(&output));
        ensure!(
            output.status.code() == Some(code),
            "cargo xtask {shown} ended with {}, expected {code}:\n{said}",
            output.status
        );
        for word in words {
            ensure!(
                said.contains(word),
                "cargo xtask {shown} does not say `{word}`:\n{said}"
            );
        }
        step(&format!("cargo xtask {shown}: ends with {code}"));
        Ok(said)
    }

    /// From a cluster that knows nothing to one with both overlays applied.
    pub(super) fn apply(&self) -> anyhow::Result<()> {
        let staging = "staging".parse()?;
        self.xtask(
            &["k8s", "diff", "staging"],
            1,
            &[
                "the cluster differs from overlay staging",
                "+ DaemonSet gpu-bringup-system/gpu-validator-gate",
            ],
        )?;
        self.xtask(&["k8s", "apply", "staging", "--dry-run"], 0, &[])?;
        ensure!(
            !self.exists("namespace", JOBS)?,
            "a dry run made namespace {JOBS}"
        );
        self.applied(&staging, &[])?;
        self.xtask(&["k8s", "apply", "staging", "--dry-run"], 0, &[])?;
        let change = [
            "patch",
            "runtimeclass",
            "nvidia",
            "--type=merge",
            "--patch",
            r#"{"metadata":{"labels":{"app.kubernetes.io/part-of":"somebody-else"}}}"#,
            "--field-manager=somebody-else",
        ];
        self.admin.text(&change, "")?;
        self.xtask(&["k8s", "diff", "staging"], BAD_INPUT, &["somebody else"])?;
        self.xtask(&["k8s", "apply", "staging"], BAD_INPUT, &["somebody else"])?;
        let back = change.map(|it| it.replace(r#""somebody-else""#, r#""gpu-bringup""#));
        let back: Vec<&str> = back.iter().map(String::as_str).collect();
        self.admin.text(&back, "")?;
        self.xtask(
            &["k8s", "apply", "production"],
            BAD_INPUT,
            &["production runs images by digest"],
        )?;
        self.xtask(
            &["k8s", "apply", "production", "--allow-tags"],
            BAD_INPUT,
            &["the cluster does not know ServiceMonitor: install the Prometheus operator"],
        )?;
        // What the Prometheus operator brings.
        self.define("monitoring.coreos.com", "v1", "ServiceMonitor")?;
        self.applied(&"production".parse()?, &["--allow-tags"])?;
        // The nodes' checks go on with the one that the documents begin with.
        self.applied(&staging, &[])
    }

    /// Every object is taken, with every field known; a second time nothing differs.
    fn applied(&self, overlay: &Overlay, options: &[&str]) -> anyhow::Result<()> {
        let objects = Manifests::of_overlay(overlay)?.objects().len();
        let name = overlay.to_string();
        let mut arguments = vec!["k8s", "apply", &name];
        arguments.extend(options);
        let words = format!("overlay {overlay} is applied");
        let said = self.xtask(&arguments, 0, &[&words])?;
        let applied = said
            .lines()
            .filter(|it| it.ends_with(" serverside-applied"))
            .count();
        ensure!(
            applied == objects,
            "{applied} objects were applied of {objects}:\n{said}"
        );
        let words = format!("the cluster is as overlay {overlay} says");
        self.xtask(&["k8s", "diff", &name], 0, &[&words])?;
        Ok(())
    }

    /// A kind that others bring, whatever its fields: those are checked elsewhere.
    fn define(&self, group: &str, version: &str, kind: &str) -> anyhow::Result<()> {
        let singular = kind.to_lowercase();
        let plural = format!("{singular}s");
        let name = format!("{plural}.{group}");
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": name},
            "spec": {
                "group": group, "scope": "Namespaced",
                "names": {"kind": kind, "plural": plural, "singular": singular},
                "versions": [{"name": version, "served": true, "storage": true, "schema": {"openAPIV3Schema":
                    {"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}],
            },
        });
        let apply = ["apply", "--server-side", "--filename", "-"];
        self.admin.text(&apply, &definition.to_string())?;
        let name = format!("crd/{name}");
        let wait = ["wait", "--for=condition=Established", &name];
        self.admin.text(&wait, "").map(drop)
    }

    fn exists(&self, kind: &str, name: &str) -> anyhow::Result<bool> {
        let get = ["get", kind, name, "--ignore-not-found", "--output=name"];
        Ok(!self.admin.text(&get, "")?.is_empty())
    }

    /// One node, then the fleet with one that fails. The test plays the job's controller, scheduler
    /// and kubelet.
    pub(super) fn validate(&self) -> anyhow::Result<()> {
        let logs = Logs::serve(
            self.server.folder().join("job-logs"),
            self.server.certificates(),
        )?;
        let reports = self.reports()?;
        let no_node = ["k8s", "validate", "staging", "--fleet"];
        self.xtask(
            &no_node,
            BAD_INPUT,
            &["no node is labelled nvidia.com/gpu=true"],
        )?;
        for (node, _) in &reports {
            create(&self.admin, &fleet_node(node, logs.port), false)?;
        }
        let out = self.server.folder().join("fleet");
        let mut player = JobPlayer {
            admin: self.server.kubectl(ADMIN_TOKEN),
            logs: &logs,
            reports: &reports,
            seen: BTreeSet::new(),
        };
        let mut validate = |which: &[&str], code: i32, words: &[&str]| {
            let folder = out.join(which.join("-")).display().to_string();
            let mut arguments = vec!["k8s", "validate", "staging", "--out", &folder];
            arguments.extend(which);
            while_playing(|| player.look(), || self.xtask(&arguments, code, words))?;
            for file in ["fleet.md", "fleet.html", "fleet.report", "fleet.junit"] {
                ensure!(Path::new(&folder).join(file).is_file(), "no {file}");
            }
            anyhow::Ok(())
        };
        validate(&["--node", "fleet-0"], 0, &["1 node, 1 GPUs: 1 pass"])?;
        validate(
            &["--fleet"],
            1,
            &["2 nodes, 2 GPUs: 1 pass, 1 fail", "fleet-1"],
        )?;
        let jobs = ["get", "jobs", "--namespace", JOBS, "--output=name"];
        let left = self.admin.text(&jobs, "")?;
        ensure!(left.is_empty(), "jobs are left behind: {left}");
        for (node, _) in &reports {
            self.admin.text(&["delete", "node", node], "")?;
        }
        Ok(())
    }

    /// What the job's pod prints on a healthy node and on a broken one.
    fn reports(&self) -> anyhow::Result<Vec<(&'static str, String)>> {
        let simulator = Simulator::build()?;
        let mut reports = Vec::new();
        for (index, (node, faults)) in [
            ("fleet-0", vec![]),
            ("fleet-1", vec!["ecc-volatile-uncorrectable".to_owned()]),
        ]
        .into_iter()
        .enumerate()
        {
            let simulated = simulator.prepare("h200x1", &faults, &[])?;
            let path = self.server.folder().join(format!("{node}.json"));
            let mut command = validator(&simulated, &["run", "--level=quick"]);
            let output = command.arg("--json").arg(&path).output()?;
            Ran::of(&output, &path)?.ended_with(i32::from(!faults.is_empty()))?;
            let mut report: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
            report["machine"]["hostname"] = json!(node);
            report["machine"]["gpus"][0]["uuid"] = json!(format!("GPU-of-{index}"));
            reports.push((node, format!("{}\n{report:#}\n", said(&output))));
        }
        Ok(reports)
    }

    /// The runners by helm: with GitHub's charts where `charts` holds them, else with a chart of
    /// the test's own.
    pub(super) fn runners(&self, charts: Option<&Path>) -> anyhow::Result<()> {
        let chart = if let Some(folder) = charts {
            let definitions = folder.join(CONTROLLER_CHART).join("crds");
            let definitions = definitions.display().to_string();
            let apply = ["apply", "--server-side", "--filename", &definitions];
            self.admin.text(&apply, "")?;
            folder.join(RUNNER_CHART)
        } else {
            // What GitHub's controller brings.
            self.define("actions.github.com", "v1alpha1", "AutoscalingRunnerSet")?;
            own_chart(self.server.folder())?
        };
        let chart = chart.display().to_string();
        let (template, apply) = (["runners", "template"], ["runners", "apply"]);
        let with_chart = |what: [&'static str; 2]| {
            [
                what[0],
                what[1],
                "staging",
                "--chart",
                &chart,
                "--controller",
                "arc-systems/arc-gha-rs-controller",
            ]
        };
        self.xtask(&with_chart(template), 0, &["kind: AutoscalingRunnerSet"])?;
        self.xtask(
            &with_chart(apply),
            1,
            &["the runners register with secret github-app of namespace gpu-runners"],
        )?;
        let secret = [
            "create",
            "secret",
            "generic",
            "github-app",
            "--namespace",
            RUNNERS,
            "--from-literal=github_app_id=1",
            "--from-literal=github_app_installation_id=1",
            "--from-literal=github_app_private_key=key",
        ];
        self.admin.text(&secret, "")?;
        // The second time everything is there already.
        for _ in 0..2 {
            self.xtask(&with_chart(apply), 0, &[])?;
        }
        self.runner_sets_are_right()?;
        step(&format!(
            "helm applied the scale sets of {}",
            charts.map_or("a chart of the test's own".to_owned(), |it| format!(
                "the charts in {}",
                it.display()
            ))
        ));
        Ok(())
    }

    fn runner_sets_are_right(&self) -> anyhow::Result<()> {
        // The controller manager, which does not run here, makes one in every namespace.
        let account = [
            "create",
            "serviceaccount",
            "default",
            "--namespace",
            RUNNERS,
        ];
        self.admin.text(&account, "")?;
        for name in ["gpu", "gpu-spot"] {
            let set = self.admin.json(&[
                "get",
                "autoscalingrunnerset",
                name,
                "--namespace",
                RUNNERS,
                "--output=json",
            ])?;
            let spec = &set["spec"];
            ensure!(
                spec["maxRunners"] == 2 && spec["template"]["spec"]["runtimeClassName"] == "nvidia",
                "scale set {name} is {spec:#}"
            );
            let containers = spec["template"]["spec"]["containers"].as_array();
            let runner = containers
                .into_iter()
                .flatten()
                .find(|it| it["name"] == "runner")
                .with_context(|| format!("scale set {name} has no runner"))?;
            ensure!(
                runner["resources"]["limits"]["nvidia.com/gpu"] == "1",
                "the runner of {name} asks for no GPU: {runner:#}"
            );
            // What a runner's pod would be, by Pod Security and every field of the API.
            let pod = super::pod(
                &format!("runner-{name}"),
                RUNNERS,
                &spec["template"]["spec"],
            );
            create(&self.admin, &pod, true)
                .with_context(|| format!("a pod of scale set {name}"))?;
        }
        Ok(())
    }

    /// Everything that the overlay applied goes, and nothing else.
    pub(super) fn delete(&self) -> anyhow::Result<()> {
        let overlay: Overlay = "staging".parse()?;
        let manifests = Manifests::of_overlay(&overlay)?;
        let admin = self.server.kubectl(ADMIN_TOKEN);
        while_playing(
            || finalize_namespaces(&admin),
            || self.xtask(&["k8s", "delete", "staging", "--yes"], 0, &[]),
        )?;
        let get = [
            "get",
            "--ignore-not-found",
            "--output=name",
            "--filename",
            "-",
        ];
        let left = self.admin.text(&get, manifests.text())?;
        ensure!(left.is_empty(), "these are left behind:\n{left}");
        ensure!(
            self.exists("namespace", RUNNERS)? && self.exists("node", "healthy")?,
            "objects that the overlay has not applied are gone"
        );
        // What is not there is no error.
        self.xtask(&["k8s", "delete", "staging", "--yes"], 0, &[])?;
        Ok(())
    }
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

fn fleet_node(name: &str, port: u16) -> Value {
    let devices = json!({"cpu": "4", "pods": "110", "nvidia.com/gpu": "1"});
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"nvidia.com/gpu": "true"}},
        "status": {
            "capacity": devices,
            "allocatable": devices,
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        },
    })
}

/// A controller of jobs: a pod on each node that the job names, each with its node's report in its
/// log.
struct JobPlayer<'a> {
    admin: Kubectl,
    logs: &'a Logs,
    reports: &'a [(&'static str, String)],
    seen: BTreeSet<String>,
}

impl JobPlayer<'_> {
    fn look(&mut self) -> anyhow::Result<()> {
        let get = ["get", "jobs", "--namespace", JOBS, "--output=json"];
        let jobs = self.admin.json(&get)?;
        for job in jobs["items"].as_array().into_iter().flatten() {
            let name = job["metadata"]["name"].as_str().context("no name")?;
            if self.seen.insert(name.to_owned()) {
                self.play(name, job)?;
            }
        }
        Ok(())
    }

    fn play(&self, name: &str, job: &Value) -> anyhow::Result<()> {
        let template = &job["spec"]["template"];
        let affinity = &template["spec"]["affinity"]["nodeAffinity"];
        let terms =
            &affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
        let terms = terms.as_array().context("the job names no node")?;
        for (index, term) in terms.iter().enumerate() {
            let node = term["matchFields"][0]["values"][0].as_str();
            let node = node.context("the term names no node")?;
            self.pod(&format!("{name}-{index}"), node, template)?;
        }
        let now = "2026-01-01T00:00:00Z";
        let met = |kind: &str| json!({"type": kind, "status": "True", "lastProbeTime": now, "lastTransitionTime": now});
        let status = json!({"status": {
            "startTime": now,
            "completionTime": now,
            "succeeded": terms.len(),
            "conditions": [met("SuccessCriteriaMet"), met("Complete")],
        }})
        .to_string();
        let patch = [
            "patch",
            "job",
            name,
            "--namespace",
            JOBS,
            "--subresource=status",
            "--type=merge",
            "--patch",
            &status,
        ];
        self.admin.text(&patch, "").map(drop)
    }

    fn pod(&self, name: &str, node: &str, template: &Value) -> anyhow::Result<()> {
        let pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": JOBS,
                "labels": template["metadata"]["labels"],
            },
            "spec": template["spec"],
        });
        create(&self.admin, &pod, false)?;
        bind(&self.admin, JOBS, name, node)?;
        let container = template["spec"]["containers"][0]["name"].as_str();
        let container = container.context("the job has no container")?;
        let report = self.reports.iter().find(|(of, _)| *of == node);
        let (_, report) = report.with_context(|| format!("no report of node {node}"))?;
        self.logs.write(name, JOBS, container, "", report)?;
        let ended = json!({"terminated": {"exitCode": 0}});
        let status = json!({
            "phase": "Succeeded",
            "containerStatuses": container_status(container, 0, &ended),
        });
        set_status(&self.admin, JOBS, name, &status)
    }
}

/// A controller of namespaces: those that are to go, go. What is in them stays in etcd, which ends
/// with the test.
fn finalize_namespaces(admin: &Kubectl) -> anyhow::Result<()> {
    let namespaces = admin.json(&["get", "namespaces", "--output=json"])?;
    for namespace in namespaces["items"].as_array().into_iter().flatten() {
        if namespace["metadata"]["deletionTimestamp"].is_null() {
            continue;
        }
        let mut finalized = namespace.clone();
        finalized["apiVersion"] = json!("v1");
        finalized["kind"] = json!("Namespace");
        finalized["spec"]["finalizers"] = json!([]);
        let name = namespace["metadata"]["name"].as_str().unwrap_or_default();
        let path = format!("/api/v1/namespaces/{name}/finalize");
        let replace = ["replace", "--raw", &path, "--filename", "-"];
        admin.text(&replace, &finalized.to_string())?;
    }
    Ok(())
}

/// A chart that takes the same values as GitHub's, by our schema of them, and makes the same kind
/// of object of them.
fn own_chart(folder: &Path) -> anyhow::Result<PathBuf> {
    let chart = folder.join("chart");
    std::fs::create_dir_all(chart.join("templates"))?;
    std::fs::write(
        chart.join("Chart.yaml"),
        format!("apiVersion: v2\nname: {RUNNER_CHART}\nversion: 0.0.0\n"),
    )?;
    std::fs::copy(
        manifests::folder().join("runners/values.schema.json"),
        chart.join("values.schema.json"),
    )?;
    std::fs::write(
        chart.join("templates/set.yaml"),
        "apiVersion: actions.github.com/v1alpha1\nkind: AutoscalingRunnerSet\nmetadata:\n  \
         name: {{ .Values.runnerScaleSetName }}\nspec:\n  {{- toYaml (omit .Values \"controllerServiceAccount\") | nindent 2 }}\n",
    )?;
    Ok(chart)
}
