//! A healthy GPU, and ways to judge one that is not.

use super::{healthy_node, judge_check};
use crate::check::Check;
use crate::facts::{
    Clocks, ClocksEventReasons, ComputeCapability, ComputeMode, EccErrors, EccMode, FabricState,
    Facts, GpuFacts, GpuProcess, MemoryUse, MigMode, NvLink, PcieLink, Power, Reading,
    RecoveryAction, RepairStatus, RetiredPages, RowRemapperHistogram, RowRemapping, Temperature,
    Utilization, ViolationTimes,
};
use crate::findings::Finding;

pub const MIB: u64 = 1024 * 1024;

/// One of eight H200s with NVSwitches, idle, as driver 580.159.04 describes it (captured with
/// `nvidia-smi -q -x`).
pub(super) fn healthy_gpu(index: u32) -> GpuFacts {
    GpuFacts {
        uuid: Reading::Value(format!("GPU-00000000-0000-0000-0000-00000000000{index}")),
        pci_address: Reading::Value(format!("0000:{:02x}:00.0", 0x10 + index)),
        lost: None,
        name: Reading::Value("NVIDIA H200".to_owned()),
        serial: Reading::Value(format!("000000000000{index}")),
        minor_number: Reading::Value(index),
        pci_device_id: Reading::Value(0x2335),
        pci_subsystem_id: Reading::Value(0x18bf_10de),
        compute_capability: Reading::Value(ComputeCapability { major: 9, minor: 0 }),
        vbios_version: Reading::Value("96.00.A5.00.1A".to_owned()),
        board_part_number: Reading::Value("692-2G520-0282-001".to_owned()),
        gsp_firmware_version: Reading::Value("580.159.04".to_owned()),
        memory: Reading::Value(MemoryUse {
            total_bytes: 143_771 * MIB,
            reserved_bytes: Some(616 * MIB),
            used_bytes: 0,
            free_bytes: 143_155 * MIB,
        }),
        persistence_mode: Reading::Value(true),
        compute_mode: Reading::Value(ComputeMode::Default),
        mig: Reading::Value(MigMode::default()),
        mig_devices: Reading::Value(Vec::new()),
        ecc_mode: Reading::Value(EccMode {
            current: true,
            pending: true,
        }),
        ecc_volatile: Reading::Value(no_ecc_errors()),
        ecc_aggregate: Reading::Value(no_ecc_errors()),
        sram_threshold_exceeded: Reading::Value(false),
        row_remapping: Reading::Value(RowRemapping {
            histogram: Some(RowRemapperHistogram {
                max: 3072,
                ..RowRemapperHistogram::default()
            }),
            ..RowRemapping::default()
        }),
        retired_pages: Reading::NotSupported,
        repair_status: Reading::Value(RepairStatus::default()),
        unrepairable_memory: Reading::Value(false),
        inforom_valid: Reading::Value(true),
        inforom_image_version: Reading::Value("G520.0282.02.02".to_owned()),
        recovery_action: Reading::Value(RecoveryAction::None),
        pcie: Reading::Value(PcieLink {
            current_generation: 5,
            current_width: 16,
            max_generation: 5,
            max_width: 16,
            gpu_max_generation: Some(5),
        }),
        pcie_replays: Reading::Value(0),
        nvlinks: Reading::Value((0..18).map(link_to_a_switch).collect()),
        fabric: Reading::Value(FabricState {
            state: "completed".to_owned(),
            status: "success".to_owned(),
            clique_id: Some(0),
            cluster_uuid: Some("00000000-0000-0000-0000-000000000000".to_owned()),
            unhealthy: None,
        }),
        clocks: Reading::Value(Clocks {
            sm_mhz: 345,
            memory_mhz: 3201,
            max_sm_mhz: Some(1980),
            max_memory_mhz: Some(3201),
        }),
        clocks_event_reasons: Reading::Value(ClocksEventReasons(ClocksEventReasons::GPU_IDLE)),
        violations: Reading::Value(ViolationTimes {
            power_ns: Some(0),
            thermal_ns: Some(0),
            hw_thermal_ns: Some(0),
            hw_power_brake_ns: Some(0),
            reliability_ns: None,
            sync_boost_ns: Some(0),
        }),
        temperature: Reading::Value(Temperature {
            gpu_c: 36,
            memory_c: Some(39),
            slowdown_c: None,
            shutdown_c: None,
            gpu_max_c: None,
            memory_max_c: None,
            tlimit_c: Some(51),
        }),
        power: Reading::Value(Power {
            draw_mw: Some(79_560),
            limit_mw: 700_000,
            default_limit_mw: Some(700_000),
            min_limit_mw: Some(200_000),
            max_limit_mw: Some(700_000),
        }),
        utilization: Reading::Value(Utilization::default()),
        performance_state: Reading::Value(0),
        processes: Reading::Value(Vec::new()),
        virtualization_mode: Reading::Value("pass_through".to_owned()),
        calls_hung: Vec::new(),
    }
}

fn no_ecc_errors() -> EccErrors {
    EccErrors {
        sram_correctable: Some(0),
        sram_uncorrectable: Some(0),
        dram_correctable: Some(0),
        dram_uncorrectable: Some(0),
        total_correctable: Some(0),
        total_uncorrectable: Some(0),
    }
}

fn link_to_a_switch(link: u32) -> NvLink {
    NvLink {
        link,
        active: true,
        speed_mbps: Some(26_562),
        crc_flit_errors: Some(0),
        crc_data_errors: Some(0),
        replay_errors: Some(0),
        recovery_errors: Some(0),
        symbol_errors: None,
        effective_errors: None,
    }
}

/// A T4: page retirement instead of row remapping, no NVLink, no MIG, thresholds in degrees, idle
/// in P8.
pub fn healthy_t4() -> GpuFacts {
    GpuFacts {
        name: Reading::Value("Tesla T4".to_owned()),
        pci_device_id: Reading::Value(0x1eb8),
        pci_subsystem_id: Reading::Value(0x12a2_10de),
        compute_capability: Reading::Value(ComputeCapability { major: 7, minor: 5 }),
        memory: Reading::Value(MemoryUse {
            total_bytes: 15_360 * MIB,
            reserved_bytes: Some(449 * MIB),
            used_bytes: 0,
            free_bytes: 14_911 * MIB,
        }),
        mig: Reading::NotSupported,
        mig_devices: Reading::NotSupported,
        row_remapping: Reading::NotSupported,
        retired_pages: Reading::Value(RetiredPages::default()),
        repair_status: Reading::NotSupported,
        unrepairable_memory: Reading::NotSupported,
        pcie: Reading::Value(PcieLink {
            current_generation: 1,
            current_width: 16,
            max_generation: 3,
            max_width: 16,
            gpu_max_generation: Some(3),
        }),
        nvlinks: Reading::NotSupported,
        fabric: Reading::NotSupported,
        clocks: Reading::Value(Clocks {
            sm_mhz: 300,
            memory_mhz: 405,
            max_sm_mhz: Some(1590),
            max_memory_mhz: Some(5001),
        }),
        temperature: Reading::Value(Temperature {
            gpu_c: 31,
            memory_c: None,
            slowdown_c: Some(93),
            shutdown_c: Some(96),
            gpu_max_c: Some(85),
            memory_max_c: None,
            tlimit_c: None,
        }),
        power: Reading::Value(Power {
            draw_mw: Some(9_400),
            limit_mw: 70_000,
            default_limit_mw: Some(70_000),
            min_limit_mw: Some(60_000),
            max_limit_mw: Some(70_000),
        }),
        performance_state: Reading::Value(8),
        ..healthy_gpu(0)
    }
}

/// One H200 of a board, passed through to a virtual machine: no fabric, and NVLinks that lead
/// nowhere.
pub fn healthy_single_h200() -> GpuFacts {
    let mut gpu = healthy_gpu(0);
    gpu.fabric = Reading::NotSupported;
    if let Reading::Value(links) = &mut gpu.nvlinks {
        for link in links {
            *link = NvLink {
                link: link.link,
                ..NvLink::default()
            };
        }
    }
    gpu
}

/// A machine off EC2 whose only GPU is `gpu`.
pub fn node_with(gpu: GpuFacts) -> Facts {
    let mut facts = healthy_node();
    facts.host.ec2 = Reading::NotSupported;
    facts.host.pci_devices = Reading::NotRead("not probed".to_owned());
    facts.gpus = vec![gpu];
    facts
}

/// Makes `gpu` one that the reference table does not know.
pub fn make_model_unknown(gpu: &mut GpuFacts) {
    gpu.name = Reading::Value("NVIDIA Unheard-of 1".to_owned());
    gpu.pci_device_id = Reading::Value(0xffff);
}

/// A foreign process.
pub fn python_process(used_memory_mib: u64) -> GpuProcess {
    GpuProcess {
        pid: 4242,
        name: Some("python3".to_owned()),
        user: None,
        used_memory_bytes: Some(used_memory_mib * MIB),
        graphics: false,
    }
}

/// The result of `check` for the first GPU of a healthy node after `change`.
pub fn judge_gpu(check: &Check, profile_yaml: &str, change: impl FnOnce(&mut GpuFacts)) -> Finding {
    let mut facts = healthy_node();
    change(&mut facts.gpus[0]);
    judge_check(check, &facts, profile_yaml).swap_remove(0)
}

/// The result of `check` for `gpu` where it is the only one, off EC2.
pub fn judge_only_gpu(check: &Check, profile_yaml: &str, gpu: GpuFacts) -> Finding {
    judge_check(check, &node_with(gpu), profile_yaml).swap_remove(0)
}

/// The results of `check` for every GPU of a healthy node.
pub fn judge_healthy(check: &Check) -> Vec<Finding> {
    judge_check(check, &healthy_node(), "{}")
}
