//! Sizes of a product, and where everything lies in the memory that a burn takes.

use super::operand::OperandType;
use super::strip::{STRIP_ROWS, STRIP_WORDS};

/// Records of a report.
pub(super) const REPORT_CAPACITY: u32 = 1024;
const REPORT_BYTES: u64 = 32 + 32 * REPORT_CAPACITY as u64;
/// Kernels want buffers aligned to 256 bytes; pages of 4 KiB keep results apart.
const ALIGNMENT_BYTES: u64 = 4096;
/// Two batches in flight and the product before, of which none may be overwritten before it was
/// looked at.
pub(super) const RESULTS_MINIMUM: u64 = 4;

/// Side of the square result and bytes of a row of an operand, from the smallest on. From the last
/// but one on verification costs less than 2 % (NOTES.md).
pub(super) const LADDER: [(u32, u32); 7] = [
    (256, 256),
    (512, 1024),
    (1024, 4096),
    (2048, 8192),
    (4096, 16_384),
    (8192, 32_768),
    (8192, 65_536),
];
/// Up to here products of exact operands are exact in every type (KERNELS.md).
pub(super) const K_MAXIMUM: u32 = 32_768;

/// C = A · Bᵀ with A and B of `side` rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) operand: OperandType,
    pub(crate) side: u32,
    pub(crate) k_bytes: u32,
}

impl Shape {
    pub(crate) fn k(self) -> u32 {
        self.k_bytes / self.operand_bytes()
    }

    fn operand_bytes(self) -> u32 {
        u32::try_from(self.operand.bytes()).unwrap_or(8)
    }

    /// 32-bit words of one element of the result.
    pub(crate) fn words_per_element(self) -> u32 {
        if self.operand == OperandType::F64 {
            2
        } else {
            1
        }
    }

    /// 32-bit words of one row of the result.
    pub(crate) fn row_words(self) -> u32 {
        self.side * self.words_per_element()
    }

    pub(crate) fn result_bytes(self) -> u64 {
        u64::from(self.side) * u64::from(self.row_words()) * 4
    }

    pub(crate) fn strips(self) -> u64 {
        self.result_bytes() / 4 / (STRIP_ROWS * STRIP_WORDS) as u64
    }

    /// A word that no element of a result has: a NaN, or an integer below every sum that
    /// [`K_MAXIMUM`] allows.
    pub(crate) fn poison_word(self) -> u32 {
        match self.operand {
            OperandType::S8 => 0x8000_0000,
            _ => u32::MAX,
        }
    }

    /// Strips of an operand's memory, taken as rows of [`STRIP_WORDS`] words. Sides are multiples
    /// of 256 and rows of 128 bytes, so that nothing is left over.
    pub(crate) fn operand_strips(self) -> u64 {
        u64::from(self.side) * u64::from(self.k_bytes) / (4 * STRIP_ROWS * STRIP_WORDS) as u64
    }

    /// Additions and multiplications of one product.
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    pub(crate) fn operations(self) -> f64 {
        let side = u64::from(self.side);
        (2 * side * side * u64::from(self.k())) as f64
    }

    /// Elements of one operand.
    pub(crate) fn operand_elements(self) -> u64 {
        u64::from(self.side) * u64::from(self.k())
    }
}

/// Offsets into the one allocation of a burn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: Shape,
    pub(crate) a: u64,
    pub(crate) b: u64,
    pub(crate) reference: u64,
    pub(crate) checksums: u64,
    pub(crate) nonfinite: u64,
    /// The report of the products, and another for looking at single strips.
    pub(crate) report: u64,
    pub(crate) strip_report: u64,
    /// Room for vectors of doubles: the random signs, the product of B with them, three of the
    /// result's rows.
    pub(crate) signs: u64,
    pub(crate) product_of_b: u64,
    pub(crate) rows: [u64; 3],
    /// Results, each followed by its map of multiprocessors.
    results: u64,
    result_stride: u64,
    pub(crate) results_count: u64,
}

/// Of so many consecutive rows of strips one has a poisoned word.
const POISON_ROWS: u64 = 8;

impl Layout {
    /// Fills `bytes` with as many results as fit; `None` when too few do.
    pub(crate) fn new(shape: Shape, bytes: u64) -> Option<Self> {
        let mut end = 0;
        let mut take = |bytes: u64| {
            let start = end;
            end += bytes.next_multiple_of(ALIGNMENT_BYTES);
            start
        };
        let side = u64::from(shape.side);
        let operand = side * u64::from(shape.k_bytes);
        let doubles = |count: u64| count * 8;
        let mut layout = Self {
            shape,
            a: take(operand),
            b: take(operand),
            reference: take(shape.result_bytes()),
            checksums: take(shape.strips() * 8),
            nonfinite: take(8),
            report: take(REPORT_BYTES),
            strip_report: take(REPORT_BYTES),
            signs: take(doubles(side)),
            product_of_b: take(doubles(u64::from(shape.k()))),
            rows: [0; 3].map(|_| take(doubles(side))),
            results: 0,
            result_stride: 0,
            results_count: 0,
        };
        layout.results = take(0);
        layout.result_stride =
            (shape.result_bytes() + Self::map_bytes(shape)).next_multiple_of(ALIGNMENT_BYTES);
        layout.results_count = bytes.checked_sub(layout.results)? / layout.result_stride;
        (layout.results_count >= RESULTS_MINIMUM).then_some(layout)
    }

    /// A map has a word for each tile; no tile is smaller than 64 x 64.
    fn map_bytes(shape: Shape) -> u64 {
        let tiles = u64::from(shape.side / 64);
        tiles * tiles * 4
    }

    /// Offset of the result of this product.
    pub(crate) fn result(&self, product: u64) -> u64 {
        self.results + (product % self.results_count) * self.result_stride
    }

    /// Offset of the first word that is poisoned before this product is computed.
    ///
    /// One word of 2048: a product that is never computed fails in every eighth row of the result
    /// at least, and a store that is lost fails once its word is the poisoned one. Row and column
    /// move with the product and with the round over the memory, so that every word has its turn. A
    /// word in every row cost 4 % of the products in FP8 and 7 % in INT8 on an H100
    /// (BENCHMARKS.md).
    pub(crate) fn poison(&self, product: u64) -> u64 {
        /// Odd, so that every column has its turn.
        const STEP: u64 = 97;
        let columns = STRIP_WORDS as u64;
        let turn = product % self.results_count + product / self.results_count;
        let row = (turn + turn / columns) % POISON_ROWS;
        self.result(product) + row * columns * 4 + turn * STEP % columns * 4
    }

    /// Words that are poisoned in a result, [`Self::POISON_PITCH_BYTES`] apart.
    pub(crate) fn poisoned_words(&self) -> u64 {
        self.shape.result_bytes() / Self::POISON_PITCH_BYTES
    }

    /// Eight rows of a strip, as they follow one another in memory.
    pub(crate) const POISON_PITCH_BYTES: u64 = POISON_ROWS * STRIP_WORDS as u64 * 4;

    /// Offset of the map of the multiprocessors that computed it.
    pub(crate) fn map(&self, product: u64) -> u64 {
        self.result(product) + self.shape.result_bytes()
    }

    /// Memory that `products` products have written: operands, reference, and results, each once.
    pub(crate) fn bytes_in_use(&self, products: u64) -> u64 {
        self.results + products.min(self.results_count) * self.result_stride
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn shape(operand: OperandType, rung: usize) -> Shape {
        let (side, k_bytes) = LADDER[rung];
        Shape {
            operand,
            side,
            k_bytes,
        }
    }

    #[test]
    fn the_largest_product_is_that_of_the_notes() {
        let bf16 = shape(OperandType::Bf16, 5);
        assert_eq!((bf16.side, bf16.k()), (8192, 16_384));
        assert_eq!(bf16.result_bytes(), 256 << 20);
        assert_eq!(bf16.strips(), 16_384);
        assert_eq!(shape(OperandType::F64, 5).k(), 4096);
        assert_eq!(shape(OperandType::F64, 5).result_bytes(), 512 << 20);
    }

    #[test]
    fn results_fill_the_memory_and_do_not_overlap() {
        let bytes = 100 * GIB;
        let layout = Layout::new(shape(OperandType::Bf16, 5), bytes).expect("fits");
        assert!(layout.bytes_in_use(u64::MAX) <= bytes);
        assert!(layout.bytes_in_use(u64::MAX) > bytes - (257 << 20));
        assert!(layout.map(0) + 4 * 128 * 128 <= layout.result(1));
        assert_eq!(layout.result(layout.results_count), layout.result(0));
        assert!(layout.rows[2] + 8 * 8192 <= layout.result(0));
    }

    #[test]
    fn every_word_of_a_result_is_poisoned_in_its_turn() {
        let layout = Layout::new(shape(OperandType::Bf16, 0), 4 << 20).expect("fits");
        let pitch = Layout::POISON_PITCH_BYTES;
        let in_row = |product: u64| {
            let first = layout.poison(product) - layout.result(product);
            assert!(first < pitch && first.is_multiple_of(4));
            assert_eq!(layout.poisoned_words() * pitch, layout.shape.result_bytes());
            first
        };
        let rounds = POISON_ROWS * STRIP_WORDS as u64;
        let rounds = (0..rounds).map(|round| in_row(3 + round * layout.results_count));
        let words: std::collections::BTreeSet<u64> = rounds.collect();
        assert_eq!(words.len() as u64, pitch / 4);
    }

    #[test]
    fn no_result_has_the_poisoned_word() {
        assert!(f32::from_bits(shape(OperandType::Bf16, 0).poison_word()).is_nan());
        // KERNELS.md: sums of INT8 products do not wrap below k = 131,072.
        let least = -128_i64 * 128 * i64::from(K_MAXIMUM);
        let poison = shape(OperandType::S8, 0).poison_word().cast_signed();
        assert!(i64::from(poison) < least);
    }

    #[test]
    fn too_little_memory_is_told() {
        assert_eq!(Layout::new(shape(OperandType::Bf16, 5), GIB), None);
        assert!(Layout::new(shape(OperandType::Bf16, 0), 4 << 20).is_some());
        assert_eq!(Layout::new(shape(OperandType::Bf16, 0), 1 << 20), None);
    }

    #[test]
    fn every_rung_keeps_to_the_kernels_sizes() {
        for (side, k_bytes) in LADDER {
            assert!(side % 256 == 0 && k_bytes % 128 == 0);
        }
    }
}
