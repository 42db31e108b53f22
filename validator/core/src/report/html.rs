//! The report as one HTML file: no script, nothing loaded from elsewhere, light or dark as the
//! reader's system is.

use maud::{DOCTYPE, Markup, PreEscaped, html as markup};

use super::answer::sentences;
use super::coverage::Coverage;
use super::faults::{Fault, faults};
use super::node_summary::{Machine, missing};
use super::text::{capitalized, cause_in_words, counted, one_line};
use super::verdict;
use crate::diagnosis::{RootCause, diagnose, name_of};
use crate::findings::{ExitStatus, Finding, Run, Subject, Verdict};

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
                    (machine_table(&machine, run))
                    (missing_list(run))
                    (faults_list(run))
                    (gpu_matrix(run))
                    (super::html_burn::burn(run))
                    (host_table(run))
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
                        (cause_in_words(cause)) ": " strong { (cause.recommended_action) }
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

fn machine_table(machine: &Machine, run: &Run) -> Markup {
    markup! {
        table.machine {
            @for (what, value) in machine.lines() {
                tr { th { (what) } td { (value) } }
            }
            tr { th { "profile" } td { (one_line(&run.profile)) ", level " (run.level.to_string()) } }
            tr {
                th { "collected" }
                td { (one_line(&run.facts.collected_at)) " by gpu-validator " (one_line(&run.facts.validator_version)) }
            }
        }
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
            h2 { "What to look at" }
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

/// Checks down, GPUs across: what one GPU alone has and what all have is seen at a glance.
fn gpu_matrix(run: &Run) -> Markup {
    let of_gpus: Vec<&Finding> = run
        .findings
        .iter()
        .filter(|it| it.subject != Subject::Host)
        .collect();
    let mut gpus: Vec<&Subject> = Vec::new();
    let mut checks: Vec<&str> = Vec::new();
    for finding in &of_gpus {
        if !gpus.contains(&&finding.subject) {
            gpus.push(&finding.subject);
        }
        if !checks.contains(&finding.check.as_str()) {
            checks.push(&finding.check);
        }
    }
    markup! {
        @if !gpus.is_empty() {
            h2 { (counted(gpus.len(), "GPU")) }
            div.scroll {
                table.matrix {
                    thead {
                        tr {
                            th { "check" }
                            @for gpu in &gpus { (gpu_head(gpu, run)) }
                        }
                    }
                    tbody {
                        @for check in &checks {
                            tr {
                                th { (one_line(check)) }
                                @for gpu in &gpus { (cell(&of_gpus, check, gpu)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn gpu_head(subject: &Subject, run: &Run) -> Markup {
    let Subject::Gpu(gpu) = subject else {
        return markup! { th { "host" } };
    };
    let short = gpu
        .pci_address
        .as_deref()
        .or(gpu.uuid.as_deref())
        .unwrap_or("unnamed");
    let title = format!("{}, {subject}", name_of(subject, &run.facts));
    markup! { th title=(one_line(&title)) { (one_line(short)) } }
}

fn cell(findings: &[&Finding], check: &str, gpu: &Subject) -> Markup {
    let finding = findings
        .iter()
        .find(|it| it.check == check && it.subject == *gpu);
    markup! {
        @match finding {
            Some(finding) => td class=(class(finding.verdict)) title=(one_line(&finding.summary)) {
                (finding.verdict.to_string())
            },
            None => td {},
        }
    }
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
            table.host {
                @for finding in findings {
                    tr {
                        td class=(class(finding.verdict)) { (finding.verdict.to_string()) }
                        th { (one_line(&finding.check)) }
                        td { (one_line(&finding.summary)) }
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
                @for group in &coverage.not_judged {
                    tr {
                        td class=(class(group.verdict)) { (group.verdict.to_string()) }
                        td { (one_line(&group.reason)) div.small { (group.names(run)) } }
                    }
                }
            }
        }
    }
}
