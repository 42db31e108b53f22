//! Power, energy, temperature and fans.

use super::call::{
    Answer, Call, Device, Handle, INVALID_ARGUMENT, NOT_SUPPORTED, Out, enabled, nvml, supported,
    version_of,
};
use crate::gpu::Temperature;
use nvml_wrapper_sys::bindings as sys;
use std::ffi::c_uint;

fn temperature(call: &Call, device: Handle, sensor: c_uint) -> Result<i32, super::call::Failure> {
    let device = call.gpu(device)?;
    match sensor {
        sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU => {
            Ok(call.readings(device).temperature_c)
        }
        _ => Err(INVALID_ARGUMENT),
    }
}

fn threshold(temperature: &Temperature, kind: c_uint) -> Result<i32, super::call::Failure> {
    match kind {
        sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_SHUTDOWN => {
            Ok(temperature.shutdown_c)
        }
        sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_SLOWDOWN => {
            Ok(temperature.slowdown_c)
        }
        sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_MEM_MAX => {
            supported(temperature.memory_max_c)
        }
        sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_GPU_MAX => {
            Ok(temperature.gpu_max_c)
        }
        kind if kind < sys::nvmlTemperatureThresholds_enum_NVML_TEMPERATURE_THRESHOLD_COUNT => {
            Err(NOT_SUPPORTED)
        }
        _ => Err(INVALID_ARGUMENT),
    }
}

fn fan_speed(call: &Call, device: Handle, fan: c_uint, out: Out<c_uint>) -> Answer {
    let speed = supported(call.gpu(device)?.gpu.fan_speed_percent)?;
    if fan > 0 {
        return Err(INVALID_ARGUMENT);
    }
    out.set(speed)
}

/// How far the GPU is below the temperature that it throttles at, on boards that report it.
pub(super) fn margin_c(call: &Call, device: Device<'_>) -> Option<i32> {
    let temperature = &device.gpu.temperature;
    let margin = || temperature.gpu_max_c - call.readings(device).temperature_c;
    temperature.t_limit.then(margin)
}

nvml! {
    fn nvmlDeviceGetPowerUsage(device: Handle, out: Out<c_uint>) |call| {
        let device = call.gpu(device)?;
        out.set(call.readings(device).power_mw)
    }

    fn nvmlDeviceGetTotalEnergyConsumption(device: Handle, out: Out<u64>) |call| {
        let device = call.gpu(device)?;
        out.set(call.readings(device).energy_mj)
    }

    fn nvmlDeviceGetPowerManagementMode(device: Handle, out: Out<c_uint>) |call| {
        call.gpu(device)?;
        out.set(enabled(true))
    }

    fn nvmlDeviceGetPowerManagementLimit(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.power.limit_mw)
    }

    fn nvmlDeviceGetEnforcedPowerLimit(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.power.limit_mw)
    }

    fn nvmlDeviceGetPowerManagementDefaultLimit(device: Handle, out: Out<c_uint>) |call| {
        out.set(call.gpu(device)?.gpu.power.default_limit_mw)
    }

    fn nvmlDeviceGetPowerManagementLimitConstraints(device: Handle, minimum: Out<c_uint>, maximum: Out<c_uint>) |call| {
        let power = &call.gpu(device)?.gpu.power;
        minimum.set(power.min_limit_mw)?;
        maximum.set(power.max_limit_mw)
    }

    fn nvmlDeviceGetPowerSource(device: Handle, out: Out<c_uint>) |call| {
        call.gpu(device)?;
        out.set(sys::NVML_POWER_SOURCE_AC)
    }

    fn nvmlDeviceGetTemperature(device: Handle, sensor: c_uint, out: Out<c_uint>) |call| {
        out.set(temperature(call, device, sensor)?.max(0).cast_unsigned())
    }

    fn nvmlDeviceGetTemperatureV(device: Handle, out: Out<sys::nvmlTemperature_t>) |call| {
        let given = out.get()?;
        out.set_versioned(1, sys::nvmlTemperature_t {
            version: version_of::<sys::nvmlTemperature_t>(1),
            sensorType: given.sensorType,
            temperature: temperature(call, device, given.sensorType)?,
        })
    }

    fn nvmlDeviceGetTemperatureThreshold(device: Handle, kind: c_uint, out: Out<c_uint>) |call| {
        out.set(threshold(&call.gpu(device)?.gpu.temperature, kind)?.max(0).cast_unsigned())
    }

    fn nvmlDeviceGetMarginTemperature(device: Handle, out: Out<sys::nvmlMarginTemperature_t>) |call| {
        let device = call.gpu(device)?;
        out.set_versioned(1, sys::nvmlMarginTemperature_t {
            version: version_of::<sys::nvmlMarginTemperature_t>(1),
            marginTemperature: supported(margin_c(call, device))?,
        })
    }

    fn nvmlDeviceGetThermalSettings(device: Handle, sensor: c_uint, out: Out<sys::nvmlGpuThermalSettings_t>) |call| {
        let device = call.gpu(device)?;
        // 0 is the first sensor, 15 all of them; there is one.
        if sensor != 0 && sensor != 15 {
            return Err(INVALID_ARGUMENT);
        }
        let mut settings = sys::nvmlGpuThermalSettings_t {
            count: 1,
            sensor: [sys::nvmlGpuThermalSettings_t__bindgen_ty_1 {
                controller: 0,
                defaultMinTemp: 0,
                defaultMaxTemp: 0,
                currentTemp: 0,
                target: 0,
            }; sys::NVML_MAX_THERMAL_SENSORS_PER_GPU as usize],
        };
        settings.sensor[0] = sys::nvmlGpuThermalSettings_t__bindgen_ty_1 {
            controller: 1,
            defaultMinTemp: 0,
            defaultMaxTemp: device.gpu.temperature.slowdown_c,
            currentTemp: call.readings(device).temperature_c,
            target: 1,
        };
        out.set(settings)
    }

    fn nvmlDeviceGetNumFans(device: Handle, out: Out<c_uint>) |call| {
        let fans = call.gpu(device)?.gpu.fan_speed_percent;
        out.set(u32::from(fans.is_some()))
    }

    fn nvmlDeviceGetFanSpeed(device: Handle, out: Out<c_uint>) |call| { fan_speed(call, device, 0, out) }
    fn nvmlDeviceGetFanSpeed_v2(device: Handle, fan: c_uint, out: Out<c_uint>) |call| {
        fan_speed(call, device, fan, out)
    }
    fn nvmlDeviceGetTargetFanSpeed(device: Handle, fan: c_uint, out: Out<c_uint>) |call| {
        fan_speed(call, device, fan, out)
    }

    fn nvmlDeviceGetMinMaxFanSpeed(device: Handle, minimum: Out<c_uint>, maximum: Out<c_uint>) |call| {
        // Boards without fans answer as to a fan that they lack.
        call.gpu(device)?.gpu.fan_speed_percent.ok_or(INVALID_ARGUMENT)?;
        minimum.set(30)?;
        maximum.set(100)
    }

    fn nvmlDeviceGetFanControlPolicy_v2(device: Handle, fan: c_uint, out: Out<c_uint>) |call| {
        let _ = fan;
        supported(call.gpu(device)?.gpu.fan_speed_percent)?;
        out.set(sys::NVML_FAN_POLICY_TEMPERATURE_CONTINOUS_SW)
    }
}
