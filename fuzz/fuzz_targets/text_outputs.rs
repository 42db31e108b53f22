//! The reports: no escape sequence and no invisible character of a text from outside gets into them.
//!
//! `cargo +nightly fuzz run text_outputs -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

#[path = "../../validator/core/tests/text_outputs/outputs.rs"]
mod outputs;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        outputs::assert_visible(text);
    }
});
