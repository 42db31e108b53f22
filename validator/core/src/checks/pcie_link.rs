//! The PCIe link has all its lanes and the speed that GPU and slot can do.
//!
//! ## Why
//! A badly seated riser or a damaged lane leaves a link that works at half the width or at an older
//! generation. Everything still runs; every copy between host and GPU is slow.
//!
//! ## How it is judged
//! Width, always: `fail` below the profile's (`gpus.pcie.width`), else below the least width with
//! which NVIDIA's diagnostics are content for this model; `fail` when another GPU of the same name
//! in this machine has more lanes, or when the link is narrower than GPU and slot can do together.
//! On virtual machines that last one is a `warn`: the real slot is hidden from the guest (some EC2
//! types connect 8 of 16 lanes by design), so state the width in the profile.
//!
//! `/sys/bus/pci` is held against NVML: fewer lanes there are a `fail`, a `warn` on virtual
//! machines.
//!
//! Generation: what GPU and slot can reach together is held against the profile
//! (`gpus.pcie.generation`), else against the diagnostics' least generation, and against the other
//! GPUs of the same name (`fail`); an SXM GPU of Hopper or newer that reaches less than its own
//! generation on bare metal is a `warn`. The current generation is judged only while the GPU is at
//! work in P0, and only as a `warn`: an idle GPU lowers it to save power, and raises it again in
//! moments.
//!
//! Under load, where the link was sampled: fewer lanes than before in any sample is a `fail`, and
//! so is a lower generation than GPU and slot can do together in more than a tenth of the samples.
//!
//! GPUs that are not known as data center models fail only against the profile or without any lane;
//! any other `fail` is a `warn` there, since workstations rightly share lanes (x8/x8) and have
//! older slots. Virtual GPUs that have no link of their own are skipped, an `error` where the
//! profile requires one.
//!
//! ## What to do
//! Reseat the GPU, riser or cable. On a cloud machine, replace the instance.
//!
//! ## Source
//! `nvmlDeviceGetCurrPcieLinkWidth` and its siblings,
//! <https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html>; the least links are
//! those of DCGM's table of models.

use std::collections::{BTreeMap, HashMap};

use crate::check::{Check, Judge, JudgeGpu};
use crate::expect;
use crate::expect::model_has;
use crate::facts::{ClocksEventReasons, Facts, GpuFacts, PciDevice, PcieLink};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::siblings::{Greatest, pci_devices_by_address};
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "pcie_link",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html",
};

/// An idle GPU raises the generation when its load begins: this project's own choice of how long
/// that may take, as a share of the samples.
const SLOW_SAMPLES_MAXIMUM: f64 = 0.1;

const REMEDY: &str = "reseat the GPU, riser or cable; on a cloud machine, replace the instance";

/// What is known of all GPUs together.
struct Node<'f> {
    facts: &'f Facts,
    devices: HashMap<&'f str, &'f PciDevice>,
    /// By product name.
    width: Greatest<'f, &'f str, u32>,
    reachable_generation: Greatest<'f, &'f str, u32>,
}

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let greatest = |value: fn(&PcieLink) -> u32| {
        Greatest::of(facts, |it| {
            Some((it.name.value()?.as_str(), value(it.pcie.value()?)))
        })
    };
    let node = Node {
        facts,
        devices: pci_devices_by_address(facts),
        width: greatest(|it| it.current_width),
        reachable_generation: greatest(|it| it.max_generation),
    };
    Box::new(move |gpu| judge(gpu, &node, profile))
}

fn judge(gpu: &GpuFacts, node: &Node<'_>, profile: &Profile) -> Judgement {
    let asked = &profile.gpus.pcie;
    let by_profile = asked.width.is_some() || asked.generation.is_some();
    let link = gpu
        .pcie
        .required_if(model_has(gpu, |_| true) || by_profile, "PCIe link")?;
    worst_of([
        Ok(judge_width(link, gpu, node, profile)),
        Ok(judge_reachable_generation(link, gpu, node, profile)),
        Ok(judge_current_generation(link, gpu)),
        judge_under_load(link, gpu, node.facts),
        Ok(judge_in_sysfs(link, gpu, node)),
    ])
}

/// The kernel reads the link's registers itself, so that it shows lanes which the driver's copy
/// does not miss yet.
fn judge_in_sysfs(link: &PcieLink, gpu: &GpuFacts, node: &Node<'_>) -> Outcome {
    let address = gpu.pci_address.value().map(String::as_str);
    let device = address.and_then(|it| node.devices.get(it));
    let width = device
        .and_then(|it| it.current_link_width)
        .filter(|it| *it > 0 && *it < link.current_width);
    let Some(width) = width else {
        return Outcome::skip("sysfs shows no fewer lanes");
    };
    let text = format!(
        "sysfs shows {width} lanes of the PCIe link, NVML {}",
        link.current_width
    );
    let outcome = if is_on_bare_metal(gpu) {
        objection(gpu, false, text)
    } else {
        Outcome::warn(text)
    };
    outcome
        .expected(format!("x{}", link.current_width))
        .observed(format!("x{width}"))
        .remedy(REMEDY)
}

/// The outcome for a link that is less than it could be. Board, riser and bifurcation of a
/// workstation rightly give a card fewer lanes or an older slot (x8/x8), so that beside a profile
/// only data center models fail.
fn objection(gpu: &GpuFacts, by_profile: bool, text: String) -> Outcome {
    if by_profile || model_has(gpu, |model| model.data_center) {
        Outcome::fail(text)
    } else {
        Outcome::warn(text)
    }
}

fn judge_width(link: &PcieLink, gpu: &GpuFacts, node: &Node<'_>, profile: &Profile) -> Outcome {
    let width = link.current_width;
    let by_profile = profile.gpus.pcie.width.is_some();
    let short_of = |wanted: u32, who: &str, by_profile: bool| {
        let text = format!("the PCIe link has {width} lanes, {who} {wanted}");
        // A link without lanes is broken in every machine.
        objection(gpu, by_profile || width == 0, text)
            .expected(format!("x{wanted}"))
            .observed(format!("x{width}"))
            .remedy(REMEDY)
    };
    let expected = expect::pcie_width(gpu, profile);
    if let Some(expected) = expected.as_ref().filter(|it| width < it.value) {
        let who = format!("{} requires", expected.source);
        return short_of(expected.value, &who, by_profile);
    }
    if let Some(wider) = best_of_siblings(gpu, &node.width, width) {
        return short_of(wider, "another GPU of this model here has", false);
    }
    if width == 0 {
        return short_of(link.max_width, "GPU and slot can do", false);
    }
    if width < link.max_width && !by_profile {
        let outcome = short_of(link.max_width, "GPU and slot can do", false);
        return if is_on_bare_metal(gpu) {
            outcome
        } else {
            Outcome::warn(outcome.summary)
                .expected(format!("x{}", link.max_width))
                .observed(format!("x{width}"))
                .remedy(
                    "if this machine connects fewer lanes by design, state gpus.pcie.width in the profile",
                )
        };
    }
    Outcome::pass(format!("the PCIe link has {width} lanes"))
}

/// Hopper's major compute capability. Boards of older GPUs are found in older hosts.
const HOPPER: u32 = 9;

fn judge_reachable_generation(
    link: &PcieLink,
    gpu: &GpuFacts,
    node: &Node<'_>,
    profile: &Profile,
) -> Outcome {
    let generation = link.max_generation;
    let by_profile = profile.gpus.pcie.generation.is_some();
    let short_of = |wanted: u32, who: &str, by_profile: bool| {
        let text = format!("GPU and slot reach PCIe generation {generation}, {who} {wanted}");
        objection(gpu, by_profile, text)
            .expected(format!("generation {wanted}"))
            .observed(format!("generation {generation}"))
            .remedy(REMEDY)
    };
    if let Some(expected) = expect::pcie_generation(gpu, profile).filter(|it| generation < it.value)
    {
        let who = format!("{} requires", expected.source);
        return short_of(expected.value, &who, by_profile);
    }
    if let Some(better) = best_of_siblings(gpu, &node.reachable_generation, generation) {
        return short_of(better, "another GPU of this model here reaches", false);
    }
    let own = link.gpu_max_generation.filter(|it| generation < *it);
    if let Some(own) = own.filter(|_| is_on_bare_metal(gpu) && is_on_a_board(gpu)) {
        return Outcome::warn(format!(
            "GPU and slot reach PCIe generation {generation}, the GPU {own}, and its board has no older slot"
        ))
        .expected(format!("generation {own}"))
        .observed(format!("generation {generation}"))
        .remedy("check the PCIe settings of the system's firmware; then reseat the board or replace the retimer");
    }
    Outcome::pass(format!("generation {generation} can be reached"))
}

/// An SXM GPU of Hopper or newer: it sits on a baseboard whose switches are of its own generation.
fn is_on_a_board(gpu: &GpuFacts) -> bool {
    expect::gpu_model(gpu)
        .is_some_and(|model| model.whole_board_nvlinks && model.compute_capability.major >= HOPPER)
}

fn judge_current_generation(link: &PcieLink, gpu: &GpuFacts) -> Outcome {
    let current = link.current_generation;
    if current < link.max_generation && is_at_work(gpu) {
        return Outcome::warn(format!(
            "the PCIe link runs at generation {current} although the GPU is at work, GPU and slot can do {}",
            link.max_generation
        ))
        .expected(format!("generation {}", link.max_generation))
        .observed(format!("generation {current}"))
        .remedy(REMEDY);
    }
    Outcome::pass(format!("it is at generation {current} now"))
}

/// Under load the link runs as fast as GPU and slot can, and has all its lanes.
fn judge_under_load(link: &PcieLink, gpu: &GpuFacts, facts: &Facts) -> Judgement {
    let sampled = gpu
        .uuid
        .value()
        .and_then(|uuid| facts.load.sensors.get(uuid)?.pcie.as_ref())
        .ok_or_else(|| Outcome::skip("the PCIe link was not sampled under load"))?;
    let below = |seen: &BTreeMap<u32, u64>, wanted: u32| -> Option<(u32, u64, u64)> {
        let all: u64 = seen.values().sum();
        let (least, _) = seen.first_key_value()?;
        let fewer: u64 = seen.range(..wanted).map(|(_, count)| count).sum();
        Some((*least, fewer, all))
    };
    if let Some((least, fewer, all)) = below(&sampled.widths, link.current_width)
        && fewer > 0
    {
        let text = format!(
            "the PCIe link had only {least} lanes in {fewer} of {all} samples under load, {} before",
            link.current_width
        );
        return Ok(objection(gpu, false, text)
            .expected(format!("x{} under load", link.current_width))
            .observed(format!("x{least}"))
            .remedy(REMEDY));
    }
    #[expect(clippy::cast_precision_loss, reason = "a share of a few samples")]
    let is_more_than_the_rise =
        |fewer: u64, all: u64| fewer as f64 > SLOW_SAMPLES_MAXIMUM * all as f64;
    if let Some((least, fewer, all)) = below(&sampled.generations, link.max_generation)
        && is_more_than_the_rise(fewer, all)
    {
        let text = format!(
            "the PCIe link ran at generation {least} in {fewer} of {all} samples under load, GPU and slot can do {}",
            link.max_generation
        );
        return Ok(objection(gpu, false, text)
            .expected(format!("generation {} under load", link.max_generation))
            .observed(format!("generation {least}"))
            .remedy(REMEDY));
    }
    Ok(Outcome::pass("it keeps speed and lanes under load"))
}

/// The greatest value among the other GPUs of this name, if it is greater than `own`.
fn best_of_siblings(gpu: &GpuFacts, greatest: &Greatest<'_, &str, u32>, own: u32) -> Option<u32> {
    let name = gpu.name.value()?.as_str();
    greatest.of_all(&name).filter(|it| *it > own)
}

/// NVML says that no hypervisor is in between. Not knowing counts as a virtual machine: there the
/// verdict is softer.
fn is_on_bare_metal(gpu: &GpuFacts) -> bool {
    gpu.virtualization_mode
        .value()
        .is_some_and(|it| it == "none")
}

/// In P0, not idle at this moment, and busy within NVML's last sampling period, or at least held by
/// a process where utilization was not asked for. What was not read is no evidence of work.
fn is_at_work(gpu: &GpuFacts) -> bool {
    let is_busy = match gpu.utilization.value() {
        Some(utilization) => utilization.gpu_percent > 0,
        None => gpu.processes.value().is_some_and(|it| !it.is_empty()),
    };
    let is_idle_now = gpu
        .clocks_event_reasons
        .value()
        .is_none_or(|it| it.contains(ClocksEventReasons::GPU_IDLE));
    gpu.performance_state.value() == Some(&0) && is_busy && !is_idle_now
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{ClocksEventReasons, GpuFacts, PcieLink, Reading, Utilization};
    use crate::findings::Verdict;
    use crate::test_machine::{
        healthy_node, healthy_t4, judge_check, judge_gpu, judge_healthy, judge_only_gpu,
        make_model_unknown, python_process,
    };

    fn set_link(gpu: &mut GpuFacts, change: impl FnOnce(&mut PcieLink)) {
        let Reading::Value(link) = &mut gpu.pcie else {
            panic!("the healthy GPU has a link")
        };
        change(link);
    }

    fn put_to_work(gpu: &mut GpuFacts) {
        gpu.performance_state = Reading::Value(0);
        gpu.utilization = Reading::Value(Utilization {
            gpu_percent: 98,
            memory_percent: 40,
        });
        gpu.clocks_event_reasons =
            Reading::Value(ClocksEventReasons(ClocksEventReasons::SW_POWER_CAP));
    }

    #[test]
    fn passes_at_full_width_and_speed() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn an_idle_gpu_may_lower_the_generation() {
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", healthy_t4()).verdict,
            Verdict::Pass
        );
    }

    #[test]
    fn fails_below_the_width_of_its_siblings() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| set_link(gpu, |it| it.current_width = 8));
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(finding.observed.as_deref(), Some("x8"));
    }

    #[test]
    fn fails_below_the_width_of_the_profile() {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            set_link(gpu, |it| it.current_width = 8);
        }
        let findings = judge_check(&CHECK, &facts, "gpus: {pcie: {width: 16}}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Fail));
        assert!(
            findings[0]
                .summary
                .contains("has 8 lanes, the profile requires 16")
        );
    }

    #[test]
    fn fewer_lanes_than_possible_fail_on_bare_metal_and_warn_in_a_virtual_machine() {
        for (mode, verdict) in [("none", Verdict::Fail), ("pass_through", Verdict::Warn)] {
            let mut gpu = healthy_t4();
            gpu.virtualization_mode = Reading::Value(mode.to_owned());
            set_link(&mut gpu, |it| it.current_width = 8);
            assert_eq!(
                judge_only_gpu(&CHECK, "{}", gpu.clone()).verdict,
                verdict,
                "{mode}"
            );
            let stated = judge_only_gpu(&CHECK, "gpus: {pcie: {width: 8}}", gpu);
            assert_eq!(stated.verdict, Verdict::Pass, "{mode}");
        }
    }

    #[test]
    fn fewer_lanes_in_sysfs_than_in_nvml_are_found() {
        for (mode, verdict) in [("none", Verdict::Fail), ("pass_through", Verdict::Warn)] {
            let mut facts = healthy_node();
            let address = facts.gpus[2].pci_address.value().cloned();
            facts.gpus[2].virtualization_mode = Reading::Value(mode.to_owned());
            let Reading::Value(devices) = &mut facts.host.pci_devices else {
                panic!("the healthy node has a PCI bus")
            };
            let device = devices
                .iter_mut()
                .find(|it| Some(&it.address) == address.as_ref());
            device.expect("the GPU is on the bus").current_link_width = Some(8);
            let findings = judge_check(&CHECK, &facts, "{}");
            assert_eq!(findings[2].verdict, verdict, "{mode}");
            assert!(findings[2].summary.contains("sysfs shows 8 lanes"));
        }
    }

    #[test]
    fn workstations_fail_only_against_a_profile() {
        let workstation = |profile, change: fn(&mut PcieLink)| {
            judge_gpu(&CHECK, profile, |gpu| {
                gpu.name = Reading::Value("NVIDIA GeForce RTX 3090".to_owned());
                gpu.pci_device_id = Reading::Value(0x2204);
                gpu.virtualization_mode = Reading::Value("none".to_owned());
                set_link(gpu, change);
            })
            .verdict
        };
        let narrow = |it: &mut PcieLink| it.current_width = 8;
        assert_eq!(workstation("{}", narrow), Verdict::Warn);
        let wide = "gpus: {pcie: {width: 16}}";
        assert_eq!(workstation(wide, narrow), Verdict::Fail);
        let slow = |it: &mut PcieLink| it.max_generation = 3;
        assert_eq!(
            workstation("gpus: {pcie: {generation: 4}}", slow),
            Verdict::Fail
        );
        assert_eq!(workstation("{}", |it| it.current_width = 0), Verdict::Fail);
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            gpu.name = Reading::Value("NVIDIA GeForce RTX 3090".to_owned());
            gpu.pci_device_id = Reading::Value(0x2204);
        }
        set_link(&mut facts.gpus[0], |it| it.current_width = 8);
        let narrow = "gpus: {pcie: {width: 8}}";
        let finding = judge_check(&CHECK, &facts, narrow).swap_remove(0);
        assert_eq!(finding.verdict, Verdict::Warn, "only the siblings object");
    }

    #[test]
    fn siblings_of_an_unknown_model_only_warn() {
        let mut facts = healthy_node();
        facts.gpus.iter_mut().for_each(make_model_unknown);
        set_link(&mut facts.gpus[0], |it| it.current_width = 8);
        let finding = judge_check(&CHECK, &facts, "{}").swap_remove(0);
        assert_eq!(finding.verdict, Verdict::Warn);
        set_link(&mut facts.gpus[1], |it| it.max_generation = 4);
        let finding = judge_check(&CHECK, &facts, "{}").swap_remove(1);
        assert_eq!(finding.verdict, Verdict::Warn);
    }

    #[test]
    fn a_width_of_zero_always_fails() {
        let mut gpu = healthy_t4();
        set_link(&mut gpu, |it| it.current_width = 0);
        assert_eq!(judge_only_gpu(&CHECK, "{}", gpu).verdict, Verdict::Fail);
    }

    #[test]
    fn fails_when_the_slot_is_of_an_older_generation_than_the_profile_asks_for() {
        assert_eq!(
            judge_gpu(&CHECK, "gpus: {pcie: {generation: 5}}", |_| {}).verdict,
            Verdict::Pass
        );
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            set_link(gpu, |it| {
                it.max_generation = 4;
                it.current_generation = 4;
            });
        }
        let findings = judge_check(&CHECK, &facts, "gpus: {pcie: {generation: 5}}");
        assert!(findings.iter().all(|it| it.verdict == Verdict::Fail));
        let findings = judge_check(&CHECK, &facts, "{}");
        assert!(
            findings.iter().all(|it| it.verdict == Verdict::Pass),
            "an older slot is no fault where nobody asks for more"
        );
    }

    #[test]
    fn fails_when_one_slot_reaches_less_than_the_others() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            set_link(gpu, |it| it.max_generation = 4);
        });
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn warns_of_a_low_generation_only_at_work() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            set_link(gpu, |it| it.current_generation = 1);
        });
        assert_eq!(finding.verdict, Verdict::Pass);
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            put_to_work(gpu);
            set_link(gpu, |it| it.current_generation = 1);
        });
        assert_eq!(finding.verdict, Verdict::Warn);
        let finding = judge_gpu(&CHECK, "{}", put_to_work);
        assert_eq!(finding.verdict, Verdict::Pass);
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            put_to_work(gpu);
            gpu.utilization = Reading::NotRead("not asked".to_owned());
            gpu.processes = Reading::Value(vec![python_process(512)]);
            set_link(gpu, |it| it.current_generation = 1);
        });
        assert_eq!(finding.verdict, Verdict::Warn);
    }

    #[test]
    fn errs_when_the_profile_asks_for_a_link_that_nobody_tells() {
        let silent = |profile| {
            judge_gpu(&CHECK, profile, |gpu| {
                make_model_unknown(gpu);
                gpu.pcie = Reading::NotSupported;
            })
            .verdict
        };
        assert_eq!(silent("{}"), Verdict::Skip);
        assert_eq!(silent("gpus: {pcie: {width: 16}}"), Verdict::Error);
        assert_eq!(silent("gpus: {pcie: {generation: 5}}"), Verdict::Error);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        for reading in [
            Reading::NotRead("unknown error".to_owned()),
            Reading::NotSupported,
        ] {
            let finding = judge_gpu(&CHECK, "{}", |gpu| gpu.pcie = reading);
            assert_eq!(finding.verdict, Verdict::Error);
        }
    }

    #[test]
    fn under_load_the_link_keeps_speed_and_lanes() {
        use crate::facts::PcieUnderLoad;
        use crate::test_machine::burned_node_with_sensors;
        let of = |generations: &[(u32, u64)], widths: &[(u32, u64)]| {
            let facts = burned_node_with_sensors(|log| {
                log.pcie = Some(PcieUnderLoad {
                    generations: generations.iter().copied().collect(),
                    widths: widths.iter().copied().collect(),
                });
            });
            judge_check(&CHECK, &facts, "{}").swap_remove(2)
        };
        assert_eq!(of(&[(5, 50)], &[(16, 50)]).verdict, Verdict::Pass);
        // The rise from idle.
        assert_eq!(of(&[(1, 5), (5, 45)], &[(16, 50)]).verdict, Verdict::Pass);
        let finding = of(&[(1, 50)], &[(16, 50)]);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.contains("generation 1 in 50 of 50"),
            "{}",
            finding.summary
        );
        assert_eq!(of(&[(1, 6), (5, 44)], &[(16, 50)]).verdict, Verdict::Fail);
        assert_eq!(of(&[(5, 50)], &[(8, 1), (16, 49)]).verdict, Verdict::Fail);
    }
}
