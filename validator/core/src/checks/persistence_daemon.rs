//! The persistence daemon runs.
//!
//! ## Why
//! `nvidia-persistenced` keeps the driver's state of every GPU while no process uses it.
//! Persistence mode that was set with `nvidia-smi -pm 1` instead is gone after the next reboot, and
//! NVIDIA calls that way deprecated.
//!
//! ## How it is judged
//! The service `nvidia-persistenced` must be active and enabled, or in the state that `services` of
//! the profile requires. Inactive fails when persistence mode is off on a GPU (or was not read),
//! and warns when the mode is on without the daemon or all GPUs are consumer cards. Active but not
//! enabled warns: it will not be there after a reboot, unless it runs without a systemd unit, in a
//! container. Skipped when the profile wants persistence mode off, without systemd, and in a
//! container that does not see the host's services.
//!
//! Skipped in WSL2 and where every GPU is a vGPU, unless the profile names the service: the Windows
//! host or the hypervisor keeps the driver loaded.
//!
//! ## What to do
//! `systemctl enable --now nvidia-persistenced`
//!
//! ## Source
//! NVIDIA Driver Persistence, <https://docs.nvidia.com/deploy/driver-persistence/>

use crate::check::{Check, Judge};
use crate::expect::is_consumer_card;
use crate::facts::{Facts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::{Profile, ServiceRequirement};
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "persistence_daemon",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/driver-persistence/",
};

pub(super) const SERVICE: &str = "nvidia-persistenced";
const REMEDY: &str = "enable and start it: systemctl enable --now nvidia-persistenced";

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let requirement = profile.services.get(SERVICE).copied();
    if requirement.is_none() && profile.gpus.persistence_mode == Some(false) {
        return Ok(Outcome::skip("the profile wants persistence mode off"));
    }
    if requirement.is_none() && queries::in_wsl(facts) {
        return Ok(Outcome::skip(
            "this is WSL2: the Windows host keeps the driver loaded",
        ));
    }
    if requirement.is_none() && queries::has_only_vgpus(facts) {
        return Ok(Outcome::skip(
            "every GPU is a vGPU: the hypervisor keeps its driver loaded",
        ));
    }
    if requirement != Some(ServiceRequirement::Inactive) {
        queries::loaded_driver(facts, profile)?;
    }
    if facts.host.services.get(SERVICE) == Some(&Reading::NotSupported) {
        return Ok(Outcome::skip("this machine has no systemd"));
    }
    let state = queries::service(facts, SERVICE)?;
    let observed = queries::describe_service(state);
    let summary = format!("service {SERVICE} is {observed}");
    if let Some(requirement) = requirement {
        let wanted = queries::requirement_word(requirement);
        return Ok(if queries::meets(state, requirement) {
            Outcome::pass(summary)
        } else {
            Outcome::fail(format!("{summary}, the profile requires {wanted}"))
                .expected(wanted)
                .observed(observed)
                .remedy(if requirement == ServiceRequirement::Inactive {
                    "disable it: systemctl disable --now nvidia-persistenced"
                } else {
                    REMEDY
                })
        });
    }
    if state.active && queries::starts_again(state, facts) {
        return Ok(Outcome::pass(summary));
    }
    let is_on_everywhere = !facts.gpus.is_empty()
        && facts
            .gpus
            .iter()
            .all(|gpu| gpu.persistence_mode == Reading::Value(true));
    let outcome = if state.active {
        Outcome::warn(format!("{summary}, so it will not run after a reboot"))
    } else if is_on_everywhere {
        Outcome::warn(format!(
            "{summary}; persistence mode is on without it, until the next reboot"
        ))
    } else if !facts.gpus.is_empty() && facts.gpus.iter().all(is_consumer_card) {
        Outcome::warn(format!(
            "{summary}, and persistence mode is not on either, as usual with consumer cards"
        ))
    } else {
        Outcome::fail(format!("{summary}, and persistence mode is not on either"))
    };
    Ok(outcome
        .expected("active and enabled")
        .observed(observed)
        .remedy(REMEDY))
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading, ServiceState};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    #[test]
    fn what_windows_or_a_hypervisor_keeps_loaded_needs_no_daemon_here() {
        let mut wsl = node([false, false, false], true);
        wsl.host.kernel_release = Reading::Value("6.6.87.2-microsoft-standard-WSL2".to_owned());
        assert_eq!(judge(&wsl, "{}").verdict, Verdict::Skip);
        let mut guest = node([false, false, false], true);
        for gpu in &mut guest.gpus {
            gpu.virtualization_mode = Reading::Value("vgpu".to_owned());
        }
        assert_eq!(judge(&guest, "{}").verdict, Verdict::Skip);
        let asked = "services: {nvidia-persistenced: active}";
        assert_eq!(judge(&guest, asked).verdict, Verdict::Fail);
    }

    /// The service in this state, and persistence mode of every GPU.
    fn node([installed, enabled, active]: [bool; 3], mode: bool) -> Facts {
        let mut facts = healthy_node();
        let state = ServiceState {
            installed,
            enabled,
            active,
        };
        facts
            .host
            .services
            .insert(super::SERVICE.to_owned(), Reading::Value(state));
        for gpu in &mut facts.gpus {
            gpu.persistence_mode = Reading::Value(mode);
        }
        facts
    }

    #[test]
    fn judges_the_service_and_what_would_replace_it() {
        for (state, mode, verdict) in [
            ([true, true, true], true, Verdict::Pass),
            ([true, false, true], true, Verdict::Warn),
            ([false, false, true], true, Verdict::Pass),
            ([true, true, false], true, Verdict::Warn),
            ([false, false, false], true, Verdict::Warn),
            ([true, true, false], false, Verdict::Fail),
            ([false, false, false], false, Verdict::Fail),
        ] {
            let finding = judge(&node(state, mode), "{}");
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn persistence_mode_that_was_not_read_is_not_on() {
        let mut facts = node([true, true, false], true);
        facts.gpus[5].persistence_mode = Reading::NotRead("time-out".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn a_profile_may_ask_for_more_or_the_opposite() {
        let facts = node([true, true, false], true);
        assert_eq!(
            judge(&facts, "services: {nvidia-persistenced: active}").verdict,
            Verdict::Fail
        );
        assert_eq!(
            judge(&facts, "services: {nvidia-persistenced: inactive}").verdict,
            Verdict::Pass
        );
        assert_eq!(
            judge(&healthy_node(), "services: {nvidia-persistenced: inactive}").verdict,
            Verdict::Fail
        );
        assert_eq!(
            judge(&facts, "gpus: {persistence_mode: false}").verdict,
            Verdict::Skip
        );
    }

    #[test]
    fn a_container_does_not_see_it() {
        let mut facts = node([false, false, false], true);
        facts.host.in_container = Reading::Value(true);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_it_was_not_read_and_skips_without_systemd() {
        let mut facts = healthy_node();
        let key = super::SERVICE.to_owned();
        facts.host.services.insert(
            key.clone(),
            Reading::NotRead("permission denied".to_owned()),
        );
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        facts
            .host
            .services
            .insert(key.clone(), Reading::NotSupported);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
        facts.host.services.remove(&key);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn consumer_cards_without_it_warn() {
        let mut facts = node([false, false, false], false);
        for gpu in &mut facts.gpus {
            gpu.name = Reading::Value("NVIDIA GeForce RTX 4090".to_owned());
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Warn);
    }
}
