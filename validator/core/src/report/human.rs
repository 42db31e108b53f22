//! The report for a person at a terminal or in a build log.

use super::coverage::{Coverage, NotJudged};
use super::faults::{Fault, faults};
use super::node_summary::{Machine, missing};
use super::text::{cause_in_words, counted, one_line, wrapped};
use super::verdict;
use crate::diagnosis::diagnose;
use crate::findings::{ExitStatus, Finding, GpuSubject, Run, Subject, Verdict};

/// Columns after which lists of names are wrapped.
const WIDTH: usize = 110;

/// How the report for a person looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct HumanStyle {
    /// ANSI colours.
    pub color: bool,
    /// Every check of every GPU on a line of its own.
    pub verbose: bool,
}

/// The report for a person: one line a check, GPUs that fare alike folded, then what is wrong, the coverage statement
/// and the verdict.
pub fn human(run: &Run, style: HumanStyle) -> String {
    let mut report = Page {
        text: String::new(),
        style,
        check_width: run
            .findings
            .iter()
            .map(|it| it.check.len())
            .max()
            .unwrap_or_default(),
    };
    for banner in verdict::banners(run) {
        report.line(&paint(style, Color::Yellow, &banner));
    }
    report.head(run);
    report.host(run);
    report.gpus(run);
    report.faults(run);
    report.diagnosis(run);
    report.missing(run);
    report.coverage(run);
    report.verdict(run);
    report.text
}

struct Page {
    text: String,
    style: HumanStyle,
    check_width: usize,
}

impl Page {
    fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    fn heading(&mut self, heading: &str) {
        let heading = paint(self.style, Color::Bold, heading);
        self.text.push('\n');
        self.line(&heading);
    }

    fn head(&mut self, run: &Run) {
        for (what, value) in Machine::of(&run.facts).lines() {
            self.line(&format!("{what:<8}  {value}"));
        }
        self.line(&format!(
            "{:<8}  {}, level {}, gpu-validator {}",
            "profile",
            one_line(&run.profile),
            run.level,
            one_line(&run.facts.validator_version)
        ));
    }

    fn finding(&mut self, finding: &Finding) {
        let mut text = one_line(&finding.summary);
        if let Some(overridden) = &finding.overridden {
            text.extend([" [", &one_line(overridden), "]"]);
        }
        let width = self.check_width;
        self.line(&format!(
            "  {}  {:<width$}  {text}",
            verdict_word(self.style, finding.verdict),
            one_line(&finding.check),
        ));
    }

    fn host(&mut self, run: &Run) {
        let findings: Vec<&Finding> = run
            .findings
            .iter()
            .filter(|it| it.subject == Subject::Host)
            .collect();
        if findings.is_empty() {
            return;
        }
        self.heading("host");
        let (skipped_alike, others) = fold_skips(&findings);
        for finding in others {
            self.finding(finding);
        }
        self.folded_skips(&skipped_alike);
    }

    /// Skips that many checks share (no GPU, turned off by the level) as one entry.
    fn folded_skips(&mut self, groups: &[Vec<&Finding>]) {
        for group in groups {
            let names: Vec<String> = group.iter().map(|it| one_line(&it.check)).collect();
            let text = format!("{}: {}", one_line(&group[0].summary), names.join(", "));
            let word = verdict_word(self.style, Verdict::Skip);
            let indent = " ".repeat(2 + VERDICT_WIDTH + 2);
            let lines = wrapped(&text, &indent, WIDTH);
            self.line(&format!("  {word}  {}", lines.trim_start()));
        }
    }

    fn gpus(&mut self, run: &Run) {
        let mut gpus = by_gpu(&run.findings);
        if gpus.is_empty() {
            return;
        }
        self.heading(if gpus.len() == 1 { "GPU" } else { "GPUs" });
        if self.style.verbose || gpus.len() == 1 {
            for (gpu, findings) in &gpus {
                self.line(&gpu_name(gpu));
                let (skipped_alike, others) = fold_skips(findings);
                for finding in others {
                    self.finding(finding);
                }
                self.folded_skips(&skipped_alike);
            }
            return;
        }
        let common = take_common(&mut gpus);
        if !common.is_empty() {
            self.line(&format!("all {}", counted(gpus.len(), "GPU")));
            for finding in &common {
                self.finding(finding);
            }
        }
        for group in alike(&gpus) {
            self.gpu_group(&group, !common.is_empty());
        }
    }

    /// GPUs about which every check says the same, good news folded. `further` is said where all GPUs have a fault.
    fn gpu_group(&mut self, group: &[&(&GpuSubject, Vec<&Finding>)], further: bool) {
        let (good, not_good): (Vec<&Finding>, Vec<&Finding>) =
            group[0].1.iter().partition(|it| is_good(it.verdict));
        let verdict = if good.iter().any(|it| it.verdict == Verdict::Pass) {
            Verdict::Pass
        } else {
            Verdict::Skip
        };
        let word = verdict_word(self.style, verdict);
        let good = good_in_words(&good);
        if not_good.is_empty() {
            let models = model_names(group);
            let others = if further { "otherwise " } else { "" };
            let number = group.len();
            self.line(&format!("  {word}  {number} x {models}: {others}{good}"));
            return;
        }
        match group {
            [(gpu, _)] => self.line(&gpu_name(gpu)),
            _ => self.line(&wrapped(&group_name(group), "", WIDTH)),
        }
        for finding in not_good {
            self.finding(finding);
        }
        self.line(&format!("  {word}  {good}"));
    }

    fn faults(&mut self, run: &Run) {
        let faults = faults(run);
        if faults.is_empty() {
            return;
        }
        self.heading("what to look at");
        for fault in &faults {
            self.fault(fault);
        }
    }

    fn fault(&mut self, fault: &Fault<'_>) {
        let finding = fault.finding;
        let indent = " ".repeat(2 + VERDICT_WIDTH + 2);
        let names = wrapped(&fault.names(), &indent, WIDTH);
        self.line(&format!(
            "  {}  {}: {}",
            verdict_word(self.style, finding.verdict),
            paint(self.style, Color::Bold, names.trim_start()),
            fault.summary()
        ));
        for subject in fault.subject_names() {
            self.line(&format!("{indent}on        {subject}"));
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
                self.line(&format!("{indent}{what:<8}  {}", one_line(value)));
            }
        }
    }

    fn diagnosis(&mut self, run: &Run) {
        let causes = diagnose(run);
        if causes.is_empty() {
            return;
        }
        self.heading("diagnosis");
        for cause in &causes {
            let word = verdict_word(self.style, cause.verdict);
            let action = paint(self.style, Color::Bold, cause.recommended_action.name());
            self.line(&format!("  {word}  {action}: {}", cause_in_words(cause)));
        }
    }

    fn missing(&mut self, run: &Run) {
        let missing = missing(&run.facts);
        if missing.is_empty() {
            return;
        }
        self.heading("missing on this machine");
        for line in missing {
            self.line(&format!("  {line}"));
        }
    }

    fn coverage(&mut self, run: &Run) {
        let coverage = Coverage::of(run);
        self.heading(&format!("coverage: {}", coverage.sentence()));
        for group in &coverage.not_judged {
            self.not_judged(run, group);
        }
    }

    fn not_judged(&mut self, run: &Run, group: &NotJudged) {
        let indent = " ".repeat(2 + VERDICT_WIDTH + 2);
        let text = format!("{}: {}", group.names(run), one_line(&group.reason));
        let lines = wrapped(&text, &indent, WIDTH);
        let word = verdict_word(self.style, group.verdict);
        self.line(&format!("  {word}  {}", lines.trim_start()));
    }

    fn verdict(&mut self, run: &Run) {
        let status = run.exit_status();
        let color = match status {
            ExitStatus::Passed => Color::Green,
            ExitStatus::Failed => Color::Red,
            _ => Color::Magenta,
        };
        let simulated = if run.facts.simulated.is_some() {
            "SIMULATED "
        } else {
            ""
        };
        let word = paint(
            self.style,
            color,
            &format!("{simulated}{}", verdict::word(status)),
        );
        let line = format!(
            "{word}: {} (exit code {})",
            verdict::sentence(run),
            status as u8
        );
        self.text.push('\n');
        self.line(&line);
    }
}

fn is_good(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Pass | Verdict::Skip)
}

/// `24 checks passed, 3 skipped`.
fn good_in_words(findings: &[&Finding]) -> String {
    let passed = findings
        .iter()
        .filter(|it| it.verdict == Verdict::Pass)
        .count();
    match (passed, findings.len() - passed) {
        (0, 0) => "nothing else was looked at".to_owned(),
        (0, skipped) => format!("{} skipped", counted(skipped, "check")),
        (passed, 0) => format!("{} passed", counted(passed, "check")),
        (passed, skipped) => format!("{} passed, {skipped} skipped", counted(passed, "check")),
    }
}

/// Takes out the faults that all GPUs share word by word and returns those of the first.
fn take_common<'a>(gpus: &mut [(&'a GpuSubject, Vec<&'a Finding>)]) -> Vec<&'a Finding> {
    let (_, of_first) = &gpus[0];
    let shared = |finding: &&Finding| {
        !is_good(finding.verdict)
            && gpus.iter().all(|(_, findings)| {
                findings.iter().any(|it| {
                    it.check == finding.check
                        && it.verdict == finding.verdict
                        && it.summary == finding.summary
                        && it.overridden == finding.overridden
                })
            })
    };
    let common: Vec<&Finding> = of_first.iter().copied().filter(shared).collect();
    for (_, findings) in gpus {
        findings.retain(|it| !common.iter().any(|common| common.check == it.check));
    }
    common
}

fn model_names(group: &[&(&GpuSubject, Vec<&Finding>)]) -> String {
    let mut names: Vec<String> = group
        .iter()
        .map(|(gpu, _)| {
            gpu.name
                .as_deref()
                .map_or_else(|| "GPU without a readable name".to_owned(), one_line)
        })
        .collect();
    names.sort();
    names.dedup();
    names.join(" or ")
}

/// `6 x NVIDIA H200: 0000:3b:00.0, …`.
fn group_name(group: &[&(&GpuSubject, Vec<&Finding>)]) -> String {
    let addresses: Vec<String> = group
        .iter()
        .map(|(gpu, _)| match &gpu.pci_address {
            Some(address) => one_line(address),
            None => one_line(&gpu.to_string()),
        })
        .collect();
    let models = model_names(group);
    format!("{} x {models}: {}", group.len(), addresses.join(", "))
}

/// `NVIDIA H200  GPU-8f0c… (0000:3b:00.0)`.
fn gpu_name(gpu: &GpuSubject) -> String {
    let name = gpu.name.as_deref().map(one_line).unwrap_or_default();
    one_line(&format!("{name}  {gpu}"))
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

/// Groups GPUs about which every check says the same; texts of good news need not agree.
fn alike<'a, 'b>(
    gpus: &'b [(&'a GpuSubject, Vec<&'a Finding>)],
) -> Vec<Vec<&'b (&'a GpuSubject, Vec<&'a Finding>)>> {
    let same = |one: &[&Finding], other: &[&Finding]| {
        one.len() == other.len()
            && one.iter().zip(other).all(|(one, other)| {
                one.check == other.check
                    && one.verdict == other.verdict
                    && (is_good(one.verdict) || one.summary == other.summary)
            })
    };
    let mut groups: Vec<Vec<&(&GpuSubject, Vec<&Finding>)>> = Vec::new();
    for gpu in gpus {
        match groups.iter_mut().find(|it| same(&it[0].1, &gpu.1)) {
            Some(group) => group.push(gpu),
            None => groups.push(vec![gpu]),
        }
    }
    groups
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

const VERDICT_WIDTH: usize = 5;

/// The verdict as a fixed-width word: capitals where something must be done.
fn verdict_word(style: HumanStyle, verdict: Verdict) -> String {
    let (word, color) = match verdict {
        Verdict::Pass => ("pass ", Color::Green),
        Verdict::Skip => ("skip ", Color::Dim),
        Verdict::Warn => ("warn ", Color::Yellow),
        Verdict::Error => ("ERROR", Color::Magenta),
        Verdict::Fail => ("FAIL ", Color::Red),
    };
    paint(style, color, word)
}

#[derive(Clone, Copy)]
enum Color {
    Bold,
    Dim,
    Green,
    Yellow,
    Red,
    Magenta,
}

fn paint(style: HumanStyle, color: Color, text: &str) -> String {
    if !style.color {
        return text.to_owned();
    }
    let code = match color {
        Color::Bold => "1",
        Color::Dim => "2",
        Color::Green => "32",
        Color::Yellow => "33",
        Color::Red => "1;31",
        Color::Magenta => "1;35",
    };
    format!("\u{1b}[{code}m{text}\u{1b}[0m")
}
