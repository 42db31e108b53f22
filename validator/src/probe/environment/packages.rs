//! GPU packages of a folder of packages, from their metadata: nothing is imported.

use std::collections::BTreeMap;
use std::path::Path;

use super::super::host::Sysroot;
use super::elf;
use crate::probe::json::at;
use validator_core::facts::{DefectKind, DeviceCode, EnvironmentDefect, PythonPackage, Reading};

/// Packages of interest by their normalized names; a name that ends in `*` stands for all that
/// begin so.
const OF_INTEREST: [&str; 20] = [
    "torch",
    "tensorflow",
    "tensorflow-gpu",
    "jax",
    "jaxlib",
    "jax-cuda*",
    "cupy",
    "cupy-cuda*",
    "numba",
    "numba-cuda",
    "triton",
    "vllm",
    "flash-attn",
    "onnxruntime-gpu",
    "bitsandbytes",
    "nvidia-*",
    "cuda-toolkit",
    "pytorch-triton",
    "xformers",
    "deepspeed",
];

/// Those whose record is compared with the disk.
const RECORD_IS_COMPARED: [&str; 8] = [
    "torch",
    "tensorflow",
    "jaxlib",
    "jax-cuda*",
    "cupy-cuda*",
    "vllm",
    "onnxruntime-gpu",
    "nvidia-*",
];

/// What the code of a `.pth` file names when it changes which GPUs or libraries programs get. Other
/// code is usual: setuptools, virtualenv, coverage, editable installations and namespace packages
/// have it.
const CHANGES_PROGRAMS: [&str; 5] = [
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "CUDA_",
    "NVIDIA_VISIBLE_DEVICES",
    "CDLL",
];

/// What one folder of packages holds.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) packages: Vec<PythonPackage>,
    pub(super) defects: Vec<EnvironmentDefect>,
    /// Lines of `.pth` files that every start of the interpreter runs.
    pub(super) startup_code: Vec<String>,
    /// Folders that `.pth` files add.
    pub(super) added: Vec<String>,
}

fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name)
        .extension()
        .is_some_and(|it| it == extension)
}

fn is_in(name: &str, list: &[&str]) -> bool {
    list.iter().any(|it| match it.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == *it,
    })
}

/// `Flash_Attn` is `flash-attn`.
pub(super) fn normalized(name: &str) -> String {
    let mut normalized = String::new();
    for character in name.chars() {
        match character {
            '-' | '_' | '.' if normalized.ends_with('-') => {}
            '-' | '_' | '.' => normalized.push('-'),
            other => normalized.extend(other.to_lowercase()),
        }
    }
    normalized
}

/// Reads one folder, whose `names` the caller has.
pub(super) fn read(root: &Sysroot, folder: &str, names: &[String]) -> Found {
    let mut found = Found::default();
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in names {
        let metadata = name
            .strip_suffix(".dist-info")
            .or_else(|| name.strip_suffix(".egg-info"));
        if let Some((package, version)) = metadata.and_then(|it| it.split_once('-')) {
            let package = normalized(package);
            if is_in(&package, &OF_INTEREST) {
                let version = version.split("-py3").next().unwrap_or(version).to_owned();
                versions
                    .entry(package.clone())
                    .or_default()
                    .push(version.clone());
                found.add_package(root, folder, name, package, version);
            }
        } else if has_extension(name, "pth") {
            found.add_path_file(root, folder, name);
        }
    }
    for (package, versions) in versions.into_iter().filter(|(_, it)| it.len() > 1) {
        found.defect(
            DefectKind::DuplicatePackage,
            format!(
                "{package} is installed in the versions {} in {folder}: an interrupted upgrade",
                versions.join(" and ")
            ),
        );
    }
    found.add_ghosts(root, folder, names);
    found
}

impl Found {
    fn defect(&mut self, kind: DefectKind, text: String) {
        self.defects.push(EnvironmentDefect { kind, text });
    }

    fn add_package(
        &mut self,
        root: &Sysroot,
        folder: &str,
        metadata: &str,
        name: String,
        version: String,
    ) {
        let path = format!("{folder}/{metadata}");
        let text = root
            .text(&format!("{path}/METADATA"))
            .or_else(|_| root.text(&format!("{path}/PKG-INFO")))
            .unwrap_or_default();
        if is_in(&name, &RECORD_IS_COMPARED) {
            self.compare_record(root, folder, &path, &name);
        }
        let mut package = PythonPackage {
            installer: root.line(&format!("{path}/INSTALLER")),
            pins: pins(&text),
            cuda: Reading::NotRead("its metadata names no CUDA version".to_owned()),
            device_code: Reading::NotSupported,
            unmet: Vec::new(),
            name,
            version,
            path,
        };
        read_build(root, folder, &text, &mut package);
        self.packages.push(package);
    }

    /// Libraries of the record that are absent or of another size.
    fn compare_record(&mut self, root: &Sysroot, folder: &str, path: &str, name: &str) {
        const SHOWN: usize = 3;
        let record = root.text(&format!("{path}/RECORD")).unwrap_or_default();
        let mut wrong = Vec::new();
        for line in record.lines() {
            let mut parts = line.rsplitn(3, ',');
            let (Some(size), Some(_), Some(file)) = (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let is_library =
                Path::new(file).extension().is_some_and(|it| it == "so") || file.contains(".so.");
            if !is_library {
                continue;
            }
            let metadata = root.unresolved_path(&format!("{folder}/{file}")).metadata();
            match (metadata, size.parse::<u64>()) {
                (Err(_), _) => wrong.push(format!("{file} is absent")),
                (Ok(found), Ok(size)) if found.len() != size => {
                    wrong.push(format!(
                        "{file} has {} bytes, its record {size}",
                        found.len()
                    ));
                }
                _ => {}
            }
        }
        let more = wrong.len().saturating_sub(SHOWN);
        if !wrong.is_empty() {
            wrong.truncate(SHOWN);
            let more = if more > 0 {
                format!(" and {more} more")
            } else {
                String::new()
            };
            self.defect(
                DefectKind::DamagedPackage,
                format!("{name} is damaged: {}{more}", wrong.join(", ")),
            );
        }
    }

    /// Lines of a `.pth` file: folders that it adds, and code that every start of the interpreter
    /// runs.
    fn add_path_file(&mut self, root: &Sysroot, folder: &str, name: &str) {
        let text = root.text(&format!("{folder}/{name}")).unwrap_or_default();
        for line in text.lines().map(str::trim) {
            let is_code = line.starts_with("import ") || line.starts_with("import\t");
            if is_code {
                let shown: String = line.chars().take(80).collect();
                if let Some(what) = CHANGES_PROGRAMS.iter().find(|it| line.contains(**it)) {
                    self.defect(
                        DefectKind::StartupCode,
                        format!("{folder}/{name} runs code with {what} at every start: {shown}"),
                    );
                }
                self.startup_code.push(format!("{folder}/{name}: {shown}"));
            } else if !line.is_empty() && !line.starts_with('#') {
                let path = if line.starts_with('/') {
                    line.to_owned()
                } else {
                    format!("{folder}/{line}")
                };
                if root.is_folder(&path) {
                    self.added.push(path);
                }
            }
        }
    }

    /// A folder without metadata and without code: the leftovers of an uninstalled package are
    /// imported as an empty package.
    fn add_ghosts(&mut self, root: &Sysroot, folder: &str, names: &[String]) {
        for name in ["torch", "jax", "tensorflow", "cupy", "triton"] {
            let is_there = names.iter().any(|it| it == name);
            let installed = self.packages.iter().any(|it| it.name.starts_with(name));
            let path = format!("{folder}/{name}");
            if is_there
                && !installed
                && root.is_folder(&path)
                && !root.exists(&format!("{path}/__init__.py"))
            {
                self.defect(
                    DefectKind::NamespaceGhost,
                    format!("{path} has no metadata and no __init__.py: an uninstalled package left it, and it imports as an empty package"),
                );
            }
        }
    }
}

/// `Requires-Dist: nvidia-cudnn-cu12==9.10.2.21; platform_system == "Linux"` for GPU packages and
/// exact versions.
fn pins(metadata: &str) -> BTreeMap<String, String> {
    let pin = |line: &str| {
        let requirement = line.strip_prefix("Requires-Dist:")?;
        let (requirement, marker) = requirement.split_once(';').unwrap_or((requirement, ""));
        // An extra is not demanded, and another machine's packages are not either.
        let other = if cfg!(target_arch = "x86_64") {
            "aarch64"
        } else {
            "x86_64"
        };
        if marker.contains("extra")
            || marker.contains(&format!("== '{other}'"))
            || marker.contains(&format!("== \"{other}\""))
        {
            return None;
        }
        let (name, version) = requirement.split_once("==")?;
        let name = name.split('[').next().unwrap_or(name);
        let name = normalized(name.trim().trim_end_matches('('));
        let version = version.trim().trim_end_matches(')').to_owned();
        (is_in(&name, &OF_INTEREST) && !version.contains(',')).then_some((name, version))
    };
    metadata
        .lines()
        .take_while(|it| !it.is_empty())
        .filter_map(pin)
        .collect()
}

/// The metadata of a package, as [`crate::fuzzing`] makes it.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn read_any(text: &str) {
    for (name, version) in pins(text) {
        assert!(is_in(&name, &OF_INTEREST) && !version.contains(','));
    }
    let _ = assigned(text, "cuda").and_then(major_minor);
    let _ = code_listed(dictionary_entry(text, "cuda_compute_capabilities"));
    assert_eq!(normalized(&normalized(text)), normalized(text));
}

/// The text between the first pair of quotes after `name` and `=` or `:`.
fn assigned<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let rest = line.trim_start().strip_prefix(name)?;
        let rest = rest.trim_start_matches(['\'', '"']);
        // `cuda: Optional[str] = '13.2'`
        let (_, value) = rest.split_once('=').or_else(|| rest.split_once(':'))?;
        let value = value.trim().trim_end_matches(',');
        value.strip_prefix(['\'', '"'])?.strip_suffix(['\'', '"'])
    })
}

/// Where each package records the CUDA version of its build, and where its GPU code lies.
fn read_build(root: &Sysroot, folder: &str, metadata: &str, package: &mut PythonPackage) {
    let text = |file: &str| root.text(&format!("{folder}/{file}")).ok();
    match package.name.as_str() {
        "torch" => {
            let Some(version) = text("torch/version.py") else {
                package.cuda = Reading::NotRead(format!("no file {folder}/torch/version.py"));
                return;
            };
            if let Some(full) = assigned(&version, "__version__") {
                full.clone_into(&mut package.version);
            }
            let is_cpu = version
                .lines()
                .any(|it| it.starts_with("cuda") && it.trim_end().ends_with("= None"));
            match assigned(&version, "cuda") {
                Some(cuda) => {
                    package.cuda = Reading::Value(cuda.to_owned());
                    package.device_code = code_of(root, folder, &["torch/lib/libtorch_cuda.so"]);
                }
                None if is_cpu => package.cuda = Reading::NotSupported,
                None => {
                    package.cuda =
                        Reading::NotRead("torch/version.py names no CUDA version".to_owned());
                }
            }
        }
        "tensorflow" | "tensorflow-gpu" => {
            let info = text("tensorflow/python/platform/build_info.py").unwrap_or_default();
            let is_cuda =
                info.contains("\"is_cuda_build\": True") || info.contains("\"cuda_version\"");
            let version = dictionary_entry(&info, "cuda_version").and_then(major_minor);
            package.cuda = match version {
                Some(version) => Reading::Value(version),
                None if !info.is_empty() && !is_cuda => Reading::NotSupported,
                None => {
                    Reading::NotRead("tensorflow's build_info.py names no CUDA version".to_owned())
                }
            };
            if package.cuda.value().is_some() {
                package.device_code =
                    code_listed(dictionary_entry(&info, "cuda_compute_capabilities"));
            }
        }
        name if name.starts_with("jax-cuda") && name.ends_with("-plugin") => {
            let major = name
                .trim_start_matches("jax-cuda")
                .trim_end_matches("-plugin");
            // `nvidia-cuda-runtime-cu12>=12.1.105` of the extra `with-cuda`.
            let minimum = metadata.lines().find_map(|line| {
                let (_, rest) = line.split_once("nvidia-cuda-runtime")?;
                let (_, version) = rest.split_once(">=")?;
                major_minor(version)
            });
            let version = minimum.unwrap_or_else(|| format!("{major}.0"));
            package.cuda = Reading::Value(version);
            let library = format!("jax_plugins/xla_cuda{major}/xla_cuda_plugin.so");
            package.device_code = code_of(root, folder, &[&library]);
        }
        name if name == "cupy" || name.starts_with("cupy-cuda") => {
            let wheel = text("cupy/.data/_wheel.json").unwrap_or_default();
            let wheel: serde_json::Value = serde_json::from_str(&wheel).unwrap_or_default();
            // `13.x`: any CUDA of this major version.
            let cuda = at(&wheel, "/cuda").as_str().map(|it| it.replace('x', "0"));
            if let Some(cuda) = cuda.and_then(|it| major_minor(&it)) {
                package.cuda = Reading::Value(cuda);
            }
        }
        "onnxruntime-gpu" => {
            let info = text("onnxruntime/capi/build_and_package_info.py").unwrap_or_default();
            if let Some(cuda) = assigned(&info, "cuda_version").and_then(major_minor) {
                package.cuda = Reading::Value(cuda);
            }
            package.device_code = code_of(
                root,
                folder,
                &["onnxruntime/capi/libonnxruntime_providers_cuda.so"],
            );
        }
        "vllm" => by_library(root, folder, "vllm", "_C", package),
        "flash-attn" => by_library(root, folder, "", "flash_attn_2_cuda", package),
        name if name.starts_with("nvidia-cuda-runtime") => {
            if let Some(cuda) = major_minor(&package.version) {
                package.cuda = Reading::Value(cuda);
            }
        }
        _ => {}
    }
}

/// The value of `"name": "value"` anywhere in a text.
fn dictionary_entry<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(&format!("\"{name}\""))?;
    let rest = rest.trim_start().strip_prefix(':')?.trim_start();
    if let Some(list) = rest.strip_prefix('[') {
        return list.split(']').next();
    }
    rest.strip_prefix('"')?.split('"').next()
}

/// The first two numbers of a version.
fn major_minor(version: &str) -> Option<String> {
    let mut numbers = version
        .split(|it: char| !it.is_ascii_digit())
        .filter(|it| !it.is_empty());
    let (major, minor) = (numbers.next()?, numbers.next()?);
    Some(format!("{major}.{minor}"))
}

/// `"sm_60", "sm_70", "compute_90"`: a list in the metadata.
fn code_listed(list: Option<&str>) -> Reading<DeviceCode> {
    let Some(list) = list else {
        return Reading::NotSupported;
    };
    let mut code = DeviceCode {
        library: "build_info.py".to_owned(),
        fat_binaries: 1,
        ..DeviceCode::default()
    };
    for name in list
        .split(',')
        .map(|it| it.trim().trim_matches(['"', '\'']))
    {
        if name.starts_with("sm_") {
            code.machine_code.insert(name.to_owned(), 1);
        } else if name.starts_with("compute_") {
            code.ptx.entry(name.to_owned()).or_default().fat_binaries = 1;
        }
    }
    Reading::Value(code)
}

fn code_of(root: &Sysroot, folder: &str, libraries: &[&str]) -> Reading<DeviceCode> {
    let mut reason = "no library with GPU code was found".to_owned();
    for library in libraries {
        let path = root.real_path(&format!("{folder}/{library}"));
        let name = library.rsplit('/').next().unwrap_or(library);
        match elf::device_code(&path, name) {
            Ok(code) => return Reading::Value(code),
            Err(error) => reason = format!("{library}: {error}"),
        }
    }
    Reading::NotRead(reason)
}

/// A package that records nothing: the CUDA major version that its library needs, and its GPU code.
fn by_library(
    root: &Sysroot,
    folder: &str,
    below: &str,
    prefix: &str,
    package: &mut PythonPackage,
) {
    let at = format!("{folder}/{below}");
    let at = at.trim_end_matches('/');
    let names = root.names(at).unwrap_or_default();
    let Some(name) = names
        .iter()
        .find(|it| it.starts_with(prefix) && has_extension(it, "so"))
    else {
        return;
    };
    let library = if below.is_empty() {
        name.clone()
    } else {
        format!("{below}/{name}")
    };
    let path = root.real_path(&format!("{folder}/{library}"));
    if let Ok(dynamic) = elf::dynamic(&path) {
        let major = dynamic
            .needed
            .iter()
            .find_map(|it| it.strip_prefix("libcudart.so.")?.split('.').next());
        if let Some(major) = major {
            package.cuda = Reading::Value(format!("{major}.0"));
        }
    }
    package.device_code = code_of(root, folder, &[&library]);
}

#[cfg(test)]
mod tests {
    use super::super::super::host::tests::tree;
    use super::*;

    const SITE: &str = "/v/lib/python3.12/site-packages";

    fn read_tree(files: &[(&str, &str)]) -> Found {
        let files: Vec<(String, &str)> = files
            .iter()
            .map(|(path, text)| (format!("{SITE}/{path}"), *text))
            .collect();
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(path, text)| (&path[..], *text))
            .collect();
        let (_folder, root) = tree(&files);
        read(&root, SITE, &root.names(SITE).expect("a folder"))
    }

    #[test]
    fn torch_records_its_build() {
        let found = read_tree(&[
            (
                "torch-2.15.0.dist-info/METADATA",
                "Name: torch\nRequires-Dist: nvidia-cudnn-cu13==9.26.0.51; platform_system == \"Linux\"\n\
                 Requires-Dist: cuda-toolkit[cublas]==13.0.2; platform_system == \"Linux\"\n\
                 Requires-Dist: triton~=3.9.0\nRequires-Dist: nvidia-nccl-cu12==1; extra == 'x'\n\nRequires-Dist: torch==1",
            ),
            ("torch-2.15.0.dist-info/INSTALLER", "pip\n"),
            (
                "torch/version.py",
                "from typing import Optional\n__version__ = '2.15.0+cu132'\ncuda: Optional[str] = '13.2'\nhip: Optional[str] = None\n",
            ),
            ("nvidia_cudnn_cu13-9.26.0.51.dist-info/METADATA", ""),
            ("requests-2.0.dist-info/METADATA", ""),
        ]);
        assert_eq!(found.packages.len(), 2, "{found:?}");
        let torch = &found.packages[1];
        assert_eq!(
            (&torch.name[..], &torch.version[..]),
            ("torch", "2.15.0+cu132")
        );
        assert_eq!(torch.cuda, Reading::Value("13.2".to_owned()));
        assert_eq!(torch.installer.as_deref(), Some("pip"));
        assert!(
            matches!(torch.device_code, Reading::NotRead(_)),
            "there is no library"
        );
        let pins: Vec<_> = torch
            .pins
            .iter()
            .map(|(name, version)| format!("{name} {version}"))
            .collect();
        assert_eq!(pins, ["cuda-toolkit 13.0.2", "nvidia-cudnn-cu13 9.26.0.51"]);
    }

    #[test]
    fn a_cpu_build_has_no_cuda() {
        let found = read_tree(&[
            ("torch-2.8.0.dist-info/METADATA", ""),
            (
                "torch/version.py",
                "__version__ = '2.8.0+cpu'\ncuda = None\n",
            ),
        ]);
        assert_eq!(found.packages[0].cuda, Reading::NotSupported);
    }

    #[test]
    fn other_frameworks_record_theirs_elsewhere() {
        let found = read_tree(&[
            ("tensorflow-2.21.0.dist-info/METADATA", ""),
            (
                "tensorflow/python/platform/build_info.py",
                "build_info = collections.OrderedDict([]) or {\"cpu_compiler\": \"x\", \"cuda_compute_capabilities\": [\"sm_60\", \"compute_90\"], \"cuda_version\": \"12.5.1\", \"is_cuda_build\": True}",
            ),
            ("cupy_cuda13x-14.2.0.dist-info/METADATA", ""),
            ("cupy/.data/_wheel.json", "{\"cuda\": \"13.x\"}"),
            ("onnxruntime_gpu-1.31.1.dist-info/METADATA", ""),
            (
                "onnxruntime/capi/build_and_package_info.py",
                "package_name = 'onnxruntime-gpu'\ncuda_version = '13.0'\n",
            ),
            (
                "jax_cuda12_plugin-0.12.0.dist-info/METADATA",
                "Requires-Dist: nvidia-cuda-runtime-cu12>=12.1.105; extra == \"with-cuda\"\n",
            ),
        ]);
        let cuda: Vec<(&str, Option<&String>)> = found
            .packages
            .iter()
            .map(|it| (&it.name[..], it.cuda.value()))
            .collect();
        let text = |text: &str| text.to_owned();
        let expected = [text("13.0"), text("12.1"), text("13.0"), text("12.5")];
        assert_eq!(
            cuda,
            [
                ("cupy-cuda13x", Some(&expected[0])),
                ("jax-cuda12-plugin", Some(&expected[1])),
                ("onnxruntime-gpu", Some(&expected[2])),
                ("tensorflow", Some(&expected[3])),
            ]
        );
        let Reading::Value(code) = &found.packages[3].device_code else {
            panic!("not read")
        };
        assert!(code.machine_code.contains_key("sm_60") && code.ptx.contains_key("compute_90"));
    }

    /// As these packages write them. A healthy machine has them all.
    #[test]
    fn code_of_usual_path_files_is_listed_and_no_defect() {
        let usual = [
            (
                "distutils-precedence.pth",
                "import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, 'local') == 'local'; enabled and __import__('_distutils_hack').add_shim(); ",
            ),
            ("_virtualenv.pth", "import _virtualenv"),
            (
                "__editable__.mine-0.1.pth",
                "import __editable___mine_0_1_finder; __editable___mine_0_1_finder.install()",
            ),
            (
                "a1_coverage.pth",
                "import sys; exec('try: import coverage; coverage.process_startup()\\nexcept ImportError: pass')",
            ),
            (
                "pytest-cov.pth",
                "import os, sys;exec('if \"COV_CORE_SOURCE\" in os.environ: from pytest_cov.embed import init; init()')",
            ),
            (
                "matplotlib-3.7.1-py3.10-nspkg.pth",
                "import sys, types, os;has_mfs = sys.version_info > (3, 5);p = os.path.join(sys._getframe(1).f_locals['sitedir'], *('mpl_toolkits',))",
            ),
            (
                "_numba_cuda_redirector.pth",
                "import _numba_cuda_redirector",
            ),
        ];
        let found = read_tree(&usual);
        assert_eq!(found.defects, []);
        assert_eq!(found.startup_code.len(), usual.len());
        // The name alone excuses nothing.
        let hostile = read_tree(&[(
            "distutils-precedence.pth",
            "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''",
        )]);
        assert_eq!(hostile.defects.len(), 1, "{:?}", hostile.defects);
    }

    #[test]
    fn damage_is_seen_without_importing() {
        let found = read_tree(&[
            (
                "torch-2.8.0.dist-info/RECORD",
                "torch/lib/libtorch_cuda.so,sha256=x,5\ntorch/lib/libc10.so,sha256=x,3\ntorch/a.py,,9\n",
            ),
            ("torch-2.9.0.dist-info/METADATA", ""),
            ("torch/lib/libc10.so", "four"),
            ("jax/core.py", ""),
            ("odd.pth", "import os; os.environ['LD_PRELOAD'] = 'x'\n"),
            ("editable.pth", "../../..\n# comment\n"),
        ]);
        let kinds: Vec<DefectKind> = found.defects.iter().map(|it| it.kind).collect();
        assert_eq!(
            kinds,
            [
                DefectKind::StartupCode,
                DefectKind::DamagedPackage,
                DefectKind::DuplicatePackage,
                DefectKind::NamespaceGhost
            ],
            "{:#?}",
            found.defects
        );
        let damage = &found.defects[1].text;
        assert!(
            damage.contains("libtorch_cuda.so is absent") && damage.contains("has 4 bytes"),
            "{damage}"
        );
        assert_eq!(found.added.len(), 1);
    }
}
