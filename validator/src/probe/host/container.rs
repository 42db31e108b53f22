//! Whether containers would get GPUs: runtimes and CDI specifications.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::sysroot::{Sysroot, io_reason};
use validator_core::facts::{ContainerRuntime, Reading};

const DOCKER: &str = "/etc/docker/daemon.json";
/// Configuration of containerd (of k3s and RKE2, too) and CRI-O, with the folders of their
/// drop-ins.
const RUNTIME_CONFIGURATIONS: [&str; 7] = [
    "/etc/containerd/config.toml",
    "/etc/containerd/conf.d/*.toml",
    "/etc/containerd/config.d/*.toml",
    "/etc/crio/crio.conf",
    "/etc/crio/crio.conf.d/*",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
];
const TOOLKIT_PROGRAMS: [&str; 6] = [
    "/usr/bin/nvidia-ctk",
    "/usr/local/bin/nvidia-ctk",
    "/usr/bin/nvidia-container-runtime",
    "/usr/local/bin/nvidia-container-runtime",
    "/usr/local/nvidia/toolkit/nvidia-container-runtime",
    "/usr/local/nvidia/toolkit/nvidia-ctk",
];
const CDI_FOLDERS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// A file that is there and cannot be read makes the whole reading fail: it may hold the runtime
/// that is looked for.
pub(super) fn container_runtime(root: &Sysroot) -> Reading<ContainerRuntime> {
    read(root).into()
}

fn read(root: &Sysroot) -> Result<ContainerRuntime, String> {
    let docker = docker(root)?;
    let mut nvidia_runtime = false;
    for pattern in RUNTIME_CONFIGURATIONS {
        for path in root.matching(pattern) {
            let text = root.text(&path).map_err(|error| io_reason(&error, &path))?;
            nvidia_runtime |= toml_has_nvidia_runtime(&text);
        }
    }
    Ok(ContainerRuntime {
        toolkit_installed: TOOLKIT_PROGRAMS.iter().any(|path| root.exists(path)),
        docker_nvidia_runtime: docker.runtimes.contains_key("nvidia"),
        docker_default_runtime: docker.default_runtime,
        containerd_nvidia_runtime: nvidia_runtime,
        cdi_specs: cdi_specs(root)?,
    })
}

#[derive(Default, Deserialize)]
struct DockerConfiguration {
    #[serde(default)]
    runtimes: BTreeMap<String, serde_json::Value>,
    #[serde(rename = "default-runtime")]
    default_runtime: Option<String>,
}

fn docker(root: &Sysroot) -> Result<DockerConfiguration, String> {
    if !root.exists(DOCKER) {
        return Ok(DockerConfiguration::default());
    }
    let text = root
        .text(DOCKER)
        .map_err(|error| io_reason(&error, DOCKER))?;
    serde_json::from_str(&text).map_err(|error| format!("{DOCKER} is not valid: {error}"))
}

/// A table `…runtimes.nvidia`, of containerd (any plugin version) or CRI-O
/// (`crio.runtime.runtimes.nvidia`).
fn toml_has_nvidia_runtime(text: &str) -> bool {
    fn has(value: &toml::Value) -> bool {
        let Some(table) = value.as_table() else {
            return false;
        };
        let here = table
            .get("runtimes")
            .and_then(toml::Value::as_table)
            .is_some_and(|runtimes| runtimes.contains_key("nvidia"));
        here || table.values().any(has)
    }
    text.parse::<toml::Table>()
        .is_ok_and(|table| has(&toml::Value::Table(table)))
}

#[derive(Deserialize)]
struct CdiSpecification {
    kind: String,
    #[serde(default)]
    devices: Vec<CdiDevice>,
}

#[derive(Deserialize)]
struct CdiDevice {
    name: String,
}

/// Specifications for `nvidia.com/gpu` by path, with the names of their devices.
fn cdi_specs(root: &Sysroot) -> Result<BTreeMap<String, Vec<String>>, String> {
    let mut specs = BTreeMap::new();
    for folder in CDI_FOLDERS {
        for path in root.matching(&format!("{folder}/*")) {
            let extension = path.rsplit_once('.').map(|(_, extension)| extension);
            let is_json = match extension {
                Some("json") => true,
                Some("yaml" | "yml") => false,
                _ => continue,
            };
            let text = root.text(&path).map_err(|error| io_reason(&error, &path))?;
            let parsed = if is_json {
                serde_json::from_str::<CdiSpecification>(&text).ok()
            } else {
                serde_yaml::from_str::<CdiSpecification>(&text).ok()
            };
            // A specification that its readers refuse, too, defines no device.
            if let Some(spec) = parsed.filter(|it| it.kind == "nvidia.com/gpu") {
                let names = spec.devices.into_iter().map(|device| device.name);
                specs.insert(path, names.collect());
            }
        }
    }
    Ok(specs)
}

const KIBIBYTES_PER_MIB: u64 = 1024;
const BYTES_PER_MIB: u64 = 1 << 20;

/// The size of the mount at `/dev/shm`.
pub(super) fn shared_memory_mib(root: &Sysroot) -> Reading<u64> {
    const MOUNTS: &str = "/proc/self/mounts";
    match root.text(MOUNTS) {
        Ok(mounts) => size_of_shared_memory(&mounts).map_or(Reading::NotSupported, Reading::Value),
        Err(error) => not_read(&error, MOUNTS),
    }
}

/// A tree that stands for a machine may have no such file.
fn not_read(error: &std::io::Error, path: &str) -> Reading<u64> {
    match error.kind() {
        std::io::ErrorKind::NotFound => Reading::NotSupported,
        _ => Reading::NotRead(io_reason(error, path)),
    }
}

/// `size=65536k` of the last mount there, which hides those before it.
fn size_of_shared_memory(mounts: &str) -> Option<u64> {
    let of_shm = |line: &&str| line.split_whitespace().nth(1) == Some("/dev/shm");
    let mount = mounts.lines().rfind(of_shm)?;
    let options = mount.split_whitespace().nth(3)?;
    let size = options.split(',').find_map(|it| it.strip_prefix("size="))?;
    let kibibytes: u64 = size.strip_suffix('k')?.parse().ok()?;
    Some(kibibytes / KIBIBYTES_PER_MIB)
}

/// The soft limit of locked memory.
pub(super) fn locked_memory_mib(root: &Sysroot) -> Reading<u64> {
    const LIMITS: &str = "/proc/self/limits";
    match root.text(LIMITS) {
        Ok(limits) => locked_memory(&limits).map_or(Reading::NotSupported, Reading::Value),
        Err(error) => not_read(&error, LIMITS),
    }
}

/// `Max locked memory         8388608              8388608              bytes`.
fn locked_memory(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|it| it.strip_prefix("Max locked memory"))?;
    let bytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(bytes / BYTES_PER_MIB)
}

#[cfg(test)]
mod tests {
    #[test]
    fn limits_of_a_container_are_read_from_its_proc() {
        use super::{locked_memory, size_of_shared_memory};
        let mounts = "tmpfs /dev tmpfs rw,size=65536k 0 0\nshm /dev/shm tmpfs rw,nosuid,size=65536k,inode64 0 0\n";
        assert_eq!(size_of_shared_memory(mounts), Some(64));
        assert_eq!(
            size_of_shared_memory("tmpfs /dev/shm tmpfs rw,nosuid 0 0\n"),
            None
        );
        let limits =
            "Max locked memory         8388608              8388608              bytes     \n";
        assert_eq!(locked_memory(limits), Some(8));
        let unlimited =
            "Max locked memory         unlimited            unlimited            bytes     \n";
        assert_eq!(locked_memory(unlimited), None);
    }

    use super::super::sysroot::tests::tree;
    use super::*;

    fn runtime(files: &[(&str, &str)]) -> ContainerRuntime {
        let (_folder, root) = tree(files);
        match container_runtime(&root) {
            Reading::Value(runtime) => runtime,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn dockers_runtimes() {
        let docker = runtime(&[
            (
                DOCKER,
                r#"{"default-runtime":"nvidia","runtimes":{"nvidia":{"args":[],"path":"nvidia-container-runtime"}}}"#,
            ),
            ("/usr/bin/nvidia-ctk", ""),
        ]);
        assert!(docker.docker_nvidia_runtime && docker.toolkit_installed);
        assert_eq!(docker.docker_default_runtime.as_deref(), Some("nvidia"));
        assert_eq!(runtime(&[]), ContainerRuntime::default());
    }

    #[test]
    fn a_broken_configuration_is_not_an_empty_one() {
        let (_folder, root) = tree(&[(DOCKER, "{ broken")]);
        assert!(matches!(container_runtime(&root), Reading::NotRead(_)));
    }

    #[test]
    fn containerds_and_crios_runtimes() {
        for (path, text) in [
            (
                "/etc/containerd/config.toml",
                "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.nvidia]\nruntime_type = \"io.containerd.runc.v2\"\n",
            ),
            (
                "/etc/containerd/conf.d/99-nvidia.toml",
                "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\nruntimes = { nvidia = { runtime_type = \"x\" } }\n",
            ),
            (
                "/etc/crio/crio.conf.d/10-nvidia",
                "[crio.runtime.runtimes.nvidia]\nruntime_path = \"/usr/bin/nvidia-container-runtime\"\n",
            ),
        ] {
            assert!(runtime(&[(path, text)]).containerd_nvidia_runtime, "{path}");
        }
        let without = "[plugins.x.containerd.runtimes.runc]\n# runtimes.nvidia\n";
        assert!(!runtime(&[("/etc/containerd/config.toml", without)]).containerd_nvidia_runtime);
    }

    #[test]
    fn cdi_in_yaml_and_json() {
        let specs = runtime(&[
            ("/etc/cdi/nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: \"0\"\n  containerEdits: {}\n- name: all\n"),
            ("/run/cdi/gpu.json", r#"{"kind":"nvidia.com/gpu","devices":[{"name":"1"}]}"#),
            ("/var/run", "->/run"),
            ("/etc/cdi/other.yaml", "kind: vendor.com/nic\ndevices: []\n"),
            ("/etc/cdi/broken.yaml", ": ["),
        ])
        .cdi_specs;
        assert_eq!(specs["/etc/cdi/nvidia.yaml"], ["0", "all"]);
        assert_eq!(specs["/var/run/cdi/gpu.json"], ["1"]);
        assert_eq!(specs.len(), 2);
    }
}
