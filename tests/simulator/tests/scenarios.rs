//! Every shipped node and fault loads, and mistakes are reported with file, line and name.

use simulator::resolve::resolve;
use simulator::{Catalogue, Kind, NodeRequest, prepare_node};
use std::path::PathBuf;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// Prepares a node with a stand-in for the library, which these tests never load.
fn prepare(
    name: &str,
    node: &str,
    faults: &[&str],
    overrides: &[&str],
) -> anyhow::Result<simulator::PreparedNode> {
    let library = folder(&format!("{name}.library"));
    std::fs::write(&library, b"\0nvmlInit\0nvmlInit_v2\0")?;
    let faults: Vec<String> = faults.iter().map(|fault| (*fault).to_owned()).collect();
    let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
    prepare_node(&NodeRequest {
        folder: &folder(name),
        library: &library,
        catalogue: &Catalogue::shipped(),
        node,
        faults: &faults,
        overrides: &overrides,
    })
}

fn error_of(name: &str, node: &str, faults: &[&str], overrides: &[&str]) -> String {
    format!(
        "{:#}",
        prepare(name, node, faults, overrides).expect_err("the mistake is an error")
    )
}

#[test]
fn every_node_prepares() {
    let names = Catalogue::shipped().names(Kind::Node).unwrap();
    assert!(!names.is_empty());
    for name in names {
        let node = prepare(&format!("node-{name}"), &name, &[], &[]).unwrap();
        assert_eq!(node.scenario_name, name);
        assert!(node.library_dir.join("libcuda.so.1").is_symlink());
    }
}

#[test]
fn every_fault_resolves_on_its_node() {
    let catalogue = Catalogue::shipped();
    let names = catalogue.names(Kind::Fault).unwrap();
    assert!(names.len() >= 60);
    for name in names {
        let (path, fault) = catalogue.fault(&name).unwrap();
        assert!(!fault.description.is_empty(), "{}", path.display());
        let healthy = resolve(&catalogue, &fault.node, &[], &[]).unwrap();
        let ill = resolve(&catalogue, &fault.node, std::slice::from_ref(&name), &[]).unwrap();
        assert_eq!(ill.name, format!("{}+{name}", fault.node));
        let changed = ill.base != healthy.base || !ill.timed.is_empty() || !ill.events.is_empty();
        assert!(changed, "{} changes nothing", path.display());
    }
}

#[test]
fn overrides_apply_to_every_gpu_and_know_units() {
    let prepared = prepare(
        "override",
        "h200x8",
        &[],
        &["gpu.memory=2GiB", "gpus.3.memory=1GiB"],
    )
    .unwrap();
    let node = simulator::node::Node::open(&prepared.folder).unwrap();
    let memory: Vec<u64> = node
        .scenario()
        .gpus
        .iter()
        .map(|gpu| gpu.memory.0)
        .collect();
    assert_eq!(
        memory,
        [
            2u64 << 30,
            2 << 30,
            2 << 30,
            1 << 30,
            2 << 30,
            2 << 30,
            2 << 30,
            2 << 30
        ]
    );
}

#[test]
fn mistakes_are_named() {
    let error = error_of("mistake-node", "h200-x8", &[], &[]);
    assert!(
        error.contains("no node `h200-x8`") && error.contains("`h200x8`"),
        "{error}"
    );
    let error = error_of("mistake-fault", "h200x8", &["xid79"], &[]);
    assert!(
        error.contains("no fault `xid79`") && error.contains("`xid-79`"),
        "{error}"
    );
    let error = error_of("mistake-set", "h200x8", &[], &["gpu.memory=2 GiBi"]);
    assert!(
        error.contains("gpu.memory=2 GiBi") && error.contains("2GiB"),
        "{error}"
    );
    let error = error_of("mistake-layer", "h200x8", &[], &["gqu.memory=2GiB"]);
    assert!(
        error.contains("unknown layer `gqu`") && error.contains("`gpu`"),
        "{error}"
    );
}

#[test]
fn a_fault_file_outside_the_repository_works_and_its_mistakes_name_the_line() {
    let path = folder("mine.yaml");
    std::fs::write(&path, "description: mine\nchanges:\n  gpu.ecc.volatile.dram_uncorrectable: 2\ntrips: {ecc_errors: fail}\n").unwrap();
    let name = path.to_str().unwrap();
    assert_eq!(
        prepare("mine", "h200x8", &[name], &[])
            .unwrap()
            .scenario_name,
        "h200x8+mine"
    );

    std::fs::write(&path, "description: mine\nchanges:\n  gpu.ecc.volatile.dram_uncorrectible: 2\ntrips: {ecc_errors: fail}\n").unwrap();
    let error = error_of("mine", "h200x8", &[name], &[]);
    assert!(error.contains("mine.yaml:3"), "{error}");
    assert!(
        error.contains("nearest valid name is `dram_uncorrectable`"),
        "{error}"
    );

    std::fs::write(
        &path,
        "description: mine\nchange: {}\ntrips: {ecc_errors: fail}\n",
    )
    .unwrap();
    let error = error_of("mine", "h200x8", &[name], &[]);
    assert!(
        error.contains("mine.yaml:2") && error.contains("nearest valid name is `changes`"),
        "{error}"
    );

    std::fs::write(
        &path,
        "description: mine\ngpu: 8\nchanges: {gpu.lost: true}\ntrips: {ecc_errors: fail}\n",
    )
    .unwrap();
    let error = error_of("mine", "h200x8", &[name], &[]);
    assert!(
        error.contains("mine.yaml:2") && error.contains("GPU 8 does not exist"),
        "{error}"
    );

    std::fs::write(
        &path,
        "description: mine\nat: 3 parsecs\nchanges: {gpu.lost: true}\ntrips: {ecc_errors: fail}\n",
    )
    .unwrap();
    let error = error_of("mine", "h200x8", &[name], &[]);
    assert!(
        error.contains("mine.yaml:2") && error.contains("not a time"),
        "{error}"
    );

    std::fs::write(
        &path,
        "description: mine\nchanges: {gpu.lost: maybe}\ntrips: {ecc_errors: fail}\n",
    )
    .unwrap();
    let error = error_of("mine", "h200x8", &[name], &[]);
    assert!(
        error.contains("gpu.lost") && error.contains("boolean"),
        "{error}"
    );
}

#[test]
fn a_fault_that_would_strike_nothing_is_refused() {
    for (set, part) in [
        (
            "gpu.wrong_results={kind: bit, kernel: gemn}",
            "no kernel's name contains `gemn`",
        ),
        (
            "gpu.wrong_results={kind: bit, sm: 132}",
            "multiprocessors 0 to 131",
        ),
        (
            "nvml.hang=[nvmlDeviceGetTemprature]",
            "no function `nvmlDeviceGetTemprature`",
        ),
        ("gpus.2.nvml.returns.nvmlDeviceGetSerail=3", "gpus[2].nvml"),
        ("cuda.returns.cuMemAloc_v2=2", "no function `cuMemAloc_v2`"),
        (
            "gpu.memory_faults=[{kind: at-rest, bit: 8}]",
            "`bit` is one of a byte",
        ),
        (
            "gpu.memory_faults=[{kind: aliased}]",
            "`onto` belongs to `aliased`",
        ),
        ("host.limits.Max open file=1024", "no limit `Max open file`"),
        ("host.files.../outside=x", "not a path below the sysroot"),
    ] {
        let error = error_of("strikes-nothing", "h200x8", &[], &[set]);
        assert!(error.contains(part), "{set}: {error}");
    }
    prepare(
        "strikes",
        "h200x8",
        &[],
        &[
            "gpu.wrong_results={kind: bit, kernel: gemm, sm: 131}",
            "nvml.hang=[nvmlDeviceGetTemperature]",
        ],
    )
    .unwrap();
}
