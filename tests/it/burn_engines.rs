//! Who multiplies in a burn: the embedded kernels or cuBLASLt, and the finding where the two
//! disagree.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::node::{Node, Ran, said};
use crate::processes::{eventually, signal};

/// Products of 512 x 512, which the host's processor multiplies for all GPUs.
const MEMORY: &str = "8MiB";
const FOUR_GPUS: &str = "g4dn.12xlarge";

fn burn(node: &Node, arguments: &[&str]) -> Ran {
    let mut command = node.burn_command(&["--memory", MEMORY, "--duration", "1s"]);
    node.finish(command.args(arguments))
}

/// What the facts hold of every GPU's burn.
fn runs(node: &Node) -> Vec<Value> {
    let facts: Value = serde_json::from_str(&node.out.read("facts.json")).expect("JSON");
    let by_gpu = facts["load"]["burn"].as_object().expect("by GPU");
    by_gpu.values().map(|run| run["value"].clone()).collect()
}

fn numerics(ran: &Ran) -> Vec<(&str, &str)> {
    ran.report
        .of_check("gemm_numerics")
        .map(|it| {
            let text = |name: &str| it[name].as_str().expect("text");
            (text("verdict"), text("summary"))
        })
        .collect()
}

#[test]
fn auto_tries_both_engines_and_says_which_is_better_and_why() {
    let node = Node::healthy("h200x1");
    let ran = burn(&node, &["--precision", "bf16,fp64"]);
    assert_eq!(numerics(&ran)[0].0, "pass", "{:?}", numerics(&ran));
    let run = &runs(&node)[0];
    let choice = run["engine_choice"].as_str().expect("text");
    assert!(
        choice.contains("bf16 by ")
            && choice.contains("; fp64 by ")
            && choice.contains(", cuBLASLt "),
        "{choice}"
    );
    for products in run["precisions"].as_array().expect("a list") {
        let proof = &products["reference"];
        assert_eq!(proof["second_engine_mismatches"], 0, "{products}");
        assert_eq!(proof["second_engine_is_right"], true, "{products}");
    }
}

/// Which engine each GPU of a burn of a minute takes, and why; it is stopped when all have chosen.
fn choices(changes: &[&str]) -> Vec<(String, String)> {
    let node = Node::with("h200x8", &[], changes);
    let gpus: Vec<String> = node
        .state()
        .scenario()
        .gpus
        .iter()
        .take(3)
        .map(|it| it.uuid.clone())
        .collect();
    let mut command = node.validator();
    command
        .args([
            "burn",
            "--simulated-ok",
            "--memory",
            MEMORY,
            "--duration",
            "60s",
            "--engine",
            "auto",
            "--gpu",
        ])
        .arg(gpus.join(","))
        .arg("--sysroot")
        .arg(node.sysroot())
        .arg("--json")
        .arg(node.out.path("report.json"))
        .arg("--facts")
        .arg(node.out.path("facts.json"))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = command.spawn().expect("the validator starts");
    eventually("a rate of each GPU", || {
        // A look is a process.
        std::thread::sleep(Duration::from_millis(200));
        let (_, stdout, _) = said(node.validator().args(["burn", "status"]));
        let rates = stdout
            .lines()
            .filter(|line| line.contains("TFLOP/s") && !line.contains(" 0.0 TFLOP/s"));
        rates.count() == gpus.len()
    });
    signal(child.id(), "INT");
    child.wait().expect("it can be waited for");
    let of_run = |run: &Value| {
        let kernels = run["precisions"][0]["kernels"].as_str();
        let choice = run["engine_choice"].as_str().expect("text");
        (
            kernels.unwrap_or_else(|| panic!("{run}")).to_owned(),
            choice.to_owned(),
        )
    };
    let runs = runs(&node);
    assert_eq!(runs.len(), 3);
    runs.iter().map(of_run).collect()
}

#[test]
fn auto_takes_the_engine_that_draws_more_power_on_every_gpu() {
    for (cublaslt_mw, taken) in [(640_000, "cublaslt"), (500_000, "sm_90a")] {
        let load = format!("gpu.power={{load_mw: 570000, cublaslt_load_mw: {cublaslt_mw}}}");
        for (kernels, choice) in choices(&[&load]) {
            assert_eq!(kernels, taken, "{choice}");
            let watts = f64::from(cublaslt_mw) / 1000.0;
            assert!(
                choice.contains(", for its power: embedded kernels ")
                    && choice.contains(" TFLOP/s at 570.0 W, cuBLASLt ")
                    && choice.contains(&format!(" TFLOP/s at {watts:.1} W"))
                    && choice.ends_with(" instantaneous readings of power)"),
                "{choice}"
            );
        }
    }
}

/// cuBLASLt is called slowly, so that it has no lead.
#[test]
fn auto_takes_the_embedded_kernels_on_every_gpu_where_cublaslt_is_not_better() {
    let load = "gpu.power={load_mw: 693000, cublaslt_load_mw: 696000}";
    for (kernels, choice) in choices(&[load, "cublaslt.delay_us=3000"]) {
        assert_eq!(kernels, "sm_90a", "{choice}");
        let says = "bf16 by the embedded kernels, since cuBLASLt is not clearly better: ";
        assert!(choice.starts_with(says), "{choice}");
        assert!(
            choice.contains(" at 693.0 W, cuBLASLt ") && choice.contains(" at 696.0 W ("),
            "{choice}"
        );
    }
}

#[test]
fn auto_says_when_the_driver_has_no_instantaneous_power() {
    let load = "gpu.power={load_mw: 570000, no_instant: true}";
    for (_, choice) in choices(&[load, "cublaslt.delay_us=3000"]) {
        let says = "readings of power that the driver averages over time, since it has no instantaneous ones)";
        assert!(choice.ends_with(says), "{choice}");
    }
}

#[test]
fn each_engine_is_taken_when_it_is_asked_for() {
    let node = Node::healthy("h200x1");
    for (engine, precisions) in [
        ("cublaslt", "bf16,fp16,tf32,fp8,int8,fp32,fp64"),
        ("ptx", "bf16"),
    ] {
        let ran = burn(&node, &["--engine", engine, "--precision", precisions]);
        assert_eq!(numerics(&ran)[0].0, "pass", "{:?}", numerics(&ran));
        let run = &runs(&node)[0];
        assert!(run["engine"][engine].is_object(), "{}", run["engine"]);
        let burned = run["precisions"].as_array().expect("a list");
        assert_eq!(burned.len(), precisions.split(',').count());
        if engine == "cublaslt" {
            let library = run["engine"][engine]["library"].as_str().expect("text");
            assert!(library.contains("libcublasLt.so.13"), "{library}");
        }
    }
}

#[test]
fn the_embedded_kernels_serve_where_there_is_no_cublaslt() {
    let node = Node::with("h200x1", &[], &["cublaslt.init_error=1"]);
    let ran = burn(&node, &[]);
    assert_eq!(numerics(&ran)[0].0, "pass");
    let run = &runs(&node)[0];
    assert_eq!(run["engine"]["ptx"]["kernels"], "sm_90a");
    let choice = run["engine_choice"].as_str().expect("text");
    assert!(
        choice.starts_with("the embedded kernels serve: no cuBLASLt works"),
        "{choice}"
    );
    assert!(choice.contains("CUBLAS_STATUS_NOT_INITIALIZED"), "{choice}");
    let ran = burn(&node, &["--engine", "cublaslt"]);
    assert_ne!(ran.code, 0);
    let completed = ran
        .report
        .of_check("burn_completed")
        .next()
        .expect("judged");
    let summary = completed["summary"].as_str().expect("text");
    assert!(
        summary.contains("cuBLASLt was requested: no cuBLASLt works"),
        "{summary}"
    );
}

#[test]
fn wrong_results_of_cublaslt_are_found() {
    let wrong = "gpu.wrong_results={kind: bit, kernel: cublasLt, every_launches: 37}";
    let node = Node::with("h200x1", &[], &[wrong]);
    let ran = burn(&node, &["--engine", "cublaslt"]);
    let (verdict, summary) = numerics(&ran)[0];
    assert_eq!(verdict, "fail", "{summary}");
    assert!(
        !summary.contains("multiprocessor"),
        "cuBLASLt tells none: {summary}"
    );
}

#[test]
fn a_library_that_is_wrong_on_all_gpus_is_suspected_and_a_gpu_alone_is_blamed() {
    let wrong = "wrong_results={kind: same-every-time, kernel: cublasLt, element: 777}";
    for engine in ["cublaslt", "ptx"] {
        let node = Node::with(FOUR_GPUS, &[], &[&format!("gpu.{wrong}")]);
        let ran = burn(&node, &["--engine", engine]);
        let findings = numerics(&ran);
        if engine == "ptx" {
            // cuBLASLt was not requested, so that it was not even loaded.
            assert!(findings.iter().all(|it| it.0 == "pass"), "{findings:?}");
            continue;
        }
        assert_eq!(findings.len(), 4);
        for (verdict, summary) in findings {
            assert_eq!(verdict, "error", "{summary}");
            assert!(
                summary.ends_with("a bug of cuBLASLt is suspected"),
                "{summary}"
            );
        }
    }
    let node = Node::with(FOUR_GPUS, &[], &[&format!("gpus.2.{wrong}")]);
    let ran = burn(&node, &["--engine", "cublaslt"]);
    let verdicts: Vec<&str> = numerics(&ran).iter().map(|it| it.0).collect();
    assert_eq!(
        verdicts.iter().filter(|it| **it == "fail").count(),
        1,
        "{verdicts:?}"
    );
    assert_eq!(
        verdicts.iter().filter(|it| **it == "pass").count(),
        3,
        "{verdicts:?}"
    );
}
