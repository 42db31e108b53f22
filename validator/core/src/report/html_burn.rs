//! The burn in the HTML report: the table, and a small chart for each GPU.

use maud::{Markup, html as markup};

use super::burn_rows::{BurnRow, burn_rows, burned_gpus};
use super::text::one_line;
use crate::facts::{BurnRun, GpuFacts, SensorLog, SensorSample};
use crate::findings::Run;

/// Of a chart, in its own units.
const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 60.0;
/// Seconds of an interval of throughput.
const INTERVAL_S: f64 = 0.5;

pub(super) fn burn(run: &Run) -> Markup {
    let rows = burn_rows(&run.facts);
    markup! {
        @if !rows.is_empty() {
            h2 { "Burn" }
            div.scroll { (table(&rows)) }
            p.small {
                "Each chart from left to right is the burn of one GPU: "
                span.throughput { "throughput" } " of its greatest, "
                span.power { "power" } " of the limit, "
                span.clock { "SM clock" } " of its greatest."
            }
            div.charts {
                @for (gpu, uuid, burned) in burned_gpus(&run.facts) {
                    (chart(gpu, uuid, burned, run.facts.load.sensors.get(uuid)))
                }
            }
        }
    }
}

fn table(rows: &[BurnRow]) -> Markup {
    markup! {
        table.matrix {
            thead { tr { @for head in BurnRow::HEADS { th { (head) } } } }
            tbody {
                @for row in rows {
                    tr class=(if row.mismatches > 0 { "fail" } else { "" }) {
                        @for cell in row.cells() { td { (one_line(&cell)) } }
                    }
                }
            }
        }
    }
}

fn chart(gpu: &GpuFacts, uuid: &str, run: &BurnRun, log: Option<&SensorLog>) -> Markup {
    let name = gpu.pci_address.value().map_or(uuid, String::as_str);
    let samples = log.map_or(&[][..], |it| &it.samples);
    let limit_w = log.and_then(|it| it.power_limit_mw).map(f64::from);
    let of_samples = |value: fn(&SensorSample) -> Option<u32>| {
        let points = samples
            .iter()
            .filter_map(|it| Some((f64::from(it.t), value(it)?)));
        points
            .map(|(t, value)| (t, f64::from(value)))
            .collect::<Vec<_>>()
    };
    let intervals = run.precisions.iter().flat_map(|it| &it.tflops_intervals);
    let throughput: Vec<(f64, f64)> = intervals
        .zip(1_u32..)
        .map(|(rate, index)| (f64::from(index) * INTERVAL_S, f64::from(*rate)))
        .collect();
    let lines = [
        (
            "clock",
            polyline(&of_samples(|it| it.sm_mhz), run.load_s(), None),
        ),
        (
            "power",
            polyline(&of_samples(|it| it.power_mw), run.load_s(), limit_w),
        ),
        ("throughput", polyline(&throughput, run.measured_s, None)),
    ];
    markup! {
        figure {
            figcaption { (one_line(name)) }
            svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img"
                aria-label={ "throughput, power and clock of " (one_line(name)) " over " (format!("{:.0}", run.measured_s)) " s" } {
                @for (class, points) in &lines {
                    @if !points.is_empty() { polyline class=(class) points=(points) {} }
                }
            }
        }
    }
}

/// The points of a line from the bottom left (nothing, the first product) to the top right (`top`,
/// or the greatest value). What lies outside of the burn or is no number is left out.
fn polyline(points: &[(f64, f64)], whole_s: f64, top: Option<f64>) -> String {
    let within = || {
        points
            .iter()
            .filter(|(t, value)| *t >= 0.0 && *t <= whole_s && value.is_finite())
    };
    let greatest = within().map(|(_, value)| *value).fold(0.0, f64::max);
    let top = top.unwrap_or(greatest).max(greatest);
    let drawable = whole_s > 0.0 && top > 0.0;
    if !drawable {
        return String::new();
    }
    let point = |(t, value): &(f64, f64)| {
        let (x, y) = (t / whole_s * WIDTH, HEIGHT - value / top * HEIGHT);
        format!("{x:.1},{y:.1}")
    };
    within().map(point).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::polyline;

    #[test]
    fn a_line_runs_from_the_bottom_left_to_the_top_right() {
        let points = [
            (-1.0, 9.0),
            (0.0, 0.0),
            (5.0, 350.0),
            (10.0, 700.0),
            (11.0, 1.0),
        ];
        assert_eq!(
            polyline(&points, 10.0, None),
            "0.0,60.0 150.0,30.0 300.0,0.0"
        );
        assert_eq!(
            polyline(&points, 10.0, Some(1400.0)),
            "0.0,60.0 150.0,45.0 300.0,30.0"
        );
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        assert_eq!(polyline(&[], 10.0, None), "");
        assert_eq!(polyline(&[(1.0, f64::NAN)], 10.0, None), "");
        assert_eq!(polyline(&[(0.0, 1.0)], 0.0, None), "");
        assert_eq!(polyline(&[(0.0, 0.0)], 1.0, None), "");
    }
}
