//! GEMM results are correct.
//!
//! ## Why
//! A GPU that computes wrong numbers without a word spoils training runs and results for weeks
//! before a fault of the hardware is suspected.
//!
//! ## How it is judged
//! The reference product is proved apart from the kernel that made it: with exact operands against
//! the host's own rows and by Freivalds' check in FP64 without tolerance; with random operands by
//! Freivalds' check and by the host's rows, within the rounding of the format. The operands are
//! compared with the host's own by checksums over all of their memory, and 1 MiB is copied in each
//! direction. Then every element of every product is compared with the reference, bit for bit.
//! - `fail`: a wrong element, a NaN or an infinity; a reference that is not right; other bits than
//!   most GPUs of the same model gave with the same seed.
//! - `error`: nothing was verified, or not every product; GPUs of one model differ and none has a
//!   majority; bits were flipped on purpose; cuBLASLt multiplies exact operands wrongly where the
//!   embedded kernels are right, on all GPUs of the model alike: that is suspected of being a bug
//!   of the library.
//!
//! Skipped where no burn was requested, and where the run was stopped before enough was verified,
//! which `run_complete` reports.
//!
//! Before each product, one of 2048 words of its result is set to a value that no result has: a
//! launch that succeeds and computes nothing, or stores that are lost, leave it there.
//!
//! Each wrong block is read again, and its product is computed again into the same memory. A block
//! that is right when read again stands right in memory: reading it erred, and the arithmetic was
//! right. One that is wrong again was computed or stored wrong: if it is right when computed again,
//! that happened once (arithmetic, or a bit that flipped in memory, which the ECC counters show);
//! if it is wrong again, it is stuck: a multiprocessor if the wrong elements name the same one, a
//! memory cell if they have the same bit of the same address.
//!
//! ## What to do
//! Take the node out of service, and keep the report: row, column, bits and multiprocessor are
//! evidence.
//!
//! ## Source
//! Freivalds, Probabilistic machines can use less running time (IFIP 1977); why silent errors
//! matter: Hochschild et al., Cores that don't count,
//! <https://sigops.org/s/conferences/hotos/2021/papers/hotos21-s01-hochschild.pdf>.

use std::collections::BTreeMap;

use crate::burned;
use crate::check::{Check, Judge};
use crate::facts::{BurnEngine, BurnRun, ElementMismatch, Facts, GpuFacts, PrecisionRun};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "gemm_numerics",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://sigops.org/s/conferences/hotos/2021/papers/hotos21-s01-hochschild.pdf",
};

const REMEDY: &str = "take the node out of service and have the GPU inspected; keep this report";

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let run = burned::run_of(gpu, facts, profile)?;
    if run.precisions.is_empty() {
        return Ok(burned::missing("no product was verified", facts, profile));
    }
    copies_are_right(run)?;
    worst_of(
        run.precisions
            .iter()
            .map(|products| judge_products(products, run, gpu, facts, profile)),
    )
}

/// Wrong copies make every comparison wrong that follows: they are the cause, not the products.
fn copies_are_right(run: &BurnRun) -> Result<(), Outcome> {
    let Some(copies) = run.copies else {
        return Ok(());
    };
    let (direction, count) = match (copies.from_gpu_wrong_bytes, copies.to_gpu_wrong_blocks) {
        (0, 0) => return Ok(()),
        (0, blocks) => (
            "from the host to the GPU",
            format!("{blocks} blocks of 16 KiB"),
        ),
        (bytes, _) => ("from the GPU to the host", format!("{bytes} bytes")),
    };
    Err(Outcome::fail(format!(
        "copies {direction} are wrong: {count} of {} MiB differ",
        copies.bytes >> 20
    ))
    .expected("the same bits on both sides")
    .remedy("take the node out of service; check the PCIe link, IOMMU and ACS settings, then have the GPU inspected"))
}

fn judge_products(
    products: &PrecisionRun,
    run: &BurnRun,
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
) -> Judgement {
    let precision = products.precision;
    let wrong = products.mismatches + products.nonfinite;
    // A flipped bit may make a NaN, which is one wrong block and one result that is not finite.
    if run.injected > 0 && products.mismatches.max(products.nonfinite) <= run.injected {
        return Ok(Outcome::error(format!(
            "{precision}: {} bits were flipped on purpose and {} wrong blocks were found, so this run does not vouch for the GPU",
            run.injected, products.mismatches
        )));
    }
    if wrong > 0 {
        return Ok(wrong_products(products, run));
    }
    engines_agree(products, run, gpu, facts, profile)?;
    judge_reference(products, facts, profile)?;
    if products.products_verified == 0 {
        let text = format!("{precision}: no product was verified");
        return Ok(burned::missing(text, facts, profile));
    }
    if products.products_verified < products.products {
        let text = format!(
            "{precision}: only {} of {} products were verified",
            products.products_verified, products.products
        );
        return Ok(burned::missing(text, facts, profile));
    }
    agree_with_others(products, run, gpu, facts, profile)?;
    Ok(Outcome::pass(format!(
        "{precision}: every element of {} products of {} x {} x {} is right",
        products.products_verified, products.m, products.n, products.k
    )))
}

fn wrong_products(products: &PrecisionRun, run: &BurnRun) -> Outcome {
    let injected = if run.injected > 0 {
        format!(" ({} bits were flipped on purpose)", run.injected)
    } else {
        String::new()
    };
    let first = products
        .examples
        .first()
        .map_or(String::new(), |it| format!(", first {}", example(it)));
    Outcome::fail(format!(
        "{}: {} blocks of results are wrong and {} results are not finite, in {} products{injected}{first}",
        products.precision, products.mismatches, products.nonfinite, products.products
    ))
    .expected("every element equal to the reference")
    .observed(
        products
            .examples
            .iter()
            .map(example)
            .collect::<Vec<_>>()
            .join("\n"),
    )
    .remedy(REMEDY)
}

fn example(it: &ElementMismatch) -> String {
    let sm = it
        .sm
        .map_or(String::new(), |sm| format!(", multiprocessor {sm}"));
    let again = match (it.right_when_read_again, it.right_when_computed_again) {
        (Some(true), _) => ", a memory read error: right when read again",
        (Some(false), Some(true)) => {
            ", a transient error in computing or storing: wrong when read again, right when computed again"
        }
        (Some(false), Some(false)) => {
            ", a stuck error in computing or storing: wrong when read again and when computed again"
        }
        (None, Some(true)) => ", a transient error: right when computed again, not read again",
        (None, Some(false)) => ", a stuck error: wrong when computed again, not read again",
        (Some(false), None) => ", an error in computing or storing: wrong when read again",
        (None, None) => "",
    };
    format!(
        "row {} column {}: {} instead of {} ({} bits){sm}{again}",
        it.row, it.column, it.observed, it.expected, it.flipped_bits
    )
}

/// Who multiplied in this precision.
fn engine_of<'r>(products: &'r PrecisionRun, run: &'r BurnRun) -> &'r BurnEngine {
    products.engine.as_ref().unwrap_or(&run.engine)
}

/// The two engines' products of exact operands have the same bits, where there are two. Where
/// cuBLASLt alone is wrong, and wrong alike on every GPU of this model, the library is more likely
/// to be wrong than the GPUs.
fn engines_agree(
    products: &PrecisionRun,
    run: &BurnRun,
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
) -> Result<(), Outcome> {
    let proof = &products.reference;
    let Some(different) = proof.second_engine_mismatches.filter(|it| *it > 0) else {
        return Ok(());
    };
    let precision = products.precision;
    let own_is_right = proof.exact_mismatches == 0;
    let other_is_right = proof.second_engine_is_right == Some(true);
    let (library_is_right, kernels_are_right) = match engine_of(products, run) {
        BurnEngine::Cublaslt { .. } => (own_is_right, other_is_right),
        BurnEngine::Ptx { .. } => (other_is_right, own_is_right),
    };
    let text = format!(
        "{precision}: cuBLASLt and the embedded kernels give other bits in {different} elements of a product of exact operands"
    );
    let alike = |other: &GpuFacts| {
        // A GPU that was not burned in this precision says nothing.
        let its_run = burned::run_of(other, facts, profile).ok();
        let its = its_run.and_then(|it| it.precisions.iter().find(|it| it.precision == precision));
        its.is_none_or(|it| {
            it.reference.second_engine_mismatches == proof.second_engine_mismatches
                && it.reference.exact_checksum == proof.exact_checksum
        })
    };
    let mut of_the_model = facts.gpus.iter().filter(|it| it.name == gpu.name);
    if !library_is_right && kernels_are_right && of_the_model.all(alike) {
        return Err(Outcome::error(format!(
            "{text}; the kernels are right, and all GPUs of this model are alike: a bug of cuBLASLt is suspected"
        ))
        .remedy("burn with --engine ptx, and with another version of cuBLASLt"));
    }
    Err(Outcome::fail(text)
        .expected("the same bits from both")
        .remedy(REMEDY))
}

/// `Err` where the reference is wrong or was not proved.
fn judge_reference(
    products: &PrecisionRun,
    facts: &Facts,
    profile: &Profile,
) -> Result<(), Outcome> {
    let (proof, precision) = (&products.reference, products.precision);
    if proof.operand_mismatches > 0 {
        return Err(Outcome::fail(format!(
            "{precision}: operands in the GPU's memory differ from the host's in {} blocks of 16 KiB",
            proof.operand_mismatches
        ))
        .expected("the operands that the seed gives")
        .remedy(REMEDY));
    }
    // Written so that NaN is not right.
    let random_is_right = proof.freivalds_worst <= 1.0 && proof.sampled_worst <= 1.0;
    if proof.exact_mismatches > 0 || !random_is_right {
        return Err(Outcome::fail(format!(
            "{precision}: the reference product is wrong: {} errors with exact operands; with random ones Freivalds' residual is {:.3} and the host's rows differ by {:.3} times the rounding",
            proof.exact_mismatches, proof.freivalds_worst, proof.sampled_worst
        ))
        .expected("a product within the rounding of its format")
        .remedy(REMEDY));
    }
    if proof.operand_blocks == Some(0)
        || proof.exact_rows == 0
        || proof.freivalds_vectors == 0
        || proof.sampled_elements == 0
    {
        let text = format!("{precision}: the reference product was not proved to the end");
        return Err(burned::missing(text, facts, profile));
    }
    Ok(())
}

/// GPUs of one model must give the same bits for the same products.
fn agree_with_others(
    products: &PrecisionRun,
    run: &BurnRun,
    gpu: &GpuFacts,
    facts: &Facts,
    profile: &Profile,
) -> Result<(), Outcome> {
    let mut by_checksum: BTreeMap<&str, usize> = BTreeMap::new();
    for other in facts.gpus.iter().filter(|it| it.name == gpu.name) {
        let Ok(its_run) = burned::run_of(other, facts, profile) else {
            continue;
        };
        let same = its_run.precisions.iter().find(|it| {
            let comparable =
                its_run.seed == run.seed && engine_of(it, its_run) == engine_of(products, run);
            let what = (it.precision, it.m, it.n, it.k);
            comparable && what == (products.precision, products.m, products.n, products.k)
        });
        if let Some(it) = same.filter(|it| !it.reference.checksum.is_empty()) {
            *by_checksum.entry(&it.reference.checksum).or_default() += 1;
        }
    }
    let all: usize = by_checksum.values().sum();
    let own = by_checksum
        .get(products.reference.checksum.as_str())
        .copied()
        .unwrap_or_default();
    if own == all {
        return Ok(());
    }
    let precision = products.precision;
    let most = by_checksum.values().copied().max().unwrap_or_default();
    if 2 * own > all {
        return Ok(());
    }
    if 2 * most > all {
        return Err(Outcome::fail(format!(
            "{precision}: the product has other bits than on {most} of {all} GPUs of this model with the same operands"
        ))
        .observed(&products.reference.checksum)
        .remedy(REMEDY));
    }
    Err(Outcome::error(format!(
        "{precision}: the product has not the same bits on {all} GPUs of this model, and no bits have a majority"
    )))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{
        BurnEngine, BurnRun, CopyProof, ElementMismatch, PrecisionRun, Reading, ReferenceProof,
    };
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{burned_node, burned_node_with, healthy_node, judge_check};

    fn judge_run(change: impl FnOnce(&mut BurnRun)) -> Finding {
        judge_check(&CHECK, &burned_node_with(change), "{}").swap_remove(2)
    }

    fn judge(change: impl FnOnce(&mut PrecisionRun)) -> Finding {
        judge_run(|run| change(&mut run.precisions[0]))
    }

    #[test]
    fn wrong_copies_are_named_with_their_direction() {
        for (to_gpu, from_gpu, words) in [
            (1, 0, "from the host to the GPU"),
            (64, 3, "from the GPU to the host"),
        ] {
            let finding = judge_run(|run| {
                run.copies = Some(CopyProof {
                    bytes: 1 << 20,
                    to_gpu_wrong_blocks: to_gpu,
                    from_gpu_wrong_bytes: from_gpu,
                });
            });
            assert_eq!(finding.verdict, Verdict::Fail);
            assert!(finding.summary.contains(words), "{}", finding.summary);
        }
    }

    #[test]
    fn wrong_operands_fail_and_unverified_ones_are_no_pass() {
        for (blocks, mismatches, verdict) in [
            (Some(100), 1, Verdict::Fail),
            (Some(0), 0, Verdict::Error),
            (Some(100), 0, Verdict::Pass),
            (None, 0, Verdict::Pass),
        ] {
            let finding = judge(|products| {
                products.reference.operand_blocks = blocks;
                products.reference.operand_mismatches = mismatches;
            });
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn passes_on_every_gpu_and_skips_without_a_burn() {
        let findings = judge_check(&CHECK, &burned_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
        let findings = judge_check(&CHECK, &healthy_node(), "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Skip));
    }

    #[test]
    fn one_wrong_element_fails_and_is_named() {
        let finding = judge(|products| {
            products.mismatches = 1;
            products.examples = vec![ElementMismatch {
                row: 7,
                column: 9,
                expected: "0x3f800000".to_owned(),
                observed: "0x3f800001".to_owned(),
                flipped_bits: 1,
                sm: Some(77),
                right_when_read_again: Some(false),
                right_when_computed_again: Some(true),
                ..ElementMismatch::default()
            }];
        });
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.ends_with(
            "first row 7 column 9: 0x3f800001 instead of 0x3f800000 (1 bits), multiprocessor 77, a transient error in computing or storing: wrong when read again, right when computed again"
        ), "{}", finding.summary);
    }

    #[test]
    fn nan_and_a_wrong_reference_fail() {
        let fails = |change: fn(&mut PrecisionRun)| {
            assert_eq!(judge(change).verdict, Verdict::Fail);
        };
        fails(|it| it.nonfinite = 1);
        fails(|it| it.reference.exact_mismatches = 1);
        fails(|it| it.reference.freivalds_worst = 1.1);
        fails(|it| it.reference.freivalds_worst = f64::NAN);
        fails(|it| it.reference.sampled_worst = f64::INFINITY);
    }

    /// All GPUs burned by cuBLASLt; `change` is made on those with these numbers.
    fn judge_library(numbers: &[usize], change: fn(&mut ReferenceProof)) -> Vec<Finding> {
        let mut facts = burned_node();
        for (index, run) in facts.load.burn.values_mut().enumerate() {
            let Reading::Value(run) = run else { continue };
            run.engine = BurnEngine::Cublaslt {
                library: "/usr/local/cuda/lib64/libcublasLt.so.13".to_owned(),
                version: "13.1.0".to_owned(),
            };
            let proof = &mut run.precisions[0].reference;
            proof.second_engine_mismatches = Some(0);
            proof.second_engine_is_right = Some(true);
            if numbers.contains(&index) {
                change(proof);
            }
        }
        judge_check(&CHECK, &facts, "{}")
    }

    #[test]
    fn a_library_that_is_wrong_everywhere_is_suspected_and_a_gpu_alone_is_blamed() {
        let wrong_library: fn(&mut ReferenceProof) = |proof| {
            proof.exact_mismatches = 1;
            proof.second_engine_mismatches = Some(4096);
        };
        let all: Vec<usize> = (0..8).collect();
        let findings = judge_library(&all, wrong_library);
        assert!(findings.iter().all(|it| it.verdict == Verdict::Error));
        let summary = &findings[0].summary;
        assert!(
            summary.ends_with("a bug of cuBLASLt is suspected"),
            "{summary}"
        );
        // Not on every GPU: then it is the GPU.
        let findings = judge_library(&all[..1], wrong_library);
        let verdicts = |verdict| findings.iter().filter(|it| it.verdict == verdict).count();
        assert_eq!((verdicts(Verdict::Fail), verdicts(Verdict::Pass)), (1, 7));
        // Both engines wrong, or the kernels alone: no bug of a library.
        for change in [
            (|proof| {
                proof.exact_mismatches = 1;
                proof.second_engine_mismatches = Some(9);
                proof.second_engine_is_right = Some(false);
            }) as fn(&mut ReferenceProof),
            |proof| {
                proof.second_engine_mismatches = Some(9);
                proof.second_engine_is_right = Some(false);
            },
        ] {
            let findings = judge_library(&all, change);
            assert!(findings.iter().all(|it| it.verdict == Verdict::Fail));
        }
        let findings = judge_library(&all, |_| {});
        assert!(findings.iter().all(|it| it.verdict == Verdict::Pass));
    }

    #[test]
    fn what_was_not_verified_is_no_pass() {
        let errs = |change: fn(&mut PrecisionRun)| {
            assert_eq!(judge(change).verdict, Verdict::Error);
        };
        errs(|it| it.products_verified = 0);
        errs(|it| it.products_verified -= 1);
        errs(|it| it.reference.exact_rows = 0);
        errs(|it| it.reference.freivalds_vectors = 0);
        errs(|it| it.reference.sampled_elements = 0);
        assert_eq!(
            judge_run(|run| run.precisions.clear()).verdict,
            Verdict::Error
        );
    }

    #[test]
    fn injected_faults_neither_pass_nor_blame_the_gpu() {
        let finding = judge_run(|run| {
            run.injected = 5;
            run.precisions[0].mismatches = 5;
        });
        assert_eq!(finding.verdict, Verdict::Error);
        let finding = judge_run(|run| run.injected = 5);
        assert_eq!(finding.verdict, Verdict::Error, "none was found");
        let finding = judge_run(|run| {
            run.injected = 5;
            run.precisions[0].mismatches = 6;
        });
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn other_bits_than_most_fail_and_no_majority_errs() {
        let finding = judge(|it| it.reference.checksum = "0x1".to_owned());
        assert_eq!(finding.verdict, Verdict::Fail);
        let mut facts = burned_node();
        for (index, run) in facts.load.burn.values_mut().enumerate() {
            if let (0..4, Reading::Value(run)) = (index, run) {
                run.precisions[0].reference.checksum = "0x1".to_owned();
            }
        }
        let findings = judge_check(&CHECK, &facts, "{}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Error));
    }
}
