//! A GPU against the others of its model in the same node.

use crate::facts::{Facts, GpuFacts};

/// Fewer neighbours have no median that one of them could not move.
const NEIGHBOURS_MINIMUM: usize = 3;
/// Scaled median absolute deviations beyond which a value is an outlier.
// Source: Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993), take 3.5; six, since a board has few GPUs.
const DEVIATIONS: f64 = 6.0;
/// Makes the median absolute deviation of normally distributed values their standard deviation.
const NORMAL: f64 = 1.4826;

/// The median of `others`, where `own` is above it by more than `least` and more than their spread explains.
pub(crate) fn median_below(own: f64, mut others: Vec<f64>, least: f64) -> Option<f64> {
    if others.len() < NEIGHBOURS_MINIMUM {
        return None;
    }
    let middle = median(&mut others)?;
    let mut distances: Vec<f64> = others.iter().map(|it| (it - middle).abs()).collect();
    let spread = median(&mut distances)? * NORMAL;
    (own - middle > least.max(DEVIATIONS * spread)).then_some(middle)
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let upper = values.len() / 2;
    let lower = values.len().checked_sub(1)? / 2;
    Some(f64::midpoint(*values.get(lower)?, *values.get(upper)?))
}

/// The other GPUs of this model that are idle, too; nothing where this GPU is not known to be.
pub(crate) fn idle_neighbours<'a>(gpu: &'a GpuFacts, facts: &'a Facts) -> Vec<&'a GpuFacts> {
    if !is_idle(gpu) {
        return Vec::new();
    }
    let same = |it: &&GpuFacts| it.uuid != gpu.uuid && it.name.value() == gpu.name.value();
    let others = facts.gpus.iter().filter(same);
    others.filter(|it| is_idle(it)).collect()
}

/// Without a process, without work in NVML's last sampling period where that was read (the probe leaves the utilization of GPUs
/// without processes out), and with clocks that have fallen: a GPU whose job has just ended draws more for some seconds.
fn is_idle(gpu: &GpuFacts) -> bool {
    let has_no_process = gpu.processes.value().is_some_and(Vec::is_empty);
    let utilization = gpu.utilization.value();
    has_no_process && utilization.is_none_or(|it| it.gpu_percent == 0) && has_idle_clocks(gpu)
}

/// At most half of the greatest SM clock: Hopper idles at 345 of 1980 MHz (`tests/facts`), and works above half.
fn has_idle_clocks(gpu: &GpuFacts) -> bool {
    let clocks = gpu.clocks.value();
    clocks.is_some_and(|it| it.max_sm_mhz.is_some_and(|max| it.sm_mhz <= max / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outlier_is_above_the_least_difference_and_the_spread() {
        let near = vec![38.0, 39.0, 40.0, 39.0];
        assert_eq!(median_below(60.0, near.clone(), 15.0), Some(39.0));
        assert_eq!(median_below(54.0, near.clone(), 15.0), None);
        assert_eq!(median_below(10.0, near.clone(), 15.0), None);
        let wide = vec![30.0, 40.0, 50.0, 60.0];
        assert_eq!(median_below(75.0, wide, 15.0), None);
        assert_eq!(median_below(90.0, near[..2].to_vec(), 15.0), None);
    }
}
