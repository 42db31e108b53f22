//! `cargo xtask tf`: the calls of terraform and the prompts for the user, with a stand-in for
//! terraform that records its calls.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use crate::ssh::Folder;
use crate::xtask::{program, stderr};

/// A terraform of some version, whose plan changes something (2), nothing (0), or fails (1).
struct Terraform {
    folder: Folder,
}

impl Terraform {
    fn new(version: &str, plan: u8) -> Terraform {
        let folder = Folder::new("terraform");
        let calls = folder.path("calls");
        folder.write_executable(
            "bin/terraform",
            &format!(
                "#!/bin/sh\nif [ \"$1\" = version ]; then echo '{{\"terraform_version\": \"{version}\"}}'; exit 0; fi\n\
                 printf '%s\\n' \"$*\" >>'{}'\n\
                 for word; do case $word in -out=*) [ {plan} = 1 ] || echo plan >\"${{word#-out=}}\" ;; esac; done\n\
                 case \"$*\" in *\" plan \"*) exit {plan} ;; *\" apply \"*) for word; do :; done; [ -f \"$word\" ] ;; esac\n",
                calls.display()
            ),
        );
        Terraform { folder }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let path = std::env::var("PATH").expect("PATH");
        Command::new(program("terraform-tasks"))
            .arg("tf")
            .args(arguments)
            .env(
                "PATH",
                format!("{}:{path}", self.folder.path("bin").display()),
            )
            .stdin(Stdio::null())
            .output()
            .expect("xtask runs")
    }

    /// The calls, each from its subcommand on.
    fn calls(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.folder.path("calls")).unwrap_or_default();
        let after_chdir = |line: &str| {
            let (chdir, rest) = line.split_once(' ').expect("more than one word");
            assert!(
                chdir.ends_with("/terraform/environments/staging"),
                "{chdir}"
            );
            rest.to_owned()
        };
        text.lines().map(after_chdir).collect()
    }
}

#[test]
fn what_is_applied_is_the_plan_that_was_shown_and_the_plan_file_goes() {
    for (action, options) in [("apply", ""), ("destroy", "-destroy ")] {
        let terraform = Terraform::new("1.13.3", 2);
        let output = terraform.run(&[action, "staging", "--yes"]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let calls = terraform.calls();
        let (before, plan) = calls[0].split_once("-out=").expect("a plan file");
        assert_eq!(
            before,
            format!("plan -input=false -detailed-exitcode {options}")
        );
        assert_eq!(calls[1..], [format!("apply -input=false {plan}")]);
        assert!(
            !std::path::Path::new(plan).exists(),
            "{plan} is still there"
        );
    }
}

#[test]
fn nothing_is_applied_when_nothing_changes_or_no_plan_is_made() {
    let terraform = Terraform::new("1.13.3", 0);
    let output = terraform.run(&["apply", "staging", "--yes"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("nothing to change in staging"));
    assert_eq!(terraform.calls().len(), 1);

    let terraform = Terraform::new("1.13.3", 1);
    let output = terraform.run(&["destroy", "staging", "--yes"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("terraform made no plan"));
    assert_eq!(terraform.calls().len(), 1);
}

#[test]
fn nobody_is_asked_where_nobody_is() {
    let terraform = Terraform::new("1.13.3", 2);
    for action in ["apply", "destroy"] {
        let output = terraform.run(&[action, "staging"]);
        assert_eq!(output.status.code(), Some(3));
        assert!(
            stderr(&output).contains("give --yes"),
            "{}",
            stderr(&output)
        );
    }
    assert!(terraform.calls().is_empty(), "{:?}", terraform.calls());
}

#[test]
fn only_the_environments_name_confirms() {
    for (typed, applied) in [("staging\n", true), ("y\n", false), ("", false)] {
        let terraform = Terraform::new("1.13.3", 2);
        let path = std::env::var("PATH").expect("PATH");
        // script(1) gives it a terminal for its prompt.
        let mut child = Command::new("script")
            .args(["--quiet", "--return", "--command"])
            .arg(format!(
                "{} tf apply staging",
                program("terraform-tasks").display()
            ))
            .arg("/dev/null")
            .env(
                "PATH",
                format!("{}:{path}", terraform.folder.path("bin").display()),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("script can be started (Debian and Ubuntu: apt-get install bsdutils)");
        let mut stdin = child.stdin.take().expect("a pipe");
        stdin.write_all(typed.as_bytes()).expect("a line");
        // The end of a terminal's input.
        stdin.write_all(b"\x04").expect("a byte");
        drop(stdin);
        let status = child.wait().expect("script ends");
        assert_eq!(status.success(), applied, "{typed:?}");
        assert_eq!(
            terraform.calls().len(),
            if applied { 2 } else { 1 },
            "{typed:?}"
        );
    }
}

#[test]
fn wrong_environments_old_terraforms_and_missing_backends_are_named() {
    let terraform = Terraform::new("1.13.3", 2);
    let output = terraform.run(&["plan", "stage"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(
        stderr(&output).contains("production, staging, state"),
        "{}",
        stderr(&output)
    );
    let old = Terraform::new("1.9.8", 2);
    let output = old.run(&["plan", "staging"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("need 1.10 or newer"),
        "{}",
        stderr(&output)
    );
    assert!(terraform.calls().is_empty() && old.calls().is_empty());
    let configured = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../terraform/environments/staging/backend.hcl"
    );
    if !std::path::Path::new(configured).exists() {
        let output = terraform.run(&["init", "staging"]);
        assert_eq!(output.status.code(), Some(3));
        assert!(
            stderr(&output).contains("backend.hcl.example"),
            "{}",
            stderr(&output)
        );
    }
}
