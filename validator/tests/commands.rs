//! The binary as a person or a script uses it: exit codes, messages, files.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use validator_core::facts::{FACTS_FORMAT, Facts, GpuFacts, NvmlFacts, Reading};
use validator_core::level::Level;

fn validator() -> Command {
    isolated(Command::new(env!("CARGO_BIN_EXE_gpu-validator")))
}

fn isolated(mut command: Command) -> Command {
    // What the machine of the test sets must not reach into it.
    for (name, _) in std::env::vars_os() {
        let foreign = ["GPU_VALIDATOR_", "GITHUB_", "NO_COLOR"];
        if foreign
            .iter()
            .any(|it| name.to_string_lossy().starts_with(it))
        {
            command.env_remove(name);
        }
    }
    command.stdin(Stdio::null());
    command
}

fn output(command: &mut Command) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("the validator starts");
    (
        status.code().expect("it was not killed"),
        String::from_utf8(stdout).expect("UTF-8"),
        String::from_utf8(stderr).expect("UTF-8"),
    )
}

/// Facts of a machine with one GPU of which nothing but its persistence mode was read.
fn facts(persistence_mode: bool) -> Facts {
    Facts {
        format: FACTS_FORMAT,
        validator_version: "0.1.0".to_owned(),
        collected_at: "2026-11-20T03:04:05Z".to_owned(),
        level: Level::Standard,
        gpus: vec![GpuFacts {
            uuid: Reading::Value("GPU-00000000-0000-0000-0000-000000000000".to_owned()),
            persistence_mode: Reading::Value(persistence_mode),
            ..GpuFacts::default()
        }],
        nvml: NvmlFacts {
            initialized: Reading::Value(true),
            ..NvmlFacts::default()
        },
        ..Facts::default()
    }
}

fn write_facts(folder: &Path, name: &str, facts: &Facts) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, serde_json::to_vec(facts).expect("JSON")).expect("written");
    path
}

/// A profile that turns off every check but the two that [`facts`] can answer.
fn narrow_profile(folder: &Path) -> PathBuf {
    let (code, list, _) = output(validator().args(["checks", "list"]));
    assert_eq!(code, 0);
    let mut profile = "checks:\n".to_owned();
    for line in list.lines() {
        let id = line.split_whitespace().next().expect("an id");
        if !["persistence_mode", "run_complete"].contains(&id) {
            writeln!(
                profile,
                "  {id}: {{severity: off, reason: these facts are narrow}}"
            )
            .expect("memory");
        }
    }
    profile.push_str("  persistence_mode: {severity: fail, reason: it is what these facts hold}\n");
    let path = folder.join("narrow.yaml");
    fs::write(&path, profile).expect("written");
    path
}

#[test]
fn help_and_version_are_good_input_and_bad_arguments_are_not() {
    for arguments in [&["--help"][..], &["run", "--help"], &["--version"]] {
        let (code, stdout, _) = output(validator().args(arguments));
        assert_eq!(code, 0, "{arguments:?}");
        assert!(!stdout.is_empty());
    }
    for arguments in [
        &[][..],
        &["launch"],
        &["run", "--level", "fast"],
        &["judge"],
        &["run", "--junit"],
    ] {
        let (code, _, stderr) = output(validator().args(arguments));
        assert_eq!(code, 3, "{arguments:?}");
        assert!(!stderr.is_empty());
    }
}

#[test]
fn help_says_what_the_exit_codes_mean() {
    for arguments in [&["--help"][..], &["run", "--help"], &["judge", "--help"]] {
        let (_, stdout, _) = output(validator().args(arguments));
        for code in ["  0  ", "  1  ", "  2  ", "  3  ", "  4  "] {
            assert!(stdout.contains(code), "{arguments:?} does not say {code}");
        }
    }
}

#[test]
fn a_machine_without_gpu_is_not_judged_and_says_what_is_missing() {
    if Path::new("/dev/nvidiactl").exists() {
        eprintln!("this machine has a GPU");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let reports = [
        ("--junit", "report.xml", "<?xml"),
        ("--json", "report.json", "{"),
        ("--markdown", "report.md", "## "),
        ("--html", "report.html", "<!DOCTYPE html>"),
        ("--metrics", "report.prom", "# HELP"),
        ("--facts", "facts.json", "{"),
    ];
    let mut command = validator();
    command.args(["run", "--level", "quick"]);
    for (option, name, _) in reports {
        command.arg(option).arg(path(name));
    }
    let (code, stdout, stderr) = output(&mut command);
    assert_eq!(code, 2, "{stdout}{stderr}");
    assert!(stdout.lines().count() <= 11, "{stdout}");
    assert!(
        stdout.starts_with("NOT JUDGED: no GPU was judged: no NVIDIA GPU on the PCI bus."),
        "{stdout}"
    );
    for what in ["NVML library: ", "CUDA driver library: ", "kernel module: "] {
        let lines = stdout
            .lines()
            .filter(|it| it.trim_start().starts_with(what));
        assert_eq!(lines.count(), 1, "one line about {what} in\n{stdout}");
    }
    assert!(!stdout.contains('\u{1b}'), "no colour into a pipe");
    for (_, name, beginning) in reports {
        let text = fs::read_to_string(path(name)).expect("it was written");
        assert!(text.starts_with(beginning), "{name} begins with {text:.40}");
    }
    let left = fs::read_dir(folder.path()).expect("listed").count();
    assert_eq!(left, reports.len(), "no temporary file is left");
}

#[test]
fn judging_what_a_run_saw_gives_the_same_reports() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let reports = [
        ("--junit", "xml"),
        ("--json", "json"),
        ("--markdown", "md"),
        ("--html", "html"),
        ("--metrics", "prom"),
    ];
    let mut run = validator();
    run.args(["run", "--facts"]).arg(path("facts.json"));
    let mut judge = validator();
    judge.arg("judge").arg(path("facts.json"));
    for (option, extension) in reports {
        run.arg(option).arg(path(&format!("run.{extension}")));
        judge.arg(option).arg(path(&format!("judge.{extension}")));
    }
    let (run_code, run_stdout, _) = output(&mut run);
    let (judge_code, judge_stdout, _) = output(&mut judge);
    assert_eq!(run_code, judge_code);
    assert_eq!(run_stdout, judge_stdout);
    for (_, extension) in reports {
        let read = |name: &str| fs::read(path(&format!("{name}.{extension}"))).expect("written");
        assert!(read("run") == read("judge"), "{extension} differs");
    }
}

#[test]
fn exit_codes_of_judged_facts() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = narrow_profile(folder.path());
    let good = write_facts(folder.path(), "good.json", &facts(true));
    let bad = write_facts(folder.path(), "bad.json", &facts(false));
    let mut stopped_facts = facts(true);
    stopped_facts.interrupted = Some("signal 15 (SIGTERM)".to_owned());
    let stopped = write_facts(folder.path(), "stopped.json", &stopped_facts);
    for (path, expected, verdict) in [
        (&good, 0, "PASS: "),
        (&bad, 1, "FAIL: "),
        (&stopped, 2, "NOT JUDGED: "),
    ] {
        let (code, stdout, stderr) = output(
            validator()
                .arg("judge")
                .arg(path)
                .arg("--profile")
                .arg(&profile),
        );
        assert_eq!(code, expected, "{stdout}{stderr}");
        let lines: Vec<&str> = stdout
            .lines()
            .filter(|it| it.starts_with(verdict))
            .collect();
        assert_eq!(lines.len(), 2, "the answer and the counts: {stdout}");
        assert_eq!(stdout.lines().next(), Some(lines[0]));
    }
}

#[test]
fn simulated_facts_do_not_pass_unless_they_are_accepted() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = narrow_profile(folder.path());
    let mut simulated = facts(true);
    simulated.simulated = Some("one healthy H200".to_owned());
    let path = write_facts(folder.path(), "simulated.json", &simulated);
    let judge = |arguments: &[&str]| {
        let mut command = validator();
        command
            .arg("judge")
            .arg(&path)
            .arg("--profile")
            .arg(&profile)
            .args(arguments);
        output(&mut command)
    };
    let (code, stdout, _) = judge(&["--simulated-ok"]);
    assert_eq!(code, 0);
    assert!(stdout.starts_with("SIMULATED PASS: "), "{stdout}");
    assert!(stdout.contains("\nSIMULATED: "), "{stdout}");
    for refusing in [&[][..], &["--forbid-simulated", "--simulated-ok"]] {
        let (code, stdout, _) = judge(refusing);
        assert_eq!(code, 2);
        assert!(
            stdout.contains("which only --simulated-ok accepts"),
            "{stdout}"
        );
    }
}

#[test]
fn a_wrong_profile_is_bad_input_and_is_named_with_its_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = folder.path().join("profile.yaml");
    fs::write(&profile, "gpus:\n  count: 8\n  persistance_mode: true\n").expect("written");
    let good = write_facts(folder.path(), "good.json", &facts(true));
    for arguments in [
        vec!["run".as_ref(), "--profile".as_ref(), profile.as_os_str()],
        vec![
            "judge".as_ref(),
            good.as_os_str(),
            "--profile".as_ref(),
            profile.as_os_str(),
        ],
        vec!["profile".as_ref(), "check".as_ref(), profile.as_os_str()],
    ] {
        let (code, stdout, stderr) = output(validator().args(&arguments));
        assert_eq!(code, 3, "{stdout}");
        assert!(stderr.contains("profile.yaml"), "{stderr}");
        assert!(stderr.contains("persistance_mode"), "{stderr}");
        assert!(stderr.contains('3'), "line 3 is not named: {stderr}");
        assert_eq!(stdout, "", "nothing was judged");
    }
}

#[test]
fn facts_that_cannot_be_read_are_bad_input() {
    let folder = tempfile::tempdir().expect("a folder");
    let cases = [
        ("garbage.json", "this is no JSON", "not a facts file"),
        ("other.json", "{\"format\": 1}", "not a facts file"),
        ("empty.json", "", "not a facts file"),
        (
            "newer.json",
            "{\"format\": 99, \"a_new_field\": 1}",
            "use a newer gpu-validator",
        ),
    ];
    for (name, content, says) in cases {
        let path = folder.path().join(name);
        fs::write(&path, content).expect("written");
        let (code, stdout, stderr) = output(validator().arg("judge").arg(&path));
        assert_eq!(code, 3, "{name}");
        assert!(stderr.contains(says) && stderr.contains(name), "{stderr}");
        assert_eq!(stdout, "");
    }
    let newer = Facts {
        format: FACTS_FORMAT + 1,
        ..facts(true)
    };
    let path = write_facts(folder.path(), "next.json", &newer);
    let (code, _, stderr) = output(validator().arg("judge").arg(&path));
    assert_eq!(code, 3);
    assert!(stderr.contains("use a newer gpu-validator"), "{stderr}");
    let (code, _, stderr) = output(validator().args(["judge", "/nonexistent/facts.json"]));
    assert_eq!(code, 3);
    assert!(stderr.contains("/nonexistent/facts.json"), "{stderr}");
}

#[test]
fn a_folder_is_judged_file_by_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = narrow_profile(folder.path());
    let fleet = folder.path().join("fleet");
    fs::create_dir(&fleet).expect("made");
    let judge = |expected: i32| -> String {
        let mut command = validator();
        command
            .arg("judge")
            .arg(&fleet)
            .arg("--profile")
            .arg(&profile);
        let (code, stdout, stderr) = output(&mut command);
        assert_eq!(code, expected, "{stdout}{stderr}");
        stdout
    };
    let mut command = validator();
    let (code, _, stderr) = output(command.arg("judge").arg(&fleet));
    assert_eq!(code, 3, "an empty folder");
    assert!(stderr.contains("no *.json file"), "{stderr}");

    for index in 0..20 {
        write_facts(&fleet, &format!("node-{index:02}.json"), &facts(true));
    }
    assert!(judge(0).ends_with("20 files: 20 pass, 0 fail, 0 not judged, 0 busy\n"));

    fs::write(fleet.join("broken.json"), "{").expect("written");
    fs::write(fleet.join("notes.txt"), "no facts").expect("written");
    let stdout = judge(2);
    assert!(
        stdout
            .ends_with("21 files: 20 pass, 0 fail, 1 not judged (1 of them unreadable), 0 busy\n"),
        "{stdout}"
    );
    assert!(stdout.starts_with("NOT JUDGED  broken.json"), "{stdout}");

    write_facts(&fleet, "node-07.json", &facts(false));
    let stdout = judge(1);
    let failed: Vec<&str> = stdout.lines().filter(|it| it.starts_with("FAIL")).collect();
    assert_eq!(failed.len(), 1, "{stdout}");
    assert!(
        failed[0].contains("node-07.json") && failed[0].contains("persistence_mode"),
        "{stdout}"
    );

    let mut command = validator();
    command
        .arg("judge")
        .arg(&fleet)
        .arg("--profile")
        .arg(&profile)
        .args(["--json", "-"]);
    let (code, stdout, stderr) = output(&mut command);
    assert_eq!(code, 1);
    let report: serde_json::Value = serde_json::from_str(&stdout).expect("only JSON");
    assert_eq!(report["totals"]["fail"], 1);
    assert_eq!(report["files"].as_array().map(Vec::len), Some(21));
    assert!(stderr.contains("21 files: "), "{stderr}");

    let mut command = validator();
    command.arg("judge").arg(&fleet).args(["--junit", "x.xml"]);
    assert_eq!(output(&mut command).0, 3);
}

#[test]
fn a_report_that_cannot_be_written_is_saved_elsewhere_and_is_no_pass() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = narrow_profile(folder.path());
    let good = write_facts(folder.path(), "good.json", &facts(true));
    let bad = write_facts(folder.path(), "bad.json", &facts(false));
    for (path, reason) in [
        ("/nonexistent/report.xml", "No such file or directory"),
        ("/dev/full", "No space left on device"),
        ("/proc/report.xml", ""),
    ] {
        for (facts, expected) in [(&good, 2), (&bad, 1)] {
            let mut command = validator();
            command
                .arg("judge")
                .arg(facts)
                .arg("--profile")
                .arg(&profile)
                .args(["--junit", path])
                .env("TMPDIR", folder.path());
            let (code, stdout, stderr) = output(&mut command);
            assert_eq!(code, expected, "a lost report is no pass: {stderr}");
            assert!(
                stderr.contains(path) && stderr.contains(reason),
                "{path}: {stderr}"
            );
            assert!(!stdout.contains("<testsuites"), "{path}: {stdout}");
            let saved = stderr.split("; it is saved as ").nth(1).expect("its place");
            let saved = fs::read_to_string(saved.trim()).expect("it is there");
            assert!(saved.contains("<testsuites"), "{path}: {saved}");
        }
    }
}

#[test]
fn a_limit_on_the_size_of_files_is_like_a_full_disk() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = narrow_profile(folder.path());
    let bad = write_facts(folder.path(), "bad.json", &facts(false));
    let report = folder.path().join("report.xml");
    let mut command = Command::new("sh");
    command
        .args(["-c", r#"ulimit -f 0; exec "$@""#, "sh"])
        .arg(validator().get_program())
        .arg("judge")
        .arg(&bad)
        .arg("--profile")
        .arg(&profile)
        .arg("--junit")
        .arg(&report);
    let (code, stdout, stderr) = output(&mut command);
    assert_eq!(code, 1, "the verdict keeps its exit code: {stderr}");
    assert!(stderr.contains("File too large"), "{stderr}");
    assert!(stdout.contains("<testsuites"), "{stdout}");
    let left: Vec<_> = fs::read_dir(folder.path())
        .expect("the folder")
        .filter_map(|entry| entry.ok().map(|it| it.file_name()))
        .filter(|name| name.to_string_lossy().contains("report"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_report_on_standard_output_stands_there_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let good = write_facts(folder.path(), "good.json", &facts(true));
    let mut command = validator();
    let (_, stdout, stderr) = output(command.arg("judge").arg(&good).args(["--json", "-"]));
    serde_json::from_str::<serde_json::Value>(&stdout).expect("only JSON");
    assert!(stderr.contains("test case"), "{stderr}");
}

#[test]
fn nobody_reading_is_no_panic_and_no_other_verdict() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = narrow_profile(folder.path());
    let bad = write_facts(folder.path(), "bad.json", &facts(false));
    for arguments in [
        vec!["judge".as_ref(), bad.as_os_str()],
        vec!["checks".as_ref(), "list".as_ref()],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = validator();
        command.args(&arguments).stdout(writer);
        if arguments[0] == "judge" {
            command.arg("--profile").arg(&profile);
        }
        let (code, _, stderr) = output(&mut command);
        assert!(!stderr.contains("panicked"), "{stderr}");
        assert_eq!(code, i32::from(arguments[0] == "judge"));
    }
}

#[test]
fn github_gets_annotations_and_a_summary() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = narrow_profile(folder.path());
    let bad = write_facts(folder.path(), "bad.json", &facts(false));
    let summary = folder.path().join("summary.md");
    fs::write(&summary, "before\n").expect("written");
    let mut command = validator();
    command
        .arg("judge")
        .arg(&bad)
        .arg("--profile")
        .arg(&profile)
        .env("GITHUB_ACTIONS", "true")
        .env("GITHUB_STEP_SUMMARY", &summary);
    let (code, stdout, _) = output(&mut command);
    assert_eq!(code, 1);
    let commands: Vec<&str> = stdout.lines().filter(|it| it.starts_with("::")).collect();
    assert_eq!(commands.len(), 1, "{stdout}");
    assert!(
        commands[0].starts_with("::error file=") && commands[0].contains("persistence_mode"),
        "{stdout}"
    );
    let text = fs::read_to_string(&summary).expect("readable");
    assert!(text.starts_with("before\n## "), "{text}");

    let (_, stdout, _) = output(command.arg("--github=false"));
    assert!(!stdout.contains("::error"), "{stdout}");
}

#[test]
fn the_environment_stands_in_for_options() {
    let folder = tempfile::tempdir().expect("a folder");
    let profile = narrow_profile(folder.path());
    let bad = write_facts(folder.path(), "bad.json", &facts(false));
    let junit = folder.path().join("report.xml");
    let mut command = validator();
    command
        .arg("judge")
        .arg(&bad)
        .env("GPU_VALIDATOR_PROFILE", &profile)
        .env("GPU_VALIDATOR_JUNIT", &junit);
    let (code, stdout, stderr) = output(&mut command);
    assert_eq!((code, stderr.as_str()), (1, ""));
    assert!(stdout.contains("narrow.yaml"), "{stdout}");
    assert!(junit.exists());
}

#[test]
fn color_is_asked_for_or_absent() {
    let folder = tempfile::tempdir().expect("a folder");
    let good = write_facts(folder.path(), "good.json", &facts(true));
    let judge = |arguments: &[&str]| output(validator().arg("judge").arg(&good).args(arguments)).1;
    assert!(!judge(&[]).contains('\u{1b}'));
    assert!(!judge(&["--color", "never"]).contains('\u{1b}'));
    assert!(judge(&["--color", "always"]).contains('\u{1b}'));
}

#[test]
fn checks_are_explained_and_mistyped_ids_corrected() {
    let (code, stdout, _) = output(validator().args(["checks", "explain", "persistence_mode"]));
    assert_eq!(code, 0);
    assert!(stdout.contains("What to do:"), "{stdout}");
    let (code, _, stderr) = output(validator().args(["checks", "explain", "persistance-mode"]));
    assert_eq!(code, 3);
    assert!(
        stderr.contains("did you mean `persistence_mode`?"),
        "{stderr}"
    );
}

#[test]
fn schemas_man_page_and_completions_are_there() {
    for format in ["profile", "report", "facts"] {
        let (code, stdout, _) = output(validator().args(["schema", format]));
        assert_eq!(code, 0);
        let schema: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
        assert_eq!(schema["type"], "object", "{format}");
    }
    let (_, man, _) = output(validator().args(["generate", "man"]));
    assert!(man.contains(".TH gpu-validator") && man.contains("COMMAND JUDGE"));
    assert!(
        !man.contains("COMMAND WORKER"),
        "hidden commands stay hidden"
    );
    for shell in ["bash", "fish", "zsh"] {
        let (code, text, _) = output(validator().args(["generate", "completions", shell]));
        assert_eq!(code, 0);
        assert!(text.contains("gpu-validator"), "{shell}");
    }
}

/// A run that is stuck when it loads the driver's libraries: each is a pipe without a writer. Its
/// first report is already there.
fn stuck_run(folder: &Path) -> (std::process::Child, PathBuf) {
    for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let made = Command::new("mkfifo").arg(folder.join(library)).status();
        assert!(made.is_ok_and(|it| it.success()), "mkfifo");
    }
    let junit = folder.join("report.xml");
    #[expect(clippy::zombie_processes, reason = "the caller waits for it")]
    let child = validator()
        .args(["run", "--level", "quick", "--sysroot"])
        .arg(folder)
        .arg("--junit")
        .arg(&junit)
        .env("LD_LIBRARY_PATH", folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the validator starts");
    for _ in 0..500 {
        if junit.exists() {
            return (child, junit);
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("no report is written before the first stage");
}

fn signal(child: &std::process::Child, name: &str) {
    let sent = Command::new("kill")
        .args(["-s", name, &child.id().to_string()])
        .status();
    assert!(sent.is_ok_and(|it| it.success()), "kill -s {name}");
}

#[test]
fn a_run_that_is_asked_to_stop_leaves_reports_that_say_so() {
    for name in ["TERM", "INT"] {
        let folder = tempfile::tempdir().expect("a folder");
        let (child, junit) = stuck_run(folder.path());
        signal(&child, name);
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(2), "SIG{name}");
        let stdout = String::from_utf8(output.stdout).expect("UTF-8");
        assert!(
            stdout.starts_with("NOT JUDGED: the run is incomplete: signal ")
                && stdout.contains(&format!("(SIG{name})")),
            "{stdout}"
        );
        let report = fs::read_to_string(junit).expect("readable");
        assert!(report.contains("INCOMPLETE host") && report.contains("</testsuites>"));
    }
}

#[test]
fn a_second_signal_ends_a_run_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let (mut child, _) = stuck_run(folder.path());
    signal(&child, "TERM");
    let asked = std::time::Instant::now();
    // The same signal twice at once is one to the kernel.
    while child.try_wait().expect("it can be waited for").is_none() {
        std::thread::sleep(std::time::Duration::from_millis(50));
        if child.try_wait().expect("it can be waited for").is_none() {
            signal(&child, "TERM");
        }
    }
    assert!(asked.elapsed() < std::time::Duration::from_secs(2));
    let status = child.wait().expect("it ended");
    assert_eq!(status.code(), Some(2));
}

#[test]
fn a_run_that_is_killed_leaves_a_report_that_passes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let junit = folder.path().join("report.xml");
    let (mut child, _) = stuck_run(folder.path());
    signal(&child, "KILL");
    child.wait().expect("it ended");
    let report = fs::read_to_string(junit).expect("readable");
    assert!(report.contains("INCOMPLETE host"), "{report}");
    assert!(!report.contains("errors=\"0\""), "{report}");
}

#[test]
fn a_profile_is_shown_with_what_it_extends_whole_and_by_key() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(
        folder.path().join("base.yaml"),
        "firstboot: {on_failure: taint_node}\nlevels: {standard: {deadline_s: 90}}\n",
    )
    .expect("written");
    let profile = folder.path().join("profile.yaml");
    fs::write(&profile, "extends: base.yaml\ngpus: {count: 8}\n").expect("written");
    let show = |key: &[&str]| {
        let mut command = validator();
        output(command.args(["profile", "show"]).arg(&profile).args(key))
    };
    for (key, shown) in [
        ("firstboot.on_failure", "taint_node\n"),
        ("levels.standard.deadline_s", "90.0\n"),
        ("gpus.count", "8\n"),
        ("gpus.model", "null\n"),
    ] {
        assert_eq!(
            show(&["--key", key]),
            (0, shown.to_owned(), String::new()),
            "{key}"
        );
    }
    let (code, whole, _) = show(&[]);
    assert_eq!(code, 0);
    let whole: serde_json::Value = serde_json::from_str(&whole).expect("JSON");
    assert_eq!(whole["gpus"]["count"], 8);
    let (code, _, stderr) = show(&["--key", "gpus.cuont"]);
    assert_eq!(code, 3);
    assert!(stderr.contains("there is no `cuont`"), "{stderr}");
}

/// The report of the recorded facts of four H200s on a terminal of this size. The lines of `-v`, one
/// a check, are left to the terminal, so that a search finds them whole.
fn report_on_terminal(columns: &str, rows: &str, variable: Option<&str>) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let facts = folder.join("../tests/facts/h200x4.facts.json");
    let mut command = isolated(Command::new("python3"));
    command.arg(folder.join("tests/on_terminal.py"));
    command.args([columns, rows, env!("CARGO_BIN_EXE_gpu-validator"), "judge"]);
    command.arg(facts).args(["--color", "never"]);
    command.env_remove("COLUMNS");
    if let Some(columns) = variable {
        command.env("COLUMNS", columns);
    }
    let (code, stdout, stderr) = output(&mut command);
    assert_eq!(code, 0, "{stdout}{stderr}");
    stdout
}

#[test]
fn a_report_has_the_width_of_its_terminal() {
    let widest = |report: &str| {
        let lines = report.lines().map(|it| it.chars().count());
        lines.max().unwrap_or_default()
    };
    let wide = widest(&report_on_terminal("200", "50", None));
    assert!((101..=200).contains(&wide), "{wide}");
    for (columns, rows, variable) in [
        ("80", "24", None),
        // A serial line and some CI services set no rows.
        ("80", "0", None),
        // The variable comes first, and completes a terminal without a size.
        ("200", "50", Some("80")),
        ("0", "0", Some("80")),
    ] {
        let report = report_on_terminal(columns, rows, variable);
        let case = format!("{columns} x {rows}, COLUMNS {variable:?}");
        assert!((61..=80).contains(&widest(&report)), "{case}:\n{report}");
    }
}
