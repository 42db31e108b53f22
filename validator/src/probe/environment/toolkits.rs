//! Toolkits that concern one environment or one user: conda, Spack, module files; and which `nvcc`
//! a shell finds.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::super::host::Sysroot;
use super::super::host::toolkits::{is_toolkit, toolkit_at};
use validator_core::facts::{
    AvailableModule, CudaToolkit, CudaToolkitKind as Kind, PythonEnvironment,
    PythonEnvironmentKind, Reading,
};

/// Where module files lie besides `MODULEPATH`.
const MODULE_PATHS: [&str; 5] = [
    "/usr/share/modulefiles",
    "/etc/modulefiles",
    "/usr/share/Modules/modulefiles",
    "/opt/modulefiles",
    "/cm/shared/modulefiles",
];
const SPACK: [&str; 3] = [
    "/opt/spack/opt/spack",
    "/spack/opt/spack",
    "/usr/local/spack/opt/spack",
];

/// Toolkits inside of environments, besides those of the machine.
pub(super) fn add(
    root: &Sysroot,
    pythons: &[PythonEnvironment],
    modules: &[AvailableModule],
    toolkits: &mut Vec<CudaToolkit>,
) {
    for environment in pythons {
        if environment.kind == PythonEnvironmentKind::Conda {
            add_conda(root, &environment.prefix, toolkits);
        }
        add_wheels(environment, toolkits);
    }
    for spack in SPACK {
        let patterns = [format!("{spack}/*/*/cuda-*"), format!("{spack}/*/cuda-*")];
        for path in patterns.iter().flat_map(|it| root.matching(it)) {
            add_at(root, &path, Kind::Spack, toolkits);
        }
    }
    for path in modules.iter().filter_map(|it| it.changes.get("PATH")) {
        for folder in path.split(':') {
            let prefix = folder.trim_end_matches('/').trim_end_matches("/bin");
            add_at(root, prefix, Kind::Module, toolkits);
        }
    }
}

fn add_at(root: &Sysroot, path: &str, kind: Kind, toolkits: &mut Vec<CudaToolkit>) {
    let Some(resolved) = root.resolve(path).filter(|it| is_toolkit(root, it)) else {
        return;
    };
    if !toolkits.iter().any(|it| it.path == resolved) {
        toolkits.push(toolkit_at(root, &resolved, kind));
    }
}

/// conda's packages name their versions: `cuda-nvcc-12.4.131-0.json`,
/// `cudatoolkit-11.8.0-h4ba93d1_0.json`.
fn add_conda(root: &Sysroot, prefix: &str, toolkits: &mut Vec<CudaToolkit>) {
    let names = root
        .names(&format!("{prefix}/conda-meta"))
        .unwrap_or_default();
    let version_of = |package: &str| {
        names.iter().find_map(|name| {
            let version = name.strip_prefix(package)?.strip_prefix('-')?;
            version
                .starts_with(|it: char| it.is_ascii_digit())
                .then(|| {
                    version
                        .split('-')
                        .next()
                        .unwrap_or(version)
                        .splitn(3, '.')
                        .take(2)
                        .collect::<Vec<_>>()
                        .join(".")
                })
        })
    };
    let version = ["cuda-version", "cuda-nvcc", "cuda-cudart", "cudatoolkit"]
        .iter()
        .find_map(|it| version_of(it));
    let nvcc = format!("{prefix}/bin/nvcc");
    let nvcc = root.exists(&nvcc).then_some(nvcc);
    if (version.is_some() || nvcc.is_some()) && !toolkits.iter().any(|it| it.path == prefix) {
        toolkits.push(CudaToolkit {
            path: prefix.to_owned(),
            version: version.map_or_else(
                || {
                    Reading::NotRead(format!(
                        "no package below {prefix}/conda-meta names a version"
                    ))
                },
                Reading::Value,
            ),
            kind: Kind::Conda,
            nvcc,
            links: Vec::new(),
        });
    }
}

fn add_wheels(environment: &PythonEnvironment, toolkits: &mut Vec<CudaToolkit>) {
    let runtimes = environment
        .packages
        .iter()
        .filter(|it| it.name.starts_with("nvidia-cuda-runtime"));
    for runtime in runtimes {
        if let Reading::Value(version) = &runtime.cuda
            && !toolkits.iter().any(|it| it.path == runtime.path)
        {
            toolkits.push(CudaToolkit {
                path: runtime.path.clone(),
                version: Reading::Value(version.clone()),
                kind: Kind::PythonWheel,
                ..CudaToolkit::default()
            });
        }
    }
}

/// The `nvcc` that a shell finds: in `path`, or in a folder that a file of the system's profile
/// names.
pub(super) fn nvcc_on_path(
    root: &Sysroot,
    path: &[String],
    toolkits: &[CudaToolkit],
) -> Option<String> {
    let in_path = path
        .iter()
        .map(|it| format!("{}/nvcc", it.trim_end_matches('/')))
        .find(|it| root.exists(it));
    if in_path.is_some() {
        return in_path;
    }
    let mut files = vec![
        "/etc/environment".to_owned(),
        "/etc/profile".to_owned(),
        "/etc/bash.bashrc".to_owned(),
    ];
    files.extend(root.matching("/etc/profile.d/*.sh"));
    let texts: Vec<String> = files.iter().filter_map(|it| root.text(it).ok()).collect();
    let is_named = |folder: &str| {
        let lines = texts.iter().flat_map(|it| it.lines());
        lines
            .filter(|it| it.contains("PATH") && !it.trim_start().starts_with('#'))
            .any(|it| it.contains(folder))
    };
    toolkits
        .iter()
        .filter(|it| it.nvcc.is_some())
        .find_map(|toolkit| {
            let mut prefixes = toolkit.links.iter().chain([&toolkit.path]);
            prefixes
                .find(|it| is_named(&format!("{it}/bin")))
                .map(|it| format!("{it}/bin/nvcc"))
        })
}

/// Runs an `nvcc` whose files name no version. Only a file that root owns is run.
pub(super) fn ask_nvcc(toolkits: &mut [CudaToolkit]) {
    use std::os::unix::fs::MetadataExt as _;
    for toolkit in toolkits
        .iter_mut()
        .filter(|it| it.version.value().is_none())
    {
        let Some(nvcc) = toolkit.nvcc.clone() else {
            continue;
        };
        let is_safe =
            std::fs::metadata(&nvcc).is_ok_and(|it| it.uid() == 0 && it.mode() & 0o022 == 0);
        if !is_safe {
            continue;
        }
        if let Some(version) = answer_of(&nvcc).and_then(|it| version_of_answer(&it)) {
            toolkit.version = Reading::Value(version);
        }
    }
}

/// What `nvcc --version` prints, within a second.
fn answer_of(nvcc: &str) -> Option<String> {
    const DEADLINE: Duration = Duration::from_secs(1);
    let mut child = Command::new(nvcc)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let begin = Instant::now();
    while child.try_wait().ok()?.is_none() {
        if begin.elapsed() > DEADLINE {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut text = String::new();
    std::io::Read::read_to_string(child.stdout.as_mut()?, &mut text).ok()?;
    Some(text)
}

/// `Cuda compilation tools, release 12.8, V12.8.93`.
fn version_of_answer(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("release ")?;
    let version = rest.split(',').next()?.trim();
    version
        .split('.')
        .all(|it| it.parse::<u32>().is_ok())
        .then(|| version.to_owned())
}

/// Module files about CUDA and Python: read, never run.
pub(super) fn modules(root: &Sysroot, module_path: &[String]) -> Vec<AvailableModule> {
    const MODULES_MAXIMUM: usize = 200;
    let mut modules = Vec::new();
    let folders = module_path.iter().map(String::as_str).chain(MODULE_PATHS);
    let mut seen: Vec<&str> = Vec::new();
    for folder in folders {
        if seen.contains(&folder) {
            continue;
        }
        seen.push(folder);
        for pattern in [format!("{folder}/*"), format!("{folder}/*/*")] {
            for path in root.matching(&pattern) {
                if root.is_folder(&path) || modules.len() >= MODULES_MAXIMUM {
                    continue;
                }
                let changes = changes(&root.text(&path).unwrap_or_default());
                let name = path
                    .trim_start_matches(folder)
                    .trim_start_matches('/')
                    .trim_end_matches(".lua");
                let concerns = [
                    "cuda",
                    "python",
                    "conda",
                    "torch",
                    "nvhpc",
                    "jax",
                    "tensorflow",
                ];
                let lower = name.to_lowercase();
                if !changes.is_empty() && concerns.iter().any(|it| lower.contains(it)) {
                    modules.push(AvailableModule {
                        name: name.to_owned(),
                        path: path.clone(),
                        changes,
                    });
                }
            }
        }
    }
    modules
}

/// `prepend-path PATH /opt/cuda/bin` of Tcl modules and `prepend_path("PATH", "/opt/cuda/bin")` of
/// Lua ones, with variables that the file itself sets.
fn changes(text: &str) -> BTreeMap<String, String> {
    const NAMES: [&str; 5] = [
        "PATH",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "CUDA_HOME",
        "CUDA_PATH",
    ];
    let mut variables: Vec<(String, String)> = Vec::new();
    let mut changes: BTreeMap<String, String> = BTreeMap::new();
    for line in text.lines() {
        let is_separator = |it: char| it.is_whitespace() || "(),\"{}=".contains(it);
        let words: Vec<&str> = line
            .split(is_separator)
            .filter(|it| !it.is_empty())
            .collect();
        let expand = |word: &str| {
            variables
                .iter()
                .fold(word.to_owned(), |text, (name, value)| {
                    text.replace(&format!("${name}"), value)
                })
        };
        match words[..] {
            ["set", name, value, ..] => {
                let value = expand(value);
                variables.push((name.to_owned(), value));
            }
            ["local", name, value, ..] => variables.push((name.to_owned(), value.to_owned())),
            [
                "prepend-path" | "prepend_path" | "append-path" | "append_path" | "setenv",
                name,
                value,
                ..,
            ] if NAMES.contains(&name) => {
                // `pathJoin(base, "bin")` of Lua.
                let value = match (value, words.get(3), words.get(4)) {
                    ("pathJoin", Some(base), Some(rest)) => {
                        let base = variables
                            .iter()
                            .find(|(name, _)| name == base)
                            .map_or(*base, |(_, value)| value.as_str());
                        format!("{base}/{rest}")
                    }
                    _ => expand(value),
                };
                let entry = changes.entry(name.to_owned()).or_default();
                if !entry.is_empty() {
                    entry.push(':');
                }
                entry.push_str(&value);
            }
            _ => {}
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::{changes, version_of_answer};

    #[test]
    fn module_files_of_both_languages() {
        let tcl = changes(
            "#%Module\nset root /opt/cuda-12.8\nprepend-path PATH $root/bin\nprepend-path LD_LIBRARY_PATH $root/lib64\nprepend-path MANPATH $root/man\n",
        );
        assert_eq!(tcl["PATH"], "/opt/cuda-12.8/bin");
        assert_eq!(tcl["LD_LIBRARY_PATH"], "/opt/cuda-12.8/lib64");
        assert_eq!(tcl.len(), 2);
        let lua = changes(
            "local base = \"/opt/python/3.9\"\nprepend_path(\"PATH\", pathJoin(base, \"bin\"))\nsetenv(\"CUDA_HOME\", \"/opt/cuda\")\n",
        );
        assert_eq!(lua["PATH"], "/opt/python/3.9/bin");
        assert_eq!(lua["CUDA_HOME"], "/opt/cuda");
    }

    #[test]
    fn the_compilers_answer() {
        let text = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.8, V12.8.93\n";
        assert_eq!(version_of_answer(text).as_deref(), Some("12.8"));
        assert_eq!(version_of_answer("bash: nvcc: not found"), None);
    }
}
