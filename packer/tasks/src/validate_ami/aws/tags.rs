//! The tags by which an instance is known: its only record, so that a run killed at any moment
//! leaves nothing unknown. The policy and the sweeper in terraform/modules/validation-instance know
//! the first two.

use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};
use xshell::cmd;

use xtask::workspace;

/// The run's id.
pub(super) const RUN: &str = "gpu-bringup.dev/validate-ami";

/// When any user may end the instance, in UTC.
pub(super) const DEADLINE: &str = "gpu-bringup.dev/terminate-after";

/// The process that launched the instance: `host/boot/process id/start time`; for one that is kept,
/// what outlives it.
pub(super) const STARTED_BY: &str = "gpu-bringup.dev/started-by";

/// What the tags of a run hold.
#[derive(Debug)]
pub(super) struct Tags {
    pub(super) run: String,
    pub(super) deadline: String,
    pub(super) started_by: String,
}

impl Tags {
    pub(super) fn new(
        instance_type: &str,
        time_limit_min: u32,
        keep: bool,
    ) -> anyhow::Result<Tags> {
        let own = Process::own()?;
        // The process id keeps two runs of a second apart, the type those of a matrix.
        let time = now()?.replace([':', '-'], "");
        Ok(Tags {
            run: format!("{time}-{}-{instance_type}", own.id),
            deadline: time_in(time_limit_min)?,
            started_by: if keep {
                // Its process ends long before its deadline, and that makes it no leftover.
                format!("--keep on {}", own.host)
            } else {
                own.to_string()
            },
        })
    }

    /// For `--tag-specifications`: instance and volumes, from their first moment on.
    pub(super) fn specifications(&self, ami: &str) -> Value {
        let tag = |key: &str, value: &str| json!({"Key": key, "Value": value});
        let tags = [
            tag("Name", &format!("validate-ami {ami}")),
            tag(RUN, &self.run),
            tag(DEADLINE, &self.deadline),
            tag(STARTED_BY, &self.started_by),
        ];
        json!([
            {"ResourceType": "instance", "Tags": tags},
            {"ResourceType": "volume", "Tags": tags},
        ])
    }
}

/// The value of a tag in an answer of EC2.
pub(super) fn value<'a>(resource: &'a Value, key: &str) -> Option<&'a str> {
    let tags = resource["Tags"].as_array()?;
    tags.iter()
        .find(|tag| tag["Key"] == key)
        .and_then(|tag| tag["Value"].as_str())
}

/// Whether an instance is no longer in use: its deadline has passed, or the process that launched
/// it was one of this machine and is gone. Without a readable deadline it counts as passed.
pub(super) fn is_leftover(resource: &Value, now: &str) -> bool {
    // Both are written by `date` in one form, in which the order of texts is that of times.
    let in_time = value(resource, DEADLINE)
        .is_some_and(|deadline| deadline.len() == now.len() && deadline > now);
    let owner_gone = value(resource, STARTED_BY)
        .and_then(Process::parse)
        .is_some_and(|process| process.is_gone());
    !in_time || owner_gone
}

/// A process, distinguished from any later one with the same id.
#[derive(Debug, PartialEq, Eq)]
struct Process {
    host: String,
    boot: String,
    id: u32,
    start_time: u64,
}

impl Process {
    fn own() -> anyhow::Result<Process> {
        let id = std::process::id();
        Ok(Process {
            host: read("/proc/sys/kernel/hostname")?,
            boot: read("/proc/sys/kernel/random/boot_id")?,
            id,
            start_time: start_time(id).context("/proc/self/stat cannot be read")?,
        })
    }

    fn parse(text: &str) -> Option<Process> {
        let [host, boot, id, start_time] = text.split('/').collect::<Vec<_>>().try_into().ok()?;
        Some(Process {
            host: host.to_owned(),
            boot: boot.to_owned(),
            id: id.parse().ok()?,
            start_time: start_time.parse().ok()?,
        })
    }

    /// Of a process of another machine nothing is known, so it counts as alive.
    fn is_gone(&self) -> bool {
        let Ok(own) = Process::own() else {
            return false;
        };
        if self.host != own.host {
            return false;
        }
        self.boot != own.boot || start_time(self.id) != Some(self.start_time)
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Process {
            host,
            boot,
            id,
            start_time,
        } = self;
        write!(formatter, "{host}/{boot}/{id}/{start_time}")
    }
}

fn read(path: &str) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("{path} cannot be read"))?;
    Ok(text.trim().to_owned())
}

/// In clock ticks since boot, the 22nd field of `/proc/<id>/stat` (proc(5)); nothing for a process
/// that has ended.
fn start_time(id: u32) -> Option<u64> {
    let text =
        std::fs::read_to_string(Path::new("/proc").join(id.to_string()).join("stat")).ok()?;
    // The second field is the program's name in brackets, which may hold anything.
    let (_, rest) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    if matches!(fields.first(), Some(&("Z" | "X"))) {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// The form that AWS Step Functions compares.
const FORMAT: &str = "+%Y-%m-%dT%H:%M:%SZ";

pub(super) fn now() -> anyhow::Result<String> {
    let shell = workspace::shell()?;
    Ok(cmd!(shell, "date --utc {FORMAT}").quiet().read()?)
}

fn time_in(minutes: u32) -> anyhow::Result<String> {
    let shell = workspace::shell()?;
    let later = format!("{minutes} minutes");
    Ok(cmd!(shell, "date --utc --date {later} {FORMAT}")
        .quiet()
        .read()?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{DEADLINE, Process, RUN, STARTED_BY, Tags, is_leftover, now, value};

    fn tagged(deadline: &str, started_by: &str) -> serde_json::Value {
        json!({"Tags": [
            {"Key": DEADLINE, "Value": deadline}, {"Key": STARTED_BY, "Value": started_by}
        ]})
    }

    #[test]
    fn a_running_process_keeps_its_instance_until_the_deadline() {
        let own = Process::own().expect("a process").to_string();
        assert_eq!(Process::parse(&own).expect("the same").to_string(), own);
        let now = now().expect("a time");
        assert!(!is_leftover(&tagged("2999-01-01T00:00:00Z", &own), &now));
        assert!(is_leftover(&tagged("2001-01-01T00:00:00Z", &own), &now));
        assert!(is_leftover(&tagged("tomorrow", &own), &now));
        assert!(is_leftover(&json!({"Tags": []}), &now));
    }

    #[test]
    fn a_process_that_is_gone_leaves_its_instance_at_once() {
        let own = Process::own().expect("a process");
        let now = now().expect("a time");
        let future = "2999-01-01T00:00:00Z";
        let other = |change: &dyn Fn(&mut Process)| {
            let mut process = Process::own().expect("a process");
            change(&mut process);
            process.to_string()
        };
        let reused = other(&|it| it.start_time = own.start_time + 1);
        assert!(is_leftover(&tagged(future, &reused), &now));
        let before_reboot = other(&|it| it.boot = "another".to_owned());
        assert!(is_leftover(&tagged(future, &before_reboot), &now));
        let elsewhere = other(&|it| {
            it.host = "another".to_owned();
            it.boot = "another".to_owned();
        });
        assert!(!is_leftover(&tagged(future, &elsewhere), &now));
    }

    #[test]
    fn a_kept_instance_is_no_leftover_before_its_deadline() {
        let tags = Tags::new("g5.xlarge", 60, true).expect("tags");
        let now = now().expect("a time");
        assert!(!is_leftover(
            &tagged(&tags.deadline, &tags.started_by),
            &now
        ));
        assert!(is_leftover(
            &tagged("2001-01-01T00:00:00Z", &tags.started_by),
            &now
        ));
    }

    #[test]
    fn instance_and_volumes_carry_run_and_deadline() {
        let tags = Tags::new("g5.xlarge", 60, false).expect("tags");
        let specifications = tags.specifications("ami-1");
        for resource in specifications.as_array().expect("two") {
            assert_eq!(value(resource, RUN), Some(&*tags.run));
            assert_eq!(value(resource, DEADLINE), Some(&*tags.deadline));
        }
        assert!(tags.deadline > now().expect("a time"));
        assert!(tags.run.ends_with("-g5.xlarge"), "{}", tags.run);
    }
}
