//! CUDA toolkits, libraries and Python environments: what decides whether a program of this machine
//! starts on its GPUs.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CudaToolkit, Reading};

/// Toolkits, libraries and Python environments of a machine or of a container image, read from
/// level standard on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentFacts {
    /// Every toolkit once, whatever number of links lead to it.
    pub toolkits: Vec<CudaToolkit>,
    /// The `nvcc` that a shell starts: found in `PATH`, or in a folder that `/etc/environment` or a
    /// profile script names. `NotSupported` below a sysroot, whose shells have another `PATH` than
    /// this process.
    pub nvcc_on_path: Reading<Option<String>>,
    /// The GPU libraries that a program without libraries of its own loads.
    pub libraries: Vec<ResolvedLibrary>,
    /// Folders of `stubs` libraries that the loader searches.
    pub stub_folders: Vec<String>,
    pub pythons: Vec<PythonEnvironment>,
    /// Module files and Spack packages that provide CUDA or Python: available, not loaded.
    pub available_modules: Vec<AvailableModule>,
    /// Variables that change which interpreter, package or library a program gets.
    pub variables: BTreeMap<String, String>,
    pub walk: DiskWalk,
    /// Nothing is started by design: the files of an image, or of this machine against another
    /// driver and other GPUs, are the question.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_files: bool,
    /// The machine that is named instead of this one: `B200 driver 570.124.06`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<String>,
}

/// How much of the disk was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskWalk {
    pub folders: u32,
    pub folders_maximum: u32,
    /// The limit was reached at this folder, so that environments below it and after it may be
    /// missing.
    pub stopped_at: Option<String>,
}

/// A module file or a Spack package.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AvailableModule {
    /// `cuda/12.8`.
    pub name: String,
    pub path: String,
    /// Folders that it prepends to `PATH`, `LD_LIBRARY_PATH` and `PYTHONPATH`, and variables that
    /// it sets.
    pub changes: BTreeMap<String, String>,
}

/// The library that the loader picks for a name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResolvedLibrary {
    /// The name that is searched: `libcudart.so.12`.
    pub name: String,
    /// The path that wins; `None` where no folder of the search holds the name.
    pub path: Option<String>,
    /// Links resolved.
    pub resolved: Option<String>,
    /// The version in the resolved name, or of the package that owns the file.
    pub version: Option<String>,
    pub found_by: LibrarySearch,
    /// The file that names it, or the framework that opens it.
    pub required_by: String,
    /// Files of the same name that the loader would pick if those before them were absent.
    pub shadowed: Vec<String>,
}

/// The rule by which the loader found a library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LibrarySearch {
    #[default]
    NotFound,
    /// A framework opens it by its full path before any other library needs it.
    Preloaded,
    /// `DT_RPATH` of the file or of the files that loaded it.
    Rpath,
    /// `LD_LIBRARY_PATH`.
    LdLibraryPath,
    /// `DT_RUNPATH` of the file.
    Runpath,
    /// `/etc/ld.so.cache`.
    Cache,
    DefaultFolder,
}

impl LibrarySearch {
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not found",
            Self::Preloaded => "preloaded",
            Self::Rpath => "RPATH",
            Self::LdLibraryPath => "LD_LIBRARY_PATH",
            Self::Runpath => "RUNPATH",
            Self::Cache => "ld.so.cache",
            Self::DefaultFolder => "default folder",
        }
    }
}

/// A Python interpreter with its packages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PythonEnvironment {
    /// `/opt/venv`, `/usr`.
    pub prefix: String,
    pub kind: PythonEnvironmentKind,
    /// The profile or `--python` names it.
    pub named: bool,
    /// `VIRTUAL_ENV`, `CONDA_PREFIX` or `PATH` selects it.
    pub active: bool,
    /// What is started: links are kept, because the real path of a virtual environment's
    /// interpreter is another environment's.
    pub interpreter: Reading<String>,
    /// `3.12.3` or, from the name of a folder, `3.12`.
    pub python_version: Reading<String>,
    /// Folders of packages, in the order of `sys.path`.
    pub site_packages: Vec<String>,
    /// GPU packages, from their metadata.
    pub packages: Vec<PythonPackage>,
    /// What is wrong with the installation as it lies on the disk.
    pub defects: Vec<EnvironmentDefect>,
    /// Lines of `.pth` files that every start of the interpreter runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub startup_code: Vec<String>,
    /// GPU libraries that the loader picks for the packages.
    pub libraries: Vec<ResolvedLibrary>,
    /// One for each framework that was started.
    pub proofs: Vec<PythonProof>,
    /// Why nothing was started; `None` where it was.
    pub not_started: Option<String>,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum PythonEnvironmentKind {
    #[default]
    System,
    Venv,
    Conda,
    Pyenv,
    Uv,
    Poetry,
    Pipx,
    Pixi,
    Spack,
    Module,
    /// A kernel of Jupyter names the interpreter.
    Jupyter,
    /// A folder of none of these forms that the profile or `--python` names.
    Other,
}

impl PythonEnvironmentKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Venv => "venv",
            Self::Conda => "conda",
            Self::Pyenv => "pyenv",
            Self::Uv => "uv",
            Self::Poetry => "poetry",
            Self::Pipx => "pipx",
            Self::Pixi => "pixi",
            Self::Spack => "spack",
            Self::Module => "module",
            Self::Jupyter => "jupyter",
            Self::Other => "python",
        }
    }
}

/// A package of an environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PythonPackage {
    /// Normalized: `nvidia-cudnn-cu12`.
    pub name: String,
    /// `2.11.0+cu126` where the package records its build.
    pub version: String,
    /// The folder of its metadata.
    pub path: String,
    /// The CUDA version of the build: `12.6`; `NotSupported` of a build without CUDA.
    pub cuda: Reading<String>,
    /// `INSTALLER`, or `conda`.
    pub installer: Option<String>,
    /// Versions that the metadata demands of other GPU packages: `nvidia-cudnn-cu12` to
    /// `9.10.2.21`.
    pub pins: BTreeMap<String, String>,
    /// What the package's GPU libraries were compiled for; `NotSupported` of a package without a
    /// library that is read.
    pub device_code: Reading<DeviceCode>,
    /// What its libraries need when they are loaded, and the libraries that the loader picks do not
    /// provide.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unmet: Vec<UnmetNeed>,
}

/// A need of a library that ends its loading.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct UnmetNeed {
    /// The library that needs it: `libtorch_cpu.so`.
    pub library: String,
    pub kind: UnmetKind,
    /// `libgomp.so.1`, `GLIBC_2.34`, `ncclCommRegister`.
    pub name: String,
    /// The file that should provide it; `None` of a library that is not found.
    pub found: Option<String>,
    /// The newest version of the same series that this file has: `GLIBC_2.31`.
    pub newest: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum UnmetKind {
    /// A library by its name (`DT_NEEDED`).
    MissingLibrary,
    /// A version of another library's symbols.
    SymbolVersion,
    /// A function of a GPU library.
    UndefinedSymbol,
}

/// Fat binaries of one library.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DeviceCode {
    pub library: String,
    pub fat_binaries: u32,
    /// How many fat binaries hold machine code of this target: `sm_90`, `sm_90a`.
    pub machine_code: BTreeMap<String, u32>,
    /// How many hold PTX of this target, `compute_90`, with the newest PTX version: `8.8`.
    pub ptx: BTreeMap<String, PtxCode>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PtxCode {
    pub fat_binaries: u32,
    pub version: String,
    /// Every occurrence lies in relocatable device code, which the driver compiles at link time
    /// only.
    pub relocatable_only: bool,
}

/// What is wrong with an installation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EnvironmentDefect {
    pub kind: DefectKind,
    /// As a lowercase fragment that names the file.
    pub text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DefectKind {
    /// The interpreter that `pyvenv.cfg` or a link names is absent.
    InterpreterMissing,
    /// Two versions of one package: an interrupted upgrade.
    DuplicatePackage,
    /// A file of the package's record is absent or of another size.
    DamagedPackage,
    /// A folder without metadata that an uninstalled package left.
    NamespaceGhost,
    /// Code in a `.pth` file, which every start of the interpreter runs, that changes which GPUs or
    /// libraries programs get.
    StartupCode,
    /// Packages of two sources are mixed.
    MixedPackages,
    /// Versions of packages that do not go together.
    VersionMismatch,
}

/// How one framework ran in one environment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PythonProof {
    pub framework: Framework,
    pub end: ProofEnd,
    /// The step that was running when the process ended; `None` where all steps ended.
    pub unfinished_step: Option<String>,
    /// The steps that ended, in their order.
    pub steps: Vec<ProofStep>,
    /// The last lines of standard error and standard output together.
    pub output: String,
    pub duration_s: f64,
    /// Largest resident set in MiB that was seen.
    pub resident_mib: u64,
    /// The user that it ran as, where that is not the validator's own.
    pub user_id: Option<u32>,
}

#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Framework {
    /// The interpreter alone.
    #[default]
    Interpreter,
    Torch,
    Jax,
    Tensorflow,
    Cupy,
}

impl Framework {
    /// Those with a GPU probe.
    pub const OF_GPUS: [Self; 4] = [Self::Torch, Self::Jax, Self::Tensorflow, Self::Cupy];

    pub fn name(self) -> &'static str {
        match self {
            Self::Interpreter => "interpreter",
            Self::Torch => "torch",
            Self::Jax => "jax",
            Self::Tensorflow => "tensorflow",
            Self::Cupy => "cupy",
        }
    }
}

/// How the process of a proof ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProofEnd {
    /// It could not be started, and this is why.
    NotStarted(String),
    Exited(i32),
    Signal(i32),
    /// It was killed at this limit in seconds.
    TimedOut(u64),
    /// It was killed when its resident set passed this limit in MiB.
    OutOfMemory(u64),
    /// It was killed because the run was stopped.
    #[default]
    Stopped,
}

/// A step of a proof.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProofStep {
    /// `import`, `devices`, `gemm_fp32`.
    pub name: String,
    pub seconds: f64,
    /// The exception, `Type: message`; `None` of a step that succeeded.
    pub error: Option<String>,
    /// Why the step does not apply.
    pub skipped: Option<String>,
    /// What the step returned.
    pub results: BTreeMap<String, serde_json::Value>,
}

impl PythonProof {
    pub fn step(&self, name: &str) -> Option<&ProofStep> {
        self.steps.iter().find(|it| it.name == name)
    }

    /// A value that a step returned.
    pub fn result(&self, step: &str, name: &str) -> Option<&serde_json::Value> {
        self.step(step)?.results.get(name)
    }

    /// Every step ended without an error and the process ended by itself.
    pub fn succeeded(&self) -> bool {
        self.end == ProofEnd::Exited(0)
            && self.unfinished_step.is_none()
            && !self.steps.is_empty()
            && self.steps.iter().all(|it| it.error.is_none())
    }
}

impl PythonEnvironment {
    pub fn package(&self, name: &str) -> Option<&PythonPackage> {
        self.packages.iter().find(|it| it.name == name)
    }

    pub fn proof(&self, framework: Framework) -> Option<&PythonProof> {
        self.proofs.iter().find(|it| it.framework == framework)
    }
}
