//! A run of the validator on a simulated node, and what its report must hold.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use harness::simulate::PreparedNode;
use xtask::workspace;

/// The validator on a simulated node.
pub(super) fn validator(node: &PreparedNode, arguments: &[&str]) -> Command {
    let mut command = Command::new(workspace::target().join("debug/gpu-validator"));
    command.args(arguments);
    workspace::without_cargos_library_path(&mut command);
    node.apply(&mut command);
    command
}

/// How a run of the validator ended.
#[derive(Debug)]
pub(super) struct Ran {
    report: Value,
    code: Option<i32>,
    said: String,
}

impl Ran {
    pub(super) fn of(output: &std::process::Output, report: &Path) -> anyhow::Result<Ran> {
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        let text = std::fs::read_to_string(report)
            .with_context(|| format!("gpu-validator left no report:\n{said}"))?;
        Ok(Ran {
            report: serde_json::from_str(&text)?,
            code: output.status.code(),
            said,
        })
    }

    fn finding(&self, check: &str) -> &Value {
        let findings = self.report["findings"].as_array();
        findings
            .into_iter()
            .flatten()
            .find(|it| it["check"] == check)
            .unwrap_or(&Value::Null)
    }

    pub(super) fn summary(&self, check: &str) -> &str {
        self.finding(check)["summary"].as_str().unwrap_or_default()
    }

    pub(super) fn expect(&self, check: &str, verdict: &str, words: &[&str]) -> anyhow::Result<()> {
        let finding = self.finding(check);
        ensure!(
            finding["verdict"] == verdict,
            "{check} says {finding}, expected {verdict}"
        );
        for word in words {
            ensure!(
                self.summary(check).contains(word),
                "{check} says `{}`, expected `{word}` in it",
                self.summary(check)
            );
        }
        Ok(())
    }

    pub(super) fn ended_with(&self, code: i32) -> anyhow::Result<()> {
        ensure!(
            self.code == Some(code),
            "the run ended with {:?}, expected {code}:\n{}",
            self.code,
            self.said
        );
        Ok(())
    }
}
