//! A Python environment in which torch works on the healthy node's GPUs.

use std::collections::BTreeMap;

use crate::facts::{
    DeviceCode, Facts, Framework, ProofEnd, ProofStep, PythonEnvironment, PythonEnvironmentKind,
    PythonPackage, PythonProof, Reading,
};
use crate::test_machine::healthy_node;

/// torch 2.8.0+cu128 in `/opt/venv`, started on the eight GPUs of [`healthy_node`].
pub fn torch_environment() -> PythonEnvironment {
    framework_environment(Framework::Torch)
}

/// One framework in `/opt/venv`, built for CUDA 12.8, started on the eight GPUs of
/// [`healthy_node`].
pub fn framework_environment(framework: Framework) -> PythonEnvironment {
    let package = |name: &str, version: &str| PythonPackage {
        name: name.to_owned(),
        version: version.to_owned(),
        path: "/opt/venv/lib/python3.12/site-packages".to_owned(),
        cuda: Reading::Value("12.8".to_owned()),
        installer: Some("pip".to_owned()),
        device_code: Reading::Value(device_code(&["sm_80", "sm_90", "sm_100"])),
        ..PythonPackage::default()
    };
    let packages = match framework {
        Framework::Interpreter => Vec::new(),
        Framework::Torch => vec![package("torch", "2.8.0+cu128")],
        Framework::Jax => vec![
            PythonPackage {
                cuda: Reading::NotRead("the plugin holds the GPU code".to_owned()),
                ..package("jax", "0.12.0")
            },
            package("jax-cuda12-plugin", "0.12.0"),
        ],
        Framework::Tensorflow => vec![package("tensorflow", "2.20.0")],
        Framework::Cupy => vec![package("cupy-cuda12x", "14.2.0")],
    };
    PythonEnvironment {
        prefix: "/opt/venv".to_owned(),
        kind: PythonEnvironmentKind::Venv,
        interpreter: Reading::Value("/opt/venv/bin/python".to_owned()),
        python_version: Reading::Value("3.12.3".to_owned()),
        site_packages: vec!["/opt/venv/lib/python3.12/site-packages".to_owned()],
        packages,
        proofs: vec![proof(framework, &healthy_node())],
        ..PythonEnvironment::default()
    }
}

/// Fat binaries with machine code for these targets.
pub fn device_code(targets: &[&str]) -> DeviceCode {
    DeviceCode {
        library: "libtorch_cuda.so".to_owned(),
        fat_binaries: 100,
        machine_code: targets.iter().map(|it| ((*it).to_owned(), 100)).collect(),
        ptx: BTreeMap::new(),
    }
}

fn proof(framework: Framework, facts: &Facts) -> PythonProof {
    let step = |name: &str| ProofStep {
        name: name.to_owned(),
        seconds: 0.1,
        ..ProofStep::default()
    };
    let devices: Vec<serde_json::Value> = facts
        .gpus
        .iter()
        .filter_map(|gpu| gpu.uuid.value())
        .map(|uuid| serde_json::json!({"uuid": uuid, "name": "NVIDIA H200"}))
        .collect();
    let mut of_devices = step("devices");
    of_devices.results = BTreeMap::from([
        ("available".to_owned(), serde_json::json!(true)),
        ("devices".to_owned(), serde_json::json!(devices)),
    ]);
    PythonProof {
        framework,
        end: ProofEnd::Exited(0),
        steps: vec![
            step("start"),
            step("import"),
            of_devices,
            step("gemm_fp32"),
            step("gemm_bf16"),
        ],
        ..PythonProof::default()
    }
}
