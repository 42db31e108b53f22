//! Extracts the documentation comments of the checks, which `checks/mod.rs` embeds.

use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/checks");
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let folder = Path::new(&out).join("checks");
    std::fs::create_dir_all(&folder).expect("OUT_DIR is writable");
    for file in std::fs::read_dir("src/checks").expect("src/checks exists") {
        let path = file.expect("src/checks is readable").path();
        let text = std::fs::read_to_string(&path).expect("a check is UTF-8 text");
        let lines: Vec<&str> = text.lines().filter(|it| it.starts_with("//!")).collect();
        let name = path.file_stem().expect("a file has a name").to_owned();
        std::fs::write(
            folder.join(name).with_extension("txt"),
            lines.join("\n") + "\n",
        )
        .expect("OUT_DIR is writable");
    }
}
