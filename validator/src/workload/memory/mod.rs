//! The memory test: writes a pattern to the free memory of its GPUs, and compares every word on the
//! device.
//!
//! A pass writes all of the memory before it compares any of it, so that caches hold nothing of
//! what is read; then it does the same with every bit inverted. Memory is allocated in chunks, with
//! one launch for each. A step launches as many as take some milliseconds ([`batch`]), so that the
//! GPU does not idle between launches and a worker stops in time.

mod batch;
mod kernels;
mod pattern;

use std::ops::Range;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use validator_core::facts::{MemoryMismatch, WorkerEnd, WorkloadRun};

pub(super) use kernels::{EXAMPLES_MAXIMUM, Pattern, PatternKernels, PatternResult};

use super::chunks::{Chunk, WORD_BYTES, allocate_chunks};
use super::{Prepared, Step, WorkerGpu, Workload};
use crate::plan::MemoryShare;
use crate::worker::protocol::Reporter;

/// The memory test as an assignment has it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MemoryTask {
    pub(crate) seed: u64,
}

impl Workload for MemoryTask {
    type Prepared<'g> = PreparedMemory<'g>;

    fn prepare<'g>(
        &self,
        gpus: &'g [WorkerGpu],
        budget: MemoryShare,
        reporter: &'g Reporter,
        run: &mut WorkloadRun,
    ) -> Result<PreparedMemory<'g>, WorkerEnd> {
        let arenas: Result<Vec<_>, _> = gpus
            .iter()
            .map(|gpu| Arena::allocate(gpu, budget, reporter, run))
            .collect();
        let arenas = arenas?;
        let chunks = arenas.iter().map(|it| it.chunks.len()).max().unwrap_or(0);
        Ok(PreparedMemory {
            seed: self.seed,
            arenas,
            chunks,
            next: 0,
            batch: 1,
        })
    }
}

/// The memory of all GPUs, and the place in the pass.
pub(crate) struct PreparedMemory<'g> {
    seed: u64,
    arenas: Vec<Arena<'g>>,
    /// Of the GPU that has most.
    chunks: usize,
    /// Chunks of the pass that are done, of [`Phase::ALL`] times `chunks`.
    next: usize,
    /// Chunks of one step.
    batch: usize,
}

/// Parts of a pass, each over all chunks.
#[derive(Clone, Copy)]
struct Phase {
    verifies: bool,
    mask: u64,
}

impl Phase {
    const ALL: [Self; 4] = [
        Self::of(false, 0),
        Self::of(true, 0),
        Self::of(false, u64::MAX),
        Self::of(true, u64::MAX),
    ];

    const fn of(verifies: bool, mask: u64) -> Self {
        Self { verifies, mask }
    }
}

impl Prepared for PreparedMemory<'_> {
    /// A batch of chunks on every GPU: launched on all, then awaited.
    fn step(&mut self, run: &mut WorkloadRun) -> Result<Step, WorkerEnd> {
        let phase = Phase::ALL[self.next / self.chunks];
        let first = self.next % self.chunks;
        let batch = first..self.chunks.min(first + self.batch);
        let began = Instant::now();
        for arena in &self.arenas {
            arena.launch(phase, batch.clone(), self.seed)?;
        }
        let mut mismatches = 0;
        run.first_mismatches.clear();
        let mut verified = 0;
        for arena in &mut self.arenas {
            arena.await_step(phase, batch.clone(), self.seed)?;
            mismatches += arena.mismatches();
            verified += arena.verified_bytes();
            run.first_mismatches.extend(arena.examples());
        }
        run.mismatches = mismatches;
        run.measured.bytes_verified = verified;
        self.next += batch.len();
        // The last step of a phase may have fewer chunks than a batch, and takes less for that.
        if batch.len() == self.batch {
            self.batch = batch::next(self.batch, began.elapsed());
        }
        if self.next < Phase::ALL.len() * self.chunks {
            return Ok(Step::WithinPass);
        }
        self.next = 0;
        Ok(Step::EndOfPass)
    }

    fn finish(self, run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        let chunks: usize = self.arenas.iter().map(|it| it.chunks.len()).sum();
        run.detail.insert("chunks".to_owned(), chunks.into());
        run.detail.insert("seed".to_owned(), self.seed.into());
        Ok(())
    }
}

/// The memory of one GPU.
struct Arena<'g> {
    gpu: &'g WorkerGpu,
    kernels: PatternKernels<'g>,
    chunks: Vec<Chunk<'g>>,
    /// The result as it was read last.
    result: PatternResult,
    /// Words that the host read back after a write, and found wrong.
    unwritten: u64,
}

impl<'g> Arena<'g> {
    fn allocate(
        gpu: &'g WorkerGpu,
        budget: MemoryShare,
        reporter: &Reporter,
        run: &mut WorkloadRun,
    ) -> Result<Self, WorkerEnd> {
        let kernels = PatternKernels::load(gpu, reporter)?;
        let chunks = allocate_chunks(gpu, budget, run)?;
        Ok(Self {
            gpu,
            kernels,
            chunks,
            result: PatternResult::default(),
            unwritten: 0,
        })
    }

    fn pattern(&self, phase: Phase, chunk: usize, seed: u64) -> Pattern {
        let before = self.chunks[..chunk].iter().map(Chunk::bytes);
        Pattern {
            // Number of the chunk's first word among all of this GPU.
            first: before.sum::<u64>() / WORD_BYTES,
            seed,
            mask: phase.mask,
        }
    }

    /// Launches a phase on the chunks of a batch that this GPU has.
    fn launch(&self, phase: Phase, batch: Range<usize>, seed: u64) -> Result<(), WorkerEnd> {
        for chunk in self.present(batch) {
            let pattern = self.pattern(phase, chunk, seed);
            let memory = self.chunks[chunk].extent();
            if phase.verifies {
                self.kernels.verify(memory, pattern)?;
            } else {
                self.kernels.write(memory, pattern)?;
            }
        }
        Ok(())
    }

    /// Waits for the launches. Of what was written the host reads the last chunk; the count of
    /// compared words shows a launch in the middle that did nothing.
    fn await_step(
        &mut self,
        phase: Phase,
        batch: Range<usize>,
        seed: u64,
    ) -> Result<(), WorkerEnd> {
        let Some(chunk) = self.present(batch).next_back() else {
            return Ok(());
        };
        if phase.verifies {
            self.result = self.kernels.result()?;
        } else {
            let pattern = self.pattern(phase, chunk, seed);
            self.unwritten += self
                .kernels
                .unwritten(self.chunks[chunk].extent(), pattern)?;
        }
        Ok(())
    }

    /// The chunks of a batch that this GPU has; another one may have more memory.
    fn present(&self, batch: Range<usize>) -> Range<usize> {
        batch.start..batch.end.min(self.chunks.len())
    }

    /// The device counts each wrong word; what only the host found wrong was never written.
    fn mismatches(&self) -> u64 {
        self.result.mismatches().max(self.unwritten)
    }

    /// Each byte is compared twice in a pass, with each value of its bits.
    fn verified_bytes(&self) -> u64 {
        self.result.bytes_compared() / 2
    }

    fn examples(&self) -> Vec<MemoryMismatch> {
        self.result.examples(&self.gpu.uuid)
    }
}
