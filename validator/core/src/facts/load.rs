//! What GPUs did under work: every worker's result, by GPU.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{AllocationFacts, LayoutFacts, Reading};
use crate::worker_id::WorkerId;

/// Results of load probes, by GPU UUID.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadFacts {
    /// The small verified kernel, by GPU UUID.
    pub cuda_kernel: BTreeMap<String, Reading<KernelRun>>,
    /// The request to the burn; `None` where the run did not come that far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub burn_plan: Option<BurnPlan>,
    /// The burn, by GPU UUID; empty where none was requested.
    pub burn: BTreeMap<String, Reading<BurnRun>>,
    /// What NVML's sensors showed while the burn ran, by GPU UUID.
    pub sensors: BTreeMap<String, SensorLog>,
    /// Every other workload: one entry for each worker, also for one that was planned and not
    /// started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<WorkloadRun>,
    /// The parent's view of the allocation test; `None` where none was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<Box<AllocationFacts>>,
    /// A user's command under several layouts; `None` where none was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layouts: Option<Box<LayoutFacts>>,
}

impl LoadFacts {
    /// The runs of this workload on this GPU.
    pub fn runs_of<'f>(
        &'f self,
        workload: &'f str,
        uuid: &'f str,
    ) -> impl Iterator<Item = &'f WorkloadRun> {
        let runs = self.runs.iter();
        runs.filter(move |it| it.id.workload == workload && it.id.has_gpu(uuid))
    }
}

/// What one worker did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkloadRun {
    pub id: WorkerId,
    /// How its process ended; `NotRead` where none was started.
    pub end: Reading<WorkerEnd>,
    pub requested: RequestedWork,
    pub measured: MeasuredWork,
    pub memory: WorkloadMemory,
    /// Values that differ from their expected ones.
    pub mismatches: u64,
    /// The first of them, at most eight for each GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub first_mismatches: Vec<MemoryMismatch>,
    /// What had to be made smaller, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// What only this workload knows, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub detail: BTreeMap<String, serde_json::Value>,
}

impl WorkloadRun {
    /// A run of which only the request and the end are known.
    pub fn empty(id: WorkerId, requested: RequestedWork, end: Reading<WorkerEnd>) -> Self {
        Self {
            id,
            end,
            requested,
            measured: MeasuredWork::default(),
            memory: WorkloadMemory::default(),
            mismatches: 0,
            first_mismatches: Vec::new(),
            notes: Vec::new(),
            detail: BTreeMap::new(),
        }
    }
}

/// The request to a workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RequestedWork {
    /// It ends after so long, even if it is not through.
    pub seconds: f64,
    /// Passes after which it is through; `None`: it repeats until its time is over.
    pub passes: Option<u64>,
}

/// How much a workload did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MeasuredWork {
    /// From the first step to the last.
    pub seconds: f64,
    /// From the start of the process to the first step, in milliseconds.
    pub start_ms: f64,
    /// From the last step to freed memory and contexts, in milliseconds; `None` where the worker
    /// did not get there, or was one of an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_ms: Option<f64>,
    pub passes: u64,
    /// Bytes of which every one was compared at least once with each of its values.
    pub bytes_verified: u64,
}

/// Memory of the GPUs, together, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkloadMemory {
    pub free_bytes: u64,
    pub used_bytes: u64,
}

/// A word of device memory that holds another value than was written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryMismatch {
    /// UUID of the GPU.
    pub gpu: String,
    /// Virtual address in the worker: `0x7f2a40000000`. Words of one chunk are contiguous.
    pub address: String,
    /// Bits as hex.
    pub expected: String,
    pub observed: String,
}

/// The request to a burn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum BurnPlan {
    /// None was requested, with the reason.
    Off(String),
    On {
        duration_s: f64,
        /// Empty: the one of each GPU that heats it most.
        precisions: Vec<Precision>,
        /// UUIDs; empty: every GPU.
        gpus: Vec<String>,
    },
}

/// How a worker process ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkerEnd {
    /// It sent its result and exited with 0.
    Finished,
    /// A driver call failed.
    CudaError {
        call: String,
        code: u32,
        name: String,
    },
    /// The GPU was in use by others, so no load was put on it.
    Busy(String),
    /// It exited early; the text holds the end of its stderr.
    Exited { status: i32, stderr: String },
    /// A signal ended it.
    Killed { signal: i32 },
    /// It did not answer in time and was killed; the text names the step it was in.
    TimedOut { step: String, seconds: f64 },
}

/// One run of the embedded check kernel on one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KernelRun {
    pub end: WorkerEnd,
    /// Values that were compared with the host's own.
    pub values_compared: u64,
    pub mismatches: u64,
    /// The first mismatches, at most eight.
    pub examples: Vec<ValueMismatch>,
    /// Wall time from start of the process to its result, in milliseconds.
    pub wall_ms: f64,
}

impl KernelRun {
    /// A run that ended before anything was compared.
    pub fn without_result(end: WorkerEnd) -> Self {
        Self {
            end,
            values_compared: 0,
            mismatches: 0,
            examples: Vec::new(),
            wall_ms: 0.0,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ValueMismatch {
    pub index: u64,
    /// Bits as hex: `0x3f800000`.
    pub expected: String,
    pub observed: String,
}

/// JSON has no NaN and no infinity, and a number that is none must not be lost: it is written as
/// `null`, read as NaN, and never passes.
mod number_or_nan {
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
    pub(super) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        number.is_finite().then_some(*number).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

/// A burn of one GPU: its request, its work, and whether the numbers were right.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BurnRun {
    pub end: WorkerEnd,
    pub engine: BurnEngine,
    /// Why this engine, and what was found of the other, in one line.
    pub engine_choice: String,
    /// Seed of the operands: the same seed gives the same bits on every GPU of a model.
    pub seed: u64,
    /// Requested seconds, and those for which products ran.
    pub requested_s: f64,
    pub measured_s: f64,
    /// Between the first product and the last the worker stood still for so many seconds more (a
    /// paused container), with nothing for the GPU to do.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stood_still_s: f64,
    /// From the start of the worker process to the first product in flight, in milliseconds; what
    /// it waited for the word to begin is left out.
    pub start_to_load_ms: f64,
    /// When it came how far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub startup: Option<BurnStartup>,
    /// From the last product to memory freed, in milliseconds; `None` when the worker did not get
    /// there.
    pub stop_ms: Option<f64>,
    /// Free memory of the GPU before the burn, and what of it was written and read back every
    /// sweep, in bytes.
    pub memory_free_bytes: u64,
    pub memory_used_bytes: u64,
    /// What had to be made smaller, and why.
    pub notes: Vec<String>,
    /// Copies between host and GPU before the first product; `None` where there was no room or an
    /// older version ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<CopyProof>,
    pub precisions: Vec<PrecisionRun>,
    /// `--inject` flipped bits on purpose: the mismatches are ours.
    pub injected: u64,
}

/// Words that were copied between host and GPU and compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyProof {
    /// Bytes copied in each direction.
    pub bytes: u64,
    /// Blocks of 16 KiB that the GPU holds otherwise than the host sent them, by the GPU's own
    /// checksums.
    pub to_gpu_wrong_blocks: u64,
    /// Bytes that the host read otherwise than the GPU generated them.
    pub from_gpu_wrong_bytes: u64,
}

impl BurnRun {
    /// A burn of which nothing is known yet.
    pub fn empty(end: WorkerEnd) -> Self {
        Self {
            end,
            engine: BurnEngine::Ptx {
                kernels: String::new(),
            },
            engine_choice: String::new(),
            seed: 0,
            requested_s: 0.0,
            measured_s: 0.0,
            stood_still_s: 0.0,
            start_to_load_ms: 0.0,
            startup: None,
            stop_ms: None,
            memory_free_bytes: 0,
            memory_used_bytes: 0,
            notes: Vec::new(),
            copies: None,
            precisions: Vec::new(),
            injected: 0,
        }
    }

    /// From the first product to the last, in seconds.
    pub fn load_s(&self) -> f64 {
        self.measured_s + self.stood_still_s
    }
}

/// When the worker of a GPU came how far, in milliseconds since the validator began to look at the
/// machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BurnStartup {
    /// Its process was started.
    pub spawned_ms: f64,
    /// It had its CUDA context.
    pub context_ms: Option<f64>,
    /// It had its memory and kernels, and stood by.
    pub ready_ms: Option<f64>,
    /// It was given the word to begin.
    pub go_ms: Option<f64>,
    /// The first product of a trial or of the sweeps was under way.
    pub first_product_ms: Option<f64>,
}

/// GEMM implementation.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BurnEngine {
    /// The embedded kernels, by the architecture that they are built for: `sm_90a`.
    Ptx { kernels: String },
    /// cuBLASLt, by the path of the library and its version.
    Cublaslt { library: String, version: String },
}

/// An operand precision of a burn, in NVIDIA's names.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    Fp64,
    Fp32,
    Tf32,
    Bf16,
    Fp16,
    Int8,
    Fp8,
}

impl Precision {
    /// Every precision, in the order of the enum.
    pub const ALL: [Self; 7] = [
        Self::Fp64,
        Self::Fp32,
        Self::Tf32,
        Self::Bf16,
        Self::Fp16,
        Self::Int8,
        Self::Fp8,
    ];

    /// Its name on the command line, in profiles and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fp64 => "fp64",
            Self::Fp32 => "fp32",
            Self::Tf32 => "tf32",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        }
    }
}

impl std::fmt::Display for Precision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The products of one precision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PrecisionRun {
    pub precision: Precision,
    /// The kernels that multiplied: a family of embedded ones (`sm_90a`), or `cublaslt`.
    #[serde(default)]
    pub kernels: String,
    /// Who multiplied; `None` in facts that hold one engine for all precisions.
    #[serde(default)]
    pub engine: Option<BurnEngine>,
    /// The product is `m` x `n`, over `k`.
    pub m: u32,
    pub n: u32,
    pub k: u32,
    /// Products that ended, and those of them whose every element was compared with the reference.
    pub products: u64,
    pub products_verified: u64,
    /// Time of the products on the GPU, in seconds, by its own events.
    #[serde(with = "number_or_nan")]
    #[schemars(with = "Option<f64>")]
    pub gpu_time_s: f64,
    /// 2 x m x n x k x products over `gpu_time_s`, in 1e12 operations a second.
    #[serde(with = "number_or_nan")]
    #[schemars(with = "Option<f64>")]
    pub tflops: f64,
    /// The same over successive intervals of equal length, warm-up included: half a second, and
    /// longer in a burn of more than a quarter of an hour.
    pub tflops_intervals: Vec<f32>,
    pub reference: ReferenceProof,
    /// Results (blocks of elements) that differ from the reference, and results that are not
    /// finite.
    pub mismatches: u64,
    pub nonfinite: u64,
    /// The first mismatches, at most eight, element by element.
    pub examples: Vec<ElementMismatch>,
}

impl PrecisionRun {
    /// Products of which none has ended.
    pub fn empty(precision: Precision, kernels: &str) -> Self {
        Self {
            precision,
            kernels: kernels.to_owned(),
            engine: None,
            m: 0,
            n: 0,
            k: 0,
            products: 0,
            products_verified: 0,
            gpu_time_s: 0.0,
            tflops: 0.0,
            tflops_intervals: Vec::new(),
            reference: ReferenceProof::default(),
            mismatches: 0,
            nonfinite: 0,
            examples: Vec::new(),
        }
    }
}

/// How it is known that the reference product is right, apart from the path that is tested.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReferenceProof {
    /// A checksum over the reference's bits, as hex: GPUs of one model with one seed must agree.
    pub checksum: String,
    /// Exact integer operands gave the product that the host computed: rows of which elements were
    /// compared (of rows longer than 256 elements 256 of each), and elements that differed.
    pub exact_rows: u32,
    pub exact_mismatches: u64,
    /// A checksum over the bits of that product, as hex: how alike GPUs are that are wrong.
    #[serde(default)]
    pub exact_checksum: String,
    /// Freivalds' check in FP64 with random vectors: the largest residual as a multiple of the
    /// rounding bound (at most 1 is right), and how many vectors.
    pub freivalds_vectors: u32,
    #[serde(with = "number_or_nan")]
    #[schemars(with = "Option<f64>")]
    pub freivalds_worst: f64,
    /// Sampled rows computed on the host: elements compared, and the largest error as a multiple of
    /// the bound.
    pub sampled_elements: u64,
    #[serde(with = "number_or_nan")]
    #[schemars(with = "Option<f64>")]
    pub sampled_worst: f64,
    /// Blocks of 16 KiB of both operands whose checksums the host computed itself, of exact
    /// operands one in sixteen, of the random ones all; 0 where that did not come to its end,
    /// `None` in facts of versions that did not compare them.
    #[serde(default)]
    pub operand_blocks: Option<u64>,
    /// Of those, the ones that differ in the GPU's memory.
    #[serde(default)]
    pub operand_mismatches: u64,
    /// The other engine's product of the same exact operands: elements with other bits; `None`
    /// without one.
    pub second_engine_mismatches: Option<u64>,
    /// Freivalds' check of that product, which allows no difference.
    #[serde(default)]
    pub second_engine_is_right: Option<bool>,
}

/// One wrong element.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ElementMismatch {
    pub row: u32,
    pub column: u32,
    /// Bits as hex.
    pub expected: String,
    pub observed: String,
    /// How many bits differ.
    pub flipped_bits: u32,
    /// The multiprocessor that computed it, where the engine knows.
    pub sm: Option<u32>,
    /// Which product of its precision, counted from 0.
    #[serde(default)]
    pub product: u64,
    /// Which sweep over the memory, counted from 0.
    pub sweep: u64,
    /// Reading the same memory again gave the right bits: a transient read error.
    pub right_when_read_again: Option<bool>,
    /// Computing the product again gave the right bits: a transient compute error; if not, it is
    /// stuck.
    pub right_when_computed_again: Option<bool>,
}

/// NVML's sensors of one GPU during load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SensorLog {
    /// The limit in force when the load began, in milliwatts.
    pub power_limit_mw: Option<u32>,
    /// In the order of their times.
    #[serde(with = "super::sensor_columns")]
    #[schemars(with = "super::SensorColumns")]
    pub samples: Vec<SensorSample>,
    /// How many looks under load found which clocks event reasons: by NVML's bits, those of one
    /// look together. Of a long burn a sample stands for many looks, and has what any of them had.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reasons_seen: BTreeMap<u64, u64>,
    /// The PCIe link while the load ran; `None` where it was not sampled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pcie: Option<PcieUnderLoad>,
    pub before: LoadCounters,
    pub after: LoadCounters,
    /// Xids that the kernel log gained during the load and that name this GPU's PCI address, but
    /// for those below.
    pub xids: Vec<u32>,
    /// Those that name a process of others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub xids_of_others: Vec<XidOfOthers>,
    /// Why it is not known what Xids the kernel log gained, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub xids_trouble: Option<String>,
    /// Xids that NVML reported as events during the load, in their order: without the process, but
    /// also where the kernel log is not readable.
    #[serde(default)]
    pub xid_events: Reading<Vec<u32>>,
    /// Processes of others that NVML listed on this GPU during the load.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_processes: Vec<super::GpuProcess>,
    /// Why sampling ended early, if it did.
    pub trouble: Option<String>,
}

/// In how many samples under load the PCIe link had which generation and width.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PcieUnderLoad {
    pub generations: BTreeMap<u32, u64>,
    pub widths: BTreeMap<u32, u64>,
}

/// An Xid that the driver reports for a foreign process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct XidOfOthers {
    pub number: u32,
    /// As the kernel calls it: at most 15 bytes of its name.
    pub process: String,
    pub pid: Option<u32>,
}

/// One look at the sensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SensorSample {
    /// Seconds since the load began, to the millisecond; negative before the first product.
    pub t: f32,
    /// Milliwatts, averaged by the driver or instantaneous as the GPU has it.
    pub power_mw: Option<u32>,
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub gpu_c: Option<i32>,
    pub memory_c: Option<i32>,
    /// [`super::ClocksEventReasons`].
    pub reasons: Option<u64>,
    pub utilization_percent: Option<u32>,
}

/// Counters that a load must not move.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoadCounters {
    pub ecc_volatile: Reading<super::EccErrors>,
    pub ecc_aggregate: Reading<super::EccErrors>,
    pub pcie_replays: Reading<u64>,
    pub row_remapping: Reading<super::RowRemapping>,
    pub retired_pages: Reading<super::RetiredPages>,
    pub violations: Reading<super::ViolationTimes>,
}

#[cfg(test)]
mod tests {
    use super::ReferenceProof;

    #[test]
    fn what_is_no_number_comes_back_as_none() {
        for residual in [f64::NAN, f64::INFINITY] {
            let proof = ReferenceProof {
                freivalds_worst: residual,
                sampled_worst: 0.5,
                ..ReferenceProof::default()
            };
            let text = serde_json::to_string(&proof).expect("JSON");
            let read: ReferenceProof = serde_json::from_str(&text).expect("read back");
            assert!(read.freivalds_worst.is_nan());
            assert!((read.sampled_worst - 0.5).abs() < f64::EPSILON);
        }
    }
}
