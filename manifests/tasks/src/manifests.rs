//! The manifests as kustomize builds them.

use std::fmt;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use serde::Deserialize as _;
use serde_json::Value;
use xshell::cmd;

use xtask::tools::go::KUSTOMIZE;
use xtask::workspace;

/// A folder of `manifests/kubernetes/overlays`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlay(String);

impl Overlay {
    /// All overlays, by name.
    pub fn all() -> anyhow::Result<Vec<Overlay>> {
        let folder = folder().join("overlays");
        let entries = std::fs::read_dir(&folder)
            .with_context(|| format!("cannot list {}", folder.display()))?;
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        if names.is_empty() {
            bail!("no overlay in {}", folder.display());
        }
        Ok(names.into_iter().map(Overlay).collect())
    }

    pub fn is_production(&self) -> bool {
        self.0 == "production"
    }
}

impl std::str::FromStr for Overlay {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        let all = Overlay::all()?;
        if let Some(overlay) = all.iter().find(|it| it.0 == name) {
            return Ok(overlay.clone());
        }
        let names: Vec<String> = all.iter().map(ToString::to_string).collect();
        bail!("no overlay `{name}`, expected {}", names.join(" or "));
    }
}

impl fmt::Display for Overlay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `manifests/kubernetes` of this checkout.
pub fn folder() -> PathBuf {
    workspace::root().join("manifests/kubernetes")
}

/// What kustomize made of an overlay.
#[derive(Debug)]
pub struct Manifests {
    text: String,
    objects: Vec<Value>,
}

impl Manifests {
    pub fn of_overlay(overlay: &Overlay) -> anyhow::Result<Manifests> {
        Self::build(&folder().join("overlays").join(&overlay.0))
    }

    /// What all overlays begin with, with the images' versions.
    pub(super) fn of_base() -> anyhow::Result<Manifests> {
        Self::composed("base", &["base"], &["images"])
    }

    /// An overlay together with folders of `manifests/kubernetes/jobs`, so that names with hashes
    /// are the overlay's.
    pub fn of_overlay_with_jobs(overlay: &Overlay, jobs: &[&str]) -> anyhow::Result<Manifests> {
        let mut folders = vec![format!("overlays/{overlay}")];
        folders.extend(jobs.iter().map(|it| format!("jobs/{it}")));
        let folders: Vec<&str> = folders.iter().map(String::as_str).collect();
        Self::composed(
            &format!("{overlay}-{}", jobs.join("-")),
            &folders,
            &["images"],
        )
    }

    /// An overlay with a component that no overlay has. Versions of images come last: a component
    /// may add containers.
    pub fn of_overlay_with_component(
        overlay: &Overlay,
        component: &str,
    ) -> anyhow::Result<Manifests> {
        let folder = format!("overlays/{overlay}");
        let component = format!("components/{component}");
        Self::composed("component", &[&folder], &[&component, "images"])
    }

    /// Folders and components of `manifests/kubernetes` in one.
    fn composed(name: &str, folders: &[&str], components: &[&str]) -> anyhow::Result<Manifests> {
        // kustomize takes folders by relative paths only.
        let composed = workspace::target()
            .join("kubernetes")
            .join(format!("{name}-{}", std::process::id()));
        let shell = workspace::shell()?;
        shell.create_dir(&composed)?;
        let relative = relative_path(&composed, &folder());
        let mut text =
            "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n"
                .to_owned();
        for folder in folders {
            let _ = writeln!(text, "  - {relative}/{folder}");
        }
        text.push_str("components:\n");
        for component in components {
            let _ = writeln!(text, "  - {relative}/{component}");
        }
        shell.write_file(composed.join("kustomization.yaml"), text)?;
        let built = Self::build(&composed);
        shell.remove_path(&composed)?;
        built
    }

    fn build(folder: &Path) -> anyhow::Result<Manifests> {
        let kustomize = KUSTOMIZE.install()?;
        let shell = workspace::shell()?;
        let text = cmd!(shell, "{kustomize} build {folder}")
            .quiet()
            .read()
            .with_context(|| format!("kustomize cannot build {}", folder.display()))?;
        Self::parse(text + "\n")
    }

    pub fn parse(text: String) -> anyhow::Result<Manifests> {
        let mut objects = Vec::new();
        for document in serde_yaml::Deserializer::from_str(&text) {
            objects.push(Value::deserialize(document).context("kustomize wrote bad YAML")?);
        }
        if objects.is_empty() {
            bail!("kustomize built no object");
        }
        Ok(Manifests { text, objects })
    }

    /// Namespaces that the manifests make.
    pub fn namespaces(&self) -> Vec<&str> {
        let namespaces = self.objects.iter().filter(|it| it["kind"] == "Namespace");
        namespaces
            .filter_map(|it| it["metadata"]["name"].as_str())
            .collect()
    }

    /// What lies in none of these namespaces, and what lies in one.
    pub fn split(self, namespaces: &[String]) -> (Manifests, Manifests) {
        let is_in = |object: &Value| {
            let namespace = object["metadata"]["namespace"].as_str();
            namespace.is_some_and(|it| namespaces.iter().any(|name| name == it))
        };
        let (inside, outside) = self.objects.into_iter().partition(is_in);
        (Self::of_objects(outside), Self::of_objects(inside))
    }

    fn of_objects(objects: Vec<Value>) -> Manifests {
        // It begins with a mark of YAML: kubectl takes a text that begins with a brace for JSON
        // alone.
        let text = objects
            .iter()
            .fold(String::new(), |text, it| text + &format!("---\n{it}\n"));
        Manifests { text, objects }
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn objects(&self) -> &[Value] {
        &self.objects
    }

    pub fn object(&self, kind: &str, name: &str) -> anyhow::Result<&Value> {
        self.objects
            .iter()
            .find(|it| it["kind"] == kind && it["metadata"]["name"] == name)
            .with_context(|| format!("no {kind} {name} among the manifests"))
    }

    /// Every image, once each, in order of appearance.
    pub fn images(&self) -> Vec<String> {
        let mut images: Vec<String> = Vec::new();
        for pod in self.objects.iter().filter_map(pod_spec) {
            for container in containers(pod) {
                let image = container["image"].as_str().unwrap_or_default().to_owned();
                if !images.contains(&image) {
                    images.push(image);
                }
            }
        }
        images
    }

    pub fn images_without_digest(&self) -> Vec<String> {
        let mut images = self.images();
        images.retain(|image| !image.contains("@sha256:"));
        images
    }
}

/// The specification of the pods that an object makes.
pub fn pod_spec(object: &Value) -> Option<&Value> {
    let template = match object["kind"].as_str()? {
        "CronJob" => &object["spec"]["jobTemplate"]["spec"]["template"],
        "DaemonSet" | "Deployment" | "Job" => &object["spec"]["template"],
        _ => return None,
    };
    Some(&template["spec"])
}

/// All containers of a pod, those that run first included.
pub fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    ["initContainers", "containers"]
        .into_iter()
        .flat_map(|kind| pod[kind].as_array().into_iter().flatten())
}

/// `to` as seen from `from`; both absolute.
fn relative_path(from: &Path, to: &Path) -> String {
    let (from, to): (Vec<_>, Vec<_>) = (from.components().collect(), to.components().collect());
    let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = vec![".."; from.len() - shared];
    let down = to[shared..]
        .iter()
        .map(|it| it.as_os_str().to_string_lossy().into_owned());
    up.into_iter()
        .map(str::to_owned)
        .chain(down)
        .collect::<Vec<_>>()
        .join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_go_up_and_down() {
        let relative = |from: &str, to: &str| relative_path(Path::new(from), Path::new(to));
        assert_eq!(
            relative("/a/target/k/x", "/a/manifests/k"),
            "../../../manifests/k"
        );
        assert_eq!(relative("/build/x", "/a/b"), "../../a/b");
    }

    #[test]
    fn images_are_found_in_every_kind_that_makes_pods() {
        let text = r#"
kind: CronJob
spec: {jobTemplate: {spec: {template: {spec: {containers: [{image: "a:1"}]}}}}}
---
kind: DaemonSet
spec: {template: {spec: {initContainers: [{image: "b:1"}], containers: [{image: "c:1@sha256:0"}, {image: "a:1"}]}}}
---
kind: Service
"#;
        let manifests = Manifests::parse(text.to_owned()).expect("YAML");
        assert_eq!(manifests.images(), ["a:1", "b:1", "c:1@sha256:0"]);
        assert_eq!(manifests.images_without_digest(), ["a:1", "b:1"]);
    }

    #[test]
    fn what_lies_in_a_namespace_is_told_apart() {
        let text = r"
kind: Namespace
metadata: {name: a}
---
kind: Job
metadata: {name: x, namespace: a}
---
kind: Job
metadata: {name: y, namespace: kube-system}
";
        let manifests = Manifests::parse(text.to_owned()).expect("YAML");
        assert_eq!(manifests.namespaces(), ["a"]);
        let (outside, inside) = manifests.split(&["a".to_owned()]);
        assert_eq!((outside.objects().len(), inside.objects().len()), (2, 1));
        assert_eq!(inside.objects()[0]["metadata"]["name"], "x");
        let again = Manifests::parse(outside.text().to_owned()).expect("what kubectl reads");
        assert_eq!(again.objects(), outside.objects());
    }

    #[test]
    fn an_unknown_overlay_is_refused_with_the_known_ones() {
        let error = "stagin"
            .parse::<Overlay>()
            .expect_err("unknown")
            .to_string();
        assert_eq!(error, "no overlay `stagin`, expected production or staging");
    }
}
