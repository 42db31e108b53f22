//! Run files of burns, records of jobs, quarantine files: another user may have written them.
//!
//! `cargo +nightly fuzz run --features validator state_files -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| validator::fuzzing::state_files(bytes));
