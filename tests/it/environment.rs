//! `gpu-validator environment` and its checks: real virtual environments, a conda-like prefix,
//! images, and a stand-in for torch that uses the simulated driver. torch itself is not installed
//! here: its wheels for `x86_64` Linux with and without CUDA that the package index has are larger
//! than what a test may fetch.

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::node::{Node, Scratch, in_place_of, said, set, validator};

const SITE: &str = "lib/python3/site-packages";

/// A virtual environment without packages, by the system's Python.
pub(crate) fn venv(scratch: &Scratch, name: &str) -> PathBuf {
    let path = scratch.path(name);
    let status = Command::new("python3")
        .args(["-m", "venv", "--without-pip"])
        .arg(&path)
        .status();
    assert!(status.expect("python3 starts").success(), "no venv");
    path
}

/// Where the environment's packages are.
pub(crate) fn site(venv: &Path) -> PathBuf {
    let lib = std::fs::read_dir(venv.join("lib")).expect("lib");
    let mut folders = lib.map(|it| it.expect("an entry").path());
    let python = folders.find(|it| it.to_string_lossy().contains("python3."));
    python.expect("lib/python3.N").join("site-packages")
}

pub(crate) fn write(path: &Path, text: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    std::fs::write(path, text).expect("a file");
}

/// The stand-in as pip would install torch 2.8.0+cu128, with a fault by its name.
fn install_torch(venv: &Path, fault: &str) {
    let site = site(venv);
    install_torch_in(&site, "2.8.0+cu128", "'12.8'", fault);
}

pub(crate) fn install_torch_in(site: &Path, version: &str, cuda: &str, fault: &str) {
    let release = version.split('+').next().expect("a release");
    let info = site.join(format!("torch-{release}.dist-info"));
    write(
        &info.join("METADATA"),
        format!("Metadata-Version: 2.1\nName: torch\nVersion: {release}\n"),
    );
    write(&info.join("INSTALLER"), "pip\n");
    write(
        &site.join("torch/version.py"),
        format!("__version__ = '{version}'\ncuda = {cuda}\n"),
    );
    write(
        &site.join("torch/__init__.py"),
        include_str!("stand_in_torch.py"),
    );
    write(
        &site.join("torch/cuda/__init__.py"),
        include_str!("stand_in_torch_cuda.py"),
    );
    write(
        &site.join("torch/cuda/nccl.py"),
        "def version():\n    return (2, 27, 3)\n",
    );
    write(
        &site.join("torch/backends/__init__.py"),
        "from . import cudnn\n",
    );
    write(
        &site.join("torch/backends/cudnn.py"),
        "def version():\n    return 91002\n",
    );
    if !fault.is_empty() {
        write(&site.join("torch/_fault.txt"), fault);
    }
}

/// A venv with the stand-in.
pub(crate) fn torch_venv(scratch: &Scratch, name: &str, fault: &str) -> PathBuf {
    let venv = venv(scratch, name);
    install_torch(&venv, fault);
    venv
}

/// `gpu-validator environment --json` on a node, with environments by name.
fn environment(node: &Node, pythons: &[&Path], arguments: &[&str]) -> (i32, Value) {
    let mut command = node.validator();
    command
        .args(["environment", "--json", "--sysroot"])
        .arg(node.sysroot());
    for python in pythons {
        command.arg("--python").arg(python);
    }
    let (code, stdout, stderr) = said(command.args(arguments));
    let value =
        serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}"));
    (code, value)
}

/// The finding of a check in the command's output.
pub(crate) fn finding<'v>(value: &'v Value, check: &str) -> &'v Value {
    let findings = value["findings"].as_array().expect("findings");
    let mut of_check = findings.iter().filter(|it| it["check"] == check);
    of_check
        .next()
        .unwrap_or_else(|| panic!("no finding of {check}"))
}

pub(crate) fn python<'v>(value: &'v Value, prefix: &Path) -> &'v Value {
    let pythons = value["environment"]["pythons"]
        .as_array()
        .expect("environments");
    let prefix = prefix.to_str().expect("UTF-8");
    let mut with = pythons.iter().filter(|it| it["prefix"] == prefix);
    with.next()
        .unwrap_or_else(|| panic!("{prefix} was not found: {pythons:#?}"))
}

/// Every file below a folder with its size and time.
fn listing(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_owned()];
    while let Some(folder) = waiting.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let metadata = path.symlink_metadata().expect("metadata");
            found.push(format!(
                "{} {} {:?}",
                path.display(),
                metadata.len(),
                metadata.modified()
            ));
            if metadata.is_dir() {
                waiting.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn a_question_is_answered_without_a_machine() {
    for (question, code, words) in [
        (
            "torch 2.11 cu126 on B200 driver 570",
            1,
            "no kernel image for B200",
        ),
        ("torch 2.8 on H200 driver 580.65.06", 0, "full"),
        ("cuda 13.0 on V100 driver 580", 1, "no longer supports V100"),
        ("jax 0.12 on T4 driver 580", 2, "name its CUDA version"),
        ("torch 2.11 on nothing", 3, "`nothing` is not a GPU model"),
    ] {
        let (found, stdout, stderr) =
            said(validator().args(["environment", "--explain", question]));
        assert_eq!(found, code, "{question}: {stdout}{stderr}");
        assert!(
            format!("{stdout}{stderr}").contains(words),
            "{question}: {stdout}{stderr}"
        );
    }
    let (_, stdout, _) = said(validator().args([
        "environment",
        "--json",
        "--explain",
        "cuda 12.8 on B200 driver 570.26",
    ]));
    let answer: Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!(answer["compatibility"]["start"], "full");
}

#[test]
fn a_torch_that_works_is_proven_and_nothing_is_written_into_its_environment() {
    let node = Node::healthy("h200x8");
    let venv = torch_venv(&node.out, "venv", "");
    let before = listing(&venv);
    let (code, value) = environment(&node, &[&venv], &["--size", "64"]);
    assert_eq!(code, 0, "{:#}", value["findings"]);
    for check in ["torch_cuda", "torch_gemm", "python_environment"] {
        assert_eq!(
            finding(&value, check)["verdict"],
            "pass",
            "{:#}",
            finding(&value, check)
        );
    }
    let found = python(&value, &venv);
    assert_eq!(found["kind"], "venv");
    assert_eq!(found["packages"][0]["version"], "2.8.0+cu128");
    let proof = &found["proofs"][0];
    let steps: Vec<&str> = proof["steps"]
        .as_array()
        .expect("steps")
        .iter()
        .filter_map(|it| it["name"].as_str())
        .collect();
    assert_eq!(
        steps,
        [
            "start",
            "import",
            "build",
            "devices",
            "roundtrip",
            "gemm_fp32",
            "gemm_bf16",
            "autograd",
            "libraries"
        ]
    );
    let devices = proof["steps"][3]["results"]["devices"]
        .as_array()
        .expect("devices");
    assert_eq!(devices.len(), 8);
    assert!(
        devices
            .iter()
            .all(|it| it["name"].as_str().is_some_and(|it| it.contains("H200")))
    );
    assert_eq!(listing(&venv), before, "the environment was changed");
}

#[test]
fn whatever_goes_wrong_is_one_finding_with_its_reason() {
    let node = Node::healthy("h200x1");
    for (fault, check, words, remedy) in [
        (
            "import error",
            "torch_cuda",
            "import failed: ImportError: libcudnn.so.9",
            "nvidia-cudnn",
        ),
        (
            "undefined symbol",
            "torch_cuda",
            "older libnccl.so.2",
            "nvidia-nccl",
        ),
        (
            "glibcxx",
            "torch_cuda",
            "older libstdc++.so.6",
            "libstdcxx-ng",
        ),
        (
            "segfault",
            "torch_cuda",
            "signal 11 (SIGSEGV) during import",
            "",
        ),
        (
            "abort",
            "torch_cuda",
            "signal 6 (SIGABRT) during import",
            "",
        ),
        ("exit", "torch_cuda", "import failed: SystemExit: 3", ""),
        (
            "silent exit",
            "torch_cuda",
            "ended during import without an error",
            "",
        ),
        (
            "hang",
            "torch_cuda",
            "did not end within 3 s, during import",
            "",
        ),
        (
            "memory",
            "torch_cuda",
            "more than 300 MiB of host memory during import",
            "",
        ),
        (
            "driver too old",
            "torch_cuda",
            "devices failed: RuntimeError: The NVIDIA driver",
            "install a newer driver",
        ),
        (
            "no kernel image",
            "torch_gemm",
            "gemm_fp32 failed: RuntimeError: CUDA error: no kernel image",
            "architecture list",
        ),
        (
            "wrong result",
            "torch_gemm",
            "1 of 4096 elements of the product on cuda:0 are wrong",
            "",
        ),
    ] {
        let venv = torch_venv(&node.out, &fault.replace(' ', "-"), fault);
        let time_limit = if fault == "hang" { "3" } else { "90" };
        let limits = [
            "--time-limit",
            time_limit,
            "--memory-limit",
            "300",
            "--size",
            "64",
        ];
        let (code, value) = environment(&node, &[&venv], &limits);
        let found = finding(&value, check);
        assert_eq!(code, 1, "{fault}: {found:#}");
        assert_eq!(found["verdict"], "fail", "{fault}: {found:#}");
        let summary = found["summary"].as_str().expect("a summary");
        assert!(summary.contains(words), "{fault}: {summary}");
        let found_remedy = found["remedy"].as_str().unwrap_or_default();
        assert!(found_remedy.contains(remedy), "{fault}: {found_remedy}");
        if fault == "hang" {
            assert!(summary.contains("its last lines"), "{summary}");
        }
    }
}

#[test]
fn a_package_that_prints_to_standard_output_works() {
    let node = Node::healthy("h200x1");
    let venv = torch_venv(&node.out, "prints", "prints");
    let (code, value) = environment(&node, &[&venv], &["--size", "64"]);
    assert_eq!(code, 0, "{:#}", value["findings"]);
    assert_eq!(finding(&value, "torch_cuda")["verdict"], "pass");
}

#[test]
fn the_drivers_own_errors_are_explained() {
    for (fault, words) in [
        (
            "cuda-803",
            "libcuda and the kernel module have different versions",
        ),
        ("cuda-804", "forward compatibility does not support"),
        ("cuda-802", "the fabric manager does not run"),
        (
            "compat-package-shadows-driver",
            "libcuda and the kernel module have different versions",
        ),
    ] {
        let node = Node::with_fault("h200x1", fault);
        let venv = torch_venv(&node.out, "venv", "");
        let (code, value) = environment(&node, &[&venv], &["--size", "64"]);
        let found = finding(&value, "torch_cuda");
        assert_eq!(
            (code, &found["verdict"]),
            (1, &json!("fail")),
            "{fault}: {found:#}"
        );
        let summary = found["summary"].as_str().expect("a summary");
        assert!(summary.contains(words), "{fault}: {summary}");
    }
}

#[test]
fn broken_interpreters_and_installations() {
    let node = Node::healthy("h200x1");
    let dead = torch_venv(&node.out, "dead", "");
    for name in ["python", "python3"] {
        std::fs::remove_file(dead.join("bin").join(name)).expect("a link");
        symlink("/nowhere/python3", dead.join("bin").join(name)).expect("a link");
    }
    let (code, value) = environment(&node, &[&dead], &[]);
    let found = finding(&value, "python_environment");
    assert_eq!((code, &found["verdict"]), (1, &json!("fail")), "{found:#}");
    let summary = found["summary"].as_str().expect("a summary");
    assert!(summary.contains("a link to /nowhere/python3"), "{summary}");

    let (code, value) = environment(&node, &[Path::new("/nowhere/venv")], &[]);
    assert_eq!(code, 1);
    let found = finding(&value, "python_environment");
    assert_eq!(found["subject"]["environment"]["path"], "/nowhere/venv");
    let summary = found["summary"].as_str().expect("a summary");
    assert!(summary.contains("the profile demands one"), "{summary}");

    // An interpreter that is no program at all.
    let broken = torch_venv(&node.out, "broken", "");
    let interpreter = broken.join("bin/python");
    std::fs::remove_file(&interpreter).expect("a link");
    write(
        &interpreter,
        "#!/bin/sh\necho 'GLIBC_2.99 not found' >&2\nexit 127\n",
    );
    std::fs::set_permissions(&interpreter, std::fs::Permissions::from_mode(0o755)).expect("a mode");
    let (code, value) = environment(&node, &[&broken], &[]);
    let found = finding(&value, "python_environment");
    assert_eq!((code, &found["verdict"]), (1, &json!("fail")), "{found:#}");
    assert!(
        found["summary"]
            .as_str()
            .expect("a summary")
            .contains("exited with 127"),
        "{found:#}"
    );

    // A damaged installation.
    let damaged = torch_venv(&node.out, "damaged", "");
    let record = site(&damaged).join("torch-2.8.0.dist-info/RECORD");
    write(&record, "torch/lib/libtorch_cuda.so,sha256=x,5\n");
    let (code, value) = environment(&node, &[&damaged], &["--size", "64"]);
    let found = finding(&value, "python_environment");
    assert_eq!((code, &found["verdict"]), (1, &json!("fail")), "{found:#}");
}

#[test]
fn a_cpu_build_is_a_warning_and_a_wrong_architecture_a_failure() {
    let node = Node::healthy("h200x1");
    let cpu = venv(&node.out, "cpu");
    install_torch_in(&site(&cpu), "2.8.0+cpu", "None", "");
    let (code, value) = environment(&node, &[&cpu], &["--no-start"]);
    let found = finding(&value, "torch_cuda");
    assert_eq!(found["verdict"], "warn", "{found:#}");
    assert_eq!(
        code, 2,
        "an environment that was named and not started is not judged"
    );

    // libtorch_cuda.so with machine code for Volta alone, as objcopy makes it.
    let volta = torch_venv(&node.out, "volta", "");
    let library = site(&volta).join("torch/lib/libtorch_cuda.so");
    make_library_with_code(&node.out, &library, &[(2, 70)]);
    let (code, value) = environment(&node, &[&volta], &["--no-start"]);
    let found = finding(&value, "torch_cuda");
    assert_eq!((code, &found["verdict"]), (1, &json!("fail")), "{found:#}");
    let summary = found["summary"].as_str().expect("a summary");
    assert!(
        summary.contains("no kernel image for H200") && summary.contains("sm_70"),
        "{summary}"
    );
    let hopper = torch_venv(&node.out, "hopper", "");
    let library = site(&hopper).join("torch/lib/libtorch_cuda.so");
    make_library_with_code(&node.out, &library, &[(2, 70), (2, 90)]);
    let (_, value) = environment(&node, &[&hopper], &["--no-start"]);
    assert_eq!(
        value["packages"][0]["compatibility"]["start"], "full",
        "{:#}",
        value["packages"]
    );
}

/// A shared library with a section of fat binaries, one entry for each kind and architecture.
pub(crate) fn make_library_with_code(scratch: &Scratch, path: &Path, entries: &[(u16, u32)]) {
    let mut body = Vec::new();
    for (kind, architecture) in entries {
        let mut entry = vec![0_u8; 72];
        entry[0..2].copy_from_slice(&kind.to_le_bytes());
        entry[4..8].copy_from_slice(&72_u32.to_le_bytes());
        entry[8..16].copy_from_slice(&16_u64.to_le_bytes());
        entry[26..28].copy_from_slice(&8_u16.to_le_bytes());
        entry[28..32].copy_from_slice(&architecture.to_le_bytes());
        body.extend(entry);
        body.extend([0_u8; 16]);
    }
    let mut section = 0xba55_ed50_u32.to_le_bytes().to_vec();
    section.extend(1_u16.to_le_bytes());
    section.extend(16_u16.to_le_bytes());
    section.extend((body.len() as u64).to_le_bytes());
    section.extend(body);
    let section = scratch.write("fatbin", section);
    let source = scratch.write("empty.c", "int empty;\n");
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    let status = Command::new("cc")
        .args(["-shared", "-o"])
        .arg(path)
        .arg(source)
        .status();
    assert!(status.expect("cc starts").success());
    let added = Command::new("objcopy")
        .arg(format!("--add-section=.nv_fatbin={}", section.display()))
        .arg(path)
        .status();
    assert!(added.expect("objcopy starts").success());
}

#[test]
fn run_starts_what_the_profile_demands() {
    let node = Node::healthy("h200x1");
    let venv = torch_venv(&node.out, "venv", "");
    let path = venv.display();
    let profile = node.out.write(
        "profile.yaml",
        format!("python: [{{path: {path}, torch: '>=2.6', cuda: '12.8'}}]\n"),
    );
    let profile = profile.to_str().expect("UTF-8");
    let ran = node.run(&["--profile", profile]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    for check in ["torch_cuda", "torch_gemm", "python_environment"] {
        assert_eq!(ran.report.finding(check)["verdict"], "pass", "{check}");
    }
    // The burn still has every GPU to itself.
    assert_eq!(ran.report.not_green(), set(&[]));

    let demanding = node.out.write(
        "demanding.yaml",
        format!("python: [{{path: {path}, torch: '>=2.12'}}, {{path: /opt/none}}]\n"),
    );
    let ran = node.run(&["--profile", demanding.to_str().expect("UTF-8"), "--no-burn"]);
    assert_eq!(ran.code, 1);
    let failed: Vec<(&str, &str)> = ran
        .report
        .of_check("python_environment")
        .filter(|it| it["verdict"] == "fail")
        .map(|it| {
            let path = it["subject"]["environment"]["path"].as_str();
            let summary = it["summary"].as_str();
            (path.expect("a path"), summary.expect("a summary"))
        })
        .collect();
    let own = path.to_string();
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed[0].0 == own && failed[0].1.contains("demands >=2.12"));
    assert_eq!(failed[1].0, "/opt/none");

    let wrong = node
        .out
        .write("wrong.yaml", "python: [{path: /opt/venv, torch: '~2'}]\n");
    let (code, _, stderr) = said(node.validator().args(["profile", "check"]).arg(&wrong));
    assert_eq!(code, 3, "{stderr}");
    assert!(
        stderr.contains("wrong.yaml:1") && stderr.contains("not a version requirement"),
        "{stderr}"
    );
}

#[test]
fn a_node_without_environments_is_as_quick_and_quiet_as_before() {
    let node = Node::healthy("h200x1");
    let ran = node.run(&["--no-burn"]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    for check in [
        "torch_cuda",
        "torch_gemm",
        "jax_cuda",
        "tensorflow_cuda",
        "cupy_cuda",
        "python_environment",
    ] {
        assert_eq!(ran.report.finding(check)["verdict"], "skip", "{check}");
    }
    assert_eq!(ran.stderr, "");
}

/// The seed's two environments: the machine's own Python, which has no torch, and a conda
/// environment, which has one.
#[test]
fn two_environments_are_judged_each() {
    let node = Node::healthy("h200x8");
    let plain = venv(&node.out, "venv1");
    let conda = torch_venv(&node.out, "conda/envs/clustrix_venv2_job_1", "");
    write(&conda.join("conda-meta/history"), "");
    write(
        &conda.join("conda-meta/python-3.9.23-h2c91f9b_0_cpython.json"),
        "{}",
    );
    write(
        &conda.join("conda-meta/state"),
        r#"{"env_vars": {"CUDA_MODULE_LOADING": "LAZY"}}"#,
    );
    let (code, value) = environment(&node, &[&plain, &conda], &["--size", "64"]);
    assert_eq!(code, 0, "{:#}", value["findings"]);
    assert_eq!(
        python(&value, &plain)["proofs"][0]["framework"],
        "interpreter"
    );
    let conda_path = conda.as_path();
    let conda = python(&value, conda_path);
    assert_eq!(conda["kind"], "conda");
    assert_eq!(conda["proofs"][0]["framework"], "torch");
    assert_eq!(finding(&value, "torch_gemm")["verdict"], "pass");
    // The one starts a program in the other, and has its result.
    let program = "import subprocess, sys; \
                   ended = subprocess.run([sys.argv[1], '-B', '-c', 'import torch; print(torch.cuda.device_count())'], stdout=subprocess.PIPE); \
                   print('RESULT:' + ended.stdout.decode().strip())";
    let command = node.validator();
    let interpreter = plain.join("bin/python");
    let mut other = in_place_of(&command, interpreter.to_str().expect("UTF-8"));
    let conda = python(&value, conda_path)["interpreter"]["value"].clone();
    other.args(["-B", "-c", program]);
    let (code, stdout, stderr) = said(other.arg(conda.as_str().expect("an interpreter")));
    assert_eq!((code, &stdout[..]), (0, "RESULT:8\n"), "{stderr}");
}

/// As long as the seed's, and written for its API.
const MATRIX_PROGRAM: &str = r#"
import time
import torch

SIZE = 16
devices = ["cuda:%d" % index for index in range(torch.cuda.device_count())]
matrices = 0
right = 0
for device in devices:
    begin = time.time()
    one = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 7
    other = torch.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 5
    expected = torch.matmul(one, other)
    product = torch.matmul(one.to(device), other.to(device))
    torch.cuda.synchronize()
    wrong = int((product.cpu() != expected).sum())
    matrices += 1
    if wrong == 0 and time.time() - begin < 60:
        right += 1
print("MATRICES:%d RIGHT:%d" % (matrices, right))
"#;

/// A machine without a toolkit: the burn does not need one, and one line reports its absence.
#[test]
fn without_a_toolkit_the_burn_runs_all_the_same() {
    let node = Node::healthy("h200x1");
    let folder = node.sysroot().join("usr/local");
    for entry in std::fs::read_dir(&folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.to_string_lossy().contains("/cuda") {
            if path.is_symlink() {
                std::fs::remove_file(&path).expect("a link");
            } else {
                std::fs::remove_dir_all(&path).expect("a toolkit");
            }
        }
    }
    let ran = node.run(&[]);
    assert_eq!(ran.code, 0, "{}{}", ran.stdout, ran.stderr);
    assert_eq!(ran.report.finding("burn_completed")["verdict"], "pass");
    let toolkit = ran.report.finding("toolkit_on_path");
    assert_eq!(toolkit["verdict"], "skip");
    assert_eq!(
        toolkit["summary"],
        "no toolkit with nvcc was found; the GPUs are judged without one"
    );
    assert_eq!(ran.report.not_green(), set(&[]));
}

/// The working and the failing examples of the seed, in an environment that the validator has
/// proven.
#[test]
fn programs_of_the_seed_run_and_a_dead_one_says_why() {
    let node = Node::healthy("h200x8");
    let venv = torch_venv(&node.out, "venv", "");
    let python = venv.join("bin/python");
    let run = |program: &str| {
        let mut command = node.validator();
        let mut other = in_place_of(&command, python.to_str().expect("UTF-8"));
        command.args(["-c"]);
        said(other.args(["-B", "-c", program]))
    };
    let (code, stdout, stderr) = run(
        "import torch; print(f'VERSION:{torch.__version__}'); print(f'CUDA:{torch.cuda.is_available()}')",
    );
    assert_eq!(
        (code, &stdout[..]),
        (0, "VERSION:2.8.0+cu128\nCUDA:True\n"),
        "{stderr}"
    );
    let (code, stdout, stderr) = run(
        "import torch; a=torch.tensor([1.0, 2.0]).to('cuda:0'); b=torch.tensor([3.0, 4.0]).to('cuda:0'); c=a+b; \
         print(f'RESULT:{c.cpu().tolist()}')",
    );
    assert_eq!((code, &stdout[..]), (0, "RESULT:[4.0, 6.0]\n"), "{stderr}");
    // The first failing example: one program with many processes, whose results all arrive.
    let (code, stdout, stderr) = run("import subprocess, sys\n\
         found = []\n\
         for number in range(4):\n\
         \x20   program = 'import torch; print(torch.tensor([%d.0]).to(\"cuda:0\").cpu().tolist())' % number\n\
         \x20   ended = subprocess.run([sys.executable, '-B', '-c', program], stdout=subprocess.PIPE, timeout=60)\n\
         \x20   found.append((ended.returncode, ended.stdout.decode().strip()))\n\
         print(found)\n");
    assert_eq!(
        (code, &stdout[..]),
        (
            0,
            "[(0, '[0.0]'), (0, '[1.0]'), (0, '[2.0]'), (0, '[3.0]')]\n"
        ),
        "{stderr}"
    );
    // The second: a program of twenty lines that multiplies matrices on each device.
    let (code, stdout, stderr) = run(MATRIX_PROGRAM);
    assert_eq!((code, &stdout[..]), (0, "MATRICES:8 RIGHT:8\n"), "{stderr}");
    // Many environments at once: all results arrive.
    let pythons: Vec<PathBuf> = (0..6)
        .map(|number| torch_venv(&node.out, &format!("venv{number}"), ""))
        .collect();
    let paths: Vec<&Path> = pythons.iter().map(PathBuf::as_path).collect();
    let (code, value) = environment(&node, &paths, &["--size", "64"]);
    assert_eq!(code, 0, "{:#}", value["findings"]);
    for path in &pythons {
        assert_eq!(
            self::python(&value, path)["proofs"][0]["end"],
            json!({"exited": 0})
        );
    }
}

#[test]
fn toolkits_in_every_place_are_found_and_calm() {
    let scratch = Scratch::new();
    let root = scratch.path("root");
    for path in [
        "usr/local/cuda-12.1",
        "usr/local/cuda-11.8",
        "opt/cuda",
        "usr/lib/cuda",
        "opt/nvidia/hpc_sdk/Linux_x86_64/25.3/cuda/12.8",
        "opt/spack/opt/spack/linux-x86_64/gcc/cuda-12.4.1-abc",
    ] {
        let version = if path.contains("11.8") {
            "11.8.0"
        } else {
            "12.1.1"
        };
        write(
            &root.join(path).join("version.json"),
            format!("{{\"cuda\": {{\"version\": \"{version}\"}}}}"),
        );
        write(&root.join(path).join("bin/nvcc"), "#!/bin/sh\n");
    }
    symlink("cuda-12.1", root.join("usr/local/cuda")).expect("a link");
    write(&root.join("opt/conda/bin/python"), "");
    write(&root.join("opt/conda/bin/nvcc"), "");
    write(
        &root.join("opt/conda/conda-meta/cuda-nvcc-12.4.131-0.json"),
        "{}",
    );
    write(
        &root.join("etc/modulefiles/cuda/12.6"),
        "#%Module\nprepend-path PATH /apps/cuda/bin\n",
    );
    write(&root.join("apps/cuda/version.txt"), "CUDA Version 12.6.0\n");
    write(&root.join("apps/cuda/bin/nvcc"), "");
    let (code, stdout, stderr) = said(
        validator()
            .args([
                "environment",
                "--json",
                "--on",
                "A100 driver 550",
                "--image",
            ])
            .arg(&root),
    );
    assert_eq!(code, 0, "{stdout}{stderr}");
    let value: Value = serde_json::from_str(&stdout).expect("JSON");
    let toolkits = value["environment"]["toolkits"]
        .as_array()
        .expect("toolkits");
    let found: Vec<String> = toolkits
        .iter()
        .map(|it| {
            format!(
                "{} {} {}",
                it["path"].as_str().unwrap_or_default(),
                it["version"]["value"].as_str().unwrap_or_default(),
                it["kind"].as_str().unwrap_or_default()
            )
        })
        .collect();
    for wanted in [
        "/usr/local/cuda-12.1 12.1.1 toolkit",
        "/usr/local/cuda-11.8 11.8.0 toolkit",
        "/opt/cuda 12.1.1 toolkit",
        "/usr/lib/cuda 12.1.1 toolkit",
        "/opt/nvidia/hpc_sdk/Linux_x86_64/25.3/cuda/12.8 12.1.1 hpc_sdk",
        "/opt/spack/opt/spack/linux-x86_64/gcc/cuda-12.4.1-abc 12.1.1 spack",
        "/opt/conda 12.4 conda",
        "/apps/cuda 12.6 module",
    ] {
        assert!(
            found.iter().any(|it| it == wanted),
            "{wanted} is not among {found:#?}"
        );
    }
    assert_eq!(
        toolkits.len(),
        8,
        "a link is no toolkit of its own: {found:#?}"
    );
    let found = finding(&value, "toolkit_on_path");
    assert_eq!(found["verdict"], "warn", "{found:#}");
    assert_eq!(found["remedy"], "export PATH=/usr/local/cuda/bin:$PATH");
}

/// A root file system with torch for CUDA 12.6 in `/opt/venv`, as an image has it.
fn image_root(scratch: &Scratch) -> PathBuf {
    let root = scratch.path("image");
    let site = root
        .join("opt/venv")
        .join(SITE.replace("python3", "python3.12"));
    install_torch_in(&site, "2.7.1+cu126", "'12.6'", "");
    make_library_with_code(
        scratch,
        &site.join("torch/lib/libtorch_cuda.so"),
        &[(2, 80), (2, 90)],
    );
    write(
        &root.join("opt/venv/pyvenv.cfg"),
        "home = /usr/bin\nversion = 3.12.3\n",
    );
    std::fs::create_dir_all(root.join("opt/venv/bin")).expect("a folder");
    write(&root.join("usr/bin/python3.12"), "\x7fELF");
    symlink("/usr/bin/python3.12", root.join("opt/venv/bin/python")).expect("a link");
    root
}

pub(crate) fn judge_image(image: &Path, on: &str) -> (i32, Value) {
    let (code, stdout, stderr) = said(
        validator()
            .args(["environment", "--json", "--on", on, "--image"])
            .arg(image),
    );
    let value =
        serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}"));
    (code, value)
}

#[test]
fn an_image_is_judged_on_the_disk() {
    let scratch = Scratch::new();
    let root = image_root(&scratch);
    let archive = oci_archive(&scratch, &root);
    for image in [&root, &archive] {
        let (code, value) = judge_image(image, "H200 driver 570");
        assert_eq!(code, 0, "{value:#}");
        assert_eq!(value["packages"][0]["version"], "2.7.1+cu126");
        assert_eq!(value["packages"][0]["environment"], "/opt/venv");
        let python = &value["environment"]["pythons"][0];
        assert_eq!(
            python["proofs"],
            json!([]),
            "nothing of an image is started"
        );
        let (code, value) = judge_image(image, "B200 driver 570");
        assert_eq!(code, 1);
        let reasons = value["packages"][0]["compatibility"]["reasons"].to_string();
        assert!(reasons.contains("no kernel image for B200"), "{reasons}");
        let (code, _) = judge_image(image, "H200 driver 470.57.02");
        assert_eq!(code, 1, "the driver is too old");
    }
    let (code, value) = judge_image(&archive, "H200 driver 570");
    assert_eq!(
        (code, &value["environment"]["variables"]["LD_LIBRARY_PATH"]),
        (0, &json!("/usr/local/cuda/compat"))
    );
    let leftovers = std::fs::read_dir(std::env::temp_dir()).expect("a folder");
    let leftovers = leftovers.filter(|it| {
        let name = it.as_ref().expect("an entry").file_name();
        name.to_string_lossy().starts_with("gpu-validator-image-")
    });
    assert!(leftovers.count() <= 1, "unpacked images are removed");
    let not_an_image = scratch.write("x.tar", "no archive");
    let (code, _, stderr) = said(
        validator()
            .args(["environment", "--image"])
            .arg(not_an_image),
    );
    assert_eq!(code, 3, "{stderr}");
    assert!(stderr.contains("OCI archive"), "{stderr}");
}

/// Two layers: the file system, gzipped, and one that removes a package with a whiteout.
pub(crate) fn oci_archive(scratch: &Scratch, root: &Path) -> PathBuf {
    let layout = scratch.path("layout");
    let blobs = layout.join("blobs/sha256");
    std::fs::create_dir_all(&blobs).expect("a folder");
    let second = scratch.path("second");
    write(
        &root.join("opt/venv/lib/python3.12/site-packages/jax-0.12.0.dist-info/METADATA"),
        "Name: jax\n",
    );
    write(
        &second.join("opt/venv/lib/python3.12/site-packages/.wh.jax-0.12.0.dist-info"),
        "",
    );
    let pack = |from: &Path, to: &Path, gzip: bool| {
        let mut tar = Command::new("tar");
        tar.args(if gzip { ["-czf"] } else { ["-cf"] })
            .arg(to)
            .arg("-C")
            .arg(from)
            .arg(".");
        assert!(tar.status().expect("tar starts").success());
    };
    pack(root, &blobs.join("1"), true);
    pack(&second, &blobs.join("2"), false);
    let blob = |name: &str, value: &Value| write(&blobs.join(name), value.to_string());
    blob(
        "3",
        &json!({"config": {"Env": ["PATH=/opt/venv/bin:/usr/bin", "LD_LIBRARY_PATH=/usr/local/cuda/compat"]}}),
    );
    blob(
        "4",
        &json!({"config": {"digest": "sha256:3"}, "layers": [{"digest": "sha256:1"}, {"digest": "sha256:2"}]}),
    );
    write(
        &layout.join("index.json"),
        json!({"manifests": [{"digest": "sha256:4", "platform": {"architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }, "os": "linux"}}]}).to_string(),
    );
    write(
        &layout.join("oci-layout"),
        r#"{"imageLayoutVersion": "1.0.0"}"#,
    );
    let archive = scratch.path("image.tar");
    pack(&layout, &archive, false);
    archive
}

#[test]
fn libraries_on_the_path_before_the_environments_own_are_named() {
    let scratch = Scratch::new();
    let root = scratch.path("root");
    let site = root.join("opt/venv/lib/python3.12/site-packages");
    install_torch_in(&site, "2.5.1+cu124", "'12.4'", "");
    write(&root.join("opt/venv/pyvenv.cfg"), "version = 3.12.3\n");
    write(&root.join("opt/venv/bin/python"), "");
    let library = |path: &Path, soname: &str, needed: &[&Path], runpath: &str| {
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        let source = scratch.write("empty.c", "int empty;\n");
        let mut cc = Command::new("cc");
        cc.args([
            "-shared",
            "-Wl,--no-as-needed",
            &format!("-Wl,-soname,{soname}"),
            "-o",
        ])
        .arg(path)
        .arg(source)
        .args(needed);
        if !runpath.is_empty() {
            cc.arg(format!("-Wl,--enable-new-dtags,-rpath,{runpath}"));
        }
        assert!(cc.status().expect("cc starts").success());
    };
    let own = site.join("nvidia/cublas/lib");
    let system = root.join("usr/local/cuda/lib64");
    library(&own.join("libcublasLt.so.12"), "libcublasLt.so.12", &[], "");
    library(
        &system.join("libcublasLt.so.12"),
        "libcublasLt.so.12",
        &[],
        "",
    );
    let lt = own.join("libcublasLt.so.12");
    library(
        &site.join("torch/lib/libtorch_cuda.so"),
        "libtorch_cuda.so",
        &[&lt],
        "$ORIGIN/../../nvidia/cublas/lib",
    );
    // RUNPATH comes after LD_LIBRARY_PATH.
    let mut command = validator();
    command
        .args(["environment", "--json", "--no-start", "--sysroot"])
        .arg(&root);
    let (_, stdout, _) = said(command.env("LD_LIBRARY_PATH", "/usr/local/cuda/lib64"));
    let value: Value = serde_json::from_str(&stdout).expect("JSON");
    let found = finding(&value, "library_resolution");
    assert_eq!(found["verdict"], "warn", "{value:#}");
    let summary = found["summary"].as_str().expect("a summary");
    assert!(
        summary.contains("/usr/local/cuda/lib64/libcublasLt.so.12 by LD_LIBRARY_PATH"),
        "{summary}"
    );
    // Without the variable it is the environment's own.
    let mut command = validator();
    command
        .args(["environment", "--json", "--no-start", "--sysroot"])
        .arg(&root);
    let (_, stdout, _) = said(&mut command);
    let value: Value = serde_json::from_str(&stdout).expect("JSON");
    let libraries = &value["environment"]["pythons"][0]["libraries"];
    assert_eq!(libraries[0]["found_by"], "runpath", "{libraries:#}");
    assert_eq!(finding(&value, "library_resolution")["verdict"], "pass");
}

#[test]
fn twenty_environments_are_discovered_quickly() {
    let scratch = Scratch::new();
    let root = scratch.path("root");
    std::fs::create_dir_all(root.join("usr")).expect("a folder");
    for number in 0..20 {
        let prefix = root.join(format!("home/user{number}/project/.venv"));
        write(&prefix.join("pyvenv.cfg"), "version = 3.12.3\n");
        write(&prefix.join("bin/python"), "");
        let site = prefix.join("lib/python3.12/site-packages");
        install_torch_in(&site, "2.8.0+cu128", "'12.8'", "");
        for package in 0..200 {
            write(
                &site.join(format!("package{package}-1.0.dist-info/METADATA")),
                "Name: x\n",
            );
        }
    }
    let (_, stdout, _) = said(
        validator()
            .args([
                "environment",
                "--json",
                "--on",
                "H200 driver 580",
                "--image",
            ])
            .arg(&root),
    );
    let value: Value = serde_json::from_str(&stdout).expect("JSON");
    assert_eq!(
        value["environment"]["pythons"].as_array().map(Vec::len),
        Some(20)
    );
    assert_eq!(
        value["environment"]["walk"].get("stopped_at"),
        Some(&Value::Null)
    );
    let folders = value["environment"]["walk"]["folders"]
        .as_u64()
        .expect("a number");
    assert!(folders < 500, "{folders} folders were read");
}

/// The probe program is plain enough for the oldest interpreter.
#[test]
fn the_probe_is_python_3_6() {
    let probe = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../validator/src/probe/environment/probe.py");
    let program = format!("import ast; ast.parse(open({probe:?}).read(), feature_version=(3, 6))");
    let status = Command::new("python3").args(["-c", &program]).status();
    assert!(status.expect("python3 starts").success());
}
