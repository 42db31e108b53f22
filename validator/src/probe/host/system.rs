//! The operating system, the environment, EC2.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::Duration;

use rustix::time::ClockId;

use super::sysroot::{Sysroot, io_reason};
use validator_core::facts::{Ec2Instance, MachineIdentity, Reading};

/// The metadata service answers within a millisecond or two, or not at all.
const METADATA_DEADLINE: Duration = Duration::from_millis(300);
const METADATA_ADDRESS: &str = "http://169.254.169.254/latest";

/// Environment variables that change what the driver, CUDA, its libraries or a debugger do.
// Source: the first row is the list of DCGM's software plugin; the others are in NVIDIA's CUDA C++
// programming guide (environment variables), MPS, NCCL and cuBLAS documentation, and ld.so(8).
const VARIABLES: [&str; 53] = [
    "NSIGHT_CUDA_DEBUGGER",
    "CUDA_INJECTION32_PATH",
    "CUDA_INJECTION64_PATH",
    "CUDA_AUTO_BOOST",
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_COREDUMP_FILE",
    "CUDA_DEVICE_WAITS_ON_EXCEPTION",
    "CUDA_PROFILE",
    "COMPUTE_PROFILE",
    "OPENCL_PROFILE",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATION_STRATEGY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_CACHE_PATH",
    "CUDA_DEBUGGER_SOFTWARE_PREEMPTION",
    "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_MAX_COPY_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_DISABLE_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP",
    "CUDA_ENABLE_USER_TRIGGERED_COREDUMP",
    "CUDA_FORCE_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_LOG_FILE",
    "CUDA_MANAGED_FORCE_DEVICE_ALLOC",
    "CUDA_MODULE_DATA_LOADING",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_CLIENT_PRIORITY",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_PATH",
    "CUDA_SCALE_LAUNCH_QUEUES",
    "CUDA_VISIBLE_DEVICES",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "NCCL_DEBUG",
    "NCCL_P2P_DISABLE",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_VISIBLE_DEVICES",
    "__NVML_DBG_FILE",
];
const VALUE_CHARACTERS_KEPT: usize = 4_096;

/// The variables of this process that matter; their values may be paths, never secrets.
pub(super) fn environment() -> Reading<BTreeMap<String, String>> {
    let variables = VARIABLES.iter().filter_map(|name| {
        let value = std::env::var_os(name)?;
        let value = value.to_string_lossy();
        Some((
            (*name).to_owned(),
            value.chars().take(VALUE_CHARACTERS_KEPT).collect(),
        ))
    });
    Reading::Value(variables.collect())
}

pub(super) fn identity(root: &Sysroot) -> Option<MachineIdentity> {
    Some(MachineIdentity {
        boot_id: root.line("/proc/sys/kernel/random/boot_id")?,
        machine_id: root.line("/etc/machine-id").filter(|it| !it.is_empty()),
    })
}

pub(super) fn hostname(root: &Sysroot) -> Reading<String> {
    let name = root
        .line("/proc/sys/kernel/hostname")
        .or_else(|| root.line("/etc/hostname"));
    line_reading(name, "/proc/sys/kernel/hostname")
}

pub(super) fn operating_system(root: &Sysroot) -> Reading<String> {
    let text = root
        .text("/etc/os-release")
        .or_else(|_| root.text("/usr/lib/os-release"));
    let text = match text {
        Ok(text) => text,
        Err(error) => return Reading::NotRead(io_reason(&error, "/etc/os-release")),
    };
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .map(|name| name.trim().trim_matches(['"', '\'']).to_owned());
    name.map_or_else(
        || Reading::NotRead("/etc/os-release has no PRETTY_NAME".to_owned()),
        Reading::Value,
    )
}

pub(super) fn kernel_release(root: &Sysroot) -> Reading<String> {
    line_reading(
        root.line("/proc/sys/kernel/osrelease"),
        "/proc/sys/kernel/osrelease",
    )
}

pub(super) fn architecture(root: &Sysroot) -> Reading<String> {
    if root.is_this_machine() {
        let name = rustix::system::uname();
        return Reading::Value(name.machine().to_string_lossy().into_owned());
    }
    line_reading(root.line("/proc/sys/kernel/arch"), "/proc/sys/kernel/arch")
}

/// Seconds since boot. Of this machine by the kernel's clock, since a container may be shown its
/// own age in `/proc/uptime` (lxcfs does), and what GPUs count they count since the machine's boot.
pub(super) fn uptime_s(root: &Sysroot) -> Reading<f64> {
    if root.is_this_machine() {
        return Reading::Value(kernel_clock_s(ClockId::Boottime));
    }
    let first = root.line("/proc/uptime").and_then(|text| {
        let seconds: f64 = text.split_whitespace().next()?.parse().ok()?;
        seconds.is_finite().then_some(seconds)
    });
    first.map_or_else(
        || Reading::NotRead("no number in /proc/uptime".to_owned()),
        Reading::Value,
    )
}

/// A clock that counts from boot, in seconds, as the kernel itself reads it: without what a time
/// namespace adds.
pub(super) fn kernel_clock_s(clock: ClockId) -> f64 {
    let name = match clock {
        ClockId::Monotonic => "monotonic",
        _ => "boottime",
    };
    // A kernel without time namespaces has no such file.
    let offsets = std::fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
    let now = rustix::time::clock_gettime(clock);
    seconds(now.tv_sec, now.tv_nsec) - time_namespace_offset_s(&offsets, name)
}

/// Lines like `monotonic       -100         0`: seconds and nanoseconds that the namespace adds to
/// the clock.
// Source: time_namespaces(7).
fn time_namespace_offset_s(offsets: &str, clock: &str) -> f64 {
    let offset = offsets.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let [name, s, ns] = [words.next()?, words.next()?, words.next()?];
        (name == clock).then(|| Some(seconds(s.parse().ok()?, ns.parse().ok()?)))?
    });
    offset.unwrap_or(0.0)
}

fn seconds(s: i64, ns: i64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "seconds since boot")]
    let seconds = s as f64 + ns as f64 / 1e9;
    seconds
}

fn line_reading(line: Option<String>, path: &str) -> Reading<String> {
    line.filter(|it| !it.is_empty()).map_or_else(
        || Reading::NotRead(format!("cannot read {path}")),
        Reading::Value,
    )
}

/// Marks that container engines leave, the control groups of the first process, and the user
/// namespace, in which engines without root (enroot, which leaves no mark, Podman, LXC) run their
/// containers.
pub(super) fn in_container(root: &Sysroot) -> Reading<bool> {
    let marked = [
        "/.dockerenv",
        "/run/.containerenv",
        "/run/systemd/container",
        "/.singularity.d",
    ]
    .iter()
    .any(|path| root.exists(path));
    let groups = root.text("/proc/1/cgroup").unwrap_or_default();
    let grouped = ["docker", "kubepods", "containerd", "crio-", "libpod", "lxc"]
        .iter()
        .any(|name| groups.contains(name));
    let in_environment = root.is_this_machine()
        && CONTAINER_VARIABLES
            .iter()
            .any(|name| std::env::var_os(name).is_some());
    let users = root.text("/proc/self/uid_map").unwrap_or_default();
    let in_user_namespace = !users.trim().is_empty() && !maps_all_users_to_themselves(&users);
    Reading::Value(marked || grouped || in_environment || in_user_namespace)
}

/// Environment variables that container engines set: systemd's convention, Kubernetes, Apptainer,
/// Singularity.
const CONTAINER_VARIABLES: [&str; 4] = [
    "container",
    "KUBERNETES_SERVICE_HOST",
    "APPTAINER_CONTAINER",
    "SINGULARITY_CONTAINER",
];

/// The map of the machine's own user namespace, by `user_namespaces(7)`.
fn maps_all_users_to_themselves(uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// The machine's name by its maker.
pub(super) fn product_name(root: &Sysroot) -> Reading<String> {
    match root.line("/sys/class/dmi/id/product_name") {
        Some(name) if !name.is_empty() => Reading::Value(name),
        _ => Reading::NotSupported,
    }
}

/// Which EC2 instance this is. The network is used only where the firmware's tables name EC2.
pub(super) fn ec2(root: &Sysroot, ask_metadata: bool) -> Reading<Ec2Instance> {
    const DMI: &str = "/sys/class/dmi/id";
    let dmi = |name: &str| root.line(&format!("{DMI}/{name}")).unwrap_or_default();
    // Nitro has it in the vendor's name; Xen instances (p3) in the version of their firmware,
    // `4.11.amazon`.
    let nitro = dmi("sys_vendor") == "Amazon EC2";
    let xen = dmi("sys_vendor") == "Xen" && dmi("bios_version").ends_with("amazon");
    if !nitro && !xen {
        return match root.text(&format!("{DMI}/sys_vendor")) {
            // Every EC2 instance has these tables.
            Ok(_) => Reading::NotSupported,
            Err(error) if error.kind() == ErrorKind::NotFound => Reading::NotSupported,
            Err(error) => Reading::NotRead(io_reason(&error, &format!("{DMI}/sys_vendor"))),
        };
    }
    if root.is_this_machine()
        && ask_metadata
        && let Some(instance) = ask_metadata_service(METADATA_ADDRESS)
    {
        return Reading::Value(instance);
    }
    let product = dmi("product_name");
    if nitro && product.contains('.') {
        return Reading::Value(Ec2Instance {
            instance_type: product,
            ..Ec2Instance::default()
        });
    }
    Reading::NotRead("the instance metadata service does not answer".to_owned())
}

/// Instance metadata version 2: a token first, then the values.
fn ask_metadata_service(address: &str) -> Option<Ec2Instance> {
    let client = crate::probe::https::client_builder()
        // Plain HTTP: no certificate needs to be read.
        .tls_certs_only([])
        .no_proxy()
        .timeout(METADATA_DEADLINE)
        .connect_timeout(METADATA_DEADLINE)
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .ok()?;
    let token = client
        .put(format!("{address}/api/token"))
        .header("X-aws-ec2-metadata-token-ttl-seconds", "60")
        .send()
        .and_then(reqwest::blocking::Response::error_for_status)
        .and_then(reqwest::blocking::Response::text)
        .ok()?;
    let get = |name: &str| {
        client
            .get(format!("{address}/meta-data/{name}"))
            .header("X-aws-ec2-metadata-token", &token)
            .send()
            .and_then(reqwest::blocking::Response::error_for_status)
            .and_then(reqwest::blocking::Response::text)
            .ok()
            // A captive portal's page is no instance type.
            .filter(|text| text.len() < 64 && !text.contains(['<', '\n']))
    };
    Some(Ec2Instance {
        instance_type: get("instance-type")?,
        region: get("placement/region"),
        ami_id: get("ami-id"),
        instance_id: get("instance-id"),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::super::sysroot::tests::tree;
    use super::*;

    #[test]
    fn an_instance_by_its_firmware() {
        let nitro = tree(&[
            ("/sys/class/dmi/id/sys_vendor", "Amazon EC2\n"),
            ("/sys/class/dmi/id/product_name", "p5.48xlarge\n"),
        ]);
        let Reading::Value(instance) = ec2(&nitro.1, true) else {
            panic!("no instance")
        };
        assert_eq!(instance.instance_type, "p5.48xlarge");
        let elsewhere = tree(&[("/sys/class/dmi/id/sys_vendor", "QEMU\n")]);
        assert_eq!(ec2(&elsewhere.1, true), Reading::NotSupported);
        let xen = tree(&[
            ("/sys/class/dmi/id/sys_vendor", "Xen\n"),
            ("/sys/class/dmi/id/bios_version", "4.11.amazon\n"),
            ("/sys/class/dmi/id/product_name", "HVM domU\n"),
        ]);
        assert!(matches!(ec2(&xen.1, true), Reading::NotRead(_)));
        assert_eq!(ec2(&tree(&[]).1, true), Reading::NotSupported);
        let unreadable = tree(&[("/sys/class/dmi/id/sys_vendor", "->sys_vendor")]);
        assert!(matches!(ec2(&unreadable.1, true), Reading::NotRead(_)));
    }

    /// Answers like the metadata service: a token to PUT, values to GET with that token.
    fn metadata_service(connections: usize) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        std::thread::spawn(move || {
            for stream in listener.incoming().take(connections) {
                let mut stream = stream.expect("a connection");
                let mut reader = BufReader::new(stream.try_clone().expect("a clone"));
                let mut head = String::new();
                while reader.read_line(&mut head).is_ok_and(|count| count > 2) {}
                let authorised = head
                    .to_lowercase()
                    .contains("x-aws-ec2-metadata-token: secret");
                let body = match head.split(' ').nth(1).unwrap_or_default() {
                    "/api/token" => "secret",
                    "/meta-data/instance-type" if authorised => "p5en.48xlarge",
                    "/meta-data/placement/region" if authorised => "eu-west-1",
                    _ => "",
                };
                let status = if body.is_empty() {
                    "404 Not Found"
                } else {
                    "200 OK"
                };
                let answer = format!(
                    "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                    body.len()
                );
                stream.write_all(answer.as_bytes()).expect("it is read");
            }
        });
        format!("http://{address}")
    }

    #[test]
    fn the_metadata_service_is_asked_with_a_token() {
        let instance = ask_metadata_service(&metadata_service(5)).expect("an instance");
        assert_eq!(instance.instance_type, "p5en.48xlarge");
        assert_eq!(instance.region.as_deref(), Some("eu-west-1"));
        assert_eq!(instance.ami_id, None);
    }

    #[test]
    fn a_service_that_does_not_answer_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("an address"));
        let start = std::time::Instant::now();
        assert_eq!(ask_metadata_service(&address), None);
        assert!(start.elapsed() < METADATA_DEADLINE * 10);
    }

    #[test]
    fn containers_leave_marks() {
        let marked = |files: &[(&str, &str)]| {
            let (_folder, root) = tree(files);
            in_container(&root)
        };
        assert_eq!(marked(&[("/.dockerenv", "")]), Reading::Value(true));
        assert_eq!(
            marked(&[("/proc/1/cgroup", "0::/kubepods.slice/x\n")]),
            Reading::Value(true)
        );
        assert_eq!(
            marked(&[("/.singularity.d/runscript", "")]),
            Reading::Value(true)
        );
        let own = ("/proc/self/uid_map", "         0       1000          1\n");
        assert_eq!(marked(&[own]), Reading::Value(true));
        let machines = ("/proc/self/uid_map", "         0          0 4294967295\n");
        assert_eq!(
            marked(&[("/proc/1/cgroup", "0::/init.scope\n"), machines]),
            Reading::Value(false)
        );
    }

    #[test]
    fn a_time_namespace_does_not_move_the_boot() {
        let offsets = "monotonic        5000         0\nboottime      -100000 500000000\n";
        let offset = |clock| time_namespace_offset_s(offsets, clock);
        assert!((offset("monotonic") - 5000.0).abs() < 1e-9);
        assert!((offset("boottime") + 99_999.5).abs() < 1e-9);
        assert!(time_namespace_offset_s("", "monotonic").abs() < 1e-9);
        let Reading::Value(uptime) = uptime_s(&Sysroot::new(None)) else {
            panic!("the kernel's clock can always be read");
        };
        assert!(uptime > 0.0);
    }

    #[test]
    fn the_operating_system() {
        let (_folder, root) = tree(&[
            ("/etc/os-release", "->../usr/lib/os-release"),
            (
                "/usr/lib/os-release",
                "ID=amzn\nPRETTY_NAME=\"Amazon Linux 2023\"\n",
            ),
            ("/proc/uptime", "812.50 3000.0\n"),
            ("/proc/sys/kernel/osrelease", "6.1.0-amzn\n"),
        ]);
        assert_eq!(
            operating_system(&root),
            Reading::Value("Amazon Linux 2023".to_owned())
        );
        assert_eq!(uptime_s(&root), Reading::Value(812.5));
        assert_eq!(
            kernel_release(&root),
            Reading::Value("6.1.0-amzn".to_owned())
        );
        assert!(matches!(hostname(&root), Reading::NotRead(_)));
    }
}
