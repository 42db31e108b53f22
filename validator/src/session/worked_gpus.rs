//! Which GPUs a run may work: those that were requested, are visible, work, and are free.

use crate::plan::BurnOptions;
use validator_core::facts::{Facts, GpuFacts, KernelRun, Reading, WorkerEnd};
use validator_core::queries::is_hidden;

/// The end of a worker that is not started on this GPU, or the reason why none is.
pub(super) fn why_not_worked(
    gpu: &GpuFacts,
    options: &BurnOptions,
    no_cuda: Option<&str>,
    kernel: Option<&Reading<KernelRun>>,
) -> Option<Reading<WorkerEnd>> {
    if let Some(lost) = &gpu.lost {
        return Some(Reading::NotRead(format!("the GPU is lost: {lost}")));
    }
    if let Some(reason) = no_cuda {
        return Some(Reading::NotRead(reason.to_owned()));
    }
    // A GPU that hung or failed with one small kernel would only do so again, for as long.
    let has_worked = |run: &KernelRun| matches!(run.end, WorkerEnd::Finished | WorkerEnd::Busy(_));
    if kernel.is_some_and(|it| !it.value().is_some_and(has_worked)) {
        return Some(Reading::NotRead(
            "the check kernel did not end well on this GPU".to_owned(),
        ));
    }
    if is_in_use(gpu, options) {
        let processes = gpu.processes.value().map_or(0, Vec::len);
        let reason = format!("{processes} other process(es) use it");
        return Some(Reading::Value(WorkerEnd::Busy(reason)));
    }
    None
}

/// Whether this GPU is among those that are requested.
pub(super) fn is_worked(uuid: &str, options: &BurnOptions) -> bool {
    options.gpus.is_empty() || options.gpus.iter().any(|it| it == uuid)
}

/// Whether others use a GPU that is not to be shared.
pub(super) fn is_in_use(gpu: &GpuFacts, options: &BurnOptions) -> bool {
    gpu.processes.value().is_some_and(|it| !it.is_empty()) && !options.share
}

/// The GPUs that `CUDA_VISIBLE_DEVICES` leaves, by UUID, where it hides some: working what is
/// hidden on purpose would disturb its owner. `Ok(None)` where nothing is hidden.
pub(crate) fn visible_gpus(facts: &Facts) -> Result<Option<Vec<String>>, String> {
    let (hidden, visible): (Vec<&GpuFacts>, Vec<&GpuFacts>) =
        facts.gpus.iter().partition(|gpu| is_hidden(gpu, facts));
    if hidden.is_empty() {
        return Ok(None);
    }
    // No names mean every GPU to a burn.
    if visible.is_empty() {
        return Err("CUDA_VISIBLE_DEVICES leaves no GPU to burn".to_owned());
    }
    let uuids = visible.iter().filter_map(|gpu| gpu.uuid.value().cloned());
    Ok(Some(uuids.collect()))
}

/// Without a driver library that initialises, no GPU can work. A probe that hung or crashed is no
/// such answer: each GPU is still tried on its own.
pub(crate) fn cuda_does_not_work(facts: &Facts) -> Option<String> {
    if let Reading::NotRead(reason) = &facts.cuda.library {
        return Some(format!("libcuda could not be loaded: {reason}"));
    }
    let init = facts.cuda.init.value().filter(|it| it.code != 0)?;
    Some(format!(
        "CUDA does not initialise: cuInit returned {} ({})",
        init.name, init.code
    ))
}
