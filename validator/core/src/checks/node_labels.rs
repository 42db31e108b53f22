//! The node has the labels that the profile requires.
//!
//! ## Why
//! The device plugin, exporters and GPU pods find a node by its labels. Without
//! `nvidia.com/gpu=true` a GPU node stays without a plugin in clusters that select by it.
//!
//! ## How it is judged
//! Each label of `kubernetes.labels` in the profile must be on the node object with exactly this
//! value. Skipped when the profile names none, without a kubelet, and without credentials for the
//! API server.
//!
//! ## What to do
//! `kubectl label node NODE nvidia.com/gpu=true`, and for nodes to come in the node group:
//! Terraform's `labels`, or the kubelet's `--node-labels`.
//!
//! ## Source
//! Kubernetes, labels, <https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "node_labels",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let wanted = &profile.kubernetes.labels;
    if wanted.is_empty() {
        return Err(Outcome::skip("no label is configured in the profile"));
    }
    let node = device_ids::api(facts, profile)?
        .node
        .required("the node object")?;
    let mut tally = Tally::default();
    for (name, value) in wanted {
        match node.labels.get(name) {
            Some(has) if has == value => tally.pass(format!("label {name}={value} is there")),
            Some(has) => tally.fail(format!(
                "label {name} is `{has}`, the profile requires `{value}`"
            )),
            None => tally.fail(format!(
                "label {name} is missing, the profile requires `{value}`"
            )),
        }
    }
    let failed = tally.worst() == Some(Verdict::Fail);
    let outcome = tally.outcome(Outcome::error("no label was read"));
    Ok(if failed {
        outcome.remedy("kubectl label node NODE NAME=VALUE, and the labels of the node group for nodes to come")
    } else {
        outcome
    })
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::Reading;
    use crate::findings::Verdict;
    use crate::test_machine::{judge_host_check, kubernetes_node, kubernetes_node_with_api};

    #[test]
    fn the_labels_of_the_profile_must_be_there() {
        for (profile, verdict, says) in [
            ("{}", Verdict::Skip, "no label is configured"),
            (
                "kubernetes: {labels: {nvidia.com/gpu: 'true'}}",
                Verdict::Pass,
                "label nvidia.com/gpu=true is there",
            ),
            (
                "kubernetes: {labels: {nvidia.com/gpu: 'false'}}",
                Verdict::Fail,
                "label nvidia.com/gpu is `true`, the profile requires `false`",
            ),
            (
                "kubernetes: {labels: {role: gpu}}",
                Verdict::Fail,
                "label role is missing, the profile requires `gpu`",
            ),
        ] {
            let finding = judge_host_check(&CHECK, &kubernetes_node(), profile);
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
            assert!(finding.summary.contains(says), "{}", finding.summary);
        }
    }

    #[test]
    fn a_node_that_was_not_read_is_an_error() {
        let facts = kubernetes_node_with_api(|api| api.node = Reading::NotRead("404".to_owned()));
        let profile = "kubernetes: {labels: {role: gpu}}";
        assert_eq!(
            judge_host_check(&CHECK, &facts, profile).verdict,
            Verdict::Error
        );
    }
}
