//! Which job runs, and what the GPUs were like when it began.

use std::collections::BTreeMap;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::state_folder::{StateFile, StateFolders, file_of_runner};
use validator_core::facts::{Facts, KernelLog, KernelLogEnd, Reading};

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

/// The pre-job hook's record for the post-job hook.
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
    /// Where the kernel log ended: later records are the job's. `None` where it could not be read.
    pub(crate) kernel_log_end: Option<KernelLogEnd>,
}

const FILE: &str = "job";

impl JobRecord {
    /// The record of a job that begins now, on the GPUs of `facts`.
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

    /// The record of this job, which stays until [`KeptRecord::remove`]; `None` where no hook ran
    /// before the job, or this one ran already. Records of other jobs are removed.
    pub(crate) fn find(job: &Job, folders: &StateFolders) -> anyhow::Result<Option<KeptRecord>> {
        let mut found = None;
        for file in folders.existing(&file_of_runner(FILE, &job.runner))? {
            let path = file.path();
            let text = file
                .read()
                .with_context(|| format!("{} cannot be read", path.display()));
            let record = text.and_then(|text| {
                serde_json::from_slice::<Self>(&text)
                    .with_context(|| format!("{} is not the record of a job", path.display()))
            });
            let record = match record {
                Ok(record) => record,
                Err(error) => {
                    // It would stop every later hook, too.
                    let _ = file.remove();
                    return Err(error);
                }
            };
            if found.is_none() && record.job.is_same(job) && record.boot_id == boot_id() {
                found = Some(KeptRecord { record, file });
            } else {
                file.remove()
                    .with_context(|| format!("{} cannot be removed", path.display()))?;
            }
        }
        Ok(found)
    }

    /// Removes whatever record this runner has.
    pub(crate) fn discard(job: &Job, folders: &StateFolders) -> anyhow::Result<()> {
        for file in folders.existing(&file_of_runner(FILE, &job.runner))? {
            file.remove()
                .with_context(|| format!("{} cannot be removed", file.path().display()))?;
        }
        Ok(())
    }
}

/// A record and its file.
#[derive(Clone, Debug)]
pub(crate) struct KeptRecord {
    pub(crate) record: JobRecord,
    file: StateFile,
}

impl KeptRecord {
    /// Called last: a hook that ends before can run again and clean the rest.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        self.file
            .remove()
            .with_context(|| format!("{} cannot be removed", self.file.path().display()))
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

    fn found(job: &Job, folders: &StateFolders) -> Option<JobRecord> {
        let kept = JobRecord::find(job, folders).expect("read");
        kept.map(|it| it.record)
    }

    #[test]
    fn a_record_stays_until_it_is_removed_and_is_only_its_own_jobs() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = StateFolders::new(Some(folder.path()));
        let record = record();
        record.save(&folders).expect("saved");
        // A hook that was killed runs again.
        assert_eq!(found(&record.job, &folders), Some(record.clone()));
        let kept = JobRecord::find(&record.job, &folders).expect("read");
        kept.expect("found").remove().expect("removed");
        assert_eq!(found(&record.job, &folders), None);
        record.save(&folders).expect("saved");
        let other = Job {
            run_id: "18".to_owned(),
            ..record.job.clone()
        };
        assert_eq!(found(&other, &folders), None);
        // The record of a job whose end nothing noticed does not wait for a later one.
        assert_eq!(found(&record.job, &folders), None);
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
        assert_eq!(found(&record.job, &folders), None);
    }

    #[test]
    fn what_is_no_record_stops_one_hook_and_no_later_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = StateFolders::new(Some(folder.path()));
        let job = record().job;
        let path = folder.path().join("job-gpu-1.json");
        std::os::unix::fs::symlink("/dev/zero", &path).expect("linked");
        let error = JobRecord::find(&job, &folders).expect_err("refused");
        assert!(format!("{error:#}").contains("symbolic link"), "{error:#}");
        assert_eq!(found(&job, &folders), None);
    }
}
