//! Tests of the checks that start a framework, one row each. The guard in `judge.rs` runs them by
//! the filter `checks::`.

use crate::check::Check;
use crate::facts::{
    EnvironmentFacts, Facts, Framework, ProofEnd, PythonEnvironment, Reading, UnmetKind, UnmetNeed,
};
use crate::findings::{Finding, Run, Verdict};
use crate::level::Level;
use crate::test_machine::{framework_environment, healthy_node, judge_check};

/// A check, its framework, a step that it judges, and whether it judges the list of devices.
struct Row {
    check: &'static str,
    framework: Framework,
    step: &'static str,
    judges_devices: bool,
}

const fn row(check: &'static str, framework: Framework, step: &'static str) -> Row {
    Row {
        check,
        framework,
        step,
        judges_devices: true,
    }
}

const ROWS: [Row; 5] = [
    row("torch_cuda", Framework::Torch, "import"),
    Row {
        judges_devices: false,
        ..row("torch_gemm", Framework::Torch, "gemm_fp32")
    },
    row("jax_cuda", Framework::Jax, "gemm_fp32"),
    row("tensorflow_cuda", Framework::Tensorflow, "gemm_fp32"),
    row("cupy_cuda", Framework::Cupy, "gemm_fp32"),
];

impl Row {
    fn check(&self) -> &'static Check {
        let entry = crate::checks::ALL
            .iter()
            .find(|it| it.check.id == self.check);
        entry.expect("a check").check
    }

    fn findings(&self, pythons: Vec<PythonEnvironment>, profile: &str) -> Vec<Finding> {
        let facts = Facts {
            environment: Some(EnvironmentFacts {
                pythons,
                ..EnvironmentFacts::default()
            }),
            ..healthy_node()
        };
        judge_check(self.check(), &facts, profile)
    }

    /// The one finding about one environment.
    fn finding(&self, environment: PythonEnvironment, profile: &str) -> Finding {
        let mut findings = self.findings(vec![environment], profile);
        assert_eq!(findings.len(), 1, "{findings:#?}");
        findings.remove(0)
    }

    fn healthy(&self) -> PythonEnvironment {
        framework_environment(self.framework)
    }

    /// The process was killed during the row's step.
    fn killed(&self) -> PythonEnvironment {
        let mut environment = self.healthy();
        let proof = &mut environment.proofs[0];
        let at = proof.steps.iter().position(|it| it.name == self.step);
        proof.steps.truncate(at.expect("a step of the proof"));
        proof.unfinished_step = Some(self.step.to_owned());
        proof.end = ProofEnd::Signal(11);
        environment
    }

    fn assert_is(&self, finding: &Finding, verdict: Verdict) {
        assert_eq!(finding.check, self.check);
        assert_eq!(finding.verdict, verdict, "{finding:#?}");
    }
}

#[test]
fn a_proof_that_succeeded_passes_and_nothing_installed_is_skipped() {
    for row in ROWS {
        row.assert_is(&row.finding(row.healthy(), "{}"), Verdict::Pass);
        let none = row.findings(Vec::new(), "{}");
        row.assert_is(&none[0], Verdict::Skip);
        let old = judge_check(row.check(), &healthy_node(), "{}");
        row.assert_is(&old[0], Verdict::Skip);
        // Without the framework there is nothing to be said of this environment.
        let mut without = row.healthy();
        without.packages.clear();
        row.assert_is(&row.finding(without, "{}"), Verdict::Skip);
    }
}

#[test]
fn a_process_that_dies_fails_with_its_signal() {
    for row in ROWS {
        let finding = row.finding(row.killed(), "{}");
        row.assert_is(&finding, Verdict::Fail);
        assert!(finding.summary.contains("SIGSEGV"), "{}", finding.summary);
        assert!(finding.summary.contains(row.step), "{}", finding.summary);
    }
}

/// Each has its finding; the verdict of the one depends on whether the other works.
#[test]
fn a_failure_in_one_of_two_environments_is_softened_unless_it_is_demanded() {
    for row in ROWS {
        let mut broken = row.killed();
        broken.prefix = "/opt/broken".to_owned();
        let demanded = "python: [{path: /opt/broken}]";
        for (profile, expected) in [("{}", Verdict::Warn), (demanded, Verdict::Fail)] {
            let findings = row.findings(vec![row.healthy(), broken.clone()], profile);
            let subjects: Vec<String> = findings.iter().map(|it| it.subject.to_string()).collect();
            assert_eq!(
                subjects,
                [
                    "Python environment /opt/venv",
                    "Python environment /opt/broken"
                ]
            );
            row.assert_is(&findings[0], Verdict::Pass);
            row.assert_is(&findings[1], expected);
        }
        let mut other = row.killed();
        other.prefix = "/opt/other".to_owned();
        for finding in row.findings(vec![broken, other], "{}") {
            row.assert_is(&finding, Verdict::Fail);
        }
    }
}

#[test]
fn a_demanded_environment_that_was_not_started_is_an_error() {
    for row in ROWS {
        let mut not_started = row.healthy();
        not_started.proofs.clear();
        not_started.not_started = Some("the run was stopped".to_owned());
        let finding = row.finding(not_started.clone(), "{}");
        assert_ne!(finding.verdict, Verdict::Pass, "{finding:#?}");
        let finding = row.finding(not_started, "python: [{path: /opt/venv}]");
        row.assert_is(&finding, Verdict::Error);
    }
}

/// Torch's computation is judged by a check of its own: a wrong list of devices is not its matter,
/// and a list that was not reached is no pass of it.
#[test]
fn the_devices_must_be_those_of_nvml() {
    let changes = [
        |it: &mut serde_json::Value| it[0]["uuid"] = serde_json::json!("GPU-of-another-node"),
        |it: &mut serde_json::Value| *it = serde_json::json!([]),
    ];
    for row in ROWS {
        for change in changes {
            let mut environment = row.healthy();
            let steps = &mut environment.proofs[0].steps;
            let step = steps.iter_mut().find(|it| it.name == "devices");
            let results = &mut step.expect("a step").results;
            change(results.get_mut("devices").expect("a list"));
            let expected = if row.judges_devices {
                Verdict::Fail
            } else {
                Verdict::Pass
            };
            row.assert_is(&row.finding(environment, "{}"), expected);
        }
        let mut environment = row.healthy();
        let proof = &mut environment.proofs[0];
        let at = proof.steps.iter().position(|it| it.name == "devices");
        let at = at.expect("a step");
        proof.steps.truncate(at + 1);
        proof.steps[at].error = Some("RuntimeError: no CUDA driver".to_owned());
        let expected = if row.judges_devices {
            Verdict::Fail
        } else {
            Verdict::Skip
        };
        row.assert_is(&row.finding(environment, "{}"), expected);
    }
}

#[test]
fn a_build_whose_gpu_code_is_not_known_is_judged_by_its_toolkit() {
    for row in ROWS {
        let mut unknown = row.healthy();
        for package in &mut unknown.packages {
            package.device_code = Reading::default();
        }
        row.assert_is(&row.finding(unknown, "{}"), Verdict::Pass);
    }
}

/// Torch as wheels have it needs a newer C library: known without a start, and refuted by one.
#[test]
fn what_the_linker_lacks_fails_where_nothing_was_started() {
    let row = &ROWS[0];
    let mut environment = row.healthy();
    environment.packages[0].unmet = vec![UnmetNeed {
        library: "libtorch_cpu.so".to_owned(),
        kind: UnmetKind::SymbolVersion,
        name: "GLIBC_2.34".to_owned(),
        found: Some("/lib64/libc.so.6".to_owned()),
        newest: Some("GLIBC_2.31".to_owned()),
    }];
    let finding = row.finding(environment.clone(), "{}");
    assert_eq!(finding.verdict, Verdict::Pass, "it works: {finding:#?}");
    environment.proofs.clear();
    let finding = row.finding(environment, "{}");
    row.assert_is(&finding, Verdict::Fail);
    let expected = "libtorch_cpu.so needs GLIBC_2.34, and /lib64/libc.so.6 has GLIBC_2.31 at most";
    assert!(finding.summary.contains(expected), "{}", finding.summary);
    let remedy = finding.remedy.expect("a remedy");
    assert!(remedy.contains("glibc 2.34 or newer"), "{remedy}");
}

/// An image, or this machine's files against another machine: nothing is started, and that is no
/// error of a demanded environment.
#[test]
fn files_are_judged_against_the_machine_that_is_named() {
    let judge = |row: &Row, on: &str| {
        let mut environment = row.healthy();
        environment.proofs.clear();
        environment.named = true;
        let facts = Facts {
            environment: Some(EnvironmentFacts {
                pythons: vec![environment],
                by_files: true,
                on: Some(on.to_owned()),
                ..EnvironmentFacts::default()
            }),
            ..healthy_node()
        };
        judge_check(row.check(), &facts, "{}").remove(0).verdict
    };
    for row in &ROWS {
        let is_of_files = row.judges_devices;
        let of = |verdict| if is_of_files { verdict } else { Verdict::Skip };
        let fits = judge(row, "H200 driver 570.124.06");
        assert_eq!(fits, of(Verdict::Pass), "{}", row.check);
        // Built for sm_80 and newer.
        let too_old = judge(row, "T4 driver 570.124.06");
        assert_eq!(too_old, of(Verdict::Fail), "{}", row.check);
    }
}

/// Every report names the environment of a finding, by its folder.
#[test]
fn reports_name_the_environment() {
    let row = &ROWS[0];
    let environment = |prefix: &str| PythonEnvironment {
        prefix: prefix.to_owned(),
        ..row.killed()
    };
    let facts = Facts {
        environment: Some(EnvironmentFacts {
            pythons: vec![environment("/opt/a"), environment("/opt/b")],
            ..EnvironmentFacts::default()
        }),
        ..healthy_node()
    };
    let profile = crate::profile::Profile::default();
    let run = Run::judged(facts, &profile, Run::BUILT_IN_PROFILE, Level::Extended);
    let causes = crate::diagnosis::diagnose(&run);
    assert_eq!(causes.len(), 1, "the same in both: {causes:#?}");
    let summary = &causes[0].summary;
    let expected = "Python environment /opt/a and 1 more: torch 2.8.0+cu128: ";
    assert!(summary.starts_with(expected), "{summary}");
    let junit = crate::report::junit(&run).expect("a report");
    for part in [
        r#"<testsuite id="9" name="Python environment /opt/a""#,
        r#"name="torch_cuda" time="0" classname="gpu-validator.environment./opt/b""#,
        r#"message="Python environment /opt/b: torch 2.8.0+cu128: "#,
    ] {
        assert!(junit.contains(part), "{part} is not in\n{junit}");
    }
    for text in [
        crate::report::html(&run),
        crate::report::markdown(&run),
        crate::report::json(&run),
    ] {
        assert!(text.contains("/opt/b"), "{text}");
    }
}
