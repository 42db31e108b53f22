//! Chunks of memory that one step launches.

use std::time::Duration;

/// A step that takes less than this is doubled. A launch of a chunk takes 0.2 ms on an H100, its
/// await 0.2 ms more (BENCHMARKS.md, "Memory test"): of 2 ms and more, waiting is at most a tenth.
const SHORT: Duration = Duration::from_millis(2);
/// A step that takes more than this is halved. A sentinel's newcomer waits for the rest of a step;
/// its goal is 20 ms (docs/sentinel.md).
const LONG: Duration = Duration::from_millis(5);
/// The queue of a stream holds about a thousand launches, after which a launch blocks.
const MAXIMUM: usize = 256;

/// The number of chunks of the next step, by the time that the last one took.
pub(super) fn next(batch: usize, took: Duration) -> usize {
    if took > LONG {
        (batch / 2).max(1)
    } else if took < SHORT {
        (batch * 2).min(MAXIMUM)
    } else {
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU that works a chunk in this time, and waits this long for the end of a step.
    fn settled(chunk: Duration, wait: Duration) -> usize {
        (0..20).fold(1, |batch, _| {
            next(batch, chunk * u32::try_from(batch).unwrap() + wait)
        })
    }

    #[test]
    fn step_settles_between_the_limits_on_every_gpu() {
        let wait = Duration::from_micros(200);
        for (gpu, chunk_micros) in [("H200", 130), ("H100", 180), ("A10", 900), ("T4", 1_800)] {
            let chunk = Duration::from_micros(chunk_micros);
            let step = chunk * u32::try_from(settled(chunk, wait)).unwrap();
            assert!(step + wait >= SHORT, "{gpu}: {step:?}");
            assert!(step + wait <= LONG, "{gpu}: {step:?}");
        }
    }

    #[test]
    fn slow_step_has_one_chunk_and_a_fast_one_no_more_than_the_queue_holds() {
        assert_eq!(settled(Duration::from_secs(1), Duration::ZERO), 1);
        assert_eq!(settled(Duration::ZERO, Duration::ZERO), MAXIMUM);
    }
}
