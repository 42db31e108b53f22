//! The product itself, and the memory of products that were computed before.

use super::matrix::Layout;
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError};

/// An operand: its layout, its bytes, and whether it is transposed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand<'memory> {
    pub(super) layout: Layout,
    pub(super) memory: &'memory [u8],
    pub(super) transposed: bool,
}

impl Operand<'_> {
    pub(super) fn rows(&self) -> u64 {
        if self.transposed {
            self.layout.columns
        } else {
            self.layout.rows
        }
    }

    pub(super) fn columns(&self) -> u64 {
        if self.transposed {
            self.layout.rows
        } else {
            self.layout.columns
        }
    }

    fn get(&self, row: usize, column: usize) -> f64 {
        if self.transposed {
            self.layout.get(self.memory, column, row)
        } else {
            self.layout.get(self.memory, row, column)
        }
    }

    /// Two operands with the same key have the same values, but for a collision of a 64-bit hash.
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let layout = &self.layout;
        (
            layout.element,
            layout.rows,
            layout.columns,
            layout.leading_dimension,
        )
            .hash(&mut hasher);
        (layout.row_major, self.transposed).hash(&mut hasher);
        self.memory.hash(&mut hasher);
        hasher.finish()
    }
}

/// How many products are remembered; a burn uses one or two pairs of operands a precision.
const REMEMBERED: usize = 4;

type Remembered = VecDeque<((u64, u64), Arc<Vec<f64>>)>;

static PRODUCTS: Mutex<Remembered> = Mutex::new(VecDeque::new());

/// The product of two matrices, row by row.
pub(super) fn product(a: &Operand<'_>, b: &Operand<'_>) -> Arc<Vec<f64>> {
    let key = (a.key(), b.key());
    let mut products = PRODUCTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, product)) = products.iter().find(|(known, _)| *known == key) {
        return Arc::clone(product);
    }
    let product = Arc::new(multiply(a, b));
    products.push_front((key, Arc::clone(&product)));
    products.truncate(REMEMBERED);
    product
}

/// Row by row, so that the inner loop runs over memory in order and is vectorized.
fn multiply(a: &Operand<'_>, b: &Operand<'_>) -> Vec<f64> {
    let size = |length: u64| usize::try_from(length).unwrap_or(0);
    let (rows, inner, columns) = (size(a.rows()), size(a.columns()), size(b.columns()));
    let right: Vec<f64> = (0..inner)
        .flat_map(|row| (0..columns).map(move |column| b.get(row, column)))
        .collect();
    let mut result = vec![0.0; rows * columns];
    for (row, line) in result.chunks_exact_mut(columns.max(1)).enumerate() {
        for (place, factors) in right.chunks_exact(columns.max(1)).enumerate() {
            let left = a.get(row, place);
            for (sum, factor) in line.iter_mut().zip(factors) {
                *sum += left * factor;
            }
        }
    }
    result
}
