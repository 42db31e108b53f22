//! The guides in docs/: every command in them is run here, is a step of CI, or states what it needs
//! that is not here.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::node::{Node, Said, Scratch, executable, in_place_of, said, validator};
use crate::xtask;

const GUIDES: [&str; 5] = ["ami", "github-actions", "monitoring", "slurm", "terraform"];

/// The words of a heading, or of the paragraph before a command, that mark commands that no test
/// can run.
const MARKS: [&str; 5] = [
    "(needs ",
    "*(needs ",
    "*(on the node)*",
    "*(GitHub)*",
    "*(GitHub, AWS)*",
];

fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(name: &str) -> String {
    let path = checkout().join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A line of a block without a language, and whether the guide states that it needs more than a
/// checkout.
struct GuideCommand {
    line: String,
    is_marked: bool,
}

fn commands(guide: &str) -> Vec<GuideCommand> {
    let text = read(&format!("docs/{guide}.md"));
    let mut commands = Vec::new();
    let (mut headings, mut paragraph): (Vec<&str>, String) = (Vec::new(), String::new());
    let mut block = None;
    for line in text.lines() {
        if let Some(language) = line.strip_prefix("```") {
            block = match block {
                None => Some(language),
                Some(_) => None,
            };
            if block.is_none() {
                paragraph.clear();
            }
        } else if block == Some("") {
            let said = [headings.join("\n"), paragraph.clone()].concat();
            commands.push(GuideCommand {
                line: line.to_owned(),
                is_marked: MARKS.iter().any(|it| said.contains(it)),
            });
        } else if block.is_some() {
        } else if line.starts_with('#') {
            let level = line.bytes().take_while(|it| *it == b'#').count();
            headings.retain(|it| it.bytes().take_while(|it| *it == b'#').count() < level);
            headings.push(line);
            paragraph.clear();
        } else if line.is_empty() {
            // A blank line before a block belongs to its paragraph; one between two ends the first.
            paragraph.push('\n');
        } else {
            if paragraph.ends_with('\n') {
                paragraph.clear();
            }
            paragraph.push_str(line);
            paragraph.push(' ');
        }
    }
    assert!(block.is_none(), "docs/{guide}.md ends inside a block");
    assert!(!commands.is_empty(), "docs/{guide}.md has no commands");
    commands
}

/// What is run, in the order of the guides.
fn unmarked(guide: &str) -> Vec<String> {
    let commands = commands(guide).into_iter();
    let unmarked = commands.filter(|it| !it.is_marked);
    unmarked.map(|it| it.line).collect()
}

/// A machine's folders, and a checkout that commands may change.
struct Machine {
    root: Scratch,
}

impl Machine {
    fn new() -> Self {
        let root = Scratch::new();
        let program = |name: &str, script: String| {
            let path = root.write(&format!("bin/{name}"), script);
            let made = Command::new("chmod").arg("+x").arg(path).status();
            assert!(made.expect("chmod runs").success());
        };
        // No process here is root's, and no file either.
        program("sudo", "#!/bin/sh\nexec \"$@\"\n".to_owned());
        program(
            "cargo",
            format!(
                "#!/bin/sh\n[ \"$1\" = xtask ] || exit 99\nshift\nexec '{}' \"$@\"\n",
                xtask::program("xtask").display()
            ),
        );
        for folder in ["usr/local/bin", "var/lib", "checkout/target/dist"] {
            std::fs::create_dir_all(root.path(folder)).expect("a folder");
        }
        for folder in ["workflows", ".github"] {
            let copied = Command::new("cp")
                .arg("--recursive")
                .arg(checkout().join(folder))
                .arg(root.path("checkout"))
                .status();
            assert!(copied.expect("cp runs").success());
        }
        // The nodes are simulated, which only the command line can accept; and the hooks' settings
        // are a file's.
        let settings = format!(
            "GPU_VALIDATOR_HOOK_BURN=0\nGPU_VALIDATOR_HOOK_STATE={}\n",
            root.path("var/lib/gpu-validator").display()
        );
        let settings = root.write("hook.env", settings);
        let script = format!(
            "#!/bin/sh\ncase \"$1 ${{2-}}\" in\n'burn status' | 'burn stop' | 'hook release') ;;\n\
             'hook '*) set -- \"$@\" --simulated-ok --settings {} --sysroot \"$SIMULATED_SYSROOT\" ;;\n\
             'run '* | 'burn '* | 'judge '*) set -- \"$@\" --simulated-ok ;;\nesac\nexec {} \"$@\"\n",
            settings.display(),
            executable().display()
        );
        program("wrapper", script);
        let binary = root.path("checkout/target/dist/gpu-validator");
        std::fs::copy(root.path("bin/wrapper"), binary).expect("a copy");
        Self { root }
    }

    fn path(&self, absolute: &str) -> PathBuf {
        self.root.path(absolute.trim_start_matches('/'))
    }

    /// As a person types it, with this machine's folders in place of the system's.
    fn command(&self, node: &Node, line: &str) -> Command {
        let root = self.root.path("").display().to_string();
        let root = root.trim_end_matches('/');
        let mut line = line.replace("--owner runner ", "");
        for folder in ["/usr/local/", "/opt/", "/var/lib/"] {
            line = line.replace(&format!(" {folder}"), &format!(" {root}{folder}"));
        }
        let path = std::env::var("PATH").expect("PATH");
        let mut command = in_place_of(&node.validator(), "bash");
        command
            .args(["-euo", "pipefail", "-c", &line])
            .current_dir(self.root.path("checkout"))
            .env("PATH", format!("{root}/bin:{root}/usr/local/bin:{path}"))
            .env("GITHUB_ACTIONS", "true")
            .env("RUNNER_NAME", "gpu-17")
            .env("SIMULATED_SYSROOT", node.sysroot())
            .env(
                "GPU_VALIDATOR_HOOK_STATE",
                format!("{root}/var/lib/gpu-validator"),
            );
        command
    }

    fn run(&self, node: &Node, line: &str) -> Said {
        said(&mut self.command(node, line))
    }
}

/// Whether it is what a step of CI or of the nightly workflow runs, from its first word on, or
/// names steps of CI.
fn is_step_of_ci(line: &str) -> bool {
    let steps = read("xtask/src/ci.rs");
    let nightly = read("workflows/nightly.yml");
    nightly.contains(&format!("- run: {line}\n"))
        || line.starts_with("cargo xtask ci ")
        || steps.contains(&format!("\"{line}\""))
        || steps.contains(&format!("\"{line} --"))
}

#[test]
fn every_command_of_the_guides_runs_or_says_what_it_needs() {
    let node = Node::healthy("h200x1");
    let machine = Machine::new();
    for guide in GUIDES {
        for line in unmarked(guide) {
            if is_step_of_ci(&line) {
                continue;
            }
            let (code, stdout, stderr) = machine.run(&node, &line);
            assert_eq!(code, 0, "docs/{guide}.md: {line}\n{stdout}{stderr}");
        }
    }
    // The commands did what the guide describes.
    let release = "gpu-validator hook release";
    let variables = read("docs/github-actions.md");
    let hook = variables
        .lines()
        .find_map(|line| line.strip_prefix("ACTIONS_RUNNER_HOOK_JOB_STARTED="))
        .expect("the guide names the hook");
    let hook = format!("bash -e {}", machine.path(hook).display());
    let (code, stdout, _) = machine.run(&node, &hook);
    assert_eq!(code, 1, "{stdout}");
    assert!(stdout.contains("GPU 3 is replaced"), "{stdout}");
    let (code, stdout, stderr) = machine.run(&node, release);
    assert!(code == 0 && stdout.contains(": lifted"), "{stdout}{stderr}");
    let (code, stdout, stderr) = machine.run(&node, &hook);
    assert_eq!(code, 0, "{stdout}{stderr}");
}

#[test]
fn what_needs_more_than_a_checkout_is_all_that_is_marked() {
    for guide in GUIDES {
        for GuideCommand { line, is_marked } in commands(guide) {
            let first = line.split_whitespace().next().unwrap_or_default();
            // What only a service answers cannot pass for something that was run.
            let needs_a_service = ["gh", "aws", "systemctl", "journalctl"].contains(&first)
                || [
                    "tf init",
                    "tf apply",
                    "tf plan",
                    "tf destroy",
                    "--ami",
                    "ami build",
                    "ami publish",
                ]
                .iter()
                .any(|it| line.contains(it));
            assert!(is_marked || !needs_a_service, "docs/{guide}.md: {line}");
        }
    }
    let unmarked: usize = GUIDES.iter().map(|it| unmarked(it).len()).sum();
    assert!(unmarked >= 12, "only {unmarked} commands are run");
}

/// What a guide writes for one command: alternatives (`pause | resume`), optional words in brackets
/// and a comment.
fn alternatives(line: &str) -> Vec<Vec<String>> {
    let line = line.split(" #").next().unwrap_or_default();
    let line = line.replace(['[', ']'], "");
    let words: Vec<&str> = line.split_whitespace().skip(1).collect();
    let Some((command, rest)) = words.split_first() else {
        return Vec::new();
    };
    let alternatives = rest.split(|it| *it == "|");
    alternatives
        .map(|it| {
            let options = it.iter().take_while(|it| **it != "--");
            let words = [*command].into_iter().chain(options.copied());
            words.map(str::to_owned).collect()
        })
        .collect()
}

/// These run for as long as they are let, or need Slurm, a cluster or the user's own program.
#[test]
fn every_command_of_the_other_guides_is_understood() {
    let mut count = 0;
    for guide in ["allocation", "sentinel"] {
        for GuideCommand { line, .. } in commands(guide) {
            if !line.starts_with("gpu-validator ") {
                continue;
            }
            for words in alternatives(&line) {
                let (code, _, stderr) = said(validator().args(&words).arg("--help"));
                assert_eq!(code, 0, "docs/{guide}.md: {words:?}: {stderr}");
                count += 1;
            }
        }
    }
    assert!(count >= 8, "only {count} commands were found");
    let (code, _, _) = said(validator().args(["sentinel", "--max-pwer", "60%", "--help"]));
    assert_eq!(code, 3, "a misspelt option is refused before the help");
}
