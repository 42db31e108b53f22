//! Whose the processes on the GPUs are: by their control groups, and the folders in which the
//! kubelet keeps pods' logs.

use std::collections::BTreeMap;
use std::path::Path;

use validator_core::facts::{Facts, ProcessOwner, Reading};

/// Folders below are called `<namespace>_<name>_<uid>`.
///
/// Source: Kubernetes documentation, Logging Architecture.
const POD_LOGS: &str = "var/log/pods";

/// The owners of all processes that NVML lists; `root` is the sysroot.
pub(super) fn owners(root: &Path, facts: &Facts) -> BTreeMap<u32, Reading<ProcessOwner>> {
    let processes = facts
        .gpus
        .iter()
        .filter_map(|gpu| gpu.processes.value())
        .flatten();
    let mut owners: BTreeMap<u32, Reading<ProcessOwner>> = BTreeMap::new();
    let mut names = None;
    for process in processes {
        owners.entry(process.pid).or_insert_with(|| {
            let path = root.join(format!("proc/{}/cgroup", process.pid));
            std::fs::read_to_string(&path)
                .map_err(|error| format!("cannot read {}: {error}", path.display()))
                .map(|text| owner(&text, names.get_or_insert_with(|| pod_names(root))))
                .into()
        });
    }
    owners
}

/// Namespaces and names by UID.
fn pod_names(root: &Path) -> BTreeMap<String, (String, String)> {
    let Ok(entries) = std::fs::read_dir(root.join(POD_LOGS)) else {
        return BTreeMap::new();
    };
    entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            // Neither a namespace nor a pod's name can hold an underscore.
            let mut parts = name.split('_');
            let (namespace, name, uid) = (parts.next()?, parts.next()?, parts.next()?);
            Some((uid.to_owned(), (namespace.to_owned(), name.to_owned())))
        })
        .collect()
}

fn owner(cgroup: &str, names: &BTreeMap<String, (String, String)>) -> ProcessOwner {
    match pod_uid(cgroup) {
        Some(uid) => {
            let (namespace, name) = names.get(&uid).cloned().unzip();
            ProcessOwner::Pod {
                uid,
                namespace,
                name,
            }
        }
        None => ProcessOwner::NoPod {
            control_group: control_group(cgroup).to_owned(),
        },
    }
}

/// The path in the unified hierarchy, or in the first one of version 1.
fn control_group(cgroup: &str) -> &str {
    let mut lines = cgroup.lines();
    let unified = lines.clone().find_map(|line| line.strip_prefix("0::"));
    unified
        .or_else(|| lines.next()?.splitn(3, ':').nth(2))
        .unwrap_or_default()
}

/// The pod's UID in a path such as
/// `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/…` (systemd's
/// driver, with underscores) or `/kubepods/burstable/pod<uid>/…` (cgroupfs). Static pods have a
/// hash.
fn pod_uid(cgroup: &str) -> Option<String> {
    let paths = cgroup
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .filter(|path| path.contains("kubepods"));
    paths.flat_map(|path| path.split('/')).find_map(|segment| {
        let segment = segment.strip_suffix(".slice").unwrap_or(segment);
        let (before, uid) = segment.rsplit_once("pod")?;
        let is_pod = before.is_empty() || before.ends_with('-');
        let is_uid = uid.len() >= 32
            && uid
                .bytes()
                .all(|it| it.is_ascii_hexdigit() || b"-_".contains(&it));
        (is_pod && is_uid).then(|| uid.replace('_', "-"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use validator_core::facts::{GpuFacts, GpuProcess};

    const UID: &str = "0d8f2d0a-53a8-4f6a-9a5c-0a1b2c3d4e5f";

    #[test]
    fn pods_are_found_in_the_control_groups_of_all_runtimes() {
        for (cgroup, uid) in [
            (
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0d8f2d0a_53a8_4f6a_9a5c_0a1b2c3d4e5f.slice/cri-containerd-1f.scope\n",
                Some(UID),
            ),
            (
                "0::/kubepods.slice/kubepods-pod0d8f2d0a_53a8_4f6a_9a5c_0a1b2c3d4e5f.slice/crio-1f.scope\n",
                Some(UID),
            ),
            (
                "11:cpu:/kubepods/besteffort/pod0d8f2d0a-53a8-4f6a-9a5c-0a1b2c3d4e5f/1f\n1:name=systemd:/x\n",
                Some(UID),
            ),
            (
                "0::/kubelet/kubepods/pod7f2a9d1c0b3e4f5a6b7c8d9e0f1a2b3c/1f\n",
                Some("7f2a9d1c0b3e4f5a6b7c8d9e0f1a2b3c"),
            ),
            ("0::/system.slice/docker-1f.scope\n", None),
            ("0::/user.slice/user-1000.slice/session-3.scope\n", None),
            ("0::/kubepods.slice\n", None),
            (
                "0::/podman.slice/pod0d8f2d0a-53a8-4f6a-9a5c-0a1b2c3d4e5f\n",
                None,
            ),
            ("", None),
        ] {
            assert_eq!(pod_uid(cgroup).as_deref(), uid, "{cgroup}");
        }
    }

    #[test]
    fn every_process_is_somebodys() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            std::fs::write(path, text).expect("written");
        };
        write(
            "proc/7/cgroup",
            &format!("0::/kubepods/burstable/pod{UID}/1f\n"),
        );
        write("proc/8/cgroup", "0::/user.slice\n");
        write(&format!("var/log/pods/team_train-0_{UID}/x/0.log"), "");
        let process = |pid| GpuProcess {
            pid,
            ..GpuProcess::default()
        };
        let facts = Facts {
            gpus: vec![GpuFacts {
                processes: Reading::Value(vec![process(7), process(8), process(9)]),
                ..GpuFacts::default()
            }],
            ..Facts::default()
        };
        let owners = owners(root.path(), &facts);
        assert_eq!(
            owners[&7],
            Reading::Value(ProcessOwner::Pod {
                uid: UID.to_owned(),
                namespace: Some("team".to_owned()),
                name: Some("train-0".to_owned()),
            })
        );
        assert_eq!(
            owners[&8],
            Reading::Value(ProcessOwner::NoPod {
                control_group: "/user.slice".to_owned()
            })
        );
        assert!(matches!(owners[&9], Reading::NotRead(_)));
    }
}
