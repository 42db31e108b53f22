//! systemd services, from their files and control groups.
//!
//! systemd itself is not queried: it needs a bus, permissions and time. A service is active when
//! its control group has processes, so that one which ends after its work (`RemainAfterExit`)
//! counts as not active; and also when its process runs elsewhere, in a container (the GPU
//! operator's fabric manager) or another slice. Where there is no systemd, as in most containers, a
//! service whose process is visible by its name counts as installed and active, and any other as
//! not readable.

use super::sysroot::{Sysroot, file_name};
use validator_core::facts::{Reading, ServiceState};

/// NVIDIA's services, and the names of their processes (the kernel keeps 15 characters).
const NVIDIA_SERVICES: [(&str, &str); 3] = [
    ("nvidia-persistenced", "nvidia-persiste"),
    ("nvidia-fabricmanager", "nv-fabricmanage"),
    ("nvidia-imex", "nvidia-imex"),
];

const UNIT_FOLDERS: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Where systemd puts the control groups of system services: version 2, then hybrid and version 1.
const CONTROL_GROUP_FOLDERS: [&str; 3] = [
    "/sys/fs/cgroup/system.slice",
    "/sys/fs/cgroup/unified/system.slice",
    "/sys/fs/cgroup/systemd/system.slice",
];

/// The state of NVIDIA's services and of `others`.
pub(super) fn services(
    root: &Sysroot,
    others: &[String],
) -> std::collections::BTreeMap<String, Reading<ServiceState>> {
    let nvidia = NVIDIA_SERVICES.iter().map(|(name, _)| (*name).to_owned());
    let others = others
        .iter()
        .map(|name| name.strip_suffix(".service").unwrap_or(name).to_owned());
    let has_systemd = root.is_folder("/run/systemd/system");
    // systemd makes the group of all services first of all, so that without it nothing is known of
    // any of them.
    let groups_are_shown = CONTROL_GROUP_FOLDERS.iter().any(|it| root.is_folder(it));
    nvidia
        .chain(others)
        .map(|name| {
            let state = if has_systemd {
                match unit_state(root, &name) {
                    state if state.installed && !groups_are_shown => Reading::NotRead(
                        "whether it runs is unknown: /sys/fs/cgroup shows no services".to_owned(),
                    ),
                    state => Reading::Value(state),
                }
            } else {
                state_by_process(root, &name)
            };
            (name, state)
        })
        .collect()
}

fn unit_state(root: &Sysroot, name: &str) -> ServiceState {
    let unit = format!("{name}.service");
    let unit_file = UNIT_FOLDERS
        .iter()
        .map(|folder| format!("{folder}/{unit}"))
        .find(|path| root.link_target(path).is_some() || root.exists(path));
    // A masked unit is a link to /dev/null.
    let masked = unit_file
        .as_deref()
        .and_then(|path| root.link_target(path))
        .is_some_and(|target| target == "/dev/null");
    ServiceState {
        installed: unit_file.is_some() && !masked,
        enabled: !masked && is_wanted(root, &unit),
        active: has_processes(root, &unit) || process_runs(root, name),
    }
}

/// A link in some target's `.wants` or `.requires` folder, or a udev rule that starts it.
fn is_wanted(root: &Sysroot, unit: &str) -> bool {
    let linked = UNIT_FOLDERS.iter().any(|folder| {
        let names = root.names(folder).unwrap_or_default();
        names
            .iter()
            .filter(|name| {
                [".wants", ".requires"]
                    .iter()
                    .any(|kind| name.ends_with(kind))
            })
            .any(|name| {
                let path = format!("{folder}/{name}/{unit}");
                root.link_target(&path).is_some() || root.exists(&path)
            })
    });
    linked || is_started_by_udev(root, unit)
}

/// Ubuntu's driver packages start nvidia-persistenced by `ENV{SYSTEMD_WANTS}` when a GPU appears.
fn is_started_by_udev(root: &Sysroot, unit: &str) -> bool {
    if !unit.starts_with("nvidia") {
        return false;
    }
    let folders = [
        "/etc/udev/rules.d",
        "/usr/lib/udev/rules.d",
        "/lib/udev/rules.d",
    ];
    folders
        .iter()
        .flat_map(|folder| root.matching(&format!("{folder}/*.rules")))
        .filter(|path| file_name(path).contains("nvidia"))
        .filter_map(|path| root.text(&path).ok())
        .flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
        .any(|line| {
            !line.trim_start().starts_with('#')
                && (line.contains("SYSTEMD_WANTS") || line.contains("systemctl start"))
                && line.contains(unit)
        })
}

fn has_processes(root: &Sysroot, unit: &str) -> bool {
    CONTROL_GROUP_FOLDERS.iter().any(|folder| {
        // A service with control groups of its own has its processes in those.
        let own = format!("{folder}/{unit}/cgroup.procs");
        let populated = format!("{folder}/{unit}/cgroup.events");
        let events = root.text(&populated).unwrap_or_default();
        events.lines().any(|line| line == "populated 1")
            || root.text(&own).is_ok_and(|text| !text.trim().is_empty())
    })
}

fn state_by_process(root: &Sysroot, name: &str) -> Reading<ServiceState> {
    if process_runs(root, name) {
        return Reading::Value(ServiceState {
            installed: true,
            enabled: false,
            active: true,
        });
    }
    Reading::NotSupported
}

/// A process with the service's name is visible.
fn process_runs(root: &Sysroot, name: &str) -> bool {
    let process = NVIDIA_SERVICES
        .iter()
        .find(|(service, _)| *service == name)
        .map_or(name, |(_, process)| process);
    let process: String = process.chars().take(15).collect();
    let pids = root.names("/proc").unwrap_or_default();
    pids.iter()
        .filter(|pid| pid.bytes().all(|byte| byte.is_ascii_digit()))
        .any(|pid| root.line(&format!("/proc/{pid}/comm")).as_ref() == Some(&process))
}

#[cfg(test)]
mod tests {
    use super::super::sysroot::tests::tree;
    use super::*;

    fn persistenced(files: &[(&str, &str)]) -> Reading<ServiceState> {
        let (_folder, root) = tree(files);
        services(&root, &[])["nvidia-persistenced"].clone()
    }

    const ALL: ServiceState = ServiceState {
        installed: true,
        enabled: true,
        active: true,
    };

    #[test]
    fn an_enabled_and_running_service_in_both_versions_of_control_groups() {
        for group in [
            (
                "/sys/fs/cgroup/system.slice/nvidia-persistenced.service/cgroup.procs",
                "812\n",
            ),
            (
                "/sys/fs/cgroup/system.slice/nvidia-persistenced.service/cgroup.events",
                "populated 1\nfrozen 0\n",
            ),
            (
                "/sys/fs/cgroup/systemd/system.slice/nvidia-persistenced.service/cgroup.procs",
                "812\n",
            ),
        ] {
            let state = persistenced(&[
                ("/run/systemd/system/x", ""),
                (
                    "/usr/lib/systemd/system/nvidia-persistenced.service",
                    "[Unit]\n",
                ),
                (
                    "/etc/systemd/system/multi-user.target.wants/nvidia-persistenced.service",
                    "->/usr/lib/systemd/system/nvidia-persistenced.service",
                ),
                group,
            ]);
            assert_eq!(state, Reading::Value(ALL), "{}", group.0);
        }
    }

    #[test]
    fn without_control_groups_no_service_is_called_inactive() {
        let state = persistenced(&[
            ("/run/systemd/system/x", ""),
            (
                "/usr/lib/systemd/system/nvidia-persistenced.service",
                "[Unit]\n",
            ),
        ]);
        assert!(matches!(state, Reading::NotRead(_)), "{state:?}");
    }

    #[test]
    fn a_udev_rule_enables_too() {
        let state = persistenced(&[
            ("/run/systemd/system/x", ""),
            (
                "/lib/systemd/system/nvidia-persistenced.service",
                "[Unit]\n",
            ),
            (
                "/lib/udev/rules.d/71-nvidia.rules",
                "ACTION==\"add\", DRIVER==\"nvidia\", TAG+=\"systemd\", ENV{SYSTEMD_WANTS}+=\"nvidia-persistenced.service\"\n",
            ),
            (
                "/sys/fs/cgroup/system.slice/nvidia-persistenced.service/cgroup.procs",
                "",
            ),
        ]);
        assert_eq!(
            state,
            Reading::Value(ServiceState {
                active: false,
                ..ALL
            })
        );
    }

    #[test]
    fn a_masked_service_is_not_installed() {
        let state = persistenced(&[
            ("/run/systemd/system/x", ""),
            (
                "/usr/lib/systemd/system/nvidia-persistenced.service",
                "[Unit]\n",
            ),
            (
                "/etc/systemd/system/nvidia-persistenced.service",
                "->/dev/null",
            ),
        ]);
        assert_eq!(state, Reading::Value(ServiceState::default()));
    }

    #[test]
    fn without_systemd_a_process_tells_and_its_absence_does_not() {
        let running = persistenced(&[("/proc/77/comm", "nvidia-persiste\n")]);
        assert_eq!(
            running,
            Reading::Value(ServiceState {
                enabled: false,
                ..ALL
            })
        );
        assert_eq!(
            persistenced(&[("/proc/77/comm", "bash\n")]),
            Reading::NotSupported
        );
    }

    #[test]
    fn a_process_outside_of_its_unit_runs_all_the_same() {
        let state = persistenced(&[
            ("/run/systemd/system/x", ""),
            ("/proc/77/comm", "nvidia-persiste\n"),
        ]);
        assert_eq!(
            state,
            Reading::Value(ServiceState {
                active: true,
                ..ServiceState::default()
            })
        );
    }

    #[test]
    fn services_that_a_profile_names() {
        let (_folder, root) = tree(&[("/run/systemd/system/x", "")]);
        let services = services(&root, &["docker.service".to_owned()]);
        assert_eq!(services["docker"], Reading::Value(ServiceState::default()));
    }
}
