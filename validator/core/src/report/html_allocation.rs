//! The allocation test in the HTML report: when each worker worked on which GPU, how much it did,
//! and which GPUs a command used under each layout.

use maud::{Markup, PreEscaped, html as markup};

use super::text::one_line;
use crate::allocation::{TestedWorker, phase_name, workers_of};
use crate::facts::{AllocationPhase, Facts, LayoutFacts};
use crate::layouts::{gpu_in_words, judge_layout, used_gpus};

const STYLE: &str = include_str!("html_allocation.css");

/// Of a picture, in its own units: names to the left, figures to the right.
const LEFT: f64 = 190.0;
const BARS: f64 = 560.0;
const RIGHT: f64 = 150.0;
const ROW: f64 = 16.0;
/// The narrowest bar that is seen.
const NARROWEST: f64 = 1.5;

const PHASES: [AllocationPhase; 5] = [
    AllocationPhase::Steady,
    AllocationPhase::ScalingOne,
    AllocationPhase::ScalingAll,
    AllocationPhase::Oversubscription,
    AllocationPhase::Killing,
];

/// Empty where neither workers nor layouts were requested.
pub(super) fn allocation(facts: &Facts) -> Markup {
    let timeline = bars(facts);
    let layouts = facts.load.layouts.as_deref();
    markup! {
        @if !timeline.is_empty() || layouts.is_some() {
            style { (PreEscaped(STYLE)) }
        }
        @if !timeline.is_empty() {
            h2 { "Allocation test" }
            p.small {
                "Each bar is one worker process: from left to right its time at work since the first one began, with its "
                "verified operations a second. Red did not succeed, grey was killed on purpose."
            }
            (picture_of_workers(facts, &timeline))
        }
        @if let Some(layouts) = layouts {
            h2 { "Layouts" }
            p.small {
                "Each line is one start of the command, each column a GPU: framed where it was given, filled where a process "
                "of the command used it."
            }
            (picture_of_layouts(facts, layouts))
        }
    }
}

/// A worker at work.
#[derive(Debug, PartialEq)]
struct Bar {
    gpu: String,
    phase: AllocationPhase,
    begin_s: f64,
    end_s: f64,
    class: &'static str,
    text: String,
}

/// By GPU, and by time for each; workers that never worked have no bar.
fn bars(facts: &Facts) -> Vec<Bar> {
    let workers = PHASES
        .iter()
        .flat_map(|phase| workers_of(facts, *phase).into_iter());
    let mut bars: Vec<Bar> = workers.filter_map(|it| bar_of(&it)).collect();
    let order = |gpu: &str| {
        let uuids = facts.gpus.iter().filter_map(|it| it.uuid.value());
        uuids.into_iter().position(|it| it == gpu)
    };
    bars.sort_by(|a, b| {
        let by_gpu = order(&a.gpu).cmp(&order(&b.gpu));
        by_gpu.then(a.begin_s.total_cmp(&b.begin_s))
    });
    bars
}

fn bar_of(tested: &TestedWorker<'_>) -> Option<Bar> {
    let begin_s = tested.worker.released_s?;
    let class = if tested.worker.killed {
        "killed"
    } else if tested
        .failure(tested.worker.phase == AllocationPhase::Oversubscription)
        .is_some()
    {
        "fail"
    } else {
        "pass"
    };
    let seconds = tested.run.measured.seconds;
    let is_drawable = begin_s.is_finite() && seconds.is_finite();
    is_drawable.then(|| Bar {
        gpu: tested.worker.gpu().to_owned(),
        phase: tested.worker.phase,
        begin_s,
        end_s: begin_s + seconds,
        class,
        text: format!("{:.1}/s", tested.operations_per_s()),
    })
}

fn picture_of_workers(facts: &Facts, bars: &[Bar]) -> Markup {
    let whole_s = bars.iter().map(|it| it.end_s).fold(0.0, f64::max);
    let scale = if whole_s > 0.0 { BARS / whole_s } else { 0.0 };
    let height = height(bars.len());
    markup! {
        svg.allocation viewBox={ "0 0 " (LEFT + BARS + RIGHT) " " (height) } role="img"
            aria-label={ "workers of the allocation test over " (format!("{whole_s:.0}")) " s" } {
            @for (bar, y) in bars.iter().zip(rows()) {
                rect.row x=(LEFT) y=(y) width=(BARS) height=(ROW - 2.0) {}
                text x="0" y=(y + ROW - 5.0) { (one_line(&gpu_in_words(facts, &bar.gpu))) }
                rect class=(bar.class)
                    x=(format!("{:.1}", LEFT + bar.begin_s * scale)) y=(y)
                    width=(format!("{:.1}", ((bar.end_s - bar.begin_s) * scale).max(NARROWEST)))
                    height=(ROW - 2.0) {}
                text x=(LEFT + BARS + 6.0) y=(y + ROW - 5.0) {
                    (bar.text) " " (phase_name(bar.phase))
                }
            }
        }
    }
}

fn picture_of_layouts(facts: &Facts, layouts: &LayoutFacts) -> Markup {
    let uuids: Vec<&String> = facts.gpus.iter().filter_map(|it| it.uuid.value()).collect();
    #[expect(clippy::cast_precision_loss, reason = "a number of GPUs")]
    let column = (BARS / uuids.len().max(1) as f64).min(60.0);
    markup! {
        svg.allocation viewBox={ "0 0 " (LEFT + BARS + RIGHT) " " (height(layouts.runs.len())) } role="img"
            aria-label="GPUs that the command was given and used under each layout" {
            @for (run, y) in layouts.runs.iter().zip(rows()) {
                @let result = judge_layout(run, facts);
                text x="0" y=(y + ROW - 5.0) {
                    (run.layout.name()) ": " (result.verdict)
                }
                @for (uuid, x) in uuids.iter().zip(columns(column)) {
                    @let is_given = run.given.contains(uuid);
                    @let is_used = used_gpus(run).contains(&uuid.as_str());
                    @if is_used {
                        rect class=(if is_given { "pass" } else { "fail" })
                            x=(x + 2.0) y=(y + 2.0) width=(column - 8.0) height=(ROW - 6.0) {}
                    }
                    @if is_given {
                        rect.given x=(x) y=(y) width=(column - 4.0) height=(ROW - 2.0) {}
                    }
                }
                text x=(LEFT + BARS + 6.0) y=(y + ROW - 5.0) { (format!("{:.1} s", run.seconds)) }
            }
        }
    }
}

/// Upper edges of rows.
fn rows() -> impl Iterator<Item = f64> {
    (0_u32..).map(|it| f64::from(it) * ROW)
}

/// Left edges of columns.
fn columns(width: f64) -> impl Iterator<Item = f64> {
    (0_u32..).map(move |it| LEFT + f64::from(it) * width)
}

fn height(rows: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a number of workers")]
    let rows = rows as f64;
    rows * ROW
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::{
        allocated_node, allocated_node_with_run, gpu_uuid, healthy_node, laid_out_node,
    };

    #[test]
    fn a_bar_for_each_worker_from_its_release_on() {
        let facts = allocated_node();
        let bars = bars(&facts);
        let workers = facts.load.allocation.as_ref().map(|it| it.workers.len());
        assert_eq!(Some(bars.len()), workers);
        let first = &bars[0];
        assert_eq!((first.gpu.as_str(), first.begin_s), (&gpu_uuid(0)[..], 0.0));
        assert!(first.end_s > first.begin_s && first.class == "pass");
        assert!(bars.iter().any(|it| it.class == "killed"));
        let text = allocation(&facts).into_string();
        // A row, its bar, and two texts for each worker.
        assert_eq!(text.matches("<rect").count(), 2 * bars.len());
        assert_eq!(text.matches("<text").count(), 2 * bars.len());
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn a_worker_that_failed_is_red() {
        let facts = allocated_node_with_run(|run| {
            run.end = crate::facts::Reading::Value(crate::facts::WorkerEnd::Killed { signal: 11 });
        });
        let failed: Vec<Bar> = bars(&facts)
            .into_iter()
            .filter(|it| it.class == "fail")
            .collect();
        assert_eq!(failed.len(), 1);
        assert_eq!(failed[0].gpu, gpu_uuid(2));
    }

    #[test]
    fn given_gpus_are_framed_and_a_stray_is_red() {
        let mut facts = laid_out_node();
        let count = |facts: &Facts, class: &str| {
            let text = allocation(facts).into_string();
            text.matches(&format!("<rect class=\"{class}\"")).count()
        };
        // One, eight, four, none.
        assert_eq!(count(&facts, "given"), 13);
        assert_eq!(count(&facts, "pass"), 13);
        assert_eq!(count(&facts, "fail"), 0);
        let layouts = facts.load.layouts.as_mut().expect("layouts");
        let stray = layouts.runs[3].gpus.entry(gpu_uuid(1)).or_default();
        stray.own.insert(7);
        assert_eq!(count(&facts, "fail"), 1);
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        assert_eq!(allocation(&healthy_node()).into_string(), "");
    }
}
