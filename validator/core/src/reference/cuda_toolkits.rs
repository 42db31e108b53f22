//! CUDA toolkits, driver branches and forward compatibility.

use std::sync::LazyLock;

use serde::Deserialize;

use super::{CudaVersion, DriverVersion};
use crate::facts::ComputeCapability;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    /// Where the tables come from, by table.
    #[expect(dead_code, reason = "for the reader of the data file")]
    sources: std::collections::BTreeMap<String, String>,
    minor_version_minimums: Vec<MinorVersionMinimum>,
    toolkits: Vec<CudaToolkitRow>,
    architectures: Vec<ArchitectureRow>,
    driver_branches: Vec<DriverBranchRow>,
    compat_packages: Vec<CompatPackageRow>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MinorVersionMinimum {
    cuda_major: u32,
    driver: DriverVersion,
}

/// A toolkit release.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CudaToolkitRow {
    /// Major, minor and update: `12.8.1`.
    pub version: CudaVersion,
    /// The driver that the release came with.
    pub driver: DriverVersion,
    /// The oldest and newest GPU architectures that its compiler and libraries target.
    #[serde(deserialize_with = "super::compute_capability")]
    pub compute_capability_minimum: ComputeCapability,
    #[serde(deserialize_with = "super::compute_capability")]
    pub compute_capability_maximum: ComputeCapability,
}

/// A driver branch.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriverBranchRow {
    pub branch: u32,
    /// The CUDA version that the branch offers.
    pub cuda: CudaVersion,
    /// A base for forward compatibility; other branches are at the end of their life for that
    /// purpose.
    pub forward_compatibility_base: bool,
    /// The oldest architecture that the branch supports.
    #[serde(deserialize_with = "super::compute_capability")]
    pub compute_capability_minimum: ComputeCapability,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ArchitectureRow {
    #[serde(deserialize_with = "super::compute_capability")]
    compute_capability: ComputeCapability,
    /// The first toolkit that compiles for it.
    first: CudaVersion,
    /// The last one; none when the newest toolkit still does.
    #[serde(default)]
    last: Option<CudaVersion>,
    /// Of a system on chip; its machine code is for it alone.
    #[serde(default)]
    integrated: bool,
}

/// How what a toolkit builds runs on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArchitectureSupport {
    /// The toolkit compiles for the GPU's architecture.
    Native,
    /// It does not, but machine code for an older architecture of the same major version runs on
    /// it; libraries tuned for the newer architecture do not exist.
    OlderMachineCode(ComputeCapability),
    /// No machine code of this toolkit runs on the GPU; only PTX that the driver compiles does.
    PtxOnly,
    /// The toolkit gave the architecture up, in compiler and libraries.
    Dropped,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CompatPackageRow {
    cuda: CudaVersion,
    /// Base driver branches for which the package works.
    compatible_branches: Vec<u32>,
    /// The branch it was made from, on which it is not needed.
    paired_branch: u32,
}

/// What a `cuda-compat` package means on a driver branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompatVerdict {
    /// It lets newer CUDA run on this driver.
    Compatible,
    /// The driver is of the package's own branch.
    NotNeeded,
    /// The driver is newer, or no base for this package: on the loader's path it shadows the
    /// driver's own library.
    NotCompatible,
    /// The table does not list the package.
    UnknownPackage,
}

static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    serde_yaml::from_str(include_str!("../../data/cuda_toolkits.yaml"))
        .expect("a test parses the embedded table")
});

/// The oldest driver on which any toolkit of this major version runs (minor-version compatibility).
pub fn minor_version_minimum(cuda_major: u32) -> Option<&'static DriverVersion> {
    TABLES
        .minor_version_minimums
        .iter()
        .find(|row| row.cuda_major == cuda_major)
        .map(|row| &row.driver)
}

/// The row of this toolkit: the same update where the table has it, else the newest listed update
/// of major.minor that is not newer, else the first of major.minor.
pub fn cuda_toolkit(version: CudaVersion) -> Option<&'static CudaToolkitRow> {
    let mut rows: Vec<_> = TABLES
        .toolkits
        .iter()
        .filter(|row| (row.version.major, row.version.minor) == (version.major, version.minor))
        .collect();
    rows.sort_by_key(|row| row.version);
    let wanted = version.update.unwrap_or(0);
    rows.iter()
        .rev()
        .find(|row| row.version.update.unwrap_or(0) <= wanted)
        .or(rows.first())
        .copied()
}

/// How what the toolkit of this version builds runs on a GPU of this architecture.
pub fn architecture_support(
    toolkit: CudaVersion,
    architecture: ComputeCapability,
) -> ArchitectureSupport {
    let version = (toolkit.major, toolkit.minor);
    let targets: Vec<&ArchitectureRow> = TABLES
        .architectures
        .iter()
        .filter(|row| (row.first.major, row.first.minor) <= version)
        .filter(|row| {
            row.last
                .is_none_or(|last| version <= (last.major, last.minor))
        })
        .collect();
    if targets
        .iter()
        .any(|row| row.compute_capability == architecture)
    {
        return ArchitectureSupport::Native;
    }
    if targets
        .iter()
        .all(|row| row.compute_capability > architecture)
    {
        return ArchitectureSupport::Dropped;
    }
    targets
        .into_iter()
        .filter(|row| !row.integrated)
        .map(|row| row.compute_capability)
        .filter(|target| target.major == architecture.major && target.minor < architecture.minor)
        .max()
        .map_or(
            ArchitectureSupport::PtxOnly,
            ArchitectureSupport::OlderMachineCode,
        )
}

/// All toolkits, oldest first.
pub fn cuda_toolkits() -> &'static [CudaToolkitRow] {
    &TABLES.toolkits
}

/// All driver branches, oldest first.
pub fn driver_branches() -> &'static [DriverBranchRow] {
    &TABLES.driver_branches
}

/// The oldest driver branch that can know GPUs of this architecture: the one that came with the
/// first toolkit for it. The GPU itself may need a newer one.
pub fn oldest_driver_branch(architecture: ComputeCapability) -> Option<u32> {
    let row = TABLES
        .architectures
        .iter()
        .find(|row| row.compute_capability == architecture)?;
    TABLES
        .driver_branches
        .iter()
        .find(|branch| branch.cuda >= row.first)
        .map(|branch| branch.branch)
}

/// The row of this driver branch.
pub fn driver_branch(branch: u32) -> Option<&'static DriverBranchRow> {
    TABLES
        .driver_branches
        .iter()
        .find(|row| row.branch == branch)
}

/// What the `cuda-compat` package of this CUDA version means on a driver of this branch.
pub fn compat_verdict(package: CudaVersion, driver_branch: u32) -> CompatVerdict {
    let row = TABLES
        .compat_packages
        .iter()
        .find(|row| (row.cuda.major, row.cuda.minor) == (package.major, package.minor));
    match row {
        None => CompatVerdict::UnknownPackage,
        Some(row) if row.paired_branch == driver_branch => CompatVerdict::NotNeeded,
        Some(row) if row.compatible_branches.contains(&driver_branch) => CompatVerdict::Compatible,
        Some(_) => CompatVerdict::NotCompatible,
    }
}
