//! The container runtimes pass GPUs to containers as the profile requires.
//!
//! ## Why
//! Without the `nvidia` runtime, or without a CDI specification that is true, containers start and
//! see no GPU, or request one that was replaced. The host itself appears healthy.
//!
//! ## How it is judged
//! `container_runtime.nvidia_runtime`: Docker, containerd or CRI-O knows a runtime named `nvidia`.
//! `container_runtime.cdi`: CDI specifications list every GPU (or every MIG device) under
//! `nvidia.com/gpu`, by index or by UUID; a UUID that no GPU of this machine has is a stale
//! specification. Each may be required or forbidden; skipped when the profile requires neither, and
//! in a container that sees no configuration of the host.
//!
//! ## What to do
//! `nvidia-ctk runtime configure --runtime=docker` (or `containerd`) and restart it;
//! `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` after every change of driver or GPU.
//!
//! ## Source
//! NVIDIA Container Toolkit,
//! <https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html>

use std::collections::BTreeSet;

use crate::check::{Check, Judge};
use crate::facts::{ContainerRuntime, Facts};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::{Profile, Requirement};
use crate::queries;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "container_runtime",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let asked = &profile.container_runtime;
    let nvidia_runtime = asked
        .nvidia_runtime
        .filter(|it| *it != Requirement::Allowed);
    let cdi = asked.cdi.filter(|it| *it != Requirement::Allowed);
    if nvidia_runtime.is_none() && cdi.is_none() {
        return Ok(Outcome::skip(
            "no container runtime is configured in the profile",
        ));
    }
    let runtime = facts
        .host
        .container_runtime
        .required("configuration of container runtimes")?;
    if queries::in_container(facts) && *runtime == ContainerRuntime::default() {
        return Ok(Outcome::skip(
            "this is a container, from which the host's container runtimes are not visible",
        ));
    }
    let mut tally = Tally::default();
    if let Some(requirement) = nvidia_runtime {
        judge_nvidia_runtime(runtime, requirement, &mut tally);
    }
    if let Some(requirement) = cdi {
        let judged = judge_cdi(runtime, facts, requirement, profile, &mut tally);
        // What cannot be told of CDI does not take back that the runtime is missing.
        if tally.worst() != Some(Verdict::Fail) {
            judged?;
        }
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::error("no container runtime was judged"));
    Ok(if worst == Some(Verdict::Fail) {
        outcome.remedy(
            "configure the runtime: nvidia-ctk runtime configure --runtime=docker (or containerd), and restart it; \
             write the CDI specification again: nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    } else {
        outcome
    })
}

fn judge_nvidia_runtime(runtime: &ContainerRuntime, requirement: Requirement, tally: &mut Tally) {
    let known_to: Vec<&str> = [
        ("Docker", runtime.docker_nvidia_runtime),
        ("containerd or CRI-O", runtime.containerd_nvidia_runtime),
    ]
    .into_iter()
    .filter_map(|(name, knows)| knows.then_some(name))
    .collect();
    let is_known = !known_to.is_empty();
    match (requirement, is_known) {
        (Requirement::Forbidden, true) => tally.fail(format!(
            "{} knows the runtime nvidia, which the profile forbids",
            known_to.join(" and ")
        )),
        (Requirement::Forbidden, false) => tally.pass("no container runtime is named nvidia"),
        (_, true) => tally.pass(format!(
            "{} knows the runtime nvidia",
            known_to.join(" and ")
        )),
        (_, false) => tally.fail(if runtime.toolkit_installed {
            "neither Docker nor containerd knows the runtime nvidia, which the profile requires"
        } else {
            "neither Docker nor containerd knows the runtime nvidia, which the profile requires, and NVIDIA Container \
             Toolkit is not installed"
        }),
    }
}

fn judge_cdi(
    runtime: &ContainerRuntime,
    facts: &Facts,
    requirement: Requirement,
    profile: &Profile,
    tally: &mut Tally,
) -> Result<(), Outcome> {
    let names: BTreeSet<&str> = runtime
        .cdi_specs
        .values()
        .flatten()
        .map(String::as_str)
        .collect();
    if requirement == Requirement::Forbidden {
        if names.is_empty() {
            tally.pass("no CDI specification lists a GPU");
        } else {
            tally.fail("a CDI specification lists GPUs, which the profile forbids");
        }
        return Ok(());
    }
    if names.is_empty() {
        tally.fail("no CDI specification lists a GPU, the profile requires one");
        return Ok(());
    }
    let uuids = device_uuids(facts, profile)?;
    let stale: Vec<&&str> = names
        .iter()
        .filter(|name| name.starts_with("GPU-") || name.starts_with("MIG-"))
        .filter(|name| !uuids.contains(**name))
        .collect();
    if let Some(name) = stale.first() {
        tally.fail(format!(
            "the CDI specification lists {name}, which this machine does not have"
        ));
    }
    let by_uuid = names.iter().filter(|it| uuids.contains(**it)).count();
    // Indices are `3` for a GPU and `3:1` for a MIG device.
    let by_index = names
        .iter()
        .filter(|it| it.bytes().all(|byte| byte.is_ascii_digit() || byte == b':'))
        .count();
    let listed = by_uuid.max(by_index);
    if listed < uuids.len() {
        tally.fail(format!(
            "CDI specifications list {listed} of {}",
            queries::counted(uuids.len(), "GPU device")
        ));
    } else if stale.is_empty() {
        tally.pass(format!(
            "CDI specifications list {}",
            queries::counted(listed, "GPU device")
        ));
    }
    Ok(())
}

/// UUIDs of what containers can be given: GPUs, or the MIG devices of GPUs that are split.
fn device_uuids<'a>(facts: &'a Facts, profile: &Profile) -> Result<BTreeSet<&'a str>, Outcome> {
    if facts.gpus.is_empty() {
        return Err(queries::reported_by(
            "gpu_count",
            "NVML lists no GPU that a CDI specification could name",
            profile,
        ));
    }
    let mut uuids = BTreeSet::new();
    for gpu in &facts.gpus {
        match gpu.mig_devices.value().filter(|it| !it.is_empty()) {
            Some(devices) => uuids.extend(devices.iter().map(|it| it.uuid.as_str())),
            None => {
                uuids.insert(gpu.uuid.required("UUID of a GPU")?.as_str());
            }
        }
    }
    Ok(uuids)
}

#[cfg(test)]
mod tests {
    use crate::facts::{ContainerRuntime, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    const BOTH: &str = "container_runtime: {nvidia_runtime: required, cdi: required}";
    const RUNTIME: &str = "container_runtime: {nvidia_runtime: required}";
    const CDI: &str = "container_runtime: {cdi: required}";
    const NEITHER: &str = "container_runtime: {nvidia_runtime: forbidden, cdi: forbidden}";

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn runtime(facts: &mut Facts) -> &mut ContainerRuntime {
        match &mut facts.host.container_runtime {
            Reading::Value(runtime) => runtime,
            _ => unreachable!("the healthy machine has a container runtime"),
        }
    }

    fn node_with_cdi_devices(names: &[&str]) -> Facts {
        let mut facts = healthy_node();
        let names = names.iter().map(|it| (*it).to_owned()).collect();
        runtime(&mut facts).cdi_specs = [("/etc/cdi/nvidia.yaml".to_owned(), names)].into();
        facts
    }

    fn uuids(facts: &Facts) -> Vec<&str> {
        facts
            .gpus
            .iter()
            .filter_map(|gpu| gpu.uuid.value())
            .map(String::as_str)
            .collect()
    }

    #[test]
    fn passes_when_both_are_there() {
        assert_eq!(judge(&healthy_node(), BOTH).verdict, Verdict::Pass);
    }

    #[test]
    fn fails_without_the_runtime() {
        let mut facts = healthy_node();
        runtime(&mut facts).docker_nvidia_runtime = false;
        assert_eq!(judge(&facts, RUNTIME).verdict, Verdict::Pass);
        runtime(&mut facts).containerd_nvidia_runtime = false;
        assert_eq!(judge(&facts, RUNTIME).verdict, Verdict::Fail);
    }

    #[test]
    fn a_specification_must_list_every_gpu() {
        let seven = node_with_cdi_devices(&["0", "1", "2", "3", "4", "5", "6", "all"]);
        let finding = judge(&seven, CDI);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "CDI specifications list 7 of 8 GPU devices"
        );
        assert_eq!(
            judge(&node_with_cdi_devices(&[]), CDI).verdict,
            Verdict::Fail
        );
    }

    #[test]
    fn a_specification_may_name_gpus_by_uuid_but_no_strangers() {
        let facts = healthy_node();
        let mut names = uuids(&facts);
        assert_eq!(
            judge(&node_with_cdi_devices(&names), CDI).verdict,
            Verdict::Pass
        );
        names[7] = "GPU-a-card-that-was-replaced";
        let finding = judge(&node_with_cdi_devices(&names), CDI);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.contains("GPU-a-card-that-was-replaced"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn a_profile_may_forbid_both() {
        assert_eq!(judge(&healthy_node(), NEITHER).verdict, Verdict::Fail);
        let mut facts = healthy_node();
        *runtime(&mut facts) = ContainerRuntime::default();
        assert_eq!(judge(&facts, NEITHER).verdict, Verdict::Pass);
    }

    #[test]
    fn skips_what_is_not_asked_for_or_cannot_be_seen() {
        assert_eq!(judge(&healthy_node(), "{}").verdict, Verdict::Skip);
        assert_eq!(
            judge(&healthy_node(), "container_runtime: {cdi: allowed}").verdict,
            Verdict::Skip
        );
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(true);
        *runtime(&mut facts) = ContainerRuntime::default();
        assert_eq!(judge(&facts, BOTH).verdict, Verdict::Skip);
        let mut facts = healthy_node();
        facts.gpus.clear();
        assert_eq!(judge(&facts, CDI).verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let mut facts = healthy_node();
        facts.host.container_runtime = Reading::NotRead("permission denied".to_owned());
        assert_eq!(judge(&facts, BOTH).verdict, Verdict::Error);
        let mut facts = healthy_node();
        facts.gpus[0].uuid = Reading::NotRead("unknown error".to_owned());
        assert_eq!(judge(&facts, CDI).verdict, Verdict::Error);
    }
}
