//! The tables are consistent, and say what their sources say.

use std::collections::BTreeSet;

use super::cuda_errors::cuda_errors;
use super::*;
use crate::profile::CudaVersion;

fn capability(text: &str) -> ComputeCapability {
    let (major, minor) = text.split_once('.').expect(text);
    ComputeCapability {
        major: major.parse().expect(text),
        minor: minor.parse().expect(text),
    }
}

fn cuda(text: &str) -> CudaVersion {
    text.parse().expect(text)
}

fn driver(text: &str) -> DriverVersion {
    text.parse().expect(text)
}

fn model(name: &str) -> &'static GpuModel {
    gpu_models()
        .iter()
        .find(|it| it.name == name)
        .unwrap_or_else(|| panic!("no GPU model {name}"))
}

fn assert_unique<T: Ord + std::fmt::Debug + Copy>(what: &str, values: impl Iterator<Item = T>) {
    let mut seen = BTreeSet::new();
    for value in values {
        assert!(seen.insert(value), "{what} {value:?} is there twice");
    }
    assert!(!seen.is_empty(), "no {what} at all");
}

/// As `Outcome` texts ask for: a fragment that can stand in a sentence.
fn assert_fragment(text: &str) {
    assert!(!text.trim().is_empty());
    assert!(!text.ends_with('.'), "full stop: {text}");
    // An acronym may come first, a sentence may not.
    let mut chars = text.chars();
    let starts_a_sentence = chars.next().is_some_and(char::is_uppercase)
        && chars.next().is_some_and(char::is_lowercase);
    assert!(!starts_a_sentence, "{text}");
}

#[test]
fn gpu_models_are_told_apart() {
    assert_unique("model name", gpu_models().iter().map(|it| it.name.as_str()));
    assert_unique(
        "product name",
        gpu_models()
            .iter()
            .flat_map(|it| it.product_names.iter().map(String::as_str)),
    );
    for it in gpu_models() {
        assert!(
            !it.product_names.is_empty() && !it.pci_device_ids.is_empty(),
            "{}",
            it.name
        );
        assert!(!it.source.is_empty(), "{}", it.name);
        // The name of one model must never be a product name of another, as profiles may give
        // either.
        assert!(
            gpu_models()
                .iter()
                .all(|other| other.name == it.name || !other.is_named(&it.name)),
            "{}",
            it.name
        );
    }
}

#[test]
fn gpu_models_are_possible() {
    for it in gpu_models() {
        let name = &it.name;
        let older_than = |text| it.compute_capability < capability(text);
        let expected_module = match it.compute_capability {
            _ if older_than("7.5") => KernelModuleSupport::ProprietaryOnly,
            _ if older_than("10.0") && !name.starts_with("GH200") => KernelModuleSupport::Either,
            _ => KernelModuleSupport::OpenOnly,
        };
        assert_eq!(it.kernel_module, expected_module, "{name}");
        assert_eq!(
            it.row_remapping,
            it.data_center && !older_than("8.0"),
            "{name}"
        );
        assert_eq!(it.ecc, it.data_center, "{name}");
        if let (Some(floor), Some(generation), Some(width)) =
            (it.pcie_floor, it.pcie_generation, it.pcie_width)
        {
            assert!(floor.width <= width, "{name}");
            assert!(floor.generation.is_none_or(|it| it <= generation), "{name}");
        }
        if let Some(watts) = it.power_limit_w {
            assert!((60..=1400).contains(&watts), "{name}: {watts} W");
        }
        if let Some(mib) = it.memory_mib {
            assert!((15_000..=300_000).contains(&mib), "{name}: {mib} MiB");
        }
        if let Some(bandwidth) = it.memory_bandwidth_gbs {
            assert!(
                (200.0..=8000.0).contains(&bandwidth),
                "{name}: {bandwidth} GB/s"
            );
        }
        assert!(!it.whole_board_nvlinks || it.nvlinks > Some(0), "{name}");
        let precisions = ["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"];
        for (precision, rate) in &it.peak_tflops {
            assert!(
                precisions.contains(&precision.as_str()),
                "{name}: {precision}"
            );
            assert!(
                (0.5..=10_000.0).contains(rate),
                "{name}: {precision} {rate}"
            );
        }
        // A sparse rate where a dense one belongs would be twice its neighbour's.
        if let (Some(bf16), Some(fp16)) = (it.peak_tflops.get("bf16"), it.peak_tflops.get("fp16")) {
            assert!((bf16 - fp16).abs() < 1e-9, "{name}");
        }
        if let (Some(fp16), Some(fp8)) = (it.peak_tflops.get("fp16"), it.peak_tflops.get("fp8")) {
            assert!(
                (1.9..=2.1).contains(&(fp8 / fp16)),
                "{name}: {fp8} is not twice {fp16}"
            );
        }
    }
}

#[test]
fn the_product_name_decides_before_the_pci_id() {
    let found = |name, id| gpu_model(name, id).map(|it| it.name.as_str());
    assert_eq!(found(Some("NVIDIA A16"), Some(0x25b6)), Some("A16"));
    assert_eq!(found(Some("NVIDIA A2"), Some(0x25b6)), Some("A2"));
    assert_eq!(found(None, Some(0x25b6)), None, "A16 and A2 share this id");
    assert_eq!(found(None, Some(0x2335)), Some("H200 SXM"));
    assert_eq!(
        found(Some("A100-SXM4-40GB"), None),
        Some("A100 SXM 40GB"),
        "drivers before 470"
    );
    assert_eq!(found(Some("NVIDIA Nothing"), Some(0x1eb8)), Some("T4"));
    assert_eq!(found(Some("NVIDIA Nothing"), Some(0xffff)), None);
}

/// `nvidia-smi -q -x` of one H200 (driver 580.159.04), the values that the table repeats.
#[test]
fn the_h200_row_is_what_an_h200_says() {
    let h200 = gpu_model(Some("NVIDIA H200"), Some(0x2335)).expect("the table has the H200");
    assert_eq!(h200.name, "H200 SXM");
    assert_eq!(h200.memory_mib, Some(143_771));
    assert!(
        h200.memory_minimum_mib()
            .is_some_and(|it| (139_000..143_771).contains(&it))
    );
    assert_eq!((h200.pcie_generation, h200.pcie_width), (Some(5), Some(16)));
    assert_eq!(h200.power_limit_w, Some(700));
    assert!(h200.ecc && h200.row_remapping && h200.mig);
    assert_eq!(h200.compute_capability, capability("9.0"));
}

/// Rows that checks meet most, against DCGM's diag-skus.yaml.in and the CUDA GPU list.
#[test]
fn well_known_models_are_right() {
    for (name, id, compute_capability, floor) in [
        ("T4", 0x1eb8, "7.5", (Some(3), 8)),
        ("V100 SXM2 16GB", 0x1db1, "7.0", (Some(3), 16)),
        ("V100 SXM2 32GB", 0x1db5, "7.0", (Some(3), 16)),
        ("A100 SXM 40GB", 0x20b0, "8.0", (Some(3), 16)),
        ("A100 SXM 80GB", 0x20b2, "8.0", (Some(3), 16)),
        ("A10G", 0x2237, "8.6", (Some(3), 8)),
        ("L4", 0x27b8, "8.9", (Some(3), 8)),
        ("L40S", 0x26b9, "8.9", (Some(4), 8)),
        ("H100 SXM 80GB", 0x2330, "9.0", (Some(3), 16)),
        ("H200 SXM", 0x2335, "9.0", (Some(3), 16)),
        ("H200 NVL", 0x233b, "9.0", (Some(3), 16)),
        ("B200", 0x2901, "10.0", (Some(3), 16)),
        ("GB200", 0x2941, "10.0", (Some(3), 1)),
        (
            "RTX PRO 6000 Blackwell Server Edition",
            0x2bb5,
            "12.0",
            (Some(3), 16),
        ),
    ] {
        let row = model(name);
        assert!(row.pci_device_ids.contains(&id), "{name}");
        assert_eq!(
            row.compute_capability,
            capability(compute_capability),
            "{name}"
        );
        let pcie_floor = row.pcie_floor.expect(name);
        assert_eq!((pcie_floor.generation, pcie_floor.width), floor, "{name}");
    }
}

/// The table of the diagnostics gives the module with an x16 slot one lane, and the superchip
/// sixteen.
#[test]
fn floors_that_look_exchanged_are_left_out() {
    for name in ["B300", "GB300"] {
        assert_eq!(model(name).pcie_floor, None, "{name}");
    }
}

#[test]
fn ec2_instances_name_known_models() {
    assert_unique(
        "instance type",
        ec2_instances().iter().map(|it| it.instance_type.as_str()),
    );
    for row in ec2_instances() {
        let name = &row.instance_type;
        assert!([1, 2, 4, 8].contains(&row.gpu_count), "{name}");
        let Some(model_name) = &row.gpu_model else {
            assert_eq!(name, "g7.48xlarge");
            continue;
        };
        let model = model(model_name);
        assert!(
            row.nvlinks.is_none_or(|it| Some(it) == model.nvlinks),
            "{name}"
        );
        // NVSwitch joins whole boards of SXM modules.
        assert!(
            !row.fabric_manager || (model.whole_board_nvlinks && row.gpu_count == 8),
            "{name}"
        );
    }
    for (name, count) in [
        ("g4dn.metal", 8),
        ("g4dn.12xlarge", 4),
        ("g5.48xlarge", 8),
        ("g5g.16xlarge", 2),
        ("g6e.16xlarge", 1),
        ("g7e.24xlarge", 4),
        ("p3.8xlarge", 4),
        ("p5.4xlarge", 1),
        ("p5.48xlarge", 8),
        ("p6-b200.48xlarge", 8),
        ("p6e-gb200.36xlarge", 4),
    ] {
        assert_eq!(ec2_instance(name).expect(name).gpu_count, count, "{name}");
    }
    assert!(ec2_instance("m5.large").is_none());
}

#[test]
fn toolkits_and_branches_are_in_order() {
    for pair in cuda_toolkits().windows(2) {
        assert!(
            pair[0].version < pair[1].version,
            "{} {}",
            pair[0].version,
            pair[1].version
        );
        assert!(
            pair[0].driver <= pair[1].driver,
            "{} {}",
            pair[0].version,
            pair[1].version
        );
        assert!(pair[0].compute_capability_maximum <= pair[1].compute_capability_maximum);
        assert!(pair[0].compute_capability_minimum <= pair[1].compute_capability_minimum);
    }
    for pair in driver_branches().windows(2) {
        assert!(pair[0].branch < pair[1].branch);
        assert!(pair[0].cuda < pair[1].cuda);
        assert!(pair[0].compute_capability_minimum <= pair[1].compute_capability_minimum);
    }
}

#[test]
fn a_branch_offers_the_cuda_of_the_toolkit_that_came_with_it() {
    for toolkit in cuda_toolkits() {
        let branch = driver_branch(toolkit.driver.branch()).expect("the branch is listed");
        let of = |version: CudaVersion| (version.major, version.minor);
        assert_eq!(of(branch.cuda), of(toolkit.version), "{}", toolkit.version);
    }
    for branch in driver_branches() {
        assert!(cuda_toolkit(branch.cuda).is_some(), "{}", branch.branch);
    }
}

#[test]
fn a_toolkit_runs_on_its_own_driver() {
    for toolkit in cuda_toolkits() {
        let minimum = minor_version_minimum(toolkit.version.major).expect("the major is listed");
        // 11.0 came before minor-version compatibility.
        assert!(
            toolkit.driver >= *minimum || toolkit.version < cuda("11.1"),
            "{}",
            toolkit.version
        );
    }
    assert_eq!(minor_version_minimum(12), Some(&driver("525.60.13")));
    assert_eq!(minor_version_minimum(13), Some(&driver("580.65.06")));
    assert_eq!(minor_version_minimum(10), None);
}

#[test]
fn toolkits_are_found_by_update() {
    let found = |text| cuda_toolkit(cuda(text)).map(|it| it.driver.to_string());
    assert_eq!(found("12.8"), Some("570.26".to_owned()));
    assert_eq!(found("12.8.1"), Some("570.124.06".to_owned()));
    assert_eq!(found("12.2.2"), Some("535.104.05".to_owned()));
    assert_eq!(
        found("12.2.9"),
        Some("535.104.05".to_owned()),
        "the newest update that is listed"
    );
    assert_eq!(found("12.6.3"), Some("560.35.05".to_owned()));
    assert_eq!(found("13.2.2"), Some("595.71.05".to_owned()));
    assert_eq!(found("12.7"), None);
}

/// The matrix of the CUDA Compatibility guide, cell by cell: C compatible, X not, N not needed.
#[test]
fn the_compat_matrix_is_nvidias() {
    let bases = [535, 570, 580, 590, 595, 610, 615];
    for (package, cells) in [
        ("13.4", "CCCCCCN"),
        ("13.3", "CCCCCNX"),
        ("13.2", "CCCCNXX"),
        ("13.1", "CCCNXXX"),
        ("13.0", "CCNXXXX"),
        ("12.9", "CCXXXXX"),
        ("12.8", "CNXXXXX"),
        ("12.6", "CXXXXXX"),
        ("12.5", "CXXXXXX"),
        ("12.4", "CXXXXXX"),
        ("12.3", "CXXXXXX"),
        ("12.2", "NXXXXXX"),
    ] {
        for (base, cell) in bases.into_iter().zip(cells.chars()) {
            let wanted = match cell {
                'C' => CompatVerdict::Compatible,
                'N' => CompatVerdict::NotNeeded,
                _ => CompatVerdict::NotCompatible,
            };
            assert_eq!(
                compat_verdict(cuda(package), base),
                wanted,
                "{package} on {base}"
            );
        }
        // Branches at the end of their life are bases for no package.
        assert_ne!(
            compat_verdict(cuda(package), 470),
            CompatVerdict::Compatible
        );
        assert_ne!(
            compat_verdict(cuda(package), 550),
            CompatVerdict::Compatible
        );
    }
    assert_eq!(
        compat_verdict(cuda("12.7"), 535),
        CompatVerdict::UnknownPackage
    );
    let listed: Vec<u32> = driver_branches()
        .iter()
        .filter(|it| it.forward_compatibility_base)
        .map(|it| it.branch)
        .collect();
    assert_eq!(listed, bases);
}

#[test]
fn architectures_follow_the_release_notes() {
    use ArchitectureSupport::{Dropped, Native, OlderMachineCode, PtxOnly};
    for (toolkit, architecture, wanted) in [
        ("12.9", "7.0", Native),
        ("13.0", "7.0", Dropped),
        ("13.4", "7.5", Native),
        ("11.8", "3.5", Native),
        ("12.0", "3.7", Dropped),
        ("11.0", "8.0", Native),
        ("11.0", "8.6", OlderMachineCode(capability("8.0"))),
        ("11.7", "9.0", PtxOnly),
        ("11.8", "9.0", Native),
        ("12.6", "10.0", PtxOnly),
        ("12.8", "10.0", Native),
        ("12.8", "10.3", OlderMachineCode(capability("10.0"))),
        ("12.9", "10.3", Native),
        ("12.8", "12.0", Native),
        ("12.8.1", "12.1", OlderMachineCode(capability("12.0"))),
        ("13.0", "8.9", Native),
        ("11.4", "8.9", OlderMachineCode(capability("8.6"))),
    ] {
        assert_eq!(
            architecture_support(cuda(toolkit), capability(architecture)),
            wanted,
            "{architecture} with {toolkit}"
        );
    }
}

#[test]
fn native_architectures_lie_within_the_toolkits_range() {
    for toolkit in cuda_toolkits() {
        for model in gpu_models() {
            let capability = model.compute_capability;
            if architecture_support(toolkit.version, capability) == ArchitectureSupport::Native {
                assert!(
                    capability >= toolkit.compute_capability_minimum,
                    "{}",
                    toolkit.version
                );
                assert!(
                    capability <= toolkit.compute_capability_maximum,
                    "{}",
                    toolkit.version
                );
            }
        }
    }
}

#[test]
fn every_model_has_a_driver_branch_and_a_toolkit() {
    for model in gpu_models() {
        let oldest = oldest_driver_branch(model.compute_capability).expect(&model.name);
        let branch = driver_branch(oldest).expect(&model.name);
        assert!(
            branch.compute_capability_minimum <= model.compute_capability,
            "{}",
            model.name
        );
    }
    assert_eq!(oldest_driver_branch(capability("10.0")), Some(570));
    assert_eq!(oldest_driver_branch(capability("8.0")), Some(450));
    // R580 is the last branch for Volta.
    let volta = capability("7.0");
    assert!(driver_branch(580).expect("580").compute_capability_minimum <= volta);
    assert!(driver_branch(590).expect("590").compute_capability_minimum > volta);
}

#[test]
fn xids_are_listed_once_and_say_what_to_do() {
    assert_unique("Xid", xids().iter().map(|it| it.number));
    assert!(xids().is_sorted_by_key(|it| it.number));
    for row in xids() {
        assert!(!row.name.is_empty(), "{}", row.number);
        assert_fragment(&row.remedy);
        assert!(
            row.resolution
                .chars()
                .all(|it| it.is_ascii_uppercase() || it == '_' || it.is_ascii_digit()),
            "{}: {}",
            row.number,
            row.resolution
        );
        assert_eq!(
            row.class == XidClass::NvlinkBySeverity,
            (144..=150).contains(&row.number),
            "{}",
            row.number
        );
    }
}

/// NVIDIA's immediate resolution is the truth: no class may be milder or harsher than it.
#[test]
fn xid_classes_follow_nvidias_resolution() {
    for row in xids() {
        let allowed: &[XidClass] = match row.resolution.as_str() {
            "RESTART_APP" => &[XidClass::Application, XidClass::Contained],
            "RESET_GPU" => &[XidClass::Reset],
            "CONTACT_SUPPORT" => &[XidClass::Hardware, XidClass::Unknown],
            "IGNORE" => &[XidClass::Application, XidClass::Informational],
            "RESTART_BM" | "RESTART_VM" => &[XidClass::Reboot],
            "UPDATE_SWFW" => &[XidClass::Software],
            "CHECK_MECHANICALS" => &[XidClass::Hardware],
            "WORKFLOW_NVLINK5_ERR" => &[XidClass::NvlinkBySeverity],
            // Workflows and codes without a resolution are decided one by one.
            _ => continue,
        };
        assert!(
            allowed.contains(&row.class),
            "{}: {:?}",
            row.number,
            row.class
        );
    }
    for (number, class) in [
        (31, XidClass::Application),
        (45, XidClass::Application),
        (48, XidClass::Reset),
        (63, XidClass::Informational),
        (74, XidClass::Reset),
        (79, XidClass::Reboot),
        (94, XidClass::Contained),
        (95, XidClass::Reset),
        (119, XidClass::Reset),
        (142, XidClass::Hardware),
        (154, XidClass::Informational),
        (159, XidClass::Unknown),
        (173, XidClass::Reboot),
    ] {
        assert_eq!(xid(number).expect("listed").class, class, "{number}");
    }
    assert!(xid(1000).is_none());
}

#[test]
fn disagreements_on_xids_are_recorded() {
    let others = |number| {
        xid(number)
            .and_then(|it| it.others.clone())
            .unwrap_or_default()
    };
    assert!(
        others(63).contains("EKS: replaces the node"),
        "{}",
        others(63)
    );
    assert!(others(63).contains("azurehpc: fails"), "{}", others(63));
    assert!(others(109).contains("gcm: ignores"), "{}", others(109));
    assert!(others(94).contains("gpud"), "{}", others(94));
    assert!(others(68).contains("azurehpc: fails"), "{}", others(68));
}

#[test]
fn cuda_errors_are_explained() {
    assert_unique("code", cuda_errors().iter().map(|it| it.code));
    assert_unique("name", cuda_errors().iter().map(|it| it.name.as_str()));
    assert!(cuda_errors().is_sorted_by_key(|it| it.code));
    for row in cuda_errors() {
        assert!(
            row.name.starts_with("CUDA_ERROR_") || row.code == 35,
            "{}",
            row.name
        );
        assert_fragment(&row.meaning);
        assert_fragment(&row.remedy);
    }
    for (code, word) in [
        (802, "fabric manager"),
        (803, "reboot"),
        (804, "cuda-compat"),
        (999, "nvidia-uvm"),
        (100, "CUDA_VISIBLE_DEVICES"),
    ] {
        assert!(
            explain_cuda_error(code)
                .expect("listed")
                .remedy
                .contains(word),
            "{code}"
        );
    }
}
