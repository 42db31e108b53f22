//! A profile's text, and errors that point into it.

use std::fmt::Write as _;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::ProfileError;

/// One profile file.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// The path as errors name it.
    pub(super) name: String,
    pub(super) text: String,
}

/// Line and column, both from 1; the column counts characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) line: usize,
    pub(super) column: usize,
}

/// What to look for in a text.
#[derive(Clone, Copy, Debug)]
pub(super) enum Find {
    /// The value at the end of the path.
    Value,
    /// The key at the end of the path.
    Key,
    /// The second key of that name, where a mapping has two.
    SecondKey,
}

/// How much of a long line is shown on either side of the fault.
const EXCERPT_CHARS: usize = 60;

impl Source {
    /// Where the value or key at this path (`gpus`, `pcie`, `width`) is written, if it is.
    pub(super) fn locate(&self, path: &[&str], find: Find) -> Option<Position> {
        let seed = Locate { path, find };
        let error = seed
            .deserialize(serde_yaml::Deserializer::from_str(&self.text))
            .err()?;
        if !error.to_string().contains(FOUND) {
            return None;
        }
        let location = error.location()?;
        Some(Position {
            line: location.line(),
            column: location.column(),
        })
    }

    /// Where this text first stands at or after a place.
    pub(super) fn find_after(&self, start: Position, wanted: &str) -> Option<Position> {
        let lines = self
            .text
            .lines()
            .enumerate()
            .skip(start.line.checked_sub(1)?);
        for (index, line) in lines {
            let skipped_chars = if index + 1 == start.line {
                start.column - 1
            } else {
                0
            };
            let skipped_bytes = line
                .char_indices()
                .nth(skipped_chars)
                .map_or(line.len(), |it| it.0);
            if let Some(found) = line[skipped_bytes..].find(wanted) {
                return Some(Position {
                    line: index + 1,
                    column: line[..skipped_bytes + found].chars().count() + 1,
                });
            }
        }
        None
    }

    /// An error that names file, line, column and shows the line with a mark under the fault.
    pub(super) fn error_at(
        &self,
        position: Option<Position>,
        message: &str,
        hint: Option<&str>,
    ) -> ProfileError {
        let message = shortened(message);
        let mut text = match position {
            Some(at) => format!("{}:{}:{}: {message}", self.name, at.line, at.column),
            None => format!("{}: {message}", self.name),
        };
        if let Some(excerpt) = position.and_then(|at| self.excerpt(at)) {
            text.push('\n');
            text.push_str(&excerpt);
        }
        if let Some(hint) = hint {
            text.push('\n');
            text.push_str(hint);
        }
        ProfileError(text)
    }

    /// The line, and below it carets under the word at the column.
    fn excerpt(&self, at: Position) -> Option<String> {
        let line: Vec<char> = self
            .text
            .lines()
            .nth(at.line.checked_sub(1)?)?
            .chars()
            .collect();
        let column = at.column.checked_sub(1)?.min(line.len());
        let from = column.saturating_sub(EXCERPT_CHARS);
        let to = (column + EXCERPT_CHARS).min(line.len());
        let word = line[column..to]
            .iter()
            .take_while(|it| !" \t:,]}#".contains(**it))
            .count();
        let shown: String = line[from..to]
            .iter()
            .map(|it| if it.is_control() { ' ' } else { *it })
            .collect();
        let number = at.line.to_string();
        let margin = " ".repeat(number.len());
        let cut = |yes| if yes { "…" } else { "" };
        let left = cut(from > 0);
        let mut text = format!(" {number} | {left}{shown}{}\n", cut(to < line.len()));
        let indent = " ".repeat(column - from + left.chars().count());
        write!(text, " {margin} | {indent}{}", "^".repeat(word.max(1))).ok()?;
        Some(text)
    }
}

/// A message quotes what it objects to, which may be a whole file in one word.
fn shortened(message: &str) -> String {
    const LIMIT_CHARS: usize = 400;
    if message.chars().count() <= LIMIT_CHARS {
        return message.to_owned();
    }
    message.chars().take(LIMIT_CHARS).chain(['…']).collect()
}

/// The error that stops the search; the YAML library reports the place.
const FOUND: &str = "found the path";

/// Walks down a path and fails on purpose at its end, as only errors carry a location.
#[derive(Clone, Copy)]
struct Locate<'a> {
    path: &'a [&'a str],
    find: Find,
}

impl<'de> DeserializeSeed<'de> for Locate<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.path.is_empty() {
            return deserializer.deserialize_any(FailHere);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Locate<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("anything")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let (wanted, rest) = (self.path[0], &self.path[1..]);
        let mut seen = 0;
        loop {
            let fail_at = match (rest.is_empty(), self.find) {
                (true, Find::Key) => Some(0),
                (true, Find::SecondKey) => Some(1),
                _ => None,
            };
            let key = KeyNamed {
                wanted,
                fail: fail_at == Some(seen),
            };
            let Some(is_wanted) = map.next_key_seed(key)? else {
                return Ok(());
            };
            if !is_wanted {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            seen += 1;
            if fail_at.is_some() {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            map.next_value_seed(Locate { path: rest, ..self })?;
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let wanted: Option<usize> = self.path[0].parse().ok();
        let mut index = 0;
        loop {
            let element = if wanted == Some(index) {
                seq.next_element_seed(Locate {
                    path: &self.path[1..],
                    ..self
                })?
            } else {
                seq.next_element::<IgnoredAny>()?.map(|_| ())
            };
            if element.is_none() {
                return Ok(());
            }
            index += 1;
        }
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// Reads a key; true when it is the wanted one.
struct KeyNamed<'a> {
    wanted: &'a str,
    /// Fail on it instead, to learn its place.
    fail: bool,
}

impl<'de> DeserializeSeed<'de> for KeyNamed<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyNamed<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> Result<bool, E> {
        let is_wanted = key == self.wanted;
        if is_wanted && self.fail {
            return Err(E::custom(FOUND));
        }
        Ok(is_wanted)
    }
}

/// Fails on whatever value comes.
struct FailHere;

impl<'de> Visitor<'de> for FailHere {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(FOUND)
    }

    fn visit_map<A: MapAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(serde::de::Error::custom(FOUND))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> Result<(), A::Error> {
        Err(serde::de::Error::custom(FOUND))
    }
}
