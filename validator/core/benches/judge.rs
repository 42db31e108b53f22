//! How long judging and reporting take for a node with eight GPUs: `cargo bench -p validator-core`.
//!
//! The facts are made up, with lists as long as a real node has them.

use validator_core::facts::{
    Facts, GpuFacts, KernelLog, KernelLogRecord, NvLink, PciDevice, Reading, Temperature,
};
use validator_core::findings::Run;
use validator_core::level::Level;
use validator_core::profile::Profile;
use validator_core::report::{HumanStyle, html, human, json, junit, markdown, metrics};

fn main() {
    divan::main();
}

/// Eight GPUs with eighteen links each and a kernel log of 200 records.
fn facts() -> Facts {
    let gpus = (0..8_u8).map(|index| GpuFacts {
        uuid: Reading::Value(format!("GPU-00000000-0000-0000-0000-00000000000{index}")),
        pci_address: Reading::Value(format!("0000:{:02x}:00.0", 0x1b + index)),
        name: Reading::Value("NVIDIA H200".to_owned()),
        persistence_mode: Reading::Value(index != 3),
        temperature: Reading::Value(Temperature {
            gpu_c: 35,
            ..Temperature::default()
        }),
        nvlinks: Reading::Value(
            (0..18)
                .map(|link| NvLink {
                    link,
                    active: true,
                    ..NvLink::default()
                })
                .collect(),
        ),
        ..GpuFacts::default()
    });
    let mut facts = Facts {
        format: validator_core::facts::FACTS_FORMAT,
        level: Level::Standard,
        gpus: gpus.collect(),
        ..Facts::default()
    };
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
    facts.host.kernel_log = Reading::Value(KernelLog {
        since_boot: true,
        records: (0..200)
            .map(|index| KernelLogRecord {
                repeats: 0,
                age_s: Some(f64::from(index)),
                at_s: None,
                text: format!("NVRM: Xid (PCI:0000:1e:00): 31, pid={index}, name=python"),
            })
            .collect(),
        ..KernelLog::default()
    });
    facts
}

fn run() -> Run {
    Run::judged(
        facts(),
        &Profile::default(),
        Run::BUILT_IN_PROFILE,
        Level::Standard,
    )
}

#[divan::bench]
fn read_facts(bencher: divan::Bencher<'_, '_>) {
    let text = serde_json::to_vec(&facts()).expect("facts are plain data");
    bencher.bench(|| Facts::from_json(&text));
}

#[divan::bench]
fn judge(bencher: divan::Bencher<'_, '_>) {
    let (facts, profile) = (facts(), Profile::default());
    bencher.bench(|| validator_core::judge(&facts, &profile, Level::Standard));
}

#[divan::bench]
fn read_judge_and_report_json(bencher: divan::Bencher<'_, '_>) {
    let text = serde_json::to_vec(&facts()).expect("facts are plain data");
    let profile = Profile::default();
    bencher.bench(|| {
        let facts = Facts::from_json(&text).expect("they were just written");
        let run = Run::judged(facts, &profile, Run::BUILT_IN_PROFILE, Level::Standard);
        json(&run)
    });
}

#[divan::bench(args = ["human", "junit", "markdown", "html", "metrics"])]
fn report(bencher: divan::Bencher<'_, '_>, format: &str) {
    let run = run();
    let render: fn(&Run) -> String = match format {
        "human" => |run| human(run, HumanStyle::default()),
        "junit" => |run| junit(run).expect("a report"),
        "markdown" => markdown,
        "html" => html,
        _ => metrics,
    };
    bencher.bench(|| render(&run));
}
