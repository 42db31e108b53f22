//! Several small judgements made into one outcome: the worst decides, and nothing of the others is
//! lost.

use crate::findings::{Judgement, Outcome, Verdict};

/// How many texts of the worst verdict the summary holds; the rest is counted there and listed
/// under `observed`.
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

    /// The worst verdict so far: fail, then error, then warn, then pass; `None` when nothing was
    /// judged.
    pub(crate) fn worst(&self) -> Option<Verdict> {
        self.parts.iter().map(|(verdict, _)| *verdict).max()
    }

    /// The outcome of the worst verdict. All texts that are not right are under `observed` when the
    /// summary has not room for them. `nothing` is the outcome when nothing was judged.
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

/// One judgement out of several about the same subject: the worst verdict, with the texts of all
/// parts that have it.
///
/// A part that does not apply is left out unless none applies. A failure that was seen outweighs a
/// part that could not be read, which outweighs everything else.
pub(crate) fn worst_of(parts: impl IntoIterator<Item = Judgement>) -> Judgement {
    let parts: Vec<Outcome> = parts
        .into_iter()
        .map(|part| part.unwrap_or_else(|outcome| outcome))
        .collect();
    let applies = |part: &&Outcome| part.verdict != Verdict::Skip;
    let worst = parts.iter().filter(applies).map(|part| part.verdict).max();
    let Some(verdict) = worst.or(parts.first().map(|part| part.verdict)) else {
        return Err(Outcome::error("nothing was read"));
    };
    let worst: Vec<&Outcome> = parts.iter().filter(|it| it.verdict == verdict).collect();
    let join = |texts: Vec<&str>| {
        let mut texts = texts;
        texts.dedup();
        (!texts.is_empty()).then(|| texts.join("; "))
    };
    Ok(Outcome {
        verdict,
        summary: join(worst.iter().map(|it| it.summary.as_str()).collect()).unwrap_or_default(),
        expected: join(
            worst
                .iter()
                .filter_map(|it| it.expected.as_deref())
                .collect(),
        ),
        observed: join(
            worst
                .iter()
                .filter_map(|it| it.observed.as_deref())
                .collect(),
        ),
        remedy: join(worst.iter().filter_map(|it| it.remedy.as_deref()).collect()),
        busy: worst.iter().any(|it| it.busy),
        recommended_action: worst.iter().filter_map(|it| it.recommended_action).max(),
        cause: worst.iter().filter_map(|it| it.cause).min(),
        evidence: parts.iter().flat_map(|it| it.evidence.to_vec()).collect(),
    })
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
