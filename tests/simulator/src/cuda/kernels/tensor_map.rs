//! `CUtensorMap`: how the simulator encodes one, and what kernels read from it.

use crate::cuda::result::{INVALID_VALUE, Outcome};

/// Marks that the bytes were encoded here; the real encoding is NVIDIA's secret.
const MAGIC: u64 = 0x5449_4c45_445f_4d41;

const RANK_MAXIMUM: usize = 5;

/// What `cuTensorMapEncodeTiled` is given, in the 128 bytes of a `CUtensorMap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    pub magic: u64,
    pub address: u64,
    /// Bytes from one row to the next, of each dimension but the first.
    pub strides: [u64; RANK_MAXIMUM - 1],
    pub dimensions: [u64; RANK_MAXIMUM],
    pub tile: [u16; RANK_MAXIMUM],
    pub element_strides: [u8; RANK_MAXIMUM],
    /// `CUtensorMapDataType`, rank, `CUtensorMapInterleave`, `…Swizzle`, `…L2promotion`,
    /// `…FloatOOBfill`.
    pub data_type: u8,
    pub rank: u8,
    pub interleave: u8,
    pub swizzle: u8,
    pub l2_promotion: u8,
    pub fill: u8,
}

const _: () = assert!(size_of::<TensorMap>() <= 128);

/// Bytes of an element of `CUtensorMapDataType`.
const ELEMENT_BYTES: [u64; 13] = [1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4];

/// `CU_TENSOR_MAP_SWIZZLE_*`: the most bytes that the inner dimension of a box may have.
const SWIZZLE_BYTES: [u64; 4] = [u64::MAX, 32, 64, 128];

impl TensorMap {
    /// Checks what the driver checks.
    // Source: CUDA Driver API, "Tensor Map Object Management", the text of cuTensorMapEncodeTiled.
    pub(crate) fn encode(mut self) -> Outcome<Self> {
        self.magic = MAGIC;
        let rank = usize::from(self.rank);
        if !(1..=RANK_MAXIMUM).contains(&rank) || self.interleave != 0 {
            return Err(INVALID_VALUE);
        }
        let element_bytes = *ELEMENT_BYTES
            .get(usize::from(self.data_type))
            .ok_or(INVALID_VALUE)?;
        let swizzle_bytes = *SWIZZLE_BYTES
            .get(usize::from(self.swizzle))
            .ok_or(INVALID_VALUE)?;
        let box_bytes = u64::from(self.tile[0]) * element_bytes;
        let strides = &self.strides[..rank - 1];
        let right = self.address != 0
            && self.address.is_multiple_of(16)
            && self.dimensions[..rank]
                .iter()
                .all(|it| (1..=1 << 32).contains(it))
            && strides
                .iter()
                .all(|it| it.is_multiple_of(16) && *it < 1 << 40)
            && self.tile[..rank].iter().all(|it| (1..=256).contains(it))
            && self.element_strides[..rank]
                .iter()
                .all(|it| (1..=8).contains(it))
            && box_bytes.is_multiple_of(16)
            && box_bytes <= swizzle_bytes
            && self.l2_promotion <= 3
            && self.fill <= 1;
        if right { Ok(self) } else { Err(INVALID_VALUE) }
    }

    /// Whether this is the map of an operand of `rows` x `row_bytes` for tiles of `tile_rows` rows,
    /// as KERNELS.md requires.
    pub(crate) fn is_operand(&self, rows: u64, row_bytes: u64, tile_rows: u16) -> bool {
        let wanted = Self {
            magic: MAGIC,
            strides: [row_bytes, 0, 0, 0],
            dimensions: [row_bytes, rows, 0, 0, 0],
            tile: [128, tile_rows, 0, 0, 0],
            element_strides: [1, 1, 0, 0, 0],
            data_type: 0,
            rank: 2,
            interleave: 0,
            swizzle: 3,
            l2_promotion: 3,
            fill: 0,
            ..*self
        };
        *self == wanted
    }

    /// Without the mark of the encoding, and without any dimension.
    pub(crate) fn empty() -> Self {
        Self {
            magic: 0,
            address: 0,
            strides: [0; RANK_MAXIMUM - 1],
            dimensions: [0; RANK_MAXIMUM],
            tile: [0; RANK_MAXIMUM],
            element_strides: [0; RANK_MAXIMUM],
            data_type: 0,
            rank: 0,
            interleave: 0,
            swizzle: 0,
            l2_promotion: 0,
            fill: 0,
        }
    }
}
