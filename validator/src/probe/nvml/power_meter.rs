//! The power of one GPU, for a worker that compares two ways of working it.

use std::cell::Cell;

use super::library::Device;
use super::own_gpu::with_own_gpu;

// Source: nvml.h, NVML_FI_DEV_POWER_INSTANT: milliwatts at this moment; scope 0 is the GPU. Drivers
// from 530 on.
const POWER_INSTANT: u32 = 186;
const SCOPE_GPU: u32 = 0;

/// What kind of reading NVML gives of a GPU's power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PowerKind {
    /// At the moment.
    Instant,
    /// `nvmlDeviceGetPowerUsage`, which is a mean over a second on Ampere and newer.
    // Source: nvml.h, nvmlDeviceGetPowerUsage.
    Averaged,
}

/// Reads the power of one GPU.
pub(crate) struct PowerMeter<'d> {
    device: Option<Device<'d>>,
    kind: Cell<Option<PowerKind>>,
}

impl PowerMeter<'_> {
    /// Watts; `None` where nothing is read.
    pub(crate) fn watts(&self) -> Option<f64> {
        let device = self.device.as_ref()?;
        let milliwatts = match self.kind.get()? {
            PowerKind::Instant => power_instant_mw(device)?,
            PowerKind::Averaged => f64::from(device.power_usage_mw().ok()?),
        };
        Some(milliwatts / 1000.0)
    }

    /// `None` where nothing is read.
    pub(crate) fn kind(&self) -> Option<PowerKind> {
        self.kind.get()
    }

    /// The best that this driver answers for this GPU.
    fn choose(&self) {
        let Some(device) = &self.device else { return };
        let instant = power_instant_mw(device).map(|_| PowerKind::Instant);
        let averaged = || device.power_usage_mw().ok().map(|_| PowerKind::Averaged);
        self.kind.set(instant.or_else(averaged));
    }
}

fn power_instant_mw(device: &Device<'_>) -> Option<f64> {
    let values = device.field_values(&[(POWER_INSTANT, SCOPE_GPU)]).ok()?;
    let milliwatts = values.into_iter().next()?.ok()?;
    u32::try_from(milliwatts).ok().map(f64::from)
}

/// Calls `body` with what reads the power of the GPU with this UUID.
pub(crate) fn with_power_meter<T>(uuid: &str, body: impl FnOnce(&PowerMeter<'_>) -> T) -> T {
    with_own_gpu(uuid, |device, _| {
        let meter = PowerMeter {
            device,
            kind: Cell::new(None),
        };
        meter.choose();
        body(&meter)
    })
}
