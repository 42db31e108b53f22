//! Processes that end, also by SIGKILL, leave nothing on the GPUs or the host.
//!
//! ## Why
//! Memory that stays in use, a context of a dead process, a zombie or a descriptor in the launcher
//! adds up with every job, until allocations fail on a GPU without visible processes.
//!
//! ## How it is judged
//! Before the first worker of the allocation test and after its last, these are read: memory and
//! processes of each GPU by NVML, open file descriptors of the parent, workers that still exist or
//! were not reaped, shared memory segments of this user, references to the module `nvidia_uvm`.
//! Half of the workers of one phase are ended by SIGKILL at random moments. Within 2 s everything
//! must be as before; memory may differ by 64 MiB, which the driver keeps for itself. More segments
//! and references than before are a warning, as processes of others may have made them. Memory
//! with processes of others that came meanwhile is not judged. Judged at level `extended` and by
//! `gpu-validator allocation`; skipped where no such test was requested.
//!
//! ## What to do
//! `fuser -v /dev/nvidia*` lists processes that hold a GPU, also those that `nvidia-smi` does not.
//! Where there is none, reset the GPU (`nvidia-smi --gpu-reset`) or reboot. Update the driver.
//!
//! ## Source
//! The time limit is this project's requirement. A context takes 0.3 to 0.6 GiB (BENCHMARKS.md),
//! far above the tolerance.

use crate::allocation::{Leftover, leftovers, lists_workers, newcomers, pids};
use crate::cause::{CauseKind, RecommendedAction};
use crate::check::{Check, Judge};
use crate::facts::{AllocationFacts, AllocationSnapshot, Facts};
use crate::findings::{Evidence, Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "allocation_leaks",
    stage: Stage::Load,
    level: Level::Extended,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvidia-smi/index.html",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let allocation = queries::allocation_test(facts, profile)?;
    let workers = pids(allocation);
    if workers.is_empty() {
        return Err(queries::workers_failed("no worker was started", profile));
    }
    let before = allocation
        .before
        .required("state of the GPUs before the first worker")?;
    let after = allocation
        .after
        .required("state of the GPUs after the last worker")?;
    for uuid in &allocation.plan.gpus {
        let memory = |it: &AllocationSnapshot| it.gpus.get(uuid)?.memory_used_bytes;
        if memory(before).is_none() || memory(after).is_none() {
            let text = format!("the memory in use of {uuid} was not read");
            return Ok(Outcome::error(text));
        }
    }
    let (beside_others, left): (Vec<Leftover>, Vec<Leftover>) = leftovers(before, after, &workers)
        .into_iter()
        .partition(|it| is_excused(it, allocation));
    let (possible, left): (Vec<Leftover>, Vec<Leftover>) =
        left.into_iter().partition(Leftover::may_be_of_others);
    if !left.is_empty() {
        return Ok(leaked(&left, facts, after.seconds));
    }
    if let Some(first) = beside_others.first() {
        return Ok(Outcome::busy(format!(
            "{first} more than before are in use, and others came to the GPU meanwhile"
        )));
    }
    if let Some(finding) = possibly_left(&possible, allocation) {
        return Ok(finding);
    }
    let text = format!(
        "nothing is left of {}",
        queries::counted(workers.len(), "worker")
    );
    let Some(killing) = allocation.killing.value() else {
        let reason = "no worker could be killed to see what it leaves";
        return Err(queries::workers_failed(reason, profile));
    };
    let Some(unlisted_s) = killing.unlisted_after_s else {
        return Ok(Outcome::fail(format!(
            "NVML listed workers for more than 2 s after they were killed ({} of them)",
            killing.killed
        ))
        .expected("no killed process in NVML's lists after 2 s")
        .remedy("search the kernel log for Xids: dmesg | grep NVRM; reset the GPU"));
    };
    let text = format!("{text}, {} of which were killed", killing.killed);
    Ok(Outcome::pass(if lists_workers(allocation) {
        format!("{text}: {unlisted_s:.1} s after the last kill NVML listed none of these")
    } else {
        format!("{text}, by the GPUs' memory; NVML listed none of them at any time")
    }))
}

/// Leftovers of this test or of other processes. References are not compared where others came to a
/// GPU.
fn possibly_left(possible: &[Leftover], allocation: &AllocationFacts) -> Option<Outcome> {
    let gpus = &allocation.plan.gpus;
    let others_came = gpus.iter().any(|it| !newcomers(allocation, it).is_empty());
    let is_of_others = |it: &&Leftover| matches!(it, Leftover::UvmReferences(_)) && others_came;
    let texts: Vec<String> = possible
        .iter()
        .filter(|it| !is_of_others(it))
        .map(Leftover::to_string)
        .collect();
    (!texts.is_empty()).then(|| {
        Outcome::warn(format!(
            "after the last worker there is more than before, of the workers or of other processes: {}",
            texts.join("; ")
        ))
        .expected("shared memory and references to nvidia_uvm as before the first worker")
        .remedy("run again while no other user starts processes; list the holders: fuser -v /dev/nvidia-uvm /dev/shm/*")
    })
}

/// Memory of which others may be the owners.
fn is_excused(leftover: &Leftover, allocation: &AllocationFacts) -> bool {
    let Leftover::Memory { gpu, .. } = leftover else {
        return false;
    };
    !newcomers(allocation, gpu).is_empty()
}

fn leaked(left: &[Leftover], facts: &Facts, seconds: f64) -> Outcome {
    let place = |it: &Leftover| match it.gpu() {
        Some(gpu) => format!("{it} ({gpu})"),
        None => it.to_string(),
    };
    let texts: Vec<String> = left.iter().map(place).collect();
    let more = match texts.len() {
        1 => String::new(),
        count => format!(", and {} more", count - 1),
    };
    let evidence = left.iter().filter_map(|it| {
        let gpu = facts.gpu(it.gpu()?)?;
        Some(Evidence {
            pci_address: gpu.pci_address.value().cloned(),
            verdict: Verdict::Fail,
            kind: CauseKind::LoadFailed,
            recommended_action: RecommendedAction::Reset,
            summary: format!("the allocation test left {it}"),
            line: None,
        })
    });
    Outcome::fail(format!(
        "{seconds:.1} s after the last worker ended, this was left: {}{more}",
        texts[0]
    ))
    .expected("memory, processes and descriptors as before the first worker")
    .observed(texts.join("\n"))
    .remedy("list who holds the GPUs: fuser -v /dev/nvidia*; where there is no process, reset the GPU or reboot")
    .evidence(evidence.collect())
}

#[cfg(test)]
mod tests {
    use crate::facts::{AllocationFacts, AllocationSnapshot, Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        allocated_node, allocated_node_with, healthy_node, judge_host_check,
    };

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    fn after(allocation: &mut AllocationFacts) -> &mut AllocationSnapshot {
        match &mut allocation.after {
            Reading::Value(after) => after,
            other => panic!("the machine was read, not {other:?}"),
        }
    }

    #[test]
    fn passes_where_everything_is_as_before() {
        let finding = judge(&allocated_node());
        assert_eq!(finding.verdict, Verdict::Pass, "{}", finding.summary);
        assert_eq!(
            finding.summary,
            "nothing is left of 43 workers, 8 of which were killed: 0.3 s after the last kill NVML listed none of these"
        );
    }

    fn with_memory(mib: u64) -> Facts {
        allocated_node_with(|it| {
            let uuid = it.plan.gpus[3].clone();
            let gpu = after(it).gpus.get_mut(&uuid).expect("a GPU");
            gpu.memory_used_bytes = Some(mib << 20);
        })
    }

    #[test]
    fn fails_for_memory_that_is_left_and_names_the_gpu() {
        assert_eq!(judge(&with_memory(64)).verdict, Verdict::Pass);
        let facts = with_memory(300);
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Fail);
        let uuid = facts.gpus[3].uuid.value().expect("a UUID");
        assert_eq!(
            finding.summary,
            format!("0.2 s after the last worker ended, this was left: 300 MiB of memory ({uuid})")
        );
        let address = facts.gpus[3].pci_address.value();
        assert_eq!(finding.evidence[0].pci_address.as_ref(), address);
    }

    #[test]
    fn processes_that_nvml_never_listed_are_not_said_to_be_gone_from_its_lists() {
        let finding = judge(&allocated_node_with(|it| it.listed.clear()));
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(
            finding
                .summary
                .contains("NVML listed none of them at any time")
        );
    }

    #[test]
    fn memory_of_newcomers_is_not_ours() {
        let mut facts = with_memory(300);
        let allocation = facts.load.allocation.as_mut().expect("a test");
        let uuid = allocation.plan.gpus[3].clone();
        allocation.listed.entry(uuid).or_default().insert(4711);
        let finding = judge(&facts);
        assert_eq!((finding.verdict, finding.busy), (Verdict::Error, true));
    }

    #[test]
    fn fails_for_processes_descriptors_and_killed_workers_that_stay() {
        let process = allocated_node_with(|it| {
            after(it).processes.insert(1003);
        });
        let descriptor = allocated_node_with(|it| after(it).descriptors += 1);
        let listed = allocated_node_with(|it| {
            if let Reading::Value(killing) = &mut it.killing {
                killing.unlisted_after_s = None;
            }
        });
        for facts in [process, descriptor, listed] {
            assert_eq!(judge(&facts).verdict, Verdict::Fail);
        }
    }

    #[test]
    fn warns_of_segments_and_references_that_others_may_have_made() {
        let segment = allocated_node_with(|it| {
            if let Reading::Value(before) = &mut it.before {
                before.shared_memory = Some([].into());
            }
            after(it).shared_memory = Some(["psm_1".to_owned()].into());
        });
        let finding = judge(&segment);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.summary.ends_with(": shared memory psm_1"));
        let mut references = allocated_node_with(|it| {
            if let Reading::Value(before) = &mut it.before {
                before.uvm_references = Some(2);
            }
            after(it).uvm_references = Some(4);
        });
        let finding = judge(&references);
        assert_eq!(finding.verdict, Verdict::Warn);
        // A process that came to a GPU has opened it.
        let allocation = references.load.allocation.as_mut().expect("a test");
        let uuid = allocation.plan.gpus[3].clone();
        allocation.listed.entry(uuid).or_default().insert(4711);
        assert_eq!(judge(&references).verdict, Verdict::Pass);
    }

    #[test]
    fn what_was_not_read_is_an_error_and_what_was_not_tested_is_skipped() {
        let unread = allocated_node_with(|it| it.after = Reading::NotRead("no NVML".to_owned()));
        let no_memory = allocated_node_with(|it| {
            let uuid = it.plan.gpus[3].clone();
            after(it).gpus.remove(&uuid);
        });
        for facts in [unread, no_memory] {
            assert_eq!(judge(&facts).verdict, Verdict::Error);
        }
        assert_eq!(judge(&healthy_node()).verdict, Verdict::Skip);
        let mut stopped = with_memory(300);
        stopped.interrupted = Some("SIGINT".to_owned());
        assert_eq!(judge(&stopped).verdict, Verdict::Skip);
    }
}
