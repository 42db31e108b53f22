//! The report as one HTML file: no script, nothing loaded from elsewhere, light or dark as the
//! reader's system is.

use maud::{DOCTYPE, Markup, PreEscaped, html as markup};

use super::answer::sentences;
use super::coverage::Coverage;
use super::faults::{Fault, faults};
use super::gpu_table::{GpuGrid, GpuGridRow};
use super::node_summary::{Machine, missing};
use super::text::{capitalized, cause_in_words, counted, one_line};
use super::verdict;
use crate::diagnosis::{RootCause, diagnose, name_of};
use crate::findings::{EnvironmentSubject, ExitStatus, Finding, Run, Subject, Verdict, gpu_count};

const STYLE: &str = include_str!("html.css");

/// The HTML report.
pub fn html(run: &Run) -> String {
    let status = run.exit_status();
    let machine = Machine::of(&run.facts);
    let hostname = machine.hostname.as_deref().unwrap_or("this machine");
    let simulated = run.facts.simulated.is_some();
    let causes = diagnose(run);
    markup! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (verdict::word(status)) ": GPU validation of " (one_line(hostname)) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    @for banner in verdict::banners(run) {
                        p.banner { (banner) }
                    }
                    header class=(status_class(status)) {
                        h1 { @if simulated { "SIMULATED " } (verdict::word(status)) }
                        p { (capitalized(&sentences(run, &causes))) }
                        p.small { "exit code " (status as u8) }
                    }
                    (diagnosis_list(&causes))
                    (gpu_table(run, &causes))
                    (machine_table(&machine, run))
                    (missing_list(run))
                    (faults_list(run))
                    (gpu_matrix(run))
                    (super::html_burn::burn(run))
                    (super::html_allocation::allocation(&run.facts))
                    (host_table(run))
                    (findings_table(run))
                    (environment_table(run))
                    (coverage_list(run))
                }
            }
        }
    }
    .into_string()
}

fn diagnosis_list(causes: &[RootCause]) -> Markup {
    markup! {
        @if !causes.is_empty() {
            h2 { "Diagnosis" }
            ol {
                @for cause in causes {
                    li class=(class(cause.verdict)) {
                        (cause_in_words(cause)) ": " strong { (cause.recommended_action.words()) }
                    }
                }
            }
        }
    }
}

fn status_class(status: ExitStatus) -> &'static str {
    match status {
        ExitStatus::Passed => "verdict pass",
        ExitStatus::Failed => "verdict fail",
        _ => "verdict error",
    }
}

fn class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Warn => "warn",
        Verdict::Fail => "fail",
        Verdict::Error => "error",
        Verdict::Skip => "skip",
    }
}

/// One row a GPU, as at the terminal, with everything that was read.
fn gpu_table(run: &Run, causes: &[RootCause]) -> Markup {
    let grid = GpuGrid::of(run, causes);
    let [before, after] = &grid.heads;
    markup! {
        @if !grid.rows.is_empty() {
            h2 { "GPUs" }
            div.scroll tabindex="0" role="region" aria-label="GPUs" {
                table.gpus {
                    thead {
                        tr {
                            @for head in before { th scope="col" { (head) } }
                            th scope="col" { "Verdict" }
                            @for head in after { th scope="col" { (head) } }
                        }
                    }
                    tbody { @for row in &grid.rows { (gpu_row(row)) } }
                }
            }
        }
    }
}

fn gpu_row(row: &GpuGridRow) -> Markup {
    let [before, after] = &row.cells;
    markup! {
        tr {
            @for (index, cell) in before.iter().enumerate() {
                @if index == 0 { th scope="row" { (cell) } } @else { td { (cell) } }
            }
            td class=(class(row.verdict)) { (row.word) }
            @for cell in after { td { (cell) } }
        }
    }
}

fn machine_table(machine: &Machine, run: &Run) -> Markup {
    let timings = durations(run);
    markup! {
        h2 { "Node" }
        table.machine {
            @for (what, value) in machine.lines() {
                tr { th scope="row" { (what) } td { (value) } }
            }
            tr { th scope="row" { "profile" } td { (one_line(&run.profile)) ", level " (run.level.to_string()) } }
            tr {
                th scope="row" { "collected" }
                td { (one_line(&run.facts.collected_at)) " by gpu-validator " (one_line(&run.facts.validator_version)) }
            }
            @if !timings.is_empty() { tr { th scope="row" { "duration" } td { (timings) } } }
        }
    }
}

/// `12.40 s: host 0.04 s, nvml 0.18 s`; parts overlap, so that they do not add up.
fn durations(run: &Run) -> String {
    const TOTAL: &str = "total";
    let timings = &run.facts.timings_ms;
    let seconds = |ms: &f64| format!("{:.2} s", ms / 1000.0);
    let parts = timings.iter().filter(|(what, _)| what.as_str() != TOTAL);
    let parts = parts.map(|(what, ms)| format!("{} {}", one_line(what), seconds(ms)));
    let parts = parts.collect::<Vec<_>>().join(", ");
    match timings.get(TOTAL).map(seconds) {
        Some(total) => format!("{total}: {parts}"),
        None => parts,
    }
}

fn missing_list(run: &Run) -> Markup {
    let missing = missing(&run.facts);
    markup! {
        @if !missing.is_empty() {
            h2 { "Missing on this machine" }
            ul { @for line in &missing { li { (line) } } }
        }
    }
}

fn faults_list(run: &Run) -> Markup {
    let faults = faults(run);
    markup! {
        @if !faults.is_empty() {
            h2 { "Problems" }
            @for fault in &faults { (fault_card(fault)) }
        }
    }
}

fn fault_card(fault: &Fault<'_>) -> Markup {
    let finding = fault.finding;
    let details = [
        ("expected", &finding.expected),
        ("observed", &finding.observed),
        ("override", &finding.overridden),
        ("do", &finding.remedy),
    ];
    markup! {
        section class={ "fault " (class(finding.verdict)) } {
            h3 { span.mark { (finding.verdict.to_string()) } " " (fault.names()) }
            p { (capitalized(&fault.summary())) }
            dl {
                @if !fault.subject_names().is_empty() {
                    dt { "on" }
                    dd { @for subject in fault.subject_names() { div { (subject) } } }
                }
                @for (what, value) in details {
                    @if let Some(value) = value { dt { (what) } dd { (one_line(value)) } }
                }
                @if let Some(url) = fault.documentation_url() {
                    dt { "see" } dd { a href=(url) { (url) } }
                }
            }
        }
    }
}

/// Checks down, GPUs across: what one GPU alone has and what all have is seen at a glance. Each
/// cell links to its finding.
fn gpu_matrix(run: &Run) -> Markup {
    let rows = finding_rows(run);
    let mut gpus: Vec<&Subject> = Vec::new();
    let mut checks: Vec<&str> = Vec::new();
    for row in &rows {
        if !checks.contains(&row.finding.check.as_str()) {
            checks.push(&row.finding.check);
        }
    }
    for finding in run.findings.iter().filter(|it| it.subject.is_gpu()) {
        if !gpus.contains(&&finding.subject) {
            gpus.push(&finding.subject);
        }
    }
    markup! {
        @if !gpus.is_empty() {
            h2 { "Checks of " (counted(gpus.len(), "GPU")) }
            div.scroll tabindex="0" role="region" aria-label="Checks of GPUs" {
                table.matrix {
                    thead {
                        tr {
                            th scope="col" { "check" }
                            @for gpu in &gpus { (gpu_head(gpu, run)) }
                        }
                    }
                    tbody {
                        @for check in &checks {
                            tr {
                                th scope="row" { (one_line(check)) }
                                @for gpu in &gpus { (cell(&rows, check, gpu)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn gpu_head(subject: &Subject, run: &Run) -> Markup {
    let name = name_of(subject, &run.facts);
    let title = format!("{name}, {subject}");
    markup! { th scope="col" title=(one_line(&title)) { (one_line(&name)) } }
}

fn cell(rows: &[FindingRow<'_>], check: &str, gpu: &Subject) -> Markup {
    let found = rows
        .iter()
        .find(|it| it.finding.check == check && it.subjects.contains(&gpu));
    markup! {
        @match found {
            Some(row) => td class=(class(row.finding.verdict)) title=(one_line(&row.finding.summary)) {
                a href={ "#" (row.id) } { (row.finding.verdict.to_string()) }
            },
            None => td {},
        }
    }
}

/// What a check found on every GPU of which it says the same.
struct FindingRow<'r> {
    /// Of its place in the page.
    id: String,
    finding: &'r Finding,
    subjects: Vec<&'r Subject>,
}

fn finding_rows(run: &Run) -> Vec<FindingRow<'_>> {
    let mut rows: Vec<FindingRow<'_>> = Vec::new();
    for finding in run.findings.iter().filter(|it| it.subject.is_gpu()) {
        let says_the_same = |it: &&mut FindingRow<'_>| {
            it.finding.check == finding.check
                && it.finding.verdict == finding.verdict
                && it.finding.summary == finding.summary
                && it.finding.overridden == finding.overridden
        };
        match rows.iter_mut().find(says_the_same) {
            Some(row) => row.subjects.push(&finding.subject),
            None => rows.push(FindingRow {
                id: format!("finding-{}", rows.len() + 1),
                finding,
                subjects: vec![&finding.subject],
            }),
        }
    }
    rows
}

/// What the cells of the matrix link to.
fn findings_table(run: &Run) -> Markup {
    let rows = finding_rows(run);
    let gpus = gpu_count(&run.findings);
    markup! {
        @if !rows.is_empty() {
            h2 { "Findings of GPUs" }
            div.scroll tabindex="0" role="region" aria-label="Findings of GPUs" {
                table.host {
                    thead { tr { @for head in ["verdict", "check", "GPU", "finding"] { th scope="col" { (head) } } } }
                    tbody {
                        @for row in &rows {
                            tr id=(row.id) {
                                td class=(class(row.finding.verdict)) { (row.finding.verdict.to_string()) }
                                th scope="row" { (one_line(&row.finding.check)) }
                                td { (names_of(&row.subjects, gpus, run)) }
                                td.text {
                                    (one_line(&row.finding.summary))
                                    @if let Some(remedy) = &row.finding.remedy { div.small { (one_line(remedy)) } }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn names_of(subjects: &[&Subject], gpus: usize, run: &Run) -> String {
    if subjects.len() > 1 && subjects.len() == gpus {
        return format!("all {gpus}");
    }
    let names = subjects.iter().map(|it| name_of(it, &run.facts));
    one_line(&names.collect::<Vec<_>>().join(", "))
}

fn host_table(run: &Run) -> Markup {
    let findings: Vec<&Finding> = run
        .findings
        .iter()
        .filter(|it| it.subject == Subject::Host)
        .collect();
    markup! {
        @if !findings.is_empty() {
            h2 { "Host" }
            div.scroll tabindex="0" role="region" aria-label="Findings of the host" {
                table.host {
                    thead { tr { @for head in ["verdict", "check", "finding"] { th scope="col" { (head) } } } }
                    tbody {
                        @for finding in findings {
                            tr {
                                td class=(class(finding.verdict)) { (finding.verdict.to_string()) }
                                th scope="row" { (one_line(&finding.check)) }
                                td.text { (one_line(&finding.summary)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn environment_table(run: &Run) -> Markup {
    let findings: Vec<(&EnvironmentSubject, &Finding)> = run
        .findings
        .iter()
        .filter_map(|it| match &it.subject {
            Subject::Environment(environment) => Some((environment, it)),
            _ => None,
        })
        .collect();
    markup! {
        @if !findings.is_empty() {
            h2 { "Python environments" }
            table.host {
                thead { tr { @for head in ["verdict", "check", "finding"] { th scope="col" { (head) } } } }
                @for (environment, finding) in findings {
                    tr {
                        td class=(class(finding.verdict)) { (finding.verdict.to_string()) }
                        th scope="row" { (one_line(&finding.check)) }
                        td.text { (one_line(&environment.path)) ": " (one_line(&finding.summary)) }
                    }
                }
            }
        }
    }
}

fn coverage_list(run: &Run) -> Markup {
    let coverage = Coverage::of(run);
    markup! {
        h2 { "Coverage" }
        p { (coverage.sentence()) "." }
        @if !coverage.not_judged.is_empty() {
            table.host {
                thead { tr { @for head in ["verdict", "reason and checks"] { th scope="col" { (head) } } } }
                @for group in &coverage.not_judged {
                    tr {
                        td class=(class(group.verdict)) { (group.verdict.to_string()) }
                        td.text { (one_line(&group.reason)) div.small { (group.names(run)) } }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::{STYLE, html};
    use crate::report::sample;

    /// The variables of the light and of the dark theme.
    fn themes() -> [BTreeMap<String, [f64; 3]>; 2] {
        let mut blocks = STYLE.split(":root {").skip(1);
        let mut theme = || {
            let block = blocks.next().and_then(|it| it.split('}').next());
            let declarations = block.expect("a theme").split(';');
            let color = |declaration: &str| {
                let (name, value) = declaration.trim().split_once(": ")?;
                Some((name.to_owned(), rgb(value)))
            };
            declarations.filter_map(color).collect()
        };
        [theme(), theme()]
    }

    /// `#1c2330`, or `#fff`.
    fn rgb(hex: &str) -> [f64; 3] {
        let digits: Vec<u8> = hex
            .trim_start_matches('#')
            .bytes()
            .filter_map(|it| u8::try_from(char::from(it).to_digit(16)?).ok())
            .collect();
        let channel = |index: usize| match digits.len() {
            3 => digits[index] * 17,
            _ => digits[index * 2] * 16 + digits[index * 2 + 1],
        };
        [0, 1, 2].map(|it| f64::from(channel(it)) / 255.0)
    }

    // Source: WCAG 2.2, definitions of relative luminance and contrast ratio.
    fn contrast(one: [f64; 3], other: [f64; 3]) -> f64 {
        let luminance = |color: [f64; 3]| {
            let linear = color.map(|it| {
                if it <= 0.04045 {
                    it / 12.92
                } else {
                    ((it + 0.055) / 1.055).powf(2.4)
                }
            });
            0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        };
        let (one, other) = (luminance(one), luminance(other));
        (one.max(other) + 0.05) / (one.min(other) + 0.05)
    }

    // Source: WCAG 2.2, success criteria 1.4.3 (text, 4.5) and 1.4.11 (graphics, 3).
    #[test]
    fn text_and_lines_have_the_contrast_of_level_aa_in_both_themes() {
        for theme in themes() {
            let meets = |front: &str, back: &str, minimum: f64| {
                let ratio = contrast(theme[front], theme[back]);
                assert!(ratio >= minimum, "{front} on {back}: {ratio:.2}");
            };
            for verdict in ["pass", "warn", "fail", "error", "skip"] {
                let (front, back) = (format!("--{verdict}"), format!("--{verdict}-back"));
                meets(&front, &back, 4.5);
                meets("--text", &back, 4.5);
            }
            for back in ["--back", "--card"] {
                meets("--text", back, 4.5);
                meets("--dim", back, 4.5);
            }
            // The name of a limit.
            meets("--fail", "--card", 4.5);
            for line in 0..8 {
                meets(&format!("--g{line}"), "--card", 3.0);
            }
        }
    }

    #[test]
    fn every_link_within_a_page_has_its_target_and_every_id_is_unique() {
        for (name, run) in sample::all() {
            let page = html(&run);
            let links: Vec<&str> = page
                .split("href=\"#")
                .skip(1)
                .filter_map(|it| it.split('"').next())
                .collect();
            for link in &links {
                let targets = page.matches(&format!("id=\"{link}\"")).count();
                assert_eq!(targets, 1, "{name}: {link}");
            }
            let cells = run.findings.iter().filter(|it| it.subject.is_gpu());
            // Two findings of one check on one GPU share a cell.
            assert!(links.len() <= cells.clone().count(), "{name}");
            assert_eq!(links.is_empty(), cells.count() == 0, "{name}");
            assert!(!page.contains("<script"), "{name}");
            assert!(!page.contains("<th>"), "{name}: a head without a scope");
        }
    }
}
