//! Which job runs, and what the GPUs were like when it began.

use std::collections::BTreeMap;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::state_folder::{StateFolders, file_of_runner};
use crate::facts::{Facts, KernelLog, KernelLogEnd, Reading};

/// The job, in the words of GitHub's default variables; empty where a variable is not set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Job {
    pub(crate) runner: String,
    /// `owner/name`.
    pub(crate) repository: String,
    pub(crate) workflow: String,
    /// `GITHUB_JOB`: the job's id in its workflow.
    #[serde(rename = "job")]
    pub(crate) id: String,
    pub(crate) run_id: String,
    pub(crate) run_attempt: String,
    /// Of the run, for a browser.
    pub(crate) url: String,
}

impl Job {
    /// Source of the variables: GitHub Actions documentation, default environment variables.
    pub(crate) fn from_environment() -> Self {
        let variable = |name| std::env::var(name).unwrap_or_default();
        let (server, repository, run_id) = (
            variable("GITHUB_SERVER_URL"),
            variable("GITHUB_REPOSITORY"),
            variable("GITHUB_RUN_ID"),
        );
        let url = if [&server, &repository, &run_id]
            .iter()
            .any(|it| it.is_empty())
        {
            String::new()
        } else {
            format!("{server}/{repository}/actions/runs/{run_id}")
        };
        Self {
            runner: variable("RUNNER_NAME"),
            repository,
            workflow: variable("GITHUB_WORKFLOW"),
            id: variable("GITHUB_JOB"),
            run_id,
            run_attempt: variable("GITHUB_RUN_ATTEMPT"),
            url,
        }
    }

    fn is_same(&self, other: &Self) -> bool {
        let key = |it: &Self| {
            (
                it.repository.clone(),
                it.run_id.clone(),
                it.run_attempt.clone(),
                it.id.clone(),
            )
        };
        key(self) == key(other)
    }
}

/// What the hook before a job keeps for the one behind it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobRecord {
    pub(crate) job: Job,
    /// RFC 3339 in UTC.
    pub(crate) began_at: String,
    /// Clock ticks since boot: a process that started later belongs to the time of the job.
    pub(crate) began_ticks: u64,
    /// `/proc/sys/kernel/random/boot_id`: after a reboot no tick of before means anything.
    pub(crate) boot_id: String,
    /// UUIDs; `None` for all GPUs of the machine.
    pub(crate) gpus: Option<Vec<String>>,
    /// Memory in use, in bytes, by the UUIDs of the GPUs.
    pub(crate) memory_used_bytes: BTreeMap<String, u64>,
    /// Where the kernel log ended: what came behind is the job's. `None` where it could not be read.
    pub(crate) kernel_log_end: Option<KernelLogEnd>,
}

const FILE: &str = "job";

impl JobRecord {
    /// The record of a job that begins now, on GPUs as `facts` tell.
    pub(crate) fn beginning_now(
        job: Job,
        gpus: Option<Vec<String>>,
        facts: &Facts,
        log: &Reading<KernelLog>,
    ) -> Self {
        let memory = facts
            .gpus
            .iter()
            .filter_map(|gpu| Some((gpu.uuid.value()?.clone(), gpu.memory.value()?.used_bytes)));
        Self {
            job,
            began_at: jiff::Timestamp::now()
                .strftime("%Y-%m-%dT%H:%M:%SZ")
                .to_string(),
            began_ticks: own_start_ticks(),
            boot_id: boot_id(),
            gpus,
            memory_used_bytes: memory.collect(),
            kernel_log_end: log.value().map(KernelLog::end),
        }
    }

    pub(crate) fn save(&self, folders: &StateFolders) -> anyhow::Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        folders.write(&file_of_runner(FILE, &self.job.runner), text.as_bytes())?;
        Ok(())
    }

    /// Takes the record of this job away and returns it; `None` where no hook ran before the job, or this one ran already.
    pub(crate) fn take(job: &Job, folders: &StateFolders) -> anyhow::Result<Option<Self>> {
        let mut taken = None;
        for path in folders.existing(&file_of_runner(FILE, &job.runner))? {
            let text = std::fs::read(&path)
                .with_context(|| format!("{} cannot be read", path.display()))?;
            let record: Self = serde_json::from_slice(&text)
                .with_context(|| format!("{} is not the record of a job", path.display()))?;
            std::fs::remove_file(&path)
                .with_context(|| format!("{} cannot be removed", path.display()))?;
            if record.job.is_same(job) && record.boot_id == boot_id() {
                taken.get_or_insert(record);
            }
        }
        Ok(taken)
    }
}

fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |it| it.trim().to_owned())
}

/// Without /proc, 0: then no process can be looked at either.
fn own_start_ticks() -> u64 {
    crate::process_stat::start_ticks(std::process::id()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> JobRecord {
        let job = Job {
            runner: "gpu-1".to_owned(),
            run_id: "17".to_owned(),
            ..Job::default()
        };
        JobRecord::beginning_now(job, None, &Facts::default(), &Reading::default())
    }

    #[test]
    fn a_record_is_taken_once_and_only_by_its_own_job() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = StateFolders::new(Some(folder.path()));
        let record = record();
        record.save(&folders).expect("saved");
        assert_eq!(
            JobRecord::take(&record.job, &folders).expect("read"),
            Some(record.clone())
        );
        assert_eq!(JobRecord::take(&record.job, &folders).expect("read"), None);
        record.save(&folders).expect("saved");
        let other = Job {
            run_id: "18".to_owned(),
            ..record.job.clone()
        };
        assert_eq!(JobRecord::take(&other, &folders).expect("read"), None);
        // The record of a job whose end nobody saw does not wait for a later one.
        assert_eq!(JobRecord::take(&record.job, &folders).expect("read"), None);
    }

    #[test]
    fn a_record_of_before_a_reboot_is_no_record() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = StateFolders::new(Some(folder.path()));
        let record = JobRecord {
            boot_id: "another".to_owned(),
            ..record()
        };
        record.save(&folders).expect("saved");
        assert_eq!(JobRecord::take(&record.job, &folders).expect("read"), None);
    }
}
