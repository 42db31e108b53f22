//! Every GPU in use is assigned to its user, and to no other.
//!
//! ## Why
//! Kubernetes does not watch GPUs. A process that uses one without having been given it, started on
//! the node or in a pod that sees all GPUs, takes memory and time from the pod that gets the GPU
//! next.
//!
//! ## How it is judged
//! By `List` of the kubelet's socket `pod-resources/kubelet.sock`: each GPU given to a container
//! must be on the node, and no device may be given to two containers, unless it is shared
//! (`GPU-…::3`). A kubelet takes devices from pods that have ended before it answers, and before it
//! gives a device to another container.
//!
//! Each process that NVML lists on a GPU is traced by `/proc/<pid>/cgroup` to its pod, which must
//! have been given this GPU. A process of no pod, or of a pod that was not given the GPU, is a
//! `fail`, a pass where `policy.foreign_processes` is `allowed`. Processes of the MPS server are
//! left out. Where a container hides the processes of others, the check is skipped.
//!
//! ## What to do
//! End the process, or let it run in a pod that requests `nvidia.com/gpu`. A pod sees all GPUs
//! where it is privileged or sets `NVIDIA_VISIBLE_DEVICES`: give the NVIDIA container runtime
//! `accept-nvidia-visible-devices-envvar-when-unprivileged = false`.
//!
//! ## Source
//! Kubernetes, device plugins,
//! <https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/>;
//! kubernetes 1.31.0 and 1.34.4, `pkg/kubelet/apis/podresources/server_v1.go` (`List`) and
//! `cm/devicemanager/manager.go` (`UpdateAllocatedDevices`)

use std::collections::BTreeMap;

use crate::check::{Check, Judge};
use crate::device_ids;
use crate::facts::{
    DeviceAssignment, Facts, GpuFacts, GpuProcess, KubernetesFacts, ProcessOwner, Reading,
};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::{Profile, Requirement};
use crate::queries::{self, counted};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "device_plugin_assignments",
    stage: Stage::Gpu,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/",
};

/// Processes of the Multi-Process Service work for all its clients.
///
/// Source: NVIDIA Multi-Process Service documentation.
const MPS_PROCESSES: &str = "nvidia-cuda-mps-";

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let kubelet = device_ids::kubelet(facts, profile)?;
    let listed = kubelet
        .assignments
        .required("the kubelet's list of assigned devices")?;
    let assignments: Vec<&DeviceAssignment> = listed.iter().collect();
    let mut tally = Tally::default();
    known_devices(facts, &assignments, &mut tally)?;
    given_once(&assignments, &mut tally);
    let hidden = processes(facts, profile, kubelet, &assignments, &mut tally)?;
    let worst = tally.worst();
    if hidden > 0 && !matches!(worst, Some(Verdict::Fail | Verdict::Error)) {
        return Err(Outcome::skip(format!(
            "this is a container, from which {} on the GPUs cannot be traced to pods",
            counted(hidden, "process")
        )));
    }
    let given: usize = assignments.iter().map(|it| it.device_ids.len()).sum();
    let outcome = tally.outcome(Outcome::pass(format!(
        "{} given to {}, and no other process uses a GPU",
        counted(given, "device"),
        counted(assignments.len(), "container")
    )));
    Ok(if worst == Some(Verdict::Fail) {
        outcome.remedy("end the process, or let it run in a pod that requests nvidia.com/gpu; a pod sees GPUs that it was not given where it is privileged or sets NVIDIA_VISIBLE_DEVICES; where a device is given twice, restart the kubelet")
    } else {
        outcome
    })
}

/// `team/train-0`.
fn pod_of(assignment: &DeviceAssignment) -> String {
    format!("{}/{}", assignment.namespace, assignment.pod)
}

fn known_devices(
    facts: &Facts,
    assignments: &[&DeviceAssignment],
    tally: &mut Tally,
) -> Result<(), Outcome> {
    if assignments.is_empty() {
        return Ok(());
    }
    let known = device_ids::expected(facts)?;
    for assignment in assignments {
        let ids = assignment.device_ids.iter();
        for id in ids.filter(|it| device_ids::is_uuid(it)) {
            if !known.contains(device_ids::uuid(id)) {
                tally.fail(format!(
                    "container {} of pod {} has {id}, which is not on this node",
                    assignment.container,
                    pod_of(assignment)
                ));
            }
        }
    }
    Ok(())
}

fn given_once(assignments: &[&DeviceAssignment], tally: &mut Tally) {
    let mut users: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for assignment in assignments {
        for id in &assignment.device_ids {
            users.entry(id).or_default().push(format!(
                "{} of pod {}",
                assignment.container,
                pod_of(assignment)
            ));
        }
    }
    for (id, users) in users.iter().filter(|(_, users)| users.len() > 1) {
        tally.fail(format!(
            "{id} is given to containers {}",
            users.join(" and ")
        ));
    }
}

/// Judges the processes on all GPUs; the answer is how many are hidden from this container.
fn processes(
    facts: &Facts,
    profile: &Profile,
    kubelet: &KubernetesFacts,
    assignments: &[&DeviceAssignment],
    tally: &mut Tally,
) -> Result<usize, Outcome> {
    let allowed = profile.policy.foreign_processes == Some(Requirement::Allowed);
    let mut hidden = 0;
    for gpu in &facts.gpus {
        // Where the driver has no list of processes there is nothing to trace.
        if gpu.processes == Reading::NotSupported {
            continue;
        }
        let processes = gpu.processes.required("list of processes")?;
        for process in processes.iter().filter(|it| !is_mps(it)) {
            match stranger(gpu, process, kubelet, assignments) {
                Ok(None) => {}
                Ok(Some(text)) if allowed => tally.pass(text),
                Ok(Some(text)) => tally.fail(text),
                Err(_) if queries::in_container(facts) => hidden += 1,
                Err(reason) => tally.error(reason),
            }
        }
    }
    Ok(hidden)
}

fn is_mps(process: &GpuProcess) -> bool {
    let name = process.name.as_deref().unwrap_or_default();
    name.rsplit('/')
        .next()
        .is_some_and(|it| it.starts_with(MPS_PROCESSES))
}

/// What is said of a process that was not given this GPU; the error says why that is not known.
fn stranger(
    gpu: &GpuFacts,
    process: &GpuProcess,
    kubelet: &KubernetesFacts,
    assignments: &[&DeviceAssignment],
) -> Result<Option<String>, String> {
    let who = format!(
        "{} (pid {}) uses {}",
        process.name.as_deref().unwrap_or("a process"),
        process.pid,
        queries::name_of(gpu)
    );
    let owner = match kubelet.process_owners.get(&process.pid) {
        None => return Err(format!("{who}, and its owner was not read")),
        Some(owner) => match owner.required("its owner") {
            Ok(owner) => owner,
            Err(outcome) => return Err(format!("{who}, and {}", outcome.summary)),
        },
    };
    match owner {
        ProcessOwner::NoPod { control_group } => Ok(Some(format!(
            "{who} and belongs to no pod, but to {control_group}"
        ))),
        ProcessOwner::Pod {
            namespace: Some(namespace),
            name: Some(name),
            ..
        } => {
            let mut of_pod = assignments
                .iter()
                .filter(|it| it.namespace == *namespace && it.pod == *name);
            let given = of_pod.any(|it| gives(it, gpu));
            Ok((!given).then(|| {
                format!("{who} and belongs to pod {namespace}/{name}, which was not given it")
            }))
        }
        ProcessOwner::Pod { uid, .. } => Err(format!(
            "{who} and belongs to a pod whose name is not known (UID {uid})"
        )),
    }
}

/// Whether the container has this GPU or a MIG device of it. Devices that are not named by UUID may
/// be any.
fn gives(assignment: &DeviceAssignment, gpu: &GpuFacts) -> bool {
    let mig = gpu.mig_devices.value().into_iter().flatten();
    let mut own = gpu.uuid.value().into_iter().chain(mig.map(|it| &it.uuid));
    assignment
        .device_ids
        .iter()
        .any(|id| !device_ids::is_uuid(id) || own.clone().any(|it| it == device_ids::uuid(id)))
        || own.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{DeviceAssignment, Facts, KubernetesFacts, ProcessOwner, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        gpu_uuid, judge_host_check, kubernetes_node, kubernetes_node_with, python_process,
    };

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&CHECK, facts, "{}")
    }

    fn given(pod: &str, ids: &[String]) -> DeviceAssignment {
        DeviceAssignment {
            namespace: "team".to_owned(),
            pod: pod.to_owned(),
            container: "train".to_owned(),
            resource: "nvidia.com/gpu".to_owned(),
            device_ids: ids.to_vec(),
        }
    }

    fn assigned(assignments: Vec<DeviceAssignment>) -> Facts {
        kubernetes_node_with(|it| it.assignments = Reading::Value(assignments))
    }

    /// The first GPU, which pod team/train-0 has, in use by a process of `owner`.
    fn used_by(gpu: usize, owner: Reading<ProcessOwner>) -> Facts {
        let mut facts = kubernetes_node_with(|it| {
            it.process_owners.insert(4242, owner);
        });
        facts.gpus[gpu].processes = Reading::Value(vec![python_process(512)]);
        facts
    }

    fn pod(name: Option<&str>) -> Reading<ProcessOwner> {
        Reading::Value(ProcessOwner::Pod {
            uid: "u".to_owned(),
            namespace: name.map(|_| "team".to_owned()),
            name: name.map(str::to_owned),
        })
    }

    fn no_pod() -> Reading<ProcessOwner> {
        Reading::Value(ProcessOwner::NoPod {
            control_group: "/user.slice".to_owned(),
        })
    }

    #[test]
    fn what_is_given_once_and_used_by_its_owner_passes() {
        let finding = judge(&kubernetes_node());
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "1 device given to 1 container, and no other process uses a GPU"
        );
        assert_eq!(
            judge(&used_by(0, pod(Some("train-0")))).verdict,
            Verdict::Pass
        );
        assert_eq!(judge(&assigned(Vec::new())).verdict, Verdict::Pass);
    }

    #[test]
    fn a_gpu_that_is_not_there_or_given_twice_fails() {
        let foreign = assigned(vec![given("a", &["GPU-of-another-node".to_owned()])]);
        assert_eq!(judge(&foreign).verdict, Verdict::Fail);
        let twice = vec![given("a", &[gpu_uuid(1)]), given("b", &[gpu_uuid(1)])];
        let finding = judge(&assigned(twice));
        assert_eq!(finding.verdict, Verdict::Fail);
        let says = "is given to containers train of pod team/a and train of pod team/b";
        assert!(finding.summary.contains(says), "{}", finding.summary);
    }

    #[test]
    fn two_users_fail_without_the_api_server_as_well() {
        let without_api = kubernetes_node_with(|it: &mut KubernetesFacts| {
            it.assignments =
                Reading::Value(vec![given("a", &[gpu_uuid(1)]), given("b", &[gpu_uuid(1)])]);
            it.api = Reading::NotSupported;
        });
        assert_eq!(judge(&without_api).verdict, Verdict::Fail);
    }

    #[test]
    fn shares_of_one_gpu_may_have_several_users() {
        let share = |share| format!("{}::{share}", gpu_uuid(1));
        let shared = vec![given("a", &[share(0)]), given("b", &[share(1)])];
        assert_eq!(judge(&assigned(shared)).verdict, Verdict::Pass);
    }

    #[test]
    fn strangers_on_a_gpu_fail() {
        for (facts, says) in [
            (
                used_by(0, no_pod()),
                "belongs to no pod, but to /user.slice",
            ),
            (
                used_by(0, pod(Some("other"))),
                "belongs to pod team/other, which was not given it",
            ),
            (
                used_by(1, pod(Some("train-0"))),
                "belongs to pod team/train-0, which was not given it",
            ),
        ] {
            let finding = judge(&facts);
            assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
            assert!(finding.summary.contains(says), "{}", finding.summary);
        }
        let allowed = "policy: {foreign_processes: allowed}";
        let finding = judge_host_check(&CHECK, &used_by(0, no_pod()), allowed);
        assert_eq!(finding.verdict, Verdict::Pass);
    }

    #[test]
    fn the_server_of_mps_is_no_stranger() {
        let mut facts = used_by(0, no_pod());
        if let Reading::Value(processes) = &mut facts.gpus[0].processes {
            processes[0].name = Some("/usr/bin/nvidia-cuda-mps-server".to_owned());
        }
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn who_is_not_known_is_an_error_and_hidden_in_a_container() {
        let unreadable = || Reading::NotRead("cannot read /proc/4242/cgroup".to_owned());
        for owner in [pod(None), unreadable()] {
            assert_eq!(judge(&used_by(0, owner)).verdict, Verdict::Error);
        }
        let mut facts = used_by(0, unreadable());
        facts.host.in_container = Reading::Value(true);
        assert_eq!(judge(&facts).verdict, Verdict::Skip);
    }

    #[test]
    fn devices_without_uuids_excuse_their_pod() {
        let mut facts = used_by(3, pod(Some("train-0")));
        if let Some(kubernetes) = &mut facts.kubernetes {
            let mut claim = given("train-0", &["gpu-3".to_owned()]);
            claim.resource = "gpu.nvidia.com".to_owned();
            kubernetes.assignments = Reading::Value(vec![claim]);
        }
        assert_eq!(judge(&facts).verdict, Verdict::Pass);
    }

    #[test]
    fn a_list_that_was_not_read_is_an_error() {
        let facts = kubernetes_node_with(|it| it.assignments = Reading::NotRead("x".to_owned()));
        assert_eq!(judge(&facts).verdict, Verdict::Error);
    }
}
