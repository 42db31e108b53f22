//! How a worker starts CUDA and finds its device.

use validator_core::facts::WorkerEnd;

use crate::cuda::{CudaFailure, CudaLibrary, Device};
use crate::worker::device_isolation::Attempt;
use crate::worker::protocol::Reporter;

/// The first step that needs the context.
pub(crate) const FIRST_USE_OF_CONTEXT: &str = "cuModuleLoadData";

/// For a worker that may be without its GPU only because others' nodes were kept from it.
pub(crate) fn retry_with_all_nodes(end: WorkerEnd) -> Attempt {
    Attempt::RetryWithAllNodes(match end {
        WorkerEnd::CudaError { call, code, name } => format!("{call} returned {name} ({code})"),
        WorkerEnd::Exited { stderr, .. } => stderr,
        other => format!("{other:?}"),
    })
}

/// The driver, ready for queries of devices; it stays loaded as long as the process lives.
fn started_cuda(reporter: &Reporter) -> Result<&'static CudaLibrary, WorkerEnd> {
    reporter.step("dlopen of libcuda.so.1");
    let cuda = CudaLibrary::load().map_err(exited)?;
    reporter.step("cuInit");
    match cuda.initialize()? {
        0 => Ok(Box::leak(Box::new(cuda))),
        code => Err(WorkerEnd::CudaError {
            call: "cuInit".to_owned(),
            code,
            name: cuda.result_name(code),
        }),
    }
}

/// UUIDs of the devices that CUDA shows this process.
pub(crate) fn visible_uuids(reporter: &Reporter) -> Result<Vec<String>, WorkerEnd> {
    let devices = started_cuda(reporter)?.devices()?;
    devices.iter().map(|it| Ok(it.uuid()?)).collect()
}

/// Whether two UUIDs name one device: a driver may spell a MIG device's with either prefix; the
/// rest is what identifies it.
pub(crate) fn is_same_device(one: &str, other: &str) -> bool {
    one[4.min(one.len())..] == other[4.min(other.len())..]
}

/// Starts CUDA and finds the GPU or MIG device with this UUID.
pub(crate) fn device_with(uuid: &str, reporter: &Reporter) -> Result<Device<'static>, WorkerEnd> {
    let mut seen = Vec::new();
    for device in started_cuda(reporter)?.devices()? {
        let its_uuid = device.uuid()?;
        if is_same_device(&its_uuid, uuid) {
            return Ok(device);
        }
        seen.push(its_uuid);
    }
    Err(exited(format!(
        "CUDA does not show GPU {uuid}, it shows {}",
        if seen.is_empty() {
            "none".to_owned()
        } else {
            seen.join(", ")
        }
    )))
}

/// A worker that ended by itself, with the reason.
pub(crate) fn exited(stderr: String) -> WorkerEnd {
    WorkerEnd::Exited { status: 1, stderr }
}

impl From<CudaFailure> for WorkerEnd {
    fn from(failure: CudaFailure) -> Self {
        match failure {
            CudaFailure::Status { call, code, name } => Self::CudaError {
                call: call.to_owned(),
                code,
                name,
            },
            CudaFailure::MissingFunction { .. } => exited(failure.to_string()),
        }
    }
}
