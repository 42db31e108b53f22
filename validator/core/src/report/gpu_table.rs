//! The GPUs of a run as a table for people: one row each in PCI order, with what was measured and
//! its limit.

use std::collections::{HashMap, HashSet};

use super::burn_rows::{BurnRow, burn_rows};
use super::text::one_line;
use super::text_columns::{Column, GAP, Side};
use crate::diagnosis::{CauseGpu, RootCause};
use crate::facts::{Facts, GpuFacts, PciDevice};
use crate::findings::{Finding, GpuSubject, Run, Subject, Verdict, findings_by};
use crate::siblings::pci_devices_by_address;

/// A name that is longer was not written by NVIDIA, and would push the figures off the terminal.
const CELL_MAXIMUM: usize = 40;

/// The table; columns that do not fit `width` and those without a value are left out.
pub(super) struct GpuTable {
    pub(super) head: String,
    pub(super) rows: Vec<GpuRow>,
}

/// One GPU, its verdict apart from the text around it, so that it can be painted.
pub(super) struct GpuRow {
    pub(super) before: String,
    pub(super) verdict: Verdict,
    /// Padded to the column.
    pub(super) word: String,
    pub(super) after: String,
}

impl GpuTable {
    pub(super) fn of(run: &Run, causes: &[RootCause], width: usize) -> Self {
        let gpus = gpus_in_pci_order(run, causes);
        let words: Vec<String> = gpus.iter().map(|it| it.word().to_owned()).collect();
        let verdicts = Column::new("Verdict", words, Side::Left);
        let (before, after) = columns(run, &gpus);
        let before: Vec<Column> = before.into_iter().filter(Column::has_values).collect();
        let mut used = verdicts.width()
            + before
                .iter()
                .map(|it| it.width() + GAP.len())
                .sum::<usize>();
        let fits = |column: &Column| {
            let wanted = used + GAP.len() + column.width();
            let fits = column.has_values() && wanted <= width;
            if fits {
                used = wanted;
            }
            fits
        };
        let after: Vec<Column> = after.into_iter().filter(fits).collect();
        let line = |cell: &dyn Fn(&Column) -> String, columns: &[Column]| -> Vec<String> {
            columns.iter().map(cell).collect()
        };
        let head = [
            line(&Column::head, &before),
            vec![verdicts.head()],
            line(&Column::head, &after),
        ]
        .concat()
        .join(GAP);
        let rows = gpus
            .iter()
            .enumerate()
            .map(|(index, gpu)| {
                let cell = |column: &Column| column.cell(index);
                let mut before = line(&cell, &before).join(GAP);
                before.push_str(GAP);
                // The gap stands before each cell, and there may be none.
                let after = [vec![String::new()], line(&cell, &after)]
                    .concat()
                    .join(GAP);
                GpuRow {
                    before,
                    verdict: gpu.verdict,
                    word: verdicts.cell(index),
                    after,
                }
            })
            .collect();
        Self { head, rows }
    }
}

/// The same table without alignment, for formats that have tables of their own.
pub(super) struct GpuGrid {
    /// Columns before and after the verdict; `-` stands in a cell where nothing was read.
    pub(super) heads: [Vec<String>; 2],
    pub(super) rows: Vec<GpuGridRow>,
}

pub(super) struct GpuGridRow {
    pub(super) cells: [Vec<String>; 2],
    pub(super) verdict: Verdict,
    pub(super) word: &'static str,
}

impl GpuGrid {
    pub(super) fn of(run: &Run, causes: &[RootCause]) -> Self {
        let gpus = gpus_in_pci_order(run, causes);
        let (before, after) = columns(run, &gpus);
        let columns = [before, after].map(|it| {
            let with_values = it.into_iter().filter(Column::has_values);
            with_values.collect::<Vec<_>>()
        });
        let rows = gpus.iter().enumerate().map(|(row, gpu)| GpuGridRow {
            cells: columns.each_ref().map(|it| {
                let cells = it.iter().map(|it| it.cell(row).trim().to_owned());
                cells.collect()
            }),
            verdict: gpu.verdict,
            word: gpu.word(),
        });
        Self {
            rows: rows.collect(),
            heads: columns
                .each_ref()
                .map(|it| it.iter().map(|it| it.name.clone()).collect()),
        }
    }
}

/// A GPU that NVML lists, or one that a cause names and NVML does not list any more.
struct ShownGpu<'f> {
    name: CauseGpu,
    facts: Option<&'f GpuFacts>,
    verdict: Verdict,
    busy: bool,
}

impl ShownGpu<'_> {
    fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Error if self.busy => "BUSY",
            verdict => super::page::verdict_in_capitals(verdict),
        }
    }
}

fn gpus_in_pci_order<'f>(run: &'f Run, causes: &[RootCause]) -> Vec<ShownGpu<'f>> {
    let findings: HashMap<&GpuSubject, Vec<&Finding>> = findings_by(&run.findings, Subject::gpu)
        .into_iter()
        .collect();
    let mut blamed: HashMap<&CauseGpu, Vec<&RootCause>> = HashMap::new();
    for cause in causes {
        for gpu in &cause.gpus {
            blamed.entry(gpu).or_default().push(cause);
        }
    }
    let of_gpu = |name: &CauseGpu| blamed.get(name).map_or(&[][..], Vec::as_slice);
    let listed = run.facts.gpus.iter().enumerate().map(|(index, gpu)| {
        let name = CauseGpu::of(gpu, index);
        let own = findings.get(&GpuSubject::of(gpu));
        let causes = of_gpu(&name);
        shown(name, Some(gpu), own.map_or(&[], Vec::as_slice), causes)
    });
    let mut gpus: Vec<ShownGpu<'f>> = listed.collect();
    let mut shown_already: HashSet<CauseGpu> = gpus.iter().map(|it| it.name.clone()).collect();
    for gpu in causes.iter().flat_map(|it| &it.gpus) {
        if shown_already.insert(gpu.clone()) {
            gpus.push(shown(gpu.clone(), None, &[], of_gpu(gpu)));
        }
    }
    let order = |it: &ShownGpu<'_>| {
        let address = it.name.pci_address.clone();
        (address.is_none(), address, it.name.index)
    };
    gpus.sort_by_key(order);
    gpus
}

/// The worst of the findings on this GPU, and of the causes that name it: a line of the kernel log
/// blames a GPU in a finding of the host.
fn shown<'f>(
    name: CauseGpu,
    facts: Option<&'f GpuFacts>,
    own: &[&Finding],
    blamed: &[&RootCause],
) -> ShownGpu<'f> {
    let verdict = own
        .iter()
        .map(|it| it.verdict)
        .chain(blamed.iter().map(|it| it.verdict))
        .max()
        .unwrap_or(Verdict::Skip);
    let errors: Vec<&&Finding> = own
        .iter()
        .filter(|it| it.verdict == Verdict::Error)
        .collect();
    let verdict = match verdict {
        Verdict::Skip if own.iter().any(|it| it.verdict.judged()) => Verdict::Pass,
        verdict => verdict,
    };
    ShownGpu {
        name,
        facts,
        verdict,
        busy: !errors.is_empty() && errors.iter().all(|it| it.busy),
    }
}

/// The columns before and after the verdict, each list with the more important ones first.
fn columns(run: &Run, gpus: &[ShownGpu<'_>]) -> (Vec<Column>, Vec<Column>) {
    let all_rows = burn_rows(&run.facts);
    let rows = by_gpu(&all_rows);
    let devices = pci_devices_by_address(&run.facts);
    let text =
        |value: Option<&String>| value.map(|it| shortened(&one_line(it))).unwrap_or_default();
    let named = |name: &str, side, cell: &dyn Fn(&ShownGpu<'_>) -> String| {
        Column::new(name, gpus.iter().map(cell).collect(), side)
    };
    let index = |gpu: &ShownGpu<'_>| gpu.name.index.map_or_else(String::new, |it| it.to_string());
    let before = vec![
        named("GPU", Side::Right, &index),
        named("Address", Side::Left, &|gpu| {
            text(gpu.name.pci_address.as_ref())
        }),
        named("Serial", Side::Left, &|gpu| text(gpu.name.serial.as_ref())),
    ];
    let mut precisions = precisions(&all_rows).into_iter().map(|precision| {
        let name = format!("{} TFLOP/s", precision.to_uppercase());
        named(&name, Side::Right, &|gpu| throughput(gpu, precision, &rows))
    });
    let (power, temperature) = if rows.is_empty() {
        ("Idle W", "Idle °C")
    } else {
        ("Load W", "Load °C")
    };
    let mut after: Vec<Column> = precisions.next().into_iter().collect();
    after.extend([
        named(power, Side::Right, &|gpu| power_cell(gpu, &rows)),
        named(temperature, Side::Right, &|gpu| {
            temperature_cell(gpu, &rows)
        }),
    ]);
    after.extend(precisions);
    after.extend([
        named("SM MHz", Side::Right, &|gpu| sm_clock(gpu, &run.facts)),
        named("Memory GiB", Side::Right, &memory),
        named("UUID", Side::Left, &|gpu| text(gpu.name.uuid.as_ref())),
        named("VBIOS", Side::Left, &|gpu| {
            text(gpu.facts.and_then(|it| it.vbios_version.value()))
        }),
        named("NUMA", Side::Right, &|gpu| numa_node(gpu, &devices)),
    ]);
    // One model is named above the table.
    let model = named("Model", Side::Left, &|gpu| text(gpu.name.name.as_ref()));
    if model.cells.iter().any(|it| it != &model.cells[0]) {
        after.push(model);
    }
    (before, after)
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= CELL_MAXIMUM {
        return text.to_owned();
    }
    let mut kept: String = text.chars().take(CELL_MAXIMUM - 1).collect();
    kept.push('…');
    kept
}

fn precisions(rows: &[BurnRow]) -> Vec<&str> {
    let mut precisions: Vec<&str> = Vec::new();
    for row in rows {
        if !precisions.contains(&row.precision.as_str()) {
            precisions.push(&row.precision);
        }
    }
    precisions
}

/// The rows of each GPU, by its UUID.
type RowsOfGpus<'r> = HashMap<&'r str, Vec<&'r BurnRow>>;

fn by_gpu(rows: &[BurnRow]) -> RowsOfGpus<'_> {
    let mut of_gpus = RowsOfGpus::new();
    for row in rows {
        of_gpus.entry(&row.gpu_uuid).or_default().push(row);
    }
    of_gpus
}

fn rows_of<'r>(gpu: &ShownGpu<'_>, rows: &'r RowsOfGpus<'r>) -> impl Iterator<Item = &'r BurnRow> {
    let uuid = gpu.name.uuid.as_deref();
    let own = uuid.and_then(|it| rows.get(it));
    own.into_iter().flatten().copied()
}

/// `660.1 (101% ref)`: the median, and its share of the model's measured reference where there is
/// one.
fn throughput(gpu: &ShownGpu<'_>, precision: &str, rows: &RowsOfGpus<'_>) -> String {
    let Some(row) = rows_of(gpu, rows).find(|it| it.precision == precision) else {
        return String::new();
    };
    let Some(tflops) = row.tflops else {
        return String::new();
    };
    let digits = if tflops < 10.0 { 3 } else { 1 };
    match row.reference_percent {
        Some(percent) => format!("{tflops:.digits$} ({percent:.0}% ref)"),
        None => format!("{tflops:.digits$}"),
    }
}

/// `694/700`: mean under load, or idle, and the limit in force.
fn power_cell(gpu: &ShownGpu<'_>, rows: &RowsOfGpus<'_>) -> String {
    let limit = gpu.facts.and_then(|it| it.power.value());
    if rows.is_empty() {
        let draw = limit.and_then(|it| it.draw_mw).map(watts);
        return of_limit(draw, limit.map(|it| watts(it.limit_mw)));
    }
    let row = rows_of(gpu, rows).next();
    of_limit(
        row.and_then(|it| it.power_w),
        row.and_then(|it| it.power_limit_w),
    )
}

fn watts(milliwatts: u32) -> f64 {
    f64::from(milliwatts) / 1000.0
}

/// `59/87`: the hottest sample under load, or idle, and the temperature from which the GPU slows
/// down.
fn temperature_cell(gpu: &ShownGpu<'_>, rows: &RowsOfGpus<'_>) -> String {
    let read = gpu.facts.and_then(|it| it.temperature.value());
    let limit = read.and_then(|it| it.slowdown_c.or(it.gpu_max_c));
    let degrees = if rows.is_empty() {
        read.map(|it| it.gpu_c)
    } else {
        rows_of(gpu, rows).filter_map(|it| it.temperature_c).max()
    };
    of_limit(degrees.map(f64::from), limit.map(f64::from))
}

fn of_limit(value: Option<f64>, limit: Option<f64>) -> String {
    match (value, limit) {
        (Some(value), Some(limit)) => format!("{value:.0}/{limit:.0}"),
        (Some(value), None) => format!("{value:.0}"),
        (None, _) => String::new(),
    }
}

/// The median under load.
fn sm_clock(gpu: &ShownGpu<'_>, facts: &Facts) -> String {
    let measured = gpu.facts.map(|it| super::measurements::of(it, facts));
    measured
        .and_then(|it| it.get("burn_sm_clock_median_mhz").copied())
        .map_or_else(String::new, |it| format!("{it:.0}"))
}

fn memory(gpu: &ShownGpu<'_>) -> String {
    let memory = gpu.facts.and_then(|it| it.memory.value());
    memory.map_or_else(String::new, |it| {
        let tenths = it.total_bytes.saturating_mul(10) >> 30;
        format!("{}.{}", tenths / 10, tenths % 10)
    })
}

/// The host's node that the GPU is attached to; empty where the platform names none.
fn numa_node(gpu: &ShownGpu<'_>, devices: &HashMap<&str, &PciDevice>) -> String {
    let address = gpu.name.pci_address.as_deref();
    let device = address.and_then(|it| devices.get(it));
    let node = device.and_then(|it| it.numa_node).filter(|it| *it >= 0);
    node.map_or_else(String::new, |it| it.to_string())
}
