//! Every process works on the GPU that it was given, and on no other.
//!
//! ## Why
//! CUDA and NVML number GPUs differently, containers renumber them, and a lost device cgroup or a
//! wrong `CUDA_VISIBLE_DEVICES` shows a process the GPUs of others. Jobs then fill a neighbour's
//! memory while their own GPU idles.
//!
//! ## How it is judged
//! Each worker of the allocation test is given one GPU by its UUID. CUDA must show it exactly that
//! one, and NVML must list its process on that GPU and on no other while it runs. Where NVML lists
//! none of the workers (it counts processes in another PID namespace), CUDA's answer is judged
//! alone, and the finding reports that. New memory that holds another worker's data is a warning:
//! the driver did not clear it. Judged at level `extended` and by `gpu-validator allocation`;
//! skipped where no such test was requested.
//!
//! ## What to do
//! Name GPUs by UUID (`nvidia-smi -L`). In a container compare `nvidia-smi -L` inside and outside,
//! and restart it after a `systemctl daemon-reload`, by which runtimes that use cgroup drivers of
//! systemd lose devices.
//!
//! ## Source
//! CUDA C++ programming guide, environment variables; issues 48 and 1227 of
//! NVIDIA/nvidia-container-toolkit.

use crate::allocation::{lists_workers, pids};
use crate::check::{Check, Judge};
use crate::facts::{AllocationFacts, AllocationWorker, Facts, GpuFacts, WorkloadRun};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "allocation_isolation",
    stage: Stage::Load,
    level: Level::Extended,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
};

const REMEDY: &str =
    "name GPUs by UUID, and compare nvidia-smi -L inside and outside of the container";

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let allocation = queries::allocation_test(facts, profile)?;
    let uuid = gpu.uuid.required("UUID of the GPU")?;
    let workers: Vec<&AllocationWorker> = allocation
        .workers
        .iter()
        .filter(|it| it.gpu() == uuid && it.pid.is_some())
        .collect();
    if workers.is_empty() {
        return Err(not_tested(allocation, uuid, profile));
    }
    let strays = strays(&workers, allocation, uuid);
    if let Some(first) = strays.first() {
        return Ok(Outcome::fail(format!(
            "{} of {} ran on another GPU: {first}",
            strays.len(),
            queries::counted(workers.len(), "worker")
        ))
        .expected(format!("processes of these workers on {uuid} alone"))
        .observed(strays.join("\n"))
        .remedy(REMEDY));
    }
    let runs = facts.load.runs_of(crate::facts::ALLOCATION, uuid);
    let details: Vec<_> = runs.filter_map(WorkloadRun::allocation).collect();
    let is_own = |device: &String| is_device_of(gpu, device);
    let wrong = details.iter().find(|it| match &it.visible_devices[..] {
        [] => false,
        [only] => !is_own(only),
        _ => true,
    });
    if let Some(wrong) = wrong {
        let shown = wrong.visible_devices.join(", ");
        return Ok(
            Outcome::fail(format!("CUDA showed a worker of this GPU {shown}"))
                .expected(uuid)
                .observed(shown)
                .remedy(REMEDY),
        );
    }
    let known = details.iter().filter(|it| !it.visible_devices.is_empty());
    let known = known.count();
    if known == 0 {
        let reason = "no worker reported which GPU CUDA showed it";
        return Err(queries::workers_failed(reason, profile));
    }
    Ok(judge_marks(
        details.iter().map(|it| it.foreign_marks).sum(),
        || passed(known, allocation),
    ))
}

fn not_tested(allocation: &AllocationFacts, uuid: &str, profile: &Profile) -> Outcome {
    if allocation.workers.iter().any(|it| it.gpu() == uuid) {
        queries::workers_failed("no worker ran on this GPU", profile)
    } else {
        Outcome::skip("no worker was assigned to this GPU")
    }
}

/// Workers of this GPU that NVML listed on another one.
fn strays(workers: &[&AllocationWorker], allocation: &AllocationFacts, uuid: &str) -> Vec<String> {
    let others = allocation.listed.iter().filter(|(gpu, _)| *gpu != uuid);
    let place = |pid: u32| {
        let mut others = others.clone();
        others.find(|(_, pids)| pids.contains(&pid))
    };
    workers
        .iter()
        .filter_map(|worker| {
            let pid = worker.pid?;
            let (gpu, _) = place(pid)?;
            let ordinal = worker.id.ordinal;
            Some(format!("worker {ordinal} (process {pid}) on {gpu}"))
        })
        .collect()
}

/// The GPU itself or a MIG device of it.
fn is_device_of(gpu: &GpuFacts, device: &str) -> bool {
    let mig_devices = gpu.mig_devices.value().into_iter().flatten();
    let mut uuids = mig_devices.map(|it| &it.uuid).chain(gpu.uuid.value());
    uuids.any(|it| it == device)
}

fn judge_marks(foreign_marks: u64, passed: impl FnOnce() -> Outcome) -> Outcome {
    if foreign_marks == 0 {
        return passed();
    }
    Outcome::warn(format!(
        "{foreign_marks} allocations held data of another worker when they were new"
    ))
    .expected("memory that was cleared before it went to another process")
    .remedy("report this to the provider of the driver, and give this GPU to one tenant at a time")
}

fn passed(workers: usize, allocation: &AllocationFacts) -> Outcome {
    let count = queries::counted(workers, "worker");
    if let Some(trouble) = &allocation.view_trouble {
        return Outcome::error(format!(
            "{count} had this GPU by CUDA, but NVML's process lists were not read: {trouble}"
        ));
    }
    if pids(allocation).is_empty() || !lists_workers(allocation) {
        return Outcome::pass(format!(
            "{count} had this GPU alone by CUDA; NVML lists none of them, as from another PID namespace"
        ));
    }
    Outcome::pass(format!("{count} had this GPU alone, by CUDA and by NVML"))
}

#[cfg(test)]
mod tests {
    use crate::facts::Facts;
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        allocated_node, allocated_node_with, allocated_node_with_run, gpu_uuid, healthy_node,
        judge_check, set_detail,
    };

    fn judge(facts: &Facts) -> Vec<Finding> {
        judge_check(&super::CHECK, facts, "{}")
    }

    #[test]
    fn passes_where_every_worker_had_its_gpu() {
        let findings = judge(&allocated_node());
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        assert_eq!(
            findings[2].summary,
            "5 workers had this GPU alone, by CUDA and by NVML"
        );
    }

    #[test]
    fn fails_where_nvml_lists_a_worker_on_another_gpu() {
        let mut facts = allocated_node();
        let uuid = facts.gpus[2].uuid.value().cloned().expect("a UUID");
        let other = facts.gpus[5].uuid.value().cloned().expect("a UUID");
        let allocation = facts.load.allocation.as_mut().expect("a test");
        let pid = allocation.workers.iter().find(|it| it.gpu() == uuid);
        let pid = pid.and_then(|it| it.pid).expect("a process");
        allocation
            .listed
            .entry(other.clone())
            .or_default()
            .insert(pid);
        let findings = judge(&facts);
        assert_eq!(findings[2].verdict, Verdict::Fail);
        assert_eq!(
            findings[2].summary,
            format!("1 of 5 workers ran on another GPU: worker 0 (process {pid}) on {other}")
        );
        assert_eq!(findings[5].verdict, Verdict::Pass);
    }

    #[test]
    fn fails_where_cuda_shows_another_gpu_or_more_than_one() {
        let other = gpu_uuid(5);
        let own = allocated_node().gpus[2]
            .uuid
            .value()
            .cloned()
            .expect("a UUID");
        for shown in [vec![other.clone()], vec![own, other]] {
            let facts = allocated_node_with_run(|run| {
                set_detail(run, |it| it.visible_devices = shown);
            });
            assert_eq!(judge(&facts)[2].verdict, Verdict::Fail);
        }
    }

    #[test]
    fn data_of_another_worker_in_new_memory_is_a_warning() {
        let facts = allocated_node_with_run(|run| set_detail(run, |it| it.foreign_marks = 2));
        assert_eq!(judge(&facts)[2].verdict, Verdict::Warn);
    }

    #[test]
    fn what_nvml_does_not_show_is_reported_and_what_it_did_not_read_is_an_error() {
        let hidden = allocated_node_with(|it| it.listed.clear());
        let finding = &judge(&hidden)[2];
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(finding.summary.contains("NVML lists none of them"));
        let unread = allocated_node_with(|it| {
            it.listed.clear();
            it.view_trouble = Some("no answer".to_owned());
        });
        assert_eq!(judge(&unread)[2].verdict, Verdict::Error);
    }

    #[test]
    fn is_skipped_where_nothing_was_tested() {
        let mut stopped = allocated_node();
        stopped.interrupted = Some("SIGINT".to_owned());
        let silent = allocated_node_with(|it| {
            for worker in &mut it.workers {
                worker.pid = None;
            }
        });
        for facts in [healthy_node(), stopped, silent] {
            let findings = judge(&facts);
            assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
        }
    }
}
