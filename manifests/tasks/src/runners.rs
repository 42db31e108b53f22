//! `cargo xtask runners`: the scale sets of GPU runners for GitHub Actions.

use std::path::PathBuf;

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};
use xshell::{Shell, cmd};

use crate::kubectl::Kubectl;
use crate::manifests::{self, Overlay};
use xtask::tools::LINTERS;
use xtask::workspace;

/// GitHub's chart, and the version that the values are written for.
const CHART: &str = "oci://ghcr.io/actions/actions-runner-controller-charts/gha-runner-scale-set";
const CHART_VERSION: &str = "0.14.2";
const NAMESPACE: &str = "gpu-runners";
/// A scale set each.
const CLASSES: [&str; 2] = ["on-demand", "spot"];
/// The scale set of jobs that name a container, which is applied where it is requested.
const CONTAINERS: &str = "containers";
/// GitHub bills nothing for own runners, but a GPU node costs; more is requested in the overlay,
/// and here.
const RUNNERS_MAXIMUM: u64 = 10;

/// Render and apply the scale sets of GPU runners (actions-runner-controller)
#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Print what helm would apply
    Template(ChartArguments),
    /// Apply the scale sets on demand and on spot capacity; the controller must be in the cluster
    Apply(ApplyArguments),
}

#[derive(Debug, clap::Args)]
struct ChartArguments {
    /// An overlay's name: which values are added
    #[arg(value_name = "OVERLAY")]
    overlay: Overlay,
    /// A chart in a folder or archive instead of GitHub's registry
    #[arg(long, value_name = "PATH")]
    chart: Option<PathBuf>,
    /// The controller's service account, where helm cannot look for it
    #[arg(long, value_name = "NAMESPACE/NAME")]
    controller: Option<String>,
    /// Also the scale set `gpu-containers`, for jobs that name a container
    #[arg(long)]
    container_jobs: bool,
    /// A volume claim of namespace gpu-runners, writable from many nodes, that keeps the compiler
    /// cache of all runners; every job can write what a later one compiles with
    #[arg(long, value_name = "NAME", value_parser = claim_name)]
    ccache_claim: Option<String>,
}

impl ChartArguments {
    fn classes(&self) -> impl Iterator<Item = &'static str> {
        let more = self.container_jobs.then_some(CONTAINERS);
        CLASSES.into_iter().chain(more)
    }
}

#[derive(Debug, clap::Args)]
struct ApplyArguments {
    #[command(flatten)]
    chart: ChartArguments,
    /// A context of the kubeconfig instead of its current one
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    helm_is_there(&shell)?;
    match &arguments.task {
        Task::Template(chart) => chart.classes().try_for_each(|class| {
            let options = options(chart, class)?;
            let name = release(class);
            cmd!(shell, "helm template {name} {options...}")
                .quiet()
                .run()
                .with_context(|| format!("helm cannot render scale set {name}"))
        }),
        Task::Apply(arguments) => apply(&shell, arguments),
    }
}

fn apply(shell: &Shell, arguments: &ApplyArguments) -> anyhow::Result<()> {
    let kubectl = Kubectl::find(arguments.context.as_deref())?;
    let prerequisites = shell.read_file(folder().join("prerequisites.yaml"))?;
    kubectl.run(
        &[
            "apply",
            "--server-side",
            "--field-manager=gpu-bringup",
            "--filename",
            "-",
        ],
        &prerequisites,
    )?;
    let values = values(&arguments.chart.overlay, CLASSES[0])?;
    let secret = values["githubConfigSecret"].as_str().unwrap_or_default();
    kubectl
        .text(&["get", "secret", secret, "--namespace", NAMESPACE, "--output=name"], "")
        .with_context(|| {
            format!("the runners register with secret {secret} of namespace {NAMESPACE}; make it first, see docs/kubernetes.md")
        })?;
    for class in arguments.chart.classes() {
        let mut options = options(&arguments.chart, class)?;
        if let Some(context) = &arguments.context {
            options.push(format!("--kube-context={context}"));
        }
        let name = release(class);
        cmd!(shell, "helm upgrade --install {name} {options...}")
            .quiet()
            .run()
            .with_context(|| format!("helm cannot apply scale set {name}; is the controller in the cluster (chart gha-runner-scale-set-controller)?"))?;
    }
    Ok(())
}

/// As Kubernetes names claims: a DNS subdomain.
fn claim_name(text: &str) -> Result<String, String> {
    let is_inner = |it: char| it.is_ascii_lowercase() || it.is_ascii_digit();
    let is_name = text.len() <= 253
        && text.starts_with(is_inner)
        && text.ends_with(is_inner)
        && text
            .chars()
            .all(|it| is_inner(it) || it == '-' || it == '.');
    if is_name {
        Ok(text.to_owned())
    } else {
        Err("expected lower-case letters, digits, `-` and `.`".to_owned())
    }
}

fn release(class: &str) -> String {
    format!("gpu-{class}")
}

fn helm_is_there(shell: &Shell) -> anyhow::Result<()> {
    let found = cmd!(shell, "helm version --short")
        .quiet()
        .ignore_stderr()
        .read();
    match found {
        Ok(version) if version.starts_with("v3.") || version.starts_with("v4.") => Ok(()),
        Ok(version) => bail!("helm is {version}, expected version 3 or 4"),
        Err(_) => bail!("helm is not on the PATH; install it: https://helm.sh/docs/intro/install/"),
    }
}

fn folder() -> PathBuf {
    manifests::folder().join("runners")
}

/// The files of values, the last one wins.
fn files(overlay: &Overlay, class: &str) -> Vec<PathBuf> {
    let overlay = overlay.to_string();
    let names = match class {
        CONTAINERS => vec![class, overlay.as_str()],
        _ => vec!["values", class, overlay.as_str()],
    };
    let file = |name| folder().join(format!("{name}.yaml"));
    names.into_iter().map(file).collect()
}

fn options(arguments: &ChartArguments, class: &str) -> anyhow::Result<Vec<String>> {
    let mut options = match &arguments.chart {
        Some(path) => vec![path.display().to_string()],
        None => vec![CHART.to_owned(), format!("--version={CHART_VERSION}")],
    };
    options.push(format!("--namespace={NAMESPACE}"));
    for file in files(&arguments.overlay, class) {
        options.push(format!("--values={}", file.display()));
    }
    if let Some(claim) = arguments
        .ccache_claim
        .as_ref()
        .filter(|_| class != CONTAINERS)
    {
        let values = with_cache_claim(values(&arguments.overlay, class)?, claim)?;
        let file = workspace::target().join(format!("kubernetes/runners-ccache-{class}.json"));
        std::fs::create_dir_all(workspace::target().join("kubernetes"))?;
        std::fs::write(&file, values.to_string())?;
        options.push(format!("--values={}", file.display()));
    }
    if let Some(account) = &arguments.controller {
        let (namespace, name) = account
            .split_once('/')
            .with_context(|| format!("--controller is `{account}`, expected NAMESPACE/NAME"))?;
        options.push(format!(
            "--set=controllerServiceAccount.namespace={namespace}"
        ));
        options.push(format!("--set=controllerServiceAccount.name={name}"));
    }
    Ok(options)
}

/// The values of a scale set, merged as helm merges them.
fn values(overlay: &Overlay, class: &str) -> anyhow::Result<Value> {
    let mut merged = json!({});
    for file in files(overlay, class) {
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("{} cannot be read", file.display()))?;
        let values: Value =
            serde_yaml::from_str(&text).with_context(|| file.display().to_string())?;
        merge(&mut merged, values);
    }
    Ok(merged)
}

const CACHE: &str = "ccache";
/// `CCACHE_DIR` of packer/runner-gpu/Dockerfile.
const CACHE_FOLDER: &str = "/var/cache/ccache";

/// The values of a scale set with a claim in place of the cache that ends with the runner. A list of
/// volumes is replaced as a whole.
fn with_cache_claim(mut values: Value, claim: &str) -> anyhow::Result<Value> {
    let volumes = values["template"]["spec"]["volumes"].as_array_mut();
    let cache = volumes
        .into_iter()
        .flatten()
        .find(|it| it["name"] == CACHE)
        .with_context(|| format!("the values have no volume {CACHE}"))?;
    *cache = json!({"name": CACHE, "persistentVolumeClaim": {"claimName": claim}});
    Ok(values)
}

/// Maps are merged, and everything else is replaced.
fn merge(into: &mut Value, values: Value) {
    match (into, values) {
        (Value::Object(into), Value::Object(values)) => {
            for (key, value) in values {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, value) => *into = value,
    }
}

/// helm 3.22 takes a key away by null where the chart has a default for it, and else passes the
/// null on, which the API server refuses.
fn check_no_null(value: &Value, path: &str) -> anyhow::Result<()> {
    match value {
        Value::Null => bail!("{path} is null, which helm passes on"),
        Value::Object(map) => map
            .iter()
            .try_for_each(|(key, value)| check_no_null(value, &format!("{path}.{key}"))),
        Value::Array(list) => list.iter().try_for_each(|it| check_no_null(it, path)),
        _ => Ok(()),
    }
}

/// Checks every file against the schema, and returns what the chart makes of the values, for the
/// schemas of Kubernetes: the scale sets and a pod of each.
pub(crate) fn checked_objects(shell: &Shell, overlay: &Overlay) -> anyhow::Result<Vec<Value>> {
    let checker = LINTERS.install()?.join("check-jsonschema");
    let schema = folder().join("values.schema.json");
    let mut objects = Vec::new();
    for class in CLASSES.into_iter().chain([CONTAINERS]) {
        let files = files(overlay, class);
        cmd!(shell, "{checker} --quiet --schemafile {schema} {files...}")
            .quiet()
            .run()
            .context("values that the chart does not know")?;
        let values = values(overlay, class)?;
        check_class(class, &values).with_context(|| format!("scale set {class}"))?;
        let metadata = |name: &str| json!({"name": name, "namespace": NAMESPACE});
        let mut spec = values.clone();
        if let Some(spec) = spec.as_object_mut() {
            // What the chart reads itself.
            spec.remove("controllerServiceAccount");
            spec.remove("containerMode");
        }
        objects.push(json!({
            "apiVersion": "actions.github.com/v1alpha1",
            "kind": "AutoscalingRunnerSet",
            "metadata": metadata(&release(class)),
            "spec": spec,
        }));
        objects.push(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata(&format!("runner-{class}")),
            "spec": values["template"]["spec"],
        }));
    }
    let mut job = job_pod()?["spec"].clone();
    job["containers"][0]["name"] = "job".into();
    objects.push(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "job", "namespace": NAMESPACE},
        "spec": job,
    }));
    Ok(objects)
}

/// A misspelt value, and Docker in Docker, must be refused, or the schema refuses nothing.
pub(crate) fn check_refusals(shell: &Shell) -> anyhow::Result<()> {
    let checker = LINTERS.install()?.join("check-jsonschema");
    let schema = folder().join("values.schema.json");
    let folder = shell.create_temp_dir()?;
    for wrong in [
        json!({"maxRuners": 1}),
        json!({"containerMode": {"type": "dind"}}),
        json!({"githubConfigSecret": {"github_token": "x"}}),
    ] {
        let file = folder.path().join("wrong.json");
        shell.write_file(&file, wrong.to_string())?;
        let output = cmd!(shell, "{checker} --quiet --schemafile {schema} {file}")
            .quiet()
            .ignore_status()
            .output()?;
        ensure!(
            output.status.code() == Some(1),
            "the schema of the runners' values takes {wrong}"
        );
    }
    Ok(())
}

fn check_class(class: &str, values: &Value) -> anyhow::Result<()> {
    check_no_null(values, "")?;
    check(values)?;
    if class == CONTAINERS {
        return check_container_mode(values, &job_pod()?);
    }
    let pod = &values["template"]["spec"];
    check_gpu_pod(pod)?;
    check_runner(pod)?;
    check_capacity(class, pod)
}

/// The pod of a job that names a container, as the container hooks read it.
fn job_pod() -> anyhow::Result<Value> {
    let text = std::fs::read_to_string(folder().join("prerequisites.yaml"))?;
    let prerequisites = manifests::Manifests::parse(text)?;
    let map = prerequisites.object("ConfigMap", "gpu-job-pod")?;
    let template = map["data"]["job-pod.yaml"].as_str();
    let template = template.context("ConfigMap gpu-job-pod has no job-pod.yaml")?;
    serde_yaml::from_str(template).context("job-pod.yaml of ConfigMap gpu-job-pod")
}

/// The runner creates the job's pod, and has no GPU itself.
fn check_container_mode(values: &Value, job: &Value) -> anyhow::Result<()> {
    let pod = &values["template"]["spec"];
    let runner = &pod["containers"][0];
    ensure!(
        runner["resources"]["limits"]["nvidia.com/gpu"].is_null(),
        "the runner holds a GPU while the job's pod waits for one"
    );
    ensure!(
        pod["automountServiceAccountToken"] == true,
        "the runner has no token, with which its hooks create the job's pod"
    );
    let template = "/etc/gpu-bringup/job-pod.yaml";
    let environment = runner["env"].as_array().into_iter().flatten();
    let mut named = environment.filter(|it| it["name"] == "ACTIONS_RUNNER_CONTAINER_HOOK_TEMPLATE");
    ensure!(
        named.any(|it| it["value"] == template),
        "the hooks are not given {template}"
    );
    let spec = &job["spec"];
    ensure!(
        spec["initContainers"].is_null(),
        "the job's pod has initContainers, which take the place of the hooks' own"
    );
    let container = &spec["containers"][0];
    ensure!(
        container["name"] == "$job",
        "the first container of the job's pod is {}, the hooks know `$job`",
        container["name"]
    );
    check_gpu_pod(spec).context("the job's pod")
}

/// Nodes as EKS managed node groups and Karpenter label them, and one of neither.
const ON_DEMAND_NODES: [&[(&str, &str)]; 4] = [
    &[("eks.amazonaws.com/capacityType", "ON_DEMAND")],
    &[("eks.amazonaws.com/capacityType", "CAPACITY_BLOCK")],
    &[("karpenter.sh/capacity-type", "on-demand")],
    &[],
];
const SPOT_NODES: [&[(&str, &str)]; 2] = [
    &[("eks.amazonaws.com/capacityType", "SPOT")],
    &[("karpenter.sh/capacity-type", "spot")],
];

/// A runner runs on the capacity of its class and on no other.
fn check_capacity(class: &str, pod: &Value) -> anyhow::Result<()> {
    let (right, wrong): (&[&[_]], &[&[_]]) = match class {
        "spot" => (&SPOT_NODES, &ON_DEMAND_NODES),
        _ => (&ON_DEMAND_NODES, &SPOT_NODES),
    };
    for labels in right {
        ensure!(
            runs_on(pod, labels),
            "it does not run on a node with the labels {labels:?}"
        );
    }
    for labels in wrong {
        ensure!(
            !runs_on(pod, labels),
            "it runs on a node with the labels {labels:?}, which is of another class"
        );
    }
    Ok(())
}

/// Required node affinity, as Kubernetes reads it: one of the terms, and of that every expression.
fn runs_on(pod: &Value, labels: &[(&str, &str)]) -> bool {
    let required =
        &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let Some(terms) = required["nodeSelectorTerms"].as_array() else {
        return true;
    };
    let holds = |expression: &Value| {
        let label = labels
            .iter()
            .find(|(key, _)| expression["key"] == *key)
            .map(|(_, value)| *value);
        let listed = || {
            let values = expression["values"].as_array();
            values.is_some_and(|it| {
                it.iter()
                    .any(|value| Some(value) == label.map(Value::from).as_ref())
            })
        };
        match expression["operator"].as_str() {
            Some("In") => label.is_some() && listed(),
            Some("NotIn") => !listed(),
            Some("Exists") => label.is_some(),
            Some("DoesNotExist") => label.is_none(),
            _ => false,
        }
    };
    terms.iter().any(|term| {
        term["matchExpressions"]
            .as_array()
            .is_some_and(|it| it.iter().all(holds))
    })
}

/// What must hold for every scale set.
fn check(values: &Value) -> anyhow::Result<()> {
    ensure!(
        values["minRunners"] == 0,
        "minRunners is {}, expected 0: an idle runner holds a GPU",
        values["minRunners"]
    );
    ensure!(
        values["maxRunners"]
            .as_u64()
            .is_some_and(|it| (1..=RUNNERS_MAXIMUM).contains(&it)),
        "maxRunners is {}, expected 1 to {RUNNERS_MAXIMUM}",
        values["maxRunners"]
    );
    for required in [
        "githubConfigUrl",
        "githubConfigSecret",
        "runnerScaleSetName",
    ] {
        ensure!(values[required].is_string(), "{required} is not set");
    }
    Ok(())
}

/// What must hold for a pod in which a job uses a GPU.
fn check_gpu_pod(pod: &Value) -> anyhow::Result<()> {
    let tolerations = pod["tolerations"].as_array().context("no toleration")?;
    let tolerates = |key: &str| tolerations.iter().any(|it| it["key"] == key);
    ensure!(
        tolerates("nvidia.com/gpu"),
        "it does not tolerate the taint nvidia.com/gpu"
    );
    ensure!(
        !tolerates("gpu-bringup.dev/unvalidated"),
        "it tolerates gpu-bringup.dev/unvalidated: jobs would run on nodes that have not passed"
    );
    ensure!(
        pod["nodeSelector"]["nvidia.com/gpu"] == "true",
        "it would run on nodes without GPUs"
    );
    ensure!(
        pod["runtimeClassName"] == "nvidia",
        "its runtime class is {}",
        pod["runtimeClassName"]
    );
    ensure!(
        pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"].is_string(),
        "it has no limit nvidia.com/gpu, so that it gets no GPU"
    );
    Ok(())
}

/// What must hold for a runner that is the job's machine.
fn check_runner(pod: &Value) -> anyhow::Result<()> {
    let runner = &pod["containers"][0];
    ensure!(
        runner["name"] == "runner",
        "the first container is {}, the chart wants `runner`",
        runner["name"]
    );
    for hook in [
        "ACTIONS_RUNNER_HOOK_JOB_STARTED",
        "ACTIONS_RUNNER_HOOK_JOB_COMPLETED",
    ] {
        let environment = runner["env"].as_array();
        let is_set = environment.is_some_and(|it| {
            it.iter()
                .any(|it| it["name"] == hook && it["value"].is_string())
        });
        ensure!(is_set, "{hook} is not set");
    }
    let named = |list: &Value| -> Vec<Value> {
        let list = list.as_array().into_iter().flatten();
        list.filter(|it| it["name"] == CACHE).cloned().collect()
    };
    ensure!(
        named(&pod["volumes"]).len() == 1
            && named(&runner["volumeMounts"])
                .iter()
                .any(|it| it["mountPath"] == CACHE_FOLDER),
        "volume {CACHE} is not mounted on {CACHE_FOLDER}, the image's CCACHE_DIR"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scale_set_of_every_overlay_is_right() {
        for overlay in Overlay::all().expect("overlays") {
            for class in CLASSES {
                let values = values(&overlay, class).expect("values");
                check_class(class, &values).expect(class);
            }
            let containers = values(&overlay, CONTAINERS).expect("values");
            check_class(CONTAINERS, &containers).expect(CONTAINERS);
        }
        let spot = values(&"staging".parse().expect("there"), "spot").expect("values");
        assert_eq!(spot["maxRunners"], 2);
        assert_eq!(
            spot["template"]["spec"]["nodeSelector"]["nvidia.com/gpu"],
            "true"
        );
        assert_eq!(
            spot["template"]["spec"]["terminationGracePeriodSeconds"],
            110
        );
    }

    #[test]
    fn one_wrong_value_is_named() {
        let right = values(&"production".parse().expect("there"), "on-demand").expect("values");
        let spec = "/template/spec";
        for (pointer, value, message) in [
            ("/minRunners".to_owned(), json!(1), "minRunners is 1"),
            ("/maxRunners".to_owned(), json!(11), "expected 1 to 10"),
            (
                "/githubConfigSecret".to_owned(),
                json!({}),
                "githubConfigSecret is not set",
            ),
            (
                format!("{spec}/containers/0/resources/limits"),
                json!({}),
                "no limit nvidia.com/gpu",
            ),
            (
                format!("{spec}/containers/0/env/0/name"),
                json!("X"),
                "JOB_STARTED is not set",
            ),
            (
                format!("{spec}/containers/0/volumeMounts"),
                json!([{"name": "ccache", "mountPath": "/tmp"}]),
                "not mounted on /var/cache/ccache",
            ),
            (
                format!("{spec}/tolerations"),
                json!([]),
                "does not tolerate",
            ),
            (
                format!("{spec}/tolerations"),
                json!([{"key": "nvidia.com/gpu"}, {"key": "gpu-bringup.dev/unvalidated"}]),
                "have not passed",
            ),
        ] {
            let mut wrong = right.clone();
            *wrong.pointer_mut(&pointer).expect("there") = value;
            let error = check_class("on-demand", &wrong)
                .expect_err(&pointer)
                .to_string();
            assert!(error.contains(message), "{pointer}: {error}");
        }
    }

    #[test]
    fn the_compilers_cache_may_outlive_its_runner() {
        let dockerfile = workspace::root().join("packer/runner-gpu/Dockerfile");
        let dockerfile = std::fs::read_to_string(dockerfile).expect("a Dockerfile");
        assert!(dockerfile.contains(&format!("CCACHE_DIR={CACHE_FOLDER} ")));
        for class in CLASSES {
            let values = values(&"production".parse().expect("there"), class).expect("values");
            let volumes = |values: &Value| values["template"]["spec"]["volumes"].clone();
            let kept = with_cache_claim(values.clone(), "cache").expect("a volume");
            check_class(class, &kept).expect(class);
            let count = |volumes: &Value| volumes.as_array().map(Vec::len);
            assert_eq!(count(&volumes(&kept)), count(&volumes(&values)));
            let claim = json!({"name": "ccache", "persistentVolumeClaim": {"claimName": "cache"}});
            let of_cache = |values: &Value| {
                let volumes = volumes(values);
                let volumes = volumes.as_array().expect("volumes").clone();
                volumes.into_iter().find(|it| it["name"] == "ccache")
            };
            assert_eq!(of_cache(&kept), Some(claim));
            assert_ne!(of_cache(&values), of_cache(&kept));
        }
        assert!(with_cache_claim(json!({}), "cache").is_err());
        for wrong in ["", "-a", "a/b", "A"] {
            assert!(claim_name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_runner_of_container_jobs_leaves_the_gpu_to_the_jobs_pod() {
        let right = values(&"production".parse().expect("there"), CONTAINERS).expect("values");
        let job = job_pod().expect("the job's pod");
        let runner = "/template/spec/containers/0";
        for (pointer, value, message) in [
            (
                format!("{runner}/resources/limits"),
                json!({"nvidia.com/gpu": "1"}),
                "holds a GPU",
            ),
            (
                "/template/spec/automountServiceAccountToken".to_owned(),
                json!(false),
                "has no token",
            ),
            (format!("{runner}/env"), json!([]), "are not given"),
        ] {
            let mut wrong = right.clone();
            *wrong.pointer_mut(&pointer).expect("there") = value;
            let error = check_container_mode(&wrong, &job).expect_err(&pointer);
            assert!(format!("{error:#}").contains(message), "{error:#}");
        }
        for (field, value, message) in [
            (
                "initContainers",
                json!([{"name": "gate"}]),
                "initContainers",
            ),
            ("runtimeClassName", json!("runc"), "runtime class is"),
            (
                "containers",
                json!([{"name": "job"}]),
                "the hooks know `$job`",
            ),
            (
                "containers",
                json!([{"name": "$job"}]),
                "no limit nvidia.com/gpu",
            ),
            (
                "tolerations",
                json!([{"key": "nvidia.com/gpu"}, {"key": "gpu-bringup.dev/unvalidated"}]),
                "have not passed",
            ),
        ] {
            let mut wrong = job.clone();
            wrong["spec"][field] = value;
            let error = check_container_mode(&right, &wrong).expect_err(field);
            assert!(format!("{error:#}").contains(message), "{error:#}");
        }
    }

    #[test]
    fn runners_on_demand_do_not_land_on_spot_nodes() {
        let values = values(&"production".parse().expect("there"), "on-demand").expect("values");
        let mut pod = values["template"]["spec"].clone();
        assert!(check_capacity("spot", &pod).is_err());
        pod["affinity"] = Value::Null;
        let error = check_capacity("on-demand", &pod).expect_err("any node");
        assert!(error.to_string().contains("SPOT"), "{error}");
    }

    #[test]
    fn values_are_merged_as_helm_does() {
        let mut values = json!({"a": {"b": 1, "c": [1, 2]}, "d": 1});
        merge(&mut values, json!({"a": {"c": [3]}, "d": null, "e": 2}));
        assert_eq!(values, json!({"a": {"b": 1, "c": [3]}, "d": null, "e": 2}));
        let error = check_no_null(&values, "").expect_err("a null");
        assert_eq!(error.to_string(), ".d is null, which helm passes on");
    }
}
