//! `cargo xtask validate-ami --target ssh://…` against a real sshd on loopback, with a stand-in for
//! the validator.

use std::io::{BufRead as _, BufReader};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::processes::eventually;
use crate::xtask::{stand_in, stderr, validate_ami};

const SSHD: &str = "/usr/sbin/sshd";

/// A folder that vanishes with the test. It is in /tmp because a socket's path must be short.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = PathBuf::from(format!(
            "/tmp/gpu-bringup-it-{name}-{}-{number}",
            std::process::id()
        ));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .expect("a new folder in /tmp");
        Folder(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
        std::fs::write(&path, text).expect("a file");
        path
    }

    pub(crate) fn write_executable(&self, name: &str, text: &str) -> PathBuf {
        let path = self.write(name, text);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700))
            .expect("permissions");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An sshd of our own: own port, own host key, own authorized key, own known hosts.
pub(crate) struct Server {
    pub(crate) folder: Folder,
    sshd: Child,
}

impl Server {
    pub(crate) fn start() -> Server {
        Self::start_with(&[])
    }

    /// With variables in the environment of every session.
    pub(crate) fn start_with(environment: &[(&str, &str)]) -> Server {
        assert!(
            Path::new(SSHD).exists(),
            "this test needs {SSHD}; install it (Debian and Ubuntu: apt-get install openssh-server)"
        );
        let folder = Folder::new("ssh");
        for key in ["host-key", "user-key"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(folder.path(key))
                .status();
            assert!(made.expect("ssh-keygen can be started").success());
        }
        // sshd wants this folder when it runs as root, and only its service makes it.
        if user() == "root" {
            std::fs::create_dir_all("/run/sshd").expect("/run/sshd");
        }
        let port = free_port();
        let path = |name: &str| folder.path(name).display().to_string();
        let server_configuration = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\n\
             StrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n",
            path("host-key"),
            path("user-key.pub"),
        );
        let variables: Vec<String> = environment
            .iter()
            .map(|(name, value)| format!(" \"{name}={value}\""))
            .collect();
        let variables = variables.concat();
        let set = if variables.is_empty() { "" } else { "SetEnv" };
        let server_configuration = format!("{server_configuration}{set}{variables}\n");
        let server_configuration = folder.write("sshd_config", &server_configuration);
        let host_key =
            std::fs::read_to_string(folder.path("host-key.pub")).expect("the host's public key");
        folder.write("known_hosts", &format!("[127.0.0.1]:{port} {host_key}"));
        let client_configuration = format!(
            "Host gpu-under-test i-*\nHostName 127.0.0.1\nPort {port}\nUser {}\nIdentityFile {}\nIdentitiesOnly yes\n\
             IdentityAgent none\nBatchMode yes\nUserKnownHostsFile {}\nGlobalKnownHostsFile /dev/null\nProxyCommand none\n",
            user(),
            path("user-key"),
            path("known_hosts"),
        );
        folder.write("ssh_config", &client_configuration);
        let log = std::fs::File::create(folder.path("sshd.log")).expect("a log");
        let sshd = Command::new(SSHD)
            .args(["-D", "-e", "-f"])
            .arg(server_configuration)
            .stderr(log)
            .spawn();
        let server = Server {
            folder,
            sshd: sshd.expect("sshd can be started"),
        };
        eventually("sshd to listen", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        server
    }

    /// `validate-ami` on this server.
    fn validate_ami(&self, stand_in: &Path) -> Command {
        let mut command = validate_ami(stand_in, &self.reports());
        command
            .args(["--target", "ssh://gpu-under-test", "--ssh-config"])
            .arg(self.folder.path("ssh_config"));
        command
    }

    fn reports(&self) -> PathBuf {
        self.folder.path("reports")
    }

    /// Kills the processes that serve connections, not the one that listens: what a lost connection
    /// looks like.
    fn drop_connections(&self) {
        let serving = sshd_processes_below(self.sshd.id());
        assert!(!serving.is_empty(), "no connection was there to be lost");
        kill(&serving);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let serving = sshd_processes_below(self.sshd.id());
        if !serving.is_empty() {
            kill(&serving);
        }
        let _ = self.sshd.kill();
        let _ = self.sshd.wait();
        if std::thread::panicking() {
            eprintln!(
                "{}",
                std::fs::read_to_string(self.folder.path("sshd.log")).unwrap_or_default()
            );
        }
    }
}

/// One connection is served by one or two processes, depending on who logs in; what runs in the
/// session is not listed.
fn sshd_processes_below(parent: u32) -> Vec<u32> {
    let output = Command::new("pgrep")
        .args(["-P", &parent.to_string()])
        .output()
        .expect("pgrep can be started");
    let children = String::from_utf8_lossy(&output.stdout).into_owned();
    let children = children.lines().filter_map(|line| line.parse::<u32>().ok());
    let is_sshd = |process: &u32| {
        std::fs::read_to_string(format!("/proc/{process}/comm"))
            .is_ok_and(|name| name.starts_with("sshd"))
    };
    children
        .filter(is_sshd)
        .flat_map(|child| [vec![child], sshd_processes_below(child)].concat())
        .collect()
}

fn kill(processes: &[u32]) {
    let processes = processes.iter().map(u32::to_string);
    // One of them may end by itself when another one does.
    let _ = Command::new("kill")
        .arg("-KILL")
        .args(processes)
        .stderr(Stdio::null())
        .status();
}

/// A run that waits on the other side, with its first output.
struct Running {
    xtask: Child,
    remote_folder: PathBuf,
    remote_process: PathBuf,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Running {
    fn start(mut command: Command) -> Running {
        let mut xtask = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("xtask runs");
        let mut lines = BufReader::new(xtask.stdout.take().expect("a pipe")).lines();
        let mut next = |key: &str| {
            let line = lines
                .next()
                .unwrap_or_else(|| panic!("no `{key}` line"))
                .expect("text");
            line.strip_prefix(key)
                .unwrap_or_else(|| panic!("`{line}` is not `{key}`"))
                .to_owned()
        };
        let remote_folder = PathBuf::from(next("folder: "));
        let remote_process = Path::new("/proc").join(next("process: "));
        next("arguments: ");
        assert_eq!(next("ready"), "");
        assert!(remote_folder.exists() && remote_process.exists());
        Running {
            xtask,
            remote_folder,
            remote_process,
            lines,
        }
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .args([signal, &self.xtask.id().to_string()])
            .status();
        assert!(sent.expect("kill can be started").success());
    }

    /// Waits for xtask to end: its output, the remote folder, the remote process.
    fn finish(mut self) -> (Output, PathBuf, PathBuf) {
        drop(self.lines);
        eventually("xtask to end", || {
            self.xtask.try_wait().expect("a child").is_some()
        });
        let output = self.xtask.wait_with_output().expect("xtask has ended");
        (output, self.remote_folder, self.remote_process)
    }
}

fn user() -> String {
    let output = Command::new("id")
        .arg("-un")
        .output()
        .expect("id can be started");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
    listener.local_addr().expect("an address").port()
}

fn line_after<'a>(text: &'a str, key: &str) -> &'a str {
    text.lines()
        .find_map(|line| line.strip_prefix(key))
        .unwrap_or_else(|| panic!("no `{key}` in:\n{text}"))
}

/// Waits for SIGTERM, then behaves like the validator: reports, exit code 2.
pub(crate) const UNTIL_TERMINATED: &str = "trap 'write_reports \"$@\"; echo stopped; exit 2' TERM; echo ready; while :; do sleep 0.1; done";

#[test]
fn reports_and_exit_code_come_back_and_the_remote_folder_is_gone() {
    let server = Server::start();
    for code in [0, 1, 2, 4] {
        let stand_in = stand_in(
            &server.folder,
            &format!("code={code}; write_reports \"$@\"; exit $code"),
        );
        let output = server.validate_ami(&stand_in).output().expect("xtask runs");
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let remote_folder = line_after(&printed, "folder: ");
        assert!(remote_folder.contains("/gpu-validator."), "{remote_folder}");
        assert!(
            !Path::new(remote_folder).exists(),
            "{remote_folder} is still there"
        );
        for name in [
            "report.junit.xml",
            "report.json",
            "report.md",
            "report.html",
            "facts.json",
        ] {
            let text = std::fs::read_to_string(server.reports().join(name)).expect(name);
            assert!(text.contains("asked for by"), "{name}: {text}");
        }
        assert_eq!(
            std::fs::read_to_string(server.reports().join("stderr.txt")).expect("stderr.txt"),
            "said on stderr\n"
        );
        assert!(stderr(&output).contains("said on stderr"));
    }
}

#[test]
fn a_profile_travels_with_those_that_it_extends() {
    let server = Server::start();
    server.folder.write(
        "manifests/profiles/node.yaml",
        "name: node\nextends: ../base.yaml\n",
    );
    server.folder.write("manifests/base.yaml", "name: base\n");
    let stand_in = stand_in(
        &server.folder,
        "cat manifests/profiles/node.yaml manifests/profiles/../base.yaml; exit 3",
    );
    let output = server
        .validate_ami(&stand_in)
        .args(["--profile", "manifests/profiles/node.yaml"])
        .current_dir(server.folder.path(""))
        .output()
        .expect("xtask runs");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(
        output.status.code(),
        Some(3),
        "{printed}{}",
        stderr(&output)
    );
    assert!(
        line_after(&printed, "arguments: ").contains("--profile manifests/profiles/node.yaml"),
        "{printed}"
    );
    assert!(
        printed.ends_with("name: node\nextends: ../base.yaml\nname: base\n"),
        "{printed}"
    );
}

#[test]
fn ctrl_c_and_sigterm_still_bring_the_reports_back() {
    for signal in ["-INT", "-TERM"] {
        let server = Server::start();
        let stand_in = stand_in(&server.folder, UNTIL_TERMINATED);
        let running = Running::start(server.validate_ami(&stand_in));
        running.signal(signal);
        let (output, remote_folder, remote_process) = running.finish();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(
            server.reports().join("report.json").exists(),
            "{}",
            stderr(&output)
        );
        assert!(
            !remote_folder.exists() && !remote_process.exists(),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn a_lost_connection_is_an_error_and_leaves_nothing_behind() {
    let server = Server::start();
    let stand_in = stand_in(&server.folder, UNTIL_TERMINATED);
    let running = Running::start(server.validate_ami(&stand_in));
    server.drop_connections();
    let (output, remote_folder, remote_process) = running.finish();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("connection to gpu-under-test was lost"),
        "{}",
        stderr(&output)
    );
    assert!(stderr(&output).contains("is gone"), "{}", stderr(&output));
    assert!(
        !remote_folder.exists() && !remote_process.exists(),
        "{}",
        stderr(&output)
    );
    let printed = std::fs::read_to_string(server.reports().join("stdout.txt")).expect("stdout.txt");
    assert!(printed.contains("ready"), "{printed}");
}

#[test]
fn a_killed_xtask_leaves_nothing_behind_even_of_a_validator_that_ignores_sigterm() {
    let server = Server::start();
    let stand_in = stand_in(
        &server.folder,
        "trap '' TERM; echo ready; while :; do sleep 0.1; done",
    );
    let running = Running::start(server.validate_ami(&stand_in));
    running.signal("-KILL");
    let (output, remote_folder, remote_process) = running.finish();
    assert_eq!(output.status.code(), None);
    eventually("the remote folder to go", || !remote_folder.exists());
    eventually("the remote validator to go", || !remote_process.exists());
}

#[test]
fn an_unknown_host_key_is_refused() {
    let server = Server::start();
    server.folder.write("known_hosts", "");
    let stand_in = stand_in(&server.folder, "write_reports \"$@\"; exit 0");
    let output = server
        .validate_ami(&stand_in)
        .stdin(Stdio::null())
        .output()
        .expect("xtask runs");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("Host key verification failed"),
        "{}",
        stderr(&output)
    );
    assert!(
        output.stdout.is_empty(),
        "something ran: {}",
        String::from_utf8_lossy(&output.stdout)
    );
}

#[test]
fn a_binary_that_cannot_start_there_is_named_as_such() {
    let server = Server::start();
    let stand_in = server
        .folder
        .write_executable("stand-in", "#!/no/such/interpreter\n");
    let output = server.validate_ami(&stand_in).output().expect("xtask runs");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("could not be started"),
        "{}",
        stderr(&output)
    );
}
