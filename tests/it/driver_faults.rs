//! Drivers that are absent, incomplete, stuck or crash: the rest is judged, and what was not read
//! never passes.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use landlock::{AccessFs, Ruleset, RulesetAttr as _, RulesetStatus};
use serde_json::Value;

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
    assert_eq!(ran.report.0["simulated"], Value::Null);
    let mut lines = ran.stdout.lines();
    let answer = lines.next().unwrap_or_default();
    assert!(
        answer.starts_with("NOT JUDGED: no GPU was judged: "),
        "{answer}"
    );
    assert!(lines.count() < 12, "{}", ran.stdout);
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
        assert_eq!(ran.report.0["simulated"], Value::Null);
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
fn an_nvml_that_answers_one_field_too_many_writes_over_nothing() {
    let node = Node::with("h200x8", &[], &["nvml.answers_one_field_too_many=true"]);
    let ran = node.run(&["--level", "quick"]);
    assert_eq!(ran.report.not_green(), set(&[]));
    assert_eq!(ran.code, 0, "{}", ran.stdout);
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

/// The findings of a node on which reading the temperature hangs or crashes.
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

/// The calls of NVML that read one GPU.
fn calls_of_a_gpu() -> String {
    let functions = functions_named_in("probe/nvml/library.rs", "nvml");
    let reads = |it: &&String| {
        it.starts_with("nvmlDeviceGet") && !it.contains("GetCount") && !it.contains("GetHandle")
    };
    let functions: Vec<&str> = functions.iter().filter(reads).map(String::as_str).collect();
    assert!(functions.len() > 40, "{functions:?}");
    functions.join(", ")
}

#[test]
fn whatever_hangs_the_verdict_comes_within_30_s_and_every_other_gpu_is_judged() {
    let every = calls_of_a_gpu();
    for (hangs, healthy) in [
        ("gpus.3.nvml.hang=[nvmlDeviceGetTemperature]".to_owned(), 7),
        (format!("gpus.3.nvml.hang=[{every}]"), 7),
        ("nvml.hang=[nvmlDeviceGetTemperature]".to_owned(), 0),
        (format!("nvml.hang=[{every}]"), 0),
    ] {
        let ran = Node::with("h200x8", &[], &[&hangs]).run(&["--level", "quick"]);
        assert!(
            ran.took < Duration::from_secs(30),
            "{hangs}: {:?}",
            ran.took
        );
        assert_eq!(ran.code, 2, "{hangs}: {}", ran.stdout);
        let of_verdict = |verdict: &str| {
            let of_check = ran.report.of_check("temperature");
            of_check.filter(|it| it["verdict"] == verdict).count()
        };
        assert_eq!(of_verdict("pass"), healthy, "{hangs}: {}", ran.stdout);
        assert_eq!(of_verdict("fail"), 0, "{hangs}: {}", ran.stdout);
    }
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

/// The driver's functions that a source file of the probes names.
fn functions_named_in(source: &str, prefix: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../validator/src")
        .join(source);
    let text = std::fs::read_to_string(&path).expect(source);
    // A comment names placeholders, too.
    let code: Vec<&str> = text
        .lines()
        .filter(|it| !it.trim_start().starts_with("//"))
        .collect();
    let text = code.join("\n");
    let words =
        text.split(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    let is_function = |word: &&str| {
        let rest = word.strip_prefix(prefix).unwrap_or_default();
        // Types are named alike, and end in `_t` or `_st`.
        rest.starts_with(char::is_uppercase) && !word.ends_with("_t") && !word.ends_with("_st")
    };
    words.filter(is_function).map(str::to_owned).collect()
}

/// A call that crashes on healthy hardware: nothing fails, nothing passes that did not before, and
/// what passes altogether has lost nothing that is judged.
fn crash_each(functions: &BTreeSet<String>, library: &str, level: &str) {
    let healthy = Node::healthy("h200x1").run(&["--level", level]);
    assert_eq!(healthy.code, 0, "{}", healthy.stdout);
    let mut noticed = 0;
    for function in functions {
        let change = format!("{library}.crash=[{function}]");
        let ran = Node::with("h200x1", &[], &[&change]).run(&["--level", level]);
        assert_ne!(ran.code, 1, "{function}: {}", ran.stdout);
        for finding in ran.report.findings() {
            let verdict = finding["verdict"].as_str().expect("text");
            // Without its UUID or name a GPU is another subject, so that the check alone is
            // compared.
            let check = finding["check"].as_str().expect("text");
            let is_usual = healthy.report.finding(check)["verdict"] == verdict;
            let of_library = ["nvml_library: warn", "cuda_driver_library: warn"];
            let is_trouble = of_library.contains(&format!("{check}: {verdict}").as_str());
            assert!(
                is_usual || is_trouble || ["error", "skip"].contains(&verdict),
                "{function}: {finding}"
            );
        }
        let not_green = ran.report.not_green();
        let only_a_warning = not_green.is_subset(&set(&["nvml_library: warn"]));
        assert_eq!(ran.code == 0, only_a_warning, "{function}: {not_green:?}");
        noticed += usize::from(!not_green.is_empty());
    }
    // Some are called on other hardware only, or where a newer one is missing.
    assert!(
        noticed * 3 > functions.len() * 2,
        "{noticed} of {functions:?} were noticed"
    );
}

#[test]
fn whichever_nvml_function_crashes_nothing_fails_and_nothing_passes_unseen() {
    let mut functions = functions_named_in("probe/nvml/library.rs", "nvml");
    functions.retain(|it| {
        ["nvmlDevice", "nvmlSystem", "nvmlInit"]
            .iter()
            .any(|start| it.starts_with(start))
    });
    assert!(functions.len() > 40, "{functions:?}");
    crash_each(&functions, "nvml", "quick");
}

#[test]
fn whichever_cuda_function_crashes_nothing_fails_and_nothing_passes_unseen() {
    let mut functions = functions_named_in("cuda/functions.rs", "cu");
    // Of a function in two versions the newer one is called where the driver has it, as the
    // simulated one does.
    let all = functions.clone();
    functions.retain(|it| !all.contains(&format!("{it}_v2")));
    assert!(functions.len() > 30, "{functions:?}");
    crash_each(&functions, "cuda", "standard");
}

fn node_that_cuda_hangs_on(gpu: u32) -> (Scratch, Node) {
    let scratch = Scratch::new();
    let fault = format!(
        "description: CUDA does not get past one GPU\n\
         gpu: {gpu}\n\
         changes: {{gpu.hangs_cuda_init: true}}\n\
         trips: {{cuda_driver_library: error, cuda_kernel: error}}\n"
    );
    let fault = scratch.write("hangs.yaml", fault);
    let node = Node::with_fault("h200x8", fault.to_str().expect("text"));
    (scratch, node)
}

/// A GPU whose worker CUDA keeps waiting. Its neighbours' workers cannot open its device node, and
/// so do not wait with it.
#[test]
fn a_gpu_that_cuda_hangs_on_is_the_only_one_that_hangs() {
    let (_scratch, node) = node_that_cuda_hangs_on(5);
    let ran = node.run(&["--level", "standard", "--deadline-scale", "0.2"]);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    assert_eq!(
        ran.report.finding("cuda_driver_library")["verdict"],
        "error"
    );
    let kernels: Vec<bool> = ran
        .report
        .of_check("cuda_kernel")
        .map(|it| it["verdict"] == "pass")
        .collect();
    // Without Landlock CUDA comes upon that GPU in every worker.
    let expected = |index| knows_landlock() && index != 5;
    assert_eq!(kernels, (0..8).map(expected).collect::<Vec<_>>());
}

/// The probe of CUDA on all GPUs is not awaited where the worker of the GPU that is burned has
/// shown that it works.
#[test]
fn a_burn_does_not_wait_for_cuda_to_get_past_another_gpu() {
    let (_scratch, node) = node_that_cuda_hangs_on(5);
    let uuid = &node.state().scenario().gpus[0].uuid;
    let own = ["--gpu", uuid, "--duration", "0.5s"];
    let mut command = node.burn_command(&[&own[..], &["--deadline-scale", "0.2"]].concat());
    let ran = node.finish(&mut command);
    assert_eq!(ran.code, 2, "{}", ran.stdout);
    let verdict = |check: &str| ran.report.finding(check)["verdict"].clone();
    assert_eq!(verdict("cuda_driver_library"), "error");
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    let run = &facts["load"]["burn"][uuid]["value"];
    if knows_landlock() {
        let products = run["precisions"][0]["products_verified"].as_u64();
        assert!(products.is_some_and(|it| it > 0), "{run}");
        // CUDA has six seconds to answer.
        let go_ms = run["startup"]["go_ms"].as_f64().expect("a time");
        assert!(go_ms < 5_000.0, "{run}");
    }
}

/// Whether the kernel restricts a process that requests it from opening files.
fn knows_landlock() -> bool {
    let asked = std::thread::spawn(|| {
        let nothing = Ruleset::default().handle_access(AccessFs::ReadFile)?;
        nothing.create()?.restrict_self()
    });
    let status = asked.join().expect("no panic").expect("an answer");
    status.ruleset != RulesetStatus::NotEnforced
}

#[test]
fn where_cuda_does_not_start_with_one_device_node_it_gets_all() {
    for level in ["quick", "standard"] {
        let node = Node::with_fault("h200x8", "cuda-needs-every-device-node");
        let ran = node.run(&["--level", level]);
        assert_eq!(ran.report.not_green(), set(&[]), "{level}");
        assert_eq!(ran.code, 0, "{}", ran.stdout);
    }
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
    // PCIe errors are counted in sysfs, too; the finding states that the log had no part in the
    // pass.
    let finding = ran.report.finding("kernel_log_pcie");
    assert!(
        finding["summary"]
            .to_string()
            .ends_with("by the kernel's counters\""),
        "{finding}"
    );
}

/// What cannot be opened, although it is there, is neither absent nor empty.
#[test]
fn host_files_that_cannot_be_opened_are_errors_and_fail_nothing() {
    for (folder, checks) in [
        (
            "sys/fs/cgroup/system.slice",
            &["fabric_manager: error", "persistence_daemon: error"][..],
        ),
        ("sys/bus/pci/devices", &["gpu_count: error"]),
        // It determines how many GPUs there should be.
        ("sys/class/dmi/id/sys_vendor", &["gpu_count: error"]),
        ("sys/module", &["kernel_module_loaded: error"]),
        ("dev", &["device_nodes: error"]),
    ] {
        let node = Node::healthy("p5.48xlarge");
        make_unopenable(&node, folder);
        let ran = node.run(&["--level", "quick"]);
        let not_green = ran.report.not_green();
        assert_eq!(ran.code, 2, "{folder}: {not_green:?}");
        assert!(
            not_green.is_superset(&set(checks)),
            "{folder}: {not_green:?}"
        );
    }
}

fn make_unopenable(node: &Node, folder: &str) {
    let path = node.sysroot().join(folder);
    std::fs::rename(&path, node.out.path("aside")).expect("moved");
    std::os::unix::fs::symlink(path.file_name().expect("a name"), &path).expect("a link to itself");
}

/// Where the driver's own list cannot be opened, NVML's minor numbers name the nodes that should
/// be.
#[test]
fn device_nodes_are_judged_by_nvml_where_the_drivers_list_is_hidden() {
    let node = Node::healthy("p5.48xlarge");
    make_unopenable(&node, "proc/driver/nvidia/gpus");
    let ran = node.run(&["--level", "quick"]);
    assert_eq!(ran.code, 0, "{:?}", ran.report.not_green());
    assert_eq!(ran.report.finding("device_nodes")["verdict"], "pass");
    std::fs::remove_file(node.sysroot().join("dev/nvidia3")).expect("removed");
    // NVML reads that GPU all the same, so that its node was made meanwhile.
    let ran = node.run(&["--level", "quick"]);
    assert_eq!(ran.code, 0);
    assert_eq!(ran.report.not_green(), set(&["device_nodes: warn"]));
    let finding = ran.report.finding("device_nodes");
    let summary = finding["summary"].as_str().expect("text");
    assert!(summary.starts_with("/dev/nvidia3 of "), "{summary}");
}
