//! NVIDIA's own device plugin on simulated nodes: it registers with the tests' kubelet, which
//! follows it as a real one does.
//!
//! The plugin is not part of this project and not on a machine that runs the tests, so these are
//! run by name, as root:
//! `NVIDIA_DEVICE_PLUGIN=/path/to/nvidia-device-plugin cargo test -p it -- --ignored device_plugin::`.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cluster::kubelet::{Followed, Kubelet, KubeletScript, Socket};
use serde_json::Value;

use crate::node::{Node, Ran, Scratch, in_place_of, said};

const REASON: &str = "needs NVIDIA's device plugin, and root: its folder of sockets is fixed";
/// The plugin looks for events every five seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// A node with the plugin and the kubelet that it has registered with.
struct Plugged {
    node: Node,
    kubelet: Kubelet,
    plugin: Child,
}

impl Plugged {
    /// `config` is the plugin's configuration file.
    fn new(node: Node, config: &str) -> Self {
        let root = node.sysroot().join("var/lib/kubelet");
        let script = KubeletScript {
            plugin: Socket::Gone,
            ..KubeletScript::default()
        };
        let kubelet = Kubelet::start(&root, script);
        let program = std::env::var_os("NVIDIA_DEVICE_PLUGIN").expect(REASON);
        let config = node.out.write("plugin.yaml", config);
        let log = std::fs::File::create(node.out.path("plugin.log")).expect("a log");
        // The folder of sockets and the driver's files in /proc are the node's, in a namespace of
        // the plugin's own. The kubelet's socket is named without a slash: gRPC in Go calls the
        // server by that name, and gRPC in Rust refuses requests to one that is no host's.
        let script = "mount -t tmpfs none /var/lib && mkdir -p /var/lib/kubelet/device-plugins \
             && mount --bind \"$1/device-plugins\" /var/lib/kubelet/device-plugins \
             && mount --bind \"$2/proc/driver\" /proc/driver && shift 2 \
             && cd /var/lib/kubelet/device-plugins && exec \"$@\" --kubelet-socket kubelet.sock";
        let mut plugin = in_place_of(&node.validator(), "unshare");
        plugin
            .args(["--mount", "sh", "-c", script, "sh"])
            .arg(&root)
            .arg(node.sysroot())
            .arg(program)
            .arg("--config-file")
            .arg(config)
            .stdout(log.try_clone().expect("a log"))
            .stderr(log);
        let plugin = plugin.spawn().expect("unshare starts");
        Self {
            node,
            kubelet,
            plugin,
        }
    }

    fn log(&self) -> String {
        self.node.out.read("plugin.log")
    }

    /// The plugin's list, as soon as it fits.
    fn followed(&self, fits: impl Fn(&Followed) -> bool) -> Followed {
        let start = Instant::now();
        loop {
            let followed = self.kubelet.followed();
            if fits(&followed) {
                return followed;
            }
            assert!(
                start.elapsed() < PATIENCE,
                "the plugin says {followed:?}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn ids(&self, resource: &str, count: usize) -> Vec<String> {
        let followed = self.followed(|it| it.get(resource).is_some_and(|it| it.len() == count));
        let mut ids: Vec<String> = followed[resource].iter().map(|it| it.0.clone()).collect();
        ids.sort();
        ids
    }

    fn run(&self, more: &str) -> Ran {
        let profile = format!(
            "levels: {{standard: {{burn: {{enabled: false}}}}}}\nkubernetes:\n  required: true\n{more}"
        );
        let profile = self.node.out.write("profile.yaml", profile);
        let profile = profile.to_str().expect("UTF-8");
        self.node.run(&["--profile", profile])
    }

    /// The verdicts on the kubelet's devices, and the summaries of those that are not right.
    fn verdicts(&self, more: &str) -> Vec<String> {
        let ran = self.run(more);
        let words = [
            "device_plugin_registered",
            "device_plugin_devices",
            "device_plugin_allocatable",
        ]
        .map(|check| {
            let finding = ran.report.finding(check);
            println!("{check}: {} {}", finding["verdict"], finding["summary"]);
            finding["verdict"].as_str().expect("a verdict").to_owned()
        });
        words.to_vec()
    }
}

impl Drop for Plugged {
    fn drop(&mut self) {
        let _ = self.plugin.kill();
        let _ = self.plugin.wait();
        println!("{}", self.log());
    }
}

fn config(more: &str) -> String {
    format!("version: v1\nflags: {{migStrategy: none, deviceDiscoveryStrategy: nvml}}\n{more}")
}

/// The UUIDs that NVML reports; of MIG devices where a GPU is cut into them.
fn uuids(node: &Node) -> Vec<String> {
    let mut collect = node.validator();
    collect.args(["collect", "--level", "quick", "--sysroot"]);
    let (code, stdout, stderr) = said(collect.arg(node.sysroot()));
    assert_eq!(code, 0, "{stderr}");
    let facts: Value = serde_json::from_str(&stdout).expect("facts");
    let array = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let mut uuids: Vec<String> = array(&facts["gpus"])
        .iter()
        .flat_map(|gpu| {
            let parts = array(&gpu["mig_devices"]["value"]);
            if parts.is_empty() {
                vec![text(&gpu["uuid"]["value"])]
            } else {
                parts.iter().map(|it| text(&it["uuid"])).collect()
            }
        })
        .collect();
    uuids.sort();
    uuids
}

#[test]
#[ignore = "needs NVIDIA's device plugin, and root: its folder of sockets is fixed"]
fn its_devices_are_ours() {
    let node = Node::healthy("h200x8");
    let expected = uuids(&node);
    let plugged = Plugged::new(node, &config(""));
    assert_eq!(plugged.ids("nvidia.com/gpu", 8), expected);
    assert_eq!(
        plugged.kubelet.registered(),
        [("nvidia-gpu.sock".to_owned(), "nvidia.com/gpu".to_owned())]
    );
    assert_eq!(
        plugged.verdicts("  list_and_watch: true\n"),
        ["pass", "pass", "pass"]
    );
}

#[test]
#[ignore = "needs NVIDIA's device plugin, and root: its folder of sockets is fixed"]
fn an_xid_makes_a_device_unhealthy_and_us_object() {
    let scratch = Scratch::new();
    // A fault of the node's hardware that comes when the plugin listens.
    let fault = "description: an Xid, later\ngpu: 1\nat: 8s\nxid: {code: 94, message: Contained}\ntrips: {kernel_log_xid: warn}\n";
    let fault = scratch.write("xid-later.yaml", fault);
    let node = Node::with("h200x8", &[fault.to_str().expect("UTF-8")], &[]);
    let plugged = Plugged::new(node, &config(""));
    let ids = plugged.ids("nvidia.com/gpu", 8);
    let followed = plugged.followed(|it| {
        it["nvidia.com/gpu"]
            .iter()
            .any(|(_, health)| health == "Unhealthy")
    });
    let ill: Vec<&String> = followed["nvidia.com/gpu"]
        .iter()
        .filter(|it| it.1 == "Unhealthy")
        .map(|it| &it.0)
        .collect();
    assert_eq!(ill, [&ids[1]]);
    assert_eq!(plugged.verdicts("")[2], "fail");
}

#[test]
#[ignore = "needs NVIDIA's device plugin, and root: its folder of sockets is fixed"]
fn shared_gpus_are_understood() {
    let sharing = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n";
    let node = Node::healthy("h200x8");
    let expected: Vec<String> = uuids(&node)
        .iter()
        .flat_map(|uuid| (0..4).map(move |share| format!("{uuid}::{share}")))
        .collect();
    let plugged = Plugged::new(node, &config(sharing));
    assert_eq!(plugged.ids("nvidia.com/gpu", 32), expected);
    assert_eq!(
        plugged.verdicts("  list_and_watch: true\n"),
        ["pass", "pass", "pass"]
    );
}

#[test]
#[ignore = "needs NVIDIA's device plugin, and root: its folder of sockets is fixed"]
fn parts_of_gpus_are_understood() {
    let mixed = "version: v1\nflags: {migStrategy: mixed, deviceDiscoveryStrategy: nvml}\n";
    let node = Node::healthy("mig");
    let expected = uuids(&node);
    let plugged = Plugged::new(node, mixed);
    let mut ids = plugged.ids("nvidia.com/mig-1g.10gb", 7);
    ids.extend(plugged.ids("nvidia.com/mig-3g.40gb", 2));
    ids.sort();
    assert_eq!(ids, expected);
    assert_eq!(
        plugged.verdicts("  list_and_watch: true\n"),
        ["pass", "pass", "pass"]
    );
    drop(plugged);
    // Whole GPUs that are cut into parts: no container can use one.
    let plugged = Plugged::new(Node::healthy("mig"), &config(""));
    plugged.ids("nvidia.com/gpu", 2);
    assert_eq!(plugged.verdicts("")[2], "fail");
    let ran = plugged.run("");
    let summary = ran.report.finding("device_plugin_allocatable")["summary"].to_string();
    assert!(summary.contains("migStrategy single or mixed"), "{summary}");
}

#[test]
#[ignore = "needs NVIDIA's device plugin, and root: its folder of sockets is fixed"]
fn a_plugin_that_dies_is_found() {
    let mut plugged = Plugged::new(Node::healthy("h200x8"), &config(""));
    plugged.ids("nvidia.com/gpu", 8);
    let kill = Command::new("kill")
        .args(["-KILL", &plugged.plugin.id().to_string()])
        .stdin(Stdio::null())
        .status();
    assert!(kill.expect("kill").success());
    plugged.plugin.wait().expect("it has ended");
    plugged.followed(|it| {
        it["nvidia.com/gpu"]
            .iter()
            .all(|(_, health)| health == "Unhealthy")
    });
    // Without a plugin that answers there is nothing to compare.
    assert_eq!(plugged.verdicts(""), ["fail", "skip", "skip"]);
}
