//! Python environments by the files that make them.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;

use super::super::host::Sysroot;
use super::walk::Walk;
use super::{Request, elf, packages};
use crate::probe::json::at;
use validator_core::facts::{
    DefectKind, EnvironmentDefect, PythonEnvironment, PythonEnvironmentKind as Kind, Reading,
};

/// Folders below a home that hold environments, each `*` one of them.
const BELOW_A_HOME: [(&str, Kind); 22] = [
    ("miniconda3", Kind::Conda),
    ("anaconda3", Kind::Conda),
    ("miniforge3", Kind::Conda),
    ("mambaforge", Kind::Conda),
    ("micromamba", Kind::Conda),
    ("miniconda3/envs/*", Kind::Conda),
    ("anaconda3/envs/*", Kind::Conda),
    ("miniforge3/envs/*", Kind::Conda),
    ("mambaforge/envs/*", Kind::Conda),
    ("micromamba/envs/*", Kind::Conda),
    (".conda/envs/*", Kind::Conda),
    (".pyenv/versions/*", Kind::Pyenv),
    (".pyenv/versions/*/envs/*", Kind::Venv),
    (".local/share/uv/python/*", Kind::Uv),
    (".local/share/uv/tools/*", Kind::Uv),
    (".cache/pypoetry/virtualenvs/*", Kind::Poetry),
    (".local/share/pipx/venvs/*", Kind::Pipx),
    (".local/pipx/venvs/*", Kind::Pipx),
    (".pixi/envs/*", Kind::Pixi),
    (".local/share/virtualenvs/*", Kind::Venv),
    (".local/share/hatch/env/virtual/*/*/*", Kind::Venv),
    (".virtualenvs/*", Kind::Venv),
];

/// Folders of the machine that hold environments.
const OF_THE_MACHINE: [(&str, Kind); 9] = [
    ("/opt/conda", Kind::Conda),
    ("/opt/conda/envs/*", Kind::Conda),
    ("/opt/*conda3", Kind::Conda),
    ("/opt/*conda3/envs/*", Kind::Conda),
    ("/opt/miniforge3/envs/*", Kind::Conda),
    ("/opt/pipx/venvs/*", Kind::Pipx),
    ("/opt/uv/python/*", Kind::Uv),
    ("/opt/pyenv/versions/*", Kind::Pyenv),
    ("/opt/spack/opt/spack/*/*/python-*", Kind::Spack),
];

/// Where the walk begins.
const WALKED: [&str; 6] = ["/opt", "/srv", "/home", "/root", "/workspace", "/app"];

/// Where kernels of Jupyter are described.
const KERNELS: [&str; 3] = [
    "/usr/share/jupyter/kernels/*",
    "/usr/local/share/jupyter/kernels/*",
    "/opt/*/share/jupyter/kernels/*",
];

/// All environments, each once, in the order in which a person would name them: what is named, what
/// is active, the rest.
pub(super) fn find(root: &Sysroot, walk: &Walk<'_>, request: &Request) -> Vec<PythonEnvironment> {
    let mut search = Search {
        root,
        walk,
        request,
        found: Vec::new(),
        known: BTreeSet::new(),
    };
    search.named();
    search.active();
    search.homes_and_machine();
    search.modules();
    search.kernels();
    search.system();
    search.walk();
    let mut found = search.found;
    found.sort_by_key(|it| (!it.named, !it.active));
    found
}

/// `.condarc`, as far as it names folders.
#[derive(serde::Deserialize)]
struct CondaConfiguration {
    #[serde(default)]
    envs_dirs: Vec<String>,
}

struct Search<'s> {
    root: &'s Sysroot,
    walk: &'s Walk<'s>,
    request: &'s Request,
    found: Vec<PythonEnvironment>,
    /// Device and inode of each prefix, with the interpreter's name where a prefix has several.
    known: BTreeSet<(u64, u64, String)>,
}

impl Search<'_> {
    fn named(&mut self) {
        for path in &self.request.named {
            let outside = Sysroot::default();
            // The path is this process's own, so that it may lie outside of a sysroot.
            let root = if self.root.exists(path) || self.root.is_this_machine() {
                self.root
            } else {
                &outside
            };
            let (prefix, interpreter) = if root.is_folder(path) {
                (path.trim_end_matches('/').to_owned(), None)
            } else {
                (prefix_of(path), Some(path.clone()))
            };
            if !root.exists(path) {
                continue;
            }
            let found = if let Some(interpreter) = interpreter {
                interpreter_environment(root, &prefix, &interpreter, Kind::Other)
            } else {
                environment_at(root, &prefix, Kind::Other).unwrap_or_else(|| PythonEnvironment {
                    prefix: prefix.clone(),
                    kind: Kind::Other,
                    interpreter: Reading::NotRead(format!("no interpreter in {prefix}/bin")),
                    defects: vec![EnvironmentDefect {
                        kind: DefectKind::InterpreterMissing,
                        text: format!("no interpreter in {prefix}/bin"),
                    }],
                    ..PythonEnvironment::default()
                })
            };
            self.add_from(
                root,
                PythonEnvironment {
                    named: true,
                    ..found
                },
            );
        }
    }

    fn active(&mut self) {
        for prefix in &self.request.active {
            if let Some(found) = environment_at(self.root, prefix, Kind::Other) {
                self.add(PythonEnvironment {
                    active: true,
                    ..found
                });
            }
        }
        for folder in &self.request.path {
            for name in ["python3", "python"] {
                let path = format!("{}/{name}", folder.trim_end_matches('/'));
                let real = self.root.real_path(&path);
                // Shims of pyenv are scripts.
                if !elf::is_elf(&real) {
                    continue;
                }
                let prefix = prefix_of(&path);
                let found = environment_at(self.root, &prefix, Kind::Other).unwrap_or_else(|| {
                    interpreter_environment(self.root, &prefix, &path, Kind::Other)
                });
                let is_first = !self.found.iter().any(|it| it.active);
                self.add(PythonEnvironment {
                    active: is_first,
                    ..found
                });
            }
        }
    }

    fn homes_and_machine(&mut self) {
        for (pattern, kind) in OF_THE_MACHINE {
            self.matching(pattern, kind);
        }
        for home in homes(self.root, self.request) {
            if self.walk.is_on_network(&home) {
                continue;
            }
            for (pattern, kind) in BELOW_A_HOME {
                self.matching(&format!("{home}/{pattern}"), kind);
            }
            for path in self.conda_list(&home) {
                self.at(&path, Kind::Conda);
            }
            self.matching(
                &format!("{home}/.local/share/jupyter/kernels/*"),
                Kind::Jupyter,
            );
        }
    }

    /// conda's central list, and the folders of `.condarc`.
    fn conda_list(&self, home: &str) -> Vec<String> {
        let list = self
            .root
            .text(&format!("{home}/.conda/environments.txt"))
            .unwrap_or_default();
        let mut paths: Vec<String> = list
            .lines()
            .map(str::trim)
            .filter(|it| it.starts_with('/'))
            .map(str::to_owned)
            .collect();
        let condarc = self
            .root
            .text(&format!("{home}/.condarc"))
            .unwrap_or_default();
        if let Ok(configuration) = serde_yaml::from_str::<CondaConfiguration>(&condarc) {
            for folder in configuration.envs_dirs {
                let folder = folder
                    .strip_prefix('~')
                    .map_or(folder.clone(), |rest| format!("{home}{rest}"));
                paths.extend(self.root.matching(&format!("{folder}/*")));
            }
        }
        paths
    }

    fn matching(&mut self, pattern: &str, kind: Kind) {
        for path in self.root.matching(pattern) {
            self.at(&path, kind);
        }
    }

    fn at(&mut self, prefix: &str, kind: Kind) {
        if self.walk.is_on_network(prefix) {
            return;
        }
        if kind == Kind::Jupyter {
            self.kernel(prefix);
        } else if let Some(found) = environment_at(self.root, prefix, kind) {
            self.add(found);
        }
    }

    /// Prefixes that module files prepend to `PATH`.
    fn modules(&mut self) {
        for folder in &self.request.module_paths {
            self.at(&prefix_of(&format!("{folder}/python3")), Kind::Module);
        }
    }

    fn kernels(&mut self) {
        for pattern in KERNELS {
            self.matching(pattern, Kind::Jupyter);
        }
    }

    fn kernel(&mut self, folder: &str) {
        let text = self
            .root
            .text(&format!("{folder}/kernel.json"))
            .unwrap_or_default();
        let kernel: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        // A bare name is whatever the server's PATH has.
        let interpreter = at(&kernel, "/argv/0").as_str();
        let Some(interpreter) = interpreter.filter(|it| it.starts_with('/')) else {
            return;
        };
        let prefix = prefix_of(interpreter);
        let found = environment_at(self.root, &prefix, Kind::Jupyter).unwrap_or_else(|| {
            interpreter_environment(self.root, &prefix, interpreter, Kind::Jupyter)
        });
        self.add(found);
    }

    /// The interpreters of the distribution.
    fn system(&mut self) {
        for prefix in ["/usr", "/usr/local"] {
            for path in self.root.matching(&format!("{prefix}/bin/python3.*")) {
                let version = path.rsplit("/python").next().unwrap_or_default();
                let is_version = version.split('.').all(|it| it.parse::<u32>().is_ok());
                if is_version && elf::is_elf(&self.root.real_path(&path)) {
                    self.add(interpreter_environment(
                        self.root,
                        prefix,
                        &path,
                        Kind::System,
                    ));
                }
            }
        }
    }

    fn walk(&mut self) {
        let mut prefixes = Vec::new();
        for top in WALKED {
            self.walk.environments_below(top, &mut prefixes);
        }
        for prefix in prefixes {
            self.at(&prefix, Kind::Other);
        }
    }

    fn add(&mut self, found: PythonEnvironment) {
        self.add_from(self.root, found);
    }

    fn add_from(&mut self, root: &Sysroot, mut found: PythonEnvironment) {
        let Ok(metadata) = root.real_path(&found.prefix).metadata() else {
            return;
        };
        // /usr has an interpreter for each version of Python.
        let version = match found.kind {
            Kind::System | Kind::Other | Kind::Module => found
                .python_version
                .value()
                .and_then(|it| packages_version(it))
                .unwrap_or_default(),
            _ => String::new(),
        };
        let any = (metadata.dev(), metadata.ino(), String::new());
        let key = (metadata.dev(), metadata.ino(), version);
        if self.known.contains(&any) || !self.known.insert(key) {
            return;
        }
        read_packages(root, self.walk, self.request, &mut found);
        self.found.push(found);
    }
}

fn homes(root: &Sysroot, request: &Request) -> Vec<String> {
    let mut homes = vec!["/root".to_owned()];
    homes.extend(root.matching("/home/*"));
    homes.extend(request.home.clone());
    homes.sort();
    homes.dedup();
    homes
}

/// `/opt/venv` of `/opt/venv/bin/python`.
fn prefix_of(interpreter: &str) -> String {
    let folder = interpreter
        .rsplit_once('/')
        .map_or("", |(folder, _)| folder);
    let prefix = folder.strip_suffix("/bin").unwrap_or(folder);
    if prefix.is_empty() {
        "/usr".to_owned()
    } else {
        prefix.to_owned()
    }
}

/// `3.12` of `3.12.3`.
fn packages_version(version: &str) -> Option<String> {
    let mut parts = version.split('.');
    let (major, minor) = (parts.next()?, parts.next()?);
    Some(format!("{major}.{minor}"))
}

/// The environment at a prefix, if there is one.
fn environment_at(root: &Sysroot, prefix: &str, kind: Kind) -> Option<PythonEnvironment> {
    let configuration = root.text(&format!("{prefix}/pyvenv.cfg")).ok();
    let is_conda = root.is_folder(&format!("{prefix}/conda-meta"));
    let names = root.names(&format!("{prefix}/bin")).unwrap_or_default();
    let interpreter = ["python", "python3"]
        .into_iter()
        .find(|name| names.iter().any(|it| it == name))
        .map(str::to_owned)
        .or_else(|| names.iter().find(|it| is_interpreter_name(it)).cloned());
    if configuration.is_none() && interpreter.is_none() {
        return None;
    }
    let kind = match kind {
        Kind::Other | Kind::Jupyter | Kind::Module if is_conda => Kind::Conda,
        Kind::Other | Kind::Jupyter if configuration.is_some() => Kind::Venv,
        Kind::Other if prefix == "/usr" || prefix == "/usr/local" => Kind::System,
        kind => kind,
    };
    let mut found = PythonEnvironment {
        prefix: prefix.to_owned(),
        kind,
        ..PythonEnvironment::default()
    };
    let path = format!(
        "{prefix}/bin/{}",
        interpreter.as_deref().unwrap_or("python")
    );
    set_interpreter(root, &path, &mut found);
    found.python_version = version_of(root, &found, configuration.as_deref(), is_conda, &names);
    Some(found)
}

fn is_interpreter_name(name: &str) -> bool {
    name.strip_prefix("python3.")
        .is_some_and(|it| it.bytes().all(|byte| byte.is_ascii_digit()))
}

/// An interpreter by its own path, as in `/usr/bin/python3.11`.
fn interpreter_environment(
    root: &Sysroot,
    prefix: &str,
    path: &str,
    kind: Kind,
) -> PythonEnvironment {
    let kind = match kind {
        Kind::Other if prefix == "/usr" || prefix == "/usr/local" => Kind::System,
        kind => kind,
    };
    let mut found = environment_at(root, prefix, kind).unwrap_or_else(|| PythonEnvironment {
        prefix: prefix.to_owned(),
        kind,
        ..PythonEnvironment::default()
    });
    set_interpreter(root, path, &mut found);
    let resolved = root.resolve(path).unwrap_or_else(|| path.to_owned());
    let name = resolved.rsplit("/python").next().unwrap_or_default();
    if name.contains('.') && name.split('.').all(|it| it.parse::<u32>().is_ok()) {
        found.python_version = Reading::Value(name.to_owned());
    }
    found
}

fn set_interpreter(root: &Sysroot, path: &str, found: &mut PythonEnvironment) {
    // A link that leads out of a sysroot to this machine's interpreter is none of the tree's.
    if root.exists(path) || root.unresolved_path(path).exists() {
        found.interpreter = Reading::Value(path.to_owned());
        return;
    }
    let target = root
        .link_target(path)
        .map(|it| format!(", which is a link to {it}"))
        .unwrap_or_default();
    let text = format!("there is no interpreter {path}{target}");
    found.interpreter = Reading::NotRead(text.clone());
    found.defects.push(EnvironmentDefect {
        kind: DefectKind::InterpreterMissing,
        text,
    });
}

fn version_of(
    root: &Sysroot,
    found: &PythonEnvironment,
    configuration: Option<&str>,
    is_conda: bool,
    names: &[String],
) -> Reading<String> {
    let prefix = &found.prefix;
    let of_configuration = || {
        configuration?.lines().find_map(|line| {
            let (name, value) = line.split_once('=')?;
            let is_version = ["version", "version_info"].contains(&name.trim());
            // `3.12.3.final.0` of virtualenv.
            let numbers: Vec<&str> = value
                .trim()
                .split('.')
                .take_while(|it| it.parse::<u32>().is_ok())
                .take(3)
                .collect();
            (is_version && numbers.len() > 1).then(|| numbers.join("."))
        })
    };
    let of_conda = || {
        let names = root
            .names(&format!("{prefix}/conda-meta"))
            .ok()
            .filter(|_| is_conda)?;
        names.iter().find_map(|name| {
            let version = name.strip_prefix("python-")?.split('-').next()?;
            version
                .starts_with(|it: char| it.is_ascii_digit())
                .then(|| version.to_owned())
        })
    };
    let of_folder = || {
        let folders = ["lib", "lib64"].map(|it| root.matching(&format!("{prefix}/{it}/python3.*")));
        let folder = folders.into_iter().flatten().next()?;
        folder
            .rsplit("/python")
            .next()
            .map(|it| it.trim_end_matches('t').to_owned())
    };
    let of_name = || {
        names
            .iter()
            .find(|it| is_interpreter_name(it))
            .map(|it| it.trim_start_matches("python").to_owned())
    };
    of_configuration()
        .or_else(of_conda)
        .or_else(of_name)
        .or_else(of_folder)
        .map_or_else(
            || Reading::NotRead(format!("no file of {prefix} names the version of Python")),
            Reading::Value,
        )
}

/// Folders of packages in the order of `sys.path`, and what they hold.
fn read_packages(
    root: &Sysroot,
    walk: &Walk<'_>,
    request: &Request,
    found: &mut PythonEnvironment,
) {
    let version = found
        .python_version
        .value()
        .and_then(|it| packages_version(it));
    let mut folders = site_packages(root, found, version.as_deref(), request);
    let mut at = 0;
    let mut read: BTreeSet<String> = BTreeSet::new();
    while let Some(folder) = folders.get(at).filter(|_| at < 64).cloned() {
        at += 1;
        let Some(resolved) = root.resolve(&folder).filter(|it| read.insert(it.clone())) else {
            continue;
        };
        found.site_packages.push(folder.clone());
        let names = walk.names_in(root, &resolved);
        let of_folder = packages::read(root, &folder, &names);
        folders.extend(of_folder.added);
        found.defects.extend(of_folder.defects);
        found.startup_code.extend(of_folder.startup_code);
        for package in of_folder.packages {
            // The first on the path is the one that is imported.
            if found.package(&package.name).is_none() {
                found.packages.push(package);
            }
        }
    }
    found
        .packages
        .sort_by(|one, other| one.name.cmp(&other.name));
    add_mismatches(found);
}

fn site_packages(
    root: &Sysroot,
    found: &PythonEnvironment,
    version: Option<&str>,
    request: &Request,
) -> Vec<String> {
    let prefix = &found.prefix;
    let python = version.map_or_else(|| "python3.*".to_owned(), |it| format!("python{it}"));
    let mut patterns = Vec::new();
    let is_system = found.kind == Kind::System;
    if is_system {
        if let Some(home) = &request.home {
            patterns.push(format!("{home}/.local/lib/{python}/site-packages"));
        }
        patterns.push(format!("/usr/local/lib/{python}/dist-packages"));
        patterns.push(format!("/usr/local/lib/{python}/site-packages"));
        patterns.push(format!("/usr/local/lib64/{python}/site-packages"));
        patterns.push("/usr/lib/python3/dist-packages".to_owned());
    }
    for lib in ["lib", "lib64"] {
        patterns.push(format!("{prefix}/{lib}/{python}/site-packages"));
        patterns.push(format!("{prefix}/{lib}/{python}t/site-packages"));
    }
    if is_system {
        patterns.push(format!("{prefix}/lib/{python}/dist-packages"));
    }
    let mut folders: Vec<String> = request.python_path.clone();
    folders.extend(patterns.iter().flat_map(|it| root.matching(it)));
    let configuration = root
        .text(&format!("{prefix}/pyvenv.cfg"))
        .unwrap_or_default();
    let setting = |name: &str| {
        configuration.lines().find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        })
    };
    if setting("include-system-site-packages").is_some_and(|it| it.eq_ignore_ascii_case("true"))
        && let Some(home) = setting("home")
    {
        let base = PythonEnvironment {
            kind: if home.starts_with("/usr/bin") {
                Kind::System
            } else {
                Kind::Other
            },
            prefix: prefix_of(&format!("{home}/python")),
            ..PythonEnvironment::default()
        };
        folders.extend(site_packages(root, &base, version, request));
    }
    folders
}

/// Versions that do not go together, and packages of several sources.
fn add_mismatches(found: &mut PythonEnvironment) {
    let mut texts: Vec<(DefectKind, String)> = Vec::new();
    let named = |prefix: &str| -> Vec<String> {
        let packages = found.packages.iter();
        packages
            .filter(|it| it.name.starts_with(prefix))
            .map(|it| it.name.clone())
            .collect()
    };
    let cupy = named("cupy-cuda");
    if cupy.len() > 1 {
        texts.push((
            DefectKind::VersionMismatch,
            format!(
                "{} are both installed, and one overwrites the other",
                cupy.join(" and ")
            ),
        ));
    }
    if let Some(jaxlib) = found.package("jaxlib") {
        for part in found
            .packages
            .iter()
            .filter(|it| it.name.starts_with("jax-cuda"))
        {
            // A plugin's fourth number is a build of the same version.
            let base = |version: &str| version.split('.').take(3).collect::<Vec<_>>().join(".");
            if base(&part.version) != base(&jaxlib.version) {
                texts.push((
                    DefectKind::VersionMismatch,
                    format!(
                        "{} {} and jaxlib {} are of different versions",
                        part.name, part.version, jaxlib.version
                    ),
                ));
            }
        }
    }
    // cuDNN and NCCL of both CUDA majors have one folder: the last installation wins.
    for library in ["nvidia-cudnn-cu", "nvidia-nccl-cu"] {
        let both = named(library);
        if both.len() > 1 {
            texts.push((
                DefectKind::MixedPackages,
                format!(
                    "{} share one folder, and one overwrites the other",
                    both.join(" and ")
                ),
            ));
        }
    }
    found.defects.extend(
        texts
            .into_iter()
            .map(|(kind, text)| EnvironmentDefect { kind, text }),
    );
}
