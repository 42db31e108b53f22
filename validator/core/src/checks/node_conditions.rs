//! The node's conditions are those of a node that takes work.
//!
//! ## Why
//! A GPU can be right on a node that the cluster gives no work to: not ready, out of disk,
//! cordoned.
//!
//! ## How it is judged
//! On the node object: `Ready` must be `True`; `MemoryPressure`, `DiskPressure`, `PIDPressure` and
//! `NetworkUnavailable` must not be `True`; `AcceleratedHardwareReady` (EKS) must not be `False`. A
//! cordoned node is a `warn`: it is an administrator's decision. Other conditions are left to those
//! who write them, `GpuValidated` above all: it is this validator's own, and describes an earlier
//! run.
//!
//! ## What to do
//! The condition's message names the problem: `kubectl describe node NODE`. `kubectl uncordon NODE`
//! opens a cordoned one.
//!
//! ## Source
//! Kubernetes, node status, <https://kubernetes.io/docs/reference/node/node-status/#condition>;
//! EKS, node health, <https://docs.aws.amazon.com/eks/latest/userguide/node-health.html>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::{Facts, NodeCondition};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "node_conditions",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/reference/node/node-status/#condition",
};

const PRESSURES: [&str; 4] = [
    "MemoryPressure",
    "DiskPressure",
    "PIDPressure",
    "NetworkUnavailable",
];

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let node = device_ids::api(facts, profile)?
        .node
        .required("the node object")?;
    let mut tally = Tally::default();
    match node.conditions.iter().find(|it| it.kind == "Ready") {
        Some(ready) if ready.status == "True" => tally.pass("the node is ready"),
        Some(ready) => tally.fail(format!("the node is not ready: {}", in_words(ready))),
        None => tally.error("the node object has no condition Ready"),
    }
    for condition in &node.conditions {
        let pressure = PRESSURES.contains(&condition.kind.as_str()) && condition.status == "True";
        let hardware = condition.kind == "AcceleratedHardwareReady" && condition.status == "False";
        if pressure || hardware {
            tally.fail(in_words(condition));
        }
    }
    if node.unschedulable {
        tally.warn("the node is cordoned");
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::error("no condition was read"));
    Ok(match worst {
        Some(Verdict::Fail) => {
            outcome.remedy("kubectl describe node NODE shows the conditions' messages")
        }
        Some(Verdict::Warn) => outcome.remedy("kubectl uncordon NODE opens it again"),
        _ => outcome,
    })
}

fn in_words(condition: &NodeCondition) -> String {
    let mut text = format!("condition {} is {}", condition.kind, condition.status);
    for part in [&condition.reason, &condition.message] {
        if !part.is_empty() {
            text.push_str(", ");
            text.push_str(part);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Facts, NodeCondition, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        judge_host_check, kubernetes_node, kubernetes_node_with_api, kubernetes_node_with_object,
    };

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&CHECK, facts, "{}")
    }

    fn with(kind: &str, status: &str) -> Facts {
        kubernetes_node_with_object(|node| {
            node.conditions.retain(|it| it.kind != kind);
            node.conditions.push(NodeCondition {
                kind: kind.to_owned(),
                status: status.to_owned(),
                reason: "Because".to_owned(),
                message: "of that".to_owned(),
            });
        })
    }

    #[test]
    fn conditions_by_their_meaning() {
        assert_eq!(judge(&kubernetes_node()).verdict, Verdict::Pass);
        for (kind, status, verdict) in [
            ("Ready", "True", Verdict::Pass),
            ("Ready", "False", Verdict::Fail),
            ("Ready", "Unknown", Verdict::Fail),
            ("DiskPressure", "True", Verdict::Fail),
            ("NetworkUnavailable", "False", Verdict::Pass),
            ("NetworkUnavailable", "True", Verdict::Fail),
            ("AcceleratedHardwareReady", "True", Verdict::Pass),
            ("AcceleratedHardwareReady", "False", Verdict::Fail),
            // What was said of an earlier validation must not decide over this one.
            ("GpuValidated", "False", Verdict::Pass),
            ("SomebodysOwn", "False", Verdict::Pass),
        ] {
            let finding = judge(&with(kind, status));
            assert_eq!(
                finding.verdict, verdict,
                "{kind}={status}: {}",
                finding.summary
            );
        }
        assert_eq!(
            judge(&with("Ready", "False")).summary,
            "the node is not ready: condition Ready is False, Because, of that"
        );
    }

    #[test]
    fn a_cordoned_node_is_a_warning() {
        let facts = kubernetes_node_with_object(|node| node.unschedulable = true);
        assert_eq!(judge(&facts).verdict, Verdict::Warn);
    }

    #[test]
    fn a_node_without_conditions_or_unread_is_an_error() {
        let none = kubernetes_node_with_object(|node| node.conditions.clear());
        let unread = kubernetes_node_with_api(|api| api.node = Reading::NotRead("403".to_owned()));
        for facts in [none, unread] {
            assert_eq!(judge(&facts).verdict, Verdict::Error);
        }
    }
}
