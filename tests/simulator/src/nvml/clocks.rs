//! Clocks, performance states, throttle reasons and utilisation.

use super::call::{
    Answer, Call, Failure, Handle, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, Out, nvml, set_list,
};
use crate::gpu::{ClockSet, Gpu, ThrottleReason};
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{c_int, c_uint};

/// Step of the supported graphics clocks in MHz, on every GPU since Maxwell.
const CLOCK_STEP_MHZ: usize = 15;
/// Averaging period of the engines' utilisation as NVML reports it, in microseconds.
// Source: real H200s, captures/h200x4.nvml-transcript.json.
const SAMPLING_PERIOD_US: u32 = 100_000;

fn clock_of(clocks: &ClockSet, kind: c_uint) -> Result<u32, Failure> {
    match kind {
        sys::nvmlClockType_enum_NVML_CLOCK_GRAPHICS => Ok(clocks.graphics_mhz),
        sys::nvmlClockType_enum_NVML_CLOCK_SM => Ok(clocks.sm_mhz),
        sys::nvmlClockType_enum_NVML_CLOCK_MEM => Ok(clocks.memory_mhz),
        sys::nvmlClockType_enum_NVML_CLOCK_VIDEO => Ok(clocks.video_mhz),
        _ => Err(INVALID_ARGUMENT),
    }
}

/// Every memory clock that can be set, highest first.
fn memory_clocks(gpu: &Gpu) -> Vec<u32> {
    let mut clocks = vec![gpu.clocks.max.memory_mhz, gpu.clocks.idle.memory_mhz];
    clocks.extend(&gpu.clocks.other_memory_mhz);
    clocks.sort_unstable_by(|left, right| right.cmp(left));
    clocks.dedup();
    clocks
}

/// Applications clocks are reported for graphics, SM and memory only, and not by consumer boards.
fn applications_clock(gpu: &Gpu, kind: c_uint) -> Result<u32, Failure> {
    let known = [
        sys::nvmlClockType_enum_NVML_CLOCK_GRAPHICS,
        sys::nvmlClockType_enum_NVML_CLOCK_SM,
        sys::nvmlClockType_enum_NVML_CLOCK_MEM,
    ];
    if !gpu.clocks.applications_clocks || !known.contains(&kind) {
        return Err(NOT_SUPPORTED);
    }
    clock_of(&gpu.clocks.max, kind)
}

fn boost_clock(gpu: &Gpu, kind: c_uint) -> Result<u32, Failure> {
    match kind {
        sys::nvmlClockType_enum_NVML_CLOCK_GRAPHICS => Ok(gpu.clocks.max.graphics_mhz),
        sys::nvmlClockType_enum_NVML_CLOCK_SM => Ok(gpu.clocks.max.sm_mhz),
        sys::nvmlClockType_enum_NVML_CLOCK_MEM | sys::nvmlClockType_enum_NVML_CLOCK_VIDEO => {
            Err(NOT_SUPPORTED)
        }
        _ => Err(INVALID_ARGUMENT),
    }
}

/// The bits of `nvmlClocksEventReasons`.
pub(super) fn reason_bit(reason: ThrottleReason) -> u64 {
    u64::from(match reason {
        ThrottleReason::GpuIdle => sys::nvmlClocksEventReasonGpuIdle,
        ThrottleReason::ApplicationsClocksSetting => {
            sys::nvmlClocksEventReasonApplicationsClocksSetting
        }
        ThrottleReason::SwPowerCap => sys::nvmlClocksEventReasonSwPowerCap,
        ThrottleReason::HwSlowdown => sys::nvmlClocksThrottleReasonHwSlowdown,
        ThrottleReason::SyncBoost => sys::nvmlClocksEventReasonSyncBoost,
        ThrottleReason::SwThermalSlowdown => sys::nvmlClocksEventReasonSwThermalSlowdown,
        ThrottleReason::HwThermalSlowdown => sys::nvmlClocksThrottleReasonHwThermalSlowdown,
        ThrottleReason::HwPowerBrakeSlowdown => sys::nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        ThrottleReason::DisplayClockSetting => sys::nvmlClocksEventReasonDisplayClockSetting,
    })
}

fn reasons(call: &Call, device: Handle, out: Out<u64>) -> Answer {
    let device = call.gpu(device)?;
    out.set(
        call.readings(device)
            .throttle_reasons
            .iter()
            .map(|reason| reason_bit(*reason))
            .fold(0, |all, bit| all | bit),
    )
}

/// Every reason that the struct names.
fn supported_reasons(call: &Call, device: Handle, out: Out<u64>) -> Answer {
    call.gpu(device)?;
    out.set(0x1ff)
}

/// Nanoseconds that a reason has held since the node was prepared.
pub(super) fn throttled_ns(
    call: &Call,
    device: super::call::Device<'_>,
    reason: ThrottleReason,
) -> u64 {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "seconds since the start are positive"
    )]
    let nanoseconds = (call.readings(device).throttled_s[reason as usize] * 1e9) as u64;
    nanoseconds
}

/// Nanoseconds below the applications and base clocks, by NVML's limiter that held longest; idling
/// is one.
pub(super) fn held_below_clocks_ns(call: &Call, device: super::call::Device<'_>) -> u64 {
    [
        ThrottleReason::GpuIdle,
        ThrottleReason::SwPowerCap,
        ThrottleReason::SwThermalSlowdown,
        ThrottleReason::HwThermalSlowdown,
        ThrottleReason::HwPowerBrakeSlowdown,
        ThrottleReason::SyncBoost,
    ]
    .map(|reason| throttled_ns(call, device, reason))
    .into_iter()
    .max()
    .unwrap_or(0)
}

fn utilization_of_engine(
    call: &Call,
    device: Handle,
    utilization: Out<c_uint>,
    period: Out<c_uint>,
) -> Answer {
    call.gpu(device)?;
    // No simulated program encodes or decodes.
    utilization.set(0)?;
    period.set(SAMPLING_PERIOD_US)
}

nvml! {
    fn nvmlDeviceGetClockInfo(device: Handle, kind: c_uint, out: Out<c_uint>) |call| {
        let device = call.gpu(device)?;
        out.set(clock_of(&call.readings(device).clocks, kind)?)
    }

    fn nvmlDeviceGetMaxClockInfo(device: Handle, kind: c_uint, out: Out<c_uint>) |call| {
        out.set(clock_of(&call.device(device)?.gpu.clocks.max, kind)?)
    }

    fn nvmlDeviceGetApplicationsClock(device: Handle, kind: c_uint, out: Out<c_uint>) |call| {
        out.set(applications_clock(call.gpu(device)?.gpu, kind)?)
    }

    fn nvmlDeviceGetDefaultApplicationsClock(device: Handle, kind: c_uint, out: Out<c_uint>) |call| {
        out.set(applications_clock(call.gpu(device)?.gpu, kind)?)
    }

    fn nvmlDeviceGetMaxCustomerBoostClock(device: Handle, kind: c_uint, out: Out<c_uint>) |call| {
        out.set(boost_clock(call.gpu(device)?.gpu, kind)?)
    }

    fn nvmlDeviceGetClock(device: Handle, kind: c_uint, which: c_uint, out: Out<c_uint>) |call| {
        let device = call.gpu(device)?;
        out.set(match which {
            sys::nvmlClockId_enum_NVML_CLOCK_ID_CURRENT => clock_of(&call.readings(device).clocks, kind)?,
            sys::nvmlClockId_enum_NVML_CLOCK_ID_APP_CLOCK_TARGET
            | sys::nvmlClockId_enum_NVML_CLOCK_ID_APP_CLOCK_DEFAULT => applications_clock(device.gpu, kind)?,
            sys::nvmlClockId_enum_NVML_CLOCK_ID_CUSTOMER_BOOST_MAX => boost_clock(device.gpu, kind)?,
            _ => return Err(INVALID_ARGUMENT),
        })
    }

    fn nvmlDeviceGetSupportedMemoryClocks(device: Handle, count: Out<c_uint>, clocks: Out<c_uint>) |call| {
        let gpu = call.gpu(device)?.gpu;
        set_list(count, clocks, &memory_clocks(gpu))
    }

    fn nvmlDeviceGetSupportedGraphicsClocks(
        device: Handle,
        memory_mhz: c_uint,
        count: Out<c_uint>,
        clocks: Out<c_uint>,
    ) |call| {
        let gpu = call.gpu(device)?.gpu;
        if !memory_clocks(gpu).contains(&memory_mhz) {
            return Err(NOT_FOUND);
        }
        let range = gpu.clocks.min_graphics_mhz..=gpu.clocks.max.graphics_mhz;
        let steps: Vec<u32> = range.rev().step_by(CLOCK_STEP_MHZ).collect();
        set_list(count, clocks, &steps)
    }

    fn nvmlDeviceGetMinMaxClockOfPState(
        device: Handle,
        kind: c_uint,
        state: c_uint,
        minimum: Out<c_uint>,
        maximum: Out<c_uint>,
    ) |call| {
        let gpu = call.gpu(device)?.gpu;
        if state != 0 {
            return Err(NOT_SUPPORTED);
        }
        let highest = clock_of(&gpu.clocks.max, kind)?;
        let lowest = match kind {
            sys::nvmlClockType_enum_NVML_CLOCK_MEM => highest,
            _ => gpu.clocks.min_graphics_mhz.min(highest),
        };
        minimum.set(lowest)?;
        maximum.set(highest)
    }

    fn nvmlDeviceGetGpcClkVfOffset(device: Handle, out: Out<c_int>) |call| {
        call.gpu(device)?;
        out.set(0)
    }

    fn nvmlDeviceGetMemClkVfOffset(device: Handle, out: Out<c_int>) |call| {
        call.gpu(device)?;
        out.set(0)
    }

    fn nvmlDeviceGetAdaptiveClockInfoStatus(device: Handle, out: Out<c_uint>) |call| {
        call.gpu(device)?;
        out.set(sys::NVML_ADAPTIVE_CLOCKING_INFO_STATUS_ENABLED)
    }

    fn nvmlDeviceGetPerformanceState(device: Handle, out: Out<c_uint>) |call| {
        let device = call.gpu(device)?;
        out.set(call.readings(device).performance_state)
    }

    fn nvmlDeviceGetPowerState(device: Handle, out: Out<c_uint>) |call| {
        let device = call.gpu(device)?;
        out.set(call.readings(device).performance_state)
    }

    fn nvmlDeviceGetSupportedPerformanceStates(device: Handle, states: Out<c_uint>, size: c_uint) |call| {
        let gpu = call.gpu(device)?.gpu;
        let mut known = vec![0];
        if gpu.clocks.idle.memory_mhz < gpu.clocks.max.memory_mhz {
            known.push(8);
        }
        // The size is in bytes, and what is left is filled with "unknown" (32).
        let room = size as usize / size_of::<c_uint>();
        if room < known.len() {
            return Err(super::call::INSUFFICIENT_SIZE);
        }
        known.resize(room, 32);
        for (index, state) in known.into_iter().enumerate() {
            states.element(index).set(state)?;
        }
        Ok(())
    }

    fn nvmlDeviceGetCurrentClocksEventReasons(device: Handle, out: Out<u64>) |call| { reasons(call, device, out) }
    fn nvmlDeviceGetCurrentClocksThrottleReasons(device: Handle, out: Out<u64>) |call| { reasons(call, device, out) }
    fn nvmlDeviceGetSupportedClocksEventReasons(device: Handle, out: Out<u64>) |call| {
        supported_reasons(call, device, out)
    }
    fn nvmlDeviceGetSupportedClocksThrottleReasons(device: Handle, out: Out<u64>) |call| {
        supported_reasons(call, device, out)
    }

    fn nvmlDeviceGetViolationStatus(device: Handle, policy: c_uint, out: Out<sys::nvmlViolationTime_t>) |call| {
        let device = call.gpu(device)?;
        let time = |reason| throttled_ns(call, device, reason);
        let violation_ns = match policy {
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_POWER => time(ThrottleReason::SwPowerCap),
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_THERMAL => time(ThrottleReason::SwThermalSlowdown)
                .max(time(ThrottleReason::HwThermalSlowdown)),
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_SYNC_BOOST => time(ThrottleReason::SyncBoost),
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_BOARD_LIMIT => time(ThrottleReason::HwPowerBrakeSlowdown),
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_LOW_UTILIZATION => time(ThrottleReason::GpuIdle),
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_RELIABILITY => 0,
            sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_TOTAL_APP_CLOCKS
            | sys::nvmlPerfPolicyType_enum_NVML_PERF_POLICY_TOTAL_BASE_CLOCKS => held_below_clocks_ns(call, device),
            _ => return Err(INVALID_ARGUMENT),
        };
        let reference_us = u64::try_from(call.node.state().elapsed().as_micros()).unwrap_or(u64::MAX);
        out.set(sys::nvmlViolationTime_t { referenceTime: reference_us, violationTime: violation_ns })
    }

    fn nvmlDeviceGetUtilizationRates(device: Handle, out: Out<sys::nvmlUtilization_t>) |call| {
        let device = call.gpu(device)?;
        // NVML does not report utilisation of a GPU that is cut into MIG instances.
        if device.gpu.mig.mode == Some(true) {
            return Err(NOT_SUPPORTED);
        }
        let readings = call.readings(device);
        out.set(sys::nvmlUtilization_t {
            gpu: readings.gpu_utilization_percent,
            memory: readings.memory_utilization_percent,
        })
    }

    fn nvmlDeviceGetEncoderUtilization(device: Handle, out: Out<c_uint>, period: Out<c_uint>) |call| {
        utilization_of_engine(call, device, out, period)
    }
    fn nvmlDeviceGetDecoderUtilization(device: Handle, out: Out<c_uint>, period: Out<c_uint>) |call| {
        utilization_of_engine(call, device, out, period)
    }
    fn nvmlDeviceGetJpgUtilization(device: Handle, out: Out<c_uint>, period: Out<c_uint>) |call| {
        utilization_of_engine(call, device, out, period)
    }
    fn nvmlDeviceGetOfaUtilization(device: Handle, out: Out<c_uint>, period: Out<c_uint>) |call| {
        utilization_of_engine(call, device, out, period)
    }

    fn nvmlDeviceGetEncoderStats(
        device: Handle,
        sessions: Out<c_uint>,
        frames_per_second: Out<c_uint>,
        latency: Out<c_uint>,
    ) |call| {
        call.gpu(device)?;
        sessions.set(0)?;
        frames_per_second.set(0)?;
        latency.set(0)
    }

    fn nvmlDeviceGetEncoderSessions(device: Handle, count: Out<c_uint>, list: Out<sys::nvmlEncoderSessionInfo_t>) |call| {
        call.gpu(device)?;
        set_list(count, list, &[])
    }

    fn nvmlDeviceGetEncoderCapacity(device: Handle, kind: c_uint, out: Out<c_uint>) |call| {
        let _ = kind;
        call.gpu(device)?;
        out.set(100)
    }

    fn nvmlDeviceGetFBCStats(device: Handle, out: Out<sys::nvmlFBCStats_t>) |call| {
        call.gpu(device)?;
        out.set(sys::nvmlFBCStats_t { sessionsCount: 0, averageFPS: 0, averageLatency: 0 })
    }

    fn nvmlDeviceGetFBCSessions(device: Handle, count: Out<c_uint>, list: Out<sys::nvmlFBCSessionInfo_t>) |call| {
        call.gpu(device)?;
        set_list(count, list, &[])
    }

    fn nvmlDeviceGetDynamicPstatesInfo(device: Handle, out: Out<sys::nvmlGpuDynamicPstatesInfo_t>) |call| {
        let device = call.gpu(device)?;
        let readings = call.readings(device);
        let domain = |percentage| sys::nvmlGpuDynamicPstatesInfo_st__bindgen_ty_1 {
            bIsPresent: 1,
            percentage,
            incThreshold: 0,
            decThreshold: 0,
        };
        let absent = sys::nvmlGpuDynamicPstatesInfo_st__bindgen_ty_1 {
            bIsPresent: 0,
            percentage: 0,
            incThreshold: 0,
            decThreshold: 0,
        };
        let mut utilization = [absent; sys::NVML_MAX_GPU_UTILIZATIONS as usize];
        utilization[0] = domain(readings.gpu_utilization_percent);
        utilization[1] = domain(readings.memory_utilization_percent);
        utilization[2] = domain(0);
        utilization[3] = domain(0);
        out.set(sys::nvmlGpuDynamicPstatesInfo_t { flags: 1, utilization })
    }
}
