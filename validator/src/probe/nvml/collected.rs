//! Reports of the workers so far, and the facts that follow.

use std::collections::BTreeSet;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::CallInFlight;
use super::protocol::{Message, SkippedCall};
use crate::probe::json::at;
use validator_core::facts::{Facts, GpuFacts, NvmlFacts};

/// More GPUs than this are not in one machine; a greater number is a broken library's.
const GPUS_MAXIMUM: u64 = 1024;

/// NVML's answers.
#[derive(Debug, Default)]
pub(crate) struct NvmlOutcome {
    pub(crate) nvml: NvmlFacts,
    pub(crate) gpus: Vec<GpuFacts>,
    /// The scenario of a simulated library.
    pub(crate) simulated: Option<String>,
}

impl NvmlOutcome {
    /// Adds the reports of [`Part::Inforom`](super::Part::Inforom) to the earlier ones.
    pub(crate) fn add_inforom_to(self, facts: &mut Facts) {
        let numbered_alike = self.gpus.len() == facts.gpus.len();
        for (index, gpu) in facts.gpus.iter_mut().enumerate() {
            let is_this = |it: &&GpuFacts| it.uuid.value().is_some() && it.uuid == gpu.uuid;
            // One that was lost since has its number and nothing else.
            let lost = || {
                let same_number = self.gpus.get(index).filter(|_| numbered_alike);
                same_number.filter(|it| it.lost.is_some())
            };
            let Some(told) = self.gpus.iter().find(is_this).or_else(lost) else {
                continue;
            };
            gpu.inforom_valid.clone_from(&told.inforom_valid);
            gpu.lost = gpu.lost.take().or_else(|| told.lost.clone());
            gpu.calls_hung.extend(told.calls_hung.iter().cloned());
        }
        facts.nvml.probe_trouble.extend(self.nvml.probe_trouble);
    }
}

/// The reported fields of one record.
type Fields = Map<String, Value>;

#[derive(Debug, Default)]
pub(super) struct Collected {
    nvml: Fields,
    gpus: Vec<Fields>,
    /// Why a GPU's other readings are missing.
    gave_up: Vec<(u32, String)>,
    simulated: Option<String>,
    /// GPUs that are at work by now, perhaps, and were read before.
    pub(super) at_rest: BTreeSet<u32>,
    /// GPUs that are not queried again.
    pub(super) finished: BTreeSet<u32>,
    pub(super) skipped: Vec<SkippedCall>,
    /// Calls that hung or crashed themselves, by GPU.
    bad_calls: Vec<(u32, String)>,
    pub(super) trouble: Vec<String>,
    stopped: Option<String>,
    nonsense_was_noted: bool,
}

impl Collected {
    pub(super) fn take(&mut self, message: Message) {
        match message {
            Message::Nvml { field, value } => {
                if field == "gpu_count" {
                    let count = at(&value, "/value").as_u64().unwrap_or(0).min(GPUS_MAXIMUM);
                    let count = usize::try_from(count).unwrap_or_default();
                    self.gpus.resize(count.max(self.gpus.len()), Fields::new());
                }
                self.nvml.insert(field, value);
            }
            Message::Gpu {
                index,
                field,
                value,
            } => {
                if let Some(gpu) = self.gpu(index) {
                    gpu.insert(field, value);
                }
            }
            Message::Unopened { index, reason } => {
                // A lost GPU is reported here already, when it has no handle and no name.
                if let Some(gpu) = self.gpu(index)
                    && gpu.get("lost").is_some()
                {
                    self.trouble.push(reason.clone());
                }
                self.gave_up.push((index, reason));
            }
            Message::GpuAtRest { index } => {
                self.at_rest.insert(index);
            }
            Message::GpuDone { index } => {
                self.finished.insert(index);
            }
            Message::Simulated { scenario } => self.simulated = Some(scenario),
            Message::Call { .. } | Message::Done {} => {}
        }
    }

    fn gpu(&mut self, index: u32) -> Option<&mut Fields> {
        self.gpus.get_mut(usize::try_from(index).ok()?)
    }

    /// The reports on this GPU so far.
    pub(super) fn told_of(&mut self, index: u32) -> Option<GpuFacts> {
        let told = self.gpu(index)?.clone();
        // Its errors are noted when all is reported.
        let reason = "not reported by the NVML probe";
        Some(facts_of(&told, reason, &mut Vec::new()))
    }

    /// This call hung or crashed.
    pub(super) fn skip(&mut self, call: &CallInFlight, reason: &str) {
        self.skipped.push(SkippedCall {
            function: call.function.clone(),
            gpu: call.gpu,
            reason: reason.to_owned(),
        });
        if let Some(gpu) = call.gpu {
            self.bad_calls.push((gpu, call.function.clone()));
        }
    }

    /// The function is not called for any GPU that was not queried yet; that is no evidence against
    /// these GPUs.
    pub(super) fn skip_everywhere(&mut self, function: &str, reason: &str) {
        for gpu in 0..u32::try_from(self.gpus.len()).unwrap_or(0) {
            if !self
                .bad_calls
                .iter()
                .any(|(it, bad)| *it == gpu && bad == function)
            {
                self.skipped.push(SkippedCall {
                    function: function.to_owned(),
                    gpu: Some(gpu),
                    reason: reason.to_owned(),
                });
            }
        }
    }

    pub(super) fn gpus_with_bad_call(&self, function: &str) -> usize {
        self.bad_calls
            .iter()
            .filter(|(_, bad)| bad == function)
            .count()
    }

    pub(super) fn bad_calls(&self, gpu: u32) -> usize {
        self.bad_calls.iter().filter(|(it, _)| *it == gpu).count()
    }

    pub(super) fn give_up(&mut self, gpu: u32, reason: &str) {
        self.finished.insert(gpu);
        self.gave_up.push((gpu, reason.to_owned()));
    }

    /// No more queries follow; `reason` is the text of every missing reading.
    pub(super) fn stop(&mut self, reason: &str) {
        if self.trouble.last().is_none_or(|it| it != reason) {
            self.trouble.push(reason.to_owned());
        }
        self.stopped = Some(reason.to_owned());
    }

    /// A library may print on stdout, which harms nothing; once is enough to say.
    pub(super) fn note_nonsense(&mut self, line: &str) {
        if !self.nonsense_was_noted {
            self.nonsense_was_noted = true;
            let start: String = line.chars().take(80).collect();
            self.trouble.push(format!(
                "the NVML worker sent an unexpected message: {start}"
            ));
        }
    }

    pub(super) fn into_outcome(mut self) -> NvmlOutcome {
        let stopped = self.stopped.take();
        let default_reason = stopped.unwrap_or_else(|| "not reported by the NVML probe".to_owned());
        let nvml_reason = self.nvml_reason().unwrap_or_else(|| default_reason.clone());
        let mut nvml: NvmlFacts = facts_of(&self.nvml, &nvml_reason, &mut self.trouble);
        let mut gpus = Vec::new();
        for (index, told) in self.gpus.iter().enumerate() {
            let is_this = |gpu: u32| usize::try_from(gpu).is_ok_and(|gpu| gpu == index);
            let gave_up = self.gave_up.iter().find(|(gpu, _)| is_this(*gpu));
            let reason = gave_up.map_or(&default_reason, |(_, reason)| reason);
            let mut gpu: GpuFacts = facts_of(told, reason, &mut self.trouble);
            gpu.calls_hung = self
                .bad_calls
                .iter()
                .filter(|(gpu, _)| is_this(*gpu))
                .map(|(_, function)| function.clone())
                .collect();
            gpus.push(gpu);
        }
        nvml.probe_trouble = self.trouble;
        NvmlOutcome {
            nvml,
            gpus,
            simulated: self.simulated,
        }
    }

    /// When NVML did not start, that is why nothing else of it was read.
    fn nvml_reason(&self) -> Option<String> {
        let reason = self.nvml.get("initialized")?.get("not_read")?.as_str()?;
        Some(format!("NVML does not work: {reason}"))
    }
}

/// The record with the reported fields; its other readings are not read for `reason`.
fn facts_of<T: Default + Serialize + DeserializeOwned>(
    told: &Fields,
    reason: &str,
    trouble: &mut Vec<String>,
) -> T {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(T::default()) else {
        return T::default();
    };
    let not_read = json!({ "not_read": reason });
    for value in fields.values_mut() {
        if value.get("not_read").is_some() {
            *value = not_read.clone();
        }
    }
    let mut all = fields.clone();
    all.extend(told.clone());
    if let Ok(facts) = serde_json::from_value(Value::Object(all)) {
        return facts;
    }
    // Some field is of another shape than this version's: take the others.
    for (field, value) in told {
        let mut with_it = fields.clone();
        with_it.insert(field.clone(), value.clone());
        match serde_json::from_value::<T>(Value::Object(with_it.clone())) {
            Ok(_) => fields = with_it,
            Err(error) => trouble.push(format!("field {field} cannot be used: {error}")),
        }
    }
    serde_json::from_value(Value::Object(fields)).unwrap_or_default()
}
