//! The parent's side, with shell scripts as workers.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::library::NvmlLibrary;
use super::*;
use crate::driver_libraries;
use validator_core::facts::{Facts, Reading};

/// The first reports of a worker for two GPUs.
const START: &str = r#"
say() { printf '%s\n' "$1"; }
say '{"nvml":{"field":"initialized","value":{"value":true}}}'
say '{"nvml":{"field":"gpu_count","value":{"value":2}}}'
told() { say "{\"gpu\":{\"index\":$1,\"field\":\"$2\",\"value\":{\"value\":$3}}}"; }
call() { say "{\"call\":{\"gpu\":$1,\"function\":\"$2\"}}"; }
at_rest() { say "{\"gpu_at_rest\":{\"index\":$1}}"; }
finished() { say "{\"gpu_done\":{\"index\":$1}}"; }
"#;

fn outcome_of(script: &str) -> NvmlOutcome {
    let folder = tempfile::tempdir().expect("a temporary folder");
    probe(
        &options(folder.path(), script),
        &Interrupt::default(),
        Part::All,
        &|_| {},
    )
}

fn options(folder: &Path, script: &str) -> ProbeOptions {
    let program = folder.join("worker");
    write_program(&program, &format!("#!/bin/sh\n{START}\n{script}\n"));
    ProbeOptions {
        worker_program: Some(program),
        deadlines: Deadlines {
            nvml_call: Duration::from_millis(300),
            nvml_initialization: Duration::from_millis(600),
            nvml: Duration::from_secs(20),
            ..Deadlines::default()
        },
        ..ProbeOptions::default()
    }
}

/// Written by a process of its own: a file that any other thread's child still holds open cannot be
/// executed.
fn write_program(path: &Path, text: &str) {
    let mut writer = Command::new("/bin/sh")
        .args(["-c", "cat > \"$0\" && chmod 755 \"$0\""])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("sh starts");
    let stdin = writer.stdin.as_mut().expect("a pipe");
    stdin
        .write_all(text.as_bytes())
        .expect("the script is taken");
    assert!(writer.wait().expect("sh ends").success());
}

fn reason<T>(reading: &Reading<T>) -> &str {
    match reading {
        Reading::NotRead(reason) => reason,
        _ => panic!("it was read"),
    }
}

#[test]
fn what_is_told_becomes_facts() {
    let outcome = outcome_of(
        r#"told 0 uuid '"GPU-a"'; told 0 minor_number 4; finished 0; told 1 uuid '"GPU-b"'; finished 1
        say '{"simulated":{"scenario":"h200x2"}}'; say '{"done":{}}'"#,
    );
    assert_eq!(outcome.nvml.probe_trouble, Vec::<String>::new());
    assert_eq!(outcome.nvml.gpu_count, Reading::Value(2));
    assert_eq!(outcome.gpus[0].minor_number, Reading::Value(4));
    assert_eq!(outcome.gpus[1].uuid, Reading::Value("GPU-b".to_owned()));
    assert_eq!(outcome.simulated.as_deref(), Some("h200x2"));
    assert_eq!(
        reason(&outcome.gpus[1].name),
        "not reported by the NVML probe"
    );
}

#[test]
fn a_call_that_hangs_costs_its_own_reading_and_no_more() {
    let outcome = outcome_of(
        r#"told 0 uuid '"GPU-a"'; finished 0; told 1 uuid '"GPU-b"'
        case "$*" in
          *--skip\ nvmlDeviceGetSerial@1=*) say '{"gpu":{"index":1,"field":"serial","value":{"not_read":"left out"}}}';;
          *) call 1 nvmlDeviceGetSerial; sleep 600;;
        esac
        told 1 minor_number 1; finished 1; say '{"done":{}}'"#,
    );
    assert_eq!(outcome.gpus[1].calls_hung, ["nvmlDeviceGetSerial"]);
    assert_eq!(outcome.gpus[0].calls_hung, Vec::<String>::new());
    assert_eq!(outcome.gpus[1].minor_number, Reading::Value(1));
    assert_eq!(outcome.gpus[1].uuid, Reading::Value("GPU-b".to_owned()));
    assert_eq!(
        outcome.nvml.probe_trouble,
        ["nvmlDeviceGetSerial of NVML's GPU 1 did not return within 0.3 s"]
    );
}

#[test]
fn a_function_that_hangs_on_every_gpu_is_given_up_after_two() {
    let script = r#"say '{"nvml":{"field":"gpu_count","value":{"value":4}}}'
        for gpu in 0 1 2 3; do
          case "$*" in
            *--finished\ $gpu*) ;;
            *nvmlDeviceGetSerial@$gpu=*) told $gpu minor_number $gpu; finished $gpu;;
            *) call $gpu nvmlDeviceGetSerial; sleep 600;;
          esac
        done; say '{"done":{}}'"#;
    let outcome = outcome_of(script);
    let hung: Vec<usize> = outcome
        .gpus
        .iter()
        .map(|gpu| gpu.calls_hung.len())
        .collect();
    assert_eq!(hung, [1, 1, 0, 0]);
    assert!(
        outcome
            .gpus
            .iter()
            .all(|gpu| gpu.minor_number.value().is_some())
    );
    assert_eq!(outcome.nvml.probe_trouble.len(), 2);
}

#[test]
fn a_crash_is_left_out_the_next_time() {
    let outcome = outcome_of(
        r#"told 0 uuid '"GPU-a"'
        case "$*" in
          *--skip\ nvmlDeviceGetFieldValues@0=*) ;;
          *) call 0 nvmlDeviceGetFieldValues; kill -SEGV $$;;
        esac
        told 0 minor_number 0; finished 0; finished 1; say '{"done":{}}'"#,
    );
    assert_eq!(outcome.gpus[0].minor_number, Reading::Value(0));
    assert_eq!(
        outcome.nvml.probe_trouble,
        ["nvmlDeviceGetFieldValues of NVML's GPU 0 took the process down: signal 11"]
    );
}

#[test]
fn a_gpu_whose_calls_all_hang_is_given_up_and_the_others_are_read() {
    let outcome = outcome_of(
        r#"case "$*" in
          *--finished\ 0*) ;;
          *@0=*) told 0 uuid '"GPU-a"'; call 0 nvmlDeviceGetSerial; sleep 600;;
          *) call 0 nvmlDeviceGetName; sleep 600;;
        esac
        told 1 uuid '"GPU-b"'; finished 1; say '{"done":{}}'"#,
    );
    assert_eq!(
        outcome.gpus[0].calls_hung,
        ["nvmlDeviceGetName", "nvmlDeviceGetSerial"]
    );
    assert_eq!(outcome.gpus[0].uuid, Reading::Value("GPU-a".to_owned()));
    assert!(
        reason(&outcome.gpus[0].temperature)
            .starts_with("not queried any more after nvmlDeviceGetSerial"),
        "{:?}",
        outcome.gpus[0].temperature
    );
    assert_eq!(outcome.gpus[1].uuid, Reading::Value("GPU-b".to_owned()));
}

#[test]
fn an_initialisation_that_hangs_is_the_reason_for_everything() {
    let outcome = outcome_of("call null nvmlInit_v2; trap '' TERM; sleep 600");
    let expected = "nvmlInit_v2 did not return within 0.6 s";
    assert_eq!(outcome.nvml.probe_trouble, [expected]);
    assert_eq!(reason(&outcome.nvml.driver_version), expected);
}

#[test]
fn nonsense_and_unknown_fields_are_noted_and_harm_nothing() {
    let outcome = outcome_of(
        r#"say 'hello from a library'; say '{"gpu":{"index":0,"field":"colour","value":{"value":1}}}'
        told 0 uuid '"GPU-a"'; told 1 minor_number '"four"'; told 77 uuid '"GPU-z"'
        finished 0; finished 1; say '{"done":{}}'"#,
    );
    assert_eq!(outcome.gpus.len(), 2);
    assert_eq!(outcome.gpus[0].uuid, Reading::Value("GPU-a".to_owned()));
    assert!(matches!(outcome.gpus[1].minor_number, Reading::NotRead(_)));
    assert_eq!(
        outcome.nvml.probe_trouble.len(),
        3,
        "{:?}",
        outcome.nvml.probe_trouble
    );
}

#[test]
fn a_worker_that_dies_outside_of_any_call_is_no_endless_loop() {
    let outcome = outcome_of("echo went wrong >&2; exit 7");
    assert_eq!(
        reason(&outcome.gpus[0].name),
        "the NVML probe took the process down: exit status 7 (went wrong), outside of any call"
    );
}

#[test]
fn a_request_to_stop_keeps_what_was_told() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let options = options(folder.path(), r#"told 0 uuid '"GPU-a"'; sleep 600"#);
    let interrupt = Interrupt::default();
    let later = interrupt.clone();
    let signal = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        later.request(2);
    });
    let outcome = probe(&options, &interrupt, Part::All, &|_| {});
    signal.join().expect("the thread ends");
    assert_eq!(outcome.gpus[0].uuid, Reading::Value("GPU-a".to_owned()));
    assert_eq!(reason(&outcome.gpus[0].name), "the run was interrupted");
}

#[test]
fn a_missing_program_is_said() {
    let options = ProbeOptions {
        worker_program: Some("/nonexistent/gpu-validator".into()),
        ..ProbeOptions::default()
    };
    let outcome = probe(&options, &Interrupt::default(), Part::All, &|_| {});
    assert!(
        reason(&outcome.nvml.initialized).starts_with("cannot start /nonexistent/gpu-validator"),
        "{:?}",
        outcome.nvml.initialized
    );
}

/// The readings of an idle GPU start its worker, once; a worker that starts again must not take
/// that work for a foreign process's.
#[test]
fn a_gpu_that_may_be_at_work_is_not_read_at_rest_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = r#"case "$*" in
          *--at-rest\ 0\ --at-rest\ 1*) ;;
          *) told 0 uuid '"GPU-a"'; at_rest 0; told 1 uuid '"GPU-b"'; at_rest 1
             call 0 nvmlDeviceGetSerial; kill -SEGV $$;;
        esac
        told 0 minor_number 7; finished 0; finished 1; say '{"done":{}}'"#;
    let got_ready = std::cell::RefCell::new(Vec::new());
    let options = options(folder.path(), script);
    let outcome = probe(&options, &Interrupt::default(), Part::All, &|gpu| {
        got_ready.borrow_mut().push(gpu.clone());
    });
    let uuids = got_ready.borrow();
    let uuids: Vec<_> = uuids.iter().filter_map(|gpu| gpu.uuid.value()).collect();
    assert_eq!(uuids, ["GPU-a", "GPU-b"]);
    assert_eq!(outcome.gpus[0].uuid, Reading::Value("GPU-a".to_owned()));
    assert_eq!(outcome.gpus[0].minor_number, Reading::Value(7));
    assert!(outcome.nvml.probe_trouble[0].contains("took the process down: signal 11"));
}

#[test]
fn what_is_asked_later_reaches_its_own_gpu() {
    let script = |first: &str, second: &str| {
        format!(
            r#"case "$*" in
            *--skip*) finished 0; finished 1;;
            *inforom*) told 0 uuid '"{first}"'; told 0 inforom_valid true; finished 0
              told 1 uuid '"{second}"'; call 1 nvmlDeviceValidateInforom; sleep 600;;
            esac; say '{{"done":{{}}}}'"#
        )
    };
    let asked = |part, script: &str| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let options = options(folder.path(), script);
        probe(&options, &Interrupt::default(), part, &|_| {})
    };
    let before = r#"told 0 uuid '"GPU-a"'; told 1 uuid '"GPU-b"'; say '{"done":{}}'"#;
    let NvmlOutcome { nvml, gpus, .. } = asked(Part::AllButInforom, before);
    let mut facts = Facts {
        nvml,
        gpus,
        ..Facts::default()
    };
    // The GPUs may be numbered otherwise by then, and one of them be gone.
    asked(Part::Inforom, &script("GPU-b", "GPU-c")).add_inforom_to(&mut facts);
    assert!(matches!(facts.gpus[0].inforom_valid, Reading::NotRead(_)));
    assert_eq!(facts.gpus[1].inforom_valid, Reading::Value(true));
    assert_eq!(facts.gpus[1].calls_hung, Vec::<String>::new());
    // A GPU that was lost meanwhile has no UUID any more, and its number.
    let lost = r#"told 0 uuid '"GPU-a"'; say '{"gpu":{"index":1,"field":"lost","value":"lost"}}'
      finished 0; finished 1; say '{"done":{}}'"#;
    asked(Part::Inforom, lost).add_inforom_to(&mut facts);
    assert_eq!(facts.gpus[0].lost, None);
    assert_eq!(facts.gpus[1].lost.as_deref(), Some("lost"));
    // A call that hangs then is reported for its GPU and for NVML, as at any other time.
    asked(Part::Inforom, &script("GPU-b", "GPU-a")).add_inforom_to(&mut facts);
    assert_eq!(facts.gpus[0].calls_hung, ["nvmlDeviceValidateInforom"]);
    let trouble = facts.nvml.probe_trouble.join("; ");
    assert!(
        trouble.contains("nvmlDeviceValidateInforom of NVML's GPU 1 did not return"),
        "{trouble}"
    );
}

/// The search for libraries follows the loader's own list.
#[test]
fn the_loaders_own_words_are_understood() {
    let folder = tempfile::tempdir().expect("a folder");
    let empty = folder.path().join("libempty.so.1");
    std::fs::write(&empty, b"").expect("written");
    for (name, missing) in [
        (empty.as_path(), false),
        (Path::new("libno-such-library.so.1"), true),
        (Path::new("/no/such/library.so"), true),
    ] {
        let Err(error) = NvmlLibrary::load(name.as_os_str()) else {
            panic!("{} cannot be loaded", name.display());
        };
        assert_eq!(driver_libraries::is_missing(&error), missing, "{error}");
    }
}
