//! A time plot as SVG: lines over seconds, axes with ticks and units, limits and marked stretches.
//!
//! Colours and strokes are classes of the page's style sheet, so that a plot follows its theme and
//! its print style.

use maud::{Markup, html as markup};

/// Of a plot, in its own units; about as many pixels on a phone.
const WIDTH: f64 = 420.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 44.0;
const RIGHT: f64 = 8.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 34.0;
/// About so many ticks on an axis.
const TICKS: f64 = 5.0;
/// Points of a line beyond these become the extremes of stretches.
const POINTS_MAXIMUM: usize = 400;
/// Lines of different colours; the next ones are dashed.
const COLORS: usize = 8;

/// One plot.
pub(super) struct Plot {
    /// `Power`.
    pub(super) title: &'static str,
    /// `W`.
    pub(super) unit: &'static str,
    /// The end of the time axis, in seconds from 0.
    pub(super) seconds: f64,
    /// Whether the value axis begins at 0.
    pub(super) from_zero: bool,
    pub(super) lines: Vec<Line>,
    pub(super) limits: Vec<Limit>,
}

/// The values of one GPU.
pub(super) struct Line {
    /// Its place in the legend, which has its colour.
    pub(super) place: usize,
    pub(super) name: String,
    /// Seconds and values, in the order of time.
    pub(super) points: Vec<(f64, f64)>,
    /// Stretches that are marked, from and to in seconds, with what happened.
    pub(super) marked: Vec<(f64, f64, String)>,
    /// Why the line ends before the plot does.
    pub(super) cut: Option<String>,
}

/// A horizontal line.
pub(super) struct Limit {
    pub(super) name: String,
    pub(super) value: f64,
}

/// The classes of a line's colour and dash.
pub(super) fn line_classes(place: usize) -> String {
    let dashed = if place / COLORS % 2 == 1 {
        " dashed"
    } else {
        ""
    };
    format!("line g{}{dashed}", place % COLORS)
}

impl Plot {
    /// The figure; nothing where there is no value.
    pub(super) fn markup(mut self) -> Markup {
        let seconds = self.seconds;
        for line in &mut self.lines {
            line.points
                .retain(|(t, value)| *t >= 0.0 && *t <= seconds && value.is_finite());
            line.points = thinned(&line.points);
        }
        self.lines.retain(|it| !it.points.is_empty());
        let Some(scale) = self.scale() else {
            return markup! {};
        };
        markup! {
            figure {
                figcaption { (self.title) " (" (self.unit) ")" }
                svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label=(self.described()) {
                    (scale.axes())
                    @for limit in &self.limits { (scale.limit(limit, self.unit)) }
                    @for line in &self.lines {
                        @for stretch in &line.marked { (scale.marked(line, stretch)) }
                    }
                    @for line in &self.lines { (scale.line(line)) }
                }
            }
        }
    }

    /// For those who do not see it.
    fn described(&self) -> String {
        let (lowest, highest) = self.extremes();
        let lines = match self.lines.as_slice() {
            [line] => line.name.clone(),
            lines => format!("{} GPUs", lines.len()),
        };
        format!(
            "{} of {lines} over {:.0} s: {} to {} {}",
            self.title,
            self.seconds,
            number(lowest),
            number(highest),
            self.unit
        )
    }

    fn extremes(&self) -> (f64, f64) {
        let values = self.lines.iter().flat_map(|it| &it.points);
        values.fold(
            (f64::INFINITY, f64::NEG_INFINITY),
            |(low, high), (_, value)| (low.min(*value), high.max(*value)),
        )
    }

    fn scale(&self) -> Option<Scale> {
        let (lowest, highest) = self.extremes();
        let limits = self.limits.iter().map(|it| it.value);
        let highest = limits.fold(highest, f64::max);
        let lowest = if self.from_zero {
            lowest.min(0.0)
        } else {
            lowest
        };
        let drawable = self.seconds > 0.0 && lowest.is_finite() && highest.is_finite();
        drawable.then(|| {
            let step = step(highest - lowest);
            let bottom = (lowest / step).floor() * step;
            let top = (highest / step).ceil() * step;
            Scale {
                seconds: self.seconds,
                bottom,
                top: if top > bottom { top } else { bottom + step },
                step,
            }
        })
    }
}

/// 1, 2 or 5 of a power of ten, so that about [`TICKS`] of them span `range`.
fn step(range: f64) -> f64 {
    let raw = range / TICKS;
    if raw.is_nan() || raw <= 0.0 {
        return 1.0;
    }
    let power = 10.0_f64.powf(raw.log10().floor());
    let nice = [1.0, 2.0, 5.0, 10.0].map(|it| it * power);
    nice.into_iter().find(|it| *it >= raw).unwrap_or(raw)
}

/// Without digits that say nothing.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// At most [`POINTS_MAXIMUM`] points, with the lowest and the highest of every stretch.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= POINTS_MAXIMUM {
        return points.to_vec();
    }
    let stretch = points.len().div_ceil(POINTS_MAXIMUM / 2);
    let extremes = |points: &[(f64, f64)]| {
        let by_value = |one: &&(f64, f64), other: &&(f64, f64)| one.1.total_cmp(&other.1);
        let lowest = points.iter().min_by(by_value).copied();
        let highest = points.iter().max_by(by_value).copied();
        let mut both: Vec<(f64, f64)> = lowest.into_iter().chain(highest).collect();
        both.sort_by(|one, other| one.0.total_cmp(&other.0));
        both
    };
    points.chunks(stretch).flat_map(extremes).collect()
}

/// Where seconds and values are in a plot.
#[derive(Debug)]
struct Scale {
    seconds: f64,
    bottom: f64,
    top: f64,
    step: f64,
}

impl Scale {
    fn x(&self, seconds: f64) -> f64 {
        LEFT + seconds / self.seconds * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        let share = (value - self.bottom) / (self.top - self.bottom);
        HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
    }

    fn points(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        let point = |(t, value)| format!("{:.1},{:.1}", self.x(t), self.y(value));
        points.map(point).collect::<Vec<_>>().join(" ")
    }

    fn axes(&self) -> Markup {
        let (left, right) = (tenths(LEFT), tenths(WIDTH - RIGHT));
        let base = HEIGHT - BOTTOM;
        markup! {
            @for value in ticks(self.bottom, self.top, self.step) {
                line.grid x1=(left) x2=(right) y1=(tenths(self.y(value))) y2=(tenths(self.y(value))) {}
                text.tick x=(tenths(LEFT - 5.0)) y=(tenths(self.y(value) + 4.0)) text-anchor="end" { (number(value)) }
            }
            @for value in ticks(0.0, self.seconds, step(self.seconds)) {
                line.grid x1=(tenths(self.x(value))) x2=(tenths(self.x(value))) y1=(tenths(base)) y2=(tenths(base + 4.0)) {}
                text.tick x=(tenths(self.x(value))) y=(tenths(base + 16.0)) text-anchor="middle" { (number(value)) }
            }
            line.axis x1=(left) x2=(right) y1=(tenths(base)) y2=(tenths(base)) {}
            text.tick x=(right) y=(tenths(HEIGHT - 3.0)) text-anchor="end" { "seconds since the first product" }
        }
    }

    fn limit(&self, limit: &Limit, unit: &str) -> Markup {
        let y = self.y(limit.value);
        markup! {
            line.limit x1=(tenths(LEFT)) x2=(tenths(WIDTH - RIGHT)) y1=(tenths(y)) y2=(tenths(y)) {}
            text.limit x=(tenths(WIDTH - RIGHT)) y=(tenths(y - 3.0)) text-anchor="end" {
                (limit.name) " " (number(limit.value)) " " (unit)
            }
        }
    }

    fn line(&self, line: &Line) -> Markup {
        let end = line.points.last().filter(|_| line.cut.is_some());
        markup! {
            polyline class=(line_classes(line.place)) points=(self.points(line.points.iter().copied())) {
                title { (line.name) }
            }
            @if let Some((t, value)) = end {
                g.cut {
                    title { (line.name) ": " (line.cut.as_deref().unwrap_or_default()) }
                    path d=(cross(self.x(*t), self.y(*value))) {}
                }
            }
        }
    }

    /// The stretch of the line, broad below it.
    fn marked(&self, line: &Line, (from, to, what): &(f64, f64, String)) -> Markup {
        let within = line
            .points
            .iter()
            .copied()
            .filter(|(t, _)| t >= from && t <= to);
        let mut points: Vec<(f64, f64)> = within.collect();
        // A single point has no length, and would not be seen.
        if let [(t, value)] = points[..] {
            points.push((t + self.seconds / 100.0, value));
        }
        markup! {
            @if !points.is_empty() {
                polyline.marked points=(self.points(points.into_iter())) {
                    title { (line.name) ": " (what) }
                }
            }
        }
    }
}

fn ticks(from: f64, to: f64, step: f64) -> Vec<f64> {
    let mut ticks = Vec::new();
    let mut value = from;
    while value <= to + step / 1000.0 && ticks.len() < 20 {
        ticks.push(value);
        value += step;
    }
    ticks
}

fn tenths(value: f64) -> String {
    format!("{value:.1}")
}

fn cross(x: f64, y: f64) -> String {
    const ARM: f64 = 4.0;
    let (left, right, above, below) = (x - ARM, x + ARM, y - ARM, y + ARM);
    format!(
        "M{left:.1},{above:.1} {right:.1},{below:.1} M{left:.1},{below:.1} {right:.1},{above:.1}"
    )
}

#[cfg(test)]
mod tests {
    use super::{Limit, Line, POINTS_MAXIMUM, Plot, line_classes, step, thinned, ticks};

    fn plot(points: Vec<(f64, f64)>) -> Plot {
        Plot {
            title: "Power",
            unit: "W",
            seconds: 10.0,
            from_zero: true,
            lines: vec![Line {
                place: 0,
                name: "GPU 0".to_owned(),
                points,
                marked: Vec::new(),
                cut: None,
            }],
            limits: Vec::new(),
        }
    }

    #[test]
    fn a_line_runs_from_the_bottom_left_to_the_top_right() {
        let points = vec![
            (-1.0, 9.0),
            (0.0, 0.0),
            (5.0, 350.0),
            (10.0, 700.0),
            (11.0, 1.0),
        ];
        let text = plot(points.clone()).markup().into_string();
        // 800 is the next tick above 700.
        assert!(
            text.contains(r#"points="44.0,186.0 228.0,109.9 412.0,33.8""#),
            "{text}"
        );
        assert!(
            text.contains("Power of GPU 0 over 10 s: 0 to 700 W"),
            "{text}"
        );
        let mut limited = plot(points);
        limited.limits.push(Limit {
            name: "limit".to_owned(),
            value: 1000.0,
        });
        let text = limited.markup().into_string();
        assert!(
            text.contains(r#"points="44.0,186.0 228.0,125.1 412.0,64.2""#),
            "{text}"
        );
        assert!(text.contains("limit 1000 W"), "{text}");
    }

    #[test]
    fn marks_and_cuts_are_drawn_with_their_reason() {
        let mut plot = plot(vec![(0.0, 1.0), (2.0, 2.0), (4.0, 1.0)]);
        plot.lines[0].marked = vec![(1.0, 3.0, "hw_slowdown".to_owned())];
        plot.lines[0].cut = Some("Xid 79".to_owned());
        let text = plot.markup().into_string();
        assert!(text.contains("GPU 0: hw_slowdown"), "{text}");
        assert!(text.contains("GPU 0: Xid 79"), "{text}");
    }

    #[test]
    fn nothing_is_drawn_of_nothing() {
        for points in [vec![], vec![(1.0, f64::NAN)], vec![(-1.0, 1.0)]] {
            assert_eq!(plot(points).markup().into_string(), "");
        }
        let mut endless = plot(vec![(0.0, 1.0)]);
        endless.seconds = 0.0;
        assert_eq!(endless.markup().into_string(), "");
        // All zero still has an axis.
        assert!(
            plot(vec![(1.0, 0.0)])
                .markup()
                .into_string()
                .contains("polyline")
        );
    }

    #[test]
    fn steps_are_round() {
        let close = |one: f64, other: f64| (one - other).abs() < 1e-9 * other;
        assert!(close(step(700.0), 200.0) && close(step(4.9), 1.0) && close(step(60.0), 20.0));
        assert!(close(step(0.0), 1.0) && close(step(f64::NAN), 1.0));
        assert_eq!(ticks(0.0, 60.0, 20.0), [0.0, 20.0, 40.0, 60.0]);
        assert!(ticks(0.0, 1e9, 1e-9).len() <= 20);
    }

    #[test]
    fn a_long_line_keeps_its_extremes() {
        let points: Vec<(f64, f64)> = (0..5_000)
            .map(|it| (f64::from(it), if it == 1_234 { 99.0 } else { 50.0 }))
            .collect();
        let kept = thinned(&points);
        assert!(kept.len() <= POINTS_MAXIMUM, "{}", kept.len());
        assert!(kept.contains(&(1_234.0, 99.0)));
        assert!(kept.is_sorted_by(|one, other| one.0 <= other.0));
    }

    #[test]
    fn the_ninth_line_has_the_first_colour_dashed() {
        assert_eq!(line_classes(0), "line g0");
        assert_eq!(line_classes(8), "line g0 dashed");
        assert_eq!(line_classes(16), "line g0");
    }
}
