//! The check kernel: a small embedded PTX program whose every result word is compared with the
//! host's own.
//!
//! It needs nothing on the machine but the driver.

mod expected;

use expected::{CHECK_KERNEL_BLOCK_THREADS, check_kernel_expected};
use validator_core::facts::{KernelRun, ValueMismatch, WorkerEnd};

use super::contention::busy_if_others_came;
use super::start::{FIRST_USE_OF_CONTEXT, device_with, exited, retry_with_all_nodes};
use crate::cuda::{Context, Device, c_text};
use crate::worker::device_isolation::Attempt;
use crate::worker::protocol::Reporter;

const PTX: &str = include_str!("check.ptx");
const KERNEL: &str = "gpu_validator_check";
/// Blocks for each SM: with 256 threads each, eight fill an SM, so that every SM gets work even if
/// others are quicker.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 16;
/// What the memory holds before, so that a kernel that wrote nothing is seen to have written
/// nothing.
const POISON: u32 = 0xdead_beef;
const EXAMPLES_MAXIMUM: usize = 8;
/// `gpu-validator worker cuda-kernel --gpu UUID`. If it `is_alone` it can open no other GPU's
/// device node.
pub(crate) fn run_worker(uuid: &str, is_alone: bool) -> Attempt {
    let reporter = Reporter::new();
    let device = match (device_with(uuid, &reporter), is_alone) {
        (Err(end), true) => return retry_with_all_nodes(end),
        (device, _) => device,
    };
    let run = device.and_then(|device| compute_and_compare(&device, &reporter));
    let run = run.map_err(|end| busy_if_others_came(end, false, uuid, &reporter));
    reporter.field("run", &run.unwrap_or_else(KernelRun::without_result));
    reporter.done();
    Attempt::Completed
}

fn compute_and_compare(device: &Device<'_>, reporter: &Reporter) -> Result<KernelRun, WorkerEnd> {
    reporter.step("cuDevicePrimaryCtxRetain");
    let context = device.context()?;
    check(device, &context, reporter)
}

/// Runs the kernel and compares every word that it wrote.
pub(crate) fn check(
    device: &Device<'_>,
    context: &Context<'_>,
    reporter: &Reporter,
) -> Result<KernelRun, WorkerEnd> {
    let blocks = device.multiprocessors()? * BLOCKS_PER_MULTIPROCESSOR;
    let count = blocks * CHECK_KERNEL_BLOCK_THREADS;
    // Another seed for each run, so that words which a former run left in memory are wrong.
    let seed = seed();
    reporter.step(FIRST_USE_OF_CONTEXT);
    let ptx = c_text(PTX).ok_or_else(|| exited("the embedded PTX holds a NUL".to_owned()))?;
    let kernel =
        c_text(KERNEL).ok_or_else(|| exited("the kernel's name holds a NUL".to_owned()))?;
    let module = context.load_module(&ptx)?;
    reporter.step("cuMemAlloc");
    let words = context.words(count as usize, POISON)?;
    reporter.step("cuLaunchKernel");
    module.launch_words_kernel(&kernel, blocks, CHECK_KERNEL_BLOCK_THREADS, &words, seed)?;
    // The host computes while the GPU does.
    let expected = expected_words(count, seed);
    reporter.step("cuCtxSynchronize");
    context.synchronize()?;
    reporter.step("cuMemcpyDtoH");
    let observed = words.copy_to_host()?;
    Ok(compare(&expected, &observed))
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
            scope.spawn(move || {
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
