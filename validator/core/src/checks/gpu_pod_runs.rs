//! A pod that requests one GPU gets one, and its results are correct.
//!
//! ## Why
//! Everything before can be right and a user's pod still see no GPU, or all of them: the container
//! runtime decides in the end. Only a pod shows the result.
//!
//! ## How it is judged
//! At level extended, or where `kubernetes.gpu_pod.run` of the profile is true, with the image of
//! `kubernetes.gpu_pod.image`. As many pods at once as devices are free (or `count`) request one
//! `nvidia.com/gpu` each, mount nothing, and run
//! `gpu-validator collect --level standard --no-burn`. Each must see exactly one GPU of this node,
//! by NVML and by CUDA, and its check kernel must be right; no two may see the same, unless GPUs
//! are shared. Where pods of others have GPUs the check is busy (exit code 4) for these, not
//! failed. Pods are removed at the end, after Ctrl-C as well; what a killed run left is found by
//! its label and removed by the next.
//!
//! ## What to do
//! No GPU in the pod: the container runtime does not give it the driver; make `nvidia` the default
//! runtime or name the runtime class (`kubernetes.gpu_pod.runtime_class`). All GPUs:
//! `NVIDIA_VISIBLE_DEVICES=all` of the image is obeyed without a limit.
//! `CUDA driver version is insufficient`: the image's CUDA is newer than the driver; take an older
//! image or update the driver. Not scheduled: the message names the taint or label.
//!
//! ## Source
//! Kubernetes, schedule GPUs, <https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/>

use std::collections::BTreeMap;

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::{Facts, GpuPod, GpuPodEnd, GpuPods, WorkerEnd};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries::counted;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "gpu_pod_runs",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let settings = &profile.kubernetes.gpu_pod;
    let asked = settings.run.unwrap_or(facts.level == Level::Extended);
    if !asked {
        return Err(Outcome::skip(
            "pods are made at level extended, or where kubernetes.gpu_pod.run of the profile is true",
        ));
    }
    device_ids::api(facts, profile)?;
    let Some(pods) = facts
        .kubernetes
        .as_ref()
        .and_then(|it| it.gpu_pods.as_ref())
    else {
        return Err(match settings.image {
            None if settings.run.is_none() => {
                Outcome::skip("the profile names no image (kubernetes.gpu_pod.image)")
            }
            None => Outcome::error(
                "the profile requires pods and names no image (kubernetes.gpu_pod.image)",
            ),
            Some(_) => Outcome::error("no pod was made"),
        });
    };
    let pods = pods.required("the GPU pods")?;
    if pods.pods.is_empty() {
        return Err(Outcome::busy(format!(
            "all devices of {} are given to pods",
            pods.resource
        )));
    }
    let mut tally = Tally::default();
    let mut busy = 0;
    for pod in &pods.pods {
        busy += usize::from(matches!(pod.end, GpuPodEnd::Busy(_)));
        judge_pod(facts, pod, &mut tally);
    }
    distinct(&pods.pods, profile, &mut tally);
    if let Some(trouble) = &pods.cleanup_trouble {
        tally.warn(trouble.clone());
    }
    let worst = tally.worst();
    if !matches!(worst, Some(Verdict::Fail | Verdict::Error)) {
        if busy > 0 {
            return Err(Outcome::busy(format!(
                "{} found no free GPU",
                counted(busy, "pod")
            )));
        }
        if let Some(taken) = taken_from_count(pods, profile) {
            return Err(taken);
        }
    }
    let outcome = tally.outcome(Outcome::error("no pod was read"));
    Ok(match worst {
        Some(Verdict::Fail) => outcome.remedy("kubectl describe pod shows events; no GPU inside: make nvidia the default runtime or name kubernetes.gpu_pod.runtime_class; CUDA newer than the driver: take an older image or update the driver"),
        Some(Verdict::Warn) => outcome.remedy("kubectl delete pod with this label, or the next run removes them"),
        _ => outcome,
    })
}

/// Fewer pods than the node has devices, or than the profile requires, because others have them.
fn taken_from_count(pods: &GpuPods, profile: &Profile) -> Option<Outcome> {
    let wanted = profile.kubernetes.gpu_pod.count?;
    let free = pods.free?;
    (free < wanted).then(|| {
        Outcome::busy(format!(
            "{} ran, the profile requires {wanted} and only {free} of {} were free",
            counted(pods.pods.len(), "pod"),
            pods.resource
        ))
    })
}

fn judge_pod(facts: &Facts, pod: &GpuPod, tally: &mut Tally) {
    let name = &pod.name;
    match &pod.end {
        GpuPodEnd::Finished => {}
        GpuPodEnd::Busy(_) => return,
        GpuPodEnd::NotStarted(reason) => {
            return tally.fail(format!("pod {name} did not start: {reason}"));
        }
        GpuPodEnd::Failed(reason) => return tally.fail(format!("pod {name} failed: {reason}")),
        GpuPodEnd::NotRead(reason) => {
            return tally.error(format!("what pod {name} saw could not be read: {reason}"));
        }
    }
    let seen = match pod.nvml_uuids.len() {
        1 => 1,
        0 => {
            return tally.fail(format!(
                "pod {name} requested one GPU and NVML lists none in it"
            ));
        }
        seen => seen,
    };
    if seen > 1 || pod.cuda_uuids.len() > 1 {
        return tally.fail(format!(
            "pod {name} requested one GPU and sees {}",
            seen.max(pod.cuda_uuids.len())
        ));
    }
    let Some(uuid) = pod.cuda_uuids.first() else {
        let why = pod.cuda_trouble.as_deref().unwrap_or("it lists no device");
        return tally.fail(format!("CUDA does not start in pod {name}: {why}"));
    };
    match device_ids::expected(facts) {
        Ok(known) if !known.contains(uuid) => {
            return tally.fail(format!("pod {name} sees {uuid}, which is not on this node"));
        }
        Ok(_) => {}
        Err(outcome) => return tally.error(outcome.summary),
    }
    judge_kernel(pod, uuid, tally);
}

fn judge_kernel(pod: &GpuPod, uuid: &str, tally: &mut Tally) {
    let name = &pod.name;
    let run = match pod.cuda_kernel.get(uuid) {
        None => return tally.error(format!("the check kernel did not run in pod {name}")),
        Some(run) => match run.required(&format!("the check kernel's run in pod {name}")) {
            Ok(run) => run,
            Err(outcome) => return tally.error(outcome.summary),
        },
    };
    if run.end != WorkerEnd::Finished {
        tally.fail(format!(
            "the check kernel failed in pod {name} on {uuid}: {:?}",
            run.end
        ));
    } else if run.mismatches > 0 {
        tally.fail(format!(
            "{} of {} values are wrong in pod {name} on {uuid}",
            run.mismatches, run.values_compared
        ));
    } else if run.values_compared == 0 {
        tally.error(format!("the check kernel compared nothing in pod {name}"));
    } else {
        tally.pass(format!(
            "pod {name} got {uuid} and computed right after {:.0} s",
            pod.took_s
        ));
    }
}

/// No GPU is seen by two pods that ran at once, unless it is shared.
fn distinct(pods: &[GpuPod], profile: &Profile, tally: &mut Tally) {
    if profile.kubernetes.replicas.is_some_and(|it| it > 1) {
        return;
    }
    let mut pods_of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for pod in pods {
        for uuid in &pod.cuda_uuids {
            pods_of.entry(uuid).or_default().push(&pod.name);
        }
    }
    for (uuid, names) in pods_of.iter().filter(|(_, names)| names.len() > 1) {
        tally.fail(format!(
            "{uuid} was given to pods {} at once",
            names.join(" and ")
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{Facts, GpuPod, GpuPodEnd, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::level::Level;
    use crate::test_machine::{
        gpu_uuid, judge_host_check, kubernetes_node, kubernetes_node_with,
        kubernetes_node_with_gpu_pods,
    };

    const IMAGE: &str = "kubernetes: {gpu_pod: {run: true, image: x}}";

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&CHECK, facts, IMAGE)
    }

    /// The node on which the third pod went wrong.
    fn with_pod(change: impl FnOnce(&mut GpuPod)) -> Facts {
        kubernetes_node_with_gpu_pods(|it| change(&mut it.pods[2]))
    }

    #[test]
    fn eight_pods_on_eight_gpus_pass() {
        assert_eq!(judge(&kubernetes_node()).verdict, Verdict::Pass);
    }

    #[test]
    #[allow(clippy::large_stack_arrays, reason = "a few whole machines in a test")]
    fn every_way_in_which_a_pod_does_not_get_its_gpu_fails() {
        // On the heap: facts are large.
        let facts = vec![
            with_pod(|pod| pod.end = GpuPodEnd::NotStarted("ImagePullBackOff".to_owned())),
            with_pod(|pod| pod.end = GpuPodEnd::Failed("exit code 2".to_owned())),
            with_pod(|pod| pod.nvml_uuids.clear()),
            with_pod(|pod| pod.nvml_uuids = (0..8).map(gpu_uuid).collect()),
            with_pod(|pod| {
                pod.cuda_uuids.clear();
                pod.cuda_trouble = Some("cuInit returned 35".to_owned());
            }),
            with_pod(|pod| pod.cuda_uuids = vec!["GPU-of-another-node".to_owned()]),
            with_pod(|pod| {
                let Some(Reading::Value(run)) = pod.cuda_kernel.get_mut(&gpu_uuid(2)) else {
                    panic!("it ran")
                };
                run.mismatches = 1;
            }),
        ];
        for facts in facts {
            let finding = judge(&facts);
            assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        }
    }

    #[test]
    fn two_pods_may_not_get_the_same_gpu_unless_it_is_shared() {
        let facts = with_pod(|pod| {
            let run = pod.cuda_kernel.remove(&gpu_uuid(2)).expect("it ran");
            pod.nvml_uuids = vec![gpu_uuid(1)];
            pod.cuda_uuids = vec![gpu_uuid(1)];
            pod.cuda_kernel.insert(gpu_uuid(1), run);
        });
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.contains("at once"), "{}", finding.summary);
        let shared = "kubernetes: {replicas: 2, gpu_pod: {run: true, image: x}}";
        assert_eq!(
            judge_host_check(&CHECK, &facts, shared).verdict,
            Verdict::Pass
        );
    }

    #[test]
    fn taken_gpus_are_busy_and_not_broken() {
        let one = with_pod(|pod| pod.end = GpuPodEnd::Busy("Insufficient".to_owned()));
        let all = kubernetes_node_with_gpu_pods(|it| {
            it.free = Some(0);
            it.pods.clear();
        });
        for facts in [&one, &all] {
            let finding = judge(facts);
            assert_eq!((finding.verdict, finding.busy), (Verdict::Error, true));
        }
        let few = kubernetes_node_with_gpu_pods(|it| {
            it.free = Some(3);
            it.pods.truncate(3);
        });
        assert_eq!(judge(&few).verdict, Verdict::Pass);
        let four = "kubernetes: {gpu_pod: {run: true, image: x, count: 4}}";
        assert!(judge_host_check(&CHECK, &few, four).busy);
        let mut broken = one;
        if let Some(Reading::Value(pods)) = broken
            .kubernetes
            .as_mut()
            .and_then(|it| it.gpu_pods.as_mut())
        {
            pods.pods[0].end = GpuPodEnd::Failed("exit code 2".to_owned());
        }
        assert_eq!(
            judge(&broken).verdict,
            Verdict::Fail,
            "busy hides no failure"
        );
    }

    #[test]
    fn what_was_not_seen_is_an_error() {
        let facts = [
            with_pod(|pod| pod.end = GpuPodEnd::NotRead("the log holds no facts".to_owned())),
            with_pod(|pod| pod.cuda_kernel.clear()),
            kubernetes_node_with(|it| it.gpu_pods = Some(Reading::NotRead("403".to_owned()))),
            kubernetes_node_with(|it| it.gpu_pods = None),
        ];
        for facts in facts {
            let finding = judge(&facts);
            assert_eq!((finding.verdict, finding.busy), (Verdict::Error, false));
        }
    }

    #[test]
    fn pods_that_are_left_behind_are_a_warning() {
        let facts = kubernetes_node_with_gpu_pods(|it| {
            it.cleanup_trouble = Some("pods are left behind".to_owned());
        });
        assert_eq!(judge(&facts).verdict, Verdict::Warn);
    }

    #[test]
    fn is_made_only_where_somebody_asks() {
        let without = || kubernetes_node_with(|it| it.gpu_pods = None);
        let mut standard = without();
        standard.level = Level::Standard;
        assert_eq!(
            judge_host_check(&CHECK, &standard, "{}").verdict,
            Verdict::Skip
        );
        assert_eq!(
            judge_host_check(&CHECK, &without(), "{}").verdict,
            Verdict::Skip
        );
        let no_image = "kubernetes: {gpu_pod: {run: true}}";
        assert_eq!(
            judge_host_check(&CHECK, &without(), no_image).verdict,
            Verdict::Error
        );
        let off = "kubernetes: {gpu_pod: {run: false, image: x}}";
        assert_eq!(
            judge_host_check(&CHECK, &kubernetes_node(), off).verdict,
            Verdict::Skip
        );
    }
}
