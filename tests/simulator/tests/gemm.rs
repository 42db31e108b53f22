//! The validator's matrix products and their verification on a simulated GPU, called through the
//! driver's C interface: each kind of wrong number is found in the sweep in which it happens, and a
//! healthy GPU is never accused.

#![allow(unsafe_code, reason = "the driver's C interface")]
#![allow(
    clippy::unused_self,
    reason = "a card that was started is what makes the call possible"
)]
#![allow(
    clippy::many_single_char_names,
    reason = "the names of C = A x B, m x n x k"
)]

mod on_node;

use simulator::cuda::api::*;
use simulator::cuda::kernels::tensor_map::TensorMap;
use simulator::cuda::result;
use std::ffi::{CString, c_void};

/// Runs `body` on a node with one small H200.
fn on_node(test: &str, overrides: &[&str], body: impl FnOnce()) {
    let small = ["gpu.memory=2GiB", "gpu.memory_reserved=64MiB"];
    on_node::on_node(test, "h200x1", &[], &[&small, overrides].concat(), body);
}

const MODULES: [&str; 5] = [
    include_str!("../../../validator/src/workload/gemm/built/support.ptx"),
    include_str!("../../../validator/src/workload/gemm/built/gemm_sm70.ptx"),
    include_str!("../../../validator/src/workload/gemm/built/gemm_sm80.ptx"),
    include_str!("../../../validator/src/workload/gemm/built/gemm_sm89.ptx"),
    include_str!("../../../validator/src/workload/gemm/built/gemm_sm90a.ptx"),
];

const SEED: u64 = 0x1234_5678_90AB_CDEF;
const MULTIPROCESSORS: u32 = 132;

fn ok(code: u32) {
    assert_eq!(code, result::SUCCESS);
}

/// A parameter of a kernel as it lies in memory, aligned as a tensor map must be.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Parameter([u64; 16]);

trait IntoParameter {
    fn parameter(&self) -> Parameter;
}
impl IntoParameter for u64 {
    fn parameter(&self) -> Parameter {
        let mut words = [0; 16];
        words[0] = *self;
        Parameter(words)
    }
}
impl IntoParameter for u32 {
    fn parameter(&self) -> Parameter {
        u64::from(*self).parameter()
    }
}
impl IntoParameter for Parameter {
    fn parameter(&self) -> Parameter {
        *self
    }
}

macro_rules! parameters {
    ($($value:expr),* $(,)?) => { [$(IntoParameter::parameter(&$value)),*] };
}

/// The driver with a context and every module loaded.
struct Card {
    modules: Vec<usize>,
}

impl Card {
    fn start() -> Self {
        let mut modules = Vec::new();
        // SAFETY: pointers to locals, texts that end with NUL.
        unsafe {
            ok(cuInit(0));
            let mut context = 0;
            ok(cuDevicePrimaryCtxRetain(&raw mut context, 0));
            ok(cuCtxSetCurrent(context));
            for ptx in MODULES {
                let text = CString::new(ptx).expect("PTX has no NUL");
                let mut module = 0;
                ok(cuModuleLoadData(&raw mut module, text.as_ptr().cast()));
                modules.push(module);
            }
        }
        Self { modules }
    }

    fn function(&self, name: &str) -> usize {
        let name = CString::new(name).expect("no NUL");
        let mut function = 0;
        // SAFETY: pointers to locals.
        let found = self.modules.iter().any(|module| unsafe {
            cuModuleGetFunction(&raw mut function, *module, name.as_ptr()) == result::SUCCESS
        });
        assert!(found, "{name:?}");
        function
    }

    fn try_launch(
        &self,
        name: &str,
        grid: [u32; 2],
        threads: u32,
        shared_bytes: u32,
        parameters: &[Parameter],
    ) -> u32 {
        let function = self.function(name);
        let pointers: Vec<*const c_void> = parameters
            .iter()
            .map(|it| std::ptr::from_ref(it).cast())
            .collect();
        // SAFETY: as many parameters as the kernel has, alive until the call returns.
        unsafe {
            ok(cuFuncSetAttribute(function, 8, shared_bytes.cast_signed()));
            cuLaunchKernel(
                function,
                grid[0],
                grid[1],
                1,
                threads,
                1,
                1,
                shared_bytes,
                0,
                pointers.as_ptr(),
                std::ptr::null(),
            )
        }
    }

    fn allocate(&self, bytes: usize) -> u64 {
        let mut address = 0;
        // SAFETY: a pointer to a local.
        unsafe { ok(cuMemAlloc_v2(&raw mut address, bytes)) };
        address
    }

    fn read<T: Copy + Default>(&self, address: u64, count: usize) -> Vec<T> {
        let mut values = vec![T::default(); count];
        // SAFETY: the vector holds so many bytes.
        unsafe {
            ok(cuMemcpyDtoH_v2(
                values.as_mut_ptr().cast(),
                address,
                size_of::<T>() * count,
            ));
        }
        values
    }

    fn operand(&self, precision: &Precision, elements: u64, seed: u64, mode: u32) -> u64 {
        let out = self.allocate(usize::try_from(elements).unwrap() * precision.bytes);
        let parameters = parameters![out, elements, seed, precision.code, mode];
        ok(self.try_launch(
            "generate_operand",
            [8 * MULTIPROCESSORS, 1],
            256,
            0,
            &parameters,
        ));
        out
    }

    fn report(&self, capacity: u32) -> u64 {
        let report = self.allocate(32 + 32 * capacity as usize);
        self.empty(report, capacity);
        report
    }

    /// Sets a report back to nothing checked.
    fn empty(&self, report: u64, capacity: u32) {
        let header = [0u32, 0, 0, 0, 0, 0, 0, capacity];
        // SAFETY: the header is 32 bytes.
        unsafe { ok(cuMemcpyHtoD_v2(report, header.as_ptr().cast(), 32)) };
    }

    /// `checked`, `mismatches`, `nonfinite`, and the records.
    fn look(&self, report: u64) -> ([u64; 3], Vec<[u64; 4]>) {
        let header: Vec<u64> = self.read(report, 4);
        let recorded = usize::try_from(header[3] & 0xFFFF_FFFF).unwrap();
        let records: Vec<[u64; 4]> = self.read(report + 32, recorded);
        ([header[0], header[1], header[2]], records)
    }
}

struct Precision {
    name: &'static str,
    code: u32,
    bytes: usize,
    /// 32-bit words of an element of the result.
    words: u32,
    kind: u32,
}

const fn precision(name: &'static str, code: u32, bytes: usize, kind: u32) -> Precision {
    let words = if kind == 2 { 2 } else { 1 };
    Precision {
        name,
        code,
        bytes,
        words,
        kind,
    }
}

const F64: Precision = precision("f64", 0, 8, 2);
const F32: Precision = precision("f32", 1, 4, 1);
const TF32: Precision = precision("tf32", 2, 4, 1);
const BF16: Precision = precision("bf16", 3, 2, 1);
const F16: Precision = precision("f16", 4, 2, 1);
const E4M3: Precision = precision("e4m3", 5, 1, 1);
const S8: Precision = precision("s8", 6, 1, 0);

/// One product: operands, sizes, and where verification finds what it needs.
struct Product<'card> {
    card: &'card Card,
    family: &'static str,
    precision: &'static Precision,
    operands: [u64; 2],
    m: u32,
    n: u32,
    k_bytes: u32,
}

#[derive(Clone, Copy, Default)]
struct Fused {
    result: u64,
    checksums: u64,
    report: u64,
    sweep: u32,
}

impl<'card> Product<'card> {
    fn new(
        card: &'card Card,
        family: &'static str,
        precision: &'static Precision,
        [m, n, k_bytes]: [u32; 3],
        mode: u32,
    ) -> Self {
        let depth = u64::from(k_bytes) / precision.bytes as u64;
        Self {
            card,
            family,
            precision,
            operands: [
                card.operand(precision, u64::from(m) * depth, SEED, mode),
                card.operand(precision, u64::from(n) * depth, SEED + 1, mode),
            ],
            m,
            n,
            k_bytes,
        }
    }

    fn words(&self) -> usize {
        self.m as usize * self.n as usize * self.precision.words as usize
    }

    fn strips(&self) -> usize {
        self.words() / 4096
    }

    fn result(&self) -> u64 {
        self.card.allocate(4 * self.words())
    }

    fn tensor_map(&self, address: u64, rows: u32, tile_rows: u32) -> Parameter {
        let mut map = Parameter([0; 16]);
        let dimensions = [u64::from(self.k_bytes), u64::from(rows)];
        // SAFETY: the map is 128 aligned bytes, the arrays are as long as the rank requires.
        unsafe {
            ok(cuTensorMapEncodeTiled(
                (&raw mut map).cast::<TensorMap>(),
                0,
                2,
                address,
                dimensions.as_ptr(),
                dimensions.as_ptr(),
                [128, tile_rows].as_ptr(),
                [1, 1].as_ptr(),
                0,
                3,
                3,
                0,
            ));
        }
        map
    }

    fn launch(&self, c: u64, tile_sm: u64, fused: Fused) {
        let [a, b] = self.operands;
        let (m, n, k) = (self.m, self.n, self.k_bytes);
        let name = format!("gemm_{}_{}", self.family, self.precision.name);
        let double = self.precision.kind == 2;
        let plain = parameters![a, b, c, m, n, k, tile_sm];
        ok(match (self.family, double) {
            ("sm70", true) => self
                .card
                .try_launch(&name, [n / 64, m / 64], 256, 0, &plain),
            ("sm70", false) => self
                .card
                .try_launch(&name, [n / 128, m / 128], 256, 0, &plain),
            ("sm80", true) => {
                self.card
                    .try_launch(&name, [m / 64 * (n / 128), 1], 128, 73_728, &plain)
            }
            ("sm80" | "sm89", _) => {
                self.card
                    .try_launch(&name, [m / 128 * (n / 256), 1], 256, 98_304, &plain)
            }
            _ => {
                let parameters = parameters![
                    self.tensor_map(a, m, 128),
                    self.tensor_map(b, n, if double { 64 } else { 128 }),
                    c,
                    m,
                    n,
                    k,
                    tile_sm,
                    fused.result,
                    fused.checksums,
                    fused.report,
                    fused.sweep,
                ];
                let clusters = m / 256 * (n / if double { 128 } else { 256 });
                let grid = 2 * clusters.min(MULTIPROCESSORS / 2);
                self.card
                    .try_launch(&name, [grid, 1], 384, 197_632, &parameters)
            }
        });
    }

    /// Writes the checksums of a result; returns how many NaN and infinities it has.
    fn checksums_of(&self, result: u64) -> (u64, u64) {
        let checksums = self.card.allocate(8 * self.strips());
        let nonfinite = self.card.report(0);
        self.verify_strips(result, checksums, nonfinite, 0, 0);
        (checksums, self.card.read::<u64>(nonfinite, 1)[0])
    }

    fn verify_strips(&self, result: u64, checksums: u64, nonfinite: u64, report: u64, sweep: u32) {
        let words = self.n * self.precision.words;
        let parameters = parameters![
            result,
            self.m,
            words,
            self.precision.kind,
            checksums,
            nonfinite,
            report,
            sweep,
        ];
        ok(self.card.try_launch(
            "verify_strips",
            [8 * MULTIPROCESSORS, 1],
            256,
            0,
            &parameters,
        ));
    }

    /// The report of comparing every element.
    fn compare(&self, result: u64, reference: u64, tile_sm: u64) -> ([u64; 3], Vec<[u64; 4]>) {
        let report = self.card.report(1 << 16);
        let words = self.n * self.precision.words;
        let tile = match self.family {
            "sm70" => [if self.precision.kind == 2 { 64u32 } else { 128 }, 128],
            "sm80" if self.precision.kind == 2 => [64, 256],
            _ => [128, 256],
        };
        let parameters = parameters![
            result,
            reference,
            words,
            0u32,
            self.m,
            0u32,
            words,
            self.precision.kind,
            tile_sm,
            tile[0],
            tile[1],
            report,
            7u32,
        ];
        ok(self.card.try_launch(
            "compare_elements",
            [MULTIPROCESSORS, 1],
            256,
            0,
            &parameters,
        ));
        self.card.look(report)
    }
}

/// Every kernel.
const KERNELS: [(&str, &Precision); 18] = [
    ("sm70", &F64),
    ("sm70", &F32),
    ("sm70", &BF16),
    ("sm70", &F16),
    ("sm70", &S8),
    ("sm80", &BF16),
    ("sm80", &F16),
    ("sm80", &TF32),
    ("sm80", &S8),
    ("sm80", &F64),
    ("sm89", &E4M3),
    ("sm90a", &BF16),
    ("sm90a", &F16),
    ("sm90a", &TF32),
    ("sm90a", &E4M3),
    ("sm90a", &S8),
    ("sm90a", &F64),
    ("sm90a", &F32),
];

/// Exact operands, as integers.
fn integer(precision: &Precision, bytes: &[u8]) -> i64 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "integers of 20 bits at most"
    )]
    match precision.name {
        "f64" => f64::from_le_bytes(bytes.try_into().unwrap()) as i64,
        "f32" | "tf32" => f32::from_le_bytes(bytes.try_into().unwrap()) as i64,
        "bf16" => f32::from_le_bytes([0, 0, bytes[0], bytes[1]]) as i64,
        "f16" => {
            simulator::number::f16_to_f64(u16::from_le_bytes(bytes.try_into().unwrap())) as i64
        }
        "e4m3" => simulator::number::e4m3_to_f64(bytes[0]) as i64,
        _ => i64::from(bytes[0].cast_signed()),
    }
}

#[test]
fn exact_products_are_those_of_integers() {
    on_node("exact_products_are_those_of_integers", &[], || {
        let card = Card::start();
        for (family, precision) in KERNELS {
            let product = Product::new(&card, family, precision, [256, 512, 256], 0);
            let depth = 256 / precision.bytes;
            let c = product.result();
            product.launch(c, 0, Fused::default());
            let words: Vec<u32> = card.read(c, product.words());
            let a: Vec<u8> = card.read(product.operands[0], 256 * 256);
            let b: Vec<u8> = card.read(product.operands[1], 512 * 256);
            let element = |memory: &[u8], row: usize, k: usize| {
                let at = row * 256 + k * precision.bytes;
                integer(precision, &memory[at..at + precision.bytes])
            };
            for (row, column) in [
                (0, 0),
                (0, 511),
                (255, 0),
                (131, 389),
                (77, 256),
                (200, 130),
            ] {
                let expected: i64 = (0..depth)
                    .map(|k| element(&a, row, k) * element(&b, column, k))
                    .sum();
                let place = row * 512 + column;
                #[expect(clippy::cast_possible_truncation, reason = "exact")]
                let got = match precision.kind {
                    2 => {
                        let bits =
                            u64::from(words[2 * place]) | u64::from(words[2 * place + 1]) << 32;
                        f64::from_bits(bits) as i64
                    }
                    1 => f32::from_bits(words[place]) as i64,
                    _ => i64::from(words[place].cast_signed()),
                };
                assert_eq!(got, expected, "{family} {} {row} {column}", precision.name);
            }
        }
    });
}

#[test]
fn random_products_pass_freivalds_check_and_a_wrong_element_does_not() {
    on_node(
        "random_products_pass_freivalds_check_and_a_wrong_element_does_not",
        &[],
        || {
            let card = Card::start();
            for (family, precision) in KERNELS {
                // KERNELS.md's bounds.
                let bound = match precision.name {
                    "s8" => 0.0,
                    "f64" => 1e-15,
                    "e4m3" => 2e-5,
                    _ => 1e-7,
                };
                let product = Product::new(&card, family, precision, [256, 512, 1024], 1);
                let c = product.result();
                product.launch(c, 0, Fused::default());
                assert!(
                    worst_row(&product, c) <= bound,
                    "{family} {}",
                    precision.name
                );
                // The highest bit but the sign: no element is so large.
                let address = c + u64::from(4 * (512 * 100 + 77) * product.precision.words);
                let high_word = address + 4 * u64::from(product.precision.words - 1);
                ok(card.try_launch("flip_bit", [1, 1], 1, 0, &parameters![high_word, 30u32]));
                let worst = worst_row(&product, c);
                assert!(
                    worst > bound || worst.is_nan(),
                    "{family} {}",
                    precision.name
                );
            }
        },
    );
}

/// Freivalds' check: the largest |v - u| / bound of any row.
fn worst_row(product: &Product<'_>, c: u64) -> f64 {
    let (card, rows, columns) = (product.card, product.m, product.n);
    let depth = product.k_bytes / u32::try_from(product.precision.bytes).unwrap();
    let signs = card.operand(&F64, u64::from(columns), SEED + 2, 2);
    let result_code = match product.precision.kind {
        0 => 7u32,
        1 => 1,
        _ => 0,
    };
    let chain = |absolute: u32| {
        let inner = card.allocate(8 * depth as usize);
        let outer = card.allocate(8 * rows as usize);
        let [a, b] = product.operands;
        let code = product.precision.code;
        let first = parameters![b, code, columns, depth, signs, inner, absolute];
        ok(card.try_launch("multiply_columns", [depth.div_ceil(64), 1], 64, 0, &first));
        let second = parameters![a, code, rows, depth, inner, outer, absolute];
        ok(card.try_launch("multiply_rows", [MULTIPROCESSORS, 1], 256, 0, &second));
        card.read::<f64>(outer, rows as usize)
    };
    let direct = card.allocate(8 * rows as usize);
    let parameters = parameters![c, result_code, rows, columns, signs, direct, 0u32];
    ok(card.try_launch("multiply_rows", [MULTIPROCESSORS, 1], 256, 0, &parameters));
    let direct: Vec<f64> = card.read(direct, rows as usize);
    let (through, bounds) = (chain(0), chain(1));
    let errors = direct.iter().zip(&through).zip(&bounds);
    errors.fold(0.0, |worst: f64, ((v, u), bound)| {
        let error = (v - u).abs() / bound;
        if error.is_nan() {
            f64::NAN
        } else {
            worst.max(error)
        }
    })
}

#[test]
fn a_healthy_gpu_is_never_accused() {
    on_node("a_healthy_gpu_is_never_accused", &[], || {
        const SWEEPS: u32 = 10_000;
        let card = Card::start();
        let product = Product::new(&card, "sm90a", &BF16, [256, 512, 128], 1);
        let results = [product.result(), product.result()];
        let tile_sm = card.allocate(4 * 4);
        product.launch(results[1], tile_sm, Fused::default());
        let (checksums, nonfinite) = product.checksums_of(results[1]);
        assert_eq!(nonfinite, 0);
        let report = card.report(16);
        for sweep in 0..SWEEPS {
            let fused = Fused {
                result: results[(sweep as usize + 1) % 2],
                checksums,
                report,
                sweep,
            };
            product.launch(results[sweep as usize % 2], tile_sm, fused);
        }
        let strips = product.strips() as u64;
        let (counts, _) = card.look(report);
        assert_eq!(counts, [strips * u64::from(SWEEPS), 0, 0]);
        let (counts, _) = product.compare(results[0], results[1], tile_sm);
        assert_eq!(counts, [256 * 512, 0, 0]);
        // Every tile was computed by one of the four blocks.
        let mut seen = card.read::<u32>(tile_sm, 4);
        seen.sort_unstable();
        assert_eq!(seen, [0, 1, 2, 3]);
    });
}

/// A GPU whose every `every`th launch of a product is wrong: sweeps find each of them, at once, and
/// nothing else.
fn is_found(test: &str, fault: &str, check: impl Fn(&Product<'_>, u64, u64, u64)) {
    const EVERY: u32 = 7;
    let wrong = format!("gpu.wrong_results={{{fault}, kernel: gemm, every_launches: {EVERY}}}");
    on_node(test, &[&wrong], || {
        let card = Card::start();
        for (family, precision) in [
            ("sm90a", &BF16),
            ("sm90a", &F64),
            ("sm80", &S8),
            ("sm70", &F32),
        ] {
            let product = Product::new(&card, family, precision, [512, 512, 128], 0);
            let (c, reference, tile_sm) = (product.result(), product.result(), card.allocate(4096));
            // Two of three in a row agree, since at most one of them is wrong.
            let mut launches = Vec::new();
            for result in [reference, c, product.result()] {
                product.launch(result, tile_sm, Fused::default());
                launches.push((result, product.checksums_of(result)));
            }
            let sums = |index: usize| card.read::<u64>(launches[index].1.0, product.strips());
            let first_is_good = sums(0) == sums(1) || sums(0) == sums(2);
            let good = usize::from(!first_is_good);
            let (reference, (checksums, nonfinite)) = launches[good];
            assert_eq!(nonfinite, 0);
            let c = launches[(good + 1) % 3].0;
            let mut found = 0;
            for sweep in 0..8 * EVERY {
                product.launch(c, tile_sm, Fused::default());
                let report = card.report(64);
                product.verify_strips(c, checksums, 0, report, sweep);
                let (counts, records) = card.look(report);
                assert_eq!(counts[0], product.strips() as u64);
                let really_wrong = card.read::<u32>(c, product.words())
                    != card.read::<u32>(reference, product.words());
                assert_eq!(counts[1] > 0, really_wrong, "{fault}, sweep {sweep}");
                if really_wrong {
                    found += 1;
                    assert!(
                        records
                            .iter()
                            .all(|it| it[1] & 0xFFFF_FFFF == u64::from(sweep))
                    );
                    check(&product, c, reference, tile_sm);
                    if family == "sm90a" {
                        fused_verification_finds_it(&product, c, checksums);
                    }
                }
            }
            assert!(found >= 8, "{family} {}: {found} wrong", precision.name);
        }
    });
}

/// The next product finds what is wrong in this one while it multiplies.
fn fused_verification_finds_it(product: &Product<'_>, wrong: u64, checksums: u64) {
    let separate = product.card.report(0);
    product.verify_strips(wrong, checksums, 0, separate, 0);
    let report = product.card.report(0);
    let fused = Fused {
        result: wrong,
        checksums,
        report,
        sweep: 3,
    };
    product.launch(product.result(), 0, fused);
    let (counts, _) = product.card.look(report);
    assert_eq!(counts[..2], product.card.look(separate).0[..2]);
}

#[test]
fn a_flipped_bit_is_found() {
    is_found(
        "a_flipped_bit_is_found",
        "kind: bit",
        |product, c, reference, tile_sm| {
            let (counts, records) = product.compare(c, reference, tile_sm);
            assert_eq!(counts[1], 1);
            let [_, _, expected, got] = records[0];
            assert_eq!((expected ^ got).count_ones(), 1);
        },
    );
}

#[test]
fn a_wrong_element_is_found() {
    is_found(
        "a_wrong_element_is_found",
        "kind: element, element: 70000",
        |product, c, reference, tile_sm| {
            let (counts, records) = product.compare(c, reference, tile_sm);
            assert_eq!(counts[1], 1);
            // Row and column, low half first.
            assert_eq!(records[0][0], (70_000 / 512) | (70_000 % 512) << 32);
        },
    );
}

#[test]
fn the_same_wrong_value_every_time_is_found() {
    is_found(
        "the_same_wrong_value_every_time_is_found",
        "kind: same-every-time, element: 4099",
        |product, c, reference, tile_sm| {
            let (counts, records) = product.compare(c, reference, tile_sm);
            assert_eq!((counts[1], records[0][0]), (1, 8 | 3 << 32));
        },
    );
}

#[test]
fn a_value_that_is_no_number_is_found() {
    is_found(
        "a_value_that_is_no_number_is_found",
        "kind: nan",
        |product, c, reference, tile_sm| {
            let (counts, _) = product.compare(c, reference, tile_sm);
            let nonfinite = u64::from(product.precision.kind != 0);
            assert_eq!(counts[1..], [1, nonfinite]);
            // It is found even in a result that is compared with itself.
            assert_eq!(
                product.compare(c, c, tile_sm).0[1..],
                [nonfinite, nonfinite]
            );
        },
    );
}

#[test]
fn a_wrong_row_is_found() {
    is_found(
        "a_wrong_row_is_found",
        "kind: row",
        |product, c, reference, tile_sm| {
            let (counts, records) = product.compare(c, reference, tile_sm);
            assert_eq!(counts[1], 512);
            let row = records[0][0] & 0xFFFF_FFFF;
            assert!(records.iter().all(|it| it[0] & 0xFFFF_FFFF == row));
        },
    );
}

#[test]
fn a_wrong_tile_is_found() {
    is_found(
        "a_wrong_tile_is_found",
        "kind: tile, bit: 12",
        |product, c, reference, tile_sm| {
            let tile = match (product.family, product.precision.kind) {
                ("sm70", _) | (_, 2) => 128 * 128,
                _ => 128 * 256,
            };
            let (counts, records) = product.compare(c, reference, tile_sm);
            assert_eq!(counts[1], tile);
            // All of it is one multiprocessor's.
            assert!(records.iter().all(|it| it[1] >> 32 == records[0][1] >> 32));
        },
    );
}

#[test]
fn a_broken_multiprocessor_is_found_and_named() {
    is_found(
        "a_broken_multiprocessor_is_found_and_named",
        "kind: element, sm: 3",
        |product, c, reference, tile_sm| {
            let (counts, records) = product.compare(c, reference, tile_sm);
            assert!(counts[1] > 0 && counts[1] == records.len() as u64);
            assert!(records.iter().all(|it| it[1] >> 32 == 3));
        },
    );
}

#[test]
fn bits_that_are_flipped_in_memory_are_found_and_localised() {
    on_node(
        "bits_that_are_flipped_in_memory_are_found_and_localised",
        &[],
        || {
            let card = Card::start();
            let product = Product::new(&card, "sm90a", &F16, [256, 256, 128], 1);
            let c = product.result();
            product.launch(c, 0, Fused::default());
            let (checksums, _) = product.checksums_of(c);
            let report = card.report(4);
            for round in 0..1000u32 {
                let word = round.wrapping_mul(0x9E37_79B9) % (256 * 256);
                let flip = parameters![c + u64::from(4 * word), round % 32];
                ok(card.try_launch("flip_bit", [1, 1], 1, 0, &flip));
                card.empty(report, 4);
                product.verify_strips(c, checksums, 0, report, round);
                let (counts, records) = card.look(report);
                assert_eq!((counts[1], records.len()), (1, 1), "round {round}");
                assert_eq!(records[0][0], u64::from(word / 256 / 16 * 16));
                ok(card.try_launch("flip_bit", [1, 1], 1, 0, &flip));
            }
        },
    );
}

/// Two wrong signs of one column, which cancel in a polynomial modulo 2^32 whatever its factor:
/// every pair of rows is found.
#[test]
fn sign_bits_of_two_rows_are_found_in_a_checksum_and_in_a_comparison() {
    on_node(
        "sign_bits_of_two_rows_are_found_in_a_checksum_and_in_a_comparison",
        &[],
        || {
            let card = Card::start();
            let product = Product::new(&card, "sm90a", &BF16, [256, 256, 128], 1);
            let (c, reference) = (product.result(), product.result());
            product.launch(c, 0, Fused::default());
            product.launch(reference, 0, Fused::default());
            let (checksums, _) = product.checksums_of(c);
            let flip = |row: u64| {
                let flip = parameters![c + 4 * (256 * row + 77), 31u32];
                ok(card.try_launch("flip_bit", [1, 1], 1, 0, &flip));
            };
            for second in 1..16 {
                for first in 0..second {
                    flip(first);
                    flip(second);
                    let report = card.report(4);
                    product.verify_strips(c, checksums, 0, report, 0);
                    assert_eq!(card.look(report).0[1], 1, "rows {first} and {second}");
                    assert_eq!(product.compare(c, reference, 0).0[1], 2);
                    flip(first);
                    flip(second);
                }
            }
        },
    );
}

#[test]
fn what_a_gpu_refuses_is_refused() {
    on_node("what_a_gpu_refuses_is_refused", &[], || {
        let card = Card::start();
        let product = Product::new(&card, "sm90a", &BF16, [256, 256, 128], 0);
        let function = card.function("gemm_sm90a_bf16");
        // SAFETY: numbers alone.
        unsafe {
            // More shared memory than a block of an H200 can have.
            assert_eq!(
                cuFuncSetAttribute(function, 8, 300_000),
                result::INVALID_VALUE
            );
            // The attribute belongs to the function; this one has not been given any.
            assert_eq!(
                cuLaunchKernel(
                    function,
                    2,
                    1,
                    1,
                    384,
                    1,
                    1,
                    197_632,
                    0,
                    std::ptr::null(),
                    std::ptr::null()
                ),
                result::INVALID_VALUE
            );
        }
        let [a, b] = product.operands;
        let wrong_box = product.tensor_map(a, 256, 64);
        let right = product.tensor_map(b, 256, 128);
        let parameters = parameters![
            wrong_box,
            right,
            product.result(),
            256u32,
            256u32,
            128u32,
            0u64,
            0u64,
            0u64,
            0u64,
            0u32
        ];
        let code = card.try_launch("gemm_sm90a_bf16", [2, 1], 384, 197_632, &parameters);
        assert_eq!(code, result::ILLEGAL_INSTRUCTION);
        // The error is sticky.
        // SAFETY: no pointers.
        unsafe { assert_eq!(cuCtxSynchronize(), result::ILLEGAL_INSTRUCTION) };
    });
}

#[test]
fn products_take_the_time_of_an_h200_and_are_fast_here() {
    on_node(
        "products_take_the_time_of_an_h200_and_are_fast_here",
        &[],
        || {
            let card = Card::start();
            let product = Product::new(&card, "sm90a", &BF16, [2048, 2048, 4096], 1);
            let c = product.result();
            let started = std::time::Instant::now();
            product.launch(c, 0, Fused::default());
            let first = started.elapsed();
            let (mut start, mut end, mut milliseconds) = (0, 0, 0f32);
            let started = std::time::Instant::now();
            // SAFETY: pointers to locals.
            unsafe {
                ok(cuEventCreate(&raw mut start, 0));
                ok(cuEventCreate(&raw mut end, 0));
                ok(cuEventRecord(start, 0));
                for _ in 0..10 {
                    product.launch(c, 0, Fused::default());
                }
                ok(cuEventRecord(end, 0));
                ok(cuEventElapsedTime(&raw mut milliseconds, start, end));
            }
            let again = started.elapsed() / 10;
            println!("the first product took {first:?}, each further one {again:?}");
            // Each launch fills and drains the multiprocessors for 20 µs.
            let sums_ms = milliseconds - 10.0 * 0.02;
            let teraflops = 10.0 * 2.0 * 2048f32.powi(3) / (sums_ms * 1e9);
            assert!((640.0..=661.0).contains(&teraflops), "{teraflops} TFLOP/s");
            // Far below what computing it again would take.
            assert!(again * 4 < first, "{first:?}, {again:?}");
        },
    );
}
