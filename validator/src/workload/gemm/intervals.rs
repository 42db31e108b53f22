//! The rate of a burn over time.

use std::time::Instant;

/// Length of an interval, until there are too many.
pub(super) const INTERVAL_S: f64 = 0.5;
/// Of a burn that is longer (a quarter of an hour), two neighbours become one, again and again: its
/// report does not grow with its time.
const INTERVALS_MAXIMUM: usize = 2_000;

/// The interval that is not over yet.
#[derive(Debug)]
pub(super) struct Interval {
    length_s: f64,
    began: Instant,
    products: u64,
    /// Time on the GPU.
    seconds: f64,
}

impl Interval {
    pub(super) fn first() -> Self {
        Self::of_length(INTERVAL_S)
    }

    fn of_length(length_s: f64) -> Self {
        Self {
            length_s,
            began: Instant::now(),
            products: 0,
            seconds: 0.0,
        }
    }

    /// Adds products that took `seconds` on the GPU; once the interval is over its rate goes into
    /// `rates`, in TFLOP/s as `rate` returns it.
    pub(super) fn add(
        &mut self,
        (products, seconds): (u64, f64),
        rates: &mut Vec<f32>,
        rate: impl FnOnce(u64, f64) -> f64,
    ) {
        self.products += products;
        self.seconds += seconds;
        if self.began.elapsed().as_secs_f64() < self.length_s {
            return;
        }
        rates.push(in_four_digits(rate(self.products, self.seconds)));
        if rates.len() >= INTERVALS_MAXIMUM {
            halve(rates);
            self.length_s *= 2.0;
        }
        *self = Self::of_length(self.length_s);
    }
}

/// Two neighbours, which took the same time, become their mean.
fn halve(rates: &mut Vec<f32>) {
    let mean = |pair: &[f32]| {
        let sum: f64 = pair.iter().copied().map(f64::from).sum();
        in_four_digits(sum / if pair.len() == 2 { 2.0 } else { 1.0 })
    };
    *rates = rates.chunks(2).map(mean).collect();
}

/// A rate as it goes into the facts, where there are many.
#[expect(clippy::cast_possible_truncation, reason = "four digits are left")]
fn in_four_digits(rate: f64) -> f32 {
    if !rate.is_normal() {
        return rate as f32;
    }
    let unit = 10_f64.powf(rate.abs().log10().floor() - 3.0);
    ((rate / unit).round() * unit) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burn_of_a_week_has_no_more_rates_than_one_of_an_hour() {
        let mut interval = Interval::first();
        let mut rates = Vec::new();
        let mut added = 0.0;
        for index in 0..100_000_u32 {
            // As if it were over.
            interval.began = Instant::now()
                .checked_sub(std::time::Duration::from_secs_f64(interval.length_s))
                .expect("the machine is up for longer");
            added += interval.length_s;
            let value = if index % 2 == 0 { 600.0 } else { 700.0 };
            interval.add((1, 0.1), &mut rates, |_, _| value);
            if interval.length_s > 60.0 {
                break;
            }
        }
        assert!(added > 60_000.0, "{added}");
        assert!(rates.len() <= INTERVALS_MAXIMUM, "{}", rates.len());
        assert!(rates.len() >= INTERVALS_MAXIMUM / 2, "{}", rates.len());
        let whole = rates[..INTERVALS_MAXIMUM / 4].iter();
        assert!(whole.into_iter().all(|it| (it - 650.0).abs() < 0.1));
    }

    #[test]
    fn rates_keep_four_digits() {
        for (rate, text) in [
            (675.1234, "675.1"),
            (50.5678, "50.57"),
            (1319.49, "1319"),
            (0.0, "0"),
        ] {
            assert_eq!(in_four_digits(rate).to_string(), text);
        }
        assert!(in_four_digits(f64::NAN).is_nan());
        assert!((in_four_digits(0.000_251_234) - 0.000_251_2).abs() < 1e-9);
    }
}
