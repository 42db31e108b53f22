//! Where reports go and what is in them, whatever the folder, the locale, the CI service and the
//! node's own texts are.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::node::{Node, Ran, in_place_of, said, set, validator};

/// The report that is saved elsewhere because its file could not be written. It is removed.
fn saved_report(stderr: &str, what: &str) -> String {
    let begins = format!("error: the {what} could not be written to ");
    let mut lines = stderr.lines().filter(|it| it.starts_with(&begins));
    let line = lines
        .next()
        .unwrap_or_else(|| panic!("no {what}: {stderr}"));
    let path = line.split("; it is saved as ").nth(1).expect("its place");
    let report = std::fs::read_to_string(path).expect("it is there");
    std::fs::remove_file(path).expect("removed");
    report
}

#[test]
fn reports_that_cannot_be_written_are_saved_elsewhere_and_are_no_pass() {
    for (node, code) in [
        (Node::healthy("h200x1"), 0),
        (Node::with_fault("h200x8", "xid-79"), 1),
        (Node::with_fault("h200x1", "kernel-log-unreadable"), 2),
    ] {
        let ends_with = if code == 0 { 2 } else { code };
        for (path, reason) in [
            ("/dev/full", "No space left on device"),
            ("/proc/report", "No such file or directory"),
            ("/nonexistent/report", "No such file or directory"),
        ] {
            let mut command = node.validator();
            command
                .args(["run", "--simulated-ok", "--level", "quick", "--sysroot"])
                .arg(node.sysroot());
            let is_device = path == "/dev/full";
            let place = |what: &str| {
                if is_device {
                    path.to_owned()
                } else {
                    format!("{path}.{what}")
                }
            };
            for option in ["--json", "--junit", "--facts"] {
                command.arg(option).arg(place(&option[2..]));
            }
            let (ended, stdout, stderr) = said(&mut command);
            assert_eq!(ended, ends_with, "{path}: {stderr}");
            for (what, option) in [
                ("JSON report", "json"),
                ("JUnit report", "junit"),
                ("facts", "facts"),
            ] {
                let place = place(option);
                let says = format!("warning: the {what} cannot be written to {place}: {reason}");
                assert_eq!(stderr.matches(&says).count(), 1, "{says}: {stderr}");
            }
            assert!(!stdout.contains("<testsuite"), "{stdout}");
            let report: Value =
                serde_json::from_str(&saved_report(&stderr, "JSON report")).expect("JSON");
            assert_eq!(report["exit_code"], code);
            assert_eq!(report["incomplete"], Value::Null);
            roxmltree::Document::parse(&saved_report(&stderr, "JUnit report")).expect("XML");
            let facts: Value = serde_json::from_str(&saved_report(&stderr, "facts")).expect("JSON");
            assert!(facts["gpus"].as_array().is_some_and(|it| !it.is_empty()));
        }
    }
}

#[test]
fn a_full_standard_output_is_no_pass_and_hides_no_failure() {
    for (node, code, ends_with) in [
        (Node::healthy("h200x1"), 0, 2),
        (Node::with_fault("h200x8", "xid-79"), 1, 1),
    ] {
        let (ended, stderr) = on_full_stdout(&mut node.run_command(&["--level", "quick"]));
        assert_eq!(ended, ends_with, "{stderr}");
        let report: Value = serde_json::from_str(&node.out.read("report.json")).expect("JSON");
        assert_eq!(report["exit_code"], code);
    }
}

/// Exit code and standard error of a command whose standard output has no room.
fn on_full_stdout(command: &mut Command) -> (i32, String) {
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .expect("/dev/full");
    let output = command.stdout(full).output().expect("it starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(
        stderr.contains("error: standard output could not be written: No space left on device"),
        "{stderr}"
    );
    assert!(!stderr.contains("panicked"), "{stderr}");
    (output.status.code().expect("it ended"), stderr)
}

/// Every command that writes to standard output.
#[test]
fn no_command_passes_on_a_full_standard_output_and_none_panics_without_a_reader() {
    let node = Node::healthy("h200x1");
    let usual = said(
        node.validator()
            .args(["collect", "--level", "quick", "--sysroot"])
            .arg(node.sysroot()),
    );
    assert_eq!(usual.0, 0, "{}", usual.2);
    let facts = node.out.write("facts.json", &usual.1);
    let facts = facts.to_str().expect("UTF-8");
    let profile = node.out.write("node.yaml", "gpus: {count: 1}\n");
    let profile = profile.to_str().expect("UTF-8");
    let sysroot = node.sysroot().to_str().expect("UTF-8");
    for arguments in [
        &["judge", facts, "--simulated-ok"][..],
        &["judge", facts, "--simulated-ok", "--json", "-"],
        &["collect", "--level", "quick", "--sysroot", sysroot],
        &["profile", "init", "--facts", facts],
        &["profile", "show", profile],
        &["profile", "check", profile],
        &["checks", "list"],
        &["checks", "list", "--json"],
        &["checks", "explain", "persistence_mode"],
        &["schema", "report"],
        &[
            "environment",
            "--explain",
            "torch 2.11 cu126 on B200 driver 570",
        ],
        &["kubernetes", "rbac", "gate"],
        &["generate", "man"],
        &["burn", "status"],
        &["--help"],
        &["run", "--help"],
        &["--version"],
    ] {
        let (usual, _, stderr) = said(node.validator().args(arguments));
        let (code, full) = on_full_stdout(node.validator().args(arguments));
        let expected = if usual == 0 { 2 } else { usual };
        assert_eq!(code, expected, "{arguments:?}: {full}, usually {stderr}");

        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = node.validator().args(arguments).stdout(writer).output();
        let output = output.expect("it starts");
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        assert!(!stderr.contains("panicked"), "{arguments:?}: {stderr}");
        // Facts without a reader are lost.
        let expected = if arguments[0] == "collect" { 2 } else { usual };
        let code = output.status.code();
        assert_eq!(code, Some(expected), "{arguments:?}: {stderr}");
    }
}

#[test]
fn one_place_for_two_reports_and_a_missing_sysroot_are_bad_input() {
    let node = Node::healthy("h200x1");
    let report = node.out.path("report");
    let report = report.to_str().expect("UTF-8");
    let same = format!("{}/./report", node.out.path("").display());
    let missing = node.out.path("none");
    let missing = missing.to_str().expect("UTF-8");
    for (arguments, says) in [
        (
            ["--json", report, "--junit", report],
            "two reports are requested in",
        ),
        (
            ["--json", report, "--markdown", &same],
            "two reports are requested in",
        ),
        (
            ["--json", "-", "--junit", "/dev/stdout"],
            "two reports are requested on standard output",
        ),
        (
            ["--json", report, "--sysroot", missing],
            "expected an existing folder",
        ),
    ] {
        let (code, stdout, stderr) = said(node.validator().arg("run").args(arguments));
        assert_eq!(code, 3, "{arguments:?}: {stdout}{stderr}");
        assert!(stderr.contains(says), "{arguments:?}: {stderr}");
        assert_eq!(stdout, "", "nothing was judged");
    }
    for command in ["collect", "burn", "environment"] {
        let (code, _, stderr) = said(node.validator().args([command, "--sysroot", missing]));
        assert_eq!(code, 3, "{command}: {stderr}");
        assert!(stderr.contains("expected an existing folder"), "{stderr}");
    }
}

#[test]
fn facts_are_not_judged_at_a_level_above_their_own() {
    let node = Node::healthy("h200x1");
    let facts = node.out.path("facts.json");
    let mut run = node.run_command(&["--level", "quick", "--facts"]);
    assert_eq!(node.finish(run.arg(&facts)).code, 0);
    for (level, code) in [("quick", 0), ("standard", 3), ("extended", 3)] {
        let mut judge = node.validator();
        judge
            .arg("judge")
            .arg(&facts)
            .args(["--simulated-ok", "--level", level]);
        let (ended, stdout, stderr) = said(&mut judge);
        assert_eq!(ended, code, "{level}: {stdout}{stderr}");
        let says = stderr.contains("the facts were collected at level quick");
        assert_eq!(says, code == 3, "{level}: {stderr}");
    }
}

/// How a command can mount a file system that only it sees: as root, else as root of a user
/// namespace.
fn private_mounts() -> Option<&'static [&'static str]> {
    let ways: [&[&str]; 2] = [&["--mount"], &["--mount", "--map-root-user"]];
    ways.into_iter().find(|way| {
        let mut command = Command::new("unshare");
        command
            .args(*way)
            .args(["mount", "-t", "tmpfs", "tmpfs", "/mnt"]);
        command
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|it| it.success())
    })
}

#[test]
fn a_full_and_a_read_only_folder_are_survived_without_a_half_written_file() {
    let Some(way) = private_mounts() else {
        eprintln!("not tested: this machine lets nobody mount a file system of their own");
        return;
    };
    let node = Node::healthy("h200x1");
    let folder = node.out.path("reports");
    std::fs::create_dir(&folder).expect("made");
    for (mount, reason, left) in [
        (
            "mount -t tmpfs -o size=64k tmpfs \"$0\"; cat /dev/zero >\"$0/filling\" 2>/dev/null",
            "No space left on device",
            "left: filling \n",
        ),
        (
            "mount -t tmpfs -o ro tmpfs \"$0\"",
            "Read-only file system",
            "left: \n",
        ),
    ] {
        let script = format!(
            "{mount}; \"$@\"; code=$?; echo \"left: $(ls -A \"$0\" | tr '\\n' ' ')\" >&2; exit $code"
        );
        let mut run = node.validator();
        run.args(["run", "--simulated-ok", "--level", "quick", "--sysroot"])
            .arg(node.sysroot());
        run.arg("--json").arg(folder.join("report.json"));
        let mut command = in_place_of(&run, "unshare");
        command
            .args(way)
            .args(["sh", "-c", &script])
            .arg(&folder)
            .arg(run.get_program())
            .args(run.get_args());
        let (code, stdout, stderr) = said(&mut command);
        assert_eq!(code, 2, "{stdout}{stderr}");
        assert!(stderr.contains(reason), "{reason}: {stderr}");
        assert!(stderr.ends_with(left), "{left}: {stderr}");
        let report: Value =
            serde_json::from_str(&saved_report(&stderr, "JSON report")).expect("JSON");
        assert_eq!(report["exit_code"], 0);
    }
}

/// What locales and time zones a machine may be set to.
fn oddities() -> Vec<Vec<(&'static str, &'static OsStr)>> {
    let text = OsStr::new;
    vec![
        vec![
            ("LC_ALL", text("tr_TR.UTF-8")),
            ("LANG", text("tr_TR.UTF-8")),
        ],
        vec![
            ("LC_ALL", text("de_DE.ISO-8859-1")),
            ("LC_NUMERIC", text("de_DE")),
        ],
        vec![("LC_ALL", text("C")), ("TZ", text("Asia/Kathmandu"))],
        vec![("TZ", text("Pacific/Kiritimati"))],
        vec![("TZ", text("garbage+99:99:99,M13.9.9/999"))],
        vec![("TZ", text(":/dev/zero"))],
        vec![("TZ", text("")), ("LANG", text(""))],
        vec![
            ("LANG", OsStr::from_bytes(b"\xff\xfe")),
            ("TZ", OsStr::from_bytes(b"\xc3\x28")),
        ],
    ]
}

/// RFC 3339 in UTC, and now.
fn assert_is_now_in_utc(time: &str) {
    assert!(time.ends_with('Z'), "{time}");
    let time: jiff::Timestamp = time.parse().expect("RFC 3339");
    let age = jiff::Timestamp::now().as_second() - time.as_second();
    assert!((0..120).contains(&age), "{time} is {age} s ago");
}

#[test]
fn no_locale_and_no_time_zone_changes_a_verdict_or_a_time() {
    let node = Node::with("h200x8", &["xid-79", "foreign-process", "hot-gpu"], &[]);
    let usual = node.run(&["--level", "quick", "--facts", "-"]);
    let facts = node.out.write("facts.json", &usual.stdout);
    let judge = || {
        let mut command = validator();
        command.arg("judge").arg(&facts).args(["--html", "-"]);
        command
    };
    let usual_judged = said(&mut judge());
    for oddity in oddities() {
        let ran = node.finish(
            node.run_command(&["--level", "quick", "--junit"])
                .arg(node.out.path("report.xml"))
                .envs(oddity.clone()),
        );
        assert_eq!(ran.report.verdicts(), usual.report.verdicts(), "{oddity:?}");
        assert_is_now_in_utc(ran.report.0["collected_at"].as_str().expect("a time"));
        let junit = node.out.read("report.xml");
        let document = roxmltree::Document::parse(&junit).expect("XML");
        for suite in document
            .descendants()
            .filter(|it| it.has_tag_name("testsuite"))
        {
            assert_is_now_in_utc(suite.attribute("timestamp").expect("a time"));
        }
        assert_eq!(
            said(judge().envs(oddity.clone())),
            usual_judged,
            "{oddity:?}"
        );
    }
}

fn generic_profile() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests/profiles/generic.yaml")
}

#[test]
fn github_actions_gets_annotations_and_a_summary_behind_that_of_other_steps() {
    let node = Node::with_fault("h200x8", "xid-79");
    let profile = generic_profile();
    let summary = node.out.write("summary.md", "what an earlier step wrote\n");
    let in_actions = |node: &Node, arguments: &[&str]| -> Ran {
        let mut command = node.run_command(arguments);
        command
            .arg("--profile")
            .arg(&profile)
            .args(["--level", "quick"]);
        command
            .env("GITHUB_ACTIONS", "true")
            .env("GITHUB_STEP_SUMMARY", &summary);
        node.finish(&mut command)
    };
    let ran = in_actions(&node, &[]);
    assert_eq!(ran.code, 1);
    let commands: Vec<&str> = ran
        .stdout
        .lines()
        .filter(|it| it.starts_with("::"))
        .collect();
    let of = |kind: &str| commands.iter().filter(|it| it.starts_with(kind)).count();
    assert!(of("::error ") >= 1, "{commands:?}");
    assert_eq!(of("::notice "), 1, "that it is simulated: {commands:?}");
    let path = profile.display().to_string();
    for command in commands.iter().filter(|it| it.starts_with("::error ")) {
        assert!(
            command.contains(&format!("file={path},title=")),
            "{command}"
        );
    }
    for check in ["kernel_log_xid", "gpu_reachable"] {
        assert!(
            commands
                .iter()
                .any(|it| it.starts_with("::error ") && it.contains(check)),
            "{check}: {commands:?}"
        );
    }
    let text = node.out.read("summary.md");
    assert!(
        text.starts_with("what an earlier step wrote\n## "),
        "{text}"
    );
    assert!(text.contains("SIMULATED FAIL"), "{text}");

    let off = in_actions(&node, &["--github=false"]);
    assert!(!off.stdout.contains("\n::"), "{}", off.stdout);
    assert_eq!(node.out.read("summary.md"), text, "nothing was appended");

    let healthy = Node::healthy("h200x1");
    let ran = in_actions(&healthy, &[]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    assert!(!ran.stdout.contains("::error"), "{}", ran.stdout);
    assert!(node.out.read("summary.md").len() > text.len());

    let mut command = node.run_command(&["--level", "quick", "--github"]);
    let ran = node.finish(command.env("GITHUB_STEP_SUMMARY", "/dev/full"));
    assert_eq!(
        ran.code, 1,
        "a summary that cannot be written changes no exit code"
    );
    assert!(
        ran.stderr
            .contains("the job summary cannot be appended to /dev/full"),
        "{}",
        ran.stderr
    );
}

/// A text that would end a CDATA section, colour a terminal, open a tag, and command a CI service.
const HOSTILE: &str =
    "x]]><script>&\u{1b}[31m\u{7}\n::add-mask::x\r\n##[error]y\u{202e}\u{fffe}\u{0b}|`@all";

/// A process whose executable has a hostile name; it is ended with the test.
struct HostileProcess(Child);

impl HostileProcess {
    fn start(node: &Node) -> Self {
        let path = node.out.path(&HOSTILE.replace('/', "_"));
        std::fs::copy("/bin/sleep", &path).expect("sleep can be copied");
        Self(Command::new(path).arg("600").spawn().expect("sleep starts"))
    }
}

impl Drop for HostileProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn hostile_names_and_messages_are_well_formed_in_every_report() {
    let first = Node::healthy("h200x1");
    let process = HostileProcess::start(&first);
    let change = format!(
        "processes.hostile={{gpu: 0, pid: {}, memory: 1GiB}}",
        process.0.id()
    );
    let node = Node::with("h200x1", &[], &[&change]);
    let message = |xid: &str, ending: &[u8]| {
        let start = format!("NVRM: Xid (PCI:0000:00:06): {xid}, pid=7, name=");
        [start.as_bytes(), ending].concat()
    };
    // The kernel escapes what is not printable, other sources of a log do not.
    let raw = message("48", HOSTILE.replace(['\n', '\r'], " ").as_bytes());
    let escaped = message(
        "64",
        br"x]]>\x1b[31m\x00\x0a::error::z\x0a##[group]\xff\xfe",
    );
    let broken = message("74", b"\xff\xfe\xc3\x28 ]]\xff>");
    node.append_to_kernel_log(&[&raw, &escaped, &broken]);

    let mut command = node.run_command(&["--level", "quick", "--github", "--verbose"]);
    for (option, name) in [
        ("--junit", "r.xml"),
        ("--markdown", "r.md"),
        ("--html", "r.html"),
        ("--metrics", "r.prom"),
    ] {
        command.arg(option).arg(node.out.path(name));
    }
    command.env("GITHUB_STEP_SUMMARY", node.out.path("summary.md"));
    let ran = node.finish(&mut command);
    assert_eq!(ran.code, 1, "{}", ran.stdout);
    assert_eq!(
        ran.report.not_green(),
        set(&["foreign_processes: warn", "kernel_log_xid: fail"])
    );
    for check in ["foreign_processes", "kernel_log_xid"] {
        let finding = ran.report.finding(check).to_string();
        assert!(
            finding.contains("x]]>"),
            "the hostile text got there: {finding}"
        );
    }

    assert_junit_counts_as_the_report(&node.out.read("r.xml"), &ran);
    for name in ["r.xml", "r.md", "r.html", "r.prom", "summary.md"] {
        let text = node.out.read(name);
        let control = text
            .chars()
            .find(|it| it.is_control() && !['\n', '\t'].contains(it));
        assert_eq!(control, None, "{name} holds a control character");
        assert!(
            !text.contains('\u{202e}'),
            "{name} changes the direction of writing"
        );
        assert!(
            !text.lines().any(|it| it.starts_with("::")),
            "{name} holds a command"
        );
    }
    assert!(
        !node.out.read("r.html").contains("<script>&"),
        "HTML is escaped"
    );
    assert!(
        !node.out.read("r.md").contains("<script>"),
        "Markdown is escaped"
    );
    let control = ran.stdout.chars().find(|it| it.is_control() && *it != '\n');
    assert_eq!(
        control, None,
        "a terminal would act on it: {:?}",
        ran.stdout
    );
    let errors = ran.stdout.lines().filter(|it| it.starts_with("::error "));
    assert_eq!(errors.count(), 1, "one check failed: {}", ran.stdout);
    for line in ran.stdout.lines() {
        let ours = ["::error ", "::warning ", "::notice "];
        assert!(
            !line.starts_with("::") || ours.iter().any(|it| line.starts_with(it)),
            "{line}"
        );
        assert!(!line.contains("##["), "{line}");
    }
}

/// As a strict reader counts, which refuses what XML 1.0 does not allow.
fn assert_junit_counts_as_the_report(junit: &str, ran: &Ran) {
    let illegal = junit.chars().find(|it| {
        !matches!(it, '\t' | '\n' | '\r' | '\u{20}'..='\u{d7ff}' | '\u{e000}'..='\u{fffd}' | '\u{10000}'..)
    });
    assert_eq!(illegal, None, "XML 1.0 has no such character");
    let document = roxmltree::Document::parse(junit).expect("well-formed");
    let count = |tag: &str| {
        document
            .descendants()
            .filter(|it| it.has_tag_name(tag))
            .count() as u64
    };
    let counts = &ran.report.0["counts"];
    for (tag, verdict) in [("failure", "fail"), ("error", "error"), ("skipped", "skip")] {
        assert_eq!(counts[verdict], count(tag), "{tag}");
    }
    assert_eq!(count("testcase"), ran.report.findings().len() as u64);
}
