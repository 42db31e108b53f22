//! What `generate_operand` writes, on the host: the same bits for the same type, mode, seed and
//! index.

/// Type of an operand's elements; the discriminant is the kernels' `type` parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum OperandType {
    F64 = 0,
    F32 = 1,
    /// FP32 patterns whose low 13 bits are zero.
    Tf32 = 2,
    Bf16 = 3,
    F16 = 4,
    /// FP8 with 4 bits of exponent and 3 of mantissa, finite values only.
    E4m3 = 5,
    S8 = 6,
}

/// What the elements are for; the discriminant is the kernels' `mode` parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum OperandMode {
    /// Small integers: every product and every partial sum is exact in every kernel.
    Exact = 0,
    /// A random sign and mantissa and one of four exponents: 1/8 <= |x| < 2. INT8: all values.
    Random = 1,
    /// Plus or minus one, in FP64 and FP32: the vector of Freivalds' check.
    Sign = 2,
}

impl OperandType {
    /// Size of one element.
    #[must_use]
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::Tf32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::E4m3 | Self::S8 => 1,
        }
    }

    /// Bits of the stored mantissa that are used, bias of the exponent, and width of the pattern
    /// they make.
    const fn format(self) -> (u32, u64, u32) {
        match self {
            Self::F64 => (52, 1023, 64),
            Self::F32 => (23, 127, 32),
            Self::Tf32 => (10, 127, 19),
            Self::Bf16 => (7, 127, 16),
            Self::F16 => (10, 15, 16),
            Self::E4m3 | Self::S8 => (3, 7, 8),
        }
    }
}

/// The bits of element `index`, in the low bits of the result.
#[must_use]
pub(crate) fn operand_bits(kind: OperandType, mode: OperandMode, seed: u64, index: u64) -> u64 {
    let word = random_word(seed, index);
    match (mode, kind) {
        (OperandMode::Sign, OperandType::F64) => (word & (1 << 63)) | 0x3FF0_0000_0000_0000,
        (OperandMode::Sign, _) => ((word >> 32) & 0x8000_0000) | 0x3F80_0000,
        (_, OperandType::S8) => word >> 56,
        (OperandMode::Random, OperandType::Tf32) => random_pattern(kind, word) << 13,
        (OperandMode::Random, _) => random_pattern(kind, word),
        (OperandMode::Exact, _) => exact_pattern(kind, word),
    }
}

/// Element `index` of the stream that `SplitMix64` gives from `seed`.
fn random_word(seed: u64, index: u64) -> u64 {
    let mut word = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ (word >> 31)
}

fn random_pattern(kind: OperandType, word: u64) -> u64 {
    let (mantissa_bits, bias, width) = kind.format();
    let sign = word >> 63;
    let exponent = bias - 3 + ((word >> 61) & 3);
    let mantissa = (word >> (61 - mantissa_bits)) & ((1 << mantissa_bits) - 1);
    (sign << (width - 1)) | (exponent << mantissa_bits) | mantissa
}

fn exact_pattern(kind: OperandType, word: u64) -> u64 {
    if kind == OperandType::F64 {
        // 20 bits: exact.
        #[expect(clippy::cast_precision_loss, reason = "20 bits fit the mantissa")]
        let value = (word >> 44) as f64 - 524_288.0;
        return value.to_bits();
    }
    let radius = if kind == OperandType::E4m3 { 2 } else { 15 };
    let offset = ((word >> 32) * (2 * radius + 1)) >> 32;
    integer_pattern(kind, offset < radius, offset.abs_diff(radius))
}

/// An integer of at most four bits in the format of `kind`; zero has no sign.
fn integer_pattern(kind: OperandType, negative: bool, magnitude: u64) -> u64 {
    let (mantissa_bits, bias, width) = match kind {
        // Stored as whole FP32.
        OperandType::Tf32 => OperandType::F32.format(),
        other => other.format(),
    };
    let Some(exponent) = magnitude.checked_ilog2() else {
        return 0;
    };
    let mantissa = (magnitude << (mantissa_bits - exponent)) & ((1 << mantissa_bits) - 1);
    (u64::from(negative) << (width - 1))
        | ((bias + u64::from(exponent)) << mantissa_bits)
        | mantissa
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 0x1234_5678_90AB_CDEF;

    /// Read back from `generate_operand` on an NVIDIA H200: elements 0 to 5 and 1023.
    const SEEN_ON_H200: [(OperandType, OperandMode, [u64; 7]); 14] = [
        (
            OperandType::F64,
            OperandMode::Exact,
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
            OperandType::F64,
            OperandMode::Random,
            [
                0x3FCE_4A47_0ABA_BCB4,
                0xBFD7_4F78_D5B3_8025,
                0x3FFD_14C4_698F_8B74,
                0x3FFD_2ED7_5127_5D1D,
                0xBFDD_C1E0_6110_3D69,
                0xBFF1_6D38_ECF8_73CF,
                0x3FC8_CA36_4F2B_371F,
            ],
        ),
        (
            OperandType::F32,
            OperandMode::Exact,
            [
                0xC140_0000,
                0x40C0_0000,
                0xBF80_0000,
                0xBF80_0000,
                0x40E0_0000,
                0x4140_0000,
                0xC150_0000,
            ],
        ),
        (
            OperandType::F32,
            OperandMode::Random,
            [
                0x3E72_5238,
                0xBEBA_7BC6,
                0x3FE8_A623,
                0x3FE9_76BA,
                0xBEEE_0F03,
                0xBF8B_69C7,
                0x3E46_51B2,
            ],
        ),
        (
            OperandType::Tf32,
            OperandMode::Exact,
            [
                0xC140_0000,
                0x40C0_0000,
                0xBF80_0000,
                0xBF80_0000,
                0x40E0_0000,
                0x4140_0000,
                0xC150_0000,
            ],
        ),
        (
            OperandType::Tf32,
            OperandMode::Random,
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
            OperandType::Bf16,
            OperandMode::Exact,
            [0xC140, 0x40C0, 0xBF80, 0xBF80, 0x40E0, 0x4140, 0xC150],
        ),
        (
            OperandType::Bf16,
            OperandMode::Random,
            [0x3E72, 0xBEBA, 0x3FE8, 0x3FE9, 0xBEEE, 0xBF8B, 0x3E46],
        ),
        (
            OperandType::F16,
            OperandMode::Exact,
            [0xCA00, 0x4600, 0xBC00, 0xBC00, 0x4700, 0x4A00, 0xCA80],
        ),
        (
            OperandType::F16,
            OperandMode::Random,
            [0x3392, 0xB5D3, 0x3F45, 0x3F4B, 0xB770, 0xBC5B, 0x3232],
        ),
        (
            OperandType::E4m3,
            OperandMode::Exact,
            [0xC0, 0x38, 0x0, 0x0, 0x38, 0x40, 0xC0],
        ),
        (
            OperandType::E4m3,
            OperandMode::Random,
            [0x27, 0xAB, 0x3E, 0x3E, 0xAE, 0xB8, 0x24],
        ),
        (
            OperandType::S8,
            OperandMode::Exact,
            [0x1C, 0xAE, 0x7A, 0x7A, 0xBB, 0xE2, 0x11],
        ),
        (
            OperandType::S8,
            OperandMode::Random,
            [0x1C, 0xAE, 0x7A, 0x7A, 0xBB, 0xE2, 0x11],
        ),
    ];

    #[test]
    fn equals_what_a_gpu_wrote() {
        for (kind, mode, seen) in SEEN_ON_H200 {
            for (index, bits) in [0, 1, 2, 3, 4, 5, 1023].into_iter().zip(seen) {
                assert_eq!(
                    operand_bits(kind, mode, SEED, index),
                    bits,
                    "{kind:?} {mode:?} element {index}"
                );
            }
        }
    }

    #[test]
    fn signs_are_plus_and_minus_one_as_a_gpu_wrote_them() {
        let signs = [1.0_f64, -1.0, 1.0, 1.0, -1.0, -1.0];
        for (index, sign) in (0..).zip(signs) {
            let bits = operand_bits(OperandType::F64, OperandMode::Sign, SEED, index);
            assert_eq!(
                f64::from_bits(bits).to_bits(),
                sign.to_bits(),
                "element {index}"
            );
        }
    }

    #[test]
    fn exact_operands_are_integers_within_their_radius_and_reach_it() {
        let values: Vec<f32> = (0..1000)
            .map(|index| operand_bits(OperandType::F32, OperandMode::Exact, SEED, index))
            .map(|bits| f32::from_bits(u32::try_from(bits).unwrap()))
            .collect();
        assert!(
            values
                .iter()
                .all(|value| value.fract() == 0.0 && value.abs() <= 15.0)
        );
        assert!(values.contains(&15.0) && values.contains(&-15.0) && values.contains(&0.0));
    }
}
