//! What the simulated H200 answers equals what `nvidia-smi -q -x` printed of the real one, value by
//! value.
//!
//! Every value of the captures is either compared, or listed in `NOT_COMPARED` with the reason; a
//! value that is in neither list fails the test.

mod simulated_transcript;

use serde_json::Value;
use simulated_transcript::transcript_of;
use std::collections::BTreeMap;
use std::path::Path;

/// Values of the captures that are not compared: the start of their path, and why.
const NOT_COMPARED: [(&str, &str); 18] = [
    (
        "display_mode",
        "nvidia-smi says of itself that it is deprecated; NVML of the same driver answers (see transcript.rs)",
    ),
    (
        "product_architecture",
        "compared as NVML's number below `architecture` in no capture's words",
    ),
    (
        "display_attached",
        "nvidia-smi reads it by a call that is not part of NVML's public interface",
    ),
    (
        "platformInfo/chassis_serial_number",
        "identifier, replaced in the capture",
    ),
    (
        "platformInfo/slot_number",
        "NVML tells bytes where nvidia-smi tells what they stand for",
    ),
    ("platformInfo/tray_index", "as slot_number"),
    ("platformInfo/host_id", "as slot_number"),
    ("platformInfo/peer_type", "as slot_number"),
    (
        "platformInfo/gpu_fabric_guid",
        "identifier, replaced in the capture",
    ),
    (
        "gpu_part_number",
        "nvidia-smi reads it by a call that is not part of NVML's public interface",
    ),
    ("gpu_fru_part_number", "as gpu_part_number"),
    (
        "gpu_virtualization_mode/",
        "vGPU is not simulated; the mode itself is compared",
    ),
    (
        "pci/pci_bridge_chip/",
        "no simulated board has a bridge chip",
    ),
    (
        "pci/pci_gpu_link_info/pcie_gen/device_current_link_gen",
        "the same as current_link_gen for nvidia-smi",
    ),
    (
        "pci/pci_gpu_link_info/pcie_gen/max_host_link_gen",
        "nvidia-smi reads it by a call that is not part of NVML's public interface",
    ),
    (
        "supported_clocks/",
        "compared as a list in `supported_clocks_are_those_of_the_capture`",
    ),
    ("fabric/clusterUuid", "identifier, replaced in the capture"),
    (
        "capabilities/egm",
        "NVML tells a bit of which nvidia-smi shows one",
    ),
];

/// Values that are constant in the captures because the hardware lacks what they speak of: NVML
/// returns a code for it.
const ABSENT_ON_H200: [(&str, &str); 30] = [
    ("addressing_mode", "None"),
    ("mig_devices", "None"),
    ("driver_model/current_dm", "N/A"),
    ("driver_model/pending_dm", "N/A"),
    ("inforom_bbx_flush/latest_timestamp", "N/A"),
    ("inforom_bbx_flush/latest_duration", "N/A"),
    ("gpu_operation_mode/current_gom", "N/A"),
    ("gpu_operation_mode/pending_gom", "N/A"),
    ("ibmnpu/relaxed_ordering_mode", "N/A"),
    ("pci/atomic_caps_outbound", "N/A"),
    ("pci/atomic_caps_inbound", "N/A"),
    ("sparse_operation_mode", "Disabled"),
    ("cc_protected_memory_usage/total", "0 MiB"),
    ("cc_protected_memory_usage/used", "0 MiB"),
    ("cc_protected_memory_usage/free", "0 MiB"),
    ("dram_encryption_mode/current_dram_encryption", "N/A"),
    ("dram_encryption_mode/pending_dram_encryption", "N/A"),
    ("temperature/gpu_target_temperature", "N/A"),
    ("supported_gpu_target_temp/gpu_target_temp_min", "N/A"),
    ("supported_gpu_target_temp/gpu_target_temp_max", "N/A"),
    ("gpu_memory_power_readings/instant_power_draw", "N/A"),
    ("module_power_readings/power_state", "P0"),
    ("power_smoothing", "N/A"),
    ("power_profiles/power_profile_requested_profiles", "N/A"),
    ("power_profiles/power_profile_enforced_profiles", "N/A"),
    ("deferred_clocks/mem_clock", "N/A"),
    ("clock_policy/auto_boost", "N/A"),
    ("clock_policy/auto_boost_default", "N/A"),
    ("processes", ""),
    ("accounted_processes", ""),
];

/// `nvmlReturn_t` of a value that the hardware does not have.
const NOT_SUPPORTED: u64 = 3;

/// One GPU's transcript, with nvidia-smi's way of writing values.
struct Gpu<'transcript>(&'transcript Value);

impl Gpu<'_> {
    fn value(&self, call: &str) -> &Value {
        let value = &self.0[call];
        assert!(!value.is_null(), "the transcript has no {call}");
        value
    }

    fn is_absent(&self, call: &str) -> bool {
        self.value(call)["error"].as_u64() == Some(NOT_SUPPORTED)
    }

    fn number(&self, call: &str) -> i64 {
        let value = self.value(call);
        let plain = ["u32", "u64", "i32", "i64"]
            .iter()
            .find_map(|kind| value[kind].as_i64());
        plain
            .or_else(|| value.as_i64())
            .unwrap_or_else(|| panic!("{call} is {value}"))
    }

    fn shown(&self, call: &str, show: impl Fn(i64) -> String) -> String {
        if self.is_absent(call) {
            "N/A".to_owned()
        } else {
            show(self.number(call))
        }
    }

    fn with_unit(&self, call: &str, unit: &str) -> String {
        self.shown(call, |number| format!("{number} {unit}"))
    }

    fn text(&self, call: &str) -> String {
        if self.is_absent(call) {
            return "N/A".to_owned();
        }
        self.value(call)
            .as_str()
            .unwrap_or_else(|| panic!("{call} is no text"))
            .to_owned()
    }

    fn member(&self, call: &str, member: &str) -> i64 {
        self.value(call)[member]
            .as_i64()
            .unwrap_or_else(|| panic!("{call} has no {member}"))
    }

    fn item(&self, call: &str, index: usize) -> i64 {
        self.value(call)[index]
            .as_i64()
            .unwrap_or_else(|| panic!("{call} has no item {index}"))
    }

    fn watts(&self, call: &str) -> String {
        self.shown(call, |mw| format!("{}.{:02} W", mw / 1000, mw % 1000 / 10))
    }

    fn reason(&self, bit: u32) -> String {
        let set = self.number("DeviceGetCurrentClocksEventReasons") >> bit & 1 == 1;
        if set { "Active" } else { "Not Active" }.to_owned()
    }
}

fn on_off(on: i64) -> String {
    if on == 1 { "Enabled" } else { "Disabled" }.to_owned()
}

fn yes_no(yes: i64) -> String {
    if yes == 1 { "Yes" } else { "No" }.to_owned()
}

/// Bytes as nvidia-smi rounds them.
fn mib(bytes: i64) -> String {
    format!("{} MiB", (bytes + (1 << 19)) >> 20)
}

/// What nvidia-smi would print for a value, from NVML's answers; none for a path that is not known
/// here.
fn expected(path: &str, gpu: &Gpu<'_>) -> Option<String> {
    let ecc = |kind: &str, index: usize| {
        gpu.value("DeviceGetSramEccErrorStatus")[kind][index]
            .as_i64()
            .map(|count| count.to_string())
    };
    let pci = |member: &str| gpu.member("DeviceGetPciInfo_v3", member);
    let module_limit = || Some("N/A".to_owned());
    Some(match path {
        "product_name" => gpu.text("DeviceGetName"),
        "product_brand" => gpu.shown("DeviceGetBrand", |brand| {
            if brand == 14 {
                "NVIDIA".to_owned()
            } else {
                brand.to_string()
            }
        }),
        "display_active" => gpu.shown("DeviceGetDisplayActive", on_off),
        "persistence_mode" => gpu.shown("DeviceGetPersistenceMode", on_off),
        "mig_mode/current_mig" => on_off(gpu.item("DeviceGetMigMode", 0)),
        "mig_mode/pending_mig" => on_off(gpu.item("DeviceGetMigMode", 1)),
        "accounting_mode" => gpu.shown("DeviceGetAccountingMode", on_off),
        "accounting_mode_buffer_size" => gpu.number("DeviceGetAccountingBufferSize").to_string(),
        "serial" => gpu.text("DeviceGetSerial"),
        "uuid" => gpu.text("DeviceGetUUID"),
        "pdi" => format!("{:#018x}", gpu.value("DeviceGetPdi").as_u64()?),
        "minor_number" => gpu.number("DeviceGetMinorNumber").to_string(),
        "vbios_version" => gpu.text("DeviceGetVbiosVersion"),
        "multigpu_board" => gpu.shown("DeviceGetMultiGpuBoard", yes_no),
        "board_id" => format!("{:#x}", gpu.number("DeviceGetBoardId")),
        "board_part_number" => gpu.text("DeviceGetBoardPartNumber"),
        "platformInfo/module_id" => gpu.number("DeviceGetModuleId").to_string(),
        "inforom_version/img_version" => gpu.text("DeviceGetInforomImageVersion"),
        "inforom_version/oem_object" => gpu.text("DeviceGetInforomVersion[0]"),
        "inforom_version/ecc_object" => gpu.text("DeviceGetInforomVersion[1]"),
        "inforom_version/pwr_object" => gpu.text("DeviceGetInforomVersion[2]"),
        "c2c_mode" => gpu.shown("DeviceGetC2cModeInfoV", on_off),
        "gpu_virtualization_mode/virtualization_mode" => {
            gpu.shown("DeviceGetVirtualizationMode", |mode| {
                if mode == 1 {
                    "Pass-Through".to_owned()
                } else {
                    mode.to_string()
                }
            })
        }
        "gpu_recovery_action" => gpu.shown("Field[230]", |action| {
            if action == 0 {
                "None".to_owned()
            } else {
                action.to_string()
            }
        }),
        "gsp_firmware_version" => gpu.text("DeviceGetGspFirmwareVersion"),
        "pci/pci_bus" => format!("{:02X}", pci("bus")),
        "pci/pci_device" => format!("{:02X}", pci("device")),
        "pci/pci_domain" => format!("{:04X}", pci("domain")),
        "pci/pci_base_class" => gpu.member("DeviceGetPciInfoExt", "base_class").to_string(),
        "pci/pci_sub_class" => gpu.member("DeviceGetPciInfoExt", "sub_class").to_string(),
        "pci/pci_device_id" => format!("{:X}", pci("device_id")),
        "pci/pci_bus_id" => gpu.value("DeviceGetPciInfo_v3")["bus_id"]
            .as_str()?
            .to_owned(),
        "pci/pci_sub_system_id" => format!("{:X}", pci("subsystem_id")),
        "pci/pci_gpu_link_info/pcie_gen/max_link_gen" => {
            gpu.number("DeviceGetMaxPcieLinkGeneration").to_string()
        }
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen" => {
            gpu.number("DeviceGetCurrPcieLinkGeneration").to_string()
        }
        "pci/pci_gpu_link_info/pcie_gen/max_device_link_gen" => {
            gpu.number("DeviceGetGpuMaxPcieLinkGeneration").to_string()
        }
        "pci/pci_gpu_link_info/link_widths/max_link_width" => {
            gpu.shown("DeviceGetMaxPcieLinkWidth", |width| format!("{width}x"))
        }
        "pci/pci_gpu_link_info/link_widths/current_link_width" => {
            gpu.shown("DeviceGetCurrPcieLinkWidth", |width| format!("{width}x"))
        }
        "pci/replay_counter" => gpu.number("DeviceGetPcieReplayCounter").to_string(),
        "pci/replay_rollover_counter" => gpu.number("Field[95]").to_string(),
        "pci/tx_util" => gpu.with_unit("DeviceGetPcieThroughput[0]", "KB/s"),
        "pci/rx_util" => gpu.with_unit("DeviceGetPcieThroughput[1]", "KB/s"),
        "fan_speed" => gpu.with_unit("DeviceGetFanSpeed", "%"),
        "performance_state" | "gpu_power_readings/power_state" => {
            gpu.shown("DeviceGetPerformanceState", |state| format!("P{state}"))
        }
        "clocks_event_reasons/clocks_event_reason_gpu_idle" => gpu.reason(0),
        "clocks_event_reasons/clocks_event_reason_applications_clocks_setting" => gpu.reason(1),
        "clocks_event_reasons/clocks_event_reason_sw_power_cap" => gpu.reason(2),
        "clocks_event_reasons/clocks_event_reason_hw_slowdown" => gpu.reason(3),
        "clocks_event_reasons/clocks_event_reason_sync_boost" => gpu.reason(4),
        "clocks_event_reasons/clocks_event_reason_sw_thermal_slowdown" => gpu.reason(5),
        "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown" => gpu.reason(6),
        "clocks_event_reasons/clocks_event_reason_hw_power_brake_slowdown" => gpu.reason(7),
        "clocks_event_reasons/clocks_event_reason_display_clocks_setting" => gpu.reason(8),
        "clocks_event_reasons_counters/clocks_event_reasons_counters_sw_power_cap" => {
            gpu.shown("Field[74]", |ns| format!("{} us", ns / 1000))
        }
        "clocks_event_reasons_counters/clocks_event_reasons_counters_sync_boost" => {
            gpu.shown("Field[76]", |ns| format!("{} us", ns / 1000))
        }
        "clocks_event_reasons_counters/clocks_event_reasons_counters_sw_therm_slowdown" => {
            gpu.shown("Field[269]", |ns| format!("{} us", ns / 1000))
        }
        "clocks_event_reasons_counters/clocks_event_reasons_counters_hw_therm_slowdown" => {
            gpu.shown("Field[270]", |ns| format!("{} us", ns / 1000))
        }
        "clocks_event_reasons_counters/clocks_event_reasons_counters_hw_power_brake" => {
            gpu.shown("Field[271]", |ns| format!("{} us", ns / 1000))
        }
        "fb_memory_usage/total" => mib(gpu.member("DeviceGetMemoryInfo_v2", "total")),
        "fb_memory_usage/reserved" => mib(gpu.member("DeviceGetMemoryInfo_v2", "reserved")),
        "fb_memory_usage/used" => mib(gpu.member("DeviceGetMemoryInfo_v2", "used")),
        "fb_memory_usage/free" => mib(gpu.member("DeviceGetMemoryInfo_v2", "free")),
        "bar1_memory_usage/total" => mib(gpu.member("DeviceGetBAR1MemoryInfo", "total")),
        "bar1_memory_usage/used" => mib(gpu.member("DeviceGetBAR1MemoryInfo", "used")),
        "bar1_memory_usage/free" => mib(gpu.member("DeviceGetBAR1MemoryInfo", "free")),
        "compute_mode" => gpu.shown("DeviceGetComputeMode", |mode| {
            if mode == 0 {
                "Default".to_owned()
            } else {
                mode.to_string()
            }
        }),
        "utilization/gpu_util" => format!("{} %", gpu.item("DeviceGetUtilizationRates", 0)),
        "utilization/memory_util" => format!("{} %", gpu.item("DeviceGetUtilizationRates", 1)),
        "utilization/encoder_util" => format!("{} %", gpu.item("DeviceGetEncoderUtilization", 0)),
        "utilization/decoder_util" => format!("{} %", gpu.item("DeviceGetDecoderUtilization", 0)),
        "utilization/jpeg_util" => format!("{} %", gpu.item("DeviceGetJpgUtilization", 0)),
        "utilization/ofa_util" => format!("{} %", gpu.item("DeviceGetOfaUtilization", 0)),
        path if path.starts_with("encoder_stats/") => {
            gpu.item("DeviceGetEncoderStats", 0).to_string()
        }
        path if path.starts_with("fbc_stats/") => gpu.item("DeviceGetFBCStats", 0).to_string(),
        "ecc_mode/current_ecc" => on_off(gpu.item("DeviceGetEccMode", 0)),
        "ecc_mode/pending_ecc" => on_off(gpu.item("DeviceGetEccMode", 1)),
        "ecc_errors/volatile/sram_correctable" => ecc("volatile", 0)?,
        "ecc_errors/volatile/sram_uncorrectable_parity" => ecc("volatile", 1)?,
        "ecc_errors/volatile/sram_uncorrectable_secded" => ecc("volatile", 2)?,
        "ecc_errors/volatile/dram_correctable" => {
            gpu.number("DeviceGetMemoryErrorCounter[0,0,2]").to_string()
        }
        "ecc_errors/volatile/dram_uncorrectable" => {
            gpu.number("DeviceGetMemoryErrorCounter[1,0,2]").to_string()
        }
        "ecc_errors/aggregate/sram_correctable" => ecc("aggregate", 0)?,
        "ecc_errors/aggregate/sram_uncorrectable_parity" => ecc("aggregate", 1)?,
        "ecc_errors/aggregate/sram_uncorrectable_secded" => ecc("aggregate", 2)?,
        "ecc_errors/aggregate/dram_correctable" => {
            gpu.number("DeviceGetMemoryErrorCounter[0,1,2]").to_string()
        }
        "ecc_errors/aggregate/dram_uncorrectable" => {
            gpu.number("DeviceGetMemoryErrorCounter[1,1,2]").to_string()
        }
        "ecc_errors/aggregate/sram_threshold_exceeded" => {
            yes_no(gpu.member("DeviceGetSramEccErrorStatus", "threshold_exceeded"))
        }
        "ecc_errors/aggregate_uncorrectable_sram_sources/sram_l2" => ecc("sources", 0)?,
        "ecc_errors/aggregate_uncorrectable_sram_sources/sram_sm" => ecc("sources", 1)?,
        "ecc_errors/aggregate_uncorrectable_sram_sources/sram_microcontroller" => {
            ecc("sources", 2)?
        }
        "ecc_errors/aggregate_uncorrectable_sram_sources/sram_pcie" => ecc("sources", 3)?,
        "ecc_errors/aggregate_uncorrectable_sram_sources/sram_other" => ecc("sources", 4)?,
        "ecc_errors/channel_repair_pending" => yes_no(gpu.item("DeviceGetRepairStatus", 0)),
        "ecc_errors/tpc_repair_pending" => yes_no(gpu.item("DeviceGetRepairStatus", 1)),
        "ecc_errors/unrepairable_memory" => {
            yes_no(gpu.number("DeviceGetUnrepairableMemoryFlag_v1"))
        }
        "retired_pages/multiple_single_bit_retirement/retired_count"
        | "retired_pages/multiple_single_bit_retirement/retired_pagelist" => {
            gpu.shown("DeviceGetRetiredPages[0]", |count| count.to_string())
        }
        "retired_pages/double_bit_retirement/retired_count"
        | "retired_pages/double_bit_retirement/retired_pagelist" => {
            gpu.shown("DeviceGetRetiredPages[1]", |count| count.to_string())
        }
        "retired_pages/pending_blacklist" | "retired_pages/pending_retirement" => {
            gpu.shown("DeviceGetRetiredPagesPendingStatus", yes_no)
        }
        "remapped_rows/remapped_row_corr" => gpu.item("DeviceGetRemappedRows", 0).to_string(),
        "remapped_rows/remapped_row_unc" => gpu.item("DeviceGetRemappedRows", 1).to_string(),
        "remapped_rows/remapped_row_corr_inactive" => gpu.number("Field[301]").to_string(),
        "remapped_rows/remapped_row_unc_inactive" => gpu.number("Field[302]").to_string(),
        "remapped_rows/remapped_row_pending" => yes_no(gpu.item("DeviceGetRemappedRows", 2)),
        "remapped_rows/remapped_row_failure" => yes_no(gpu.item("DeviceGetRemappedRows", 3)),
        "remapped_rows/row_remapper_histogram/row_remapper_histogram_max" => {
            format!("{} bank(s)", gpu.item("DeviceGetRowRemapperHistogram", 0))
        }
        "remapped_rows/row_remapper_histogram/row_remapper_histogram_high" => {
            format!("{} bank(s)", gpu.item("DeviceGetRowRemapperHistogram", 1))
        }
        "remapped_rows/row_remapper_histogram/row_remapper_histogram_partial" => {
            format!("{} bank(s)", gpu.item("DeviceGetRowRemapperHistogram", 2))
        }
        "remapped_rows/row_remapper_histogram/row_remapper_histogram_low" => {
            format!("{} bank(s)", gpu.item("DeviceGetRowRemapperHistogram", 3))
        }
        "remapped_rows/row_remapper_histogram/row_remapper_histogram_none" => {
            format!("{} bank(s)", gpu.item("DeviceGetRowRemapperHistogram", 4))
        }
        "temperature/gpu_temp" => gpu.with_unit("DeviceGetTemperature[0]", "C"),
        "temperature/gpu_temp_tlimit" => gpu.with_unit("DeviceGetMarginTemperature", "C"),
        "temperature/gpu_temp_max_tlimit_threshold" => gpu.with_unit("Field[193]", "C"),
        "temperature/gpu_temp_slow_tlimit_threshold" => gpu.with_unit("Field[194]", "C"),
        "temperature/gpu_temp_max_mem_tlimit_threshold" => gpu.with_unit("Field[195]", "C"),
        "temperature/gpu_temp_max_gpu_tlimit_threshold" => gpu.with_unit("Field[196]", "C"),
        "temperature/memory_temp" => gpu.with_unit("Field[82]", "C"),
        "gpu_power_readings/average_power_draw" => gpu.watts("Field[185]"),
        "gpu_power_readings/instant_power_draw" => gpu.watts("Field[186]"),
        "gpu_power_readings/current_power_limit" => gpu.watts("DeviceGetEnforcedPowerLimit"),
        "gpu_power_readings/requested_power_limit" => gpu.watts("Field[192]"),
        "gpu_power_readings/default_power_limit" => {
            gpu.watts("DeviceGetPowerManagementDefaultLimit")
        }
        "gpu_power_readings/min_power_limit" => format!(
            "{}.00 W",
            gpu.item("DeviceGetPowerManagementLimitConstraints", 0) / 1000
        ),
        "gpu_power_readings/max_power_limit" => format!(
            "{}.00 W",
            gpu.item("DeviceGetPowerManagementLimitConstraints", 1) / 1000
        ),
        "gpu_memory_power_readings/average_power_draw" => gpu.watts("Field[185] of the memory"),
        "module_power_readings/average_power_draw"
        | "module_power_readings/instant_power_draw"
        | "module_power_readings/current_power_limit"
        | "module_power_readings/requested_power_limit"
        | "module_power_readings/default_power_limit"
        | "module_power_readings/min_power_limit"
        | "module_power_readings/max_power_limit" => module_limit()?,
        "clocks/graphics_clock" => gpu.with_unit("DeviceGetClockInfo[0]", "MHz"),
        "clocks/sm_clock" => gpu.with_unit("DeviceGetClockInfo[1]", "MHz"),
        "clocks/mem_clock" => gpu.with_unit("DeviceGetClockInfo[2]", "MHz"),
        "clocks/video_clock" => gpu.with_unit("DeviceGetClockInfo[3]", "MHz"),
        "applications_clocks/graphics_clock" => {
            gpu.with_unit("DeviceGetApplicationsClock[0]", "MHz")
        }
        "applications_clocks/mem_clock" => gpu.with_unit("DeviceGetApplicationsClock[2]", "MHz"),
        "default_applications_clocks/graphics_clock" => {
            gpu.with_unit("DeviceGetDefaultApplicationsClock[0]", "MHz")
        }
        "default_applications_clocks/mem_clock" => {
            gpu.with_unit("DeviceGetDefaultApplicationsClock[2]", "MHz")
        }
        "max_clocks/graphics_clock" => gpu.with_unit("DeviceGetMaxClockInfo[0]", "MHz"),
        "max_clocks/sm_clock" => gpu.with_unit("DeviceGetMaxClockInfo[1]", "MHz"),
        "max_clocks/mem_clock" => gpu.with_unit("DeviceGetMaxClockInfo[2]", "MHz"),
        "max_clocks/video_clock" => gpu.with_unit("DeviceGetMaxClockInfo[3]", "MHz"),
        "max_customer_boost_clocks/graphics_clock" => {
            gpu.with_unit("DeviceGetMaxCustomerBoostClock[0]", "MHz")
        }
        path if path.starts_with("fabric/") => fabric(path, gpu)?,
        _ => return None,
    })
}

fn fabric(path: &str, gpu: &Gpu<'_>) -> Option<String> {
    if gpu.is_absent("DeviceGetGpuFabricInfoV") {
        return Some("N/A".to_owned());
    }
    let member = |name: &str| gpu.member("DeviceGetGpuFabricInfoV", name);
    Some(match path {
        "fabric/state" => {
            if member("state") == 3 {
                "Completed".to_owned()
            } else {
                member("state").to_string()
            }
        }
        "fabric/status" => {
            if member("status") == 0 {
                "Success".to_owned()
            } else {
                member("status").to_string()
            }
        }
        "fabric/cliqueId" => member("clique").to_string(),
        path if path.starts_with("fabric/health/") => {
            assert_eq!((member("health_mask"), member("health_summary")), (0, 0));
            "N/A".to_owned()
        }
        _ => return None,
    })
}

/// The leaves of an element by their path.
fn leaves(element: roxmltree::Node<'_, '_>, path: &str, into: &mut BTreeMap<String, String>) {
    for child in element.children().filter(roxmltree::Node::is_element) {
        let name = child.tag_name().name();
        let path = if path.is_empty() {
            name.to_owned()
        } else {
            format!("{path}/{name}")
        };
        if child.children().any(|it| it.is_element()) {
            leaves(child, &path, into);
        } else {
            into.insert(path, child.text().unwrap_or("").trim().to_owned());
        }
    }
}

fn capture(node: &str) -> String {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("captures/{node}.nvidia-smi-q.xml"));
    std::fs::read_to_string(path).unwrap()
}

fn parse(text: &str) -> roxmltree::Document<'_> {
    let options = roxmltree::ParsingOptions {
        allow_dtd: true,
        ..Default::default()
    };
    roxmltree::Document::parse_with_options(text, options).unwrap()
}

fn compare(node: &str) {
    let (text, transcript) = (capture(node), transcript_of(node, "capture"));
    let document = parse(&text);
    let root = document.root_element();
    let head = |name: &str| {
        root.children()
            .find(|it| it.has_tag_name(name))
            .and_then(|it| it.text())
            .unwrap()
            .to_owned()
    };
    assert_eq!(
        transcript["system"]["SystemGetDriverVersion"],
        head("driver_version")
    );
    let cuda = transcript["system"]["SystemGetCudaDriverVersion"]
        .as_i64()
        .unwrap();
    assert_eq!(
        format!("{}.{}", cuda / 1000, cuda % 1000 / 10),
        head("cuda_version")
    );
    let gpus: Vec<_> = root
        .children()
        .filter(|it| it.has_tag_name("gpu"))
        .collect();
    assert_eq!(transcript["gpus"].as_array().unwrap().len(), gpus.len());
    let mut wrong = Vec::new();
    let mut compared = 0;
    for (index, captured) in gpus.into_iter().enumerate() {
        let mut values = BTreeMap::new();
        leaves(captured, "", &mut values);
        for (path, value) in values {
            if let Some((_, constant)) = ABSENT_ON_H200.iter().find(|(known, _)| *known == path) {
                assert_eq!(value, *constant, "{node} GPU {index} {path}");
                continue;
            }
            let answered = expected(&path, &Gpu(&transcript["gpus"][index]));
            if answered.is_none()
                && NOT_COMPARED
                    .iter()
                    .any(|(start, _)| path.starts_with(start))
            {
                continue;
            }
            compared += 1;
            if answered.as_ref() != Some(&value) {
                wrong.push(format!(
                    "GPU {index} {path}: captured {value}, simulated {answered:?}"
                ));
            }
        }
    }
    assert!(wrong.is_empty(), "{node}:\n{}", wrong.join("\n"));
    assert!(
        compared > 130,
        "only {compared} values of {node} were compared"
    );
}

#[test]
fn one_h200_answers_as_captured() {
    compare("h200x1");
}

#[test]
fn eight_h200s_answer_as_captured() {
    compare("h200x8");
}

#[test]
fn supported_clocks_are_those_of_the_capture() {
    let text = capture("h200x1");
    let document = parse(&text);
    let mhz = |text: &str| text.trim_end_matches(" MHz").parse::<u64>().unwrap();
    let transcript = transcript_of("h200x1", "clocks");
    let gpu = &transcript["gpus"][0];
    let mut captured_memory_clocks = Vec::new();
    for memory in document
        .descendants()
        .filter(|it| it.has_tag_name("supported_mem_clock"))
    {
        let values = |tag: &'static str| {
            memory
                .children()
                .filter(move |it| it.has_tag_name(tag))
                .map(|it| mhz(it.text().unwrap()))
        };
        let clock = values("value").next().unwrap();
        let graphics: Vec<u64> = values("supported_graphics_clock").collect();
        let simulated: Vec<u64> = serde_json::from_value(
            gpu[format!("DeviceGetSupportedGraphicsClocks[{clock}]")].clone(),
        )
        .unwrap();
        assert_eq!(simulated, graphics, "with memory at {clock} MHz");
        captured_memory_clocks.push(clock);
    }
    assert_eq!(captured_memory_clocks.len(), 2);
    let simulated: Vec<u64> =
        serde_json::from_value(gpu["DeviceGetSupportedMemoryClocks"].clone()).unwrap();
    assert_eq!(simulated, captured_memory_clocks);
}
