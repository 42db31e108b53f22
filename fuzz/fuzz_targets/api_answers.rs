//! An answer of the API server, which may lie.
//!
//! `cargo +nightly fuzz run --features validator api_answers -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| validator::fuzzing::api_answers(bytes));
