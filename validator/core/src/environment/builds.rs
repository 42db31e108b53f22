//! Published builds of frameworks, and the toolkits of PTX versions.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::reference::CudaVersion;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Tables {
    #[expect(dead_code, reason = "for the reader of the data file")]
    sources: BTreeMap<String, String>,
    frameworks: BTreeMap<String, Vec<FrameworkRelease>>,
    ptx_versions: Vec<PtxVersionRow>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PtxVersionRow {
    ptx: String,
    cuda: CudaVersion,
}

/// A release of a framework.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrameworkRelease {
    /// Major and minor version: `2.11`.
    pub release: String,
    /// The oldest and newest Python with a wheel.
    #[serde(default)]
    pub python: Option<(String, String)>,
    #[serde(default)]
    pub cudnn: Option<String>,
    #[serde(default)]
    pub nccl: Option<String>,
    pub builds: Vec<FrameworkBuild>,
}

/// A release's build for one CUDA version.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FrameworkBuild {
    pub cuda: CudaVersion,
    /// What the Python Package Index has.
    #[serde(default)]
    pub default: bool,
    /// Empty where no list is on record.
    #[serde(default)]
    pub machine_code: Vec<String>,
    #[serde(default)]
    pub ptx: Vec<String>,
}

static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    serde_yaml::from_str(include_str!("../../data/framework_builds.yaml"))
        .expect("a test parses the embedded table")
});

/// All releases of a framework, oldest first; empty of a framework without a table.
pub fn framework_releases(framework: &str) -> &'static [FrameworkRelease] {
    TABLES
        .frameworks
        .get(framework)
        .map(Vec::as_slice)
        .unwrap_or_default()
}

/// The release that a version such as `2.11.0+cu126` is of.
pub fn framework_release(framework: &str, version: &str) -> Option<&'static FrameworkRelease> {
    let release = major_minor(version)?;
    framework_releases(framework)
        .iter()
        .find(|it| it.release == release)
}

/// `2.11` of `2.11.0+cu126`, `2.6.0a0+git1a2b` and `2.11`.
pub(crate) fn major_minor(version: &str) -> Option<String> {
    let mut parts = version.split(['.', '+']);
    let major: u32 = parts.next()?.parse().ok()?;
    let minor: u32 = parts.next()?.parse().ok()?;
    Some(format!("{major}.{minor}"))
}

/// The toolkit that first wrote this version of PTX.
pub(crate) fn cuda_of_ptx(version: &str) -> Option<CudaVersion> {
    TABLES
        .ptx_versions
        .iter()
        .find(|row| row.ptx == version)
        .map(|row| row.cuda)
}

/// The CUDA version of a tag: `cu126` is 12.6, `cu118` is 11.8, `cu12` has no minor version.
pub(crate) fn cuda_of_tag(tag: &str) -> Option<CudaVersion> {
    let digits = tag.strip_prefix("cu")?;
    if digits.len() != 3 || !digits.bytes().all(|it| it.is_ascii_digit()) {
        return None;
    }
    format!("{}.{}", &digits[..2], &digits[2..]).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{cuda_of_ptx, cuda_of_tag, framework_release, framework_releases};
    use crate::environment::CodeTarget;

    #[test]
    fn the_table_is_whole() {
        for framework in ["torch", "tensorflow", "onnxruntime"] {
            let releases = framework_releases(framework);
            assert!(!releases.is_empty(), "{framework}");
            for release in releases {
                let defaults = release.builds.iter().filter(|it| it.default).count();
                assert_eq!(defaults, 1, "{framework} {}", release.release);
                for build in &release.builds {
                    for target in build.machine_code.iter().chain(&build.ptx) {
                        assert!(target.parse::<CodeTarget>().is_ok(), "{target}");
                    }
                    let known = crate::reference::cuda_toolkits().iter().any(|row| {
                        (row.version.major, row.version.minor)
                            == (build.cuda.major, build.cuda.minor)
                    });
                    assert!(known, "CUDA {} has a row", build.cuda);
                }
            }
        }
        assert!(framework_releases("fastai").is_empty());
    }

    #[test]
    fn versions_name_their_release() {
        let release = |version| framework_release("torch", version).map(|it| &it.release[..]);
        assert_eq!(release("2.11.0+cu126"), Some("2.11"));
        assert_eq!(release("2.1.2"), Some("2.1"));
        assert_eq!(release("2.6.0a0+git1a2b.nv25.06"), Some("2.6"));
        assert_eq!(release("3.0"), None);
        assert_eq!(release("nightly"), None);
    }

    #[test]
    fn tags_and_ptx_versions() {
        assert_eq!(
            cuda_of_tag("cu126").map(|it| it.to_string()).as_deref(),
            Some("12.6")
        );
        assert_eq!(
            cuda_of_tag("cu118").map(|it| it.to_string()).as_deref(),
            Some("11.8")
        );
        assert_eq!(cuda_of_tag("cu12"), None);
        assert_eq!(cuda_of_tag("cpu"), None);
        assert_eq!(
            cuda_of_ptx("8.8").map(|it| it.to_string()).as_deref(),
            Some("12.9")
        );
        assert_eq!(cuda_of_ptx("99.0"), None);
    }
}
