//! The systemd units of the images, as systemd itself sees them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use xshell::{Shell, cmd};

use xtask::workspace;

/// `systemd-analyze security` counts from 0 (shut) to 100. What the validator must see and do
/// (devices, modules, processes, root) is most of what is left.
const EXPOSURE_MAXIMUM: u8 = 60;

/// Programs that the units start, which are on the image only.
const PROGRAMS: [&str; 13] = [
    "usr/bin/chown",
    "usr/sbin/nft",
    "opt/actions-runner/run.sh",
    "snap/bin/kubelet-eks",
    "usr/bin/gpu-validator",
    "usr/bin/kubelet",
    "usr/bin/true",
    "usr/libexec/gpu-bringup/actions-runner-after-job.sh",
    "usr/libexec/gpu-bringup/actions-runner-registration.sh",
    "usr/libexec/gpu-bringup/actions-runner-start.sh",
    "usr/libexec/gpu-validator/kubelet-taints-unvalidated.sh",
    "usr/libexec/gpu-validator/withheld.sh",
    "usr/share/docker.io/contrib/dockerd-rootless.sh",
];

/// Those that are on the image of a runner besides its own.
const OF_RUNNER: [&str; 3] = [
    "actions-runner-docker.service",
    "actions-runner-metadata.service",
    "actions-runner-registration.service",
];

/// The units of Amazon's and Canonical's images, as far as ours touch them.
const KUBELET: &str = "[Unit]\nDescription=kubelet\n[Service]\nEnvironmentFile=/etc/eks/kubelet/environment\n\
    ExecStart=/usr/bin/kubelet $NODEADM_KUBELET_ARGS\n";
const KUBELET_SNAP: &str =
    "[Unit]\nDescription=kubelet\n[Service]\nExecStart=/snap/bin/kubelet-eks\n";

/// cloud-init's, as Canonical's images order and enable them.
const CLOUD_INIT: [(&str, &str); 2] = [
    (
        "cloud-final.service",
        "[Unit]\nAfter=network-online.target multi-user.target\n[Service]\nType=oneshot\nExecStart=/usr/bin/true\n",
    ),
    (
        "cloud-init.target",
        "[Unit]\nAfter=multi-user.target\nWants=cloud-final.service\n",
    ),
];

/// The units that wait, with the drop-in that makes them.
const GATED: [(&str, &str); 4] = [
    ("kubelet.service", "requires-gpu-validator.conf"),
    ("kubelet.service", "kubelet-taints-unvalidated.conf"),
    (
        "snap.kubelet-eks.daemon.service",
        "requires-gpu-validator.conf",
    ),
    ("actions-runner.service", "requires-gpu-validator.conf"),
];

const VALIDATION: &str = "gpu-validator-firstboot.service";
const WITHHELD: &str = "gpu-validator-withheld.service";

pub(super) fn check() -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let root = workspace::target().join("images/units");
    for (gated, drop_in) in GATED {
        lay_out(&shell, &root, gated, drop_in)?;
        verify(&root, &[VALIDATION, WITHHELD, gated])?;
        if gated == "actions-runner.service" {
            verify(&root, &OF_RUNNER)?;
        }
        // A boot as a whole: systemd leaves a unit out where units wait for each other.
        verify(&root, &["multi-user.target"])?;
    }
    let maximum = EXPOSURE_MAXIMUM.to_string();
    cmd!(
        shell,
        "systemd-analyze security --offline=true --no-pager --root={root} --threshold={maximum} {VALIDATION}"
    )
    .quiet()
    .ignore_stdout()
    .run()
    .with_context(|| format!("{VALIDATION} is more exposed than {maximum} of 100"))?;
    println!("units: systemd takes {VALIDATION} and every unit that waits for it");
    Ok(())
}

/// A root folder with the machine's own units, so that what ours name is there.
fn lay_out(shell: &Shell, root: &Path, gated: &str, drop_in: &str) -> anyhow::Result<()> {
    let files = workspace::root().join("packer/files");
    let units = root.join("etc/systemd/system");
    shell.remove_path(root)?;
    shell.create_dir(units.join(format!("{gated}.d")))?;
    shell.create_dir(root.join("usr/lib/systemd"))?;
    cmd!(
        shell,
        "cp --archive /usr/lib/systemd/system {root}/usr/lib/systemd/"
    )
    .quiet()
    .run()
    .context(
        "this machine has no systemd; install it (Debian and Ubuntu: apt-get install systemd)",
    )?;
    for program in PROGRAMS {
        let path = root.join(program);
        shell.write_file(&path, "#!/bin/sh\n")?;
        cmd!(shell, "chmod +x {path}").quiet().run()?;
    }
    for unit in [VALIDATION, WITHHELD, "actions-runner.service"]
        .iter()
        .chain(&OF_RUNNER)
    {
        shell.copy_file(files.join(unit), units.join(unit))?;
    }
    shell.write_file(units.join("kubelet.service"), KUBELET)?;
    shell.write_file(units.join("snap.kubelet-eks.daemon.service"), KUBELET_SNAP)?;
    for (unit, text) in CLOUD_INIT {
        shell.write_file(units.join(unit), text)?;
    }
    let wants = shell.create_dir(units.join("multi-user.target.wants"))?;
    let mut wanted = vec![VALIDATION, gated, "cloud-init.target"];
    if gated == "actions-runner.service" {
        wanted.extend([
            "actions-runner-docker.service",
            "actions-runner-metadata.service",
        ]);
    }
    for unit in wanted {
        std::os::unix::fs::symlink(format!("../{unit}"), wants.join(unit))?;
    }
    let target = units.join(format!("{gated}.d/50-gpu-validator.conf"));
    shell.copy_file(files.join(drop_in), target)?;
    Ok(())
}

/// `systemd-analyze verify` succeeds with an unknown key, which it only reports.
fn verify(root: &Path, units: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .arg(format!("--root={}", root.display()))
        .args(units)
        .output()
        .context("systemd-analyze could not be started")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success() && said.trim().is_empty(),
        "systemd objects to {}:\n{said}",
        units.join(" and ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{GATED, VALIDATION};

    /// A unit that starts in parallel with the validation would take work on a node that does not
    /// pass.
    #[test]
    fn the_validation_names_every_unit_that_waits_for_it() {
        let unit = include_str!("../../../packer/files/gpu-validator-firstboot.service");
        let before: BTreeSet<&str> = unit
            .lines()
            .filter_map(|line| line.strip_prefix("Before="))
            .flat_map(str::split_whitespace)
            .collect();
        let gated: BTreeSet<&str> = GATED.iter().map(|(unit, _)| *unit).collect();
        assert_eq!(before, gated);
    }

    #[test]
    fn a_unit_that_requires_the_validation_also_waits_for_it() {
        let drop_in = include_str!("../../../packer/files/requires-gpu-validator.conf");
        for line in ["Requires=", "After="] {
            let wanted = format!("{line}{VALIDATION}");
            assert!(drop_in.lines().any(|it| it == wanted), "{wanted}");
        }
    }

    /// The manager's environment reaches every unit.
    #[test]
    fn no_inherited_variable_decides_a_verdict() {
        for (name, unit) in [
            (
                "firstboot",
                include_str!("../../../packer/files/gpu-validator-firstboot.service"),
            ),
            (
                "sentinel",
                include_str!("../../../packer/files/gpu-validator-sentinel.service"),
            ),
            (
                "package",
                include_str!("../../../packaging/systemd/gpu-validator.service"),
            ),
            (
                "health",
                include_str!("../../../packaging/systemd/gpu-validator-health.service"),
            ),
        ] {
            let unset: BTreeSet<&str> = unit
                .lines()
                .filter_map(|line| line.strip_prefix("UnsetEnvironment="))
                .flat_map(str::split_whitespace)
                .collect();
            for variable in [
                "LD_PRELOAD",
                "LD_LIBRARY_PATH",
                "LD_AUDIT",
                "CUDA_VISIBLE_DEVICES",
                "CUDA_DEVICE_ORDER",
                "GPU_SIMULATOR_NODE",
            ] {
                assert!(unset.contains(variable), "{name} keeps {variable}");
            }
        }
    }

    #[test]
    fn every_template_gates_one_of_them() {
        let sources = include_str!("../../../packer/sources.pkr.hcl");
        for template in packer_tasks::packer::TEMPLATES {
            let line = sources
                .lines()
                .find(|line| line.trim_start().starts_with(&format!("\"{template}\"")))
                .expect("the template's line in gated_unit");
            assert!(
                GATED
                    .iter()
                    .any(|(unit, _)| line.contains(&format!("= \"{unit}\""))),
                "{line}"
            );
        }
    }
}
