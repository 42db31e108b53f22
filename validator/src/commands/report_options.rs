//! Options that `run` and `judge` share: the profile, and which reports to write.

use std::path::PathBuf;

use super::terminal::{ColorChoice, to_stderr};
use validator_core::findings::Run;
use validator_core::profile::Profile;
use validator_core::report::HumanStyle;

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ReportOptions {
    /// Node requirements (profile); without it, expectations follow from the EC2 instance type and
    /// the GPU model
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_PROFILE")]
    pub(crate) profile: Option<PathBuf>,
    /// Write a JUnit report, `-` for standard output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_JUNIT")]
    pub(crate) junit: Option<PathBuf>,
    /// Write a JSON report (see `gpu-validator schema report`), `-` for standard output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_JSON")]
    pub(crate) json: Option<PathBuf>,
    /// Write a Markdown report, `-` for standard output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_MARKDOWN")]
    pub(crate) markdown: Option<PathBuf>,
    /// Write an HTML report, `-` for standard output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_HTML")]
    pub(crate) html: Option<PathBuf>,
    /// Write metrics for node_exporter's textfile collector, `-` for standard output
    #[arg(long, value_name = "FILE", env = "GPU_VALIDATOR_METRICS")]
    pub(crate) metrics: Option<PathBuf>,
    /// Write a report in another format, `-` for standard output: `ocptv` (OCP Test & Validation
    /// 2.0, JSON lines) or `ctrf` (Common Test Report Format, JSON)
    #[arg(long = "report", value_name = "FORMAT:FILE")]
    pub(crate) more: Vec<ReportTarget>,
    /// Annotate a GitHub Actions job and append to its summary; on by itself where GITHUB_ACTIONS
    /// is true
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) github: Option<bool>,
    /// Colour the report on standard output
    #[arg(
        long,
        value_name = "WHEN",
        value_enum,
        default_value_t,
        env = "GPU_VALIDATOR_COLOR"
    )]
    pub(crate) color: ColorChoice,
    /// Add every check of every GPU, findings in full, and what was not judged and why
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// Accept simulated driver libraries, for tests; without it, a run that they answered counts as
    /// not judged. No variable sets this
    #[arg(long, alias = "allow-simulated", overrides_with = "simulated_ok")]
    pub(crate) simulated_ok: bool,
    /// Refuse simulated driver libraries, also with --simulated-ok
    #[arg(long, env = "GPU_VALIDATOR_FORBID_SIMULATED")]
    pub(crate) forbid_simulated: bool,
}

/// The value of `--report`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReportTarget {
    pub(crate) format: ReportFormat,
    pub(crate) path: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReportFormat {
    Ctrf,
    Ocptv,
}

impl std::str::FromStr for ReportTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (format, path) = text
            .split_once(':')
            .filter(|(_, path)| !path.is_empty())
            .ok_or("expected FORMAT:FILE, such as ctrf:report.json")?;
        let format = match format {
            "ctrf" => ReportFormat::Ctrf,
            "ocptv" => ReportFormat::Ocptv,
            other => return Err(format!("unknown format `{other}`, expected ctrf or ocptv")),
        };
        let path = path.into();
        Ok(Self { format, path })
    }
}

impl ReportOptions {
    /// Whether facts that simulated libraries answered count as not judged.
    pub(crate) fn refuses_simulated(&self) -> bool {
        self.forbid_simulated || !(self.simulated_ok || super::simulated_ok::by_root())
    }

    /// The profile and its name in reports.
    pub(crate) fn profile(&self) -> anyhow::Result<(Profile, String)> {
        match self.profile.as_deref() {
            Some(path) => {
                let profile = crate::profile_file::load(path)?;
                if profile == Profile::default() {
                    to_stderr(&format!(
                        "warning: profile {} is empty and requires nothing: the expectations are those of the EC2 instance type and the GPU model alone\n",
                        path.display()
                    ));
                }
                Ok((profile, path.display().to_string()))
            }
            None => Ok((Profile::default(), Run::BUILT_IN_PROFILE.to_owned())),
        }
    }

    pub(crate) fn style(&self) -> HumanStyle {
        HumanStyle {
            color: self.color.on_stdout(),
            verbose: self.verbose,
            width: super::terminal::width_of_stdout(),
        }
    }

    pub(crate) fn github(&self) -> bool {
        self.github
            .unwrap_or_else(|| std::env::var_os("GITHUB_ACTIONS").is_some_and(|it| it == "true"))
    }
}

#[cfg(test)]
mod tests {
    use super::{ReportFormat, ReportTarget};

    #[test]
    fn a_report_is_a_format_and_a_file() {
        let parsed = "ocptv:a:b.jsonl".parse::<ReportTarget>();
        let expected = ReportTarget {
            format: ReportFormat::Ocptv,
            path: "a:b.jsonl".into(),
        };
        assert_eq!(parsed, Ok(expected));
        for wrong in ["ctrf", "ctrf:", "tap:file", "report.json"] {
            assert!(wrong.parse::<ReportTarget>().is_err(), "{wrong}");
        }
    }
}
