//! A GPU that gives no memory, or no access, because others have it: it is busy, which is no
//! evidence about the GPU.

use crate::cuda::{CUDA_ERROR_DEVICE_UNAVAILABLE, CUDA_ERROR_OUT_OF_MEMORY};
use crate::probe::users_of;
use crate::worker::protocol::Reporter;
use validator_core::facts::{ComputeMode, GpuFacts, WorkerEnd};
use validator_core::queries::processes_in_words;

/// With less memory free a GPU is full: context, kernels and the engines' workspace take most of
/// it.
// Source: a context takes 0.3 to 0.6 GiB (BENCHMARKS.md), cuBLASLt's workspace 32 MiB; this
// project's own choice.
pub(crate) const ROOM_BYTES: u64 = 1 << 30;
/// The detail by which a workload marks that it ended for that reason.
pub(crate) const NO_ROOM: &str = "no_room";
/// More than a driver keeps for itself (616 MiB on an H200), so a process's data, as in
/// `idle_memory`: NVML does not show a container the processes of others.
const SOMEBODYS_DATA_BYTES: u64 = 1 << 30;

/// What a GPU did not give.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Denied {
    Memory,
    Access,
}

impl Denied {
    /// What a worker that ended so was denied, if that was it.
    fn in_end(end: &WorkerEnd) -> Option<Self> {
        let WorkerEnd::CudaError { code, .. } = end else {
            return None;
        };
        match *code {
            CUDA_ERROR_OUT_OF_MEMORY => Some(Self::Memory),
            CUDA_ERROR_DEVICE_UNAVAILABLE => Some(Self::Access),
            _ => None,
        }
    }
}

/// `end`, or busy where NVML's view of this GPU shows that others have what it did not give.
pub(crate) fn busy_if_others_have_it(end: WorkerEnd, gpu: &GpuFacts) -> WorkerEnd {
    match Denied::in_end(&end) {
        Some(denied) => busy_if_others_have(denied, end, gpu),
        None => end,
    }
}

/// The same in a worker of the GPU with this UUID whose context is gone, with NVML's view of this
/// moment: others may have come after the machine was looked at. A worker may also have had
/// `no_room` for what it was to do.
pub(crate) fn busy_if_others_came(
    end: WorkerEnd,
    no_room: bool,
    uuid: &str,
    reporter: &Reporter,
) -> WorkerEnd {
    let denied = Denied::in_end(&end).or(no_room.then_some(Denied::Memory));
    let Some(denied) = denied else {
        return end;
    };
    reporter.step("reading the GPU's processes from NVML");
    match users_of(uuid) {
        Some(gpu) => busy_if_others_have(denied, end, &gpu),
        None => end,
    }
}

fn busy_if_others_have(denied: Denied, end: WorkerEnd, gpu: &GpuFacts) -> WorkerEnd {
    let Some(others) = who_has(denied, gpu) else {
        return end;
    };
    match end {
        WorkerEnd::CudaError { call, name, .. } => {
            WorkerEnd::Busy(format!("{call} returned {name} while {others}"))
        }
        WorkerEnd::Exited { stderr, .. } => WorkerEnd::Busy(format!("{stderr}, while {others}")),
        other => other,
    }
}

/// Who has it, in words; `None` where no process is seen, or where the GPU could have given it all
/// the same.
fn who_has(denied: Denied, gpu: &GpuFacts) -> Option<String> {
    if denied == Denied::Access && gpu.compute_mode.value() != Some(&ComputeMode::ExclusiveProcess)
    {
        return None;
    }
    if let Some(processes) = gpu.processes.value().filter(|it| !it.is_empty()) {
        return Some(format!("{} used the GPU", processes_in_words(processes)));
    }
    let memory = gpu.memory.value()?;
    let is_taken = match denied {
        Denied::Memory => memory.free_bytes < ROOM_BYTES,
        Denied::Access => memory.used_bytes > SOMEBODYS_DATA_BYTES,
    };
    is_taken.then(|| {
        let (used, total) = (memory.used_bytes >> 20, memory.total_bytes >> 20);
        format!("{used} of {total} MiB of its memory were in use")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::{GpuProcess, MemoryUse, Reading};

    fn error(code: u32, name: &str) -> WorkerEnd {
        WorkerEnd::CudaError {
            call: "cuMemAlloc_v2".to_owned(),
            code,
            name: name.to_owned(),
        }
    }

    fn no_memory() -> WorkerEnd {
        error(CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
    }

    fn no_access() -> WorkerEnd {
        error(
            CUDA_ERROR_DEVICE_UNAVAILABLE,
            "CUDA_ERROR_DEVICE_UNAVAILABLE",
        )
    }

    fn gpu(processes: usize, used_mib: u64, compute_mode: ComputeMode) -> GpuFacts {
        GpuFacts {
            processes: Reading::Value(vec![GpuProcess::default(); processes]),
            memory: Reading::Value(MemoryUse {
                total_bytes: 15_360 << 20,
                reserved_bytes: Some(0),
                used_bytes: used_mib << 20,
                free_bytes: (15_360 - used_mib) << 20,
            }),
            compute_mode: Reading::Value(compute_mode),
            ..GpuFacts::default()
        }
    }

    fn is_busy(end: &WorkerEnd, gpu: &GpuFacts) -> bool {
        let busy = busy_if_others_have_it(end.clone(), gpu);
        assert!(busy == *end || matches!(busy, WorkerEnd::Busy(_)));
        busy != *end
    }

    #[test]
    fn memory_that_others_have_is_no_fault() {
        let with = |processes, used_mib| gpu(processes, used_mib, ComputeMode::Default);
        assert!(!is_busy(&no_memory(), &with(0, 14_336)));
        assert!(is_busy(&no_memory(), &with(0, 14_337)));
        assert!(is_busy(&no_memory(), &with(1, 0)));
        assert!(!is_busy(&no_memory(), &GpuFacts::default()));
    }

    #[test]
    fn a_gpu_that_denies_itself_in_default_mode_is_broken_whoever_uses_it() {
        for (mode, busy) in [
            (ComputeMode::Default, false),
            (ComputeMode::ExclusiveProcess, true),
        ] {
            assert_eq!(is_busy(&no_access(), &gpu(1, 2000, mode)), busy);
            assert_eq!(is_busy(&no_access(), &gpu(0, 1025, mode)), busy);
            assert!(!is_busy(&no_access(), &gpu(0, 1024, mode)));
        }
    }

    #[test]
    fn other_errors_are_not_excused() {
        let illegal = error(700, "CUDA_ERROR_ILLEGAL_ADDRESS");
        assert!(!is_busy(&illegal, &gpu(3, 15_000, ComputeMode::Default)));
        let killed = WorkerEnd::Killed { signal: 9 };
        assert!(!is_busy(&killed, &gpu(3, 15_000, ComputeMode::Default)));
    }

    #[test]
    fn says_who_has_it() {
        let listed = gpu(1, 100, ComputeMode::Default);
        let hidden = gpu(0, 15_000, ComputeMode::Default);
        let no_room = WorkerEnd::Exited {
            status: 1,
            stderr: "nothing could be multiplied".to_owned(),
        };
        for (end, gpu, expected) in [
            (
                no_memory(),
                &listed,
                "cuMemAlloc_v2 returned CUDA_ERROR_OUT_OF_MEMORY while unknown name (pid 0) used the GPU",
            ),
            (
                no_room,
                &hidden,
                "nothing could be multiplied, while 15000 of 15360 MiB of its memory were in use",
            ),
        ] {
            let busy = busy_if_others_have(Denied::Memory, end, gpu);
            assert_eq!(busy, WorkerEnd::Busy(expected.to_owned()));
        }
    }
}
