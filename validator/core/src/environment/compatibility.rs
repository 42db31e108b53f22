//! One build of CUDA code against one machine: driver, `cuda-compat` package and GPU architectures.

use crate::environment::device_code::{CodeFit, CodeTarget, fit};
use crate::expect;
use crate::facts::{ComputeCapability, Facts};
use crate::queries;
use crate::reference::{self, ArchitectureSupport, CompatVerdict, CudaVersion, DriverVersion};

/// What a build is judged against.
#[derive(Clone, Debug, Default)]
pub struct Machine {
    /// The kernel module's version; `None` where it is not known.
    pub driver: Option<DriverVersion>,
    /// Only the branch of the driver is known; its newest release is assumed.
    pub driver_is_branch: bool,
    pub gpus: Vec<MachineGpu>,
    /// The `cuda-compat` package that the loader selects.
    pub compat: Option<CudaVersion>,
    /// `cuInit` succeeded on this machine as it is, which outweighs a table about compat packages.
    pub cuda_initialised: bool,
}

/// A kind of GPU of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineGpu {
    pub name: String,
    pub capability: ComputeCapability,
    /// Forward compatibility applies to it.
    pub data_center: bool,
}

/// A build of CUDA code.
#[derive(Clone, Debug)]
pub struct Build {
    /// `torch 2.11.0`.
    pub name: String,
    pub cuda: CudaVersion,
    pub code: Code,
}

/// The GPU code of a build.
#[derive(Clone, Debug)]
pub enum Code {
    /// The targets in its fat binaries.
    Listed(Vec<CodeTarget>),
    /// No list is known: whatever the toolkit compiles for.
    OfToolkit,
}

/// How far a build starts; the order is from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    Full,
    /// It starts, and something does not work.
    Limited,
    /// A table or a value is missing.
    Unknown,
    Impossible,
}

impl Start {
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Limited => "limited",
            Self::Unknown => "unknown",
            Self::Impossible => "impossible",
        }
    }
}

/// The judgement of one build.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Compatibility {
    pub start: Start,
    /// One fragment for each reason; the worst first.
    pub reasons: Vec<String>,
    /// The oldest driver on which the build starts.
    pub minimum_driver: Option<DriverVersion>,
    pub remedy: Option<String>,
}

impl Compatibility {
    /// The worst of several parts, with the reasons of all.
    fn of(parts: Vec<Part>, minimum_driver: Option<DriverVersion>) -> Self {
        let mut parts = parts;
        parts.sort_by_key(|it| std::cmp::Reverse(it.start));
        let start = parts.first().map_or(Start::Full, |it| it.start);
        let remedy = parts.iter().find_map(|it| it.remedy.clone());
        let mut reasons: Vec<String> = parts.into_iter().map(|it| it.reason).collect();
        reasons.dedup();
        Self {
            start,
            reasons,
            minimum_driver,
            remedy,
        }
    }

    pub fn unknown(reason: impl Into<String>) -> Self {
        Self {
            start: Start::Unknown,
            reasons: vec![reason.into()],
            minimum_driver: None,
            remedy: None,
        }
    }

    /// Adds a reason of its own, which may lower the answer.
    pub fn add(&mut self, start: Start, reason: impl Into<String>, remedy: Option<String>) {
        let at_front = start > self.start;
        self.start = self.start.max(start);
        if at_front {
            self.reasons.insert(0, reason.into());
            self.remedy = remedy.or(self.remedy.take());
        } else {
            self.reasons.push(reason.into());
            self.remedy = self.remedy.take().or(remedy);
        }
    }
}

struct Part {
    start: Start,
    reason: String,
    remedy: Option<String>,
}

fn part(start: Start, reason: String) -> Part {
    Part {
        start,
        reason,
        remedy: None,
    }
}

impl Part {
    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

/// The driver side of a machine, as user-mode code sees it.
struct Drivers {
    /// The version of the libcuda that programs load.
    user_mode: Option<DriverVersion>,
    /// The CUDA version whose PTX it compiles.
    cuda: Option<CudaVersion>,
    /// A compat package replaces the driver's own libcuda.
    by_compat: bool,
}

/// Judges `build` against `machine`.
pub fn judge(build: &Build, machine: &Machine) -> Compatibility {
    let minimum = minimum_driver(build.cuda);
    let mut parts = Vec::new();
    let drivers = drivers_of(machine, &mut parts);
    judge_driver(build, machine, &drivers, minimum, &mut parts);
    for gpu in &machine.gpus {
        judge_gpu(build, machine, &drivers, gpu, &mut parts);
    }
    Compatibility::of(parts, minimum.cloned())
}

/// The oldest driver on which a build of this CUDA version starts: that of minor-version
/// compatibility or, where it is older, the toolkit's own.
pub fn minimum_driver(cuda: CudaVersion) -> Option<&'static DriverVersion> {
    let own = reference::cuda_toolkit(cuda).map(|row| &row.driver);
    reference::minor_version_minimum(cuda.major)
        .into_iter()
        .chain(own)
        .min()
}

fn drivers_of(machine: &Machine, parts: &mut Vec<Part>) -> Drivers {
    let branch_cuda = |driver: &DriverVersion| {
        reference::driver_branch(driver.branch())
            .map(|row| row.cuda)
            .or_else(|| newest_cuda_at(driver))
    };
    let own = Drivers {
        user_mode: machine.driver.clone(),
        cuda: machine.driver.as_ref().and_then(branch_cuda),
        by_compat: false,
    };
    let (Some(package), Some(driver)) = (machine.compat, &machine.driver) else {
        return own;
    };
    let branch = driver.branch();
    let of_package = Drivers {
        user_mode: reference::cuda_toolkit(package).map(|row| row.driver.clone()),
        cuda: Some(package),
        by_compat: true,
    };
    let consumer = machine.gpus.iter().find(|gpu| !gpu.data_center);
    if let Some(gpu) = consumer.filter(|_| !machine.cuda_initialised) {
        parts.push(
            part(
                Start::Impossible,
                format!(
                    "cuda-compat {package} does not support {}: CUDA fails with error 804",
                    gpu.name
                ),
            )
            .remedy(REMOVE_COMPAT),
        );
        return of_package;
    }
    match reference::compat_verdict(package, branch) {
        CompatVerdict::Compatible => {
            parts.push(part(
                Start::Full,
                format!("cuda-compat {package} lets CUDA {package} run on driver {driver}"),
            ));
            of_package
        }
        CompatVerdict::NotNeeded => {
            parts.push(part(
                Start::Full,
                format!(
                    "cuda-compat {package} is of the driver's own branch {branch} and not needed"
                ),
            ));
            own
        }
        CompatVerdict::NotCompatible if machine.cuda_initialised => of_package,
        CompatVerdict::NotCompatible => {
            let shadows = own.cuda.is_some_and(|it| it > package);
            let reason = if shadows {
                format!("cuda-compat {package} shadows the libcuda of the newer driver {driver}")
            } else {
                format!(
                    "driver branch {branch} is no base for cuda-compat {package}: CUDA fails with error 803"
                )
            };
            parts.push(part(Start::Impossible, reason).remedy(REMOVE_COMPAT));
            of_package
        }
        CompatVerdict::UnknownPackage => {
            parts.push(part(
                Start::Unknown,
                format!("NVIDIA's matrix does not list cuda-compat {package}"),
            ));
            of_package
        }
    }
}

const REMOVE_COMPAT: &str = "remove the compat folder from LD_LIBRARY_PATH and /etc/ld.so.conf.d";

/// The CUDA version of a driver whose branch the table does not list: that of the newest toolkit
/// that it is new enough for.
fn newest_cuda_at(driver: &DriverVersion) -> Option<CudaVersion> {
    let rows = reference::cuda_toolkits().iter();
    rows.filter(|row| row.driver <= *driver)
        .map(|row| CudaVersion {
            update: None,
            ..row.version
        })
        .max()
}

fn judge_driver(
    build: &Build,
    machine: &Machine,
    drivers: &Drivers,
    minimum: Option<&DriverVersion>,
    parts: &mut Vec<Part>,
) {
    let cuda = build.cuda;
    let Some(driver) = &drivers.user_mode else {
        let reason = match minimum {
            Some(minimum) => format!(
                "{} needs driver {minimum} or newer, and no driver is known",
                build.name
            ),
            None => "no driver is known".to_owned(),
        };
        parts.push(part(Start::Unknown, reason));
        return;
    };
    let Some(minimum) = minimum else {
        parts.push(part(
            Start::Unknown,
            format!("CUDA {cuda} has no row in the reference table"),
        ));
        return;
    };
    if driver < minimum {
        let compat = compat_for(cuda, machine)
            .map(|it| {
                format!(
                    " or, on these GPUs, the package cuda-compat-{}-{}",
                    it.major, it.minor
                )
            })
            .unwrap_or_default();
        parts.push(
            part(
                Start::Impossible,
                format!(
                    "CUDA {cuda} needs driver {minimum} or newer, this is {}",
                    name_of(driver, machine)
                ),
            )
            .remedy(format!("install driver {minimum} or newer{compat}")),
        );
        return;
    }
    let Some(row) = reference::cuda_toolkit(cuda) else {
        return;
    };
    if *driver < row.driver && !drivers.by_compat {
        // Where the targets are listed, each GPU's own judgement states whether its machine code is
        // among them.
        let start = match build.code {
            Code::Listed(_) => Start::Full,
            Code::OfToolkit => Start::Limited,
        };
        parts.push(part(
            start,
            format!(
                "minor-version compatibility: the driver of CUDA {cuda} is {}, this is {}; PTX of CUDA {cuda} is not compiled, \
                 so that every GPU needs machine code ({})",
                row.driver,
                name_of(driver, machine),
                needed_code(machine),
            ),
        ));
    }
}

fn name_of(driver: &DriverVersion, machine: &Machine) -> String {
    if machine.driver_is_branch && Some(driver) == machine.driver.as_ref() {
        format!("branch {}", driver.branch())
    } else {
        driver.to_string()
    }
}

/// `sm_90 for H200 SXM`.
fn needed_code(machine: &Machine) -> String {
    if machine.gpus.is_empty() {
        return "no GPU is known".to_owned();
    }
    let parts: Vec<String> = machine
        .gpus
        .iter()
        .map(|gpu| {
            format!(
                "{} for {}",
                CodeTarget::machine_code(gpu.capability),
                gpu.name
            )
        })
        .collect();
    parts.join(", ")
}

/// The oldest `cuda-compat` package of the major version that makes this CUDA version run on the
/// machine's driver.
fn compat_for(cuda: CudaVersion, machine: &Machine) -> Option<CudaVersion> {
    let driver = machine.driver.as_ref()?;
    if machine.gpus.is_empty() || machine.gpus.iter().any(|gpu| !gpu.data_center) {
        return None;
    }
    let package = CudaVersion {
        update: None,
        ..cuda
    };
    (reference::compat_verdict(package, driver.branch()) == CompatVerdict::Compatible)
        .then_some(package)
}

fn judge_gpu(
    build: &Build,
    machine: &Machine,
    drivers: &Drivers,
    gpu: &MachineGpu,
    parts: &mut Vec<Part>,
) {
    if let Some(part) = judge_driver_of_gpu(machine, gpu) {
        parts.push(part);
    }
    let cuda = build.cuda;
    let MachineGpu {
        name, capability, ..
    } = gpu;
    let targets = match &build.code {
        Code::Listed(targets) => targets,
        Code::OfToolkit => {
            parts.push(judge_toolkit(cuda, gpu, drivers));
            return;
        }
    };
    parts.push(match fit(targets, *capability, drivers.cuda) {
        CodeFit::Native(target) if target.capability == *capability => {
            part(Start::Full, format!("machine code {target} for {name}"))
        }
        CodeFit::Native(target) => part(
            Start::Full,
            format!("machine code {target} runs on {name} (compute capability {capability})"),
        ),
        CodeFit::PtxOnly(target) => part(
            Start::Limited,
            format!(
                "no machine code for {name} (compute capability {capability}): the driver compiles {target} at the first start, \
                 which takes minutes for a large package"
            ),
        ),
        CodeFit::PtxTooNew(target) => part(
            Start::Impossible,
            format!(
                "no machine code for {name} (compute capability {capability}), and the driver is older than the toolkit of its \
                 {target}: CUDA fails with error 222"
            ),
        )
        .remedy("install a newer driver, or a build with machine code for this GPU"),
        CodeFit::NoCode => part(
            Start::Impossible,
            format!(
                "no kernel image for {name} (compute capability {capability}): the build has {}",
                list(targets)
            ),
        )
        .remedy(remedy_for(*capability)),
    });
}

/// Every target once.
fn list(targets: &[CodeTarget]) -> String {
    if targets.is_empty() {
        return "no GPU code".to_owned();
    }
    let mut names: Vec<CodeTarget> = targets.to_vec();
    names.sort();
    let mut names: Vec<String> = names.iter().map(ToString::to_string).collect();
    names.dedup();
    names.join(" ")
}

/// The first toolkit that compiles for the capability, or the last one.
fn remedy_for(capability: ComputeCapability) -> String {
    let mut rows = reference::cuda_toolkits()
        .iter()
        .filter(|row| {
            reference::architecture_support(row.version, capability) == ArchitectureSupport::Native
        })
        .map(|row| row.version);
    let (Some(first), last) = (rows.next(), rows.next_back()) else {
        return format!(
            "no toolkit of the reference table compiles for compute capability {capability}"
        );
    };
    let last = last.unwrap_or(first);
    let newest = reference::cuda_toolkits().last().map(|row| row.version);
    if newest == Some(last) {
        format!(
            "install a build for CUDA {}.{} or newer",
            first.major, first.minor
        )
    } else {
        format!(
            "install a build for CUDA {}.{} to {}.{}",
            first.major, first.minor, last.major, last.minor
        )
    }
}

/// What the driver branch itself supports.
fn judge_driver_of_gpu(machine: &Machine, gpu: &MachineGpu) -> Option<Part> {
    let driver = machine.driver.as_ref()?;
    let branch = driver.branch();
    let MachineGpu {
        name, capability, ..
    } = gpu;
    if machine.cuda_initialised {
        return None;
    }
    let row = reference::driver_branch(branch);
    if row.is_some_and(|row| *capability < row.compute_capability_minimum) {
        let last = reference::driver_branches()
            .iter()
            .rev()
            .find(|row| row.compute_capability_minimum <= *capability)?;
        return Some(
            part(
                Start::Impossible,
                format!(
                    "driver branch {branch} no longer supports {name} (compute capability {capability}): {} is its last branch",
                    last.branch
                ),
            )
            .remedy(format!("install a driver of branch {}", last.branch)),
        );
    }
    let oldest = reference::oldest_driver_branch(*capability)?;
    (branch < oldest).then(|| {
        part(
            Start::Impossible,
            format!(
                "driver branch {branch} is older than {name} (compute capability {capability}), which needs branch {oldest} or newer"
            ),
        )
        .remedy(format!("install a driver of branch {oldest} or newer"))
    })
}

/// A toolkit, or a build of which only the toolkit is known.
fn judge_toolkit(cuda: CudaVersion, gpu: &MachineGpu, drivers: &Drivers) -> Part {
    let MachineGpu {
        name, capability, ..
    } = gpu;
    let Some(row) = reference::cuda_toolkit(cuda) else {
        return part(
            Start::Unknown,
            format!("CUDA {cuda} has no row in the reference table"),
        );
    };
    let in_full = drivers
        .user_mode
        .as_ref()
        .is_some_and(|driver| *driver >= row.driver);
    match reference::architecture_support(cuda, *capability) {
        ArchitectureSupport::Native => part(
            Start::Full,
            format!("CUDA {cuda} compiles for {name} (compute capability {capability})"),
        ),
        ArchitectureSupport::OlderMachineCode(older) => part(
            Start::Full,
            format!("code of CUDA {cuda} for {older} runs on {name} (compute capability {capability})"),
        ),
        ArchitectureSupport::PtxOnly if in_full => part(
            Start::Limited,
            format!(
                "CUDA {cuda} has no machine code for {name} (compute capability {capability}): only programs with PTX start"
            ),
        )
        .remedy(remedy_for(*capability)),
        ArchitectureSupport::PtxOnly => part(
            Start::Impossible,
            format!(
                "CUDA {cuda} has no machine code for {name} (compute capability {capability}), and this driver does not compile \
                 its PTX"
            ),
        )
        .remedy(remedy_for(*capability)),
        ArchitectureSupport::Dropped => part(
            Start::Impossible,
            format!("CUDA {cuda} no longer supports {name} (compute capability {capability})"),
        )
        .remedy(remedy_for(*capability)),
    }
}

/// The machine that the facts describe.
pub fn machine_of(facts: &Facts) -> Machine {
    let modules = facts.host.kernel_modules.value();
    let driver = modules.and_then(|it| it.nvidia_version.value()?.parse().ok());
    let mut gpus: Vec<MachineGpu> = Vec::new();
    for (architecture, gpu) in queries::all_gpu_architectures(facts)
        .into_iter()
        .zip(facts.gpus.iter().map(Some).chain(std::iter::repeat(None)))
    {
        let Some(capability) = architecture.compute_capability else {
            continue;
        };
        let model = gpu.and_then(expect::gpu_model);
        let one = MachineGpu {
            name: model.map_or(architecture.gpu, |it| it.name.clone()),
            capability,
            // An unknown model is not accused of being a consumer card.
            data_center: model.is_none_or(|it| it.data_center),
        };
        if !gpus.contains(&one) {
            gpus.push(one);
        }
    }
    Machine {
        driver,
        driver_is_branch: false,
        gpus,
        compat: selected_compat(facts),
        cuda_initialised: queries::cuda_initialised(facts),
    }
}

fn selected_compat(facts: &Facts) -> Option<CudaVersion> {
    let packages = facts.host.cuda_compat.value()?;
    let package = packages.iter().find(|it| it.on_loader_path)?;
    let of_libcuda = || {
        let libcuda: DriverVersion = package.libcuda_version.as_ref()?.parse().ok()?;
        Some(reference::driver_branch(libcuda.branch())?.cuda)
    };
    let of_folder = package.cuda_version.as_ref();
    of_folder.and_then(|it| it.parse().ok()).or_else(of_libcuda)
}
