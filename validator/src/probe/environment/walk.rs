//! A walk of the disk that ends: a limit on folders, no network file systems, no links.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::super::host::Sysroot;
use validator_core::facts::DiskWalk;

/// With a warm cache a folder takes some 20 microseconds, so that the whole walk stays below a
/// fifth of a second.
pub(super) const FOLDERS_MAXIMUM: u32 = 8_000;
/// `/opt/team/project/.venv/pyvenv.cfg` is at depth 4.
const DEPTH_MAXIMUM: usize = 4;

/// Names below which no environment of interest lies, and of which there are thousands.
const NOT_ENTERED: [&str; 14] = [
    "node_modules",
    ".git",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "proc",
    "sys",
    "dev",
    "include",
    "share",
    "pkgs",
    "blobs",
    "snapshots",
    ".cargo",
];

/// File systems whose server may not answer.
const NETWORK: [&str; 14] = [
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "fuse",
    "9p",
    "afs",
    "wekafs",
];

/// Budget and result of all walks of one discovery.
#[derive(Debug)]
pub(super) struct Walk<'r> {
    root: &'r Sysroot,
    network_mounts: Vec<String>,
    state: RefCell<DiskWalk>,
    entered: RefCell<BTreeSet<String>>,
}

impl<'r> Walk<'r> {
    pub(super) fn new(root: &'r Sysroot, folders_maximum: u32) -> Self {
        let mounts = if root.is_this_machine() {
            std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default()
        } else {
            String::new()
        };
        Self {
            root,
            network_mounts: network_mounts(&mounts),
            state: RefCell::new(DiskWalk {
                folders_maximum,
                ..DiskWalk::default()
            }),
            entered: RefCell::default(),
        }
    }

    pub(super) fn result(&self) -> DiskWalk {
        self.state.borrow().clone()
    }

    /// The path lies on a file system of the network, which a stopped server makes hang.
    pub(super) fn is_on_network(&self, path: &str) -> bool {
        let below = |mount: &String| {
            path == mount
                || path
                    .strip_prefix(mount.as_str())
                    .is_some_and(|it| it.starts_with('/'))
        };
        self.network_mounts.iter().any(below)
    }

    /// The names in a folder, which counts against the limit; empty once that is reached.
    pub(super) fn names(&self, folder: &str) -> Vec<String> {
        self.names_in(self.root, folder)
    }

    /// The same below another root: that of an environment which was named.
    pub(super) fn names_in(&self, root: &Sysroot, folder: &str) -> Vec<String> {
        if self.is_on_network(folder) {
            return Vec::new();
        }
        let mut state = self.state.borrow_mut();
        if state.folders >= state.folders_maximum {
            state.stopped_at.get_or_insert_with(|| folder.to_owned());
            return Vec::new();
        }
        state.folders += 1;
        drop(state);
        root.names(folder).unwrap_or_default()
    }

    /// Folders below `top` that hold an environment: a `pyvenv.cfg` or a `conda-meta`.
    pub(super) fn environments_below(&self, top: &str, found: &mut Vec<String>) {
        if self.root.is_folder(top) && self.root.link_target(top).is_none() {
            self.enter(top, 0, found);
        }
    }

    fn enter(&self, folder: &str, depth: usize, found: &mut Vec<String>) {
        if !self.entered.borrow_mut().insert(folder.to_owned()) {
            return;
        }
        let names = self.names(folder);
        let holds = |name: &str| names.iter().any(|it| it == name);
        let is_conda = holds("conda-meta");
        if is_conda || holds("pyvenv.cfg") {
            found.push(folder.to_owned());
            if is_conda && holds("envs") && depth < DEPTH_MAXIMUM {
                self.enter(&format!("{folder}/envs"), depth, found);
            }
            return;
        }
        if depth >= DEPTH_MAXIMUM {
            return;
        }
        for name in &names {
            if NOT_ENTERED.contains(&name.as_str()) || name.starts_with("python3.") {
                continue;
            }
            let path = format!("{}/{name}", folder.trim_end_matches('/'));
            // One call returns whether it is a folder and no link.
            let path_outside = self.root.unresolved_path(&path);
            let is_folder = std::fs::symlink_metadata(path_outside).is_ok_and(|it| it.is_dir());
            if is_folder {
                self.enter(&path, depth + 1, found);
            }
        }
    }
}

/// Mount points of network file systems, by `/proc/self/mountinfo`.
fn network_mounts(mountinfo: &str) -> Vec<String> {
    let mount = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let kind = after.split(' ').next()?;
        let is_network = NETWORK.iter().any(|it| {
            kind == *it
                || kind
                    .strip_prefix(it)
                    .is_some_and(|rest| rest.starts_with('.'))
        });
        let point = before.split(' ').nth(4)?.replace("\\040", " ");
        (is_network && point != "/").then_some(point)
    };
    mountinfo.lines().filter_map(mount).collect()
}

#[cfg(test)]
mod tests {
    use super::super::super::host::tests::tree;
    use super::{Walk, network_mounts};

    #[test]
    fn network_file_systems_are_not_entered() {
        let mounts = network_mounts(
            "36 35 98:0 / / rw,noatime master:1 - ext4 /dev/root rw\n\
             40 36 0:52 / /home rw shared:2 - nfs4 server:/home rw\n\
             41 36 0:53 / /mnt/my\\040data rw - fuse.sshfs host: rw\n\
             42 36 0:54 / /opt/local rw - xfs /dev/sdb rw\n",
        );
        assert_eq!(mounts, ["/home", "/mnt/my data"]);
    }

    #[test]
    fn environments_are_found_and_the_limit_holds() {
        let (_folder, root) = tree(&[
            ("/opt/team/project/.venv/pyvenv.cfg", ""),
            ("/opt/conda/conda-meta/history", ""),
            ("/opt/conda/envs/a/conda-meta/history", ""),
            ("/opt/a/node_modules/x/pyvenv.cfg", ""),
            ("/opt/loop", "->/opt"),
            ("/opt/1/2/3/4/5/pyvenv.cfg", ""),
        ]);
        let mut found = Vec::new();
        let walk = Walk::new(&root, 1000);
        walk.environments_below("/opt", &mut found);
        found.sort();
        assert_eq!(
            found,
            ["/opt/conda", "/opt/conda/envs/a", "/opt/team/project/.venv"]
        );
        assert_eq!(walk.result().stopped_at, None);
        let walk = Walk::new(&root, 3);
        walk.environments_below("/opt", &mut Vec::new());
        assert_eq!(walk.result().folders, 3);
        assert!(walk.result().stopped_at.is_some());
    }
}
