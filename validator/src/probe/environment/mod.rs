//! Toolkits, libraries and Python environments: found on the disk, and started.

mod elf;
mod fat_binary;
pub(crate) mod image;
pub(crate) mod launch;
mod links;
mod packages;
mod proof;
mod pythons;
mod resolution;
mod toolkits;
mod walk;

use std::collections::BTreeMap;
use std::path::PathBuf;

/// An ELF file, and the metadata of packages.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod readers {
    use std::path::Path;

    pub(crate) fn elf(path: &Path) {
        let _ = super::elf::is_elf(path);
        let _ = super::elf::dynamic(path);
        let _ = super::elf::device_code(path, "library.so");
        let _ = super::links::links(path);
    }

    pub(crate) fn packages(bytes: &[u8]) {
        super::packages::read_any(&String::from_utf8_lossy(bytes));
    }
}

pub(crate) use proof::{ProofLimits, prove};

use super::host::{LoaderPath, Sysroot, toolkits as host_toolkits};
use super::{Interrupt, ProbeOptions};
use validator_core::facts::{CudaToolkitKind, EnvironmentFacts, Facts, Reading};

/// Variables that change which interpreter, package or library a program gets.
const VARIABLES: [&str; 18] = [
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONUSERBASE",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MODULE_LOADING",
    "TRITON_PTXAS_PATH",
    "TRITON_LIBCUDA_PATH",
    "XLA_FLAGS",
    "BNB_CUDA_VERSION",
    "LOADEDMODULES",
    "MODULEPATH",
];

/// Where environments are looked for, besides the usual places.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    /// Folders or interpreters that the profile or the command line names.
    pub(crate) named: Vec<String>,
    /// `VIRTUAL_ENV`, `CONDA_PREFIX`, `MAMBA_ROOT_PREFIX`.
    active: Vec<String>,
    /// Folders of `PATH`.
    path: Vec<String>,
    python_path: Vec<String>,
    module_path: Vec<String>,
    /// Folders that module files prepend to `PATH`.
    module_paths: Vec<String>,
    home: Option<String>,
    ld_library_path: Option<String>,
    variables: BTreeMap<String, String>,
    /// `PATH` is that of the shells of this machine or image.
    path_is_known: bool,
}

impl Request {
    /// As this process's environment has it; below a sysroot only `LD_LIBRARY_PATH` speaks of the
    /// tree.
    pub(crate) fn of_this_process(is_this_machine: bool, named: Vec<String>) -> Self {
        if is_this_machine {
            return Self::of_variables(named, |name| std::env::var(name).ok());
        }
        let variable = |name: &str| {
            (name == "LD_LIBRARY_PATH")
                .then(|| std::env::var(name).ok())
                .flatten()
        };
        let mut request = Self::of_variables(named, variable);
        request.path_is_known = false;
        request
    }

    /// As the configuration of an image has it.
    pub(crate) fn of_image(variables: &BTreeMap<String, String>, named: Vec<String>) -> Self {
        Self::of_variables(named, |name| variables.get(name).cloned())
    }

    fn of_variables(named: Vec<String>, variable: impl Fn(&str) -> Option<String>) -> Self {
        let list = |name: &str| -> Vec<String> {
            let value = variable(name).unwrap_or_default();
            value
                .split(':')
                .filter(|it| it.starts_with('/'))
                .map(str::to_owned)
                .collect()
        };
        let mut active = list("VIRTUAL_ENV");
        active.extend(list("CONDA_PREFIX"));
        active.extend(list("MAMBA_ROOT_PREFIX"));
        let variables = VARIABLES
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), variable(name)?)))
            .collect();
        Self {
            named,
            active,
            path: list("PATH"),
            python_path: list("PYTHONPATH"),
            module_path: list("MODULEPATH"),
            module_paths: Vec::new(),
            home: variable("HOME").filter(|it| it.starts_with('/')),
            ld_library_path: variable("LD_LIBRARY_PATH"),
            variables,
            path_is_known: true,
        }
    }
}

/// What a run discovers.
pub(crate) fn discover_by(options: &ProbeOptions) -> EnvironmentFacts {
    let request = Request::of_this_process(options.sysroot.is_none(), options.pythons.clone());
    discover(options.sysroot.clone(), request)
}

/// What a run starts.
pub(crate) fn prove_by(options: &ProbeOptions, interrupt: &Interrupt, facts: &mut Facts) {
    let Some(environment) = &mut facts.environment else {
        return;
    };
    let limits = ProofLimits {
        worker_program: options.worker_program.clone(),
        ..ProofLimits::default()
    };
    let begin = std::time::Instant::now();
    prove(environment, options.sysroot.is_none(), &limits, interrupt);
    if environment.pythons.iter().any(|it| !it.proofs.is_empty()) {
        let milliseconds = begin.elapsed().as_secs_f64() * 1000.0;
        facts.timings_ms.insert("python".to_owned(), milliseconds);
    }
}

/// Finds everything below `sysroot`, or on this machine; nothing that was found is started, but an
/// `nvcc` of root's.
pub(crate) fn discover(sysroot: Option<PathBuf>, mut request: Request) -> EnvironmentFacts {
    let root = Sysroot::new(sysroot);
    let modules = toolkits::modules(&root, &request.module_path);
    let prepended = modules.iter().filter_map(|it| it.changes.get("PATH"));
    request.module_paths = prepended
        .flat_map(|it| it.split(':'))
        .map(str::to_owned)
        .collect();
    let walk = walk::Walk::new(&root, walk::FOLDERS_MAXIMUM);
    let loader = LoaderPath::read(&root, request.ld_library_path.as_deref());
    let mut pythons = pythons::find(&root, &walk, &request);
    for environment in &mut pythons {
        let outside = Sysroot::default();
        let root = if root.exists(&environment.prefix) {
            &root
        } else {
            &outside
        };
        let of_packages = resolution::of_environment(root, &loader, environment);
        environment.libraries = of_packages.libraries;
        for package in &mut environment.packages {
            package.unmet = of_packages
                .unmet
                .get(&package.name)
                .cloned()
                .unwrap_or_default();
        }
    }
    let named = host_toolkits::NamedFolders::of(
        ["CUDA_HOME", "CUDA_PATH"]
            .iter()
            .filter_map(|name| request.variables.get(*name))
            .cloned()
            .collect(),
    );
    let mut found = match host_toolkits::cuda_toolkits(&root, &named) {
        Reading::Value(toolkits) => toolkits,
        Reading::NotSupported | Reading::NotRead(_) => Vec::new(),
    };
    // Those of environments are found below with the environments.
    found.retain(|it| it.kind != CudaToolkitKind::PythonWheel);
    toolkits::add(&root, &pythons, &modules, &mut found);
    if root.is_this_machine() {
        toolkits::ask_nvcc(&mut found);
    }
    EnvironmentFacts {
        nvcc_on_path: if request.path_is_known {
            Reading::Value(toolkits::nvcc_on_path(&root, &request.path, &found))
        } else {
            Reading::NotSupported
        },
        toolkits: found,
        libraries: resolution::of_the_machine(&root, &loader),
        stub_folders: resolution::stub_folders(&root, &loader),
        pythons,
        available_modules: modules,
        variables: request.variables,
        walk: walk.result(),
        by_files: false,
        on: None,
    }
}
