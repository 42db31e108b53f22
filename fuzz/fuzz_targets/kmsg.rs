//! The kernel log's records and lines, and the loader's cache.
//!
//! `cargo +nightly fuzz run --features validator kmsg -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| validator::fuzzing::kmsg(bytes));
