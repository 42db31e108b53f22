//! `generate_operand`, and the elements of operands. Written from KERNELS.md, apart from the
//! validator's own host version.

use super::{Blocks, Done, LAUNCH_NS, Launch, Output};
use crate::cuda::result::{INVALID_VALUE, Outcome};
use crate::number::{e4m3_to_f64, f16_to_f64};
use crate::threads::in_parallel;

const THREADS: u64 = 256;

/// Elements that a GPU generates in a nanosecond: bound by integer arithmetic.
const ELEMENTS_PER_NS: u64 = 200;

/// The kernels' `type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F64,
    F32,
    Tf32,
    Bf16,
    F16,
    E4m3,
    S8,
    /// Of results only.
    S32,
}

impl Element {
    pub(super) fn from_code(code: u32) -> Option<Self> {
        use Element::{Bf16, E4m3, F16, F32, F64, S8, S32, Tf32};
        let all = [F64, F32, Tf32, Bf16, F16, E4m3, S8, S32];
        all.get(code as usize).copied()
    }

    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::Tf32 | Self::S32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::S8 => 1,
        }
    }

    /// The values of these bytes; every type but F64 and S32 fits FP32 as it is.
    pub(super) fn values(self, memory: &[u8]) -> Vec<f64> {
        match self {
            Self::F64 => words::<8>(memory).map(f64::from_le_bytes).collect(),
            Self::S32 => words::<4>(memory)
                .map(|it| f64::from(i32::from_le_bytes(it)))
                .collect(),
            _ => self.values_f32(memory).into_iter().map(f64::from).collect(),
        }
    }

    /// The values of these bytes as FP32; TF32 units do not see the low 13 bits.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the narrow types fit; the wide ones are not asked for"
    )]
    pub(super) fn values_f32(self, memory: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => words::<4>(memory).map(f32::from_le_bytes).collect(),
            Self::Tf32 => words::<4>(memory)
                .map(|it| f32::from_bits(u32::from_le_bytes(it) & !0x1FFF))
                .collect(),
            Self::Bf16 => words::<2>(memory)
                .map(|it| f32::from_bits(u32::from(u16::from_le_bytes(it)) << 16))
                .collect(),
            Self::F16 => words::<2>(memory)
                .map(|it| f16_to_f64(u16::from_le_bytes(it)) as f32)
                .collect(),
            Self::E4m3 => {
                let table: [f32; 256] =
                    std::array::from_fn(|bits| e4m3_to_f64(bits.try_into().unwrap_or(0)) as f32);
                memory
                    .iter()
                    .map(|bits| table[usize::from(*bits)])
                    .collect()
            }
            Self::S8 => memory
                .iter()
                .map(|bits| f32::from(bits.cast_signed()))
                .collect(),
            Self::F64 | Self::S32 => self
                .values(memory)
                .into_iter()
                .map(|it| it as f32)
                .collect(),
        }
    }
}

fn words<const BYTES: usize>(memory: &[u8]) -> impl Iterator<Item = [u8; BYTES]> {
    memory.as_chunks::<BYTES>().0.iter().copied()
}

/// `generate_operand(out: *mut u64, elements: u64, seed: u64, type: u32, mode: u32)`.
pub(super) fn run(launch: &Launch<'_>) -> Outcome<Done> {
    // SAFETY: the parameters are those above.
    let (out, elements, seed, code, mode) = unsafe {
        (
            launch.parameter::<u64>(0)?,
            launch.parameter::<u64>(1)?,
            launch.parameter::<u64>(2)?,
            launch.parameter::<u32>(3)?,
            launch.parameter::<u32>(4)?,
        )
    };
    let kind = Element::from_code(code)
        .filter(|it| *it != Element::S32)
        .ok_or(INVALID_VALUE)?;
    let elements_of_word = 8 / kind.bytes() as u64;
    let length = usize::try_from(elements / elements_of_word).map_err(|_| INVALID_VALUE)?;
    if launch.threads_per_block() != THREADS || mode > 2 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the output is the kernel's own while it runs, and any bits are a u64.
    let words = unsafe { launch.device_slice::<u64>(out, length)? };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let part = if length < 1 << 16 {
        length
    } else {
        length.div_ceil(threads)
    };
    let parts = words.chunks_mut(part.max(1)).enumerate();
    in_parallel(threads.min(parts.len()), parts, |(number, words)| {
        let first = (number * part) as u64 * elements_of_word;
        for (index, word) in (first..).step_by(8 / kind.bytes()).zip(words) {
            *word = (0..elements_of_word).fold(0, |packed, place| {
                let bits = operand_bits(kind, mode, random_word(seed, index + place));
                packed | bits << (8 * kind.bytes() as u64 * place)
            });
        }
    });
    let output = Output {
        address: out,
        element_size: kind.bytes(),
        elements: length as u64 * elements_of_word,
        row_length: length as u64 * elements_of_word,
        blocks: Blocks::InOrder {
            elements: THREADS * elements_of_word,
        },
    };
    Ok(Done {
        outputs: vec![output],
        gpu_time_ns: LAUNCH_NS + elements / ELEMENTS_PER_NS,
    })
}

/// Output `index` of SplitMix64 for the state `seed`.
fn random_word(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

fn operand_bits(kind: Element, mode: u32, w: u64) -> u64 {
    match (mode, kind) {
        (2, Element::F64) => if w >> 63 == 1 { -1f64 } else { 1.0 }.to_bits(),
        (2, _) => if w >> 63 == 1 { -1f32 } else { 1.0 }.to_bits().into(),
        (_, Element::S8) => w >> 56,
        (1, _) => random_bits(kind, w),
        #[expect(clippy::cast_precision_loss, reason = "20 bits")]
        (_, Element::F64) => ((w >> 44) as f64 - 524_288.0).to_bits(),
        (_, Element::E4m3) => exact_bits(kind, small_integer(w, 5) - 2),
        _ => exact_bits(kind, small_integer(w, 31) - 15),
    }
}

/// From 0 to `count` - 1, from the upper half of the word.
fn small_integer(w: u64, count: u64) -> i32 {
    i32::try_from(((w >> 32) * count) >> 32).unwrap_or(0)
}

#[expect(clippy::cast_precision_loss, reason = "small integers")]
fn exact_bits(kind: Element, value: i32) -> u64 {
    let single = u64::from((value as f32).to_bits());
    match kind {
        Element::Bf16 => single >> 16,
        Element::F16 => crate::number::f64_to_f16(f64::from(value)).into(),
        Element::E4m3 => crate::number::f64_to_e4m3(f64::from(value)).into(),
        _ => single,
    }
}

fn random_bits(kind: Element, w: u64) -> u64 {
    let (mantissa_bits, bias, sign_shift, shift) = match kind {
        Element::F64 => (52, 1023, 63, 0),
        Element::F32 => (23, 127, 31, 0),
        Element::Tf32 => (10, 127, 18, 13),
        Element::Bf16 => (7, 127, 15, 0),
        Element::F16 => (10, 15, 15, 0),
        Element::E4m3 | Element::S8 | Element::S32 => (3, 7, 7, 0),
    };
    let exponent = bias - 3 + (w >> 61 & 3);
    let mantissa = w >> (61 - mantissa_bits) & ((1 << mantissa_bits) - 1);
    ((w >> 63) << sign_shift | exponent << mantissa_bits | mantissa) << shift
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Elements 0 to 5 and 1023 as `generate_operand` wrote them on an NVIDIA H200: type, mode,
    /// bits.
    const SEEN_ON_H200: [(Element, u32, [u64; 7]); 6] = [
        (
            Element::F64,
            0,
            [
                0xC118_DAE0_0000_0000,
                0x4107_4F78_0000_0000,
                0xC0D7_5A00_0000_0000,
                0xC0D6_8980_0000_0000,
                0x410D_C1E0_0000_0000,
                0x4118_B69C_0000_0000,
                0xC11B_9AE8_0000_0000,
            ],
        ),
        (
            Element::Tf32,
            1,
            [
                0x3E72_4000,
                0xBEBA_6000,
                0x3FE8_A000,
                0x3FE9_6000,
                0xBEEE_0000,
                0xBF8B_6000,
                0x3E46_4000,
            ],
        ),
        (
            Element::Bf16,
            0,
            [0xC140, 0x40C0, 0xBF80, 0xBF80, 0x40E0, 0x4140, 0xC150],
        ),
        (
            Element::F16,
            1,
            [0x3392, 0xB5D3, 0x3F45, 0x3F4B, 0xB770, 0xBC5B, 0x3232],
        ),
        (Element::E4m3, 0, [0xC0, 0x38, 0x0, 0x0, 0x38, 0x40, 0xC0]),
        (Element::S8, 1, [0x1C, 0xAE, 0x7A, 0x7A, 0xBB, 0xE2, 0x11]),
    ];

    #[test]
    fn elements_are_those_of_a_gpu() {
        for (kind, mode, seen) in SEEN_ON_H200 {
            for (index, bits) in [0, 1, 2, 3, 4, 5, 1023].into_iter().zip(seen) {
                let word = random_word(0x1234_5678_90AB_CDEF, index);
                assert_eq!(
                    operand_bits(kind, mode, word),
                    bits,
                    "{kind:?} {mode} element {index}"
                );
            }
        }
    }
}
