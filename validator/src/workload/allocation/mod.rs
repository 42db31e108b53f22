//! The allocation test's work: allocate, compute, verify, free, and again.
//!
//! Each operation allocates the worker's memory, writes a pattern that no other worker and no other
//! operation has, compares every word on the device, and frees the memory. Before an operation
//! frees its memory it leaves marks there; an allocation that holds the mark of another worker has
//! received that worker's data.

mod current_call;
mod mark;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use validator_core::facts::{
    ALLOCATION, AllocationDetail, AllocationFailures, WorkerEnd, WorkloadRun,
};

use super::chunks::{Extent, WORD_BYTES};
use super::memory::{EXAMPLES_MAXIMUM, Pattern, PatternKernels, PatternResult};
use super::start::{exited, is_same_device, visible_uuids};
use super::{Prepared, Step, WorkerGpu, Workload};
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CudaFailure, DeviceMemory};
use crate::plan::MemoryShare;
use crate::worker::protocol::Reporter;
use current_call::{Call, CurrentCall};
use mark::Mark;

/// Pause after a refused allocation: requests in a row take driver locks that all processes share.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(5);

/// The allocation test as an assignment has it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AllocationTask {
    /// The same for all workers of a test.
    pub(crate) seed: u64,
    /// Number of the worker in the test.
    pub(crate) number: u32,
}

/// Notes which devices CUDA shows, also in a worker that finds none of its own among them.
pub(super) fn note_visible_devices(
    assigned: &[String],
    reporter: &Reporter,
    run: &mut WorkloadRun,
) {
    // Without CUDA there is nothing to note, and the end of the run has the reason.
    let Ok(visible_devices) = visible_uuids(reporter) else {
        return;
    };
    let is_assigned = |uuid: &String| assigned.iter().any(|it| is_same_device(it, uuid));
    let is_wrong = visible_devices.iter().any(|it| !is_assigned(it));
    let detail = AllocationDetail {
        failures: AllocationFailures {
            wrong_gpu: u64::from(is_wrong),
            ..AllocationFailures::default()
        },
        visible_devices,
        ..AllocationDetail::default()
    };
    note(&detail, run);
}

fn note(detail: &AllocationDetail, run: &mut WorkloadRun) {
    if let Ok(detail) = serde_json::to_value(detail) {
        run.detail.insert(ALLOCATION.to_owned(), detail);
    }
}

impl Workload for AllocationTask {
    type Prepared<'g> = PreparedAllocation<'g>;

    fn prepare<'g>(
        &self,
        gpus: &'g [WorkerGpu],
        budget: MemoryShare,
        reporter: &'g Reporter,
        run: &mut WorkloadRun,
    ) -> Result<PreparedAllocation<'g>, WorkerEnd> {
        let [gpu] = gpus else {
            let count = gpus.len();
            return Err(exited(format!(
                "the worker has {count} GPUs instead of one"
            )));
        };
        let kernels = PatternKernels::load(gpu, reporter)?;
        let (free, _) = gpu.context.memory_bytes()?;
        run.memory.free_bytes = free;
        let mut detail = run.allocation().unwrap_or_default();
        detail.device = gpu.device.uuid()?;
        let prepared = PreparedAllocation {
            task: self.clone(),
            gpu,
            call: CurrentCall::watch(),
            kernels,
            bytes: budget.of(free).max(WORD_BYTES) / WORD_BYTES * WORD_BYTES,
            step: 0,
            detail,
        };
        note(&prepared.detail, run);
        Ok(prepared)
    }
}

/// A worker with its kernels; it holds no other memory between two operations.
pub(crate) struct PreparedAllocation<'g> {
    task: AllocationTask,
    gpu: &'g WorkerGpu,
    call: CurrentCall,
    kernels: PatternKernels<'g>,
    bytes: u64,
    step: u64,
    detail: AllocationDetail,
}

impl Prepared for PreparedAllocation<'_> {
    fn step(&mut self, run: &mut WorkloadRun) -> Result<Step, WorkerEnd> {
        let operation = self.operate(run);
        if matches!(operation, Err(WorkerEnd::CudaError { .. })) {
            self.detail.failures.cuda_error += 1;
        }
        self.step += 1;
        note(&self.detail, run);
        operation.map(|()| Step::EndOfPass)
    }

    fn finish(self, run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        note(&self.detail, run);
        Ok(())
    }
}

impl PreparedAllocation<'_> {
    fn operate(&mut self, run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        self.call.begin(Call::Allocate);
        let memory = match self.gpu.context.allocate(self.bytes) {
            Ok(memory) => memory,
            Err(CudaFailure::Status { code, .. }) if code == CUDA_ERROR_OUT_OF_MEMORY => {
                self.detail.failures.out_of_memory += 1;
                std::thread::sleep(PAUSE_AFTER_REFUSAL);
                return Ok(());
            }
            Err(failure) => return Err(failure.into()),
        };
        self.detail.peak_memory_bytes = self.detail.peak_memory_bytes.max(memory.bytes());
        run.memory.used_bytes = self.detail.peak_memory_bytes;
        let own = Mark {
            test: self.task.seed,
            worker: self.task.number,
        };
        self.call.begin(Call::Copy);
        self.detail.foreign_marks += u64::from(own.another_is_in(&memory)?);
        self.call.begin(Call::Compute);
        self.compute(&memory, run)?;
        self.call.begin(Call::Copy);
        own.write_to(&memory)?;
        self.call.begin(Call::Free);
        memory.free()?;
        Ok(())
    }

    fn compute(
        &mut self,
        memory: &DeviceMemory<'_, '_>,
        run: &mut WorkloadRun,
    ) -> Result<(), WorkerEnd> {
        let pattern = Pattern {
            first: 0,
            seed: mark::seed_of(&self.task, self.step),
            mask: 0,
        };
        self.kernels.clear()?;
        let extent = Extent::of(memory);
        self.kernels.write(extent, pattern)?;
        let unwritten = self.kernels.unwritten(extent, pattern)?;
        self.kernels.verify(extent, pattern)?;
        let result = self.kernels.result()?;
        self.count(&result, unwritten, run);
        Ok(())
    }

    fn count(&mut self, result: &PatternResult, unwritten: u64, run: &mut WorkloadRun) {
        let mismatches = result.mismatches().max(unwritten);
        if mismatches == 0 && result.bytes_compared() == self.bytes {
            self.detail.operations += 1;
            run.measured.bytes_verified += self.bytes;
            return;
        }
        self.detail.failures.wrong_result += 1;
        run.mismatches = run.mismatches.saturating_add(mismatches);
        let room = EXAMPLES_MAXIMUM.saturating_sub(run.first_mismatches.len());
        let examples = result.examples(&self.gpu.uuid).into_iter().take(room);
        run.first_mismatches.extend(examples);
    }
}
