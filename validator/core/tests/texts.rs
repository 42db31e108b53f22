//! The texts that users see are written as NVIDIA's and Kubernetes' documentation is, and hold no
//! placeholder. The help of the subcommands is covered in `validator/src/cli.rs`.

use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use validator_core::check::title;

/// Words that give programs a voice or hide the subject. A text with one of them is rewritten:
/// programs report, return, request and read.
const AVOIDED: &str = include_str!("avoided_words.txt");

fn avoided_word(text: &str) -> Option<&str> {
    text.split(|it: char| !it.is_alphanumeric())
        .find(|word| AVOIDED.lines().any(|it| it.eq_ignore_ascii_case(word)))
}

#[test]
fn titles_and_documentation_of_checks_are_in_standard_terms() {
    for entry in validator_core::CHECKS {
        let (id, title) = (entry.check.id, title(entry));
        assert_eq!(
            title.split(' ').find(|it| *it == "what"),
            None,
            "{id}: {title}"
        );
        assert!(title.len() <= 100, "{id}: a title is one line");
        for line in entry.documentation.lines() {
            assert_eq!(avoided_word(line), None, "{id}: {line}");
        }
    }
}

#[test]
fn messages_are_in_standard_terms() {
    let mut found = Vec::new();
    let mut messages = 0;
    for file in sources() {
        let text = std::fs::read_to_string(&file).expect("a source");
        let tokens: TokenStream = text.parse().expect("tokens");
        for message in messages_of(tokens) {
            messages += 1;
            if let Some(word) = avoided_word(&message) {
                found.push(format!("{}: `{word}` in {message}", file.display()));
            }
            if let Some(placeholder) = placeholder(&message) {
                found.push(format!("{}: <{placeholder}> in {message}", file.display()));
            }
        }
    }
    assert!(messages > 2000, "{messages} messages are not all");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn avoided_words_and_placeholders_are_found_outside_tests() {
    let source = r##"
        fn f() { fail(format!("it {says} that\n", 1), "asks"); error("<CARGO_PKG_NAME> of"); }
        #[expect(dead_code, reason = "nobody calls it")]
        #[cfg(test)] mod tests { const TEXT: &str = "somebody is here"; }
        const NEXT: &str = r#"look at it"#;
    "##;
    let messages = messages_of(source.parse().expect("tokens"));
    assert_eq!(messages, ["it  that ", "<CARGO_PKG_NAME> of", "look at it"]);
    let avoided: Vec<_> = messages.iter().map(|it| avoided_word(it)).collect();
    assert_eq!(avoided, [None, None, Some("look")]);
    assert_eq!(placeholder(&messages[1]), Some("CARGO_PKG_NAME"));
}

#[test]
fn reports_are_in_standard_terms() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let files = files_below(&folder);
    assert!(files.len() > 10, "{files:?}");
    for file in files {
        let text = std::fs::read_to_string(&file).expect("text");
        for line in text.lines() {
            assert_eq!(avoided_word(line), None, "{}: {line}", file.display());
            let words = line.split(|it: char| !it.is_alphanumeric());
            for word in words.filter(|it| *it != "CuPy") {
                assert!(!is_capitalized_function(word), "{}: {word}", file.display());
            }
        }
    }
}

/// `NvmlInit`, `CuInit`: the name of a function changed as the first word of a sentence.
fn is_capitalized_function(word: &str) -> bool {
    ["Nvml", "Cu"].iter().any(|prefix| {
        let rest = word.strip_prefix(prefix);
        rest.is_some_and(|it| it.starts_with(|first: char| first.is_ascii_uppercase()))
    })
}

#[test]
fn links_lead_to_the_check_that_they_name() {
    for entry in validator_core::CHECKS {
        let (id, url) = (entry.check.id, entry.check.documentation_url);
        assert!(url.starts_with("https://"), "{id}: {url}");
        assert!(!entry.documentation.contains("CARGO_"), "{id}");
    }
    for (number, line) in checks_md().lines().enumerate() {
        let mut links = line.split("](#").collect::<Vec<_>>().into_iter().peekable();
        while let (Some(before), Some(after)) = (links.next(), links.peek()) {
            let name = before.rsplit('[').next().unwrap_or_default();
            let target = after.split(')').next().unwrap_or_default();
            assert_eq!(name.trim_matches('`'), target, "CHECKS.md:{}", number + 1);
        }
        assert_eq!(placeholder(line), None, "CHECKS.md:{}", number + 1);
    }
}

fn checks_md() -> String {
    let checks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../CHECKS.md");
    std::fs::read_to_string(checks).expect("CHECKS.md")
}

/// `<CARGO_PKG_REPOSITORY>`.
fn placeholder(text: &str) -> Option<&str> {
    let mut brackets = text
        .split('<')
        .skip(1)
        .filter_map(|it| it.split('>').next());
    brackets.find(|it| {
        it.contains('_') && !it.contains(|it: char| !it.is_ascii_uppercase() && it != '_')
    })
}

/// The sources of the validator outside tests.
fn sources() -> Vec<PathBuf> {
    let core = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [
        core.join("src"),
        core.join("../src"),
        core.join("../remote/src"),
    ];
    let mut files: Vec<PathBuf> = folders.iter().flat_map(|it| files_below(it)).collect();
    files.retain(|it| {
        let name = it
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let is_test = name == "tests" || name.ends_with("_tests");
        it.extension().is_some_and(|it| it == "rs") && !is_test
    });
    files
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files
}

/// String literals of more than one word outside attributes and tests, without their placeholders.
fn messages_of(tokens: TokenStream) -> Vec<String> {
    let mut messages = Vec::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '#' => {
                let _inner = tokens.next_if(|it| it.to_string() == "!");
                let attribute = tokens.next().map_or_else(String::new, |it| it.to_string());
                if attribute.replace(' ', "") == "[cfg(test)]" {
                    let is_end = |it: &TokenTree| match it {
                        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                        other => other.to_string() == ";",
                    };
                    tokens.find(is_end);
                }
            }
            TokenTree::Group(group) => messages.extend(messages_of(group.stream())),
            TokenTree::Literal(literal) => {
                let text = message(&literal.to_string());
                messages.extend(text.filter(|it| it.trim().contains(' ')));
            }
            TokenTree::Punct(_) | TokenTree::Ident(_) => {}
        }
    }
    messages
}

/// The text of a string literal without escapes and placeholders; `None` for other literals.
fn message(literal: &str) -> Option<String> {
    let quoted = literal.trim_start_matches('r').trim_matches('#');
    let text = quoted.strip_prefix('"')?.strip_suffix('"')?;
    let mut message = String::new();
    let mut depth = 0_u32;
    let mut characters = text
        .replace("\\n", " ")
        .chars()
        .collect::<Vec<_>>()
        .into_iter();
    while let Some(character) = characters.next() {
        match character {
            '\\' => message.extend(characters.next().filter(|it| !it.is_whitespace())),
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            other if depth == 0 => message.push(other),
            _ => {}
        }
    }
    Some(message)
}
