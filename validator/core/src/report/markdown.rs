//! The report as GitHub-flavoured Markdown: a job's summary, a comment, a ticket.

use std::fmt::Write as _;

use super::answer::sentences;
use super::burn_rows::{BurnRow, burn_rows};
use super::coverage::Coverage;
use super::faults::faults;
use super::node_summary::{Machine, missing};
use super::text::cause_in_words;
use super::text::{capitalized, counted, counted_subjects, markdown as escaped};
use super::verdict;
use crate::diagnosis::{RootCause, diagnose};
use crate::findings::{Run, Subject, Verdict};

/// The Markdown report: the verdict first, then what is not green, the rest folded.
pub fn markdown(run: &Run) -> String {
    let mut page = String::new();
    let status = run.exit_status();
    let _ = writeln!(
        page,
        "## {} GPU validation: {}{}\n",
        verdict_mark(run),
        if run.facts.simulated.is_some() {
            "SIMULATED "
        } else {
            ""
        },
        verdict::word(status)
    );
    for banner in verdict::banners(run) {
        let _ = writeln!(page, "> **{}**\n", escaped(&banner));
    }
    let causes = diagnose(run);
    let answer = escaped(&capitalized(&sentences(run, &causes)));
    let _ = writeln!(page, "{answer} Exit code {}.\n", status as u8);
    write_diagnosis(&mut page, &causes);
    for (what, value) in Machine::of(&run.facts).lines() {
        let _ = writeln!(page, "- {what}: {}", escaped(&value));
    }
    let _ = writeln!(
        page,
        "- profile: {}, level {}\n",
        escaped(&run.profile),
        run.level
    );
    write_missing(&mut page, run);
    write_faults(&mut page, run);
    write_burn(&mut page, run);
    write_coverage(&mut page, run);
    write_all(&mut page, run);
    page
}

fn write_diagnosis(page: &mut String, causes: &[RootCause]) {
    for (number, cause) in causes.iter().enumerate() {
        let _ = writeln!(
            page,
            "{}. **{}**: {} (recommended action: {})",
            number + 1,
            cause.verdict,
            escaped(&cause_in_words(cause)),
            cause.recommended_action.words()
        );
    }
    if !causes.is_empty() {
        page.push('\n');
    }
}

fn verdict_mark(run: &Run) -> &'static str {
    match run.exit_status() as u8 {
        0 => "\u{2705}",
        1 => "\u{274c}",
        _ => "\u{26a0}\u{fe0f}",
    }
}

fn write_missing(page: &mut String, run: &Run) {
    let missing = missing(&run.facts);
    if missing.is_empty() {
        return;
    }
    page.push_str("Missing on this machine:\n\n");
    for line in missing {
        let _ = writeln!(page, "- {}", escaped(&line));
    }
    page.push('\n');
}

fn write_faults(page: &mut String, run: &Run) {
    let faults = faults(run);
    if faults.is_empty() {
        return;
    }
    page.push_str(
        "| | check | on | what | expected | observed | do |\n|---|---|---|---|---|---|---|\n",
    );
    for fault in &faults {
        let finding = fault.finding;
        let name = match fault.documentation_url() {
            Some(url) => format!("[{}]({url})", escaped(&finding.check)),
            None => escaped(&fault.names()),
        };
        let mut subjects: Vec<String> =
            fault.subject_names().iter().map(|it| escaped(it)).collect();
        if subjects.is_empty() {
            subjects.push("host".to_owned());
        }
        let cell = |value: &Option<String>| value.as_deref().map(escaped).unwrap_or_default();
        let mut what = escaped(&fault.summary());
        if let Some(overridden) = &finding.overridden {
            let _ = write!(what, "<br>{}", escaped(overridden));
        }
        let _ = writeln!(
            page,
            "| **{}** | {name} | {} | {what} | {} | {} | {} |",
            finding.verdict,
            subjects.join("<br>"),
            cell(&finding.expected),
            cell(&finding.observed),
            cell(&finding.remedy),
        );
    }
    page.push('\n');
}

fn write_burn(page: &mut String, run: &Run) {
    let rows = burn_rows(&run.facts);
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(page, "| {} |", BurnRow::HEADS.join(" | "));
    let _ = writeln!(page, "|{}", "---|".repeat(BurnRow::HEADS.len()));
    for row in &rows {
        let cells: Vec<String> = row.cells().iter().map(|it| escaped(it)).collect();
        let _ = writeln!(page, "| {} |", cells.join(" | "));
    }
    page.push('\n');
}

fn write_coverage(page: &mut String, run: &Run) {
    let coverage = Coverage::of(run);
    let _ = writeln!(page, "Coverage: {}.\n", coverage.sentence());
    if coverage.not_judged.is_empty() {
        return;
    }
    page.push_str("<details><summary>Not judged, and why</summary>\n\n");
    for group in &coverage.not_judged {
        let _ = writeln!(
            page,
            "- {}: {}: {}",
            group.verdict,
            escaped(&group.reason),
            escaped(&group.names(run))
        );
    }
    page.push_str("\n</details>\n\n");
}

fn write_all(page: &mut String, run: &Run) {
    let passed = run.counts().pass;
    if passed == 0 {
        return;
    }
    let _ = writeln!(
        page,
        "<details><summary>{} passed</summary>\n",
        counted(passed, "test case")
    );
    let mut checks: Vec<(&str, Vec<&Subject>, &str)> = Vec::new();
    for finding in run.findings.iter().filter(|it| it.verdict == Verdict::Pass) {
        match checks.iter_mut().find(|(id, _, _)| *id == finding.check) {
            Some((_, subjects, _)) => subjects.push(&finding.subject),
            None => checks.push((&finding.check, vec![&finding.subject], &finding.summary)),
        }
    }
    for (id, subjects, summary) in checks {
        let line = match subjects.len() {
            1 => format!("- {}: {}", escaped(id), escaped(summary)),
            _ => format!("- {} ({})", escaped(id), counted_subjects(subjects)),
        };
        let _ = writeln!(page, "{line}");
    }
    page.push_str("\n</details>\n");
}
