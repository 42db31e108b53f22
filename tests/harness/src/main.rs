//! What `cargo xtask` starts: see the library.

fn main() -> std::process::ExitCode {
    harness::main()
}
