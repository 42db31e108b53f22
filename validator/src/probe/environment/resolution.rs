//! Which library the dynamic loader picks for each name: ld.so(8), applied to the files on the
//! disk.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::super::host::{LoaderPath, Sysroot, version_in_name};
use super::elf::{Dynamic, dynamic};
use super::links::{self, LinkedFile};
use validator_core::facts::{
    Framework, LibrarySearch, PythonEnvironment, Reading, ResolvedLibrary, UnmetNeed,
};

/// Names of GPU libraries, without `.so` and version.
const GPU_LIBRARIES: [&str; 16] = [
    "libcuda",
    "libnvidia-ml",
    "libcudart",
    "libcublas",
    "libcublasLt",
    "libcudnn",
    "libnccl",
    "libnvrtc",
    "libnvJitLink",
    "libcusparse",
    "libcusparseLt",
    "libcusolver",
    "libcufft",
    "libcurand",
    "libcupti",
    "libnvshmem_host",
];

/// Names that programs of the machine ask for.
const OF_THE_MACHINE: [&str; 18] = [
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libcudart.so.11.0",
    "libcudart.so.12",
    "libcudart.so.13",
    "libcublas.so.11",
    "libcublas.so.12",
    "libcublas.so.13",
    "libcublasLt.so.11",
    "libcublasLt.so.12",
    "libcublasLt.so.13",
    "libcudnn.so.8",
    "libcudnn.so.9",
    "libnccl.so.2",
    "libnvrtc.so.11.2",
    "libnvrtc.so.12",
    "libnvrtc.so.13",
    "libnvJitLink.so.12",
];

/// Libraries with which each framework's GPU code begins, below a folder of packages; a part of a
/// name may be `*`.
const ENTRIES: [(&str, &[&str]); 9] = [
    (
        "torch",
        &[
            "torch/lib/libtorch_global_deps.so",
            "torch/lib/libtorch_cuda.so",
            "torch/lib/libtorch_python.so",
            "torch/_C.*.so",
        ],
    ),
    (
        "tensorflow",
        &[
            "tensorflow/libtensorflow_cc.so.2",
            "tensorflow/libtensorflow_framework.so.2",
        ],
    ),
    ("jaxlib", &["jaxlib/libjax_common.so", "jaxlib/_jax.*so"]),
    ("cupy", CUPY),
    (
        "jax-cuda12-plugin",
        &["jax_plugins/xla_cuda12/xla_cuda_plugin.so"],
    ),
    (
        "jax-cuda13-plugin",
        &["jax_plugins/xla_cuda13/xla_cuda_plugin.so"],
    ),
    (
        "onnxruntime-gpu",
        &["onnxruntime/capi/libonnxruntime_providers_cuda.so"],
    ),
    ("vllm", &["vllm/_C.abi3.so"]),
    ("bitsandbytes", &[]),
];

/// Of every distribution of CuPy: `cupy`, `cupy-cuda12x`. Its modules for cuBLAS and others open
/// NVIDIA's wheels by their full paths first (cupy 14.2.0).
const CUPY: &[&str] = &["cupy/_core/core.*.so"];

/// The order in which torch opens the libraries of NVIDIA's wheels (torch/__init__.py 2.15.0).
const TORCH_PRELOADS: [&str; 14] = [
    "libcublasLt",
    "libcublas",
    "libcudnn",
    "libnvrtc",
    "libcudart",
    "libcupti",
    "libcufft",
    "libnvJitLink",
    "libcusparse",
    "libcusparseLt",
    "libcusolver",
    "libnccl",
    "libnvshmem_host",
    "libcufile",
];

/// How many libraries of one environment are read.
const LIBRARIES_MAXIMUM: usize = 400;

fn stem(name: &str) -> &str {
    name.split(".so").next().unwrap_or(name)
}

fn is_gpu_library(name: &str) -> bool {
    let stem = stem(name);
    GPU_LIBRARIES.contains(&stem) || stem.starts_with("libcudnn_")
}

/// The libraries of a program that brings none of its own.
pub(super) fn of_the_machine(root: &Sysroot, loader: &LoaderPath) -> Vec<ResolvedLibrary> {
    OF_THE_MACHINE
        .iter()
        .filter_map(|name| {
            let Reading::Value(files) = loader.files(root, name) else {
                return None;
            };
            let mut files = files.into_iter();
            let first = files.next()?;
            let by_variable = loader.environment.iter().any(|it| {
                first
                    .path
                    .strip_prefix(it.trim_end_matches('/'))
                    .is_some_and(|rest| rest.starts_with('/'))
            });
            let found_by = if by_variable {
                LibrarySearch::LdLibraryPath
            } else if loader.in_cache(name) {
                LibrarySearch::Cache
            } else {
                LibrarySearch::DefaultFolder
            };
            Some(ResolvedLibrary {
                name: (*name).to_owned(),
                version: first.version,
                path: Some(first.path),
                resolved: Some(first.resolved),
                found_by,
                required_by: "programs".to_owned(),
                shadowed: files.map(|it| it.resolved).collect(),
            })
        })
        .collect()
}

/// Folders of stubs that the loader searches.
pub(super) fn stub_folders(root: &Sysroot, loader: &LoaderPath) -> Vec<String> {
    let is_stubs = |it: &str| it.split('/').any(|part| part == "stubs");
    let mut folders: Vec<String> = loader
        .environment
        .iter()
        .filter(|it| is_stubs(it) && root.is_folder(it))
        .cloned()
        .collect();
    folders.extend(loader.cache_folders().filter(|it| is_stubs(it)));
    folders.sort();
    folders.dedup();
    folders
}

/// What the packages of an environment load.
#[derive(Debug, Default)]
pub(super) struct LoadedByPackages {
    /// GPU libraries.
    pub(super) libraries: Vec<ResolvedLibrary>,
    /// What each package's libraries need and do not get.
    pub(super) unmet: BTreeMap<String, Vec<UnmetNeed>>,
}

/// The libraries that an environment's packages load.
pub(super) fn of_environment(
    root: &Sysroot,
    loader: &LoaderPath,
    environment: &PythonEnvironment,
) -> LoadedByPackages {
    let mut process = Process {
        root,
        loader,
        environment,
        wheels: wheel_folders(root, environment),
        loaded: BTreeMap::new(),
        waiting: VecDeque::new(),
        result: Vec::new(),
        read: BTreeSet::new(),
        files: Vec::new(),
        package: None,
        of_interpreter: Vec::new(),
    };
    let is_of = |package: &str, name: &str| {
        package == name || name == "cupy" && package.starts_with("cupy-cuda")
    };
    let installed = |name: &str| environment.packages.iter().find(|it| is_of(&it.name, name));
    if ENTRIES.iter().any(|(name, _)| installed(name).is_some()) {
        process.open_interpreter();
    }
    for (name, libraries) in ENTRIES {
        let Some(package) = installed(name) else {
            continue;
        };
        // It imports without its CUDA libraries, which `preload_dlls` opens later.
        let imports_all = name != "onnxruntime-gpu";
        process.package = imports_all.then(|| package.name.clone());
        let site = package.path.rsplit_once('/').map_or("", |(site, _)| site);
        for library in libraries {
            let paths = root.matching(&format!("{site}/{library}"));
            for path in &paths {
                process.open(path);
            }
            let opens_wheels =
                name == Framework::Torch.name() && libraries.first() == Some(library);
            if opens_wheels && !paths.is_empty() {
                process.preload();
            }
        }
    }
    let unmet = process.unmet();
    process.add_wheels();
    LoadedByPackages {
        libraries: process.result,
        unmet,
    }
}

/// `site-packages/nvidia/*/lib`: the folders of NVIDIA's wheels.
fn wheel_folders(root: &Sysroot, environment: &PythonEnvironment) -> Vec<String> {
    let sites = environment.site_packages.iter();
    sites
        .flat_map(|site| root.matching(&format!("{site}/nvidia/*/lib")))
        .collect()
}

/// One process that loads libraries, breadth first as the loader does.
struct Process<'p> {
    root: &'p Sysroot,
    loader: &'p LoaderPath,
    environment: &'p PythonEnvironment,
    wheels: Vec<String>,
    /// What a name leads to since it was loaded.
    loaded: BTreeMap<String, String>,
    waiting: VecDeque<Loaded>,
    result: Vec<ResolvedLibrary>,
    read: BTreeSet<String>,
    files: Vec<LinkedFile>,
    /// The package whose libraries are opened.
    package: Option<String>,
    /// `DT_RPATH` of the interpreter, which every library inherits: conda's names the environment.
    of_interpreter: Vec<String>,
}

/// A loaded library whose needed ones come next.
struct Loaded {
    path: String,
    dynamic: Dynamic,
    /// `DT_RPATH` of those that loaded it, expanded.
    inherited: Vec<String>,
}

impl Process<'_> {
    fn open(&mut self, path: &str) {
        self.take_up(path, self.of_interpreter.clone());
        while let Some(loaded) = self.waiting.pop_front() {
            for name in loaded.dynamic.needed.clone() {
                self.need(&name, &loaded);
            }
        }
    }

    /// The interpreter's libraries are loaded first.
    fn open_interpreter(&mut self) {
        let interpreter = self.environment.interpreter.value();
        let Some(path) = interpreter.and_then(|it| self.root.resolve(it)) else {
            return;
        };
        if let Ok(dynamic) = dynamic(&self.root.real_path(&path))
            && dynamic.runpath.is_none()
        {
            self.of_interpreter = expand(&dynamic.rpath, &path);
        }
        self.open(&path);
    }

    /// What each package's libraries need and do not get.
    ///
    /// A tree without a C library is no root file system, and one that was not read to its end
    /// says nothing of what is not there.
    fn unmet(&mut self) -> BTreeMap<String, Vec<UnmetNeed>> {
        let is_root = self.search("libc.so.6", &[], &[]).is_some()
            || !self.root.matching("/lib/ld-musl-*").is_empty();
        if !is_root || self.read.len() >= LIBRARIES_MAXIMUM {
            return BTreeMap::new();
        }
        // The driver's libraries come with the node.
        let of_the_driver = |name: &str| ["libcuda", "libnvidia-ml"].contains(&stem(name));
        let mut files = std::mem::take(&mut self.files);
        for file in &mut files {
            file.needed.retain(|(name, _)| !of_the_driver(name));
            for (name, path) in &mut file.needed {
                *path = self.loaded.get(name).filter(|it| !it.is_empty()).cloned();
            }
        }
        let versions = RefCell::new(BTreeMap::<String, BTreeSet<String>>::new());
        let versions_of = |path: &str| {
            let mut versions = versions.borrow_mut();
            let of_path = versions.entry(path.to_owned()).or_insert_with(|| {
                let links = links::links(&self.root.real_path(path));
                links.map(links::Links::versions).unwrap_or_default()
            });
            of_path.clone()
        };
        let packages: BTreeSet<String> = files.iter().filter_map(|it| it.package.clone()).collect();
        packages
            .into_iter()
            .map(|it| {
                let unmet = links::unmet(&it, &files, versions_of);
                (it, unmet)
            })
            .collect()
    }

    /// torch opens NVIDIA's wheels by their full paths before its own GPU library needs them.
    fn preload(&mut self) {
        for wanted in TORCH_PRELOADS {
            let folders = self.wheels.clone();
            let found = folders.iter().find_map(|folder| {
                let names = self.root.names(folder).ok()?;
                let name = names
                    .into_iter()
                    .find(|it| stem(it) == wanted && it.contains(".so."))?;
                Some((format!("{folder}/{name}"), name))
            });
            let Some((path, name)) = found else { continue };
            if !self.loaded.contains_key(&name) {
                self.record(&name, Some(path.clone()), LibrarySearch::Preloaded, "torch");
                self.open(&path);
            }
        }
    }

    /// Libraries of NVIDIA's wheels that no package above needs: programs open them by their full
    /// paths.
    fn add_wheels(&mut self) {
        for folder in self.wheels.clone() {
            for name in self.root.names(&folder).unwrap_or_default() {
                let known = self.result.iter().any(|it| stem(&it.name) == stem(&name));
                if !known && name.contains(".so.") && is_gpu_library(&name) {
                    let path = format!("{folder}/{name}");
                    self.record(&name, Some(path), LibrarySearch::Preloaded, "its wheel");
                }
            }
        }
    }

    fn take_up(&mut self, path: &str, inherited: Vec<String>) {
        let Some(resolved) = self.root.resolve(path) else {
            return;
        };
        if self.read.len() >= LIBRARIES_MAXIMUM || !self.read.insert(resolved) {
            return;
        }
        let Ok(dynamic) = dynamic(&self.root.real_path(path)) else {
            return;
        };
        if let Some(soname) = &dynamic.soname {
            self.loaded.insert(soname.clone(), path.to_owned());
        }
        let is_of_package = self
            .environment
            .site_packages
            .iter()
            .any(|it| path.starts_with(&format!("{it}/")));
        self.files.push(LinkedFile {
            path: path.to_owned(),
            name: file_name(path).to_owned(),
            links: links::links(&self.root.real_path(path)).unwrap_or_default(),
            needed: dynamic.needed.iter().map(|it| (it.clone(), None)).collect(),
            package: self.package.clone().filter(|_| is_of_package),
        });
        self.waiting.push_back(Loaded {
            path: path.to_owned(),
            dynamic,
            inherited,
        });
    }

    fn need(&mut self, name: &str, by: &Loaded) {
        if self.loaded.contains_key(name) {
            return;
        }
        let mut rpath: Vec<String> = expand(&by.dynamic.rpath, &by.path);
        rpath.extend(by.inherited.iter().cloned());
        let runpath = by.dynamic.runpath.as_ref().map(|it| expand(it, &by.path));
        let found = self.search(
            name,
            if runpath.is_some() { &[] } else { &rpath },
            runpath.as_deref().unwrap_or_default(),
        );
        let is_gpu = is_gpu_library(name);
        match found {
            Some((path, search)) => {
                self.loaded.insert(name.to_owned(), path.clone());
                if is_gpu {
                    self.record(name, Some(path.clone()), search, file_name(&by.path));
                }
                // Libraries of the distribution lead to no GPU library.
                let own = path.starts_with(&format!("{}/", self.environment.prefix));
                if is_gpu || own {
                    // RUNPATH switches inheritance off.
                    let inherited = if by.dynamic.runpath.is_some() {
                        Vec::new()
                    } else {
                        rpath
                    };
                    self.take_up(&path, inherited);
                }
            }
            None if is_gpu => {
                self.loaded.insert(name.to_owned(), String::new());
                // The driver's absence is another check's finding.
                if !["libcuda", "libnvidia-ml"].contains(&stem(name)) {
                    self.record(name, None, LibrarySearch::NotFound, file_name(&by.path));
                }
            }
            None => {}
        }
    }

    fn search(
        &self,
        name: &str,
        rpath: &[String],
        runpath: &[String],
    ) -> Option<(String, LibrarySearch)> {
        let in_folders = |folders: &[String], search: LibrarySearch| {
            let mut paths = folders
                .iter()
                .map(|it| format!("{}/{name}", it.trim_end_matches('/')));
            paths.find(|it| self.root.exists(it)).map(|it| (it, search))
        };
        in_folders(rpath, LibrarySearch::Rpath)
            .or_else(|| in_folders(&self.loader.environment, LibrarySearch::LdLibraryPath))
            .or_else(|| in_folders(runpath, LibrarySearch::Runpath))
            .or_else(|| {
                let Reading::Value(files) = self.loader.files(self.root, name) else {
                    return None;
                };
                let search = if self.loader.in_cache(name) {
                    LibrarySearch::Cache
                } else {
                    LibrarySearch::DefaultFolder
                };
                files.into_iter().next().map(|it| (it.path, search))
            })
    }

    fn record(&mut self, name: &str, path: Option<String>, found_by: LibrarySearch, by: &str) {
        if self.result.iter().any(|it| it.name == name) {
            return;
        }
        let resolved = path.as_deref().and_then(|it| self.root.resolve(it));
        // What the search would have given without its winner: the environment's own copy, and the
        // machine's.
        let mut shadowed: Vec<String> = Vec::new();
        let own = self
            .wheels
            .iter()
            .chain(&self.loader.environment)
            .map(|it| format!("{it}/{name}"));
        for other in own.filter_map(|it| self.root.resolve(&it)) {
            if Some(&other) != resolved.as_ref() && !shadowed.contains(&other) {
                shadowed.push(other);
            }
        }
        let version = resolved
            .as_deref()
            .and_then(|it| version_in_name(file_name(it)))
            .or_else(|| self.version_of_wheel(name, resolved.as_deref()?));
        self.result.push(ResolvedLibrary {
            name: name.to_owned(),
            version,
            path,
            resolved,
            found_by,
            required_by: by.to_owned(),
            shadowed,
        });
    }

    /// NVIDIA's wheels name the version in their metadata only.
    fn version_of_wheel(&self, name: &str, resolved: &str) -> Option<String> {
        const PACKAGES: [(&str, &str); 12] = [
            ("libcudart", "nvidia-cuda-runtime"),
            ("libcublas", "nvidia-cublas"),
            ("libcudnn", "nvidia-cudnn"),
            ("libnccl", "nvidia-nccl"),
            ("libnvrtc", "nvidia-cuda-nvrtc"),
            ("libnvJitLink", "nvidia-nvjitlink"),
            ("libcusparseLt", "nvidia-cusparselt"),
            ("libcusparse", "nvidia-cusparse"),
            ("libcusolver", "nvidia-cusolver"),
            ("libcufft", "nvidia-cufft"),
            ("libcurand", "nvidia-curand"),
            ("libcupti", "nvidia-cuda-cupti"),
        ];
        if !self.wheels.iter().any(|it| {
            self.root
                .resolve(it)
                .is_some_and(|it| resolved.starts_with(&it))
        }) {
            return None;
        }
        let (_, package) = PACKAGES
            .iter()
            .find(|(library, _)| stem(name).starts_with(library))?;
        let is_of = |it: &str| {
            it == *package
                || it
                    .strip_prefix(package)
                    .is_some_and(|rest| rest.starts_with("-cu"))
        };
        let packages = self.environment.packages.iter();
        packages
            .into_iter()
            .find(|it| is_of(&it.name))
            .map(|it| it.version.clone())
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// `$ORIGIN/../../nvidia/cudnn/lib` for the folder of the file.
fn expand(folders: &[String], path: &str) -> Vec<String> {
    let origin = path.rsplit_once('/').map_or("/", |(folder, _)| folder);
    folders
        .iter()
        .map(|it| it.replace("$ORIGIN", origin).replace("${ORIGIN}", origin))
        .map(|it| simplified(&it))
        .collect()
}

/// Without `..`: the folders of a package are no links.
fn simplified(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/').filter(|it| !it.is_empty() && *it != ".") {
        if part == ".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    format!("/{}", parts.join("/"))
}
