//! `CUDA_VISIBLE_DEVICES` hides no GPU and is not garbled.
//!
//! ## Why
//! CUDA reads the variable silently: it stops at the first entry that it does not know, so that one
//! typing error takes GPUs away from every program, without an error message.
//!
//! ## How it is judged
//! Not set passes when CUDA and NVML list the same GPUs. Set, each entry must name a GPU that NVML
//! lists, as the driver reads it: all by their numbers, or all by the start of their UUIDs without
//! a space before them, and none twice; anything else fails, and so does hiding every GPU. Hiding
//! some is a warning, as GPUs that are hidden cannot be put under load, unless the profile lists
//! the variable under `environment.allowed` or `environment.required`. The value is compared with
//! what CUDA really offers (without a value, from level standard on: at level quick CUDA is started
//! on one GPU). With MIG on, CUDA's devices must be GPUs or MIG devices that NVML knows.
//!
//! ## What to do
//! Unset the variable where the validator runs, or correct it; UUIDs (`nvidia-smi -L`) are safer
//! than indices.
//!
//! ## Source
//! CUDA Environment Variables,
//! <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables>

use std::collections::BTreeSet;

use crate::check::{Check, Judge};
use crate::facts::{CudaDevice, Facts, GpuFacts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries::{self, counted};
use crate::visible_devices::{self, Garbled};

pub(crate) const CHECK: Check = Check {
    id: "cuda_visible_devices",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
};

const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
const REMEDY: &str =
    "unset CUDA_VISIBLE_DEVICES where this runs, or write UUIDs as nvidia-smi -L prints them";

/// The variable is set to something that leaves CUDA fewer GPUs than it names, or none.
pub(super) fn is_garbled(facts: &Facts) -> bool {
    facts
        .host
        .environment
        .value()
        .and_then(|it| it.get(VARIABLE))
        .is_some_and(|value| garbled(value, facts).is_some())
}

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let value = facts
        .host
        .environment
        .required("the environment")?
        .get(VARIABLE);
    if facts.gpus.is_empty() {
        return Err(queries::reported_by(
            "gpu_count",
            "NVML lists no GPU that could be hidden",
            profile,
        ));
    }
    if let Some(value) = value
        && let Some(trouble) = garbled(value, facts)
    {
        return Ok(Outcome::fail(format!("{VARIABLE} is `{value}`: {trouble}")).remedy(REMEDY));
    }
    if !queries::cuda_initialised(facts) {
        return Err(queries::reported_by(
            "cuda_driver_library",
            "what CUDA offers is not known",
            profile,
        ));
    }
    let offered = facts.cuda.devices.required("CUDA's list of GPUs")?;
    if is_split(facts) {
        return Ok(judge_split(value, offered, facts));
    }
    if facts.cuda.first_gpu_only {
        return Ok(judge_first(offered, facts));
    }
    match value {
        None => judge_unset(offered, facts, profile),
        Some(value) => judge_set(value, offered, facts, profile),
    }
}

fn judge_unset(offered: &[CudaDevice], facts: &Facts, profile: &Profile) -> Judgement {
    let hidden = hidden_gpus(offered, facts)?;
    // A lost GPU may be offered or not, which gpu_reachable reports.
    let lost = facts.gpus.iter().filter(|it| it.lost.is_some()).count();
    let differs = offered.len() > facts.gpus.len() || offered.len() + lost < facts.gpus.len();
    if !hidden.is_empty() || differs {
        return Err(queries::reported_by(
            "gpu_count",
            "CUDA and NVML list different GPUs though the variable is not set",
            profile,
        ));
    }
    Ok(Outcome::pass(format!(
        "{VARIABLE} is not set, CUDA offers all {}",
        counted(offered.len(), "GPU")
    )))
}

/// Level quick hides the other GPUs itself, which it does only where the variable is not set.
fn judge_first(offered: &[CudaDevice], facts: &Facts) -> Outcome {
    let known = known_uuids(facts);
    match offered
        .iter()
        .find(|device| !known.contains(device.uuid.as_str()))
    {
        Some(device) => stranger(device, facts),
        None => Outcome::pass(format!("{VARIABLE} is not set")),
    }
}

/// A device that is not among those that NVML lists, as far as their UUIDs were read.
fn stranger(device: &CudaDevice, facts: &Facts) -> Outcome {
    let unread = |gpu: &&GpuFacts| {
        gpu.uuid.value().is_none() || matches!(gpu.mig_devices, Reading::NotRead(_))
    };
    let unread = facts.gpus.iter().filter(unread).count();
    if unread > 0 {
        return Outcome::error(format!(
            "CUDA offers {}; NVML's UUIDs of {} were not read",
            device.uuid,
            counted(unread, "GPU")
        ));
    }
    Outcome::fail(format!(
        "CUDA offers {}, which NVML does not know",
        device.uuid
    ))
    .remedy("reset the GPUs, or reboot")
}

/// With MIG on, CUDA offers a part of what NVML lists, whatever the variable says.
fn judge_split(value: Option<&String>, offered: &[CudaDevice], facts: &Facts) -> Outcome {
    let known = known_uuids(facts);
    if let Some(device) = offered
        .iter()
        .find(|device| !known.contains(device.uuid.as_str()))
    {
        return stranger(device, facts);
    }
    let variable = value.map_or("not set".to_owned(), |it| format!("`{it}`"));
    Outcome::pass(format!(
        "{VARIABLE} is {variable}; with MIG on, CUDA offers {}",
        counted(offered.len(), "device")
    ))
}

fn judge_set(value: &str, offered: &[CudaDevice], facts: &Facts, profile: &Profile) -> Judgement {
    let wanted = value.split(',').count();
    if offered.len() != wanted {
        return Ok(Outcome::fail(format!(
            "{VARIABLE} is `{value}`, but CUDA offers {}",
            counted(offered.len(), "device")
        ))
        .expected(wanted)
        .observed(offered.len())
        .remedy(REMEDY));
    }
    let hidden = hidden_gpus(offered, facts)?;
    if hidden.is_empty() {
        return Ok(Outcome::pass(format!(
            "{VARIABLE} is `{value}` and hides no GPU"
        )));
    }
    let summary = format!(
        "{VARIABLE} is `{value}` and hides {} of {}",
        hidden.len(),
        counted(facts.gpus.len(), "GPU")
    );
    let environment = &profile.environment;
    if environment.allowed.iter().any(|it| it == VARIABLE)
        || environment.required.contains_key(VARIABLE)
    {
        return Ok(Outcome::pass(format!("{summary}, as the profile allows")));
    }
    Ok(Outcome::warn(summary)
        .expected("no GPU hidden")
        .observed(hidden.join("\n"))
        .remedy(REMEDY))
}

fn is_split(facts: &Facts) -> bool {
    facts
        .gpus
        .iter()
        .any(|gpu| gpu.mig.value().is_some_and(|mig| mig.current))
}

/// UUIDs of GPUs and MIG devices that NVML lists.
fn known_uuids(facts: &Facts) -> BTreeSet<&str> {
    let gpus = facts.gpus.iter().filter_map(|gpu| gpu.uuid.value());
    let parts = facts
        .gpus
        .iter()
        .filter_map(|gpu| gpu.mig_devices.value())
        .flatten()
        .map(|device| &device.uuid);
    gpus.chain(parts).map(String::as_str).collect()
}

/// GPUs that NVML lists and CUDA does not offer.
fn hidden_gpus(offered: &[CudaDevice], facts: &Facts) -> Result<Vec<String>, Outcome> {
    let offered: BTreeSet<&String> = offered.iter().map(|it| &it.uuid).collect();
    let mut hidden = Vec::new();
    for gpu in facts.gpus.iter().filter(|it| it.lost.is_none()) {
        let uuid = gpu.uuid.required("UUID of a GPU")?;
        if !offered.contains(uuid) {
            hidden.push(queries::name_of(gpu));
        }
    }
    Ok(hidden)
}

/// What is wrong with the value, if anything is, so that CUDA offers less than it names.
fn garbled(value: &str, facts: &Facts) -> Option<Garbled> {
    let offerable: Vec<&str> = if value.starts_with("MIG-") {
        known_uuids(facts).into_iter().collect()
    } else {
        let gpus = facts.gpus.iter();
        gpus.map(|gpu| gpu.uuid.value().map_or("", String::as_str))
            .collect()
    };
    visible_devices::named(value, &offerable).err()
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, MigDevice, MigMode, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    /// The variable has this value, and CUDA offers the GPUs in these positions.
    fn node(value: &str, offered: &[usize]) -> Facts {
        let mut facts = healthy_node();
        facts.host.environment =
            Reading::Value([("CUDA_VISIBLE_DEVICES".to_owned(), value.to_owned())].into());
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            *devices = offered.iter().map(|it| devices[*it].clone()).collect();
        }
        facts
    }

    fn uuid(facts: &Facts, position: usize) -> String {
        facts.gpus[position]
            .uuid
            .value()
            .cloned()
            .unwrap_or_default()
    }

    #[test]
    fn passes_when_it_is_not_set_or_hides_nothing() {
        assert_eq!(judge(&healthy_node(), "{}").verdict, Verdict::Pass);
        let facts = node("7,6,5,4,3,2,1,0", &[7, 6, 5, 4, 3, 2, 1, 0]);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn device_that_nvml_does_not_list_fails_only_where_all_uuids_were_read() {
        let mut facts = healthy_node();
        facts.cuda.first_gpu_only = true;
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.truncate(1);
            devices[0].uuid = "GPU-11111111-2222-3333-4444-555555555555".to_owned();
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
        facts.gpus[7].uuid = Reading::NotRead("nvmlDeviceGetUUID did not return".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn hiding_some_is_a_warning_unless_allowed() {
        let facts = node("0,1", &[0, 1]);
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(
            finding.summary,
            "CUDA_VISIBLE_DEVICES is `0,1` and hides 6 of 8 GPUs"
        );
        assert_eq!(
            judge(&facts, "environment: {allowed: [CUDA_VISIBLE_DEVICES]}").verdict,
            Verdict::Pass
        );
        let facts = node(&uuid(&healthy_node(), 3), &[3]);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Warn);
    }

    #[test]
    fn what_is_garbled_or_hides_everything_fails() {
        for value in [
            "",
            " ",
            "-1",
            "8",
            "0,1,8",
            "0,x,1",
            "none",
            "0,0",
            "GPU-ffffffff",
        ] {
            let finding = judge(&node(value, &[]), "{}");
            assert_eq!(finding.verdict, Verdict::Fail, "`{value}`");
        }
        let first = uuid(&healthy_node(), 0);
        for (value, says) in [
            (" ".to_owned() + &first, "begins with a space"),
            (first.clone() + ", " + &first, "begins with a space"),
            (first.clone() + ",1", "is of another kind than the first"),
            (
                "0,".to_owned() + &first,
                "is of another kind than the first",
            ),
            (first.clone() + "," + &first, "for the second time"),
        ] {
            let finding = judge(&node(&value, &[]), "{}");
            assert_eq!(finding.verdict, Verdict::Fail, "`{value}`");
            assert!(finding.summary.contains(says), "{finding:?}");
        }
    }

    #[test]
    fn what_is_odd_and_understood_by_cuda_is_not_garbled() {
        let first = uuid(&healthy_node(), 0);
        for value in [
            "00",
            " 0 ",
            "+0",
            "0;1",
            "0.5",
            &first.replace('-', "").replace("GPU", "GPU-"),
        ] {
            let finding = judge(&node(value, &[0]), "{}");
            assert_eq!(finding.verdict, Verdict::Warn, "`{value}` {finding:?}");
            assert!(
                finding.summary.ends_with("hides 7 of 8 GPUs"),
                "{finding:?}"
            );
        }
    }

    #[test]
    fn a_start_that_fits_several_gpus_is_garbled() {
        assert_eq!(judge(&node("GPU-", &[]), "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn what_cuda_offers_must_be_what_the_variable_says() {
        assert_eq!(judge(&node("0,1", &[0]), "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn with_mig_the_devices_must_be_known() {
        let mut facts = healthy_node();
        facts.gpus[0].mig = Reading::Value(MigMode {
            current: true,
            pending: true,
        });
        facts.gpus[0].mig_devices = Reading::Value(vec![MigDevice {
            uuid: "MIG-1".to_owned(),
            ..MigDevice::default()
        }]);
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.truncate(1);
            devices[0].uuid = "MIG-1".to_owned();
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices[0].uuid = "MIG-2".to_owned();
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn different_lists_without_the_variable_are_left_to_gpu_count() {
        let mut facts = healthy_node();
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.pop();
        }
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(finding.summary.contains("gpu_count"));
    }

    #[test]
    fn errs_when_environment_or_devices_were_not_read() {
        let mut facts = healthy_node();
        facts.cuda.devices = Reading::NotRead("time-out".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        facts.host.environment = Reading::NotRead("not probed".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn leaves_other_root_causes_to_their_own_checks() {
        let mut facts = healthy_node();
        facts.cuda.init = Reading::NotRead("not probed".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
        facts.gpus.clear();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
    }
}
