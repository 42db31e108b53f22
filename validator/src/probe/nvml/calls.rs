//! NVML calls as events: announced before they are made, left out when they hung or crashed before.

use std::cell::Cell;

use super::protocol::{Output, SkippedCall};
use super::status::{
    ERROR_FUNCTION_NOT_FOUND, ERROR_GPU_IS_LOST, ERROR_INVALID_ARGUMENT, ERROR_NOT_SUPPORTED,
    ERROR_RESET_REQUIRED, ERROR_VGPU_ECC_NOT_SUPPORTED, status_name,
};
use validator_core::facts::Reading;

/// A call's result.
pub(super) type Called<T> = Result<T, Failure>;

/// Why a call gave nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallFailure {
    /// The library does not export the function.
    MissingSymbol,
    /// NVML answered with this status.
    Status(u32),
    /// NVML returned success, and a number that is none.
    AllOnes,
    /// The call was not made; this is why.
    LeftOut(String),
}

/// A call that gave nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) function: &'static str,
    pub(super) cause: CallFailure,
}

impl Failure {
    pub(super) fn status(&self) -> Option<u32> {
        match self.cause {
            CallFailure::Status(status) => Some(status),
            CallFailure::MissingSymbol | CallFailure::AllOnes | CallFailure::LeftOut(_) => None,
        }
    }

    /// The library or the kernel module under it is older than the function.
    pub(super) fn is_missing_function(&self) -> bool {
        matches!(
            self.cause,
            CallFailure::MissingSymbol | CallFailure::Status(ERROR_FUNCTION_NOT_FOUND)
        )
    }

    /// This GPU, or this driver, has no such thing. A library that lacks a function which its own
    /// version should have is a broken library, not an older one.
    pub(super) fn is_not_supported(&self, driver_branch: Option<u32>) -> bool {
        if self.is_missing_function() {
            let since = FUNCTIONS_SINCE
                .iter()
                .find(|(function, _)| *function == self.function);
            return match (since, driver_branch) {
                (Some((_, since)), Some(branch)) => branch < *since,
                (Some(_), None) | (None, _) => false,
            };
        }
        // A field that the driver does not know is an invalid argument to it.
        matches!(
            self.status(),
            Some(ERROR_NOT_SUPPORTED | ERROR_VGPU_ECC_NOT_SUPPORTED)
        ) || (self.function == "nvmlDeviceGetFieldValues"
            && self.status() == Some(ERROR_INVALID_ARGUMENT))
    }

    pub(super) fn reading<T>(&self, driver_branch: Option<u32>) -> Reading<T> {
        if self.is_not_supported(driver_branch) {
            return Reading::NotSupported;
        }
        Reading::NotRead(self.to_string())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.cause {
            CallFailure::MissingSymbol => {
                write!(f, "libnvidia-ml has no function {}", self.function)
            }
            CallFailure::Status(status) => {
                write!(f, "{} returned {}", self.function, status_name(*status))
            }
            CallFailure::AllOnes => write!(
                f,
                "{} returned 0xffffffff, as a register of a device that does not respond",
                self.function
            ),
            CallFailure::LeftOut(reason) => write!(f, "{} {reason}", self.function),
        }
    }
}

/// Functions that older drivers lack, with the branch from which on their absence is a fault of the
/// library. Chosen late where the exact branch is not documented, so that no older driver is
/// blamed. All other functions that are called are in R450 already, the oldest branch that CUDA 11
/// and newer run on.
// Source: the change lists in NVML's API reference,
// docs.nvidia.com/deploy/nvml-api/change-log.html.
const FUNCTIONS_SINCE: [(&str, u32); 8] = [
    ("nvmlDeviceGetRowRemapperHistogram", 510),
    ("nvmlDeviceGetMemoryInfo_v2", 510),
    ("nvmlDeviceGetGspFirmwareVersion", 515),
    ("nvmlDeviceGetGpuFabricInfo", 530),
    ("nvmlDeviceGetSramEccErrorStatus", 555),
    ("nvmlDeviceGetMarginTemperature", 565),
    ("nvmlDeviceGetRepairStatus", 580),
    ("nvmlDeviceGetUnrepairableMemoryFlag_v1", 590),
];

/// Makes the calls of one thread: about one GPU, or about the driver as a whole.
pub(super) struct Calls<'a> {
    pub(super) gpu: Option<u32>,
    pub(super) skipped: &'a [SkippedCall],
    pub(super) output: &'a Output,
    lost_was_told: Cell<bool>,
}

impl<'a> Calls<'a> {
    pub(super) fn new(gpu: Option<u32>, skipped: &'a [SkippedCall], output: &'a Output) -> Self {
        Self {
            gpu,
            skipped,
            output,
            lost_was_told: Cell::new(false),
        }
    }

    /// Announces the call, so that the parent knows what hung or crashed, and makes it.
    pub(super) fn make<T>(
        &self,
        function: &'static str,
        call: impl FnOnce() -> Result<T, CallFailure>,
    ) -> Called<T> {
        let failure = |cause| Failure { function, cause };
        let left_out = self
            .skipped
            .iter()
            .find(|it| it.gpu == self.gpu && it.function == function);
        if let Some(left_out) = left_out {
            return Err(failure(CallFailure::LeftOut(left_out.reason.clone())));
        }
        self.output.announce(self.gpu, function);
        call().map_err(|cause| {
            let failure = failure(cause);
            self.tell_when_lost(&failure);
            failure
        })
    }

    fn tell_when_lost(&self, failure: &Failure) {
        let lost = matches!(
            failure.status(),
            Some(ERROR_GPU_IS_LOST | ERROR_RESET_REQUIRED)
        );
        if let (true, Some(gpu), false) = (lost, self.gpu, self.lost_was_told.get()) {
            self.lost_was_told.set(true);
            self.output.gpu(gpu, "lost", &Some(failure.to_string()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(function: &'static str, status: u32) -> Failure {
        let cause = CallFailure::Status(status);
        Failure { function, cause }
    }

    #[test]
    fn a_vgpu_without_ecc_has_no_ecc_counts() {
        // nvml.h: NVML_ERROR_VGPU_ECC_NOT_SUPPORTED is 22.
        let failure = answer("nvmlDeviceGetTotalEccErrors", 22);
        assert_eq!(failure.reading::<u64>(Some(580)), Reading::NotSupported);
    }

    #[test]
    fn only_a_driver_of_its_time_is_blamed_for_a_missing_function() {
        let cause = CallFailure::MissingSymbol;
        let function = "nvmlDeviceGetRowRemapperHistogram";
        let failure = Failure { function, cause };
        assert_eq!(failure.reading::<u64>(Some(470)), Reading::NotSupported);
        for branch in [Some(580), None] {
            assert_eq!(
                failure.reading::<u64>(branch),
                Reading::NotRead(format!("libnvidia-ml has no function {function}"))
            );
        }
    }
}
