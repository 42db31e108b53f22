//! CUDA toolkits, driver branches and forward compatibility.

use std::sync::LazyLock;

use serde::Deserialize;

use super::DriverVersion;
use crate::facts::ComputeCapability;
use crate::profile::CudaVersion;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    /// Where the tables come from, by table.
    #[expect(dead_code, reason = "for the reader of the data file")]
    sources: std::collections::BTreeMap<String, String>,
    minor_version_minimums: Vec<MinorVersionMinimum>,
    toolkits: Vec<CudaToolkitRow>,
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
    pub compute_capability_minimum: ComputeCapability,
    pub compute_capability_maximum: ComputeCapability,
}

/// A driver branch.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriverBranchRow {
    pub branch: u32,
    /// The CUDA version that the branch offers.
    pub cuda: CudaVersion,
    /// A base for forward compatibility; other branches are at the end of their life for that purpose.
    pub forward_compatibility_base: bool,
    /// The oldest architecture that the branch supports.
    pub compute_capability_minimum: ComputeCapability,
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
    /// The driver is newer, or no base for this package: on the loader's path it shadows the driver's own library.
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

/// The row of this toolkit: the same update where the table has it, else the newest listed update of major.minor that
/// is not newer, else the first of major.minor.
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
