//! One boot of one machine, from power on to power off.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use xshell::cmd;

use super::image::Image;
use xtask::workspace;

const QEMU: &str = "qemu-system-x86_64";
/// The longest boot waits for systemd's own time limit; on two busy cores the shortest takes
/// minutes.
const DEADLINE: Duration = Duration::from_mins(30);

/// What this boot has and does; the kernel's command line identifies the machine.
#[derive(Debug)]
pub(super) struct Boot<'a> {
    /// A node and its faults: `g6.xlarge+xid-79`.
    pub(super) gpus: &'a str,
    /// What is done once it is decided what starts; see
    /// `tests/images/boot/root/usr/libexec/boot-test/after-boot`.
    pub(super) steps: &'a str,
    pub(super) parameters: &'a str,
}

/// Boots until the machine turns itself off, and copies what it wrote down to `out`.
pub(super) fn boot(image: &Image, disk: &Path, boot: &Boot<'_>, out: &Path) -> anyhow::Result<()> {
    run(image, disk, boot, out)?;
    let shell = workspace::shell()?;
    let rdump = format!("rdump /var/lib/boot-test {}", out.display());
    // It cannot give the files to root and reports it; the reader finds what is missing.
    cmd!(shell, "debugfs -R {rdump} {disk}")
        .quiet()
        .ignore_stderr()
        .run()
        .context("no debugfs; install e2fsprogs")?;
    let remove = format!("{}/boot-test", out.display());
    ensure!(
        Path::new(&remove).is_dir(),
        "the machine wrote nothing down; see serial.log"
    );
    Ok(())
}

fn run(image: &Image, disk: &Path, boot: &Boot<'_>, out: &Path) -> anyhow::Result<()> {
    let Boot {
        gpus,
        steps,
        parameters,
    } = boot;
    let append = format!(
        "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=false no_timer_check panic=-1 cloud-init=enabled simulated_gpus={gpus} \
         after_boot={steps} {parameters}"
    );
    let mut machine = Command::new(QEMU)
        // Software emulation, also where the machine could do better: a virtual machine may not
        // nest.
        .args([
            "-machine",
            "q35,accel=tcg",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            "1024",
        ])
        .args(["-display", "none", "-monitor", "none", "-no-reboot"])
        .arg("-serial")
        .arg(format!("file:{}", out.join("serial.log").display()))
        .arg("-kernel")
        .arg(image.kernel())
        .arg("-initrd")
        .arg(image.initrd())
        .args(["-append", &append])
        .arg("-drive")
        .arg(format!(
            "file={},format=raw,if=virtio,cache=unsafe",
            disk.display()
        ))
        // A network that gives an address and leads nowhere.
        .args(["-nic", "user,model=virtio-net-pci,restrict=on"])
        .spawn()
        .with_context(|| {
            format!("no {QEMU}; install it (Debian and Ubuntu: apt-get install qemu-system-x86)")
        })?;
    let started = Instant::now();
    loop {
        if let Some(status) = machine.try_wait()? {
            ensure!(status.success(), "{QEMU} ended with {status}");
            return Ok(());
        }
        if started.elapsed() > DEADLINE {
            machine.kill()?;
            machine.wait()?;
            anyhow::bail!(
                "the machine did not turn itself off within {} s; see serial.log",
                DEADLINE.as_secs()
            );
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
