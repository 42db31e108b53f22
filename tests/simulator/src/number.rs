//! The number formats of GPUs, to and from FP64, with the rounding that the hardware uses.

/// BF16 is the upper half of an FP32; rounding is to nearest even.
pub fn bf16_to_f64(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

pub fn f64_to_bf16(value: f64) -> u16 {
    round_to(
        value,
        Format {
            exponent_bits: 8,
            mantissa_bits: 7,
            finite_only: false,
        },
    )
}

pub fn f16_to_f64(bits: u16) -> f64 {
    decode(
        bits,
        Format {
            exponent_bits: 5,
            mantissa_bits: 10,
            finite_only: false,
        },
    )
}

pub fn f64_to_f16(value: f64) -> u16 {
    round_to(
        value,
        Format {
            exponent_bits: 5,
            mantissa_bits: 10,
            finite_only: false,
        },
    )
}

/// OCP FP8 E4M3: no infinities, one NaN a sign, saturating.
pub fn e4m3_to_f64(bits: u8) -> f64 {
    decode(
        bits.into(),
        Format {
            exponent_bits: 4,
            mantissa_bits: 3,
            finite_only: true,
        },
    )
}

pub fn f64_to_e4m3(value: f64) -> u8 {
    let bits = round_to(
        value,
        Format {
            exponent_bits: 4,
            mantissa_bits: 3,
            finite_only: true,
        },
    );
    u8::try_from(bits).unwrap_or(0x7f)
}

/// OCP FP8 E5M2.
pub fn e5m2_to_f64(bits: u8) -> f64 {
    decode(
        bits.into(),
        Format {
            exponent_bits: 5,
            mantissa_bits: 2,
            finite_only: false,
        },
    )
}

/// A small binary floating-point format.
#[derive(Clone, Copy, Debug)]
struct Format {
    exponent_bits: u32,
    mantissa_bits: u32,
    /// The largest exponent holds numbers, too; only all ones are a NaN.
    finite_only: bool,
}

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent_bits - 1)) - 1
    }

    fn largest_exponent_field(self) -> i32 {
        (1 << self.exponent_bits) - 1
    }

    fn sign_shift(self) -> u32 {
        self.exponent_bits + self.mantissa_bits
    }

    fn nan(self) -> u16 {
        (1 << self.sign_shift()) - 1
    }

    /// What a finite value that is too large becomes.
    fn overflow(self) -> u16 {
        if self.finite_only {
            self.nan() - 1
        } else {
            u16::try_from(self.largest_exponent_field() << self.mantissa_bits).unwrap_or(u16::MAX)
        }
    }
}

fn decode(bits: u16, format: Format) -> f64 {
    let sign = if bits >> format.sign_shift() & 1 == 1 {
        -1.0
    } else {
        1.0
    };
    let magnitude = bits & format.nan();
    let field = i32::from(magnitude >> format.mantissa_bits);
    let mantissa = f64::from(magnitude & ((1 << format.mantissa_bits) - 1));
    let scale = f64::from(1 << format.mantissa_bits);
    if format.finite_only && magnitude == format.nan() {
        return f64::NAN;
    }
    if !format.finite_only && field == format.largest_exponent_field() {
        return if mantissa == 0.0 {
            sign * f64::INFINITY
        } else {
            f64::NAN
        };
    }
    if field == 0 {
        return sign * mantissa / scale * f64::powi(2.0, 1 - format.bias());
    }
    sign * (1.0 + mantissa / scale) * f64::powi(2.0, field - format.bias())
}

fn round_to(value: f64, format: Format) -> u16 {
    let sign = u16::from(value.is_sign_negative()) << format.sign_shift();
    if value.is_nan() {
        return sign | format.nan();
    }
    let magnitude = value.abs();
    if magnitude == 0.0 {
        return sign;
    }
    if magnitude.is_infinite() {
        return sign | format.overflow();
    }
    // A subnormal FP64 is far below every subnormal of these formats and rounds to zero with the
    // smallest exponent.
    let exponent = i32::try_from(magnitude.to_bits() >> 52).unwrap_or(0) - 1023;
    let exponent = exponent.max(1 - format.bias());
    let unit = f64::powi(2.0, exponent - format.mantissa_bits.cast_signed());
    let steps = (magnitude / unit).round_ties_even();
    #[expect(
        clippy::cast_possible_truncation,
        reason = "at most 2^(mantissa_bits + 1)"
    )]
    let steps = steps as i32;
    // Steps beyond a full mantissa carry into the exponent by themselves.
    let field_and_mantissa = ((exponent + format.bias() - 1) << format.mantissa_bits) + steps;
    let bits = u16::try_from(field_and_mantissa).unwrap_or(u16::MAX);
    sign | bits.min(format.overflow())
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "the formats' values are exact in FP64")]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_f16_and_e4m3_survives_the_way_to_f64_and_back() {
        for bits in 0..=u16::MAX {
            let value = bf16_to_f64(bits);
            assert!(
                value.is_nan() || f64_to_bf16(value) == bits,
                "bf16 {bits:#x}"
            );
            let value = f16_to_f64(bits);
            assert!(value.is_nan() || f64_to_f16(value) == bits, "f16 {bits:#x}");
        }
        for bits in 0..=u8::MAX {
            let value = e4m3_to_f64(bits);
            assert!(
                value.is_nan() || f64_to_e4m3(value) == bits,
                "e4m3 {bits:#x}"
            );
        }
    }

    #[test]
    fn known_values_decode() {
        assert_eq!(bf16_to_f64(0x3f80), 1.0);
        assert_eq!(f16_to_f64(0x3555), 0.333_251_953_125);
        assert_eq!(f16_to_f64(0x0001), f64::powi(2.0, -24));
        assert_eq!(e4m3_to_f64(0x7e), 448.0);
        assert!(e4m3_to_f64(0x7f).is_nan());
        assert_eq!(e5m2_to_f64(0x7b), 57_344.0);
    }

    #[test]
    fn ties_go_to_even_and_large_values_overflow() {
        assert_eq!(f64_to_bf16(1.0 + f64::powi(2.0, -8)), 0x3f80);
        assert_eq!(f64_to_bf16(1.0 + 3.0 * f64::powi(2.0, -8)), 0x3f82);
        assert_eq!(f64_to_f16(65_520.0), 0x7c00);
        assert_eq!(f64_to_f16(65_519.0), 0x7bff);
        assert_eq!(f64_to_e4m3(1000.0), 0x7e);
        assert_eq!(f64_to_e4m3(-1000.0), 0xfe);
    }
}
