//! What CI checks about the Terraform files, without AWS and without the AWS provider: a program of
//! ours that knows its schema stands in for it (terraform/tests/schema-provider).

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use super::folders;
use xtask::tools::go::{GO, TERRAFORM};
use xtask::{tools, workspace};

pub(super) fn run() -> anyhow::Result<()> {
    let terraform = TERRAFORM.install()?;
    let shell = workspace::shell()?;
    let place = workspace::target().join("terraform/check");
    // A copy, because terraform writes into the folder that it reads.
    shell.remove_path(&place)?;
    shell.create_dir(&place)?;
    for name in ["modules", "environments", "tests/refused"] {
        let (from, to) = (format!("terraform/{name}"), place.join(name));
        shell.create_dir(&to)?;
        cmd!(shell, "cp -R {from}/. {to}").quiet().run()?;
    }
    let mirror = build_provider(&shell, &place)?;
    let configuration = place.join("terraform.rc");
    let text = format!(
        "disable_checkpoint = true\nprovider_installation {{\n  filesystem_mirror {{\n    path = \"{}\"\n  }}\n}}\n",
        mirror.display()
    );
    shell.write_file(&configuration, text)?;
    let _environment = [
        shell.push_env("TF_CLI_CONFIG_FILE", &configuration),
        shell.push_env("TF_IN_AUTOMATION", "1"),
        shell.push_env("CHECKPOINT_DISABLE", "1"),
    ];
    cmd!(shell, "{terraform} fmt -check -diff -recursive terraform")
        .quiet()
        .run()
        .context("files are not formatted; run `terraform fmt -recursive terraform`")?;
    refuses_what_is_wrong(&shell, &terraform, &place.join("tests/refused"))?;
    for folder in [
        folders(&place.join("modules"))?,
        folders(&place.join("environments"))?,
    ]
    .concat()
    {
        validate_and_test(&shell, &terraform, &folder, &place)?;
    }
    policies(&shell)
}

/// Builds the stand-in into a mirror from which terraform installs it like any provider. Gives the
/// mirror's folder.
fn build_provider(shell: &Shell, place: &Path) -> anyhow::Result<PathBuf> {
    let go = GO.install()?.join("go");
    let source = workspace::root().join("terraform/tests/schema-provider");
    let schema: Value = serde_json::from_str(&shell.read_file(source.join("aws-schema.json"))?)?;
    let version = schema["provider_version"]
        .as_str()
        .context("aws-schema.json has no provider_version")?;
    let mirror = place.join("mirror");
    let program = mirror
        .join("registry.terraform.io/hashicorp/aws")
        .join(version)
        .join(format!("linux_{}", go_architecture()))
        .join(format!("terraform-provider-aws_v{version}"));
    let _environment = [
        shell.push_env("GOTOOLCHAIN", "local"),
        shell.push_env("GOFLAGS", "-mod=readonly"),
        shell.push_env("GOWORK", "off"),
        shell.push_env("CGO_ENABLED", "0"),
    ];
    cmd!(shell, "{go} vet -C {source} .").quiet().run()?;
    cmd!(shell, "{go} build -C {source} -trimpath -o {program} .")
        .quiet()
        .run()
        .context(
            "terraform/tests/schema-provider could not be built; is the Go module proxy reachable?",
        )?;
    Ok(mirror)
}

/// As Go, and with it terraform, names the processor.
fn go_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The stand-in must refuse what the provider would, or no other check here means anything. Each
/// `# refused:` comment is an error that must be among those that terraform finds.
fn refuses_what_is_wrong(shell: &Shell, terraform: &Path, folder: &Path) -> anyhow::Result<()> {
    let text = shell.read_file(folder.join("main.tf"))?;
    let expected: Vec<&str> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("# refused: "))
        .collect();
    ensure!(
        !expected.is_empty(),
        "terraform/tests/refused expects no refusal"
    );
    init(shell, terraform, folder)?;
    let chdir = format!("-chdir={}", folder.display());
    let answer = cmd!(shell, "{terraform} {chdir} validate -json")
        .quiet()
        .ignore_status()
        .read()?;
    let answer: Value = serde_json::from_str(&answer)?;
    let diagnostics = answer["diagnostics"].as_array();
    let found: Vec<String> = diagnostics
        .into_iter()
        .flatten()
        .map(|it| {
            format!(
                "{}: {}",
                it["summary"].as_str().unwrap_or_default(),
                it["detail"].as_str().unwrap_or_default()
            )
        })
        .collect();
    for expected in &expected {
        ensure!(
            found.iter().any(|it| it.contains(expected)),
            "terraform/tests/refused: `{expected}` was not refused; found {found:?}"
        );
    }
    ensure!(
        found.len() == expected.len(),
        "terraform/tests/refused expects {} errors; found {found:?}",
        expected.len()
    );
    println!("{} wrong arguments are refused", expected.len());
    Ok(())
}

fn init(shell: &Shell, terraform: &Path, folder: &Path) -> anyhow::Result<()> {
    let chdir = format!("-chdir={}", folder.display());
    let output = cmd!(
        shell,
        "{terraform} {chdir} init -backend=false -input=false -no-color"
    )
    .quiet()
    .ignore_status()
    .output()?;
    ensure!(
        output.status.success(),
        "{}: terraform init failed: {}{}",
        folder.display(),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn validate_and_test(
    shell: &Shell,
    terraform: &Path,
    folder: &Path,
    place: &Path,
) -> anyhow::Result<()> {
    let name = folder.strip_prefix(place).unwrap_or(folder).display();
    ensure!(
        folder.join("tests").is_dir(),
        "terraform/{name} has no tests"
    );
    init(shell, terraform, folder)?;
    let chdir = format!("-chdir={}", folder.display());
    println!("{name}");
    cmd!(shell, "{terraform} {chdir} validate -no-color")
        .quiet()
        .run()
        .with_context(|| format!("terraform/{name} is not valid"))?;
    cmd!(shell, "{terraform} {chdir} test -no-color")
        .quiet()
        .run()
        .with_context(|| format!("a test of terraform/{name} failed"))
}

/// terraform/.checkov.yaml lists the policies that do not apply, with the reason.
fn policies(shell: &Shell) -> anyhow::Result<()> {
    let checkov = tools::CHECKOV.install()?.join("checkov");
    cmd!(
        shell,
        "{checkov} --directory terraform --config-file terraform/.checkov.yaml"
    )
    .quiet()
    .run()
    .context("checkov found what a policy forbids; correct it, or skip it with the reason in terraform/.checkov.yaml")
}
