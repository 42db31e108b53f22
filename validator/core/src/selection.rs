//! Checks and GPUs that a run leaves out by request. What would have been judged and was left out
//! makes the run incomplete: a run is never green by omission.

use crate::diagnosis::name_of;
use crate::facts::Facts;
use crate::findings::{Finding, GpuSubject, Run, Subject, Verdict};
use crate::gpu_names::{gpu_named, is_address, is_named};
use crate::nearest_name::nearest_name;

/// Judged whatever is selected: it reports that a run ended early.
const ALWAYS_JUDGED: &str = "run_complete";

/// Which checks are judged, and on which GPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// Only these, where it is not empty.
    only: Vec<String>,
    /// Not these.
    skip: Vec<String>,
    /// Only on these GPUs, by index, PCI address or UUID, where it is not empty. Checks of the host
    /// are judged as a whole.
    gpus: Vec<String>,
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
            gpus: Vec::new(),
        })
    }

    /// Judges only these GPUs.
    #[must_use]
    pub fn on_gpus(self, names: &[String]) -> Self {
        Self {
            gpus: names.to_vec(),
            ..self
        }
    }

    /// `Err` names the first name that no GPU has. Where no GPU was found at all, no name is
    /// refused: the run reports why.
    pub fn refuse_unknown_gpus(&self, facts: &Facts) -> Result<(), String> {
        let unlisted = crate::queries::unlisted_gpus(facts);
        if facts.gpus.is_empty() && unlisted.is_empty() {
            return Ok(());
        }
        let is_unlisted = |name: &String| unlisted.iter().any(|it| is_at(it, name));
        let mut names = self.gpus.iter().filter(|it| !is_unlisted(it));
        names.try_for_each(|name| gpu_named(name, facts).map(|_| ()))
    }

    fn leaves_out(&self, check: &str) -> bool {
        let is_in = |ids: &[String]| ids.iter().any(|it| it == check);
        check != ALWAYS_JUDGED
            && (is_in(&self.skip) || (!self.only.is_empty() && !is_in(&self.only)))
    }

    /// Whether this is a GPU that is not among those named.
    fn leaves_out_gpu(&self, subject: &Subject, facts: &Facts) -> bool {
        let Subject::Gpu(gpu) = subject else {
            return false;
        };
        let index = gpu.position_in(facts);
        let listed = index.and_then(|it| facts.gpus.get(it));
        let is_it = |name: &String| {
            is_at(gpu, name) || listed.is_some_and(|gpu| is_named(gpu, index, name))
        };
        !self.gpus.is_empty() && !self.gpus.iter().any(is_it)
    }

    /// Takes what is left out from the findings of `run`. Checks that do not apply here were not
    /// left out by it.
    #[must_use]
    pub fn applied_to(&self, mut run: Run) -> Run {
        let (mut checks, mut gpus): (Vec<String>, Vec<String>) = Default::default();
        for finding in &mut run.findings {
            let (left_out, name, options) = if self.leaves_out_gpu(&finding.subject, &run.facts) {
                (&mut gpus, name_of(&finding.subject, &run.facts), "--gpu")
            } else if self.leaves_out(&finding.check) {
                (&mut checks, finding.check.clone(), "--only or --skip")
            } else {
                continue;
            };
            if finding.verdict == Verdict::Skip {
                continue;
            }
            if !left_out.contains(&name) {
                left_out.push(name);
            }
            *finding = Finding {
                verdict: Verdict::Skip,
                summary: format!("left out by {options}"),
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
        let left_out = [
            (gpus, "GPUs", "--gpu"),
            (checks, "checks", "--only or --skip"),
        ];
        let reasons: Vec<String> = left_out
            .iter()
            .filter(|(names, ..)| !names.is_empty())
            .map(|(names, things, options)| {
                format!("{} left out by {options}", in_words(names, things))
            })
            .collect();
        if !reasons.is_empty() && run.incomplete.is_none() {
            run.incomplete = Some(reasons.join("; "));
        }
        run
    }
}

/// Whether `name` is the PCI address of this GPU, which NVML may not list.
fn is_at(gpu: &GpuSubject, name: &str) -> bool {
    let address = gpu.pci_address.as_deref().unwrap_or_default();
    is_address(address, name)
}

/// The first names; the coverage has all.
fn in_words(names: &[String], things: &str) -> String {
    const NAMED: usize = 4;
    let first = names.iter().take(NAMED).cloned().collect::<Vec<_>>();
    match names.len().saturating_sub(NAMED) {
        0 => first.join(", "),
        further => format!("{} and {further} more {things}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::Selection;
    use crate::facts::{Facts, Reading};
    use crate::findings::{ExitStatus, GpuSubject, Run, Subject, Verdict};
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

    fn run_on(facts: Facts, gpus: &[&str]) -> Run {
        let gpus: Vec<String> = gpus.iter().map(|&it| it.to_owned()).collect();
        let selection = Selection::default().on_gpus(&gpus);
        assert_eq!(selection.refuse_unknown_gpus(&facts), Ok(()));
        selection.applied_to(Run::judged(
            facts,
            &Profile::default(),
            Run::BUILT_IN_PROFILE,
            Level::Quick,
        ))
    }

    #[test]
    fn gpus_that_are_left_out_are_named_and_make_no_pass() {
        let facts = healthy_node();
        let name = |index: usize| crate::queries::gpu_name(&facts.gpus[index], index);
        let uuid = facts.gpus[1].uuid.value().cloned().unwrap_or_default();
        let run = run_on(facts.clone(), &["0", &uuid]);
        assert_eq!(run.exit_status(), ExitStatus::NotJudged);
        let says = format!(
            "{}, {}, {}, {} and 2 more GPUs left out by --gpu",
            name(2),
            name(3),
            name(4),
            name(5)
        );
        assert_eq!(run.incomplete, Some(says));
        let judged = |index: usize| {
            let subject = Subject::Gpu(GpuSubject::of(&facts.gpus[index]));
            let mut of_it = run.findings.iter().filter(|it| it.subject == subject);
            of_it.any(|it| it.verdict.judged())
        };
        let judged: Vec<usize> = (0..8).filter(|it| judged(*it)).collect();
        assert_eq!(judged, [0, 1]);
        let all: Vec<String> = (0..8).map(|it| it.to_string()).collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        assert_eq!(run_on(facts, &all).exit_status(), ExitStatus::Passed);
    }

    #[test]
    fn only_the_gpus_that_are_named_fail_the_run() {
        let mut facts = healthy_node();
        facts.gpus[2].persistence_mode = Reading::Value(false);
        let address = facts.gpus[2].pci_address.value().cloned();
        let address = address.unwrap_or_default();
        let status = |gpus: &[&str]| run_on(facts.clone(), gpus).exit_status();
        assert_eq!(status(&[&address]), ExitStatus::Failed);
        assert_eq!(status(&["1"]), ExitStatus::NotJudged);
        // NVML does not list it any more: it is named by its address alone.
        let lost = facts.gpus.remove(2);
        let run = run_on(facts.clone(), &[&address]);
        let missing = run.findings.iter().filter(|it| it.subject.is_gpu());
        let of_lost = |it: &&crate::findings::Finding| match &it.subject {
            Subject::Gpu(gpu) => {
                gpu.pci_address.as_deref() == lost.pci_address.value().map(String::as_str)
            }
            _ => false,
        };
        assert!(
            missing
                .filter(of_lost)
                .all(|it| !it.summary.starts_with("left out"))
        );
    }

    #[test]
    fn a_name_that_no_gpu_has_is_refused_where_gpus_were_found() {
        let selection = Selection::default().on_gpus(&["9".to_owned()]);
        let error = selection.refuse_unknown_gpus(&healthy_node());
        let error = error.expect_err("eight GPUs");
        assert!(error.starts_with("no GPU 9; expected an index"), "{error}");
        assert_eq!(selection.refuse_unknown_gpus(&Facts::default()), Ok(()));
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
