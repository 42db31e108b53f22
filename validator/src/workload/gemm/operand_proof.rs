//! Operands and copies, verified apart from the products that use them: a wrong operand gives a
//! product that is consistent with itself.

use std::sync::atomic::{AtomicBool, Ordering};

use super::kernels::Support;
use super::operand::{OperandMode, OperandType, operand_bits};
use super::proof::seed_of_b;
use super::shape::{Layout, Shape};
use super::strip::{STRIP_ROWS, STRIP_WORDS, strip_checksum};
use crate::cuda::{CudaFailure, DeviceMemory};
use validator_core::facts::CopyProof;

/// 32-bit words of a strip, which lies in one piece in memory that is taken as rows of
/// [`STRIP_WORDS`] words.
const WORDS: usize = STRIP_ROWS * STRIP_WORDS;
/// Of exact operands, which are used for two products, one strip in so many is compared; of random
/// ones, which the whole burn multiplies, every strip. A strip takes the host some 15 microseconds;
/// this project's choice.
const EXACT_STRIPS_STEP: usize = 16;
/// Strips that are copied to the GPU and back: 1 MiB.
const COPIED_STRIPS: u64 = 64;
/// Seed of the copied words.
const SEED_OF_COPIES: u64 = 0x9D2C_5680_A5A5_5A5A;

/// The checksums that the GPU computed over both operands in its memory.
#[derive(Debug)]
pub(super) struct OperandChecksums {
    shape: Shape,
    mode: OperandMode,
    seed: u64,
    a: Vec<u64>,
    b: Vec<u64>,
}

/// How many strips of operands the host compared, and how many differed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OperandComparison {
    pub(super) strips: u64,
    pub(super) mismatches: u64,
}

/// Has the GPU compute the checksums of both operands; the first result's memory is overwritten.
pub(super) fn operand_checksums(
    support: &Support<'_, '_>,
    arena: &DeviceMemory<'_, '_>,
    layout: &Layout,
    (mode, seed): (OperandMode, u64),
) -> Result<OperandChecksums, CudaFailure> {
    let of = |operand: u64| {
        let strips = layout.shape.operand_strips();
        let place = layout.result(0);
        let address = arena.address();
        support.checksums_of_memory(address + operand, strips, address + place)?;
        read_words(arena, place, strips)
    };
    Ok(OperandChecksums {
        shape: layout.shape,
        mode,
        seed,
        a: of(layout.a)?,
        b: of(layout.b)?,
    })
}

impl OperandChecksums {
    /// Computes the same checksums from the host's own operands, unless `stop` is set.
    pub(super) fn compare(&self, stop: &AtomicBool) -> OperandComparison {
        let every = self.compared_every();
        let seeds = [(self.seed, &self.a), (seed_of_b(self.seed), &self.b)];
        let mut comparison = OperandComparison::default();
        for (seed, checksums) in seeds {
            for (strip, checksum) in checksums.iter().enumerate().step_by(every) {
                if stop.load(Ordering::Relaxed) {
                    return comparison;
                }
                let words = strip_of_operand(self.shape.operand, self.mode, seed, strip);
                comparison.strips += 1;
                comparison.mismatches +=
                    u64::from(strip_checksum(&words, STRIP_WORDS) != *checksum);
            }
        }
        comparison
    }

    /// Strips that a comparison to the end compares.
    pub(super) fn strips(&self) -> u64 {
        2 * self.a.len().div_ceil(self.compared_every()) as u64
    }

    /// One strip in so many is compared.
    fn compared_every(&self) -> usize {
        match self.mode {
            OperandMode::Exact => EXACT_STRIPS_STEP,
            _ => 1,
        }
    }
}

/// The words of one strip of an operand, as `generate_operand` writes them.
fn strip_of_operand(operand: OperandType, mode: OperandMode, seed: u64, strip: usize) -> Vec<u32> {
    let element_bytes = operand.bytes();
    let elements = WORDS * 4 / element_bytes;
    let first = strip * elements;
    let mut bytes = Vec::with_capacity(WORDS * 4);
    for index in first..first + elements {
        let bits = operand_bits(operand, mode, seed, index as u64).to_le_bytes();
        bytes.extend_from_slice(&bits[..element_bytes]);
    }
    let words = bytes.as_chunks::<4>().0.iter();
    words.map(|it| u32::from_le_bytes(*it)).collect()
}

/// Copies words that the host knows to the GPU and back, and words that the GPU generated to the
/// host. `arena` must hold 4 MiB, else nothing is proved.
pub(crate) fn prove_copies(
    support: &Support<'_, '_>,
    arena: &DeviceMemory<'_, '_>,
) -> Result<Option<CopyProof>, CudaFailure> {
    let bytes = COPIED_STRIPS * (WORDS * 4) as u64;
    let (sent, generated, checksums) = (0, bytes, 2 * bytes);
    if arena.bytes() < 4 * bytes {
        return Ok(None);
    }
    let (operand, mode) = (OperandType::F32, OperandMode::Random);
    let strips = |seed: u64| -> Vec<Vec<u32>> {
        (0..usize::try_from(COPIED_STRIPS).unwrap_or_default())
            .map(|strip| strip_of_operand(operand, mode, seed, strip))
            .collect()
    };
    let own = strips(SEED_OF_COPIES);
    let of_gpu = strips(!SEED_OF_COPIES);
    let own_bytes: Vec<u8> = own
        .iter()
        .flatten()
        .flat_map(|it| it.to_le_bytes())
        .collect();
    arena.write(sent, &own_bytes)?;
    let elements = bytes / operand.bytes() as u64;
    let address = arena.address();
    support.generate(
        address + generated,
        elements,
        !SEED_OF_COPIES,
        operand,
        mode,
    )?;
    support.checksums_of_memory(address + sent, COPIED_STRIPS, address + checksums)?;
    let arrived = read_words(arena, checksums, COPIED_STRIPS)?;
    let mut read_back = vec![0; own_bytes.len()];
    arena.read(generated, &mut read_back)?;
    let of_gpu_bytes = of_gpu.iter().flatten().flat_map(|it| it.to_le_bytes());
    let wrong = |it: bool| u64::from(it);
    Ok(Some(CopyProof {
        bytes,
        to_gpu_wrong_blocks: own
            .iter()
            .zip(&arrived)
            .map(|(words, checksum)| wrong(strip_checksum(words, STRIP_WORDS) != *checksum))
            .sum(),
        from_gpu_wrong_bytes: of_gpu_bytes
            .zip(&read_back)
            .map(|(own, read)| wrong(own != *read))
            .sum(),
    }))
}

fn read_words(
    arena: &DeviceMemory<'_, '_>,
    offset: u64,
    count: u64,
) -> Result<Vec<u64>, CudaFailure> {
    let mut bytes = vec![0; usize::try_from(count * 8).unwrap_or_default()];
    arena.read(offset, &mut bytes)?;
    let words = bytes.as_chunks::<8>().0.iter();
    Ok(words.map(|it| u64::from_le_bytes(*it)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksums(operand: OperandType, mode: OperandMode) -> OperandChecksums {
        let shape = Shape {
            operand,
            side: 256,
            k_bytes: 256,
        };
        let strips = usize::try_from(shape.operand_strips()).expect("a few");
        let own = |seed| {
            let strip =
                |it| strip_checksum(&strip_of_operand(operand, mode, seed, it), STRIP_WORDS);
            (0..strips).map(strip).collect()
        };
        OperandChecksums {
            shape,
            mode,
            seed: 7,
            a: own(7),
            b: own(seed_of_b(7)),
        }
    }

    #[test]
    fn right_operands_agree_in_every_type_and_a_wrong_strip_is_found() {
        for operand in [
            OperandType::F64,
            OperandType::Bf16,
            OperandType::E4m3,
            OperandType::S8,
        ] {
            let mut device = checksums(operand, OperandMode::Random);
            let right = device.compare(&AtomicBool::new(false));
            assert_eq!((right.strips, right.mismatches), (device.strips(), 0));
            assert_eq!(device.strips(), 8);
            device.b[3] ^= 1;
            assert_eq!(device.compare(&AtomicBool::new(false)).mismatches, 1);
        }
    }

    #[test]
    fn exact_operands_are_sampled_and_a_stop_ends_the_comparison() {
        let device = checksums(OperandType::Bf16, OperandMode::Exact);
        assert_eq!(
            device.compare(&AtomicBool::new(false)).strips,
            device.strips()
        );
        assert!(device.strips() < 8);
        assert_eq!(device.compare(&AtomicBool::new(true)).strips, 0);
    }
}
