//! Writes the reports: whole files or none, again after every stage. A report that cannot be
//! written where it was requested is saved in the folder for temporary files, and the command does
//! not exit with 0.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::fs::OFlags;

use super::report_options::{ReportFormat, ReportOptions};
use super::terminal::{note_lost_report, to_stderr, to_stdout};
use crate::owned_folder::replace_in;
use validator_core::facts::Facts;
use validator_core::findings::Run;
use validator_core::report::{
    ctrf, github_annotations, html, human, json, junit, markdown, metrics, ocptv, visible_json,
};

type Render = fn(&Run) -> anyhow::Result<String>;

/// A report and where it goes.
struct ReportFile {
    /// What it is, for messages: `JUnit report`.
    what: &'static str,
    render: Render,
    path: PathBuf,
    /// The last attempt to write it failed.
    trouble: Option<String>,
}

/// All reports of a run.
pub(crate) struct ReportFiles {
    files: Vec<ReportFile>,
}

/// Whether this names standard output: writing to its target by its path would replace other output
/// there.
pub(super) fn is_standard_output(path: &Path) -> bool {
    ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"]
        .iter()
        .any(|name| path == Path::new(name))
}

impl ReportFiles {
    pub(crate) fn new(options: &ReportOptions, facts: Option<&Path>) -> Self {
        type Asked<'a> = (&'static str, Render, Option<&'a Path>);
        let asked: [Asked<'_>; 6] = [
            ("JUnit report", junit, options.junit.as_deref()),
            ("JSON report", |run| Ok(json(run)), options.json.as_deref()),
            (
                "Markdown report",
                |run| Ok(markdown(run)),
                options.markdown.as_deref(),
            ),
            ("HTML report", |run| Ok(html(run)), options.html.as_deref()),
            (
                "metrics",
                |run| Ok(metrics(run)),
                options.metrics.as_deref(),
            ),
            ("facts", |run| Ok(facts_json(&run.facts)), facts),
        ];
        let more = options.more.iter().map(|it| -> Asked<'_> {
            match it.format {
                ReportFormat::Ctrf => ("CTRF report", |run| Ok(ctrf(run)), Some(&it.path)),
                ReportFormat::Ocptv => ("OCPTV report", |run| Ok(ocptv(run)), Some(&it.path)),
            }
        });
        let files = asked
            .into_iter()
            .chain(more)
            .filter_map(|(what, render, path)| {
                Some(ReportFile {
                    what,
                    render,
                    path: path?.to_owned(),
                    trouble: None,
                })
            })
            .collect();
        Self { files }
    }

    /// Writes every file anew. A failed write is reported once and repeated with the next call. A
    /// pipe or device would get one report after the other, so it waits for [`Self::finish`].
    pub(crate) fn write(&mut self, run: &Run) {
        self.write_where(run, |file| !file.cannot_be_replaced());
    }

    fn write_where(&mut self, run: &Run, is_wanted: impl Fn(&ReportFile) -> bool) {
        let wanted = |it: &&mut ReportFile| !it.is_stdout() && is_wanted(it);
        for file in self.files.iter_mut().filter(wanted) {
            let outcome =
                (file.render)(run).and_then(|text| Ok(write_whole(&file.path, text.as_bytes())?));
            let trouble = outcome.err().map(|error| format!("{error:#}"));
            if let (None, Some(reason)) = (&file.trouble, &trouble) {
                to_stderr(&format!(
                    "warning: the {} cannot be written to {}: {reason}; it is saved elsewhere at the end\n",
                    file.what,
                    file.path.display()
                ));
            }
            file.trouble = trouble;
        }
    }

    /// Writes every file for the last time, and the other output of a finished run.
    pub(crate) fn finish(&mut self, run: &Run, options: &ReportOptions) {
        let mut text = human(run, options.style());
        if options.github() {
            text.push_str(&github_annotations(run));
            append_step_summary(run);
        }
        self.finish_saying(run, &text);
    }

    /// Writes every file for the last time, and prints `text` in place of the report for people.
    pub(crate) fn finish_saying(&mut self, run: &Run, text: &str) {
        self.write_where(run, |_| true);
        // A report on standard output is for a program; what a person reads must not get into it.
        if self.files.iter().any(ReportFile::is_stdout) {
            to_stderr(text);
        } else {
            to_stdout(text);
        }
        for file in &self.files {
            if !file.is_stdout() && file.trouble.is_none() {
                continue;
            }
            match ((file.render)(run), &file.trouble) {
                (Ok(text), Some(reason)) => save_elsewhere(file.what, &file.path, reason, &text),
                (Ok(text), None) => {
                    to_stdout(&text);
                }
                (Err(error), _) => {
                    note_lost_report();
                    to_stderr(&format!("error: the {} is missing: {error:#}\n", file.what));
                }
            }
        }
    }
}

impl ReportFile {
    fn is_stdout(&self) -> bool {
        is_standard_output(&self.path)
    }

    /// A pipe or device: what is written there is read at once.
    fn cannot_be_replaced(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|it| !it.is_file())
    }
}

/// Saves a report that could not be written to `path` in the folder for temporary files; where that
/// has no room either, the report goes to standard output. Either way the command does not exit
/// with 0.
pub(crate) fn save_elsewhere(
    what: &str,
    path: &Path,
    reason: &dyn std::fmt::Display,
    report: &str,
) {
    note_lost_report();
    let path = path.display();
    match save_in(&std::env::temp_dir(), what, report) {
        Ok(saved) => to_stderr(&format!(
            "error: the {what} could not be written to {path}: {reason}; it is saved as {}\n",
            saved.display()
        )),
        Err(error) => {
            to_stderr(&format!(
                "error: the {what} could be written neither to {path} ({reason}) nor to the folder for temporary files \
                 ({error}); it is on standard output\n"
            ));
            to_stdout(&format!(
                "\n----- {what} for {path}, which could not be written: {reason} -----\n{report}"
            ));
        }
    }
}

fn save_in(folder: &Path, what: &str, report: &str) -> io::Result<PathBuf> {
    let prefix = format!("gpu-validator-{}-", what.to_lowercase().replace(' ', "-"));
    // A random name that did not exist: another user can prepare nothing under it. As with any
    // report, less what the umask takes.
    let mut file = tempfile::Builder::new()
        .prefix(&prefix)
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .tempfile_in(folder)?;
    file.write_all(report.as_bytes())?;
    let (_, path) = file.keep().map_err(|it| it.error)?;
    Ok(path)
}

/// `facts.json`, indented, with a line break at its end.
pub(crate) fn facts_json(facts: &Facts) -> String {
    let mut text = serde_json::to_string_pretty(facts).unwrap_or_default();
    text.push('\n');
    visible_json(&text)
}

/// How long a pipe's reader may take to make room.
const PIPE_DEADLINE: Duration = Duration::from_secs(10);
/// As many links in a row as Linux follows.
const LINKS_MAXIMUM: usize = 40;

/// Writes a file so that a reader sees the old content or the new, never a part.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let target = destination(path)?;
    // A link stays a link, and a pipe or device is written to, not replaced.
    if fs::metadata(&target).is_ok_and(|it| !it.is_file()) {
        return write_to_device(&target, content);
    }
    let (folder, name) = folder_and_name(&target)?;
    // As with any new file, less what the umask takes.
    replace_in(folder, name, content, 0o666)
}

fn folder_and_name(target: &Path) -> io::Result<(&Path, &OsStr)> {
    let (Some(folder), Some(name)) = (target.parent(), target.file_name()) else {
        let reason = "not the name of a file";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    };
    let here = Path::new(".");
    Ok((
        if folder.as_os_str().is_empty() {
            here
        } else {
            folder
        },
        name,
    ))
}

/// Where a link of this user or root leads. One of another user would let that user choose the file
/// that is replaced.
fn destination(path: &Path) -> io::Result<PathBuf> {
    let own = rustix::process::geteuid().as_raw();
    let mut target = path.to_owned();
    for _ in 0..LINKS_MAXIMUM {
        // `/dev/fd/3` and its like are links of the kernel's, which only the kernel can follow.
        let link = fs::symlink_metadata(&target)
            .ok()
            .filter(Metadata::is_symlink);
        let Some(link) = link.filter(|_| !target.starts_with("/proc")) else {
            return Ok(target);
        };
        if link.uid() != own && link.uid() != 0 {
            let reason = format!(
                "{} is a symbolic link of user {}, which is not followed",
                target.display(),
                link.uid()
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        let next = fs::read_link(&target)?;
        target = target.parent().map_or(next.clone(), |it| it.join(&next));
    }
    Err(io::Error::from_raw_os_error(
        rustix::io::Errno::LOOP.raw_os_error(),
    ))
}

/// Opens a pipe or device without waiting for a reader.
fn open_device(target: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = fs::OpenOptions::new()
        .write(true)
        .custom_flags(flags.bits().cast_signed())
        .open(target);
    opened.map_err(|error| {
        if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) {
            let reason = "it is a named pipe that no program reads";
            return io::Error::new(io::ErrorKind::NotConnected, reason);
        }
        error
    })
}

fn write_to_device(target: &Path, mut content: &[u8]) -> io::Result<()> {
    let mut file = open_device(target)?;
    let deadline = Instant::now() + PIPE_DEADLINE;
    while !content.is_empty() {
        match file.write(content) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => content = content.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= deadline {
                    let reason = "its reader takes nothing";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The outputs of a command, free of what an earlier one left there. Keeps named pipes open until
/// it is dropped, so that their readers wait for the report.
#[derive(Debug, Default)]
pub(crate) struct ClaimedOutputs {
    #[expect(dead_code, reason = "kept open")]
    pipes: Vec<File>,
}

impl ClaimedOutputs {
    /// The first act of a command: removes the files of an earlier run, which must not be taken for
    /// those of this one however this one ends. What can be neither removed nor emptied is an
    /// error, and so is an output that is one of the `inputs`.
    pub(crate) fn of(
        options: &ReportOptions,
        facts: Option<&Path>,
        inputs: &[Option<&Path>],
    ) -> anyhow::Result<Self> {
        let reports = [
            &options.junit,
            &options.json,
            &options.markdown,
            &options.html,
            &options.metrics,
        ];
        let reports = reports.into_iter().map(Option::as_deref);
        let more = options.more.iter().map(|it| Some(it.path.as_path()));
        let outputs: Vec<&Path> = reports.chain(more).chain([facts]).flatten().collect();
        let mut inputs: Vec<&Path> = inputs.iter().copied().flatten().collect();
        inputs.extend(options.profile.as_deref());
        Self::of_paths(&outputs, &inputs)
    }

    pub(crate) fn of_paths(outputs: &[&Path], inputs: &[&Path]) -> anyhow::Result<Self> {
        refuse_one_place_for_two(outputs)?;
        let mut pipes = Vec::new();
        let files = outputs.iter().filter(|it| !is_standard_output(it));
        for path in files {
            if let Some(input) = inputs.iter().find(|it| is_same_file(it, path)) {
                bail!(
                    "{} is both read and written; name another file for the report",
                    input.display()
                );
            }
            let pipe = discard(path)
                .with_context(|| format!("the report {} cannot be used", path.display()))?;
            pipes.extend(pipe);
        }
        Ok(Self { pipes })
    }
}

/// Two reports in one file would leave one of them, and two on standard output are no document.
fn refuse_one_place_for_two(outputs: &[&Path]) -> anyhow::Result<()> {
    for (index, one) in outputs.iter().enumerate() {
        for other in outputs.iter().skip(index + 1) {
            if is_standard_output(one) && is_standard_output(other) {
                bail!("two reports are requested on standard output; name a file for one of them");
            }
            if is_same_place(one, other) {
                bail!(
                    "two reports are requested in {}; name another file for one of them",
                    other.display()
                );
            }
        }
    }
    Ok(())
}

/// Whether both names are of one regular file, which need not exist yet. A device takes several
/// reports.
fn is_same_place(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        let target = destination(path).ok()?;
        let (folder, name) = folder_and_name(&target).ok()?;
        let found = fs::metadata(&target).ok();
        let is_file = found.is_none_or(|it| it.is_file());
        let folder = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        is_file.then(|| (folder, name.to_owned()))
    };
    let one = place(one);
    one.is_some() && one == place(other)
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
    let one = identity(one);
    one.is_some() && one == identity(other)
}

/// Removes an old report, or empties it where its folder does not allow that. A named pipe is
/// opened instead.
fn discard(path: &Path) -> anyhow::Result<Option<File>> {
    let target = destination(path)?;
    let Ok(found) = fs::symlink_metadata(&target) else {
        return Ok(None);
    };
    if found.file_type().is_fifo() {
        return Ok(Some(open_device(&target)?));
    }
    if !found.is_file() {
        return Ok(None);
    }
    let Err(error) = fs::remove_file(&target) else {
        return Ok(None);
    };
    let emptied = fs::OpenOptions::new()
        .write(true)
        .truncate(true)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(&target);
    match emptied {
        Ok(_) => Ok(None),
        // Removed meanwhile is as good.
        Err(_) if !target.exists() => Ok(None),
        Err(_) => bail!("it is of an earlier run and cannot be removed: {error}"),
    }
}

/// Source of the limit: GitHub Actions documentation, job summaries (1 MiB a step).
const STEP_SUMMARY_LIMIT_BYTES: usize = 1024 * 1024;

fn append_step_summary(run: &Run) {
    let mut summary = markdown(run);
    if summary.len() >= STEP_SUMMARY_LIMIT_BYTES {
        summary = format!(
            "## GPU validation\n\nThe summary is too long for GitHub (exit code {}); see the other reports.\n",
            run.exit_status() as u8
        );
    }
    append_to_step_summary(&summary);
}

/// Appends Markdown to the job's summary, where there is one. The job may have put anything in its
/// place.
pub(super) fn append_to_step_summary(summary: &str) {
    let Some(path) = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|it| !it.is_empty()) else {
        return;
    };
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let outcome = fs::OpenOptions::new()
        .append(true)
        .create(true)
        .custom_flags(flags.bits().cast_signed())
        .open(&path)
        .and_then(|mut file| {
            if file.metadata()?.is_file() {
                return file.write_all(summary.as_bytes());
            }
            let reason = "it is not a regular file";
            Err(io::Error::new(io::ErrorKind::InvalidInput, reason))
        });
    if let Err(error) = outcome {
        to_stderr(&format!(
            "warning: the job summary cannot be appended to {}: {error}\n",
            Path::new(&path).display()
        ));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{ReportFile, ReportFiles, is_standard_output, write_whole};
    use validator_core::facts::Facts;
    use validator_core::findings::Run;
    use validator_core::level::Level;
    use validator_core::profile::Profile;

    fn metrics_to(path: &Path) -> ReportFiles {
        ReportFiles {
            files: vec![ReportFile {
                what: "metrics",
                render: |_| Ok("up 1\n".to_owned()),
                path: path.to_owned(),
                trouble: None,
            }],
        }
    }

    #[test]
    fn a_report_that_cannot_be_made_leaves_no_file_and_its_reason() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut reports = metrics_to(&folder.path().join("metrics"));
        reports.files[0].render = |_| anyhow::bail!("a suite is missing");
        let facts = Facts::default();
        let run = Run::judged(facts, &Profile::default(), "built-in", Level::Quick);
        reports.write(&run);
        assert_eq!(
            reports.files[0].trouble.as_deref(),
            Some("a suite is missing")
        );
        assert!(!reports.files[0].path.exists());
    }

    #[test]
    fn a_pipe_or_device_is_written_once_at_the_end() {
        let run = Run::judged(
            Facts::default(),
            &Profile::default(),
            Run::BUILT_IN_PROFILE,
            Level::Quick,
        );
        // Writing to this device always fails, which shows whether it was tried.
        let mut files = metrics_to(Path::new("/dev/full"));
        files.write(&run);
        assert_eq!(files.files[0].trouble, None);
        files.write_where(&run, |_| true);
        assert!(files.files[0].trouble.is_some());

        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.prom");
        metrics_to(&path).write(&run);
        assert_eq!(std::fs::read(&path).expect("readable"), b"up 1\n");
    }

    #[test]
    fn standard_output_is_known_by_all_its_names() {
        for name in ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
            assert!(is_standard_output(Path::new(name)), "{name}");
        }
        assert!(!is_standard_output(Path::new("/dev/fd/10")));
    }

    #[test]
    fn replaces_a_file_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("report.xml");
        write_whole(&path, b"old").expect("written");
        write_whole(&path, b"new").expect("written");
        assert_eq!(std::fs::read(&path).expect("readable"), b"new");
        assert_eq!(std::fs::read_dir(folder.path()).expect("listed").count(), 1);
    }

    #[test]
    fn follows_a_link_and_keeps_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let target = folder.path().join("target.xml");
        std::fs::write(&target, "old").expect("written");
        let link = folder.path().join("report.xml");
        std::os::unix::fs::symlink(&target, &link).expect("linked");
        write_whole(&link, b"new").expect("written");
        assert_eq!(std::fs::read(&target).expect("readable"), b"new");
        assert!(link.is_symlink());
    }

    #[test]
    fn a_missing_folder_is_an_error_with_its_reason() {
        let error =
            write_whole(Path::new("/nonexistent/report.xml"), b"x").expect_err("no such folder");
        assert!(error.to_string().contains("No such file or directory"));
    }

    #[test]
    fn writes_to_a_device_without_replacing_it() {
        write_whole(Path::new("/dev/null"), b"x").expect("written");
        let full = write_whole(Path::new("/dev/full"), b"x").expect_err("full");
        assert!(full.to_string().contains("No space left on device"));
    }
}
