//! A message of the kubelet or of a device plugin.
//!
//! `cargo +nightly fuzz run --features validator grpc_answers -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| validator::fuzzing::grpc_answers(bytes));
