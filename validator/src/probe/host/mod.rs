//! The operating system's side: files below `/` or a sysroot, the environment, EC2's metadata.

mod container;
mod image;
mod kernel_log;
mod loader;
mod modules;
mod pci;
mod services;
mod sysroot;
mod system;
pub(super) mod toolkits;

pub(crate) use loader::{LoaderPath, version_in_name};
pub(crate) use sysroot::Sysroot;

/// The kernel log, and the loader's cache.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_any(bytes: &[u8]) -> [KernelLog; 2] {
    assert!(loader::parse_cache(bytes).len() <= bytes.len());
    kernel_log::read_any(bytes)
}
#[cfg(test)]
pub(crate) use sysroot::tests;

use super::ProbeOptions;
use crate::interrupt::Interrupt;
use crate::threads::spawn_scoped;
use validator_core::facts::{
    HostFacts, KernelLog, KernelLogEnd, MachineIdentity, PciDevice, Reading,
};
use validator_core::level::Level;

/// Reads everything; slow reads (metadata, the kernel log) in parallel with the rest.
pub(crate) fn probe(options: &ProbeOptions, interrupt: &Interrupt) -> HostFacts {
    let root = Sysroot::new(options.sysroot.clone());
    std::thread::scope(|scope| {
        let ec2 = spawn_scoped(scope, || system::ec2(&root, options.ec2_metadata));
        let kernel_log = spawn_scoped(scope, || kernel_log::kernel_log(&root, interrupt));
        let mut facts = files(&root, options);
        if options.level == Level::Image {
            facts.image = Some(image::image(&root, options, interrupt));
        }
        facts.ec2 = joined(ec2.join(), "EC2");
        facts.kernel_log = joined(kernel_log.join(), "kernel log");
        facts
    })
}

/// The kernel log as it is now.
pub(crate) fn kernel_log_of(options: &ProbeOptions, interrupt: &Interrupt) -> Reading<KernelLog> {
    kernel_log::kernel_log(&Sysroot::new(options.sysroot.clone()), interrupt)
}

/// NVIDIA's functions on the PCI bus as they are now.
pub(crate) fn pci_devices_of(options: &ProbeOptions) -> Reading<Vec<PciDevice>> {
    pci::pci_devices(&Sysroot::new(options.sysroot.clone()))
}

/// What the kernel log gained since it ended at `end`.
pub(crate) fn kernel_log_since(
    end: KernelLogEnd,
    options: &ProbeOptions,
    interrupt: &Interrupt,
) -> Reading<KernelLog> {
    kernel_log::kernel_log_since(&Sysroot::new(options.sysroot.clone()), end, interrupt)
}

fn files(root: &Sysroot, options: &ProbeOptions) -> HostFacts {
    let environment = system::environment();
    let ld_library_path = environment
        .value()
        .and_then(|it| it.get("LD_LIBRARY_PATH"))
        .map(String::as_str);
    let loader = LoaderPath::read(root, ld_library_path);
    let named = toolkits::NamedFolders::of_environment();
    HostFacts {
        hostname: system::hostname(root),
        operating_system: system::operating_system(root),
        kernel_release: system::kernel_release(root),
        architecture: system::architecture(root),
        uptime_s: system::uptime_s(root),
        in_container: system::in_container(root),
        product_name: system::product_name(root),
        ec2: Reading::default(),
        pci_devices: pci::pci_devices(root),
        kernel_modules: modules::kernel_modules(root),
        device_nodes: modules::device_nodes(root),
        services: services::services(root, &options.services),
        kernel_log: Reading::default(),
        cuda_toolkits: toolkits::cuda_toolkits(root, &named),
        cuda_compat: toolkits::cuda_compat(root, &loader),
        libcuda_files: loader.files(root, "libcuda.so.1"),
        libnvidia_ml_files: loader.files(root, "libnvidia-ml.so.1"),
        gsp_firmware_versions: toolkits::gsp_firmware_versions(root),
        container_runtime: container::container_runtime(root),
        shared_memory_mib: container::shared_memory_mib(root),
        locked_memory_mib: container::locked_memory_mib(root),
        environment,
        identity: system::identity(root),
        image: None,
    }
}

/// Which machine this is, and which boot of it.
pub(super) fn identity() -> Option<MachineIdentity> {
    system::identity(&Sysroot::default())
}

/// A probe that panicked has read nothing.
fn joined<T>(result: std::thread::Result<Reading<T>>, what: &str) -> Reading<T> {
    result.unwrap_or_else(|_| Reading::NotRead(format!("the {what} probe panicked")))
}
