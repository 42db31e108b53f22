//! `gpu-validator kubernetes gate`: validates this node and reports to the cluster.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, bail};
use serde_json::{Value, json};

use super::closure::{Closure, ClosureFile};
use super::device_taint::DeviceTaint;
use super::health_watch::{HealthWatch, wait};
use crate::commands::burn_options::BurnOfRun;
use crate::commands::report_files::{ClaimedOutputs, ReportFiles};
use crate::commands::report_options::ReportOptions;
use crate::commands::run::{
    Asked, look_and_report, probe_options, refuse_missing_sysroot, refuse_simulated,
    stop_on_signals,
};
use crate::commands::terminal::{to_stderr, to_stdout};
use crate::interrupt::Interrupt;
use crate::probe::json::at;
use crate::probe::kubernetes::client::{ApiClient, ApiError, PatchKind, Target};
use crate::probe::kubernetes::credentials::CredentialsWanted;
use crate::probe::kubernetes::{GET_NODE, PATCH_NODE, PATCH_NODE_STATUS, node_name_here};
use crate::probe::machine_identity;
use crate::session::SessionOptions;
use validator_core::facts::{Facts, MachineIdentity};
use validator_core::findings::{ExitStatus, Finding, Run, Verdict};
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::report::one_line;
use validator_core::selection::Selection;

/// How long the API server may take for one answer. A loaded one was seen to take 12 s.
const API_DEADLINE: Duration = Duration::from_secs(25);
/// Interval of reports to the cluster where the verdict may change later; a closure is reported
/// until the API server accepts it.
const ATTEMPTS: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// How often a change is tried again because another client changed the node in between.
const CONFLICTS_MAXIMUM: u32 = 5;
/// Before the first of these attempts; twice as long before each further one.
const CONFLICT_PAUSE: Duration = Duration::from_millis(100);
const VALIDATION_FAILED: &str = "ValidationFailed";
/// The driver of a node that was open does not answer any more.
const HEALTH_NOT_JUDGED: &str = "HealthNotJudged";
/// A condition's message is read in `kubectl describe node`; a page is too much there.
const MESSAGE_CHARACTERS_MAXIMUM: usize = 1000;
/// Findings that the annotation names.
const FINDINGS_MAXIMUM: usize = 10;
const SUMMARY_CHARACTERS_MAXIMUM: usize = 200;

/// Validate this node and open it for work only when it passes: the container of a DaemonSet
///
/// On a pass, node condition GpuValidated becomes True and then the taint is removed. On a failure
/// the condition becomes False and the taint is put on if it is not there. When something could not
/// be judged, or GPUs are busy, the condition becomes Unknown with the reason and the taint stays
/// as it is, there or not. A summary is kept as an annotation. Where the cluster has the kind
/// DeviceTaintRule (dynamic resource allocation, Kubernetes 1.37), a failure taints the node's GPUs
/// as well, and a pass removes that taint. The exit code is that of the
/// validation, and 2 where the report to the cluster failed.
///
/// Needs the rights that `gpu-validator kubernetes rbac gate` prints, and NODE_NAME from the
/// downward API (spec.nodeName). The service account of the pod is used, or a kubeconfig.
#[derive(Debug, clap::Args)]
#[command(after_long_help = crate::commands::EXIT_CODES)]
pub(crate) struct Arguments {
    /// This node's name in the cluster
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: Option<String>,
    /// Judge these facts, which `gpu-validator run --facts` has just written on this node, instead
    /// of reading it
    #[arg(long, value_name = "FILE", conflicts_with_all = ["facts", "sysroot"])]
    judge: Option<PathBuf>,
    /// Facts for --judge that are older than this are refused
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    judge_age_maximum_s: u64,
    /// How much to read
    #[arg(long, value_parser = crate::cli_values::level(), default_value_t, env = "GPU_VALIDATOR_LEVEL")]
    level: Level,
    #[command(flatten)]
    burn: BurnOfRun,
    #[command(flatten)]
    pub(super) report: ReportOptions,
    /// Write what was seen, so that `gpu-validator judge` can judge it again
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_FACTS")]
    facts: Option<PathBuf>,
    /// Read the host's files below this folder
    #[arg(long, value_name = "DIR")]
    pub(super) sysroot: Option<PathBuf>,
    /// The taint that keeps work away until the node has passed
    #[arg(
        long,
        value_name = "KEY:EFFECT",
        default_value = "gpu-bringup.dev/unvalidated:NoSchedule"
    )]
    taint: String,
    /// The node condition with the verdict
    #[arg(long, value_name = "TYPE", default_value = "GpuValidated")]
    condition: String,
    /// The node annotation that keeps a summary as JSON
    #[arg(long, value_name = "KEY", default_value = "gpu-bringup.dev/validation")]
    annotation: String,
    /// A kubeconfig instead of the pod's service account [env: KUBECONFIG]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// A context of the kubeconfig instead of its current one
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Print the reports to the cluster and send none
    #[arg(long)]
    dry_run: bool,
    /// After a pass, keep watching the node at level quick until SIGTERM, and close it when it
    /// falls ill: the container of a DaemonSet
    #[arg(long)]
    stay: bool,
    /// Keep a closure that the API server has not accepted in this folder, and report it first
    /// after a restart or a reboot
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

pub(crate) fn gate(arguments: &Arguments) -> anyhow::Result<ExitStatus> {
    let interrupt = stop_on_signals()?;
    let judged = arguments.judge.as_deref();
    let _outputs = ClaimedOutputs::of(&arguments.report, arguments.facts.as_deref(), &[judged])?;
    let taint: Taint = arguments.taint.parse()?;
    let (profile, profile_name) = arguments.report.profile()?;
    refuse_missing_sysroot(arguments.sysroot.as_deref())?;
    let closures = ClosureFile::open(arguments.state.as_deref())?;
    let cluster = Cluster {
        arguments,
        profile: &profile,
        taint: &taint,
    };
    // Reports that an earlier gate could not deliver come before anything that takes time.
    if let Some(closure) = closures.read()? {
        match cluster.close(&closure, &interrupt) {
            Ok(text) => to_stdout(&format!("{text} (kept from before)\n")),
            Err(error) => not_told(&error),
        };
    }
    let run = validate(arguments, &profile, &profile_name, &interrupt)?;
    let decision = Decision::of(&run);
    if !report_to_cluster(&cluster, &run, &decision, &closures, &interrupt)? {
        let status = run.exit_status();
        // A failure stays one; everything else is now not known to the cluster.
        return Ok(if status == ExitStatus::Failed {
            status
        } else {
            ExitStatus::NotJudged
        });
    }
    if !arguments.stay || run.exit_status() != ExitStatus::Passed {
        return Ok(run.exit_status());
    }
    let watch = HealthWatch {
        sysroot: arguments.sysroot.as_deref(),
        refuses_simulated: arguments.report.refuses_simulated(),
        profile: &profile,
        profile_name: &profile_name,
    };
    let Some(ill) = watch.until_ill(&interrupt) else {
        return Ok(ExitStatus::Passed);
    };
    ReportFiles::new(&arguments.report, arguments.facts.as_deref()).finish(&ill, &arguments.report);
    let decision = Decision::of_ill(&ill);
    report_to_cluster(&cluster, &ill, &decision, &closures, &interrupt)?;
    // The kubelet starts the gate again, which opens the node when it passes at its own level.
    Ok(ill.exit_status())
}

/// Whether the cluster accepted the report. A closure is kept until it was; a gate that stays tries
/// again until a signal ends it.
fn report_to_cluster(
    cluster: &Cluster<'_>,
    run: &Run,
    decision: &Decision,
    closures: &ClosureFile,
    interrupt: &Interrupt,
) -> anyhow::Result<bool> {
    let node = cluster.node(run)?;
    let closes = decision.taint == TaintChange::Add;
    let summary = summary(run, decision).to_string();
    if closes && !cluster.arguments.dry_run {
        let closure = Closure {
            node: node.clone(),
            reason: decision.reason.to_owned(),
            message: decision.message.clone(),
            summary: summary.clone(),
        };
        if let Err(error) = closures.keep(&closure) {
            to_stderr(&format!("warning: the closure is not kept: {error:#}\n"));
        }
    }
    // The verdict of a run that a signal ended is reported all the same, so that signal must not
    // end the report.
    let telling = if run.incomplete.is_some() && interrupt.signal().is_some() {
        Interrupt::default()
    } else {
        interrupt.clone()
    };
    let patient = closes && cluster.arguments.stay;
    let attempts = if patient { u32::MAX } else { ATTEMPTS };
    let told = again_while_it_may_pass(attempts, &telling, &mut || {
        cluster.tell(&node, &summary, decision, &telling)
    });
    match told {
        Ok(text) => {
            to_stdout(&format!("{text}\n"));
            if decision.taint != TaintChange::LeaveAsItIs {
                closures.clear()?;
            }
            Ok(true)
        }
        Err(error) => {
            not_told(&error);
            Ok(false)
        }
    }
}

fn not_told(error: &anyhow::Error) -> bool {
    to_stderr(&format!("error: the cluster was not updated: {error:#}\n"));
    false
}

/// Repeats what a busy or absent API server refused, with growing pauses.
fn again_while_it_may_pass(
    attempts: u32,
    interrupt: &Interrupt,
    attempt: &mut dyn FnMut() -> anyhow::Result<String>,
) -> anyhow::Result<String> {
    let mut pause = FIRST_PAUSE;
    for _ in 1..attempts {
        match attempt() {
            Err(error) if may_pass(&error) => {
                to_stderr(&format!("the cluster is not updated yet: {error:#}\n"));
                if !wait(with_jitter(pause), interrupt) {
                    return Err(error);
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            outcome => return outcome,
        }
    }
    attempt()
}

fn may_pass(error: &anyhow::Error) -> bool {
    let Some(error) = error.downcast_ref::<ApiError>() else {
        return false;
    };
    // No status: no answer, or none in time.
    error
        .status
        .is_none_or(|it| it >= 500 || matches!(it, 408 | 409 | 429))
}

/// Between half of the pause and all of it: gates of many nodes that a restart of the API server
/// stopped at once do not come back at once.
fn with_jitter(pause: Duration) -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanoseconds = now.map_or(0, |it| it.subsec_nanos()) ^ std::process::id().rotate_left(16);
    let half = pause / 2;
    half + half.mul_f64(f64::from(nanoseconds % 1000) / 1000.0)
}

fn validate(
    arguments: &Arguments,
    profile: &Profile,
    profile_name: &str,
    interrupt: &Interrupt,
) -> anyhow::Result<Run> {
    if let Some(path) = &arguments.judge {
        let mut facts = read_fresh_facts(path, arguments.judge_age_maximum_s)?;
        if facts.simulated.is_none() {
            let here = machine_identity().context("this machine's boot cannot be read")?;
            check_machine(&facts, &here).with_context(|| path.display().to_string())?;
        }
        refuse_simulated(&mut facts, arguments.report.refuses_simulated());
        let run = Run::judged(facts, profile, profile_name, arguments.level);
        ReportFiles::new(&arguments.report, None).finish(&run, &arguments.report);
        return Ok(run);
    }
    let probe = probe_options(arguments.level, arguments.sysroot.clone(), profile);
    let mut options = SessionOptions::from(probe);
    options.burn = arguments.burn.plan(arguments.level, profile)?;
    let asked = Asked {
        profile,
        profile_name,
        report: &arguments.report,
        facts: arguments.facts.as_deref(),
        forbid_simulated: arguments.report.refuses_simulated(),
        selection: Selection::default(),
        history: None,
    };
    Ok(look_and_report(options, &asked, interrupt))
}

fn read_fresh_facts(path: &Path, age_maximum_s: u64) -> anyhow::Result<Facts> {
    let name = path.display();
    let text = std::fs::read(path).with_context(|| format!("cannot read {name}"))?;
    let facts = Facts::from_json(&text).with_context(|| name.to_string())?;
    let collected: jiff::Timestamp = facts
        .collected_at
        .parse()
        .with_context(|| format!("{name}: collected_at is no time"))?;
    let age_s = jiff::Timestamp::now().as_second() - collected.as_second();
    // A clock that is set while a node starts must not let old facts through as facts of the
    // future.
    if !(-60..=i64::try_from(age_maximum_s).unwrap_or(i64::MAX)).contains(&age_s) {
        bail!("{name}: these facts are {age_s} s old, at most {age_maximum_s} s are accepted");
    }
    Ok(facts)
}

/// Facts of another machine, or of this one before a reboot, must not open this node.
fn check_machine(facts: &Facts, here: &MachineIdentity) -> anyhow::Result<()> {
    let Some(there) = &facts.host.identity else {
        bail!("these facts do not name their machine; write them with this version on this node");
    };
    if there.boot_id != here.boot_id {
        bail!(
            "these facts are of boot {}, and this node runs boot {}: another machine, or this one before a reboot",
            one_line(&there.boot_id),
            here.boot_id
        );
    }
    if let (Some(there), Some(here)) = (&there.machine_id, &here.machine_id)
        && there != here
    {
        bail!(
            "these facts are of machine {}, and this node is machine {here}",
            one_line(there)
        );
    }
    Ok(())
}

/// A taint by key and effect.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Taint {
    key: String,
    effect: String,
}

impl std::str::FromStr for Taint {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        match text.rsplit_once(':') {
            Some((key, effect @ ("NoSchedule" | "NoExecute" | "PreferNoSchedule")))
                if !key.is_empty() && !key.contains(['=', ' ']) =>
            {
                Ok(Self {
                    key: key.to_owned(),
                    effect: effect.to_owned(),
                })
            }
            _ => bail!(
                "`{text}` is not a taint, expected KEY:EFFECT with an effect of NoSchedule, NoExecute or PreferNoSchedule"
            ),
        }
    }
}

impl Taint {
    fn is(&self, taint: &Value) -> bool {
        at(taint, "/key") == self.key.as_str() && at(taint, "/effect") == self.effect.as_str()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaintChange {
    Remove,
    Add,
    LeaveAsItIs,
}

/// The report to the cluster on a run.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Decision {
    /// `True`, `False` or `Unknown`.
    status: &'static str,
    /// One word in camel case, as conditions have it.
    reason: &'static str,
    message: String,
    taint: TaintChange,
}

impl Decision {
    fn of(run: &Run) -> Self {
        let (status, reason, taint) = match run.exit_status() {
            ExitStatus::Passed => ("True", "ValidationPassed", TaintChange::Remove),
            ExitStatus::Failed => ("False", VALIDATION_FAILED, TaintChange::Add),
            ExitStatus::Busy => ("Unknown", "GpusBusy", TaintChange::LeaveAsItIs),
            ExitStatus::NotJudged | ExitStatus::BadInput => {
                ("Unknown", "NotJudged", TaintChange::LeaveAsItIs)
            }
        };
        Self {
            status,
            reason,
            message: shortened(
                &validator_core::report::verdict_sentence(run),
                MESSAGE_CHARACTERS_MAXIMUM,
            ),
            taint,
        }
    }
}

impl Decision {
    /// Of a node that was open and is ill now. One whose driver does not answer takes no work
    /// either.
    fn of_ill(run: &Run) -> Self {
        let decision = Self::of(run);
        if decision.taint == TaintChange::Add {
            return decision;
        }
        Self {
            reason: HEALTH_NOT_JUDGED,
            taint: TaintChange::Add,
            ..decision
        }
    }
}

fn shortened(text: &str, characters_maximum: usize) -> String {
    if text.chars().count() <= characters_maximum {
        return text.to_owned();
    }
    let kept: String = text.chars().take(characters_maximum - 1).collect();
    format!("{kept}…")
}

/// The annotation: what a person or a program wants to know of the last validation, without the
/// reports.
fn summary(run: &Run, decision: &Decision) -> Value {
    let counts = run.counts();
    let objections = |verdict: Verdict| -> Vec<String> {
        let of_verdict = run.findings.iter().filter(|it| it.verdict == verdict);
        of_verdict.take(FINDINGS_MAXIMUM).map(in_one_line).collect()
    };
    json!({
        "verdict": decision.reason,
        "exitCode": run.exit_status() as u8,
        "at": run.facts.collected_at,
        "validator": env!("CARGO_PKG_VERSION"),
        "level": run.level,
        "profile": run.profile,
        "gpus": run.facts.gpus.len(),
        "simulated": run.facts.simulated.is_some(),
        "counts": counts,
        "failed": objections(Verdict::Fail),
        "notJudged": objections(Verdict::Error),
    })
}

fn in_one_line(finding: &Finding) -> String {
    let text = format!(
        "{} on {}: {}",
        finding.check, finding.subject, finding.summary
    );
    shortened(&text, SUMMARY_CHARACTERS_MAXIMUM)
}

/// The cluster, and the client for reports to it.
struct Cluster<'a> {
    arguments: &'a Arguments,
    profile: &'a Profile,
    taint: &'a Taint,
}

impl Cluster<'_> {
    fn node(&self, run: &Run) -> anyhow::Result<String> {
        self.arguments
            .node_name
            .clone()
            .map_or_else(|| node_name_here(&self.profile.kubernetes, &run.facts), Ok)
            .map_err(anyhow::Error::msg)
    }

    fn client(&self, interrupt: &Interrupt) -> anyhow::Result<ApiClient> {
        let api = &self.profile.kubernetes.api;
        let arguments = self.arguments;
        let kubeconfig = arguments.kubeconfig.as_deref();
        let kubeconfig = kubeconfig.or(api.kubeconfig.as_deref().map(Path::new));
        let context = arguments.context.as_deref().or(api.context.as_deref());
        let allow_insecure = api.allow_insecure == Some(true);
        let credentials = CredentialsWanted::from_environment(kubeconfig, context, allow_insecure)
            .find(interrupt)
            .map_err(anyhow::Error::msg)?
            .context(
                "there are no credentials: this is no pod with a service account, and neither --kubeconfig nor KUBECONFIG names a kubeconfig",
            )?;
        ApiClient::new(&credentials, API_DEADLINE, interrupt).map_err(anyhow::Error::msg)
    }

    /// Reports to the cluster; the result describes the report.
    fn tell(
        &self,
        node: &str,
        summary: &str,
        decision: &Decision,
        interrupt: &Interrupt,
    ) -> anyhow::Result<String> {
        let arguments = self.arguments;
        if arguments.dry_run {
            return Ok(format!(
                "dry run: node {node} would get {}={} ({}), taint {}",
                arguments.condition, decision.status, decision.reason, arguments.taint
            ));
        }
        let client = self.client(interrupt)?;
        let gate = Gate {
            client: &client,
            node,
            arguments,
            taint: self.taint,
            interrupt,
        };
        // A node that is open has its condition already, and one that has failed is closed before
        // its condition is set.
        let (tainted, of_devices) = match decision.taint {
            TaintChange::Add => {
                let tainted = gate.change_taint(summary, decision.taint)?;
                gate.write_condition(decision)?;
                (tainted, gate.change_device_taint(decision)?)
            }
            TaintChange::Remove | TaintChange::LeaveAsItIs => {
                gate.write_condition(decision)?;
                let of_devices = gate.change_device_taint(decision)?;
                (gate.change_taint(summary, decision.taint)?, of_devices)
            }
        };
        let of_devices =
            of_devices.map_or_else(String::new, |it| format!(", DeviceTaintRule {it}"));
        Ok(format!(
            "node {node}: {}={} ({}), taint {} {tainted}{of_devices}",
            arguments.condition, decision.status, decision.reason, arguments.taint
        ))
    }

    /// Closes a node as an earlier gate wanted to.
    fn close(&self, closure: &Closure, interrupt: &Interrupt) -> anyhow::Result<String> {
        let decision = Decision {
            status: "False",
            reason: if closure.reason == HEALTH_NOT_JUDGED {
                HEALTH_NOT_JUDGED
            } else {
                VALIDATION_FAILED
            },
            message: closure.message.clone(),
            taint: TaintChange::Add,
        };
        self.tell(&closure.node, &closure.summary, &decision, interrupt)
    }
}

/// One node, and who writes to it.
struct Gate<'a> {
    client: &'a ApiClient,
    node: &'a str,
    arguments: &'a Arguments,
    taint: &'a Taint,
    interrupt: &'a Interrupt,
}

impl Gate<'_> {
    fn write_condition(&self, decision: &Decision) -> Result<(), ApiError> {
        let node = self.client.get(Target::object(GET_NODE, self.node))?;
        let now = jiff::Timestamp::now()
            .strftime("%Y-%m-%dT%H:%M:%SZ")
            .to_string();
        let condition = condition(&node, &self.arguments.condition, decision, &now);
        let patch = json!({"status": {"conditions": [condition]}});
        let target = Target::object(PATCH_NODE_STATUS, self.node);
        self.client
            .patch(target, PatchKind::StrategicMerge, &patch)?;
        Ok(())
    }

    /// Changes the taint of the node's devices where the cluster has such taints; reports the result.
    fn change_device_taint(&self, decision: &Decision) -> Result<Option<&'static str>, ApiError> {
        if decision.taint == TaintChange::LeaveAsItIs {
            return Ok(None);
        }
        let taint = DeviceTaint {
            node: self.node,
            key: &self.taint.key,
            effect: &self.taint.effect,
        };
        let Some(version) = taint.version(self.client)? else {
            return Ok(None);
        };
        if decision.taint == TaintChange::Add {
            let node = self.client.get(Target::object(GET_NODE, self.node))?;
            taint.put(self.client, version, &node, decision.reason)?;
            return Ok(Some("applied"));
        }
        let was_there = taint.remove(self.client, version)?;
        Ok(was_there.then_some("deleted"))
    }

    /// Writes annotation and taint in one request; reports the result for the taint.
    fn change_taint(&self, summary: &str, change: TaintChange) -> Result<&'static str, ApiError> {
        let mut conflicts = 0;
        let mut pause = CONFLICT_PAUSE;
        loop {
            let node = self.client.get(Target::object(GET_NODE, self.node))?;
            let (taints, became) = taints_after(&node, self.taint, change);
            let annotations = json!({self.arguments.annotation.as_str(): summary});
            let patch = match taints {
                None => json!({"metadata": {"annotations": annotations}}),
                // The list is replaced as a whole: with the version that it was read at, no other
                // client's change is lost.
                Some(taints) => json!({
                    "metadata": {
                        "annotations": annotations,
                        "resourceVersion": at(&node, "/metadata/resourceVersion"),
                    },
                    "spec": {"taints": taints},
                }),
            };
            let target = Target::object(PATCH_NODE, self.node);
            match self.client.patch(target, PatchKind::Merge, &patch) {
                Ok(_) => return Ok(became),
                Err(error)
                    if error.status == Some(409)
                        && conflicts < CONFLICTS_MAXIMUM
                        && wait(with_jitter(pause), self.interrupt) =>
                {
                    conflicts += 1;
                    pause *= 2;
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// The condition as it is to be; the time of transition is kept where the status is what it was.
fn condition(node: &Value, kind: &str, decision: &Decision, now: &str) -> Value {
    let before = at(node, "/status/conditions")
        .as_array()
        .into_iter()
        .flatten()
        .find(|it| at(it, "/type") == kind);
    let since = before
        .filter(|it| at(it, "/status") == decision.status)
        .and_then(|it| at(it, "/lastTransitionTime").as_str())
        .unwrap_or(now);
    json!({
        "type": kind,
        "status": decision.status,
        "reason": decision.reason,
        "message": decision.message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": since,
    })
}

/// The list of taints as it is to be, `None` where it is so already, and what became of ours.
fn taints_after(
    node: &Value,
    taint: &Taint,
    change: TaintChange,
) -> (Option<Vec<Value>>, &'static str) {
    let taints = at(node, "/spec/taints")
        .as_array()
        .cloned()
        .unwrap_or_default();
    let is_there = taints.iter().any(|it| taint.is(it));
    match (change, is_there) {
        (TaintChange::Remove, true) => {
            let left = taints.into_iter().filter(|it| !taint.is(it)).collect();
            (Some(left), "removed")
        }
        (TaintChange::Add, false) => {
            let mut taints = taints;
            taints.push(json!({"key": taint.key, "effect": taint.effect}));
            (Some(taints), "added")
        }
        (_, true) => (None, "left on"),
        (_, false) => (None, "not there"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::test_machine::healthy_node;

    fn node(taints: &Value) -> Value {
        json!({"metadata": {"resourceVersion": "7"}, "spec": {"taints": taints}})
    }

    fn taint() -> Taint {
        "gpu-bringup.dev/unvalidated:NoSchedule"
            .parse()
            .expect("a taint")
    }

    fn run_of(facts: Facts) -> Run {
        Run::judged(
            facts,
            &Profile::default(),
            Run::BUILT_IN_PROFILE,
            Level::Standard,
        )
    }

    #[test]
    fn only_a_pass_removes_the_taint_and_only_a_failure_adds_it() {
        let passed = run_of(healthy_node());
        assert_eq!(passed.exit_status(), ExitStatus::Passed);
        let mut facts = healthy_node();
        facts.gpus[0].recovery_action =
            validator_core::facts::Reading::Value(validator_core::facts::RecoveryAction::GpuReset);
        let failed = run_of(facts);
        let mut facts = healthy_node();
        facts.interrupted = Some("signal 15 (SIGTERM)".to_owned());
        let stopped = run_of(facts);
        for (run, status, taint) in [
            (&passed, "True", TaintChange::Remove),
            (&failed, "False", TaintChange::Add),
            (&stopped, "Unknown", TaintChange::LeaveAsItIs),
        ] {
            let decision = Decision::of(run);
            assert_eq!((decision.status, decision.taint), (status, taint));
        }
        let busy = Run {
            findings: passed
                .findings
                .iter()
                .cloned()
                .map(|mut it| {
                    if it.check == "cuda_kernel" {
                        it.verdict = Verdict::Error;
                        it.busy = true;
                    }
                    it
                })
                .collect(),
            ..passed
        };
        let decision = Decision::of(&busy);
        assert_eq!(
            (decision.reason, decision.taint),
            ("GpusBusy", TaintChange::LeaveAsItIs)
        );
    }

    #[test]
    fn other_taints_stay() {
        let ours = json!({"key": "gpu-bringup.dev/unvalidated", "effect": "NoSchedule"});
        let other = json!({"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"});
        let same_key = json!({"key": "gpu-bringup.dev/unvalidated", "effect": "NoExecute"});
        let all = node(&json!([other, ours, same_key]));
        let (taints, became) = taints_after(&all, &taint(), TaintChange::Remove);
        assert_eq!(taints, Some(vec![other.clone(), same_key]));
        assert_eq!(became, "removed");
        let (taints, became) = taints_after(&node(&json!([other])), &taint(), TaintChange::Add);
        assert_eq!(taints, Some(vec![other, ours]));
        assert_eq!(became, "added");
        for change in [TaintChange::Add, TaintChange::LeaveAsItIs] {
            assert_eq!(taints_after(&all, &taint(), change), (None, "left on"));
        }
        let none = json!({"spec": {}});
        for change in [TaintChange::Remove, TaintChange::LeaveAsItIs] {
            assert_eq!(taints_after(&none, &taint(), change), (None, "not there"));
        }
    }

    #[test]
    fn the_time_of_transition_is_kept_while_the_status_is_the_same() {
        let decision = Decision::of(&run_of(healthy_node()));
        let node = json!({"status": {"conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "a"},
            {"type": "GpuValidated", "status": "True", "lastTransitionTime": "b"},
        ]}});
        let same = condition(&node, "GpuValidated", &decision, "now");
        assert_eq!(same["lastTransitionTime"], "b");
        assert_eq!(same["lastHeartbeatTime"], "now");
        let other = condition(&node, "Other", &decision, "now");
        assert_eq!(other["lastTransitionTime"], "now");
    }

    #[test]
    fn a_taint_is_a_key_and_an_effect() {
        for wrong in ["", "x", "x:Never", ":NoSchedule", "a=b:NoSchedule"] {
            assert!(wrong.parse::<Taint>().is_err(), "{wrong}");
        }
        assert_eq!(taint().key, "gpu-bringup.dev/unvalidated");
    }

    #[test]
    fn the_summary_of_a_broken_node_is_short() {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            *gpu = validator_core::facts::GpuFacts {
                uuid: gpu.uuid.clone(),
                ..validator_core::facts::GpuFacts::default()
            };
        }
        let run = run_of(facts);
        let text = summary(&run, &Decision::of(&run)).to_string();
        assert!(text.len() < 8 * 1024, "{} bytes", text.len());
        assert!(text.contains("\"notJudged\":[\""), "{text}");
    }

    #[test]
    fn old_facts_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("facts.json");
        for (age_s, accepted) in [(0, true), (100, true), (1000, false), (-3600, false)] {
            let mut facts = healthy_node();
            let then = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(age_s);
            facts.collected_at = then.to_string();
            std::fs::write(&path, serde_json::to_vec(&facts).expect("JSON")).expect("written");
            assert_eq!(read_fresh_facts(&path, 900).is_ok(), accepted, "{age_s} s");
        }
    }
}
