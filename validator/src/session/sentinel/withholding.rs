//! Where the sentinel does not work: modes, MPS, GPUs that a scheduler gave away.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::Event;
use crate::interrupt::Interrupt;
use crate::probe::ProbeOptions;
use validator_core::facts::{ComputeMode, GpuFacts};

/// The folder of an MPS daemon's pipes where none is configured, and its files there.
// Source: nvidia-cuda-mps-control(1).
const MPS_FOLDER: &str = "tmp/nvidia-mps";
const MPS_FOLDER_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
const MPS_PID: &str = "nvidia-cuda-mps-control.pid";
const MPS_CONTROL: &str = "control";
/// Poll interval of the kubelet, which allows 100 requests a second.
// Source: kubernetes.io, PodResources API.
const SCHEDULER_POLL: Duration = Duration::from_secs(1);
/// The inode of the initial PID namespace.
// Source: Linux, include/linux/proc_ns.h, PROC_PID_INIT_INO.
const INITIAL_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Why a GPU in these modes is not worked.
pub(super) fn of_modes(mode: Option<&ComputeMode>, gpu: Option<&GpuFacts>) -> Option<String> {
    let Some(mode) = mode else {
        return Some("its compute mode could not be read".to_owned());
    };
    if *mode != ComputeMode::Default {
        return Some(format!(
            "compute mode {mode:?} leaves no room for a second process"
        ));
    }
    let gpu = gpu?;
    if gpu.mig.value().is_some_and(|it| it.current || it.pending) {
        return Some("MIG mode: the sentinel does not work MIG devices".to_owned());
    }
    if gpu
        .virtualization_mode
        .value()
        .is_some_and(|it| it == "vgpu")
    {
        return Some("a vGPU guest does not see the other guests".to_owned());
    }
    None
}

/// The MPS daemon that runs here, if one does: its clients are in no list of compute processes.
pub(super) fn mps_daemon(sysroot: Option<&Path>) -> Option<String> {
    let root = sysroot.unwrap_or(Path::new("/"));
    let configured = std::env::var_os(MPS_FOLDER_VARIABLE);
    let folder = configured.map_or_else(|| root.join(MPS_FOLDER), Into::into);
    if !folder.join(MPS_CONTROL).exists() {
        return None;
    }
    // The pipe outlives a daemon that was killed; without its number the daemon counts as running.
    let pid = std::fs::read_to_string(folder.join(MPS_PID)).ok();
    let pid: Option<u32> = pid.and_then(|it| it.trim().parse().ok());
    let runs = pid.is_none_or(|it| crate::process_stat::start_ticks(it).is_some());
    runs.then(|| format!("an MPS daemon runs ({})", folder.display()))
}

/// What is hidden from this process, if it is in a PID namespace of its own.
pub(super) fn pid_namespace_note() -> Option<String> {
    let namespace = std::fs::read_link("/proc/self/ns/pid").ok()?;
    let is_initial = namespace.to_str() == Some(INITIAL_PID_NAMESPACE);
    (!is_initial).then(|| {
        "this process is in a PID namespace of its own: NVML may leave out processes of other containers, which are \
         noticed by their memory and by the opens of nvidia-uvm alone; hostPID shows all of them"
            .to_owned()
    })
}

/// Reads who was given GPUs, each second, where there is a kubelet.
pub(super) fn follow_scheduler(
    probe: &ProbeOptions,
    events: &Sender<Event>,
    interrupt: &Interrupt,
) -> std::io::Result<()> {
    let (probe, events, interrupt) = (probe.clone(), events.clone(), interrupt.clone());
    let follow = move || {
        let mut was_present = false;
        while interrupt.signal().is_none() {
            let assigned = crate::probe::kubernetes::assigned_devices(&probe, &interrupt);
            if let Some(assigned) = assigned {
                was_present = true;
                if events.send(Event::Scheduled(assigned)).is_err() {
                    return;
                }
            } else if was_present {
                let gone = Err("its socket is gone".to_owned());
                if events.send(Event::Scheduled(gone)).is_err() {
                    return;
                }
            }
            std::thread::sleep(SCHEDULER_POLL);
        }
    };
    crate::threads::spawn("to read the kubelet", follow).map(|_| ())
}

/// The owner of a GPU, by device ids: UUIDs, with `::N` for a replica. An id of another form may be
/// any GPU.
pub(super) fn owner_of(given: &BTreeMap<String, String>, uuid: &str) -> Option<String> {
    let is_uuid = |id: &str| id.starts_with("GPU-") || id.starts_with("MIG-");
    let names = |id: &str| !is_uuid(id) || id.split("::").next() == Some(uuid);
    let owner = given.iter().find(|(id, _)| names(id));
    owner.map(|(id, owner)| format!("Kubernetes gave {id} to {owner}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_devices_name_their_gpu_and_unknown_forms_name_all() {
        let given = |id: &str| BTreeMap::from([(id.to_owned(), "pod a/b".to_owned())]);
        assert!(owner_of(&given("GPU-a"), "GPU-a").is_some());
        assert!(owner_of(&given("GPU-a::3"), "GPU-a").is_some());
        assert_eq!(owner_of(&given("GPU-a"), "GPU-b"), None);
        assert_eq!(owner_of(&given("MIG-a"), "GPU-b"), None);
        let owner = owner_of(&given("nvidia0"), "GPU-b");
        assert_eq!(owner.as_deref(), Some("Kubernetes gave nvidia0 to pod a/b"));
    }

    #[test]
    fn modes_without_room_withhold_a_gpu() {
        let gpu = GpuFacts::default();
        assert_eq!(of_modes(Some(&ComputeMode::Default), Some(&gpu)), None);
        assert!(of_modes(Some(&ComputeMode::ExclusiveProcess), Some(&gpu)).is_some());
        assert!(of_modes(Some(&ComputeMode::Prohibited), Some(&gpu)).is_some());
        assert!(of_modes(None, Some(&gpu)).is_some());
    }

    #[test]
    fn an_mps_daemon_counts_while_its_process_lives() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join(MPS_FOLDER);
        assert_eq!(mps_daemon(Some(root.path())), None);
        std::fs::create_dir_all(&folder).expect("made");
        std::fs::write(folder.join(MPS_CONTROL), "").expect("written");
        assert!(mps_daemon(Some(root.path())).is_some());
        let own = std::process::id().to_string();
        for (pid, runs) in [(own.as_str(), true), ("4194304", false)] {
            std::fs::write(folder.join(MPS_PID), pid).expect("written");
            assert_eq!(mps_daemon(Some(root.path())).is_some(), runs);
        }
    }
}
