//! A healthy machine for tests: each test breaks one thing of it.

mod allocation;
mod burn;
mod environment;
mod gpu;
mod host;
mod image;
mod kubernetes;
mod layouts;
mod many_gpus;

pub use allocation::{allocated_node, allocated_node_with, allocated_node_with_run, set_detail};
pub use burn::{burned_node, burned_node_with, burned_node_with_sensors};
pub use environment::{device_code, framework_environment, torch_environment};
pub use gpu::{
    MIB, healthy_single_h200, healthy_t4, judge_gpu, judge_healthy, judge_only_gpu,
    make_model_unknown, node_with, python_process,
};
pub use host::unload_driver;
pub use image::{healthy_image, image_of, judge_image_check};
pub use kubernetes::{
    gpu_uuid, kubernetes_node, kubernetes_node_with, kubernetes_node_with_api,
    kubernetes_node_with_gpu_pods, kubernetes_node_with_object,
};
pub use layouts::laid_out_node;
pub use many_gpus::burned_node_of;

use crate::check::Check;
use crate::facts::Facts;
use crate::findings::Finding;
use crate::level::Level;

/// UUIDs of the GPUs, in their order.
fn uuids_of(facts: &Facts) -> Vec<String> {
    let uuids = facts.gpus.iter().filter_map(|gpu| gpu.uuid.value());
    uuids.cloned().collect()
}

/// Eight healthy H200s as a p5en.48xlarge has them, at level extended.
pub fn healthy_node() -> Facts {
    let mut facts = Facts {
        level: Level::Extended,
        collected_at: "2026-11-20T12:00:00Z".to_owned(),
        ..Facts::default()
    };
    host::add_host_and_cuda(&mut facts);
    facts.gpus = (0..8).map(gpu::healthy_gpu).collect();
    facts
}

/// Begins the lines in which tests report the verdicts that they saw.
pub const VERDICT_SEEN: &str = "verdict-seen";

/// The findings of one check about every subject, host first, then in the order of the GPUs.
pub fn judge_check(check: &Check, facts: &Facts, profile_yaml: &str) -> Vec<Finding> {
    judge_check_at(Level::Extended, check, facts, profile_yaml)
}

fn judge_check_at(level: Level, check: &Check, facts: &Facts, profile_yaml: &str) -> Vec<Finding> {
    let profile =
        crate::parse_profile(profile_yaml, "test profile").expect("the test's profile is valid");
    let findings: Vec<Finding> = crate::judge(facts, &profile, level)
        .into_iter()
        .filter(|it| it.check == check.id)
        .collect();
    for finding in &findings {
        // Read by `every_check_is_seen_to_pass_and_to_object` in check.rs.
        println!("{VERDICT_SEEN} {} {}", finding.check, finding.verdict);
    }
    findings
}

/// The one finding of a check that judges the host.
pub fn judge_host_check(check: &Check, facts: &Facts, profile_yaml: &str) -> Finding {
    let mut findings = judge_check(check, facts, profile_yaml);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings.remove(0)
}
