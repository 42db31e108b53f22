//! A kubeconfig: what it names is neither read nor started.
//!
//! `cargo +nightly fuzz run --features validator kubeconfig -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| validator::fuzzing::kubeconfig(bytes));
