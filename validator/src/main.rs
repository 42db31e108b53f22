//! The binary `gpu-validator`; everything is in the library.

fn main() -> std::process::ExitCode {
    validator::cli::main()
}
