//! The product itself.

use super::matrix::Layout;
use crate::product::{Products, Sizes, fingerprint, multiply_by_transposed};
use std::sync::Arc;

/// An operand: its layout, its bytes, and whether it is transposed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand<'memory> {
    pub(super) layout: Layout,
    pub(super) memory: &'memory [u8],
    pub(super) transposed: bool,
}

/// Two operands with the same key have the same values, but for a collision of a 64-bit hash.
type Key = (Layout, bool, u64);

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

    fn key(&self) -> Key {
        (self.layout, self.transposed, fingerprint(self.memory))
    }
}

static PRODUCTS: Products<(Key, Key), Arc<Vec<f64>>> = Products::new();

/// The product of two matrices, row by row.
pub(super) fn product(a: &Operand<'_>, b: &Operand<'_>) -> Arc<Vec<f64>> {
    PRODUCTS.get((a.key(), b.key()), || Arc::new(multiply(a, b)))
}

fn multiply(a: &Operand<'_>, b: &Operand<'_>) -> Vec<f64> {
    let size = |length: u64| usize::try_from(length).unwrap_or(0);
    let sizes = Sizes {
        rows: size(a.rows()),
        columns: size(b.columns()),
        depth: size(a.columns()),
    };
    let row_by_row = |rows: usize, get: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
        (0..rows)
            .flat_map(|row| (0..sizes.depth).map(move |place| get(row, place)))
            .collect()
    };
    let left = row_by_row(sizes.rows, &|row, place| a.get(row, place));
    let right = row_by_row(sizes.columns, &|column, place| b.get(place, column));
    let mut result = vec![0.0; sizes.rows * sizes.columns];
    multiply_by_transposed::<f64, f64, 8>(&left, &right, sizes, sizes.depth, &mut result);
    result
}
