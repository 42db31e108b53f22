//! What is wrong with copies and products of a GPU, for every workload that multiplies.

use crate::facts::{CopyProof, PrecisionRun};

/// Copies that arrived with other bits, in words.
pub fn wrong_copies(copies: &CopyProof) -> Option<String> {
    let (direction, count) = match (copies.from_gpu_wrong_bytes, copies.to_gpu_wrong_blocks) {
        (0, 0) => return None,
        (0, blocks) => (
            "from the host to the GPU",
            format!("{blocks} blocks of 16 KiB"),
        ),
        (bytes, _) => ("from the GPU to the host", format!("{bytes} bytes")),
    };
    Some(format!(
        "copies {direction} are wrong: {count} of {} MiB differ",
        copies.bytes >> 20
    ))
}

/// Results that differ from the reference or are not finite, in words.
pub fn wrong_results(products: &PrecisionRun) -> Option<String> {
    (products.mismatches + products.nonfinite > 0).then(|| {
        format!(
            "{}: {} blocks of results are wrong and {} results are not finite, in {} products",
            products.precision, products.mismatches, products.nonfinite, products.products
        )
    })
}

/// Operands that are not those of the seed, in words.
pub fn wrong_operands(products: &PrecisionRun) -> Option<String> {
    let (proof, precision) = (&products.reference, products.precision);
    (proof.operand_mismatches > 0).then(|| {
        format!(
            "{precision}: operands in the GPU's memory differ from the host's in {} blocks of 16 KiB",
            proof.operand_mismatches
        )
    })
}

/// A reference that is not the product of its operands, in words.
pub fn wrong_reference(products: &PrecisionRun) -> Option<String> {
    let (proof, precision) = (&products.reference, products.precision);
    // Written so that NaN is not right.
    let random_is_right = proof.freivalds_worst <= 1.0 && proof.sampled_worst <= 1.0;
    (proof.exact_mismatches > 0 || !random_is_right).then(|| {
        format!(
            "{precision}: the reference product is wrong: {} errors with exact operands; with random ones Freivalds' residual is {:.3} and the host's rows differ by {:.3} times the rounding",
            proof.exact_mismatches, proof.freivalds_worst, proof.sampled_worst
        )
    })
}

/// Errors among these products; more than zero where any of the above finds one.
pub fn errors(products: &PrecisionRun) -> u64 {
    let proof = &products.reference;
    let counted = products.mismatches + products.nonfinite + proof.operand_mismatches;
    // Of a residual there is no number.
    let of_reference = wrong_reference(products).map_or(0, |_| proof.exact_mismatches.max(1));
    counted + of_reference
}
