//! A burn of the healthy machine.

use std::collections::BTreeMap;

use super::healthy_node;
use crate::facts::{
    BurnEngine, BurnPlan, BurnRun, CopyProof, Facts, LoadCounters, PcieUnderLoad, Precision,
    PrecisionRun, Reading, ReferenceProof, RowRemapping, SensorLog, SensorSample, ViolationTimes,
    WorkerEnd,
};

/// Eight healthy H200s after ten seconds of BF16 at the power limit.
pub fn burned_node() -> Facts {
    let mut facts = healthy_node();
    facts.load.burn_plan = Some(BurnPlan::On {
        duration_s: 10.0,
        precisions: Vec::new(),
        gpus: Vec::new(),
    });
    let gpus: Vec<_> = facts
        .gpus
        .iter()
        .filter_map(|gpu| {
            let ecc = (gpu.ecc_volatile.clone(), gpu.ecc_aggregate.clone());
            Some((gpu.uuid.value()?.clone(), ecc))
        })
        .collect();
    for (uuid, (ecc_volatile, ecc_aggregate)) in gpus {
        let counters = LoadCounters {
            ecc_volatile,
            ecc_aggregate,
            pcie_replays: Reading::Value(0),
            row_remapping: Reading::Value(RowRemapping::default()),
            retired_pages: Reading::NotSupported,
            violations: Reading::Value(ViolationTimes::default()),
        };
        let sensors = SensorLog {
            power_limit_mw: Some(700_000),
            samples: (0..50_u8).map(sample).collect(),
            reasons_seen: BTreeMap::new(),
            pcie: Some(PcieUnderLoad {
                generations: BTreeMap::from([(5, 50)]),
                widths: BTreeMap::from([(16, 50)]),
            }),
            before: counters.clone(),
            after: counters,
            xids: Vec::new(),
            xids_of_others: Vec::new(),
            xids_trouble: None,
            xid_events: Reading::Value(Vec::new()),
            other_processes: Vec::new(),
            trouble: None,
        };
        facts.load.sensors.insert(uuid.clone(), sensors);
        facts.load.burn.insert(uuid, Reading::Value(healthy_run()));
    }
    facts
}

/// The same, but for the run of the third GPU.
pub fn burned_node_with(change: impl FnOnce(&mut BurnRun)) -> Facts {
    let mut facts = burned_node();
    let uuid = facts.gpus[2].uuid.value().cloned().unwrap_or_default();
    match facts.load.burn.get_mut(&uuid) {
        Some(Reading::Value(run)) => change(run),
        other => panic!("the machine has a run, not {other:?}"),
    }
    facts
}

/// The same, but for the sensors of the third GPU.
pub fn burned_node_with_sensors(change: impl FnOnce(&mut SensorLog)) -> Facts {
    let mut facts = burned_node();
    let uuid = facts.gpus[2].uuid.value().cloned().unwrap_or_default();
    change(facts.load.sensors.entry(uuid).or_default());
    facts
}

fn sample(index: u8) -> SensorSample {
    SensorSample {
        t: f32::from(index) / 5.0,
        power_mw: Some(694_000),
        sm_mhz: Some(1455),
        memory_mhz: Some(3201),
        gpu_c: Some(62),
        memory_c: Some(68),
        reasons: Some(0x4),
        utilization_percent: Some(100),
    }
}

fn healthy_run() -> BurnRun {
    let products = PrecisionRun {
        precision: Precision::Bf16,
        kernels: "sm_90a".to_owned(),
        engine: None,
        m: 8192,
        n: 8192,
        k: 16_384,
        products: 3000,
        products_verified: 3000,
        gpu_time_s: 10.0,
        tflops: 660.0,
        tflops_intervals: vec![660.0; 20],
        reference: ReferenceProof {
            checksum: "0x0123456789abcdef".to_owned(),
            exact_rows: 2,
            freivalds_vectors: 2,
            freivalds_worst: 0.05,
            sampled_elements: 16_384,
            sampled_worst: 0.1,
            ..ReferenceProof::default()
        },
        mismatches: 0,
        nonfinite: 0,
        examples: Vec::new(),
    };
    BurnRun {
        end: WorkerEnd::Finished,
        engine: BurnEngine::Ptx {
            kernels: "sm_90a".to_owned(),
        },
        engine_choice: "the embedded sm_90a kernels, which need the driver alone".to_owned(),
        seed: 7,
        requested_s: 10.0,
        measured_s: 10.0,
        stood_still_s: 0.0,
        start_to_load_ms: 600.0,
        startup: None,
        stop_ms: Some(50.0),
        memory_free_bytes: 150_000_000_000,
        memory_used_bytes: 142_500_000_000,
        notes: Vec::new(),
        copies: Some(CopyProof {
            bytes: 1 << 20,
            ..CopyProof::default()
        }),
        precisions: vec![products],
        injected: 0,
    }
}
