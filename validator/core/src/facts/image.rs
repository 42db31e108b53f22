//! What is on the disk of an image that is being baked.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{KernelModuleFlavor, Reading};

/// What level image reads in addition to the rest of the host. Everything is read from files, so
/// that no GPU is needed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageFacts {
    /// Kernels below `/lib/modules`, sorted by release.
    pub kernels: Reading<Vec<InstalledKernel>>,
    /// The output of `nv-fabricmanager --version`; `NotSupported` where it is not installed.
    pub fabric_manager_version: Reading<String>,
    /// The files that the profile requires (`image.files`) by path.
    pub files: BTreeMap<String, Reading<ImageFile>>,
    /// What is of the build instance and must not be found on the instances of the image.
    pub leftovers: Reading<Vec<Leftover>>,
    /// The file system of `/`.
    pub root_disk: Reading<DiskSpace>,
}

/// A kernel that can be booted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct InstalledKernel {
    /// The folder's name below `/lib/modules`, which equals `uname -r`.
    pub release: String,
    /// `nvidia` and `nvidia_uvm`; `NotSupported` where no file of the module is installed for this
    /// kernel.
    pub modules: BTreeMap<String, Reading<ModuleFile>>,
}

/// A kernel module's file, as `modinfo` describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModuleFile {
    /// Without the sysroot.
    pub path: String,
    /// `580.159.04`.
    pub version: String,
    /// By the module's license.
    pub flavor: KernelModuleFlavor,
    /// The kernel release that the module was built for (`vermagic`).
    pub built_for: String,
}

/// A file that the profile requires.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageFile {
    pub bytes: u64,
    /// Permission bits.
    pub mode: u32,
}

/// A leftover of the build instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Leftover {
    /// Without the sysroot.
    pub path: String,
    pub kind: LeftoverKind,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum LeftoverKind {
    /// It gives access to this machine or another one: keys, tokens, passwords.
    #[default]
    Secret,
    /// It would be the same on every instance, or name the build instance: host keys, machine id,
    /// cloud-init's state.
    Identity,
    /// What was typed.
    History,
    /// It only takes room.
    Cache,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSpace {
    pub free_bytes: u64,
    pub total_bytes: u64,
}
