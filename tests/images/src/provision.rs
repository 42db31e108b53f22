//! What the provisioners leave on a simulated machine, without Packer and AWS: how it joins its
//! cluster, what its services start with, and what a job may do on a runner.

use std::path::Path;
use std::process::Output;

use anyhow::{Context as _, ensure};
use xshell::cmd;

use super::bake::{CUDA_KEYRING_SHA256, DRIVER_VERSION, RUNNER_VERSION, runner_archive};
use super::instance::{self, Instance, OperatingSystem, User};
use xtask::workspace;

mod adversary;

const TOOLKIT_VERSION: &str = "1.18.2";
const UPLOADED: &str = "/tmp/gpu-bringup";

/// A machine that is provisioned, in `target/images/provision/TEMPLATE-FAMILY`.
#[derive(Debug)]
struct Machine {
    template: &'static str,
    operating_system: OperatingSystem,
    gpu_family: &'static str,
    gated_unit: &'static str,
    fabric_manager: bool,
    check: fn(&Instance) -> anyhow::Result<()>,
}

const MACHINES: [Machine; 4] = [
    Machine {
        template: "eks-gpu-al2023",
        operating_system: OperatingSystem::AmazonLinux2023,
        gpu_family: "p6-b200",
        gated_unit: "kubelet.service",
        fabric_manager: true,
        check: loads_its_modules,
    },
    Machine {
        template: "eks-gpu-ubuntu2204",
        operating_system: OperatingSystem::Ubuntu2204,
        gpu_family: "p5",
        gated_unit: "snap.kubelet-eks.daemon.service",
        fabric_manager: true,
        check: joins_with_the_nvidia_runtime,
    },
    Machine {
        template: "eks-gpu-ubuntu2204",
        operating_system: OperatingSystem::Ubuntu2204,
        gpu_family: "p6-b200",
        gated_unit: "snap.kubelet-eks.daemon.service",
        fabric_manager: true,
        check: loads_its_modules,
    },
    Machine {
        template: "ubuntu2404-runner",
        operating_system: OperatingSystem::Ubuntu2404,
        gpu_family: "g6",
        gated_unit: "actions-runner.service",
        fabric_manager: false,
        check: adversary::check,
    },
];

pub(super) fn check() -> anyhow::Result<()> {
    let folder = workspace::target().join("images/provision");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder)?;
    let userland = instance::userland()?;
    let validator = workspace::debug_validator(&workspace::shell()?)?;
    for machine in &MACHINES {
        let name = format!("{}-{}", machine.template, machine.gpu_family);
        machine
            .run(&folder.join(&name), &userland, &validator)
            .with_context(|| format!("machine {name}"))?;
        println!("provision: {name}");
    }
    Ok(())
}

impl Machine {
    fn run(&self, folder: &Path, userland: &Path, validator: &Path) -> anyhow::Result<()> {
        let downloads = folder.join("simulated/downloads");
        std::fs::create_dir_all(&downloads)?;
        let runner_sha256 = runner_archive(folder, &downloads)?;
        upload(&folder.join("simulated/uploaded"), validator)?;
        let instance =
            Instance::with_users(folder, userland, self.operating_system, DRIVER_VERSION)?;
        let prepare = format!(
            "mkdir -p /tmp && cp --recursive /simulated/uploaded {UPLOADED} && rm -r /simulated/uploaded"
        );
        succeeded(&instance.bash(User::Root, &[], &prepare)?)?;
        if self.operating_system == OperatingSystem::AmazonLinux2023 {
            self.refuses_another_key(&instance)?;
        }
        for (script, variables) in self.provisioners(&runner_sha256) {
            let path = workspace::root().join("packer/provisioners").join(script);
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("{} cannot be read", path.display()))?;
            let output = instance.bash(User::Root, &variables, &text)?;
            succeeded(&output).with_context(|| script.to_owned())?;
        }
        persistence_mode_is_on(&instance)?;
        (self.check)(&instance)
    }

    /// An attacker who controls the repository controls its key.
    fn refuses_another_key(&self, instance: &Instance) -> anyhow::Result<()> {
        let (script, variables) = self
            .provisioners("")
            .into_iter()
            .find(|(script, _)| script.starts_with("install-nvidia-driver"))
            .context("no provisioner installs the driver")?;
        let path = workspace::root().join("packer/provisioners").join(script);
        let text = std::fs::read_to_string(path)?;
        let key = "/simulated/downloads/D42D0685.pub";
        for change in [
            "s/610C/610D/",
            "$a pub:-:4096:1:0000000000000000:1:::-:::scSC::::::23::0:",
        ] {
            let spoil = format!("cp {key} {key}.right && sed --in-place '{change}' {key}");
            succeeded(&instance.bash(User::Root, &[], &spoil)?)?;
            let output = instance.bash(User::Root, &variables, &text)?;
            let message = String::from_utf8_lossy(&output.stderr);
            ensure!(
                !output.status.success()
                    && message.contains("610C7B14E068A878070DA4E99CD0A493D42D0685"),
                "packages are installed with another key than NVIDIA's ({change}): {}\n{message}",
                output.status
            );
            succeeded(&instance.bash(User::Root, &[], &format!("mv {key}.right {key}"))?)?;
        }
        Ok(())
    }

    /// In the order of packer/build.pkr.hcl, with its variables.
    fn provisioners(&self, runner_sha256: &str) -> Vec<(&'static str, Vec<String>)> {
        let variables = |pairs: &[(&str, &str)]| -> Vec<String> {
            let pairs = pairs.iter();
            pairs
                .map(|(name, value)| format!("{name}={value}"))
                .collect()
        };
        let driver = variables(&[
            ("GPU_FAMILY", self.gpu_family),
            ("NVIDIA_DRIVER_VERSION", DRIVER_VERSION),
            ("NVIDIA_KERNEL_MODULE", "open"),
            (
                "FABRIC_MANAGER",
                if self.fabric_manager { "true" } else { "false" },
            ),
            ("CUDA_TOOLKIT_VERSION", ""),
            ("CUDA_KEYRING_SHA256", CUDA_KEYRING_SHA256),
        ]);
        let is_ubuntu = self.operating_system != OperatingSystem::AmazonLinux2023;
        let mut scripts = vec![
            ("wait-for-cloud-init.sh", Vec::new()),
            if is_ubuntu {
                ("install-nvidia-driver-ubuntu.sh", driver)
            } else {
                ("install-nvidia-driver-al2023.sh", driver)
            },
            (
                "install-container-toolkit.sh",
                variables(&[("NVIDIA_CONTAINER_TOOLKIT_VERSION", TOOLKIT_VERSION)]),
            ),
        ];
        if self.operating_system == OperatingSystem::Ubuntu2204 {
            scripts.push(("configure-containerd-ubuntu.sh", Vec::new()));
        }
        scripts.push((
            "install-gpu-validator.sh",
            variables(&[
                ("UPLOADED_FOLDER", UPLOADED),
                ("GPU_FAMILY", self.gpu_family),
                ("GATED_UNIT", self.gated_unit),
            ]),
        ));
        if self.template == "ubuntu2404-runner" {
            scripts.push((
                "install-actions-runner.sh",
                variables(&[
                    ("UPLOADED_FOLDER", UPLOADED),
                    ("ACTIONS_RUNNER_VERSION", RUNNER_VERSION),
                    ("ACTIONS_RUNNER_SHA256", runner_sha256),
                ]),
            ));
        }
        scripts
    }
}

/// What Packer uploads.
fn upload(uploaded: &Path, validator: &Path) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    shell.create_dir(uploaded)?;
    for (from, to) in [
        ("packer/files", "files"),
        ("workflows/hooks", "hooks"),
        ("manifests/profiles", "profiles"),
    ] {
        let to = uploaded.join(to);
        cmd!(shell, "cp --recursive {from} {to}").quiet().run()?;
    }
    shell.copy_file(validator, uploaded.join("gpu-validator"))?;
    let man_page = cmd!(shell, "{validator} generate man").quiet().read()?;
    shell.write_file(uploaded.join("gpu-validator.1"), man_page)?;
    Ok(())
}

/// What a successful command printed.
fn succeeded(output: &Output) -> anyhow::Result<String> {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success(),
        "ended with {}\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(stdout)
}

/// The unit as systemd would start it: the package's, and the drop-ins of /etc over it.
fn persistence_mode_is_on(instance: &Instance) -> anyhow::Result<()> {
    const UNIT: &str = "nvidia-persistenced.service";
    let text = succeeded(&instance.bash(
        User::Root,
        &[],
        &format!("cat /usr/lib/systemd/system/{UNIT}; shopt -s nullglob; for file in /etc/systemd/system/{UNIT}.d/*.conf; do cat \"$file\"; done"),
    )?)?;
    let mut command = "";
    let mut stops_when_unneeded = false;
    for line in text.lines() {
        if let Some(value) = line.strip_prefix("ExecStart=") {
            command = value;
        }
        if let Some(value) = line.strip_prefix("StopWhenUnneeded=") {
            stops_when_unneeded = matches!(value, "true" | "yes" | "on" | "1");
        }
    }
    ensure!(
        !command.is_empty() && !command.contains("--no-persistence-mode") && !stops_when_unneeded,
        "{UNIT} starts `{command}` (StopWhenUnneeded: {stops_when_unneeded}): the GPUs would have no persistence mode, which every profile asks for"
    );
    let wants = format!("test -e /etc/systemd/system/multi-user.target.wants/{UNIT}");
    succeeded(&instance.bash(User::Root, &[], &wants)?)
        .with_context(|| format!("no target starts {UNIT} at boot"))?;
    Ok(())
}

/// A file of /etc/modules-load.d names only modules that the running kernel has.
fn loads_its_modules(instance: &Instance) -> anyhow::Result<()> {
    let missing = succeeded(&instance.bash(
        User::Root,
        &[],
        "for module in $(cat /etc/modules-load.d/*.conf); do\n  \
           [ -n \"$(find \"/lib/modules/$(uname --kernel-release)\" -name \"${module//_/[-_]}.ko*\")\" ] || echo \"$module\"\ndone",
    )?)?;
    ensure!(
        missing.is_empty(),
        "modules that are loaded at boot and are not there:\n{missing}"
    );
    Ok(())
}

/// As modules/eks-gpu starts it in user data.
const JOIN: &str = "/etc/eks/bootstrap.sh training --apiserver-endpoint https://example --b64-cluster-ca LS0t \
    --kubelet-extra-args '--node-labels=role=gpu'";

fn joins_with_the_nvidia_runtime(instance: &Instance) -> anyhow::Result<()> {
    succeeded(&instance.bash(User::Root, &[], JOIN)?)?;
    let text = instance.read("/etc/containerd/config.toml")?;
    let configuration: toml::Value = toml::from_str(&text)
        .with_context(|| format!("containerd cannot read its configuration:\n{text}"))?;
    let cri = configuration
        .get("plugins")
        .and_then(|plugins| plugins.get("io.containerd.grpc.v1.cri"))
        .context("containerd has no CRI plugin")?;
    let at = |path: &[&str]| {
        path.iter()
            .try_fold(cri, |value, key| value.get(key))
            .cloned()
    };
    let runtimes = ["containerd", "runtimes"];
    let option = |runtime, name| at(&[runtimes[0], runtimes[1], runtime, "options", name]);
    ensure!(
        option("nvidia", "BinaryName")
            .as_ref()
            .and_then(toml::Value::as_str)
            == Some("/usr/bin/nvidia-container-runtime"),
        "containerd has no handler for the runtime class nvidia:\n{text}"
    );
    ensure!(
        option("nvidia", "SystemdCgroup") == option("runc", "SystemdCgroup"),
        "the handlers nvidia and runc have different cgroup drivers:\n{text}"
    );
    for wanted in [
        &["sandbox_image"][..],
        &["cni", "bin_dir"],
        &["cni", "conf_dir"],
    ] {
        ensure!(
            at(wanted).is_some(),
            "containerd has no {}:\n{text}",
            wanted.join(".")
        );
    }
    Ok(())
}

/// The folder of the provisioners, for tests.
#[cfg(test)]
fn provisioners() -> std::path::PathBuf {
    workspace::root().join("packer/provisioners")
}

#[cfg(test)]
mod tests {
    use super::{MACHINES, provisioners};

    /// A provisioner that build.pkr.hcl runs and this list lacks would not be tested here, and the
    /// other way round.
    #[test]
    fn the_provisioners_are_those_of_the_template() {
        let template = include_str!("../../../packer/build.pkr.hcl");
        let ours: Vec<&str> = MACHINES
            .iter()
            .flat_map(|machine| machine.provisioners(""))
            .map(|(script, _)| script)
            .collect();
        for script in &ours {
            assert!(provisioners().join(script).exists(), "{script}");
            assert!(
                template.contains(&format!("/provisioners/{script}\"")),
                "{script}"
            );
        }
        // Steps that inspect or clean the machine belong to whole bakes.
        let others = [
            "start-nvidia-driver.sh",
            "run-validation.sh",
            "clean-image.sh",
            "end-with-verdict.sh",
        ];
        for script in template
            .lines()
            .filter_map(|line| line.split_once("/provisioners/")?.1.split('"').next())
        {
            assert!(
                ours.contains(&script) || others.contains(&script),
                "{script}"
            );
        }
    }
}
