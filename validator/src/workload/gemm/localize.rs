//! The cause of a strip's wrong checksum: which elements, which bits, and whether memory or
//! arithmetic did it.

use std::collections::{BTreeMap, BTreeSet};

use super::kernels::{Gemm, Operands, Support};
use super::report::{self, Record};
use super::shape::Layout;
use crate::cuda::{CudaFailure, DeviceMemory};
use validator_core::facts::ElementMismatch;

/// Examples that the facts keep.
pub(super) const EXAMPLES_MAXIMUM: usize = 8;

/// What is needed to look at results again.
pub(super) struct Localizer<'x, 'c, 'a> {
    pub(super) support: &'x Support<'c, 'a>,
    pub(super) gemm: &'x Gemm<'c, 'a>,
    pub(super) operands: &'x Operands,
    pub(super) arena: &'x DeviceMemory<'c, 'a>,
    pub(super) layout: &'x Layout,
}

/// The causes of the records of a report.
#[derive(Debug, Default)]
pub(super) struct Localized {
    pub(super) examples: Vec<ElementMismatch>,
    /// NaNs and infinities among the wrong elements.
    pub(super) nonfinite: u64,
    /// Product, row, column and flipped bits of every wrong element that was looked at.
    pub(super) elements: Vec<(u64, u32, u32, u64)>,
}

impl Localizer<'_, '_, '_> {
    /// Finds the causes of the records of products since `first_product`. Of `examples_wanted` the
    /// products are computed again.
    pub(super) fn look(
        &self,
        records: &[Record],
        first_product: u64,
        examples_wanted: usize,
    ) -> Result<Localized, CudaFailure> {
        let mut found = Localized::default();
        for (product, strips) in by_product(records, first_product) {
            let still_wrong = self.still_wrong(product)?;
            for strip in strips {
                let again = still_wrong.as_ref().map(|wrong| !wrong.contains(&strip));
                let wanted = examples_wanted.saturating_sub(found.examples.len());
                self.look_at_strip(product, strip, again, wanted, &mut found)?;
            }
        }
        Ok(found)
    }

    /// The strips of a result that are wrong when they are read again; `None` when they are too
    /// many to be listed.
    fn still_wrong(&self, product: u64) -> Result<Option<BTreeSet<(u32, u32)>>, CudaFailure> {
        let at = self.layout.strip_report;
        report::clear(self.arena, at)?;
        self.support
            .verify(self.arena.address(), self.layout, product, at)?;
        let seen = report::read(self.arena, at)?;
        let strips = seen.records.iter().map(|it| (it.row, it.column)).collect();
        Ok(seen.complete.then_some(strips))
    }

    fn look_at_strip(
        &self,
        product: u64,
        strip: (u32, u32),
        right_when_read_again: Option<bool>,
        wanted: usize,
        found: &mut Localized,
    ) -> Result<(), CudaFailure> {
        let elements = self.compare(product, strip)?;
        found.nonfinite += elements.counts.nonfinite;
        found.elements.extend(
            elements
                .records
                .iter()
                .map(|it| (product, it.row, it.column, it.expected ^ it.got)),
        );
        if wanted == 0 {
            return Ok(());
        }
        let digits = 2 + 8 * self.layout.shape.words_per_element() as usize;
        let mut examples: Vec<ElementMismatch> = elements
            .records
            .iter()
            .take(wanted)
            .map(|it| ElementMismatch {
                row: it.row,
                column: it.column,
                expected: format!("{:#0digits$x}", it.expected),
                observed: format!("{:#0digits$x}", it.got),
                flipped_bits: (it.expected ^ it.got).count_ones(),
                sm: it.sm,
                product,
                sweep: product / self.layout.results_count,
                right_when_read_again,
                right_when_computed_again: None,
            })
            .collect();
        if examples.is_empty() {
            // The strip was wrong when it was verified, and every element is right now.
            examples.push(ElementMismatch {
                row: strip.0,
                column: strip.1 / self.layout.shape.words_per_element(),
                expected: "the checksum of this strip".to_owned(),
                observed: "another checksum, and no wrong element when read again".to_owned(),
                product,
                sweep: product / self.layout.results_count,
                right_when_read_again: Some(true),
                ..ElementMismatch::default()
            });
        }
        let right = self.right_when_computed_again(product, strip)?;
        for example in &mut examples {
            example.right_when_computed_again = Some(right);
        }
        found.examples.extend(examples);
        Ok(())
    }

    fn compare(&self, product: u64, strip: (u32, u32)) -> Result<report::Report, CudaFailure> {
        let at = self.layout.strip_report;
        report::clear(self.arena, at)?;
        self.support
            .compare_strip(self.arena.address(), self.layout, product, strip, self.gemm)?;
        report::read(self.arena, at)
    }

    /// Computes the product again, into the same memory.
    fn right_when_computed_again(
        &self,
        product: u64,
        strip: (u32, u32),
    ) -> Result<bool, CudaFailure> {
        let place = (self.layout.result(product), Some(self.layout.map(product)));
        self.gemm.multiply(
            self.operands,
            self.arena.address(),
            self.layout,
            place,
            None,
        )?;
        let seen = self.compare(product, strip)?;
        Ok(seen.counts.checked > 0 && seen.counts.mismatches == 0)
    }
}

/// The strips by product. Products are numbered in 32 bits, and none is older than `first_product`.
fn by_product(records: &[Record], first_product: u64) -> BTreeMap<u64, BTreeSet<(u32, u32)>> {
    let mut products: BTreeMap<u64, BTreeSet<(u32, u32)>> = BTreeMap::new();
    for record in records {
        let distance = record
            .product
            .wrapping_sub(super::kernels::cut(first_product));
        products
            .entry(first_product + u64::from(distance))
            .or_default()
            .insert((record.row, record.column));
    }
    products
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_found_beyond_32_bits() {
        let record = |product, row| Record {
            row,
            column: 256,
            product,
            sm: None,
            expected: 0,
            got: 1,
        };
        let first = (1 << 32) - 2;
        let records = [record(u32::MAX, 16), record(1, 0), record(1, 0)];
        let products = by_product(&records, first);
        let expected = BTreeMap::from([
            ((1 << 32) - 1, BTreeSet::from([(16, 256)])),
            ((1 << 32) + 1, BTreeSet::from([(0, 256)])),
        ]);
        assert_eq!(products, expected);
    }
}
