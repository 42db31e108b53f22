//! One instance, from its launch to its end. Whatever ends our process in order ends the instance
//! too; what a killed process leaves is found by its tags.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::cli::Cli;
use super::refusal::{Refusal, is_lack_of_capacity, nothing_was_done};
use super::tags::{self, Tags};
use xtask::say;

/// What the account was prepared with by terraform/modules/validation-instance.
#[derive(Debug)]
pub(super) struct Foundation {
    pub(super) subnet_ids: Vec<String>,
    security_group_id: String,
    instance_profile_name: String,
    kms_key_arn: Option<String>,
}

impl Foundation {
    pub(super) fn read(cli: &Cli, parameter: &str) -> anyhow::Result<Foundation> {
        let answer = cli.read(&["ssm", "get-parameter", "--name", parameter])?;
        let text = answer["Parameter"]["Value"]
            .as_str()
            .with_context(|| format!("parameter {parameter} has no value"))?;
        let value: Value = serde_json::from_str(text)
            .with_context(|| format!("parameter {parameter} is not JSON"))?;
        let field = |name: &str| {
            let field = value[name].as_str().map(str::to_owned);
            field.with_context(|| format!("parameter {parameter} has no {name}"))
        };
        let subnets = value["subnet_ids"].as_array();
        let subnet_ids: Vec<String> = subnets
            .into_iter()
            .flatten()
            .filter_map(|id| id.as_str().map(str::to_owned))
            .collect();
        ensure!(
            !subnet_ids.is_empty(),
            "parameter {parameter} has no subnet_ids"
        );
        Ok(Foundation {
            subnet_ids,
            security_group_id: field("security_group_id")?,
            instance_profile_name: field("instance_profile_name")?,
            kms_key_arn: value["kms_key_arn"].as_str().map(str::to_owned),
        })
    }
}

/// The image, as far as a launch needs it.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) id: String,
    pub(super) name: String,
    root_device: String,
    /// As in the image, in GiB.
    root_size_gib: Option<u64>,
}

impl Image {
    pub(super) fn read(cli: &Cli, id: &str) -> anyhow::Result<Image> {
        let answer = cli.read(&["ec2", "describe-images", "--image-ids", id])?;
        let image = &answer["Images"][0];
        let text = |name: &str| {
            let text = image[name].as_str();
            text.with_context(|| format!("AWS says no {name} of {id}"))
        };
        let state = text("State")?;
        ensure!(
            state == "available",
            "{id} is {state}, not available; wait until its build has ended"
        );
        let architecture = text("Architecture")?;
        ensure!(
            architecture == "x86_64",
            "{id} is for {architecture}; the validator runs on x86_64 only"
        );
        let root_device = text("RootDeviceName")?;
        let devices = image["BlockDeviceMappings"].as_array();
        let root = devices.and_then(|all| all.iter().find(|it| it["DeviceName"] == root_device));
        Ok(Image {
            id: id.to_owned(),
            name: image["Name"].as_str().unwrap_or_default().to_owned(),
            root_device: root_device.to_owned(),
            root_size_gib: root.and_then(|root| root["Ebs"]["VolumeSize"].as_u64()),
        })
    }
}

/// How the instance is paid for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Market {
    OnDemand,
    Spot,
    /// Bought ahead of time; the capacity reservation states which one.
    CapacityBlock,
}

/// What is launched.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) image: &'a Image,
    pub(super) foundation: &'a Foundation,
    pub(super) instance_type: &'a str,
    pub(super) subnet_ids: &'a [String],
    pub(super) market: Market,
    pub(super) capacity_reservation: Option<&'a str>,
    pub(super) user_data: &'a Path,
    pub(super) tags: &'a Tags,
}

impl Request<'_> {
    /// The input of `ec2 run-instances`. Everything that makes the instance safe is stated here and
    /// not left to defaults; the launcher's policy refuses a call that leaves it out.
    fn input(&self, subnet_id: &str) -> Value {
        let mut volume =
            json!({"Encrypted": true, "VolumeType": "gp3", "DeleteOnTermination": true});
        if let Some(size) = self.image.root_size_gib {
            volume["VolumeSize"] = json!(size);
        }
        if let Some(key) = &self.foundation.kms_key_arn {
            volume["KmsKeyId"] = json!(key);
        }
        let mut input = json!({
            "ImageId": self.image.id,
            "InstanceType": self.instance_type,
            "MinCount": 1,
            "MaxCount": 1,
            // Two calls with one token are one launch: the CLI repeats a call whose answer was
            // lost.
            "ClientToken": format!("{}/{}", self.tags.run, subnet_id.trim_start_matches("subnet-")),
            "SubnetId": subnet_id,
            "SecurityGroupIds": [self.foundation.security_group_id],
            "IamInstanceProfile": {"Name": self.foundation.instance_profile_name},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpEndpoint": "enabled", "HttpPutResponseHopLimit": 1},
            "BlockDeviceMappings": [{"DeviceName": self.image.root_device, "Ebs": volume}],
            "TagSpecifications": self.tags.specifications(&self.image.id),
        });
        match self.market {
            Market::OnDemand => {}
            Market::Spot => {
                input["InstanceMarketOptions"] = json!({
                    "MarketType": "spot",
                    "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
                });
            }
            Market::CapacityBlock => {
                input["InstanceMarketOptions"] = json!({"MarketType": "capacity-block"});
            }
        }
        if let Some(id) = self.capacity_reservation {
            input["CapacityReservationSpecification"] =
                json!({"CapacityReservationTarget": {"CapacityReservationId": id}});
        }
        input
    }
}

/// An instance that ends with this value. It exists from before the call that launches it: when the
/// answer is lost, the instance is found by the run's tag.
#[derive(Debug)]
pub(super) struct Instance<'a> {
    cli: &'a Cli,
    run: String,
    pub(super) id: Option<String>,
    /// Nothing can be there any more, or it shall stay.
    done: bool,
}

impl<'a> Instance<'a> {
    /// Launches one in the first subnet that has room.
    pub(super) fn launch(cli: &'a Cli, request: &Request<'_>) -> anyhow::Result<Instance<'a>> {
        let mut instance = Instance {
            cli,
            run: request.tags.run.clone(),
            id: None,
            done: false,
        };
        let user_data = format!("file://{}", request.user_data.display());
        let mut refused = None;
        for subnet_id in request.subnet_ids {
            ensure!(!cli.interrupts.requested(), "interrupted before the launch");
            let input = request.input(subnet_id).to_string();
            let launched = cli.change(&[
                "ec2",
                "run-instances",
                "--user-data",
                &user_data,
                "--cli-input-json",
                &input,
            ]);
            match launched {
                Ok(answer) => {
                    let id = answer["Instances"][0]["InstanceId"].as_str();
                    instance.id = id.map(str::to_owned);
                    ensure!(
                        instance.id.is_some(),
                        "AWS launched an instance and said no id"
                    );
                    return Ok(instance);
                }
                Err(error) => {
                    let refusal = error.downcast_ref::<Refusal>();
                    if refusal.is_some_and(is_lack_of_capacity) {
                        say!("no capacity for {} in {subnet_id}", request.instance_type);
                        refused = Some(error);
                        continue;
                    }
                    instance.done = refusal.is_some_and(nothing_was_done);
                    return Err(error);
                }
            }
        }
        instance.done = true;
        Err(refused.context("no subnet to launch in")?)
    }

    /// Lets the instance live on, until its own deadline.
    pub(super) fn keep(mut self) {
        self.done = true;
    }

    /// Waits until ssh answers and the boot is over, so that first-boot validation does not share
    /// the GPUs with ours.
    pub(super) fn wait_until_ready(&self, configuration: &Path) -> anyhow::Result<()> {
        let id = self.id.as_deref().context("the instance has no id")?;
        let deadline = Instant::now() + READY_WITHIN;
        let mut said = String::new();
        for attempt in 1.. {
            let output = self.ssh(configuration, id, "exit 0")?;
            if output.status.success() {
                break;
            }
            ensure!(
                !self.cli.interrupts.requested(),
                "interrupted while {id} was booting"
            );
            String::from_utf8_lossy(&output.stderr)
                .trim()
                .clone_into(&mut said);
            ensure!(
                Instant::now() < deadline,
                "{id} did not answer ssh within {} min: {said}; its console: `aws ec2 get-console-output --latest --instance-id {id}`",
                READY_WITHIN.as_secs() / 60
            );
            // Reading the instance's state costs a call, and instances rarely end by themselves.
            if attempt % 6 == 0 {
                self.still_alive(id)?;
            }
            std::thread::sleep(BETWEEN_ATTEMPTS);
        }
        // Degraded counts as over, and a machine without the state has no boot to wait for.
        self.ssh(
            configuration,
            id,
            "timeout 600 systemctl is-system-running --wait >/dev/null 2>&1; exit 0",
        )?;
        ensure!(
            !self.cli.interrupts.requested(),
            "interrupted while {id} was booting"
        );
        Ok(())
    }

    fn ssh(
        &self,
        configuration: &Path,
        id: &str,
        line: &str,
    ) -> anyhow::Result<std::process::Output> {
        use std::os::unix::process::CommandExt as _;
        let child = Command::new("ssh")
            .arg("-F")
            .arg(configuration)
            .args(["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "--", id, line])
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .context("ssh could not be started; install it (Debian and Ubuntu: apt-get install openssh-client)")?;
        let process = Pid::from_child(&child);
        Ok(self.cli.interrupts.while_waiting(
            move |_| {
                let _ = kill_process(process, Signal::TERM);
            },
            || child.wait_with_output(),
        )?)
    }

    fn still_alive(&self, id: &str) -> anyhow::Result<()> {
        let answer = self
            .cli
            .read(&["ec2", "describe-instances", "--instance-ids", id])?;
        let instance = &answer["Reservations"][0]["Instances"][0];
        let state = instance["State"]["Name"].as_str().unwrap_or("unknown");
        if !matches!(state, "pending" | "running") {
            let reason = instance["StateReason"]["Message"].as_str();
            bail!(
                "{id} is {state} before it could be judged: {}",
                reason.unwrap_or("AWS says no reason")
            );
        }
        Ok(())
    }

    /// Ends the instance; reports a failure, because the instance costs money until its deadline.
    pub(super) fn end(&mut self) {
        if std::mem::replace(&mut self.done, true) {
            return;
        }
        match self.terminate() {
            Ok(ended) if ended.is_empty() => {}
            Ok(ended) => say!("terminated {}", ended.join(", ")),
            Err(error) => say!(
                "warning: {} may still be running: {error:#}; to end it: cargo xtask validate-ami --sweep (it ends itself at its deadline, too)",
                self.id.as_deref().unwrap_or("an instance")
            ),
        }
    }

    fn terminate(&self) -> anyhow::Result<Vec<String>> {
        let ids = match &self.id {
            Some(id) => vec![id.clone()],
            None => self.find_by_tag()?,
        };
        if !ids.is_empty() {
            terminate(self.cli, &ids)?;
        }
        Ok(ids)
    }

    /// A new instance may not be listed at once.
    fn find_by_tag(&self) -> anyhow::Result<Vec<String>> {
        for attempt in 0..4 {
            if attempt > 0 {
                std::thread::sleep(Duration::from_secs(2));
            }
            let found = living(
                self.cli,
                &format!("Name=tag:{},Values={}", tags::RUN, self.run),
            )?;
            if !found.is_empty() {
                return Ok(found.iter().filter_map(id_of).collect());
            }
        }
        Ok(Vec::new())
    }
}

impl Drop for Instance<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// The biggest types take up to ten minutes from launch to ssh.
const READY_WITHIN: Duration = Duration::from_mins(15);

const BETWEEN_ATTEMPTS: Duration = Duration::from_secs(5);

pub(super) fn terminate(cli: &Cli, ids: &[String]) -> anyhow::Result<()> {
    let mut arguments = vec!["ec2", "terminate-instances", "--instance-ids"];
    arguments.extend(ids.iter().map(String::as_str));
    cli.change(&arguments).map(drop)
}

/// The instances under a filter that are not ended.
pub(super) fn living(cli: &Cli, filter: &str) -> anyhow::Result<Vec<Value>> {
    // Also queried while ending, after a signal.
    let answer = cli.change(&[
        "ec2",
        "describe-instances",
        "--filters",
        filter,
        "Name=instance-state-name,Values=pending,running,stopping,stopped",
    ])?;
    let reservations = answer["Reservations"].as_array();
    let instances = reservations
        .into_iter()
        .flatten()
        .filter_map(|reservation| reservation["Instances"].as_array());
    Ok(instances.flatten().cloned().collect())
}

pub(super) fn id_of(instance: &Value) -> Option<String> {
    instance["InstanceId"].as_str().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::{Foundation, Image, Market, Request, Tags};

    #[test]
    fn reservations_and_keys_are_asked_for_in_the_launch() {
        let image = Image {
            id: "ami-1".to_owned(),
            name: String::new(),
            root_device: "/dev/xvda".to_owned(),
            root_size_gib: Some(30),
        };
        let foundation = Foundation {
            subnet_ids: vec!["subnet-0123456789abcdef0".to_owned()],
            security_group_id: "sg-1".to_owned(),
            instance_profile_name: "profile".to_owned(),
            kms_key_arn: Some("arn:aws:kms:eu-central-1:111122223333:key/1".to_owned()),
        };
        let tags = Tags::new("p6-b200.48xlarge", 60, false).expect("tags");
        let request = Request {
            image: &image,
            foundation: &foundation,
            instance_type: "p6-b200.48xlarge",
            subnet_ids: &foundation.subnet_ids,
            market: Market::CapacityBlock,
            capacity_reservation: Some("cr-1"),
            user_data: Path::new("/user-data"),
            tags: &tags,
        };
        let input = request.input(&foundation.subnet_ids[0]);
        assert_eq!(
            input["InstanceMarketOptions"],
            json!({"MarketType": "capacity-block"})
        );
        assert_eq!(
            input["CapacityReservationSpecification"]["CapacityReservationTarget"]["CapacityReservationId"],
            "cr-1"
        );
        assert_eq!(
            input["BlockDeviceMappings"][0],
            json!({"DeviceName": "/dev/xvda", "Ebs": {
                "Encrypted": true, "VolumeType": "gp3", "DeleteOnTermination": true, "VolumeSize": 30,
                "KmsKeyId": "arn:aws:kms:eu-central-1:111122223333:key/1"
            }})
        );
        // EC2's own limit (API reference of RunInstances).
        let token = input["ClientToken"].as_str().expect("a text");
        assert!(token.len() <= 64, "{token}");
    }
}
