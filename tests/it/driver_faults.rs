//! Drivers that are absent, incomplete, stuck or crash: the rest is judged, and what was not read never passes.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::node::{Node, Ran, Scratch, set, validator};

#[test]
fn a_machine_without_gpu_and_driver_is_not_judged() {
    let empty = Scratch::new();
    for folder in [
        "libraries",
        "sysroot/sys/bus/pci/devices",
        "sysroot/proc",
        "sysroot/dev",
    ] {
        std::fs::create_dir_all(empty.path(folder)).expect("a folder");
    }
    let mut command = validator();
    command
        .env("LD_LIBRARY_PATH", empty.path("libraries"))
        .args(["run", "--sysroot"])
        .arg(empty.path("sysroot"))
        .arg("--json")
        .arg(empty.path("report.json"));
    let ran = Ran::of(&mut command, || empty.read("report.json"));
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert_eq!(ran.report.0["simulated"], serde_json::Value::Null);
    assert!(
        ran.stdout.contains("missing on this machine"),
        "{}",
        ran.stdout
    );
    for what in ["NVML library: ", "CUDA driver library: ", "kernel module: "] {
        let lines = ran.stdout.lines().map(str::trim_start);
        let said = lines.filter(|line| line.starts_with(what)).count();
        assert_eq!(said, 1, "one line about {what}: {}", ran.stdout);
    }
}

/// GPUs on the bus that no driver was installed for, and a driver whose libraries are gone.
#[test]
fn gpus_without_libraries_fail_and_are_not_simulated() {
    let absent = ["nvml.present=false", "cuda.present=false"];
    for (faults, failing) in [
        (&["driver-not-loaded"][..], "kernel_module_loaded"),
        (&[], "nvml_library"),
    ] {
        let ran = Node::with("h200x8", faults, &absent).run(&[]);
        assert_eq!(ran.code, 1, "{}", ran.stdout);
        assert_eq!(ran.report.finding(failing)["verdict"], "fail");
        assert_eq!(ran.report.0["simulated"], serde_json::Value::Null);
        let judged_gpu = ran.report.findings().iter().any(|it| {
            it["subject"] != "host"
                && ["pass", "warn"].contains(&it["verdict"].as_str().unwrap_or(""))
        });
        assert!(!judged_gpu, "nothing was read of any GPU");
    }
}

/// The checks whose verdict is another than on the healthy node.
fn differing(healthy: &Ran, ran: &Ran) -> BTreeSet<String> {
    let (before, after) = (healthy.report.verdicts(), ran.report.verdicts());
    assert_eq!(
        before.keys().collect::<Vec<_>>(),
        after.keys().collect::<Vec<_>>(),
        "every check has its finding about every subject"
    );
    let differing = before
        .iter()
        .filter(|(key, verdict)| after[*key] != **verdict);
    differing.map(|((check, _), _)| check.clone()).collect()
}

#[test]
fn a_missing_symbol_costs_the_readings_that_need_it_and_no_other() {
    let healthy = Node::healthy("h200x1").run(&["--level", "quick"]);
    assert_eq!(healthy.code, 0, "{}", healthy.stdout);
    let cases: [(&str, &[&str]); 7] = [
        ("nvmlDeviceGetTemperature", &["temperature"]),
        ("nvmlDeviceGetEccMode", &["ecc_mode"]),
        ("nvmlDeviceGetPersistenceMode", &["persistence_mode"]),
        ("nvmlDeviceGetComputeMode", &["compute_mode"]),
        ("nvmlDeviceGetRepairStatus", &["memory_repair"]),
        ("nvmlDeviceGetPcieReplayCounter", &["pcie_replays"]),
        ("nvmlDeviceGetRemappedRows", &["row_remapping"]),
    ];
    for (symbol, affected) in cases {
        let change = format!("nvml.missing_symbols=[{symbol}]");
        let ran = Node::with("h200x1", &[], &[&change]).run(&["--level", "quick"]);
        assert_eq!(differing(&healthy, &ran), set(affected), "{symbol}");
        for check in affected {
            let finding = ran.report.finding(check);
            assert_eq!(finding["verdict"], "error", "{symbol}: {finding}");
        }
        assert_eq!(ran.code, 2, "{symbol}");
    }
}

#[test]
fn nvml_without_its_first_functions_is_not_judged() {
    for symbol in [
        "nvmlInit_v2",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
    ] {
        let change = format!("nvml.missing_symbols=[{symbol}]");
        let ran = Node::with("h200x8", &[], &[&change]).run(&["--level", "quick"]);
        assert_ne!(ran.code, 0, "{symbol}: {}", ran.stdout);
        assert_eq!(ran.report.finding("run_complete")["verdict"], "pass");
    }
}

/// What a node says on which reading the temperature hangs or crashes.
const HUNG_OR_CRASHED: [&str; 3] = [
    "gpu_reachable: error",
    "nvml_library: warn",
    "temperature: error",
];

#[test]
fn an_nvml_call_that_hangs_costs_its_deadline_and_its_reading() {
    let healthy = Node::healthy("h200x1").run(&["--level", "quick"]);
    let ran = Node::with_fault("h200x1", "nvml-hang").run(&["--level", "quick"]);
    assert_eq!(
        differing(&healthy, &ran),
        set(&["gpu_reachable", "nvml_library", "temperature"])
    );
    assert_eq!(ran.report.not_green(), set(&HUNG_OR_CRASHED));
    assert_eq!(ran.code, 2);
    let text = ran.report.finding("temperature")["summary"].to_string();
    assert!(text.contains("did not return within 5 s"), "{text}");
    assert!(ran.took >= Duration::from_secs(5), "{:?}", ran.took);
    assert!(ran.took < Duration::from_secs(9), "{:?}", ran.took);
}

/// The call hangs on every GPU: it is tried on all at once, on two of them alone, and then no more.
#[test]
fn a_call_that_hangs_on_eight_gpus_costs_three_deadlines() {
    let ran = Node::with_fault("h200x8", "nvml-hang").run(&["--level", "quick"]);
    assert_eq!(ran.report.not_green(), set(&HUNG_OR_CRASHED));
    assert_eq!(ran.report.of_check("temperature").count(), 8);
    assert!(
        ran.report
            .of_check("temperature")
            .all(|it| it["verdict"] == "error")
    );
    assert_eq!(ran.code, 2);
    assert!(ran.took < Duration::from_secs(22), "{:?}", ran.took);
}

#[test]
fn an_nvml_call_that_crashes_costs_its_reading() {
    let healthy = Node::healthy("h200x1").run(&["--level", "quick"]);
    let ran = Node::with_fault("h200x1", "nvml-crash").run(&["--level", "quick"]);
    assert_eq!(
        differing(&healthy, &ran),
        set(&["gpu_reachable", "nvml_library", "temperature"])
    );
    assert_eq!(ran.code, 2);
    let text = ran.report.finding("temperature")["summary"].to_string();
    assert!(text.contains("signal 6"), "{text}");
    assert!(ran.took < Duration::from_secs(5), "{:?}", ran.took);
}

#[test]
fn cuda_that_crashes_is_not_judged_and_nvml_is() {
    let ran = Node::with("h200x1", &[], &["cuda.crash=[cuInit]"]).run(&["--level", "standard"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let finding = ran.report.finding("cuda_driver_library");
    assert_eq!(finding["verdict"], "error");
    assert!(
        finding["summary"].to_string().contains("signal 6"),
        "{finding}"
    );
    assert_ne!(ran.report.finding("cuda_kernel")["verdict"], "pass");
    assert_eq!(ran.report.finding("temperature")["verdict"], "pass");
}

#[test]
fn a_kernel_log_that_cannot_be_read_is_an_error_with_its_remedy() {
    let ran = Node::with_fault("h200x1", "kernel-log-unreadable").run(&["--level", "quick"]);
    assert_eq!(ran.code, 2);
    assert_eq!(ran.report.not_green(), set(&["kernel_log_xid: error"]));
    let finding = ran.report.finding("kernel_log_xid");
    assert!(
        finding["summary"].to_string().contains("/dev/kmsg"),
        "{finding}"
    );
    assert!(
        finding["remedy"]
            .to_string()
            .contains("kernel.dmesg_restrict"),
        "{finding}"
    );
    // PCIe errors are counted in sysfs, too; that the log had no part in the pass is said.
    let finding = ran.report.finding("kernel_log_pcie");
    assert!(
        finding["summary"]
            .to_string()
            .ends_with("by the kernel's counters\""),
        "{finding}"
    );
}
