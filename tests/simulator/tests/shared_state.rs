//! State between processes: what a process holds is seen by others, and vanishes when it is killed.

use simulator::{Catalogue, NodeRequest, node::Node, prepare_node};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "SIMULATOR_TEST_HOLD_MEMORY_ON";
const HELD: u64 = 3 << 30;

fn prepare(name: &str, faults: &[&str]) -> Node {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let library = folder.with_extension("library");
    std::fs::write(&library, b"not a library").unwrap();
    let faults: Vec<String> = faults.iter().map(|fault| (*fault).to_owned()).collect();
    let request = NodeRequest {
        folder: &folder,
        library: &library,
        catalogue: &Catalogue::shipped(),
        node: "h200x8",
        faults: &faults,
        overrides: &[],
    };
    Node::open(&prepare_node(&request).unwrap().folder).unwrap()
}

/// Not a test of its own: the other process of the tests below.
#[test]
fn hold_memory_when_asked() {
    let Some(folder) = std::env::var_os(ROLE) else {
        return;
    };
    let node = Node::open(Path::new(&folder)).unwrap();
    let gpu = node.state().gpu(2);
    let slot = gpu.attach().unwrap();
    slot.open_context();
    assert!(slot.take_memory(gpu, HELD, node.memory_capacity(2)));
    let _work = node.begin_work(2, slot);
    println!("\nholding");
    std::thread::sleep(Duration::from_mins(1));
}

fn holder(node: &Node) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hold_memory_when_asked", "--nocapture"])
        .env(ROLE, node.folder())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap() == "holding"),
        "the other process ended early"
    );
    child
}

#[test]
fn a_killed_process_leaves_nothing_behind() {
    let node = prepare("state-kill", &[]);
    let mut children: Vec<Child> = (0..3).map(|_| holder(&node)).collect();
    let mut expected: Vec<u32> = children.iter().map(Child::id).collect();
    let mut seen: Vec<u32> = node
        .state()
        .gpu(2)
        .processes()
        .iter()
        .map(|process| process.pid)
        .collect();
    expected.sort_unstable();
    seen.sort_unstable();
    assert_eq!(seen, expected);
    assert_eq!(node.memory_used(2), 3 * HELD);
    assert_eq!(node.memory_used(1), 0);
    assert!(node.state().gpu(2).busy());

    // Killed, and not even reaped yet: a zombie holds nothing either.
    for child in &mut children {
        child.kill().unwrap();
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while node.memory_used(2) > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(node.memory_used(2), 0);
    assert_eq!(node.state().gpu(2).processes(), []);
    assert!(!node.state().gpu(2).busy());
    for mut child in children {
        child.wait().unwrap();
    }

    // Its slot serves others, with nothing of what it held.
    let slot = node.state().gpu(2).attach().unwrap();
    assert_eq!(slot.memory_bytes(), 0);
}

#[test]
fn memory_is_refused_when_the_gpu_is_full() {
    let node = prepare("state-full", &[]);
    let gpu = node.state().gpu(0);
    let capacity = node.memory_capacity(0);
    let slot = gpu.attach().unwrap();
    assert!(slot.take_memory(gpu, capacity, capacity));
    assert!(!slot.take_memory(gpu, 1, capacity));
    assert_eq!(gpu.memory_used(), capacity);
    slot.release_memory(capacity);
    assert_eq!(gpu.memory_used(), 0);
}

#[test]
fn power_and_clocks_follow_load() {
    let node = prepare("state-load", &[]);
    let idle = node.readings(2);
    assert_eq!(
        (
            idle.power_mw,
            idle.clocks.sm_mhz,
            idle.gpu_utilization_percent
        ),
        (node.scenario().gpus[2].power.idle_mw, 345, 0)
    );
    let mut child = holder(&node);
    std::thread::sleep(Duration::from_millis(700));
    let loaded = node.readings(2);
    assert!(loaded.power_mw > 600_000, "{loaded:?}");
    assert_eq!(loaded.clocks.sm_mhz, 1550);
    assert!(loaded.gpu_utilization_percent > 50, "{loaded:?}");
    assert!(loaded.energy_mj > idle.energy_mj);
    assert_eq!(
        node.readings(1).power_mw,
        node.scenario().gpus[1].power.idle_mw
    );
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(node.readings(2).clocks.sm_mhz, 345);
}

#[test]
fn a_timed_fault_takes_effect_once_with_its_event_and_kernel_message() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let fault = folder.join("later.yaml");
    std::fs::write(
        &fault,
        "description: later\ngpu: 5\nafter: 3 launches\nchanges: {gpu.lost: true}\nxid: {code: 79, message: gone}\ntrips: {kernel_log_xid: fail}\n",
    )
    .unwrap();
    let node = prepare("state-timed", &[fault.to_str().unwrap()]);
    let other = Node::open(node.folder()).unwrap();
    assert!(!node.scenario().gpus[5].lost);
    for _ in 0..3 {
        node.state().gpu(5).count_launch();
    }
    assert!(other.scenario().gpus[5].lost);
    assert!(node.scenario().gpus[5].lost);
    assert_eq!(node.state().event_count(), 1);
    let event = node.state().event(0).unwrap();
    assert_eq!((event.gpu, event.xid), (5, 79));
    let log = std::fs::read_to_string(node.folder().join("sysroot/dev/kmsg")).unwrap();
    assert_eq!(
        log.matches("NVRM: Xid (PCI:0000:00:0b): 79, gone").count(),
        1
    );
}
