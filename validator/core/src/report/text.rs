//! Makes foreign text safe for the place it is shown in.
//!
//! Device names, kernel log lines and process names are written by others: they may hold terminal
//! control sequences, line breaks, markup, or commands for the service that reads our output.

use std::fmt::Write as _;

use crate::diagnosis::RootCause;
use crate::findings::{GpuSubject, Subject};

/// A root cause on one line:
/// `GPU 0 (0000:53:00.0): Xid 79 (GPU has fallen off the bus); explains 3 further findings`.
pub(crate) fn cause_in_words(cause: &RootCause) -> String {
    const GPUS_NAMED: usize = 4;
    let gpus: Vec<String> = cause.gpus.iter().map(ToString::to_string).collect();
    let place = match gpus.len() {
        0 => String::new(),
        count if count <= GPUS_NAMED => format!("{}: ", gpus.join(", ")),
        count => format!("{}: ", counted(count, "GPU")),
    };
    let consequences = match cause.consequences.len() {
        0 => String::new(),
        count => format!("; explains {}", counted(count, "further finding")),
    };
    one_line(&format!("{place}{}{consequences}", cause_summary(cause)))
}

/// The summary of a root cause without the name of its GPU, which the reports write before it.
pub(crate) fn cause_summary(cause: &RootCause) -> String {
    let [gpu] = cause.gpus.as_slice() else {
        return cause.summary.clone();
    };
    let subject = Subject::Gpu(GpuSubject {
        uuid: gpu.uuid.clone(),
        pci_address: gpu.pci_address.clone(),
        name: None,
    });
    let by_address = gpu.pci_address.as_ref().map(|it| format!("GPU at {it}"));
    [Some(subject.to_string()), by_address]
        .into_iter()
        .flatten()
        .fold(cause.summary.clone(), |summary, name| {
            summary.replace(&format!(" on {name}"), "")
        })
}

/// Keeps what XML 1.0 allows and what does not end a CDATA section; every string of the JUnit
/// report passes through here.
///
/// What XML cannot carry is shown as an escape (`\u{1b}`), so that the reader knows of it.
pub(crate) fn xml(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    for character in text.chars() {
        // Source: XML 1.0 (fifth edition), production 2, Char. A carriage return is allowed but
        // readers normalise it.
        match character {
            hidden if is_invisible(hidden) => escape(&mut kept, hidden),
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
pub fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for character in text.trim().chars() {
        match character {
            '\n' | '\r' | '\t' if line.ends_with(' ') => {}
            '\n' | '\r' | '\t' => line.push(' '),
            hidden if hidden.is_control() || is_invisible(hidden) => escape(&mut line, hidden),
            other => line.push(other),
        }
    }
    // GitHub's runner acts on `::command::` at the start of a line and on `##[command]` anywhere in
    // one.
    if line.starts_with("::") {
        line.insert(0, ' ');
        line.insert(0, '\u{2024}');
    }
    line.replace("##[", "# #[")
}

/// Several lines without anything that a terminal would act on; layout stays.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\t' => shown.push(character),
            hidden if hidden.is_control() || is_invisible(hidden) => escape(&mut shown, hidden),
            other => shown.push(other),
        }
    }
    shown
}

/// JSON with the same values, in which invisible characters and the control characters that JSON
/// permits (RFC 8259 escapes those below U+0020 alone) are written as escapes. They occur only
/// inside of strings.
pub fn visible_json(text: &str) -> String {
    let is_hidden = |it| is_invisible(it) || ('\u{7f}'..='\u{9f}').contains(&it);
    if !text.chars().any(is_hidden) {
        return text.to_owned();
    }
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if is_hidden(character) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Characters that show nothing, or turn the direction of writing: with them a line reads
/// differently from its contents, and two names look the same that are not.
// Source: Unicode 16.0, DerivedCoreProperties.txt, Default_Ignorable_Code_Point; PropList.txt,
// Bidi_Control; and the separators of lines and paragraphs, the interlinear annotation and the
// tags.
fn is_invisible(character: char) -> bool {
    matches!(
        character,
        '\u{ad}'
            | '\u{34f}'
            | '\u{61c}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{feff}'
            | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}'
    )
}

fn escape(into: &mut String, character: char) {
    let _ = write!(into, "\\u{{{:x}}}", u32::from(character));
}

/// Markdown that shows `text` as it is, in a table cell too.
pub fn markdown(text: &str) -> String {
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
            // An underscore inside a word is plain text in GitHub's Markdown; elsewhere it may
            // begin emphasis.
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

/// The text as a sentence begins. The name of a function, a file, a setting or a package before its
/// version stays as it is written.
pub(crate) fn capitalized(text: &str) -> String {
    let mut words = text.split_whitespace();
    let first_word = words.next().unwrap_or_default();
    let is_name = |it: char| it.is_uppercase() || it.is_ascii_digit() || "_/.(=".contains(it);
    let is_version =
        |it: &str| it.contains('.') && it.starts_with(|first: char| first.is_ascii_digit());
    if first_word.contains(is_name) || words.next().is_some_and(is_version) {
        return text.to_owned();
    }
    let mut characters = text.chars();
    characters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(characters).collect()
    })
}

pub(crate) use crate::words::counted;

/// `8 GPUs`, `2 Python environments`, of subjects of one kind.
pub(crate) fn counted_subjects<'s>(subjects: impl IntoIterator<Item = &'s Subject>) -> String {
    let mut subjects = subjects.into_iter().peekable();
    let noun = match subjects.peek() {
        Some(Subject::Environment(_)) => "Python environment",
        _ => "GPU",
    };
    counted(subjects.count(), noun)
}

/// Wraps `text` at `width` columns; every line begins with `indent`, and none with a command (see
/// [`one_line`]).
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

    use super::{capitalized, one_line, printable, visible_json, wrapped, xml};

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
    fn what_shows_nothing_is_shown() {
        for hidden in [
            '\u{200b}',
            '\u{200e}',
            '\u{200f}',
            '\u{61c}',
            '\u{feff}',
            '\u{202e}',
            '\u{2069}',
            '\u{ad}',
            '\u{2060}',
            '\u{3164}',
            '\u{e0041}',
        ] {
            let shown = format!("a\\u{{{:x}}}b", u32::from(hidden));
            let name = format!("a{hidden}b");
            assert_eq!(one_line(&name), shown);
            assert_eq!(xml(&name), shown);
        }
        // Letters, marks and signs stay what they are.
        for seen in ["µ-Gerät", "日本語", "e\u{301}", "…"] {
            assert_eq!(one_line(seen), seen);
        }
    }

    #[test]
    fn json_means_the_same_with_invisible_characters_shown() {
        let value = serde_json::json!({"a\u{200b}": "b\u{e0041}\u{feff}c\\"});
        let text = visible_json(&value.to_string());
        assert!(text.is_ascii(), "{text}");
        let read: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(read, value);
    }

    #[test]
    fn layout_stays_and_nothing_is_acted_on() {
        assert_eq!(
            printable("a\n\t ^\u{1b}[2J\u{200e}"),
            "a\n\t ^\\u{1b}[2J\\u{200e}"
        );
    }

    #[test]
    fn a_sentence_begins_with_a_capital_and_names_stay() {
        assert_eq!(capitalized("the driver is loaded"), "The driver is loaded");
        for name in [
            "nvmlInit_v2 returned an error",
            "cuInit returned 100",
            "persistence_mode is off",
            "/dev/nvidia0 is missing",
            "libcuda.so.1 is missing",
            "cupy 14.2.0 needs CUDA 12",
            "torch 2.11+cu126 does not start",
        ] {
            assert_eq!(capitalized(name), name);
        }
    }

    #[test]
    fn wraps_between_words() {
        assert_eq!(wrapped("aa bb cc", "  ", 7), "  aa bb\n  cc");
    }

    proptest! {
        #[test]
        fn a_line_is_one_line_without_control_characters(text in any::<String>()) {
            let line = one_line(&text);
            prop_assert!(!line.chars().any(|it| it.is_control() || super::is_invisible(it)));
            prop_assert!(!line.trim_start().starts_with("::"));
            prop_assert!(!line.contains("##["));
        }
    }
}
