//! `cargo xtask validate-ami --ami`: launches an instance from an AMI, judges it over ssh, and ends
//! it.
//!
//! It goes through the AWS CLI and not through Terraform: the instance lives for minutes, a state
//! file could be lost, and a run that is killed between two steps would leave resources that are in
//! no state. Here the tags are the state.

mod access;
mod cli;
mod instance;
mod matrix;
mod refusal;
mod sweep;
mod tags;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde_json::json;

use self::access::Access;
use self::cli::Cli;
use self::instance::{Foundation, Image, Instance, Market, Request};
use self::matrix::Entry;
use self::refusal::is_lack_of_quota;
use self::tags::Tags;
use super::{Arguments, BadInput, conclude};
use validator_remote::interrupts::Interrupts;
use validator_remote::{Destination, command, reports, session};
use xtask::{say, workspace};

/// What is launched, and where.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "On AWS")]
#[allow(
    clippy::struct_excessive_bools,
    reason = "independent switches of a command line"
)]
pub(crate) struct Options {
    /// Launch an instance from this AMI, judge it, and terminate it
    #[arg(long, value_name = "AMI", value_parser = ami, conflicts_with_all = ["target", "simulate", "sudo"])]
    pub(super) ami: Option<String>,
    /// The instance's type
    #[arg(long, value_name = "TYPE", value_parser = instance_type, default_value = "g5.xlarge", requires = "ami")]
    instance_type: String,
    /// Judge the AMI on each of these types, and merge the reports
    #[arg(long, value_name = "TYPE,…", value_parser = instance_type, value_delimiter = ',', requires = "ami", conflicts_with = "instance_type")]
    matrix: Vec<String>,
    /// Of the types of --matrix, so many are judged side by side
    #[arg(long, value_name = "NUMBER", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=16), requires = "matrix")]
    at_once: u16,
    /// The AWS region [default: the AWS CLI's]
    #[arg(long, value_name = "REGION", value_parser = region)]
    region: Option<String>,
    /// Take spot capacity
    #[arg(long, requires = "ami")]
    spot: bool,
    /// Leave the instance running, until its deadline, and print how to reach it
    #[arg(long, requires = "ami", conflicts_with = "matrix")]
    keep: bool,
    /// A subnet instead of those of the account's foundation; may be given several times, tried in
    /// order
    #[arg(long, value_name = "SUBNET", requires = "ami")]
    subnet: Vec<String>,
    /// A capacity reservation to run in
    #[arg(long, value_name = "ID", requires = "ami")]
    capacity_reservation: Option<String>,
    /// The capacity reservation is a capacity block, bought ahead of time
    #[arg(long, requires = "capacity_reservation", conflicts_with = "spot")]
    capacity_block: bool,
    /// The instance ends itself after this time, whatever becomes of this command
    #[arg(long, value_name = "MINUTES", default_value_t = 60, value_parser = clap::value_parser!(u32).range(20..=720), requires = "ami")]
    time_limit: u32,
    /// The SSM parameter that terraform/modules/validation-instance wrote
    #[arg(
        long,
        value_name = "NAME",
        default_value = "/gpu-bringup/validation-instance",
        requires = "ami"
    )]
    foundation: String,
    /// End the leftovers of killed runs, and nothing else
    #[arg(long, conflicts_with_all = ["ami", "target", "simulate", "binary", "profile", "out"])]
    pub(super) sweep: bool,
    /// With --sweep: also instances of other machines that may still be worked with
    #[arg(long, requires = "sweep")]
    all: bool,
}

pub(super) fn sweep(options: &Options) -> anyhow::Result<u8> {
    let interrupts = Interrupts::catch().context("signals cannot be caught")?;
    let cli = Cli::find(options.region.as_deref(), &interrupts)?;
    sweep::sweep(&cli, options.all)?;
    Ok(0)
}

/// What all instances of a command share.
#[derive(Debug)]
struct Session<'a> {
    arguments: &'a Arguments,
    options: &'a Options,
    cli: Cli,
    foundation: Foundation,
    image: Image,
    binary: PathBuf,
}

pub(super) fn validate(arguments: &Arguments, ami: &str) -> anyhow::Result<u8> {
    let options = &arguments.aws;
    matrix::refuse_repeated(&options.matrix)?;
    needs_session_manager(arguments.ssh_config.as_deref())?;
    let interrupts = Interrupts::catch().context("signals cannot be caught")?;
    let cli = Cli::find(options.region.as_deref(), &interrupts)?;
    // Every request that can be refused comes before minutes of building, and before anything costs
    // money.
    let foundation = Foundation::read(&cli, &options.foundation)?;
    let image = Image::read(&cli, ami)?;
    let session = Session {
        arguments,
        options,
        cli,
        foundation,
        image,
        binary: super::binary(arguments)?,
    };
    let folder = super::reports_folder(arguments)?;
    if options.matrix.is_empty() {
        return session.judge(&options.instance_type, &folder);
    }
    let mut entries = session.judge_matrix(&folder);
    matrix::write(&folder, ami, &mut entries)?;
    for entry in &entries {
        let verdict = entry.outcome.as_ref().map(|code| matrix::verdict(*code));
        say!(
            "{}: {}",
            entry.instance_type,
            verdict.unwrap_or("not judged")
        );
    }
    say!(
        "merged reports: {} (matrix.junit.xml, matrix.json, matrix.md)",
        folder.path().display()
    );
    Ok(matrix::exit_code(&entries))
}

impl Session<'_> {
    /// Every type of the matrix, in its order.
    fn judge_matrix(&self, folder: &reports::Folder) -> Vec<Entry> {
        let types = &self.options.matrix;
        let at_once = usize::from(self.options.at_once);
        let judge = |instance_type: &str| self.judge_into(instance_type, folder);
        let mut outcomes = matrix::side_by_side(types, at_once, judge);
        // Quotas count what runs at the same time, so the other types may have used up what this
        // one needed.
        let alone = at_once.min(types.len()) == 1;
        for (instance_type, outcome) in types.iter().zip(&mut outcomes) {
            let refusal = outcome.as_ref().err().and_then(|it| it.downcast_ref());
            let again = !alone && refusal.is_some_and(is_lack_of_quota);
            if again && !self.cli.interrupts.requested() {
                say!("{instance_type}: again, now that no other type uses the quota");
                *outcome = judge(instance_type);
            }
        }
        let entries = types.iter().zip(outcomes);
        entries
            .map(|(instance_type, outcome)| Entry {
                instance_type: instance_type.clone(),
                outcome: outcome.map_err(|error| format!("{error:#}")),
            })
            .collect()
    }

    /// Into a folder of the type's own.
    fn judge_into(&self, instance_type: &str, folder: &reports::Folder) -> anyhow::Result<u8> {
        let outcome = reports::Folder::create(&folder.path().join(instance_type))
            .and_then(|folder| self.judge(instance_type, &folder));
        if let Err(error) = &outcome {
            say!("error: {instance_type}: {error:#}");
        }
        outcome
    }

    /// One instance, from launch to end.
    fn judge(&self, instance_type: &str, folder: &reports::Folder) -> anyhow::Result<u8> {
        let interrupts = &self.cli.interrupts;
        if interrupts.requested() {
            bail!("interrupted before {instance_type} was launched");
        }
        let tags = Tags::new(instance_type, self.options.time_limit, self.options.keep)?;
        let mut access =
            Access::create(&tags.run, &self.cli, self.arguments.ssh_config.as_deref())?;
        let user_data = access.user_data(self.options.time_limit)?;
        let subnet_ids = if self.options.subnet.is_empty() {
            &self.foundation.subnet_ids
        } else {
            &self.options.subnet
        };
        say!(
            "launching {instance_type} from {} ({}); it ends itself at {}",
            self.image.id,
            self.image.name,
            tags.deadline
        );
        let mut instance = Instance::launch(
            &self.cli,
            &Request {
                image: &self.image,
                foundation: &self.foundation,
                instance_type,
                subnet_ids,
                market: match (self.options.spot, self.options.capacity_block) {
                    (true, _) => Market::Spot,
                    (_, true) => Market::CapacityBlock,
                    _ => Market::OnDemand,
                },
                capacity_reservation: self.options.capacity_reservation.as_deref(),
                user_data: &user_data,
                tags: &tags,
            },
        )?;
        let id = instance.id.clone().context("the instance has no id")?;
        write_instance(folder, &self.image, instance_type, &id, &tags)?;
        say!("{id} ({instance_type}): waiting until it has booted");
        let ending = instance
            .wait_until_ready(&access.configuration())
            .and_then(|()| self.run_validator(&id, instance_type, &access, folder));
        if self.options.keep {
            access.keep();
            say!(
                "{id} is kept until {}; to reach it: ssh -F {} {id}; to end it: aws ec2 terminate-instances --instance-ids {id}",
                tags.deadline,
                access.configuration().display()
            );
            instance.keep();
        } else {
            instance.end();
        }
        conclude(
            ending,
            folder,
            self.arguments,
            &format!("{id} ({instance_type})"),
        )
    }

    fn run_validator(
        &self,
        id: &str,
        instance_type: &str,
        access: &Access,
        folder: &reports::Folder,
    ) -> anyhow::Result<command::Ending> {
        let run = command::Run {
            binary: &self.binary,
            level: self.arguments.level.as_deref(),
            profile: self.arguments.profile.as_deref(),
            more: &[],
            // The user that we made there may, and the kernel log is only root's.
            sudo: true,
            reports: folder,
            label: (!self.options.matrix.is_empty()).then_some(instance_type),
            interrupts: &self.cli.interrupts,
        };
        let destination = Destination {
            user: None,
            host: id.to_owned(),
            port: None,
        };
        session::run(&run, &destination, Some(&access.configuration()))
    }
}

/// What was judged, next to the reports.
fn write_instance(
    folder: &reports::Folder,
    image: &Image,
    instance_type: &str,
    id: &str,
    tags: &Tags,
) -> anyhow::Result<()> {
    let value = json!({
        "ami": image.id,
        "ami_name": image.name,
        "instance_type": instance_type,
        "instance_id": id,
        "run": tags.run,
    });
    let path = folder.file("instance.json");
    std::fs::write(&path, format!("{value:#}\n"))
        .with_context(|| format!("{} could not be written", path.display()))
}

/// Without a configuration of the user's own, ssh goes through Systems Manager, for which the AWS
/// CLI needs a plugin.
fn needs_session_manager(ssh_config: Option<&Path>) -> anyhow::Result<()> {
    if ssh_config.is_none() && workspace::in_path("session-manager-plugin").is_none() {
        bail!(BadInput(
            "session-manager-plugin is not in PATH; the AWS CLI needs it to reach an instance without ingress: https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html (or give an OpenSSH configuration for `Host i-*` with --ssh-config)"
                .to_owned()
        ));
    }
    Ok(())
}

fn ami(text: &str) -> Result<String, String> {
    let digits = text.strip_prefix("ami-").unwrap_or_default();
    if (8..=17).contains(&digits.len()) && digits.bytes().all(|it| it.is_ascii_hexdigit()) {
        Ok(text.to_owned())
    } else {
        Err("an AMI's id looks like ami-0123456789abcdef0".to_owned())
    }
}

/// The type becomes a folder's name and a tag.
fn instance_type(text: &str) -> Result<String, String> {
    let plain = |part: &str| {
        !part.is_empty()
            && part
                .bytes()
                .all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-')
    };
    match text.split_once('.') {
        Some((family, size)) if plain(family) && plain(size) => Ok(text.to_owned()),
        _ => Err("an instance type looks like g5.xlarge".to_owned()),
    }
}

fn region(text: &str) -> Result<String, String> {
    let plain = |it: u8| it.is_ascii_lowercase() || it.is_ascii_digit() || it == b'-';
    if !text.starts_with('-') && text.contains('-') && text.bytes().all(plain) {
        Ok(text.to_owned())
    } else {
        Err("a region looks like eu-central-1".to_owned())
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_are_those_that_aws_gives() {
        assert!(super::ami("ami-0123456789abcdef0").is_ok());
        assert!(super::ami("ami-0123456789abcdef0; reboot").is_err());
        assert!(super::instance_type("p6-b200.48xlarge").is_ok());
        assert!(super::instance_type("../x.xlarge").is_err());
        assert!(super::region("us-gov-west-1").is_ok());
        assert!(super::region("--profile").is_err());
    }
}
