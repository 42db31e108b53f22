//! Whole bakes: a healthy machine gives an image with its reports, a broken one gives reports and
//! no image.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::cloud::Cloud;
use super::instance::{self, Instance, OperatingSystem};
use super::simulated_gpus;
use packer_tasks::ami::manifest;
use packer_tasks::packer::Packer;
use xtask::{dist, workspace};

pub(super) const DRIVER_VERSION: &str = "580.95.05";
/// Of the word that the simulated internet has in its place.
pub(super) const CUDA_KEYRING_SHA256: &str =
    "bc4a71180870f7945155fbb02f4b0a2e3faa2a62d6d31b7039013055ed19869a";
/// The program of `cargo xtask ami`.
const PACKER_TASKS: &str = "packer-tasks";
const WITHOUT_GPU: &str = "m7i.2xlarge";
const WITH_GPU: &str = "g6.xlarge";
pub(super) const RUNNER_VERSION: &str = "2.0.0";

/// One build, and what must come of it.
#[derive(Debug)]
struct Bake {
    template: &'static str,
    operating_system: OperatingSystem,
    /// One of tests/images/README.md; empty on a healthy machine.
    fault: &'static str,
    /// The check of level image that must fail; `None` where it must pass.
    fails: Option<&'static str>,
    /// The type of the build instance, which determines whether it must have a GPU.
    instance_type: &'static str,
    /// The GPUs that it has, simulated: a node and its faults.
    gpus: Option<&'static str>,
    /// The verdict of level standard; `None` where it must not run.
    standard: Option<&'static str>,
    /// What `cargo xtask ami build` must end with; 0 makes an image, and nothing else does.
    code: i32,
    /// A call by which the driver's packages are held at their versions.
    holds: &'static str,
}

const fn healthy(
    template: &'static str,
    operating_system: OperatingSystem,
    holds: &'static str,
) -> Bake {
    Bake {
        template,
        operating_system,
        fault: "",
        fails: None,
        instance_type: WITHOUT_GPU,
        gpus: None,
        standard: None,
        code: 0,
        holds,
    }
}

const fn broken(fault: &'static str, check: &'static str) -> Bake {
    Bake {
        fault,
        fails: Some(check),
        code: 1,
        ..ON_AMAZON_LINUX
    }
}

const ON_AMAZON_LINUX: Bake = healthy(
    "eks-gpu-al2023",
    OperatingSystem::AmazonLinux2023,
    "dnf versionlock add *nvidia*",
);

/// Its type has a GPU and its bus shows none: level standard cannot judge one, even if the disk
/// passes level image.
const GPU_IS_GONE: Bake = Bake {
    instance_type: WITH_GPU,
    standard: Some("not_judged"),
    code: 2,
    ..ON_AMAZON_LINUX
};

/// Packer registers it. The task does not take simulated GPUs for real ones, and writes no manifest
/// that could be published.
const GPU_IS_WELL: Bake = Bake {
    gpus: Some("g6.xlarge"),
    standard: Some("pass"),
    code: 2,
    ..GPU_IS_GONE
};

/// Its disk is as it should be; only the GPU at work shows it.
const GPU_IS_ILL: Bake = Bake {
    gpus: Some("g6.xlarge+wrong-bit-every-time"),
    standard: Some("fail"),
    code: 1,
    ..GPU_IS_GONE
};

const BAKES: [Bake; 10] = [
    ON_AMAZON_LINUX,
    healthy(
        "eks-gpu-ubuntu2204",
        OperatingSystem::Ubuntu2204,
        "apt-mark hold linux-headers-6.8.0-1035-aws nvidia-headless-580-open nvidia-utils-580",
    ),
    healthy(
        "ubuntu2404-runner",
        OperatingSystem::Ubuntu2404,
        "apt-mark hold linux-headers-6.14.0-1015-aws nvidia-headless-580-open nvidia-utils-580",
    ),
    broken("kernel-without-modules", "image_kernel_modules"),
    broken("library-of-another-version", "image_driver_components"),
    broken("service-not-enabled", "image_services"),
    broken("secret-left", "image_leftovers"),
    GPU_IS_GONE,
    GPU_IS_WELL,
    GPU_IS_ILL,
];

pub(super) fn check(validator_folder: &Path) -> anyhow::Result<()> {
    let folder = workspace::target().join("images/bakes");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder)?;
    // The shared parts of all builds are made before they run in parallel.
    Packer::install()?;
    let userland = instance::userland()?;
    let simulator = dist::build_portable_simulator()?;
    let cloud = Cloud::start(&folder)?;
    // A build mostly waits for its next connection, so all go on at the same time.
    let outcomes: Vec<anyhow::Result<()>> = std::thread::scope(|scope| {
        let builds: Vec<_> = BAKES
            .iter()
            .map(|bake| {
                let (cloud, folder, userland) = (&cloud, &folder, &userland);
                let simulator = &simulator;
                scope.spawn(move || {
                    let validator_folder =
                        bake.validator_folder(folder, validator_folder, simulator)?;
                    bake.run(cloud, folder, userland, &validator_folder)
                })
            })
            .collect();
        builds
            .into_iter()
            .map(|build| match build.join() {
                Ok(outcome) => outcome,
                Err(_) => Err(anyhow::anyhow!("a build's thread panicked")),
            })
            .collect()
    });
    outcomes.into_iter().collect::<anyhow::Result<Vec<()>>>()?;
    check_cloud(&cloud)?;
    let passed = &BAKES[0];
    publish(&cloud, passed, &passed.folder(&folder))?;
    let broken = BAKES.iter().filter(|it| !it.makes_image()).count();
    println!(
        "bake: {} templates gave an image, {broken} broken machines gave reports and none",
        BAKES.len() - broken
    );
    Ok(())
}

impl Bake {
    fn makes_image(&self) -> bool {
        self.code == 0 || self.standard == Some("pass")
    }

    fn name(&self) -> String {
        [
            self.template,
            self.instance_type,
            self.fault,
            self.gpus.unwrap_or_default(),
        ]
        .join("-")
        .trim_end_matches('-')
        .to_owned()
    }

    fn folder(&self, parent: &Path) -> PathBuf {
        parent.join(self.name())
    }

    /// Where the image's gpu-validator comes from. On simulated GPUs it must read those.
    fn validator_folder(
        &self,
        parent: &Path,
        validator_folder: &Path,
        simulator: &Path,
    ) -> anyhow::Result<PathBuf> {
        let Some(gpus) = self.gpus else {
            return Ok(validator_folder.to_path_buf());
        };
        let shell = workspace::shell()?;
        let folder = self.folder(parent);
        let (simulated, uploaded) = (folder.join("simulated"), folder.join("validator"));
        simulated_gpus::install(simulator, &simulated.join("simulator"))?;
        shell.create_dir(&uploaded)?;
        shell.write_file(simulated.join("gpus"), gpus)?;
        let binary = validator_folder.join("gpu-validator");
        shell.copy_file(&binary, simulated.join("gpu-validator"))?;
        shell.copy_file(&binary, uploaded.join("gpu-validator.real"))?;
        shell.copy_file(validator_folder.join("gpu-validator.1"), &uploaded)?;
        shell.copy_file("tests/images/stand-ins/gpu-validator", &uploaded)?;
        Ok(uploaded)
    }

    fn run(
        &self,
        cloud: &Cloud,
        parent: &Path,
        userland: &Path,
        validator_folder: &Path,
    ) -> anyhow::Result<()> {
        let folder = self.folder(parent);
        let downloads = folder.join("simulated/downloads");
        std::fs::create_dir_all(&downloads)?;
        let runner_sha256 = runner_archive(&folder, &downloads)?;
        let instance = Instance::start(
            &folder,
            cloud,
            userland,
            self.operating_system,
            DRIVER_VERSION,
            self.fault,
        )
        .with_context(|| self.name())?;
        let code = self.build(cloud, &folder, validator_folder, &instance, &runner_sha256)?;
        self.check(&folder, code, &instance)
            .with_context(|| format!("{}; see {}", self.name(), folder.display()))
    }

    fn build(
        &self,
        cloud: &Cloud,
        folder: &Path,
        validator_folder: &Path,
        instance: &Instance,
        runner_sha256: &str,
    ) -> anyhow::Result<Option<i32>> {
        let mut command = Command::new(workspace::program(&workspace::shell()?, PACKER_TASKS)?);
        cloud.apply(&mut command)?;
        command
            .args(["ami", "build", self.template])
            .arg("--validator-folder")
            .arg(validator_folder)
            .arg("--out")
            .arg(folder.join("out"));
        let variables = [
            "gpu_family=g6".to_owned(),
            format!("instance_type={}", self.instance_type),
            format!("nvidia_driver_version={DRIVER_VERSION}"),
            format!("cuda_keyring_sha256={CUDA_KEYRING_SHA256}"),
            format!("actions_runner_version={RUNNER_VERSION}"),
            format!("actions_runner_sha256={runner_sha256}"),
            "ssh_host=127.0.0.1".to_owned(),
            format!("ssh_port={}", instance.port),
            "ssh_from_cidrs=[\"127.0.0.1/32\"]".to_owned(),
            format!("ssh_username={}", Instance::user()?),
        ];
        for variable in variables {
            command.args(["--var", &variable]);
        }
        let log = std::fs::File::create(folder.join("build.log"))?;
        let status = command
            .stdout(log.try_clone()?)
            .stderr(log)
            .status()
            .context("the build could not be started")?;
        Ok(status.code())
    }

    fn check(&self, folder: &Path, code: Option<i32>, instance: &Instance) -> anyhow::Result<()> {
        ensure!(
            code == Some(self.code),
            "the build ended with {code:?}, expected exit code {}; build.log says why",
            self.code
        );
        let reports = folder.join("out").join(manifest::REPORTS);
        let junit = std::fs::read_to_string(reports.join("image.junit.xml"))
            .context("there is no JUnit report")?;
        let report: Value =
            serde_json::from_str(&std::fs::read_to_string(reports.join("image.json"))?)?;
        let failed: BTreeSet<&str> = report["findings"]
            .as_array()
            .context("the report has no findings")?
            .iter()
            .filter(|it| it["verdict"] != "pass" && it["verdict"] != "skip")
            .filter_map(|it| it["check"].as_str())
            .collect();
        ensure!(
            failed == self.fails.into_iter().collect(),
            "the report objects by {failed:?}, expected {:?}",
            self.fails
        );
        ensure!(
            junit.contains("<failure") == self.fails.is_some(),
            "the JUnit report does not say the same as the other"
        );
        self.check_level_standard(&reports)?;
        ensure!(
            folder.join("out").join(manifest::NAME).exists() == (self.code == 0),
            "{} must be there for an image, and for nothing else",
            manifest::NAME
        );
        let cdi_refresh = instance.read("/etc/systemd/system/nvidia-cdi-refresh.service")?;
        ensure!(
            !cdi_refresh.contains("After=multi-user.target"),
            "nvidia-cdi-refresh.service and the validation wait for each other"
        );
        let calls = instance.read("/simulated/calls")?;
        ensure!(
            calls.lines().any(|call| call.contains(self.holds)),
            "the driver's packages are not held: no call `{}`",
            self.holds
        );
        Ok(())
    }

    /// It is for build instances whose type has a GPU, and for all of them.
    fn check_level_standard(&self, reports: &Path) -> anyhow::Result<()> {
        let path = reports.join("standard.json");
        let Some(expected) = self.standard else {
            ensure!(!path.exists(), "level standard ran without a GPU");
            return Ok(());
        };
        let text =
            std::fs::read_to_string(&path).context("there is no report of level standard")?;
        let report: Value = serde_json::from_str(&text)?;
        ensure!(
            report["verdict"] == expected && report["simulated"].as_str() == self.gpus,
            "level standard says {} of {}, expected {expected} of {:?}",
            report["verdict"],
            report["simulated"],
            self.gpus
        );
        let junit = std::fs::read_to_string(reports.join("standard.junit.xml"))?;
        ensure!(
            junit.contains("<failure") == (expected == "fail"),
            "the JUnit report of level standard does not say the same as the other"
        );
        Ok(())
    }
}

/// What the simulated internet has for the runner; its checksum.
pub(crate) fn runner_archive(folder: &Path, downloads: &Path) -> anyhow::Result<String> {
    use xshell::cmd;
    let shell = workspace::shell()?;
    let runner = folder.join("runner");
    shell.create_dir(runner.join("bin"))?;
    for name in ["run.sh", "config.sh", "bin/installdependencies.sh"] {
        shell.write_file(runner.join(name), "#!/bin/sh\n")?;
    }
    cmd!(shell, "chmod --recursive +x {runner}").quiet().run()?;
    let archive = downloads.join(format!("actions-runner-linux-x64-{RUNNER_VERSION}.tar.gz"));
    cmd!(
        shell,
        "tar --create --gzip --file {archive} --directory {runner} ."
    )
    .quiet()
    .run()?;
    let line = cmd!(shell, "sha256sum {archive}").quiet().read()?;
    let sum = line
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned();
    Ok(sum)
}

/// Every build instance is gone, and every image is one that passed.
fn check_cloud(cloud: &Cloud) -> anyhow::Result<()> {
    let instances = cloud.ask(&[
        "ec2",
        "describe-instances",
        "--query",
        "Reservations[].Instances[].[InstanceId, State.Name]",
    ])?;
    let told = instances.as_array().context("no instances were told")?;
    ensure!(
        told.len() == BAKES.len() && told.iter().all(|it| it[1] == "terminated"),
        "the build instances are {instances}, expected {} that are terminated; every build.log names its own, moto.log what failed",
        BAKES.len()
    );
    let images = cloud.ask(&["ec2", "describe-images", "--owners", "self"])?;
    let images = images["Images"].as_array().context("no images were told")?;
    let passing = BAKES.iter().filter(|it| it.makes_image()).count();
    ensure!(
        images.len() == passing,
        "there are {} images, expected {passing}",
        images.len()
    );
    for image in images {
        let tag = |key: &str| {
            let tags = image["Tags"].as_array().into_iter().flatten();
            tags.filter(|it| it["Key"] == format!("gpu-bringup.dev/{key}"))
                .find_map(|it| it["Value"].as_str())
                .unwrap_or("none")
        };
        ensure!(
            tag("verdict") == "pass"
                && tag("nvidia-driver") == DRIVER_VERSION
                && tag("cuda-toolkit") == "none"
                && tag("gpu-validator") == env!("CARGO_PKG_VERSION")
                // The newest of the source images, by their names' dates.
                && tag("source-image").ends_with("20261101"),
            "the tags of {} are {}",
            image["Name"],
            image["Tags"]
        );
    }
    Ok(())
}

/// An image is shared and published by its parameter; one whose report was changed afterwards is
/// not.
fn publish(cloud: &Cloud, bake: &Bake, folder: &Path) -> anyhow::Result<()> {
    const ACCOUNT: &str = "210987654321";
    let manifest = folder.join("out").join(manifest::NAME);
    // Its build instance had no GPU: a run on an instance of the image stands for one.
    let image: Value = serde_json::from_str(&std::fs::read_to_string(&manifest)?)?;
    let report = folder.join("gpu-report.json");
    let publish = |ami: &Value| -> anyhow::Result<bool> {
        let judged = serde_json::json!({
            "exit_code": 0, "level": "standard", "simulated": null, "incomplete": null,
            "machine": {"ec2_ami_id": ami, "gpus": [{}]},
        });
        std::fs::write(&report, judged.to_string())?;
        let mut command = Command::new(workspace::program(&workspace::shell()?, PACKER_TASKS)?);
        cloud.apply(&mut command)?;
        let output = command
            .args(["ami", "publish", bake.template, "--share-with", ACCOUNT])
            .arg("--manifest")
            .arg(&manifest)
            .arg("--gpu-reports")
            .arg(&report)
            .output()?;
        std::fs::write(folder.join("publish.log"), &output.stderr)?;
        Ok(output.status.success())
    };
    ensure!(
        !publish(&Value::from("ami-0"))?,
        "an image is published that no GPU was judged with"
    );
    ensure!(
        publish(&image["ami"])?,
        "the image is not published; see publish.log"
    );
    let parameter = format!("/gpu-bringup/ami/{}/g6", bake.template);
    let told = cloud.ask(&["ssm", "get-parameter", "--name", &parameter])?;
    ensure!(
        told["Parameter"]["Value"] == image["ami"],
        "{parameter} is {}, expected {}",
        told["Parameter"]["Value"],
        image["ami"]
    );
    let junit = folder
        .join("out")
        .join(manifest::REPORTS)
        .join("image.junit.xml");
    let text = std::fs::read_to_string(&junit)?;
    std::fs::write(&junit, format!("{text}\n"))?;
    ensure!(
        !publish(&image["ami"])?,
        "an image is published although its report was changed"
    );
    Ok(())
}
