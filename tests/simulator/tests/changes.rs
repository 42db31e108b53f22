//! Scenarios beyond values at the start: memory that does not keep what was written, results that
//! were never computed, calls that fail for one GPU, host files that follow load, and nodes that
//! are changed while programs run.

#![allow(unsafe_code, reason = "the driver's C interface")]

mod on_node;

use on_node::{NODE, on_node};
use simulator::Catalogue;
use simulator::change::change_node;
use simulator::cuda::api::*;
use simulator::cuda::result;
use simulator::node::Node;
use simulator::resolve::NodeChange;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;

const CHECK_PTX: &str = include_str!("../../../validator/src/workload/check/check.ptx");

unsafe extern "C" {
    fn nvmlInit_v2() -> u32;
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut usize) -> u32;
    fn nvmlDeviceGetTemperature(device: usize, sensor: u32, degrees: *mut u32) -> u32;
    fn nvmlDeviceGetPersistenceMode(device: usize, mode: *mut u32) -> u32;
    fn nvmlDeviceGetCurrPcieLinkGeneration(device: usize, generation: *mut u32) -> u32;
    fn nvmlDeviceGetName(device: usize, name: *mut c_char, length: u32) -> u32;
}

fn node_folder() -> PathBuf {
    std::env::var_os(NODE).expect("a node").into()
}

fn sysroot_file(path: &str) -> String {
    std::fs::read_to_string(node_folder().join("sysroot").join(path)).unwrap()
}

/// Starts the driver with a context on the first device, and gives a buffer of device memory.
unsafe fn buffer(bytes: usize) -> u64 {
    let (mut context, mut pointer) = (0, 0);
    unsafe {
        assert_eq!(cuInit(0), result::SUCCESS);
        let retained = cuDevicePrimaryCtxRetain(&raw mut context, 0);
        assert_eq!(retained, result::SUCCESS);
        assert_eq!(cuCtxSetCurrent(context), result::SUCCESS);
        assert_eq!(cuMemAlloc_v2(&raw mut pointer, bytes), result::SUCCESS);
    }
    pointer
}

unsafe fn write(to: u64, bytes: &[u8]) {
    let code = unsafe { cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()) };
    assert_eq!(code, result::SUCCESS);
}

unsafe fn read(from: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let code = unsafe { cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, length) };
    assert_eq!(code, result::SUCCESS);
    bytes
}

/// Launches the check kernel over 64 values.
unsafe fn launch(out: u64, seed: u32) {
    let ptx = CString::new(CHECK_PTX).unwrap();
    let (mut module, mut function) = (0, 0);
    let count = 64u32;
    let parameters: [*const c_void; 3] = [
        (&raw const out).cast(),
        (&raw const count).cast(),
        (&raw const seed).cast(),
    ];
    unsafe {
        let loaded = cuModuleLoadData(&raw mut module, ptx.as_ptr().cast());
        assert_eq!(loaded, result::SUCCESS);
        let name = c"gpu_validator_check".as_ptr();
        let found = cuModuleGetFunction(&raw mut function, module, name);
        assert_eq!(found, result::SUCCESS);
        let (list, none) = (parameters.as_ptr(), std::ptr::null());
        let launched = cuLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, 0, list, none);
        assert_eq!(launched, result::SUCCESS);
    }
}

fn differing_bits(one: &[u8], other: &[u8]) -> Vec<(usize, u8)> {
    let pairs = one.iter().zip(other).enumerate();
    pairs
        .filter(|(_, (one, other))| one != other)
        .map(|(place, (one, other))| (place, one ^ other))
        .collect()
}

#[test]
fn memory_flips_a_bit_at_rest() {
    let fault = "gpu.memory_faults=[{kind: at-rest, offset: 5000, bit: 3, first: 1, every: 1000}]";
    on_node(
        "memory_flips_a_bit_at_rest",
        "h200x1",
        &[],
        &[fault],
        || unsafe {
            let memory = buffer(1 << 20);
            let sent = vec![0xa5; 1 << 20];
            write(memory, &sent);
            let received = read(memory, sent.len());
            assert_eq!(differing_bits(&sent, &received), [(5000, 1 << 3)]);
            assert_eq!(read(memory, sent.len()), received);
        },
    );
}

#[test]
fn stores_to_a_page_are_lost() {
    let set = "gpu.memory_faults=[{kind: lost-stores, offset: 8KiB, length: 4KiB, first: 1}]";
    on_node(
        "stores_to_a_page_are_lost",
        "h200x1",
        &[],
        &[set],
        || unsafe {
            let memory = buffer(64 << 10);
            write(memory, &vec![1; 64 << 10]);
            write(memory, &vec![2; 64 << 10]);
            let received = read(memory, 64 << 10);
            assert!(received[8192..12288].iter().all(|byte| *byte == 1));
            assert!(received[..8192].iter().all(|byte| *byte == 2));
            assert!(received[12288..].iter().all(|byte| *byte == 2));
        },
    );
}

#[test]
fn two_addresses_are_one_memory() {
    let set = "gpu.memory_faults=[{kind: aliased, offset: 0, onto: 32KiB, length: 4KiB}]";
    on_node(
        "two_addresses_are_one_memory",
        "h200x1",
        &[],
        &[set],
        || unsafe {
            let memory = buffer(64 << 10);
            write(memory, &[1; 4096]);
            write(memory + (32 << 10), &[2; 4096]);
            assert_eq!(read(memory, 4096), [2; 4096]);
            write(memory + 4096, &[3; 4096]);
            assert_eq!(read(memory + (36 << 10), 4096), [0; 4096]);
        },
    );
}

#[test]
fn copies_lose_a_bit_in_their_own_direction_only() {
    let set =
        "gpu.memory_faults=[{kind: copy-to-host, offset: 7, bit: 0, every: 2, copies_from: 100}]";
    let name = "copies_lose_a_bit_in_their_own_direction_only";
    on_node(name, "h200x1", &[], &[set], || unsafe {
        let memory = buffer(4096);
        write(memory, &[0; 4096]);
        assert_eq!(read(memory, 64), [0; 64]);
        assert_eq!(differing_bits(&read(memory, 4096), &[0; 4096]), [(7, 1)]);
        assert_eq!(read(memory, 4096), [0; 4096]);
    });
}

#[test]
fn a_stale_launch_leaves_what_was_there() {
    let set = "gpu.wrong_results={kind: stale, first_launch: 1, every_launches: 100}";
    let name = "a_stale_launch_leaves_what_was_there";
    on_node(name, "h200x1", &[], &[set], || unsafe {
        let memory = buffer(256);
        launch(memory, 1);
        let first = read(memory, 256);
        launch(memory, 2);
        assert_eq!(read(memory, 256), first);
        launch(memory, 2);
        assert_ne!(read(memory, 256), first);
        let wrong = simulator::wrong_results::read(&node_folder()).unwrap();
        assert_eq!((wrong.len(), wrong[0].launch), (1, 1));
    });
}

#[test]
fn results_are_wrong_in_heat_only() {
    let set = "gpu.wrong_results={kind: bit, from_temperature_c: 90}";
    let name = "results_are_wrong_in_heat_only";
    on_node(name, "h200x1", &[], &[set], || unsafe {
        let memory = buffer(256);
        launch(memory, 1);
        let right = read(memory, 256);
        change(
            &[],
            &["gpu.temperature.idle_c=95", "gpu.temperature.load_c=95"],
        );
        launch(memory, 1);
        assert_eq!(differing_bits(&right, &read(memory, 256)).len(), 1);
    });
}

fn change(faults: &[&str], overrides: &[&str]) -> String {
    let owned = |list: &[&str]| list.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
    let change = NodeChange {
        catalogue: &Catalogue::shipped(),
        healthy: false,
        faults: &owned(faults),
        overrides: &owned(overrides),
    };
    change_node(&node_folder(), &change).unwrap()
}

/// The first two GPUs' handles.
unsafe fn handles() -> [usize; 2] {
    let mut handles = [0; 2];
    unsafe {
        assert_eq!(nvmlInit_v2(), 0);
        for (index, handle) in (0..).zip(&mut handles) {
            assert_eq!(nvmlDeviceGetHandleByIndex_v2(index, handle), 0);
        }
    }
    handles
}

#[test]
fn a_call_fails_for_one_gpu_alone() {
    let set = "gpus.1.nvml.returns.nvmlDeviceGetTemperature=999";
    let name = "a_call_fails_for_one_gpu_alone";
    on_node(name, "h200x8", &[], &[set], || unsafe {
        let [first, second] = handles();
        let mut degrees = 0;
        assert_eq!(nvmlDeviceGetTemperature(first, 0, &raw mut degrees), 0);
        assert_eq!(nvmlDeviceGetTemperature(second, 0, &raw mut degrees), 999);
        let mut name = [0; 96];
        assert_eq!(nvmlDeviceGetName(second, name.as_mut_ptr(), 96), 0);
        assert!(
            CStr::from_ptr(name.as_ptr())
                .to_string_lossy()
                .contains("H200")
        );
    });
}

#[test]
fn a_node_is_changed_while_a_program_runs() {
    let name = "a_node_is_changed_while_a_program_runs";
    on_node(name, "h200x8", &[], &[], || unsafe {
        let [first, second] = handles();
        let persistence = |device| {
            let mut mode = 9;
            let code = nvmlDeviceGetPersistenceMode(device, &raw mut mode);
            (code, mode)
        };
        assert_eq!(persistence(second), (0, 1));
        assert_eq!(change(&[], &["gpus.1.persistence_mode=false"]), "h200x8");
        assert_eq!((persistence(first), persistence(second)), ((0, 1), (0, 0)));
        assert_eq!(change(&["xid-79"], &[]), "h200x8+xid-79");
        let node = Node::open(&node_folder()).unwrap();
        assert_eq!(node.state().event(0).map(|event| event.xid), Some(79));
        assert_eq!(sysroot_file("dev/kmsg").matches("Xid (PCI:").count(), 1);
        // A fault whose time has not come.
        let path = node_folder().join("later.yaml");
        let later = "description: later\ngpus: all\nat: 1h\nchanges: {gpu.lost: true}\ntrips: {gpu_count: fail}\n";
        std::fs::write(&path, later).unwrap();
        change(&[path.to_str().unwrap()], &[]);
        assert_eq!(persistence(first), (0, 1));
        let healthy = NodeChange {
            catalogue: &Catalogue::shipped(),
            healthy: true,
            faults: &[],
            overrides: &[],
        };
        assert_eq!(change_node(&node_folder(), &healthy).unwrap(), "h200x8");
        assert_eq!(persistence(second), (0, 1));
        let wrong = NodeChange {
            healthy: false,
            overrides: &["gpus.9.lost=true".to_owned()],
            ..healthy
        };
        assert!(change_node(&node_folder(), &wrong).is_err());
        assert_eq!(persistence(second), (0, 1));
    });
}

#[test]
fn the_hosts_files_follow_changes() {
    let name = "the_hosts_files_follow_changes";
    on_node(name, "h200x8", &[], &[], || {
        let gpu = Node::open(&node_folder()).unwrap().scenario().gpus[3].clone();
        let folder = format!("sys/bus/pci/devices/{}", gpu.pci_address);
        assert!(
            sysroot_file(&format!("{folder}/aer_dev_nonfatal")).contains("TOTAL_ERR_NONFATAL 0")
        );
        change(
            &[],
            &[
                "gpus.3.pcie.aer_nonfatal=7",
                "gpus.3.pcie.sysfs_width=8",
                "gpus.3.visible_to={device_node: false}",
                "host.files.proc/self/limits=text",
            ],
        );
        assert!(
            sysroot_file(&format!("{folder}/aer_dev_nonfatal")).contains("TOTAL_ERR_NONFATAL 7")
        );
        assert_eq!(sysroot_file(&format!("{folder}/current_link_width")), "8\n");
        assert_eq!(sysroot_file("proc/self/limits"), "text");
        let node = |minor| node_folder().join(format!("sysroot/dev/nvidia{minor}"));
        assert!(node(2).exists() && !node(3).exists());
        change(&[], &["gpus.3.visible_to={device_node: true}"]);
        assert!(node(3).exists());
    });
}

#[test]
fn a_link_falls_under_load() {
    let name = "a_link_falls_under_load";
    on_node(
        name,
        "h200x1",
        &[],
        &["gpu.pcie.load_generation=1"],
        || unsafe {
            let address = Node::open(&node_folder()).unwrap().scenario().gpus[0]
                .pci_address
                .clone();
            let file = format!("sys/bus/pci/devices/{address}/current_link_speed");
            assert_eq!(sysroot_file(&file), "32.0 GT/s PCIe\n");
            let memory = buffer(256);
            for seed in 0..32 {
                launch(memory, seed);
            }
            let (mut handle, mut generation) = (0, 0);
            assert_eq!(nvmlInit_v2(), 0);
            assert_eq!(nvmlDeviceGetHandleByIndex_v2(0, &raw mut handle), 0);
            nvmlDeviceGetCurrPcieLinkGeneration(handle, &raw mut generation);
            assert_eq!(generation, 1);
            assert_eq!(sysroot_file(&file), "2.5 GT/s PCIe\n");
            // The queue of launches has ended by then.
            std::thread::sleep(std::time::Duration::from_millis(600));
            nvmlDeviceGetCurrPcieLinkGeneration(handle, &raw mut generation);
            assert_eq!(generation, 5);
            assert_eq!(sysroot_file(&file), "32.0 GT/s PCIe\n");
        },
    );
}
