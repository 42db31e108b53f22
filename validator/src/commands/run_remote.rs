//! `gpu-validator run --target ssh://…`: this binary is copied to other machines, runs there, and
//! brings its reports back.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, bail};

use super::fleet::{Missing, report_of_folder};
use super::report_options::ReportOptions;
use super::terminal::to_stderr;
use validator_core::findings::ExitStatus;
use validator_core::level::Level;
use validator_remote::Destination;
use validator_remote::command::Run;
use validator_remote::interrupts::Interrupts;
use validator_remote::reports::Folder;
use validator_remote::session;

/// Machines of one fleet that are judged at a time.
const AT_ONCE: u16 = 16;

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "On other machines")]
pub(crate) struct RemoteOptions {
    /// Judge this machine instead: ssh://user@host:port (user and port may be left to the ssh
    /// configuration)
    #[arg(long, value_name = "TARGET", value_parser = Destination::of_url, conflicts_with = "targets")]
    target: Option<Destination>,
    /// Judge all machines of this file, one target a line (`#` begins a comment), and report on all
    /// of them in one
    #[arg(long, value_name = "FILE")]
    targets: Option<PathBuf>,
    /// Folder for the reports of other machines [default: one named by the time, in UTC, below
    /// gpu-validator-reports]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Run as root there, through `sudo -n`, which must not request a password
    #[arg(long)]
    sudo: bool,
    /// Configuration file for ssh, as in `ssh -F`
    #[arg(long, value_name = "FILE")]
    ssh_config: Option<PathBuf>,
    /// Of the machines of --targets, judge so many in parallel
    #[arg(long, value_name = "NUMBER", default_value_t = AT_ONCE, value_parser = clap::value_parser!(u16).range(1..=256), requires = "targets")]
    parallel: u16,
}

/// Options of this machine's side, and whether a value follows; all others are passed on.
const NOT_PASSED_ON: [(&str, bool); 9] = [
    ("--target", true),
    ("--targets", true),
    ("--out", true),
    ("--sudo", false),
    ("--ssh-config", true),
    ("--parallel", true),
    // The profile's files are copied, and the level may come from the environment.
    ("--profile", true),
    ("--level", true),
    ("--color", true),
];

impl RemoteOptions {
    /// Whether other machines are judged, and not this one.
    pub(crate) fn is_given(&self) -> bool {
        self.target.is_some() || self.targets.is_some()
    }

    /// Refuses options that mean nothing on this machine.
    pub(crate) fn refuse_without_target(&self) -> anyhow::Result<()> {
        let given = [
            ("--out", self.out.is_some()),
            ("--sudo", self.sudo),
            ("--ssh-config", self.ssh_config.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => bail!("{option} needs --target or --targets"),
            None => Ok(()),
        }
    }
}

/// What the command line of `run` wants of other machines.
pub(crate) struct Request<'a> {
    pub(crate) options: &'a RemoteOptions,
    pub(crate) level: Level,
    pub(crate) report: &'a ReportOptions,
    pub(crate) facts: Option<&'a Path>,
}

/// What all machines of a run share.
struct Plan<'a> {
    request: &'a Request<'a>,
    binary: PathBuf,
    more: Vec<OsString>,
    interrupts: Interrupts,
}

pub(crate) fn run(request: &Request<'_>) -> anyhow::Result<ExitStatus> {
    refuse_local_reports(request)?;
    // A profile that is wrong is found here, before anything is copied.
    request.report.profile()?;
    let options = request.options;
    let targets = match &options.targets {
        Some(file) => Some(read_targets(file)?),
        None => None,
    };
    let plan = Plan {
        request,
        binary: std::env::current_exe().context("the path of this program cannot be read")?,
        more: passed_on(std::env::args_os()),
        interrupts: Interrupts::catch().context("signals cannot be caught")?,
    };
    let folder = match &options.out {
        Some(path) => Folder::create(path)?,
        None => Folder::create_in(Path::new("gpu-validator-reports"), &time_in_utc())?,
    };
    match (&targets, &options.target) {
        (Some(targets), _) => plan.judge_fleet(targets, &folder),
        (None, Some(target)) => Ok(plan.judge_one(target, &folder)),
        (None, None) => bail!("no --target"),
    }
}

/// Reports of the other machine go to one folder, all formats of them.
fn refuse_local_reports(request: &Request<'_>) -> anyhow::Result<()> {
    let report = request.report;
    for (option, path) in [
        ("--junit", report.junit.as_deref()),
        ("--json", report.json.as_deref()),
        ("--markdown", report.markdown.as_deref()),
        ("--html", report.html.as_deref()),
        ("--metrics", report.metrics.as_deref()),
        ("--report", report.more.first().map(|it| it.path.as_path())),
        ("--facts", request.facts),
    ] {
        if path.is_some() {
            bail!("{option} reports on this machine; reports of other machines go to --out DIR");
        }
    }
    Ok(())
}

fn time_in_utc() -> String {
    jiff::Timestamp::now()
        .strftime("%Y-%m-%dT%H-%M-%SZ")
        .to_string()
}

/// The words of the command line after `run`, less those that are for this machine.
fn passed_on(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut passed = Vec::new();
    let mut words = words.skip_while(|it| it != "run").skip(1);
    while let Some(word) = words.next() {
        let text = word.to_string_lossy().into_owned();
        let (name, has_value) = match text.split_once('=') {
            Some((name, _)) => (name, true),
            None => (&*text, false),
        };
        match NOT_PASSED_ON.iter().find(|(option, _)| *option == name) {
            Some((_, takes_value)) if *takes_value && !has_value => drop(words.next()),
            Some(_) => {}
            None => passed.push(word),
        }
    }
    passed
}

/// One target a line, with or without `ssh://`.
fn read_targets(file: &Path) -> anyhow::Result<Vec<Destination>> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("--targets {} cannot be read", file.display()))?;
    let mut targets: Vec<Destination> = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let target = line.split('#').next().unwrap_or_default().trim();
        if target.is_empty() {
            continue;
        }
        let at = || format!("{}:{number}: `{target}`", file.display());
        let target: Destination = target
            .strip_prefix("ssh://")
            .unwrap_or(target)
            .parse()
            .map_err(anyhow::Error::msg)
            .with_context(at)?;
        if targets.contains(&target) {
            bail!("{} is listed twice", at());
        }
        targets.push(target);
    }
    if targets.is_empty() {
        bail!("--targets {} names no machine", file.display());
    }
    Ok(targets)
}

impl Plan<'_> {
    fn judge_one(&self, target: &Destination, folder: &Folder) -> ExitStatus {
        let outcome = self.judge(target, folder, None);
        let written = folder.written();
        if written.is_empty() {
            folder.remove_if_empty();
        } else {
            to_stderr(&format!(
                "reports: {} ({})\n",
                folder.path().display(),
                written.join(", ")
            ));
        }
        outcome.unwrap_or_else(|error| {
            to_stderr(&format!("error: {error:#}\n"));
            ExitStatus::NotJudged
        })
    }

    /// All machines, each into a folder of its own, with one report on all of them.
    fn judge_fleet(&self, targets: &[Destination], folder: &Folder) -> anyhow::Result<ExitStatus> {
        let left = Mutex::new(targets.iter());
        let missing = Mutex::new(Vec::new());
        let judge_some = || {
            loop {
                let next = left.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(target) = next else { return };
                if let Err(error) = self.judge_into(target, folder) {
                    to_stderr(&format!("error: {target}: {error:#}\n"));
                    let mut missing = missing.lock().unwrap_or_else(PoisonError::into_inner);
                    missing.push(Missing {
                        node: target.to_string(),
                        reason: format!("{error:#}"),
                    });
                }
            }
        };
        let at_once = usize::from(self.request.options.parallel).min(targets.len());
        crate::threads::in_parallel(at_once, judge_some);
        let missing = missing.into_inner().unwrap_or_else(PoisonError::into_inner);
        report_of_folder(folder.path(), &missing)
    }

    /// An error is a machine without a verdict; its report, if one came back, is set aside, so that
    /// no other verdict is read from it.
    fn judge_into(&self, target: &Destination, folder: &Folder) -> anyhow::Result<()> {
        if self.interrupts.requested() {
            bail!("interrupted before it was judged");
        }
        let name = target.to_string().replace(['/', '[', ']'], "_");
        let folder = Folder::create(&folder.path().join(name))?;
        let label = target.to_string();
        let outcome = self.judge(target, &folder, Some(&label));
        if outcome.is_err() {
            for name in ["report.json", "report.junit.xml", "facts.json"] {
                let file = folder.file(name);
                if file.exists() {
                    std::fs::rename(&file, file.with_added_extension("not-judged"))?;
                }
            }
        }
        outcome.map(drop)
    }

    fn judge(
        &self,
        target: &Destination,
        folder: &Folder,
        label: Option<&str>,
    ) -> anyhow::Result<ExitStatus> {
        let level = self.request.level.to_string();
        let run = Run {
            binary: &self.binary,
            level: Some(&level),
            profile: self.request.report.profile.as_deref(),
            more: &self.more,
            sudo: self.request.options.sudo,
            reports: folder,
            label,
            interrupts: &self.interrupts,
        };
        let ending = session::run(&run, target, self.request.options.ssh_config.as_deref())?;
        let code = ending.exit_code()?;
        folder.back_up(code, false)?;
        Ok(match code {
            0 => ExitStatus::Passed,
            1 => ExitStatus::Failed,
            3 => ExitStatus::BadInput,
            4 => ExitStatus::Busy,
            _ => ExitStatus::NotJudged,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::{NOT_PASSED_ON, passed_on, read_targets};

    #[test]
    fn what_concerns_the_other_machine_is_passed_on() {
        let words =
            |line: &str| -> Vec<OsString> { line.split_whitespace().map(OsString::from).collect() };
        let line = "gpu-validator run --target ssh://gpu-17 --sudo --no-burn --level=quick --profile p.yaml -v \
             --burn-duration 20s --out=reports --ssh-config c --burn-precision=bf16";
        assert_eq!(
            passed_on(words(line).into_iter()),
            words("--no-burn -v --burn-duration 20s --burn-precision=bf16")
        );
        assert!(passed_on(words("gpu-validator run").into_iter()).is_empty());
    }

    /// An option of this machine that were passed on would be refused there, or worse.
    #[test]
    fn every_option_of_this_machine_is_known_with_its_value() {
        let command =
            <super::super::run::Arguments as clap::Args>::augment_args(clap::Command::new("run"));
        let of_heading = command
            .get_arguments()
            .filter(|it| it.get_help_heading() == Some("On other machines"));
        let mut count = 0;
        for argument in of_heading {
            let name = format!("--{}", argument.get_long().expect("a long name"));
            let takes_value = argument.get_action().takes_values();
            assert!(NOT_PASSED_ON.contains(&(&*name, takes_value)), "{name}");
            count += 1;
        }
        assert_eq!(count, 6);
    }

    #[test]
    fn a_file_of_targets_has_one_a_line_and_errors_name_the_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let read = |text: &str| {
            let file = folder.path().join("hosts");
            std::fs::write(&file, text).expect("written");
            read_targets(&file)
        };
        let targets = read("# fleet\nssh://root@gpu-1:2222\n\n  gpu-2 # spare\n").expect("targets");
        let targets: Vec<String> = targets.iter().map(ToString::to_string).collect();
        assert_eq!(targets, ["root@gpu-1:2222", "gpu-2"]);
        let refused = |text: &str| format!("{:#}", read(text).expect_err(text));
        assert!(refused("# none\n").contains("names no machine"));
        assert!(refused("gpu-1\nssh://gpu-1\n").contains("hosts:2: `ssh://gpu-1` is listed twice"));
        let bad = refused("gpu-1\n-oProxyCommand=x\n");
        assert!(
            bad.contains("hosts:2:") && bad.contains("is not a host name"),
            "{bad}"
        );
        let missing = read_targets(&folder.path().join("gone")).expect_err("no file");
        assert!(missing.to_string().contains("cannot be read"));
    }
}
