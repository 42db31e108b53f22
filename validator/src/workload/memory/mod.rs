//! The memory test: writes a pattern to the free memory of its GPUs, and compares every word on the device.
//!
//! A pass writes all of the memory before it compares any of it, so that caches hold nothing of what is read; then it does the
//! same with every bit inverted. Memory is allocated and worked in chunks, so that a worker stops within milliseconds.

mod pattern;

use std::ffi::CStr;

use serde::{Deserialize, Serialize};
use validator_core::facts::{MemoryMismatch, WorkerEnd, WorkloadRun};

use super::chunks::{WORD_BYTES, allocate_chunks};
use super::start::{FIRST_USE_OF_CONTEXT, exited};
use super::{Prepared, Step, WorkerGpu, Workload};
use crate::cuda::{Argument, DeviceMemory, LaunchShape, Module, c_text};
use crate::plan::MemoryShare;
use crate::worker::protocol::Reporter;

const PTX: &str = include_str!("memory.ptx");
const WRITE: &CStr = c"gpu_validator_memory_write";
const VERIFY: &CStr = c"gpu_validator_memory_verify";
const BLOCK_THREADS: u32 = 256;
/// Eight blocks of 256 threads fill an SM; twice that hides the end of a launch.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 16;
const WORD: usize = size_of::<u64>();
/// Mismatches whose addresses the kernel keeps.
const EXAMPLES_MAXIMUM: usize = 8;
/// Words of the result: mismatches, words compared, and three for each example.
const RESULT_WORDS: usize = 2 + 3 * EXAMPLES_MAXIMUM;

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
        reporter: &Reporter,
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
        })
    }
}

/// The memory of all GPUs, and the place in the pass.
pub(crate) struct PreparedMemory<'g> {
    seed: u64,
    arenas: Vec<Arena<'g>>,
    /// Of the GPU that has most.
    chunks: usize,
    /// Steps of the pass that are done, of [`Phase::ALL`] times `chunks`.
    next: usize,
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
    /// One chunk on every GPU: launched on all, then awaited.
    fn step(&mut self, run: &mut WorkloadRun) -> Result<Step, WorkerEnd> {
        let phase = Phase::ALL[self.next / self.chunks];
        let chunk = self.next % self.chunks;
        for arena in &self.arenas {
            arena.launch(phase, chunk, self.seed)?;
        }
        let mut mismatches = 0;
        run.first_mismatches.clear();
        let mut verified = 0;
        for arena in &mut self.arenas {
            arena.await_step(phase, chunk, self.seed)?;
            mismatches += arena.mismatches();
            verified += arena.verified_bytes();
            run.first_mismatches.extend(arena.examples());
        }
        run.mismatches = mismatches;
        run.measured.bytes_verified = verified;
        self.next += 1;
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
    module: Module<'g, 'static>,
    chunks: Vec<DeviceMemory<'g, 'static>>,
    result: DeviceMemory<'g, 'static>,
    /// The result as it was read last.
    words: [u64; RESULT_WORDS],
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
        let context = &gpu.context;
        context.make_current()?;
        reporter.step(FIRST_USE_OF_CONTEXT);
        let ptx = c_text(PTX).ok_or_else(|| exited("the embedded PTX holds a NUL".to_owned()))?;
        let module = context.load_module(&ptx)?;
        reporter.step("cuMemAlloc");
        let result = context.allocate(RESULT_WORDS as u64 * WORD_BYTES)?;
        result.write(0, &[0; RESULT_WORDS * WORD])?;
        let chunks = allocate_chunks(gpu, budget, run)?;
        Ok(Self {
            gpu,
            module,
            chunks,
            result,
            words: [0; RESULT_WORDS],
            unwritten: 0,
        })
    }

    /// Number of the chunk's first word among all of this GPU.
    fn first_word(&self, chunk: usize) -> u64 {
        let before = self.chunks[..chunk].iter().map(DeviceMemory::bytes);
        before.sum::<u64>() / WORD_BYTES
    }

    fn launch(&self, phase: Phase, chunk: usize, seed: u64) -> Result<(), WorkerEnd> {
        let Some(memory) = self.chunks.get(chunk) else {
            return Ok(());
        };
        self.gpu.context.make_current()?;
        let kernel = if phase.verifies { VERIFY } else { WRITE };
        let arguments = [
            Argument::Pointer(memory.address()),
            Argument::U64(memory.bytes() / WORD_BYTES),
            Argument::U64(self.first_word(chunk)),
            Argument::U64(seed),
            Argument::U64(phase.mask),
            Argument::Pointer(self.result.address()),
        ];
        let shape = LaunchShape {
            grid: (
                self.gpu.device.multiprocessors()? * BLOCKS_PER_MULTIPROCESSOR,
                1,
            ),
            block: BLOCK_THREADS,
            shared_bytes: 0,
        };
        Ok(self.module.kernel(kernel, 0)?.launch(shape, &arguments)?)
    }

    /// Waits for the launch. Two words that it wrote are compared by the host, since a kernel that does nothing would agree with
    /// another one that does nothing.
    fn await_step(&mut self, phase: Phase, chunk: usize, seed: u64) -> Result<(), WorkerEnd> {
        let Some(memory) = self.chunks.get(chunk) else {
            return Ok(());
        };
        self.gpu.context.make_current()?;
        self.gpu.context.synchronize()?;
        if phase.verifies {
            let mut bytes = [0; RESULT_WORDS * WORD];
            self.result.read(0, &mut bytes)?;
            for (word, bytes) in self.words.iter_mut().zip(bytes.chunks_exact(WORD)) {
                *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            }
            return Ok(());
        }
        let last = memory.bytes() / WORD_BYTES - 1;
        for number in [0, last] {
            let mut bytes = [0; WORD];
            memory.read(number * WORD_BYTES, &mut bytes)?;
            let expected = pattern::word(self.first_word(chunk) + number, seed, phase.mask);
            self.unwritten += u64::from(u64::from_le_bytes(bytes) != expected);
        }
        Ok(())
    }

    /// The device counts each wrong word; what only the host found wrong was never written.
    fn mismatches(&self) -> u64 {
        self.words[0].max(self.unwritten)
    }

    /// Each byte is compared twice in a pass, with each value of its bits.
    fn verified_bytes(&self) -> u64 {
        self.words[1] * WORD_BYTES / 2
    }

    fn examples(&self) -> Vec<MemoryMismatch> {
        let count = usize::try_from(self.words[0]).unwrap_or(usize::MAX);
        let examples = self.words[2..].chunks_exact(3);
        examples
            .take(count.min(EXAMPLES_MAXIMUM))
            .map(|it| MemoryMismatch {
                gpu: self.gpu.uuid.clone(),
                address: format!("{:#x}", it[0]),
                expected: format!("{:#018x}", it[1]),
                observed: format!("{:#018x}", it[2]),
            })
            .collect()
    }
}
