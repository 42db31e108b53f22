//! Made-up fleets with planted faults.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::node_report::{self, FailedGpu, Kept, NodeReport, NodeVerdict};
use super::render;
use super::summary::Fleet;

/// A folder that vanishes with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("fleet-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    fn write(&self, name: &str, content: &str) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(path, content).expect("a file");
    }

    fn fleet(&self) -> Fleet {
        let mut files = Vec::new();
        let mut folders = vec![self.0.clone()];
        while let Some(folder) = folders.pop() {
            for entry in folder.read_dir().expect("listed").flatten() {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    files.push(path);
                }
            }
        }
        Fleet::of(files.iter().map(|it| read(it)).collect(), false)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A number between -1 and 1 that is the same in every run.
fn noise(node: usize, gpu: usize, salt: usize) -> f64 {
    let seed = (node * 8 + gpu) * 31 + salt;
    let mixed = u32::try_from(seed)
        .expect("small")
        .wrapping_mul(2_654_435_761)
        .rotate_left(13)
        .wrapping_mul(0x85eb_ca6b);
    f64::from(mixed >> 8) / f64::from(1 << 23) - 1.0
}

/// A node of eight H200s that passed, as `gpu-validator run --json` writes it.
fn node(number: usize) -> Value {
    let gpus: Vec<Value> = (0..8)
        .map(|gpu| {
            json!({
                "uuid": format!("GPU-{number:05}-{gpu}"),
                "name": "NVIDIA H200",
                "pci_address": null,
                "serial": null,
                "measurements": {
                    "burn_bf16_tflops": 650.0 * (1.0 + 0.01 * noise(number, gpu, 1)),
                    "burn_temperature_maximum_c": (62.0 + 4.0 * noise(number, gpu, 2)).round(),
                    "burn_power_median_w": 695.0 + 3.0 * noise(number, gpu, 3),
                    "pcie_width": 16.0,
                },
            })
        })
        .collect();
    json!({
        "format": 1,
        "validator_version": "0.1.0",
        "verdict": "pass",
        "verdict_text": "PASS: node is ready",
        "exit_code": 0,
        "simulated": null,
        "incomplete": null,
        "collected_at": "2026-11-20T03:04:05Z",
        "machine": {"hostname": format!("node-{number}"), "driver_version": "580.159.04", "gpus": gpus},
        "findings": [{"check": "gpu_count", "subject": "host", "verdict": "pass", "summary": "8 GPUs"}],
    })
}

fn read(path: &Path) -> NodeReport {
    let bytes = std::fs::read(path).expect("a file");
    let name = path.file_stem().expect("a name").to_string_lossy();
    let source = path.display().to_string();
    let report = if path.extension().is_some_and(|it| it == "xml") {
        NodeReport::of_junit(&bytes, &name, &source)
    } else {
        NodeReport::of_json(&bytes, &name, &source, &Kept::default())
    };
    report.unwrap_or_else(|error| NodeReport::unreadable(&name, &source, &error))
}

fn written(format: render::Format, fleet: &Fleet) -> String {
    let mut text = Vec::new();
    format.write(fleet, &mut text).expect("written");
    String::from_utf8(text).expect("UTF-8")
}

fn parse(value: &Value) -> NodeReport {
    let folder = Folder::new(&format!("parse-{:p}", std::ptr::from_ref(value)));
    folder.write("a.json", &value.to_string());
    read(&folder.0.join("a.json"))
}

#[test]
fn planted_outliers_are_found_and_nothing_else() {
    let folder = Folder::new("planted");
    for number in 0..40 {
        let mut node = node(number);
        let gpu = &mut node["machine"]["gpus"][3]["measurements"];
        match number {
            7 => gpu["burn_bf16_tflops"] = json!(540.0),
            11 => gpu["burn_temperature_maximum_c"] = json!(84.0),
            23 => gpu["pcie_width"] = json!(8.0),
            _ => {}
        }
        folder.write(&format!("{number}/report.json"), &node.to_string());
    }
    let fleet = folder.fleet();
    let found: Vec<String> = fleet
        .outliers()
        .map(|(compared, it)| format!("{} {} {}", compared.measurement, it.node, it.uuid))
        .collect();
    assert_eq!(
        found,
        [
            "burn_bf16_tflops node-7 GPU-00007-3",
            "burn_temperature_maximum_c node-11 GPU-00011-3",
            "pcie_width node-23 GPU-00023-3",
        ]
    );
    assert_eq!((fleet.gpus(), fleet.exit_code()), (320, 0));
    let markdown = render::markdown(&fleet);
    assert!(
        markdown.contains("GPU-00007-3 on node-7: burn\\_bf16\\_tflops is 540, 6"),
        "{markdown}"
    );
    let strict = Fleet::of(fleet.nodes, true);
    assert_eq!(strict.exit_code(), 1);
    assert!(written(render::Format::Junit, &strict).contains(r#"failures="3" errors="0""#));
}

#[test]
fn the_worst_node_is_the_fleets_verdict() {
    let with = |verdict: &str, code: u8| {
        let mut node = node(usize::from(code));
        node["verdict"] = json!(verdict);
        node["exit_code"] = json!(code);
        parse(&node)
    };
    let code = |nodes: &[&NodeReport]| {
        Fleet::of(nodes.iter().map(|it| (*it).clone()).collect(), false).exit_code()
    };
    let (pass, fail) = (with("pass", 0), with("fail", 1));
    let (not_judged, busy) = (with("not_judged", 2), with("busy", 4));
    assert_eq!(code(&[]), 2);
    assert_eq!(code(&[&pass]), 0);
    assert_eq!(code(&[&pass, &busy]), 4);
    assert_eq!(code(&[&pass, &busy, &not_judged]), 2);
    assert_eq!(code(&[&pass, &busy, &not_judged, &fail]), 1);
    let gone = NodeReport::missing("x", "pod gone");
    assert_eq!(code(&[&pass, &gone]), 2);
    // One node twice: which report is true?
    assert_eq!(code(&[&pass, &pass]), 2);
}

#[test]
fn no_bad_report_is_a_pass() {
    let folder = Folder::new("bad");
    folder.write("empty.json", "");
    folder.write("cut.json", &node(1).to_string()[..300]);
    folder.write("facts.json", r#"{"format": 1, "gpus": []}"#);
    for (name, pointer, value) in [
        ("format", "/format", json!(2)),
        ("contradicts", "/exit_code", json!(1)),
        ("incomplete", "/incomplete", json!("signal 15")),
        ("no-gpu", "/machine/gpus", json!([])),
        ("unknown", "/verdict", json!("great")),
    ] {
        let mut node = node(1);
        *node.pointer_mut(pointer).expect("there") = value;
        folder.write(&format!("{name}.json"), &node.to_string());
    }
    folder.write(
        "half.xml",
        r#"<testsuites><testsuite><testcase name="x" classname="gpu-validator.gpu.1"/>"#,
    );
    folder.write("none.xml", "<testsuites/>");
    folder.write(
        "foreign.xml",
        r#"<testsuite><testcase name="x" classname="pytest"/></testsuite>"#,
    );
    folder.write(
        "host-only.xml",
        r#"<testsuite><testcase name="x" classname="gpu-validator.host"/></testsuite>"#,
    );
    folder.write(
        "all-skipped.xml",
        r#"<testsuite><testcase name="x" classname="gpu-validator.gpu.1"><skipped message="y"/></testcase></testsuite>"#,
    );
    let fleet = folder.fleet();
    assert_eq!(fleet.nodes.len(), 13);
    for node in &fleet.nodes {
        assert_eq!(node.verdict, NodeVerdict::NotJudged, "{node:?}");
    }
}

#[test]
fn junit_files_count_where_there_is_no_json() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let read_alone = |name: &str| {
        // Alone in a folder: a report in JSON next to it would be read instead.
        let folder = Folder::new(name);
        folder.write(
            name,
            &std::fs::read_to_string(golden.join(name)).expect("a golden report"),
        );
        read(&folder.0.join(name))
    };
    let healthy = read_alone("healthy.junit.xml");
    assert_eq!(
        (healthy.verdict, healthy.name.as_str()),
        (NodeVerdict::Pass, "ip-10-1-2-3")
    );
    let failing = read_alone("failing.junit.xml");
    assert_eq!(failing.verdict, NodeVerdict::Fail);
    assert!(
        failing.failures.iter().any(|it| it.verdict == "fail"),
        "{failing:?}"
    );
    assert_eq!(
        read_alone("incomplete.junit.xml").verdict,
        NodeVerdict::NotJudged
    );
    assert_eq!(
        read_alone("no_gpu.junit.xml").verdict,
        NodeVerdict::NotJudged
    );
    assert!(read_alone("simulated.junit.xml").simulated);
}

#[test]
fn reports_in_json_are_those_of_the_validator() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    for (name, verdict) in [
        ("healthy", NodeVerdict::Pass),
        ("failing", NodeVerdict::Fail),
        ("busy", NodeVerdict::Busy),
        ("incomplete", NodeVerdict::NotJudged),
        ("no_gpu", NodeVerdict::NotJudged),
        ("hostile", NodeVerdict::Fail),
    ] {
        let report = read(&golden.join(format!("{name}.json")));
        assert_eq!(report.verdict, verdict, "{report:?}");
    }
    let healthy = read(&golden.join("healthy.json"));
    assert!(
        healthy
            .gpus
            .iter()
            .all(|it| it.measured("power_limit_w").is_some()),
        "{healthy:?}"
    );
}

#[test]
fn whatever_a_report_holds_the_fleets_is_well_formed() {
    let mut hostile = node(1);
    hostile["machine"]["hostname"] = json!("<script>\u{1b}[31m|\u{0}&\"'");
    hostile["verdict"] = json!("fail");
    hostile["exit_code"] = json!(1);
    hostile["findings"] = json!([{"check": "a", "subject": {"gpu": {"uuid": "<script>", "pci_address": null, "name": null}}, "verdict": "fail", "summary": "]]>\u{1}<b>"}]);
    let fleet = Fleet::of(vec![parse(&hostile), parse(&node(2))], false);
    let junit = written(render::Format::Junit, &fleet);
    let mut reader = quick_xml::Reader::from_str(&junit);
    let mut cases = 0;
    loop {
        match reader.read_event().expect("well-formed") {
            quick_xml::events::Event::Start(element) if element.name().as_ref() == b"testcase" => {
                cases += 1;
            }
            quick_xml::events::Event::Eof => break,
            _ => {}
        }
    }
    assert_eq!(cases, 2 + fleet.compared.len());
    assert!(!junit.contains(['\u{1b}', '\u{1}', '\u{0}']), "{junit}");
    assert!(!render::html(&fleet).contains("<script>"));
    assert!(!render::markdown(&fleet).contains('\u{1b}'));
    let parsed: Value = serde_json::from_str(&written(render::Format::Json, &fleet)).expect("JSON");
    assert_eq!(parsed["totals"]["fail"], 1);
}

#[test]
fn nodes_that_differ_are_named() {
    let folder = Folder::new("differ");
    for number in 0..5 {
        let mut node = node(number);
        if number == 4 {
            node["machine"]["driver_version"] = json!("570.86.15");
            node["machine"]["gpus"][0]["uuid"] = json!("GPU-00000-0");
        }
        folder.write(&format!("{number}.json"), &node.to_string());
    }
    let fleet = folder.fleet();
    assert_eq!(
        fleet.remarks,
        ["driver 570.86.15 on node-4, 580.159.04 on most others"]
    );
    assert_eq!(
        fleet.contradictions,
        ["GPU-00000-0 is in several reports: node-0, node-4"]
    );
    assert_eq!(fleet.exit_code(), 2);
}

#[test]
fn measurements_are_kept_as_they_are_written() {
    let mut values = node(1);
    values["machine"]["gpus"][2]["measurements"] = json!({
        "burn_bf16_tflops": 648.3,
        "memory_total_mib": 143_771.0,
        // These are not compared.
        "serial": 7.0,
        "burn_seconds": 10.0,
    });
    values["machine"]["gpus"][3] = json!({"uuid": null, "name": null});
    let report = parse(&values);
    let gpus: Vec<_> = report.gpus.iter().collect();
    assert_eq!(gpus.len(), 8);
    assert_eq!(gpus[2].uuid, "GPU-00001-2");
    assert_eq!(gpus[2].measured("burn_bf16_tflops"), Some(648.3_f32));
    assert!((node_report::shortest(648.3_f32) - 648.3).abs() < f64::EPSILON);
    assert_eq!(gpus[2].measured("memory_total_mib"), Some(143_771.0));
    assert_eq!(gpus[2].measured("serial"), None);
    assert_eq!((gpus[3].uuid, gpus[3].measured("pcie_width")), ("", None));
    assert_eq!(gpus[4].uuid, "GPU-00001-4");
    assert_eq!(gpus[4].measured("pcie_width"), Some(16.0));
}

#[test]
fn a_failure_names_its_node_its_gpu_and_the_serial_number() {
    let mut sick = node(3);
    sick["verdict"] = json!("fail");
    sick["exit_code"] = json!(1);
    sick["machine"]["gpus"][5]["pci_address"] = json!("0000:53:00.0");
    sick["machine"]["gpus"][5]["serial"] = json!("1650223012345");
    let gpu = json!({"gpu": {"uuid": "GPU-00003-5", "pci_address": "0000:53:00.0", "name": "NVIDIA H200"}});
    sick["findings"] = json!([
        {"check": "gpu_count", "subject": "host", "verdict": "fail", "summary": "7 GPUs"},
        {"check": "gemm_numerics", "subject": gpu, "verdict": "fail", "summary": "3 mismatches"},
        {"check": "row_remapping", "subject": gpu, "verdict": "error", "summary": "not read"},
        {"check": "persistence_mode", "subject": gpu, "verdict": "warn", "summary": "off"},
    ]);
    let fleet = Fleet::of(vec![parse(&node(1)), parse(&sick)], false);
    let of_gpu = "GPU 5 (0000:53:00.0), serial 1650223012345, GPU-00003-5";
    let expected = [
        "fail gpu_count: 7 GPUs".to_owned(),
        format!("fail gemm_numerics on {of_gpu}: 3 mismatches"),
        format!("error row_remapping on {of_gpu}: not read"),
    ];
    let report: Value = serde_json::from_str(&written(render::Format::Json, &fleet)).expect("JSON");
    let node = &report["nodes"][1];
    assert_eq!(
        (&node["name"], &node["objections"]),
        (&json!("node-3"), &json!(expected))
    );
    assert_eq!(node["failures"][0]["gpu"], Value::Null);
    assert_eq!(node["failures"][1]["gpu"]["serial"], "1650223012345");
    assert_eq!(node["failures"][2]["gpu"]["index"], 5);
    for format in [
        render::Format::Markdown,
        render::Format::Html,
        render::Format::Junit,
    ] {
        let text = written(format, &fleet);
        assert!(text.contains("serial 1650223012345"), "{text}");
    }
    // A GPU that NVML cannot name is still one.
    assert_eq!(FailedGpu::default().to_string(), "GPU, serial not reported");
}

#[test]
fn facts_that_were_judged_here_are_a_node_as_their_report_is() {
    let facts = crate::test_machine::healthy_node();
    let level = facts.level;
    let run = crate::findings::Run::judged(facts, &crate::profile::Profile::default(), "p", level);
    let kept = Kept::default();
    let of_run = NodeReport::of_run(&run, "x", "x.json", &kept).expect("a report");
    let json = crate::report::json(&run);
    let of_json = NodeReport::of_json(json.as_bytes(), "x", "x.json", &kept).expect("a report");
    assert_eq!(format!("{of_run:?}"), format!("{of_json:?}"));
    assert_eq!(of_run.gpus.len(), 8);
}
