//! systemd services are in the state that the profile requires.
//!
//! ## Why
//! A GPU node needs more than a driver: a container runtime, a metrics exporter, a device plugin. A
//! profile names them, and names those that must not run.
//!
//! ## How it is judged
//! Each unit under `services` of the profile must be `active`, `enabled` or `installed`, or
//! `inactive`, as stated there. `nvidia-persistenced` and `nvidia-fabricmanager` are left to
//! `persistence_daemon` and `fabric_manager`, which follow the same lines of the profile. Skipped
//! when the profile names no other.
//!
//! ## What to do
//! `systemctl status <unit>` and `journalctl -u <unit>` show the reason;
//! `systemctl enable --now <unit>` starts it for good.
//!
//! ## Source
//! systemctl(1), <https://www.freedesktop.org/software/systemd/man/latest/systemctl.html>

use crate::check::{Check, Judge};
use crate::expect::FABRIC_MANAGER_SERVICE;
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "services",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://www.freedesktop.org/software/systemd/man/latest/systemctl.html",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let mut tally = Tally::default();
    let mut hidden = None;
    let asked = profile
        .services
        .iter()
        .filter(|(name, _)| !judged_elsewhere(name));
    for (name, requirement) in asked {
        let wanted = queries::requirement_word(*requirement);
        match queries::service(facts, name) {
            Ok(state) if queries::meets(state, *requirement) => {
                tally.pass(format!(
                    "service {name} is {}",
                    queries::describe_service(state)
                ));
            }
            Ok(state) => tally.fail(format!(
                "service {name} is {}, the profile requires {wanted}",
                queries::describe_service(state)
            )),
            Err(outcome) if outcome.verdict == Verdict::Skip => hidden = Some(outcome),
            Err(outcome) => tally.error(outcome.summary),
        }
    }
    let worst = tally.worst();
    if let Some(hidden) = hidden
        && !matches!(worst, Some(Verdict::Fail | Verdict::Error))
    {
        return Err(hidden);
    }
    let outcome = tally.outcome(Outcome::skip(
        "no other service is configured in the profile",
    ));
    Ok(if worst == Some(Verdict::Fail) {
        outcome.remedy("see why: systemctl status UNIT; journalctl -u UNIT; start it for good: systemctl enable --now UNIT")
    } else {
        outcome
    })
}

fn judged_elsewhere(name: &str) -> bool {
    name == FABRIC_MANAGER_SERVICE || name == super::persistence_daemon::SERVICE
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading, ServiceState};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    const DOCKER_AND_EXPORTER: &str = "services: {docker: active, nvidia-dcgm: inactive}";

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn node(docker_active: bool, dcgm_active: bool) -> Facts {
        let mut facts = healthy_node();
        for (name, active) in [("docker", docker_active), ("nvidia-dcgm", dcgm_active)] {
            let state = ServiceState {
                installed: true,
                enabled: true,
                active,
            };
            facts
                .host
                .services
                .insert(name.to_owned(), Reading::Value(state));
        }
        facts
    }

    #[test]
    fn judges_each_unit_that_the_profile_names() {
        for (docker, dcgm, verdict) in [
            (true, false, Verdict::Pass),
            (false, false, Verdict::Fail),
            (true, true, Verdict::Fail),
        ] {
            let finding = judge(&node(docker, dcgm), DOCKER_AND_EXPORTER);
            assert_eq!(finding.verdict, verdict);
        }
        assert_eq!(
            judge(&node(false, false), DOCKER_AND_EXPORTER).summary,
            "service docker is enabled but not active, the profile requires active"
        );
    }

    #[test]
    fn judges_enabled_and_installed() {
        let mut facts = node(false, false);
        assert_eq!(
            judge(&facts, "services: {docker: enabled}").verdict,
            Verdict::Pass
        );
        facts
            .host
            .services
            .insert("docker".to_owned(), Reading::Value(ServiceState::default()));
        assert_eq!(
            judge(&facts, "services: {docker: enabled}").verdict,
            Verdict::Fail
        );
        assert_eq!(
            judge(&facts, "services: {docker: installed}").verdict,
            Verdict::Fail
        );
    }

    #[test]
    fn skips_what_no_profile_names_or_what_has_its_own_check() {
        assert_eq!(judge(&healthy_node(), "{}").verdict, Verdict::Skip);
        let finding = judge(
            &healthy_node(),
            "services: {nvidia-fabricmanager: inactive, nvidia-persistenced: inactive}",
        );
        assert_eq!(finding.verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_one_was_not_read() {
        let mut facts = node(true, false);
        facts.host.services.remove("nvidia-dcgm");
        assert_eq!(judge(&facts, DOCKER_AND_EXPORTER).verdict, Verdict::Error);
        facts
            .host
            .services
            .insert("nvidia-dcgm".to_owned(), Reading::NotSupported);
        assert_eq!(judge(&facts, DOCKER_AND_EXPORTER).verdict, Verdict::Error);
    }

    #[test]
    fn what_a_container_cannot_see_is_not_passed() {
        let mut facts = node(true, false);
        facts.host.in_container = Reading::Value(true);
        facts.host.services.insert(
            "nvidia-dcgm".to_owned(),
            Reading::Value(ServiceState::default()),
        );
        assert_eq!(judge(&facts, DOCKER_AND_EXPORTER).verdict, Verdict::Skip);
    }
}
