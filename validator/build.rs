//! Embeds the commit of the build, where git knows it, writes the clients of the kubelet's sockets,
//! and deflates the GPU kernels' images.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = env!("CARGO_PKG_VERSION");
    let built_from = built_from().map_or_else(String::new, |it| format!(" ({it})"));
    println!("cargo::rustc-env=GPU_VALIDATOR_LONG_VERSION={version}{built_from}");
    kubelet_clients();
    kernel_images();
}

/// The commit. A debug build does not run on nodes, and would be rebuilt for every commit.
fn built_from() -> Option<String> {
    println!("cargo::rerun-if-env-changed=GPU_VALIDATOR_COMMIT");
    if std::env::var("PROFILE").is_ok_and(|it| it == "debug") {
        return Some("debug build".to_owned());
    }
    // A package built from a source archive has no git; the builder may state the commit.
    if let Ok(commit) = std::env::var("GPU_VALIDATOR_COMMIT") {
        return Some(commit);
    }
    let log = git(&[
        "rev-parse",
        "--path-format=absolute",
        "--git-path",
        "logs/HEAD",
    ]);
    // A file that does not exist would make every build a changed one.
    if let Some(log) = log.filter(|it| std::path::Path::new(it).exists()) {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

/// Deflates the built kernels to where `workload/gemm/images.rs` embeds them from: a quarter of
/// their size.
fn kernel_images() {
    let built = "src/workload/gemm/built";
    println!("cargo::rerun-if-changed={built}");
    let folder = out_folder("kernels");
    for file in std::fs::read_dir(built).expect("the kernels are there") {
        let file = file.expect("the kernels can be listed");
        let image = std::fs::read(file.path()).expect("a kernel can be read");
        let deflated = miniz_oxide::deflate::compress_to_vec(&image, 9);
        std::fs::write(folder.join(file.file_name()), deflated).expect("OUT_DIR can be written");
    }
}

/// A folder of this name where the crate embeds files from.
fn out_folder(name: &str) -> std::path::PathBuf {
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    let folder = std::path::Path::new(&out).join(name);
    std::fs::create_dir_all(&folder).expect("OUT_DIR can be written");
    folder
}

/// Rust code of the kubelet's interfaces, from the files that Kubernetes publishes; protox needs no
/// protoc.
fn kubelet_clients() {
    println!("cargo::rerun-if-changed=proto");
    let files = ["deviceplugin/v1beta1.proto", "podresources/v1.proto"];
    let descriptors = protox::compile(files, ["proto"]).expect("the .proto files are right");
    tonic_prost_build::configure()
        .build_server(false)
        .disable_comments(["."])
        .compile_fds(descriptors)
        .expect("the clients can be written");
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let text = text.trim();
    (output.status.success() && !text.is_empty()).then(|| text.to_owned())
}
