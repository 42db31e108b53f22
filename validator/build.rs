//! Tells the binary which commit it was built from, where git knows, and writes the clients of the kubelet's sockets.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=GPU_VALIDATOR_COMMIT");
    // A package built from a source archive has no git; whoever builds it may say the commit.
    let commit = std::env::var("GPU_VALIDATOR_COMMIT")
        .ok()
        .or_else(|| git(&["rev-parse", "--short=12", "HEAD"]));
    if let Some(log) = git(&[
        "rev-parse",
        "--path-format=absolute",
        "--git-path",
        "logs/HEAD",
    ]) {
        // A file that does not exist would make every build a changed one.
        if std::path::Path::new(&log).exists() {
            println!("cargo::rerun-if-changed={log}");
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    let version = env!("CARGO_PKG_VERSION");
    let long = commit.map_or_else(
        || version.to_owned(),
        |commit| format!("{version} ({commit})"),
    );
    println!("cargo::rustc-env=GPU_VALIDATOR_LONG_VERSION={long}");
    kubelet_clients();
}

/// Rust code of the kubelet's interfaces, from the files that Kubernetes publishes; protox needs no protoc.
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
