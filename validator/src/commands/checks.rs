//! `gpu-validator checks`: what is checked, why, and what to do when it fails.

use anyhow::bail;

use super::terminal::to_stdout;
use validator_core::CHECKS as ALL;
use validator_core::check::{Entry, Judge, title};
use validator_core::findings::ExitStatus;
use validator_core::level::Level;
use validator_core::nearest_name::nearest_name;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum ChecksCommand {
    /// List every check: its id, stage, lowest level, and what it wants
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Explain a check: what, why, how it is judged, what to do, and by which source
    Explain {
        /// The check's id, as in reports: persistence_mode
        id: String,
    },
}

pub(crate) fn checks(command: &ChecksCommand) -> anyhow::Result<ExitStatus> {
    let text = match command {
        ChecksCommand::List { json: true } => list_as_json()?,
        ChecksCommand::List { json: false } => list(),
        ChecksCommand::Explain { id } => explain(id)?,
    };
    to_stdout(&text);
    Ok(ExitStatus::Passed)
}

/// One check of `checks list --json`.
#[derive(serde::Serialize)]
struct ListedCheck {
    id: &'static str,
    title: String,
    stage: String,
    /// The lowest level at which it is judged.
    level: Level,
    /// `host`, `gpu` or `environment`, as in the subjects of a report.
    subject: &'static str,
    documentation_url: &'static str,
}

fn list_as_json() -> anyhow::Result<String> {
    let checks: Vec<ListedCheck> = ALL
        .iter()
        .map(|entry| ListedCheck {
            id: entry.check.id,
            title: title(entry).to_owned(),
            stage: entry.check.stage.to_string(),
            level: entry.check.level,
            subject: match entry.check.judge {
                Judge::Host(_) => "host",
                Judge::EachGpu(_) | Judge::EachGpuAmongAll(_) => "gpu",
                Judge::EachEnvironment(..) => "environment",
            },
            documentation_url: entry.check.documentation_url,
        })
        .collect();
    Ok(serde_json::to_string_pretty(&checks)? + "\n")
}

fn list() -> String {
    let width = ALL.iter().map(|it| it.check.id.len()).max().unwrap_or(0);
    let lines: Vec<String> = ALL
        .iter()
        .map(|entry| {
            let check = entry.check;
            let subject = match check.judge {
                Judge::Host(_) => "host",
                Judge::EachGpu(_) | Judge::EachGpuAmongAll(_) => "each GPU",
                Judge::EachEnvironment(..) => "each environment",
            };
            format!(
                "{:<width$}  {:<4}  {:<8}  {:<8}  {}",
                check.id,
                check.stage.to_string(),
                check.level.to_string(),
                subject,
                title(entry)
            )
        })
        .collect();
    lines.join("\n") + "\n"
}

fn explain(id: &str) -> anyhow::Result<String> {
    let Some(entry) = ALL.iter().find(|it| it.check.id == id) else {
        match nearest_name(id, validator_core::check_ids()) {
            Some(near) => bail!("there is no check `{id}`; did you mean `{near}`?"),
            None => bail!("there is no check `{id}`; `gpu-validator checks list` names all"),
        }
    };
    let check = entry.check;
    Ok(format!(
        "{id}: {}\n\nSee also: {}\nStage {}, level {}.\n\
         To change its severity in a profile, with a reason that reports show:\n\n  \
         checks:\n    {id}: {{severity: warn, reason: \"…\"}}\n",
        documentation(entry),
        check.documentation_url,
        check.stage,
        match check.level {
            Level::Image => "image only".to_owned(),
            level => format!("{level} and above"),
        },
    ))
}

/// The `//!` lines as plain text.
fn documentation(entry: &Entry) -> String {
    let lines: Vec<String> = entry
        .documentation
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .map(|line| {
            let line = line.trim_start_matches("//!");
            let line = line.strip_prefix(' ').unwrap_or(line);
            match line.strip_prefix("## ") {
                Some(heading) => format!("{heading}:"),
                None => line.to_owned(),
            }
        })
        .collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_mistyped_id_is_answered_with_the_nearest() {
        let answer = |id| super::explain(id).expect_err(id).to_string();
        assert!(answer("persistance-mode").ends_with("did you mean `persistence_mode`?"));
        assert!(answer("zzz").ends_with("`gpu-validator checks list` names all"));
    }

    #[test]
    fn the_list_as_json_has_every_check_once() {
        let list: serde_json::Value =
            serde_json::from_str(&super::list_as_json().expect("JSON")).expect("JSON");
        let ids: Vec<&str> = list
            .as_array()
            .expect("a list")
            .iter()
            .map(|it| it["id"].as_str().expect("an id"))
            .collect();
        assert_eq!(ids, validator_core::check_ids().collect::<Vec<_>>());
    }

    #[test]
    fn every_check_is_listed_and_can_be_explained() {
        let list = super::list();
        for entry in validator_core::CHECKS {
            assert!(list.contains(entry.check.id));
            let text = super::explain(entry.check.id).expect("it is a check");
            for heading in ["Why:", "How it is judged:", "What to do:", "Source:"] {
                assert!(
                    text.contains(heading),
                    "{} does not say `{heading}`",
                    entry.check.id
                );
            }
        }
    }
}
