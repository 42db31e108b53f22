//! Products of one precision, one after another over all of the memory, each verified in every
//! element: a state machine that its caller steps.

use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::intervals::Interval;
use super::kernels::Gemm;
use super::localize::{EXAMPLES_MAXIMUM, Localizer};
use super::operand::{OperandMode, OperandType, operand_bits};
use super::product::{GemmGpu, Product};
use super::reference::{Establishing, HostComparison};
use super::report::{self, Counts, HEADER_WORDS};
use super::shape::Layout;
use super::sizing::Pace;
use crate::cuda::{CudaFailure, Event, HostWords};
use crate::worker::suspension::SuspensionWatch;
use validator_core::facts::PrecisionRun;

type CudaResult<T> = Result<T, CudaFailure>;

/// Batches under way, so that the GPU never waits for the host.
const BATCHES: usize = 2;
/// Batches with wrong results that are looked into; of a GPU that computes nothing right, counting
/// is enough.
const LOCALIZATIONS_MAXIMUM: u32 = 16;
/// Poll interval for the end of the host's comparison.
const HOST_POLL: Duration = Duration::from_millis(2);
/// Added to the seed for the places of injected faults.
const SEED_OF_FAULTS: u64 = 0xD1B5_4A32_D192_ED03;

/// The request for the products of one precision.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sweeps {
    pub(crate) duration: Duration,
    pub(crate) seed: u64,
    /// Bits to flip on purpose.
    pub(crate) inject: u32,
    pub(crate) pace: Pace,
}

/// The stage of the products after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The reference is being proved.
    Proving,
    /// A batch of products ended, or none was left.
    Sweeping,
    /// The last product is verified; what is left is the host's to compute.
    Swept,
    Done,
}

/// What is known of the products while they run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    /// Since the first product was launched, less what is below.
    pub(crate) elapsed: Duration,
    /// How long this process stood still meanwhile, with nothing for the GPU to do.
    pub(crate) stood_still: Duration,
    /// Of the arena, written and read back so far.
    pub(crate) memory_used_bytes: u64,
    pub(crate) injected: u64,
    /// Injected faults that were found at their element and bit.
    pub(crate) injected_found: u64,
}

/// The products of one precision, from the proof of their reference to the last of them.
pub(crate) struct Sweep<'c, 'a> {
    stage: Stage<'c, 'a>,
    asked: Sweeps,
    product_s: f64,
}

enum Stage<'c, 'a> {
    Proving(Product<'c, 'a>, Box<Establishing<'c, 'a>>),
    Sweeping(Box<Sweeper<'c, 'a>>, HostComparison),
    Swept(Box<Sweeper<'c, 'a>>, HostComparison),
    Done,
}

impl<'c, 'a> Sweep<'c, 'a> {
    /// Multiplies by `gemm` for the requested time; `second` multiplies exact operands once, too.
    /// `None` where products of this size cannot be computed.
    pub(crate) fn new(
        gpu: &Rc<GemmGpu<'c, 'a>>,
        (gemm, second): (Rc<Gemm<'c, 'a>>, Option<Rc<Gemm<'c, 'a>>>),
        (layout, product_s): (Layout, f64),
        asked: Sweeps,
        run: &mut PrecisionRun,
    ) -> CudaResult<Option<Self>> {
        let Some(operands) = gemm.operands(gpu.context, &gpu.arena, &layout)? else {
            return Ok(None);
        };
        (run.m, run.n, run.k) = (layout.shape.side, layout.shape.side, layout.shape.k());
        let product = Product {
            gpu: Rc::clone(gpu),
            gemm,
            layout,
            operands,
        };
        let establishing = Box::new(Establishing::new(second, asked.seed));
        Ok(Some(Self {
            stage: Stage::Proving(product, establishing),
            asked,
            product_s,
        }))
    }

    /// A part of the proof, or a batch of products; results are written into `run`. Where the GPU
    /// shall stop, what is under way is awaited and verified, and the products end.
    pub(crate) fn step(&mut self, run: &mut PrecisionRun) -> CudaResult<Progress> {
        match std::mem::replace(&mut self.stage, Stage::Done) {
            Stage::Proving(product, establishing) => self.prove(product, establishing, run),
            Stage::Sweeping(mut sweeper, host) => match sweeper.step(run) {
                Ok(true) => {
                    self.stage = Stage::Sweeping(sweeper, host);
                    Ok(Progress::Sweeping)
                }
                Ok(false) => {
                    self.stage = Stage::Swept(sweeper, host);
                    Ok(Progress::Swept)
                }
                Err(failure) => {
                    host.stop();
                    host.add_to(&mut run.reference);
                    Err(failure)
                }
            },
            Stage::Swept(sweeper, host) => {
                // A stopped run does not wait for the host's rows; one that went its time does.
                if sweeper.product.gpu.shall_stop() {
                    host.stop();
                } else if !host.is_finished() {
                    std::thread::sleep(HOST_POLL);
                    self.stage = Stage::Swept(sweeper, host);
                    return Ok(Progress::Swept);
                }
                host.add_to(&mut run.reference);
                Ok(Progress::Done)
            }
            Stage::Done => Ok(Progress::Done),
        }
    }

    fn prove(
        &mut self,
        product: Product<'c, 'a>,
        mut establishing: Box<Establishing<'c, 'a>>,
        run: &mut PrecisionRun,
    ) -> CudaResult<Progress> {
        if product.gpu.shall_stop() {
            return Ok(Progress::Done);
        }
        self.stage = match establishing.step(&product, run)? {
            None => Stage::Proving(product, establishing),
            Some(host) => match Sweeper::new(product, self.product_s, self.asked) {
                Ok(sweeper) => Stage::Sweeping(Box::new(sweeper), host),
                Err(failure) => {
                    host.stop();
                    host.add_to(&mut run.reference);
                    return Err(failure);
                }
            },
        };
        Ok(Progress::Proving)
    }

    /// What is known of the products; `None` before the first of them, and once the host has
    /// compared.
    pub(crate) fn moment(&self, run: &PrecisionRun) -> Option<Moment> {
        match &self.stage {
            Stage::Sweeping(sweeper, _) | Stage::Swept(sweeper, _) => Some(sweeper.moment(run)),
            Stage::Proving(..) | Stage::Done => None,
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn tflops(operations: f64, products: u64, seconds: f64) -> f64 {
    if seconds <= 0.0 {
        return 0.0;
    }
    operations * products as f64 / seconds / 1e12
}

/// The time of the products, which stands still while this process does: the GPU has nothing to do then,
/// and the request is for that much work.
struct SweepClock {
    begun: Instant,
    watch: SuspensionWatch,
}

impl SweepClock {
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

struct Sweeper<'c, 'a> {
    product: Product<'c, 'a>,
    asked: Sweeps,
    clock: SweepClock,
    batch_products: u64,
    under_way: VecDeque<Batch>,
    next_slot: usize,
    events: [(Event<'c, 'a>, Event<'c, 'a>); BATCHES],
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

impl<'c, 'a> Sweeper<'c, 'a> {
    fn new(product: Product<'c, 'a>, product_s: f64, asked: Sweeps) -> CudaResult<Self> {
        let context = product.gpu.context;
        report::clear(&product.gpu.arena, product.layout.report)?;
        let event = || context.event();
        // Both batches and the product before them stay in memory until they were looked at.
        let most = (product.layout.results_count - 2) / 2;
        Ok(Self {
            asked,
            batch_products: asked.pace.batch(product_s, most),
            under_way: VecDeque::new(),
            next_slot: 0,
            events: [(event()?, event()?), (event()?, event()?)],
            headers: context.host_words(BATCHES * HEADER_WORDS)?,
            launched: 0,
            first_unreported: 0,
            counted: Counts::default(),
            injected: BTreeSet::new(),
            injected_found: 0,
            localizations: 0,
            interval: Interval::first(),
            clock: SweepClock::start(),
            product,
        })
    }

    /// Fills the queue and awaits the oldest batch; false where none was left, and the last product
    /// is verified.
    fn step(&mut self, run: &mut PrecisionRun) -> CudaResult<bool> {
        let is_over = self.product.gpu.shall_stop() || self.clock.elapsed() >= self.asked.duration;
        while !is_over && self.under_way.len() < BATCHES {
            let batch = self.launch_batch(self.next_slot)?;
            self.under_way.push_back(batch);
            self.next_slot = (self.next_slot + 1) % BATCHES;
        }
        let Some(batch) = self.under_way.pop_front() else {
            self.verify_last(run)?;
            return Ok(false);
        };
        let seen = self.finish_batch(&batch, run)?;
        if seen.mismatches > self.counted_mismatches() {
            // What follows is under way already; it ends before anything is looked at.
            while let Some(batch) = self.under_way.pop_front() {
                self.finish_batch(&batch, run)?;
            }
            self.look_into_mismatches(run)?;
        }
        Ok(true)
    }

    fn moment(&self, run: &PrecisionRun) -> Moment {
        Moment {
            elapsed: self.clock.elapsed(),
            stood_still: self.clock.watch.stood_still(),
            memory_used_bytes: self.product.layout.bytes_in_use(run.products_verified),
            injected: self.injected.len() as u64,
            injected_found: self.injected_found,
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
            &self.product.gpu.arena,
            self.product.layout.report,
        )?;
        self.events[slot].1.record()?;
        Ok(Batch {
            products: self.batch_products,
            slot,
        })
    }

    fn launch_product(&mut self) -> CudaResult<()> {
        let product = self.launched;
        let arena = self.product.gpu.arena.address();
        let place = (
            self.product.layout.result(product),
            Some(self.product.layout.map(product)),
        );
        let before = product
            .checked_sub(1)
            .filter(|_| self.product.gemm.verifies());
        // Without poison, a launch that succeeds and writes nothing leaves the right result of the
        // round before.
        self.product.gpu.arena.set_words(
            self.product.layout.poison(product),
            Layout::POISON_PITCH_BYTES,
            self.product.layout.poisoned_words(),
            self.product.layout.shape.poison_word(),
        )?;
        self.product.gemm.multiply(
            &self.product.operands,
            arena,
            &self.product.layout,
            place,
            before,
        )?;
        self.launched += 1;
        // The first product is left alone, so that it is seen that a healthy one is healthy.
        if (1..=u64::from(self.asked.inject)).contains(&product) {
            self.inject(product)?;
        }
        if !self.product.gemm.verifies() {
            self.product.gpu.support.verify(
                arena,
                &self.product.layout,
                product,
                self.product.layout.report,
            )?;
        }
        Ok(())
    }

    /// Flips one bit of a result, between product and check.
    fn inject(&mut self, product: u64) -> CudaResult<()> {
        let shape = self.product.layout.shape;
        let random = operand_bits(
            OperandType::F64,
            OperandMode::Random,
            self.asked.seed ^ SEED_OF_FAULTS,
            product,
        );
        let words = shape.result_bytes() / 4;
        let word = (random >> 5) % words;
        let bit = u32::try_from(random & 31).unwrap_or_default();
        let address =
            self.product.gpu.arena.address() + self.product.layout.result(product) + 4 * word;
        self.product.gpu.support.flip(address, bit)?;
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
        let operations = self.product.layout.shape.operations();
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
        run.products_verified = counts.checked / self.product.layout.shape.strips();
        run.mismatches = counts.mismatches;
    }

    /// Reads the whole report, finds its elements, and clears it. Nothing is under way.
    fn look_into_mismatches(&mut self, run: &mut PrecisionRun) -> CudaResult<()> {
        let seen = report::read(&self.product.gpu.arena, self.product.layout.report)?;
        report::clear(&self.product.gpu.arena, self.product.layout.report)?;
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
            support: &self.product.gpu.support,
            gemm: &self.product.gemm,
            operands: &self.product.operands,
            arena: &self.product.gpu.arena,
            layout: &self.product.layout,
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
            .filter(|_| self.product.gemm.verifies())
        {
            let arena = self.product.gpu.arena.address();
            self.product.gpu.support.verify(
                arena,
                &self.product.layout,
                last,
                self.product.layout.report,
            )?;
        }
        let seen = report::read(&self.product.gpu.arena, self.product.layout.report)?;
        let counts = self.counted + seen.counts;
        self.count(counts, run);
        if counts.mismatches > self.counted.mismatches {
            self.look_into_mismatches(run)?;
        }
        Ok(())
    }
}
