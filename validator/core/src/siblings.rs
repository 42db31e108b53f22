//! Figures of the GPUs of one kind, computed once of all GPUs. A check that read its siblings for
//! each GPU would take a time that grows with the square of their number.

use std::collections::HashMap;
use std::hash::Hash;

use crate::facts::{Facts, GpuFacts, PciDevice, Reading};

/// The greatest figure of each kind of GPU.
#[derive(Debug)]
pub(crate) struct Greatest<'f, K, T>(HashMap<K, Top<'f, T>>);

#[derive(Debug)]
struct Top<'f, T> {
    value: T,
    uuid: &'f Reading<String>,
    /// The greatest of the GPUs with other UUIDs.
    of_another: Option<T>,
}

impl<'f, K: Eq + Hash, T: Copy + Ord> Greatest<'f, K, T> {
    /// Of the GPUs that have a figure; `kind_and_figure` names the kind by which they are compared.
    pub(crate) fn of(
        facts: &'f Facts,
        kind_and_figure: impl Fn(&'f GpuFacts) -> Option<(K, T)>,
    ) -> Self {
        let mut tops: HashMap<K, Top<'f, T>> = HashMap::new();
        for gpu in &facts.gpus {
            let Some((kind, value)) = kind_and_figure(gpu) else {
                continue;
            };
            let top = tops.entry(kind).or_insert(Top {
                value,
                uuid: &gpu.uuid,
                of_another: None,
            });
            top.add(value, &gpu.uuid);
        }
        Self(tops)
    }

    /// Of all GPUs of this kind.
    pub(crate) fn of_all(&self, kind: &K) -> Option<T> {
        self.0.get(kind).map(|it| it.value)
    }

    /// Of the GPUs of this kind with another UUID.
    pub(crate) fn of_others(&self, kind: &K, uuid: &Reading<String>) -> Option<T> {
        let top = self.0.get(kind)?;
        if top.uuid == uuid {
            top.of_another
        } else {
            Some(top.value)
        }
    }
}

impl<'f, T: Copy + Ord> Top<'f, T> {
    fn add(&mut self, value: T, uuid: &'f Reading<String>) {
        if self.uuid == uuid {
            self.value = self.value.max(value);
        } else if value > self.value {
            self.of_another = Some(self.value);
            self.value = value;
            self.uuid = uuid;
        } else {
            self.of_another = self.of_another.max(Some(value));
        }
    }
}

/// All figures of the GPUs of each product name, in ascending order.
#[derive(Debug)]
pub(crate) struct Sorted<'f, T>(HashMap<&'f Reading<String>, Vec<T>>);

impl<'f, T: Copy + Ord> Sorted<'f, T> {
    pub(crate) fn of<I: IntoIterator<Item = T>>(
        facts: &'f Facts,
        figures: impl Fn(&'f GpuFacts) -> I,
    ) -> Self {
        let mut of_names: HashMap<&'f Reading<String>, Vec<T>> = HashMap::new();
        for gpu in &facts.gpus {
            of_names.entry(&gpu.name).or_default().extend(figures(gpu));
        }
        for figures in of_names.values_mut() {
            figures.sort_unstable();
        }
        Self(of_names)
    }

    /// Those of the GPUs with the name of this one.
    pub(crate) fn alike(&self, gpu: &GpuFacts) -> &[T] {
        self.0.get(&gpu.name).map_or(&[], Vec::as_slice)
    }
}

/// How many GPUs have each product name.
#[derive(Debug)]
pub(crate) struct NameCounts<'f> {
    of_names: HashMap<&'f str, usize>,
    unnamed: usize,
}

impl<'f> NameCounts<'f> {
    pub(crate) fn of(facts: &'f Facts) -> Self {
        let mut of_names: HashMap<&str, usize> = HashMap::new();
        for name in facts.gpus.iter().filter_map(|it| it.name.value()) {
            *of_names.entry(name).or_default() += 1;
        }
        let named: usize = of_names.values().sum();
        Self {
            of_names,
            unnamed: facts.gpus.len() - named,
        }
    }

    /// How many GPUs may be of this GPU's model, itself included: one without a name may be.
    pub(crate) fn of_this_model(&self, gpu: &GpuFacts) -> usize {
        let name = gpu.name.value().map(String::as_str);
        let named = name.and_then(|it| self.of_names.get(it));
        self.unnamed + named.copied().unwrap_or_default()
    }
}

/// The devices of the PCI bus by their address; none where the bus was not read.
pub(crate) fn pci_devices_by_address(facts: &Facts) -> HashMap<&str, &PciDevice> {
    let devices = facts.host.pci_devices.value().into_iter().flatten();
    let mut by_address = HashMap::new();
    for device in devices {
        by_address.entry(device.address.as_str()).or_insert(device);
    }
    by_address
}

#[cfg(test)]
mod tests {
    use super::{Greatest, NameCounts};
    use crate::facts::{Facts, GpuFacts, Reading};

    fn gpu(uuid: &str, name: Option<&str>, minor_number: u32) -> GpuFacts {
        GpuFacts {
            uuid: Reading::Value(uuid.to_owned()),
            name: name.map_or_else(Reading::default, |it| Reading::Value(it.to_owned())),
            minor_number: Reading::Value(minor_number),
            ..GpuFacts::default()
        }
    }

    fn facts(gpus: &[(&str, Option<&str>, u32)]) -> Facts {
        let gpus = gpus
            .iter()
            .map(|(uuid, name, number)| gpu(uuid, *name, *number));
        Facts {
            gpus: gpus.collect(),
            ..Facts::default()
        }
    }

    /// What a search of all GPUs finds.
    fn searched(facts: &Facts, name: &str, without: Option<&Reading<String>>) -> Option<u32> {
        let gpus = facts.gpus.iter();
        gpus.filter(|it| it.name.value().is_some_and(|it| it == name))
            .filter(|it| Some(&it.uuid) != without)
            .filter_map(|it| it.minor_number.value().copied())
            .max()
    }

    #[test]
    fn the_greatest_is_what_a_search_finds_in_any_order() {
        let mut gpus = [
            ("a", Some("T4"), 3),
            ("a", Some("T4"), 1),
            ("b", Some("T4"), 3),
            ("c", Some("T4"), 2),
            ("d", Some("L4"), 9),
            ("e", None, 10),
        ];
        for turn in 0..gpus.len() * 2 {
            gpus.rotate_left(1);
            gpus.swap(0, turn % 3);
            let facts = facts(&gpus);
            let greatest = Greatest::of(&facts, |gpu| {
                Some((gpu.name.value()?.as_str(), *gpu.minor_number.value()?))
            });
            for name in ["T4", "L4", "A10"] {
                assert_eq!(greatest.of_all(&name), searched(&facts, name, None));
                for gpu in &facts.gpus {
                    let others = searched(&facts, name, Some(&gpu.uuid));
                    assert_eq!(greatest.of_others(&name, &gpu.uuid), others, "{gpus:?}");
                }
            }
        }
    }

    #[test]
    fn a_gpu_without_a_name_may_be_of_any_model() {
        let facts = facts(&[("a", Some("T4"), 0), ("b", Some("L4"), 0), ("c", None, 0)]);
        let counts = NameCounts::of(&facts);
        let of_each: Vec<usize> = facts
            .gpus
            .iter()
            .map(|it| counts.of_this_model(it))
            .collect();
        assert_eq!(of_each, [2, 2, 1]);
    }
}
