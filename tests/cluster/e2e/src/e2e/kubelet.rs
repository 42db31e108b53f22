//! As much of a scheduler and a kubelet as the API server needs: it binds pods, sets how they end,
//! and serves their logs.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::{Value, json};

use super::certificates::{Certificates, SERVER};
use kubernetes_tasks::kubectl::Kubectl;
use xtask::loopback::free_port;

const LOOK_AGAIN: Duration = Duration::from_millis(200);

/// The kubelet's HTTPS endpoint: the API server requests the logs of pods from it. One serves all
/// nodes.
#[derive(Debug)]
pub(super) struct Logs {
    folder: PathBuf,
    pub(super) port: u16,
    process: Child,
}

impl Logs {
    pub(super) fn serve(folder: PathBuf, certificates: &Certificates) -> anyhow::Result<Logs> {
        std::fs::create_dir_all(&folder)?;
        let port = free_port()?;
        let mut command = Command::new("openssl");
        command.args(["s_server", "-quiet", "-WWW", "-accept"]);
        command.arg(format!("127.0.0.1:{port}"));
        command.arg("-cert").arg(certificates.certificate(SERVER));
        command.arg("-key").arg(certificates.key(SERVER));
        // It reports every file that was sent, and every other as missing.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let process = command.stdin(Stdio::null()).current_dir(&folder).spawn();
        Ok(Logs {
            folder,
            port,
            process: process.context("openssl does not start")?,
        })
    }

    /// What the container has printed; `query` is the API server's query, in its order.
    pub(super) fn write(
        &self,
        pod: &str,
        namespace: &str,
        container: &str,
        query: &str,
        text: &str,
    ) -> anyhow::Result<()> {
        // Kubernetes, pkg/registry/core/pod: containerLogs/NAMESPACE/POD/CONTAINER.
        let folder = self.folder.join("containerLogs").join(namespace).join(pod);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(format!("{container}{query}")), text)?;
        Ok(())
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Writes the status of a pod, as its kubelet does.
pub(super) fn set_status(
    admin: &Kubectl,
    namespace: &str,
    pod: &str,
    status: &Value,
) -> anyhow::Result<()> {
    let patch = json!({"status": status}).to_string();
    let command = [
        "patch",
        "pod",
        pod,
        "--namespace",
        namespace,
        "--subresource=status",
        "--type=merge",
        "--patch",
        &patch,
    ];
    admin.text(&command, "").map(drop)
}

/// Binds a pod to a node, as the scheduler does.
pub(super) fn bind(admin: &Kubectl, namespace: &str, pod: &str, node: &str) -> anyhow::Result<()> {
    let binding = json!({
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    });
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/binding");
    let command = ["create", "--raw", &path, "--filename", "-"];
    admin.text(&command, &binding.to_string()).map(drop)
}

/// The status of a pod's only container in this state.
pub(super) fn container_status(name: &str, restarts: u32, state: &Value) -> Value {
    json!([{
        "name": name,
        "image": "image",
        "imageID": "",
        "ready": state["running"].is_object(),
        "restartCount": restarts,
        "state": state,
    }])
}

/// Runs `work`, and meanwhile `play` again and again: what a cluster's controllers do of
/// themselves.
pub(super) fn while_playing<T>(
    mut play: impl FnMut() -> anyhow::Result<()> + Send,
    work: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let controllers = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                play()?;
                std::thread::sleep(LOOK_AGAIN);
            }
            anyhow::Ok(())
        });
        let worked = work();
        stop.store(true, Ordering::Relaxed);
        let played = controllers.join().unwrap_or_else(|_| {
            Err(anyhow::anyhow!(
                "what plays the cluster's controllers panicked"
            ))
        });
        // What was worked on shows best what went wrong; the controllers' trouble may be its cause.
        match (worked, played) {
            (worked, Ok(())) => worked,
            (Ok(_), Err(error)) => Err(error),
            (Err(worked), Err(played)) => Err(worked.context(format!("{played:#}"))),
        }
    })
}
