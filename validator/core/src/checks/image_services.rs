//! The services that a GPU node needs start at boot.
//!
//! ## Why
//! A service that was started while baking, and not enabled, is gone on every instance.
//!
//! ## How it is judged
//! At level image only, from unit files and enablement links. Each service of
//! `image.enabled_services` in the profile must be installed and enabled. Without that list it is
//! `nvidia-persistenced` alone, which every GPU node needs.
//!
//! ## What to do
//! `systemctl enable UNIT` while baking.
//!
//! ## Source
//! systemctl(1), <https://www.freedesktop.org/software/systemd/man/latest/systemctl.html>

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "image_services",
    stage: Stage::Host,
    level: Level::Image,
    judge: Judge::Host(judge),
    documentation_url: "https://www.freedesktop.org/software/systemd/man/latest/systemctl.html",
};

#[expect(clippy::unnecessary_wraps, reason = "every check has this signature")]
fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let asked = &profile.image.enabled_services;
    let names: Vec<&str> = if asked.is_empty() {
        vec![super::persistence_daemon::SERVICE]
    } else {
        asked.iter().map(String::as_str).collect()
    };
    let mut tally = Tally::default();
    for name in names {
        let name = name.strip_suffix(".service").unwrap_or(name);
        let reading = facts.host.services.get(name);
        let Some(reading) = reading else {
            tally.error(format!("the state of service {name} was not read"));
            continue;
        };
        match reading.required(&format!("service {name}")) {
            Ok(state) if state.installed && state.enabled => {
                tally.pass(format!("service {name} is enabled"));
            }
            Ok(state) if state.installed => {
                tally.fail(format!("service {name} is installed but not enabled"));
            }
            Ok(_) => tally.fail(format!("service {name} is not installed")),
            Err(outcome) => tally.error(outcome.summary),
        }
    }
    let failed = tally.worst() == Some(Verdict::Fail);
    let outcome = tally.outcome(Outcome::error("no service was read"));
    Ok(if failed {
        outcome.remedy("enable it while baking: systemctl enable UNIT")
    } else {
        outcome
    })
}

#[cfg(test)]
mod tests {
    use crate::facts::{Reading, ServiceState};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_image, judge_image_check};

    const ASKED: &str = "image: {enabled_services: [nvidia-persistenced, nvidia-cdi-refresh]}";

    fn judge(cdi_refresh: Reading<ServiceState>, profile: &str) -> Finding {
        let mut facts = healthy_image();
        let name = "nvidia-cdi-refresh".to_owned();
        facts.host.services.insert(name, cdi_refresh);
        judge_image_check(&super::CHECK, &facts, profile)
    }

    fn state(installed: bool, enabled: bool) -> Reading<ServiceState> {
        Reading::Value(ServiceState {
            installed,
            enabled,
            active: false,
        })
    }

    #[test]
    fn passes_when_all_are_enabled_although_none_runs() {
        let finding = judge(state(true, true), ASKED);
        assert_eq!(finding.verdict, Verdict::Pass, "{finding:#?}");
        assert_eq!(judge(Reading::default(), "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn fails_for_one_that_would_not_start() {
        let finding = judge(state(true, false), ASKED);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "service nvidia-cdi-refresh is installed but not enabled"
        );
        assert_eq!(judge(state(false, false), ASKED).verdict, Verdict::Fail);
        let finding = judge_image_check(
            &super::CHECK,
            &{
                let mut facts = healthy_image();
                let name = "nvidia-persistenced".to_owned();
                facts.host.services.insert(name, state(false, false));
                facts
            },
            "{}",
        );
        assert_eq!(
            finding.summary,
            "service nvidia-persistenced is not installed"
        );
    }

    #[test]
    fn errs_for_one_that_was_not_read() {
        assert_eq!(judge(Reading::default(), ASKED).verdict, Verdict::Error);
        assert_eq!(judge(Reading::NotSupported, ASKED).verdict, Verdict::Error);
        let unknown = "image: {enabled_services: [nobody-looked]}";
        assert_eq!(judge(state(true, true), unknown).verdict, Verdict::Error);
    }
}
