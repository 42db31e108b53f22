//! Reads profiles: YAML, `extends`, and errors that name file, line and field.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Profile;
use super::contradictions::{refuse_contradictions, refuse_impossible_values};
use super::error::ProfileError;
use super::merge::merge;
use super::source::{Find, Position, Source};
use crate::nearest_name::nearest_name_hint;

/// The largest profile, in bytes. A profile is a page of text.
pub const SIZE_LIMIT_BYTES: usize = 256 * 1024;

/// No profile nests deeper than its schema (five); the YAML library takes quadratic time for deep
/// brackets.
const NESTING_LIMIT: usize = 32;

/// Where profiles come from: [`load`] itself does no IO.
pub trait ProfileFiles {
    /// The text of the profile at `path`; the error names the path.
    fn read(&self, path: &Path) -> Result<String, String>;

    /// Whether both paths name the same file.
    fn is_same(&self, one: &Path, other: &Path) -> bool;
}

/// How many files a profile may extend one through the other.
const EXTENDS_LIMIT: usize = 3;

/// Reads a profile file and those that it extends.
///
/// `extends` names a file relative to its own, at most three of them one through the other. The
/// extending file's scalars override, its mappings merge key by key and its lists replace; `null`
/// clears a value. Name and description are not inherited.
///
/// `known_checks` are the ids that `checks:` may name.
pub fn load(
    path: &Path,
    files: &dyn ProfileFiles,
    known_checks: &[&str],
) -> Result<Profile, ProfileError> {
    let read = |path: &Path| {
        Ok(Source {
            name: path.display().to_string(),
            text: files.read(path)?,
        })
    };
    let mut sources = vec![read(path).map_err(ProfileError)?];
    let mut profiles = vec![parse_one(&sources[0], known_checks)?];
    let mut paths = vec![path.to_owned()];
    while let Some(extends) = profiles.last().and_then(|it| it.extends.clone()) {
        let source = &sources[sources.len() - 1];
        let refuse = |message: &str| {
            source.error_at(source.locate(&["extends"], Find::Value), message, None)
        };
        let base = beside(&paths[paths.len() - 1], &extends);
        if paths
            .iter()
            .any(|it| it == &base || files.is_same(it, &base))
        {
            return Err(refuse(&format!(
                "{} extends itself in a circle",
                base.display()
            )));
        }
        if paths.len() > EXTENDS_LIMIT {
            return Err(refuse(&format!(
                "profiles extend each other no more than {EXTENDS_LIMIT} deep"
            )));
        }
        let base_source = read(&base).map_err(|error| refuse(&error))?;
        profiles.push(parse_one(&base_source, known_checks)?);
        sources.push(base_source);
        paths.push(base);
    }
    let profile = resolve(&sources, profiles)?;
    refuse_contradictions(&profile, &sources)?;
    Ok(profile)
}

/// Parses one profile's text; `name` stands for the file in errors. `extends` is left as it is, and
/// contradictions are looked for only without it, since the file that it names may resolve them.
pub fn parse(text: &str, name: &str, known_checks: &[&str]) -> Result<Profile, ProfileError> {
    let source = Source {
        name: name.to_owned(),
        text: text.to_owned(),
    };
    let profile = parse_one(&source, known_checks)?;
    if profile.extends.is_none() {
        refuse_contradictions(&profile, &[source])?;
    }
    Ok(profile)
}

/// `extends` as the file at `path` means it.
fn beside(path: &Path, extends: &str) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(extends)
}

pub fn too_large(name: &str) -> String {
    format!(
        "{name}: the profile is larger than {} KiB",
        SIZE_LIMIT_BYTES / 1024
    )
}

/// Parses one file on its own: every key known, every type right, no key twice, no value that can
/// never hold.
fn parse_one(source: &Source, known_checks: &[&str]) -> Result<Profile, ProfileError> {
    if source.text.len() > SIZE_LIMIT_BYTES {
        return Err(ProfileError(too_large(&source.name)));
    }
    refuse_nesting(source)?;
    let profile: Profile =
        serde_yaml::from_str(&source.text).map_err(|error| explain(source, &error))?;
    // The typed parse overlooks a key that is twice in a free mapping (`checks`, `services`).
    written(source)?;
    refuse_impossible_values(&profile, source, known_checks)?;
    Ok(profile)
}

/// The keys that the file has.
fn written(source: &Source) -> Result<serde_yaml::Value, ProfileError> {
    serde_yaml::from_str(&source.text).map_err(|error| explain(source, &error))
}

fn refuse_nesting(source: &Source) -> Result<(), ProfileError> {
    let mut depth = 0_usize;
    for (line_index, line) in source.text.lines().enumerate() {
        if line.trim_start().starts_with('#') {
            continue;
        }
        for (column_index, character) in line.chars().enumerate() {
            match character {
                '[' | '{' => depth += 1,
                ']' | '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > NESTING_LIMIT {
                let position = Position {
                    line: line_index + 1,
                    column: column_index + 1,
                };
                let message = format!("brackets are nested deeper than {NESTING_LIMIT}");
                return Err(source.error_at(Some(position), &message, None));
            }
        }
    }
    Ok(())
}

/// Lays the profiles over each other; the first is the requested one.
fn resolve(sources: &[Source], profiles: Vec<Profile>) -> Result<Profile, ProfileError> {
    let cannot = |error: serde_json::Error| {
        ProfileError(format!(
            "{}: cannot resolve `extends`: {error}",
            sources[0].name
        ))
    };
    let mut resolved = Value::Null;
    for (source, profile) in sources.iter().zip(profiles).rev() {
        let value = serde_json::to_value(profile).map_err(cannot)?;
        resolved = if resolved.is_null() {
            value
        } else {
            merge(resolved, &value, &written(source)?)
        };
    }
    let mut profile: Profile = serde_json::from_value(resolved).map_err(cannot)?;
    profile.extends = None;
    Ok(profile)
}

/// Turns the YAML library's error into ours: where, what, and what was probably meant.
fn explain(source: &Source, error: &serde_yaml::Error) -> ProfileError {
    let text = error.to_string();
    // The library ends its text with the place, which ours begins with.
    let text = text.rfind(" at line ").map_or(text.as_str(), |end| {
        let place = &text[end + " at line ".len()..];
        let is_place = place
            .chars()
            .all(|it| it.is_ascii_digit() || " column".contains(it));
        if is_place { &text[..end] } else { &text }
    });
    let (field, problem) = split_path(text);
    let quoted = quoted(problem);
    let mut position = error.location().map(|it| Position {
        line: it.line(),
        column: it.column(),
    });
    if problem.starts_with("duplicate ") {
        let key = quoted.first().copied().unwrap_or_default();
        let path: Vec<&str> = field
            .split('.')
            .filter(|it| !it.is_empty())
            .chain([key])
            .collect();
        position = source.locate(&path, Find::SecondKey).or(position);
    }
    // The library places what a value's own parser refuses at the section around it.
    if let (Some(refused), Some(section)) = (quoted.first(), position)
        && problem.starts_with('`')
    {
        position = source.find_after(section, refused).or(position);
    }
    let place = if field.is_empty() {
        String::new()
    } else {
        format!(" in `{field}`")
    };
    let unknown = [("unknown field ", "key"), ("unknown variant ", "value")]
        .into_iter()
        .find(|(prefix, _)| problem.starts_with(prefix));
    if let (Some((_, kind)), Some((offending, valid))) = (unknown, quoted.split_first()) {
        let hint = nearest_name_hint(offending, valid.iter().copied());
        return source.error_at(
            position,
            &format!("unknown {kind} `{offending}`{place}"),
            Some(&hint),
        );
    }
    source.error_at(position, &format!("{}{place}", in_words(problem)), None)
}

/// Splits `gpus.pcie: unknown field …` into the path and the problem.
fn split_path(text: &str) -> (&str, &str) {
    match text.split_once(": ") {
        Some((path, problem)) if !path.contains([' ', '`', '"']) => (path, problem),
        _ => ("", text),
    }
}

/// The names between backticks, or between quotation marks where there are none.
fn quoted(text: &str) -> Vec<&str> {
    let mark = if text.contains('`') { '`' } else { '"' };
    text.split(mark).skip(1).step_by(2).collect()
}

/// Rewords the library's errors for users.
fn in_words(problem: &str) -> String {
    let mut text = problem.to_owned();
    for (theirs, ours) in [
        (
            "expected struct CheckSetting",
            "expected `severity` and `reason`",
        ),
        (
            "expected struct Profile",
            "expected a mapping of keys to values",
        ),
        ("expected u8", "expected a whole number"),
        ("expected u32", "expected a whole number"),
        ("expected u64", "expected a whole number"),
        ("expected i32", "expected a whole number"),
        ("expected f64", "expected a number"),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected a mapping of keys to values"),
        ("expected a boolean", "expected true or false"),
        ("missing field", "missing key"),
        ("duplicate field", "the key is there twice:"),
        ("duplicate entry with key", "the key is there twice:"),
        ("unit value", "nothing"),
        ("invalid type: sequence", "invalid type: list"),
        ("recursion limit exceeded", "values are nested too deeply"),
        (
            "deserializing from YAML containing more than one document is not supported",
            "the file holds more than one YAML document",
        ),
    ] {
        text = text.replace(theirs, ours);
    }
    // What is left of Rust's type names are sections.
    match text.split_once("expected struct ") {
        Some((before, _)) => format!("{before}expected a mapping of keys to values"),
        None => text,
    }
}

#[cfg(test)]
mod tests;
