//! A healthy image on a build instance without a GPU.

use std::collections::BTreeMap;

use super::host::{DRIVER_VERSION, unload_driver};
use super::{healthy_node, judge_check_at};
use crate::check::Check;
use crate::facts::{
    DiskSpace, Facts, ImageFacts, InstalledKernel, KernelModuleFlavor, ModuleFile, Reading,
};
use crate::findings::Finding;
use crate::level::Level;

const KERNEL_RELEASE: &str = "6.14.0-1015-aws";

/// An image for an H200 node, baked on an instance that has no GPU.
pub fn healthy_image() -> Facts {
    let mut facts = healthy_node();
    facts.level = Level::Image;
    unload_driver(&mut facts);
    facts.host.pci_devices = Reading::Value(Vec::new());
    facts.host.device_nodes = Reading::Value(Vec::new());
    facts.host.container_runtime = Reading::default();
    facts.cuda = crate::facts::CudaFacts::default();
    facts.load.cuda_kernel.clear();
    facts.host.image = Some(ImageFacts {
        kernels: Reading::Value(vec![InstalledKernel {
            release: KERNEL_RELEASE.to_owned(),
            modules: ["nvidia", "nvidia_uvm"].map(module).into(),
        }]),
        fabric_manager_version: Reading::Value(DRIVER_VERSION.to_owned()),
        files: BTreeMap::new(),
        leftovers: Reading::Value(Vec::new()),
        root_disk: Reading::Value(DiskSpace {
            free_bytes: 40 << 30,
            total_bytes: 50 << 30,
        }),
    });
    facts
}

fn module(name: &str) -> (String, Reading<ModuleFile>) {
    let file = ModuleFile {
        path: format!("/lib/modules/{KERNEL_RELEASE}/updates/dkms/{name}.ko.zst"),
        version: DRIVER_VERSION.to_owned(),
        flavor: KernelModuleFlavor::Open,
        built_for: KERNEL_RELEASE.to_owned(),
    };
    (name.to_owned(), Reading::Value(file))
}

pub fn image_of(facts: &mut Facts) -> &mut ImageFacts {
    facts
        .host
        .image
        .as_mut()
        .expect("these are facts of an image")
}

/// The one finding of a check that judges an image.
pub fn judge_image_check(check: &Check, facts: &Facts, profile_yaml: &str) -> Finding {
    let mut findings = judge_check_at(Level::Image, check, facts, profile_yaml);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings.remove(0)
}
