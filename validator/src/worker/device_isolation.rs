//! Keeps a worker to the device node of its own GPU.
//!
//! With any value of `CUDA_VISIBLE_DEVICES`, `cuInit` opens the node of every GPU several times and
//! queries each, under locks that all processes share: one process for each of eight GPUs makes 64
//! such visits. Where a node cannot be opened the driver leaves that GPU out, as it does in a
//! container that was given one GPU. So Landlock restricts the worker to the node of its own GPU:
//! GPUs start sooner (BENCHMARKS.md), and none is queried by a neighbour's worker, with any effect
//! on either.
//!
//! This is help and not a need. Where the kernel does not know Landlock, or is too slow to say, the
//! worker goes on as any program would; where CUDA does not start that way, the worker begins anew
//! with every node, so that no GPU is judged by what was kept from it.
//!
//! For the same reason its environment has nothing that changes how CUDA computes
//! ([`NOT_INHERITED`]).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use landlock::{
    AccessFs, CompatLevel, Compatible as _, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreated, RulesetCreatedAttr as _, RulesetError, RulesetStatus,
};

/// How long the folders on the way to the nodes may take to be listed. It takes a millisecond,
/// unless the machine is busy or one of them is of a server that is gone.
const PATIENCE: Duration = Duration::from_secs(2);
/// What a program's first thread has on Linux.
const STACK_BYTES: usize = 8 << 20;

/// Environment variables that change how CUDA programs compute, or how fast. They are no evidence
/// about the GPU, and on an H100 two of these made a healthy one fail: with `NVIDIA_TF32_OVERRIDE`
/// cuBLASLt's FP32 products are those of TF32, or the other way round (BENCHMARKS.md). What jobs
/// will find set is a fact of the host, and the check `injected_environment` judges what is wrong
/// there.
// Source: CUDA C++ programming guide, environment variables; cuBLAS documentation, floating point
// emulation and environment variables; DCGM's list (see that check).
pub(crate) const NOT_INHERITED: [&str; 22] = [
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
    // Parts of a GPU that jobs are to have: what is left of it would not be looked at, and an H100
    // of which 30 % were at work got too hot there.
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_FORCE_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_DISABLE_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_AUTO_BOOST",
    "CUDA_INJECTION32_PATH",
    "CUDA_INJECTION64_PATH",
    "NSIGHT_CUDA_DEBUGGER",
    "CUDA_PROFILE",
    "COMPUTE_PROFILE",
    "OPENCL_PROFILE",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP",
    "CUDA_COREDUMP_FILE",
    "CUDA_DEVICE_WAITS_ON_EXCEPTION",
];

/// What a worker on this device has in its environment: CUDA shows it nothing else, and makes one
/// queue for its kernels instead of eight. A worker needs no second one, and the driver makes and
/// ends the queues of all GPUs one after another: 0.1 s of a context's 0.16, and half of its end
/// (BENCHMARKS.md).
// Source: CUDA C++ programming guide, environment variables.
pub(crate) fn cuda_environment(device: &str) -> Vec<(&'static str, Option<String>)> {
    let mut environment: Vec<_> = NOT_INHERITED.map(|name| (name, None)).into();
    environment.extend([
        ("CUDA_VISIBLE_DEVICES", Some(device.to_owned())),
        ("CUDA_DEVICE_MAX_CONNECTIONS", Some("1".to_owned())),
    ]);
    environment
}

/// What a worker's work came to.
pub(crate) enum Attempt {
    Completed,
    /// CUDA did not start with one node alone, for this reason.
    RetryWithAllNodes(String),
}

/// Does `work` on a thread that can open the GPU nodes in `nodes` and no other ones of their
/// folders, and passes it whether that is so.
pub(crate) fn keep_to<W>(nodes: &[PathBuf], work: W) -> Attempt
where
    W: FnOnce(bool) -> Attempt + Send + 'static,
{
    let nodes = nodes.to_vec();
    keep_by(move || rules(&nodes), PATIENCE, work)
}

/// The same with rules that come from `rules`. If these do not come within `patience`, the work is
/// done without them.
fn keep_by<R, W>(rules: R, patience: Duration, work: W) -> Attempt
where
    R: FnOnce() -> Option<RulesetCreated> + Send + 'static,
    W: FnOnce(bool) -> Attempt + Send + 'static,
{
    // Its taker does it.
    let work = Arc::new(Mutex::new(Some(work)));
    let take = |work: &Mutex<Option<W>>| {
        let mut work = work.lock().unwrap_or_else(PoisonError::into_inner);
        work.take()
    };
    let (begins, begun) = channel();
    let its_work = Arc::clone(&work);
    // Rules hold for a thread and all that it starts; the first thread stays free, to begin anew.
    let thread = std::thread::Builder::new()
        .stack_size(STACK_BYTES)
        .spawn(move || {
            let rules = rules();
            let work = take(&its_work)?;
            let _ = begins.send(());
            let is_alone = rules.is_some_and(|it| matches!(restrict(it), Ok(true)));
            Some(work(is_alone))
        });
    let _ = begun.recv_timeout(patience);
    if let Some(work) = take(&work) {
        return work(false);
    }
    match thread.map(std::thread::JoinHandle::join) {
        Ok(Ok(then)) => then.unwrap_or(Attempt::Completed),
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        // Without a thread the work was still there to take.
        Err(_) => Attempt::Completed,
    }
}

/// Whether the calling thread is kept to the rules from now on.
fn restrict(rules: RulesetCreated) -> Result<bool, RulesetError> {
    // A kernel that keeps an audit log would otherwise log each node that the driver tries.
    let status = rules.log_same_exec(false)?.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Everything may be read but the other GPUs' nodes. `None` where there are none, or where that is
/// unknown.
///
/// A device is opened for reading and writing, so that no right but the one to read has to be kept
/// back.
fn rules(nodes: &[PathBuf]) -> Option<RulesetCreated> {
    let kept_back: BTreeSet<PathBuf> = nodes.iter().flat_map(|node| neighbours(node)).collect();
    if kept_back.is_empty() {
        return None;
    }
    // Where the kernel cannot, the thread must not lose the right to gain privileges either, by
    // which `nvidia-modprobe` loads what is missing of the driver.
    let strict = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let ruleset = strict.handle_access(AccessFs::ReadFile).ok()?.create();
    let mut ruleset = ruleset.ok()?.set_compatibility(CompatLevel::BestEffort);
    allow_all_but(&kept_back, Path::new("/"), &mut ruleset).ok()?;
    Some(ruleset)
}

/// The nodes of the other GPUs in this one's folder, if it is there itself.
fn neighbours(node: &Path) -> Vec<PathBuf> {
    let folder = node.parent().and_then(|it| it.canonicalize().ok());
    let (Some(folder), Some(own)) = (folder, node.file_name()) else {
        return Vec::new();
    };
    if !folder.join(own).exists() {
        return Vec::new();
    }
    let others = gpu_nodes(&folder).into_values();
    others.filter(|it| it.file_name() != Some(own)).collect()
}

/// The nodes of GPUs, `nvidia<minor>`, of a folder, by their minor numbers.
pub(crate) fn gpu_nodes(folder: &Path) -> BTreeMap<u32, PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name();
            let number = name.to_str()?.strip_prefix("nvidia")?;
            let is_number = !number.is_empty() && number.bytes().all(|it| it.is_ascii_digit());
            Some((number.parse().ok().filter(|_| is_number)?, entry.path()))
        })
        .collect()
}

/// A rule for a folder holds for all below it. So there is one for each entry that has nothing
/// below it to keep back.
fn allow_all_but(
    kept_back: &BTreeSet<PathBuf>,
    folder: &Path,
    ruleset: &mut RulesetCreated,
) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let path = entry.path();
        // Where a link leads, the rules of that place hold.
        if kept_back.contains(&path) || entry.file_type()?.is_symlink() {
            continue;
        }
        if kept_back.iter().any(|it| it.starts_with(&path)) {
            allow_all_but(kept_back, &path, ruleset)?;
        } else if let Ok(opened) = PathFd::new(&path) {
            // What takes no rule cannot be opened then.
            let _ = ruleset.add_rule(PathBeneath::new(opened, AccessFs::ReadFile));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::time::Instant;

    use super::*;

    /// Whether each of the files can be opened, as `keep_to` has it and as its work got it.
    fn opened(nodes: &[PathBuf], files: Vec<PathBuf>) -> (bool, Vec<Result<(), ErrorKind>>) {
        let (tell, told) = channel();
        keep_to(nodes, move |is_alone| {
            // The driver has threads of its own.
            let open = move || {
                let open = |it: &PathBuf| std::fs::File::open(it).map(drop);
                let results = files.iter().map(|it| open(it).map_err(|it| it.kind()));
                results.collect::<Vec<_>>()
            };
            let results = std::thread::spawn(open).join().expect("no panic");
            tell.send((is_alone, results)).expect("somebody listens");
            Attempt::Completed
        });
        told.recv().expect("the work was done")
    }

    fn folder_of_three() -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for name in ["nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm"] {
            std::fs::write(folder.path().join(name), "").expect("written");
        }
        let link = |name: &str, target: &str| {
            std::os::unix::fs::symlink(target, folder.path().join(name)).expect("linked");
        };
        link("195:0", "nvidia0");
        link("195:1", "nvidia1");
        // A folder that leads back here.
        link("char", ".");
        folder
    }

    #[test]
    fn injected_variables_are_not_inherited_except_the_loaders_own() {
        for (name, _) in validator_core::reference::INJECTED_VARIABLES {
            let inherited = !NOT_INHERITED.contains(&name);
            assert_eq!(inherited, name.starts_with("LD_"), "{name}");
        }
    }

    #[test]
    fn no_gpus_node_can_be_opened_but_the_own_one() {
        let folder = folder_of_three();
        let in_folder = |name: &str| folder.path().join(name);
        let own = in_folder("nvidia1");
        let allowed = [
            own.clone(),
            in_folder("195:1"),
            in_folder("char/nvidia1"),
            in_folder("nvidiactl"),
            in_folder("nvidia-uvm"),
            "/proc/self/status".into(),
            "/etc/passwd".into(),
            std::env::current_exe().expect("a path"),
        ];
        let kept_back = ["nvidia0", "nvidia12", "195:0", "char/nvidia0"].map(in_folder);
        let (is_alone, allowed) = opened(std::slice::from_ref(&own), allowed.to_vec());
        assert!(allowed.iter().all(Result::is_ok), "{allowed:?}");
        let (_, kept_back) = opened(std::slice::from_ref(&own), kept_back.to_vec());
        // The value that the work gets must be true on a kernel without Landlock, too.
        let expected = if is_alone {
            Err(ErrorKind::PermissionDenied)
        } else {
            Ok(())
        };
        assert_eq!(kept_back, [expected; 4]);
        let knows_landlock = std::thread::spawn(|| {
            let nothing = Ruleset::default().handle_access(AccessFs::ReadFile)?;
            restrict(nothing.create()?)
        });
        let knows_landlock = knows_landlock.join().expect("no panic");
        assert_eq!(is_alone, knows_landlock.expect("an answer"));
        // The calling thread is unrestricted, and so are its later threads.
        let kept_back = in_folder("nvidia0");
        let free = std::thread::spawn(move || std::fs::File::open(kept_back).is_ok());
        assert!(free.join().expect("no panic"));
    }

    #[test]
    fn nothing_is_kept_back_where_there_is_nothing_to_keep() {
        let folder = folder_of_three();
        let missing = folder.path().join("nvidia7");
        let alone = tempfile::tempdir().expect("a folder");
        let only = alone.path().join("nvidia0");
        std::fs::write(&only, "").expect("written");
        for node in [missing, only] {
            let file = folder.path().join("nvidia0");
            assert_eq!(opened(&[node], vec![file]), (false, vec![Ok(())]));
        }
    }

    #[test]
    fn what_takes_too_long_is_not_waited_for() {
        let began = Instant::now();
        let hang = || {
            std::thread::sleep(Duration::from_mins(1));
            None
        };
        let (tell, told) = channel();
        keep_by(hang, Duration::from_millis(20), move |is_alone| {
            tell.send(is_alone).expect("somebody listens");
            Attempt::Completed
        });
        assert_eq!(told.recv(), Ok(false));
        assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn a_panic_of_the_work_is_one_of_the_caller() {
        let panics = || {
            keep_to(&[], |_| -> Attempt { panic!("on purpose") });
        };
        assert!(std::panic::catch_unwind(panics).is_err());
    }

    #[test]
    fn gpus_nodes_are_told_from_the_others() {
        let folder = folder_of_three();
        let minors: Vec<u32> = gpu_nodes(folder.path()).into_keys().collect();
        assert_eq!(minors, [0, 1, 12]);
    }
}
