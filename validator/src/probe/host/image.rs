//! What is on the disk of an image that is being baked.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use super::super::ProbeOptions;
use super::sysroot::{Sysroot, io_reason};
use crate::interrupt::Interrupt;
use crate::worker::listener::{ConversationEnd, read_output};
use crate::worker::process::{ProcessEnd, WorkerProcess};
use validator_core::facts::{
    DiskSpace, ImageFacts, ImageFile, InstalledKernel, KernelModuleFlavor, Leftover, LeftoverKind,
    ModuleFile, Reading,
};

/// `modinfo` reads one file, and fabric manager prints its version before it does anything else.
const PROGRAM_DEADLINE: Duration = Duration::from_secs(10);
/// The modules that CUDA needs. `nvidia_modeset` and `nvidia_drm` serve displays, `nvidia_peermem`
/// is optional.
const MODULES: [&str; 2] = ["nvidia", "nvidia_uvm"];
const FABRIC_MANAGER: &str = "/usr/bin/nv-fabricmanager";
/// Facts stay small with any number of leftovers; a person needs the first few.
const LEFTOVERS_KEPT: usize = 64;

pub(super) fn image(root: &Sysroot, options: &ProbeOptions, interrupt: &Interrupt) -> ImageFacts {
    ImageFacts {
        kernels: kernels(root, interrupt),
        fabric_manager_version: fabric_manager_version(root, interrupt),
        files: files(root, &options.image_files),
        leftovers: leftovers(root).into(),
        root_disk: root_disk(root),
    }
}

/// Folders that only hold what was built for a kernel that is gone have neither of the kernel
/// packages' own entries.
fn kernels(root: &Sysroot, interrupt: &Interrupt) -> Reading<Vec<InstalledKernel>> {
    const FOLDER: &str = "/lib/modules";
    let names = match root.names(FOLDER) {
        Ok(names) => names,
        Err(error) => return Reading::NotRead(io_reason(&error, FOLDER)),
    };
    let kernels = names
        .into_iter()
        .filter(|release| {
            ["modules.builtin", "kernel"]
                .iter()
                .any(|entry| root.exists(&format!("{FOLDER}/{release}/{entry}")))
        })
        .map(|release| InstalledKernel {
            modules: modules(root, &format!("{FOLDER}/{release}"), interrupt),
            release,
        });
    Reading::Value(kernels.collect())
}

fn modules(
    root: &Sysroot,
    kernel: &str,
    interrupt: &Interrupt,
) -> BTreeMap<String, Reading<ModuleFile>> {
    MODULES
        .iter()
        .map(|name| {
            let reading = match module_path(root, kernel, name) {
                Some(path) => module_file(root, &path, interrupt),
                None => Reading::NotSupported,
            };
            ((*name).to_owned(), reading)
        })
        .collect()
}

/// Where packages and DKMS put the driver's modules: RHEL's and Amazon's `extra` and
/// `weak-updates`, Debian's and Ubuntu's `updates/dkms`, NVIDIA's installer's
/// `kernel/drivers/video`, Ubuntu's signed modules in `kernel/nvidia-*`.
fn module_path(root: &Sysroot, kernel: &str, name: &str) -> Option<String> {
    const FOLDERS: [&str; 9] = [
        "updates/dkms",
        "updates",
        "extra",
        "extra/*",
        "weak-updates",
        "weak-updates/*",
        "kernel/drivers/video",
        "kernel/drivers/video/*",
        "kernel/nvidia-*",
    ];
    // Both spellings name the same module to the kernel.
    let names = [name.to_owned(), name.replace('_', "-")];
    FOLDERS.iter().find_map(|folder| {
        names.iter().find_map(|name| {
            root.matching(&format!("{kernel}/{folder}/{name}.ko*"))
                .into_iter()
                .next()
        })
    })
}

/// Runs `modinfo`, which reads every compression that the kernel loads.
fn module_file(root: &Sysroot, path: &str, interrupt: &Interrupt) -> Reading<ModuleFile> {
    let file = root.real_path(path);
    // Outside of a root shell `PATH` may lack the folders in which kmod lies.
    let programs = ["modinfo", "/usr/sbin/modinfo", "/sbin/modinfo"];
    let output = programs
        .iter()
        .find_map(|program| output_of(program, &[&file.to_string_lossy()], interrupt).transpose());
    match output {
        Some(Ok(text)) => parse_modinfo(path, &text),
        Some(Err(reason)) => Reading::NotRead(format!("modinfo {path}: {reason}")),
        None => Reading::NotRead(format!("modinfo is not installed, which reads {path}")),
    }
}

fn parse_modinfo(path: &str, text: &str) -> Reading<ModuleFile> {
    let field = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(str::trim)
            .filter(|value| !value.is_empty())
    };
    let Some(version) = field("version") else {
        return Reading::NotRead(format!("modinfo names no version of {path}"));
    };
    // The open modules are `Dual MIT/GPL`, the proprietary ones `NVIDIA`.
    let flavor = match field("license") {
        Some("NVIDIA") => KernelModuleFlavor::Proprietary,
        Some("Dual MIT/GPL") => KernelModuleFlavor::Open,
        other => {
            return Reading::NotRead(format!(
                "{path} has license {}, which is neither flavour's",
                other.unwrap_or("none")
            ));
        }
    };
    let built_for = field("vermagic").and_then(|it| it.split_whitespace().next());
    let Some(built_for) = built_for else {
        return Reading::NotRead(format!("modinfo names no vermagic of {path}"));
    };
    Reading::Value(ModuleFile {
        path: path.to_owned(),
        version: version.to_owned(),
        flavor,
        built_for: built_for.to_owned(),
    })
}

fn fabric_manager_version(root: &Sysroot, interrupt: &Interrupt) -> Reading<String> {
    if !root.exists(FABRIC_MANAGER) {
        return Reading::NotSupported;
    }
    if !root.is_this_machine() {
        return Reading::NotRead(format!("{FABRIC_MANAGER} is not run below a sysroot"));
    }
    match output_of(FABRIC_MANAGER, &["--version"], interrupt) {
        Ok(Some(text)) => driver_version_in(&text).map_or_else(
            || Reading::NotRead(format!("{FABRIC_MANAGER} --version names no version")),
            Reading::Value,
        ),
        Ok(None) => Reading::NotRead(format!("{FABRIC_MANAGER} cannot be started")),
        Err(reason) => Reading::NotRead(format!("{FABRIC_MANAGER} --version: {reason}")),
    }
}

/// The first word that looks like a driver's version: `Fabric Manager version is : 580.159.04`.
fn driver_version_in(text: &str) -> Option<String> {
    let is_version = |word: &&str| {
        let mut parts = word.split('.');
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|it| it.is_ascii_digit());
        parts.next().is_some_and(|it| it.len() == 3 && digits(it))
            && word.contains('.')
            && parts.all(digits)
    };
    text.split_whitespace().find(is_version).map(str::to_owned)
}

/// What a program prints; `None` when it cannot be started at all.
fn output_of(
    program: &str,
    arguments: &[&str],
    interrupt: &Interrupt,
) -> Result<Option<String>, String> {
    let arguments: Vec<_> = arguments.iter().map(Into::into).collect();
    let environment = [("LC_ALL", Some("C".to_owned()))];
    let Ok(mut process) = WorkerProcess::start_program(program, &arguments, &environment) else {
        return Ok(None);
    };
    let mut text = String::new();
    let mut on_line = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    match read_output(&mut process, PROGRAM_DEADLINE, interrupt, &mut on_line) {
        ConversationEnd::Closed(ProcessEnd::Exited(0)) => Ok(Some(text)),
        ConversationEnd::Closed(ProcessEnd::Exited(code)) => {
            Err(format!("it ended with exit code {code}"))
        }
        ConversationEnd::Closed(ProcessEnd::Killed(signal)) => {
            Err(format!("it was killed by signal {signal}"))
        }
        ConversationEnd::Closed(ProcessEnd::Stuck) => Err("it does not end".to_owned()),
        ConversationEnd::TimedOut { .. } => Err("it did not end in time".to_owned()),
        ConversationEnd::Interrupted | ConversationEnd::Dismissed | ConversationEnd::Complete => {
            Err("the run was interrupted".to_owned())
        }
    }
}

fn files(root: &Sysroot, asked: &[String]) -> BTreeMap<String, Reading<ImageFile>> {
    asked
        .iter()
        .map(|path| {
            let reading = match std::fs::metadata(root.real_path(path)) {
                Ok(metadata) => Reading::Value(ImageFile {
                    bytes: metadata.len(),
                    mode: metadata.permissions().mode() & 0o7777,
                }),
                Err(error) if error.kind() == ErrorKind::NotFound => Reading::NotSupported,
                Err(error) => Reading::NotRead(io_reason(&error, path)),
            };
            (path.clone(), reading)
        })
        .collect()
}

/// Patterns of what must not be in an image that others start. `HOME` stands for every home folder.
// Sources: AWS's list for shared images,
// <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/building-shared-amis.html> (host keys,
// authorized keys, shell history, credentials); systemd's, <https://systemd.io/BUILDING_IMAGES/>
// (machine id); cloud-init's own `clean` (`/var/lib/cloud`); actions/runner's `config.sh remove`
// (its three files).
const LEFTOVERS: [(&str, LeftoverKind); 29] = [
    ("HOME/.ssh/authorized_keys*", LeftoverKind::Secret),
    ("HOME/.ssh/id_*", LeftoverKind::Secret),
    ("HOME/.aws/credentials", LeftoverKind::Secret),
    ("HOME/.aws/sso/cache/*", LeftoverKind::Secret),
    ("HOME/.aws/cli/cache/*", LeftoverKind::Secret),
    ("HOME/.docker/config.json", LeftoverKind::Secret),
    ("HOME/.config/gh/hosts.yml", LeftoverKind::Secret),
    ("HOME/.git-credentials", LeftoverKind::Secret),
    ("HOME/.kube/config", LeftoverKind::Secret),
    ("HOME/.netrc", LeftoverKind::Secret),
    ("HOME/.pgpass", LeftoverKind::Secret),
    ("/opt/actions-runner/.credentials*", LeftoverKind::Secret),
    ("/opt/actions-runner/.runner", LeftoverKind::Identity),
    ("/etc/ssh/ssh_host_*", LeftoverKind::Identity),
    ("/etc/cdi/nvidia.yaml", LeftoverKind::Identity),
    ("/var/lib/cloud/instance", LeftoverKind::Identity),
    ("/var/lib/cloud/instances/*", LeftoverKind::Identity),
    ("/var/lib/cloud/data/*", LeftoverKind::Identity),
    ("/var/lib/cloud/sem/*", LeftoverKind::Identity),
    ("/var/log/gpu-validator/*", LeftoverKind::Identity),
    ("HOME/.bash_history", LeftoverKind::History),
    ("HOME/.zsh_history", LeftoverKind::History),
    ("HOME/.python_history", LeftoverKind::History),
    ("HOME/.lesshst", LeftoverKind::History),
    ("/var/cache/apt/archives/*.deb", LeftoverKind::Cache),
    ("/var/lib/apt/lists/*_Packages", LeftoverKind::Cache),
    ("/var/lib/apt/lists/*_InRelease", LeftoverKind::Cache),
    ("/var/cache/dnf/*", LeftoverKind::Cache),
    ("/var/cache/yum/*", LeftoverKind::Cache),
];

/// Files that every shell or unit reads; a secret in one of them is in every process of every
/// instance.
const ENVIRONMENT_FILES: [&str; 8] = [
    "/etc/environment",
    "/etc/profile.d/*",
    "/etc/gpu-validator/*",
    "/etc/sysconfig/*",
    "HOME/.bashrc",
    "HOME/.bash_profile",
    "HOME/.profile",
    "HOME/.zshrc",
];

/// Names of variables whose value is a secret, in lower case.
const SECRET_VARIABLES: [&str; 6] = [
    "aws_secret_access_key",
    "aws_session_token",
    "github_token",
    "gh_token",
    "runner_token",
    "hf_token",
];

/// A folder that cannot be listed may hold anything, so that the whole reading fails.
fn leftovers(root: &Sysroot) -> Result<Vec<Leftover>, String> {
    let homes = homes(root)?;
    let mut found = Vec::new();
    for (pattern, kind) in LEFTOVERS {
        for pattern in in_every_home(pattern, &homes) {
            let folder = pattern.rsplit_once('/').map_or("/", |(folder, _)| folder);
            listable(root, folder)?;
            let paths = root.matching(&pattern).into_iter();
            found.extend(
                paths
                    .filter(|path| holds_something(root, path))
                    .map(|path| Leftover { path, kind }),
            );
        }
    }
    found.extend(machine_id(root)?);
    for pattern in ENVIRONMENT_FILES {
        for pattern in in_every_home(pattern, &homes) {
            for path in root.matching(&pattern) {
                // Folders such as /etc/sysconfig/network-scripts are none of the files that shells
                // read.
                if root.is_folder(&path) {
                    continue;
                }
                let text = root.text(&path).map_err(|error| io_reason(&error, &path))?;
                if text.lines().any(sets_a_secret) {
                    found.push(Leftover {
                        path,
                        kind: LeftoverKind::Secret,
                    });
                }
            }
        }
    }
    found.sort_by(|a, b| (a.kind, &a.path).cmp(&(b.kind, &b.path)));
    found.truncate(LEFTOVERS_KEPT);
    Ok(found)
}

fn homes(root: &Sysroot) -> Result<Vec<String>, String> {
    listable(root, "/root")?;
    listable(root, "/home")?;
    let mut homes = vec!["/root".to_owned()];
    homes.extend(root.matching("/home/*"));
    Ok(homes)
}

fn in_every_home(pattern: &str, homes: &[String]) -> Vec<String> {
    match pattern.strip_prefix("HOME") {
        Some(rest) => homes.iter().map(|home| format!("{home}{rest}")).collect(),
        None => vec![pattern.to_owned()],
    }
}

fn listable(root: &Sysroot, folder: &str) -> Result<(), String> {
    match root.names(folder) {
        Ok(_) => Ok(()),
        Err(error) => match error.kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => Ok(()),
            _ => Err(io_reason(&error, folder)),
        },
    }
}

/// An empty file gives nothing away, and an empty folder is as good as none.
fn holds_something(root: &Sysroot, path: &str) -> bool {
    if root.is_folder(path) {
        return root.names(path).map_or(true, |names| !names.is_empty());
    }
    std::fs::metadata(root.real_path(path)).map_or(true, |it| it.len() > 0)
}

/// systemd draws a new machine id where the file is empty or contains `uninitialized`.
fn machine_id(root: &Sysroot) -> Result<Option<Leftover>, String> {
    const PATH: &str = "/etc/machine-id";
    match root.text(PATH) {
        Ok(text) if ["", "uninitialized"].contains(&text.trim()) => Ok(None),
        Ok(_) => Ok(Some(Leftover {
            path: PATH.to_owned(),
            kind: LeftoverKind::Identity,
        })),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io_reason(&error, PATH)),
    }
}

fn sets_a_secret(line: &str) -> bool {
    let line = line.trim().to_lowercase();
    let line = line.strip_prefix("export ").unwrap_or(&line);
    let Some((name, value)) = line.split_once('=') else {
        return false;
    };
    SECRET_VARIABLES.contains(&name.trim()) && !value.trim().trim_matches(['"', '\'']).is_empty()
}

fn root_disk(root: &Sysroot) -> Reading<DiskSpace> {
    match rustix::fs::statvfs(root.real_path("/")) {
        Ok(space) => Reading::Value(DiskSpace {
            free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
            total_bytes: space.f_blocks.saturating_mul(space.f_frsize),
        }),
        Err(error) => Reading::NotRead(format!("cannot read the free space of /: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sysroot::tests::tree;
    use super::*;

    fn found(files: &[(&str, &str)]) -> Vec<(String, LeftoverKind)> {
        let (_folder, root) = tree(files);
        let found = leftovers(&root).expect("all folders can be listed");
        found.into_iter().map(|it| (it.path, it.kind)).collect()
    }

    #[test]
    fn a_module_is_described_by_modinfo() {
        let text = "filename:       /lib/modules/6.1.1/extra/nvidia.ko.xz\nfirmware:       nvidia/580.95.05/gsp_ga10x.bin\n\
                    alias:          char-major-195-*\nversion:        580.95.05\nlicense:        Dual MIT/GPL\n\
                    srcversion:     ABCDEF\nvermagic:       6.1.1 SMP preempt mod_unload modversions \n";
        let expected = ModuleFile {
            path: "/m/nvidia.ko.xz".to_owned(),
            version: "580.95.05".to_owned(),
            flavor: KernelModuleFlavor::Open,
            built_for: "6.1.1".to_owned(),
        };
        assert_eq!(
            parse_modinfo("/m/nvidia.ko.xz", text),
            Reading::Value(expected)
        );
        for missing in ["version:", "license:", "vermagic:"] {
            let lines = text.lines().filter(|line| !line.starts_with(missing));
            let text = lines.collect::<Vec<_>>().join("\n");
            let reading = parse_modinfo("/m/nvidia.ko", &text);
            assert!(matches!(reading, Reading::NotRead(_)), "{missing}");
        }
    }

    #[test]
    fn kernels_are_those_that_a_package_installed() {
        let (_folder, root) = tree(&[
            ("/lib/modules/6.1.1/modules.builtin", ""),
            ("/lib/modules/6.1.2/kernel/x", ""),
            ("/lib/modules/5.10.9-removed/modules.dep", ""),
        ]);
        let Reading::Value(kernels) = kernels(&root, &Interrupt::default()) else {
            panic!("not read")
        };
        let releases: Vec<_> = kernels.iter().map(|it| it.release.as_str()).collect();
        assert_eq!(releases, ["6.1.1", "6.1.2"]);
        assert_eq!(kernels[0].modules["nvidia"], Reading::NotSupported);
    }

    #[test]
    fn modules_are_found_wherever_packages_put_them() {
        for path in [
            "/lib/modules/k/updates/dkms/nvidia-uvm.ko.zst",
            "/lib/modules/k/extra/nvidia_uvm.ko.xz",
            "/lib/modules/k/extra/nvidia/nvidia-uvm.ko",
            "/lib/modules/k/kernel/drivers/video/nvidia-uvm.ko",
            "/lib/modules/k/kernel/nvidia-580srv-open/nvidia-uvm.ko.zst",
        ] {
            let (_folder, root) = tree(&[(path, "module")]);
            let seen = module_path(&root, "/lib/modules/k", "nvidia_uvm");
            assert_eq!(seen.as_deref(), Some(path));
            assert_eq!(module_path(&root, "/lib/modules/k", "nvidia"), None);
        }
    }

    #[test]
    fn a_file_that_is_no_module_is_not_read() {
        let (_folder, root) = tree(&[("/lib/modules/k/extra/nvidia.ko", "no module")]);
        let path = "/lib/modules/k/extra/nvidia.ko";
        let reading = module_file(&root, path, &Interrupt::default());
        assert!(matches!(reading, Reading::NotRead(_)), "{reading:?}");
    }

    #[test]
    fn a_version_among_words() {
        let said = "Fabric Manager version is : 580.95.05\n";
        assert_eq!(driver_version_in(said).as_deref(), Some("580.95.05"));
        assert_eq!(driver_version_in("error 2 of 10.1.2.3\n"), None);
        assert_eq!(driver_version_in("exit code 255\n"), None);
    }

    #[test]
    fn what_a_build_leaves_behind() {
        assert_eq!(
            found(&[
                ("/etc/ssh/ssh_host_ed25519_key", "key"),
                ("/etc/machine-id", "0123456789abcdef\n"),
                ("/home/ec2-user/.ssh/authorized_keys", "ssh-ed25519 AAAA"),
                ("/home/ec2-user/.bash_history", "ls\n"),
                ("/root/.aws/credentials", "[default]\n"),
                ("/var/lib/cloud/instances/i-1/user-data.txt", "#"),
                ("/var/lib/cloud/instance", "->instances/i-1"),
                ("/var/cache/dnf/amazonlinux/repodata", "x"),
                (
                    "/etc/environment",
                    "PATH=/bin\nexport AWS_SECRET_ACCESS_KEY='x'\n"
                ),
            ]),
            [
                ("/etc/environment".to_owned(), LeftoverKind::Secret),
                (
                    "/home/ec2-user/.ssh/authorized_keys".to_owned(),
                    LeftoverKind::Secret
                ),
                ("/root/.aws/credentials".to_owned(), LeftoverKind::Secret),
                ("/etc/machine-id".to_owned(), LeftoverKind::Identity),
                (
                    "/etc/ssh/ssh_host_ed25519_key".to_owned(),
                    LeftoverKind::Identity
                ),
                ("/var/lib/cloud/instance".to_owned(), LeftoverKind::Identity),
                (
                    "/var/lib/cloud/instances/i-1".to_owned(),
                    LeftoverKind::Identity
                ),
                (
                    "/home/ec2-user/.bash_history".to_owned(),
                    LeftoverKind::History
                ),
                ("/var/cache/dnf/amazonlinux".to_owned(), LeftoverKind::Cache),
            ]
        );
    }

    #[test]
    fn what_is_empty_is_not_left_behind() {
        assert_eq!(
            found(&[
                ("/etc/machine-id", "uninitialized\n"),
                ("/root/.ssh/authorized_keys", ""),
                (
                    "/etc/environment",
                    "AWS_REGION=us-west-2\nAWS_SESSION_TOKEN=\n"
                ),
                ("/var/lib/apt/lists/lock", "x"),
            ]),
            []
        );
        assert_eq!(found(&[]), []);
    }

    #[test]
    fn files_and_the_disk() {
        let (_folder, root) = tree(&[("/usr/bin/gpu-validator", "binary")]);
        let asked = ["/usr/bin/gpu-validator", "/etc/none"].map(str::to_owned);
        let files = files(&root, &asked);
        assert_eq!(
            files["/usr/bin/gpu-validator"].value().map(|it| it.bytes),
            Some(6)
        );
        assert_eq!(files["/etc/none"], Reading::NotSupported);
        let disk = root_disk(&root);
        let space = disk.value().expect("this machine has a disk");
        assert!(space.free_bytes <= space.total_bytes && space.total_bytes > 0);
    }
}
