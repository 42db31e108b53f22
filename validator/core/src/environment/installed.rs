//! The packages of an environment against the machine, and what the proofs returned.

use crate::environment::builds::framework_release;
use crate::environment::compatibility::{Build, Code, Compatibility, Machine, Start, judge};
use crate::environment::device_code::targets_of;
use crate::environment::explain::add_python;
use crate::environment::messages::{KnownMessage, explain_message};
use crate::facts::{
    EnvironmentFacts, Facts, Framework, ProofEnd, PythonEnvironment, PythonPackage, PythonProof,
    Reading,
};
use crate::findings::{Outcome, Verdict};
use crate::profile::{Profile, PythonRequirement};
use crate::tally::Tally;

/// Packages that bring GPU code of their own, by their names in the index, and the framework whose
/// table lists them.
const JUDGED: [(&str, &str); 12] = [
    ("torch", "torch"),
    ("tensorflow", "tensorflow"),
    ("onnxruntime-gpu", "onnxruntime"),
    ("jax-cuda12-plugin", "jax"),
    ("jax-cuda13-plugin", "jax"),
    ("cupy", "cupy"),
    ("cupy-cuda11x", "cupy"),
    ("cupy-cuda12x", "cupy"),
    ("cupy-cuda13x", "cupy"),
    ("vllm", "vllm"),
    ("flash-attn", "flash-attn"),
    ("bitsandbytes", "bitsandbytes"),
];

/// How a package starts on the machine; `None` of a package without GPU code of its own.
pub fn judge_package(
    package: &PythonPackage,
    environment: &PythonEnvironment,
    machine: &Machine,
) -> Option<Compatibility> {
    let (_, framework) = JUDGED.iter().find(|(name, _)| *name == package.name)?;
    let name = format!("{} {}", package.name, package.version);
    let cuda = match &package.cuda {
        Reading::Value(version) => version.parse(),
        Reading::NotSupported => return None,
        Reading::NotRead(reason) => Err(reason.clone()),
    };
    let cuda = match cuda {
        Ok(cuda) => cuda,
        Err(reason) => {
            return Some(Compatibility::unknown(format!(
                "the CUDA version of {name} is not known: {reason}"
            )));
        }
    };
    let listed = package.device_code.value().map(targets_of);
    let code = match listed.filter(|it| !it.is_empty()) {
        Some(targets) => Code::Listed(targets),
        None => Code::OfToolkit,
    };
    let mut compatibility = judge(&Build { name, cuda, code }, machine);
    if let Some(python) = environment.python_version.value() {
        // Packages of a distribution or of a build at home are not those of the index.
        if package.installer.as_deref() == Some("pip") {
            add_python(framework, &package.version, python, &mut compatibility);
        }
    }
    add_pins(package, environment, &mut compatibility);
    add_release(framework, package, environment, &mut compatibility);
    Some(compatibility)
}

/// Packages whose metadata demands an exact version that is not the installed one.
fn add_pins(
    package: &PythonPackage,
    environment: &PythonEnvironment,
    compatibility: &mut Compatibility,
) {
    for (name, wanted) in &package.pins {
        let found = environment.package(name);
        let Some(found) = found.filter(|it| !same_version(&it.version, wanted)) else {
            continue;
        };
        compatibility.add(
            Start::Limited,
            format!(
                "{} {} pins {name} {wanted}, and {} is installed",
                package.name, package.version, found.version
            ),
            Some(format!("pip install {name}=={wanted}")),
        );
    }
}

/// cuDNN and NCCL as the release was published, where the metadata itself pins none.
fn add_release(
    framework: &str,
    package: &PythonPackage,
    environment: &PythonEnvironment,
    compatibility: &mut Compatibility,
) {
    let Some(release) = framework_release(framework, &package.version) else {
        return;
    };
    let parts = [
        ("nvidia-cudnn-cu", &release.cudnn),
        ("nvidia-nccl-cu", &release.nccl),
    ];
    for (prefix, wanted) in parts {
        let Some(wanted) = wanted else { continue };
        let is_pinned = package.pins.keys().any(|it| it.starts_with(prefix));
        let installed = environment
            .packages
            .iter()
            .find(|it| it.name.starts_with(prefix));
        let Some(installed) = installed.filter(|_| !is_pinned) else {
            continue;
        };
        if older(&installed.version, wanted) {
            compatibility.add(
                Start::Limited,
                format!(
                    "{} {} was published with {prefix}* {wanted}, and {} is installed",
                    package.name, package.version, installed.version
                ),
                None,
            );
        }
    }
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|it| it.parse().ok()).collect()
}

fn older(found: &str, wanted: &str) -> bool {
    numbers(found) < numbers(wanted)
}

/// `1.2` and `1.2.0` are the same; a pin such as `13.0.*` holds for every version that begins so.
fn same_version(found: &str, wanted: &str) -> bool {
    if let Some(prefix) = wanted.strip_suffix(".*") {
        return numbers(found).starts_with(&numbers(prefix));
    }
    let trimmed = |version: &str| {
        let version = version.split('+').next().unwrap_or(version);
        let mut parts = numbers(version);
        while parts.last() == Some(&0) {
            parts.pop();
        }
        parts
    };
    trimmed(found) == trimmed(wanted)
}

/// The distributions of a framework in an environment.
pub fn packages_of(environment: &PythonEnvironment, framework: Framework) -> Vec<&PythonPackage> {
    let is_of = |name: &str| match framework {
        Framework::Interpreter => false,
        Framework::Torch => name == "torch",
        Framework::Jax => name == "jax",
        Framework::Tensorflow => matches!(name, "tensorflow" | "tensorflow-gpu"),
        Framework::Cupy => name == "cupy" || name.starts_with("cupy-cuda"),
    };
    let packages = environment.packages.iter();
    packages.filter(|it| is_of(&it.name)).collect()
}

/// The distribution that holds a framework's GPU code: for JAX, its plugin.
fn gpu_package(environment: &PythonEnvironment, framework: Framework) -> Option<&PythonPackage> {
    if framework == Framework::Jax {
        let mut plugins = environment.packages.iter();
        return plugins.find(|it| it.name.starts_with("jax-cuda") && it.name.ends_with("-plugin"));
    }
    packages_of(environment, framework).first().copied()
}

/// Why a proof did not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProofFailure {
    /// `killed by signal 11 (SIGSEGV) during import`.
    pub reason: String,
    pub output: String,
    pub known: Option<&'static KnownMessage>,
}

impl std::fmt::Display for ProofFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reason)?;
        if let Some(known) = self.known {
            write!(f, " ({})", known.cause)?;
        }
        Ok(())
    }
}

/// The first thing that went wrong among the steps that `is_of` selects; an end in the middle of a
/// step is that step's.
pub fn failure(proof: &PythonProof, is_of: impl Fn(&str) -> bool) -> Option<ProofFailure> {
    let failed = proof
        .steps
        .iter()
        .find(|it| it.error.is_some() && is_of(&it.name));
    if let Some(step) = failed {
        let error = step.error.as_deref().unwrap_or_default();
        let known = explain_message(error).or_else(|| explain_message(&proof.output));
        return Some(ProofFailure {
            reason: format!("{} failed: {}", step.name, first_line(error)),
            output: last_lines(error, &proof.output),
            known,
        });
    }
    let at = proof.unfinished_step.as_deref().unwrap_or("start");
    let during = match &proof.unfinished_step {
        Some(step) => format!("during {step}"),
        None => "after its last step".to_owned(),
    };
    if !is_of(at) {
        return None;
    }
    let reason = match &proof.end {
        ProofEnd::NotStarted(reason) => format!("the interpreter did not start: {reason}"),
        ProofEnd::Signal(number) => format!(
            "the process was killed by signal {number}{} {during}",
            signal_name(*number)
        ),
        ProofEnd::TimedOut(seconds) => {
            format!("the process did not end within {seconds} s, {during}")
        }
        ProofEnd::OutOfMemory(limit) => {
            format!("the process used more than {limit} MiB of host memory {during}")
        }
        ProofEnd::Stopped => format!("the run was stopped {during}"),
        ProofEnd::Exited(0) if proof.unfinished_step.is_none() && !proof.steps.is_empty() => {
            return None;
        }
        ProofEnd::Exited(0) => format!("the process ended {during} without an error"),
        ProofEnd::Exited(code) => format!("the process exited with {code} {during}"),
    };
    Some(ProofFailure {
        reason,
        output: proof.output.clone(),
        known: explain_message(&proof.output),
    })
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// The traceback of an error where it has one, and the process's last lines.
fn last_lines(error: &str, output: &str) -> String {
    let parts = [error.trim(), output.trim()];
    let parts: Vec<&str> = parts.into_iter().filter(|it| !it.is_empty()).collect();
    parts.join("\n")
}

fn signal_name(number: i32) -> &'static str {
    match number {
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL, as the kernel sends when memory runs out)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

/// What was read of environments: an `error` where the profile demands one and nothing was read,
/// else a `skip`.
pub(crate) fn seen<'f>(
    facts: &'f Facts,
    profile: &Profile,
) -> Result<&'f EnvironmentFacts, Outcome> {
    facts.environment.as_ref().ok_or_else(|| {
        const REASON: &str = "these facts were collected without CUDA and Python environments";
        if profile.python.is_empty() {
            Outcome::skip(REASON)
        } else {
            Outcome::error(format!(
                "the profile demands Python environments, and {REASON}"
            ))
        }
    })
}

/// What the profile demands of an environment.
pub(crate) fn requirement<'p>(
    environment: &PythonEnvironment,
    profile: &'p Profile,
) -> Option<&'p PythonRequirement> {
    let demanded = |it: &&PythonRequirement| {
        let path = it.path.trim_end_matches('/');
        environment.prefix == path || environment.interpreter.value().is_some_and(|it| it == path)
    };
    profile.python.iter().find(demanded)
}

/// A name for texts: `venv /opt/venv (Python 3.12.3)`.
pub fn name_of(environment: &PythonEnvironment) -> String {
    let version = environment.python_version.value();
    let version = version
        .map(|it| format!(" (Python {it})"))
        .unwrap_or_default();
    format!(
        "{} {}{version}",
        environment.kind.name(),
        environment.prefix
    )
}

/// The steps of a proof that a check judges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Everything.
    All,
    /// Import, build and devices.
    Devices,
    /// Everything that computes.
    Computation,
}

impl Part {
    fn has(self, step: &str) -> bool {
        let is_of_devices = ["start", "import", "build", "devices", "libraries"].contains(&step);
        match self {
            Self::All => true,
            Self::Devices => is_of_devices,
            Self::Computation => !is_of_devices,
        }
    }
}

/// One judgement for a framework over all environments that have it.
///
/// A failure in an environment that neither the profile nor a variable selects is a warning where
/// the framework works in another environment: it concerns only those who choose that environment.
pub(crate) fn judge_framework(
    facts: &Facts,
    profile: &Profile,
    framework: Framework,
    part: Part,
) -> crate::findings::Judgement {
    let seen = seen(facts, profile)?;
    let machine = super::compatibility::machine_of(facts);
    let environments: Vec<&PythonEnvironment> = seen
        .pythons
        .iter()
        .filter(|it| !packages_of(it, framework).is_empty())
        .collect();
    if environments.is_empty() {
        return Err(Outcome::skip(format!(
            "no Python environment has {}",
            framework.name()
        )));
    }
    let mut judged: Vec<(&PythonEnvironment, Tally)> = Vec::new();
    let mut remedies: Vec<(bool, String)> = Vec::new();
    let mut not_started: Vec<String> = Vec::new();
    for environment in environments {
        let mut one = OneFramework {
            facts,
            machine: &machine,
            environment,
            framework,
            part,
            demanded: environment.named || requirement(environment, profile).is_some(),
            tally: Tally::default(),
            remedy: None,
            not_started: None,
        };
        one.judge();
        not_started.extend(one.not_started);
        let failed = one.tally.worst() == Some(Verdict::Fail);
        remedies.extend(one.remedy.map(|it| (failed, it)));
        judged.push((environment, one.tally));
    }

    let works = |tally: &Tally| matches!(tally.worst(), Some(Verdict::Pass | Verdict::Warn));
    let one_works = judged.iter().any(|(_, tally)| works(tally));
    let mut all = Tally::default();
    for (environment, tally) in judged {
        let is_chosen =
            environment.named || environment.active || requirement(environment, profile).is_some();
        if one_works && !is_chosen {
            all.add_softened(tally);
        } else {
            all.add(tally);
        }
    }
    let reason = not_started
        .first()
        .cloned()
        .unwrap_or_else(|| format!("{} was started in no environment", framework.name()));
    let worst = all.worst();
    let outcome = all.outcome(Outcome::skip(reason));
    remedies.sort_by_key(|(failed, _)| !failed);
    Ok(match (worst, remedies.into_iter().next()) {
        (Some(Verdict::Fail | Verdict::Warn | Verdict::Error), Some((_, remedy))) => {
            outcome.remedy(remedy)
        }
        _ => outcome,
    })
}

/// One framework in one environment.
struct OneFramework<'f> {
    facts: &'f Facts,
    machine: &'f Machine,
    environment: &'f PythonEnvironment,
    framework: Framework,
    part: Part,
    /// Somebody named this environment, so that not having started it is an error.
    demanded: bool,
    tally: Tally,
    remedy: Option<String>,
    not_started: Option<String>,
}

impl OneFramework<'_> {
    fn judge(&mut self) {
        let name = name_of(self.environment);
        let what = self.describe();
        let package = gpu_package(self.environment, self.framework);
        if self.framework == Framework::Jax && package.is_none() {
            return self.judge_cpu_build(&format!("{what} in {name} has no CUDA plugin"));
        }
        if package.is_some_and(|it| it.cuda == Reading::NotSupported) {
            return self.judge_cpu_build(&format!("{what} in {name} is a CPU build"));
        }
        let static_answer =
            package.and_then(|it| judge_package(it, self.environment, self.machine));
        let proof = self.environment.proof(self.framework);
        if let Some(proof) = proof {
            self.judge_proof(proof, &what, &name, static_answer.as_ref());
            return;
        }
        let reason = self.environment.not_started.clone();
        let reason = reason.unwrap_or_else(|| "it was not started".to_owned());
        self.not_started = Some(format!("{what} in {name}: {reason}"));
        if self.part == Part::Computation {
            if self.demanded {
                self.tally
                    .error(format!("{what} in {name} did not compute: {reason}"));
            }
            return;
        }
        self.judge_statically(static_answer, &what, &name, &reason);
    }

    fn describe(&self) -> String {
        let packages = packages_of(self.environment, self.framework);
        let version = packages.first().map_or("", |it| it.version.as_str());
        format!("{} {version}", self.framework.name())
    }

    /// A CPU build is a choice, unless the environment was named for its GPUs.
    fn judge_cpu_build(&mut self, text: &str) {
        if self.part == Part::Computation {
            self.not_started = Some(format!("{text}, which uses no GPU"));
            return;
        }
        let known = explain_message("Torch not compiled with CUDA enabled");
        if self.framework == Framework::Torch {
            self.remedy = known.map(|it| it.remedy.clone());
        }
        self.tally.warn(format!("{text}, which uses no GPU"));
    }

    fn judge_statically(
        &mut self,
        answer: Option<Compatibility>,
        what: &str,
        name: &str,
        reason: &str,
    ) {
        if let Some(answer) = answer {
            let why = answer.reasons.first().cloned().unwrap_or_default();
            match answer.start {
                Start::Impossible => self
                    .tally
                    .fail(format!("{what} in {name} cannot start: {why}")),
                Start::Limited => self.tally.warn(format!("{what} in {name}: {why}")),
                Start::Full | Start::Unknown => {}
            }
            self.remedy = answer.remedy;
        }
        if self.demanded {
            self.tally
                .error(format!("{what} in {name} was not started: {reason}"));
        }
    }

    fn judge_proof(
        &mut self,
        proof: &PythonProof,
        what: &str,
        name: &str,
        static_answer: Option<&Compatibility>,
    ) {
        let part = self.part;
        if let Some(failure) = failure(proof, |step| part.has(step)) {
            let why = static_answer
                .filter(|it| it.start == Start::Impossible && failure.known.is_none())
                .and_then(|it| it.reasons.first())
                .map(|it| format!("; {it}"))
                .unwrap_or_default();
            let tail = tail_of(&failure.output);
            self.tally
                .fail(format!("{what} in {name}: {failure}{why}{tail}"));
            self.remedy = failure
                .known
                .map(|it| it.remedy.clone())
                .or_else(|| static_answer?.remedy.clone());
            return;
        }
        // The other part's failure is the other check's.
        let reached = |step: &str| proof.step(step).is_some_and(|it| it.error.is_none());
        if part == Part::Computation && !reached("devices") {
            self.not_started = Some(format!("{what} in {name} did not come to compute"));
            return;
        }
        if part != Part::Computation && self.judge_devices(proof, what, name) {
            return;
        }
        if let Some(answer) = static_answer.filter(|it| it.start == Start::Limited) {
            let why = answer.reasons.first().cloned().unwrap_or_default();
            self.tally
                .warn(format!("{what} in {name} works, and {why}"));
            self.remedy.clone_from(&answer.remedy);
            return;
        }
        self.tally.pass(match part {
            Part::Computation => format!("{what} in {name} computes what the CPU computes"),
            Part::All | Part::Devices => {
                let count = device_uuids(proof).map_or(0, |it| it.len());
                format!(
                    "{what} in {name} sees {}",
                    crate::queries::counted(count, "GPU")
                )
            }
        });
    }

    /// Compares the devices with NVML's; true where they are not right.
    fn judge_devices(&mut self, proof: &PythonProof, what: &str, name: &str) -> bool {
        if proof.result("devices", "available") == Some(&serde_json::Value::Bool(false)) {
            self.tally.fail(format!(
                "{what} in {name} reports that CUDA is not available{}",
                tail_of(&proof.output)
            ));
            return true;
        }
        let Some(found) = device_uuids(proof) else {
            self.tally
                .error(format!("{what} in {name} returned no list of devices"));
            return true;
        };
        let nvml: Vec<String> = self
            .facts
            .gpus
            .iter()
            .filter(|gpu| !crate::queries::is_hidden(gpu, self.facts))
            .filter_map(|gpu| gpu.uuid.value().map(|it| bare_uuid(it)))
            .collect();
        let mig = self
            .facts
            .gpus
            .iter()
            .any(|gpu| gpu.mig.value().is_some_and(|it| it.current));
        if mig || nvml.is_empty() {
            return false;
        }
        if found.len() != nvml.len() {
            self.tally.fail(format!(
                "{what} in {name} sees {}, NVML lists {}",
                crate::queries::counted(found.len(), "GPU"),
                nvml.len()
            ));
            return true;
        }
        // Old releases return no UUID.
        let foreign: Vec<&String> = found
            .iter()
            .filter(|it| !it.is_empty() && !nvml.contains(it))
            .collect();
        if let Some(uuid) = foreign.first() {
            self.tally.fail(format!(
                "{what} in {name} sees GPU-{uuid}, which NVML does not list"
            ));
            return true;
        }
        false
    }
}

/// The last three lines of an output, as a part of a text.
pub(crate) fn tail_of(output: &str) -> String {
    const LINES: usize = 3;
    let lines: Vec<&str> = output.lines().filter(|it| !it.trim().is_empty()).collect();
    if lines.is_empty() {
        return String::new();
    }
    let from = lines.len().saturating_sub(LINES);
    format!("; its last lines: {}", lines[from..].join(" | "))
}

fn bare_uuid(uuid: &str) -> String {
    uuid.trim_start_matches("GPU-").to_lowercase()
}

/// The UUIDs that the framework returned, without `GPU-`; empty texts of releases that return none.
fn device_uuids(proof: &PythonProof) -> Option<Vec<String>> {
    let devices = proof.result("devices", "devices")?.as_array()?;
    let uuid = |it: &serde_json::Value| bare_uuid(it["uuid"].as_str().unwrap_or_default());
    Some(devices.iter().map(uuid).collect())
}
