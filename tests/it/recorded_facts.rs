//! Facts and profiles as files: judged elsewhere they give the same reports, made anonymous they
//! give the same verdicts, and files that are none are refused.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::node::{Node, Ran, Scratch, said, set, validator};

fn shipped_profile(name: &str) -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    workspace.join("manifests/profiles").join(name)
}

/// `gpu-validator judge FACTS`, with a JSON report at `NAME.json`.
fn judge(folder: &Scratch, facts: &Path, name: &str, arguments: &[&str]) -> Ran {
    let report = format!("{name}.json");
    let mut command = validator();
    command
        .args(["judge", "--simulated-ok"])
        .arg(facts)
        .args(arguments);
    command.arg("--json").arg(folder.path(&report));
    Ran::of(&mut command, || folder.read(&report))
}

const REPORTS: [(&str, &str); 5] = [
    ("--junit", "xml"),
    ("--json", "json"),
    ("--markdown", "md"),
    ("--html", "html"),
    ("--metrics", "prom"),
];

fn with_reports(command: &mut Command, folder: &Scratch, name: &str) {
    for (option, extension) in REPORTS {
        command
            .arg(option)
            .arg(folder.path(&format!("{name}.{extension}")));
    }
}

#[test]
fn judging_what_a_run_saw_gives_the_same_bytes() {
    let profile = shipped_profile("generic.yaml");
    for (name, faults, code) in [
        ("h200x8", &[][..], 0),
        ("h200x8", &["xid-79"], 1),
        ("h200x8", &["nvml-crash", "foreign-process", "xid-31"], 2),
        (
            "p5.48xlarge",
            &["ecc-volatile-uncorrectable", "pcie-link-narrow", "hot-gpu"],
            1,
        ),
    ] {
        let node = Node::with(name, faults, &[]);
        for arguments in [
            &["--color", "never"][..],
            &["--color", "always", "--verbose"],
        ] {
            let mut run = node.validator();
            run.args(["run", "--simulated-ok", "--sysroot"])
                .arg(node.sysroot())
                .args(arguments);
            run.arg("--profile").arg(&profile);
            run.arg("--facts").arg(node.out.path("facts.json"));
            with_reports(&mut run, &node.out, "run");
            let (run_code, run_stdout, run_stderr) = said(&mut run);
            assert_eq!(run_code, code, "{name} {faults:?}: {run_stdout}");
            let mut judge = validator();
            judge
                .args(["judge", "--simulated-ok"])
                .arg(node.out.path("facts.json"))
                .args(arguments);
            judge.arg("--profile").arg(&profile);
            with_reports(&mut judge, &node.out, "judge");
            let judged = said(&mut judge);
            assert_eq!(
                judged,
                (run_code, run_stdout, run_stderr),
                "{name} {faults:?}"
            );
            for (_, extension) in REPORTS {
                let (run, judge) = (format!("run.{extension}"), format!("judge.{extension}"));
                let (of_run, of_judge) = (node.out.read(&run), node.out.read(&judge));
                let pairs = of_run
                    .split_inclusive('>')
                    .zip(of_judge.split_inclusive('>'));
                let differing: Vec<_> = pairs.filter(|(run, judge)| run != judge).collect();
                assert!(of_run == of_judge, "{extension} differs: {differing:?}");
            }
        }
    }
}

#[test]
fn a_profile_of_a_healthy_node_passes_on_it_and_not_on_another() {
    let mut profiles = Vec::new();
    for (name, level) in [
        ("h200x1", "standard"),
        ("h200x8", "standard"),
        ("p5.48xlarge", "standard"),
        ("g4dn.12xlarge", "standard"),
        ("workstation", "standard"),
        ("mig", "standard"),
    ] {
        let node = Node::healthy(name);
        let facts = node.out.path("facts.json");
        let mut collect = node.validator();
        collect
            .args(["collect", "--level", level, "--sysroot"])
            .arg(node.sysroot());
        assert_eq!(
            said(collect.arg("-o").arg(&facts)),
            (0, String::new(), String::new())
        );
        let profile = node.out.path("profile.yaml");
        let mut init = validator();
        init.args(["profile", "init", "--facts"])
            .arg(&facts)
            .arg("-o")
            .arg(&profile);
        assert_eq!(said(&mut init), (0, String::new(), String::new()), "{name}");
        let (code, stdout, stderr) = said(validator().args(["profile", "check"]).arg(&profile));
        assert_eq!(code, 0, "{stdout}{stderr}");
        let ran = node.run(&[
            "--level",
            level,
            "--profile",
            profile.to_str().expect("UTF-8"),
        ]);
        assert_eq!(ran.code, 0, "{name}: {}", ran.stdout);
        assert_eq!(ran.report.not_green(), set(&[]), "{name}");
        profiles.push((name, node, profile, facts));
    }
    for (name, node, profile, _) in &profiles {
        let profile = profile.to_str().expect("UTF-8");
        for (other, _, _, facts) in profiles.iter().filter(|(other, ..)| other != name) {
            let ran = judge(&node.out, facts, "other", &["--profile", profile]);
            assert_eq!(
                ran.code, 1,
                "{other} by the profile of {name}: {}",
                ran.stdout
            );
        }
    }
    let (_, _, profile, facts) = &profiles[0];
    let mut again = validator();
    again
        .args(["profile", "init", "--facts"])
        .arg(facts)
        .arg("-o")
        .arg(profile);
    let (code, _, stderr) = said(&mut again);
    assert_eq!(code, 3, "a profile that is there is not overwritten");
    assert!(stderr.contains("is already there"), "{stderr}");
}

/// Everything in the facts that has the form of a UUID, and serial numbers.
fn identifiers(facts: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    match facts {
        Value::String(text) => {
            let is_part = |character: char| character.is_ascii_hexdigit() || character == '-';
            let words = text.split(|character| !is_part(character));
            let uuids = words.filter(|it| it.len() >= 36 && it.matches('-').count() >= 4);
            found.extend(uuids.map(|it| it[it.len() - 36..].to_owned()));
        }
        Value::Array(values) => found.extend(values.iter().flat_map(identifiers)),
        Value::Object(map) => {
            for (key, value) in map {
                found.extend(identifiers(&Value::String(key.clone())));
                found.extend(identifiers(value));
                if let (true, Some(serial)) = (key == "serial", value["value"].as_str()) {
                    found.insert(serial.to_owned());
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
    found
}

#[test]
fn anonymous_facts_identify_nothing_and_are_judged_alike() {
    const HOST: &str = "gpu-node-17.example.net";
    let node = Node::with(
        "p5.48xlarge",
        &["xid-31", "ecc-off", "foreign-process"],
        &[],
    );
    for file in ["proc/sys/kernel/hostname", "etc/hostname"] {
        std::fs::write(node.sysroot().join(file), format!("{HOST}\n")).expect("written");
    }
    let collect = |name: &str, arguments: &[&str]| -> PathBuf {
        let path = node.out.path(name);
        let mut command = node.validator();
        command
            .args(["collect", "--sysroot"])
            .arg(node.sysroot())
            .args(arguments);
        let (code, _, stderr) = said(command.arg("-o").arg(&path));
        assert_eq!((code, stderr.as_str()), (0, ""));
        path
    };
    let raw: Value = serde_json::from_str(
        &std::fs::read_to_string(collect("first.json", &[])).expect("readable"),
    )
    .expect("JSON");
    let mut secrets = identifiers(&raw);
    assert!(
        secrets.len() >= 16,
        "8 UUIDs and 8 serial numbers at least: {secrets:?}"
    );
    let line = |secret: &String| format!("NVRM: GPU at PCI:0000:53:00: {}", secret.to_uppercase());
    let mut lines: Vec<String> = secrets.iter().map(line).collect();
    lines.push(format!("NVRM: {HOST} and gpu-node-17 said so"));
    let lines: Vec<&[u8]> = lines.iter().map(String::as_bytes).collect();
    node.append_to_kernel_log(&lines);
    secrets.extend([
        HOST.to_owned(),
        "gpu-node-17".to_owned(),
        "example.net".to_owned(),
    ]);

    let raw = collect("raw.json", &[]);
    let anonymous = collect("anonymous.json", &["--anonymize"]);
    let text = node.out.read("anonymous.json").to_lowercase();
    let raw_text = node.out.read("raw.json").to_lowercase();
    for secret in &secrets {
        let secret = secret.to_lowercase();
        assert!(raw_text.contains(&secret), "{secret} is in the raw facts");
        assert!(!text.contains(&secret), "{secret} is left");
    }
    let verdicts = |facts: &Path, name: &str| -> Vec<(String, String)> {
        let ran = judge(&node.out, facts, name, &[]);
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let findings = ran.report.findings().iter();
        findings
            .map(|it| (text(&it["check"]), text(&it["verdict"])))
            .collect()
    };
    assert_eq!(
        verdicts(&raw, "raw-report"),
        verdicts(&anonymous, "anonymous-report")
    );
    let ran = judge(&node.out, &anonymous, "anonymous-report", &[]);
    assert!(ran.stdout.contains("anonymized: "), "{}", ran.stdout);
}

/// The arguments are refused with exit code 3, at once, and stderr names the file and holds `says`.
fn refused(arguments: &[&Path], file: &Path, says: &str) {
    let started = Instant::now();
    let (code, stdout, stderr) = said(validator().args(arguments));
    assert_eq!(code, 3, "{arguments:?}: {stdout}{stderr}");
    assert_eq!(stdout, "", "nothing was judged");
    let name = file.file_name().expect("a name").to_string_lossy();
    assert!(
        stderr.contains(&*name) && stderr.contains(says),
        "{says}: {stderr}"
    );
    assert!(
        stderr.len() < 4_000,
        "{} bytes are no message to a person",
        stderr.len()
    );
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn files_that_are_no_facts_are_refused() {
    let node = Node::healthy("h200x1");
    let facts = node.out.path("facts.json");
    let mut collect = node.validator();
    collect.args(["collect", "--sysroot"]).arg(node.sysroot());
    assert_eq!(said(collect.arg("-o").arg(&facts)).0, 0);
    let text = node.out.read("facts.json");

    for parts in 0..20 {
        let end = text.len() * parts / 20;
        let path = node.out.write("truncated.json", &text[..end]);
        refused(&["judge".as_ref(), &path], &path, "not a facts file");
    }
    let mut facts: Value = serde_json::from_str(&text).expect("JSON");
    let format = facts["format"].as_u64().expect("a number");
    facts["format"] = (format + 1).into();
    facts["what_only_it_knows"] = "x".into();
    let path = node.out.write("newer.json", facts.to_string());
    refused(
        &["judge".as_ref(), &path],
        &path,
        "use a newer gpu-validator",
    );
    refused(
        &[
            "profile".as_ref(),
            "init".as_ref(),
            "--facts".as_ref(),
            &path,
        ],
        &path,
        "use a newer gpu-validator",
    );
    // The same format with a field that it does not have is not what this version wrote.
    facts["format"] = format.into();
    let path = node.out.write("unknown-field.json", facts.to_string());
    refused(&["judge".as_ref(), &path], &path, "what_only_it_knows");
    let garbage: Vec<u8> = (0..100_000_u32)
        .map(|it| it.wrapping_mul(2_654_435_761).to_be_bytes()[0])
        .collect();
    for (name, content) in [
        ("garbage.json", garbage),
        ("empty.json", Vec::new()),
        ("null.json", b"null".to_vec()),
        ("nested.json", b"[".repeat(1 << 20)),
        ("nested-objects.json", b"{\"host\":".repeat(1 << 17)),
        ("no-facts.json", b"{\"format\":1}".to_vec()),
        ("negative-format.json", b"{\"format\":-1}".to_vec()),
    ] {
        let path = node.out.write(name, content);
        refused(&["judge".as_ref(), &path], &path, "not a facts file");
    }
}

/// The paths of all readings that hold a value; of the entries of a list, those of the first stand
/// for all.
fn readings(facts: &Value, path: &str, found: &mut Vec<String>) {
    match facts {
        Value::Object(map) => {
            if map.len() == 1 && map.contains_key("value") {
                found.push(path.to_owned());
            }
            for (name, value) in map {
                readings(value, &format!("{path}/{name}"), found);
            }
        }
        Value::Array(values) => {
            if let Some(first) = values.first() {
                readings(first, &format!("{path}/0"), found);
            }
        }
        _ => {}
    }
}

/// On a node that passes, each reading in turn is made one that could not be read.
#[test]
fn a_reading_that_is_taken_out_never_passes() {
    let node = Node::healthy("p5.48xlarge");
    let facts = node.out.path("facts.json");
    let mut collect = node.validator();
    collect
        .args(["collect", "--level", "standard", "--sysroot"])
        .arg(node.sysroot());
    assert_eq!(said(collect.arg("-o").arg(&facts)).0, 0);
    let ran = judge(&node.out, &facts, "whole", &[]);
    assert_eq!(ran.code, 0, "{}", ran.stdout);
    let whole: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    let fleet = node.out.path("fleet");
    std::fs::create_dir(&fleet).expect("made");
    let mut paths = Vec::new();
    readings(&whole, "", &mut paths);
    // The second reading repeats the first; that none of its values goes missing unseen is a
    // property test of the judge.
    paths.retain(|it| !it.starts_with("/after_load"));
    assert!(paths.len() > 60, "a node has more readings than {paths:?}");
    for path in &paths {
        let mut facts = whole.clone();
        *facts.pointer_mut(path).expect("it was found there") =
            serde_json::json!({"not_read": "taken out by a test"});
        let name = path.trim_start_matches('/').replace('/', ".");
        std::fs::write(fleet.join(format!("{name}.json")), facts.to_string()).expect("written");
    }
    let mut command = validator();
    command
        .args(["judge", "--simulated-ok", "--json", "-"])
        .arg(&fleet);
    let (_, stdout, stderr) = said(&mut command);
    let report: Value = serde_json::from_str(&stdout).expect("JSON");
    let files = report["files"].as_array().expect("files");
    assert_eq!(files.len(), paths.len());
    let mut passed: Vec<String> = files
        .iter()
        .filter(|it| it["verdict"] == "pass")
        .filter_map(|it| it["file"].as_str()?.strip_suffix(".json"))
        .map(of_any_gpu)
        .collect();
    passed.dedup();
    assert_eq!(passed, READINGS_THAT_MAY_BE_MISSING, "{stderr}");
}

/// The name of a reading with `*` for a UUID.
fn of_any_gpu(name: &str) -> String {
    let parts = name.split('.').map(|part| {
        let is_uuid = part.starts_with("GPU-");
        if is_uuid { "*" } else { part }
    });
    parts.collect::<Vec<_>>().join(".")
}

/// What may be missing without a profile that speaks of it. They are listed so that a check which
/// stops to read a value, or passes without it, is seen.
const READINGS_THAT_MAY_BE_MISSING: [&str; 21] = [
    // host.cuda_toolkits has it, too, and is judged.
    "environment.toolkits.0.version",
    "gpus.0.board_part_number",
    "gpus.0.inforom_image_version",
    // The GPU is not in MIG mode.
    "gpus.0.mig_devices",
    "gpus.0.minor_number",
    // The model follows from the name, too.
    "gpus.0.pci_device_id",
    "gpus.0.pci_subsystem_id",
    "gpus.0.serial",
    // Taken for a GPU of its own, not a vGPU, of which less would be expected.
    "gpus.0.virtualization_mode",
    "host.container_runtime",
    // NVML reports the processes on the GPUs.
    "host.gsp_firmware_versions",
    "host.hostname",
    // Taken for no container, of which more is expected.
    "host.in_container",
    // NVML reports it as well.
    "host.kernel_modules.value.nvidia_version",
    "host.kernel_release",
    "host.operating_system",
    // It is judged where it names a board whose parts are known, as a DGX.
    "host.product_name",
    // It is needed on NVLink domains of several nodes only.
    "host.services.nvidia-imex",
    // The kernel log has them as well.
    "load.sensors.*.xid_events",
    // The CUDA driver library reports it as well.
    "nvml.cuda_driver_version",
    // The GPUs themselves are in the facts.
    "nvml.gpu_count",
];

#[test]
fn profiles_of_a_megabyte_of_nesting_are_refused_at_once() {
    let folder = Scratch::new();
    let mut indented = String::new();
    for depth in 0..1_400 {
        writeln!(indented, "{}a:", " ".repeat(depth)).expect("memory");
    }
    for (name, content) in [
        ("brackets.yaml", "[".repeat(1 << 20)),
        ("braces.yaml", "{a: ".repeat(1 << 18)),
        ("closed.yaml", "[".repeat(1 << 19) + &"]".repeat(1 << 19)),
        ("dashes.yaml", "- ".repeat(1 << 19)),
        ("indented.yaml", indented),
        (
            "laughs.yaml",
            "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n\
             d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n\
             g: &g [*f,*f,*f,*f,*f,*f,*f,*f,*f]\nh: &h [*g,*g,*g,*g,*g,*g,*g,*g,*g]\ni: &i [*h,*h,*h,*h,*h,*h,*h,*h,*h]\n"
                .to_owned(),
        ),
    ] {
        let path = folder.write(name, content);
        refused(&["profile".as_ref(), "check".as_ref(), &path], &path, "");
        refused(&["run".as_ref(), "--profile".as_ref(), &path], &path, "");
    }
}
