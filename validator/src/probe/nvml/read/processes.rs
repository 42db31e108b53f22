//! The processes on the GPU.

use validator_core::facts::GpuProcess;

use super::super::calls::Called;
use super::GpuReader;
use crate::process_stat;

impl GpuReader<'_> {
    /// Those of others.
    pub(super) fn processes(&self) -> Called<Vec<GpuProcess>> {
        let mut processes = self.all_processes()?;
        processes.retain(|it| !is_own_process(it.pid));
        Ok(processes)
    }

    /// Those of others while a worker of this validator works the GPU; none where the driver does
    /// not say.
    pub(in crate::probe::nvml) fn processes_beside_a_worker(&self) -> Vec<GpuProcess> {
        let all = self.all_processes().unwrap_or_default();
        beside_a_worker(all, is_own_process)
    }

    /// A process that both computes and draws is listed once, as one that draws.
    pub(in crate::probe::nvml) fn all_processes(&self) -> Called<Vec<GpuProcess>> {
        let mut processes: Vec<GpuProcess> = Vec::new();
        let graphics = self.optional(self.device.graphics_processes())?;
        let listed = [
            (true, graphics.unwrap_or_default()),
            (false, self.device.compute_processes()?),
        ];
        for (graphics, list) in listed {
            for (pid, used_memory_bytes) in list {
                if !processes.iter().any(|it| it.pid == pid) {
                    processes.push(GpuProcess {
                        pid,
                        name: process_name(pid),
                        user: process_stat::user(pid),
                        used_memory_bytes,
                        graphics,
                    });
                }
            }
        }
        Ok(processes)
    }
}

/// Of the processes on a GPU that a worker works, those of others. Where none of them is our own,
/// the driver counts processes in another namespace than ours, and the worker is the one that holds
/// most of the memory.
fn beside_a_worker(
    mut processes: Vec<GpuProcess>,
    is_own: impl Fn(u32) -> bool,
) -> Vec<GpuProcess> {
    let count = processes.len();
    processes.retain(|it| !is_own(it.pid));
    if processes.len() == count {
        let memory = |it: &(usize, &GpuProcess)| it.1.used_memory_bytes;
        let worker = processes.iter().enumerate().max_by_key(memory);
        if let Some((worker, _)) = worker {
            processes.remove(worker);
        }
    }
    processes
}

/// This worker, the validator that started it, or another of its workers.
fn is_own_process(pid: u32) -> bool {
    let validator = std::os::unix::process::parent_id();
    pid == std::process::id() || pid == validator || process_stat::parent(pid) == Some(validator)
}

/// The name of an executable, else of its thread; `None` for a process that this one cannot see.
fn process_name(pid: u32) -> Option<String> {
    let executable = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let name = executable
        .as_deref()
        .and_then(|path| path.file_name())
        .map(|name| name.to_string_lossy().into_owned());
    name.or_else(|| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        Some(comm.trim_end().to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_not_taken_for_somebody_else() {
        let process = |(pid, mib): (u32, u64)| GpuProcess {
            pid,
            used_memory_bytes: Some(mib << 20),
            ..GpuProcess::default()
        };
        let beside = |listed: &[(u32, u64)], own: u32| -> Vec<u32> {
            let all = listed.iter().copied().map(process).collect();
            let others = beside_a_worker(all, |pid| pid == own);
            others.into_iter().map(|it| it.pid).collect()
        };
        assert_eq!(beside(&[(40, 77_000)], 40), [0_u32; 0]);
        assert_eq!(beside(&[(40, 500), (50, 77_000)], 40), [50]);
        // Numbers of another namespace, which say nothing of whose they are.
        assert_eq!(beside(&[(9040, 77_000)], 40), [0_u32; 0]);
        assert_eq!(beside(&[(9050, 500), (9040, 77_000)], 40), [9050]);
        assert_eq!(beside(&[], 40), [0_u32; 0]);
    }
}
