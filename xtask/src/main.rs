//! `cargo xtask <task>`: see the library.

fn main() -> std::process::ExitCode {
    xtask::main()
}
