//! The watch over a node that is open for work: level quick again and again, until it falls ill.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::commands::run::{probe_options, refuse_simulated, watch};
use crate::interrupt::Interrupt;
use validator_core::findings::{ExitStatus, Run, Verdict};
use validator_core::level::Level;
use validator_core::profile::Profile;

/// Between two looks at a healthy node. With a look that hangs, the one that confirms it and the
/// pause between them, an illness is known within 45 s, which leaves the API server 15 s of the
/// minute in which a node is to be closed.
const PERIOD: Duration = Duration::from_secs(10);
/// A look takes half a second on eight GPUs; one that takes longer than this hangs.
const LOOK_DEADLINE: Duration = Duration::from_secs(15);
/// Before a finding is confirmed by a second look: what a job makes of a GPU for a moment is no
/// illness.
const BEFORE_CONFIRMATION: Duration = Duration::from_secs(2);
const SIGNAL_POLL: Duration = Duration::from_millis(100);

/// How a node is looked at.
pub(super) struct HealthWatch<'a> {
    pub(super) sysroot: Option<&'a Path>,
    pub(super) refuses_simulated: bool,
    pub(super) profile: &'a Profile,
    pub(super) profile_name: &'a str,
}

impl HealthWatch<'_> {
    /// Returns the run that shows the node to be ill; `None` after SIGTERM.
    ///
    /// A failed check, or a driver that does not answer, counts when two looks in a row have it.
    pub(super) fn until_ill(&self, interrupt: &Interrupt) -> Option<Run> {
        loop {
            if !wait(PERIOD, interrupt) {
                return None;
            }
            let first = objections(&self.look());
            if first.is_empty() {
                continue;
            }
            if !wait(BEFORE_CONFIRMATION, interrupt) {
                return None;
            }
            let second = self.look();
            if objections(&second).iter().any(|it| first.contains(it)) {
                return Some(second);
            }
        }
    }

    fn look(&self) -> Run {
        let mut options =
            probe_options(Level::Quick, self.sysroot.map(Path::to_owned), self.profile);
        options.deadlines.run = Some(LOOK_DEADLINE);
        // Of its own: the deadline of one look must not stop the next.
        let mut facts = watch(options.into(), &Interrupt::default(), &mut |_, _| {});
        refuse_simulated(&mut facts, self.refuses_simulated);
        Run::judged(facts, self.profile, self.profile_name, Level::Quick)
    }
}

/// What keeps a run from being a pass, by check and subject. GPUs that jobs use are what an open
/// node is for.
fn objections(run: &Run) -> Vec<String> {
    if matches!(run.exit_status(), ExitStatus::Passed | ExitStatus::Busy) {
        return Vec::new();
    }
    let objections = run
        .findings
        .iter()
        .filter(|it| matches!(it.verdict, Verdict::Fail | Verdict::Error) && !it.busy);
    objections
        .map(|it| format!("{} on {}", it.check, it.subject))
        .collect()
}

/// Whether the time passed without a signal.
pub(super) fn wait(time: Duration, interrupt: &Interrupt) -> bool {
    let deadline = Instant::now() + time;
    while Instant::now() < deadline {
        if interrupt.signal().is_some() {
            return false;
        }
        std::thread::sleep(SIGNAL_POLL.min(deadline.saturating_duration_since(Instant::now())));
    }
    interrupt.signal().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::{Facts, Reading, RecoveryAction};
    use validator_core::test_machine::healthy_node;

    fn run_of(facts: Facts) -> Run {
        Run::judged(facts, &Profile::default(), "built-in", Level::Quick)
    }

    #[test]
    fn a_failure_and_an_unread_node_are_objections_and_a_healthy_one_has_none() {
        let healthy = objections(&run_of(healthy_node()));
        assert_eq!(healthy, Vec::<String>::new());
        let mut facts = healthy_node();
        facts.gpus[1].recovery_action = Reading::Value(RecoveryAction::GpuReset);
        let ill = objections(&run_of(facts));
        assert_eq!(ill.len(), 1, "{ill:?}");
        let mut facts = healthy_node();
        facts.interrupted = Some("the deadline passed".to_owned());
        assert!(!objections(&run_of(facts)).is_empty());
    }

    #[test]
    fn a_signal_ends_a_wait() {
        let interrupt = Interrupt::default();
        assert!(wait(Duration::from_millis(1), &interrupt));
        interrupt.request(15);
        let started = Instant::now();
        assert!(!wait(Duration::from_mins(1), &interrupt));
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}
