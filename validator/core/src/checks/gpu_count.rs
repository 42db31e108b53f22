//! Every GPU that the machine should have is there, in every layer.
//!
//! ## Why
//! A GPU can be lost between any two layers: it falls off the PCI bus, the kernel module does not
//! start it, NVML does not list it, CUDA does not offer it. Jobs then get seven of eight GPUs, or
//! fail in ways that name no GPU.
//!
//! ## How it is judged
//! The number of GPUs on the PCI bus must be the expected one: `gpus.count` of the profile, else
//! what the EC2 instance type has. Where neither states a number, what the machine shows decides:
//! the GPUs of NVIDIA's own systems by their DMI product name, GPUs that the kernel enumerated when
//! it booted, boards whose NVSwitches and GPUs do not fit (seven GPUs or three NVSwitches of an HGX
//! H100), GPUs of a tray whose fabric spans nodes (four of a GB200 NVL72), and, on bare metal, a
//! number of SXM GPUs that no board has. An NVSwitch that no driver holds fails. In a container a list in
//! `NVIDIA_VISIBLE_DEVICES` counts. Two GPUs with one UUID fail. Each GPU must be held by the
//! kernel module, listed by NVML and, where neither `CUDA_VISIBLE_DEVICES` nor MIG changes the
//! picture, offered by CUDA (from level standard on: at level quick CUDA is started on one GPU);
//! the text names the first layer that misses each GPU. When nothing is expected and there is no
//! GPU at all, or when the profile has no count and the instance type of an EC2 instance could not
//! be read, it could not be judged. In a container only the profile's count, NVML and CUDA are
//! compared: the bus it sees is the host's.
//!
//! In WSL2, whose PCI bus shows no GPU, NVML and CUDA are compared as in a container.
//!
//! ## What to do
//! Search the kernel log for the PCI address (`dmesg | grep -i nvrm`). Reset or rescan the GPU,
//! reboot; if the GPU stays away from the bus, stop and start the instance on other hardware, or
//! have the machine inspected.
//!
//! ## Source
//! DCGM's deployment check "Permissions and OS-related Blocks" counts device nodes; AWS, Amazon EC2
//! instance types, <https://aws.amazon.com/ec2/instance-types/#Accelerated_Computing>; NVIDIA
//! Fabric Manager User Guide, <https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/>

use std::collections::BTreeSet;

use crate::check::{Check, Judge};
use crate::expect::{self, Expected};
use crate::facts::{Facts, GpuFacts, KernelModules, PciDevice, Reading};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries::{self, counted};

pub(crate) const CHECK: Check = Check {
    id: "gpu_count",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/xid-errors/",
};

const REMEDY: &str = "search the kernel log for the PCI address: dmesg | grep -i nvrm; reset the GPU or reboot; if it stays \
                      away from the bus, stop and start the instance on other hardware";

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    if let Some(uuid) = uuid_of_two(facts) {
        return Ok(Outcome::fail(format!(
            "two GPUs have the UUID {uuid}, by which jobs and tools distinguish them"
        ))
        .expected("a UUID for each GPU")
        .observed(uuid)
        .remedy("reset the GPUs or reboot; if it stays, have the boards inspected"));
    }
    if queries::in_container(facts) || queries::in_wsl(facts) {
        judge_container(facts, profile)
    } else {
        judge_machine(facts, profile)
    }
}

fn uuid_of_two(facts: &Facts) -> Option<&String> {
    let mut seen = BTreeSet::new();
    let mut uuids = facts.gpus.iter().filter_map(|gpu| gpu.uuid.value());
    uuids.find(|uuid| !seen.insert(uuid.as_str()))
}

fn judge_machine(facts: &Facts, profile: &Profile) -> Judgement {
    let gpus = queries::pci_gpus(facts)?;
    let expected = expect::gpu_count(facts, profile);
    if let Some(expected) = &expected
        && gpus.len() != expected.value as usize
    {
        return Ok(wrong_number(gpus.len(), "on the PCI bus", expected).remedy(REMEDY));
    }
    if expected.is_none()
        && let Some(trouble) = expect::incomplete_board(facts)
    {
        return Ok(Outcome::fail(trouble)
            .expected("every GPU and NVSwitch of the machine")
            .observed(gpus.len())
            .remedy(REMEDY));
    }
    if gpus.is_empty() && facts.gpus.is_empty() {
        if expected.is_some() {
            return Ok(Outcome::pass("no GPU is expected, and none is there"));
        }
        return Ok(Outcome::error(
            "no NVIDIA GPU is on the PCI bus, and neither profile nor instance type gives the expected number",
        )
        .remedy("run this on a GPU node, or set the expected number in a profile: gpus: {count: 8}"));
    }
    let modules = queries::loaded_driver(facts, profile)?;
    let held_by_others: Vec<String> = gpus
        .iter()
        .filter_map(|gpu| missing_in_kernel_module(gpu, modules))
        .collect();
    if let Some(outcome) = judge_switches(facts) {
        return Ok(outcome);
    }
    let nvml_answers = facts.nvml.initialized == Reading::Value(true);
    if !nvml_answers && held_by_others.is_empty() {
        return Err(queries::reported_by(
            "nvml_library",
            &format!(
                "{} on the PCI bus could not be compared with NVML, which does not answer",
                counted(gpus.len(), "GPU")
            ),
            profile,
        ));
    }
    let mut missing = held_by_others;
    if nvml_answers {
        missing.extend(missing_in_nvml(&gpus, modules, facts)?);
    }
    if missing.is_empty() {
        missing.extend(strangers_to_the_bus(&gpus, facts));
    }
    if let Some(outcome) = judge_missing(&missing, gpus.len(), facts) {
        return Ok(outcome);
    }
    let layers = "PCI bus, kernel module, NVML";
    let outcome = judge_cuda(facts, gpus.len(), layers, expected.as_ref())?;
    if expected.is_some() || outcome.verdict != Verdict::Pass {
        return Ok(outcome);
    }
    nobody_expects(outcome, facts)
}

/// An NVSwitch without a driver connects nothing. One that is bound to another driver was given to
/// a virtual machine.
fn judge_switches(facts: &Facts) -> Option<Outcome> {
    let devices = facts.host.pci_devices.value()?;
    let without: Vec<&str> = devices
        .iter()
        .filter(|it| it.is_nvswitch() && it.driver.is_none())
        .map(|it| it.address.as_str())
        .collect();
    let first = without.first()?;
    Some(
        Outcome::fail(match without.len() {
            1 => format!("NVSwitch {first} is not held by its driver"),
            count => format!("{count} NVSwitches are not held by their driver, first {first}"),
        })
        .expected("every NVSwitch held by nvidia-nvswitch")
        .observed(without.join("\n"))
        .remedy("read the kernel log's lines with its PCI address: dmesg | grep -i nvswitch; reboot; if it stays, have the board inspected"),
    )
}

/// All layers agree, and neither the profile nor a known instance type says on how many GPUs they
/// should.
fn nobody_expects(outcome: Outcome, facts: &Facts) -> Judgement {
    match &facts.host.ec2 {
        Reading::NotSupported => Ok(outcome),
        Reading::Value(instance) => Ok(Outcome::pass(format!(
            "{}; how many EC2 instance type {} should have is not known",
            outcome.summary, instance.instance_type
        ))),
        Reading::NotRead(reason) => Err(Outcome::error(format!(
            "{}, but how many there should be is not known: the EC2 instance type could not be read: {reason}",
            outcome.summary
        ))
        .remedy("set the expected number in a profile: gpus: {count: 8}")),
    }
}

/// In a container the bus is the host's; what counts is what the container was given.
fn judge_container(facts: &Facts, profile: &Profile) -> Judgement {
    if facts.nvml.initialized != Reading::Value(true) {
        // The bus is the host's; that it has no GPU at all holds for the container too.
        if queries::pci_gpus(facts)?.is_empty() {
            return judge_machine(facts, profile);
        }
        queries::loaded_driver(facts, profile)?;
        return Err(queries::reported_by(
            "nvml_library",
            "the GPUs of this container could not be counted: NVML does not answer",
            profile,
        ));
    }
    let count = *facts.nvml.gpu_count.required("NVML's number of GPUs")? as usize;
    let place = if queries::in_wsl(facts) {
        "WSL2"
    } else {
        "this container"
    };
    let by_profile = profile.gpus.count.map(|value| Expected {
        value,
        source: "the profile".to_owned(),
    });
    let expected = by_profile.or_else(|| given_by_the_environment(facts));
    match &expected {
        Some(expected) if count != expected.value as usize => {
            return Ok(
                wrong_number(count, &format!("given to {place}"), expected).remedy(
                    "request all GPUs from the container runtime, or correct gpus.count of the profile",
                ),
            );
        }
        None if count == 0 => {
            return Ok(Outcome::error(format!(
                "no GPU was given to {place}, and gpus.count is not configured in the profile"
            ))
            .remedy("start the container with GPUs: docker run --gpus all"));
        }
        _ => {}
    }
    judge_cuda(facts, count, &format!("NVML in {place}"), expected.as_ref())
}

/// How many GPUs the container runtime should give: a list of indices or UUIDs. `all`, `none`,
/// `void` and MIG devices name no number of GPUs.
fn given_by_the_environment(facts: &Facts) -> Option<Expected<u32>> {
    const VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";
    let list = facts.host.environment.value()?.get(VARIABLE)?;
    let is_gpu = |it: &str| {
        it.starts_with("GPU-") || (!it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let names: BTreeSet<&str> = list.split(',').map(str::trim).collect();
    let value = u32::try_from(names.len()).ok()?;
    names.iter().all(|it| is_gpu(it)).then(|| Expected {
        value,
        source: VARIABLE.to_owned(),
    })
}

fn wrong_number(count: usize, place: &str, expected: &Expected<u32>) -> Outcome {
    Outcome::fail(format!(
        "{} {} {place}, {} expects {}",
        counted(count, "GPU"),
        if count == 1 { "is" } else { "are" },
        expected.source,
        expected.value
    ))
    .expected(format!("{} ({})", expected.value, expected.source))
    .observed(count)
}

fn missing_in_kernel_module(gpu: &PciDevice, modules: &KernelModules) -> Option<String> {
    let bound_to_nvidia = gpu.driver.as_deref() == Some("nvidia");
    if bound_to_nvidia || modules.nvidia_gpus.contains_key(&gpu.address) {
        return None;
    }
    Some(match &gpu.driver {
        Some(driver) => format!(
            "GPU {} is bound to kernel driver {driver}, not to nvidia",
            gpu.address
        ),
        None => format!("GPU {} is not held by the kernel module", gpu.address),
    })
}

/// GPUs that the kernel module holds and NVML does not list.
fn missing_in_nvml(
    gpus: &[&PciDevice],
    modules: &KernelModules,
    facts: &Facts,
) -> Result<Vec<String>, Outcome> {
    let addresses = facts.gpus.iter().filter_map(|it| it.pci_address.value());
    let listed: BTreeSet<&String> = addresses.collect();
    let missing: Vec<String> = gpus
        .iter()
        .filter(|gpu| missing_in_kernel_module(gpu, modules).is_none())
        .filter(|gpu| !listed.contains(&gpu.address))
        .map(|gpu| {
            format!(
                "GPU {} is held by the kernel module and {}",
                gpu.address,
                if facts.gpus.iter().any(|it| it.pci_address.value().is_none()) {
                    "lost to NVML"
                } else {
                    "not listed by NVML"
                }
            )
        })
        .collect();
    // Where the call for their number was not answered, an empty list is not NVML's.
    if !missing.is_empty() {
        facts.nvml.gpu_count.required("NVML's number of GPUs")?;
    }
    // A lost GPU tells nothing, not even its address: it is missing all the same.
    let unread = facts
        .gpus
        .iter()
        .filter(|gpu| gpu.pci_address.value().is_none() && gpu.lost.is_none())
        .count();
    // A GPU that NVML lists without its address may be the one that seems to be missing.
    if !missing.is_empty() && unread > 0 {
        return Err(Outcome::error(format!(
            "{} that NVML lists reported no PCI address, so that {} on the bus could not be matched",
            counted(unread, "GPU"),
            counted(missing.len(), "GPU")
        )));
    }
    Ok(missing)
}

/// GPUs that NVML lists and the bus does not show.
fn strangers_to_the_bus(gpus: &[&PciDevice], facts: &Facts) -> Vec<String> {
    let on_the_bus: BTreeSet<&String> = gpus.iter().map(|it| &it.address).collect();
    facts
        .gpus
        .iter()
        .filter(|gpu| {
            !gpu.pci_address
                .value()
                .is_some_and(|address| on_the_bus.contains(address))
        })
        .map(|gpu| {
            format!(
                "{} is listed by NVML and not on the PCI bus",
                queries::name_of(gpu)
            )
        })
        .collect()
}

fn judge_missing(missing: &[String], total: usize, facts: &Facts) -> Option<Outcome> {
    let first = missing.first()?;
    let summary = match missing.len() {
        1 => first.clone(),
        count => format!("{count} of {total} GPUs are missing in a layer: {first}; …"),
    };
    let mut observed = missing.join("\n");
    for line in what_the_kernel_says(facts) {
        observed.push_str("\nkernel log: ");
        observed.push_str(line);
    }
    Some(
        Outcome::fail(summary)
            .expected(format!("{} in every layer", counted(total, "GPU")))
            .observed(observed)
            .remedy(REMEDY),
    )
}

/// The kernel's own words on a GPU that did not start, at most three.
fn what_the_kernel_says(facts: &Facts) -> impl Iterator<Item = &str> {
    facts
        .host
        .kernel_log
        .value()
        .into_iter()
        .flat_map(|log| &log.records)
        .map(|record| record.text.as_str())
        .filter(|text| text.contains("RmInitAdapter failed") || text.contains("fallen off the bus"))
        .take(3)
}

/// The last layer. CUDA's own list is only comparable where nothing is meant to change it.
fn judge_cuda(
    facts: &Facts,
    count: usize,
    layers: &str,
    expected: Option<&Expected<u32>>,
) -> Judgement {
    let agreed = |layers: &str| {
        let source = expected.map_or(String::new(), |it| format!(", as {} expects", it.source));
        format!("{} in {layers}{source}", counted(count, "GPU"))
    };
    if let Some(reason) = cuda_is_not_comparable(facts) {
        return Ok(Outcome::pass(format!(
            "{} (not compared with CUDA: {reason})",
            agreed(layers)
        )));
    }
    let devices = facts.cuda.devices.required("CUDA's list of GPUs")?;
    let in_cuda: BTreeSet<&str> = devices.iter().map(|it| it.uuid.as_str()).collect();
    let mut missing = Vec::new();
    // Whether CUDA still offers a lost GPU depends on when it was lost; gpu_reachable reports it.
    let lost = |gpu: &&GpuFacts| gpu.lost.is_some();
    let offered_and_lost = facts
        .gpus
        .iter()
        .filter(lost)
        .filter_map(|gpu| gpu.uuid.value())
        .filter(|uuid| in_cuda.contains(uuid.as_str()))
        .count();
    for gpu in facts.gpus.iter().filter(|gpu| !lost(gpu)) {
        if !in_cuda.contains(gpu.uuid.required("UUID of a GPU")?.as_str()) {
            missing.push(format!(
                "{} is listed by NVML and not offered by CUDA",
                queries::name_of(gpu)
            ));
        }
    }
    if let Some(outcome) = judge_missing(&missing, count, facts) {
        return Ok(outcome);
    }
    let listed = facts.gpus.iter().filter(|gpu| !lost(gpu)).count();
    if devices.len() != listed + offered_and_lost {
        return Ok(Outcome::fail(format!(
            "CUDA offers {}, NVML lists {listed}",
            counted(devices.len(), "GPU"),
        ))
        .expected(listed)
        .observed(devices.len())
        .remedy(REMEDY));
    }
    Ok(Outcome::pass(agreed(&format!("{layers}, CUDA"))))
}

fn cuda_is_not_comparable(facts: &Facts) -> Option<&'static str> {
    if facts.cuda.first_gpu_only {
        return Some("level quick starts it on one GPU");
    }
    let mig_is_on = facts
        .gpus
        .iter()
        .any(|gpu| gpu.mig.value().is_some_and(|mig| mig.current));
    if facts.cuda.init.value().is_none_or(|init| init.code != 0) {
        Some("cuda_driver_library reports why")
    } else if queries::cuda_visible_devices_is_set(facts) {
        Some("CUDA_VISIBLE_DEVICES is set, see cuda_visible_devices")
    } else if mig_is_on {
        Some("MIG is on")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::Verdict;
    use crate::facts::{
        CudaFacts, CudaResult, Ec2Instance, Facts, KernelLogRecord, MigMode, NvmlFacts, PciDevice,
        Reading,
    };
    use crate::findings::Finding;
    use crate::test_machine::{healthy_node, judge_check, judge_host_check, unload_driver};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn bus(facts: &mut Facts) -> &mut Vec<PciDevice> {
        match &mut facts.host.pci_devices {
            Reading::Value(devices) => devices,
            _ => unreachable!("the healthy machine has a bus"),
        }
    }

    fn node_without_gpus() -> Facts {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::NotSupported;
        bus(&mut facts).clear();
        facts.gpus.clear();
        facts.nvml = NvmlFacts::default();
        facts.cuda = CudaFacts::default();
        unload_driver(&mut facts);
        facts
    }

    /// The kernel module no longer holds the GPU in this position of the bus.
    fn unbind(facts: &mut Facts, position: usize) {
        let device = &mut bus(facts)[position];
        device.driver = None;
        let address = device.address.clone();
        if let Reading::Value(modules) = &mut facts.host.kernel_modules {
            modules.nvidia_gpus.remove(&address);
        }
        facts
            .gpus
            .retain(|gpu| gpu.pci_address.value() != Some(&address));
        facts.nvml.gpu_count = Reading::Value(u32::try_from(facts.gpus.len()).expect("few GPUs"));
    }

    #[test]
    fn an_nvswitch_without_a_driver_fails_and_one_of_a_virtual_machine_passes() {
        for (driver, verdict) in [(None, Verdict::Fail), (Some("vfio-pci"), Verdict::Pass)] {
            let mut facts = healthy_node();
            bus(&mut facts)[9].driver = driver.map(str::to_owned);
            let finding = judge(&facts, "{}");
            assert_eq!(finding.verdict, verdict, "{}", finding.summary);
        }
    }

    #[test]
    fn at_level_quick_cuda_lists_only_its_first_gpu() {
        let mut facts = healthy_node();
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.truncate(1);
        }
        assert_eq!(
            judge_check(&super::CHECK, &facts, "{}")[0].verdict,
            Verdict::Fail
        );
        facts.cuda.first_gpu_only = true;
        let finding = &judge_check(&super::CHECK, &facts, "{}")[0];
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(
            finding.summary.contains("level quick starts it on one GPU"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn passes_when_every_layer_has_all() {
        let finding = judge(&healthy_node(), "gpus: {count: 8}");
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "8 GPUs in PCI bus, kernel module, NVML, CUDA, as the profile expects"
        );
        assert_eq!(judge(&healthy_node(), "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn fails_when_the_bus_has_fewer_or_more_than_expected() {
        for expected in [7, 9] {
            let finding = judge(&healthy_node(), &format!("gpus: {{count: {expected}}}"));
            assert_eq!(finding.verdict, Verdict::Fail);
            assert_eq!(
                finding.summary,
                format!("8 GPUs are on the PCI bus, the profile expects {expected}")
            );
        }
    }

    #[test]
    fn an_instance_type_that_was_not_read_is_no_agreement() {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::NotRead("time-out".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        assert_eq!(judge(&facts, "gpus: {count: 8}").verdict, Verdict::Pass);
        facts.gpus.remove(2);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn says_that_nobody_knows_the_instance_type() {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::Value(Ec2Instance {
            instance_type: "p9.48xlarge".to_owned(),
            ..Ec2Instance::default()
        });
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(
            finding
                .summary
                .ends_with("how many EC2 instance type p9.48xlarge should have is not known"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn a_machine_without_gpus_fails_only_where_some_are_expected() {
        let facts = node_without_gpus();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        assert_eq!(judge(&facts, "gpus: {count: 8}").verdict, Verdict::Fail);
    }

    #[test]
    fn so_does_a_container_on_one() {
        let mut facts = node_without_gpus();
        facts.host.in_container = Reading::Value(true);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        assert_eq!(judge(&facts, "gpus: {count: 8}").verdict, Verdict::Fail);
    }

    #[test]
    fn names_the_layer_that_misses_a_gpu() {
        let mut facts = healthy_node();
        unbind(&mut facts, 2);
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding
                .summary
                .ends_with("is not held by the kernel module"),
            "{}",
            finding.summary
        );

        let mut facts = healthy_node();
        facts.gpus.remove(2);
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.ends_with("not listed by NVML"),
            "{}",
            finding.summary
        );

        let mut facts = healthy_node();
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.remove(2);
        }
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(
            finding.summary.ends_with("not offered by CUDA"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn a_lost_gpu_is_missing_although_nvml_counts_it() {
        let mut facts = healthy_node();
        facts.gpus[4].lost = Some("nvmlDeviceGetPciInfo".to_owned());
        facts.gpus[4].pci_address = Reading::NotRead("GPU is lost".to_owned());
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.ends_with("lost to NVML"), "{finding:#?}");
    }

    #[test]
    fn a_gpu_given_to_a_virtual_machine_is_missing_here() {
        let mut facts = healthy_node();
        unbind(&mut facts, 0);
        bus(&mut facts)[0].driver = Some("vfio-pci".to_owned());
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.contains("vfio-pci"), "{}", finding.summary);
    }

    #[test]
    fn tells_what_the_kernel_says_of_it() {
        let mut facts = healthy_node();
        unbind(&mut facts, 2);
        if let Reading::Value(log) = &mut facts.host.kernel_log {
            log.records.push(KernelLogRecord {
                repeats: 0,
                age_s: Some(60.0),
                at_s: None,
                text: "NVRM: GPU 0000:12:00.0: RmInitAdapter failed! (0x62:0xffff:2477)".to_owned(),
            });
        }
        let observed = judge(&facts, "{}").observed.unwrap_or_default();
        assert!(observed.contains("RmInitAdapter failed"), "{observed}");
    }

    #[test]
    fn a_gpu_that_the_bus_does_not_show_is_a_fault_too() {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::NotSupported;
        bus(&mut facts).remove(0);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }

    #[test]
    fn cuda_is_not_compared_where_something_is_meant_to_change_its_list() {
        let hide_all_but_one = |facts: &mut Facts| {
            if let Reading::Value(devices) = &mut facts.cuda.devices {
                devices.truncate(1);
            }
        };
        let mut facts = healthy_node();
        hide_all_but_one(&mut facts);
        facts.host.environment =
            Reading::Value([("CUDA_VISIBLE_DEVICES".to_owned(), "0".to_owned())].into());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);

        let mut facts = healthy_node();
        hide_all_but_one(&mut facts);
        facts.gpus[0].mig = Reading::Value(MigMode {
            current: true,
            pending: true,
        });
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);

        let mut facts = healthy_node();
        facts.cuda.devices = Reading::NotRead("not probed".to_owned());
        facts.cuda.init = Reading::Value(CudaResult {
            code: 802,
            name: "CUDA_ERROR_SYSTEM_NOT_READY".to_owned(),
        });
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Pass);
        assert!(
            finding.summary.contains("cuda_driver_library"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn a_container_is_judged_by_what_it_was_given() {
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(true);
        facts.gpus.truncate(1);
        facts.nvml.gpu_count = Reading::Value(1);
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.truncate(1);
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        assert_eq!(judge(&facts, "gpus: {count: 1}").verdict, Verdict::Pass);
        assert_eq!(judge(&facts, "gpus: {count: 2}").verdict, Verdict::Fail);
        facts.gpus.clear();
        facts.nvml.gpu_count = Reading::Value(0);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }

    #[test]
    fn errs_when_a_layer_was_not_read() {
        let breakages: [fn(&mut Facts); 4] = [
            |facts| facts.host.pci_devices = Reading::NotRead("no /sys".to_owned()),
            |facts| facts.gpus[0].pci_address = Reading::NotRead("unknown error".to_owned()),
            |facts| facts.gpus[0].uuid = Reading::NotRead("unknown error".to_owned()),
            |facts| facts.cuda.devices = Reading::NotRead("time-out".to_owned()),
        ];
        for break_one in breakages {
            let mut facts = healthy_node();
            break_one(&mut facts);
            assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        }
    }

    #[test]
    fn errs_when_the_instance_type_was_not_read_and_the_profile_says_no_count() {
        let mut facts = healthy_node();
        facts.host.ec2 =
            Reading::NotRead("the instance metadata service does not answer".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        assert_eq!(judge(&facts, "gpus: {count: 8}").verdict, Verdict::Pass);
        facts.host.ec2 = Reading::NotSupported;
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_nvml_did_not_tell_how_many_there_are() {
        let mut facts = healthy_node();
        facts.gpus.clear();
        facts.nvml.gpu_count = Reading::NotRead("the run was interrupted".to_owned());
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Error);
        assert!(
            finding.summary.contains("the run was interrupted"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn leaves_a_missing_driver_and_a_silent_nvml_to_their_own_checks() {
        let mut facts = healthy_node();
        facts.gpus.clear();
        facts.nvml = NvmlFacts::default();
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(finding.summary.contains("nvml_library"));
        unload_driver(&mut facts);
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(finding.summary.contains("kernel_module_loaded"));
    }

    /// The healthy machine without an instance type, and with these GPUs and NVSwitches on its bus.
    fn board(gpus: usize, switches: usize) -> Facts {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::NotSupported;
        facts.host.product_name = Reading::NotSupported;
        facts.gpus.truncate(gpus);
        let kept: BTreeSet<String> = facts
            .gpus
            .iter()
            .filter_map(|gpu| gpu.pci_address.value().cloned())
            .collect();
        if let Reading::Value(devices) = &mut facts.host.pci_devices {
            let first_left_out = format!("0000:{:02x}:00.0", 0x80 + switches);
            devices.retain(|it| {
                if it.is_nvswitch() {
                    it.address < first_left_out
                } else {
                    kept.contains(&it.address)
                }
            });
        }
        if let Reading::Value(devices) = &mut facts.cuda.devices {
            devices.truncate(gpus);
        }
        facts.nvml.gpu_count = Reading::Value(u32::try_from(gpus).expect("a few"));
        facts
    }

    #[test]
    fn a_board_that_is_not_whole_fails_without_a_profile() {
        for (gpus, switches, verdict) in [
            (8, 4, Verdict::Pass),
            (7, 4, Verdict::Fail),
            (8, 3, Verdict::Fail),
            (1, 4, Verdict::Fail),
            // A virtual machine whose NVSwitches the host keeps.
            (8, 0, Verdict::Pass),
            (4, 0, Verdict::Pass),
            (3, 0, Verdict::Pass),
        ] {
            let finding = judge(&board(gpus, switches), "{}");
            assert_eq!(
                finding.verdict, verdict,
                "{gpus} and {switches}: {}",
                finding.summary
            );
        }
        let mut facts = board(7, 0);
        for gpu in &mut facts.gpus {
            gpu.virtualization_mode = Reading::Value("none".to_owned());
        }
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
        // Who states the number knows better.
        assert_eq!(
            judge(&board(7, 4), "gpus: {count: 7}").verdict,
            Verdict::Pass
        );
    }

    #[test]
    fn the_makers_name_and_the_boot_say_how_many_there_were() {
        let mut facts = board(7, 0);
        facts.host.product_name = Reading::Value("DGXH100".to_owned());
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        facts.host.product_name = Reading::Value("PowerEdge XE9680".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
        let found = |address: &str, at_s: f64| KernelLogRecord {
            age_s: Some(86_400.0 - at_s),
            at_s: Some(at_s),
            repeats: 0,
            text: format!("pci {address}: [10de:2335] type 00 class 0x030200 PCIe Endpoint"),
        };
        let with = |record: KernelLogRecord| {
            let mut facts = board(7, 0);
            if let Reading::Value(log) = &mut facts.host.kernel_log {
                log.records.insert(0, record);
            }
            judge(&facts, "{}").verdict
        };
        assert_eq!(with(found("0000:17:00.0", 1.0)), Verdict::Fail);
        assert_eq!(with(found("0000:16:00.0", 1.0)), Verdict::Pass);
        // A virtual function that came after the driver, and is gone.
        assert_eq!(with(found("0000:17:00.0", 20.0)), Verdict::Pass);
        assert_eq!(with(found("0000:17:00.4", 1.0)), Verdict::Pass);
    }

    #[test]
    fn a_container_has_as_many_gpus_as_it_was_given() {
        let mut facts = board(2, 0);
        facts.host.in_container = Reading::Value(true);
        for (list, verdict) in [
            ("0,1", Verdict::Pass),
            ("0,1,2", Verdict::Fail),
            ("all", Verdict::Pass),
            ("MIG-1,MIG-2,MIG-3", Verdict::Pass),
        ] {
            let variables = [("NVIDIA_VISIBLE_DEVICES".to_owned(), list.to_owned())];
            facts.host.environment = Reading::Value(variables.into());
            let finding = judge(&facts, "{}");
            assert_eq!(finding.verdict, verdict, "{list}: {}", finding.summary);
        }
    }

    #[test]
    fn two_gpus_with_one_uuid_fail() {
        let mut facts = healthy_node();
        facts.gpus[3].uuid = facts.gpus[2].uuid.clone();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
    }
}
