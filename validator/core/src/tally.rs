//! Several small judgements made into one outcome: the worst decides, and nothing of the others is
//! lost.

use crate::findings::{Judgement, Outcome, Verdict};

/// How many texts of the worst verdict the summary of a tally holds; the rest is counted there and
/// listed under `observed`.
const TEXTS_IN_THE_SUMMARY: usize = 3;

/// Judgements about parts of one subject.
///
/// A failure that was seen outweighs a part that could not be read, which outweighs everything
/// else. A part that does not apply is left out unless none applies.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    parts: Vec<Outcome>,
}

impl Tally {
    pub(crate) fn pass(&mut self, text: impl Into<String>) {
        self.parts.push(Outcome::pass(text));
    }

    pub(crate) fn warn(&mut self, text: impl Into<String>) {
        self.parts.push(Outcome::warn(text));
    }

    pub(crate) fn error(&mut self, text: impl Into<String>) {
        self.parts.push(Outcome::error(text));
    }

    pub(crate) fn fail(&mut self, text: impl Into<String>) {
        self.parts.push(Outcome::fail(text));
    }

    /// Takes over all parts of `other`.
    pub(crate) fn add(&mut self, other: Self) {
        self.parts.extend(other.parts);
    }

    /// Takes over all parts of `other`, failures as warnings.
    pub(crate) fn add_softened(&mut self, mut other: Self) {
        for part in &mut other.parts {
            if part.verdict == Verdict::Fail {
                part.verdict = Verdict::Warn;
            }
        }
        self.add(other);
    }

    /// The worst verdict so far: fail, then error, then warn, then pass; `None` when nothing was
    /// judged.
    pub(crate) fn worst(&self) -> Option<Verdict> {
        let verdicts = self.parts.iter().map(|it| it.verdict);
        verdicts.filter(|it| *it != Verdict::Skip).max()
    }

    /// The outcome of the worst verdict, shortened. All texts that are not right are under
    /// `observed` where there are several. `nothing` is the outcome when nothing was judged.
    pub(crate) fn outcome(self, nothing: Outcome) -> Outcome {
        let Some(worst) = self.worst() else {
            return nothing;
        };
        let texts = self.texts(worst, |it| Some(&it.summary));
        let shown = texts.len().min(TEXTS_IN_THE_SUMMARY);
        let summary = match texts.len() - shown {
            0 => texts.join("; "),
            more => format!("{}; and {more} more", texts[..shown].join("; ")),
        };
        let not_right: Vec<String> = self
            .parts
            .iter()
            .filter(|it| it.verdict != Verdict::Pass)
            .map(|it| format!("{}: {}", it.verdict, it.summary))
            .collect();
        let outcome = Outcome {
            summary,
            ..self.joined(worst)
        };
        if not_right.len() > 1 {
            outcome.observed(not_right.join("\n"))
        } else {
            outcome
        }
    }

    /// The parts with this verdict as one outcome, with the texts of all of them.
    fn joined(&self, verdict: Verdict) -> Outcome {
        let join = |of: fn(&Outcome) -> Option<&String>| {
            let mut texts = self.texts(verdict, of);
            texts.dedup();
            (!texts.is_empty()).then(|| texts.join("; "))
        };
        let parts = || self.parts.iter().filter(|it| it.verdict == verdict);
        Outcome {
            verdict,
            summary: join(|it| Some(&it.summary)).unwrap_or_default(),
            expected: join(|it| it.expected.as_ref()),
            observed: join(|it| it.observed.as_ref()),
            remedy: join(|it| it.remedy.as_ref()),
            busy: parts().any(|it| it.busy),
            recommended_action: parts().filter_map(|it| it.recommended_action).max(),
            cause: parts().filter_map(|it| it.cause).min(),
            evidence: self
                .parts
                .iter()
                .flat_map(|it| it.evidence.to_vec())
                .collect(),
        }
    }

    fn texts(&self, verdict: Verdict, of: fn(&Outcome) -> Option<&String>) -> Vec<&str> {
        let parts = self.parts.iter().filter(|it| it.verdict == verdict);
        parts.filter_map(of).map(String::as_str).collect()
    }
}

/// One judgement out of several about the same subject, unabridged.
pub(crate) fn worst_of(parts: impl IntoIterator<Item = Judgement>) -> Judgement {
    let parts = parts.into_iter();
    let parts = parts.map(|part| part.unwrap_or_else(|outcome| outcome));
    let tally = Tally {
        parts: parts.collect(),
    };
    let first = tally.parts.first().map(|part| part.verdict);
    match tally.worst().or(first) {
        Some(verdict) => Ok(tally.joined(verdict)),
        None => Err(Outcome::error("nothing was read")),
    }
}

#[cfg(test)]
mod tests {
    use super::{Judgement, Outcome, Tally, Verdict, worst_of};

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

    fn verdict_of(parts: &[Judgement]) -> Verdict {
        worst_of(parts.to_vec())
            .unwrap_or_else(|outcome| outcome)
            .verdict
    }

    #[test]
    fn the_worst_part_decides() {
        let pass = || Ok(Outcome::pass("right"));
        let skip = || Err(Outcome::skip("does not apply"));
        let warn = || Ok(Outcome::warn("better not"));
        let error = || Err(Outcome::error("not read"));
        let fail = || Ok(Outcome::fail("wrong"));
        assert_eq!(verdict_of(&[pass(), skip()]), Verdict::Pass);
        assert_eq!(verdict_of(&[skip(), skip()]), Verdict::Skip);
        assert_eq!(verdict_of(&[pass(), warn(), skip()]), Verdict::Warn);
        assert_eq!(verdict_of(&[pass(), warn(), error()]), Verdict::Error);
        assert_eq!(verdict_of(&[error(), fail(), warn()]), Verdict::Fail);
        assert_eq!(verdict_of(&[]), Verdict::Error, "nothing was read");
    }

    #[test]
    fn all_parts_with_the_worst_verdict_speak() {
        let outcome = worst_of([
            Ok(Outcome::fail("hot").observed("99").remedy("reset")),
            Ok(Outcome::pass("quiet").observed("0")),
            Ok(Outcome::fail("slow").observed("1").remedy("reset")),
        ])
        .unwrap();
        assert_eq!(outcome.summary, "hot; slow");
        assert_eq!(outcome.observed.as_deref(), Some("99; 1"));
        assert_eq!(outcome.remedy.as_deref(), Some("reset"));
    }
}
