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
//! - `error`: nothing was verified, or not every product, or not a precision that most GPUs of the
//!   model multiplied; no copy was compared; GPUs of one model differ and none has a
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

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::burned;
use crate::check::{Check, Judge, JudgeGpu};
use crate::facts::{
    BurnEngine, BurnRun, ElementMismatch, Facts, GpuFacts, Precision, PrecisionRun, Reading,
    WorkerEnd,
};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::worst_of;
use crate::wrong_products;

pub(crate) const CHECK: Check = Check {
    id: "gemm_numerics",
    stage: Stage::Load,
    level: Level::Standard,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://sigops.org/s/conferences/hotos/2021/papers/hotos21-s01-hochschild.pdf",
};

const REMEDY: &str = "take the node out of service and have the GPU inspected; keep this report";

/// What the GPUs multiplied together.
struct Node<'f> {
    facts: &'f Facts,
    profile: &'f Profile,
    /// How many GPUs have each checksum of the same product.
    checksums: HashMap<Product<'f>, BTreeMap<&'f str, usize>>,
    second_engines: HashMap<(&'f Reading<String>, Precision), SecondEngine<'f>>,
    /// Burns of the GPUs of each name, and how many multiplied in each precision.
    precisions: HashMap<&'f Reading<String>, (usize, BTreeMap<Precision, usize>)>,
}

/// GPUs of one name that multiplied it with the same engine have the same bits.
#[derive(PartialEq, Eq, Hash)]
struct Product<'f> {
    name: &'f Reading<String>,
    seed: u64,
    engine: &'f BurnEngine,
    precision: Precision,
    size: (u32, u32, u32),
}

/// What the two engines gave on the GPUs of one name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SecondEngine<'f> {
    AlikeOnAll(ExactProduct<'f>),
    Different,
}

/// Elements in which the engines differ, and the checksum of the exact product.
type ExactProduct<'f> = (Option<u64>, &'f str);

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let mut node = Node {
        facts,
        profile,
        checksums: HashMap::new(),
        second_engines: HashMap::new(),
        precisions: HashMap::new(),
    };
    for gpu in &facts.gpus {
        if let Ok(run) = burned::run_of(gpu, facts, profile) {
            node.add(gpu, run);
        }
    }
    Box::new(move |gpu| judge(gpu, &node))
}

impl<'f> Node<'f> {
    /// Of several products of one kind the first counts.
    fn add(&mut self, gpu: &'f GpuFacts, run: &'f BurnRun) {
        let (mut products_seen, mut precisions_seen) = (HashSet::new(), HashSet::new());
        let (runs, precisions) = self.precisions.entry(&gpu.name).or_default();
        *runs += 1;
        for products in &run.precisions {
            *precisions.entry(products.precision).or_default() += 1;
        }
        for products in &run.precisions {
            let checksum = products.reference.checksum.as_str();
            if products_seen.insert(product(products, run, gpu)) && !checksum.is_empty() {
                let checksums = self.checksums.entry(product(products, run, gpu));
                *checksums.or_default().entry(checksum).or_default() += 1;
            }
            if precisions_seen.insert(products.precision) {
                let own = SecondEngine::AlikeOnAll(exact_product(products));
                let of_all = self.second_engines.entry((&gpu.name, products.precision));
                let of_all = of_all.or_insert(own);
                if *of_all != own {
                    *of_all = SecondEngine::Different;
                }
            }
        }
    }

    /// A precision that most GPUs of this model multiplied and this one did not, although its burn
    /// ended well; `burn_completed` reports one that did not.
    fn precision_of_others(&self, run: &BurnRun, gpu: &GpuFacts) -> Option<Precision> {
        if run.end != WorkerEnd::Finished {
            return None;
        }
        let (runs, counts) = self.precisions.get(&gpu.name)?;
        let is_own = |it: Precision| run.precisions.iter().any(|own| own.precision == it);
        let is_common = |count: usize| 2 * count > *runs;
        let mut common = counts.iter().filter(|(_, count)| is_common(**count));
        common.find(|(it, _)| !is_own(**it)).map(|(it, _)| *it)
    }
}

fn product<'f>(products: &'f PrecisionRun, run: &'f BurnRun, gpu: &'f GpuFacts) -> Product<'f> {
    Product {
        name: &gpu.name,
        seed: run.seed,
        engine: engine_of(products, run),
        precision: products.precision,
        size: (products.m, products.n, products.k),
    }
}

fn exact_product(products: &PrecisionRun) -> ExactProduct<'_> {
    let proof = &products.reference;
    (proof.second_engine_mismatches, &proof.exact_checksum)
}

fn judge(gpu: &GpuFacts, node: &Node<'_>) -> Judgement {
    let (facts, profile) = (node.facts, node.profile);
    let run = burned::run_of(gpu, facts, profile)?;
    if run.precisions.is_empty() {
        return Ok(burned::missing("no product was verified", facts, profile));
    }
    copies_are_right(run)?;
    if let Some(precision) = node.precision_of_others(run, gpu) {
        let text =
            format!("{precision}: no product was verified, other GPUs of this model multiplied it");
        return Ok(burned::missing(text, facts, profile));
    }
    worst_of(
        run.precisions
            .iter()
            .map(|products| judge_products(products, run, gpu, node)),
    )
}

/// Wrong copies make every comparison wrong that follows: they are the cause, not the products.
fn copies_are_right(run: &BurnRun) -> Result<(), Outcome> {
    let Some(copies) = &run.copies else {
        return Ok(());
    };
    if copies.bytes == 0 {
        return Err(Outcome::error(
            "copies between host and GPU were not compared",
        ));
    }
    let Some(text) = wrong_products::wrong_copies(copies) else {
        return Ok(());
    };
    Err(Outcome::fail(text)
    .expected("the same bits on both sides")
    .remedy("take the node out of service; check the PCIe link, IOMMU and ACS settings, then have the GPU inspected"))
}

fn judge_products(
    products: &PrecisionRun,
    run: &BurnRun,
    gpu: &GpuFacts,
    node: &Node<'_>,
) -> Judgement {
    let (facts, profile) = (node.facts, node.profile);
    let precision = products.precision;
    // A flipped bit may make a NaN, which is one wrong block and one result that is not finite.
    if run.injected > 0 && products.mismatches.max(products.nonfinite) <= run.injected {
        return Ok(Outcome::error(format!(
            "{precision}: {} bits were flipped on purpose and {} wrong blocks were found, so this run does not vouch for the GPU",
            run.injected, products.mismatches
        )));
    }
    if let Some(text) = wrong_products::wrong_results(products) {
        return Ok(wrong_results(&text, products, run));
    }
    engines_agree(products, run, gpu, node)?;
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
    agree_with_others(products, run, gpu, node)?;
    Ok(Outcome::pass(format!(
        "{precision}: every element of {} products of {} x {} x {} is right",
        products.products_verified, products.m, products.n, products.k
    )))
}

fn wrong_results(text: &str, products: &PrecisionRun, run: &BurnRun) -> Outcome {
    let injected = if run.injected > 0 {
        format!(" ({} bits were flipped on purpose)", run.injected)
    } else {
        String::new()
    };
    let first = products
        .examples
        .first()
        .map_or(String::new(), |it| format!(", first {}", example(it)));
    Outcome::fail(format!("{text}{injected}{first}"))
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
    node: &Node<'_>,
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
    // A GPU that was not burned in this precision is no evidence.
    let of_all = node.second_engines.get(&(&gpu.name, precision));
    let own = SecondEngine::AlikeOnAll(exact_product(products));
    let all_are_alike = of_all.is_none_or(|it| *it == own);
    if !library_is_right && kernels_are_right && all_are_alike {
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
    if let Some(text) = wrong_products::wrong_operands(products) {
        return Err(Outcome::fail(text)
            .expected("the operands that the seed gives")
            .remedy(REMEDY));
    }
    if let Some(text) = wrong_products::wrong_reference(products) {
        return Err(Outcome::fail(text)
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
    node: &Node<'_>,
) -> Result<(), Outcome> {
    let Some(by_checksum) = node.checksums.get(&product(products, run, gpu)) else {
        return Ok(());
    };
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
        BurnEngine, BurnRun, CopyProof, ElementMismatch, Precision, PrecisionRun, Reading,
        ReferenceProof, WorkerEnd,
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
    fn copies_that_were_not_compared_are_no_pass() {
        let finding = judge_run(|run| run.copies = Some(CopyProof::default()));
        assert_eq!(finding.verdict, Verdict::Error, "{}", finding.summary);
    }

    #[test]
    fn a_precision_that_the_other_gpus_multiplied_is_no_pass() {
        let judged = |lacking: &[usize], end: WorkerEnd| {
            let mut facts = burned_node();
            for (index, run) in facts.load.burn.values_mut().enumerate() {
                let Reading::Value(run) = run else { continue };
                if lacking.contains(&index) {
                    run.end = end.clone();
                } else {
                    let mut fp64 = run.precisions[0].clone();
                    fp64.precision = Precision::Fp64;
                    run.precisions.push(fp64);
                }
            }
            judge_check(&CHECK, &facts, "{}").swap_remove(2).verdict
        };
        assert_eq!(judged(&[2], WorkerEnd::Finished), Verdict::Error);
        assert_eq!(judged(&[2], WorkerEnd::Killed { signal: 9 }), Verdict::Pass);
        assert_eq!(judged(&[0, 1, 2, 3], WorkerEnd::Finished), Verdict::Pass);
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
