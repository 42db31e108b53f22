//! What `gpu-validator-withheld.sh` does for an instance that did not pass: prints, publishes, and
//! sets its end.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, ensure};

use xtask::workspace;

const REPORT: &str = r#"{"machine": {"ec2_instance_id": "i-0123456789abcdef0"}, "findings": [
    {"check": "ecc_errors", "verdict": "fail"}, {"check": "ecc_errors", "verdict": "fail"},
    {"check": "kernel_log_xid", "verdict": "error"}, {"check": "gpu_count", "verdict": "pass"}]}"#;
const TOPIC: &str = "arn:aws:sns:eu-central-1:111122223333:gpu-nodes";

pub(super) fn check() -> anyhow::Result<()> {
    let folder = workspace::target().join("images/withheld");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder)?;
    let report = folder.join("report.json");
    std::fs::write(&report, REPORT)?;
    let programs = programs(&folder)?;
    let run = |report: &Path, variables: &[(&str, &str)]| -> anyhow::Result<(Output, String)> {
        let calls = folder.join("calls");
        std::fs::write(&calls, "")?;
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new(workspace::root().join("packer/files/gpu-validator-withheld.sh"))
            .arg(report)
            .env("PATH", format!("{}:{path}", programs.display()))
            .env("CALLS", &calls)
            .envs(variables.iter().copied())
            .output()
            .context("the script could not be started")?;
        Ok((output, std::fs::read_to_string(&calls)?))
    };

    let (output, calls) = run(&report, &[])?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success()
            && printed.contains(
                "i-0123456789abcdef0 is withheld from work: ecc_errors, kernel_log_xid\n"
            )
            && calls.is_empty(),
        "without options the script printed {printed:?} and called {calls:?}"
    );

    let (output, calls) = run(
        &report,
        &[("POWER_OFF_AFTER_HOURS", "6"), ("TOPIC_ARN", TOPIC)],
    )?;
    ensure!(
        output.status.success()
            && calls.contains(
                "systemd-run --quiet --unit=gpu-validator-power-off --on-active=6h sh -c"
            )
            && calls.contains(&format!(
                "aws sns publish --region eu-central-1 --topic-arn {TOPIC}"
            ))
            && calls.contains("ecc_errors, kernel_log_xid; it is powered off in 6 h"),
        "with both options the script called\n{calls}"
    );

    let (output, _) = run(&folder.join("none.json"), &[])?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.success() && printed.contains("there is no report"),
        "without a report the script printed {printed:?}"
    );
    for wrong in ["0", "169", "six", "1; reboot"] {
        let (output, calls) = run(&report, &[("POWER_OFF_AFTER_HOURS", wrong)])?;
        ensure!(
            output.status.code() == Some(3) && !calls.contains("systemd-run"),
            "POWER_OFF_AFTER_HOURS={wrong} is taken"
        );
    }
    println!("withheld: an instance that did not pass reports itself, and ends when it is told to");
    Ok(())
}

/// Programs that write down how they are called; the timer is not active before.
fn programs(folder: &Path) -> anyhow::Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let programs = folder.join("programs");
    std::fs::create_dir_all(&programs)?;
    for (name, text) in [
        ("aws", "#!/bin/sh\necho \"aws $*\" >>\"$CALLS\"\n"),
        (
            "systemd-run",
            "#!/bin/sh\necho \"systemd-run $*\" >>\"$CALLS\"\n",
        ),
        ("systemctl", "#!/bin/sh\nexit 3\n"),
    ] {
        let program = programs.join(name);
        std::fs::write(&program, text)?;
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    }
    Ok(programs)
}
