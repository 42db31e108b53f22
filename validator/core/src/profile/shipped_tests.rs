//! The profiles of `manifests/profiles` hold what the reference tables say.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{Profile, ServiceRequirement};
use crate::expect::FABRIC_MANAGER_SERVICE;
use crate::findings::Verdict;
use crate::level::Level;
use crate::reference::{self, Ec2InstanceRow, GpuModel, KernelModuleSupport};

/// Every EC2 family that has a profile.
const FAMILIES: [&str; 11] = [
    "g4dn", "g5", "g6", "g6e", "p3", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200",
];

fn shipped() -> BTreeMap<String, Profile> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../manifests/profiles");
    std::fs::read_dir(&folder)
        .expect("the profiles are there")
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_some_and(|it| it == "yaml"))
        .map(|path| {
            let name = path
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            (name, load(&path))
        })
        .collect()
}

/// The shipped profiles extend one another by file name.
fn load(path: &std::path::Path) -> Profile {
    struct Disk;
    impl super::ProfileFiles for Disk {
        fn read(&self, path: &std::path::Path) -> Result<String, String> {
            std::fs::read_to_string(path).map_err(|error| error.to_string())
        }
        fn is_same(&self, _: &std::path::Path, _: &std::path::Path) -> bool {
            false
        }
    }
    crate::load_profile(path, &Disk).unwrap_or_else(|error| panic!("{error}"))
}

fn instances(family: &str) -> Vec<&'static Ec2InstanceRow> {
    let rows: Vec<_> = reference::ec2_instances()
        .iter()
        .filter(|row| {
            row.instance_type
                .split_once('.')
                .is_some_and(|it| it.0 == family)
        })
        .collect();
    assert!(!rows.is_empty(), "{family}");
    rows
}

fn model(profile: &Profile) -> &'static GpuModel {
    let name = profile.gpus.model.as_deref().expect("a family has a model");
    reference::gpu_models()
        .iter()
        .find(|it| it.name == name)
        .expect(name)
}

#[test]
fn every_family_has_its_profile() {
    let profiles = shipped();
    let mut names: Vec<&str> = FAMILIES.to_vec();
    names.extend(["aws-base", "generic"]);
    names.sort_unstable();
    assert_eq!(
        profiles.keys().map(String::as_str).collect::<Vec<_>>(),
        names
    );
    for (file, profile) in &profiles {
        assert_eq!(profile.name.as_ref(), Some(file));
        assert!(profile.description.is_some(), "{file}");
        assert_eq!(profile.gpus.persistence_mode, Some(true), "{file}");
    }
}

#[test]
fn families_are_what_their_instances_are() {
    let profiles = shipped();
    for family in FAMILIES {
        let profile = &profiles[family];
        let rows = instances(family);
        for row in &rows {
            assert_eq!(row.gpu_model, profile.gpus.model, "{}", row.instance_type);
            if let Some(count) = profile.gpus.count {
                assert_eq!(row.gpu_count, count, "{}", row.instance_type);
            }
            if profile.gpus.nvlinks.is_some() {
                assert_eq!(row.nvlinks, profile.gpus.nvlinks, "{}", row.instance_type);
            }
            if let Some(wanted) = profile.services.get(FABRIC_MANAGER_SERVICE) {
                assert_eq!(*wanted, ServiceRequirement::Active, "{family}");
                assert!(row.fabric_manager, "{}", row.instance_type);
            }
        }
        // A family of one size has the values of its only row.
        if let [row] = rows[..] {
            assert_eq!(profile.gpus.count, Some(row.gpu_count), "{family}");
            assert_eq!(profile.gpus.nvlinks, row.nvlinks, "{family}");
            assert_eq!(
                profile.services.contains_key(FABRIC_MANAGER_SERVICE),
                row.fabric_manager,
                "{family}"
            );
        }
    }
}

#[test]
fn numbers_are_those_of_the_gpu_model() {
    let profiles = shipped();
    for family in FAMILIES {
        let profile = &profiles[family];
        let model = model(profile);
        assert_eq!(profile.gpus.ecc, Some(model.ecc), "{family}");
        if let Some(width) = profile.gpus.pcie.width {
            assert_eq!(model.pcie_floor.map(|it| it.width), Some(width), "{family}");
            assert!(model.pcie_width > Some(width), "{family}: nothing to say");
        }
        assert_eq!(profile.gpus.pcie.generation, None, "{family}");
        let flavor = profile.driver.kernel_module.map(KernelModuleSupport::only);
        match model.kernel_module {
            KernelModuleSupport::Either => assert_eq!(flavor, None, "{family}"),
            only => assert_eq!(flavor, Some(only), "{family}"),
        }
    }
}

#[test]
fn driver_minimums_are_those_of_the_architecture() {
    let profiles = shipped();
    for family in FAMILIES {
        let profile = &profiles[family];
        let oldest = reference::oldest_driver_branch(model(profile).compute_capability);
        // T4 and V100 are older than any driver of the tables.
        let Some(minimum) = &profile.driver.minimum else {
            assert!(["g4dn", "p3"].contains(&family), "{family}");
            continue;
        };
        assert_eq!(Some(minimum.branch()), oldest, "{family}");
        assert!(
            reference::cuda_toolkits()
                .iter()
                .any(|it| it.driver == *minimum),
            "{family}: {minimum}"
        );
        if let Some(cuda) = profile.cuda.driver_minimum {
            let offered = reference::driver_branch(minimum.branch())
                .expect(family)
                .cuda;
            assert_eq!(cuda, offered, "{family}");
        }
    }
}

#[test]
fn a_healthy_p5en_passes_its_profile() {
    let facts = crate::test_machine::healthy_node();
    let profiles = shipped();
    for name in ["p5en", "generic"] {
        for finding in crate::judge(&facts, &profiles[name], Level::Extended) {
            assert!(
                !matches!(finding.verdict, Verdict::Fail | Verdict::Error),
                "{name}: {finding:#?}"
            );
        }
    }
}
