//! The profile parser: text in, profile or error out.
//!
//! `cargo +nightly fuzz run profile -- -timeout=5 -rss_limit_mb=512`

#![no_main]

use libfuzzer_sys::fuzz_target;
use validator_core::parse_profile;

fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    match parse_profile(text, "fuzz.yaml") {
        // A profile that was understood can be written down and means the same again.
        Ok(profile) => {
            let written = serde_yaml::to_string(&profile).expect("a profile can be written");
            match parse_profile(&written, "written.yaml") {
                Ok(again) => assert_eq!(again, profile),
                // The guard against nesting comes before the YAML parser and may take brackets
                // inside of a text for nesting: such a profile is refused, never misread.
                Err(error) => assert!(error.0.contains("nested deeper"), "{error}"),
            }
        }
        Err(error) => {
            assert!(error.0.starts_with("fuzz.yaml"), "{error}");
            assert!(error.0.len() < 16 * 1024, "{} bytes of error", error.0.len());
        }
    }
});
