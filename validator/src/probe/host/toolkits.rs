//! CUDA toolkits, Python wheels of the CUDA runtime, `cuda-compat` folders and GSP firmware.

use super::loader::{LoaderPath, version_in_name};
use super::sysroot::{Sysroot, file_name};
use crate::probe::json::at;
use validator_core::facts::{CudaCompatPackage, CudaToolkit, CudaToolkitKind, Reading};

/// Where Python keeps packages; each `*` is one folder. Virtual environments elsewhere are found
/// when they are active.
const SITE_PACKAGES: [&str; 12] = [
    "/usr/lib/python3*/*-packages",
    "/usr/local/lib/python3*/*-packages",
    "/usr/lib64/python3*/site-packages",
    "/opt/conda/lib/python3*/site-packages",
    "/opt/conda/envs/*/lib/python3*/site-packages",
    "/opt/miniconda3/lib/python3*/site-packages",
    "/opt/*/lib/python3*/site-packages",
    "/opt/*/venv/lib/python3*/site-packages",
    "/root/.venv/lib/python3*/site-packages",
    "/home/*/.venv/lib/python3*/site-packages",
    "/home/*/venv/lib/python3*/site-packages",
    "/home/*/miniconda3/lib/python3*/site-packages",
];

/// Where toolkits are installed: NVIDIA's packages, distributions (Debian has `/usr/lib/cuda`, Arch
/// `/opt/cuda`), the HPC SDK.
const TOOLKIT_FOLDERS: [(&str, CudaToolkitKind); 5] = [
    ("/usr/local/cuda*", CudaToolkitKind::Toolkit),
    ("/opt/cuda*", CudaToolkitKind::Toolkit),
    ("/usr/lib/cuda", CudaToolkitKind::Toolkit),
    ("/opt/nvidia/cuda*", CudaToolkitKind::Toolkit),
    (
        "/opt/nvidia/hpc_sdk/Linux_*/*/cuda/*",
        CudaToolkitKind::HpcSdk,
    ),
];

/// Folders named by the environment, besides the usual places.
#[derive(Clone, Debug, Default)]
pub(in crate::probe) struct NamedFolders {
    /// `CUDA_HOME` and `CUDA_PATH`.
    pub(super) toolkits: Vec<String>,
    /// `VIRTUAL_ENV` and `CONDA_PREFIX`.
    pub(super) python_prefixes: Vec<String>,
}

impl NamedFolders {
    /// Folders of toolkits alone.
    pub(in crate::probe) fn of(toolkits: Vec<String>) -> Self {
        Self {
            toolkits,
            python_prefixes: Vec::new(),
        }
    }

    pub(super) fn of_environment() -> Self {
        let values = |names: [&str; 2]| {
            let values = names.iter().filter_map(|name| std::env::var(name).ok());
            values.filter(|it| it.starts_with('/')).collect()
        };
        Self {
            toolkits: values(["CUDA_HOME", "CUDA_PATH"]),
            python_prefixes: values(["VIRTUAL_ENV", "CONDA_PREFIX"]),
        }
    }
}

pub(in crate::probe) fn cuda_toolkits(
    root: &Sysroot,
    named: &NamedFolders,
) -> Reading<Vec<CudaToolkit>> {
    let usual = TOOLKIT_FOLDERS.iter().flat_map(|(pattern, kind)| {
        let folders = root.matching(pattern).into_iter();
        folders.map(|folder| (folder, *kind))
    });
    let named_toolkits = named.toolkits.iter().cloned();
    let folders = usual.chain(named_toolkits.map(|it| (it, CudaToolkitKind::Toolkit)));
    let mut toolkits: Vec<CudaToolkit> = Vec::new();
    for (folder, kind) in folders {
        let Some(path) = root.resolve(&folder) else {
            continue;
        };
        let position = toolkits.iter().position(|it| it.path == path);
        let position = position.or_else(|| {
            is_toolkit(root, &path).then(|| {
                toolkits.push(toolkit_at(root, &path, kind));
                toolkits.len() - 1
            })
        });
        let Some(toolkit) = position.and_then(|it| toolkits.get_mut(it)) else {
            continue;
        };
        if folder != toolkit.path && !toolkit.links.contains(&folder) {
            toolkit.links.push(folder);
        }
    }
    toolkits.extend(wheels(root, named));
    Reading::Value(toolkits)
}

/// The toolkit in a folder of which [`is_toolkit`] holds.
pub(in crate::probe) fn toolkit_at(
    root: &Sysroot,
    path: &str,
    kind: CudaToolkitKind,
) -> CudaToolkit {
    let nvcc = format!("{path}/bin/nvcc");
    CudaToolkit {
        version: toolkit_version(root, path),
        path: path.to_owned(),
        kind,
        nvcc: root.exists(&nvcc).then_some(nvcc),
        links: Vec::new(),
    }
}

/// A folder that holds a `compat` folder alone is a `cuda-compat` package's.
pub(in crate::probe) fn is_toolkit(root: &Sysroot, path: &str) -> bool {
    [
        "version.json",
        "version.txt",
        "bin/nvcc",
        "include/cuda.h",
        "lib64/libcudart.so",
    ]
    .iter()
    .any(|file| root.exists(&format!("{path}/{file}")))
        || !root
            .matching(&format!("{path}/lib64/libcudart.so*"))
            .is_empty()
}

fn toolkit_version(root: &Sysroot, path: &str) -> Reading<String> {
    let read = |file: &str| root.text(&format!("{path}/{file}")).ok();
    let version = read("version.json")
        .and_then(|text| version_of_json(&text))
        .or_else(|| read("version.txt").and_then(|text| version_of_text(&text)))
        .or_else(|| read("include/cuda.h").and_then(|text| version_of_header(&text)))
        .or_else(|| version_of_runtime(root, path));
    version.map_or_else(
        || {
            Reading::NotRead(format!(
                "none of version.json, version.txt, include/cuda.h and libcudart below {path} names a version"
            ))
        },
        Reading::Value,
    )
}

/// `libcudart.so.12.8.90`: the third number is the component's.
fn version_of_runtime(root: &Sysroot, path: &str) -> Option<String> {
    let names = ["lib64", "lib"].map(|it| root.names(&format!("{path}/{it}")).unwrap_or_default());
    names.into_iter().flatten().find_map(|name| {
        let version = name.strip_prefix("libcudart.so.")?;
        (version.split('.').count() > 2 && is_version(version)).then(|| major_minor(version))
    })
}

/// `{"cuda": {"name": "CUDA SDK", "version": "12.8.1"}, …}`
fn version_of_json(text: &str) -> Option<String> {
    let json: serde_json::Value = serde_json::from_str(text).ok()?;
    let version = at(&json, "/cuda/version").as_str()?;
    is_version(version).then(|| version.to_owned())
}

/// `CUDA Version 11.0.228`, of toolkits before 11.1; the third number is a build there, not an
/// update.
fn version_of_text(text: &str) -> Option<String> {
    let version = text
        .split_whitespace()
        .find(|word| word.contains('.') && is_version(word))?;
    Some(major_minor(version))
}

/// `#define CUDA_VERSION 12080`
fn version_of_header(text: &str) -> Option<String> {
    let number: u32 = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("#define CUDA_VERSION "))?
        .trim()
        .parse()
        .ok()?;
    Some(format!("{}.{}", number / 1000, number % 1000 / 10))
}

fn is_version(text: &str) -> bool {
    text.split('.').all(|part| part.parse::<u32>().is_ok())
}

fn major_minor(version: &str) -> String {
    version.splitn(3, '.').take(2).collect::<Vec<_>>().join(".")
}

/// `nvidia_cuda_runtime_cu12-12.8.90.dist-info`: major and minor are CUDA's, the third number is
/// the component's.
fn wheels(root: &Sysroot, named: &NamedFolders) -> Vec<CudaToolkit> {
    let named = named
        .python_prefixes
        .iter()
        .map(|prefix| format!("{prefix}/lib/python3*/site-packages"));
    let patterns = SITE_PACKAGES.iter().map(|it| (*it).to_owned()).chain(named);
    let mut wheels: Vec<CudaToolkit> = Vec::new();
    for pattern in patterns {
        for info in root.matching(&format!("{pattern}/nvidia_cuda_runtime*.dist-info")) {
            let Some(path) = root.resolve(&info) else {
                continue;
            };
            if wheels.iter().any(|it| it.path == path) {
                continue;
            }
            let name = file_name(&path).trim_end_matches(".dist-info");
            let version = name.rsplit_once('-').map(|(_, version)| version);
            wheels.push(CudaToolkit {
                version: version.filter(|it| is_version(it)).map_or_else(
                    || Reading::NotRead(format!("no version in the name {name}")),
                    |it| Reading::Value(major_minor(it)),
                ),
                path,
                kind: CudaToolkitKind::PythonWheel,
                ..CudaToolkit::default()
            });
        }
    }
    wheels
}

pub(super) fn cuda_compat(root: &Sysroot, loader: &LoaderPath) -> Reading<Vec<CudaCompatPackage>> {
    let mut packages: Vec<CudaCompatPackage> = Vec::new();
    let mut folders = root.matching("/usr/local/cuda*/compat");
    folders.extend(root.matching("/opt/cuda*/compat"));
    for folder in folders {
        let Some(path) = root.resolve(&folder) else {
            continue;
        };
        let names = root.names(&path).unwrap_or_default();
        let has_libcuda = names.iter().any(|name| name.starts_with("libcuda.so"));
        if !has_libcuda || packages.iter().any(|it| it.path == path) {
            continue;
        }
        packages.push(CudaCompatPackage {
            cuda_version: cuda_version_of_folder(&path),
            libcuda_version: names
                .iter()
                .filter(|name| name.starts_with("libcuda.so."))
                .find_map(|name| version_in_name(name)),
            on_loader_path: loader.selects(root, &path),
            path,
        });
    }
    Reading::Value(packages)
}

/// `/usr/local/cuda-13.0/compat` is of CUDA 13.0.
fn cuda_version_of_folder(path: &str) -> Option<String> {
    path.split('/')
        .filter_map(|component| component.strip_prefix("cuda-"))
        .find(|version| version.contains('.') && is_version(version))
        .map(str::to_owned)
}

/// Folders with GSP firmware; those named after a chip are nouveau's.
pub(super) fn gsp_firmware_versions(root: &Sysroot) -> Reading<Vec<String>> {
    let mut versions = Vec::new();
    for folder in ["/lib/firmware/nvidia", "/usr/lib/firmware/nvidia"] {
        for path in root.matching(&format!("{folder}/*")) {
            let version = file_name(&path);
            let is_new = is_version(version)
                && version.contains('.')
                && !versions.iter().any(|it| it == version);
            if is_new && !root.matching(&format!("{path}/gsp*")).is_empty() {
                versions.push(version.to_owned());
            }
        }
    }
    Reading::Value(versions)
}

#[cfg(test)]
mod tests {
    use super::super::sysroot::tests::tree;
    use super::*;

    #[test]
    fn toolkits_are_found_once_with_their_versions() {
        let (_folder, root) = tree(&[
            ("/usr/local/cuda", "->cuda-12.8"),
            ("/usr/local/cuda-12", "->/usr/local/cuda-12.8"),
            (
                "/usr/local/cuda-12.8/version.json",
                r#"{"cuda":{"name":"CUDA SDK","version":"12.8.1"}}"#,
            ),
            (
                "/usr/local/cuda-11.0/version.txt",
                "CUDA Version 11.0.228\n",
            ),
            (
                "/usr/local/cuda-12.2/include/cuda.h",
                "#ifndef X\n#define CUDA_VERSION 12020\n",
            ),
            ("/usr/local/cuda-12.9/bin/nvcc", ""),
            ("/usr/local/cuda-13.0/compat/libcuda.so.580.65.06", ""),
            ("/srv/cuda/version.json", r#"{"cuda":{"version":"13.0.2"}}"#),
        ]);
        let named = NamedFolders {
            toolkits: vec!["/srv/cuda".to_owned(), "/nowhere".to_owned()],
            ..NamedFolders::default()
        };
        let Reading::Value(toolkits) = cuda_toolkits(&root, &named) else {
            panic!("not read")
        };
        let found: Vec<_> = toolkits
            .iter()
            .map(|it| (it.path.as_str(), it.version.value().map(String::as_str)))
            .collect();
        assert_eq!(
            found,
            [
                ("/usr/local/cuda-12.8", Some("12.8.1")),
                ("/usr/local/cuda-11.0", Some("11.0")),
                ("/usr/local/cuda-12.2", Some("12.2")),
                ("/usr/local/cuda-12.9", None),
                ("/srv/cuda", Some("13.0.2")),
            ]
        );
    }

    #[test]
    fn wheels_of_python_environments() {
        let (_folder, root) = tree(&[
            (
                "/usr/local/lib/python3.12/dist-packages/nvidia_cuda_runtime_cu12-12.8.90.dist-info/RECORD",
                "",
            ),
            (
                "/venv/lib/python3.11/site-packages/nvidia_cuda_runtime-13.0.96.dist-info/RECORD",
                "",
            ),
            (
                "/usr/lib/python3.12/dist-packages/nvidia_cuda_nvcc_cu12-12.8.93.dist-info/RECORD",
                "",
            ),
        ]);
        let named = NamedFolders {
            python_prefixes: vec!["/venv".to_owned()],
            ..NamedFolders::default()
        };
        let Reading::Value(wheels) = cuda_toolkits(&root, &named) else {
            panic!("not read")
        };
        let versions: Vec<_> = wheels
            .iter()
            .map(|it| (it.kind, it.version.clone()))
            .collect();
        assert_eq!(
            versions,
            [
                (
                    CudaToolkitKind::PythonWheel,
                    Reading::Value("12.8".to_owned())
                ),
                (
                    CudaToolkitKind::PythonWheel,
                    Reading::Value("13.0".to_owned())
                ),
            ]
        );
    }

    #[test]
    fn compat_packages_and_whether_the_loader_takes_them() {
        let (_folder, root) = tree(&[
            ("/usr/local/cuda", "->cuda-13.0"),
            (
                "/usr/local/cuda-13.0/compat/libcuda.so.1",
                "->libcuda.so.580.65.06",
            ),
            ("/usr/local/cuda-13.0/compat/libcuda.so.580.65.06", ""),
            ("/usr/local/cuda-12.8/compat/README", ""),
        ]);
        let loader = LoaderPath::read(&root, Some("/usr/local/cuda/compat"));
        assert_eq!(
            cuda_compat(&root, &loader),
            Reading::Value(vec![CudaCompatPackage {
                path: "/usr/local/cuda-13.0/compat".to_owned(),
                cuda_version: Some("13.0".to_owned()),
                libcuda_version: Some("580.65.06".to_owned()),
                on_loader_path: true,
            }])
        );
        let Reading::Value(off_path) = cuda_compat(&root, &LoaderPath::default()) else {
            panic!("not read")
        };
        assert!(!off_path[0].on_loader_path);
    }

    #[test]
    fn firmware_of_the_driver_and_not_of_nouveau() {
        let (_folder, root) = tree(&[
            ("/lib", "->usr/lib"),
            ("/usr/lib/firmware/nvidia/580.159.04/gsp_ga10x.bin", ""),
            ("/usr/lib/firmware/nvidia/ga102/gsp/gsp-535.113.01.bin", ""),
            ("/usr/lib/firmware/nvidia/570.86.15/README", ""),
        ]);
        assert_eq!(
            gsp_firmware_versions(&root),
            Reading::Value(vec!["580.159.04".to_owned()])
        );
    }
}
