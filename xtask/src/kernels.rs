//! `cargo xtask kernels`: builds the GPU kernels of `validator/src/workload/gemm/cuda` to PTX and
//! cubins, which are committed.
//!
//! To build the validator no CUDA toolkit is needed: NVIDIA's compiler comes from `PyPI`, pinned,
//! and only this task uses it. The manifest next to the results holds what they were made from, so
//! that a stale file is found without it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use xshell::{Shell, cmd};

use crate::tools::PythonTools;
use crate::workspace;

/// Sources, every `.cu` and `.cuh` of which counts.
const SOURCES: &str = "validator/src/workload/gemm/cuda";
/// Results, which hold nothing else.
const BUILT: &str = "validator/src/workload/gemm/built";
const MANIFEST: &str = "MANIFEST";
const NVRTC_SCRIPT: &str = "xtask/src/kernels_nvrtc.py";

/// CUDA 12.9 is the last release that compiles for `sm_70`, and its cubins load on every driver for
/// CUDA 12 and newer.
const TOOLCHAIN: PythonTools = PythonTools {
    name: "kernels",
    purpose: "compiling the GPU kernels",
    packages: &[
        "nvidia-cuda-nvcc-cu12==12.9.86",
        "nvidia-cuda-nvrtc-cu12==12.9.86",
        "nvidia-cuda-cuobjdump==13.5.37",
        "nvidia-cuda-nvdisasm==13.5.37",
    ],
    source_packages: &[],
};

/// Where the packages lie below the virtual environment's `lib/python3.*/site-packages`.
const NVRTC: &str = "nvidia/cuda_nvrtc/lib/libnvrtc.so.12";
const PTXAS: &str = "nvidia/cuda_nvcc/bin/ptxas";
const CUOBJDUMP: &str = "nvidia/cu13/bin/cuobjdump";

/// One source file and what is made of it.
struct Module {
    name: &'static str,
    /// Virtual architecture of the PTX; newer GPUs translate it when no cubin fits.
    architecture: &'static str,
    /// PTX ISA version written into the PTX, the oldest that has its instructions: a driver refuses
    /// PTX that is newer than itself. ptxas refuses an instruction that is newer than the version.
    ptx_version: &'static str,
    /// Real architectures with a cubin, which spares a start of up to a second; it serves newer
    /// minor versions too.
    cubins: &'static [&'static str],
}

/// PTX 6.4 is CUDA 10.1 (driver R418), 7.0 CUDA 11.0 (R450), 8.0 CUDA 12.0 (R525), 8.4 CUDA 12.4
/// (R550): NVIDIA's PTX ISA document, release notes.
const MODULES: [Module; 5] = [
    Module {
        name: "support",
        architecture: "70",
        ptx_version: "6.4",
        cubins: &["sm_80", "sm_90", "sm_100", "sm_120"],
    },
    Module {
        name: "gemm_sm70",
        architecture: "70",
        ptx_version: "6.4",
        cubins: &["sm_80", "sm_90", "sm_100", "sm_120"],
    },
    Module {
        name: "gemm_sm80",
        architecture: "80",
        ptx_version: "7.0",
        cubins: &["sm_80", "sm_90", "sm_100", "sm_120"],
    },
    Module {
        name: "gemm_sm89",
        architecture: "89",
        ptx_version: "8.4",
        cubins: &["sm_89", "sm_100", "sm_120"],
    },
    Module {
        name: "gemm_sm90a",
        architecture: "90a",
        ptx_version: "8.0",
        cubins: &["sm_90a"],
    },
];

/// The instruction that each Hopper kernel must be made of, and how many of it at least; anything
/// else is a slower path. FP32's are eight of K for 128 accumulators.
const HOPPER_INSTRUCTIONS: [(&str, &str, usize); 7] = [
    ("gemm_sm90a_bf16", "HGMMA.64x256x16.F32.BF16", 4),
    ("gemm_sm90a_f16", "HGMMA.64x256x16.F32", 4),
    ("gemm_sm90a_tf32", "HGMMA.64x256x8.F32.TF32", 4),
    ("gemm_sm90a_e4m3", "QGMMA.64x256x32.F32.E4M3.E4M3", 4),
    ("gemm_sm90a_s8", "IGMMA.64x256x32.S8.S8", 4),
    ("gemm_sm90a_f64", "DMMA.16x8x16", 4),
    ("gemm_sm90a_f32", "FFMA", 1024),
];

/// All of `built` together, because every byte of it is in every binary that ships.
const MAXIMUM_BUILT_BYTES: u64 = 2_500_000;

/// Builds the kernels, or with `check` reports whether the committed ones match the sources.
///
/// A check needs no compiler while the manifest agrees with every file. When it does not, the
/// kernels are built in another folder and compared, so that the message states whether only the
/// manifest is old or the kernels are.
pub(crate) fn run(sh: &Shell, check: bool) -> anyhow::Result<()> {
    let _folder = sh.push_dir(workspace::root());
    let difference = manifest_difference(sh)?;
    if check {
        let Some(difference) = difference else {
            println!("{BUILT} is up to date");
            return Ok(());
        };
        let built = build(sh)?;
        let stale = files_that_differ(sh, &built)?;
        if stale.is_empty() {
            bail!(
                "{BUILT}/{MANIFEST} is stale ({difference}), the kernels themselves are not; run `cargo xtask kernels` and commit the result"
            );
        }
        bail!(
            "{} in {BUILT} stale ({difference}); run `cargo xtask kernels` and commit the result",
            stale.join(", ")
        );
    }
    let built = build(sh)?;
    let stale = files_that_differ(sh, &built)?;
    install(sh, &built)?;
    if difference.is_none() && !stale.is_empty() {
        // The same sources and compiler gave other bytes: that must be known, not committed in
        // silence.
        bail!("rebuilding unchanged sources changed {}", stale.join(", "));
    }
    println!(
        "{} of {} files in {BUILT} changed",
        stale.len(),
        built.files.len()
    );
    Ok(())
}

/// What was built, by file name, in a folder of its own.
struct Built {
    folder: PathBuf,
    files: Vec<String>,
}

fn build(sh: &Shell) -> anyhow::Result<Built> {
    let python = TOOLCHAIN.install()?.join("python3");
    let packages = site_packages()?;
    let (nvrtc, ptxas) = (packages.join(NVRTC), packages.join(PTXAS));
    let folder = workspace::target().join("kernels");
    sh.remove_path(&folder)?;
    sh.create_dir(&folder)?;
    let mut files = Vec::new();
    for module in &MODULES {
        let name = module.name;
        let source = Path::new(SOURCES).join(format!("{name}.cu"));
        let ptx = folder.join(format!("{name}.ptx"));
        let architecture = format!("compute_{}", module.architecture);
        cmd!(
            sh,
            "{python} -I {NVRTC_SCRIPT} {nvrtc} {source} {architecture} {ptx}"
        )
        .quiet()
        .run()
        .with_context(|| format!("{} does not compile", source.display()))?;
        let text = with_ptx_version(&sh.read_file(&ptx)?, module.ptx_version)
            .with_context(|| ptx.display().to_string())?;
        sh.write_file(&ptx, text)?;
        files.push(format!("{name}.ptx"));
        for real in module.cubins {
            let file = format!("{name}.{real}.cubin");
            let cubin = folder.join(&file);
            cmd!(sh, "{ptxas} --gpu-name {real} {ptx} --output-file {cubin}")
                .quiet()
                .run()
                .with_context(|| format!("{name}.ptx does not assemble for {real}"))?;
            files.push(file);
        }
    }
    require_hopper_instructions(sh, &packages.join(CUOBJDUMP), &folder)?;
    require_size(&folder, &files)?;
    Ok(Built { folder, files })
}

/// The folder that pip filled; its name holds the version of Python.
fn site_packages() -> anyhow::Result<PathBuf> {
    let library = workspace::tools().join(TOOLCHAIN.name).join("lib");
    let entries = std::fs::read_dir(&library)
        .with_context(|| format!("{} cannot be read", library.display()))?;
    entries
        .flatten()
        .map(|entry| entry.path().join("site-packages"))
        .find(|path| path.join(PTXAS).exists())
        .with_context(|| format!("{PTXAS} is missing below {}", library.display()))
}

/// The same PTX with another ISA version.
fn with_ptx_version(ptx: &str, version: &str) -> anyhow::Result<String> {
    let mut replaced = 0;
    let lines = ptx.lines().map(|line| {
        if line.starts_with(".version ") {
            replaced += 1;
            format!(".version {version}\n")
        } else {
            format!("{line}\n")
        }
    });
    let text: String = lines.collect();
    ensure!(
        replaced == 1,
        "{replaced} lines start with `.version `, one is expected"
    );
    Ok(text)
}

fn require_hopper_instructions(sh: &Shell, cuobjdump: &Path, folder: &Path) -> anyhow::Result<()> {
    let cubin = folder.join("gemm_sm90a.sm_90a.cubin");
    // cuobjdump starts nvdisasm of the same folder.
    let tools = cuobjdump.parent().unwrap_or(cuobjdump);
    let search = std::env::join_paths(
        std::iter::once(tools.to_path_buf()).chain(
            std::env::var_os("PATH")
                .iter()
                .flat_map(std::env::split_paths),
        ),
    )?;
    for (kernel, instruction, least) in HOPPER_INSTRUCTIONS {
        let assembly = cmd!(sh, "{cuobjdump} --dump-sass --function {kernel} {cubin}")
            .env("PATH", &search)
            .quiet()
            .ignore_stderr()
            .read()?;
        let count = assembly
            .split_whitespace()
            .filter(|word| *word == instruction)
            .count();
        ensure!(
            count >= least,
            "{kernel} holds {instruction} {count} times, at least {least} are expected"
        );
    }
    Ok(())
}

fn require_size(folder: &Path, files: &[String]) -> anyhow::Result<()> {
    let mut bytes = 0;
    for file in files {
        bytes += std::fs::metadata(folder.join(file))?.len();
    }
    ensure!(
        bytes <= MAXIMUM_BUILT_BYTES,
        "the kernels are {bytes} bytes together, at most {MAXIMUM_BUILT_BYTES} are wanted in the binary"
    );
    Ok(())
}

/// Names of built files that are not committed as they are, and of committed ones that are not
/// built.
fn files_that_differ(sh: &Shell, built: &Built) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for file in &built.files {
        let new = sh.read_binary_file(built.folder.join(file))?;
        let old = sh.read_binary_file(Path::new(BUILT).join(file));
        if old.map_or(true, |old| old != new) {
            names.push(file.clone());
        }
    }
    names.extend(
        committed_files(sh)?
            .into_iter()
            .filter(|name| !built.files.contains(name)),
    );
    Ok(names)
}

fn install(sh: &Shell, built: &Built) -> anyhow::Result<()> {
    sh.create_dir(BUILT)?;
    for old in committed_files(sh)? {
        sh.remove_path(Path::new(BUILT).join(old))?;
    }
    for file in &built.files {
        sh.copy_file(built.folder.join(file), Path::new(BUILT).join(file))?;
    }
    sh.write_file(Path::new(BUILT).join(MANIFEST), manifest(sh)?)?;
    Ok(())
}

/// Everything in the folder of results but the manifest.
fn committed_files(sh: &Shell) -> anyhow::Result<Vec<String>> {
    if !sh.path_exists(BUILT) {
        return Ok(Vec::new());
    }
    let names = sh.read_dir(BUILT)?.into_iter().filter_map(|path| {
        path.file_name()
            .and_then(|name| name.to_str())
            .map(str::to_owned)
    });
    Ok(names.filter(|name| name != MANIFEST).collect())
}

/// What the results were made with and from, and what they are: one line each, sorted, hashed as
/// git does.
fn manifest(sh: &Shell) -> anyhow::Result<String> {
    let mut lines: Vec<String> = TOOLCHAIN
        .packages
        .iter()
        .map(|package| format!("compiler {package}"))
        .collect();
    for module in &MODULES {
        lines.push(format!(
            "module {} compute_{} PTX {} {}",
            module.name,
            module.architecture,
            module.ptx_version,
            module.cubins.join(" ")
        ));
    }
    lines.push(hash_line(sh, "script", Path::new(NVRTC_SCRIPT))?);
    for path in sh.read_dir(SOURCES)? {
        let is_source = path
            .extension()
            .is_some_and(|extension| extension == "cu" || extension == "cuh");
        if is_source {
            lines.push(hash_line(sh, "source", &path)?);
        }
    }
    for file in committed_files(sh)? {
        lines.push(hash_line(sh, "result", &Path::new(BUILT).join(file))?);
    }
    lines.sort();
    Ok(lines.join("\n") + "\n")
}

fn hash_line(sh: &Shell, kind: &str, path: &Path) -> anyhow::Result<String> {
    let name = path
        .file_name()
        .and_then(|name| name.to_str())
        .with_context(|| format!("{} has no name", path.display()))?;
    let hash = cmd!(sh, "git hash-object --no-filters {path}")
        .quiet()
        .read()?;
    Ok(format!("{kind} {name} {hash}"))
}

/// The first difference between the manifest and the files as they are, or nothing.
fn manifest_difference(sh: &Shell) -> anyhow::Result<Option<String>> {
    let path = Path::new(BUILT).join(MANIFEST);
    if !sh.path_exists(&path) {
        return Ok(Some(format!("{} is missing", path.display())));
    }
    Ok(first_difference(&sh.read_file(&path)?, &manifest(sh)?))
}

fn first_difference(recorded: &str, actual: &str) -> Option<String> {
    // Everything but the last word names a thing, the last word is its state.
    let entries = |text: &str| -> BTreeMap<String, String> {
        text.lines()
            .map(|line| {
                let (name, state) = line.rsplit_once(' ').unwrap_or((line, ""));
                (name.to_owned(), state.to_owned())
            })
            .collect()
    };
    let (recorded, actual) = (entries(recorded), entries(actual));
    for (name, state) in &actual {
        match recorded.get(name) {
            None => return Some(format!("{name} is not in the manifest")),
            Some(old) if old != state => return Some(format!("{name} has changed")),
            Some(_) => {}
        }
    }
    let gone = recorded.keys().find(|name| !actual.contains_key(*name))?;
    Some(format!("{gone} is gone"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_kernels_are_what_the_sources_give() {
        let sh = Shell::new().unwrap();
        let _folder = sh.push_dir(workspace::root());
        assert_eq!(
            manifest_difference(&sh).unwrap(),
            None,
            "run `cargo xtask kernels` and commit the result"
        );
    }

    #[test]
    fn every_kind_of_difference_is_named() {
        let recorded = "result a.ptx 11\nsource a.cu 22\n";
        assert_eq!(first_difference(recorded, recorded), None);
        let cases = [
            (
                "result a.ptx 11\nsource a.cu 23\n",
                "source a.cu has changed",
            ),
            (
                "result a.ptx 12\nsource a.cu 22\n",
                "result a.ptx has changed",
            ),
            ("source a.cu 22\n", "result a.ptx is gone"),
            (
                "result a.ptx 11\nresult b.ptx 1\nsource a.cu 22\n",
                "result b.ptx is not in the manifest",
            ),
        ];
        for (actual, expected) in cases {
            assert_eq!(
                first_difference(recorded, actual).as_deref(),
                Some(expected)
            );
        }
    }

    #[test]
    fn the_ptx_version_is_replaced_once() {
        let ptx = "//\n.version 8.8\n.target sm_70\n";
        assert_eq!(
            with_ptx_version(ptx, "6.4").unwrap(),
            "//\n.version 6.4\n.target sm_70\n"
        );
        assert!(with_ptx_version(".target sm_70\n", "6.4").is_err());
    }

    #[test]
    fn no_instruction_of_a_module_is_newer_than_its_architecture_in_the_name() {
        for module in &MODULES {
            let suffix = module.name.rsplit_once("_sm").map(|(_, suffix)| suffix);
            if let Some(suffix) = suffix {
                assert_eq!(suffix, module.architecture, "{}", module.name);
            }
        }
    }
}
