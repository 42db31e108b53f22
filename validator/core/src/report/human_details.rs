//! The details of the report for a person: every check, the findings that object in full, and the
//! coverage by name.

use super::burn_rows::{BurnRow, burn_rows};
use super::coverage::Coverage;
use super::faults::{Fault, faults};
use super::node_summary::Machine;
use super::page::{Color, Page};
use super::text::one_line;
use super::text_columns::{self, Column, Side};
use crate::diagnosis::gpu_of;
use crate::facts::Facts;
use crate::findings::{Finding, GpuSubject, Run, Subject, Verdict, findings_by};

/// Appends the details to the page.
pub(super) fn details(page: &mut Page, run: &Run) {
    machine(page, run);
    burn(page, run);
    let check_width = run.findings.iter().map(|it| it.check.len()).max();
    let check_width = check_width.unwrap_or_default();
    let host: Vec<&Finding> = run
        .findings
        .iter()
        .filter(|it| it.subject == Subject::Host)
        .collect();
    if !host.is_empty() {
        page.heading("Checks of the host");
        checks(page, &host, check_width);
    }
    for (gpu, findings) in findings_by(&run.findings, Subject::gpu) {
        page.heading(&heading_of(gpu, &run.facts));
        checks(page, &findings, check_width);
    }
    for (environment, findings) in findings_by(&run.findings, Subject::environment) {
        page.heading(&one_line(&environment.to_string()));
        checks(page, &findings, check_width);
    }
    in_full(page, run);
    coverage(page, run);
}

fn machine(page: &mut Page, run: &Run) {
    page.heading("Machine");
    for (what, value) in Machine::of(&run.facts).lines() {
        page.line(&format!("{what:<8}  {value}"));
    }
}

/// One line a GPU and precision: median, minimum, maximum and deviation over time.
fn burn(page: &mut Page, run: &Run) {
    let rows = burn_rows(&run.facts);
    if rows.is_empty() {
        return;
    }
    page.heading("Burn");
    let cells: Vec<[String; BurnRow::HEADS.len()]> = rows.iter().map(BurnRow::cells).collect();
    let column = |(index, head): (usize, &&str)| {
        let cells = cells.iter().map(|row| one_line(&row[index])).collect();
        let side = if index < 2 { Side::Left } else { Side::Right };
        Column::new(head, cells, side)
    };
    let columns = BurnRow::HEADS.iter().enumerate().map(column).collect();
    for line in text_columns::lines(columns, page.style.width) {
        page.line(&line);
    }
}

/// One line a check; skips that several checks share are one entry.
fn checks(page: &mut Page, findings: &[&Finding], check_width: usize) {
    let (skipped_alike, others) = fold_skips(findings);
    for finding in others {
        let mut text = one_line(&finding.summary);
        if let Some(overridden) = &finding.overridden {
            text.extend([" [", &one_line(overridden), "]"]);
        }
        let check = one_line(&finding.check);
        page.verdict_line(finding.verdict, &format!("{check:<check_width$}  {text}"));
    }
    for group in skipped_alike {
        let names: Vec<String> = group.iter().map(|it| one_line(&it.check)).collect();
        let text = format!("{}: {}", one_line(&group[0].summary), names.join(", "));
        page.after_verdict(Verdict::Skip, &text);
    }
}

/// `GPU 0 (0000:53:00.0), NVIDIA H200, serial 165…, GPU-8f0c…`.
fn heading_of(subject: &GpuSubject, facts: &Facts) -> String {
    let gpu = gpu_of(subject, facts);
    let serial = gpu.serial.as_ref().map(|it| format!("serial {it}"));
    let parts = [
        Some(gpu.to_string()),
        gpu.name.clone(),
        serial,
        gpu.uuid.clone(),
    ];
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    one_line(&parts.join(", "))
}

/// Every objection with what was expected and observed.
fn in_full(page: &mut Page, run: &Run) {
    let faults = faults(run);
    if faults.is_empty() {
        return;
    }
    page.heading("Findings in full");
    for fault in &faults {
        fault_in_full(page, fault);
    }
}

fn fault_in_full(page: &mut Page, fault: &Fault<'_>) {
    let finding = fault.finding;
    let names = page.paint(Color::Bold, &fault.names());
    page.verdict_line(finding.verdict, &format!("{names}: {}", fault.summary()));
    for subject in fault.subject_names() {
        page.under_verdict(&format!("on: {subject}"));
    }
    let details = [
        ("expected", finding.expected.as_deref()),
        ("observed", finding.observed.as_deref()),
        ("override", finding.overridden.as_deref()),
        ("do", finding.remedy.as_deref()),
        ("see", fault.documentation_url()),
    ];
    for (what, value) in details {
        if let Some(value) = value {
            page.under_verdict(&format!("{what}: {}", one_line(value)));
        }
    }
}

fn coverage(page: &mut Page, run: &Run) {
    let coverage = Coverage::of(run);
    page.heading(&format!("Coverage: {}", coverage.sentence()));
    for group in &coverage.not_judged {
        let text = format!("{}: {}", group.names(run), one_line(&group.reason));
        page.after_verdict(group.verdict, &text);
    }
}

/// Takes out the skips that at least three checks share the reason of.
fn fold_skips<'a>(findings: &[&'a Finding]) -> (Vec<Vec<&'a Finding>>, Vec<&'a Finding>) {
    const ALIKE: usize = 3;
    let mut groups: Vec<Vec<&Finding>> = Vec::new();
    for finding in findings.iter().filter(|it| it.verdict == Verdict::Skip) {
        match groups
            .iter_mut()
            .find(|it| it[0].summary == finding.summary)
        {
            Some(group) => group.push(finding),
            None => groups.push(vec![finding]),
        }
    }
    groups.retain(|it| it.len() >= ALIKE);
    let folded = |finding: &&Finding| {
        finding.verdict == Verdict::Skip && groups.iter().any(|it| it[0].summary == finding.summary)
    };
    let others = findings.iter().copied().filter(|it| !folded(it)).collect();
    (groups, others)
}
