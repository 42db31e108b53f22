//! The texts of checks are written as NVIDIA's and Kubernetes' documentation is, and hold no
//! placeholder.

use std::path::Path;

use validator_core::check::title;

/// Words that give programs a voice or hide the subject. A text with one of them is rewritten:
/// programs report, return, request and read.
const AVOIDED: [&str; 13] = [
    "ask", "asks", "behind", "mended", "nobody", "say", "says", "somebody", "tell", "tells",
    "told", "what", "whoever",
];

#[test]
fn titles_of_checks_are_in_standard_terms() {
    for entry in validator_core::CHECKS {
        let title = title(entry);
        for word in title.split(|it: char| !it.is_alphanumeric()) {
            assert!(
                !AVOIDED.contains(&word.to_lowercase().as_str()),
                "{}: `{title}` has the word `{word}`",
                entry.check.id
            );
        }
        assert!(
            title.len() <= 100,
            "{}: a title is one line",
            entry.check.id
        );
    }
}

#[test]
fn texts_hold_no_placeholder() {
    for entry in validator_core::CHECKS {
        let url = entry.check.documentation_url;
        assert!(url.starts_with("https://"), "{}: {url}", entry.check.id);
        assert!(
            !entry.documentation.contains("CARGO_"),
            "{}",
            entry.check.id
        );
    }
    let checks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../CHECKS.md");
    let checks = std::fs::read_to_string(checks).expect("CHECKS.md");
    for (number, line) in checks.lines().enumerate() {
        let brackets = line
            .split('<')
            .skip(1)
            .filter_map(|it| it.split('>').next());
        for name in brackets {
            let is_placeholder = name.contains('_') && !name.contains(|it: char| it.is_lowercase());
            assert!(!is_placeholder, "CHECKS.md:{}: <{name}>", number + 1);
        }
    }
}
