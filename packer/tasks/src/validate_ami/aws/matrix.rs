//! Several instance types side by side, and one verdict over them: their JUnit files in one, and a
//! table.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;
use serde_json::{Value, json};

use crate::validate_ami::BadInput;
use validator_remote::reports::Folder;

/// What became of one instance type.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) instance_type: String,
    /// The validator's exit code, or why there is none.
    pub(super) outcome: Result<u8, String>,
}

/// A type names a folder and a run, so each may be there once.
pub(super) fn refuse_repeated(types: &[String]) -> anyhow::Result<()> {
    let mut seen = BTreeSet::new();
    match types.iter().find(|it| !seen.insert(*it)) {
        Some(twice) => Err(BadInput(format!("--matrix names {twice} twice")).into()),
        None => Ok(()),
    }
}

/// Judges every type, `at_once` of them at a time; what came of each, in the order of the types.
pub(super) fn side_by_side<T: Send>(
    types: &[String],
    at_once: usize,
    judge: impl Fn(&str) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let judge_next = || {
        let mut judged = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(instance_type) = types.get(index) else {
                return judged;
            };
            judged.push((index, judge(instance_type)));
        }
    };
    let mut judged: Vec<(usize, T)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..at_once.min(types.len()))
            .map(|_| scope.spawn(judge_next))
            .collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(judged) => judged,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.flatten().collect()
    });
    judged.sort_by_key(|(index, _)| *index);
    judged.into_iter().map(|(_, outcome)| outcome).collect()
}

/// The worst of all: a failure, then what was not judged, then bad input, then busy GPUs.
pub(super) fn exit_code(entries: &[Entry]) -> u8 {
    let codes: Vec<u8> = entries
        .iter()
        .map(|entry| *entry.outcome.as_ref().unwrap_or(&2))
        .collect();
    let worst = [1, 2, 3, 4].into_iter().find(|code| codes.contains(code));
    // Nothing judged is no pass.
    worst.unwrap_or(if codes.is_empty() { 2 } else { 0 })
}

/// Writes `matrix.junit.xml`, `matrix.json` and `matrix.md` next to the folders of the types. A
/// type whose report cannot be merged is one that was not judged.
pub(super) fn write(folder: &Folder, ami: &str, entries: &mut [Entry]) -> anyhow::Result<()> {
    let mut suites = Vec::new();
    for entry in &mut *entries {
        let path = folder
            .path()
            .join(&entry.instance_type)
            .join("report.junit.xml");
        let merged = std::fs::read_to_string(&path)
            .map_err(anyhow::Error::from)
            .and_then(|text| renamed_suites(&text, &entry.instance_type));
        match merged {
            Ok(merged) => suites.extend(merged),
            Err(error) if entry.outcome.is_ok() => {
                entry.outcome = Err(format!("{}: {error:#}", path.display()));
            }
            // Without a report, and why there is none is known.
            Err(_) => {}
        }
        if let Err(why) = &entry.outcome {
            suites.push(missing(&entry.instance_type, why));
        }
    }
    let entries = &*entries;
    let files = [
        ("matrix.junit.xml", junit(ami, &suites)),
        ("matrix.json", format!("{:#}\n", summary(ami, entries))),
        ("matrix.md", table(ami, entries)),
    ];
    for (name, text) in files {
        let path = folder.path().join(name);
        write_whole(&path, &text)
            .with_context(|| format!("{} could not be written", path.display()))?;
    }
    Ok(())
}

fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let unfinished = path.with_extension("unfinished");
    std::fs::write(&unfinished, text)?;
    std::fs::rename(unfinished, path)
}

/// A test suite as text, with its counts.
#[derive(Debug)]
struct Suite {
    text: String,
    counts: [u64; 4],
}

const COUNTS: [&str; 4] = ["tests", "failures", "errors", "skipped"];

/// The suites of one report, word for word but for the instance type in front of their names.
fn renamed_suites(junit: &str, instance_type: &str) -> anyhow::Result<Vec<Suite>> {
    let document = roxmltree::Document::parse(junit)?;
    let mut suites = Vec::new();
    for suite in document
        .root_element()
        .children()
        .filter(|it| it.has_tag_name("testsuite"))
    {
        let mut counts = [0; 4];
        for (count, name) in counts.iter_mut().zip(COUNTS) {
            let text = suite.attribute(name).unwrap_or("0");
            *count = text
                .parse()
                .with_context(|| format!("{name}=\"{text}\" is not a number"))?;
        }
        let name = suite
            .attribute_node("name")
            .context("a test suite has no name")?;
        let (whole, at) = (suite.range(), name.range_value().start);
        let (before, after) = (&junit[whole.start..at], &junit[at..whole.end]);
        suites.push(Suite {
            text: format!("{before}{}: {after}", escaped(instance_type)),
            counts,
        });
    }
    anyhow::ensure!(!suites.is_empty(), "no test suite in it");
    Ok(suites)
}

/// An instance type without a verdict is one test case that could not be judged.
fn missing(instance_type: &str, why: &str) -> Suite {
    let (name, why) = (escaped(instance_type), escaped(why));
    Suite {
        text: format!(
            "<testsuite name=\"{name}: instance\" tests=\"1\" failures=\"0\" errors=\"1\" skipped=\"0\" time=\"0\">\n  \
             <testcase name=\"validated\" classname=\"gpu-validator.instance\" time=\"0\">\n   \
             <error type=\"error\" message=\"{why}\"/>\n  </testcase>\n </testsuite>"
        ),
        counts: [1, 0, 1, 0],
    }
}

fn junit(ami: &str, suites: &[Suite]) -> String {
    let mut text = format!(
        "<?xml version=\"1.0\" encoding=\"utf-8\"?>\n<testsuites name=\"{}\"",
        escaped(ami)
    );
    for (index, name) in COUNTS.iter().enumerate() {
        let sum: u64 = suites.iter().map(|suite| suite.counts[index]).sum();
        let _ = write!(text, " {name}=\"{sum}\"");
    }
    text.push_str(">\n");
    for suite in suites {
        let _ = writeln!(text, " {}", suite.text);
    }
    text + "</testsuites>\n"
}

fn summary(ami: &str, entries: &[Entry]) -> Value {
    let types: Vec<Value> = entries
        .iter()
        .map(|entry| match &entry.outcome {
            Ok(code) => json!({"instance_type": entry.instance_type, "exit_code": code}),
            Err(why) => json!({"instance_type": entry.instance_type, "exit_code": 2, "error": why}),
        })
        .collect();
    json!({"ami": ami, "exit_code": exit_code(entries), "instance_types": types})
}

fn table(ami: &str, entries: &[Entry]) -> String {
    let mut text = format!("# {ami}\n\n| instance type | verdict |\n|---|---|\n");
    for entry in entries {
        let verdict = match &entry.outcome {
            Ok(code) => verdict(*code).to_owned(),
            Err(why) => format!("not judged: {}", why.replace(['\n', '|'], " ")),
        };
        let _ = writeln!(text, "| {} | {verdict} |", entry.instance_type);
    }
    text
}

/// One word for each exit code of ARCHITECTURE.md.
pub(super) fn verdict(code: u8) -> &'static str {
    match code {
        0 => "pass",
        1 => "fail",
        3 => "bad input",
        4 => "busy",
        _ => "not judged",
    }
}

/// For an attribute. Control characters, which XML cannot hold at all, become spaces.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            _ if character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}') => {
                escaped.push(' ');
            }
            _ => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::{
        Entry, exit_code, junit, missing, refuse_repeated, renamed_suites, side_by_side, table,
    };

    fn types(names: &[&str]) -> Vec<String> {
        names.iter().map(|it| (*it).to_owned()).collect()
    }

    #[test]
    fn types_are_judged_side_by_side_and_told_in_their_order() {
        // Each pair waits for its other half: one after another, the first would wait for ever.
        let (pair, running, most) = (Barrier::new(2), AtomicUsize::new(0), AtomicUsize::new(0));
        let outcomes = side_by_side(&types(&["a", "b", "c", "d"]), 2, |it| {
            let now = running.fetch_add(1, Ordering::SeqCst) + 1;
            most.fetch_max(now, Ordering::SeqCst);
            pair.wait();
            running.fetch_sub(1, Ordering::SeqCst);
            it.to_owned()
        });
        assert_eq!(outcomes, types(&["a", "b", "c", "d"]));
        assert_eq!(most.into_inner(), 2);
        assert!(side_by_side(&[], 4, |_| ()).is_empty());
    }

    #[test]
    fn a_type_that_is_named_twice_is_refused() {
        assert!(refuse_repeated(&types(&["g5.xlarge", "g5.2xlarge"])).is_ok());
        let error = refuse_repeated(&types(&["g5.xlarge", "g6.xlarge", "g5.xlarge"]));
        assert_eq!(
            error.expect_err("twice").to_string(),
            "--matrix names g5.xlarge twice"
        );
    }

    fn entry(instance_type: &str, outcome: Result<u8, &str>) -> Entry {
        Entry {
            instance_type: instance_type.to_owned(),
            outcome: outcome.map_err(str::to_owned),
        }
    }

    #[test]
    fn one_verdict_is_the_worst_of_all() {
        let code = |outcomes: &[Result<u8, &str>]| {
            exit_code(
                &outcomes
                    .iter()
                    .map(|it| entry("g5.xlarge", *it))
                    .collect::<Vec<_>>(),
            )
        };
        assert_eq!(code(&[Ok(0), Ok(0)]), 0);
        assert_eq!(code(&[Ok(0), Ok(4)]), 4);
        assert_eq!(code(&[Ok(4), Err("no capacity")]), 2);
        assert_eq!(code(&[Ok(2), Ok(1)]), 1);
        assert_eq!(code(&[Ok(3), Ok(3)]), 3);
        assert_eq!(code(&[]), 2, "nothing judged is no pass");
    }

    #[test]
    fn suites_are_merged_word_for_word_and_counted() {
        let golden = include_str!("../../../../../tests/golden/failing.junit.xml");
        let mut suites = renamed_suites(golden, "g5.xlarge").expect("suites");
        let own = suites.len();
        suites.push(missing(
            "p5.48xlarge",
            "InsufficientInstanceCapacity: \"none\" <free> & \u{1b}[1m",
        ));
        let merged = junit("ami-1", &suites);
        let document = roxmltree::Document::parse(&merged).expect("well-formed");
        let root = document.root_element();
        let count = |name: &str| {
            root.attribute(name)
                .and_then(|text| text.parse::<usize>().ok())
        };
        let elements = |tag: &str| root.descendants().filter(|it| it.has_tag_name(tag)).count();
        assert_eq!(elements("testsuite"), own + 1);
        assert_eq!(count("tests"), Some(elements("testcase")));
        assert_eq!(count("failures"), Some(elements("failure")));
        assert_eq!(count("errors"), Some(elements("error")));
        assert_eq!(count("skipped"), Some(elements("skipped")));
        let names: Vec<_> = root
            .children()
            .filter_map(|it| it.attribute("name"))
            .collect();
        assert_eq!(
            (names[0], names[own]),
            ("g5.xlarge: host", "p5.48xlarge: instance")
        );
    }

    #[test]
    fn a_report_without_suites_is_refused() {
        assert!(renamed_suites("<testsuites/>", "g5.xlarge").is_err());
        assert!(renamed_suites("cut sho", "g5.xlarge").is_err());
    }

    #[test]
    fn the_table_names_what_was_not_judged() {
        let entries = [
            entry("g5.xlarge", Ok(0)),
            entry("p5.48xlarge", Err("no capacity | there")),
        ];
        assert!(table("ami-1", &entries).ends_with(
            "| g5.xlarge | pass |\n| p5.48xlarge | not judged: no capacity   there |\n"
        ));
    }
}
