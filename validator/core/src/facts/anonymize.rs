//! Replaces what identifies a machine, so that its facts can be shown to others.
//!
//! Replaced are UUIDs (of GPUs, MIG devices and NVLink clusters), serial numbers of boards, the
//! host's name, EC2 instance and image ids, and the names of a cluster's node, API server and pods
//! with GPUs, wherever they stand: in their own fields, as keys, and inside of texts such as kernel
//! messages, paths and names of processes. The same identifier becomes the same replacement
//! everywhere, so that everything that referred to a GPU still refers to it. What is left is what
//! describes the kind of machine: models, versions, PCI addresses, counters, and paths apart from
//! user names in `/home/…`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use serde_json::Value;

use super::{Facts, KubernetesFacts, ProcessOwner, Reading};

/// Names shorter than this stand in too many texts for another reason to be replaced there.
const SHORTEST_NAME: usize = 3;

impl Facts {
    /// These facts without what identifies the machine, see the module's documentation. Facts that
    /// are anonymous already come back as they are.
    pub fn anonymized(&self) -> anyhow::Result<Self> {
        if self.anonymized {
            return Ok(self.clone());
        }
        let mut replacements = Replacements::default();
        replacements.learn(self);
        let value = serde_json::to_value(self).context("facts cannot be written as JSON")?;
        let mut facts: Self = serde_json::from_value(replacements.apply_to(value))
            .context("anonymized facts cannot be read back")?;
        // A name that is too short to be looked for in texts still leaves its own field.
        if let Reading::Value(name) = &mut facts.host.hostname {
            "host".clone_into(name);
        }
        facts.host.identity = None;
        if let Some(kubernetes) = &mut facts.kubernetes {
            remove_namespaces(kubernetes);
        }
        remove_users(&mut facts);
        facts.anonymized = true;
        Ok(facts)
    }
}

/// Names of users are common words (`ubuntu`), and are in no other field.
fn remove_users(facts: &mut Facts) {
    let after = facts.after_load.iter_mut();
    let after = after.filter_map(|it| match &mut it.gpus {
        Reading::Value(gpus) => Some(gpus),
        _ => None,
    });
    let listed = facts.gpus.iter_mut().chain(after.flatten());
    let listed = listed.filter_map(|gpu| match &mut gpu.processes {
        Reading::Value(processes) => Some(processes),
        _ => None,
    });
    let logs = facts.load.sensors.values_mut();
    let of_logs = logs.map(|it| &mut it.other_processes);
    for process in listed.chain(of_logs).flatten() {
        if let Some(user) = &mut process.user {
            "user".clone_into(user);
        }
    }
}

/// Namespaces are common words (`default`), so that they are replaced in their own fields and
/// nowhere else.
fn remove_namespaces(kubernetes: &mut KubernetesFacts) {
    const NAMESPACE: &str = "namespace";
    if let Reading::Value(assignments) = &mut kubernetes.assignments {
        for assignment in assignments {
            NAMESPACE.clone_into(&mut assignment.namespace);
        }
    }
    for owner in kubernetes.process_owners.values_mut() {
        if let Reading::Value(ProcessOwner::Pod {
            namespace: Some(namespace),
            ..
        }) = owner
        {
            NAMESPACE.clone_into(namespace);
        }
    }
}

#[derive(Default)]
struct Replacements {
    /// What is replaced, by what; the longest first, so that no replacement cuts through a longer
    /// identifier.
    identifiers: Vec<(String, String)>,
    /// By the UUID in lower case: the kernel and the drivers do not agree on the case.
    uuids: BTreeMap<String, String>,
}

impl Replacements {
    fn learn(&mut self, facts: &Facts) {
        let mut serials = 0;
        for gpu in &facts.gpus {
            // UUIDs are found by their form; those of GPUs get their numbers first, in the order of
            // the GPUs.
            if let Some(uuid) = gpu.uuid.value() {
                self.texts_uuids(uuid);
            }
            if let Some(serial) = gpu.serial.value()
                && serial.chars().any(|character| character != '0')
            {
                let replacement = format!("{serials:0width$}", width = serial.len().max(4));
                serials += 1;
                self.learn_one(serial, &replacement);
            }
        }
        if let Some(name) = facts.host.hostname.value() {
            self.learn_one(name, "host");
            // The first part of a name with a domain stands alone in logs.
            if let Some((first, _)) = name.split_once('.') {
                self.learn_one(first, "host");
            }
        }
        if let Reading::Value(ec2) = &facts.host.ec2 {
            for (id, kind) in [(&ec2.instance_id, "i"), (&ec2.ami_id, "ami")] {
                if let Some(id) = id {
                    self.learn_one(id, &format!("{kind}-00000000000000000"));
                }
            }
        }
        if let Some(kubernetes) = &facts.kubernetes {
            self.learn_kubernetes(kubernetes);
        }
        self.identifiers
            .sort_by_key(|(identifier, _)| std::cmp::Reverse(identifier.len()));
    }

    /// Names of the node, of the API server, and of the pods that have GPUs, whose names often say
    /// whose they are.
    fn learn_kubernetes(&mut self, kubernetes: &KubernetesFacts) {
        if let Some(api) = kubernetes.api.value() {
            if let Some(name) = api.node_name.value() {
                self.learn_one(name, "node");
            }
            self.learn_one(&api.server, "https://api-server");
        }
        let assignments = kubernetes.assignments.value().into_iter().flatten();
        let given = assignments.map(|it| &it.pod);
        let owners = kubernetes
            .process_owners
            .values()
            .filter_map(|it| match it.value() {
                Some(ProcessOwner::Pod {
                    name: Some(name), ..
                }) => Some(name),
                _ => None,
            });
        let pods: BTreeSet<&String> = given.chain(owners).collect();
        for (number, pod) in pods.into_iter().enumerate() {
            self.learn_one(pod, &format!("pod-{number}"));
        }
    }

    fn learn_one(&mut self, identifier: &str, replacement: &str) {
        if identifier.len() >= SHORTEST_NAME && identifier != "localhost" {
            self.identifiers
                .push((identifier.to_owned(), replacement.to_owned()));
        }
    }

    fn apply_to(&mut self, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(values) => {
                Value::Array(values.into_iter().map(|it| self.apply_to(it)).collect())
            }
            // Keys of the format itself hold no identifier, so that all keys can be treated alike.
            Value::Object(map) => {
                let entries = map.into_iter();
                Value::Object(
                    entries
                        .map(|(key, value)| (self.uuids_replaced(&key), self.apply_to(value)))
                        .collect(),
                )
            }
            other => other,
        }
    }

    fn text(&mut self, text: &str) -> String {
        let mut text = self.uuids_replaced(text);
        for (identifier, replacement) in &self.identifiers {
            text = replace_words(&text, identifier, replacement);
        }
        without_user_names(&text)
    }

    fn texts_uuids(&mut self, text: &str) {
        let _ = self.uuids_replaced(text);
    }

    fn uuids_replaced(&mut self, text: &str) -> String {
        const UUID_BYTES: usize = 36;
        let mut replaced = String::with_capacity(text.len());
        let mut rest = text;
        while !rest.is_empty() {
            if let Some(uuid) = rest.get(..UUID_BYTES).filter(|it| is_uuid(it)) {
                let number = self.uuids.len();
                let replacement = self
                    .uuids
                    .entry(uuid.to_lowercase())
                    .or_insert_with(|| format!("00000000-0000-0000-0000-{number:012x}"));
                replaced.push_str(replacement);
                rest = &rest[UUID_BYTES..];
                continue;
            }
            let mut characters = rest.chars();
            replaced.extend(characters.next());
            rest = characters.as_str();
        }
        replaced
    }
}

/// Eight, four, four, four and twelve hexadecimal digits.
fn is_uuid(text: &str) -> bool {
    text.bytes()
        .enumerate()
        .all(|(position, byte)| match position {
            8 | 13 | 18 | 23 => byte == b'-',
            _ => byte.is_ascii_hexdigit(),
        })
}

/// Replaces `word` where no letter or digit touches it, so that a host called `gpu` does not change
/// `gpus`.
fn replace_words(text: &str, word: &str, replacement: &str) -> String {
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let (before, from) = rest.split_at(at);
        let after = &from[word.len()..];
        let touches = |character: Option<char>| character.is_some_and(char::is_alphanumeric);
        let before_it = before
            .chars()
            .next_back()
            .or_else(|| replaced.chars().next_back());
        replaced.push_str(before);
        if touches(before_it) || touches(after.chars().next()) {
            replaced.push_str(word);
        } else {
            replaced.push_str(replacement);
        }
        rest = after;
    }
    replaced.push_str(rest);
    replaced
}

/// `/home/ada/.venv` becomes `/home/user/.venv`.
fn without_user_names(text: &str) -> String {
    const HOME: &str = "/home/";
    let mut replaced = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(HOME) {
        let (before, from) = rest.split_at(at + HOME.len());
        replaced.push_str(before);
        let end = from.find(['/', ':', ' ', '"']).unwrap_or(from.len());
        if end > 0 {
            replaced.push_str("user");
        }
        rest = &from[end..];
    }
    replaced.push_str(rest);
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{
        CudaDevice, Ec2Instance, GpuFacts, GpuProcess, KernelLog, KernelLogRecord, KernelRun,
        WorkerEnd,
    };

    const UUID: &str = "GPU-8f0c1a2b-aaaa-bbbb-cccc-1234567890AB";

    fn facts() -> Facts {
        let mut facts = Facts::default();
        facts.gpus.push(GpuFacts {
            uuid: Reading::Value(UUID.to_owned()),
            serial: Reading::Value("1652923012345".to_owned()),
            processes: Reading::Value(vec![GpuProcess {
                name: Some("train-on-node7.corp.example".to_owned()),
                user: Some("jane".to_owned()),
                ..GpuProcess::default()
            }]),
            ..GpuFacts::default()
        });
        facts.cuda.devices = Reading::Value(vec![CudaDevice {
            uuid: UUID.to_lowercase().replace("gpu-", "GPU-"),
            ..CudaDevice::default()
        }]);
        facts.host.hostname = Reading::Value("node7.corp.example".to_owned());
        facts.host.ec2 = Reading::Value(Ec2Instance {
            instance_type: "p5.48xlarge".to_owned(),
            instance_id: Some("i-0abc123def4567890".to_owned()),
            ..Ec2Instance::default()
        });
        facts.host.kernel_log = Reading::Value(KernelLog {
            records: vec![KernelLogRecord {
                repeats: 0,
                age_s: None,
                at_s: None,
                text: format!(
                    "node7 NVRM: GPU at PCI:0000:3b:00: {UUID} serial 1652923012345, nodes node71"
                ),
            }],
            ..KernelLog::default()
        });
        facts.host.environment = Reading::Value(BTreeMap::from([(
            "LD_LIBRARY_PATH".to_owned(),
            "/home/ada/lib:/home/bob".to_owned(),
        )]));
        facts.load.cuda_kernel.insert(
            UUID.to_owned(),
            Reading::Value(KernelRun {
                end: WorkerEnd::Finished,
                values_compared: 1,
                mismatches: 0,
                examples: Vec::new(),
                wall_ms: 1.0,
            }),
        );
        facts
    }

    #[test]
    fn nothing_that_identifies_is_left_and_references_still_match() {
        let facts = facts().anonymized().expect("facts are data");
        let text = serde_json::to_string(&facts).expect("facts are data");
        for secret in [
            "8f0c1a2b",
            "1234567890",
            "16529230",
            "node7.",
            "node7 ",
            "corp.example",
            "i-0abc",
            "ada",
            "bob",
            "jane",
        ] {
            assert!(!text.contains(secret), "{secret} is left in {text}");
        }
        let uuid = facts.gpus[0].uuid.value().expect("a UUID").clone();
        assert_eq!(uuid, "GPU-00000000-0000-0000-0000-000000000000");
        assert!(facts.load.cuda_kernel.contains_key(&uuid));
        assert_eq!(facts.cuda.devices.value().expect("devices")[0].uuid, uuid);
        assert!(facts.anonymized);
    }

    #[test]
    fn what_describes_the_kind_of_machine_stays() {
        let facts = facts().anonymized().expect("facts are data");
        let Reading::Value(log) = &facts.host.kernel_log else {
            panic!("no log")
        };
        assert_eq!(
            log.records[0].text,
            "host NVRM: GPU at PCI:0000:3b:00: GPU-00000000-0000-0000-0000-000000000000 serial 0000000000000, nodes node71"
        );
        assert_eq!(
            facts.host.ec2.value().expect("EC2").instance_type,
            "p5.48xlarge"
        );
    }

    #[test]
    fn a_clusters_names_are_replaced_alike() {
        let mut facts = crate::test_machine::kubernetes_node();
        if let Some(Reading::Value(given)) = facts.kubernetes.as_mut().map(|it| &mut it.assignments)
        {
            let mut other = given[0].clone();
            other.namespace = "default".to_owned();
            given.push(other);
        }
        let facts = facts.anonymized().expect("facts are data");
        let text = serde_json::to_string(&facts).expect("facts are data");
        for secret in ["gpu-node-1", "train-0", "10.0.0.1", "team"] {
            assert!(!text.contains(secret), "{secret} is left in {text}");
        }
        assert!(text.contains("\"pod\":\"pod-0\""), "{text}");
    }

    #[test]
    fn a_second_time_changes_nothing() {
        let once = facts().anonymized().expect("facts are data");
        assert_eq!(once.anonymized().expect("facts are data"), once);
    }
}
