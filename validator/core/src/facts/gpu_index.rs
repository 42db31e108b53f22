//! Where a GPU stands in [`Facts::gpus`](super::Facts::gpus): each check and each report of each
//! GPU needs it, and a search of the list for each would make the time grow with its square.

use std::collections::HashMap;
use std::sync::OnceLock;

use super::GpuFacts;

/// Made at the first question. It is no part of the facts: it is not written, and all are equal.
#[derive(Debug, Default)]
pub struct GpuIndex(OnceLock<Positions>);

/// The first GPU with each UUID and each PCI address.
#[derive(Debug, Default)]
struct Positions {
    of_uuids: HashMap<String, usize>,
    of_addresses: HashMap<String, usize>,
}

impl Clone for GpuIndex {
    /// A copy may be changed.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for GpuIndex {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl GpuIndex {
    /// The first GPU that is the one; UUID and PCI address are those that it has, if it has.
    ///
    /// The list may have been changed since the positions were noted, and two GPUs may have one
    /// name: what is noted is looked at, and what is not there is searched for.
    pub(super) fn find(
        &self,
        gpus: &[GpuFacts],
        (uuid, address): (Option<&str>, Option<&str>),
        is_it: impl Fn(&GpuFacts) -> bool,
    ) -> Option<usize> {
        let positions = self.0.get_or_init(|| Positions::of(gpus));
        let by_uuid = uuid.and_then(|it| positions.of_uuids.get(it));
        let noted = by_uuid.or_else(|| positions.of_addresses.get(address?));
        let noted = noted.copied();
        let noted = noted.filter(|it| gpus.get(*it).is_some_and(&is_it));
        noted.or_else(|| gpus.iter().position(is_it))
    }
}

impl Positions {
    fn of(gpus: &[GpuFacts]) -> Self {
        let mut positions = Self::default();
        for (position, gpu) in gpus.iter().enumerate() {
            if let Some(uuid) = gpu.uuid.value() {
                positions.of_uuids.entry(uuid.clone()).or_insert(position);
            }
            if let Some(address) = gpu.pci_address.value() {
                let address = positions.of_addresses.entry(address.clone());
                address.or_insert(position);
            }
        }
        positions
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, GpuFacts, Reading};

    fn gpu(uuid: &str) -> GpuFacts {
        GpuFacts {
            uuid: Reading::Value(uuid.to_owned()),
            ..GpuFacts::default()
        }
    }

    #[test]
    fn a_gpu_is_found_wherever_it_stands_now() {
        let mut facts = Facts {
            gpus: vec![gpu("GPU-a"), gpu("GPU-b"), GpuFacts::default()],
            ..Facts::default()
        };
        assert_eq!(facts.gpu("GPU-b"), Some(&facts.gpus[1]));
        assert_eq!(facts.gpu("GPU-c"), None);
        let is_nameless = |gpu: &GpuFacts| gpu.uuid.value().is_none();
        assert_eq!(facts.position_of((None, None), is_nameless), Some(2));
        facts.gpus.swap(0, 1);
        facts.gpus.push(gpu("GPU-c"));
        assert_eq!(facts.gpu("GPU-b"), Some(&facts.gpus[0]));
        assert_eq!(facts.gpu("GPU-c"), Some(&facts.gpus[3]));
        facts.gpus.clear();
        assert_eq!(facts.gpu("GPU-b"), None);
        assert_eq!(facts.position_of((None, None), is_nameless), None);
    }
}
