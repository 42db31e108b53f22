//! Facts from anywhere: they are judged and reported, or refused.
//!
//! `cargo +nightly fuzz run facts -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

use libfuzzer_sys::fuzz_target;
use validator_core::facts::Facts;
use validator_core::findings::Run;
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::report;

fuzz_target!(|bytes: &[u8]| {
    let Ok(facts) = Facts::from_json(bytes) else {
        return;
    };
    let written = serde_json::to_vec(&facts).expect("facts can be written");
    assert_eq!(Facts::from_json(&written).expect("and read again"), facts);
    let run = Run::judged(facts, &Profile::default(), "built-in", Level::Standard);
    let counts = run.counts();
    assert_eq!(counts.total(), run.findings.len());
    assert!(report::junit(&run).expect("a report").starts_with("<?xml"));
    assert!(serde_json::from_str::<serde_json::Value>(&report::json(&run)).is_ok());
    let _ = report::markdown(&run);
    let _ = report::html(&run);
});
