//! A page of text for a person: lines, headings and verdicts in colour, wrapped at the width of the
//! terminal.

use super::text::wrapped;
use crate::findings::Verdict;

/// How the report for a person looks.
#[derive(Clone, Copy, Debug)]
pub struct HumanStyle {
    /// ANSI colours.
    pub color: bool,
    /// Every check of every GPU on a line of its own.
    pub verbose: bool,
    /// Columns of the terminal.
    pub width: usize,
}

impl HumanStyle {
    /// Columns where no terminal has a width: files and pipes get the same text everywhere.
    pub const WIDTH_OF_PIPES: usize = 100;
    /// On narrower terminals lines are broken by the terminal.
    pub(super) const WIDTH_MINIMUM: usize = 60;
}

impl Default for HumanStyle {
    fn default() -> Self {
        Self {
            color: false,
            verbose: false,
            width: Self::WIDTH_OF_PIPES,
        }
    }
}

pub(super) struct Page {
    pub(super) text: String,
    pub(super) style: HumanStyle,
}

impl Page {
    pub(super) fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    pub(super) fn blank(&mut self) {
        self.text.push('\n');
    }

    pub(super) fn heading(&mut self, heading: &str) {
        let heading = self.paint(Color::Bold, heading);
        self.blank();
        self.line(&heading);
    }

    /// `text` after a word in colour, wrapped; further lines begin at column 2.
    pub(super) fn after_word(&mut self, word: &str, color: Color, text: &str) {
        let lines = wrapped(&format!("{word} {text}"), "  ", self.style.width);
        // Escapes have no width, so that the word is painted after wrapping.
        let rest = lines.trim_start().strip_prefix(word).unwrap_or_default();
        let word = self.paint(color, word);
        self.line(&format!("{word}{rest}"));
    }

    /// A verdict in its column and `text` in the next one, wrapped there.
    pub(super) fn after_verdict(&mut self, verdict: Verdict, text: &str) {
        let lines = wrapped(text, VERDICT_INDENT, self.style.width);
        let lines = lines.strip_prefix(VERDICT_INDENT).unwrap_or(&lines);
        self.verdict_line(verdict, lines);
    }

    /// A verdict in its column and one line after it.
    pub(super) fn verdict_line(&mut self, verdict: Verdict, line: &str) {
        let word = verdict_in_capitals(verdict);
        let padding = " ".repeat(VERDICT_INDENT.len().saturating_sub(word.len()));
        let word = self.paint(color_of_verdict(verdict), word);
        self.line(&format!("{word}{padding}{line}"));
    }

    /// Lines that belong to the entry above.
    pub(super) fn under_verdict(&mut self, text: &str) {
        let lines = wrapped(text, VERDICT_INDENT, self.style.width);
        self.line(&lines);
    }

    pub(super) fn paint(&self, color: Color, text: &str) -> String {
        if !self.style.color {
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
}

/// As wide as the longest verdict and a gap.
const VERDICT_INDENT: &str = "       ";

/// Capitals where something must be done.
pub(super) fn verdict_in_capitals(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "pass",
        Verdict::Skip => "skip",
        Verdict::Warn => "WARN",
        Verdict::Error => "ERROR",
        Verdict::Fail => "FAIL",
    }
}

#[derive(Clone, Copy)]
pub(super) enum Color {
    Bold,
    Dim,
    Green,
    Yellow,
    Red,
    Magenta,
}

pub(super) fn color_of_verdict(verdict: Verdict) -> Color {
    match verdict {
        Verdict::Pass => Color::Green,
        Verdict::Skip => Color::Dim,
        Verdict::Warn => Color::Yellow,
        Verdict::Error => Color::Magenta,
        Verdict::Fail => Color::Red,
    }
}
