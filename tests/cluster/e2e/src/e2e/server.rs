//! etcd and kube-apiserver, for as long as a test lasts.

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::bail;
use serde_json::{Value, json};

use super::certificates::{self, AUTHORITY, Certificates, EXPIRED_SERVER, OTHER_AUTHORITY, SERVER};
use kubernetes_tasks::kubectl::Kubectl;
use xtask::loopback::free_port;
use xtask::tools::go::{KUBE_APISERVER, KUBECTL};
use xtask::workspace;

/// A token of group system:masters, for a server that listens on the loopback interface only.
pub(super) const ADMIN_TOKEN: &str = "the-tests-own-admin";
/// A token of a user that has the rights of the checks and of the pods that read GPUs.
pub(super) const CHECKS_TOKEN: &str = "the-tests-own-checks";
pub(super) const CHECKS_USER: &str = "checks";
/// A cold start of both takes ten seconds on two busy cores.
const START_DEADLINE: Duration = Duration::from_secs(90);

#[derive(Debug)]
pub(super) struct Server {
    folder: PathBuf,
    certificates: Certificates,
    port: u16,
    kubectl: PathBuf,
    processes: Vec<Child>,
    keep: bool,
}

impl Server {
    pub(super) fn start(keep: bool) -> anyhow::Result<Server> {
        let (program, kubectl) = (KUBE_APISERVER.install()?, KUBECTL.install()?);
        let folder = workspace::target().join(format!("kubernetes/e2e-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let [client, peer, secure] = [free_port()?, free_port()?, free_port()?];
        let mut server = Server {
            certificates: Certificates::make(folder.join("certificates"))?,
            port: secure,
            folder,
            kubectl,
            processes: Vec::new(),
            keep,
        };
        server.start_etcd(client, peer)?;
        server.start_api_server(&program, client, secure)?;
        server.wait_until_ready()?;
        Ok(server)
    }

    fn start_etcd(&mut self, client: u16, peer: u16) -> anyhow::Result<()> {
        let client = format!("http://127.0.0.1:{client}");
        let mut etcd = Command::new("etcd");
        etcd.arg("--data-dir")
            .arg(self.folder.join("etcd"))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args(["--listen-peer-urls", &format!("http://127.0.0.1:{peer}")]);
        self.spawn("etcd", etcd).map_err(|error| match error.downcast_ref::<std::io::Error>() {
            Some(it) if it.kind() == ErrorKind::NotFound => {
                anyhow::anyhow!("etcd is not on the PATH; install it (Debian and Ubuntu: apt-get install etcd-server)")
            }
            _ => error,
        })
    }

    fn start_api_server(&mut self, program: &Path, etcd: u16, port: u16) -> anyhow::Result<()> {
        let key = self.folder.join("service-accounts.key");
        certificates::make_key(&key)?;
        let tokens = self.folder.join("tokens.csv");
        std::fs::write(
            &tokens,
            format!(
                "{ADMIN_TOKEN},admin,admin,system:masters\n{CHECKS_TOKEN},{CHECKS_USER},{CHECKS_USER}\n"
            ),
        )?;
        let shown = |name: &str, kind: &str| {
            let path = match kind {
                "crt" => self.certificates.certificate(name),
                _ => self.certificates.key(name),
            };
            path.display().to_string()
        };
        let mut command = Command::new(program);
        command
            .arg(format!("--etcd-servers=http://127.0.0.1:{etcd}"))
            .arg(format!("--secure-port={port}"))
            .arg(format!("--tls-cert-file={}", shown(SERVER, "crt")))
            .arg(format!("--tls-private-key-file={}", shown(SERVER, "key")))
            // A request for this name is shown an expired certificate.
            .arg(format!(
                "--tls-sni-cert-key={},{}:localhost",
                shown(EXPIRED_SERVER, "crt"),
                shown(EXPIRED_SERVER, "key")
            ))
            .arg(format!("--client-ca-file={}", shown(AUTHORITY, "crt")))
            .arg(format!("--token-auth-file={}", tokens.display()))
            .arg(format!("--service-account-key-file={}", key.display()))
            .arg(format!(
                "--service-account-signing-key-file={}",
                key.display()
            ))
            .args([
                "--service-account-issuer=https://kubernetes.default.svc",
                "--bind-address=127.0.0.1",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.0.0.0/24",
                "--allow-privileged=true",
                // The only version of the kind DeviceTaintRule that this Kubernetes has.
                "--runtime-config=resource.k8s.io/v1alpha3=true",
                "--feature-gates=DRADeviceTaints=true",
            ]);
        self.spawn("kube-apiserver", command)
    }

    fn spawn(&mut self, name: &str, mut command: Command) -> anyhow::Result<()> {
        let log = File::create(self.folder.join(format!("{name}.log")))?;
        let child = command.stdout(log.try_clone()?).stderr(log).spawn()?;
        self.processes.push(child);
        Ok(())
    }

    fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let admin = self.kubectl(ADMIN_TOKEN);
        let deadline = Instant::now() + START_DEADLINE;
        loop {
            for process in &mut self.processes {
                if let Some(status) = process.try_wait()? {
                    self.keep = true;
                    bail!(
                        "etcd or kube-apiserver ended with {status}; logs: {}",
                        self.folder.display()
                    );
                }
            }
            if admin.refusal(&["get", "--raw", "/readyz"], "").is_none() {
                return Ok(());
            }
            if Instant::now() > deadline {
                self.keep = true;
                bail!(
                    "kube-apiserver is not ready; logs: {}",
                    self.folder.display()
                );
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    pub(super) fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn kubectl(&self, token: &str) -> Kubectl {
        let authority = self.certificates.certificate(AUTHORITY);
        let options = vec![
            format!("--server={}", self.url()),
            format!("--certificate-authority={}", authority.display()),
            format!("--token={token}"),
            "--kubeconfig=/dev/null".to_owned(),
        ];
        Kubectl::with(self.kubectl.clone(), options)
    }

    /// The folder of the pinned kubectl, for a `PATH`.
    pub(super) fn kubectl_folder(&self) -> &Path {
        self.kubectl.parent().unwrap_or(Path::new("."))
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// A kubeconfig of this name; `user` is its section of the user.
    pub(super) fn kubeconfig(&self, name: &str, user: &Value) -> anyhow::Result<PathBuf> {
        let cluster = json!({
            "server": self.url(),
            "certificate-authority": self.certificates.certificate(AUTHORITY),
        });
        self.kubeconfig_of(name, &cluster, user)
    }

    /// The same, for the name for which the server's certificate has expired.
    pub(super) fn kubeconfig_expired(&self, name: &str, user: &Value) -> anyhow::Result<PathBuf> {
        let cluster = json!({
            "server": format!("https://localhost:{}", self.port),
            "certificate-authority": self.certificates.certificate(AUTHORITY),
        });
        self.kubeconfig_of(name, &cluster, user)
    }

    /// The same, trusting an authority that has not signed the server's certificate.
    pub(super) fn kubeconfig_distrusting(
        &self,
        name: &str,
        user: &Value,
    ) -> anyhow::Result<PathBuf> {
        let cluster = json!({
            "server": self.url(),
            "certificate-authority": self.certificates.certificate(OTHER_AUTHORITY),
        });
        self.kubeconfig_of(name, &cluster, user)
    }

    fn kubeconfig_of(&self, name: &str, cluster: &Value, user: &Value) -> anyhow::Result<PathBuf> {
        let path = self.folder.join(format!("{name}.kubeconfig"));
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "e2e",
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e"}}],
            "clusters": [{"name": "e2e", "cluster": cluster}],
            "users": [{"name": "e2e", "user": user}],
        });
        std::fs::write(&path, config.to_string())?;
        Ok(path)
    }

    pub(super) fn version(&self) -> anyhow::Result<String> {
        let admin = self.kubectl(ADMIN_TOKEN);
        let version = admin.json(&["version", "--output=json"])?;
        Ok(format!(
            "kube-apiserver {}",
            version["serverVersion"]["gitVersion"]
                .as_str()
                .unwrap_or("?")
        ))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
        if self.keep {
            eprintln!("kept: {}", self.folder.display());
        } else {
            let _ = std::fs::remove_dir_all(&self.folder);
        }
    }
}
