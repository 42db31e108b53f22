//! The lines of a worker: its driver library may print anything between them.
//!
//! `cargo +nightly fuzz run --features validator worker_lines -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| validator::fuzzing::worker_lines(bytes));
