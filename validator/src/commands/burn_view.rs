//! What a person sees of a burn while it runs: a live view on a terminal, a plain line now and then
//! elsewhere.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::burn_options::gibibytes;
use super::terminal::to_stderr;
use crate::plan::BurnProgress;
use crate::plan::BurnState;
use validator_core::burned;
use validator_core::facts::{ClocksEventReasons, Facts, GpuFacts, SensorSample};
use validator_core::reference::GemmRate;

/// Between two plain lines about a GPU.
const LINE_PERIOD: Duration = Duration::from_secs(5);
/// Steps of the bar of a whole burn.
const BAR_STEPS: u64 = 1000;

pub(super) struct BurnView {
    gpus: BTreeMap<String, GpuFacts>,
    duration: Duration,
    shown: Shown,
}

enum Shown {
    /// One line a GPU, and the bar below them; the lines appear in the order in which the GPUs do.
    Live {
        screen: MultiProgress,
        lines: BTreeMap<String, ProgressBar>,
        bar: ProgressBar,
    },
    Lines(Option<Instant>),
}

impl BurnView {
    pub(super) fn new(facts: &Facts, duration: Duration) -> Self {
        let gpus = facts
            .gpus
            .iter()
            .filter_map(|gpu| Some((gpu.uuid.value()?.clone(), gpu.clone())))
            .collect();
        let shown = if std::io::stderr().is_terminal() {
            let screen = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
            let bar = screen.add(ProgressBar::new(BAR_STEPS));
            bar.set_style(style("[{bar:20}] {wide_msg}"));
            Shown::Live {
                screen,
                lines: BTreeMap::new(),
                bar,
            }
        } else {
            Shown::Lines(None)
        };
        Self {
            gpus,
            duration,
            shown,
        }
    }

    /// A line for each GPU, for the run file.
    pub(super) fn lines(&self, progress: &[BurnProgress]) -> Vec<String> {
        let line = |gpu: &BurnProgress| {
            let words = words(gpu, self.gpus.get(&gpu.uuid), Width::Whole);
            format!("{words}, {:.0} s left", gpu.remaining_s)
        };
        progress.iter().map(line).collect()
    }

    pub(super) fn show(&mut self, progress: &[BurnProgress]) {
        match &mut self.shown {
            Shown::Live { screen, lines, bar } => {
                for gpu in progress {
                    let line = lines.entry(gpu.uuid.clone()).or_insert_with(|| {
                        let line = screen.insert_before(bar, ProgressBar::no_length());
                        line.set_style(style("{wide_msg}"));
                        line
                    });
                    line.set_message(words(gpu, self.gpus.get(&gpu.uuid), Width::Short));
                }
                let (done, text) = overall(progress, self.duration);
                bar.set_message(text);
                bar.set_position(done);
            }
            Shown::Lines(shown) => {
                let running = progress.iter().any(|it| it.state == BurnState::Running);
                let due = shown.map_or(running, |it| it.elapsed() >= LINE_PERIOD);
                if due {
                    *shown = Some(Instant::now());
                    for line in self.lines(progress) {
                        to_stderr(&format!("{line}\n"));
                    }
                }
            }
        }
    }
}

impl Drop for BurnView {
    fn drop(&mut self) {
        if let Shown::Live { screen, lines, bar } = &self.shown {
            for line in lines.values() {
                line.finish_and_clear();
            }
            bar.finish_and_clear();
            // A terminal that is gone shows nothing any more.
            let _ = screen.clear();
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    // The templates are constants, and a bar without its style is still a bar.
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// How far the slowest GPU is, in steps of the bar, and the same in words.
fn overall(progress: &[BurnProgress], duration: Duration) -> (u64, String) {
    let running = || progress.iter().filter(|it| it.state != BurnState::Ended);
    let elapsed_s = running()
        .map(|it| it.elapsed_s)
        .fold(f64::INFINITY, f64::min);
    let whole_s = duration.as_secs_f64();
    let elapsed_s = if elapsed_s.is_finite() {
        elapsed_s.min(whole_s)
    } else {
        whole_s
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "steps of a bar"
    )]
    let steps = (elapsed_s / whole_s * BAR_STEPS as f64) as u64;
    let tflops: f64 = running().map(|it| it.tflops_now).sum();
    let mismatches: u64 = progress.iter().map(|it| it.mismatches).sum();
    (
        steps,
        format!(
            "{elapsed_s:.0} of {whole_s:.0} s, {:.0} s left, {tflops:.0} TFLOP/s together, {mismatches} mismatches; Ctrl-C stops",
            whole_s - elapsed_s
        ),
    )
}

#[derive(Clone, Copy, PartialEq)]
enum Width {
    /// For one line of a terminal, of which the end may be cut off: what matters most comes first.
    Short,
    Whole,
}

/// What one GPU does.
fn words(progress: &BurnProgress, gpu: Option<&GpuFacts>, width: Width) -> String {
    let mut text = match width {
        Width::Whole => progress.uuid.clone(),
        Width::Short => gpu.and_then(|gpu| gpu.pci_address.value()).map_or_else(
            || progress.uuid.clone(),
            |it| it.trim_start_matches("0000:").to_owned(),
        ),
    };
    if progress.mismatches > 0 {
        let _ = write!(text, " {} MISMATCHES", progress.mismatches);
    }
    let state = match progress.state {
        BurnState::Starting => " starting",
        BurnState::Running if width == Width::Short => "",
        BurnState::Running => " running",
        BurnState::Ended => " ended",
    };
    text.push_str(state);
    // Writing to a string does not fail.
    if let Some(precision) = progress.precision {
        let of_reference = gpu
            .and_then(|gpu| burned::reference_of(gpu, &progress.kernels, precision))
            .and_then(|rate| match rate {
                GemmRate::Measured { tflops, .. } => Some(progress.tflops_mean / tflops * 100.0),
                GemmRate::Floor { .. } => None,
            })
            .map_or(String::new(), |percent| {
                format!(", {percent:.0} % of reference")
            });
        let _ = write!(
            text,
            " {precision} {:.1} TFLOP/s (mean {:.1}{of_reference})",
            progress.tflops_now, progress.tflops_mean
        );
    }
    let sensors = progress.sensors.unwrap_or_default();
    push_sensors(&mut text, sensors, progress.power_limit_mw);
    if progress.precision.is_some() {
        let _ = write!(
            text,
            ", {} products verified, {} mismatches, {:.1} GiB",
            progress.products_verified,
            progress.mismatches,
            gibibytes(progress.memory_bytes),
        );
    }
    let reasons = sensors.reasons.unwrap_or(0) & !ClocksEventReasons::GPU_IDLE;
    if reasons != 0 {
        let _ = write!(text, ", {}", ClocksEventReasons(reasons).names().join(" "));
    }
    text
}

fn push_sensors(text: &mut String, sensors: SensorSample, power_limit_mw: Option<u32>) {
    if let Some(power) = sensors.power_mw {
        let _ = match power_limit_mw {
            Some(limit) => write!(text, ", {} of {} W", power / 1000, limit / 1000),
            None => write!(text, ", {} W", power / 1000),
        };
    }
    if let Some(clock) = sensors.sm_mhz {
        let _ = write!(text, ", {clock} MHz");
    }
    if let Some(degrees) = sensors.gpu_c {
        let _ = write!(text, ", {degrees} °C");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::Precision;
    use validator_core::test_machine::healthy_node;

    fn running(uuid: &str) -> BurnProgress {
        BurnProgress {
            uuid: uuid.to_owned(),
            state: BurnState::Running,
            precision: Some(Precision::Bf16),
            kernels: "sm_90a".to_owned(),
            tflops_now: 660.4,
            tflops_mean: 661.2,
            products_verified: 300,
            elapsed_s: 1.0,
            remaining_s: 9.0,
            memory_bytes: 1 << 31,
            power_limit_mw: Some(700_000),
            sensors: Some(SensorSample {
                power_mw: Some(698_200),
                sm_mhz: Some(1455),
                gpu_c: Some(62),
                reasons: Some(0x4),
                ..SensorSample::default()
            }),
            ..BurnProgress::default()
        }
    }

    #[test]
    fn a_line_says_what_a_gpu_does() {
        let facts = healthy_node();
        assert_eq!(
            words(&running("GPU-a"), Some(&facts.gpus[0]), Width::Whole),
            "GPU-a running bf16 660.4 TFLOP/s (mean 661.2, 100 % of reference), 698 of 700 W, 1455 MHz, 62 °C, 300 products verified, 0 mismatches, 2.0 GiB, sw_power_cap"
        );
        let short = words(&running("GPU-0123"), None, Width::Short);
        assert!(short.starts_with("GPU-0123 bf16 660.4 TFLOP/s (mean 661.2), 698 of 700 W"));
        let wrong = BurnProgress {
            mismatches: 3,
            ..running("GPU-a")
        };
        let short = words(&wrong, Some(&facts.gpus[1]), Width::Short);
        assert!(short.contains(" 3 MISMATCHES bf16 "), "{short}");
        assert!(!short.starts_with("GPU-a"), "{short}");
        let starting = BurnProgress {
            uuid: "GPU-a".to_owned(),
            ..BurnProgress::default()
        };
        assert_eq!(words(&starting, None, Width::Whole), "GPU-a starting");
    }

    #[test]
    fn the_bar_follows_the_slowest_gpu_that_still_burns() {
        let behind = BurnProgress {
            elapsed_s: 0.5,
            mismatches: 2,
            ..running("GPU-b")
        };
        let ended = BurnProgress {
            state: BurnState::Ended,
            elapsed_s: 0.1,
            ..running("GPU-c")
        };
        let duration = Duration::from_secs(10);
        let (steps, text) = overall(&[running("GPU-a"), behind, ended.clone()], duration);
        assert_eq!(steps, 50);
        assert_eq!(
            text,
            "0 of 10 s, 10 s left, 1321 TFLOP/s together, 2 mismatches; Ctrl-C stops"
        );
        assert_eq!(overall(&[ended], duration).0, BAR_STEPS);
    }
}
