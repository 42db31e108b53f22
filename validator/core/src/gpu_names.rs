//! GPUs as command lines name them: by index, PCI address or UUID.

use crate::facts::{Facts, GpuFacts};
use crate::queries::gpu_name;

/// Whether `name` is the UUID, the PCI address, with or without its domain, or the index of this
/// GPU. The index is known once all GPUs were read.
pub fn is_named(gpu: &GpuFacts, index: Option<usize>, name: &str) -> bool {
    let uuid = gpu.uuid.value().map_or("", String::as_str);
    let address = gpu.pci_address.value().map_or("", String::as_str);
    // No address and no UUID is a number alone.
    (index.is_some() && name.parse().ok() == index)
        || (!uuid.is_empty() && uuid.eq_ignore_ascii_case(name))
        || is_address(address, name)
}

/// Whether `name` is this PCI address, with or without its domain.
pub(crate) fn is_address(address: &str, name: &str) -> bool {
    let is_it = |name: &str| !address.is_empty() && name.eq_ignore_ascii_case(address);
    is_it(name) || is_it(&format!("0000:{name}"))
}

/// The GPU with this name; `Err` names the GPUs that there are.
pub fn gpu_named<'f>(name: &str, facts: &'f Facts) -> Result<&'f GpuFacts, String> {
    let mut gpus = facts.gpus.iter().enumerate();
    let named = gpus.find(|(index, gpu)| is_named(gpu, Some(*index), name));
    named.map(|(_, gpu)| gpu).ok_or_else(|| {
        let known: Vec<String> = facts
            .gpus
            .iter()
            .enumerate()
            .map(|(index, gpu)| gpu_name(gpu, index))
            .collect();
        format!(
            "no GPU {name}; expected an index, PCI address or UUID of: {}",
            known.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::{gpu_named, is_named};
    use crate::facts::{GpuFacts, Reading};
    use crate::test_machine::healthy_node;

    #[test]
    fn a_gpu_is_named_by_index_address_or_uuid() {
        let facts = healthy_node();
        let gpu = &facts.gpus[2];
        let uuid = gpu.uuid.value().cloned().unwrap_or_default();
        let address = gpu.pci_address.value().cloned().unwrap_or_default();
        let short = address.trim_start_matches("0000:").to_uppercase();
        for name in [uuid.to_lowercase(), uuid, address, short, "2".to_owned()] {
            assert_eq!(gpu_named(&name, &facts), Ok(gpu), "{name}");
        }
        assert!(!is_named(gpu, None, "2"), "the index is not known yet");
        let error = gpu_named("GPU-x", &facts).expect_err("unknown");
        let says = "no GPU GPU-x; expected an index, PCI address or UUID of: GPU 0 (0000:";
        assert!(error.starts_with(says), "{error}");
    }

    #[test]
    fn an_empty_name_is_no_gpu_whose_identity_was_not_read() {
        let gpu = GpuFacts {
            uuid: Reading::NotSupported,
            pci_address: Reading::NotSupported,
            ..GpuFacts::default()
        };
        assert!(!is_named(&gpu, Some(0), ""));
        assert!(is_named(&gpu, Some(0), "0"));
    }
}
