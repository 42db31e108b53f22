//! The allocation test as two tables: one line for each worker, one for each GPU.

use std::fmt::Write as _;

use super::one_line;
use crate::allocation::{TestedWorker, jain_index, scaling, workers_of};
use crate::facts::{AllocationPhase, Facts};

/// The steady phase by worker and by GPU, and how the GPUs scale; empty where no test ran.
pub fn allocation_table(facts: &Facts) -> String {
    let workers = workers_of(facts, AllocationPhase::Steady);
    let mut text = String::new();
    if workers.is_empty() {
        return text;
    }
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{:<44} {:>10} {:>9} {:>9} {:>9}  result",
        "worker", "operations", "a second", "MiB peak", "start ms"
    );
    for worker in &workers {
        let detail = worker.detail.clone().unwrap_or_default();
        let result = worker.failure(false);
        let _ = writeln!(
            text,
            "{:<44} {:>10} {:>9.1} {:>9} {:>9.0}  {}",
            format!("{} {}", worker.worker.gpu(), worker.worker.id.ordinal),
            detail.operations,
            worker.operations_per_s(),
            detail.peak_memory_bytes >> 20,
            worker.run.measured.start_ms,
            one_line(result.as_deref().unwrap_or("ok")),
        );
    }
    let _ = writeln!(
        text,
        "{:<44} {:>10} {:>9} {:>9} {:>9}",
        "GPU", "workers", "a second", "fairness", "slowest"
    );
    for gpu in gpus_of(&workers) {
        let of_gpu = workers.iter().filter(|it| it.worker.gpu() == gpu);
        let rates: Vec<f64> = of_gpu.map(TestedWorker::operations_per_s).collect();
        let fairness = jain_index(&rates).map_or("-".to_owned(), |it| format!("{it:.3}"));
        let slowest = rates.iter().copied().fold(f64::INFINITY, f64::min);
        let _ = writeln!(
            text,
            "{gpu:<44} {:>10} {:>9.1} {fairness:>9} {slowest:>9.1}",
            rates.len(),
            rates.iter().sum::<f64>(),
        );
    }
    if let Some(scaling) = scaling(facts) {
        let _ = writeln!(
            text,
            "{} GPUs are {:.2} times one: {:.1} operations a second after {:.1}",
            scaling.gpus,
            scaling.factor(),
            scaling.all,
            scaling.one,
        );
    }
    text
}

/// UUIDs in the order of their first workers.
fn gpus_of<'w>(workers: &'w [TestedWorker<'_>]) -> Vec<&'w str> {
    let mut gpus = Vec::new();
    for worker in workers {
        if !gpus.contains(&worker.worker.gpu()) {
            gpus.push(worker.worker.gpu());
        }
    }
    gpus
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::{allocated_node, healthy_node};

    #[test]
    fn a_line_for_each_worker_and_gpu_and_one_for_all() {
        let text = allocation_table(&allocated_node());
        let lines: Vec<&str> = text.lines().collect();
        // Eight GPUs with two workers each, and a head for each table.
        assert_eq!(lines.len(), 1 + 16 + 1 + 8 + 1, "{text}");
        assert!(lines[1].ends_with("  ok"), "{text}");
        assert!(lines[18].contains("1.000"), "{text}");
        assert_eq!(
            lines[26],
            "8 GPUs are 8.00 times one: 800.0 operations a second after 100.0"
        );
        assert_eq!(allocation_table(&healthy_node()), "");
    }
}
