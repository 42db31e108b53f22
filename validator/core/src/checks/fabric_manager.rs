//! Fabric manager runs where NVSwitches need it.
//!
//! ## Why
//! On machines whose GPUs are connected by NVSwitches, CUDA starts on none of them (error 802,
//! system not yet initialized) until fabric manager has set the switches up. It has been seen dead
//! for weeks while every GPU appeared healthy.
//!
//! ## How it is judged
//! The service `nvidia-fabricmanager` must be active where the profile's `services` requires it,
//! where the EC2 instance type has NVSwitches, or where NVSwitches are on the PCI bus; not enabled
//! is a warning, as it will not run after a reboot, except where it runs without a systemd unit:
//! the GPU operator starts it in a container. Skipped elsewhere (HGX boards of Blackwell GPUs show
//! no NVSwitch; there `fabric_state` judges the result), and in a container that does not see the
//! host's services. `fabric_state` judges the fabric's state of each GPU.
//!
//! ## What to do
//! Install the package of exactly the driver's version and
//! `systemctl enable --now nvidia-fabricmanager`; its log is `/var/log/fabricmanager.log`.
//!
//! ## Source
//! Fabric Manager for NVIDIA NVSwitch Systems,
//! <https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/>

use crate::check::{Check, Judge};
use crate::expect::{self, FABRIC_MANAGER_SERVICE};
use crate::facts::{Facts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::{Profile, ServiceRequirement};
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "fabric_manager",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let Some(needed) = expect::fabric_manager(facts, profile) else {
        facts.host.pci_devices.required("the PCI bus")?;
        return Ok(Outcome::error(
            "whether fabric manager is needed could not be determined",
        ));
    };
    let asked = profile.services.get(FABRIC_MANAGER_SERVICE).copied();
    if !needed.value && asked.is_none() {
        return Ok(Outcome::skip(format!(
            "nothing requires fabric manager: {}",
            needed.source
        )));
    }
    if asked.is_none() {
        queries::loaded_driver(facts, profile)?;
    }
    let no_systemd =
        facts.host.services.get(FABRIC_MANAGER_SERVICE) == Some(&Reading::NotSupported);
    if no_systemd && !queries::in_container(facts) {
        return Ok(Outcome::error(
            "whether fabric manager runs could not be determined: this machine has no systemd",
        ));
    }
    let state = queries::service(facts, FABRIC_MANAGER_SERVICE)?;
    let observed = queries::describe_service(state);
    let summary = format!("service {FABRIC_MANAGER_SERVICE} is {observed}");
    let requirement = match asked {
        Some(ServiceRequirement::Inactive) => ServiceRequirement::Inactive,
        // A node whose switches need it is not well with a fabric manager that is merely installed.
        _ if needed.value => ServiceRequirement::Active,
        Some(requirement) => requirement,
        None => ServiceRequirement::Active,
    };
    let wanted = queries::requirement_word(requirement);
    let source = if asked == Some(requirement) {
        "the profile"
    } else {
        &needed.source
    };
    if !queries::meets(state, requirement) {
        return Ok(Outcome::fail(format!("{summary}, {wanted} is needed: {source}"))
            .expected(wanted)
            .observed(observed)
            .remedy(if requirement == ServiceRequirement::Inactive {
                "disable it: systemctl disable --now nvidia-fabricmanager"
            } else {
                "install the package of exactly the driver's version, then: systemctl enable --now nvidia-fabricmanager; \
                 read /var/log/fabricmanager.log"
            }));
    }
    if requirement == ServiceRequirement::Active && !queries::starts_again(state, facts) {
        return Ok(
            Outcome::warn(format!("{summary}, so CUDA will not start after a reboot"))
                .expected("active and enabled")
                .observed(observed)
                .remedy("enable it: systemctl enable nvidia-fabricmanager"),
        );
    }
    Ok(Outcome::pass(summary))
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading, ServiceState};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn set_service(facts: &mut Facts, installed: bool, enabled: bool, active: bool) {
        let state = ServiceState {
            installed,
            enabled,
            active,
        };
        facts
            .host
            .services
            .insert("nvidia-fabricmanager".to_owned(), Reading::Value(state));
    }

    #[test]
    fn passes_when_the_gpu_operator_runs_it_in_a_container() {
        let mut facts = healthy_node();
        set_service(&mut facts, false, false, true);
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        assert_eq!(
            finding.summary,
            "service nvidia-fabricmanager is active without a systemd unit, as in a container"
        );
    }

    /// Off EC2, and with no switch on the bus.
    fn node_without_switches() -> Facts {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::NotSupported;
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            devices.retain(|device| !device.is_nvswitch());
        }
        facts
    }

    #[test]
    fn passes_when_it_runs() {
        let finding = judge(&healthy_node(), "{}");
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "service nvidia-fabricmanager is active and enabled"
        );
    }

    #[test]
    fn fails_where_switches_wait_for_it() {
        for (installed, enabled) in [(true, true), (true, false), (false, false)] {
            let mut facts = healthy_node();
            facts.host.ec2 = Reading::NotSupported;
            set_service(&mut facts, installed, enabled, false);
            let finding = judge(&facts, "{}");
            assert_eq!(finding.verdict, Verdict::Fail);
            assert!(
                finding.summary.contains("NVSwitches on the PCI bus"),
                "{}",
                finding.summary
            );
        }
    }

    #[test]
    fn warns_when_it_will_not_start_again() {
        let mut facts = healthy_node();
        set_service(&mut facts, true, false, true);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Warn);
    }

    #[test]
    fn skips_without_switches_unless_the_profile_asks() {
        let mut facts = node_without_switches();
        set_service(&mut facts, true, true, false);
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
        assert_eq!(
            finding.summary,
            "nothing requires fabric manager: no NVSwitch is visible; fabric_state judges the result"
        );
        for (asked, verdict) in [
            ("active", Verdict::Fail),
            ("installed", Verdict::Pass),
            ("enabled", Verdict::Pass),
            ("inactive", Verdict::Pass),
        ] {
            let profile = format!("services: {{nvidia-fabricmanager: {asked}}}");
            assert_eq!(judge(&facts, &profile).verdict, verdict, "{asked}");
        }
    }

    #[test]
    fn installed_is_not_enough_where_switches_wait_for_it() {
        let mut facts = healthy_node();
        set_service(&mut facts, true, true, false);
        let finding = judge(&facts, "services: {nvidia-fabricmanager: installed}");
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn a_container_does_not_see_it() {
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(true);
        set_service(&mut facts, false, false, false);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
        facts
            .host
            .services
            .insert("nvidia-fabricmanager".to_owned(), Reading::NotSupported);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
        set_service(&mut facts, true, false, true);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_bus_or_service_were_not_read() {
        let mut facts = node_without_switches();
        facts.host.pci_devices = Reading::NotRead("no /sys".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        let mut facts = healthy_node();
        facts.host.services.clear();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        facts
            .host
            .services
            .insert("nvidia-fabricmanager".to_owned(), Reading::NotSupported);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }
}
