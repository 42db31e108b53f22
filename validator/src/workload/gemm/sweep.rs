//! Products of one precision, one after another over all of the memory, each verified in every
//! element.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::intervals::{INTERVAL_S, Interval};
use super::kernels::{Gemm, Operands, Support};
use super::localize::{EXAMPLES_MAXIMUM, Localizer};
use super::operand::{OperandMode, OperandType, operand_bits};
use super::operand_proof::{OperandChecksums, operand_checksums};
use super::proof::{self, HOST_ROWS, SampledRows};
use super::report::{self, Counts, HEADER_WORDS};
use super::shape::{K_MAXIMUM, LADDER, Layout, Shape};
use crate::cuda::{Context, CudaFailure, DeviceMemory, Event, HostWords};
use crate::probe::PowerMeter;
use crate::threads::spawn_scoped_or_defer;
use crate::worker::suspension::SuspensionWatch;
use validator_core::facts::{PrecisionRun, ReferenceProof};

type CudaResult<T> = Result<T, CudaFailure>;

/// A product that takes longer is as large as it gets: the next one takes eight times as long or
/// more, and a burn must stop within a second.
const PRODUCT_TO_GROW_S: f64 = 0.01;
/// Launched at a time; two of these are under way, so that the GPU never waits for the host.
const BATCH_S: f64 = 0.1;
/// Products of the first batch of a trial.
const TRIAL_BATCH: u64 = 16;
/// Batches with wrong results that are looked into; of a GPU that computes nothing right, counting
/// is enough.
const LOCALIZATIONS_MAXIMUM: u32 = 16;
/// How long after a change of engines a power is still the other's, in part: NVIDIA's instantaneous
/// reading is renewed every tenth of a second.
// Source: BENCHMARKS.md, power readings of an H200.
const POWER_SETTLES: Duration = Duration::from_millis(100);
/// Fewer readings have no mean worth the name; this project's choice.
const POWER_READINGS_MINIMUM: u32 = 3;
/// Added to the seed for the places of injected faults.
const SEED_OF_FAULTS: u64 = 0xD1B5_4A32_D192_ED03;

/// One GPU, ready to burn.
pub(crate) struct BurningGpu<'x, 'm, 'c, 'a> {
    pub(crate) context: &'c Context<'a>,
    pub(crate) support: &'x Support<'m, 'c, 'a>,
    pub(crate) arena: &'x DeviceMemory<'c, 'a>,
    /// Set when the burn shall end.
    pub(crate) stop: &'x AtomicBool,
}

impl BurningGpu<'_, '_, '_, '_> {
    pub(crate) fn shall_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// The request for the products of one precision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sweeps {
    pub(crate) duration: Duration,
    pub(crate) seed: u64,
    /// Bits to flip on purpose.
    pub(crate) inject: u32,
}

/// Reports of the burn while it runs.
pub(crate) struct Moment<'r> {
    /// Since the first product was launched, less what is below.
    pub(crate) elapsed: Duration,
    /// How long this process stood still meanwhile, with nothing for the GPU to do.
    pub(crate) stood_still: Duration,
    pub(crate) run: &'r PrecisionRun,
    /// Of the arena, written and read back so far.
    pub(crate) memory_used_bytes: u64,
    pub(crate) injected: u64,
    /// Injected faults that were found at their element and bit.
    pub(crate) injected_found: u64,
    /// Half a second passed since the last one that was, or the products ended.
    pub(crate) is_due: bool,
    /// The products ended; what is left is the host's to compute.
    pub(crate) is_last: bool,
}

/// Listens to the burn after every batch; `false` stops it.
pub(crate) type Listener<'l> = dyn FnMut(Moment<'_>) -> bool + 'l;

/// The largest product that the memory holds and the GPU computes quickly, and how long it takes,
/// in seconds.
pub(crate) fn choose_layout(
    gpu: &BurningGpu<'_, '_, '_, '_>,
    gemm: &Gemm<'_, '_, '_>,
) -> CudaResult<Option<(Layout, f64)>> {
    let (begin, end) = (gpu.context.event()?, gpu.context.event()?);
    let mut chosen = None;
    for (side, k_bytes) in LADDER {
        let shape = Shape {
            operand: gemm.operand,
            side,
            k_bytes,
        };
        if shape.k() > K_MAXIMUM || (chosen.is_some() && gpu.shall_stop()) {
            break;
        }
        let Some(layout) = Layout::new(shape, gpu.arena.bytes()) else {
            break;
        };
        let Some(operands) = gemm.operands(gpu.context, gpu.arena, &layout)? else {
            continue;
        };
        let mut product_s = f64::INFINITY;
        // The first launch of a kernel also loads it.
        for _ in 0..2 {
            begin.record()?;
            let place = (layout.reference, None);
            gemm.multiply(&operands, gpu.arena.address(), &layout, place, None)?;
            end.record()?;
            end.wait()?;
            product_s = product_s.min(end.seconds_since(&begin)?);
            if product_s < PRODUCT_TO_GROW_S {
                break;
            }
        }
        chosen = Some((layout, product_s));
        if product_s >= PRODUCT_TO_GROW_S {
            break;
        }
    }
    Ok(chosen)
}

/// What an engine reached while it was tried.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Trial {
    operations: f64,
    seconds: f64,
    /// Sum of the powers that were read under load, in watts, and how many they were.
    power_sum_w: f64,
    /// Sum of their squares.
    power_squares: f64,
    pub(crate) power_readings: u32,
}

impl Trial {
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            operations: self.operations + other.operations,
            seconds: self.seconds + other.seconds,
            power_sum_w: self.power_sum_w + other.power_sum_w,
            power_squares: self.power_squares + other.power_squares,
            power_readings: self.power_readings + other.power_readings,
        }
    }

    fn note_power(&mut self, watts: f64) {
        self.power_sum_w += watts;
        self.power_squares += watts * watts;
        self.power_readings += 1;
    }

    pub(crate) fn tflops(&self) -> f64 {
        self.operations / self.seconds.max(1e-9) / 1e12
    }

    /// The mean; `None` where it was not read often enough.
    pub(crate) fn power_w(&self) -> Option<f64> {
        let enough = self.power_readings >= POWER_READINGS_MINIMUM;
        enough.then(|| self.power_sum_w / f64::from(self.power_readings))
    }

    /// How far the mean may lie from what longer reading would give, in watts: its standard error,
    /// from how the readings vary.
    pub(crate) fn power_error_w(&self) -> f64 {
        let number = f64::from(self.power_readings).max(2.0);
        let of_squares = self.power_squares - self.power_sum_w * self.power_sum_w / number;
        (of_squares.max(0.0) / (number - 1.0) / number).sqrt()
    }
}

/// Multiplies random operands for `duration` without looking at results, and reads the power under
/// way. `None` where products of this size cannot be computed.
pub(crate) fn try_out(
    gpu: &BurningGpu<'_, '_, '_, '_>,
    gemm: &Gemm<'_, '_, '_>,
    (layout, product_s): &(Layout, f64),
    (seed, duration): (u64, Duration),
    power: &PowerMeter<'_>,
) -> CudaResult<Option<Trial>> {
    let Some(operands) = gemm.operands(gpu.context, gpu.arena, layout)? else {
        return Ok(None);
    };
    generate_operands(gpu, gemm, layout, (OperandMode::Random, seed))?;
    let end = gpu.context.event()?;
    end.record()?;
    end.wait()?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a number of products"
    )]
    let most = ((BATCH_S / product_s.max(1e-6)) as u64).clamp(1, layout.results_count);
    // Launching may take longer than multiplying, so that batches grow only while the host keeps
    // up.
    let mut batch = most.min(TRIAL_BATCH);
    let mut number = 0;
    let started = Instant::now();
    let mut trial = Trial::default();
    while number == 0 || (started.elapsed() < duration && !gpu.shall_stop()) {
        let launched = Instant::now();
        for _ in 0..batch {
            let place = (layout.result(number), None);
            gemm.multiply(&operands, gpu.arena.address(), layout, place, None)?;
            number += 1;
        }
        if launched.elapsed().as_secs_f64() < BATCH_S / 2.0 {
            batch = most.min(batch * 2);
        }
        end.record()?;
        if started.elapsed() >= POWER_SETTLES
            && let Some(watts) = power.watts()
        {
            trial.note_power(watts);
        }
        end.wait()?;
    }
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let operations = layout.shape.operations() * number as f64;
    Ok(Some(Trial {
        operations,
        seconds: started.elapsed().as_secs_f64(),
        ..trial
    }))
}

#[cfg(test)]
impl Trial {
    /// One that reached this rate, with these readings of its power.
    pub(crate) fn of(tflops: f64, powers_w: &[f64]) -> Self {
        let mut trial = Self {
            operations: tflops * 1e12,
            seconds: 1.0,
            ..Self::default()
        };
        for watts in powers_w {
            trial.note_power(*watts);
        }
        trial
    }
}

/// Multiplies by `gemm` for the requested time, and writes results into `run` as it goes. `second`
/// multiplies exact operands once, too.
pub(crate) fn run(
    gpu: &BurningGpu<'_, '_, '_, '_>,
    (gemm, second): (&Gemm<'_, '_, '_>, Option<&Gemm<'_, '_, '_>>),
    (layout, product_s): (Layout, f64),
    asked: Sweeps,
    run: &mut PrecisionRun,
    listener: &mut Listener<'_>,
) -> CudaResult<()> {
    let Some(operands) = gemm.operands(gpu.context, gpu.arena, &layout)? else {
        return Ok(());
    };
    (run.m, run.n, run.k) = (layout.shape.side, layout.shape.side, layout.shape.k());
    let engines = (gemm, second);
    let (exact, random) = establish_reference(gpu, engines, &layout, &operands, asked.seed, run)?;
    let stop = AtomicBool::new(false);
    let elements = exact.rows.elements();
    std::thread::scope(|scope| {
        // The host computes its rows while the GPU burns.
        let host = spawn_scoped_or_defer(scope, || {
            let rows = (exact.rows.compare(&stop), random.rows.compare(&stop));
            let of_exact = exact.operands.compare(&stop);
            (rows, of_exact, random.operands.compare(&stop))
        });
        let swept = Sweeper::new(gpu, gemm, &layout, &operands, product_s, asked)
            .and_then(|mut sweeper| sweeper.sweep(run, listener));
        // A stopped run does not wait for the host's rows; one that went its time does.
        if !matches!(swept, Ok(true)) {
            stop.store(true, Ordering::Relaxed);
        }
        if let Ok(((rows_of_exact, rows_of_random), of_exact, of_random)) = host.join() {
            let proof = &mut run.reference;
            let compared = of_exact.strips + of_random.strips;
            let all = exact.operands.strips() + random.operands.strips();
            proof.operand_blocks = Some(if compared == all { compared } else { 0 });
            proof.operand_mismatches = of_exact.mismatches + of_random.mismatches;
            let (exact, random) = (rows_of_exact, rows_of_random);
            if exact.elements == elements {
                proof.exact_rows = u32::try_from(HOST_ROWS).unwrap_or_default();
            }
            proof.exact_mismatches += exact.mismatches;
            proof.sampled_elements = random.elements;
            proof.sampled_worst = random.worst;
        }
        swept.map(|_| ())
    })
}

/// What the host compares while the GPU burns: rows of a reference, and the operands that it was
/// made of.
struct Established {
    rows: SampledRows,
    operands: OperandChecksums,
}

/// Makes the reference and proves it: first with exact operands, which the second engine
/// multiplies, too, then with the random ones that are used from then on.
fn establish_reference(
    gpu: &BurningGpu<'_, '_, '_, '_>,
    (gemm, second): (&Gemm<'_, '_, '_>, Option<&Gemm<'_, '_, '_>>),
    layout: &Layout,
    operands: &Operands,
    seed: u64,
    run: &mut PrecisionRun,
) -> CudaResult<(Established, Established)> {
    let mut proof = ReferenceProof::default();
    let (exact, checksums) =
        multiply_once(gpu, gemm, layout, operands, (OperandMode::Exact, seed))?;
    proof.exact_checksum = proof::checksum_text(&checksums);
    proof.exact_mismatches += u64::from(!is_right(gpu, layout, layout.reference, seed)?);
    if let Some(second) = second {
        compare_engines(gpu, second, layout, seed, &mut proof)?;
    }
    let (random, checksums) =
        multiply_once(gpu, gemm, layout, operands, (OperandMode::Random, seed))?;
    for vector in 1..=proof::FREIVALDS_VECTORS {
        let seed = seed.wrapping_add(u64::from(vector));
        let reference = (layout, layout.reference);
        let worst = proof::freivalds(gpu.support, gpu.arena, reference, OperandMode::Random, seed)?;
        proof.freivalds_worst = proof.freivalds_worst.max(worst);
        proof.freivalds_vectors = vector;
    }
    proof.checksum = proof::checksum_text(&checksums);
    if !random.rows.checksums_agree(&checksums) {
        // A checksum that the host cannot confirm proves nothing; it counts as a wrong reference.
        proof.exact_mismatches += 1;
    }
    let mut nonfinite = [0; 8];
    gpu.arena.read(layout.nonfinite, &mut nonfinite)?;
    run.nonfinite += u64::from_le_bytes(nonfinite);
    run.reference = proof;
    Ok((exact, random))
}

/// Freivalds' check of a product of exact operands, which allows no difference.
fn is_right(
    gpu: &BurningGpu<'_, '_, '_, '_>,
    layout: &Layout,
    result: u64,
    seed: u64,
) -> CudaResult<bool> {
    let product = (layout, result);
    let worst = proof::freivalds(gpu.support, gpu.arena, product, OperandMode::Exact, seed)?;
    Ok(worst <= 1.0)
}

/// Has the second engine multiply the same exact operands: its product must have the reference's
/// bits.
fn compare_engines(
    gpu: &BurningGpu<'_, '_, '_, '_>,
    second: &Gemm<'_, '_, '_>,
    layout: &Layout,
    seed: u64,
    proof: &mut ReferenceProof,
) -> CudaResult<()> {
    let Some(operands) = second.operands(gpu.context, gpu.arena, layout)? else {
        return Ok(());
    };
    // No product of the sweeps is there yet.
    let result = layout.result(0);
    let arena = gpu.arena.address();
    second.multiply(&operands, arena, layout, (result, None), None)?;
    report::clear(gpu.arena, layout.strip_report)?;
    gpu.support.compare_all(arena, layout, result)?;
    let counts = report::read(gpu.arena, layout.strip_report)?.counts;
    let side = u64::from(layout.shape.side);
    // What was not compared counts as different.
    let unseen = (side * side).saturating_sub(counts.checked);
    proof.second_engine_mismatches = Some(counts.mismatches + unseen);
    proof.second_engine_is_right = Some(is_right(gpu, layout, result, seed)?);
    Ok(())
}

/// Both operands, by the seed.
fn generate_operands(
    gpu: &BurningGpu<'_, '_, '_, '_>,
    gemm: &Gemm<'_, '_, '_>,
    layout: &Layout,
    (mode, seed): (OperandMode, u64),
) -> CudaResult<()> {
    let elements = layout.shape.operand_elements();
    for (offset, seed) in [(layout.a, seed), (layout.b, proof::seed_of_b(seed))] {
        let address = gpu.arena.address() + offset;
        gpu.support
            .generate(address, elements, seed, gemm.operand, mode)?;
    }
    Ok(())
}

/// One product into the reference, with its checksums. NaNs are counted for this product alone.
fn multiply_once(
    gpu: &BurningGpu<'_, '_, '_, '_>,
    gemm: &Gemm<'_, '_, '_>,
    layout: &Layout,
    operands: &Operands,
    (mode, seed): (OperandMode, u64),
) -> CudaResult<(Established, Vec<u64>)> {
    let arena = gpu.arena.address();
    generate_operands(gpu, gemm, layout, (mode, seed))?;
    gpu.arena.write(layout.nonfinite, &[0; 8])?;
    let place = (layout.reference, None);
    gemm.multiply(operands, arena, layout, place, None)?;
    gpu.support
        .write_checksums(arena, layout, layout.reference)?;
    let mut bytes = vec![0; usize::try_from(layout.shape.strips() * 8).unwrap_or_default()];
    gpu.arena.read(layout.checksums, &mut bytes)?;
    let words = bytes.as_chunks::<8>().0;
    let checksums = words.iter().map(|it| u64::from_le_bytes(*it)).collect();
    let established = Established {
        rows: proof::sample_rows(gpu.arena, layout, mode, seed)?,
        operands: operand_checksums(gpu.support, gpu.arena, layout, (mode, seed))?,
    };
    Ok((established, checksums))
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn tflops(operations: f64, products: u64, seconds: f64) -> f64 {
    if seconds <= 0.0 {
        return 0.0;
    }
    operations * products as f64 / seconds / 1e12
}

/// The time of a burn, which stands still while this process does: the GPU has nothing to do then,
/// and the request is for that much work.
struct BurnClock {
    begun: Instant,
    watch: SuspensionWatch,
}

impl BurnClock {
    fn start() -> Self {
        Self {
            begun: Instant::now(),
            watch: SuspensionWatch::start(),
        }
    }

    fn elapsed(&self) -> Duration {
        self.begun
            .elapsed()
            .saturating_sub(self.watch.stood_still())
    }
}

/// A batch of products under way.
struct Batch {
    products: u64,
    /// Which of the two pairs of events, and of the two copies of the header.
    slot: usize,
}

struct Sweeper<'x, 'm, 'c, 'a> {
    gpu: &'x BurningGpu<'x, 'm, 'c, 'a>,
    gemm: &'x Gemm<'m, 'c, 'a>,
    layout: &'x Layout,
    operands: &'x Operands,
    asked: Sweeps,
    batch_products: u64,
    events: [(Event<'c, 'a>, Event<'c, 'a>); 2],
    headers: HostWords<'c, 'a>,
    /// Products launched.
    launched: u64,
    /// The first product that a record can be of.
    first_unreported: u64,
    /// Counts before the report was cleared last.
    counted: Counts,
    /// Product, row, column and bits of the faults that were injected.
    injected: BTreeSet<(u64, u32, u32, u64)>,
    injected_found: u64,
    localizations: u32,
    /// What goes into the rates over time.
    interval: Interval,
}

impl<'x, 'm, 'c, 'a> Sweeper<'x, 'm, 'c, 'a> {
    fn new(
        gpu: &'x BurningGpu<'x, 'm, 'c, 'a>,
        gemm: &'x Gemm<'m, 'c, 'a>,
        layout: &'x Layout,
        operands: &'x Operands,
        product_s: f64,
        asked: Sweeps,
    ) -> CudaResult<Self> {
        report::clear(gpu.arena, layout.report)?;
        let event = || gpu.context.event();
        // Both batches and the product before them stay in memory until they were looked at.
        let most = (layout.results_count - 2) / 2;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of products"
        )]
        let wanted = (BATCH_S / product_s.max(1e-6)) as u64;
        Ok(Self {
            gpu,
            gemm,
            layout,
            operands,
            asked,
            batch_products: wanted.clamp(1, most),
            events: [(event()?, event()?), (event()?, event()?)],
            headers: gpu.context.host_words(2 * HEADER_WORDS)?,
            launched: 0,
            first_unreported: 0,
            counted: Counts::default(),
            injected: BTreeSet::new(),
            injected_found: 0,
            localizations: 0,
            interval: Interval::first(),
        })
    }

    /// Multiplies until the time is over (`true`) or the listener stops it (`false`).
    fn sweep(&mut self, run: &mut PrecisionRun, listener: &mut Listener<'_>) -> CudaResult<bool> {
        let clock = BurnClock::start();
        let mut under_way: VecDeque<Batch> = VecDeque::new();
        let mut told = None;
        let mut slot = 0;
        let mut go_on = !self.gpu.shall_stop();
        loop {
            let more = go_on && clock.elapsed() < self.asked.duration;
            while more && under_way.len() < 2 {
                under_way.push_back(self.launch_batch(slot)?);
                slot = 1 - slot;
            }
            let Some(batch) = under_way.pop_front() else {
                break;
            };
            let seen = self.finish_batch(&batch, run)?;
            if seen.mismatches > self.counted_mismatches() {
                // What follows is under way already; it ends before anything is looked at.
                while let Some(batch) = under_way.pop_front() {
                    self.finish_batch(&batch, run)?;
                }
                self.look_into_mismatches(run)?;
            }
            let due = told.is_none_or(|it: Instant| it.elapsed().as_secs_f64() >= INTERVAL_S);
            if due {
                told = Some(Instant::now());
            }
            go_on &= listener(Moment {
                is_due: due || !more,
                ..self.moment(run, &clock)
            });
        }
        self.verify_last(run)?;
        let last = self.moment(run, &clock);
        listener(Moment {
            is_due: true,
            is_last: true,
            ..last
        });
        Ok(go_on)
    }

    fn moment<'r>(&self, run: &'r PrecisionRun, clock: &BurnClock) -> Moment<'r> {
        Moment {
            elapsed: clock.elapsed(),
            stood_still: clock.watch.stood_still(),
            run,
            memory_used_bytes: self.layout.bytes_in_use(run.products_verified),
            injected: self.injected.len() as u64,
            injected_found: self.injected_found,
            is_due: false,
            is_last: false,
        }
    }

    fn launch_batch(&mut self, slot: usize) -> CudaResult<Batch> {
        self.events[slot].0.record()?;
        for _ in 0..self.batch_products {
            self.launch_product()?;
        }
        self.headers.copy_later(
            slot * HEADER_WORDS,
            HEADER_WORDS,
            self.gpu.arena,
            self.layout.report,
        )?;
        self.events[slot].1.record()?;
        Ok(Batch {
            products: self.batch_products,
            slot,
        })
    }

    fn launch_product(&mut self) -> CudaResult<()> {
        let product = self.launched;
        let arena = self.gpu.arena.address();
        let place = (self.layout.result(product), Some(self.layout.map(product)));
        let before = product.checked_sub(1).filter(|_| self.gemm.verifies());
        // Without poison, a launch that succeeds and writes nothing leaves the right result of the
        // round before.
        self.gpu.arena.set_words(
            self.layout.poison(product),
            Layout::POISON_PITCH_BYTES,
            self.layout.poisoned_words(),
            self.layout.shape.poison_word(),
        )?;
        self.gemm
            .multiply(self.operands, arena, self.layout, place, before)?;
        self.launched += 1;
        // The first product is left alone, so that it is seen that a healthy one is healthy.
        if (1..=u64::from(self.asked.inject)).contains(&product) {
            self.inject(product)?;
        }
        if !self.gemm.verifies() {
            self.gpu
                .support
                .verify(arena, self.layout, product, self.layout.report)?;
        }
        Ok(())
    }

    /// Flips one bit of a result, between product and check.
    fn inject(&mut self, product: u64) -> CudaResult<()> {
        let shape = self.layout.shape;
        let random = operand_bits(
            OperandType::F64,
            OperandMode::Random,
            self.asked.seed ^ SEED_OF_FAULTS,
            product,
        );
        let words = shape.result_bytes() / 4;
        let word = (random >> 5) % words;
        let bit = u32::try_from(random & 31).unwrap_or_default();
        let address = self.gpu.arena.address() + self.layout.result(product) + 4 * word;
        self.gpu.support.flip(address, bit)?;
        let row_words = u64::from(shape.row_words());
        let of_element = u64::from(shape.words_per_element());
        let in_element = (word % of_element) * 32 + u64::from(bit);
        let place = |it: u64| u32::try_from(it).unwrap_or(u32::MAX);
        self.injected.insert((
            product,
            place(word / row_words),
            place(word % row_words / of_element),
            1 << in_element,
        ));
        Ok(())
    }

    /// Waits for a batch and adds its results to `run`. Returns all counts so far.
    fn finish_batch(&mut self, batch: &Batch, run: &mut PrecisionRun) -> CudaResult<Counts> {
        let (begin, end) = &self.events[batch.slot];
        end.wait()?;
        let seconds = end.seconds_since(begin)?;
        let word = |index| self.headers.word(batch.slot * HEADER_WORDS + index);
        let counts = self.counted
            + Counts {
                checked: word(0),
                mismatches: word(1),
                nonfinite: word(2),
            };
        let operations = self.layout.shape.operations();
        run.products += batch.products;
        run.gpu_time_s += seconds;
        run.tflops = tflops(operations, run.products, run.gpu_time_s);
        let batch = (batch.products, seconds);
        self.interval
            .add(batch, &mut run.tflops_intervals, |products, seconds| {
                tflops(operations, products, seconds)
            });
        self.count(counts, run);
        Ok(counts)
    }

    fn counted_mismatches(&self) -> u64 {
        self.counted.mismatches
    }

    fn count(&self, counts: Counts, run: &mut PrecisionRun) {
        run.products_verified = counts.checked / self.layout.shape.strips();
        run.mismatches = counts.mismatches;
    }

    /// Reads the whole report, finds its elements, and clears it. Nothing is under way.
    fn look_into_mismatches(&mut self, run: &mut PrecisionRun) -> CudaResult<()> {
        let seen = report::read(self.gpu.arena, self.layout.report)?;
        report::clear(self.gpu.arena, self.layout.report)?;
        self.counted = self.counted + seen.counts;
        self.count(self.counted, run);
        // A verifying kernel looks at the product before its own, which may be of the batch before.
        let first = self.first_unreported.saturating_sub(1);
        self.first_unreported = self.launched;
        self.localizations += 1;
        let all = self.asked.inject > 0;
        if self.localizations > LOCALIZATIONS_MAXIMUM && !all {
            run.nonfinite += seen.counts.nonfinite;
            return Ok(());
        }
        let localizer = Localizer {
            support: self.gpu.support,
            gemm: self.gemm,
            operands: self.operands,
            arena: self.gpu.arena,
            layout: self.layout,
        };
        let wanted = EXAMPLES_MAXIMUM - run.examples.len();
        let found = localizer.look(&seen.records, first, wanted)?;
        run.nonfinite += found.nonfinite;
        run.examples.extend(found.examples);
        let at_their_place = found
            .elements
            .iter()
            .filter(|it| self.injected.contains(*it));
        self.injected_found += at_their_place.count() as u64;
        Ok(())
    }

    /// The last product has no next one that would verify it.
    fn verify_last(&mut self, run: &mut PrecisionRun) -> CudaResult<()> {
        if let Some(last) = self
            .launched
            .checked_sub(1)
            .filter(|_| self.gemm.verifies())
        {
            let arena = self.gpu.arena.address();
            self.gpu
                .support
                .verify(arena, self.layout, last, self.layout.report)?;
        }
        let seen = report::read(self.gpu.arena, self.layout.report)?;
        let counts = self.counted + seen.counts;
        self.count(counts, run);
        if counts.mismatches > self.counted.mismatches {
            self.look_into_mismatches(run)?;
        }
        Ok(())
    }
}
