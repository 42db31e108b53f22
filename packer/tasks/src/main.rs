//! What `cargo xtask` starts: see the library.

fn main() -> std::process::ExitCode {
    packer_tasks::main()
}
