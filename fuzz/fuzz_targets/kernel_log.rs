//! The kernel log: anything may stand in it, process names of users included.
//!
//! `cargo +nightly fuzz run kernel_log -- -timeout=5 -rss_limit_mb=512`

#![no_main]

use libfuzzer_sys::fuzz_target;
use validator_core::facts::KernelLogRecord;
use validator_core::kernel_log_events::{events, is_flood, is_relevant, parse};

fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let mut records = Vec::new();
    for line in text.lines() {
        // A message about a GPU must never be left out of the facts as irrelevant.
        if parse(line).is_some() {
            assert!(is_relevant(line), "{line:?} is an event and would not be kept");
        }
        let _ = is_flood(line);
        records.push(KernelLogRecord { age_s: Some(1.0), at_s: Some(1.0), text: line.to_owned(), repeats: 0 });
    }
    assert!(events(&records).len() <= records.len());
});
