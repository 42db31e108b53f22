//! A simulated build instance: a namespace with a small Debian userland, reached through an sshd on
//! loopback.

use std::io::{BufRead as _, BufReader};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use xshell::cmd;

use super::cloud::Cloud;
use xtask::loopback::free_port;
use xtask::{debian_userland, workspace};

const SSHD: &str = "/usr/sbin/sshd";
const START_DEADLINE: Duration = Duration::from_secs(30);

/// What the provisioners call and is not simulated.
const USERLAND_PACKAGES: &str = "bash,coreutils,dash,findutils,gawk,grep,gzip,iproute2,jq,kmod,libc-bin,nftables,openssh-client,python3-minimal,sed,\
    sudo,tar,util-linux";

/// The operating system that an instance reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperatingSystem {
    AmazonLinux2023,
    Ubuntu2204,
    Ubuntu2404,
}

impl OperatingSystem {
    fn id(self) -> &'static str {
        match self {
            Self::AmazonLinux2023 => "amzn",
            Self::Ubuntu2204 | Self::Ubuntu2404 => "ubuntu",
        }
    }

    fn os_release(self) -> &'static str {
        match self {
            Self::AmazonLinux2023 => {
                "ID=amzn\nVERSION_ID=2023\nPRETTY_NAME=\"Amazon Linux 2023\"\n"
            }
            Self::Ubuntu2204 => "ID=ubuntu\nVERSION_ID=22.04\nPRETTY_NAME=\"Ubuntu 22.04.5 LTS\"\n",
            Self::Ubuntu2404 => "ID=ubuntu\nVERSION_ID=24.04\nPRETTY_NAME=\"Ubuntu 24.04.3 LTS\"\n",
        }
    }

    fn kernel_release(self) -> &'static str {
        match self {
            Self::AmazonLinux2023 => "6.1.155-176.282.amzn2023.x86_64",
            Self::Ubuntu2204 => "6.8.0-1035-aws",
            Self::Ubuntu2404 => "6.14.0-1015-aws",
        }
    }

    /// What its package manager finds: a file of tests/images/packages.
    fn packages(self) -> &'static str {
        match self {
            Self::AmazonLinux2023 => "amzn2023",
            Self::Ubuntu2204 => "ubuntu22.04",
            Self::Ubuntu2404 => "ubuntu24.04",
        }
    }

    /// The files of the image that the template starts from: a folder of tests/images/base.
    fn base(self) -> Option<&'static str> {
        match self {
            // The one template on Ubuntu 22.04 starts from Canonical's EKS image.
            Self::Ubuntu2204 => Some("eks-ubuntu"),
            Self::AmazonLinux2023 | Self::Ubuntu2404 => None,
        }
    }
}

#[derive(Debug)]
pub(super) struct Instance {
    namespace: Child,
    sshd: Option<Child>,
    /// A process inside, by which others enter.
    inside: String,
    root: PathBuf,
    pub(super) port: u16,
    has_users: bool,
}

/// Who a command runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum User {
    Root,
    Runner,
}

impl Instance {
    /// Boots an instance in `folder`. `fault` is one of tests/images/README.md, or empty.
    pub(super) fn start(
        folder: &Path,
        cloud: &Cloud,
        userland: &Path,
        operating_system: OperatingSystem,
        driver_version: &str,
        fault: &str,
    ) -> anyhow::Result<Instance> {
        let simulated = folder.join("simulated");
        describe(&simulated, operating_system, driver_version, fault)?;
        let mut instance = Instance::enter_namespace(folder, userland, &simulated, false)?;
        instance.start_sshd(folder, cloud)?;
        Ok(instance)
    }

    /// sshd runs outside as this user, who may log in as no other user; every command is carried
    /// inside. An instance without sshd, whose users are several: files have owners, and commands
    /// run as one of them. The user needs subordinate ids where it is not root.
    pub(super) fn with_users(
        folder: &Path,
        userland: &Path,
        operating_system: OperatingSystem,
        driver_version: &str,
    ) -> anyhow::Result<Instance> {
        let simulated = folder.join("simulated");
        describe(&simulated, operating_system, driver_version, "")?;
        std::fs::write(simulated.join("users"), "")?;
        Instance::enter_namespace(folder, userland, &simulated, true)
    }

    fn enter_namespace(
        folder: &Path,
        userland: &Path,
        simulated: &Path,
        has_users: bool,
    ) -> anyhow::Result<Instance> {
        let root = folder.join("root");
        std::fs::create_dir_all(&root)?;
        let ids: &[&str] = match (has_users, user()? == "root") {
            (false, _) => &["--map-root-user"],
            (true, true) => &[],
            (true, false) => &["--map-root-user", "--map-auto"],
        };
        let mut namespace = Command::new("unshare")
            .args(ids)
            .args(["--mount", "--pid", "--fork", "--kill-child"])
            // Its own network: rules for packets are tried there.
            .args(has_users.then_some("--net"))
            .arg(workspace::root().join("tests/images/instance.sh"))
            .args([root.as_path(), userland, simulated])
            .stdout(Stdio::piped())
            .spawn()
            .context("unshare could not be started")?;
        let mut line = String::new();
        let stdout = namespace.stdout.take().context("no pipe")?;
        BufReader::new(stdout).read_line(&mut line)?;
        ensure!(
            line.trim() == "ready",
            "the simulated machine did not start; see above"
        );
        Ok(Instance {
            inside: first_child(namespace.id())?,
            namespace,
            sshd: None,
            root,
            port: free_port()?,
            has_users,
        })
    }

    /// Runs a script of bash inside. Variables are `NAME=VALUE`.
    pub(super) fn bash(
        &self,
        user: User,
        variables: &[String],
        script: &str,
    ) -> anyhow::Result<std::process::Output> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.inside, "--mount", "--pid"]);
        command.args(self.has_users.then_some("--net"));
        if !(self.has_users && self::user()? == "root") {
            command.args(["--user", "--preserve-credentials"]);
        }
        command.arg("chroot").arg(&self.root);
        if user == User::Runner {
            ensure!(self.has_users, "this instance has no user but root");
            command.args([
                "/usr/bin/setpriv",
                "--reuid=runner",
                "--regid=runner",
                "--init-groups",
            ]);
        }
        command
            .args(["/usr/bin/env", "-i", "HOME=/root"])
            .arg("PATH=/simulated/stand-ins:/usr/sbin:/usr/bin:/sbin:/bin")
            .args(variables)
            .args(["/bin/bash", "-c", script])
            .output()
            .context("nsenter could not be started")
    }

    fn start_sshd(&mut self, folder: &Path, cloud: &Cloud) -> anyhow::Result<()> {
        ensure!(
            Path::new(SSHD).exists(),
            "{SSHD} is missing; install it (Debian and Ubuntu: apt-get install openssh-server)"
        );
        let enter = folder.join("enter");
        let text = format!(
            "#!/bin/sh\nexec nsenter --target {} --user --mount --pid --preserve-credentials chroot '{}' \\\n  \
             /usr/bin/env -i HOME=/root PATH=/simulated/stand-ins:/usr/sbin:/usr/bin:/sbin:/bin \\\n  \
             /bin/bash -c \"$SSH_ORIGINAL_COMMAND\"\n",
            self.inside,
            self.root.display()
        );
        std::fs::write(&enter, text)?;
        std::fs::set_permissions(&enter, std::fs::Permissions::from_mode(0o755))?;
        let shell = workspace::shell()?;
        let host_key = folder.join("host-key");
        cmd!(shell, "ssh-keygen -q -t ed25519 -N '' -f {host_key}")
            .quiet()
            .run()?;
        // bash takes a shell of level 2 for none that sshd started, and leaves this user's own
        // start-up files alone. Programs that return keys to sshd must be root's, so Python is, and
        // the script is its argument.
        let configuration = format!(
            "ListenAddress 127.0.0.1\nPort {}\nHostKey {}\nAuthorizedKeysFile none\n\
             AuthorizedKeysCommand /usr/bin/python3 -I {} {}/\nAuthorizedKeysCommandUser {}\nPidFile none\nUsePAM no\n\
             StrictModes no\nPasswordAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\n\
             SetEnv SHLVL=2\nForceCommand {}\n",
            self.port,
            host_key.display(),
            workspace::root()
                .join("tests/images/authorized_keys.py")
                .display(),
            cloud.endpoint(),
            user()?,
            enter.display()
        );
        let path = folder.join("sshd_config");
        std::fs::write(&path, configuration)?;
        // sshd wants this folder when it runs as root, and only its service makes it.
        if user()? == "root" {
            std::fs::create_dir_all("/run/sshd")?;
        }
        let log = std::fs::File::create(folder.join("sshd.log"))?;
        let sshd = Command::new(SSHD)
            .args(["-D", "-e", "-f"])
            .arg(&path)
            .stderr(log)
            .spawn()?;
        self.sshd = Some(sshd);
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            ensure!(
                started.elapsed() < START_DEADLINE,
                "sshd does not listen; see sshd.log"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// The user that Packer must log in as.
    pub(super) fn user() -> anyhow::Result<String> {
        user()
    }

    /// A file of the instance.
    pub(super) fn read(&self, path: &str) -> anyhow::Result<String> {
        let inside = &self.inside;
        let shell = workspace::shell()?;
        let path = format!("{}{path}", self.root.display());
        let user: &[&str] = if self.has_users && user()? == "root" {
            &[]
        } else {
            &["--user", "--preserve-credentials"]
        };
        Ok(cmd!(
            shell,
            "nsenter --target {inside} --mount {user...} cat {path}"
        )
        .quiet()
        .read()?)
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if let Some(sshd) = &mut self.sshd {
            let _ = sshd.kill();
            let _ = sshd.wait();
        }
        // Its namespace's first process dies with it, and with that everything inside.
        let _ = self.namespace.kill();
        let _ = self.namespace.wait();
    }
}

fn user() -> anyhow::Result<String> {
    let shell = workspace::shell()?;
    Ok(cmd!(shell, "id --user --name").quiet().read()?)
}

fn first_child(parent: u32) -> anyhow::Result<String> {
    let shell = workspace::shell()?;
    let parent = parent.to_string();
    let children = cmd!(shell, "pgrep --parent {parent}").quiet().read()?;
    children
        .lines()
        .next()
        .map(str::to_owned)
        .context("the simulated machine has no process")
}

/// The userland that every instance copies.
pub(super) fn userland() -> anyhow::Result<PathBuf> {
    let shell = workspace::shell()?;
    debian_userland::bootstrap(&shell, "build-machine", "bookworm", USERLAND_PACKAGES)
}

/// What the stand-ins read.
pub(super) fn describe(
    folder: &Path,
    operating_system: OperatingSystem,
    driver_version: &str,
    fault: &str,
) -> anyhow::Result<()> {
    let downloads = folder.join("downloads");
    let stand_ins = folder.join("stand-ins");
    std::fs::create_dir_all(&stand_ins)?;
    std::fs::create_dir_all(&downloads)?;
    let shell = workspace::shell()?;
    for program in ["internet", "machine", "nvidia-persistenced"] {
        let from = format!("tests/images/stand-ins/{program}");
        shell.copy_file(from, stand_ins.join(program))?;
    }
    let packages = format!("tests/images/packages/{}", operating_system.packages());
    let text = shell.read_file(packages)?;
    let packages: String = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .flat_map(|line| [line, "\n"])
        .collect();
    shell.write_file(folder.join("packages"), packages)?;
    if let Some(base) = operating_system.base() {
        let (from, to) = (format!("tests/images/base/{base}"), folder.join("base"));
        cmd!(shell, "cp --recursive {from} {to}").quiet().run()?;
    }
    let kernel = operating_system.kernel_release();
    for (name, text) in [
        ("os", operating_system.id()),
        ("os-release", operating_system.os_release()),
        ("kernel-release", kernel),
        ("fault", fault),
        ("credentials", "[default]\n"),
        ("calls", ""),
        ("installed", ""),
        ("downloads/cuda-keyring_1.1-1_all.deb", "package"),
        (
            "downloads/D42D0685.pub",
            // What gpg prints of NVIDIA's key, as far as it is read.
            "pub:-:4096:1:9CD0A493D42D0685:1649894400:::-:::scSC::::::23::0:\n\
             fpr:::::::::610C7B14E068A878070DA4E99CD0A493D42D0685:\n",
        ),
    ] {
        std::fs::write(folder.join(name), text)?;
    }
    for (file, name) in [("nvidia", "nvidia"), ("nvidia-uvm", "nvidia_uvm")] {
        kernel_module(
            &folder.join(format!("{file}.ko")),
            name,
            driver_version,
            kernel,
        )?;
    }
    Ok(())
}

/// An object file with what `modinfo` reads of a kernel module.
fn kernel_module(path: &Path, name: &str, version: &str, kernel: &str) -> anyhow::Result<()> {
    let source = format!(
        ".section .modinfo,\"a\",@progbits\n.asciz \"version={version}\"\n.asciz \"license=Dual MIT/GPL\"\n\
         .asciz \"vermagic={kernel} SMP mod_unload\"\n.asciz \"name={name}\"\n"
    );
    let shell = workspace::shell()?;
    cmd!(shell, "as -o {path} -")
        .stdin(source)
        .quiet()
        .run()
        .context("no assembler; install binutils")?;
    Ok(())
}
