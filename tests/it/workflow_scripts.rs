//! The scripts of the workflows, with what GitHub gives them, on simulated nodes.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::node::{Node, Said, Scratch, executable, in_place_of, said};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../workflows")
        .join(name)
}

/// One step that uses the action, with the defaults of its inputs.
struct Step {
    out: Scratch,
    inputs: Vec<(&'static str, String)>,
}

impl Step {
    fn new() -> Self {
        let out = Scratch::new();
        std::fs::create_dir(out.path("temp")).expect("a folder");
        let binary = executable().display().to_string();
        let defaults = [
            ("INPUT_PROFILE", ""),
            ("INPUT_LEVEL", "quick"),
            ("INPUT_BINARY", binary.as_str()),
            ("INPUT_VERSION", ""),
            ("INPUT_SHA256", ""),
            ("INPUT_RELEASES_URL", "http://127.0.0.1:1"),
            ("INPUT_FAIL_ON", "not-pass"),
            ("INPUT_ALLOW_SIMULATED", "true"),
        ];
        Self {
            out,
            inputs: defaults
                .map(|(name, value)| (name, value.to_owned()))
                .to_vec(),
        }
    }

    fn with(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.inputs.push((name, value.into()));
        self
    }

    fn run(&self, node: &Node) -> Said {
        let mut command = in_place_of(&node.validator(), "bash");
        command
            .arg(script("validate-gpu/validate.sh"))
            .env("GITHUB_OUTPUT", self.out.path("output"))
            .env("RUNNER_TEMP", self.out.path("temp"))
            .envs(self.inputs.iter().map(|(name, value)| (*name, value)));
        said(&mut command)
    }

    /// An output of the step; of several values the last counts.
    fn output(&self, name: &str) -> Option<String> {
        let outputs = self.out.read("output");
        let of_name = |line: &str| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned());
        outputs.lines().rev().find_map(of_name)
    }
}

#[test]
fn the_action_tells_verdict_coverage_and_where_the_reports_are() {
    // The host's log and services are those of the machine that runs the tests, so only the output
    // is compared.
    let node = Node::healthy("h200x1");
    let step = Step::new();
    let (code, stdout, stderr) = step.run(&node);
    let verdict = step.output("verdict").expect("told");
    let exit_code = step.output("exit-code").expect("told");
    assert_eq!(code == 0, verdict == "pass", "{stdout}{stderr}");
    let report = PathBuf::from(step.output("report").expect("told"));
    for name in ["report.xml", "report.html", "report.json", "facts.json"] {
        assert!(report.join(name).is_file(), "{name}");
    }
    let json: Value =
        serde_json::from_slice(&std::fs::read(report.join("report.json")).expect("read"))
            .expect("JSON");
    assert_eq!(json["exit_code"].to_string(), exit_code);
    let (judged, all) = step
        .output("coverage")
        .expect("told")
        .split_once('/')
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .expect("a ratio");
    assert!(judged.parse::<u32>().expect("a number") <= all.parse().expect("a number"));
}

#[test]
fn wrong_inputs_of_the_action_are_errors() {
    let node = Node::healthy("h200x1");
    let digits = "0".repeat(64);
    for (inputs, says) in [
        (
            &[("INPUT_FAIL_ON", "sometimes")][..],
            "fail-on is 'sometimes'",
        ),
        (
            &[("INPUT_ALLOW_SIMULATED", "maybe")],
            "allow-simulated is 'maybe'",
        ),
        (
            &[("INPUT_BINARY", "no-such-validator")],
            "no program 'no-such-validator'",
        ),
        (
            &[("INPUT_VERSION", "9.9.9")],
            "the workflow asks for '9.9.9'",
        ),
        (
            &[("INPUT_BINARY", "none"), ("INPUT_SHA256", &digits)],
            "sha256 needs version",
        ),
        (
            &[
                ("INPUT_BINARY", "none"),
                ("INPUT_VERSION", "0.1.0"),
                ("INPUT_SHA256", "abc"),
            ],
            "a checksum has 64 digits",
        ),
        (
            &[
                ("INPUT_BINARY", "none"),
                ("INPUT_VERSION", "../0.1.0"),
                ("INPUT_SHA256", &digits),
            ],
            "sha256 needs version",
        ),
    ] {
        let step = inputs
            .iter()
            .fold(Step::new(), |step, (name, value)| step.with(name, *value));
        let (code, stdout, stderr) = step.run(&node);
        assert_eq!(code, 1, "{says}: {stdout}{stderr}");
        assert!(
            stdout.contains("::error title=gpu-validator::") && stdout.contains(says),
            "{says}: {stdout}"
        );
        assert_eq!(
            step.output("verdict").as_deref(),
            Some("not_judged"),
            "{says}"
        );
    }
}

/// Serves one file at one path until the test ends.
fn serve(path: &'static str, content: Vec<u8>) -> String {
    serve_all(vec![(path, content)])
}

/// Serves files, each at its path, until the test ends.
pub(crate) fn serve_all(files: Vec<(&'static str, Vec<u8>)>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = BufReader::new(stream.try_clone().expect("cloned"));
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") && request.read_line(&mut head).is_ok_and(|it| it > 0)
            {
            }
            let found = files
                .iter()
                .find(|(path, _)| head.starts_with(&format!("GET {path} ")));
            let (status, body) = match found {
                Some((_, content)) => ("200 OK", &content[..]),
                None => ("404 Not Found", &b""[..]),
            };
            let _ = write!(
                stream,
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                body.len()
            );
            let _ = stream.write_all(body);
        }
    });
    url
}

#[test]
fn the_released_binary_is_downloaded_by_checksum_and_by_no_other() {
    let node = Node::healthy("h200x1");
    let (_, version, _) = said(Command::new(executable()).arg("--version"));
    assert_eq!(version.split(' ').nth(1), Some("0.1.0"), "{version}");
    // What is released is a file; here it is one that starts the binary which was built.
    let released = format!("#!/bin/sh\nexec '{}' \"$@\"\n", executable().display());
    let out = Scratch::new();
    let file = out.write("gpu-validator", &released);
    let sum = said(Command::new("sha256sum").arg(&file)).1;
    let sum = sum.split(' ').next().expect("a checksum").to_owned();
    let url = serve("/v0.1.0/gpu-validator", released.into_bytes());
    let step = |sum: &str| {
        Step::new()
            .with("INPUT_BINARY", "no-such-validator")
            .with("INPUT_VERSION", "0.1.0")
            .with("INPUT_RELEASES_URL", url.clone())
            .with("INPUT_SHA256", sum)
    };
    let good = step(&sum);
    let (_, stdout, stderr) = good.run(&node);
    assert!(
        good.output("exit-code").is_some(),
        "it ran: {stdout}{stderr}"
    );
    let bad = step(&"0".repeat(64));
    let (code, stdout, _) = bad.run(&node);
    assert_eq!(code, 1);
    assert!(
        stdout.contains("has another checksum than sha256 says; it was not run"),
        "{stdout}"
    );
    assert_eq!(bad.output("exit-code"), None);
    let missing = step(&sum).with("INPUT_RELEASES_URL", format!("{url}/elsewhere"));
    let (code, stdout, _) = missing.run(&node);
    assert_eq!(code, 1);
    assert!(stdout.contains("could not be downloaded"), "{stdout}");
    // A machine that has that version downloads nothing.
    let baked = Step::new()
        .with("INPUT_VERSION", "0.1.0")
        .with("INPUT_SHA256", sum);
    baked.run(&node);
    assert!(baked.output("exit-code").is_some());
}

/// The facts of nodes as the artifacts of their jobs have them, and the report on them.
fn fleet_report(nodes: &[(&str, Option<&Node>)]) -> (Said, Scratch) {
    let out = Scratch::new();
    std::fs::create_dir(out.path("nodes")).expect("a folder");
    for (name, node) in nodes {
        let Some(node) = node else { continue };
        let folder = out.path(&format!("nodes/node-{name}"));
        std::fs::create_dir(&folder).expect("a folder");
        let mut command = node.validator();
        command
            .args(["collect", "--level", "quick", "--sysroot"])
            .arg(node.sysroot())
            .arg("-o")
            .arg(folder.join("facts.json"));
        assert_eq!(said(&mut command).0, 0);
    }
    let names: Vec<Value> = nodes
        .iter()
        .map(|(name, _)| serde_json::json!({"name": name, "labels": [name]}))
        .collect();
    let mut command = Command::new("bash");
    command
        .arg(script("fleet-report.sh"))
        .arg(out.path("nodes"))
        .arg(out.path("fleet.json"))
        .env("FLEET", Value::from(names).to_string())
        .env("GPU_VALIDATOR_BINARY", accepting_simulated(&out))
        .env("GITHUB_STEP_SUMMARY", out.path("summary.md"))
        .env("RUNNER_TEMP", out.path(""))
        .env_remove("GITHUB_ACTIONS");
    (said(&mut command), out)
}

/// The validator for facts of simulated nodes, which only its command line can accept.
fn accepting_simulated(out: &Scratch) -> PathBuf {
    let script = format!(
        "#!/bin/sh\nexec {} \"$@\" --simulated-ok\n",
        executable().display()
    );
    let path = out.write("accepting", script);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&path, mode).expect("chmod");
    path
}

#[test]
fn a_fleet_is_as_well_as_its_worst_node_and_silence_is_no_pass() {
    let well = Node::healthy("h200x1");
    let sick = Node::with_fault("h200x1", "ecc-volatile-uncorrectable");
    let ((code, stdout, stderr), out) = fleet_report(&[("gpu-1", Some(&well))]);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert!(out.read("summary.md").starts_with("## GPU fleet\n\n    "));
    let ((code, stdout, stderr), out) =
        fleet_report(&[("gpu-1", Some(&well)), ("gpu-2", Some(&sick))]);
    assert_eq!(code, 1, "{stdout}{stderr}");
    let fleet: Value = serde_json::from_str(&out.read("fleet.json")).expect("JSON");
    assert!(fleet.to_string().contains("gpu-2"), "{fleet}");
    let ((code, stdout, _), _) = fleet_report(&[("gpu-1", Some(&well)), ("gpu-3", None)]);
    assert_eq!(code, 2);
    assert!(
        stdout.contains("::error title=fleet::gpu-3 left no facts"),
        "{stdout}"
    );
    let ((code, stdout, _), _) = fleet_report(&[("gpu-3", None)]);
    assert_eq!(code, 2);
    assert!(
        stdout.contains("no node of the fleet was validated"),
        "{stdout}"
    );
}

/// What NVIDIA and GitHub answer; `driver` is the newest of branch 580, `digest` that of the
/// runner's archive.
fn releases(driver: &str, digest: &str) -> Vec<(&'static str, Vec<u8>)> {
    let drivers = serde_json::json!({
        "570": {"type": "production branch", "driver_info": [{"release_version": "570.999.01"}]},
        "580": {"type": "lts branch", "driver_info": [
            {"release_version": "580.65.06", "release_date": "2025-08-04"},
            {"release_version": driver, "release_date": "2026-10-01"},
            {"release_version": "580.95.05", "release_date": "2025-09-30"},
        ]},
        "590": {"type": "new feature branch", "driver_info": [{"release_version": "590.44.01"}]},
    });
    let runner = serde_json::json!({"tag_name": "v2.340.1", "assets": [
        {"name": "actions-runner-linux-arm64-2.340.1.tar.gz", "digest": format!("sha256:{}", "1".repeat(64))},
        {"name": "actions-runner-linux-x64-2.340.1.tar.gz", "digest": digest},
    ]});
    let toolkit = serde_json::json!({"tag_name": "v1.20.0"});
    vec![
        ("/releases.json", drivers.to_string().into_bytes()),
        (
            "/repos/NVIDIA/nvidia-container-toolkit/releases/latest",
            toolkit.to_string().into_bytes(),
        ),
        (
            "/repos/actions/runner/releases/latest",
            runner.to_string().into_bytes(),
        ),
    ]
}

fn newest_versions(files: Vec<(&'static str, Vec<u8>)>) -> Said {
    let url = serve_all(files);
    let mut command = Command::new("bash");
    command
        .arg(script("newest-versions.sh"))
        .arg(script("../packer/versions.auto.pkrvars.hcl"))
        .env_remove("GITHUB_TOKEN")
        .env("GITHUB_API_URL", &url)
        .env("NVIDIA_RELEASES_URL", format!("{url}/releases.json"));
    said(&mut command)
}

#[test]
fn the_newest_versions_replace_those_that_are_pinned() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let (code, stdout, stderr) = newest_versions(releases("580.126.09", &digest));
    assert_eq!(code, 0, "{stderr}");
    let sha256 = "a".repeat(64);
    for line in [
        "nvidia_driver_version = \"580.126.09\"",
        "nvidia_container_toolkit_version = \"1.20.0\"",
        "actions_runner_version = \"2.340.1\"",
        &format!("actions_runner_sha256  = \"{sha256}\""),
    ] {
        assert!(stdout.lines().any(|it| it == line), "{line}: {stdout}");
    }
}

#[test]
fn an_answer_that_is_no_version_becomes_no_file() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let with = |path: &str, answer: &str| {
        let mut files = releases("580.126.09", &digest);
        for (name, content) in &mut files {
            if *name == path {
                *content = answer.as_bytes().to_vec();
            }
        }
        files
    };
    let runner = "/repos/actions/runner/releases/latest";
    for (files, says) in [
        (
            releases("580.126.09", ""),
            "names no checksum of actions-runner-linux-x64",
        ),
        (with("/releases.json", "{}"), "branch 580 in"),
        (
            with(runner, "{}"),
            "the newest release of actions/runner has no version",
        ),
        (
            with(runner, "{\"tag_name\": \"v2.1.0\\\"; echo\"}"),
            "the newest release of actions/runner has no version",
        ),
        (with(runner, "no JSON"), ""),
        (Vec::new(), "could not be read"),
    ] {
        let (code, stdout, stderr) = newest_versions(files);
        assert_ne!(code, 0, "{says}");
        assert!(stdout.is_empty(), "{stdout}");
        assert!(stderr.contains(says), "{says}: {stderr}");
    }
}

/// What the build jobs of both architectures leave.
fn built() -> Scratch {
    let out = Scratch::new();
    for architecture in ["x86_64", "aarch64"] {
        let folder = out.path(&format!("built/dist-{architecture}"));
        for name in ["dist/completions", "packages"] {
            std::fs::create_dir_all(folder.join(name)).expect("a folder");
        }
        let files = [
            "dist/gpu-validator",
            "dist/gpu-validator.1",
            "dist/completions/bash",
            "dist/gpu-validator.cdx.json",
            "packages/gpu-validator.deb",
            "packages/gpu-validator.rpm",
        ];
        for name in files {
            std::fs::write(folder.join(name), format!("{architecture} {name}")).expect("written");
        }
        let sums = said(
            Command::new("sha256sum")
                .current_dir(folder.join("dist"))
                .args(["gpu-validator", "gpu-validator.1", "completions/bash"]),
        );
        std::fs::write(folder.join("dist/SHA256SUMS"), sums.1).expect("written");
    }
    out.write("built/images/kubernetes-images.yaml", "images: []\n");
    out
}

fn release_files(out: &Scratch) -> Said {
    said(
        Command::new("bash")
            .arg(script("release-files.sh"))
            .arg(out.path("built"))
            .arg(out.path("release")),
    )
}

#[test]
fn a_release_holds_both_architectures_under_one_list_of_checksums() {
    let out = built();
    let (code, _, stderr) = release_files(&out);
    assert_eq!(code, 0, "{stderr}");
    let sums = out.read("release/SHA256SUMS");
    let names: Vec<&str> = sums.lines().map(|it| &it[66..]).collect();
    assert_eq!(
        names,
        [
            "gpu-validator",
            "gpu-validator-aarch64",
            "gpu-validator-aarch64.cdx.json",
            "gpu-validator-aarch64.deb",
            "gpu-validator-aarch64.rpm",
            "gpu-validator-completions.tar.gz",
            "gpu-validator-x86_64.deb",
            "gpu-validator-x86_64.rpm",
            "gpu-validator.1",
            "gpu-validator.cdx.json",
            "install.sh",
            "kubernetes-images.yaml",
        ]
    );
    let installs = out.read("release/install.sh");
    assert!(installs.contains("\nversion='0.1.0'\n"), "{installs}");
    assert_eq!(
        out.read("release/gpu-validator-aarch64"),
        "aarch64 dist/gpu-validator"
    );
    let checked = said(
        Command::new("sha256sum")
            .current_dir(out.path("release"))
            .args(["--check", "SHA256SUMS"]),
    );
    assert_eq!(checked.0, 0, "{}", checked.1);
}

#[test]
fn a_file_that_changed_on_its_way_or_is_missing_is_not_released() {
    let out = built();
    out.write("built/dist-aarch64/dist/gpu-validator", "another");
    let (code, _, stderr) = release_files(&out);
    assert_ne!(code, 0, "{stderr}");
    let out = built();
    std::fs::remove_file(out.path("built/dist-x86_64/packages/gpu-validator.rpm")).expect("gone");
    let (code, _, stderr) = release_files(&out);
    assert_ne!(code, 0);
    assert!(stderr.contains("gpu-validator.rpm"), "{stderr}");
}

#[test]
fn the_released_action_names_its_version_and_checksums() {
    let out = built();
    assert_eq!(release_files(&out).0, 0);
    let action = |version: &str, sums: &str| {
        said(
            Command::new("bash")
                .arg(script("release-action.sh"))
                .arg(version)
                .arg(out.path(sums)),
        )
    };
    let (code, stdout, stderr) = action("1.2.3", "release/SHA256SUMS");
    assert_eq!(code, 0, "{stderr}");
    let sums = out.read("release/SHA256SUMS");
    let of = |name: &str| {
        let line = sums.lines().find(|it| it.ends_with(&format!("  {name}")));
        line.expect(name)[..64].to_owned()
    };
    for line in [
        "    default: \"1.2.3\"".to_owned(),
        format!("    default: \"{}\"", of("gpu-validator")),
        format!("    default: \"{}\"", of("gpu-validator-aarch64")),
    ] {
        assert!(stdout.lines().any(|it| it == line), "{line}: {stdout}");
    }
    let before = std::fs::read_to_string(script("../action.yml")).expect("read");
    let changed = before.lines().zip(stdout.lines()).filter(|(a, b)| a != b);
    assert_eq!(changed.count(), 3);
    let (code, stdout, stderr) = action("v1", "release/SHA256SUMS");
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains("'v1' is no version"), "{stderr}");
    let empty = out.write("empty", "");
    assert!(empty.exists());
    let (code, _, stderr) = action("1.2.3", "empty");
    assert_eq!(code, 1);
    assert!(
        stderr.contains("has no checksum of gpu-validator"),
        "{stderr}"
    );
}

#[test]
fn the_runners_image_is_built_from_what_its_dockerfile_copies() {
    let out = built();
    let context = |from: &str| {
        said(
            Command::new("bash")
                .arg(script("runner-image-context.sh"))
                .arg(out.path(from))
                .arg(out.path("context")),
        )
    };
    let (code, _, stderr) = context("built/dist-x86_64/dist");
    assert_eq!(code, 0, "{stderr}");
    let dockerfile = std::fs::read_to_string(script("../packer/runner-gpu/Dockerfile"));
    let dockerfile = dockerfile.expect("read");
    let copied: Vec<&str> = dockerfile
        .lines()
        .filter_map(|it| it.strip_prefix("COPY "))
        .filter(|it| !it.starts_with("--from="))
        .filter_map(|it| it.split(' ').next())
        .collect();
    assert!(copied.contains(&"gpu-validator"), "{copied:?}");
    for name in copied {
        assert!(out.path("context").join(name).exists(), "{name} is missing");
    }
    let (code, _, _) = context("built/dist-x86_64/dist");
    assert_ne!(code, 0, "a folder that is there already is not taken");
    std::fs::remove_dir_all(out.path("context")).expect("removed");
    assert_ne!(context("built").0, 0, "there is no binary");
}

/// Each architecture of a release has an image, and one name has both.
#[test]
fn a_release_has_an_image_for_each_architecture_that_it_builds() {
    let workflow = std::fs::read_to_string(script("release.yml")).expect("read");
    let (of_binaries, of_images) = workflow.split_once("\n  image:\n").expect("job image");
    let architectures = |jobs: &str| -> Vec<String> {
        let lines = jobs.lines().map(str::trim);
        let entries = lines.filter_map(|it| it.strip_prefix("- {architecture: "));
        let names = entries.filter_map(|it| it.split(',').next());
        names.map(str::to_owned).collect()
    };
    let built = architectures(of_binaries);
    assert_eq!(built, ["x86_64", "aarch64"]);
    assert_eq!(architectures(of_images), built);
    for architecture in built {
        assert!(
            workflow.contains(&format!(" \"$image:$version-{architecture}\"")),
            "{architecture} is not in the index"
        );
    }
}

/// `docker buildx imagetools inspect` is a registry's answer.
fn release_images(version: &str, digest: &str, registry: &str) -> Said {
    let out = Scratch::new();
    let docker = format!(
        "#!/bin/sh\n[ \"$1 $2 $3\" = 'buildx imagetools inspect' ] || exit 9\n\
         case $4 in nvcr.io/*:[0-9v]*) {registry} ;; *) exit 8 ;; esac\n"
    );
    let docker = out.write("bin/docker", docker);
    let made = Command::new("chmod").arg("+x").arg(docker).status();
    assert!(made.expect("chmod runs").success());
    let path = std::env::var("PATH").expect("PATH");
    said(
        Command::new("bash")
            .arg(script("release-images.sh"))
            .args(["ghcr.io/someone/gpu-validator", version, digest])
            .env("PATH", format!("{}:{path}", out.path("bin").display())),
    )
}

#[test]
fn a_release_names_every_image_by_its_digest() {
    let (ours, theirs) = ("a".repeat(64), "b".repeat(64));
    let ours = format!("sha256:{ours}");
    let registry = format!("echo sha256:{theirs}");
    let (code, stdout, stderr) = release_images("0.1.0", &ours, &registry);
    assert_eq!(code, 0, "{stderr}");
    let images =
        std::fs::read_to_string(script("../manifests/kubernetes/images/kustomization.yaml"));
    let images = images.expect("read");
    let names = images.lines().filter(|it| it.starts_with("  - name: "));
    let digests = stdout
        .lines()
        .filter(|it| it.starts_with("    digest: sha256:"));
    assert_eq!(digests.count(), names.count(), "{stdout}");
    assert!(
        stdout.contains(&format!(
            "  - name: ghcr.io/gpu-bringup/gpu-validator\n    newName: ghcr.io/someone/gpu-validator\n    newTag: 0.1.0\n    digest: {ours}\n"
        )),
        "{stdout}"
    );
    for (version, digest, registry, message) in [
        (
            "0.2.0",
            ours.as_str(),
            registry.as_str(),
            "the release is 0.2.0",
        ),
        ("0.1.0", "sha256:1", &registry, "has the digest 'sha256:1'"),
        ("0.1.0", &ours, "echo", "has the digest ''"),
        ("0.1.0", &ours, "exit 1", ""),
    ] {
        let (code, _, stderr) = release_images(version, digest, registry);
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
    }
}

/// `uses: OWNER/gpu-bringup@v1` is the same action as
/// `uses: OWNER/gpu-bringup/workflows/validate-gpu@…`.
#[test]
fn the_action_of_the_root_is_that_of_the_workflows_folder() {
    let read = |name: &str| std::fs::read_to_string(script(name)).expect("read");
    let inputs = |text: &str| text[text.find("inputs:").expect("inputs")..].to_owned();
    let expected = inputs(&read("validate-gpu/action.yml"))
        .replace("ACTION_PATH/", "ACTION_PATH/workflows/validate-gpu/");
    assert_eq!(inputs(&read("../action.yml")), expected);
}
