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

use std::collections::HashMap;

use crate::check::{Check, Judge, JudgeGpu};
use crate::expect;
use crate::expect::model_has;
use crate::facts::{FabricState, Facts, GpuFacts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::siblings::NameCounts;

pub(crate) const CHECK: Check = Check {
    id: "fabric_state",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/",
};

/// Hopper, the first architecture that registers with a fabric.
const FIRST_MAJOR_WITH_FABRIC: u32 = 9;

/// What is known of all GPUs together.
struct Node<'f> {
    counts: NameCounts<'f>,
    has_switches: bool,
    /// The fabrics in which GPUs of one name are registered.
    fabrics: HashMap<&'f Reading<String>, Fabrics<'f>>,
}

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let mut registered: HashMap<&Reading<String>, Vec<Fabric<'f>>> = HashMap::new();
    for gpu in &facts.gpus {
        if let Some(state) = gpu.fabric.value().filter(|it| it.state == "completed") {
            let fabrics = registered.entry(&gpu.name).or_default();
            fabrics.push(Fabric::of(state));
        }
    }
    let fabrics = registered.into_iter();
    let node = Node {
        counts: NameCounts::of(facts),
        has_switches: expect::fabric_manager(facts, profile).is_some_and(|it| it.value),
        fabrics: fabrics.map(|(name, it)| (name, Fabrics::of(&it))).collect(),
    };
    Box::new(move |gpu| judge(gpu, &node))
}

fn judge(gpu: &GpuFacts, node: &Node<'_>) -> Judgement {
    let fabric = gpu
        .fabric
        .required_if(must_have_a_fabric(gpu, node), "NVLink fabric")?;
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
    } else if let Some(other) = other_fabric(gpu, fabric, node) {
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
fn other_fabric(gpu: &GpuFacts, fabric: &FabricState, node: &Node<'_>) -> Option<String> {
    let own = Fabric::of(fabric);
    let differs = node.fabrics.get(&gpu.name)?.at_least_as_large(own)?;
    Some(format!(
        "registered with clique {} of cluster {}, another GPU of this node with clique {} of cluster {}",
        in_words(own.clique),
        in_words(own.cluster),
        in_words(differs.clique),
        in_words(differs.cluster),
    ))
}

/// As far as a GPU knows its fabric.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Fabric<'f> {
    cluster: Option<&'f str>,
    clique: Option<u32>,
}

impl<'f> Fabric<'f> {
    fn of(state: &'f FabricState) -> Self {
        Self {
            cluster: state.cluster_uuid.as_deref(),
            clique: state.clique_id,
        }
    }

    /// What one of them does not know does not differ.
    fn is_one(self, other: Self) -> bool {
        let clusters = self.cluster.zip(other.cluster);
        let cliques = self.clique.zip(other.clique);
        clusters.is_none_or(|(one, other)| one == other)
            && cliques.is_none_or(|(one, other)| one == other)
    }
}

/// Fabrics with the number of GPUs that may be members of each, in the order of the GPUs.
struct Fabrics<'f> {
    members: Vec<(Fabric<'f>, usize)>,
}

impl<'f> Fabrics<'f> {
    fn of(registered: &[Fabric<'f>]) -> Self {
        let mut counts: HashMap<Fabric<'f>, usize> = HashMap::new();
        let mut of_clusters: HashMap<Option<&str>, usize> = HashMap::new();
        let mut of_cliques: HashMap<Option<u32>, usize> = HashMap::new();
        let mut different = Vec::new();
        for fabric in registered {
            let count = counts.entry(*fabric).or_default();
            if *count == 0 {
                different.push(*fabric);
            }
            *count += 1;
            *of_clusters.entry(fabric.cluster).or_default() += 1;
            *of_cliques.entry(fabric.clique).or_default() += 1;
        }
        let of_cluster = |it| of_clusters.get(&it).copied().unwrap_or_default();
        let of_clique = |it| of_cliques.get(&it).copied().unwrap_or_default();
        let exact = |cluster, clique| {
            let count = counts.get(&Fabric { cluster, clique });
            count.copied().unwrap_or_default()
        };
        let may_be_of = |it: &Fabric<'f>| match (it.cluster, it.clique) {
            (Some(_), Some(_)) => {
                exact(it.cluster, it.clique)
                    + exact(it.cluster, None)
                    + exact(None, it.clique)
                    + exact(None, None)
            }
            (Some(_), None) => of_cluster(it.cluster) + of_cluster(None),
            (None, Some(_)) => of_clique(it.clique) + of_clique(None),
            (None, None) => registered.len(),
        };
        let members = different.into_iter();
        Self {
            members: members.map(|it| (it, may_be_of(&it))).collect(),
        }
    }

    /// The first fabric that differs from `own` and has as many GPUs.
    fn at_least_as_large(&self, own: Fabric<'_>) -> Option<Fabric<'f>> {
        let of_own = self.members.iter().find(|(it, _)| *it == own);
        let of_own = of_own.map_or(0, |(_, members)| *members);
        let mut others = self.members.iter();
        let other = others.find(|(it, members)| *members >= of_own && !it.is_one(own));
        other.map(|(it, _)| *it)
    }
}

fn in_words(value: Option<impl std::fmt::Display>) -> String {
    value.map_or("without a value".to_owned(), |it| it.to_string())
}

fn is_zero(uuid: &str) -> bool {
    uuid.bytes().all(|it| matches!(it, b'0' | b'-'))
}

fn must_have_a_fabric(gpu: &GpuFacts, node: &Node<'_>) -> bool {
    let is_new_enough = gpu
        .compute_capability
        .value()
        .is_some_and(|it| it.major >= FIRST_MAJOR_WITH_FABRIC);
    let whole_board = expect::is_on_a_whole_board(gpu, &node.counts)
        && model_has(gpu, |model| model.whole_board_nvlinks);
    is_new_enough && (whole_board || node.has_switches)
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
