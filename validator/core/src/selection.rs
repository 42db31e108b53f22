//! Checks that a run leaves out by request. What would have been judged and was left out makes the
//! run incomplete: a run is never green by omission.

use crate::findings::{Finding, Run, Verdict};
use crate::nearest_name::nearest_name;

/// Judged whatever is selected: it reports that a run ended early.
const ALWAYS_JUDGED: &str = "run_complete";

/// Which checks are judged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Only these, where it is not empty.
    only: Vec<String>,
    /// Not these.
    skip: Vec<String>,
}

impl Selection {
    /// `Err` names the first id that no check has.
    pub fn new(only: &[String], skip: &[String]) -> Result<Self, String> {
        for (option, ids) in [("--only", only), ("--skip", skip)] {
            for id in ids {
                if !crate::check_ids().any(|it| it == id) {
                    let near = nearest_name(id, crate::check_ids())
                        .map_or_else(String::new, |it| format!("; did you mean `{it}`?"));
                    return Err(format!(
                        "{option}: there is no check `{id}`{near} (gpu-validator checks list)"
                    ));
                }
            }
        }
        Ok(Self {
            only: only.to_vec(),
            skip: skip.to_vec(),
        })
    }

    fn leaves_out(&self, check: &str) -> bool {
        let is_in = |ids: &[String]| ids.iter().any(|it| it == check);
        check != ALWAYS_JUDGED
            && (is_in(&self.skip) || (!self.only.is_empty() && !is_in(&self.only)))
    }

    /// Takes what is left out from the findings of `run`. Checks that do not apply here were not
    /// left out by it.
    #[must_use]
    pub fn applied_to(&self, mut run: Run) -> Run {
        let mut left_out: Vec<String> = Vec::new();
        for finding in &mut run.findings {
            if finding.verdict == Verdict::Skip || !self.leaves_out(&finding.check) {
                continue;
            }
            if !left_out.contains(&finding.check) {
                left_out.push(finding.check.clone());
            }
            *finding = Finding {
                verdict: Verdict::Skip,
                summary: "left out by --only or --skip".to_owned(),
                expected: None,
                observed: None,
                remedy: None,
                recommended_action: None,
                cause: None,
                evidence: Vec::new(),
                busy: false,
                overridden: None,
                ..finding.clone()
            };
        }
        if !left_out.is_empty() && run.incomplete.is_none() {
            run.incomplete = Some(format!(
                "{} left out by --only or --skip",
                in_words(&left_out)
            ));
        }
        run
    }
}

/// The first names; the coverage has all.
fn in_words(checks: &[String]) -> String {
    const NAMED: usize = 4;
    let named = checks.iter().take(NAMED).cloned().collect::<Vec<_>>();
    match checks.len().saturating_sub(NAMED) {
        0 => named.join(", "),
        further => format!("{} and {further} more checks", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::Selection;
    use crate::facts::{Facts, Reading};
    use crate::findings::{ExitStatus, Run, Verdict};
    use crate::level::Level;
    use crate::profile::Profile;
    use crate::test_machine::healthy_node;

    fn run(facts: Facts, only: &[&str], skip: &[&str]) -> Run {
        let owned = |ids: &[&str]| ids.iter().map(|&it| it.to_owned()).collect::<Vec<_>>();
        let selection = Selection::new(&owned(only), &owned(skip)).expect("checks");
        let run = Run::judged(
            facts,
            &Profile::default(),
            Run::BUILT_IN_PROFILE,
            Level::Quick,
        );
        assert_eq!(
            run.findings.len(),
            selection.applied_to(run.clone()).findings.len()
        );
        selection.applied_to(run)
    }

    #[test]
    fn without_a_selection_nothing_changes() {
        let plain = run(healthy_node(), &[], &[]);
        assert_eq!(plain.exit_status(), ExitStatus::Passed);
        assert_eq!(plain.incomplete, None);
    }

    #[test]
    fn a_check_that_is_left_out_is_named_and_makes_no_pass() {
        let run = run(healthy_node(), &[], &["persistence_mode"]);
        assert_eq!(run.exit_status(), ExitStatus::NotJudged);
        assert_eq!(
            run.incomplete.as_deref(),
            Some("persistence_mode left out by --only or --skip")
        );
        let of_it = run
            .findings
            .iter()
            .filter(|it| it.check == "persistence_mode");
        assert!(of_it.clone().all(|it| it.verdict == Verdict::Skip));
        assert_eq!(of_it.count(), 8);
    }

    #[test]
    fn a_failure_that_is_left_out_is_no_pass_and_one_that_is_not_fails() {
        let mut facts = healthy_node();
        facts.gpus[2].persistence_mode = Reading::Value(false);
        let without = run(facts.clone(), &[], &["persistence_mode"]);
        assert_eq!(without.exit_status(), ExitStatus::NotJudged);
        let with = run(facts, &["persistence_mode"], &[]);
        assert_eq!(with.exit_status(), ExitStatus::Failed);
        let judged = with.findings.iter().filter(|it| it.verdict.judged());
        let mut checks: Vec<&str> = judged.map(|it| it.check.as_str()).collect();
        checks.dedup();
        assert_eq!(checks, ["run_complete", "persistence_mode"]);
    }

    #[test]
    fn a_check_that_does_not_apply_is_not_left_out() {
        let run = run(healthy_node(), &[], &["services"]);
        assert_eq!(run.exit_status(), ExitStatus::Passed);
    }

    #[test]
    fn an_unknown_check_is_refused_with_the_nearest() {
        let error = Selection::new(&["persistance_mode".to_owned()], &[]).expect_err("unknown");
        assert!(
            error.starts_with(
                "--only: there is no check `persistance_mode`; did you mean `persistence_mode`?"
            ),
            "{error}"
        );
    }
}
