//! Several small judgements made into one outcome: the worst decides, and nothing of the others is lost.

use crate::findings::{Outcome, Verdict};

/// How many texts of the worst verdict the summary holds; the rest is counted there and listed under `observed`.
const TEXTS_IN_THE_SUMMARY: usize = 3;

/// Texts by verdict, each a fragment that names its object.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    parts: Vec<(Verdict, String)>,
}

impl Tally {
    pub(crate) fn pass(&mut self, text: impl Into<String>) {
        self.parts.push((Verdict::Pass, text.into()));
    }

    pub(crate) fn warn(&mut self, text: impl Into<String>) {
        self.parts.push((Verdict::Warn, text.into()));
    }

    pub(crate) fn error(&mut self, text: impl Into<String>) {
        self.parts.push((Verdict::Error, text.into()));
    }

    pub(crate) fn fail(&mut self, text: impl Into<String>) {
        self.parts.push((Verdict::Fail, text.into()));
    }

    /// Takes over all texts of `other`.
    pub(crate) fn add(&mut self, other: Self) {
        self.parts.extend(other.parts);
    }

    /// Takes over all texts of `other`, what failed there as a warning.
    pub(crate) fn add_softened(&mut self, other: Self) {
        let soften = |verdict| match verdict {
            Verdict::Fail => Verdict::Warn,
            verdict => verdict,
        };
        let parts = other.parts.into_iter();
        self.parts
            .extend(parts.map(|(verdict, text)| (soften(verdict), text)));
    }

    /// The worst verdict so far: fail, then error, then warn, then pass; `None` when nothing was judged.
    pub(crate) fn worst(&self) -> Option<Verdict> {
        self.parts.iter().map(|(verdict, _)| *verdict).max()
    }

    /// The outcome of the worst verdict. All texts that are not right are under `observed` when the summary has not
    /// room for them. `nothing` is the outcome when nothing was judged.
    pub(crate) fn outcome(self, nothing: Outcome) -> Outcome {
        let Some(worst) = self.worst() else {
            return nothing;
        };
        let texts: Vec<&str> = self
            .parts
            .iter()
            .filter(|(verdict, _)| *verdict == worst)
            .map(|(_, text)| text.as_str())
            .collect();
        let shown = texts.len().min(TEXTS_IN_THE_SUMMARY);
        let summary = match texts.len() - shown {
            0 => texts.join("; "),
            more => format!("{}; and {more} more", texts[..shown].join("; ")),
        };
        let outcome = match worst {
            Verdict::Pass | Verdict::Skip => Outcome::pass(summary),
            Verdict::Warn => Outcome::warn(summary),
            Verdict::Error => Outcome::error(summary),
            Verdict::Fail => Outcome::fail(summary),
        };
        let not_right: Vec<String> = self
            .parts
            .iter()
            .filter(|(verdict, _)| *verdict != Verdict::Pass)
            .map(|(verdict, text)| format!("{verdict}: {text}"))
            .collect();
        if not_right.len() > 1 {
            outcome.observed(not_right.join("\n"))
        } else {
            outcome
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Tally, Verdict};

    #[test]
    fn the_worst_decides_and_the_rest_is_kept() {
        let mut tally = Tally::default();
        tally.pass("a is right");
        tally.error("b was not read");
        tally.fail("c is wrong");
        tally.warn("d is old");
        let outcome = tally.outcome(Outcome::skip("nothing"));
        assert_eq!(outcome.verdict, Verdict::Fail);
        assert_eq!(outcome.summary, "c is wrong");
        assert_eq!(
            outcome.observed.as_deref(),
            Some("error: b was not read\nfail: c is wrong\nwarn: d is old")
        );
    }

    #[test]
    fn what_was_not_read_outweighs_a_pass_and_a_warning() {
        let mut tally = Tally::default();
        tally.pass("a is right");
        tally.warn("d is old");
        tally.error("b was not read");
        assert_eq!(
            tally.outcome(Outcome::skip("nothing")).verdict,
            Verdict::Error
        );
    }

    #[test]
    fn a_long_list_is_counted() {
        let mut tally = Tally::default();
        for name in ["a", "b", "c", "d", "e"] {
            tally.fail(name);
        }
        assert_eq!(
            tally.outcome(Outcome::skip("nothing")).summary,
            "a; b; c; and 2 more"
        );
    }

    #[test]
    fn nothing_judged_is_no_pass() {
        let outcome = Tally::default().outcome(Outcome::skip("nothing"));
        assert_eq!(outcome.verdict, Verdict::Skip);
    }
}
