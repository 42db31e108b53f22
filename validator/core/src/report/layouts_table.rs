//! A user's command under each layout: one line each, and the end of its output where it is red.

use std::fmt::Write as _;

use super::one_line;
use crate::facts::Facts;
use crate::findings::Verdict;
use crate::layouts::{gpu_in_words, judge_layout, used_gpus};

/// Lines of output that are shown of a layout that did not pass.
const OUTPUT_LINES: usize = 6;

/// Empty where no layouts were requested.
pub fn layouts_table(facts: &Facts) -> String {
    let mut text = String::new();
    let Some(layouts) = &facts.load.layouts else {
        return text;
    };
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{:<7} {:>5} {:>5} {:>8}  {:<5} result",
        "layout", "given", "used", "seconds", ""
    );
    for run in &layouts.runs {
        let result = judge_layout(run, facts);
        let _ = writeln!(
            text,
            "{:<7} {:>5} {:>5} {:>8.1}  {:<5} {}",
            run.layout.name(),
            run.given.len(),
            used_gpus(run).len(),
            run.seconds,
            result.verdict.to_string(),
            one_line(&result.summary)
        );
        if matches!(result.verdict, Verdict::Pass | Verdict::Skip) {
            continue;
        }
        let given: Vec<String> = run.given.iter().map(|it| gpu_in_words(facts, it)).collect();
        if !given.is_empty() {
            let _ = writeln!(text, "        given: {}", given.join(", "));
        }
        let output = if run.stderr.trim().is_empty() {
            &run.stdout
        } else {
            &run.stderr
        };
        let lines: Vec<&str> = output.lines().filter(|it| !it.trim().is_empty()).collect();
        for line in &lines[lines.len().saturating_sub(OUTPUT_LINES)..] {
            let _ = writeln!(text, "        | {}", one_line(line));
        }
        if let Some(remedy) = &result.remedy {
            let _ = writeln!(text, "        do: {remedy}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{LayoutEnd, Reading};
    use crate::test_machine::{healthy_node, laid_out_node};

    #[test]
    fn a_line_for_each_layout_and_the_end_of_the_output_of_a_red_one() {
        let mut facts = laid_out_node();
        let text = layouts_table(&facts);
        assert_eq!(text.lines().count(), 1 + 4, "{text}");
        assert!(
            text.contains("single      1     1     12.0  pass  it used GPU 7 ("),
            "{text}"
        );
        let layouts = facts.load.layouts.as_mut().expect("layouts");
        layouts.runs[1].end = Reading::Value(LayoutEnd::Killed { signal: 6 });
        layouts.runs[1].stderr = (0..9)
            .map(|it| format!("line {it}\u{1b}[31m"))
            .collect::<Vec<_>>()
            .join("\n");
        let text = layouts_table(&facts);
        // The line itself, the GPUs, six lines of nine, and the remedy.
        assert_eq!(text.lines().count(), 1 + 4 + 1 + 6 + 1, "{text}");
        assert!(
            text.contains("| line 8") && !text.contains("| line 2"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'), "{text}");
        assert_eq!(layouts_table(&healthy_node()), "");
    }
}
