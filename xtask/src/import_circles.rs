//! `cargo xtask import-circles`: fails where modules of a crate import each other in a circle,
//! outside tests.

mod graph;
mod source;

use std::collections::BTreeSet;
use std::fmt::Write as _;

use anyhow::bail;
use graph::{Circle, Ties};
use source::Crate;
use xshell::Shell;

use crate::{packages, workspace};

pub(crate) fn run() -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let crates = read_crates(&shell)?;
    let circles: Vec<String> = crates.iter().flat_map(circles).collect();
    if !circles.is_empty() {
        bail!("imports:\n{}", circles.join("\n"));
    }
    println!(
        "{} modules of {} crates without a circle of imports",
        crates.iter().map(|it| it.modules).sum::<usize>(),
        crates.len(),
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

/// A text for each circle of a crate.
fn circles(Read { name, ties, .. }: &Read) -> Vec<String> {
    let mut circles: Vec<Circle<'_>> = ties.circles().into_values().collect();
    // Short ones first, and none that shares a tie with one that is shown: a circle makes many
    // others.
    circles.sort_by_key(Vec::len);
    let mut shown = BTreeSet::new();
    let mut texts = Vec::new();
    for circle in circles {
        if circle.iter().all(|tie| !shown.contains(tie)) {
            texts.push(described(name, &circle));
            shown.extend(circle);
        }
    }
    texts
}

fn described(name: &str, circle: &Circle<'_>) -> String {
    let mut text = String::from("a circle of imports:");
    for tie in circle {
        let _ = write!(
            text,
            "\n  {}:{}: {name}: {} -> {}",
            tie.import.file.display(),
            tie.import.line,
            tie.from.join("::"),
            tie.to.join("::")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Crate, Read, Ties, circles};

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

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        circles(&read(files))
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
        assert_eq!(found(&files), [""; 0]);
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
        assert_eq!(
            found(&files),
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
        assert_eq!(
            found(&files),
            [
                "a circle of imports:\n  lib.rs:1: x: a::one -> a::two\n  lib.rs:1: x: a::two -> a::one"
            ]
        );
        // A parent and its child are one unit.
        let files = [(
            "lib.rs",
            "mod a { pub mod one { use super::S; } use one::O; pub struct S; }",
        )];
        assert_eq!(found(&files), [""; 0]);
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
            let found = found(&files);
            assert_eq!(found.len(), 1, "{facade}: {found:?}");
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
            assert_eq!(found(&files), [""; 0], "{text}");
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
            assert_eq!(found(&files).len(), 1, "{before}");
        }
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
