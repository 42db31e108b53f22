//! Reports of a machine whose texts are any text: for the test beside it and for the fuzz target.

use std::sync::LazyLock;

use validator_core::facts::{Facts, Reading};
use validator_core::findings::Run;
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::report::{self, HumanStyle};

/// A machine whose texts are replaced.
static MACHINE: LazyLock<Facts> = LazyLock::new(|| {
    Facts::from_json(include_bytes!("../../../../fuzz/corpus/facts/h200x1.json"))
        .expect("facts of the corpus")
});

/// The texts that reach reports, one for each part between NUL bytes.
fn run_of(text: &str) -> Run {
    let mut parts = text.split('\0').cycle();
    let mut next = || parts.next().unwrap_or_default().to_owned();
    let mut facts = MACHINE.clone();
    facts.host.hostname = Reading::Value(next());
    facts.host.product_name = Reading::Value(next());
    facts.nvml.driver_version = Reading::Value(next());
    for gpu in &mut facts.gpus {
        gpu.name = Reading::Value(next());
        gpu.serial = Reading::Value(next());
        gpu.vbios_version = Reading::NotRead(next());
        gpu.temperature = Reading::NotRead(next());
    }
    if let Reading::Value(log) = &mut facts.host.kernel_log {
        for record in &mut log.records {
            record.text = format!("NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name={}", next());
        }
    }
    let mut run = Run::judged(facts, &Profile::default(), "built-in", Level::Quick);
    run.incomplete = Some(next());
    run.profile = next();
    run
}

/// Characters that steer a terminal or are not seen: what is left of a text has none.
fn is_visible(it: char) -> bool {
    let is_hidden = matches!(
        it,
        '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{61c}' | '\u{feff}'
    );
    matches!(it, '\n' | '\t') || !(it.is_control() || is_hidden)
}

/// No report holds a character that is not visible.
pub(crate) fn assert_visible(text: &str) {
    let run = run_of(text);
    let outputs = [
        ("human", report::human(&run, HumanStyle::default())),
        ("markdown", report::markdown(&run)),
        ("html", report::html(&run)),
        (
            "junit",
            report::junit(&run).unwrap_or_else(|error| error.to_string()),
        ),
        ("json", report::json(&run)),
        ("ctrf", report::ctrf(&run)),
        ("annotations", report::github_annotations(&run)),
        ("metrics", report::metrics(&run)),
        ("ocptv", report::ocptv(&run)),
    ];
    for (format, output) in outputs {
        let hidden = output.chars().find(|it| !is_visible(*it));
        assert_eq!(hidden, None, "in {format}, of {text:?}");
    }
}
