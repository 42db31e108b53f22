//! NVML as a program meets it: the library loaded by name, in a process of its own on a simulated
//! node.

#![allow(unsafe_code, reason = "calls NVML's C interface")]

use nvml_wrapper_sys::bindings as sys;
use nvml_wrapper_sys::bindings::{NvmlLib, nvmlDevice_t};
use simulator::node::{NODE_VARIABLE, Node};
use simulator::{Catalogue, NodeRequest, PreparedNode, prepare_node};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `gpu_simulator_scenario`.
type Marker = unsafe extern "C" fn() -> *const std::ffi::c_char;

const SUCCESS: u32 = sys::nvmlReturn_enum_NVML_SUCCESS;
const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;

fn library() -> PathBuf {
    // Cargo builds the shared library next to the tests.
    std::env::current_exe()
        .unwrap()
        .with_file_name("libsimulator.so")
}

fn prepare(name: &str, node: &str, faults: &[&str]) -> PreparedNode {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("nvml-{name}"));
    let faults: Vec<String> = faults.iter().map(|fault| (*fault).to_owned()).collect();
    prepare_node(&NodeRequest {
        folder: &folder,
        library: &library(),
        catalogue: &Catalogue::shipped(),
        node,
        faults: &faults,
        overrides: &[],
    })
    .unwrap()
}

/// Runs the named test of this file in a process on the node; there it finds `NODE_VARIABLE` set.
fn start(test: &str, prepared: &PreparedNode) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .envs(&prepared.environment)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn run(test: &str, prepared: &PreparedNode) {
    let output: Output = start(test, prepared).wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// True in the process on the node; in the test runner's own, `start` is called instead.
fn on_node() -> bool {
    std::env::var_os(NODE_VARIABLE).is_some()
}

fn load() -> NvmlLib {
    // SAFETY: loads the library by the name that every program uses.
    unsafe { NvmlLib::new("libnvidia-ml.so.1") }.unwrap()
}

fn initialize(nvml: &NvmlLib) -> u32 {
    // SAFETY: takes nothing.
    unsafe { nvml.nvmlInit_v2() }
}

fn device(nvml: &NvmlLib, index: u32) -> Result<nvmlDevice_t, u32> {
    let mut device = std::ptr::null_mut();
    // SAFETY: fills one handle.
    match unsafe { nvml.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device) } {
        SUCCESS => Ok(device),
        code => Err(code),
    }
}

#[test]
fn every_function_of_nvml_is_exported() {
    // SAFETY: loads a library whose initialisers do nothing.
    let library = unsafe { libloading::Library::new(library()) }.unwrap();
    let names = include_str!("../src/nvml/symbols.txt");
    let missing: Vec<&str> = names
        .lines()
        // SAFETY: the function is looked up and not called.
        .filter(|name| {
            unsafe { library.get::<unsafe extern "C" fn() -> u32>(name.as_bytes()) }.is_err()
        })
        .collect();
    assert!(missing.is_empty(), "not exported: {missing:?}");
    assert!(names.lines().count() > 400);
}

#[test]
fn at_least_150_functions_are_really_answered() {
    let not_supported = include_str!("../src/nvml/not_supported.rs");
    let refused = include_str!("../src/nvml/settings.rs");
    let listed = |text: &str| {
        text.lines()
            .filter(|line| line.trim_start().starts_with("nvml"))
            .count()
    };
    let all = include_str!("../src/nvml/symbols.txt").lines().count();
    let answered = all - listed(not_supported) - listed(refused);
    assert!(answered >= 150, "{answered} functions are answered");
}

#[test]
fn without_a_node_nothing_looks_healthy() {
    let output = Command::new(env!("CARGO_BIN_EXE_nvml-transcript"))
        .env(
            "LD_LIBRARY_PATH",
            prepare("no-node", "h200x1", &[]).library_dir,
        )
        .env_remove(NODE_VARIABLE)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains("GPU_SIMULATOR_NODE is not set"), "{stderr}");
    assert!(stderr.contains("nvmlInit_v2: error 9"), "{stderr}");
}

#[test]
fn a_node_of_another_version_is_refused() {
    let prepared = prepare("other-version", "h200x1", &[]);
    let path = prepared.folder.join(simulator::scenario::SCENARIO_FILE);
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replacen("\"vbios\"", "\"vbias\"", 1)).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_nvml-transcript"))
        .envs(&prepared.environment)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("another version of the simulator"),
        "{stderr}"
    );
    assert!(stderr.contains("nvmlInit_v2: error 9"), "{stderr}");
}

#[test]
fn return_codes_are_nvmls() {
    if !on_node() {
        return run(
            "return_codes_are_nvmls",
            &prepare("codes", "h200x8", &["xid-79"]),
        );
    }
    let nvml = load();
    let mut count = 0;
    let mut memory = sys::nvmlMemory_v2_t {
        version: 0,
        total: 0,
        reserved: 0,
        free: 0,
        used: 0,
    };
    // SAFETY: every pointer is to a value that lives through its call, as NVML requires.
    unsafe {
        assert_eq!(
            nvml.nvmlDeviceGetCount_v2(&raw mut count),
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED
        );
        assert_eq!(
            nvml.nvmlShutdown(),
            sys::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED
        );
        assert_eq!(initialize(&nvml), SUCCESS);
        assert_eq!(nvml.nvmlDeviceGetCount_v2(&raw mut count), SUCCESS);
        assert_eq!(count, 8);
        assert_eq!(
            nvml.nvmlDeviceGetCount_v2(std::ptr::null_mut()),
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT
        );
        assert_eq!(
            device(&nvml, 8),
            Err(sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
        );
        // The fault is on GPU 1.
        assert_eq!(
            device(&nvml, 1),
            Err(sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST)
        );
        let gpu = device(&nvml, 0).unwrap();
        let mut name = [0; 4];
        let code = nvml.nvmlDeviceGetName(gpu, name.as_mut_ptr(), 4);
        assert_eq!(code, sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
        let code = nvml.nvmlDeviceGetMemoryInfo_v2(gpu, &raw mut memory);
        assert_eq!(
            code,
            sys::nvmlReturn_enum_NVML_ERROR_ARGUMENT_VERSION_MISMATCH
        );
        memory.version = 0x0200_0028;
        assert_eq!(
            nvml.nvmlDeviceGetMemoryInfo_v2(gpu, &raw mut memory),
            SUCCESS
        );
        assert_eq!(memory.total, 143_771 << 20);
        assert_eq!(
            nvml.nvmlDeviceSetPersistenceMode(gpu, 0),
            sys::nvmlReturn_enum_NVML_ERROR_NO_PERMISSION
        );
        let mut speed = 0;
        assert_eq!(
            nvml.nvmlDeviceGetFanSpeed(gpu, &raw mut speed),
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED
        );
        let nonsense = std::ptr::without_provenance_mut(0x1234);
        assert_eq!(
            nvml.nvmlDeviceGetFanSpeed(nonsense, &raw mut speed),
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT
        );
        assert_eq!(nvml.nvmlShutdown(), SUCCESS);
    }
}

#[test]
fn an_xid_wakes_who_waits_for_it() {
    if !on_node() {
        let fault = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("wake.yaml");
        std::fs::write(
            &fault,
            "description: wake\ngpu: 5\nafter: 1 launch\nxid: {code: 95, message: Uncontained}\ntrips: {kernel_log_xid: fail}\n",
        )
        .unwrap();
        let prepared = prepare("events", "h200x8", &[fault.to_str().unwrap()]);
        return run("an_xid_wakes_who_waits_for_it", &prepared);
    }
    let nvml = load();
    assert_eq!(initialize(&nvml), SUCCESS);
    let (other, gpu) = (device(&nvml, 4).unwrap(), device(&nvml, 5).unwrap());
    let mut set = std::ptr::null_mut();
    // SAFETY: every pointer is to a value that lives through its call.
    unsafe {
        assert_eq!(nvml.nvmlEventSetCreate(&raw mut set), SUCCESS);
        assert_eq!(nvml.nvmlDeviceRegisterEvents(other, XID, set), SUCCESS);
        let mut data: sys::nvmlEventData_t = std::mem::zeroed();
        let timeout = sys::nvmlReturn_enum_NVML_ERROR_TIMEOUT;
        assert_eq!(nvml.nvmlEventSetWait_v2(set, &raw mut data, 20), timeout);
        assert_eq!(nvml.nvmlDeviceRegisterEvents(gpu, XID, set), SUCCESS);
        let started = Instant::now();
        let launcher = std::thread::spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            let folder = std::env::var_os(NODE_VARIABLE).unwrap();
            let node = Node::open(Path::new(&folder)).unwrap();
            node.state().gpu(5).count_launch();
            node.advance();
        });
        assert_eq!(
            nvml.nvmlEventSetWait_v2(set, &raw mut data, 10_000),
            SUCCESS
        );
        assert!(
            started.elapsed() < Duration::from_secs(2),
            "{:?}",
            started.elapsed()
        );
        assert_eq!(
            (data.device, data.eventType, data.eventData),
            (gpu, XID, 95)
        );
        launcher.join().unwrap();
        assert_eq!(nvml.nvmlEventSetWait_v2(set, &raw mut data, 0), timeout);
        assert_eq!(nvml.nvmlEventSetFree(set), SUCCESS);
        assert_eq!(
            nvml.nvmlEventSetFree(set),
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT
        );
    }
}

/// Not a test of its own: a process that reads a temperature, on nodes where that goes wrong.
#[test]
fn read_a_temperature_when_asked() {
    if !on_node() {
        return;
    }
    let nvml = load();
    assert_eq!(initialize(&nvml), SUCCESS);
    let gpu = device(&nvml, 0).unwrap();
    let mut celsius = 0;
    // SAFETY: fills one number.
    let code = unsafe { nvml.nvmlDeviceGetTemperature(gpu, 0, &raw mut celsius) };
    assert_eq!(code, SUCCESS);
}

#[test]
fn a_hang_lasts_and_a_crash_is_a_signal() {
    run(
        "read_a_temperature_when_asked",
        &prepare("healthy", "h200x8", &[]),
    );
    let mut hung = start(
        "read_a_temperature_when_asked",
        &prepare("hang", "h200x8", &["nvml-hang"]),
    );
    std::thread::sleep(Duration::from_millis(500));
    assert!(hung.try_wait().unwrap().is_none(), "the call came back");
    hung.kill().unwrap();
    hung.wait().unwrap();
    let crashed = start(
        "read_a_temperature_when_asked",
        &prepare("crash", "h200x8", &["nvml-crash"]),
    );
    let status = crashed.wait_with_output().unwrap().status;
    assert_eq!(status.signal(), Some(6));
}

#[test]
fn a_missing_function_is_missing_and_the_others_work() {
    if !on_node() {
        let prepared = prepare("symbol", "h200x8", &["nvml-missing-symbol"]);
        return run(
            "a_missing_function_is_missing_and_the_others_work",
            &prepared,
        );
    }
    let nvml = load();
    assert!(nvml.nvmlDeviceGetRepairStatus.is_err());
    assert!(nvml.nvmlDeviceGetRowRemapperHistogram.is_ok());
    assert_eq!(initialize(&nvml), SUCCESS);
    assert!(device(&nvml, 0).is_ok());
}

/// Not a test of its own: a process that initialises NVML where it must fail, and returns the code
/// as its exit status.
#[test]
fn tell_the_code_of_initialisation_when_asked() {
    if on_node() {
        std::process::exit(i32::try_from(initialize(&load())).unwrap());
    }
}

#[test]
fn initialisation_fails_as_on_a_broken_driver() {
    for (fault, expected) in [
        (
            "nvml-version-differs",
            sys::nvmlReturn_enum_NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        ),
        (
            "driver-not-loaded",
            sys::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED,
        ),
    ] {
        let prepared = prepare(&format!("init-{fault}"), "h200x8", &[fault]);
        let child = start("tell_the_code_of_initialisation_when_asked", &prepared);
        let code = child.wait_with_output().unwrap().status.code();
        assert_eq!(code, Some(i32::try_from(expected).unwrap()), "{fault}");
    }
    let prepared = prepare("init-missing", "h200x8", &["nvml-library-missing"]);
    assert!(!prepared.library_dir.join("libnvidia-ml.so.1").exists());
}

#[test]
fn the_marker_names_the_scenario() {
    if !on_node() {
        return run(
            "the_marker_names_the_scenario",
            &prepare("marker", "p5.48xlarge", &["xid-79"]),
        );
    }
    for name in [
        "libnvidia-ml.so.1",
        "libcuda.so.1",
        "libcublasLt.so.12",
        "libcublasLt.so.13",
    ] {
        // SAFETY: the symbol has this signature and gives a string that lives as long as the
        // library.
        let told = unsafe {
            let library = libloading::Library::new(name).unwrap();
            let marker = *library.get::<Marker>(b"gpu_simulator_scenario\0").unwrap();
            let told = std::ffi::CStr::from_ptr(marker())
                .to_str()
                .unwrap()
                .to_owned();
            library.close().unwrap();
            told
        };
        assert_eq!(told, "p5.48xlarge+xid-79", "{name}");
    }
}
