//! A run on another machine, through the system's OpenSSH: its agent, configuration and known hosts
//! decide, and host keys are always checked.
//!
//! One connection is shared by all steps. A *keeper* on the other side owns the temporary folder:
//! it removes the folder when we are done, when we are killed, and when the connection is lost.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::command::{Ending, Run, Streams};
use crate::destination::Destination;
use crate::interrupts::{Interrupts, Request};
use crate::profile_files;
use crate::reports::{self, REPORTS};

const KEEPER: &str = include_str!("keeper.sh");
const RUN: &str = include_str!("run.sh");
const FETCH: &str = include_str!("fetch.sh");

/// Creates parent folders and writes stdin to a file that only its owner may read and execute.
const UPLOAD: &str =
    r#"umask 077; mkdir -p -- "$(dirname -- "$1")" && cat >"$1" && chmod 700 "$1""#;

/// Waits for the folder to go, after the connection was lost.
const IS_GONE: &str =
    r#"n=0; while [ -e "$1" ] && [ $n -lt 150 ]; do sleep 0.1; n=$((n + 1)); done; [ ! -e "$1" ]"#;

/// ssh's own exit code for any trouble of the connection.
const SSH_TROUBLE: i32 = 255;

/// Followed by the process id and the time.
const CONTROL_FOLDER: &str = "/tmp/gpu-validator-ssh-";

/// How often the keeper hears that we are alive; it waits for 60 s.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// Judges the machine. The folder there is removed whatever happens.
pub fn run(
    run: &Run<'_>,
    destination: &Destination,
    config: Option<&Path>,
) -> anyhow::Result<Ending> {
    let ssh = Ssh::connect(destination, config, run.interrupts)?;
    let keeper = Keeper::start(&ssh, run)?;
    let ending = judge(&ssh, &keeper, run);
    let folder = keeper.folder.clone();
    if let Err(error) = keeper.finish(run.interrupts) {
        say!("warning: {error:#}");
        say!("{}", whether_gone(&ssh, &folder));
    }
    ending
}

fn judge(ssh: &Ssh, keeper: &Keeper, run: &Run<'_>) -> anyhow::Result<Ending> {
    let size = std::fs::metadata(run.binary)?.len();
    say!(
        "copying gpu-validator ({}.{} MB) to {}:{}",
        size / 1_000_000,
        size % 1_000_000 / 100_000,
        ssh.destination,
        keeper.folder
    );
    let folder = PathBuf::from(&keeper.folder);
    upload(
        ssh,
        run.interrupts,
        run.binary,
        &folder.join("gpu-validator"),
    )?;
    let profile = run
        .profile
        .map(profile_files::collect)
        .transpose()?
        .unwrap_or_default();
    for file in &profile {
        upload(ssh, run.interrupts, &file.from, &folder.join(&file.to))?;
    }
    ensure!(
        !run.interrupts.requested(),
        "interrupted before the validator was started on {}",
        ssh.destination
    );
    let ending = run_validator(ssh, keeper, run, profile.first().map(|file| &*file.to))?;
    fetch(ssh, keeper, run)
        .with_context(|| format!("the reports could not be fetched from {}", ssh.destination))?;
    Ok(ending)
}

fn run_validator(
    ssh: &Ssh,
    keeper: &Keeper,
    run: &Run<'_>,
    profile: Option<&Path>,
) -> anyhow::Result<Ending> {
    let mut arguments: Vec<OsString> = vec![keeper.folder.clone().into(), sudo(run).into()];
    arguments.extend(run.arguments(Path::new("reports"), profile));
    let mut child = ssh
        .command(RUN, &arguments)?
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let (id, voice) = (Pid::from_child(&child), keeper.voice.clone());
    let streams = Streams::follow(&mut child, run).inspect_err(|_| end(id))?;
    let status = run.interrupts.while_waiting(
        move |request| match request {
            Request::Stop => voice.say(b's'),
            Request::Kill => end(id),
        },
        || child.wait(),
    )?;
    streams.finish();
    let ending = Ending::of(status);
    match ending {
        Ending::Code(SSH_TROUBLE) => bail!(
            "the connection to {} was lost while the validator ran; what it printed until then is in {} and {}",
            ssh.destination,
            run.reports.file(reports::STDOUT).display(),
            run.reports.file(reports::STDERR).display()
        ),
        Ending::Signal(_) => bail!("gave up waiting for the validator on {}", ssh.destination),
        Ending::Code(_) => Ok(ending),
    }
}

fn upload(ssh: &Ssh, interrupts: &Interrupts, from: &Path, to: &Path) -> anyhow::Result<()> {
    let file = File::open(from).with_context(|| format!("{} cannot be read", from.display()))?;
    let child = ssh
        .command(UPLOAD, &[to.into()])?
        .stdin(file)
        .stderr(Stdio::piped())
        .spawn()?;
    let output = wait(child, interrupts)?;
    ensure!(
        output.status.success(),
        "{} could not be copied to {}: {}",
        from.display(),
        ssh.destination,
        complaint(&output)
    );
    Ok(())
}

fn fetch(ssh: &Ssh, keeper: &Keeper, run: &Run<'_>) -> anyhow::Result<()> {
    let mut arguments: Vec<OsString> = vec![keeper.folder.clone().into(), sudo(run).into()];
    arguments.extend(REPORTS.iter().map(|(_, name)| name.into()));
    let child = ssh
        .command(FETCH, &arguments)?
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let id = Pid::from_child(&child);
    // A first Ctrl-C came to get the reports early, so only a second one stops us from fetching
    // them.
    let output = run.interrupts.while_waiting(
        move |request| {
            if request == Request::Kill {
                end(id);
            }
        },
        || child.wait_with_output(),
    )?;
    ensure!(output.status.success(), "{}", complaint(&output));
    for (name, bytes) in unpack(&output.stdout)? {
        let path = run.reports.file(name);
        std::fs::write(&path, bytes)
            .with_context(|| format!("{} could not be written", path.display()))?;
    }
    Ok(())
}

/// Splits what the fetch script printed. Only the requested names are taken.
fn unpack(mut stream: &[u8]) -> anyhow::Result<Vec<(&'static str, Vec<u8>)>> {
    let mut files = Vec::new();
    while !stream.is_empty() {
        let mut header = String::new();
        stream.read_line(&mut header)?;
        let (name, size) = header
            .trim_end()
            .split_once(' ')
            .with_context(|| format!("`{header}` is not a report's name and size"))?;
        let asked = REPORTS
            .iter()
            .map(|(_, asked)| *asked)
            .find(|asked| *asked == name);
        let name = asked.with_context(|| format!("`{name}` was not requested"))?;
        let size: usize = size
            .parse()
            .with_context(|| format!("`{size}` is not the size of {name}"))?;
        ensure!(stream.len() >= size, "{name} was cut short");
        let (bytes, rest) = stream.split_at(size);
        files.push((name, bytes.to_vec()));
        stream = rest;
    }
    Ok(files)
}

/// What becomes of the folder when it could not be removed in order.
fn whether_gone(ssh: &Ssh, folder: &str) -> String {
    let gone = ssh
        .fresh_command(IS_GONE, &[folder.into()])
        .and_then(|mut command| Ok(command.output()?));
    match gone {
        Ok(output) if output.status.success() => {
            format!("the folder {folder} on {} is gone", ssh.destination)
        }
        _ => format!(
            "whether the folder {folder} on {} is gone could not be seen; it removes itself within a minute of silence, else remove it by hand",
            ssh.destination
        ),
    }
}

fn sudo(run: &Run<'_>) -> &'static str {
    if run.sudo { "sudo -n" } else { "" }
}

/// What a failed command printed on stderr, in one line.
fn complaint(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    if lines.is_empty() {
        output.status.to_string()
    } else {
        lines.join("; ")
    }
}

/// Ends one of our ssh processes; it may have ended in this very moment.
fn end(process: Pid) {
    let _ = kill_process(process, Signal::TERM);
}

/// Waits for a step before the run; any signal ends it.
fn wait(child: Child, interrupts: &Interrupts) -> std::io::Result<Output> {
    let id = Pid::from_child(&child);
    interrupts.while_waiting(move |_| end(id), || child.wait_with_output())
}

/// The shared connection.
#[derive(Debug)]
struct Ssh {
    destination: Destination,
    config: Option<PathBuf>,
    /// A folder of ours alone that holds the socket of the shared connection.
    control_folder: PathBuf,
}

impl Ssh {
    /// Opens the connection; ssh may ask for a passphrase or about an unknown host on the terminal.
    fn connect(
        destination: &Destination,
        config: Option<&Path>,
        interrupts: &Interrupts,
    ) -> anyhow::Result<Ssh> {
        let ssh = Ssh {
            destination: destination.clone(),
            config: config.map(std::path::absolute).transpose()?,
            control_folder: make_control_folder()?,
        };
        let mut command = ssh.client();
        // The connection goes to the background once it stands, and ends a minute after its last
        // user.
        command.args(["-o", "ControlMaster=yes", "-o", "ControlPersist=60"]);
        command.args([
            "-o",
            "ServerAliveInterval=15",
            "-o",
            "ServerAliveCountMax=3",
        ]);
        command
            .arg("--")
            .arg(&ssh.destination.host)
            .arg("uname -sm");
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("ssh could not be started; install it (Debian and Ubuntu: apt-get install openssh-client)")?;
        let output = wait(child, interrupts)?;
        let system = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success(),
            "no connection to {destination}, ssh reports the reason above; try it by hand, which also lets you check and accept an unknown host key: {}",
            ssh.by_hand()
        );
        ensure!(
            system.trim() == "Linux x86_64",
            "{destination} is `{}`; the binary runs on Linux x86_64 only",
            system.trim()
        );
        Ok(ssh)
    }

    /// The command that a person would type.
    fn by_hand(&self) -> String {
        let Destination { user, host, port } = &self.destination;
        let config = self
            .config
            .as_ref()
            .map(|file| format!("-F {} ", file.display()))
            .unwrap_or_default();
        let port = port.map(|port| format!("-p {port} ")).unwrap_or_default();
        let user = user
            .as_ref()
            .map(|user| format!("-l {user} "))
            .unwrap_or_default();
        format!("ssh {config}{port}{user}{host}")
    }

    /// ssh with the options of every call. Those of the user's configuration that would get in the
    /// way of a plain command are switched off; nothing about keys or hosts is.
    fn client(&self) -> Command {
        let mut command = Command::new("ssh");
        if let Some(config) = &self.config {
            command.arg("-F").arg(config);
        }
        if let Some(user) = &self.destination.user {
            command.arg("-l").arg(user);
        }
        if let Some(port) = self.destination.port {
            command.arg("-p").arg(port.to_string());
        }
        command.arg("-o").arg(format!(
            "ControlPath={}",
            self.control_folder.join("socket").display()
        ));
        command.args([
            "-T",
            "-o",
            "RemoteCommand=none",
            "-o",
            "ClearAllForwardings=yes",
            "-o",
            "PermitLocalCommand=no",
        ]);
        command
    }

    /// A script on the other machine, over the shared connection, out of reach of the terminal's
    /// Ctrl-C.
    fn command(&self, script: &str, arguments: &[OsString]) -> anyhow::Result<Command> {
        let mut command = self.client();
        command.args(["-o", "ControlMaster=no", "-o", "BatchMode=yes"]);
        self.finish_command(command, script, arguments)
    }

    /// The same over a connection of its own, for when the shared one is lost.
    fn fresh_command(&self, script: &str, arguments: &[OsString]) -> anyhow::Result<Command> {
        let mut command = self.client();
        // ssh takes the first value of an option, and `-S` before it.
        command.args([
            "-S",
            "none",
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=10",
        ]);
        self.finish_command(command, script, arguments)
    }

    fn finish_command(
        &self,
        mut command: Command,
        script: &str,
        arguments: &[OsString],
    ) -> anyhow::Result<Command> {
        command
            .arg("--")
            .arg(&self.destination.host)
            .arg(remote_line(script, arguments)?);
        command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        Ok(command)
    }
}

impl Drop for Ssh {
    fn drop(&mut self) {
        // The connection may be lost already.
        let _ = self
            .client()
            .args(["-O", "exit", "--"])
            .arg(&self.destination.host)
            .stderr(Stdio::null())
            .status();
        let _ = std::fs::remove_dir_all(&self.control_folder);
    }
}

/// A socket's path is limited to about a hundred characters, so it lives in /tmp rather than below
/// the checkout.
fn make_control_folder() -> anyhow::Result<PathBuf> {
    remove_abandoned_control_folders();
    let time = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_nanos();
    let folder = PathBuf::from(format!("{CONTROL_FOLDER}{}-{time}", std::process::id()));
    // Fails where it exists: another user's folder must not hold our socket.
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&folder)
        .with_context(|| format!("{} cannot be made", folder.display()))?;
    Ok(folder)
}

/// Those of runs that were killed. What belongs to another user stays: /tmp lets no other user
/// remove it.
fn remove_abandoned_control_folders() {
    let Ok(entries) = std::fs::read_dir("/tmp") else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        let process = path
            .to_str()
            .and_then(|path| path.strip_prefix(CONTROL_FOLDER)?.split('-').next());
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

/// One line for any login shell of the other machine: `sh` runs the script.
fn remote_line(script: &str, arguments: &[OsString]) -> anyhow::Result<String> {
    ensure!(
        !script.contains('\''),
        "a remote script may not hold a single quote"
    );
    let mut words = vec![format!("exec sh -c '{script}' sh")];
    for argument in arguments {
        let text = argument
            .to_str()
            .with_context(|| format!("{} is not UTF-8", argument.display()))?;
        ensure!(
            !text.contains(['\n', '\0']),
            "`{}` holds a line break",
            text.escape_debug()
        );
        words.push(format!("'{}'", text.replace('\'', r"'\''")));
    }
    Ok(words.join(" "))
}

/// The way to talk to the keeper.
#[derive(Debug, Clone)]
struct Voice(Arc<Mutex<Option<ChildStdin>>>);

impl Voice {
    fn say(&self, byte: u8) {
        if let Some(stdin) = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_mut()
        {
            // A keeper that is gone has cleaned up already.
            let _ = stdin.write_all(&[byte]).and_then(|()| stdin.flush());
        }
    }

    fn is_open(&self) -> bool {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    fn close(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// The owner of the folder on the other machine.
#[derive(Debug)]
struct Keeper {
    child: Child,
    voice: Voice,
    folder: String,
}

impl Keeper {
    fn start(ssh: &Ssh, run: &Run<'_>) -> anyhow::Result<Keeper> {
        let mut child = ssh
            .command(KEEPER, &[sudo(run).into()])?
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("stdout is not a pipe")?;
        let voice = Voice(Arc::new(Mutex::new(child.stdin.take())));
        let id = Pid::from_child(&child);
        let mut folder = String::new();
        run.interrupts.while_waiting(
            move |_| end(id),
            || BufReader::new(stdout).read_line(&mut folder),
        )?;
        let folder = folder.trim_end().to_owned();
        if !(folder.starts_with('/') && folder.contains("/gpu-validator.")) {
            voice.close();
            let output = child.wait_with_output()?;
            bail!(
                "no temporary folder on {}: {}",
                ssh.destination,
                complaint(&output)
            );
        }
        let heartbeat = voice.clone();
        let beat = move || {
            while heartbeat.is_open() {
                heartbeat.say(b'.');
                std::thread::sleep(HEARTBEAT);
            }
        };
        if let Err(error) = std::thread::Builder::new().spawn(beat) {
            voice.close();
            bail!("no thread could be started for the connection: {error}");
        }
        Ok(Keeper {
            child,
            voice,
            folder,
        })
    }

    /// Has the folder removed, and waits until it is.
    fn finish(mut self, interrupts: &Interrupts) -> anyhow::Result<()> {
        self.voice.close();
        let id = Pid::from_child(&self.child);
        let mut stderr = self.child.stderr.take().context("stderr is not a pipe")?;
        let mut said = String::new();
        let status = interrupts.while_waiting(
            move |request| {
                if request == Request::Kill {
                    end(id);
                }
            },
            || {
                stderr.read_to_string(&mut said)?;
                self.child.wait()
            },
        )?;
        ensure!(
            status.success(),
            "the folder {} was not removed in order ({status}) {}",
            self.folder,
            said.trim()
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{FETCH, IS_GONE, KEEPER, RUN, UPLOAD, remote_line, unpack};

    #[test]
    fn arguments_survive_the_remote_shell() {
        let arguments = [
            "plain".into(),
            "two words; $(reboot)".into(),
            "it's".into(),
            "".into(),
        ];
        let line = remote_line(r#"printf "<%s>" "$@""#, &arguments).expect("a line");
        let output = std::process::Command::new("sh")
            .args(["-c", &line])
            .output()
            .expect("sh runs");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            "<plain><two words; $(reboot)><it's><>"
        );
        assert!(remote_line("true", &["a\nb".into()]).is_err());
    }

    #[test]
    fn every_script_is_one_that_sh_accepts_between_single_quotes() {
        for script in [KEEPER, RUN, FETCH, UPLOAD, IS_GONE] {
            assert!(remote_line(script, &[]).is_ok(), "{script}");
            let checked = std::process::Command::new("sh")
                .args(["-n", "-c", script])
                .status()
                .expect("sh runs");
            assert!(checked.success(), "{script}");
        }
    }

    #[test]
    fn fetched_reports_are_split_by_their_size() {
        let files =
            unpack(b"report.json 3\n{\n}report.md 0\nfacts.json 2\nok").expect("three files");
        assert_eq!(
            files,
            [
                ("report.json", b"{\n}".to_vec()),
                ("report.md", Vec::new()),
                ("facts.json", b"ok".to_vec())
            ]
        );
        assert!(
            unpack(b"../evil 1\nx")
                .expect_err("refused")
                .to_string()
                .contains("was not requested")
        );
        assert!(
            unpack(b"report.md 9\nx")
                .expect_err("refused")
                .to_string()
                .contains("cut short")
        );
        assert!(
            unpack(b"Welcome!\n")
                .expect_err("refused")
                .to_string()
                .contains("not a report's name")
        );
    }
}
