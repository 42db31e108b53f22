//! The memory of an idle GPU is free.
//!
//! ## Why
//! Memory that stays in use without a process is leaked: by a job that was killed and whose process
//! hangs in the kernel, or by a container that NVML cannot see. The next job runs out of memory.
//!
//! ## How it is judged
//! On a GPU with processes more than 1024 MiB that these do not explain warn, where NVML states the
//! memory of each; otherwise the check is skipped, since the memory may well be theirs. On a GPU
//! without processes, memory in use besides what the driver reserves:
//! - with `policy.idle_memory_maximum_mib`: `fail` above it;
//! - without: `warn` above 15 MiB, `fail` above 1024 MiB. In a container, where processes of others
//!   can be hidden, it is always a `warn`.
//!
//! Only the upper limit is judged with old drivers, which count what they reserve as used, and on
//! GPUs that are not known as data center models: a console or desktop takes tens of MiB there.
//! GPUs in MIG mode are skipped, and so are those without a list of processes, an `error` with a
//! maximum in the profile.
//!
//! ## What to do
//! Search for processes in state D or Z that hold `/dev/nvidia*` (`fuser -v /dev/nvidia*`), and for
//! stopped containers. If there are none, reset the GPU or reboot.
//!
//! ## Source
//! 15 MiB is the limit of Meta's gcm health checks before a job. 1024 MiB is this project's own
//! choice: it leaves room for what old drivers count of their own (driver 580 reserves 616 MiB on
//! an H200).

use crate::check::{Check, Judge};
use crate::expect::model_has;
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "idle_memory",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpu(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/structnvmlMemory__v2__t.html",
};

const MIB: u64 = 1024 * 1024;
/// The limit of Meta's gcm health checks.
const WARN_ABOVE_MIB: u64 = 15;
/// This project's own choice: more than a driver keeps for itself (616 MiB on an H200), so
/// somebody's data.
const FAIL_ABOVE_MIB: u64 = 1024;

fn judge(gpu: &GpuFacts, facts: &Facts, profile: &Profile) -> Judgement {
    let by_policy = profile.policy.idle_memory_maximum_mib;
    let memory = gpu.memory.required_if(
        model_has(gpu, |_| true) || by_policy.is_some(),
        "memory of its own",
    )?;
    if gpu.mig.value().is_some_and(|mig| mig.current) {
        return Ok(Outcome::skip(
            "the GPU is in MIG mode, its memory belongs to MIG devices",
        ));
    }
    let processes = gpu
        .processes
        .required_if(by_policy.is_some(), "list of processes")?;
    if !processes.is_empty() {
        let stated: Option<Vec<u64>> = processes.iter().map(|it| it.used_memory_bytes).collect();
        let explained: Option<u64> = stated.map(|it| it.iter().sum());
        let unexplained = explained.map(|it| memory.used_bytes.saturating_sub(it) / MIB);
        if let Some(unexplained) = unexplained.filter(|it| *it > FAIL_ABOVE_MIB) {
            return Ok(Outcome::warn(format!(
                "{unexplained} MiB of memory are in use that no listed process explains ({})",
                queries::processes_in_words(processes)
            ))
            .expected(format!("at most {FAIL_ABOVE_MIB} MiB besides the processes' own"))
            .observed(format!("{unexplained} MiB"))
            .remedy("check for processes that hold the GPU (fuser -v /dev/nvidia*) and for stopped containers; if there are none, reset the GPU or reboot"));
        }
        return Ok(Outcome::skip(format!(
            "{} processes use the GPU; whether memory is leaked shows only without them",
            processes.len()
        )));
    }
    let used_mib = memory.used_bytes / MIB;
    let is_data_center = model_has(gpu, |model| model.data_center);
    let warn_above = match memory.reserved_bytes {
        Some(_) if is_data_center => WARN_ABOVE_MIB,
        Some(_) | None => FAIL_ABOVE_MIB,
    };
    let limit = by_policy.unwrap_or(warn_above);
    let text = format!("{used_mib} MiB of memory are in use without a process");
    if used_mib <= limit {
        return Ok(Outcome::pass(text));
    }
    let text = format!("{text}, more than {limit} MiB");
    let others_may_be_hidden = facts.host.in_container.value() == Some(&true);
    let is_failure = by_policy.is_some() || used_mib > FAIL_ABOVE_MIB;
    let outcome = if is_failure && !others_may_be_hidden {
        Outcome::fail(text)
    } else {
        Outcome::warn(text)
    };
    Ok(outcome
        .expected(format!("at most {limit} MiB"))
        .observed(format!("{used_mib} MiB"))
        .remedy("check for processes that hold the GPU (fuser -v /dev/nvidia*) and for stopped containers; if there are none, reset the GPU or reboot"))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{GpuFacts, MigMode, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        MIB, healthy_node, judge_check, judge_gpu, judge_healthy, python_process,
    };

    fn use_mib(gpu: &mut GpuFacts, used_mib: u64) {
        let Reading::Value(memory) = &mut gpu.memory else {
            panic!("the healthy GPU has memory")
        };
        memory.used_bytes = used_mib * MIB;
    }

    fn with(profile: &str, used_mib: u64, in_container: bool) -> Finding {
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(in_container);
        use_mib(&mut facts.gpus[0], used_mib);
        judge_check(&CHECK, &facts, profile).swap_remove(0)
    }

    #[test]
    fn passes_when_memory_is_free() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn warns_above_15_mib_and_fails_above_a_gibibyte() {
        let verdict = |used_mib| with("{}", used_mib, false).verdict;
        assert_eq!(verdict(15), Verdict::Pass);
        assert_eq!(verdict(16), Verdict::Warn);
        assert_eq!(verdict(1024), Verdict::Warn);
        assert_eq!(verdict(1025), Verdict::Fail);
    }

    #[test]
    fn fails_above_what_the_profile_allows() {
        let profile = "policy: {idle_memory_maximum_mib: 100}";
        assert_eq!(with(profile, 100, false).verdict, Verdict::Pass);
        let finding = with(profile, 101, false);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "101 MiB of memory are in use without a process, more than 100 MiB"
        );
    }

    #[test]
    fn only_warns_in_a_container_where_processes_may_be_hidden() {
        assert_eq!(with("{}", 20_000, true).verdict, Verdict::Warn);
    }

    #[test]
    fn a_workstation_may_show_a_console() {
        let used = |used_mib| {
            judge_gpu(&CHECK, "{}", |gpu| {
                gpu.name = Reading::Value("NVIDIA GeForce RTX 3090".to_owned());
                gpu.pci_device_id = Reading::Value(0x2204);
                use_mib(gpu, used_mib);
            })
            .verdict
        };
        assert_eq!(used(60), Verdict::Pass);
        assert_eq!(used(1025), Verdict::Fail);
    }

    #[test]
    fn an_old_driver_may_count_what_it_reserves() {
        let used = |used_mib| {
            judge_gpu(&CHECK, "{}", |gpu| {
                let Reading::Value(memory) = &mut gpu.memory else {
                    panic!("the healthy GPU has memory")
                };
                memory.reserved_bytes = None;
                memory.used_bytes = used_mib * MIB;
            })
            .verdict
        };
        assert_eq!(used(616), Verdict::Pass);
        assert_eq!(used(1025), Verdict::Fail);
    }

    #[test]
    fn skips_with_processes_and_in_mig_mode() {
        let busy = judge_gpu(&CHECK, "{}", |gpu| {
            use_mib(gpu, 20_000);
            gpu.processes = Reading::Value(vec![python_process(19_000)]);
        });
        assert_eq!(busy.verdict, Verdict::Skip);
        let mig = judge_gpu(&CHECK, "{}", |gpu| {
            use_mib(gpu, 20_000);
            gpu.mig = Reading::Value(MigMode {
                current: true,
                pending: true,
            });
        });
        assert_eq!(mig.verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_memory_or_processes_were_not_read() {
        let memory = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.memory = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(memory.verdict, Verdict::Error);
        let processes = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.processes = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(processes.verdict, Verdict::Error);
        let without_list = |profile| {
            judge_gpu(&CHECK, profile, |gpu| gpu.processes = Reading::NotSupported).verdict
        };
        assert_eq!(without_list("{}"), Verdict::Skip);
        let limited = "policy: {idle_memory_maximum_mib: 100}";
        assert_eq!(without_list(limited), Verdict::Error);
    }

    #[test]
    fn memory_that_no_process_explains_warns() {
        let with = |mib: u64| {
            judge_gpu(&CHECK, "{}", |gpu| {
                gpu.processes = Reading::Value(vec![python_process(600)]);
                if let Reading::Value(memory) = &mut gpu.memory {
                    memory.used_bytes = mib * MIB;
                }
            })
            .verdict
        };
        assert_eq!(with(700), Verdict::Skip);
        assert_eq!(with(40_000), Verdict::Warn);
    }
}
