//! Where cuBLASLt lies on a machine, and which of its copies works.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::cuda::Cublaslt;

/// The oldest major version with the functions that a burn calls.
const OLDEST_MAJOR: u32 = 11;
/// The newest major version that is requested from the loader by name. Folders may hold newer ones.
const NEWEST_MAJOR: u32 = 19;
/// Copies that are tried at most: loading one that does not work costs time.
const ATTEMPTS_MAXIMUM: usize = 6;

/// Folders as they are, with one `*` a part, below which libraries lie.
const USUAL_FOLDERS: [&str; 7] = [
    "/usr/local/cuda*/lib64",
    "/usr/local/cuda*/targets/*-linux/lib",
    "/opt/cuda*/lib64",
    "/opt/cuda*/targets/*-linux/lib",
    "/opt/nvidia/hpc_sdk/Linux_*/*/math_libs/lib64",
    "/opt/nvidia/hpc_sdk/Linux_*/*/math_libs/*/lib64",
    "/opt/nvidia/*/lib64",
];
/// Below a Python environment's prefix.
const IN_PYTHON: [&str; 4] = [
    "lib/python3*/site-packages/nvidia/*/lib",
    "lib/python3*/dist-packages/nvidia/*/lib",
    "lib64/python3*/site-packages/nvidia/*/lib",
    "lib",
];
const PYTHON_PREFIXES: [&str; 4] = ["/usr", "/usr/local", "/opt/conda", "/opt/*/.venv"];

/// The folders that the environment names.
#[derive(Clone, Debug, Default)]
pub(crate) struct Surroundings {
    /// `CUDA_HOME` and `CUDA_PATH`.
    toolkits: Vec<PathBuf>,
    /// `VIRTUAL_ENV`, `CONDA_PREFIX`, and the prefixes of every `python3` on `PATH`.
    python_prefixes: Vec<PathBuf>,
    /// `LD_LIBRARY_PATH`.
    library_folders: Vec<PathBuf>,
}

impl Surroundings {
    pub(crate) fn of_environment() -> Self {
        let folders = |name: &str| -> Vec<PathBuf> {
            std::env::var_os(name)
                .map(|value| std::env::split_paths(&value).collect())
                .unwrap_or_default()
        };
        let absolute = |names: [&str; 2]| -> Vec<PathBuf> {
            let values = names.iter().flat_map(|name| folders(name));
            values.filter(|it| it.is_absolute()).collect()
        };
        let mut python_prefixes = absolute(["VIRTUAL_ENV", "CONDA_PREFIX"]);
        let on_path = folders("PATH");
        python_prefixes.extend(
            on_path
                .iter()
                .filter(|folder| folder.join("python3").exists())
                .filter_map(|folder| folder.parent().map(Path::to_owned)),
        );
        Self {
            toolkits: absolute(["CUDA_HOME", "CUDA_PATH"]),
            python_prefixes,
            library_folders: folders("LD_LIBRARY_PATH"),
        }
    }

    fn folders(&self) -> Vec<PathBuf> {
        let mut folders = self.library_folders.clone();
        for toolkit in &self.toolkits {
            folders.extend(["lib64", "lib"].map(|it| toolkit.join(it)));
            folders.extend(matching(&toolkit.join("targets/*-linux/lib")));
        }
        let prefixes = self.python_prefixes.iter().cloned();
        let usual = PYTHON_PREFIXES
            .iter()
            .flat_map(|it| matching(Path::new(it)));
        for prefix in prefixes.chain(usual) {
            folders.extend(IN_PYTHON.iter().flat_map(|it| matching(&prefix.join(it))));
        }
        folders.extend(USUAL_FOLDERS.iter().flat_map(|it| matching(Path::new(it))));
        folders
    }

    /// The library's files, the newest version first, each once however many links lead to it.
    /// Names without a folder are for the loader's own search.
    pub(crate) fn candidates(&self) -> Vec<PathBuf> {
        let mut seen = BTreeSet::new();
        let mut found: Vec<(Vec<u32>, PathBuf)> = Vec::new();
        for folder in self.folders() {
            let Ok(entries) = std::fs::read_dir(&folder) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name();
                let Some(version) = name.to_str().and_then(version_in_name) else {
                    continue;
                };
                let Ok(file) = entry.path().canonicalize() else {
                    continue;
                };
                // The target of a link often shows more of its version.
                let full = file.file_name().and_then(|it| it.to_str());
                let version = full.and_then(version_in_name).unwrap_or(version);
                if version[0] >= OLDEST_MAJOR && seen.insert(file) {
                    found.push((version, entry.path()));
                }
            }
        }
        for major in OLDEST_MAJOR..=NEWEST_MAJOR {
            found.push((vec![major], format!("libcublasLt.so.{major}").into()));
        }
        // Of one version the file that was found first; stable.
        found.sort_by(|(a, _), (b, _)| b.cmp(a));
        found.into_iter().map(|(_, path)| path).collect()
    }
}

/// `libcublasLt.so.13.1.0.3` gives 13, 1, 0, 3. The name without a version is a link for compilers,
/// next to one with it.
fn version_in_name(name: &str) -> Option<Vec<u32>> {
    let version = name.strip_prefix("libcublasLt.so.")?;
    version.split('.').map(|part| part.parse().ok()).collect()
}

/// The folders that fit a pattern in which each part may have one `*`.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::new()];
    for part in pattern.components() {
        let part = part.as_os_str();
        let Some((start, end)) = part.to_str().and_then(|it| it.split_once('*')) else {
            for folder in &mut folders {
                folder.push(part);
            }
            continue;
        };
        folders = folders
            .iter()
            .filter_map(|folder| std::fs::read_dir(folder).ok())
            .flat_map(Iterator::flatten)
            .filter(|entry| {
                let name = entry.file_name();
                name.to_str().is_some_and(|name| {
                    name.len() >= start.len() + end.len()
                        && name.starts_with(start)
                        && name.ends_with(end)
                })
            })
            .map(|entry| entry.path())
            .collect();
        folders.sort();
    }
    folders.retain(|it| it.is_dir());
    folders
}

/// The newest copy that works on this GPU, or in one line why there is none. The calling thread
/// must have a context.
pub(crate) fn find() -> Result<Rc<Cublaslt>, String> {
    let mut failures = Vec::new();
    let by_the_loader = |path: &Path| path.parent() == Some(Path::new(""));
    let mut attempts = 0;
    for path in Surroundings::of_environment().candidates() {
        if !by_the_loader(&path) {
            attempts += 1;
            if attempts > ATTEMPTS_MAXIMUM {
                continue;
            }
        }
        match Cublaslt::load(&path) {
            Ok(cublaslt) => return Ok(cublaslt),
            // That the loader knows no such name is no news.
            Err(_) if by_the_loader(&path) => {}
            Err(error) => failures.push(format!("{}: {error}", path.display())),
        }
    }
    if failures.is_empty() {
        return Err("no cuBLASLt is installed".to_owned());
    }
    Err(format!("no cuBLASLt works: {}", failures.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(root: &Path, file: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        std::fs::write(path, "").expect("written");
    }

    #[test]
    fn the_newest_version_comes_first_and_each_file_once() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        touch(root, "toolkit/lib64/libcublasLt.so.12.9.1.4");
        touch(
            root,
            "venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcublasLt.so.13",
        );
        touch(root, "venv/lib/python3.12/site-packages/nvidia/cudnn/lib/x");
        touch(root, "libraries/libcublasLt.so.10.1");
        touch(root, "libraries/libcublasLt_static.a");
        for link in ["libcublasLt.so.12", "libcublasLt.so"] {
            let link = root.join("toolkit/lib64").join(link);
            std::os::unix::fs::symlink("libcublasLt.so.12.9.1.4", link).expect("linked");
        }
        let surroundings = Surroundings {
            toolkits: vec![root.join("toolkit")],
            python_prefixes: vec![root.join("venv")],
            library_folders: vec![root.join("libraries"), root.join("absent")],
        };
        let found: Vec<PathBuf> = surroundings
            .candidates()
            .into_iter()
            .filter(|it| it.starts_with(root))
            .collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].ends_with("cu13/lib/libcublasLt.so.13"));
        let name = found[1].file_name().and_then(|it| it.to_str());
        assert!(name.is_some_and(|it| it.starts_with("libcublasLt.so.12")));
    }

    #[test]
    fn names_for_the_loader_are_asked_too() {
        let candidates = Surroundings::default().candidates();
        assert!(candidates.contains(&"libcublasLt.so.12".into()));
    }

    #[test]
    fn versions_are_numbers() {
        assert_eq!(
            version_in_name("libcublasLt.so.13.1.0.3"),
            Some(vec![13, 1, 0, 3])
        );
        for other in [
            "libcublasLt.so",
            "libcublasLt_static.a",
            "libcublas.so.13",
            "libcublasLt.so.alt",
        ] {
            assert_eq!(version_in_name(other), None);
        }
    }
}
