//! The details of the report for a person: every check, the findings that object in full, and the
//! coverage by name.

use super::coverage::Coverage;
use super::faults::{Fault, faults};
use super::node_summary::Machine;
use super::page::{Color, Page};
use super::text::one_line;
use crate::diagnosis::gpu_of;
use crate::facts::Facts;
use crate::findings::{Finding, GpuSubject, Run, Subject, Verdict};

/// Appends the details to the page.
pub(super) fn details(page: &mut Page, run: &Run) {
    machine(page, run);
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
    for (gpu, findings) in by_gpu(&run.findings) {
        page.heading(&heading_of(gpu, &run.facts));
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

/// Findings by GPU, in their order.
fn by_gpu(findings: &[Finding]) -> Vec<(&GpuSubject, Vec<&Finding>)> {
    let mut gpus: Vec<(&GpuSubject, Vec<&Finding>)> = Vec::new();
    for finding in findings {
        let Subject::Gpu(gpu) = &finding.subject else {
            continue;
        };
        match gpus.iter_mut().find(|(known, _)| *known == gpu) {
            Some((_, of_gpu)) => of_gpu.push(finding),
            None => gpus.push((gpu, vec![finding])),
        }
    }
    gpus
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
