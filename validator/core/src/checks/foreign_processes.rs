//! No other process uses the GPU.
//!
//! ## Why
//! At image build, at first boot and before a job, a process that still holds the GPU is a
//! leftover: it takes memory and time from the next job. But busy is not broken.
//!
//! ## How it is judged
//! Processes on the GPU, this validator's own aside, before the load and during the burn: `warn` by
//! default, `fail` where `policy.foreign_processes` is `forbidden`, pass where it is `allowed`.
//! With `required` their absence is a `fail`. Where the driver has no list of processes the check
//! is skipped, an `error` with `forbidden` or `required`.
//!
//! ## What to do
//! Find out whose process it is (`ps -fp <pid>`), and let it end or end it. In a container NVML may
//! hide the processes of others, so list them on the host.
//!
//! ## Source
//! `nvmlDeviceGetComputeRunningProcesses`,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>; DCGM warns of graphics
//! processes, Meta's gcm fails on any before a job.

use crate::check::{Check, Judge};
use crate::facts::{Facts, GpuFacts, GpuProcess};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::{Profile, Requirement};
use crate::queries::processes_in_words;

pub(crate) const CHECK: Check = Check {
    id: "foreign_processes",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let policy = profile.policy.foreign_processes;
    let must_tell = matches!(policy, Some(Requirement::Forbidden | Requirement::Required));
    let before = gpu.processes.required_if(must_tell, "list of processes")?;
    let processes = &with_newcomers(before, gpu, facts);
    if processes.is_empty() {
        if policy == Some(Requirement::Required) {
            return Ok(
                Outcome::fail("no process uses the GPU, the profile requires one")
                    .expected("a process")
                    .observed("none")
                    .remedy("start the service that the profile counts on"),
            );
        }
        return Ok(Outcome::pass("no process uses the GPU"));
    }
    let text = format!(
        "{} the GPU: {}",
        count_use(processes),
        processes_in_words(processes)
    );
    let outcome = match policy {
        Some(Requirement::Allowed | Requirement::Required) => return Ok(Outcome::pass(text)),
        Some(Requirement::Forbidden) => Outcome::fail(text),
        None => Outcome::warn(text),
    };
    Ok(outcome
        .expected("no process")
        .observed(processes_in_words(processes))
        .remedy("find out whose they are (ps -fp <pid>) and let them end; if they belong here, state policy.foreign_processes in the profile"))
}

/// And those who came while the GPU was burned.
fn with_newcomers(before: &[GpuProcess], gpu: &GpuFacts, facts: &Facts) -> Vec<GpuProcess> {
    let uuid = gpu.uuid.value();
    let during_burn = uuid.and_then(|uuid| facts.load.sensors.get(uuid));
    let newcomers = during_burn
        .into_iter()
        .flat_map(|log| &log.other_processes)
        .filter(|it| !before.iter().any(|known| known.pid == it.pid));
    before.iter().chain(newcomers).cloned().collect()
}

fn count_use(processes: &[GpuProcess]) -> String {
    match processes.len() {
        1 => "1 process uses".to_owned(),
        count => format!("{count} processes use"),
    }
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{GpuProcess, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{burned_node, judge_check, judge_gpu, judge_healthy, python_process};

    fn with(profile: &str, processes: Vec<GpuProcess>) -> Finding {
        judge_gpu(&CHECK, profile, |gpu| {
            gpu.processes = Reading::Value(processes);
        })
    }

    #[test]
    fn passes_when_nobody_is_there() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn warns_by_default_and_names_them() {
        let finding = with("{}", vec![python_process(512)]);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(
            finding.summary,
            "1 process uses the GPU: python3 (pid 4242, 512 MiB)"
        );
    }

    #[test]
    fn who_comes_during_the_burn_is_there_too() {
        let mut facts = burned_node();
        let log = facts.load.sensors.values_mut().next().expect("a log");
        let newcomer = GpuProcess {
            pid: 4343,
            ..python_process(64)
        };
        log.other_processes = vec![python_process(512), newcomer];
        let with_known = |known: Vec<GpuProcess>, profile: &str| {
            let mut facts = facts.clone();
            for gpu in &mut facts.gpus {
                gpu.processes = Reading::Value(known.clone());
            }
            judge_check(&CHECK, &facts, profile)
        };
        let forbidden = "policy: {foreign_processes: forbidden}";
        let verdicts = |findings: Vec<Finding>| {
            let failed = findings.iter().filter(|it| it.verdict == Verdict::Fail);
            failed.count()
        };
        assert_eq!(verdicts(with_known(Vec::new(), forbidden)), 1);
        assert_eq!(
            verdicts(with_known(vec![python_process(512)], forbidden)),
            8
        );
        let named = with_known(vec![python_process(512)], "{}");
        let most = named
            .iter()
            .find(|it| it.summary.starts_with("2 processes use the GPU"));
        let most = most.expect("one GPU has a newcomer");
        assert!(
            most.summary.ends_with("python3 (pid 4343, 64 MiB)"),
            "{}",
            most.summary
        );
    }

    #[test]
    fn names_only_the_first_few() {
        let finding = with("{}", vec![python_process(1); 7]);
        assert!(finding.summary.starts_with("7 processes use the GPU"));
        assert!(finding.summary.ends_with(", 2 more"), "{}", finding.summary);
    }

    #[test]
    fn names_a_process_of_which_little_is_known() {
        let finding = with(
            "{}",
            vec![GpuProcess {
                pid: 7,
                graphics: true,
                ..GpuProcess::default()
            }],
        );
        assert_eq!(
            finding.observed.as_deref(),
            Some("unknown name (pid 7, graphics)")
        );
    }

    #[test]
    fn the_profile_decides() {
        let policy = |word| format!("policy: {{foreign_processes: {word}}}");
        let one = || vec![python_process(512)];
        assert_eq!(with(&policy("forbidden"), one()).verdict, Verdict::Fail);
        assert_eq!(with(&policy("allowed"), one()).verdict, Verdict::Pass);
        assert_eq!(with(&policy("required"), one()).verdict, Verdict::Pass);
        assert_eq!(with(&policy("forbidden"), vec![]).verdict, Verdict::Pass);
        assert_eq!(with(&policy("required"), vec![]).verdict, Verdict::Fail);
    }

    #[test]
    fn errs_when_they_were_not_read_and_skips_where_they_are_not_told() {
        let not_read = judge_gpu(&CHECK, "policy: {foreign_processes: allowed}", |gpu| {
            gpu.processes = Reading::NotRead("no permission".to_owned());
        });
        assert_eq!(not_read.verdict, Verdict::Error);
        let none = judge_gpu(&CHECK, "{}", |gpu| gpu.processes = Reading::NotSupported);
        assert_eq!(none.verdict, Verdict::Skip);
        for (word, verdict) in [
            ("allowed", Verdict::Skip),
            ("forbidden", Verdict::Error),
            ("required", Verdict::Error),
        ] {
            let policy = format!("policy: {{foreign_processes: {word}}}");
            let finding = judge_gpu(&CHECK, &policy, |gpu| gpu.processes = Reading::NotSupported);
            assert_eq!(finding.verdict, verdict, "{word}");
        }
    }
}
