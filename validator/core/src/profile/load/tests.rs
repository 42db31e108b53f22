use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::Severity;
use super::{Profile, ProfileError, ProfileFiles};
use crate::level::Level;

fn parse(text: &str, name: &str) -> Result<Profile, ProfileError> {
    crate::parse_profile(text, name)
}

fn load(path: &Path) -> Result<Profile, ProfileError> {
    crate::load_profile(path, &Disk)
}

/// Profiles as files; the binary's own reader has its tests there.
struct Disk;

impl ProfileFiles for Disk {
    fn read(&self, path: &Path) -> Result<String, String> {
        fs::read_to_string(path)
            .map_err(|error| format!("cannot read profile {}: {error}", path.display()))
    }

    fn is_same(&self, one: &Path, other: &Path) -> bool {
        matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
    }
}

fn error(text: &str) -> String {
    parse(text, "p.yaml").expect_err(text).0
}

/// A folder of its own for one test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("profile-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("the temporary folder can be written");
        Self(path)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).expect("the temporary folder can be written");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_empty_profile_expects_nothing() {
    for text in [
        "",
        "# only a comment\n",
        "gpus:\n",
        "gpus: {}\ndriver:\n  # minimum: \"580\"\n",
        "---\n",
    ] {
        assert_eq!(parse(text, "p.yaml"), Ok(Profile::default()), "{text:?}");
    }
}

#[test]
fn a_whole_profile_is_read() {
    let profile = parse(
        "name: all\ndriver: {minimum: 580.65.06, branch: 580, kernel_module: open}\n\
         cuda: {driver_minimum: 12.10, toolkits: [\"12.8\", 12.9.1], compat_package: forbidden}\n\
         gpus: {model: NVIDIA H200, count: 8, mig: false, compute_mode: default, pcie: {width: 16}}\n\
         services: {nvidia-persistenced: active}\n\
         policy: {xid: {window_hours: 24, fail: [63], ignore: [43]}}\n\
         levels: {quick: {kernel_deadline_s: 2.5}}\n\
         checks: {persistence_mode: {severity: off, reason: a display node}}\n",
        "p.yaml",
    )
    .expect("valid");
    // Unquoted, yet not a number: 12.10 must not become 12.1.
    assert_eq!(profile.cuda.driver_minimum.map(|it| it.minor), Some(10));
    assert_eq!(profile.gpus.count, Some(8));
    assert_eq!(profile.checks["persistence_mode"].severity, Severity::Off);
    assert!(profile.levels.contains_key(&Level::Quick));
}

#[test]
fn an_unknown_key_is_named_with_place_and_nearest_name() {
    assert_eq!(
        error("gpus:\n  pcie:\n    widht: 8\n"),
        "p.yaml:3:5: unknown key `widht` in `gpus.pcie`\n \
         3 |     widht: 8\n   |     ^^^^^\n\
         did you mean `width`? valid here: generation, width"
    );
    assert!(error("gpuss: {}\n").starts_with("p.yaml:1:1: unknown key `gpuss`\n"));
    assert!(error("gpuss: {}\n").contains("did you mean `gpus`?"));
    // Nothing is near this one, so nothing is guessed.
    let far = error("gpus:\n  zzz: 1\n");
    assert!(
        !far.contains("did you mean") && far.contains("valid here: model, count"),
        "{far}"
    );
}

#[test]
fn a_wrong_type_is_named_with_place() {
    assert_eq!(
        error("gpus:\n  count: eight\n"),
        "p.yaml:2:10: invalid type: string \"eight\", expected a whole number in `gpus.count`\n \
         2 |   count: eight\n   |          ^^^^^"
    );
    for (text, place, words) in [
        (
            "gpus: 5\n",
            "p.yaml:1:7:",
            "expected a mapping of keys to values in `gpus`",
        ),
        (
            "gpus: {count: -1}\n",
            "p.yaml:1:15:",
            "expected a whole number in `gpus.count`",
        ),
        (
            "gpus: {ecc: on}\n",
            "p.yaml:1:13:",
            "expected true or false in `gpus.ecc`",
        ),
        (
            "driver: {minimum: 580}\n",
            "p.yaml:1:19:",
            "`580` is not a driver version",
        ),
        (
            "cuda: {toolkits: [12.8, twelve]}\n",
            "p.yaml:1:25:",
            "`twelve` is not a CUDA version",
        ),
        (
            "cuda: {toolkits: 12.8}\n",
            "p.yaml:1:18:",
            "expected a list in `cuda.toolkits`",
        ),
        (
            "- a\n",
            "p.yaml:1:1:",
            "expected a mapping of keys to values",
        ),
        (
            "levels: {quik: {}}\n",
            "p.yaml:1:10:",
            "did you mean `quick`?",
        ),
        (
            "services: {x: activ}\n",
            "p.yaml:1:15:",
            "did you mean `active`?",
        ),
        (
            "driver: {kernel_module: opne}\n",
            "p.yaml:1:25:",
            "did you mean `open`?",
        ),
        (
            "checks: {persistence_mode: {severity: warn}}\n",
            "p.yaml:1:28:",
            "missing key `reason`",
        ),
        (
            "checks: {persistence_mode: off}\n",
            "p.yaml:1:28:",
            "expected `severity` and `reason`",
        ),
        (
            "gpus: {count: 1\n",
            "p.yaml:2:1:",
            "did not find expected ',' or '}'",
        ),
        (
            "gpus:\n\tcount: 1\n",
            "p.yaml:2:1:",
            "cannot start any token",
        ),
        (
            "gpus:\n  count: 1\n  count: 2\n",
            "p.yaml:3:3:",
            "the key is there twice: `count`",
        ),
        (
            "services:\n  a: active\n  a: enabled\n",
            "p.yaml:3:3:",
            "the key is there twice: \"a\"",
        ),
        ("gpus: *x\n", "p.yaml:1:7:", "unknown anchor"),
    ] {
        let message = error(text);
        assert!(message.starts_with(place), "{text:?}: {message}");
        assert!(message.contains(words), "{text:?}: {message}");
    }
    assert!(error("gpus: {}\n---\ngpus: {}\n").contains("more than one YAML document"));
}

#[test]
fn contradictions_are_named_with_place() {
    for (text, place, words) in [
        (
            "gpus: {mig: false, mig_devices: 7}\n",
            "1:33:",
            "`mig_devices` is 7, but `mig` is false",
        ),
        ("gpus: {mig_devices: 7}\n", "1:21:", "needs `mig: true`"),
        (
            "driver: {minimum: 570.26, branch: 580}\n",
            "1:19:",
            "but `driver.branch` is 580",
        ),
        (
            "driver: {branch: 570}\ncuda: {driver_minimum: \"13.0\"}\n",
            "2:24:",
            "offers CUDA 12.8",
        ),
        (
            "driver: {minimum: 570.26}\ncuda: {toolkits: [\"12.8\", \"13.0\"]}\n",
            "2:27:",
            "needs driver 580.65.06",
        ),
        (
            "driver: {branch: 470}\ncuda: {toolkits: [\"12.8\"]}\n",
            "2:19:",
            "needs driver 525.60.13",
        ),
        (
            "policy: {xid: {fail: [63], ignore: [43, 63]}}\n",
            "1:41:",
            "Xid 63 is in `fail` and in `ignore`",
        ),
        (
            "policy: {xid: {warn: [63], ignore: [63]}}\n",
            "1:37:",
            "Xid 63 is in `warn` and in `ignore`",
        ),
        (
            "checks:\n  persistence_mode: {severity: off, reason: \" \"}\n",
            "2:45:",
            "without a reason",
        ),
        (
            "checks:\n  persistance_mode: {severity: off, reason: x}\n",
            "2:3:",
            "did you mean `persistence_mode`?",
        ),
        ("gpus:\n  count: 0\n", "2:10:", "`gpus.count` is 0"),
        (
            "gpus: {pcie: {width: 12}}\n",
            "1:22:",
            "no PCIe link has 12 lanes",
        ),
        ("policy: {xid: {window_hours: -1}}\n", "1:30:", "-1 hours"),
        (
            "policy: {xid: {window_hours: .nan}}\n",
            "1:30:",
            "NaN hours",
        ),
        (
            "levels: {quick: {kernel_deadline_s: 0}}\n",
            "1:37:",
            "0 seconds",
        ),
        (
            "levels: {standard: {deadline_s: -5}}\n",
            "1:33:",
            "-5 seconds are no time",
        ),
        (
            "levels: {quick: {burn: {duration_s: 5}}}\n",
            "1:24:",
            "level quick works no GPU",
        ),
        (
            "levels: {standard: {burn: {duration_s: .inf}}}\n",
            "1:40:",
            "a week at most, not inf s",
        ),
        (
            "levels: {standard: {burn: {memory_percent: 101}}}\n",
            "1:44:",
            "at most 100, not 101",
        ),
        (
            "levels: {standard: {burn: {precisions: [fp8, bf16, fp8]}}}\n",
            "1:52:",
            "fp8 is there twice",
        ),
        (
            "levels:\n  standard:\n    deadline_s: 60\n    burn: {duration_s: 60}\n",
            "4:24:",
            "the burn takes 60 s, the whole run may take 60 s",
        ),
        (
            "levels: {extended: {deadline_s: 60}}\n",
            "1:33:",
            "the burn takes 60 s, the whole run may take 60 s",
        ),
        ("policy: {temperature_maximum_c: 900}\n", "1:33:", "900 °C"),
        (
            "services: {nvidia-persistenced.service: active}\n",
            "1:12:",
            "`nvidia-persistenced`",
        ),
        (
            "gpus: {vbios: [\"\"]}\n",
            "1:16:",
            "a VBIOS version is empty",
        ),
        (
            "gpus: {model: \"\"}\n",
            "1:15:",
            "the GPU model has no name",
        ),
        (
            "gpus: {model: B200}\ndriver: {kernel_module: proprietary}\n",
            "2:25:",
            "open kernel module only",
        ),
        (
            "gpus: {model: V100 SXM2 16GB}\ndriver: {kernel_module: open}\n",
            "2:25:",
            "proprietary kernel module only",
        ),
        (
            "gpus: {model: Tesla V100-SXM2-16GB}\ndriver: {branch: 590}\n",
            "2:18:",
            "compute capability 7.5 and newer",
        ),
        (
            "gpus: {model: V100 SXM2 16GB}\ndriver: {minimum: 590.44.01}\n",
            "2:19:",
            "has 7.0",
        ),
        (
            "gpus: {model: NVIDIA B200}\ndriver: {branch: 535}\n",
            "2:18:",
            "needs driver branch 570",
        ),
        (
            "gpus: {model: V100 SXM2 16GB}\ncuda: {toolkits: [\"12.8\", \"13.0\"]}\n",
            "2:27:",
            "no longer supports",
        ),
        (
            "gpus: {model: L4, mig: true}\n",
            "1:24:",
            "the L4 has no MIG",
        ),
        (
            "gpus: {model: NVIDIA H200, nvlinks: 19}\n",
            "1:37:",
            "has 18 NVLinks",
        ),
        (
            "gpus: {model: NVIDIA H200, memory_minimum_mib: 160000}\n",
            "1:48:",
            "has 158148 MiB of memory at most",
        ),
    ] {
        let message = error(text);
        assert!(
            message.starts_with(&format!("p.yaml:{place}")),
            "{text:?}: {message}"
        );
        assert!(message.contains(words), "{text:?}: {message}");
    }
}

#[test]
fn what_merely_sounds_contradictory_is_allowed() {
    for text in [
        "gpus: {mig: false, mig_devices: 0}\n",
        "driver: {minimum: 570.26}\ncuda: {toolkits: [\"13.0\"], compat_package: required}\n",
        "driver: {branch: 999}\ncuda: {driver_minimum: \"13.4\"}\n",
        "driver: {minimum: 450.80.02}\ngpus: {model: NVIDIA B200}\n",
        "gpus: {model: NVIDIA Something New, nvlinks: 36}\n",
        "gpus: {model: NVIDIA GeForce RTX 4090, ecc: true}\n",
        "policy: {xid: {fail: [63, 63]}}\n",
        "extends: base.yaml\ngpus: {mig_devices: 7}\n",
    ] {
        assert!(
            parse(text, "p.yaml").is_ok(),
            "{text:?}: {:?}",
            parse(text, "p.yaml")
        );
    }
}

#[test]
fn extending_overrides_merges_and_replaces() {
    let folder = Folder::new("extends");
    fs::create_dir_all(folder.0.join("base")).expect("writable");
    folder.write(
        "base/aws.yaml",
        "name: aws\ndescription: base\ngpus: {persistence_mode: true, ecc: true, count: 4, pcie: {width: 16}}\n\
         cuda: {toolkits: [\"12.8\"]}\nservices: {a: active, b: active}\n\
         policy: {xid: {fail: [63], ignore: [13]}}\n",
    );
    let path = folder.write(
        "node.yaml",
        "extends: base/aws.yaml\nname: node\ngpus:\n  count: 8\n  ecc: ~\n  pcie: {generation: 5}\n\
         cuda: {toolkits: []}\nservices: {b: inactive, c: enabled}\ndriver:\n\
         policy:\n  xid:\n    fail: [94, 95]\n",
    );
    let profile = load(&path).expect("valid");
    let flat = parse(
        "name: node\ngpus: {persistence_mode: true, count: 8, pcie: {generation: 5, width: 16}}\n\
         services: {a: active, b: inactive, c: enabled}\n\
         policy: {xid: {fail: [94, 95], ignore: [13]}}\n",
        "flat",
    )
    .expect("valid");
    assert_eq!(profile, flat);
}

#[test]
fn extending_goes_three_deep_and_no_deeper() {
    let folder = Folder::new("deep");
    folder.write("d.yaml", "gpus: {count: 4}\n");
    folder.write("c.yaml", "extends: d.yaml\n");
    folder.write("b.yaml", "extends: c.yaml\n");
    let three_deep = folder.write("a.yaml", "extends: b.yaml\n");
    assert_eq!(load(&three_deep).expect("valid").gpus.count, Some(4));
    let four_deep = folder.write("0.yaml", "# too deep\nextends: a.yaml\n");
    let message = load(&four_deep).expect_err("too deep").0;
    assert!(
        message.contains("c.yaml:1:10:") && message.contains("no more than 3 deep"),
        "{message}"
    );
}

#[test]
fn a_circle_is_refused() {
    let folder = Folder::new("circle");
    folder.write("b.yaml", "extends: ./a.yaml\n");
    let path = folder.write("a.yaml", "extends: b.yaml\n");
    let message = load(&path).expect_err("a circle").0;
    assert!(
        message.contains("b.yaml:1:10:") && message.contains("in a circle"),
        "{message}"
    );
    let own = folder.write("own.yaml", "extends: own.yaml\n");
    assert!(load(&own).expect_err("a circle").0.contains("in a circle"));
}

#[test]
fn errors_name_the_file_that_they_are_in() {
    let folder = Folder::new("named");
    folder.write("typo.yaml", "gpus: {cuont: 8}\n");
    folder.write("fine.yaml", "driver: {branch: 570}\n");
    for (text, file, words) in [
        (
            "extends: typo.yaml\n",
            "typo.yaml:1:8:",
            "unknown key `cuont`",
        ),
        (
            "extends: missing.yaml\n",
            "child.yaml:1:10:",
            "cannot read profile",
        ),
        ("extends: .\n", "child.yaml:1:10:", "directory"),
        (
            "extends: fine.yaml\ncuda: {driver_minimum: \"13.0\"}\n",
            "child.yaml:2:24:",
            "offers CUDA 12.8",
        ),
        // Not even where another file would override it.
        (
            "policy: {xid: {window_hours: .nan}}\n",
            "child.yaml:1:30:",
            "NaN hours",
        ),
        // The value at fault is in the base, and the wish that contradicts it in the child.
        (
            "extends: fine.yaml\ngpus: {model: V100 SXM2 16GB}\ndriver: {branch: 590}\n",
            "child.yaml:3:18:",
            "7.5 and newer",
        ),
        (
            "extends: fine.yaml\ngpus: {model: NVIDIA B300 SXM6 AC}\n",
            "fine.yaml:1:18:",
            "needs driver branch 575",
        ),
    ] {
        let path = folder.write("child.yaml", text);
        let message = load(&path).expect_err(text).0;
        let first_line = message.lines().next().unwrap_or_default();
        assert!(
            first_line.contains(file) && message.contains(words),
            "{text:?}: {message}"
        );
    }
}

#[test]
fn nesting_is_refused_quickly() {
    let started = Instant::now();
    for text in [
        "[".repeat(1_000_000),
        "[".repeat(250_000),
        "{a: ".repeat(60_000),
        "- ".repeat(125_000),
        "? ".repeat(125_000),
        "a: &a [x]\nb: ".to_owned() + &"[*a, ".repeat(40_000),
        (0..700).fold(String::new(), |text, depth| {
            text + &" ".repeat(depth) + "a:\n"
        }),
        "\"".repeat(250_000),
        "a: ".to_owned() + &"x ".repeat(120_000),
        "a".repeat(250_000),
    ] {
        let message = parse(&text, "p.yaml").expect_err("no profile").0;
        assert!(message.len() < 2_000, "{} bytes of message", message.len());
    }
    // A person would call a tenth of this quick; the tests' machine may be busy.
    assert!(
        started.elapsed() < Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
}

/// Text that looks like a profile, so that chance gets past the first line.
fn profile_like() -> impl Strategy<Value = String> {
    let word = prop::sample::select(vec![
        "gpus",
        "driver",
        "cuda",
        "policy",
        "xid",
        "checks",
        "count",
        "mig",
        "severity",
        "reason",
        "fail",
        "extends",
        "levels",
        "quick",
        "off",
        "12.8",
        "580.65.06",
        "~",
        "true",
        "&a",
        "*a",
        "!t",
        "é",
        "\u{1b}",
        "|",
        ">",
        "<<",
        "8",
        "-1",
        "1e99",
        ".inf",
    ]);
    let mark = prop::sample::select(vec![
        ": ", "\n", "\n  ", "\n    ", "{", "}", "[", "]", ", ", "- ", "? ", "\"", "'", "# ", "\t",
        "\r\n", "---\n",
    ]);
    prop::collection::vec((word, mark), 0..40).prop_map(|parts| {
        parts
            .into_iter()
            .flat_map(|(word, mark)| [word, mark])
            .collect()
    })
}

proptest! {
    #[test]
    fn no_text_panics(text in any::<String>()) {
        let _ = parse(&text, "p.yaml");
    }

    #[test]
    fn no_profile_like_text_panics(text in profile_like()) {
        if let Err(error) = parse(&text, "p.yaml") {
            prop_assert!(error.0.starts_with("p.yaml"), "{error}");
        }
    }

    #[test]
    fn what_was_read_can_be_written_and_read_again(text in profile_like()) {
        if let Ok(profile) = parse(&text, "p.yaml") {
            let written = serde_yaml::to_string(&profile).expect("a profile can be written");
            prop_assert_eq!(parse(&written, "p.yaml"), Ok(profile));
        }
    }
}
