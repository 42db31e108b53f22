//! The packages of an environment against the machine, and what the proofs returned.

use crate::environment::builds::framework_release;
use crate::environment::compatibility::{
    Build, Code, Compatibility, Machine, Start, judge, machine_of,
};
use crate::environment::device_code::targets_of;
use crate::environment::explain::{add_python, parse_machine};
use crate::environment::messages::{KnownMessage, explain_message};
use crate::facts::{
    EnvironmentFacts, Facts, Framework, ProofEnd, PythonEnvironment, PythonPackage, PythonProof,
    Reading, UnmetKind, UnmetNeed,
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
    add_unmet(package, environment, &mut compatibility);
    add_pins(package, environment, &mut compatibility);
    add_release(framework, package, environment, &mut compatibility);
    Some(compatibility)
}

/// What the dynamic linker would end with, of the package and of those that load with it.
fn add_unmet(
    package: &PythonPackage,
    environment: &PythonEnvironment,
    compatibility: &mut Compatibility,
) {
    let of_jax = |it: &&PythonPackage| package.name.starts_with("jax-cuda") && it.name == "jaxlib";
    let also = environment.packages.iter().filter(of_jax);
    for need in [package].into_iter().chain(also).flat_map(|it| &it.unmet) {
        let UnmetNeed { library, name, .. } = need;
        let found = need.found.as_deref().unwrap_or_default();
        let (reason, remedy) = match need.kind {
            UnmetKind::MissingLibrary => (
                format!("{library} needs {name}, which the loader does not find"),
                format!("install the package of {name}"),
            ),
            UnmetKind::SymbolVersion => {
                let newest = match &need.newest {
                    Some(newest) => format!("{newest} at most"),
                    None => "none of these versions".to_owned(),
                };
                (
                    format!("{library} needs {name}, and {found} has {newest}"),
                    remedy_of_version(name, &package.name),
                )
            }
            UnmetKind::UndefinedSymbol => (
                format!("{library} needs {name}, which {found} does not define"),
                format!(
                    "install the version of {} that {} {} pins, and remove other copies from LD_LIBRARY_PATH",
                    found.rsplit('/').next().unwrap_or(found),
                    package.name,
                    package.version
                ),
            ),
        };
        compatibility.add(Start::Impossible, reason, Some(remedy));
    }
}

/// `GLIBC_2.34` comes with the distribution, `GLIBCXX_3.4.30` with the compiler's run time.
fn remedy_of_version(version: &str, package: &str) -> String {
    match version.split_once('_') {
        Some(("GLIBC", number)) => format!(
            "use an operating system or base image with glibc {number} or newer, or a release of {package} that was built for an older one"
        ),
        Some(("GLIBCXX" | "CXXABI" | "GCC", _)) => format!(
            "install a libstdc++ and libgcc with {version} (a newer distribution, or conda install -c conda-forge libstdcxx-ng)"
        ),
        _ => format!("install the version of the library that defines {version}"),
    }
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

/// What environments are judged against: the machine that is named, else the one of the facts.
pub fn machine(facts: &Facts) -> Machine {
    let named = facts.environment.as_ref().and_then(|it| it.on.as_deref());
    named
        .and_then(|it| parse_machine(it).ok())
        .unwrap_or_else(|| machine_of(facts))
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

/// One judgement for a framework in one environment.
///
/// A failure in an environment that neither the profile nor a variable selects is a warning where
/// the framework works in another environment: it concerns only those who choose that environment.
pub(crate) fn judge_framework(
    environment: &PythonEnvironment,
    facts: &Facts,
    profile: &Profile,
    framework: Framework,
    part: Part,
) -> crate::findings::Judgement {
    let seen = seen(facts, profile)?;
    let machine = machine(facts);
    let judge = |environment| {
        OneFramework::judged(environment, facts, profile, &machine, (framework, part))
    };
    let own = judge(environment);
    let is_chosen =
        environment.named || environment.active || requirement(environment, profile).is_some();
    let works_elsewhere = || {
        let mut others = seen
            .pythons
            .iter()
            .filter(|it| it.prefix != environment.prefix)
            .filter(|it| !packages_of(it, framework).is_empty());
        others.any(|it| {
            let worst = judge(it).tally.worst();
            matches!(worst, Some(Verdict::Pass | Verdict::Warn))
        })
    };
    let mut tally = Tally::default();
    if own.tally.worst() == Some(Verdict::Fail) && !is_chosen && !seen.by_files && works_elsewhere()
    {
        tally.add_softened(own.tally);
    } else {
        tally.add(own.tally);
    }
    let worst = tally.worst();
    let reason = own
        .not_started
        .unwrap_or_else(|| format!("{} was not started", framework.name()));
    let outcome = tally.outcome(Outcome::skip(reason));
    Ok(match (worst, own.remedy) {
        (Some(Verdict::Fail | Verdict::Warn | Verdict::Error), Some(remedy)) => {
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
    /// This environment was named, so that not having started it is an error.
    demanded: bool,
    /// The files are the question, so that they are judged where nothing was started.
    by_files: bool,
    tally: Tally,
    remedy: Option<String>,
    not_started: Option<String>,
}

impl<'f> OneFramework<'f> {
    fn judged(
        environment: &'f PythonEnvironment,
        facts: &'f Facts,
        profile: &Profile,
        machine: &'f Machine,
        (framework, part): (Framework, Part),
    ) -> Self {
        let by_files = facts.environment.as_ref().is_some_and(|it| it.by_files);
        let mut one = Self {
            facts,
            machine,
            environment,
            framework,
            part,
            demanded: !by_files
                && (environment.named || requirement(environment, profile).is_some()),
            by_files,
            tally: Tally::default(),
            remedy: None,
            not_started: None,
        };
        one.judge();
        one
    }

    fn judge(&mut self) {
        let what = self.describe();
        let package = gpu_package(self.environment, self.framework);
        if self.framework == Framework::Jax && package.is_none() {
            return self.judge_cpu_build(&format!("{what} has no CUDA plugin"));
        }
        if package.is_some_and(|it| it.cuda == Reading::NotSupported) {
            return self.judge_cpu_build(&format!("{what} is a CPU build"));
        }
        let static_answer =
            package.and_then(|it| judge_package(it, self.environment, self.machine));
        let proof = self.environment.proof(self.framework);
        if let Some(proof) = proof {
            self.judge_proof(proof, &what, static_answer.as_ref());
            return;
        }
        let reason = self.environment.not_started.clone();
        let reason = reason.unwrap_or_else(|| "it was not started".to_owned());
        self.not_started = Some(format!("{what}: {reason}"));
        if self.part == Part::Computation {
            if self.demanded {
                self.tally
                    .error(format!("{what} did not compute: {reason}"));
            }
            return;
        }
        self.judge_statically(static_answer, &what, &reason);
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

    fn judge_statically(&mut self, answer: Option<Compatibility>, what: &str, reason: &str) {
        if let Some(answer) = answer {
            let why = answer.reasons.first().cloned().unwrap_or_default();
            match answer.start {
                Start::Impossible => self.tally.fail(format!("{what} cannot start: {why}")),
                Start::Limited => self.tally.warn(format!("{what}: {why}")),
                Start::Full if self.by_files => {
                    self.tally
                        .pass(format!("{what} starts by its files: {why}"));
                }
                Start::Unknown if self.by_files => self.tally.error(format!("{what}: {why}")),
                Start::Full | Start::Unknown => {}
            }
            self.remedy = answer.remedy;
        } else if self.by_files {
            self.tally
                .error(format!("{what} cannot be judged by its files"));
        }
        if self.demanded {
            self.tally
                .error(format!("{what} was not started: {reason}"));
        }
    }

    fn judge_proof(
        &mut self,
        proof: &PythonProof,
        what: &str,
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
            self.tally.fail(format!("{what}: {failure}{why}{tail}"));
            self.remedy = failure
                .known
                .map(|it| it.remedy.clone())
                .or_else(|| static_answer?.remedy.clone());
            return;
        }
        // The other part's failure is the other check's.
        let reached = |step: &str| proof.step(step).is_some_and(|it| it.error.is_none());
        if part == Part::Computation && !reached("devices") {
            self.not_started = Some(format!("{what} did not come to compute"));
            return;
        }
        if part != Part::Computation && self.judge_devices(proof, what) {
            return;
        }
        if let Some(answer) = static_answer.filter(|it| it.start == Start::Limited) {
            let why = answer.reasons.first().cloned().unwrap_or_default();
            self.tally.warn(format!("{what} works, and {why}"));
            self.remedy.clone_from(&answer.remedy);
            return;
        }
        self.tally.pass(match part {
            Part::Computation => format!("{what} computes what the CPU computes"),
            Part::All | Part::Devices => {
                let count = device_uuids(proof).map_or(0, |it| it.len());
                format!("{what} sees {}", crate::queries::counted(count, "GPU"))
            }
        });
    }

    /// Compares the devices with NVML's; true where they are not right.
    fn judge_devices(&mut self, proof: &PythonProof, what: &str) -> bool {
        if proof.result("devices", "available") == Some(&serde_json::Value::Bool(false)) {
            self.tally.fail(format!(
                "{what} reports that CUDA is not available{}",
                tail_of(&proof.output)
            ));
            return true;
        }
        let Some(found) = device_uuids(proof) else {
            self.tally
                .error(format!("{what} returned no list of devices"));
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
                "{what} sees {}, NVML lists {}",
                crate::queries::counted(found.len(), "GPU"),
                nvml.len()
            ));
            return true;
        }
        // Old releases return no UUID.
        let foreign: Vec<&String> = found
            .iter()
            .filter(|it| !it.is_empty() && !nvml.iter().any(|nvml| is_of(it, nvml)))
            .collect();
        if let Some(uuid) = foreign.first() {
            self.tally
                .fail(format!("{what} sees GPU-{uuid}, which NVML does not list"));
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
    format!(
        "; its last lines: {}",
        lines.get(from..).unwrap_or_default().join(" | ")
    )
}

/// Whether a UUID of a framework is this one of NVML, both without their prefix. CuPy returns the
/// 16 bytes as a C string, which ends before a byte of zero (seen with 14.2.0 on an H100).
fn is_of(found: &str, nvml: &str) -> bool {
    if found == nvml {
        return true;
    }
    let nvml: String = nvml.chars().filter(|it| *it != '-').collect();
    let rest = nvml.strip_prefix(found);
    found.len().is_multiple_of(2) && rest.is_some_and(|it| it.starts_with("00"))
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

#[cfg(test)]
mod tests {
    use super::is_of;

    #[test]
    fn uuid_that_ends_before_a_byte_of_zero_is_of_its_gpu_alone() {
        let nvml = "7d1ba14f-1d02-9000-3836-53150bc84308";
        assert!(is_of(nvml, nvml));
        assert!(is_of("7d1ba14f1d0290", nvml));
        for other in [
            "7d1ba14f1d02",
            "7d1ba14f1d029",
            "7d1ba14f1d0291",
            "7d1ba14f1d02900038",
        ] {
            assert!(!is_of(other, nvml), "{other}");
        }
    }
}
