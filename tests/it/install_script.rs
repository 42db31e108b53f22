//! install.sh against a server of releases on this machine.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::node::{Said, Scratch, said};
use crate::workflow_scripts::serve_all;

/// What stands for the released binary.
const RELEASED: &str = "#!/bin/sh\necho gpu-validator 1.2.3\n";

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../install.sh")
}

/// A machine of this architecture, on which only what is named here can be called.
struct Machine(Scratch);

impl Machine {
    fn new(architecture: &str) -> Self {
        let machine = Self(Scratch::new());
        let uname = format!("[ \"$1\" = -m ] && echo {architecture} || echo Linux");
        machine.program("uname", &uname);
        // Root by name only: nothing here may change this machine.
        machine.program("id", "echo 0");
        for name in ["dpkg", "rpm"] {
            let says = machine.0.path("installed");
            machine.program(name, &format!("echo {name} \"$@\" >>{}", says.display()));
        }
        let needed = [
            "awk",
            "curl",
            "sha256sum",
            "mktemp",
            "rm",
            "mkdir",
            "install",
            "sh",
        ];
        for name in needed {
            let found = said(Command::new("which").arg(name)).1;
            let link = machine.0.path(&format!("bin/{name}"));
            std::os::unix::fs::symlink(found.trim(), link).expect("a link");
        }
        machine
    }

    fn program(&self, name: &str, text: &str) {
        let path = self
            .0
            .write(&format!("bin/{name}"), format!("#!/bin/sh\n{text}\n"));
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(path, mode).expect("a program");
    }

    fn without(&self, name: &str) {
        std::fs::remove_file(self.0.path(&format!("bin/{name}"))).expect("it was there");
    }

    fn run_file(&self, file: &Path, arguments: &[&str]) -> Said {
        said(
            Command::new("/bin/sh")
                .arg(file)
                .args(arguments)
                .env_clear()
                .env("PATH", self.0.path("bin"))
                .env("TMPDIR", self.0.path("")),
        )
    }

    fn run(&self, arguments: &[&str]) -> Said {
        self.run_file(&script(), arguments)
    }

    /// The binary alone, into a folder of the machine.
    fn run_to(&self, url: &str, more: &[&str]) -> Said {
        let to = self.0.path("to");
        let to = to.to_str().expect("UTF-8");
        self.run(&[&["--releases-url", url, "--to", to], more].concat())
    }

    fn installed(&self) -> Option<String> {
        std::fs::read_to_string(self.0.path("to/gpu-validator")).ok()
    }
}

fn sum_of(content: &str) -> String {
    let out = Scratch::new();
    let file = out.write("file", content);
    let line = said(Command::new("sha256sum").arg(file)).1;
    line[..64].to_owned()
}

/// A release 1.2.3, which is also the newest, with these checksums.
fn release(sums: &str) -> String {
    let mut files = Vec::new();
    for (folder, names) in [
        (
            "/latest/download",
            [
                "/latest/download/SHA256SUMS",
                "/latest/download/gpu-validator",
            ],
        ),
        (
            "/download/v1.2.3",
            [
                "/download/v1.2.3/SHA256SUMS",
                "/download/v1.2.3/gpu-validator-aarch64",
            ],
        ),
    ] {
        assert!(names[0].starts_with(folder));
        files.push((names[0], sums.as_bytes().to_vec()));
        files.push((names[1], RELEASED.as_bytes().to_vec()));
    }
    files.push((
        "/latest/download/gpu-validator-x86_64.deb",
        RELEASED.as_bytes().to_vec(),
    ));
    serve_all(files)
}

fn right_sums() -> String {
    let sum = sum_of(RELEASED);
    [
        "gpu-validator",
        "gpu-validator-aarch64",
        "gpu-validator-x86_64.deb",
    ]
    .map(|name| format!("{sum}  {name}\n"))
    .concat()
}

#[test]
fn the_binary_of_the_architecture_is_installed_and_started() {
    let url = release(&right_sums());
    let machine = Machine::new("x86_64");
    let (code, stdout, stderr) = machine.run_to(&url, &[]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert_eq!(machine.installed().as_deref(), Some(RELEASED));
    assert!(
        stdout.starts_with("gpu-validator 1.2.3\ninstalled "),
        "{stdout}"
    );
    let leftovers = std::fs::read_dir(machine.0.path(""))
        .expect("a folder")
        .count();
    assert_eq!(leftovers, 2, "bin and to, and no folder of the script");

    let machine = Machine::new("aarch64");
    let (code, _, stderr) = machine.run_to(&url, &["--version", "1.2.3"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(machine.installed().is_some());

    let machine = Machine::new("riscv64");
    let (code, _, stderr) = machine.run_to(&url, &[]);
    assert_eq!(code, 1);
    assert!(stderr.contains("no gpu-validator for riscv64"), "{stderr}");
}

#[test]
fn nothing_is_installed_with_another_checksum_or_none() {
    let other = right_sums().replace(&sum_of(RELEASED), &"0".repeat(64));
    let right = sum_of(RELEASED);
    for (sums, more, message) in [
        (other.clone(), vec![], "has another checksum than 0000"),
        (
            format!("{right}  gpu-validator.deb\n"),
            vec![],
            "does not list gpu-validator",
        ),
        (
            right_sums(),
            vec!["--sha256", &other[..64]],
            "has another checksum than 0000",
        ),
        (
            right_sums(),
            vec!["--version", "9.9.9"],
            "could not be downloaded",
        ),
        (
            right_sums(),
            vec!["--version", "../x"],
            "expected one such as 1.2.3",
        ),
        (right_sums(), vec!["--too", "x"], "unknown option --too"),
    ] {
        let machine = Machine::new("x86_64");
        let (code, stdout, stderr) = machine.run_to(&release(&sums), &more);
        assert_eq!(code, 1, "{message}: {stdout}");
        assert!(stderr.contains(message), "{message}: {stderr}");
        assert_eq!(machine.installed(), None, "{message}");
    }
    let machine = Machine::new("x86_64");
    let (code, _, stderr) = machine.run_to(&release(&right_sums()), &["--sha256", &right]);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn the_package_is_installed_where_its_program_is_and_by_root_only() {
    let url = release(&right_sums());
    let arguments = ["--releases-url", &url];
    let machine = Machine::new("x86_64");
    // The package stands in for itself: nothing made /usr/bin/gpu-validator, which is reported.
    let (_, _, _) = machine.run(&arguments);
    let installed = machine.0.read("installed");
    assert!(
        installed.starts_with("dpkg --install ")
            && installed.ends_with("/gpu-validator-x86_64.deb\n"),
        "{installed}"
    );

    machine.without("dpkg");
    let (code, _, stderr) = machine.run(&arguments);
    assert_eq!(code, 1);
    assert!(
        stderr.contains("gpu-validator-x86_64.rpm could not be downloaded"),
        "{stderr}"
    );

    machine.program("id", "echo 1000");
    let (code, _, stderr) = machine.run(&arguments);
    assert_eq!(code, 1);
    assert!(stderr.contains("takes root"), "{stderr}");
}

#[test]
fn a_script_that_arrives_in_part_does_nothing() {
    let text = std::fs::read_to_string(script()).expect("install.sh");
    let url = release(&right_sums());
    let lines: Vec<&str> = text.lines().collect();
    for kept in 1..lines.len() {
        let machine = Machine::new("x86_64");
        let part = machine.0.write("part.sh", lines[..kept].join("\n"));
        let to = machine.0.path("to");
        let to = to.to_str().expect("UTF-8");
        machine.run_file(&part, &["--releases-url", &url, "--to", to]);
        assert_eq!(machine.installed(), None, "{kept} lines");
        assert!(!machine.0.path("installed").exists(), "{kept} lines");
    }
}
