//! The node has the taints that the profile requires.
//!
//! ## Why
//! A GPU node without its taint is filled by pods that need no GPU, and the pods that do then find
//! no room on it.
//!
//! ## How it is judged
//! Each taint of `kubernetes.taints` in the profile (`nvidia.com/gpu=true:NoSchedule`) must be on
//! the node object with this key, value and effect; others may be there. Skipped when the profile
//! names none, without a kubelet, and without credentials for the API server.
//!
//! ## What to do
//! `kubectl taint node NODE nvidia.com/gpu=true:NoSchedule`, and for nodes to come in the node
//! group: Terraform's `taint`, or the kubelet's `--register-with-taints`. Pods that request GPUs
//! need the toleration; the admission plugin `ExtendedResourceToleration` gives it to them.
//!
//! ## Source
//! Kubernetes, taints and tolerations,
//! <https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/>

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "node_taints",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let wanted = &profile.kubernetes.taints;
    if wanted.is_empty() {
        return Err(Outcome::skip("no taint is configured in the profile"));
    }
    let node = device_ids::api(facts, profile)?
        .node
        .required("the node object")?;
    let has: Vec<String> = node.taints.iter().map(ToString::to_string).collect();
    let mut tally = Tally::default();
    for taint in wanted {
        if has.contains(taint) {
            tally.pass(format!("taint {taint} is there"));
        } else {
            tally.fail(format!("taint {taint} is missing"));
        }
    }
    let failed = tally.worst() == Some(Verdict::Fail);
    let outcome = tally.outcome(Outcome::error("no taint was read"));
    Ok(if failed {
        let observed = if has.is_empty() {
            "no taint".to_owned()
        } else {
            has.join(", ")
        };
        outcome
            .expected(wanted.join(", "))
            .observed(observed)
            .remedy("kubectl taint node NODE KEY=VALUE:EFFECT, and the taints of the node group for nodes to come")
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
    fn the_taints_of_the_profile_must_be_there() {
        for (taint, verdict) in [
            ("nvidia.com/gpu=true:NoSchedule", Verdict::Pass),
            ("nvidia.com/gpu:NoSchedule", Verdict::Fail),
            ("nvidia.com/gpu=true:NoExecute", Verdict::Fail),
            ("team=a:NoSchedule", Verdict::Fail),
        ] {
            let profile = format!("kubernetes: {{taints: ['{taint}']}}");
            let finding = judge_host_check(&CHECK, &kubernetes_node(), &profile);
            assert_eq!(finding.verdict, verdict, "{taint}: {}", finding.summary);
        }
        let finding = judge_host_check(&CHECK, &kubernetes_node(), "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
    }

    #[test]
    fn a_node_that_was_not_read_is_an_error() {
        let facts = kubernetes_node_with_api(|api| api.node = Reading::NotRead("404".to_owned()));
        let profile = "kubernetes: {taints: ['team=a:NoSchedule']}";
        assert_eq!(
            judge_host_check(&CHECK, &facts, profile).verdict,
            Verdict::Error
        );
    }
}
