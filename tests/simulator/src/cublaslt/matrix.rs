//! Matrices in device memory: element types, layouts, reading and writing.

use crate::number::{
    bf16_to_f64, e4m3_to_f64, e5m2_to_f64, f16_to_f64, f64_to_bf16, f64_to_e4m3, f64_to_f16,
};

/// `cudaDataType_t`, as far as products know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F64,
    F32,
    F16,
    Bf16,
    E4m3,
    E5m2,
    S8,
    S32,
}

impl Element {
    /// Source: library_types.h.
    pub(super) fn from_code(code: u32) -> Option<Self> {
        Some(match code {
            0 => Self::F32,
            1 => Self::F64,
            2 => Self::F16,
            3 => Self::S8,
            10 => Self::S32,
            14 => Self::Bf16,
            28 => Self::E4m3,
            29 => Self::E5m2,
            _ => return None,
        })
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 | Self::S32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 | Self::S8 => 1,
        }
    }

    /// The value of the element whose bytes these are.
    fn read(self, bytes: &[u8]) -> f64 {
        let word = |count: usize| {
            let mut all = [0; 8];
            all[..count].copy_from_slice(&bytes[..count]);
            u64::from_le_bytes(all)
        };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "as many bits as the type has"
        )]
        match self {
            Self::F64 => f64::from_bits(word(8)),
            Self::F32 => f64::from(f32::from_bits(word(4) as u32)),
            Self::S32 => f64::from((word(4) as u32).cast_signed()),
            Self::F16 => f16_to_f64(word(2) as u16),
            Self::Bf16 => bf16_to_f64(word(2) as u16),
            Self::E4m3 => e4m3_to_f64(bytes[0]),
            Self::E5m2 => e5m2_to_f64(bytes[0]),
            Self::S8 => f64::from(bytes[0].cast_signed()),
        }
    }

    /// Rounds the value to this type.
    fn write(self, value: f64, bytes: &mut [u8]) {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "rounding to the type is the purpose; `as` saturates"
        )]
        match self {
            Self::F64 => bytes.copy_from_slice(&value.to_le_bytes()),
            Self::F32 => bytes.copy_from_slice(&(value as f32).to_le_bytes()),
            Self::S32 => bytes.copy_from_slice(&(value as i32).to_le_bytes()),
            Self::F16 => bytes.copy_from_slice(&f64_to_f16(value).to_le_bytes()),
            Self::Bf16 => bytes.copy_from_slice(&f64_to_bf16(value).to_le_bytes()),
            Self::E4m3 => bytes[0] = f64_to_e4m3(value),
            // Products do not write this type.
            Self::E5m2 => bytes[0] = 0x7f,
            Self::S8 => bytes[0] = (value.round_ties_even() as i8).cast_unsigned(),
        }
    }
}

/// `cublasLtMatrixLayout_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) element: Element,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) leading_dimension: i64,
    /// `CUBLASLT_ORDER_ROW` instead of `_COL`.
    pub(super) row_major: bool,
    pub(super) batches: i32,
}

impl Layout {
    /// Bytes from the first element to the end of the last one.
    pub(super) fn bytes(&self) -> Option<u64> {
        let (lines, length) = if self.row_major {
            (self.rows, self.columns)
        } else {
            (self.columns, self.rows)
        };
        let pitch = u64::try_from(self.leading_dimension)
            .ok()
            .filter(|pitch| *pitch >= length)?;
        let elements = lines
            .checked_sub(1)?
            .checked_mul(pitch)?
            .checked_add(length)?;
        elements.checked_mul(self.element.bytes() as u64)
    }

    fn place(&self, row: usize, column: usize) -> usize {
        let pitch = usize::try_from(self.leading_dimension).unwrap_or(0);
        let element = if self.row_major {
            row * pitch + column
        } else {
            column * pitch + row
        };
        element * self.element.bytes()
    }

    pub(super) fn get(&self, memory: &[u8], row: usize, column: usize) -> f64 {
        self.element.read(&memory[self.place(row, column)..])
    }

    pub(super) fn set(&self, memory: &mut [u8], row: usize, column: usize, value: f64) {
        let place = self.place(row, column);
        self.element
            .write(value, &mut memory[place..place + self.element.bytes()]);
    }
}
