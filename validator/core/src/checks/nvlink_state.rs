//! All NVLinks that should be connected are active.
//!
//! ## Why
//! With one link down, work between GPUs is slower on that GPU, and so everywhere: collectives run
//! at the pace of the slowest. Or it fails at once.
//!
//! ## How it is judged
//! The number of active links must reach the profile's (`gpus.nvlinks`), else that of the EC2
//! instance type, else all links of the model where a whole board of eight GPUs is in the machine.
//! Fewer is a `fail` that names each inactive link.
//!
//! Where no number is known, a GPU with fewer active links than another of its name in this machine
//! is a `fail`, and inactive links are otherwise a `warn`, because bridges and virtual machines
//! rightly connect fewer (Azure's `NCv5`: 12 of 18). A GPU that is alone in its machine and has no
//! active link is skipped, and so are cards that only a bridge can link, when no link of the
//! machine is active, and an A100 in MIG mode, whose links go inactive by design, unless the
//! profile states `gpus.nvlinks`. An active link that is slower than the GPU's other links is a
//! `warn`, and so are links that are all slower than those of its architecture (25 GB/s on Volta,
//! A100 and Hopper, 50 GB/s on data center Blackwell); a GPU all of whose links are slower than
//! those of another GPU of its name is a `fail`. GPUs without NVLink are skipped.
//!
//! ## What to do
//! Check `fabric_manager`, `fabric_state` and the kernel log (Xid 74, 136, 144 to 150, `SXid`),
//! then reset the GPUs of the board together, or reboot. A link that stays down is a hardware
//! fault.
//!
//! ## Source
//! `nvmlDeviceGetNvLinkState`, <https://docs.nvidia.com/deploy/nvml-api/group__NvLink.html>.

use crate::check::{Check, Judge, JudgeGpu};
use crate::expect;
use crate::expect::model_has;
use crate::facts::{Facts, GpuFacts, NvLink, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::siblings::{Greatest, NameCounts};
use crate::tally::worst_of;

pub(crate) const CHECK: Check = Check {
    id: "nvlink_state",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/group__NvLink.html",
};

const REMEDY: &str = "check fabric_manager, fabric_state and the kernel log (Xid 74, SXid), then reset all GPUs of the board together or reboot";

/// What is known of all GPUs together.
struct Node<'f> {
    facts: &'f Facts,
    counts: NameCounts<'f>,
    /// The most active links of a GPU of this name.
    active: Greatest<'f, &'f Reading<String>, usize>,
    /// The fastest active link of a GPU of this name, in MB/s.
    speed_mbps: Greatest<'f, &'f Reading<String>, u64>,
}

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let node = Node {
        facts,
        counts: NameCounts::of(facts),
        active: Greatest::of(facts, |it| Some((&it.name, active(it.nvlinks.value()?)))),
        speed_mbps: Greatest::of(facts, |it| Some((&it.name, fastest(it.nvlinks.value()?)?))),
    };
    Box::new(move |gpu| judge(gpu, &node, profile))
}

fn judge(gpu: &GpuFacts, node: &Node<'_>, profile: &Profile) -> Judgement {
    if mig_turns_links_off(gpu) && profile.gpus.nvlinks.is_none() {
        return Ok(Outcome::skip(
            "the GPU is in MIG mode, in which NVLinks of this architecture go inactive",
        ));
    }
    let expected = expect::nvlinks(gpu, &node.counts, node.facts, profile);
    let must_have_links = expected.as_ref().is_some_and(|it| it.value > 0)
        || (expected.is_none() && most_among_siblings(gpu, node) > 0);
    let links = gpu.nvlinks.required_if(must_have_links, "NVLinks")?;
    let count = match expected {
        Some(expected) => judge_against(links, expected.value as usize, &expected.source),
        None => judge_by_itself(links, gpu, node),
    };
    worst_of([
        Ok(count),
        Ok(judge_speed(links)),
        Ok(judge_speed_of_the_model(links, gpu)),
        judge_speed_among_siblings(links, gpu, node),
    ])
}

fn judge_against(links: &[NvLink], wanted: usize, source: &str) -> Outcome {
    let active = active(links);
    if active >= wanted {
        return Outcome::pass(format!("{active} NVLinks are active"));
    }
    Outcome::fail(format!(
        "{active} NVLinks are active, {source} requires {wanted}{}",
        inactive_in_words(links)
    ))
    .expected(format!("{wanted} active NVLinks"))
    .observed(format!("{active} active NVLinks"))
    .remedy(REMEDY)
}

fn judge_by_itself(links: &[NvLink], gpu: &GpuFacts, node: &Node<'_>) -> Outcome {
    let active = active(links);
    // First of all: links that the driver does not even list are missing too.
    let most = most_among_siblings(gpu, node);
    if active < most {
        return judge_against(links, most, "another GPU of this model here");
    }
    if links.is_empty() {
        return Outcome::skip("this GPU has no NVLink");
    }
    if active == links.len() {
        return Outcome::pass(format!("all {active} NVLinks are active"));
    }
    if active == 0 && node.counts.of_this_model(gpu) == 1 {
        return Outcome::skip("this GPU is alone in its machine, so its NVLinks lead nowhere");
    }
    if active == 0
        && none_is_linked(gpu, node)
        && model_has(gpu, |model| !model.whole_board_nvlinks)
    {
        return Outcome::skip(
            "no bridge links the GPUs of this machine; state gpus.nvlinks in the profile if one should",
        );
    }
    Outcome::warn(format!(
        "{active} of {} NVLinks are active, and no expected number for this model is known{}",
        links.len(),
        inactive_in_words(links)
    ))
    .expected(format!("{} active NVLinks", links.len()))
    .observed(format!("{active} active NVLinks"))
    .remedy("if this machine connects fewer by design, state gpus.nvlinks in the profile")
}

/// Ampere's major compute capability. From Hopper on links stay active in MIG mode.
const AMPERE: u32 = 8;

/// Source: Fabric Manager for NVIDIA NVSwitch Systems, "MIG Mode" (links of an A100 in MIG mode are
/// down).
fn mig_turns_links_off(gpu: &GpuFacts) -> bool {
    let is_ampere = gpu
        .compute_capability
        .value()
        .is_some_and(|it| it.major == AMPERE);
    is_ampere && gpu.mig.value().is_some_and(|mig| mig.current)
}

fn judge_speed(links: &[NvLink]) -> Outcome {
    let speeds = || {
        links
            .iter()
            .filter(|it| it.active)
            .filter_map(|it| Some((it.link, it.speed_mbps?)))
    };
    if active(links) == 0 {
        return Outcome::skip("no NVLink is active, so none has a speed");
    }
    let Some(fastest) = speeds().map(|(_, speed)| speed).max() else {
        return Outcome::pass("speed not reported");
    };
    let slow: Vec<String> = speeds()
        .filter(|(_, speed)| *speed < fastest)
        .map(|(link, speed)| format!("{link} ({speed} MB/s)"))
        .collect();
    if slow.is_empty() {
        return Outcome::pass("at one speed");
    }
    let slow = slow.join(", ");
    Outcome::warn(format!(
        "NVLinks slower than this GPU's fastest ({fastest} MB/s): {slow}"
    ))
    .expected(format!("{fastest} MB/s on every link"))
    .observed(slow)
    .remedy(REMEDY)
}

/// Of a link, the least rate in MB/s that data center GPUs of this compute capability have; NVML
/// reports 25781 on V100 and A100, 26562 on Hopper and 53125 on Blackwell. Boards of other
/// capabilities (A40, RTX A6000) have links of other rates.
// Source: nvidia-smi nvlink -s of these GPUs (tests/facts, tests/simulator/captures), which states
// 25 GB/s a link of NVLink 2 to 4 and 50 GB/s of NVLink 5, as NVIDIA's data sheets do.
fn rate_of_the_architecture(gpu: &GpuFacts) -> Option<u64> {
    let capability = gpu.compute_capability.value()?;
    match (capability.major, capability.minor) {
        (7..=9, 0) => Some(25_000),
        (10, _) => Some(50_000),
        _ => None,
    }
}

/// All links at a lower rate are as slow as one, and no neighbour shows it.
fn judge_speed_of_the_model(links: &[NvLink], gpu: &GpuFacts) -> Outcome {
    let Some(wanted) = rate_of_the_architecture(gpu) else {
        return Outcome::skip("no rate is known for links of this architecture");
    };
    let active = links.iter().filter(|it| it.active);
    let Some(fastest) = active.filter_map(|it| it.speed_mbps).max() else {
        return Outcome::skip("no active link reported its speed");
    };
    if fastest >= wanted {
        return Outcome::pass("as fast as the architecture has them");
    }
    Outcome::warn(format!(
        "the NVLinks run at {fastest} MB/s at most, those of this architecture at {wanted} MB/s"
    ))
    .expected(format!("at least {wanted} MB/s"))
    .observed(format!("{fastest} MB/s"))
    .remedy(REMEDY)
}

/// GPUs of one model in one machine have NVLinks of one speed. The links of five recorded boards of
/// H100 and H200 are alike to the megabyte.
fn judge_speed_among_siblings(links: &[NvLink], gpu: &GpuFacts, node: &Node<'_>) -> Judgement {
    let own = fastest(links).ok_or_else(|| Outcome::skip("no NVLink is active"))?;
    let is_named = gpu.name.value().is_some();
    let best = node.speed_mbps.of_all(&&gpu.name).filter(|_| is_named);
    let best = best.unwrap_or(own);
    if own < best {
        return Ok(Outcome::fail(format!(
            "NVLinks run at {own} MB/s, those of another GPU of this model here at {best} MB/s"
        ))
        .expected(format!("{best} MB/s"))
        .observed(format!("{own} MB/s"))
        .remedy(REMEDY));
    }
    Ok(Outcome::pass("as fast as those of the other GPUs"))
}

fn active(links: &[NvLink]) -> usize {
    links.iter().filter(|it| it.active).count()
}

/// Of the fastest active link, in MB/s.
fn fastest(links: &[NvLink]) -> Option<u64> {
    let active = links.iter().filter(|it| it.active);
    active.filter_map(|it| it.speed_mbps).max()
}

fn none_is_linked(gpu: &GpuFacts, node: &Node<'_>) -> bool {
    node.active.of_all(&&gpu.name).is_none_or(|it| it == 0)
}

fn most_among_siblings(gpu: &GpuFacts, node: &Node<'_>) -> usize {
    if gpu.name.value().is_none() {
        return 0;
    }
    node.active.of_all(&&gpu.name).unwrap_or_default()
}

fn inactive_in_words(links: &[NvLink]) -> String {
    let numbers: Vec<String> = links
        .iter()
        .filter(|it| !it.active)
        .map(|it| it.link.to_string())
        .collect();
    match numbers.len() {
        0 => String::new(),
        1 => format!("; link {} is inactive", numbers[0]),
        _ => format!("; links {} are inactive", numbers.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{ComputeCapability, Facts, GpuFacts, MigMode, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{
        healthy_node, healthy_t4, judge_check, judge_gpu, judge_healthy, judge_only_gpu,
        make_model_unknown,
    };

    fn deactivate(gpu: &mut GpuFacts, down: impl IntoIterator<Item = usize>) {
        let Reading::Value(links) = &mut gpu.nvlinks else {
            panic!("the healthy GPU has NVLinks")
        };
        for link in down {
            links[link].active = false;
            links[link].speed_mbps = None;
        }
    }

    /// GPUs of a model that nobody knows, off EC2: nothing but the machine's own consistency is
    /// left.
    fn without_expectation(count: usize) -> Facts {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::NotSupported;
        facts.gpus.truncate(count);
        facts.gpus.iter_mut().for_each(make_model_unknown);
        facts
    }

    fn first(facts: &Facts, profile: &str) -> Finding {
        judge_check(&CHECK, facts, profile).swap_remove(0)
    }

    #[test]
    fn passes_when_all_are_active() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn fails_and_names_each_inactive_link() {
        let profile = "gpus: {nvlinks: 18}";
        let one = judge_gpu(&CHECK, profile, |gpu| deactivate(gpu, [7]));
        assert_eq!(one.verdict, Verdict::Fail);
        assert_eq!(
            one.summary,
            "17 NVLinks are active, the profile requires 18; link 7 is inactive"
        );
        let two = judge_gpu(&CHECK, profile, |gpu| deactivate(gpu, [3, 17]));
        assert!(two.summary.ends_with("links 3, 17 are inactive"));
    }

    #[test]
    fn fails_on_a_whole_board_without_a_profile() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| deactivate(gpu, [0]));
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn fails_when_fewer_links_are_listed_than_should_be_active() {
        let finding = judge_gpu(&CHECK, "gpus: {nvlinks: 18}", |gpu| {
            gpu.nvlinks = Reading::Value(Vec::new());
        });
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn a_profile_may_ask_for_fewer() {
        let finding = judge_gpu(&CHECK, "gpus: {nvlinks: 12}", |gpu| deactivate(gpu, 12..18));
        assert_eq!(finding.verdict, Verdict::Pass);
    }

    #[test]
    fn without_expectation_the_siblings_decide() {
        let mut facts = without_expectation(2);
        deactivate(&mut facts.gpus[0], [4]);
        let finding = first(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.contains("another GPU of this model here"));
        deactivate(&mut facts.gpus[1], [4]);
        assert_eq!(first(&facts, "{}").verdict, Verdict::Warn);
    }

    #[test]
    fn links_that_are_not_even_listed_are_missed_by_the_siblings() {
        let mut facts = without_expectation(2);
        let Reading::Value(links) = &mut facts.gpus[0].nvlinks else {
            panic!("the healthy GPU has NVLinks")
        };
        links.truncate(12);
        let finding = first(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        facts.gpus[0].nvlinks = Reading::Value(Vec::new());
        assert_eq!(first(&facts, "{}").verdict, Verdict::Fail);
        facts.gpus[0].nvlinks = Reading::NotSupported;
        assert_eq!(first(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn an_a100_in_mig_mode_turns_its_links_off() {
        let with_mig = |major, profile| {
            judge_gpu(&CHECK, profile, |gpu| {
                gpu.compute_capability = Reading::Value(ComputeCapability { major, minor: 0 });
                gpu.mig = Reading::Value(MigMode {
                    current: true,
                    pending: true,
                });
                deactivate(gpu, 0..18);
            })
            .verdict
        };
        assert_eq!(with_mig(8, "{}"), Verdict::Skip);
        assert_eq!(with_mig(8, "gpus: {nvlinks: 12}"), Verdict::Fail);
        assert_eq!(with_mig(9, "{}"), Verdict::Fail);
    }

    #[test]
    fn without_expectation_no_active_link_warns_beside_other_gpus_and_skips_alone() {
        let mut facts = without_expectation(2);
        for gpu in &mut facts.gpus {
            deactivate(gpu, 0..18);
        }
        assert_eq!(first(&facts, "{}").verdict, Verdict::Warn);
        facts.gpus.truncate(1);
        assert_eq!(first(&facts, "{}").verdict, Verdict::Skip);
    }

    #[test]
    fn cards_without_a_bridge_are_skipped_and_half_bridged_ones_are_not() {
        let mut facts = without_expectation(2);
        for gpu in &mut facts.gpus {
            gpu.name = Reading::Value("NVIDIA H200 NVL".to_owned());
            gpu.pci_device_id = Reading::Value(0x233b);
            deactivate(gpu, 0..18);
        }
        assert_eq!(first(&facts, "{}").verdict, Verdict::Skip);
        assert_eq!(first(&facts, "gpus: {nvlinks: 18}").verdict, Verdict::Fail);
        let Reading::Value(links) = &mut facts.gpus[1].nvlinks else {
            panic!("the healthy GPU has NVLinks")
        };
        links[0].active = true;
        assert_eq!(first(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn says_when_no_link_tells_its_speed() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            let Reading::Value(links) = &mut gpu.nvlinks else {
                panic!("the healthy GPU has NVLinks")
            };
            for link in links {
                link.speed_mbps = None;
            }
        });
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(finding.summary, "18 NVLinks are active; speed not reported");
    }

    #[test]
    fn warns_of_a_slow_link() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            let Reading::Value(links) = &mut gpu.nvlinks else {
                panic!("the healthy GPU has NVLinks")
            };
            links[5].speed_mbps = Some(13_281);
        });
        assert_eq!(finding.verdict, Verdict::Warn);
        assert_eq!(finding.observed.as_deref(), Some("5 (13281 MB/s)"));
    }

    #[test]
    fn errs_when_links_were_not_read_or_are_denied_where_they_must_be() {
        let not_read = judge_gpu(&CHECK, "{}", |gpu| {
            gpu.nvlinks = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(not_read.verdict, Verdict::Error);
        let denied = judge_gpu(&CHECK, "gpus: {nvlinks: 18}", |gpu| {
            gpu.nvlinks = Reading::NotSupported;
        });
        assert_eq!(denied.verdict, Verdict::Error);
    }

    #[test]
    fn skips_where_the_gpu_has_none() {
        assert_eq!(
            judge_only_gpu(&CHECK, "{}", healthy_t4()).verdict,
            Verdict::Skip
        );
    }

    #[test]
    fn links_slower_than_those_of_the_other_gpus_fail() {
        let finding = judge_gpu(&CHECK, "{}", |gpu| {
            if let Reading::Value(links) = &mut gpu.nvlinks {
                for link in links {
                    link.speed_mbps = Some(13_281);
                }
            }
        });
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
    }
}
