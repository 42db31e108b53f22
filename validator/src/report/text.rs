//! Makes foreign text safe for the place it is shown in.
//!
//! Device names, kernel log lines and process names are written by others: they may hold terminal control sequences,
//! line breaks, markup, or commands for the service that reads our output.

use std::fmt::Write as _;

/// Keeps what XML 1.0 allows and what does not end a CDATA section; every string of the JUnit report passes through here.
///
/// What XML cannot carry is shown as an escape (`\u{1b}`), so that the reader knows of it.
pub(crate) fn xml(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for character in text.chars() {
        // Source: XML 1.0 (fifth edition), production 2, Char. A carriage return is allowed but readers normalise it.
        match character {
            '\t' | '\n' | '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'.. => {
                kept.push(character);
            }
            other => escape(&mut kept, other),
        }
        if kept.ends_with("]]>") {
            kept.truncate(kept.len() - 1);
            kept.push_str(" >");
        }
    }
    kept
}

/// One line without anything that a terminal or a CI service would act on.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.trim().chars() {
        match character {
            '\n' | '\r' | '\t' if line.ends_with(' ') => {}
            '\n' | '\r' | '\t' => line.push(' '),
            // Marks that turn the direction of writing make a line read as something else than it says.
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{2028}' | '\u{2029}' => {
                escape(&mut line, character);
            }
            control if control.is_control() => escape(&mut line, control),
            other => line.push(other),
        }
    }
    // GitHub's runner acts on `::command::` at the start of a line and on `##[command]` anywhere in one.
    if line.starts_with("::") {
        line.insert(0, ' ');
        line.insert(0, '\u{2024}');
    }
    line.replace("##[", "# #[")
}

fn escape(into: &mut String, character: char) {
    let _ = write!(into, "\\u{{{:x}}}", u32::from(character));
}

/// Markdown that shows `text` as it is, in a table cell too.
pub(crate) fn markdown(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in one_line(text).chars() {
        match character {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '|' => escaped.push_str("&#124;"),
            '\\' | '`' | '*' | '[' | ']' | '~' | '#' | '!' => {
                escaped.push('\\');
                escaped.push(character);
            }
            // An underscore inside a word is plain text in GitHub's Markdown; elsewhere it may begin emphasis.
            '_' if !escaped.ends_with(|before: char| before.is_ascii_alphanumeric()) => {
                escaped.push_str("\\_");
            }
            // Keeps GitHub from notifying people and from linking issues.
            '@' => escaped.push_str("&#64;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// The text as a sentence begins.
pub(crate) fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    characters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(characters).collect()
    })
}

/// Whether `count` things are one or many: `1 check`, `2 checks`.
pub(crate) fn counted(count: usize, thing: &str) -> String {
    if count == 1 {
        format!("1 {thing}")
    } else {
        format!("{count} {thing}s")
    }
}

/// Wraps `text` at `width` columns; every line begins with `indent`, and none with a command (see [`one_line`]).
pub(crate) fn wrapped(text: &str, indent: &str, width: usize) -> String {
    let mut lines = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        let too_long = column + 1 + length > width;
        if column == 0 || (too_long && !word.starts_with("::")) {
            if column > 0 {
                lines.push('\n');
            }
            lines.push_str(indent);
            column = indent.len();
        } else {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{one_line, wrapped, xml};

    #[test]
    fn xml_shows_what_it_cannot_carry() {
        assert_eq!(
            xml("\u{1b}[31mred\0 ]]> \u{ffff}"),
            "\\u{1b}[31mred\\u{0} ]] > \\u{ffff}"
        );
        assert_eq!(xml("tab\t and\nline"), "tab\t and\nline");
    }

    #[test]
    fn a_line_holds_no_command() {
        assert_eq!(one_line("::error::x"), "\u{2024} ::error::x");
        assert_eq!(one_line("a\n::error::x"), "a ::error::x");
        assert_eq!(one_line("a ##[error]x"), "a # #[error]x");
        assert_eq!(one_line("\u{1b}]0;title\u{7}"), "\\u{1b}]0;title\\u{7}");
        assert_eq!(one_line("\u{202e}gnp"), "\\u{202e}gnp");
    }

    #[test]
    fn wraps_between_words() {
        assert_eq!(wrapped("aa bb cc", "  ", 7), "  aa bb\n  cc");
    }

    proptest! {
        #[test]
        fn a_line_is_one_line_without_control_characters(text in any::<String>()) {
            let line = one_line(&text);
            prop_assert!(!line.chars().any(char::is_control));
            prop_assert!(!line.trim_start().starts_with("::"));
            prop_assert!(!line.contains("##["));
        }
    }
}
