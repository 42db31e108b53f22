//! Writes servers and clients of the kubelet's interfaces from the same files as the validator's
//! clients.

fn main() {
    const FOLDER: &str = "../../validator/proto";
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={FOLDER}");
    let files = ["deviceplugin/v1beta1.proto", "podresources/v1.proto"];
    let descriptors = protox::compile(files, [FOLDER]).expect("the .proto files are right");
    tonic_prost_build::configure()
        .disable_comments(["."])
        .compile_fds(descriptors)
        .expect("servers and clients can be written");
}
