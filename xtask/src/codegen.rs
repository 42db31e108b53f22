//! `cargo xtask codegen`: writes the list of checks and CHECKS.md from the files in
//! `validator/core/src/checks`.

use std::fmt::Write as _;

use anyhow::{Context as _, bail, ensure};
use xshell::{Shell, cmd};

use crate::workspace;

const FOLDER: &str = "validator/core/src/checks";
const LIST: &str = "validator/core/src/checks/mod.rs";
const DOCUMENT: &str = "CHECKS.md";

/// The sections that every check's documentation has, in this order.
const SECTIONS: [&str; 4] = ["Why", "How it is judged", "What to do", "Source"];

/// The stages in the order in which a run goes through them.
const STAGES: [&str; 3] = ["Host", "Gpu", "Load"];
const JUDGES: [&str; 4] = ["Host", "EachGpu", "EachGpuAmongAll", "EachEnvironment"];
const LEVELS: [&str; 4] = ["Image", "Quick", "Standard", "Extended"];

/// Write validator/core/src/checks/mod.rs and CHECKS.md from the files of the checks
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Write nothing; fail when a generated file is stale
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let checks = read_checks(&shell)?;
    let generated = [
        (LIST, format_rust(&shell, &list(&checks))?),
        (DOCUMENT, document(&checks)),
    ];
    let mut stale = Vec::new();
    for (path, text) in generated {
        if shell.read_file(path).is_ok_and(|old| old == text) {
            continue;
        }
        stale.push(path);
        if !arguments.check {
            shell.write_file(path, text)?;
            println!("wrote {path}");
        }
    }
    if arguments.check && !stale.is_empty() {
        bail!(
            "{} not up to date; run `cargo xtask codegen` and commit the result",
            stale.join(" and ")
        );
    }
    Ok(())
}

/// What is known of a check outside its own file.
#[derive(Debug, PartialEq, Eq)]
struct Check {
    id: String,
    title: String,
    /// Position in [`STAGES`].
    stage: usize,
    /// Position in [`LEVELS`].
    level: usize,
    /// Position in [`JUDGES`].
    judge: usize,
    documentation_url: String,
    /// Title and Markdown of each section.
    sections: Vec<(String, String)>,
}

fn read_checks(shell: &Shell) -> anyhow::Result<Vec<Check>> {
    let mut checks = Vec::new();
    for path in shell.read_dir(FOLDER)? {
        let name = path
            .file_stem()
            .and_then(|name| name.to_str())
            .unwrap_or_default()
            .to_owned();
        if name == "mod" || path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        checks.push(
            parse(&name, &shell.read_file(&path)?)
                .with_context(|| format!("{FOLDER}/{name}.rs"))?,
        );
    }
    ensure!(!checks.is_empty(), "{FOLDER} holds no check");
    checks.sort_by(|a, b| (a.stage, &a.id).cmp(&(b.stage, &b.id)));
    Ok(checks)
}

fn parse(name: &str, text: &str) -> anyhow::Result<Check> {
    let (title, sections) = parse_documentation(text)?;
    let (_, rest) = text
        .split_once("pub(crate) const CHECK: Check = Check {")
        .context("no `pub(crate) const CHECK: Check = Check {`")?;
    let (fields, _) = rest
        .split_once("\n};")
        .context("the end of CHECK (`};` at the start of a line) is missing")?;
    let id = word_after(fields, "id: \"")?;
    ensure!(
        id == name,
        "CHECK says id `{id}`, the file is called `{name}`"
    );
    let judge = word_after(fields, "judge: Judge::")?;
    Ok(Check {
        id,
        title,
        stage: position(&STAGES, &word_after(fields, "stage: Stage::")?)?,
        level: position(&LEVELS, &word_after(fields, "level: Level::")?)?,
        judge: position(&JUDGES, &judge)?,
        documentation_url: quoted_after(fields, "documentation_url:")?,
        sections,
    })
}

fn parse_documentation(text: &str) -> anyhow::Result<(String, Vec<(String, String)>)> {
    let comment = text.lines().map_while(|line| line.strip_prefix("//!"));
    let mut lines = comment.map(|line| line.strip_prefix(' ').unwrap_or(line));
    let title = lines
        .next()
        .context("no `//!` comment at the top")?
        .trim_end_matches('.')
        .to_owned();
    ensure!(
        !title.is_empty(),
        "the first line of the `//!` comment is the title, and it is empty"
    );
    let mut sections: Vec<(String, String)> = Vec::new();
    for line in lines {
        if let Some(name) = line.strip_prefix("## ") {
            sections.push((name.to_owned(), String::new()));
        } else if let Some((_, body)) = sections.last_mut() {
            body.push_str(line);
            body.push('\n');
        } else {
            ensure!(
                line.is_empty(),
                "text before the first section (`## Why`): `{line}`"
            );
        }
    }
    let names: Vec<&str> = sections.iter().map(|(name, _)| name.as_str()).collect();
    ensure!(
        names == SECTIONS,
        "the sections are {names:?}, expected {SECTIONS:?}"
    );
    for (name, body) in &mut sections {
        *body = body.trim().to_owned();
        ensure!(!body.is_empty(), "the section `## {name}` is empty");
    }
    Ok((title, sections))
}

fn word_after(fields: &str, key: &str) -> anyhow::Result<String> {
    let (_, rest) = fields
        .split_once(key)
        .with_context(|| format!("CHECK has no `{key}…`"))?;
    Ok(rest
        .chars()
        .take_while(|c| c.is_alphanumeric() || *c == '_')
        .collect())
}

fn quoted_after(fields: &str, key: &str) -> anyhow::Result<String> {
    let (_, rest) = fields
        .split_once(key)
        .with_context(|| format!("CHECK has no `{key}`"))?;
    let mut parts = rest.splitn(3, '"');
    let value = parts
        .nth(1)
        .with_context(|| format!("`{key}` has no text in quotes"))?;
    Ok(value.to_owned())
}

fn position(known: &[&str], name: &str) -> anyhow::Result<usize> {
    known
        .iter()
        .position(|it| *it == name)
        .with_context(|| format!("`{name}` is none of {known:?}"))
}

fn list(checks: &[Check]) -> String {
    let mut text = "//! Every check, one file each.
//!
//! GENERATED by `cargo xtask codegen` from the files of this folder: do not edit. The types are in
//! `check.rs` above.

"
    .to_owned();
    let mut ids: Vec<&str> = checks.iter().map(|check| check.id.as_str()).collect();
    ids.sort_unstable();
    for id in ids {
        let _ = writeln!(text, "mod {id};");
    }
    text.push_str(
        "
use crate::check::Entry;

/// The `//!` lines of a check's file, as `build.rs` copied them: the rest of the text would only
/// make the binary large.
macro_rules! documentation {
    ($id:literal) => {
        include_str!(concat!(env!(\"OUT_DIR\"), \"/checks/\", $id, \".txt\"))
    };
}

/// All checks, in the order in which reports list them: by stage, then by id.
pub static ALL: &[Entry] = &[
",
    );
    for Check { id, .. } in checks {
        let _ = writeln!(
            text,
            "Entry {{ check: &{id}::CHECK, file_name: \"{id}\", documentation: documentation!(\"{id}\") }},"
        );
    }
    text.push_str("];\n");
    text
}

/// The repository's own style, so that `cargo fmt --check` and `codegen --check` agree.
fn format_rust(shell: &Shell, text: &str) -> anyhow::Result<String> {
    let config = workspace::root().join("rustfmt.toml");
    let formatted = cmd!(
        shell,
        "rustfmt --edition 2024 --config-path {config} --emit stdout"
    )
    .stdin(text)
    .quiet()
    .read()
    .context("rustfmt could not be run; `rustup component add rustfmt` installs it")?;
    Ok(formatted + "\n")
}

fn document(checks: &[Check]) -> String {
    let mut text = "# Checks

<!-- GENERATED by `cargo xtask codegen` from validator/core/src/checks: do not edit. -->

Every check that `gpu-validator` makes, in the order in which reports list them. `gpu-validator checks explain <id>` prints the
same on the machine.

| id | title | stage | level | subject |
|---|---|---|---|---|
"
    .to_owned();
    for check in checks {
        let _ = writeln!(
            text,
            "| [{0}](#{0}) | {1} | {2} | {3} | {4} |",
            check.id,
            check.title.replace('|', "\\|"),
            STAGES[check.stage].to_lowercase(),
            LEVELS[check.level].to_lowercase(),
            subject(check),
        );
    }
    for check in checks {
        let _ = write!(text, "\n## {}\n\n**{}.**\n", check.id, check.title);
        for (name, body) in &check.sections {
            let _ = write!(text, "\n### {name}\n\n{body}\n");
        }
        // A check without a public page of its own has this section, which needs no link to itself.
        let documentation = if check.documentation_url.starts_with("https://") {
            format!("Documentation: <{}> · ", check.documentation_url)
        } else {
            String::new()
        };
        let _ = write!(
            text,
            "\n{documentation}[source](validator/core/src/checks/{}.rs)\n",
            check.id
        );
    }
    text
}

fn subject(check: &Check) -> &'static str {
    ["host", "each GPU", "each GPU", "each Python environment"][check.judge]
}

#[cfg(test)]
mod tests {
    use super::{document, list, parse};

    const FILE: &str = r#"//! Power limit is the wanted one.
//!
//! ## Why
//! Less power, less work.
//!
//! ## How it is judged
//! - by `x`
//!   - and `y`
//!
//! ## What to do
//! Set it.
//!
//! ## Source
//! NVML

use crate::check::{Check, Judge};

pub(crate) const CHECK: Check = Check {
    id: "power_limit",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/",
};
"#;

    #[test]
    fn a_check_is_read_from_its_file() {
        let check = parse("power_limit", FILE).expect("a well-formed check");
        assert_eq!(
            (check.title.as_str(), check.stage, check.level, check.judge),
            ("Power limit is the wanted one", 1, 1, 1)
        );
        assert_eq!(check.sections[1].1, "- by `x`\n  - and `y`");
        let document = document(std::slice::from_ref(&check));
        assert!(document.contains("| [power_limit](#power_limit) | Power limit is the wanted one | gpu | quick | each GPU |"));
        assert!(document.contains("\n## power_limit\n\n**Power limit is the wanted one.**\n\n### Why\n\nLess power, less work.\n"));
        assert!(list(&[check]).contains("check: &power_limit::CHECK, file_name: \"power_limit\""));
    }

    #[test]
    fn a_file_that_says_too_little_is_refused() {
        let refused = |name: &str, text: &str| {
            format!("{:#}", parse(name, text).expect_err("must be refused"))
        };
        assert!(refused("power", FILE).contains("the file is called `power`"));
        assert!(refused("power_limit", &FILE.replace("//! ## Source\n", "")).contains("expected"));
        assert!(
            refused(
                "power_limit",
                &FILE.replace("//! Less power, less work.\n", "")
            )
            .contains("`## Why` is empty")
        );
        assert!(
            refused("power_limit", &FILE.replace("Stage::Gpu", "Stage::Cloud"))
                .contains("`Cloud` is none of")
        );
        assert!(
            refused("power_limit", &FILE.replace("const CHECK", "const OTHER"))
                .contains("no `pub(crate) const CHECK")
        );
    }
}
