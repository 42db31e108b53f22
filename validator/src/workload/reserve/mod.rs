//! Reservation: holds memory of its GPUs in chunks and computes nothing.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use validator_core::facts::{WorkerEnd, WorkloadRun};

use super::chunks::{Chunk, allocate_chunks};
use super::start::FIRST_USE_OF_CONTEXT;
use super::{Prepared, Step, WorkerGpu, Workload};
use crate::plan::MemoryShare;
use crate::worker::protocol::Reporter;

/// One wait, so that an order is not delayed.
const STEP: Duration = Duration::from_millis(5);

/// The reservation as an assignment has it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct ReserveTask {}

impl Workload for ReserveTask {
    type Prepared<'g> = PreparedReserve<'g>;

    fn prepare<'g>(
        &self,
        gpus: &'g [WorkerGpu],
        budget: MemoryShare,
        reporter: &'g Reporter,
        run: &mut WorkloadRun,
    ) -> Result<PreparedReserve<'g>, WorkerEnd> {
        let mut chunks = Vec::new();
        for gpu in gpus {
            gpu.context.make_current()?;
            reporter.step(FIRST_USE_OF_CONTEXT);
            chunks.extend(allocate_chunks(gpu, budget, run)?);
        }
        Ok(PreparedReserve { chunks })
    }
}

/// The memory that is held.
pub(crate) struct PreparedReserve<'g> {
    chunks: Vec<Chunk<'g>>,
}

impl Prepared for PreparedReserve<'_> {
    fn step(&mut self, _run: &mut WorkloadRun) -> Result<Step, WorkerEnd> {
        std::thread::sleep(STEP);
        Ok(Step::WithinPass)
    }

    fn finish(self, run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        run.detail
            .insert("chunks".to_owned(), self.chunks.len().into());
        Ok(())
    }
}
