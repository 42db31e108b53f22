//! The GPU is registered with its NVLink fabric.
//!
//! ## Why
//! With NVSwitches (Hopper and newer) a GPU works only after fabric manager has registered it:
//! before that CUDA initialisation fails with error 802, or the GPU computes but cannot reach its
//! peers.
//!
//! ## How it is judged
//! The registration must be completed, with success, and the fabric's health mask must name
//! nothing. All GPUs of a model must be in one cluster and one clique, and on rack-scale systems
//! (GB200, GB300) the cluster UUID must not be zero. Anything else is a `fail`, "in progress" too:
//! it ends by itself only in the first minutes after boot. GPUs that need no fabric are skipped;
//! one that must have a fabric (a whole board of Hopper or newer, or an EC2 type with NVSwitches)
//! and reports that it has none is an `error`.
//!
//! ## What to do
//! Start fabric manager of exactly the driver's version
//! (`systemctl enable --now nvidia-fabricmanager`) and read its log. On a virtual machine with
//! shared NVSwitches the host runs it: contact the provider, or replace the instance.
//!
//! ## Source
//! `nvmlGpuFabricInfo_t`, <https://docs.nvidia.com/deploy/nvml-api/group__nvmlFabricDefs.html>;
//! NVIDIA Fabric Manager User Guide,
//! <https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/>; DCGM fails every other
//! state.

use crate::check::{Check, Judge};
use crate::expect;
use crate::expect::model_has;
use crate::facts::{FabricState, Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;

pub(crate) const CHECK: Check = Check {
    id: "fabric_state",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
};

/// Hopper, the first architecture that registers with a fabric.
const FIRST_MAJOR_WITH_FABRIC: u32 = 9;

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let fabric = gpu
        .fabric
        .required_if(must_have_a_fabric(gpu, facts, profile), "NVLink fabric")?;
    let state = fabric.state.as_str();
    let trouble = if state != "completed" {
        format!(
            "registration with the NVLink fabric is {}",
            state.replace('_', " ")
        )
    } else if fabric.status != "success" {
        format!(
            "registration with the NVLink fabric ended with {}",
            fabric.status
        )
    } else if let Some(unhealthy) = fabric.unhealthy.as_ref().filter(|it| !it.is_empty()) {
        format!("the NVLink fabric is unhealthy: {}", unhealthy.join(", "))
    } else if let Some(other) = other_fabric(gpu, fabric, facts) {
        other
    } else if expect::is_rack_scale(gpu) && fabric.cluster_uuid.as_deref().is_none_or(is_zero) {
        "registered with the NVLink fabric, but the cluster UUID is zero".to_owned()
    } else {
        return Ok(Outcome::pass(
            "registered with the NVLink fabric".to_owned(),
        ));
    };
    Ok(Outcome::fail(trouble)
        .expected("completed, success, healthy")
        .observed(format!("{state}, {}", fabric.status))
        .remedy(
            "start fabric manager of the driver's version (systemctl enable --now nvidia-fabricmanager) and read its log; where the host runs it, contact the provider",
        ))
}

/// The GPUs of one node are in one fabric: cluster and clique are the same. Of several fabrics the
/// one with most GPUs is taken for right, and where none has most, every GPU is at fault.
fn other_fabric(gpu: &GpuFacts, fabric: &FabricState, facts: &Facts) -> Option<String> {
    let others = facts.gpus.iter().filter(|it| it.name == gpu.name);
    let registered: Vec<&FabricState> = others
        .filter_map(|it| it.fabric.value())
        .filter(|it| it.state == "completed")
        .collect();
    let members = |of: &FabricState| registered.iter().filter(|it| is_one(it, of)).count();
    let own = members(fabric);
    let differs = registered
        .iter()
        .find(|it| !is_one(it, fabric) && members(it) >= own)?;
    Some(format!(
        "registered with clique {} of cluster {}, another GPU of this node with clique {} of cluster {}",
        in_words(fabric.clique_id),
        in_words(fabric.cluster_uuid.as_ref()),
        in_words(differs.clique_id),
        in_words(differs.cluster_uuid.as_ref()),
    ))
}

/// What one of them does not know does not differ.
fn is_one(one: &FabricState, other: &FabricState) -> bool {
    let clusters = one.cluster_uuid.as_ref().zip(other.cluster_uuid.as_ref());
    let cliques = one.clique_id.zip(other.clique_id);
    clusters.is_none_or(|(one, other)| one == other)
        && cliques.is_none_or(|(one, other)| one == other)
}

fn in_words(value: Option<impl std::fmt::Display>) -> String {
    value.map_or("without a value".to_owned(), |it| it.to_string())
}

fn is_zero(uuid: &str) -> bool {
    uuid.bytes().all(|it| matches!(it, b'0' | b'-'))
}

fn must_have_a_fabric(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> bool {
    let is_new_enough = gpu
        .compute_capability
        .value()
        .is_some_and(|it| it.major >= FIRST_MAJOR_WITH_FABRIC);
    let whole_board = expect::is_on_a_whole_board(gpu, facts)
        && model_has(gpu, |model| model.whole_board_nvlinks);
    let has_switches = expect::fabric_manager(facts, profile).is_some_and(|it| it.value);
    is_new_enough && (whole_board || has_switches)
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{FabricState, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_node, healthy_single_h200, healthy_t4, judge_gpu, judge_healthy, judge_only_gpu,
    };

    fn with(change: impl FnOnce(&mut FabricState)) -> Finding {
        judge_gpu(&CHECK, "{}", |gpu| {
            let Reading::Value(fabric) = &mut gpu.fabric else {
                panic!("the healthy GPU has a fabric")
            };
            change(fabric);
        })
    }

    #[test]
    fn passes_when_registered() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_in_every_other_state() {
        for (state, words) in [
            ("not_started", "not started"),
            ("in_progress", "in progress"),
        ] {
            let finding = with(|fabric| fabric.state = state.to_owned());
            assert_eq!(finding.verdict, Verdict::Fail);
            assert!(finding.summary.ends_with(words), "{}", finding.summary);
        }
    }

    #[test]
    fn fails_when_the_registration_did_not_succeed() {
        let finding = with(|fabric| fabric.status = "NVML_ERROR_UNKNOWN".to_owned());
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.contains("NVML_ERROR_UNKNOWN"));
    }

    #[test]
    fn fails_when_the_fabric_is_unhealthy() {
        let finding = with(|fabric| fabric.unhealthy = Some(vec!["degraded bandwidth".to_owned()]));
        assert_eq!(finding.verdict, Verdict::Fail);
        let finding = with(|fabric| fabric.unhealthy = Some(Vec::new()));
        assert_eq!(finding.verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_it_was_not_read_or_a_whole_board_denies_it() {
        let not_read = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.fabric = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(not_read.verdict, Verdict::Error);
        let denied = judge_gpu(&CHECK, "{}", |gpu| gpu.fabric = Reading::NotSupported);
        assert_eq!(denied.verdict, Verdict::Error);
    }

    #[test]
    fn skips_where_no_fabric_is_needed() {
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", healthy_t4()).verdict,
            Verdict::Skip
        );
        let finding = judge_only_gpu(&CHECK, "{}", healthy_single_h200());
        assert_eq!(finding.verdict, Verdict::Skip);
    }

    #[test]
    fn gpus_of_one_node_are_in_one_fabric() {
        let finding = with(|fabric| fabric.clique_id = Some(1));
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        let finding = with(|fabric| {
            fabric.cluster_uuid = Some("11111111-0000-0000-0000-000000000000".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
    }

    #[test]
    fn a_rack_has_a_cluster_uuid() {
        let mut gpu = healthy_node().gpus.swap_remove(0);
        gpu.name = Reading::Value("NVIDIA GB200".to_owned());
        let finding = judge_only_gpu(&CHECK, "{}", gpu.clone());
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        if let Reading::Value(fabric) = &mut gpu.fabric {
            fabric.cluster_uuid = Some("5c1f0000-0000-4000-8000-000000000000".to_owned());
        }
        assert_eq!(judge_only_gpu(&CHECK, "{}", gpu).verdict, Verdict::Pass);
    }
}
