//! Which GPUs run which machine code and PTX.

use std::str::FromStr;

use crate::environment::builds::cuda_of_ptx;
use crate::facts::{ComputeCapability, DeviceCode};
use crate::reference::CudaVersion;

/// What one piece of GPU code was compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CodeTarget {
    pub capability: ComputeCapability,
    pub reach: Reach,
    /// PTX, and the CUDA version that wrote it where that is known; `None` for machine code.
    pub ptx: Option<Ptx>,
}

/// The GPUs that a target reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// Machine code: the same major version from this minor version on. PTX: every newer GPU.
    Upward,
    /// Suffix `f`: the family.
    Family,
    /// Suffix `a`: this capability alone.
    Exact,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ptx {
    pub written_by: Option<CudaVersion>,
    /// Only a link at run time can use it.
    pub relocatable: bool,
}

/// How code runs on a GPU; the order is from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeFit {
    /// Machine code of this target runs.
    Native(CodeTarget),
    /// The driver compiles this PTX at the start.
    PtxOnly(CodeTarget),
    /// There is PTX, and the driver is too old to compile it.
    PtxTooNew(CodeTarget),
    /// Neither.
    NoCode,
}

/// Integrated GPUs (Jetson, DRIVE) run machine code for themselves alone, although others share
/// their major version.
///
/// Source: the table of integrated architectures in torch/cuda/__init__.py 2.15.0; CUDA 13.0
/// renamed 10.1 to 11.0.
const INTEGRATED: [(u32, u32); 7] = [(5, 3), (6, 2), (7, 2), (8, 7), (8, 8), (10, 1), (11, 0)];

fn is_integrated(capability: ComputeCapability) -> bool {
    INTEGRATED.contains(&(capability.major, capability.minor))
}

impl CodeTarget {
    /// Machine code for a capability and all that are binary compatible with it.
    pub fn machine_code(capability: ComputeCapability) -> Self {
        Self {
            capability,
            reach: Reach::Upward,
            ptx: None,
        }
    }

    fn runs_natively_on(&self, device: ComputeCapability) -> bool {
        if self.ptx.is_some() || self.capability.major != device.major {
            return false;
        }
        if is_integrated(device) || is_integrated(self.capability) {
            return self.capability == device;
        }
        match self.reach {
            Reach::Exact => self.capability == device,
            Reach::Family | Reach::Upward => self.capability.minor <= device.minor,
        }
    }

    fn compiles_for(&self, device: ComputeCapability) -> bool {
        let Some(ptx) = self.ptx else {
            return false;
        };
        let reaches = match self.reach {
            Reach::Upward => self.capability <= device,
            Reach::Family => {
                self.capability.major == device.major && self.capability.minor <= device.minor
            }
            Reach::Exact => self.capability == device,
        };
        reaches && !ptx.relocatable
    }
}

/// The best way in which any of these targets runs on the GPU. `driver_cuda` is the CUDA version
/// whose PTX the driver compiles.
pub(super) fn fit(
    targets: &[CodeTarget],
    device: ComputeCapability,
    driver_cuda: Option<CudaVersion>,
) -> CodeFit {
    let native = targets.iter().filter(|it| it.runs_natively_on(device));
    if let Some(best) = native.max_by_key(|it| it.capability) {
        return CodeFit::Native(*best);
    }
    let usable = |it: &&CodeTarget| {
        let written_by = it.ptx.and_then(|ptx| ptx.written_by);
        match (written_by, driver_cuda) {
            (Some(written_by), Some(driver)) => written_by <= driver,
            _ => true,
        }
    };
    let ptx: Vec<&CodeTarget> = targets
        .iter()
        .filter(|it| it.compiles_for(device))
        .collect();
    if let Some(best) = ptx
        .iter()
        .copied()
        .filter(usable)
        .max_by_key(|it| it.capability)
    {
        return CodeFit::PtxOnly(*best);
    }
    ptx.into_iter()
        .max_by_key(|it| it.capability)
        .map_or(CodeFit::NoCode, |it| CodeFit::PtxTooNew(*it))
}

/// The targets of a library's fat binaries.
pub(super) fn targets_of(code: &DeviceCode) -> Vec<CodeTarget> {
    let machine_code = code.machine_code.keys().filter_map(|it| it.parse().ok());
    let ptx = code.ptx.iter().filter_map(|(name, ptx)| {
        let target: CodeTarget = name.parse().ok()?;
        Some(CodeTarget {
            ptx: Some(Ptx {
                written_by: cuda_of_ptx(&ptx.version),
                relocatable: ptx.relocatable_only,
            }),
            ..target
        })
    });
    machine_code.chain(ptx).collect()
}

/// `sm_90a`, `compute_120`, `9.0`, `9.0a`.
impl FromStr for CodeTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("`{text}` is not an architecture like sm_90, compute_90 or 9.0a");
        let (is_ptx, rest) = match (text.strip_prefix("sm_"), text.strip_prefix("compute_")) {
            (Some(rest), _) => (false, rest),
            (_, Some(rest)) => (true, rest),
            _ => (false, text),
        };
        let (digits, reach) = if let Some(digits) = rest.strip_suffix('a') {
            (digits, Reach::Exact)
        } else if let Some(digits) = rest.strip_suffix('f') {
            (digits, Reach::Family)
        } else {
            (rest, Reach::Upward)
        };
        let number = |text: &str| text.parse::<u32>().map_err(|_| expected());
        let (major, minor) = if let Some((major, minor)) = digits.split_once('.') {
            (number(major)?, number(minor)?)
        } else {
            let both = number(digits)?;
            (both / 10, both % 10)
        };
        if major == 0 {
            return Err(expected());
        }
        Ok(Self {
            capability: ComputeCapability { major, minor },
            reach,
            ptx: is_ptx.then_some(Ptx {
                written_by: None,
                relocatable: false,
            }),
        })
    }
}

/// `sm_90a`, `compute_90`.
impl std::fmt::Display for CodeTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.ptx.is_some() { "compute" } else { "sm" };
        let suffix = match self.reach {
            Reach::Upward => "",
            Reach::Family => "f",
            Reach::Exact => "a",
        };
        let ComputeCapability { major, minor } = self.capability;
        write!(f, "{kind}_{major}{minor}{suffix}")
    }
}

#[cfg(test)]
mod tests {
    use super::{CodeFit, CodeTarget, fit};
    use crate::facts::ComputeCapability;

    fn on(list: &str, (major, minor): (u32, u32), cuda: &str) -> CodeFit {
        let targets: Vec<CodeTarget> = list.split(' ').map(|it| it.parse().expect(it)).collect();
        let cuda = cuda.parse().expect("a version");
        fit(&targets, ComputeCapability { major, minor }, Some(cuda))
    }

    fn runs(list: &str, device: (u32, u32)) -> bool {
        matches!(on(list, device, "13.2"), CodeFit::Native(_))
    }

    #[test]
    fn machine_code_runs_within_a_major_version_upward() {
        assert!(runs("sm_86", (8, 9)));
        assert!(runs("sm_100", (10, 3)));
        assert!(runs("sm_120", (12, 1)));
        assert!(!runs("sm_89", (8, 6)));
        assert!(!runs("sm_80", (9, 0)));
        assert!(!runs("sm_90", (10, 0)));
    }

    #[test]
    fn suffixes_bound_the_reach() {
        assert!(runs("sm_90a", (9, 0)));
        assert!(!runs("sm_100a", (10, 3)));
        assert!(runs("sm_100f", (10, 3)));
        assert!(!runs("sm_120a", (12, 1)));
        assert!(runs("sm_120f", (12, 1)));
    }

    #[test]
    fn integrated_gpus_run_their_own_code_alone() {
        assert!(!runs("sm_80 sm_86", (8, 7)));
        assert!(runs("sm_87", (8, 7)));
        assert!(!runs("sm_87", (8, 9)));
        assert!(!runs("sm_100", (10, 1)));
    }

    #[test]
    fn ptx_needs_a_driver_of_its_toolkit() {
        assert!(matches!(
            on("sm_80 compute_90", (10, 0), "12.8"),
            CodeFit::PtxOnly(_)
        ));
        assert_eq!(on("compute_90a", (10, 0), "12.8"), CodeFit::NoCode);
        assert_eq!(on("compute_90", (8, 0), "12.8"), CodeFit::NoCode);
        let mut target: CodeTarget = "compute_90".parse().expect("a target");
        target.ptx = Some(super::Ptx {
            written_by: Some("13.0".parse().expect("a version")),
            relocatable: false,
        });
        let device = ComputeCapability {
            major: 10,
            minor: 0,
        };
        let driver = |text: &str| Some(text.parse().expect("a version"));
        assert!(matches!(
            fit(&[target], device, driver("12.8")),
            CodeFit::PtxTooNew(_)
        ));
        assert!(matches!(
            fit(&[target], device, driver("13.0")),
            CodeFit::PtxOnly(_)
        ));
    }

    #[test]
    fn names_are_read_and_written_alike() {
        for name in ["sm_75", "sm_90a", "sm_103f", "compute_120", "sm_121"] {
            assert_eq!(name.parse::<CodeTarget>().expect(name).to_string(), name);
        }
        for name in ["", "sm_", "sm_x", "sm_9", "90.x", "sm_90b"] {
            assert!(name.parse::<CodeTarget>().is_err(), "{name}");
        }
    }
}
