//! Renovate's custom managers are patterns over files of this repository. A pattern that no longer
//! matches raises nothing and reports nothing, so each is tried here on the files that it is for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use regex::Regex;
use serde_json::Value;

use crate::workspace;

/// A pinned version that a custom manager found.
#[derive(Debug)]
struct Pin {
    file: String,
    name: String,
    version: String,
    digest: Option<String>,
    /// Where in the file it stands.
    place: std::ops::Range<usize>,
}

fn configuration() -> Value {
    serde_json::from_str(&read(".github/renovate.json")).expect("JSON")
}

fn read(file: &str) -> String {
    let path = workspace::root().join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Files of the folders that hold pins, by their names in the repository.
fn files() -> Vec<String> {
    let root = workspace::root();
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = ["packer", "xtask", ".ci", "manifests/kubernetes"]
        .iter()
        .map(|it| root.join(it))
        .collect();
    while let Some(folder) = folders.pop() {
        for entry in folder.read_dir().expect("a folder").flatten() {
            if entry.path().is_dir() {
                folders.push(entry.path());
            } else {
                found.push(entry.path());
            }
        }
    }
    found.push(root.join("Cargo.toml"));
    let relative = |path: PathBuf| {
        let path = path.strip_prefix(&root).expect("below the root");
        path.display().to_string()
    };
    found.into_iter().map(relative).collect()
}

fn pattern(text: &str) -> Regex {
    Regex::new(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Every pin of every manager; a manager that matches nothing is an error.
fn pins() -> Vec<Pin> {
    let configuration = configuration();
    let mut pins = Vec::new();
    for manager in configuration["customManagers"].as_array().expect("a list") {
        let texts = |key: &str| -> Vec<Regex> {
            let list = manager[key].as_array().expect(key);
            let texts = list.iter().map(|it| it.as_str().expect("a text"));
            texts.map(|it| pattern(it.trim_matches('/'))).collect()
        };
        let (of_files, matches) = (texts("managerFilePatterns"), texts("matchStrings"));
        let before = pins.len();
        for file in files() {
            if !of_files.iter().any(|it| it.is_match(&file)) {
                continue;
            }
            let text = read(&file);
            for found in matches.iter().flat_map(|it| it.captures_iter(&text)) {
                let named = |group: &str| found.name(group).map(|it| it.as_str().to_owned());
                let template = manager["depNameTemplate"].as_str().map(str::to_owned);
                pins.push(Pin {
                    file: file.clone(),
                    name: named("depName").or(template).expect("a name"),
                    version: named("currentValue").expect("a version"),
                    digest: named("currentDigest"),
                    place: found.get(0).expect("the whole").range(),
                });
            }
        }
        assert!(pins.len() > before, "it matches nothing: {manager}");
    }
    pins
}

#[test]
fn every_version_that_xtask_pins_is_known_to_renovate() {
    let pins = pins();
    let pinned = pattern(
        r#"version: "(?<a>v?[0-9]+\.[0-9]+\.[0-9][^"]*)"|"[A-Za-z0-9._-]+==(?<b>[^"]+)"|const [A-Z_]*VERSION: &str = "(?<c>v[0-9.]+)""#,
    );
    let mut seen = BTreeSet::new();
    for file in files()
        .iter()
        .filter(|it| pattern(r"^xtask/.+\.rs$").is_match(it))
    {
        if file.ends_with("renovate.rs") {
            continue;
        }
        let text = read(file);
        for found in pinned.find_iter(&text) {
            let covered = |pin: &&Pin| pin.file == *file && pin.place.end >= found.end();
            let covered = pins
                .iter()
                .filter(covered)
                .any(|it| it.place.start <= found.start());
            assert!(covered, "{file}: {} is raised by nothing", found.as_str());
            seen.insert(found.as_str().to_owned());
        }
    }
    assert!(seen.len() > 50, "only {} pins were found", seen.len());
}

#[test]
fn the_images_versions_have_names_and_checksums() {
    let pins = pins();
    let of_images: BTreeMap<&str, &Pin> = pins
        .iter()
        .filter(|it| it.file == "packer/versions.auto.pkrvars.hcl")
        .map(|it| (it.name.as_str(), it))
        .collect();
    let names: Vec<&str> = of_images.keys().copied().collect();
    assert_eq!(
        names,
        [
            "NVIDIA/nvidia-container-toolkit",
            "actions/runner",
            "nvidia-driver"
        ]
    );
    let runner = of_images["actions/runner"];
    assert!(runner.digest.is_some());
    // The runner's container image takes the same one.
    let of_container = pins
        .iter()
        .find(|it| it.file == "packer/runner-gpu/Dockerfile" && it.name == "actions/runner");
    let of_container = of_container.expect("the Dockerfile names a runner");
    assert_eq!(
        (&runner.version, &runner.digest),
        (&of_container.version, &of_container.digest)
    );
}

/// The versions are in one place: no variable of the templates has a default that would stand in
/// for the file.
#[test]
fn the_templates_have_no_versions_of_their_own() {
    let variables = read("packer/variables.pkr.hcl");
    let versions = read("packer/versions.auto.pkrvars.hcl");
    let assignment = pattern(r"(?m)^([a-z_0-9]+) +=");
    let mut count = 0;
    for name in assignment
        .captures_iter(&versions)
        .map(|it| it[1].to_owned())
    {
        let start = variables
            .find(&format!("variable \"{name}\" {{"))
            .unwrap_or_else(|| panic!("the templates have no variable {name}"));
        let block = &variables[start..];
        let block = &block[..block.find("\n}").expect("it ends")];
        assert!(!block.contains("\n  default"), "{name} has a default");
        count += 1;
    }
    assert_eq!(count, 4);
}

#[test]
fn the_same_rust_is_named_everywhere() {
    let pins = pins();
    let versions: BTreeSet<String> = pins
        .iter()
        .filter(|it| it.name == "rust")
        .map(|it| it.version.trim_end_matches(".0").to_owned())
        .collect();
    assert_eq!(versions.len(), 1, "{versions:?}");
    let count = pins.iter().filter(|it| it.name == "rust").count();
    assert_eq!(count, 2, "Cargo.toml and .ci/run");
}

/// A tag can be moved to another image.
#[test]
fn images_of_others_are_pinned_by_digest() {
    let configuration = configuration();
    let rules = configuration["packageRules"].as_array().expect("rules");
    let rule = rules.iter().find(|it| it["pinDigests"] == true);
    let rule = rule.expect("a rule that pins digests");
    for manager in ["dockerfile", "kustomize"] {
        let managers = rule["matchManagers"].as_array().expect("managers");
        assert!(managers.iter().any(|it| it == manager), "{manager}");
    }
    // Renovate reads the base of a Dockerfile from the argument's default.
    for file in files().iter().filter(|it| it.ends_with("Dockerfile")) {
        let text = read(file);
        for line in text.lines().filter(|it| it.starts_with("FROM ${")) {
            let name = line["FROM ${".len()..].split('}').next().expect("a name");
            let default = format!("ARG {name}=");
            let image = text.lines().find_map(|it| it.strip_prefix(&default));
            assert!(image.is_some_and(|it| it.contains(':')), "{file}: {name}");
        }
    }
}
