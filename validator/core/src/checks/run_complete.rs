//! The run completed all stages.
//!
//! ## Why
//! A run that was stopped early has few failures to report, and would read as a green one in every
//! tool that counts failures.
//!
//! ## How it is judged
//! The facts must state when they were collected, and that collection was not interrupted.
//!
//! ## What to do
//! Run again and let it finish.
//!
//! ## Source
//! This project's own rule: a value that was not read never passes.

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "run_complete",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: concat!(
        env!("CARGO_PKG_REPOSITORY"),
        "/blob/main/CHECKS.md#run_complete"
    ),
};

#[expect(clippy::unnecessary_wraps, reason = "every check has this signature")]
fn judge(facts: &Facts, _: &Profile) -> Judgement {
    if let Some(reason) = &facts.interrupted {
        return Ok(Outcome::error(format!("the run ended early: {reason}")).remedy("run it again"));
    }
    if facts.collected_at.is_empty() {
        return Ok(Outcome::error("the facts have no time of collection"));
    }
    Ok(Outcome::pass("every stage ended"))
}

#[cfg(test)]
mod tests {
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_node, judge_check};

    #[test]
    fn passes_when_every_stage_ended() {
        let findings = judge_check(&super::CHECK, &healthy_node(), "{}");
        assert_eq!(findings[0].verdict, Verdict::Pass);
        assert_eq!(findings[0].summary, "every stage ended");
    }

    #[test]
    fn errs_when_the_run_was_stopped() {
        let mut facts = healthy_node();
        facts.interrupted = Some("signal 15 (SIGTERM)".to_owned());
        let findings = judge_check(&super::CHECK, &facts, "{}");
        assert_eq!(findings[0].verdict, Verdict::Error);
        assert_eq!(
            findings[0].summary,
            "the run ended early: signal 15 (SIGTERM)"
        );
    }

    #[test]
    fn errs_when_nothing_was_collected() {
        let facts = crate::facts::Facts::default();
        let findings = judge_check(&super::CHECK, &facts, "{}");
        assert_eq!(findings[0].verdict, Verdict::Error);
    }
}
