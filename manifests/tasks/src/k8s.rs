//! `cargo xtask k8s`: the manifests of `manifests/kubernetes` checked, compared, applied, and a
//! validation started with them.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{bail, ensure};
use serde_json::Value;

use crate::kubectl::Kubectl;
use crate::manifests::{Manifests, Overlay};
use crate::{check, validate};

/// Check, compare, apply and delete the Kubernetes manifests, and validate nodes with them
#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, clap::Subcommand)]
enum Task {
    /// Print an overlay's manifests, as `apply` would apply them
    Build(OverlayArguments),
    /// Show what `apply` would change in the cluster; ends with 0 where nothing would change
    Diff(ClusterArguments),
    /// Apply an overlay to the cluster: server-side, so that what others own is named and not
    /// overwritten
    Apply(ApplyArguments),
    /// Delete what an overlay applied, and nothing else
    Delete(DeleteArguments),
    Validate(validate::Arguments),
    /// Check every overlay against the schemas of each Kubernetes version, security policies and
    /// the validator's own list of rights; needs no cluster
    Check,
    /// Try manifests and gate on a real API server on this machine
    E2e,
}

#[derive(Debug, clap::Args)]
struct OverlayArguments {
    /// A folder of manifests/kubernetes/overlays
    #[arg(value_name = "OVERLAY")]
    overlay: Overlay,
}

#[derive(Debug, clap::Args)]
struct ClusterArguments {
    #[command(flatten)]
    overlay: OverlayArguments,
    /// A context of the kubeconfig instead of its current one
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
}

#[derive(Debug, clap::Args)]
struct ApplyArguments {
    #[command(flatten)]
    cluster: ClusterArguments,
    /// Let production run images that are named by tag only
    #[arg(long)]
    allow_tags: bool,
    /// Let the API server check everything and change nothing
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, clap::Args)]
struct DeleteArguments {
    #[command(flatten)]
    cluster: ClusterArguments,
    /// Apply without a confirmation
    #[arg(long)]
    yes: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let done = match &arguments.task {
        Task::Validate(arguments) => return validate::run(arguments),
        Task::Build(arguments) => build(&arguments.overlay),
        Task::Diff(arguments) => return diff(arguments),
        Task::Apply(arguments) => apply(arguments),
        Task::Delete(arguments) => delete(arguments),
        Task::Check => check::run(),
        // Listed here and run by tests/cluster/e2e, which depends on this crate; `cargo xtask`
        // starts that one.
        Task::E2e => {
            bail!("this task is another program's: cargo run --package cluster-tests -- k8s e2e")
        }
    };
    done.map(|()| ExitCode::SUCCESS)
}

impl ClusterArguments {
    fn open(&self) -> anyhow::Result<(Manifests, Kubectl)> {
        let manifests = Manifests::of_overlay(&self.overlay.overlay)?;
        Ok((manifests, Kubectl::find(self.context.as_deref())?))
    }
}

fn build(overlay: &Overlay) -> anyhow::Result<()> {
    let manifests = Manifests::of_overlay(overlay)?;
    std::io::stdout().write_all(manifests.text().as_bytes())?;
    Ok(())
}

fn diff(arguments: &ClusterArguments) -> anyhow::Result<ExitCode> {
    let overlay = &arguments.overlay.overlay;
    let (manifests, kubectl) = arguments.open()?;
    let missing = kubectl.missing_namespaces(&manifests.namespaces())?;
    // The API server compares nothing in a namespace that it does not have: all of it is new.
    let (there, new) = manifests.split(&missing);
    for object in new.objects() {
        println!("+ {}", named(object));
    }
    if kubectl.differs(there.text())? || !new.objects().is_empty() {
        eprintln!("the cluster differs from overlay {overlay}");
        return Ok(ExitCode::FAILURE);
    }
    println!("the cluster is as overlay {overlay} says");
    Ok(ExitCode::SUCCESS)
}

fn apply(arguments: &ApplyArguments) -> anyhow::Result<()> {
    let overlay = &arguments.cluster.overlay.overlay;
    let (manifests, kubectl) = arguments.cluster.open()?;
    let by_tag = manifests.images_without_digest();
    if overlay.is_production() && !arguments.allow_tags && !by_tag.is_empty() {
        bail!(
            "production runs images by digest, and these have a tag only: {}; name their digests in \
             manifests/kubernetes/images/kustomization.yaml, or give --allow-tags",
            by_tag.join(", ")
        );
    }
    if arguments.dry_run {
        return dry_run(manifests, &kubectl);
    }
    let command = [
        "apply",
        "--server-side",
        "--field-manager=gpu-bringup",
        "--filename",
        "-",
    ];
    kubectl.run(&command, manifests.text())?;
    println!(
        "overlay {overlay} is applied; each GPU node is validated now: kubectl get nodes -l nvidia.com/gpu=true"
    );
    Ok(())
}

/// The API server refuses to try anything in a namespace that it does not have: of that, kubectl
/// checks the fields.
fn dry_run(manifests: Manifests, kubectl: &Kubectl) -> anyhow::Result<()> {
    let missing = kubectl.missing_namespaces(&manifests.namespaces())?;
    let (there, new) = manifests.split(&missing);
    let server = [
        "apply",
        "--server-side",
        "--field-manager=gpu-bringup",
        "--dry-run=server",
        "--filename",
        "-",
    ];
    kubectl.run(&server, there.text())?;
    if new.objects().is_empty() {
        return Ok(());
    }
    let client = ["apply", "--dry-run=client", "--filename", "-"];
    kubectl.run(&client, new.text())?;
    println!(
        "the cluster does not have the namespaces {} yet: of what goes there, only the fields were checked",
        missing.join(", ")
    );
    Ok(())
}

/// `DaemonSet gpu-bringup-system/gpu-validator-gate`
fn named(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let metadata = &object["metadata"];
    let (kind, name) = (text(&object["kind"]), text(&metadata["name"]));
    format!("{kind} {}/{name}", text(&metadata["namespace"]))
}

fn delete(arguments: &DeleteArguments) -> anyhow::Result<()> {
    let overlay = &arguments.cluster.overlay.overlay;
    let (manifests, kubectl) = arguments.cluster.open()?;
    if !arguments.yes {
        println!(
            "this deletes the {} objects of overlay {overlay}, the device plugin among them: no new pod gets a GPU then",
            manifests.objects().len()
        );
        print!("type the overlay's name to go on: ");
        std::io::stdout().flush()?;
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer)?;
        ensure!(answer.trim() == overlay.to_string(), "nothing was deleted");
    }
    kubectl.run(
        &["delete", "--ignore-not-found", "--filename", "-"],
        manifests.text(),
    )
}
