//! The burn in the HTML report: the table, a time plot for each quantity with a line a GPU, and
//! what happened meanwhile.

use std::collections::BTreeSet;

use maud::{Markup, html as markup};

use super::burn_rows::{BurnRow, burn_rows};
use super::plot::{Limit, Line, Plot, line_classes};
use super::text::one_line;
use crate::allocation::end_in_words;
use crate::burned;
use crate::diagnosis::CauseGpu;
use crate::facts::{
    BurnRun, ClocksEventReasons, Facts, GpuFacts, Reading, SensorLog, SensorSample, WorkerEnd,
};
use crate::findings::Run;
use crate::reference::GemmRate;

/// A line that ends so much earlier than the burn was cut off.
const CUT_S: f64 = 2.0;
/// Limits that differ from GPU to GPU beyond so many values make a plot unreadable.
const LIMITS_MAXIMUM: usize = 4;

pub(super) fn burn(run: &Run) -> Markup {
    let rows = burn_rows(&run.facts);
    let gpus = burned_gpus(&run.facts);
    markup! {
        @if !rows.is_empty() || !gpus.is_empty() {
            section {
                h2 id="burn" { "Burn" }
                @if !rows.is_empty() { div.scroll tabindex="0" role="region" aria-label="Burn" { (table(&rows)) } }
                (plots(&gpus))
            }
        }
    }
}

fn table(rows: &[BurnRow]) -> Markup {
    markup! {
        table.matrix {
            thead { tr { @for head in BurnRow::HEADS { th scope="col" { (head) } } } }
            tbody {
                @for row in rows {
                    tr class=(if row.mismatches > 0 { "fail" } else { "" }) {
                        @for (index, cell) in row.cells().into_iter().enumerate() {
                            @if index == 0 { th scope="row" { (one_line(&cell)) } } @else { td { (one_line(&cell)) } }
                        }
                    }
                }
            }
        }
    }
}

/// A GPU that was under load, or whose sensors were read meanwhile.
struct BurnedGpu<'f> {
    place: usize,
    name: String,
    gpu: &'f GpuFacts,
    run: Option<&'f BurnRun>,
    log: Option<&'f SensorLog>,
}

fn burned_gpus(facts: &Facts) -> Vec<BurnedGpu<'_>> {
    let mut gpus = Vec::new();
    for (index, gpu) in facts.gpus.iter().enumerate() {
        let Some(uuid) = gpu.uuid.value() else {
            continue;
        };
        let run = facts.load.burn.get(uuid).and_then(Reading::value);
        let log = facts.load.sensors.get(uuid);
        if run.is_some() || log.is_some_and(|it| !it.samples.is_empty()) {
            gpus.push(BurnedGpu {
                place: gpus.len(),
                name: one_line(&CauseGpu::of(gpu, index).to_string()),
                gpu,
                run,
                log,
            });
        }
    }
    gpus
}

fn plots(gpus: &[BurnedGpu<'_>]) -> Markup {
    let seconds = seconds(gpus);
    markup! {
        @if seconds > 0.0 {
            ul.legend {
                @for gpu in gpus {
                    li {
                        svg.swatch viewBox="0 0 24 8" aria-hidden="true" {
                            polyline class=(line_classes(gpu.place)) points="0,4 24,4" {}
                        }
                        (gpu.name)
                        @if let Some(serial) = gpu.gpu.serial.value() { ", serial " (one_line(serial)) }
                    }
                }
            }
            div.charts {
                (throughput(gpus, seconds).markup())
                (power(gpus, seconds).markup())
                (temperature(gpus, seconds).markup())
                (sm_clock(gpus, seconds).markup())
            }
            (events(gpus))
        }
    }
}

/// The length of the longest burn; of samples where no burn came to its end.
fn seconds(gpus: &[BurnedGpu<'_>]) -> f64 {
    let burned = gpus.iter().filter_map(|it| Some(it.run?.load_s()));
    let burned = burned.fold(0.0, f64::max);
    if burned > 0.0 {
        return burned;
    }
    let samples = gpus.iter().filter_map(|it| it.log?.samples.last());
    samples.map(|it| f64::from(it.t)).fold(0.0, f64::max)
}

impl BurnedGpu<'_> {
    fn line(&self, points: Vec<(f64, f64)>) -> Line {
        Line {
            place: self.place,
            name: self.name.clone(),
            points,
            marked: Vec::new(),
            cut: None,
        }
    }

    /// A sensor over time; the line ends in a cross where sampling ended before the burn.
    fn sensor(&self, seconds: f64, value: fn(&SensorSample) -> Option<f64>) -> Line {
        let samples = self.log.map_or(&[][..], |it| &it.samples);
        let points = samples
            .iter()
            .filter_map(|it| Some((f64::from(it.t), value(it)?)));
        let mut line = self.line(points.collect());
        let last = line.points.last().map_or(0.0, |(t, _)| *t);
        let own = self.run.map_or(seconds, BurnRun::load_s);
        if last < own.max(seconds - CUT_S) - CUT_S || self.ended_badly().is_some() {
            line.cut = Some(self.why_cut());
        }
        line
    }

    fn ended_badly(&self) -> Option<&WorkerEnd> {
        let end = &self.run?.end;
        (*end != WorkerEnd::Finished && !matches!(end, WorkerEnd::Busy(_))).then_some(end)
    }

    fn why_cut(&self) -> String {
        let trouble = self.log.and_then(|it| it.trouble.as_deref());
        let xids = self.xids();
        if !xids.is_empty() {
            return xids;
        }
        match (trouble, self.ended_badly()) {
            (Some(trouble), _) => one_line(trouble),
            (None, Some(end)) => one_line(&end_in_words(end)),
            (None, None) => "no further sample".to_owned(),
        }
    }

    /// `Xid 31, Xid 79`, of the kernel log and NVML's events.
    fn xids(&self) -> String {
        let Some(log) = self.log else {
            return String::new();
        };
        let events = log.xid_events.value().into_iter().flatten();
        let numbers: BTreeSet<u32> = log.xids.iter().chain(events).copied().collect();
        let names: Vec<String> = numbers.iter().map(|it| format!("Xid {it}")).collect();
        names.join(", ")
    }

    /// Stretches in which heat or the power supply held the clocks down.
    fn throttled(&self) -> Vec<(f64, f64, String)> {
        let mut stretches: Vec<(f64, f64, u64)> = Vec::new();
        let mut is_open = false;
        let samples = self.log.map_or(&[][..], |it| &it.samples);
        for sample in samples.iter().filter(|it| it.t >= 0.0) {
            let t = f64::from(sample.t);
            let bits =
                sample.reasons.unwrap_or_default() & ClocksEventReasons::HEAT_OR_POWER_SUPPLY;
            match stretches.last_mut().filter(|_| is_open) {
                Some((_, to, all)) => {
                    *to = t;
                    *all |= bits;
                }
                None if bits != 0 => stretches.push((t, t, bits)),
                None => {}
            }
            is_open = bits != 0;
        }
        let named = |(from, to, bits)| (from, to, ClocksEventReasons(bits).names().join(", "));
        stretches.into_iter().map(named).collect()
    }
}

fn throughput(gpus: &[BurnedGpu<'_>], seconds: f64) -> Plot {
    let mut limits = Vec::new();
    let mut lines = Vec::new();
    for it in gpus {
        let Some(run) = it.run else { continue };
        for products in &run.precisions {
            if let Some(GemmRate::Measured { tflops, .. }) = burned::reference(products, it.gpu) {
                limits.push((format!("{} reference", products.precision), tflops));
            }
        }
        lines.push(it.line(rates(run)));
    }
    Plot {
        title: "Throughput",
        unit: "TFLOP/s",
        seconds,
        from_zero: true,
        lines,
        limits: distinct(limits),
    }
}

/// Rates at the ends of their intervals, which are of equal length in a burn.
fn rates(run: &BurnRun) -> Vec<(f64, f64)> {
    let intervals = run.precisions.iter().flat_map(|it| &it.tflops_intervals);
    let count = u32::try_from(intervals.clone().count()).unwrap_or(u32::MAX);
    let length_s = run.load_s() / f64::from(count.max(1));
    intervals
        .zip(1_u32..)
        .map(|(rate, index)| (f64::from(index) * length_s, f64::from(*rate)))
        .collect()
}

fn power(gpus: &[BurnedGpu<'_>], seconds: f64) -> Plot {
    let watts = |it: &SensorSample| it.power_mw.map(|it| f64::from(it) / 1000.0);
    let limit = |it: &BurnedGpu<'_>| it.log?.power_limit_mw.map(|it| f64::from(it) / 1000.0);
    Plot {
        title: "Power",
        unit: "W",
        seconds,
        from_zero: true,
        lines: gpus.iter().map(|it| it.sensor(seconds, watts)).collect(),
        limits: named("limit", gpus.iter().filter_map(limit)),
    }
}

fn temperature(gpus: &[BurnedGpu<'_>], seconds: f64) -> Plot {
    let slowdown = |it: &BurnedGpu<'_>| {
        let read = it.gpu.temperature.value()?;
        read.slowdown_c.or(read.gpu_max_c).map(f64::from)
    };
    let degrees = |it: &SensorSample| it.gpu_c.map(f64::from);
    Plot {
        title: "GPU temperature",
        unit: "°C",
        seconds,
        from_zero: false,
        lines: gpus.iter().map(|it| it.sensor(seconds, degrees)).collect(),
        limits: named("slowdown", gpus.iter().filter_map(slowdown)),
    }
}

fn sm_clock(gpus: &[BurnedGpu<'_>], seconds: f64) -> Plot {
    let maximum = |it: &BurnedGpu<'_>| it.gpu.clocks.value()?.max_sm_mhz.map(f64::from);
    let line = |it: &BurnedGpu<'_>| Line {
        marked: it.throttled(),
        ..it.sensor(seconds, |it| it.sm_mhz.map(f64::from))
    };
    Plot {
        title: "SM clock",
        unit: "MHz",
        seconds,
        from_zero: true,
        lines: gpus.iter().map(line).collect(),
        limits: named("maximum", gpus.iter().filter_map(maximum)),
    }
}

fn named(name: &str, values: impl Iterator<Item = f64>) -> Vec<Limit> {
    distinct(values.map(|it| (name.to_owned(), it)).collect())
}

fn distinct(mut values: Vec<(String, f64)>) -> Vec<Limit> {
    values.sort_by(|one, other| one.1.total_cmp(&other.1).then(one.0.cmp(&other.0)));
    values.dedup();
    values.truncate(LIMITS_MAXIMUM);
    let limit = |(name, value)| Limit { name, value };
    values.into_iter().map(limit).collect()
}

/// In words what the plots mark, and what has no time.
fn events(gpus: &[BurnedGpu<'_>]) -> Markup {
    let mut events: Vec<(&str, String)> = Vec::new();
    for gpu in gpus {
        for (from, to, what) in gpu.throttled() {
            let text = if to > from {
                format!("{what} from {from:.1} to {to:.1} s")
            } else {
                format!("{what} at {from:.1} s")
            };
            events.push((&gpu.name, text));
        }
        let xids = gpu.xids();
        if !xids.is_empty() {
            events.push((&gpu.name, format!("{xids} during the burn")));
        }
        if let Some(trouble) = gpu.log.and_then(|it| it.trouble.as_deref()) {
            events.push((&gpu.name, format!("sampling ended: {}", one_line(trouble))));
        }
        if let Some(end) = gpu.ended_badly() {
            events.push((&gpu.name, one_line(&end_in_words(end))));
        }
    }
    markup! {
        @if events.is_empty() {
            p.small { "No clock was held down by heat or power supply, and no Xid was reported during the burn." }
        } @else {
            h3 { "Events during the burn" }
            ul { @for (name, text) in &events { li { (name) ": " (text) } } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::burn;
    use crate::facts::{ClocksEventReasons, Reading};
    use crate::findings::Run;
    use crate::level::Level;
    use crate::test_machine::{burned_node, burned_node_with_sensors};

    fn page(facts: crate::facts::Facts) -> String {
        let run = Run {
            facts,
            profile: Run::BUILT_IN_PROFILE.to_owned(),
            level: Level::Standard,
            findings: Vec::new(),
            incomplete: None,
        };
        burn(&run).into_string()
    }

    #[test]
    fn every_quantity_is_a_plot_with_a_line_a_gpu_and_its_limit() {
        let page = page(burned_node());
        for title in [
            "Throughput (TFLOP/s)",
            "Power (W)",
            "GPU temperature (°C)",
            "SM clock (MHz)",
        ] {
            assert!(page.contains(title), "{title}");
        }
        // Eight lines in four plots, and eight swatches.
        assert_eq!(page.matches("<polyline class=\"line").count(), 40);
        assert!(page.contains("limit 700 W"));
        assert!(!page.contains("polyline class=\"marked"));
        assert!(page.contains("no Xid was reported"));
    }

    #[test]
    fn throttling_and_xids_of_a_gpu_are_marked_and_listed() {
        let page = page(burned_node_with_sensors(|log| {
            for sample in &mut log.samples[20..26] {
                sample.reasons = Some(ClocksEventReasons::HW_THERMAL_SLOWDOWN);
            }
            log.samples.truncate(30);
            log.xids = vec![79];
            log.xid_events = Reading::Value(vec![79]);
            log.trouble = Some("NVML_ERROR_GPU_IS_LOST".to_owned());
        }));
        assert_eq!(page.matches("polyline class=\"marked").count(), 1);
        assert!(
            page.contains("hw_thermal_slowdown from 4.0 to 5.2 s"),
            "{page}"
        );
        assert!(page.contains("Xid 79 during the burn"));
        // Power, temperature and clock end in a cross.
        assert_eq!(page.matches("g class=\"cut\"").count(), 3);
    }
}
