//! `gpu-validator environment` on libraries that the dynamic linker cannot link, on a real wheel of
//! NVRTC, and against a machine that is named.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::{Value, json};

use crate::environment::{
    finding, install_torch_in, judge_image, make_library_with_code, oci_archive, python, site,
    torch_venv, venv, write,
};
use crate::node::{Node, Scratch, said, validator};
use crate::xtask::program;

const SITE: &str = "opt/venv/lib/python3.12/site-packages";

/// A shared library with these functions, by version of its symbols where it has versions.
fn library(path: &Path, versions: &[(&str, &str)], source: &str, needed: &[&Path]) {
    std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
    let name = path.file_name().expect("a name").to_str().expect("UTF-8");
    let source_file = path.with_extension("c");
    write(&source_file, source);
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-nostdlib", "-Wl,--no-as-needed"])
        .arg(format!("-Wl,-soname,{name}"))
        .arg("-Wl,--enable-new-dtags,-rpath,$ORIGIN/../../nvidia/nccl/lib");
    if !versions.is_empty() {
        let map = path.with_extension("map");
        let nodes: Vec<String> = versions
            .iter()
            .map(|(version, function)| format!("{version} {{ global: {function}; }};\n"))
            .collect();
        write(&map, nodes.concat());
        cc.arg(format!("-Wl,--version-script={}", map.display()));
    }
    cc.arg("-o").arg(path).arg(&source_file).args(needed);
    assert!(cc.status().expect("cc starts").success());
    std::fs::remove_file(source_file).expect("the source");
}

const NEW_C_LIBRARY: [(&str, &str); 2] = [("GLIBC_2.31", "old"), ("GLIBC_2.34", "young")];
const FUNCTIONS: &str = "int old(void) { return 1; }\nint young(void) { return 2; }\n";

/// The root file system of an image with a torch whose library needs `young` of the C library and
/// two functions of NCCL.
fn image(scratch: &Scratch, name: &str) -> PathBuf {
    let root = scratch.path(name);
    let site = root.join(SITE);
    install_torch_in(&site, "2.7.1+cu126", "'12.6'", "");
    write(
        &root.join("opt/venv/pyvenv.cfg"),
        "home = /usr/bin\nversion = 3.12.3\n",
    );
    write(&root.join("opt/venv/bin/python"), "");
    let c_library = root.join("usr/lib64/libc.so.6");
    library(&c_library, &NEW_C_LIBRARY, FUNCTIONS, &[]);
    let nccl = site.join("nvidia/nccl/lib/libnccl.so.2");
    let functions = "int ncclSend(void) { return 1; }\nint ncclCommRegister(void) { return 2; }\n";
    library(&nccl, &[], functions, &[]);
    library(
        &site.join("torch/lib/libtorch_cuda.so"),
        &[],
        "int young(void); int ncclSend(void); int ncclCommRegister(void);\n\
         int start(void) { return young() + ncclSend() + ncclCommRegister(); }\n",
        &[&c_library, &nccl],
    );
    root
}

/// The finding of `torch_cuda` for the image on a machine without other faults.
fn judge(image: &Path) -> (i32, Value) {
    let (code, value) = judge_image(image, "H200 driver 570");
    let found = finding(&value, "torch_cuda");
    assert_eq!(found["subject"]["environment"]["path"], "/opt/venv");
    (code, found.clone())
}

#[test]
fn an_image_whose_c_library_is_too_old_for_its_torch_fails() {
    let scratch = Scratch::new();
    let root = image(&scratch, "image");
    let (code, found) = judge(&root);
    assert_eq!((code, &found["verdict"]), (0, &json!("pass")), "{found:#}");

    let c_library = root.join("usr/lib64/libc.so.6");
    library(&c_library, &NEW_C_LIBRARY[..1], FUNCTIONS, &[]);
    let archive = oci_archive(&scratch, &root);
    for image in [&root, &archive] {
        let (code, found) = judge(image);
        assert_eq!((code, &found["verdict"]), (1, &json!("fail")), "{found:#}");
        let summary = found["summary"].as_str().expect("a summary");
        assert!(
            summary.contains(
                "libtorch_cuda.so needs GLIBC_2.34, and /usr/lib64/libc.so.6 has GLIBC_2.31 at most"
            ),
            "{summary}"
        );
        let remedy = found["remedy"].as_str().expect("a remedy");
        assert!(remedy.contains("glibc 2.34 or newer"), "{remedy}");
    }
}

#[test]
fn a_function_and_a_library_that_are_not_there_are_named() {
    let scratch = Scratch::new();
    let root = image(&scratch, "older-nccl");
    let nccl = root.join(SITE).join("nvidia/nccl/lib/libnccl.so.2");
    library(&nccl, &[], "int ncclSend(void) { return 1; }\n", &[]);
    let (code, found) = judge(&root);
    let summary = found["summary"].as_str().expect("a summary");
    assert_eq!(code, 1, "{summary}");
    assert!(
        summary.contains("libtorch_cuda.so needs ncclCommRegister, which")
            && summary.contains("libnccl.so.2 does not define"),
        "{summary}"
    );

    let root = image(&scratch, "without-nccl");
    std::fs::remove_dir_all(root.join(SITE).join("nvidia")).expect("a folder");
    let (code, found) = judge(&root);
    let summary = found["summary"].as_str().expect("a summary");
    assert_eq!(code, 1, "{summary}");
    assert!(
        summary.contains("libtorch_cuda.so needs libnccl.so.2, which the loader does not find"),
        "{summary}"
    );
}

/// The folder of the pinned tools, with NVIDIA's wheel of NVRTC in an environment of its own. A
/// wheel that cannot be had fails the test.
fn nvrtc_environment() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let installed = Command::new(program("xtask"))
            .args(["tools", "nvrtc"])
            .stdout(Stdio::null())
            .status();
        assert!(
            installed.expect("xtask runs").success(),
            "NVRTC could not be installed"
        );
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
        let folder = target.expect("target is above").join("tools/nvrtc");
        folder.canonicalize().expect("the environment")
    })
}

#[test]
fn a_real_wheel_of_nvrtc_is_found_and_intact() {
    /// Of the library itself, as the wheels 12.3.107 hold it.
    const SHA256: &str = if cfg!(target_arch = "aarch64") {
        "15b10e5145b00ea1d06e30d4e8a7d0c877a642b04dfbedad81f03b0c519844d1"
    } else {
        "fb52541503c06db5996646b735f9062b92226184c3ba187ddb807c5f1b978c46"
    };
    /// The whole wheel on the disk; what a test may fetch is bounded.
    const BYTES_MAXIMUM: u64 = 128 << 20;
    let environment = nvrtc_environment();
    let path = site(environment).join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    let bytes = std::fs::metadata(&path).expect("the library").len();
    assert!(bytes < BYTES_MAXIMUM, "{bytes}");
    let sum = said(Command::new("sha256sum").arg(&path)).1;
    assert!(sum.starts_with(SHA256), "{sum}");

    let scratch = Scratch::new();
    let root = scratch.path("root");
    std::fs::create_dir_all(root.join("usr")).expect("a folder");
    let (code, stdout, stderr) = said(
        validator()
            .args(["environment", "--json", "--on", "H200 driver 570"])
            .arg("--sysroot")
            .arg(&root)
            .arg("--python")
            .arg(environment),
    );
    let value: Value =
        serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}"));
    assert_eq!(code, 0, "{value:#}");
    let found = python(&value, environment);
    let packages = found["packages"].as_array().expect("packages");
    assert!(
        packages
            .iter()
            .any(|it| it["name"] == "nvidia-cuda-nvrtc-cu12" && it["version"] == "12.3.107"),
        "{packages:#?}"
    );
    let libraries = found["libraries"].as_array().expect("libraries");
    let nvrtc = libraries.iter().find(|it| it["name"] == "libnvrtc.so.12");
    let nvrtc = nvrtc.unwrap_or_else(|| panic!("no libnvrtc: {libraries:#?}"));
    assert_eq!(nvrtc["version"], "12.3.107");
    assert_eq!(nvrtc["resolved"], path.to_str().expect("UTF-8"));
    let whole = finding(&value, "python_environment");
    assert_eq!(whole["verdict"], "pass", "{whole:#}");
}

/// `--on` judges the files alone: what starts on this machine proves nothing about another.
#[test]
fn environments_of_this_machine_are_judged_for_another() {
    let node = Node::healthy("h200x1");
    let old = venv(&node.out, "old");
    install_torch_in(&site(&old), "2.6.0+cu124", "'12.4'", "");
    let gpu_library = site(&old).join("torch/lib/libtorch_cuda.so");
    make_library_with_code(&node.out, &gpu_library, &[(2, 90)]);
    let new = torch_venv(&node.out, "new", "");
    let judge = |on: &str| {
        let mut command = node.validator();
        command
            .args(["environment", "--json", "--on", on, "--sysroot"])
            .arg(node.sysroot())
            .arg("--python")
            .arg(&old)
            .arg("--python")
            .arg(&new);
        let (code, stdout, stderr) = said(&mut command);
        let value: Value = serde_json::from_str(&stdout)
            .unwrap_or_else(|error| panic!("{error}: {stdout}{stderr}"));
        (code, value)
    };
    let verdict = |value: &Value, path: &Path| -> String {
        let findings = value["findings"].as_array().expect("findings");
        let path = path.to_str().expect("UTF-8");
        let mut of_environment = findings.iter().filter(|it| {
            it["check"] == "torch_cuda" && it["subject"]["environment"]["path"] == path
        });
        let found = of_environment
            .next()
            .expect("a finding of each environment");
        found["verdict"].as_str().expect("a verdict").to_owned()
    };
    let (code, value) = judge("B200 driver 570.124.06");
    assert_eq!(code, 1, "{:#}", value["findings"]);
    assert_eq!(value["on"], "B200 driver 570.124.06");
    assert_eq!(verdict(&value, &old), "fail", "it holds nothing for a B200");
    assert_eq!(verdict(&value, &new), "pass");
    assert_eq!(
        python(&value, &new)["proofs"],
        json!([]),
        "nothing is started"
    );
    let (code, value) = judge("H200 driver 570.124.06");
    assert_eq!(code, 0, "{:#}", value["findings"]);
    let (code, _, stderr) = said(validator().args(["environment", "--on", "toaster driver 570"]));
    assert_eq!(code, 3, "{stderr}");
}

/// Readers of JUnit that compare runs take class and name for the test's identity.
#[test]
fn each_environment_is_a_suite_with_the_same_names_in_every_run() {
    let node = Node::healthy("h200x1");
    let works = torch_venv(&node.out, "works", "");
    let broken = torch_venv(&node.out, "broken", "import error");
    let profile = node.out.write(
        "profile.yaml",
        format!(
            "python: [{{path: {}}}, {{path: {}}}]\n",
            works.display(),
            broken.display()
        ),
    );
    let profile = profile.to_str().expect("UTF-8");
    let junit = node.out.path("report.xml");
    let mut names = Vec::new();
    for _ in 0..2 {
        let file = junit.to_str().expect("UTF-8");
        let ran = node.run(&["--profile", profile, "--no-burn", "--junit", file]);
        assert_eq!(ran.code, 1, "{}{}", ran.stdout, ran.stderr);
        let verdicts: Vec<(&Value, &Value)> = ran
            .report
            .of_check("torch_cuda")
            .map(|it| (&it["subject"]["environment"]["path"], &it["verdict"]))
            .collect();
        let path = |path: &Path| json!(path.to_str().expect("UTF-8"));
        assert!(
            verdicts.contains(&(&path(&works), &json!("pass"))),
            "{verdicts:?}"
        );
        assert!(
            verdicts.contains(&(&path(&broken), &json!("fail"))),
            "{verdicts:?}"
        );
        assert!(
            ran.stdout
                .contains(&format!("Python environment {}", broken.display())),
            "{}",
            ran.stdout
        );
        let text = std::fs::read_to_string(&junit).expect("a JUnit report");
        let of_environments: Vec<String> = text
            .lines()
            .filter(|it| it.contains("classname=\"gpu-validator.environment."))
            .map(|it| {
                it.split(" time=").next().unwrap_or_default().to_owned()
                    + it.split(" classname=").nth(1).unwrap_or_default()
            })
            .collect();
        assert_eq!(of_environments.len(), 6, "{of_environments:#?}");
        names.push(of_environments);
    }
    assert_eq!(names[0], names[1]);
}
