//! The check kernel: a small embedded PTX program whose every result word is compared with the
//! host's own.
//!
//! It needs nothing on the machine but the driver.

mod expected;

use std::ffi::CStr;
use std::time::{Duration, Instant};

use expected::{CHECK_KERNEL_BLOCK_THREADS, check_kernel_expected};
use serde::{Deserialize, Serialize};
use validator_core::facts::{KernelRun, ValueMismatch, WorkerEnd, WorkloadRun};

use super::start::{FIRST_USE_OF_CONTEXT, exited};
use super::{Prepared, Step, WorkerGpu, Workload};
use crate::cuda::{Argument, CudaResult, DeviceMemory, LaunchShape, Module, c_text};
use crate::plan::MemoryShare;
use crate::threads::spawn_scoped;
use crate::worker::protocol::Reporter;

const PTX: &str = include_str!("check.ptx");
const KERNEL: &CStr = c"gpu_validator_check";
/// Blocks for each SM: with 256 threads each, eight fill an SM, so that every SM gets work even if
/// others are quicker.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 16;
/// What the memory holds before, so that a kernel that wrote nothing is seen to have written
/// nothing.
const POISON: u32 = 0xdead_beef;
const EXAMPLES_MAXIMUM: usize = 8;
const WORD_BYTES: u64 = 4;
/// One wait between two passes, so that an order is not delayed.
const WAIT: Duration = Duration::from_millis(5);

/// Name of the detail that holds the [`KernelRun`].
pub(crate) const DETAIL: &str = "check";

/// The check kernel as an assignment has it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct CheckTask {
    /// From the beginning of a pass to that of the next, in seconds: the host computes every word,
    /// too, on several processors.
    #[serde(default)]
    pub(crate) interval_s: f64,
}

impl Workload for CheckTask {
    type Prepared<'g> = PreparedCheck<'g>;

    fn prepare<'g>(
        &self,
        gpus: &'g [WorkerGpu],
        _budget: MemoryShare,
        reporter: &'g Reporter,
        run: &mut WorkloadRun,
    ) -> Result<PreparedCheck<'g>, WorkerEnd> {
        let [gpu] = gpus else {
            let count = gpus.len();
            return Err(exited(format!(
                "the worker has {count} GPUs instead of one"
            )));
        };
        let prepared = PreparedCheck::on(gpu, reporter)?;
        run.memory.used_bytes = prepared.words.bytes();
        let interval = Duration::try_from_secs_f64(self.interval_s).unwrap_or_default();
        Ok(PreparedCheck {
            interval,
            ..prepared
        })
    }
}

/// Runs the kernel once in a worker that has started for something else.
pub(crate) fn check(gpu: &WorkerGpu, reporter: &Reporter) -> Result<KernelRun, WorkerEnd> {
    PreparedCheck::on(gpu, reporter)?.compare()
}

/// The kernel and the memory that it writes, on one GPU.
pub(crate) struct PreparedCheck<'g> {
    gpu: &'g WorkerGpu,
    reporter: &'g Reporter,
    words: DeviceMemory<'g, 'static>,
    module: Module<'g, 'static>,
    blocks: u32,
    interval: Duration,
    /// When the last pass began.
    began: Option<Instant>,
}

impl<'g> PreparedCheck<'g> {
    fn on(gpu: &'g WorkerGpu, reporter: &'g Reporter) -> Result<Self, WorkerEnd> {
        let blocks = gpu.device.multiprocessors()? * BLOCKS_PER_MULTIPROCESSOR;
        let count = blocks * CHECK_KERNEL_BLOCK_THREADS;
        reporter.step(FIRST_USE_OF_CONTEXT);
        let ptx = c_text(PTX).ok_or_else(|| exited("the embedded PTX holds a NUL".to_owned()))?;
        let module = gpu.context.load_module(&ptx)?;
        reporter.step("cuMemAlloc");
        let words = gpu.context.allocate(u64::from(count) * WORD_BYTES)?;
        words.fill(POISON)?;
        Ok(Self {
            gpu,
            reporter,
            words,
            module,
            blocks,
            interval: Duration::ZERO,
            began: None,
        })
    }

    /// Runs the kernel and compares every word that it wrote.
    fn compare(&self) -> Result<KernelRun, WorkerEnd> {
        let count = self.blocks * CHECK_KERNEL_BLOCK_THREADS;
        // Another seed for each run, so that words which a former run left in memory are wrong.
        let seed = seed();
        self.reporter.step("cuLaunchKernel");
        let shape = LaunchShape {
            grid: (self.blocks, 1),
            block: CHECK_KERNEL_BLOCK_THREADS,
            shared_bytes: 0,
        };
        let arguments = [
            Argument::Pointer(self.words.address()),
            Argument::U32(count),
            Argument::U32(seed),
        ];
        self.module.kernel(KERNEL, 0)?.launch(shape, &arguments)?;
        // The host computes while the GPU does.
        let expected = expected_words(count, seed);
        self.reporter.step("cuCtxSynchronize");
        self.gpu.context.synchronize()?;
        self.reporter.step("cuMemcpyDtoH");
        let observed = words_of(&self.words)?;
        Ok(compare(&expected, &observed))
    }
}

impl Prepared for PreparedCheck<'_> {
    fn step(&mut self, run: &mut WorkloadRun) -> Result<Step, WorkerEnd> {
        if self.began.is_some_and(|it| it.elapsed() < self.interval) {
            std::thread::sleep(WAIT);
            return Ok(Step::WithinPass);
        }
        self.began = Some(Instant::now());
        let kernel = self.compare()?;
        run.mismatches += kernel.mismatches;
        run.measured.bytes_verified += kernel.values_compared * WORD_BYTES;
        if let Ok(kernel) = serde_json::to_value(&kernel) {
            run.detail.insert(DETAIL.to_owned(), kernel);
        }
        Ok(Step::EndOfPass)
    }

    fn finish(self, _run: &mut WorkloadRun) -> Result<(), WorkerEnd> {
        Ok(())
    }
}

fn words_of(memory: &DeviceMemory<'_, '_>) -> CudaResult<Vec<u32>> {
    let mut bytes = vec![0; usize::try_from(memory.bytes()).unwrap_or(usize::MAX)];
    memory.read(0, &mut bytes)?;
    let words = bytes.as_chunks().0.iter();
    Ok(words.map(|it| u32::from_le_bytes(*it)).collect())
}

fn seed() -> u32 {
    let since_epoch = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    since_epoch.subsec_nanos() ^ std::process::id().rotate_left(16)
}

/// The host's own words, by as many threads as there are processors, since there are some 100,000
/// to a million.
fn expected_words(count: u32, seed: u32) -> Vec<u32> {
    let threads = std::thread::available_parallelism().map_or(1, |it| it.get().min(4));
    let mut words = vec![0; count as usize];
    let part = words.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (number, words) in words.chunks_mut(part).enumerate() {
            spawn_scoped(scope, move || {
                for (index, word) in (number * part..).zip(words) {
                    let index = u32::try_from(index).unwrap_or(u32::MAX);
                    *word = check_kernel_expected(index, seed);
                }
            });
        }
    });
    words
}

fn compare(expected: &[u32], observed: &[u32]) -> KernelRun {
    let mut mismatches = 0;
    let mut examples = Vec::new();
    for (index, (expected, observed)) in expected.iter().zip(observed).enumerate() {
        if expected == observed {
            continue;
        }
        mismatches += 1;
        if examples.len() < EXAMPLES_MAXIMUM {
            examples.push(ValueMismatch {
                index: index as u64,
                expected: format!("{expected:#010x}"),
                observed: format!("{observed:#010x}"),
            });
        }
    }
    KernelRun {
        end: WorkerEnd::Finished,
        values_compared: expected.len().min(observed.len()) as u64,
        mismatches,
        examples,
        wall_ms: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_word_is_counted_and_the_first_are_shown() {
        let expected = expected_words(4096, 9);
        let mut observed = expected.clone();
        assert_eq!(compare(&expected, &observed).mismatches, 0);
        observed[4095] ^= 1;
        for word in &mut observed[100..120] {
            *word = POISON;
        }
        let run = compare(&expected, &observed);
        assert_eq!(
            (run.values_compared, run.mismatches, run.examples.len()),
            (4096, 21, 8)
        );
        assert_eq!(run.examples[0].index, 100);
        assert_eq!(run.examples[0].observed, "0xdeadbeef");
    }

    #[test]
    fn threads_compute_the_same_words_as_one() {
        let words = expected_words(1000, 3);
        assert!((0..1000).all(|index| words[index as usize] == check_kernel_expected(index, 3)));
    }
}
