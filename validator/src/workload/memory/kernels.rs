//! The kernels that write a pattern to a GPU's memory and compare it, with the words in which they
//! count.

use std::ffi::CStr;

use validator_core::facts::{MemoryMismatch, WorkerEnd};

use super::super::WorkerGpu;
use super::super::chunks::{Extent, WORD_BYTES};
use super::super::start::{FIRST_USE_OF_CONTEXT, exited};
use super::pattern;
use crate::cuda::{Argument, DeviceMemory, LaunchShape, Module, c_text};
use crate::worker::protocol::Reporter;

const PTX: &str = include_str!("memory.ptx");
const WRITE: &CStr = c"gpu_validator_memory_write";
const VERIFY: &CStr = c"gpu_validator_memory_verify";
const BLOCK_THREADS: u32 = 256;
/// Eight blocks of 256 threads fill an SM. More were slower (BENCHMARKS.md, "Memory test").
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;
const WORD: usize = size_of::<u64>();
/// Mismatches whose addresses the kernel keeps.
pub(in crate::workload) const EXAMPLES_MAXIMUM: usize = 8;
/// Words of the result: mismatches, words compared, and three for each example.
const RESULT_WORDS: usize = 2 + 3 * EXAMPLES_MAXIMUM;

/// The words of a piece of memory.
#[derive(Clone, Copy)]
pub(in crate::workload) struct Pattern {
    /// Number of the first word.
    pub(in crate::workload) first: u64,
    pub(in crate::workload) seed: u64,
    /// Combined with every word.
    pub(in crate::workload) mask: u64,
}

/// The kernels of one GPU.
pub(in crate::workload) struct PatternKernels<'g> {
    gpu: &'g WorkerGpu,
    module: Module<'g, 'static>,
    result: DeviceMemory<'g, 'static>,
}

impl<'g> PatternKernels<'g> {
    pub(in crate::workload) fn load(
        gpu: &'g WorkerGpu,
        reporter: &Reporter,
    ) -> Result<Self, WorkerEnd> {
        let context = &gpu.context;
        context.make_current()?;
        reporter.step(FIRST_USE_OF_CONTEXT);
        let ptx = c_text(PTX).ok_or_else(|| exited("the embedded PTX holds a NUL".to_owned()))?;
        let module = context.load_module(&ptx)?;
        reporter.step("cuMemAlloc");
        let result = context.allocate(RESULT_WORDS as u64 * WORD_BYTES)?;
        let kernels = Self {
            gpu,
            module,
            result,
        };
        kernels.clear()?;
        Ok(kernels)
    }

    /// Begins to count anew.
    pub(in crate::workload) fn clear(&self) -> Result<(), WorkerEnd> {
        Ok(self.result.write(0, &[0; RESULT_WORDS * WORD])?)
    }

    /// Launches the kernel that writes.
    pub(in crate::workload) fn write(
        &self,
        memory: Extent<'_>,
        pattern: Pattern,
    ) -> Result<(), WorkerEnd> {
        self.launch(WRITE, memory, pattern)
    }

    /// Launches the kernel that compares.
    pub(in crate::workload) fn verify(
        &self,
        memory: Extent<'_>,
        pattern: Pattern,
    ) -> Result<(), WorkerEnd> {
        self.launch(VERIFY, memory, pattern)
    }

    fn launch(&self, kernel: &CStr, memory: Extent<'_>, pattern: Pattern) -> Result<(), WorkerEnd> {
        self.gpu.context.make_current()?;
        let arguments = [
            Argument::Pointer(memory.address()),
            Argument::U64(memory.bytes() / WORD_BYTES),
            Argument::U64(pattern.first),
            Argument::U64(pattern.seed),
            Argument::U64(pattern.mask),
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

    /// Waits for a launch that wrote, and returns how many of two words the host finds wrong: a
    /// kernel that does nothing would agree with another one that does nothing.
    pub(in crate::workload) fn unwritten(
        &self,
        memory: Extent<'_>,
        pattern: Pattern,
    ) -> Result<u64, WorkerEnd> {
        self.gpu.context.make_current()?;
        self.gpu.context.synchronize()?;
        let last = memory.bytes() / WORD_BYTES - 1;
        let mut unwritten = 0;
        for number in [0, last] {
            let mut bytes = [0; WORD];
            memory.read(number * WORD_BYTES, &mut bytes)?;
            let expected = pattern::word(pattern.first + number, pattern.seed, pattern.mask);
            unwritten += u64::from(u64::from_le_bytes(bytes) != expected);
        }
        Ok(unwritten)
    }

    /// Waits for the launches, and reads what they counted.
    pub(in crate::workload) fn result(&self) -> Result<PatternResult, WorkerEnd> {
        self.gpu.context.make_current()?;
        self.gpu.context.synchronize()?;
        let mut bytes = [0; RESULT_WORDS * WORD];
        self.result.read(0, &mut bytes)?;
        let mut result = PatternResult::default();
        for (word, bytes) in result.words.iter_mut().zip(bytes.chunks_exact(WORD)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        }
        Ok(result)
    }
}

/// What the kernel that compares counted.
#[derive(Clone, Default)]
pub(in crate::workload) struct PatternResult {
    words: [u64; RESULT_WORDS],
}

impl PatternResult {
    pub(in crate::workload) fn mismatches(&self) -> u64 {
        self.words[0]
    }

    /// The count comes from memory that is tested, and may be any number.
    pub(in crate::workload) fn bytes_compared(&self) -> u64 {
        self.words[1].saturating_mul(WORD_BYTES)
    }

    pub(in crate::workload) fn examples(&self, gpu: &str) -> Vec<MemoryMismatch> {
        let count = usize::try_from(self.mismatches()).unwrap_or(usize::MAX);
        let examples = self.words[2..].chunks_exact(3);
        examples
            .take(count.min(EXAMPLES_MAXIMUM))
            .map(|it| MemoryMismatch {
                gpu: gpu.to_owned(),
                address: format!("{:#x}", it[0]),
                expected: format!("{:#018x}", it[1]),
                observed: format!("{:#018x}", it[2]),
            })
            .collect()
    }
}
