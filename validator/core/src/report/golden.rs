//! Every sample in every format against the files in `tests/golden`;
//! `UPDATE_EXPECT=1 cargo test golden` writes them anew. Below, what must hold for any run at all.

use expect_test::expect_file;
use proptest::prelude::*;

use super::sample;
use super::{
    HumanStyle, Report, ctrf, github_annotations, html, human, json, junit, markdown, metrics,
    ocptv,
};
use crate::facts::Reading;
use crate::findings::{Counts, ExitStatus, Finding, GpuSubject, Run, Subject, Verdict};

fn plain(run: &Run) -> String {
    human(run, HumanStyle::default())
}

fn verbose_in_color(run: &Run) -> String {
    let style = HumanStyle {
        color: true,
        verbose: true,
        ..HumanStyle::default()
    };
    human(run, style)
}

type Format = fn(&Run) -> String;

const FORMATS: [(&str, Format); 10] = [
    ("txt", plain),
    ("verbose.ansi", verbose_in_color),
    ("junit.xml", |run| junit(run).expect("a report")),
    ("json", json),
    ("md", markdown),
    ("html", html),
    ("prom", metrics),
    ("github.txt", github_annotations),
    ("ctrf.json", ctrf),
    ("ocptv.jsonl", ocptv),
];

#[test]
fn reports_are_as_expected() {
    for (name, run) in sample::all() {
        for (extension, render) in FORMATS {
            let report = render(&run).replace(env!("CARGO_PKG_VERSION"), "VERSION");
            let path = format!(
                "{}/../../tests/golden/{name}.{extension}",
                env!("CARGO_MANIFEST_DIR")
            );
            expect_file![path].assert_eq(&report);
        }
    }
}

#[test]
fn exit_codes_of_the_samples() {
    let codes: Vec<(&str, ExitStatus)> = sample::all()
        .into_iter()
        .map(|(name, run)| (name, run.exit_status()))
        .collect();
    assert_eq!(
        codes,
        [
            ("healthy", ExitStatus::Passed),
            ("healthy_single", ExitStatus::Passed),
            ("failing", ExitStatus::Failed),
            ("no_gpu", ExitStatus::NotJudged),
            ("hostile", ExitStatus::Failed),
            ("incomplete", ExitStatus::NotJudged),
            ("simulated", ExitStatus::Passed),
            ("busy", ExitStatus::Busy),
            ("burned", ExitStatus::Failed),
            ("fallen_off_the_bus", ExitStatus::Failed),
        ]
    );
}

#[test]
fn every_report_says_that_it_is_simulated() {
    for (extension, render) in FORMATS {
        let report = render(&sample::simulated());
        let says = report.contains("SIMULATED")
            || report.contains("simulated=\"true\"")
            || report.contains("\"simulated\": \"p5en.48xlarge, no faults\"");
        assert!(says, "{extension} does not:\n{report}");
    }
}

#[test]
fn every_report_says_that_it_is_incomplete() {
    for (extension, render) in FORMATS {
        let report = render(&sample::incomplete());
        let says = report.contains("INCOMPLETE")
            || report.contains("incomplete=\"true\"")
            || report.contains("\"incomplete\": \"signal 15 (SIGTERM)\"");
        assert!(says, "{extension} does not:\n{report}");
    }
}

#[test]
fn every_report_names_every_failed_check() {
    let run = sample::failing();
    for (extension, render) in FORMATS {
        let report = render(&run);
        for finding in run.findings.iter().filter(|it| it.verdict == Verdict::Fail) {
            assert!(
                report.contains(&finding.check),
                "{extension} does not name {}",
                finding.check
            );
        }
    }
}

#[test]
fn an_annotation_is_one_line_whatever_the_texts_hold() {
    let commands = github_annotations(&sample::hostile());
    for line in commands.lines() {
        assert!(
            ["::error ", "::warning ", "::notice "]
                .iter()
                .any(|it| line.starts_with(it)),
            "{line}"
        );
    }
    assert!(!commands.contains('\r'));
}

#[test]
fn checks_that_pass_are_details() {
    let report = plain(&sample::healthy());
    assert_eq!(report.matches("persistence_mode").count(), 0, "{report}");
    let details = verbose_in_color(&sample::healthy());
    assert_eq!(details.matches("persistence mode is on").count(), 8);
}

#[test]
fn a_run_that_judged_nothing_is_ten_lines_with_the_reason_first() {
    let report = plain(&sample::no_gpu());
    assert!(report.lines().count() <= 10, "{report}");
    let first = report.lines().next().unwrap_or_default();
    assert!(first.contains("no NVIDIA GPU on the PCI bus"), "{report}");
    assert!(
        report.contains("Remediation: install the NVIDIA driver"),
        "{report}"
    );
    assert!(verbose_in_color(&sample::no_gpu()).lines().count() > 20);
}

#[test]
fn eight_gpus_fit_a_terminal_of_24_lines_and_80_columns() {
    for run in [sample::healthy(), sample::fallen_off_the_bus()] {
        let report = human(
            &run,
            HumanStyle {
                width: 80,
                ..HumanStyle::default()
            },
        );
        assert!(report.lines().count() <= 24, "{report}");
        let longest = report.lines().map(|it| it.chars().count()).max();
        assert!(longest <= Some(80), "{longest:?}: {report}");
    }
}

#[test]
fn the_answer_is_the_first_line_and_the_last_repeats_the_verdict() {
    for (name, run) in sample::all() {
        let report = plain(&run);
        let word = crate::report::answer::word(&run);
        for line in [
            report.lines().next(),
            report.lines().rev().find(|it| !it.starts_with("  ")),
        ] {
            let line = line.expect("a line");
            let line = line.strip_prefix("SIMULATED ").unwrap_or(line);
            assert!(line.starts_with(&format!("{word}: ")), "{name}: {line}");
        }
    }
}

#[test]
fn one_obstacle_before_several_checks_is_one_problem_with_their_names() {
    let mut run = sample::no_gpu();
    for finding in &mut run.findings {
        if finding.verdict == Verdict::Error {
            finding.summary = "kernel modules could not be read: no such file".to_owned();
        }
    }
    let report = verbose_in_color(&run);
    let (_, problems) = report.split_once("Problems").expect("problems");
    let (problems, _) = problems.split_once("Machine").expect("details");
    assert_eq!(
        problems.matches("kernel modules could not be read").count(),
        1,
        "{report}"
    );
    assert!(
        report.contains("Checks: driver_age, gpu_number"),
        "{report}"
    );
}

#[test]
fn every_width_shows_every_gpu() {
    let run = sample::fallen_off_the_bus();
    for width in [1, 60, 80, 120, 200, 400] {
        let report = human(
            &run,
            HumanStyle {
                width,
                ..HumanStyle::default()
            },
        );
        for gpu in &run.facts.gpus {
            let address = gpu.pci_address.value().expect("an address");
            assert!(
                report
                    .lines()
                    .any(|line| line.contains(&format!("  {address}  "))),
                "{width}: {report}"
            );
        }
    }
}

/// What JUnit's attributes and elements say, counted by a strict parser.
fn counted(junit: &str) -> (Counts, Counts) {
    let document = roxmltree::Document::parse(junit).expect("well-formed XML");
    let number = |node: roxmltree::Node<'_, '_>, name: &str| -> usize {
        node.attribute(name)
            .and_then(|it| it.parse().ok())
            .unwrap_or_else(|| panic!("no number {name}"))
    };
    let mut by_element = Counts::default();
    let mut by_attribute = Counts::default();
    for suite in document
        .descendants()
        .filter(|it| it.has_tag_name("testsuite"))
    {
        let (fail, error, skip) = (
            number(suite, "failures"),
            number(suite, "errors"),
            number(suite, "skipped"),
        );
        by_attribute.fail += fail;
        by_attribute.error += error;
        by_attribute.skip += skip;
        by_attribute.pass += number(suite, "tests") - fail - error - skip;
    }
    for case in document
        .descendants()
        .filter(|it| it.has_tag_name("testcase"))
    {
        let time: f64 = case
            .attribute("time")
            .and_then(|it| it.parse().ok())
            .expect("a time");
        assert!(time.is_finite() && time >= 0.0, "time is {time}");
        let has = |name| case.children().any(|it| it.has_tag_name(name));
        if has("failure") {
            by_element.fail += 1;
        } else if has("error") {
            by_element.error += 1;
        } else if has("skipped") {
            by_element.skip += 1;
        } else {
            by_element.pass += 1;
        }
    }
    (by_attribute, by_element)
}

/// What a run counts as in JUnit, where a warning passes.
fn expected_counts(run: &Run) -> Counts {
    let counts = run.counts();
    Counts {
        pass: counts.pass + counts.warn,
        warn: 0,
        ..counts
    }
}

#[test]
fn junit_counts_what_json_counts() {
    for (name, run) in sample::all() {
        let (by_attribute, by_element) = counted(&junit(&run).expect("a report"));
        assert_eq!(by_attribute, expected_counts(&run), "{name}");
        assert_eq!(by_element, expected_counts(&run), "{name}");
        assert_eq!(Report::of(&run).counts, run.counts(), "{name}");
    }
}

#[test]
fn junit_names_are_distinct() {
    for (name, run) in sample::all() {
        let text = junit(&run).expect("a report");
        let document = roxmltree::Document::parse(&text).expect("well-formed XML");
        let mut names: Vec<_> = document
            .descendants()
            .filter(|it| it.has_tag_name("testcase"))
            .map(|it| (it.attribute("classname"), it.attribute("name")))
            .collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all, "{name}");
    }
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        proptest::collection::vec(
            prop_oneof![
                Just("]]>".to_owned()),
                Just("]".to_owned()),
                Just(">".to_owned()),
                Just("\u{0}\u{1b}\u{fffe}\u{ffff}\u{85}".to_owned()),
                Just("\r\n::error::\n##[".to_owned()),
                any::<char>().prop_map(String::from),
            ],
            0..12
        )
        .prop_map(|parts| parts.concat()),
    ]
}

fn any_finding() -> impl Strategy<Value = Finding> {
    let verdict = prop_oneof![
        Just(Verdict::Pass),
        Just(Verdict::Skip),
        Just(Verdict::Warn),
        Just(Verdict::Error),
        Just(Verdict::Fail),
    ];
    let gpu = (
        proptest::option::of(any_text()),
        proptest::option::of(any_text()),
        proptest::option::of(any_text()),
    );
    let subject = proptest::option::of(gpu).prop_map(|it| match it {
        None => Subject::Host,
        Some((uuid, pci_address, name)) => Subject::Gpu(GpuSubject {
            uuid,
            pci_address,
            name,
        }),
    });
    let texts = proptest::collection::vec(proptest::option::of(any_text()), 4);
    (
        any_text(),
        subject,
        verdict,
        any_text(),
        texts,
        any::<f64>(),
        any::<bool>(),
    )
        .prop_map(
            |(check, subject, verdict, summary, texts, time_s, busy)| Finding {
                check,
                subject,
                verdict,
                summary,
                expected: texts[0].clone(),
                observed: texts[1].clone(),
                remedy: texts[2].clone(),
                recommended_action: None,
                cause: None,
                evidence: Vec::new(),
                busy,
                overridden: texts[3].clone(),
                time_s,
            },
        )
}

fn any_run() -> impl Strategy<Value = Run> {
    (
        proptest::collection::vec(any_finding(), 0..6),
        proptest::collection::vec(any_text(), 8),
        any::<bool>(),
    )
        .prop_map(|(findings, texts, marked)| {
            let mut run = sample::hostile();
            run.findings = findings;
            run.profile.clone_from(&texts[0]);
            run.facts.collected_at.clone_from(&texts[1]);
            run.facts.host.hostname = Reading::Value(texts[2].clone());
            run.facts.nvml.driver_version = Reading::Value(texts[3].clone());
            run.facts.gpus[0].name = Reading::Value(texts[4].clone());
            run.facts.gpus[1].uuid = Reading::Value(texts[5].clone());
            if marked {
                run.facts.simulated = Some(texts[6].clone());
                run.incomplete = Some(texts[7].clone());
            }
            run
        })
}

proptest! {
    #[test]
    fn junit_is_well_formed_and_counts_right_whatever_the_texts_hold(run in any_run()) {
        let (by_attribute, by_element) = counted(&junit(&run).expect("a report"));
        prop_assert_eq!(by_attribute, expected_counts(&run));
        prop_assert_eq!(by_element, expected_counts(&run));
    }

    #[test]
    fn no_report_for_people_holds_a_control_character(run in any_run()) {
        let page = plain(&run);
        prop_assert!(!page.chars().any(|it| it.is_control() && it != '\n'));
        for line in page.lines() {
            prop_assert!(!line.trim_start().starts_with("::"), "{}", line);
            prop_assert!(!line.contains("##["), "{}", line);
        }
    }

    #[test]
    fn annotations_are_one_line_each_whatever_the_texts_hold(run in any_run()) {
        for line in github_annotations(&run).split('\n').filter(|it| !it.is_empty()) {
            prop_assert!(line.starts_with("::error ") || line.starts_with("::warning ") || line.starts_with("::notice "), "{}", line);
        }
    }

    #[test]
    fn json_can_be_read_whatever_the_texts_hold(run in any_run()) {
        let value: serde_json::Value = serde_json::from_str(&json(&run)).expect("JSON");
        prop_assert_eq!(&value["exit_code"], &serde_json::json!(run.exit_status() as u8));
    }
}
