//! A node's folder: the libraries under their real names, the resolved scenario, the shared state
//! and the sysroot.

use crate::catalogue::Catalogue;
use crate::host::LIBRARY_FOLDER;
use crate::node::{NODE_VARIABLE, Node};
use crate::resolve::{resolve, scenario_at_start};
use crate::scenario::{LibraryBehaviour, SCENARIO_FILE, Scenario};
use crate::state::State;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The library's own name in a node's folder; every other name is a link to it.
const OWN_NAME: &str = ".libsimulator.so";

/// What to prepare.
#[derive(Debug, Clone)]
pub struct NodeRequest<'request> {
    /// The folder to make; what is in it is replaced.
    pub folder: &'request Path,
    /// The simulator's shared library (`libsimulator.so`).
    pub library: &'request Path,
    pub catalogue: &'request Catalogue,
    /// A node's name or file.
    pub node: &'request str,
    /// Names or files of faults, in the order in which they apply.
    pub faults: &'request [String],
    /// `PATH=VALUE`, such as `gpu.memory=2GiB`.
    pub overrides: &'request [String],
}

/// A node that programs can be run on.
#[derive(Debug, Clone)]
pub struct PreparedNode {
    /// Node and faults, such as `p5.48xlarge+xid-79`; the marker symbol has the same.
    pub scenario_name: String,
    pub folder: PathBuf,
    /// Where `libnvidia-ml.so.1`, `libcuda.so.1` and `libcublasLt.so.*` are.
    pub library_dir: PathBuf,
    /// The host side, for `--sysroot`.
    pub sysroot: PathBuf,
    /// Variables to set for programs on the node. `LD_LIBRARY_PATH` keeps the caller's entries,
    /// after the node's own.
    pub environment: BTreeMap<String, String>,
}

/// Makes the folder of a node. Its time (`at: 3s`) starts now.
pub fn prepare_node(request: &NodeRequest<'_>) -> Result<PreparedNode> {
    let resolved = resolve(
        request.catalogue,
        request.node,
        request.faults,
        request.overrides,
    )?;
    let scenario = scenario_at_start(&resolved)?;
    let folder = request.folder;
    if folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| format!("replace {}", folder.display()))?;
    }
    let library_dir = folder.join("sysroot").join(LIBRARY_FOLDER);
    let sysroot = folder.join("sysroot");
    for path in [&library_dir, &sysroot] {
        std::fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
    }
    // Absolute, so that a program may change its folder.
    let folder = folder
        .canonicalize()
        .with_context(|| format!("resolve {}", folder.display()))?;
    let library_dir = folder.join("sysroot").join(LIBRARY_FOLDER);
    let sysroot = folder.join("sysroot");
    let path = folder.join(SCENARIO_FILE);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
    }
    std::fs::write(&path, serde_json::to_vec(&resolved)?)
        .with_context(|| format!("write {}", path.display()))?;
    let own = folder.join(OWN_NAME);
    install_libraries(&scenario, request.library, &own, &library_dir)?;
    let kernel_records = crate::host::write_sysroot(&sysroot, &scenario, &resolved.events, &own)?;
    // Last, because the node's time starts with it.
    State::create(&folder.join("state"))?.set_kernel_records(kernel_records);
    let environment = environment(&scenario, &folder, &library_dir);
    Ok(PreparedNode {
        scenario_name: resolved.name,
        folder,
        library_dir,
        sysroot,
        environment,
    })
}

/// A node that was prepared before, for one more program on it.
pub fn reopen_node(folder: &Path) -> Result<PreparedNode> {
    let node = Node::open(folder)?;
    let library_dir = folder.join("sysroot").join(LIBRARY_FOLDER);
    Ok(PreparedNode {
        scenario_name: node.name().to_owned(),
        folder: folder.to_owned(),
        sysroot: folder.join("sysroot"),
        environment: environment(&node.scenario(), folder, &library_dir),
        library_dir,
    })
}

fn environment(scenario: &Scenario, folder: &Path, library_dir: &Path) -> BTreeMap<String, String> {
    let mut environment = scenario.host.environment.clone();
    let mut search_path = library_dir.display().to_string();
    // A compat folder on the host's library path shadows the driver's own libraries, as it does
    // with a real loader.
    for path in scenario.host.library_paths.iter().rev() {
        search_path = format!("{}/sysroot{path}:{search_path}", folder.display());
    }
    if let Ok(before) = std::env::var("LD_LIBRARY_PATH")
        && !before.is_empty()
    {
        search_path = format!("{search_path}:{before}");
    }
    environment.insert("LD_LIBRARY_PATH".to_owned(), search_path);
    // The host's processor multiplies for all GPUs, so that a burn of seconds over all memory would
    // take hours.
    for (name, value) in [
        ("GPU_VALIDATOR_ALLOCATION_DURATION", "0.5s"),
        ("GPU_VALIDATOR_ALLOCATION_MEMORY", "256KiB"),
        ("GPU_VALIDATOR_BURN_DURATION", "0.2s"),
        ("GPU_VALIDATOR_BURN_MEMORY", "8MiB"),
    ] {
        // A fault that comes in the middle of a burn needs a longer one.
        let entry = environment.entry(name.to_owned());
        entry.or_insert_with(|| value.to_owned());
    }
    // Simulated GPUs of different nodes have the same UUIDs, and a GPU is burned once at a time.
    let runtime = folder.join("run").display().to_string();
    environment.insert("GPU_VALIDATOR_RUNTIME_DIR".to_owned(), runtime);
    let sysroot = folder.join("sysroot").display().to_string();
    environment.insert("GPU_SIMULATOR_SYSROOT".to_owned(), sysroot);
    environment.insert(NODE_VARIABLE.to_owned(), folder.display().to_string());
    environment
}

/// Installs the library under the names that the driver's packages use: `libcuda.so.580.159.04`,
/// and links to it.
///
/// The files are hard links, so that one process that loads several of them shares one copy of the
/// code and its state.
fn install_libraries(
    scenario: &Scenario,
    library: &Path,
    own: &Path,
    library_dir: &Path,
) -> Result<()> {
    std::fs::hard_link(library, own)
        .or_else(|_| std::fs::copy(library, own).map(|_| ()))
        .with_context(|| format!("place {} at {}", library.display(), own.display()))?;
    let driver = &scenario.driver;
    install(
        own,
        library_dir,
        "libnvidia-ml.so",
        driver.nvml_version(),
        &[".1", ""],
        &scenario.nvml,
    )?;
    install(
        own,
        library_dir,
        "libcuda.so",
        driver.libcuda_version(),
        &[".1", ""],
        &scenario.cuda,
    )?;
    // cuBLASLt follows the toolkit, not the driver; both majors that programs load are there.
    for (soname, version) in [(".12", "12.9.1.4"), (".13", "13.1.0.3")] {
        install(
            own,
            library_dir,
            "libcublasLt.so",
            version,
            &[soname],
            &scenario.cublaslt,
        )?;
    }
    Ok(())
}

fn install(
    own: &Path,
    library_dir: &Path,
    name: &str,
    version: &str,
    links: &[&str],
    behaviour: &LibraryBehaviour,
) -> Result<()> {
    if !behaviour.present {
        return Ok(());
    }
    let file_name = format!("{name}.{version}");
    let file = library_dir.join(&file_name);
    if behaviour.missing_symbols.is_empty() {
        std::fs::hard_link(own, &file).with_context(|| format!("link {}", file.display()))?;
    } else {
        crate::elf::copy_without_symbols(own, &file, &behaviour.missing_symbols)?;
    }
    for suffix in links {
        let link = library_dir.join(format!("{name}{suffix}"));
        std::os::unix::fs::symlink(&file_name, &link)
            .with_context(|| format!("link {}", link.display()))?;
    }
    Ok(())
}
