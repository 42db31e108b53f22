//! The GPU has all its memory.
//!
//! ## Why
//! A GPU that shows less memory than its siblings (a failed memory stack, a wrong VBIOS, a MIG or
//! vGPU remainder) fails jobs that fit everywhere else.
//!
//! ## How it is judged
//! NVML's total memory must be at least the profile's (`gpus.memory_minimum_mib`), else what the
//! GPU model has. It must also be what the other GPUs of the same name in this machine have: `fail`
//! below 97 % of the largest with the same PCI device id and ECC mode, otherwise less is a `warn`,
//! since ECC, board and firmware take a little each. With no expectation and no other GPU, the
//! check is skipped, as it is on GPUs that share the host's memory.
//!
//! ## What to do
//! Reset the GPU (`nvidia-smi --gpu-reset`) or reboot; if memory is still missing, replace the GPU.
//!
//! ## Source
//! NVIDIA's data sheets, as the rows of the reference table name them.

use crate::check::{Check, Judge, JudgeGpu};
use crate::expect;
use crate::expect::model_has;
use crate::facts::{Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::siblings::Greatest;

pub(crate) const CHECK: Check = Check {
    id: "gpu_memory",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/structnvmlMemory__v2__t.html",
};

const MIB: u64 = 1024 * 1024;
/// What the reference table demands of a model's memory too: drivers and firmware keep up to 2.6 %
/// of it.
const SIBLING_MINIMUM_PERCENT: u64 = 97;

/// The most memory, in MiB, of the GPUs of each product name; and of those that are alike, too:
/// the same product may be built on several chips, and ECC takes memory on some.
struct Largest<'f> {
    of_the_name: Greatest<'f, &'f str, u64>,
    of_those_alike: Greatest<'f, Likeness<'f>, u64>,
}

/// Product name, PCI device id, and whether ECC is on.
type Likeness<'f> = (&'f str, Option<u16>, Option<bool>);

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let total_mib = |gpu: &GpuFacts| Some(gpu.memory.value()?.total_bytes / MIB);
    let largest = Largest {
        of_the_name: Greatest::of(facts, |it| Some((name(it)?, total_mib(it)?))),
        of_those_alike: Greatest::of(facts, |it| Some((likeness(it)?, total_mib(it)?))),
    };
    Box::new(move |gpu| judge(gpu, &largest, profile))
}

fn name(gpu: &GpuFacts) -> Option<&str> {
    gpu.name.value().map(String::as_str)
}

fn likeness(gpu: &GpuFacts) -> Option<Likeness<'_>> {
    let ecc = gpu.ecc_mode.value().map(|mode| mode.current);
    Some((name(gpu)?, gpu.pci_device_id.value().copied(), ecc))
}

fn judge(gpu: &GpuFacts, largest: &Largest<'_>, profile: &Profile) -> Judgement {
    let must_tell = profile.gpus.memory_minimum_mib.is_some() || model_has(gpu, |_| true);
    let memory = gpu.memory.required_if(must_tell, "memory of its own")?;
    let total_mib = memory.total_bytes / MIB;
    let remedy = "reset the GPU or reboot; if memory is still missing, replace the GPU";
    let minimum = expect::memory_minimum_mib(gpu, profile);
    if let Some(minimum) = minimum.as_ref().filter(|it| total_mib < it.value) {
        return Ok(Outcome::fail(format!(
            "the GPU has {total_mib} MiB of memory, {} requires at least {} MiB",
            minimum.source, minimum.value
        ))
        .expected(format!("at least {} MiB", minimum.value))
        .observed(format!("{total_mib} MiB"))
        .remedy(remedy));
    }
    let largest_mib = name(gpu).and_then(|it| largest.of_the_name.of_others(&it, &gpu.uuid));
    if let Some(largest_mib) = largest_mib.filter(|it| total_mib < *it) {
        let is_much_less = likeness(gpu)
            .and_then(|it| largest.of_those_alike.of_others(&it, &gpu.uuid))
            .is_some_and(|it| total_mib * 100 < it.saturating_mul(SIBLING_MINIMUM_PERCENT));
        let text = format!(
            "the GPU has {total_mib} MiB of memory, another of the same model in this machine has {largest_mib} MiB"
        );
        let outcome = if is_much_less {
            Outcome::fail(text)
        } else {
            Outcome::warn(text)
        };
        return Ok(outcome
            .expected(format!("{largest_mib} MiB"))
            .observed(format!("{total_mib} MiB"))
            .remedy(remedy));
    }
    if minimum.is_none() && largest_mib.is_none() {
        return Ok(Outcome::skip(format!(
            "the GPU has {total_mib} MiB of memory; neither profile, reference table nor another GPU gives the expected size"
        )));
    }
    Ok(Outcome::pass(format!(
        "the GPU has {total_mib} MiB of memory"
    )))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{EccMode, GpuFacts, MemoryUse, Reading};
    use crate::findings::Verdict;
    use crate::test_machine::{
        MIB, healthy_t4, judge_gpu, judge_healthy, judge_only_gpu, make_model_unknown,
    };

    fn set_total_mib(gpu: &mut GpuFacts, total_mib: u64) {
        gpu.memory = Reading::Value(MemoryUse {
            total_bytes: total_mib * MIB,
            ..MemoryUse::default()
        });
    }

    #[test]
    fn passes_with_all_memory() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_one_mebibyte_below_the_profile() {
        let profile = "gpus: {memory_minimum_mib: 143771}";
        assert_eq!(
            judge_gpu(&CHECK, profile, |_| {}).verdict,
            Verdict::Pass,
            "exactly the minimum is enough"
        );
        let finding = judge_gpu(&CHECK, profile, |gpu| set_total_mib(gpu, 143_770));
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "the GPU has 143770 MiB of memory, the profile requires at least 143771 MiB"
        );
    }

    #[test]
    fn fails_below_97_percent_of_its_siblings_and_warns_above() {
        let profile = "gpus: {memory_minimum_mib: 1}";
        let finding = |total_mib| judge_gpu(&CHECK, profile, |gpu| set_total_mib(gpu, total_mib));
        // 97 % of 143,771 MiB are 139,457.87.
        let fail = finding(139_457);
        assert_eq!(fail.verdict, Verdict::Fail);
        assert!(fail.summary.contains("143771"), "{}", fail.summary);
        assert_eq!(finding(139_458).verdict, Verdict::Warn);
        assert_eq!(finding(143_770).verdict, Verdict::Warn);
    }

    #[test]
    fn only_warns_beside_siblings_of_another_chip_or_ecc_mode() {
        let profile = "gpus: {memory_minimum_mib: 1}";
        let changes: [fn(&mut GpuFacts); 2] = [
            |gpu| gpu.pci_device_id = Reading::Value(0x2321),
            |gpu| gpu.ecc_mode = Reading::Value(EccMode::default()),
        ];
        for change in changes {
            let finding = judge_gpu(&CHECK, profile, |gpu| {
                set_total_mib(gpu, 70_000);
                change(gpu);
            });
            assert_eq!(finding.verdict, Verdict::Warn);
        }
    }

    #[test]
    fn skips_where_nobody_says_how_much() {
        let mut gpu = healthy_t4();
        make_model_unknown(&mut gpu);
        assert_eq!(judge_only_gpu(&CHECK, "{}", gpu).verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.memory = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }
}
