//! `cargo xtask import-circles`: fails where modules of a crate import each other in a circle,
//! outside tests.
//!
//! Circles that the tree still has are listed tie by tie in `xtask/import-circles.txt`. The list
//! can only shrink: a tie that is in a circle and not listed is an error, and so is a listed one
//! that is part of no circle any more.

mod graph;
mod source;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::bail;
use graph::{Circle, Tie, Ties};
use source::Crate;
use xshell::Shell;

use crate::{packages, workspace};

const LIST: &str = "xtask/import-circles.txt";

/// Fail on circles of imports between modules that xtask/import-circles.txt does not list
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Remove the listed ties that are part of no circle any more; adds nothing
    #[arg(long)]
    shrink: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let crates = read_crates(&shell)?;
    let list = shell.read_file(LIST)?;
    let compared = compare(&crates, &list);
    if arguments.shrink {
        shell.write_file(LIST, &compared.still_listed)?;
    }
    let mut errors = compared.unlisted;
    if !arguments.shrink {
        errors.extend(compared.stale);
    }
    if !errors.is_empty() {
        bail!("imports:\n{}", errors.join("\n"));
    }
    println!(
        "{} modules of {} crates; {} ties in listed circles",
        crates.iter().map(|it| it.modules).sum::<usize>(),
        crates.len(),
        compared
            .still_listed
            .lines()
            .filter(|it| is_tie(it))
            .count()
    );
    Ok(())
}

/// A library or program of the workspace.
#[derive(Debug)]
struct Read {
    name: String,
    modules: usize,
    ties: Ties,
}

fn read_crates(shell: &Shell) -> anyhow::Result<Vec<Read>> {
    let mut crates = Vec::new();
    let packages = packages::of_workspace(shell)?;
    for target in packages.iter().flat_map(|it| &it.targets) {
        // Tests, benchmarks and build scripts are left out.
        if ["test", "bench", "example", "custom-build"]
            .iter()
            .any(|it| target.is(it))
        {
            continue;
        }
        let modules = Crate::read(&workspace::root(), &target.file)?;
        // A program may have the name of the library that it starts.
        let kind = if target.is("bin") { " (program)" } else { "" };
        crates.push(Read {
            name: format!("{}{kind}", target.name),
            modules: modules.len(),
            ties: Ties::of(modules.imports()),
        });
    }
    Ok(crates)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Compared {
    /// A text for each circle that is not listed.
    unlisted: Vec<String>,
    /// A text for each line of the list that names no tie of a circle.
    stale: Vec<String>,
    /// The list without these lines.
    still_listed: String,
}

fn compare(crates: &[Read], list: &str) -> Compared {
    let listed: BTreeSet<&str> = list
        .lines()
        .filter(|it| is_tie(it))
        .map(str::trim)
        .collect();
    let mut compared = Compared::default();
    let mut there = BTreeSet::new();
    for Read { name, ties, .. } in crates {
        let mut circles = Vec::new();
        for (tie, circle) in ties.circles() {
            let line = line_of(name, &tie);
            if !listed.contains(&*line) {
                circles.push(circle);
            }
            there.insert(line);
        }
        // Short ones first, and none that shares a tie with one that is shown: a circle makes many
        // others.
        circles.sort_by_key(Vec::len);
        let mut shown = BTreeSet::new();
        for circle in circles {
            if circle.iter().all(|tie| !shown.contains(tie)) {
                compared.unlisted.push(described(name, &circle, &listed));
                shown.extend(circle);
            }
        }
    }
    for (line, number) in list.lines().zip(1..) {
        if is_tie(line) && !there.contains(line.trim()) {
            compared.stale.push(format!(
                "{LIST}:{number}: `{}` is part of no circle any more; `cargo xtask import-circles --shrink` removes the line",
                line.trim()
            ));
        } else {
            let _ = writeln!(compared.still_listed, "{line}");
        }
    }
    compared
}

fn is_tie(line: &str) -> bool {
    !line.trim().is_empty() && !line.starts_with('#')
}

/// `validator: facts::gpu -> facts::reading`, as the list has it.
fn line_of(name: &str, tie: &Tie<'_>) -> String {
    format!("{name}: {} -> {}", tie.from.join("::"), tie.to.join("::"))
}

fn described(name: &str, circle: &Circle<'_>, listed: &BTreeSet<&str>) -> String {
    let mut text = String::from("a circle of imports:");
    for tie in circle {
        let import = tie.import;
        let line = line_of(name, tie);
        let known = if listed.contains(&*line) {
            " (listed)"
        } else {
            ""
        };
        let _ = write!(
            text,
            "\n  {}:{}: {line}{known}",
            import.file.display(),
            import.line
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Compared, Crate, Read, Ties, compare};

    /// A crate of these files, `lib.rs` first.
    fn read(files: &[(&str, &str)]) -> Read {
        let shell = xshell::Shell::new().expect("a shell");
        let folder = shell.create_temp_dir().expect("a folder");
        for (name, text) in files {
            shell
                .write_file(folder.path().join(name), text)
                .expect("a file");
        }
        let modules = Crate::read(folder.path(), Path::new(files[0].0)).expect("a crate");
        Read {
            name: "x".to_owned(),
            modules: modules.len(),
            ties: Ties::of(modules.imports()),
        }
    }

    fn compared(files: &[(&str, &str)], list: &str) -> Compared {
        compare(&[read(files)], list)
    }

    #[test]
    fn a_crate_without_a_circle_has_nothing_to_report() {
        let files = [
            (
                "lib.rs",
                "mod a; mod b; pub mod c { pub fn f() { super::a::f() } }",
            ),
            ("a.rs", "use crate::b::B; use other::c::C; pub fn f() {}"),
            (
                "b.rs",
                "pub struct B; #[cfg(test)] mod tests { use crate::a::f; }",
            ),
        ];
        assert_eq!(read(&files).modules, 4);
        assert_eq!(compared(&files, ""), Compared::default());
    }

    #[test]
    fn a_circle_is_reported_once_with_every_file_and_line() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "\nuse crate::{b::B, d};"),
            ("b/mod.rs", "mod deep;\npub struct B;"),
            ("b/deep.rs", "fn f() {\n\n  vec![crate::c::C::new()];\n}"),
            ("c.rs", "pub use super::a::A as C;"),
        ];
        let found = compared(&files, "");
        assert_eq!(
            found.unlisted,
            [concat!(
                "a circle of imports:",
                "\n  a.rs:2: x: a -> b",
                "\n  b/deep.rs:3: x: b -> c",
                "\n  c.rs:1: x: c -> a"
            )]
        );
    }

    #[test]
    fn siblings_inside_a_module_are_a_level_of_their_own() {
        let files = [(
            "lib.rs",
            "mod a { pub mod one { use super::two::T; } pub mod two { use crate::a::one; pub struct T; } }",
        )];
        let found = compared(&files, "");
        assert_eq!(
            found.unlisted,
            [
                "a circle of imports:\n  lib.rs:1: x: a::one -> a::two\n  lib.rs:1: x: a::two -> a::one"
            ]
        );
        // A parent and its child are one unit.
        let files = [(
            "lib.rs",
            "mod a { pub mod one { use super::S; } use one::O; pub struct S; }",
        )];
        assert_eq!(compared(&files, ""), Compared::default());
    }

    #[test]
    fn a_reexport_hides_no_circle() {
        for facade in ["pub use b::B;", "pub use b::*;", "pub use self::b::B as B;"] {
            let root = format!("mod a; mod b; {facade}");
            let files = [
                ("lib.rs", &*root),
                ("a.rs", "use crate::B; pub struct A;"),
                ("b.rs", "use super::a::A; pub struct B;"),
            ];
            let found = compared(&files, "");
            assert_eq!(found.unlisted.len(), 1, "{facade}: {found:?}");
        }
    }

    #[test]
    fn what_only_tests_and_other_crates_import_is_no_tie() {
        for text in [
            "#[cfg(test)] use crate::a::A; pub struct B;",
            "#[cfg(test)] #[derive(Debug)] const X: A = A { a: crate::a::A }; pub struct B;",
            "#[cfg(all(test, unix))] fn f() { crate::a::A; } pub struct B;",
            "use ::a::A; pub struct B;",
            "use z::a::A; fn f() { a::b() } pub struct B;",
            "// use crate::a::A;\npub struct B; const S: &str = \"crate::a::A\";",
        ] {
            let files = [
                ("lib.rs", "mod a; mod b;"),
                ("a.rs", "use crate::b::B; pub struct A;"),
                ("b.rs", text),
            ];
            assert_eq!(compared(&files, ""), Compared::default(), "{text}");
        }
    }

    #[test]
    fn what_comes_after_a_test_counts_again() {
        for before in [
            "#[cfg(test)] use crate::c::C;",
            "#[cfg(test)] const X: A = A { a: 1 };",
            "#[cfg(test)] mod tests { }",
            "#[cfg(not(test))] fn f() {}",
            "struct S { #[cfg(test)] a: u8, b: u8 }",
        ] {
            let text = format!("{before} fn g(a: crate::a::A) {{}} pub struct B;");
            let files = [
                ("lib.rs", "mod a; mod b;"),
                ("a.rs", "use crate::b::B; pub struct A;"),
                ("b.rs", &*text),
            ];
            assert_eq!(compared(&files, "").unlisted.len(), 1, "{before}");
        }
    }

    #[test]
    fn a_listed_circle_passes_and_a_line_without_one_is_an_error() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b; use crate::c;"),
            ("b.rs", "use crate::a;"),
            ("c.rs", ""),
        ];
        let list = "# why\nx: a -> b\nx: b -> a\n";
        let listed = Compared {
            still_listed: list.to_owned(),
            ..Compared::default()
        };
        assert_eq!(compared(&files, list), listed);
        let found = compared(&files, &format!("{list}x: a -> c\n"));
        assert_eq!(found.still_listed, list);
        assert!(found.unlisted.is_empty());
        let [stale] = &found.stale[..] else {
            panic!("{found:?}");
        };
        assert!(
            stale.starts_with("xtask/import-circles.txt:4: `x: a -> c` is part of no circle"),
            "{stale}"
        );
        // A tie that closes another circle among listed modules.
        let closed = compared(
            &[files[0], files[1], files[2], ("c.rs", "use crate::a::A;")],
            list,
        );
        let ["a circle of imports:\n  a.rs:1: x: a -> c\n  c.rs:1: x: c -> a"] = &closed
            .unlisted
            .iter()
            .map(String::as_str)
            .collect::<Vec<_>>()[..]
        else {
            panic!("{closed:?}");
        };
    }

    #[test]
    fn modules_without_a_file_and_text_that_is_no_rust_are_errors() {
        let shell = xshell::Shell::new().expect("a shell");
        let folder = shell.create_temp_dir().expect("a folder");
        for (text, expected) in [
            ("mod gone;", "module `gone` has no file"),
            ("fn f( {", "lib.rs:1"),
        ] {
            shell
                .write_file(folder.path().join("lib.rs"), text)
                .expect("a file");
            let error = Crate::read(folder.path(), Path::new("lib.rs")).expect_err(text);
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
    }
}
