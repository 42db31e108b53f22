//! kubectl of the PATH, and what its errors mean.

use std::io::{ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, bail};
use serde_json::Value;

/// kubectl with the requested context.
#[derive(Debug)]
pub struct Kubectl {
    program: PathBuf,
    /// Before every command.
    options: Vec<String>,
}

impl Kubectl {
    /// The user's own kubectl: it is the one that has the user's credential plugins.
    pub fn find(context: Option<&str>) -> anyhow::Result<Kubectl> {
        let kubectl = Kubectl {
            program: PathBuf::from("kubectl"),
            options: context.iter().map(|it| format!("--context={it}")).collect(),
        };
        match kubectl.command(&["version", "--client"]).output() {
            Ok(output) if output.status.success() => Ok(kubectl),
            Ok(output) => bail!("kubectl does not start: {}", last_line(&output.stderr)),
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "kubectl is not on the PATH; install it: https://kubernetes.io/docs/tasks/tools/"
            ),
            Err(error) => Err(error).context("kubectl does not start"),
        }
    }

    /// This kubectl, with these options before every command.
    pub fn with(program: PathBuf, options: Vec<String>) -> Kubectl {
        Kubectl { program, options }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.options).args(arguments);
        command
    }

    /// Runs a command with manifests on its standard input; its output is shown.
    pub fn run(&self, arguments: &[&str], manifests: &str) -> anyhow::Result<()> {
        let output = self.output(arguments, manifests, Stdio::inherit())?;
        if output.status.success() {
            return Ok(());
        }
        Err(failure(arguments, &output))
    }

    /// Runs a command and reads the JSON that it prints.
    pub fn json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let text = self.text(arguments, "")?;
        serde_json::from_str(&text)
            .with_context(|| format!("kubectl {} printed no JSON", arguments.join(" ")))
    }

    /// Runs a command and takes what it prints.
    pub fn text(&self, arguments: &[&str], input: &str) -> anyhow::Result<String> {
        let output = self.output(arguments, input, Stdio::piped())?;
        if !output.status.success() {
            return Err(failure(arguments, &output));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The objection to a command; `None` where it succeeds.
    pub fn refusal(&self, arguments: &[&str], input: &str) -> Option<String> {
        match self.output(arguments, input, Stdio::null()) {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(String::from_utf8_lossy(&output.stderr).into_owned()),
            Err(error) => Some(format!("{error:#}")),
        }
    }

    /// Those of `namespaces` that the cluster does not have.
    pub fn missing_namespaces(&self, namespaces: &[&str]) -> anyhow::Result<Vec<String>> {
        let mut missing = Vec::new();
        for name in namespaces {
            let get = [
                "get",
                "namespace",
                name,
                "--ignore-not-found",
                "--output=name",
            ];
            if self.text(&get, "")?.trim().is_empty() {
                missing.push((*name).to_owned());
            }
        }
        Ok(missing)
    }

    /// Whether the cluster differs from `manifests`; the differences are shown.
    pub fn differs(&self, manifests: &str) -> anyhow::Result<bool> {
        let arguments = [
            "diff",
            "--server-side",
            "--field-manager=gpu-bringup",
            "--filename",
            "-",
        ];
        let output = self.output(&arguments, manifests, Stdio::inherit())?;
        // kubectl-diff: 0 no difference, 1 differences, more an error.
        match output.status.code() {
            Some(0) => Ok(false),
            Some(1) if output.stderr.is_empty() => Ok(true),
            _ => Err(failure(&arguments, &output)),
        }
    }

    fn output(&self, arguments: &[&str], input: &str, stdout: Stdio) -> anyhow::Result<Output> {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .context("kubectl does not start")?;
        let stdin = child
            .stdin
            .take()
            .context("kubectl has no standard input")?;
        // A thread writes, so that neither side waits for the other; kubectl that ends early
        // reports the reason itself.
        std::thread::scope(|scope| {
            let mut stdin = stdin;
            scope.spawn(move || stdin.write_all(input.as_bytes()));
            child.wait_with_output().context("kubectl was lost")
        })
    }
}

fn failure(arguments: &[&str], output: &Output) -> anyhow::Error {
    let said = String::from_utf8_lossy(&output.stderr);
    eprint!("{said}");
    let what = arguments.first().copied().unwrap_or_default();
    match meaning(&said) {
        Some(meaning) => anyhow::anyhow!("kubectl {what} failed: {meaning}"),
        None => anyhow::anyhow!("kubectl {what} failed: {}", last_line(&output.stderr)),
    }
}

fn last_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.trim()
        .lines()
        .last()
        .unwrap_or("it reported nothing")
        .to_owned()
}

/// Messages of kubectl and their meaning here; the first that fits.
// The texts are kubectl's own and the API server's, of versions 1.31 to 1.34.
const MEANINGS: &[(&[&str], &str)] = &[
    (
        &["no matches for kind \"ServiceMonitor\""],
        "the cluster does not know ServiceMonitor: install the Prometheus operator, or take component dcgm-exporter out of the overlay",
    ),
    (
        &["no matches for kind", "ensure CRDs are installed first"],
        "the cluster does not know one of these kinds: a custom resource definition is missing, or the cluster is older than Kubernetes 1.31",
    ),
    (
        &[
            "Unauthorized",
            "must be logged in",
            "getting credentials",
            "token has expired",
        ],
        "the API server does not accept your credentials: log in again (on EKS: aws eks update-kubeconfig --name CLUSTER)",
    ),
    (
        &["forbidden: violates PodSecurity"],
        "the namespace's Pod Security level refuses the pod: apply the whole overlay, which labels the namespaces",
    ),
    (
        &["orbidden"],
        "your user lacks a right, named above; `kubectl auth can-i --list` shows what you may do",
    ),
    (
        &["conflict with", "Apply failed with"],
        "somebody else set fields that these manifests set too, named above: take them out of the manifests, or give them up there",
    ),
    (
        &[
            "connection refused",
            "no such host",
            "i/o timeout",
            "Unable to connect to the server",
            "deadline exceeded",
        ],
        "the API server cannot be reached: is it up, and is this the right cluster (kubectl config current-context)?",
    ),
    (
        &[
            "context was not found",
            "does not exist in the kubeconfig",
            "no context exists with the name",
        ],
        "the kubeconfig has no such context; `kubectl config get-contexts` lists them",
    ),
];

fn meaning(said: &str) -> Option<&'static str> {
    MEANINGS
        .iter()
        .find(|(texts, _)| texts.iter().any(|text| said.contains(text)))
        .map(|(_, meaning)| *meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_put_in_plain_words() {
        for (said, expected) in [
            (
                "error: resource mapping not found for name: \"dcgm-exporter\" namespace: \"x\" from \"STDIN\": no matches for kind \"ServiceMonitor\" in version \"monitoring.coreos.com/v1\"\nensure CRDs are installed first",
                "Prometheus operator",
            ),
            (
                "Unable to connect to the server: dial tcp: lookup cluster.example: no such host",
                "cannot be reached",
            ),
            (
                "error: You must be logged in to the server (Unauthorized)",
                "log in again",
            ),
            (
                "Error from server (Forbidden): nodes is forbidden: User \"x\" cannot list resource \"nodes\"",
                "lacks a right",
            ),
            (
                "error: Apply failed with 1 conflict: conflict with \"helm\": .spec.x",
                "somebody else",
            ),
            (
                "error: context \"prod\" does not exist\nerror: context was not found for specified context: prod",
                "no such context",
            ),
        ] {
            let meaning = meaning(said).expect(said);
            assert!(meaning.contains(expected), "{said}: {meaning}");
        }
        assert_eq!(meaning("something new"), None);
    }
}
