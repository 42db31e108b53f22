//! Whether the burn finds wrong numbers: every kind of fault, in every kernel, held against the
//! simulator's own record of what it made wrong.
//!
//! One worker process burns one GPU, without the probes and checks around it. The simulator notes
//! each result that it spoils (`wrong-results.jsonl`); the worker must have counted as many wrong
//! strips, no more and no fewer, and name the product, the element, the bits and the multiprocessor
//! of the first ones.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use simulator::wrong_results::{self, WrongArea, WrongResult};

use crate::node::Node;
use crate::processes::signal;

/// A kernel, a node of one GPU, and the precision in which that kernel multiplies there.
type Kernel = (&'static str, &'static str, &'static str);

/// Every kernel, by a node of one GPU that runs it: Hopper's, those for Ampere, that for Ada, and
/// the plain ones.
const KERNELS: [Kernel; 18] = [
    ("gemm_sm90a_bf16", "h200x1", "bf16"),
    ("gemm_sm90a_f16", "h200x1", "fp16"),
    ("gemm_sm90a_tf32", "h200x1", "tf32"),
    ("gemm_sm90a_e4m3", "h200x1", "fp8"),
    ("gemm_sm90a_s8", "h200x1", "int8"),
    ("gemm_sm90a_f64", "h200x1", "fp64"),
    ("gemm_sm90a_f32", "h200x1", "fp32"),
    ("gemm_sm89_e4m3", "g6.xlarge", "fp8"),
    ("gemm_sm80_bf16", "g5.xlarge", "bf16"),
    ("gemm_sm80_f16", "g5.xlarge", "fp16"),
    ("gemm_sm80_tf32", "g5.xlarge", "tf32"),
    ("gemm_sm80_s8", "g5.xlarge", "int8"),
    ("gemm_sm80_f64", "g5.xlarge", "fp64"),
    ("gemm_sm70_f64", "g4dn.xlarge", "fp64"),
    ("gemm_sm70_f32", "g4dn.xlarge", "fp32"),
    ("gemm_sm70_bf16", "g4dn.xlarge", "bf16"),
    ("gemm_sm70_f16", "g4dn.xlarge", "fp16"),
    ("gemm_sm70_s8", "g4dn.xlarge", "int8"),
];

/// cuBLASLt's products in every precision.
const OF_CUBLASLT: [Kernel; 7] = [
    ("cublasLtMatmul", "h200x1", "bf16"),
    ("cublasLtMatmul", "h200x1", "fp16"),
    ("cublasLtMatmul", "h200x1", "tf32"),
    ("cublasLtMatmul", "h200x1", "fp8"),
    ("cublasLtMatmul", "h200x1", "int8"),
    ("cublasLtMatmul", "h200x1", "fp32"),
    ("cublasLtMatmul", "h200x1", "fp64"),
];

/// Products of 256 x 256 (of two tiles or more in every kernel), and few of them in a sweep.
const SMALL: u64 = 3 << 20;
/// Products of 512 x 512, with several tiles in a row.
const MEDIUM: u64 = 12 << 20;

/// Products of matrices whose reference is right; their number is not reached.
const NEVER: &str = "{kind: bit, kernel: gemm, first_launch: 1000000000}";
/// Rows and 32-bit words of a strip, as KERNELS.md has it.
const STRIP: (u64, u64) = (16, 256);

/// A worker that burns until it is stopped.
struct Worker {
    child: Child,
    lines: std::thread::JoinHandle<Vec<String>>,
}

impl Worker {
    fn start(faulty: &Faulty, memory: u64) -> Self {
        let Faulty {
            node,
            kernel,
            precision,
        } = faulty;
        let engine = if kernel.starts_with("gemm") {
            "ptx"
        } else {
            "cublaslt"
        };
        let device = node.state().scenario().gpus[0].uuid.clone();
        let burn = json!({
            "seconds": 600.0,
            "precisions": [precision],
            "inject": 0,
            "seed": 20_261_120,
            "engine": engine,
        });
        let assignment = json!({
            "id": {"workload": "burn", "gpus": [device], "ordinal": 0},
            "devices": [device],
            "memory": {"bytes": memory},
            "requested": {"seconds": 1e9, "passes": 1},
            "on_foreign_process": "read_on_refusal",
            "task": {"burn": burn},
        });
        let mut child = node
            .validator()
            .args([
                "worker",
                "workload",
                "--assignment",
                &assignment.to_string(),
            ])
            .env("CUDA_VISIBLE_DEVICES", device)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the validator starts");
        // It reports its progress twice a second, and must not wait for a listener.
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        let lines = std::thread::spawn(move || stdout.lines().map_while(Result::ok).collect());
        Self { child, lines }
    }

    /// Lets it burn until `is_enough`, and returns its last report.
    fn until(mut self, mut is_enough: impl FnMut() -> bool) -> Value {
        let deadline = Instant::now() + Duration::from_mins(10);
        while !is_enough() {
            assert!(Instant::now() < deadline, "too slow to measure anything");
            let ended = self.child.try_wait().expect("it can be waited for");
            assert_eq!(ended, None, "it ended by itself: {:?}", self.lines.join());
            std::thread::sleep(Duration::from_millis(2));
        }
        signal(self.child.id(), "TERM");
        let status = self.child.wait().expect("it can be waited for");
        let lines = self.lines.join().expect("lines");
        assert!(status.success(), "{status}: {lines:?}");
        let mut runs = lines
            .iter()
            .rev()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter_map(|message| Some(message.get("field")?["value"].clone()));
        let run = runs.next().expect("it told of its run");
        assert_eq!(run["end"]["value"], "finished", "{run}");
        let precisions = &run["detail"]["burn"]["precisions"];
        assert_eq!(precisions.as_array().map(Vec::len), Some(1), "{run}");
        precisions[0].clone()
    }
}

fn number(products: &Value, name: &str) -> u64 {
    let value = products[name].as_u64();
    value.unwrap_or_else(|| panic!("no {name} in {products}"))
}

/// A node of one GPU with faults of wrong numbers, one after another.
struct Faulty {
    node: Node,
    kernel: &'static str,
    precision: &'static str,
}

impl Faulty {
    /// `steps`: from which launch of the GPU on (of all kernels), and the fault.
    fn new((kernel, node, precision): Kernel, steps: &[(u64, String)]) -> Self {
        let change = |fault: &str| format!("{{gpu.wrong_results: {fault}}}");
        let mut fault = format!(
            "description: wrong numbers\nchanges: {}\nharmless: a test of its own\ntrips: {{}}\nthen:\n",
            change(NEVER)
        );
        for (after, step) in steps {
            let changes = change(step);
            let _ = writeln!(fault, "- {{after: {after} launches, changes: {changes}}}");
        }
        if steps.is_empty() {
            fault += "- {at: 100000h}\n";
        }
        let scratch = crate::node::Scratch::new();
        let file = scratch.write("fault.yaml", fault);
        let faults = [file.to_str().expect("UTF-8")];
        Self {
            node: Node::with(node, &faults, &[]),
            kernel,
            precision,
        }
    }

    /// Products launched so far, those before the first sweep and those that are computed again
    /// among them.
    fn launches(&self) -> u64 {
        self.node.state().state().gpu(0).spoilable_launches()
    }

    fn wrong(&self) -> Vec<WrongResult> {
        wrong_results::read(self.node.folder()).expect("the simulator's record")
    }

    fn words_of_element(&self) -> u64 {
        if self.precision == "fp64" { 2 } else { 1 }
    }

    /// How many strips of the checksum are wrong.
    fn strips(&self, result: &WrongResult) -> u64 {
        let mut strips = std::collections::BTreeSet::new();
        for area in &result.areas {
            for row in (area.row..area.row + area.rows).map(|it| it / STRIP.0) {
                let words = area.column * self.words_of_element()
                    ..(area.column + area.columns) * self.words_of_element();
                strips.extend(words.map(|word| (row, word / STRIP.1)));
            }
        }
        strips.len() as u64
    }
}

/// Of the wrong elements that a worker names, each is in an area of its product, with the right
/// bits and multiprocessor.
fn check_examples(faulty: &Faulty, products: &Value, before_sweeps: u64) {
    let kernel = faulty.kernel;
    let wrong = faulty.wrong();
    let examples = products["examples"].as_array().expect("a list");
    assert!(!examples.is_empty(), "{kernel}: nothing is localised");
    let mut computed_again = std::collections::BTreeSet::new();
    for example in examples {
        let of = |name: &str| {
            example[name]
                .as_u64()
                .unwrap_or_else(|| panic!("{name}: {example}"))
        };
        let (row, column, product) = (of("row"), of("column"), of("product"));
        // Each strip that was looked into before was computed again, which is a launch, too.
        let strip = (
            product,
            row / STRIP.0,
            column * faulty.words_of_element() / STRIP.1,
        );
        let again_before = computed_again
            .iter()
            .filter(|(it, _, _)| *it < product)
            .count();
        computed_again.insert(strip);
        let launch = before_sweeps + product + again_before as u64;
        let result = wrong.iter().find(|it| it.launch == launch);
        let result = result
            .unwrap_or_else(|| panic!("{kernel}: launch {launch} was right, {example}, {wrong:?}"));
        assert_eq!(result.kernel, kernel);
        let holds = |area: &&WrongArea| {
            (area.row..area.row + area.rows).contains(&row)
                && (area.column..area.column + area.columns).contains(&column)
        };
        let area = result.areas.iter().find(holds);
        let area = area.unwrap_or_else(|| panic!("{kernel}: {example} is right, {result:?}"));
        let bits = |name: &str| {
            let text = example[name].as_str().expect("text");
            u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("hex")
        };
        let flipped = bits("expected") ^ bits("observed");
        if (row, column) == (area.row, area.column) {
            assert_eq!(
                flipped, area.flipped_bits,
                "{kernel}: {example}, {result:?}"
            );
        }
        assert_eq!(of("flipped_bits"), u64::from(flipped.count_ones()));
        let sm = area.sm.filter(|_| kernel.starts_with("gemm"));
        if let Some(sm) = sm {
            assert_eq!(
                example["sm"].as_u64(),
                Some(sm.into()),
                "{kernel}: {example}"
            );
        }
        assert_eq!(
            example["right_when_read_again"], false,
            "{kernel}: {example}"
        );
    }
}

/// Launches of products before the first sweep: sizes are tried, and two references made.
fn launches_before_sweeps(faulty: &Faulty, products: &Value) -> u64 {
    let strips = products["examples"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| {
            let of = |name: &str| it[name].as_u64().expect("a number");
            let word = of("column") * faulty.words_of_element();
            (of("product"), of("row") / STRIP.0, word / STRIP.1)
        });
    let computed_again = strips.collect::<std::collections::BTreeSet<_>>().len() as u64;
    faulty.launches() - number(products, "products") - computed_again
}

/// Spoils results in each of `kinds`, one after another, and compares what the worker found with
/// what was spoiled.
fn is_found(kernel: Kernel, kinds: &[&str], memory: u64) {
    // Launches from one kind to the next: more than are under way at a time.
    const PERIOD: u64 = 64;
    let steps: Vec<(u64, String)> = (1..)
        .zip(kinds)
        .map(|(number, kind)| {
            let fault = format!("{{{kind}, first_launch: 0, every_launches: 25}}");
            (64 + number * PERIOD, fault)
        })
        .collect();
    let faulty = Faulty::new(kernel, &steps);
    let last = steps.last().expect("a kind").0 + PERIOD;
    let worker = Worker::start(&faulty, memory);
    let state = faulty.node.state();
    let products = worker.until(|| state.state().gpu(0).launches() > last);
    let wrong = faulty.wrong();
    assert!(wrong.len() >= kinds.len(), "{}: {wrong:?}", faulty.kernel);
    let expected: u64 = wrong.iter().map(|it| faulty.strips(it)).sum();
    let found = number(&products, "mismatches");
    assert_eq!(found, expected, "{}: {wrong:?}, {products}", faulty.kernel);
    assert_eq!(
        number(&products, "products_verified"),
        number(&products, "products"),
        "{}",
        faulty.kernel
    );
    check_examples(
        &faulty,
        &products,
        launches_before_sweeps(&faulty, &products),
    );
}

#[test]
fn single_wrong_elements_are_found_in_every_kernel() {
    let kinds = [
        "kind: bit",
        "kind: element",
        "kind: nan",
        "kind: infinity",
        "kind: same-every-time",
        "kind: two-rows",
    ];
    in_two_threads(&KERNELS, |kernel| is_found(kernel, &kinds, SMALL));
}

#[test]
fn wrong_rows_tiles_and_multiprocessors_are_found_in_every_kernel() {
    let kinds = ["kind: row", "kind: tile", "kind: element, sm: 1"];
    let cases: Vec<_> = (0..)
        .zip(KERNELS)
        .map(|(index, kernel)| (kernel, kinds[index % 3]))
        .collect();
    in_two_threads(&cases, |(kernel, kind)| is_found(kernel, &[kind], MEDIUM));
}

/// cuBLASLt's tiles and multiprocessors are its own, so that elements are named and the
/// multiprocessor is not.
#[test]
fn wrong_numbers_of_cublaslt_are_found() {
    let kinds = [
        "kind: bit",
        "kind: element",
        "kind: nan",
        "kind: infinity",
        "kind: same-every-time",
        "kind: two-rows",
        "kind: row",
        "kind: tile",
    ];
    in_two_threads(&OF_CUBLASLT, |kernel| is_found(kernel, &kinds, SMALL));
}

/// Each bit of each corner of each tile, one a product.
#[test]
fn every_bit_of_every_corner_of_a_tile_is_found() {
    in_two_threads(&KERNELS, |kernel| {
        // The first wrong products are looked into and computed again, which are launches, too;
        // later ones are counted.
        let first = "{kind: bit, first_launch: 0, every_launches: 12}";
        let corners = "{place: tile-corners, first_launch: 320, every_launches: 1}";
        let steps = [(64, first.to_owned()), (320, corners.to_owned())];
        let faulty = Faulty::new(kernel, &steps);
        let worker = Worker::start(&faulty, SMALL);
        // Tiles are of 64 x 64 elements at least.
        let (bits, tiles) = match (faulty.kernel, faulty.precision) {
            ("gemm_sm70_f64", _) => (64, 16),
            ("gemm_sm80_f64", _) => (64, 8),
            (_, "fp64") => (64, 4),
            ("gemm_sm70_f32" | "gemm_sm70_bf16" | "gemm_sm70_f16" | "gemm_sm70_s8", _) => (32, 4),
            _ => (32, 2),
        };
        let launches = 330 + 4 * bits * tiles;
        let products = worker.until(|| faulty.launches() > launches);
        let wrong = faulty.wrong();
        let corners = wrong.iter().filter(|it| it.launch >= 320);
        let places: std::collections::BTreeSet<_> = corners
            .map(|it| {
                let area = it.areas[0];
                (area.row, area.column, area.flipped_bits)
            })
            .collect();
        assert!(
            places.len() as u64 >= 4 * bits * tiles,
            "{}: {} places",
            faulty.kernel,
            places.len()
        );
        let found = number(&products, "mismatches");
        assert_eq!(found, wrong.len() as u64, "{}", faulty.kernel);
    });
}

/// Burns healthy GPUs for so many sweeps over their memory.
fn nothing_is_found_in(sweeps: u64, kernels: &[Kernel]) {
    in_two_threads(kernels, |kernel| {
        let faulty = Faulty::new(kernel, &[]);
        let started = Instant::now();
        // As few results as there can be, of 256 x 256 elements of a word or two; a sweep goes over
        // all of them.
        let memory = faulty.words_of_element() * (1536 << 10);
        let worker = Worker::start(&faulty, memory);
        let result = 256 * 256 * 4 * faulty.words_of_element();
        // Operands take 64 KiB each, and the reference is a result.
        let results = (memory - 2 * (64 << 10) - result) / result;
        let products = worker.until(|| faulty.launches() > sweeps * results + 64);
        for (name, expected) in [("mismatches", 0), ("nonfinite", 0), ("m", 256)] {
            assert_eq!(
                number(&products, name),
                expected,
                "{}: {products}",
                faulty.kernel
            );
        }
        let verified = number(&products, "products_verified");
        assert_eq!(verified, number(&products, "products"));
        assert!(verified >= sweeps * results);
        let reference = &products["reference"];
        assert_eq!(reference["exact_mismatches"], 0, "{}", faulty.kernel);
        println!(
            "{}: {verified} products in {sweeps} sweeps and nothing wrong, {:.1} s",
            faulty.kernel,
            started.elapsed().as_secs_f64()
        );
    });
}

#[test]
fn a_healthy_gpu_is_not_accused() {
    nothing_is_found_in(20, &KERNELS);
}

#[test]
#[ignore = "takes minutes: cargo test -p it -- --ignored --nocapture ten_thousand_sweeps"]
fn a_healthy_gpu_is_not_accused_in_ten_thousand_sweeps() {
    // Minutes a kernel: some can be named, by parts of their names with commas between.
    let named = std::env::var("GEMM_KERNELS").unwrap_or_default();
    let is_named = |kernel: &&Kernel| named.split(',').any(|part| kernel.0.contains(part));
    let kernels: Vec<Kernel> = KERNELS.iter().filter(is_named).copied().collect();
    assert!(!kernels.is_empty(), "no kernel has `{named}` in its name");
    nothing_is_found_in(10_000, &kernels);
}

/// A worker waits for its GPU as much as it computes.
fn in_two_threads<T: Copy + Sync>(cases: &[T], run: impl Fn(T) + Sync) {
    let half = cases.len().div_ceil(2);
    std::thread::scope(|scope| {
        for some in cases.chunks(half) {
            scope.spawn(|| some.iter().for_each(|case| run(*case)));
        }
    });
}
