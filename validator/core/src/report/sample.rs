//! Hand-made runs for the tests of reports. Most check ids here are no real ones, so that a change
//! of a check changes no expected report.

use crate::facts::{
    BurnRun, Ec2Instance, Facts, GpuFacts, KernelModuleFlavor, KernelModules, MemoryUse, PciDevice,
    Power, Precision, PrecisionRun, Reading, ReferenceProof, SensorLog, SensorSample, Temperature,
    WorkerEnd,
};
use crate::findings::{Finding, GpuSubject, Outcome, Run, Subject};
use crate::level::Level;

const PROFILE: &str = "manifests/profiles/p5en.48xlarge.yaml";

fn run(facts: Facts, findings: Vec<Finding>) -> Run {
    Run {
        incomplete: facts.interrupted.clone(),
        facts,
        profile: PROFILE.to_owned(),
        level: Level::Standard,
        findings,
    }
}

fn finding(check: &str, subject: Subject, outcome: Outcome) -> Finding {
    Finding {
        check: check.to_owned(),
        subject,
        verdict: outcome.verdict,
        summary: outcome.summary,
        expected: outcome.expected,
        observed: outcome.observed,
        remedy: outcome.remedy,
        recommended_action: crate::diagnosis::recommended_action(
            check,
            outcome.verdict,
            outcome.recommended_action,
            outcome.busy,
        ),
        cause: outcome.cause,
        evidence: outcome.evidence.into_vec(),
        busy: outcome.busy,
        overridden: None,
        time_s: 0.012_5,
    }
}

fn gpu(index: u8) -> GpuFacts {
    GpuFacts {
        uuid: Reading::Value(format!("GPU-5c1f{index:04}-0000-4000-8000-000000000000")),
        pci_address: Reading::Value(format!("0000:{:02x}:00.0", 0x1b + index)),
        name: Reading::Value("NVIDIA H200".to_owned()),
        serial: Reading::Value(format!("165322{index:07}")),
        memory: Reading::Value(MemoryUse {
            total_bytes: 150_754_820_096,
            reserved_bytes: Some(627_048_448),
            used_bytes: 0,
            free_bytes: 150_127_771_648,
        }),
        temperature: Reading::Value(Temperature {
            gpu_c: 31 + i32::from(index),
            memory_c: Some(38),
            ..Temperature::default()
        }),
        power: Reading::Value(Power {
            draw_mw: Some(76_500),
            limit_mw: 700_000,
            ..Power::default()
        }),
        ..GpuFacts::default()
    }
}

fn facts(gpus: u8) -> Facts {
    let mut facts = Facts {
        format: crate::facts::FACTS_FORMAT,
        validator_version: env!("CARGO_PKG_VERSION").to_owned(),
        collected_at: "2026-11-20T03:04:05Z".to_owned(),
        level: Level::Standard,
        gpus: (0..gpus).map(gpu).collect(),
        timings_ms: [("host".to_owned(), 41.5), ("nvml".to_owned(), 180.0)].into(),
        ..Facts::default()
    };
    facts.host.hostname = Reading::Value("ip-10-1-2-3".to_owned());
    facts.host.operating_system = Reading::Value("Ubuntu 24.04.3 LTS".to_owned());
    facts.host.kernel_release = Reading::Value("6.8.0-1036-aws".to_owned());
    facts.host.ec2 = Reading::Value(Ec2Instance {
        instance_type: "p5en.48xlarge".to_owned(),
        ..Ec2Instance::default()
    });
    facts.host.pci_devices = Reading::Value(
        facts
            .gpus
            .iter()
            .map(|gpu| PciDevice {
                address: gpu.pci_address.value().cloned().unwrap_or_default(),
                class: 0x03_0200,
                ..PciDevice::default()
            })
            .collect(),
    );
    facts.host.kernel_modules = Reading::Value(KernelModules {
        loaded: [("nvidia".to_owned(), Some("580.159.04".to_owned()))].into(),
        nvidia_version: Reading::Value("580.159.04".to_owned()),
        nvidia_flavor: Reading::Value(KernelModuleFlavor::Open),
        ..KernelModules::default()
    });
    facts.nvml.initialized = Reading::Value(true);
    facts.nvml.driver_version = Reading::Value("580.159.04".to_owned());
    facts.nvml.cuda_driver_version = Reading::Value(13_000);
    facts.cuda.library = Reading::Value("/usr/lib/libcuda.so.580.159.04".to_owned());
    facts
}

fn subject(facts: &Facts, index: usize) -> Subject {
    Subject::Gpu(GpuSubject::of(&facts.gpus[index]))
}

/// Two host checks, and three of each GPU, all as they should be.
fn healthy_findings(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        finding(
            "driver_age",
            Subject::Host,
            Outcome::pass("driver is 580.159.04, from 2026-08-04"),
        ),
        finding(
            "clock_source",
            Subject::Host,
            Outcome::skip("no clock source is configured in the profile"),
        ),
    ];
    for index in 0..facts.gpus.len() {
        let gpu = subject(facts, index);
        findings.push(finding(
            "fan_speed",
            gpu.clone(),
            Outcome::skip("this GPU or driver has no fan"),
        ));
        findings.push(finding(
            "persistence_mode",
            gpu.clone(),
            Outcome::pass("persistence mode is on"),
        ));
        findings.push(finding(
            "board_temperature",
            gpu,
            Outcome::pass(format!("board is at {} C", 31 + index)),
        ));
    }
    findings
}

/// Eight GPUs, nothing wrong.
pub(super) fn healthy() -> Run {
    let facts = facts(8);
    let findings = healthy_findings(&facts);
    run(facts, findings)
}

/// One GPU, nothing wrong, no profile.
pub(super) fn healthy_single() -> Run {
    let facts = facts(1);
    let findings = healthy_findings(&facts);
    Run {
        profile: Run::BUILT_IN_PROFILE.to_owned(),
        ..run(facts, findings)
    }
}

/// Eight GPUs: one too hot, persistence mode off on all, a reading missing on one, a warning, a
/// profile's override.
pub(super) fn failing() -> Run {
    let mut run = healthy();
    let hot = subject(&run.facts, 3);
    let silent = subject(&run.facts, 5);
    for finding in &mut run.findings {
        let outcome = match finding.check.as_str() {
            "persistence_mode" => Outcome::fail("persistence mode is off, on is expected")
                .expected("on")
                .observed("off")
                .remedy("enable the daemon: systemctl enable --now nvidia-persistenced"),
            "board_temperature" if finding.subject == hot => {
                Outcome::fail("board is at 91 C, 87 C is the highest that the profile allows")
                    .expected("at most 87 C")
                    .observed("91 C")
                    .remedy("take the node out of service and have its cooling checked")
            }
            "board_temperature" if finding.subject == silent => {
                Outcome::error("board temperature could not be read: unknown error (999)")
            }
            "driver_age" => Outcome::warn("driver is 580.65.06, a newer one of its branch is out")
                .expected("580.159.04")
                .observed("580.65.06"),
            _ => continue,
        };
        let time_s = finding.time_s;
        *finding = Finding {
            time_s,
            ..self::finding(&finding.check, finding.subject.clone(), outcome)
        };
        if finding.check == "driver_age" {
            finding.overridden =
                Some("fail became warn by the profile: image rebuild is planned".to_owned());
        }
    }
    run
}

/// Neither GPU nor driver.
pub(super) fn no_gpu() -> Run {
    let mut facts = facts(0);
    facts.host.kernel_modules = Reading::Value(KernelModules {
        nvidia_version: Reading::NotSupported,
        nvidia_flavor: Reading::NotSupported,
        ..KernelModules::default()
    });
    facts.nvml = crate::facts::NvmlFacts {
        initialized: Reading::NotRead("libnvidia-ml.so.1 is not on this machine".to_owned()),
        ..Default::default()
    };
    facts.cuda.library = Reading::NotRead("libcuda.so.1 is not on this machine".to_owned());
    let missing = "libnvidia-ml.so.1 is not on this machine";
    let error = |check: &str, what: &str| {
        let outcome = Outcome::error(format!("{what} could not be read: {missing}"))
            .remedy("install the NVIDIA driver");
        finding(check, Subject::Host, outcome)
    };
    let skip = |check| {
        let outcome = Outcome::skip("no GPU was found, which gpu_count reports");
        finding(check, Subject::Host, outcome)
    };
    let findings = vec![
        error("driver_age", "driver version"),
        error("gpu_number", "number of GPUs"),
        skip("fan_speed"),
        skip("persistence_mode"),
        skip("board_temperature"),
    ];
    Run {
        profile: Run::BUILT_IN_PROFILE.to_owned(),
        ..run(facts, findings)
    }
}

/// Every text is hostile to some format.
pub(super) fn hostile() -> Run {
    let hostile = "\u{1b}[2J]]></failure>\0 \"<&>'` | @all [x](http://evil) \u{202e}gnp.\u{ffff}\n::error::forged\r\n##[error]forged %0A";
    let mut facts = facts(2);
    facts.host.hostname = Reading::Value(hostile.to_owned());
    facts.gpus[0].name = Reading::Value(hostile.to_owned());
    facts.gpus[1].uuid = Reading::NotRead(hostile.to_owned());
    facts.gpus[1].pci_address = Reading::NotRead(hostile.to_owned());
    facts.collected_at = hostile.to_owned();
    let mut findings = vec![
        finding(
            "driver_age",
            Subject::Host,
            Outcome::fail(hostile)
                .expected(hostile)
                .observed(hostile)
                .remedy(hostile),
        ),
        finding("clock_source", Subject::Host, Outcome::skip(hostile)),
        finding(hostile, Subject::Host, Outcome::pass(hostile)),
    ];
    for index in [0, 1] {
        let gpu = subject(&facts, index);
        findings.push(finding("fan_speed", gpu.clone(), Outcome::error(hostile)));
        findings.push(finding("persistence_mode", gpu, Outcome::warn(hostile)));
    }
    findings[0].time_s = f64::NAN;
    findings[1].time_s = f64::INFINITY;
    findings[2].time_s = -1.0;
    Run {
        profile: hostile.to_owned(),
        ..run(facts, findings)
    }
}

/// Stopped by a signal after the host stage.
pub(super) fn incomplete() -> Run {
    let mut facts = facts(0);
    facts.nvml = crate::facts::NvmlFacts::default();
    facts.interrupted = Some("signal 15 (SIGTERM)".to_owned());
    let findings = vec![
        finding(
            "driver_age",
            Subject::Host,
            Outcome::pass("driver is 580.159.04, from 2026-08-04"),
        ),
        finding(
            "run_complete",
            Subject::Host,
            Outcome::error("the run ended early: signal 15 (SIGTERM)").remedy("run it again"),
        ),
    ];
    run(facts, findings)
}

/// The driver libraries were the simulator's; facts anonymized.
pub(super) fn simulated() -> Run {
    let mut run = healthy_single();
    run.facts.simulated = Some("p5en.48xlarge, no faults".to_owned());
    run.facts.anonymized = true;
    run
}

/// Others use the only GPU.
pub(super) fn busy() -> Run {
    let mut run = healthy_single();
    let gpu = subject(&run.facts, 0);
    run.findings.push(finding(
        "matrix_load",
        gpu,
        Outcome::busy("2 processes use this GPU, so no load was put on it")
            .remedy("run again when the GPU is idle"),
    ));
    run
}

/// Two GPUs after ten seconds of two precisions; the second one computed wrong.
pub(super) fn burned() -> Run {
    let mut facts = facts(2);
    let products = |precision, tflops: f64, mismatches| PrecisionRun {
        precision,
        kernels: "sm_90a".to_owned(),
        engine: None,
        m: 8192,
        n: 8192,
        k: 16_384,
        products: 1500,
        products_verified: 1500,
        gpu_time_s: 5.0,
        tflops,
        #[expect(clippy::cast_possible_truncation, reason = "a rate")]
        tflops_intervals: (0..10_u8)
            .map(|it| tflops as f32 * if it == 0 { 1.1 } else { 1.0 })
            .collect(),
        reference: ReferenceProof::default(),
        mismatches,
        nonfinite: 0,
        examples: Vec::new(),
    };
    for (index, mismatches) in [(0, 0), (1, 3)] {
        let uuid = facts.gpus[index].uuid.value().cloned().unwrap_or_default();
        let run = BurnRun {
            measured_s: 10.0,
            stood_still_s: 0.0,
            precisions: vec![
                products(Precision::Bf16, 660.0, mismatches),
                products(Precision::Fp8, 1305.0, 0),
            ],
            ..BurnRun::empty(WorkerEnd::Finished)
        };
        let samples = (0..20_u8).map(|it| SensorSample {
            t: f32::from(it) / 2.0,
            power_mw: Some(if it < 2 { 400_000 } else { 694_000 }),
            sm_mhz: Some(if it < 2 { 1980 } else { 1455 }),
            gpu_c: Some(40 + i32::from(it)),
            ..SensorSample::default()
        });
        let log = SensorLog {
            power_limit_mw: Some(700_000),
            samples: samples.collect(),
            ..SensorLog::default()
        };
        facts.load.burn.insert(uuid.clone(), Reading::Value(run));
        facts.load.sensors.insert(uuid, log);
    }
    let findings = vec![
        finding(
            "matrix_load",
            subject(&facts, 0),
            Outcome::pass("every element of 3000 products is right"),
        ),
        finding(
            "matrix_load",
            subject(&facts, 1),
            Outcome::fail("3 blocks of results are wrong").remedy("take the node out of service"),
        ),
    ];
    run(facts, findings)
}

/// Eight simulated GPUs, one of which fell off the bus: a line of the kernel log, and what follows
/// from it.
pub(super) fn fallen_off_the_bus() -> Run {
    let mut run = healthy();
    run.facts.simulated = Some("p5en.48xlarge+xid-79".to_owned());
    let lost = subject(&run.facts, 1);
    let address = run.facts.gpus[1].pci_address.value().cloned();
    for it in &mut run.findings {
        if it.subject == lost && it.verdict == crate::findings::Verdict::Pass {
            let outcome =
                Outcome::error("not read: nvmlDeviceGetName returned NVML_ERROR_GPU_IS_LOST");
            *it = finding(&it.check, lost.clone(), outcome);
        }
    }
    let evidence = crate::findings::Evidence {
        pci_address: address.clone(),
        verdict: crate::findings::Verdict::Fail,
        kind: crate::cause::CauseKind::GpuLost,
        recommended_action: crate::cause::RecommendedAction::Reboot,
        summary: "Xid 79 (GPU has fallen off the bus), 60 s ago".to_owned(),
        line: Some("NVRM: Xid (PCI:0000:1c:00): 79, GPU has fallen off the bus.".to_owned()),
    };
    let outcome = Outcome::fail("Xid 79 (GPU has fallen off the bus), 60 s ago")
        .remedy("restart the machine")
        .evidence(vec![evidence]);
    run.findings
        .push(finding("kernel_log_xid", Subject::Host, outcome));
    run
}

/// Every sample by name.
pub(super) fn all() -> Vec<(&'static str, Run)> {
    vec![
        ("healthy", healthy()),
        ("healthy_single", healthy_single()),
        ("failing", failing()),
        ("no_gpu", no_gpu()),
        ("hostile", hostile()),
        ("incomplete", incomplete()),
        ("simulated", simulated()),
        ("busy", busy()),
        ("burned", burned()),
        ("fallen_off_the_bus", fallen_off_the_bus()),
    ]
}
