//! The kubelet's configuration after `kubelet-taints-unvalidated.sh`, for every way in which
//! nodeadm configures it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use xtask::workspace;

const TAINT: &str = "gpu-bringup.dev/unvalidated=true:NoSchedule";

pub(super) fn check() -> anyhow::Result<()> {
    let folder = workspace::target().join("images/kubelet-taint");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder)?;
    let configured = folder.join("config.json");
    std::fs::write(
        &configured,
        r#"{"registerWithTaints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}, {"key": "a", "effect": "NoExecute"}]}"#,
    )?;
    let missing = folder.join("none.json");
    let node = Node { folder: &folder };

    let passed = node.kubelet_arguments(true, "--v=2", &missing)?;
    ensure!(passed.is_none(), "a node that passed gets {passed:?}");
    for (arguments, configuration, expected) in [
        (
            "--v=2",
            &missing,
            format!("--v=2 --register-with-taints={TAINT}"),
        ),
        (
            "--register-with-taints=nvidia.com/gpu=true:NoSchedule --v=2",
            &configured,
            format!("--register-with-taints=nvidia.com/gpu=true:NoSchedule,{TAINT} --v=2"),
        ),
        (
            r#"--node-labels="a=b" --v=2"#,
            &configured,
            format!(
                r#"--node-labels="a=b" --v=2 --register-with-taints=nvidia.com/gpu=true:NoSchedule,a=:NoExecute,{TAINT}"#
            ),
        ),
    ] {
        let told = node.kubelet_arguments(false, arguments, configuration)?;
        ensure!(
            told.as_deref() == Some(&*expected),
            "with {arguments} kubelet is told {told:?}, expected {expected:?}"
        );
    }
    drop_ins(&node, &folder)?;
    let unconfigured = node.run(false, "", &missing)?;
    ensure!(
        !unconfigured.success(),
        "kubelet starts although nodeadm has not configured it"
    );
    println!("kubelet-taint: a node that did not pass is registered with {TAINT}");
    Ok(())
}

/// As the kubelet merges them (kubernetes, cmd/kubelet/app/server.go,
/// `mergeKubeletConfigurations`): files that end with `.conf`, in the order of their names, each a
/// merge patch of what was before, so that a later list replaces an earlier one.
fn drop_ins(node: &Node<'_>, folder: &Path) -> anyhow::Result<()> {
    let drop_ins = folder.join("config.json.d");
    std::fs::create_dir_all(&drop_ins)?;
    let configuration = folder.join("base.json");
    let taints = |key: &str| {
        format!(r#"{{"registerWithTaints": [{{"key": "{key}", "effect": "NoSchedule"}}]}}"#)
    };
    let write = |name: &str, text: &str| std::fs::write(drop_ins.join(name), text);
    std::fs::write(&configuration, taints("base"))?;
    let arguments = format!(
        "--config={} --config-dir={}",
        configuration.display(),
        drop_ins.display()
    );
    let elsewhere = folder.join("none.json");
    let expect = |arguments: &str, taints: &str| -> anyhow::Result<()> {
        let expected = format!("{arguments} --register-with-taints={taints}");
        let given = node.kubelet_arguments(false, arguments, &elsewhere)?;
        ensure!(
            given.as_deref() == Some(&*expected),
            "with drop-ins the kubelet gets {given:?}, expected {expected:?}"
        );
        Ok(())
    };
    write("40-nodeadm.conf", r#"{"maxPods": 20}"#)?;
    expect(&arguments, &format!("base=:NoSchedule,{TAINT}"))?;
    write("40-nodeadm.conf", &taints("karpenter.sh/unregistered"))?;
    write("90-other.json", &taints("not-a-drop-in"))?;
    expect(
        &arguments,
        &format!("karpenter.sh/unregistered=:NoSchedule,{TAINT}"),
    )?;
    // Without the flag the kubelet reads no folder.
    let without = format!("--config={}", configuration.display());
    expect(&without, &format!("base=:NoSchedule,{TAINT}"))?;
    write("50-more.conf", r#"{"registerWithTaints": null}"#)?;
    expect(&arguments, TAINT)?;

    // The API server refuses a node with the same taint twice.
    write("50-more.conf", &taints("gpu-bringup.dev/unvalidated"))?;
    let given = node.kubelet_arguments(false, &arguments, &elsewhere)?;
    ensure!(
        given.is_none(),
        "a taint that the kubelet has already is given again: {given:?}"
    );
    let flag = format!("--v=2 --register-with-taints=a=b:NoSchedule,{TAINT}");
    let given = node.kubelet_arguments(false, &flag, &elsewhere)?;
    ensure!(
        given.is_none(),
        "a taint that the flag has already is given again: {given:?}"
    );
    // The kubelet takes the last flag.
    let given = node.kubelet_arguments(
        false,
        "--register-with-taints=a=b:NoSchedule --register-with-taints c=d:NoExecute --v=2",
        &elsewhere,
    )?;
    let expected = format!(
        "--register-with-taints=a=b:NoSchedule --register-with-taints=c=d:NoExecute,{TAINT} --v=2"
    );
    ensure!(
        given.as_deref() == Some(&*expected),
        "of two flags the kubelet gets {given:?}, expected {expected:?}"
    );

    write("50-more.conf", "registerWithTaints: []")?;
    let status = node.run(false, &arguments, &elsewhere)?;
    ensure!(
        !status.success(),
        "the kubelet starts although a drop-in could not be read"
    );
    Ok(())
}

struct Node<'a> {
    folder: &'a Path,
}

impl Node<'_> {
    /// What systemd would read into `NODEADM_KUBELET_ARGS`; `None` where nothing was written.
    fn kubelet_arguments(
        &self,
        passed: bool,
        arguments: &str,
        configuration: &Path,
    ) -> anyhow::Result<Option<String>> {
        let status = self.run(passed, arguments, configuration)?;
        ensure!(status.success(), "the script ended with {status}");
        let path = self.folder.join("environment");
        let Ok(text) = std::fs::read_to_string(&path) else {
            return Ok(None);
        };
        let quoted = text
            .trim_end()
            .strip_prefix("NODEADM_KUBELET_ARGS=\"")
            .and_then(|rest| rest.strip_suffix('"'))
            .with_context(|| format!("{} holds {text:?}", path.display()))?;
        Ok(Some(quoted.replace("\\\"", "\"")))
    }

    fn run(
        &self,
        passed: bool,
        arguments: &str,
        configuration: &Path,
    ) -> anyhow::Result<std::process::ExitStatus> {
        let programs = self.systemctl(passed)?;
        let path = std::env::var("PATH").unwrap_or_default();
        let script = workspace::root().join("packer/files/kubelet-taints-unvalidated.sh");
        let output = Command::new(script)
            .arg(self.folder)
            .arg(configuration)
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("NODEADM_KUBELET_ARGS", arguments)
            .output()
            .context("the script could not be started")?;
        Ok(output.status)
    }

    /// A `systemctl` that answers whether the validation's unit is active.
    fn systemctl(&self, active: bool) -> anyhow::Result<PathBuf> {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = self.folder.join("programs");
        std::fs::create_dir_all(&folder)?;
        let code = if active { 0 } else { 3 };
        let text = format!(
            "#!/bin/sh\n[ \"$*\" = 'is-active --quiet gpu-validator-firstboot.service' ] || exit 9\nexit {code}\n"
        );
        let program = folder.join("systemctl");
        std::fs::write(&program, text)?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
        Ok(folder)
    }
}
