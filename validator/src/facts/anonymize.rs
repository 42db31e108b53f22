//! Facts that can be shown to others.

use std::collections::BTreeMap;

use anyhow::Context as _;
use serde_json::Value;

use super::Facts;

impl Facts {
    /// These facts with GPU, MIG and cluster UUIDs, serial numbers, the host name, the instance id, and users' home
    /// folders replaced, alike wherever they appear, also inside kernel log lines and as keys. The GPUs stay
    /// distinguishable, and every verdict stays what it was.
    pub fn anonymized(&self) -> anyhow::Result<Self> {
        let mut facts = serde_json::to_value(self).context("facts cannot be written as JSON")?;
        // Longest first, so that no replacement cuts through a longer name.
        let mut replacements: Vec<(String, String)> = self.identities().into_iter().collect();
        replacements.sort_by_key(|(name, _)| std::cmp::Reverse(name.len()));
        replace(&mut facts, &replacements);
        let mut facts: Self =
            serde_json::from_value(facts).context("anonymized facts cannot be read back")?;
        facts.anonymized = true;
        Ok(facts)
    }

    /// Every identifying text in these facts and what stands for it.
    fn identities(&self) -> BTreeMap<String, String> {
        let mut names = BTreeMap::new();
        let mut add = |name: Option<&String>, stands: String| {
            if let Some(name) = name.filter(|it| it.len() >= 4) {
                names.insert(name.clone(), stands);
            }
        };
        add(self.host.hostname.value(), "node".to_owned());
        let instance = self.host.ec2.value().and_then(|it| it.instance_id.as_ref());
        add(instance, "i-00000000000000000".to_owned());
        for (index, gpu) in self.gpus.iter().enumerate() {
            add(
                gpu.uuid.value(),
                format!("GPU-00000000-0000-0000-0000-{index:012}"),
            );
            add(gpu.serial.value(), format!("{index:013}"));
            let mig_devices = gpu.mig_devices.value().into_iter().flatten();
            for (mig, device) in mig_devices.enumerate() {
                add(
                    Some(&device.uuid),
                    format!("MIG-00000000-0000-0000-{index:04}-{mig:012}"),
                );
            }
            let cluster = gpu.fabric.value().and_then(|it| it.cluster_uuid.as_ref());
            add(cluster, "00000000-0000-0000-0000-000000000000".to_owned());
        }
        names
    }
}

fn replace(value: &mut Value, replacements: &[(String, String)]) {
    match value {
        Value::String(text) => *text = replaced(text, replacements),
        Value::Array(items) => {
            for item in items {
                replace(item, replacements);
            }
        }
        Value::Object(fields) => {
            let old = std::mem::take(fields);
            for (key, mut field) in old {
                replace(&mut field, replacements);
                fields.insert(replaced(&key, replacements), field);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn replaced(text: &str, replacements: &[(String, String)]) -> String {
    let mut text = text.to_owned();
    for (name, stands) in replacements {
        if text.contains(name.as_str()) {
            text = text.replace(name.as_str(), stands);
        }
    }
    without_home_folders(&text)
}

/// `/home/alice/env` becomes `/home/user/env`.
fn without_home_folders(text: &str) -> String {
    const HOME: &str = "/home/";
    let mut parts = text.split(HOME);
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept.push_str(HOME);
        let name_length = part
            .find(|it: char| it == '/' || it == ':' || it.is_whitespace())
            .unwrap_or(part.len());
        if name_length > 0 {
            kept.push_str("user");
        }
        kept.push_str(&part[name_length..]);
    }
    kept
}

#[cfg(test)]
mod tests {
    use crate::facts::{Ec2Instance, KernelLog, KernelLogRecord, Reading};
    use crate::profile::Profile;
    use crate::test_machine::healthy_node;

    #[test]
    fn names_are_replaced_alike_everywhere() {
        let mut facts = healthy_node();
        facts.host.hostname = Reading::Value("ip-10-1-2-3".to_owned());
        facts.host.ec2 = Reading::Value(Ec2Instance {
            instance_type: "p5en.48xlarge".to_owned(),
            instance_id: Some("i-0abcdef1234567890".to_owned()),
            ..Ec2Instance::default()
        });
        facts.gpus[2].uuid = Reading::Value("GPU-8f0c1d2e-secret".to_owned());
        facts.gpus[2].serial = Reading::Value("1653222012345".to_owned());
        facts.host.kernel_log = Reading::Value(KernelLog {
            records: vec![KernelLogRecord {
                age_s: None,
                text: "ip-10-1-2-3 GPU-8f0c1d2e-secret /home/alice/train.py".to_owned(),
            }],
            ..KernelLog::default()
        });
        facts.load.cuda_kernel.insert(
            "GPU-8f0c1d2e-secret".to_owned(),
            Reading::NotRead("x".to_owned()),
        );
        let anonymized = facts.anonymized().expect("they are plain facts");
        let text = serde_json::to_string(&anonymized).expect("they are plain facts");
        for secret in [
            "8f0c1d2e",
            "1653222012345",
            "ip-10-1-2-3",
            "i-0abcdef",
            "alice",
        ] {
            assert!(!text.contains(secret), "{secret} is still there");
        }
        let uuid = anonymized.gpus[2].uuid.value().expect("still named");
        assert!(anonymized.load.cuda_kernel.contains_key(uuid));
        assert!(anonymized.anonymized);
        assert_eq!(
            crate::judge(&anonymized, &Profile::default(), facts.level).len(),
            crate::judge(&facts, &Profile::default(), facts.level).len()
        );
    }
}
