//! What the simulated H200 answers to every call and field equals what a real one answered to the
//! same program.
//!
//! `captures/h200x4.nvml-transcript.json` is what `nvml-transcript` printed on a node of four
//! H200s. Everything in it is either equal on the simulated node, or listed in `DIFFERENCES` with
//! the reason; anything else fails the test.

mod simulated_transcript;

use serde_json::{Map, Value};
use simulated_transcript::transcript_of;
use std::collections::BTreeSet;
use std::path::Path;

/// Why an answer may differ. Either way it has the same shape on both: a value of the same type,
/// never an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// Another value each time it is read, so that it may be equal by chance.
    Momentary(&'static str),
    /// A fixed value; if it is equal on every GPU, it no longer belongs here.
    Always(&'static str),
}
use Why::{Always, Momentary};

/// Entries that may differ; `*` stands for any link.
const DIFFERENCES: [(&str, Why); 36] = [
    (
        "DeviceGetCount",
        Always("four GPUs of a node for eight were asked"),
    ),
    (
        "DeviceGetPdi",
        Always("identifier, replaced in the capture"),
    ),
    (
        "DeviceGetIrqNum",
        Always("the host's choice: the real GPUs shared one interrupt"),
    ),
    (
        "DeviceGetBoardPartNumber",
        Always(
            "another revision of the board than in the captures of nvidia-smi, which the model follows",
        ),
    ),
    (
        "DeviceGetMemoryInfo",
        Always(
            "the driver kept 0.4 MiB less on this board revision than the captures of nvidia-smi show",
        ),
    ),
    ("DeviceGetMemoryInfo_v2", Always("as DeviceGetMemoryInfo")),
    (
        "DeviceGetBAR1MemoryInfo",
        Always("the captures of nvidia-smi show 1 MiB used, which the model follows"),
    ),
    ("DeviceGetPowerUsage", Momentary("power")),
    ("Field[185]", Momentary("power")),
    ("Field[185] of the memory", Momentary("power")),
    ("Field[186]", Momentary("power")),
    ("DeviceGetTotalEnergyConsumption", Momentary("energy")),
    ("Field[83]", Momentary("energy")),
    ("Field[191]", Momentary("energy")),
    ("DeviceGetTemperature[0]", Momentary("temperature")),
    ("DeviceGetTemperatureV", Momentary("temperature")),
    ("DeviceGetMarginTemperature", Momentary("temperature")),
    ("Field[82]", Momentary("temperature of the memory")),
    ("DeviceGetPcieThroughput[0]", Momentary("throughput")),
    ("DeviceGetPcieThroughput[1]", Momentary("throughput")),
    (
        "Field[197]",
        Momentary("bytes sent since the driver's start"),
    ),
    (
        "Field[198]",
        Momentary("bytes received since the driver's start"),
    ),
    ("DeviceGetViolationStatus[4]", Momentary("time spent idle")),
    (
        "DeviceGetViolationStatus[10]",
        Momentary("time spent below the applications clocks"),
    ),
    (
        "DeviceGetViolationStatus[11]",
        Momentary("time spent below the base clocks"),
    ),
    ("Field[78]", Momentary("time spent idle")),
    (
        "Field[80]",
        Momentary("time spent below the applications clocks"),
    ),
    ("Field[81]", Momentary("time spent below the base clocks")),
    (
        "DeviceGetNvLinkErrorCounter[*,3]",
        Momentary("background of a healthy link, another on every link"),
    ),
    (
        "DeviceGetNvLinkErrorCounter[*,4]",
        Momentary("background of a healthy link, another on every link"),
    ),
    (
        "Field[140]",
        Momentary("KiB that the links sent for themselves; the simulated ones are silent"),
    ),
    (
        "Field[141]",
        Momentary("KiB that the links received for themselves; the simulated ones are silent"),
    ),
    (
        "Field[169]",
        Momentary("recoveries of the PCIe link while it was trained; the simulated one needs none"),
    ),
    (
        "Field[175]",
        Momentary("receiver errors of the PCIe link: 0 to 2 on the real ones"),
    ),
    (
        "Field[176]",
        Momentary("bad packets of the PCIe link: 0 to 2 on the real ones"),
    ),
    (
        "Field[177]",
        Momentary("packets of the PCIe link refused: 0 to 2 on the real ones"),
    ),
];

fn listed(entry: &str) -> Option<usize> {
    DIFFERENCES.iter().position(|(pattern, _)| {
        pattern
            .split_once('*')
            .map_or(*pattern == entry, |(start, end)| {
                entry.starts_with(start) && entry.ends_with(end)
            })
    })
}

/// The types of a value and of what is in it; errors are distinguished by their number.
fn shape(value: &Value) -> String {
    match value {
        Value::Object(members) if members.contains_key("error") => value.to_string(),
        Value::Object(members) => {
            let members = members
                .iter()
                .map(|(name, member)| name.clone() + ":" + &shape(member));
            members.collect::<Vec<_>>().join(",")
        }
        Value::Array(items) => items.iter().map(shape).collect(),
        Value::Number(_) => "number".to_owned(),
        Value::String(_) => "text".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::Null => "nothing".to_owned(),
    }
}

/// The differences of one GPU, or of the system: those that are not listed, and the positions of
/// those that are.
fn compare(place: &str, real: &Value, simulated: &Value) -> (Vec<String>, BTreeSet<usize>) {
    let keys = |value: &Value| -> BTreeSet<String> {
        let entries = value.as_object().map(Map::keys);
        entries.into_iter().flatten().cloned().collect()
    };
    let (mut unexpected, mut seen) = (Vec::new(), BTreeSet::new());
    let both = &keys(real) | &keys(simulated);
    for entry in both.iter().filter(|it| real[*it] != simulated[*it]) {
        let (real, simulated) = (&real[entry], &simulated[entry]);
        match listed(entry) {
            Some(position) if shape(real) == shape(simulated) => {
                seen.insert(position);
            }
            _ => unexpected.push(format!(
                "{place} {entry}: real {real}, simulated {simulated}"
            )),
        }
    }
    (unexpected, seen)
}

fn capture() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("captures/h200x4.nvml-transcript.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_simulated_h200_answers_every_call_as_a_real_one() {
    let (real, simulated) = (capture(), transcript_of("h200x8", "transcript"));
    let (mut unexpected, mut seen) = compare("system", &real["system"], &simulated["system"]);
    let gpus = real["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 4);
    for (index, gpu) in gpus.iter().enumerate() {
        assert!(gpu.as_object().unwrap().len() > 700, "GPU {index}");
        let (more, also) = compare(&format!("GPU {index}"), gpu, &simulated["gpus"][index]);
        unexpected.extend(more);
        seen.extend(also);
    }
    assert!(unexpected.is_empty(), "{}", unexpected.join("\n"));
    for (position, (entry, why)) in DIFFERENCES.iter().enumerate() {
        assert!(
            matches!(why, Momentary(_)) || seen.contains(&position),
            "{entry} is listed as different and is equal: {why:?}"
        );
    }
}

#[test]
fn what_is_not_listed_or_has_another_shape_is_a_difference() {
    let real = serde_json::json!({"DeviceGetPowerUsage": 1, "DeviceGetName": "a", "DeviceGetNvLinkErrorCounter[7,3]": 1});
    let other = serde_json::json!({"DeviceGetPowerUsage": {"error": 3}, "DeviceGetName": "b", "DeviceGetNvLinkErrorCounter[7,3]": 2});
    let (unexpected, seen) = compare("GPU 0", &real, &other);
    assert_eq!(unexpected.len(), 2, "{unexpected:?}");
    assert_eq!(seen.len(), 1);
}
