//! First boots: machines under software emulation, with disks that the provisioners made and GPUs
//! that are simulated. What starts, and what does not, is systemd's own doing.

mod image;
mod machine;
mod seen;

use std::path::Path;

use anyhow::Context as _;

use self::image::{Image, ImageOptions};
use self::machine::Boot;
use self::seen::Expected;
use super::instance::OperatingSystem;
use xtask::{dist, workspace};

/// Level standard with a burn takes a minute of processor time under software emulation.
const PATIENT_S: u32 = 600;
const IMPATIENT_S: u32 = 30;
/// A burn that the time limit allows, and that cannot end within it together with what comes
/// before.
const BURN_WITHOUT_AN_END: &str = "burn=29s";
const SHORT_BURN: &str = "burn=0.2s";
const HEALTHY: &str = "g6.xlarge";
const FAULTY: &str = "g6.xlarge+ecc-volatile-uncorrectable";

/// The disks, by what differs in them.
#[derive(Debug)]
struct Images {
    withholding: Image,
    impatient: Image,
    tainting: Image,
    ubuntu: Image,
    runner: Image,
}

pub(super) fn check(validator_folder: &Path) -> anyhow::Result<()> {
    let folder = workspace::target().join("images/boots");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder)?;
    let images = Images::make(&folder.join("images"), validator_folder)?;
    let boots: [fn(&Images, &Path) -> anyhow::Result<()>; 6] = [
        a_node_that_passes_and_then_fails,
        a_node_that_fails,
        a_node_that_is_tainted,
        a_runner,
        a_node_on_ubuntu,
        a_validation_without_an_end,
    ];
    // All at once: each machine waits for much of its time, and the validation's limit is far off.
    let outcomes = std::thread::scope(|scope| {
        let trials: Vec<_> = boots
            .iter()
            .map(|boot| scope.spawn(|| boot(&images, &folder)))
            .collect();
        trials
            .into_iter()
            .map(|trial| {
                trial
                    .join()
                    .unwrap_or_else(|_| Err(anyhow::anyhow!("a boot's thread panicked")))
            })
            .collect::<Vec<anyhow::Result<()>>>()
    });
    outcomes.into_iter().collect::<anyhow::Result<Vec<()>>>()?;
    println!("boot: nothing that takes work starts before the validation has passed");
    Ok(())
}

impl Images {
    fn make(folder: &Path, validator_folder: &Path) -> anyhow::Result<Self> {
        let simulator = dist::build_portable_simulator()?;
        let userland = image::userland()?;
        let make = |name: &str, template, operating_system, gated_unit, on_failure, deadline_s| {
            Image::make(&ImageOptions {
                folder: folder.join(name),
                userland: &userland,
                simulator: &simulator,
                validator_folder,
                template,
                operating_system,
                gated_unit,
                on_failure,
                deadline_s,
            })
            .with_context(|| format!("image {name}"))
        };
        let (kubelet, snap) = ("kubelet.service", "snap.kubelet-eks.daemon.service");
        let amazon = OperatingSystem::AmazonLinux2023;
        Ok(Self {
            withholding: make(
                "withholding",
                "eks-gpu-al2023",
                amazon,
                kubelet,
                "withhold_kubelet",
                PATIENT_S,
            )?,
            impatient: make(
                "impatient",
                "eks-gpu-al2023",
                amazon,
                kubelet,
                "withhold_kubelet",
                IMPATIENT_S,
            )?,
            tainting: make(
                "tainting",
                "eks-gpu-al2023",
                amazon,
                kubelet,
                "taint_node",
                PATIENT_S,
            )?,
            ubuntu: make(
                "ubuntu",
                "eks-gpu-ubuntu2204",
                OperatingSystem::Ubuntu2204,
                snap,
                "withhold_kubelet",
                PATIENT_S,
            )?,
            runner: make(
                "runner",
                "ubuntu2404-runner",
                OperatingSystem::Ubuntu2404,
                "actions-runner.service",
                "withhold_kubelet",
                PATIENT_S,
            )?,
        })
    }
}

/// Boots a machine and reads the files that it wrote.
struct Trial<'a> {
    name: &'a str,
    disk: &'a Path,
    image: &'a Image,
    boot: Boot<'a>,
}

impl<'a> Trial<'a> {
    /// Boots once and writes down what started.
    fn that_looks(name: &'a str, (disk, image): (&'a Path, &'a Image), gpus: &'a str) -> Self {
        Trial {
            name,
            disk,
            image,
            boot: Boot {
                gpus,
                steps: "look",
                parameters: "",
            },
        }
    }

    fn run(&self, folder: &Path, expected: &[Expected<'_>]) -> anyhow::Result<()> {
        let out = folder.join(self.name);
        let context = || format!("boot {}; see {}", self.name, out.display());
        std::fs::create_dir_all(&out)?;
        machine::boot(self.image, self.disk, &self.boot, &out).with_context(context)?;
        for record in expected {
            let seconds = seen::check(&out, self.image.gated_unit, record).with_context(context)?;
            println!(
                "boot {}: {}: as expected; the validation took {seconds:.1} s",
                self.name, record.record
            );
        }
        Ok(())
    }
}

const fn passed(record: &str) -> Expected<'_> {
    Expected {
        record,
        validation: "active",
        result: "success",
        gated_starts: true,
        arguments: "",
        journal: &[],
        verdict: Some("pass"),
    }
}

const fn failed<'a>(record: &'a str, journal: &'a [&'a str]) -> Expected<'a> {
    Expected {
        record,
        validation: "failed",
        result: "exit-code",
        gated_starts: false,
        arguments: "",
        journal,
        verdict: Some("fail"),
    }
}

fn a_node_that_passes_and_then_fails(images: &Images, folder: &Path) -> anyhow::Result<()> {
    let image = &images.withholding;
    let disk = image.new_disk(&folder.join("withholding.disk"))?;
    let trial = |name, gpus, steps, parameters| Trial {
        name,
        disk: &disk,
        image,
        boot: Boot {
            gpus,
            steps,
            parameters,
        },
    };
    trial("healthy", HEALTHY, "look", SHORT_BURN).run(folder, &[passed("boot")])?;
    // The second boot of the same disk: validated anew, and a repair and a start by hand bring
    // kubelet back.
    trial("healthy-then-ill", FAULTY, "repair", "").run(
        folder,
        &[
            failed(
                "boot",
                &["gpu-validator-firstboot.service: Failed with result"],
            ),
            passed("repaired"),
        ],
    )
}

fn a_node_that_fails(images: &Images, folder: &Path) -> anyhow::Result<()> {
    let image = &images.withholding;
    let disk = image.new_disk(&folder.join("faulty.disk"))?;
    Trial::that_looks("faulty", (&disk, image), FAULTY)
        .run(folder, &[failed("boot", &["ecc_errors"])])
}

/// The profile's time limit ends the first; the second is killed, and the third stands still until
/// systemd's own limit.
fn a_validation_without_an_end(images: &Images, folder: &Path) -> anyhow::Result<()> {
    let image = &images.impatient;
    let disk = image.new_disk(&folder.join("endless.disk"))?;
    let trial = |name, steps, parameters| Trial {
        name,
        disk: &disk,
        image,
        boot: Boot {
            gpus: HEALTHY,
            steps,
            parameters,
        },
    };
    let ended = |record, result, journal| Expected {
        result,
        verdict: None,
        ..failed(record, journal)
    };
    trial("past-deadline", "look", BURN_WITHOUT_AN_END).run(
        folder,
        &[ended(
            "boot",
            "exit-code",
            &["the profile's deadline for the whole run passed"],
        )],
    )?;
    trial("interrupted", "interrupt", "").run(
        folder,
        &[
            ended("killed", "signal", &["code=killed, status=9/KILL"]),
            ended("stopped", "timeout", &["start operation timed out"]),
        ],
    )
}

fn a_node_that_is_tainted(images: &Images, folder: &Path) -> anyhow::Result<()> {
    let image = &images.tainting;
    let disk = image.new_disk(&folder.join("tainting.disk"))?;
    let trial = |name, gpus| Trial::that_looks(name, (&disk, image), gpus);
    trial("tainted", FAULTY).run(
        folder,
        &[Expected {
            gated_starts: true,
            arguments: "--register-with-taints=gpu-bringup.dev/unvalidated=true:NoSchedule",
            ..failed("boot", &["ecc_errors"])
        }],
    )?;
    trial("not-tainted", HEALTHY).run(
        folder,
        &[Expected {
            arguments: "--v=2 --node-labels=role=gpu",
            ..passed("boot")
        }],
    )
}

fn a_node_on_ubuntu(images: &Images, folder: &Path) -> anyhow::Result<()> {
    let image = &images.ubuntu;
    let disk = image.new_disk(&folder.join("ubuntu.disk"))?;
    Trial {
        name: "ubuntu-faulty",
        disk: &disk,
        image,
        boot: Boot {
            gpus: FAULTY,
            steps: "repair",
            parameters: "",
        },
    }
    .run(
        folder,
        &[failed("boot", &["ecc_errors"]), passed("repaired")],
    )
}

/// User data registers and starts it on the first boot, and multi-user.target on every later one.
fn a_runner(images: &Images, folder: &Path) -> anyhow::Result<()> {
    let image = &images.runner;
    let disk = image.new_disk(&folder.join("runner.disk"))?;
    let trial = |name, gpus| Trial::that_looks(name, (&disk, image), gpus);
    trial("runner-registered", HEALTHY).run(folder, &[passed("boot")])?;
    trial("runner-faulty", FAULTY).run(folder, &[failed("boot", &["ecc_errors"])])
}
