//! Python environments are complete, start, and match the profile.
//!
//! ## Why
//! An environment whose interpreter is gone, whose upgrade was interrupted or whose packages do not
//! go together fails at the start of a job, hours after the image was made.
//!
//! ## How it is judged
//! Each environment that has a GPU package or is named, by the files on its disk: an absent
//! interpreter, two versions of one package, files of a GPU package that are absent or of another
//! size, packages of mixed sources, `.pth` files whose code changes which GPUs or libraries
//! programs get (other code in them is listed by `gpu-validator environment` and is right), GPU
//! packages without a check of their own that cannot start on this driver and these GPUs. These are
//! a `warn`, and a `fail` in an environment that the profile or `--python` names. Such an
//! environment is also started, and must have the versions that the profile demands; one that does
//! not exist is a `fail`. Skipped where no environment has a GPU package and none is named.
//!
//! ## What to do
//! Make the environment anew, or install the package again:
//! `pip install --force-reinstall PACKAGE`.
//!
//! ## Source
//! Python, virtual environments, <https://docs.python.org/3/library/venv.html>; recording installed
//! projects, <https://packaging.python.org/en/latest/specifications/recording-installed-packages/>

use crate::check::{Check, Judge};
use crate::environment::VersionRequirement;
use crate::environment::compatibility::Start;
use crate::environment::installed::{
    failure, judge_package, machine, name_of, packages_of, requirement, seen, tail_of,
};
use crate::facts::{DefectKind, Facts, Framework, PythonEnvironment, Reading};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::{Profile, PythonRequirement};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "python_environment",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachEnvironment(None, judge),
    documentation_url: "https://docs.python.org/3/library/venv.html",
};

fn judge(environment: &PythonEnvironment, facts: &Facts, profile: &Profile) -> Judgement {
    let demanded = requirement(environment, profile);
    let is_named = environment.named || demanded.is_some();
    let mut tally = Tally::default();
    let by_files = seen(facts, profile)?.by_files;
    judge_files(environment, is_named, &mut tally);
    judge_other_packages(environment, facts, (by_files, is_named), &mut tally);
    if is_named && !by_files {
        judge_start(environment, &mut tally);
    }
    if let Some(demanded) = demanded {
        judge_versions(environment, demanded, &mut tally);
    }
    if tally.worst().is_none() {
        tally.pass(format!("{} is whole", name_of(environment)));
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::error("nothing was judged"));
    Ok(match worst {
        Some(Verdict::Fail | Verdict::Warn) => outcome.remedy(
            "make the environment anew, or install the package again (pip install --force-reinstall PACKAGE)",
        ),
        _ => outcome,
    })
}

fn judge_files(environment: &PythonEnvironment, is_named: bool, tally: &mut Tally) {
    for defect in &environment.defects {
        let text = defect.text.clone();
        match defect.kind {
            // It is code of the environment's owner, who may want it.
            DefectKind::StartupCode | DefectKind::MixedPackages => tally.warn(text),
            _ if is_named => tally.fail(text),
            _ => tally.warn(text),
        }
    }
}

/// GPU packages that no check of a framework judges: vllm, flash-attn, onnxruntime-gpu.
fn judge_other_packages(
    environment: &PythonEnvironment,
    facts: &Facts,
    (by_files, is_named): (bool, bool),
    tally: &mut Tally,
) {
    let machine = machine(facts);
    let others = environment
        .packages
        .iter()
        .filter(|it| !OF_FRAMEWORK_CHECKS.iter().any(|of| it.name.starts_with(of)));
    for package in others {
        let Some(answer) = judge_package(package, environment, &machine) else {
            continue;
        };
        let why = answer.reasons.first().cloned().unwrap_or_default();
        let text = format!("{} {}: {why}", package.name, package.version);
        match answer.start {
            Start::Impossible if by_files || is_named => tally.fail(text),
            Start::Impossible => tally.warn(text),
            Start::Unknown if by_files => tally.error(text),
            Start::Full | Start::Limited | Start::Unknown => {}
        }
    }
}

/// Beginnings of the names of packages that checks of their own judge.
const OF_FRAMEWORK_CHECKS: [&str; 4] = ["torch", "tensorflow", "jax", "cupy"];

fn judge_start(environment: &PythonEnvironment, tally: &mut Tally) {
    let Some(proof) = environment.proofs.first() else {
        let reason = environment
            .not_started
            .as_deref()
            .unwrap_or("it was not started");
        tally.error(reason);
        return;
    };
    if let Some(failure) = failure(proof, |step| step == "start") {
        tally.fail(format!("{failure}{}", tail_of(&failure.output)));
    }
}

fn judge_versions(
    environment: &PythonEnvironment,
    demanded: &PythonRequirement,
    tally: &mut Tally,
) {
    if let Some(wanted) = &demanded.python {
        match &environment.python_version {
            Reading::Value(found) => judge_version("Python", found, wanted, tally),
            other => tally.error(format!("the Python version is not known: {other:?}")),
        }
    }
    for (framework, wanted) in [
        (Framework::Torch, &demanded.torch),
        (Framework::Jax, &demanded.jax),
        (Framework::Tensorflow, &demanded.tensorflow),
        (Framework::Cupy, &demanded.cupy),
    ] {
        let Some(wanted) = wanted else { continue };
        match packages_of(environment, framework).first() {
            Some(found) => judge_version(framework.name(), &found.version, wanted, tally),
            None => tally.fail(format!(
                "there is no {}, the profile demands {wanted}",
                framework.name()
            )),
        }
    }
    let Some(wanted) = demanded.cuda else { return };
    let mut built = environment
        .packages
        .iter()
        .filter(|it| !matches!(it.cuda, Reading::NotRead(_)))
        .filter(|it| !it.name.starts_with("nvidia-"))
        .peekable();
    if built.peek().is_none() {
        tally.fail(format!(
            "no package is built for CUDA, the profile demands CUDA {wanted}"
        ));
    }
    for package in built {
        let found = package.cuda.value().map_or("none", |it| it);
        let is_right = found == wanted.to_string() || found.starts_with(&format!("{wanted}."));
        if !is_right {
            tally.fail(format!(
                "{} {} is built for CUDA {found}, the profile demands {wanted}",
                package.name, package.version
            ));
        }
    }
}

fn judge_version(what: &str, found: &str, wanted: &VersionRequirement, tally: &mut Tally) {
    match wanted.is_met_by(found) {
        Some(true) => {}
        Some(false) => tally.fail(format!("{what} is {found}, the profile demands {wanted}")),
        None => tally.error(format!("{what} is {found}, which is no version by number")),
    }
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{
        DefectKind, EnvironmentDefect, EnvironmentFacts, Facts, ProofEnd, PythonEnvironment,
        PythonPackage, PythonProof, Reading,
    };
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_check, judge_host_check, torch_environment};

    fn with(environment: PythonEnvironment) -> Facts {
        Facts {
            environment: Some(EnvironmentFacts {
                pythons: vec![environment],
                ..EnvironmentFacts::default()
            }),
            ..healthy_node()
        }
    }

    fn judge(environment: PythonEnvironment, profile: &str) -> Finding {
        judge_host_check(&CHECK, &with(environment), profile)
    }

    #[test]
    fn each_environment_has_its_own_finding_and_an_absent_one_fails() {
        let mut damaged = torch_environment();
        damaged.prefix = "/opt/damaged".to_owned();
        damaged.defects.push(EnvironmentDefect {
            kind: DefectKind::DuplicatePackage,
            text: "torch is there in 2.7.1 and 2.8.0".to_owned(),
        });
        let mut without_gpu_packages = torch_environment();
        without_gpu_packages.prefix = "/usr".to_owned();
        without_gpu_packages.packages.clear();
        let mut facts = with(torch_environment());
        let pythons = &mut facts.environment.as_mut().expect("environments").pythons;
        pythons.extend([damaged, without_gpu_packages]);
        let findings = judge_check(&CHECK, &facts, "python: [{path: /opt/other/}]");
        let seen: Vec<(String, Verdict)> = findings
            .iter()
            .map(|it| (it.subject.to_string(), it.verdict))
            .collect();
        let expected = [
            ("/opt/venv", Verdict::Pass),
            ("/opt/damaged", Verdict::Warn),
            ("/opt/other", Verdict::Fail),
        ]
        .map(|(path, verdict)| (format!("Python environment {path}"), verdict));
        assert_eq!(seen, expected);
        assert!(findings[2].summary.contains("the profile demands one"));
    }

    const DEMANDED: &str =
        "python: [{path: /opt/venv, python: '>=3.10', torch: '>=2.6', cuda: '12.8'}]";

    #[test]
    fn a_whole_environment_passes() {
        assert_eq!(judge(torch_environment(), "{}").verdict, Verdict::Pass);
        let finding = judge(torch_environment(), DEMANDED);
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
    }

    #[test]
    fn what_the_profile_demands_must_be_there() {
        for (profile, words) in [
            (
                "python: [{path: /opt/venv, torch: '>=2.12'}]",
                "demands >=2.12",
            ),
            (
                "python: [{path: /opt/venv, jax: '0.12'}]",
                "there is no jax",
            ),
            (
                "python: [{path: /opt/venv, cuda: '13.0'}]",
                "built for CUDA 12.8",
            ),
            (
                "python: [{path: /opt/venv, python: '<3.9'}]",
                "Python is 3.12.3",
            ),
        ] {
            let finding = judge(torch_environment(), profile);
            assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
            assert!(finding.summary.contains(words), "{}", finding.summary);
        }
        let finding = judge_host_check(&CHECK, &healthy_node(), DEMANDED);
        assert_eq!(finding.verdict, Verdict::Error, "nothing was read");
    }

    #[test]
    fn a_defect_warns_and_fails_where_the_environment_is_named() {
        let mut broken = torch_environment();
        broken.defects.push(EnvironmentDefect {
            kind: DefectKind::DamagedPackage,
            text: "torch/lib/libtorch_cuda.so is absent".to_owned(),
        });
        assert_eq!(judge(broken.clone(), "{}").verdict, Verdict::Warn);
        assert_eq!(judge(broken, DEMANDED).verdict, Verdict::Fail);
    }

    #[test]
    fn an_environment_that_is_named_and_was_not_started_is_an_error() {
        let mut named = torch_environment();
        named.proofs.clear();
        named.not_started = Some("its folder is writable by every user".to_owned());
        assert_eq!(judge(named, DEMANDED).verdict, Verdict::Error);
    }

    #[test]
    fn an_interpreter_that_dies_says_how() {
        let mut named = torch_environment();
        named.proofs = vec![PythonProof {
            end: ProofEnd::Exited(127),
            unfinished_step: Some("start".to_owned()),
            output: "python: error while loading shared libraries: libpython3.12.so.1.0: cannot open shared object file"
                .to_owned(),
            ..PythonProof::default()
        }];
        let finding = judge(named, DEMANDED);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.contains("exited with 127"),
            "{}",
            finding.summary
        );
        assert!(
            finding.summary.contains("libpython3.12"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn a_gpu_package_without_a_check_of_its_own_that_cannot_start_is_named() {
        let mut with_flash_attention = torch_environment();
        let mut package = with_flash_attention.packages[0].clone();
        package.name = "flash-attn".to_owned();
        package.version = "2.8.3".to_owned();
        with_flash_attention.packages.push(package);
        assert_eq!(
            judge(with_flash_attention.clone(), "{}").verdict,
            Verdict::Pass
        );
        let code = crate::test_machine::device_code(&["sm_80"]);
        with_flash_attention.packages[1].device_code = Reading::Value(code);
        // sm_80 runs on no H200.
        let finding = judge(with_flash_attention.clone(), "{}");
        assert_eq!(finding.verdict, Verdict::Warn, "{}", finding.summary);
        assert!(
            finding
                .summary
                .starts_with("flash-attn 2.8.3: no kernel image")
        );
        assert_eq!(judge(with_flash_attention, DEMANDED).verdict, Verdict::Fail);
    }

    #[test]
    fn environments_without_gpu_packages_are_no_ones_concern() {
        let mut empty = torch_environment();
        empty.packages = Vec::<PythonPackage>::new();
        assert_eq!(judge(empty, "{}").verdict, Verdict::Skip);
        assert_eq!(
            judge_host_check(&CHECK, &healthy_node(), "{}").verdict,
            Verdict::Skip
        );
    }

    #[test]
    fn an_unknown_version_of_the_interpreter_is_an_error() {
        let mut unknown = torch_environment();
        unknown.python_version = Reading::default();
        let finding = judge(unknown, "python: [{path: /opt/venv, python: '3.12'}]");
        assert_eq!(finding.verdict, Verdict::Error, "{}", finding.summary);
    }
}
