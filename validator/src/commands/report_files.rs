//! Writes the reports: whole files or none, again after every stage, and to standard output where a file cannot be.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::report_options::ReportOptions;
use super::terminal::{to_stderr, to_stdout};
use crate::facts::Facts;
use crate::findings::Run;
use crate::report::{github_annotations, html, human, json, junit, markdown, metrics};

/// A report and where it goes.
struct ReportFile {
    /// What it is, for messages: `JUnit report`.
    what: &'static str,
    render: fn(&Run) -> String,
    path: PathBuf,
    /// The last attempt to write it failed.
    trouble: Option<String>,
}

/// All reports of a run.
pub(crate) struct ReportFiles {
    files: Vec<ReportFile>,
}

/// Whether this names standard output: writing to the file behind it by its path would replace what else goes there.
pub(super) fn is_standard_output(path: &Path) -> bool {
    ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"]
        .iter()
        .any(|name| path == Path::new(name))
}

impl ReportFiles {
    pub(crate) fn new(options: &ReportOptions, facts: Option<&Path>) -> Self {
        type Asked<'a> = (&'static str, fn(&Run) -> String, Option<&'a Path>);
        let asked: [Asked<'_>; 6] = [
            ("JUnit report", junit, options.junit.as_deref()),
            ("JSON report", json, options.json.as_deref()),
            ("Markdown report", markdown, options.markdown.as_deref()),
            ("HTML report", html, options.html.as_deref()),
            ("metrics", metrics, options.metrics.as_deref()),
            ("facts", |run| facts_json(&run.facts), facts),
        ];
        let files = asked
            .into_iter()
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

    /// Writes every file anew. What cannot be written is said once and tried again with the next call. A pipe or device
    /// would get one report after the other, so it waits for [`Self::finish`].
    pub(crate) fn write(&mut self, run: &Run) {
        self.write_where(run, |file| !file.cannot_be_replaced());
    }

    fn write_where(&mut self, run: &Run, is_wanted: impl Fn(&ReportFile) -> bool) {
        let wanted = |it: &&mut ReportFile| !it.is_stdout() && is_wanted(it);
        for file in self.files.iter_mut().filter(wanted) {
            let outcome = write_whole(&file.path, (file.render)(run).as_bytes());
            let trouble = outcome.err().map(|error| error.to_string());
            if let (None, Some(reason)) = (&file.trouble, &trouble) {
                to_stderr(&format!(
                    "warning: the {} cannot be written to {}: {reason}; it goes to standard output at the end\n",
                    file.what,
                    file.path.display()
                ));
            }
            file.trouble = trouble;
        }
    }

    /// Writes every file for the last time, and everything else that a finished run says.
    pub(crate) fn finish(&mut self, run: &Run, options: &ReportOptions) {
        let mut text = human(run, options.style());
        if options.github() {
            text.push_str(&github_annotations(run));
            append_step_summary(run);
        }
        self.finish_saying(run, &text);
    }

    /// Writes every file for the last time, and says `text` in place of the report for people.
    pub(crate) fn finish_saying(&mut self, run: &Run, text: &str) {
        self.write_where(run, |_| true);
        // A report on standard output is for a program; what a person reads must not get into it.
        if self.files.iter().any(ReportFile::is_stdout) {
            to_stderr(text);
        } else {
            to_stdout(text);
        }
        for file in &self.files {
            let report = || (file.render)(run);
            if file.is_stdout() {
                to_stdout(&report());
            } else if let Some(reason) = &file.trouble {
                let path = file.path.display();
                to_stdout(&format!(
                    "\n----- {} for {path}, which could not be written: {reason} -----\n{}",
                    file.what,
                    report()
                ));
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

/// `facts.json`, indented, with a line break at its end.
pub(crate) fn facts_json(facts: &Facts) -> String {
    let mut text = serde_json::to_string_pretty(facts).unwrap_or_default();
    text.push('\n');
    text
}

/// Writes a file so that a reader sees the old content or the new, never a part.
pub(crate) fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    // A link stays a link, and a pipe or device is written to, not replaced.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    match fs::metadata(&target) {
        Ok(existing) if !existing.is_file() => return fs::write(&target, content),
        _ => {}
    }
    let (Some(folder), Some(name)) = (target.parent(), target.file_name()) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not the name of a file",
        ));
    };
    // The process id keeps two runs at once apart.
    let mut temporary_name = std::ffi::OsString::from(".");
    temporary_name.push(name);
    temporary_name.push(format!(".{}.tmp", std::process::id()));
    let temporary = folder.join(temporary_name);
    let written = fs::write(&temporary, content).and_then(|()| fs::rename(&temporary, &target));
    if written.is_err() {
        // The reason for the failure is what the caller must hear, not that of the cleaning up.
        let _ = fs::remove_file(&temporary);
    }
    written
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

/// Appends Markdown to the job's summary, where there is one.
pub(super) fn append_to_step_summary(summary: &str) {
    use std::io::Write as _;
    let Some(path) = std::env::var_os("GITHUB_STEP_SUMMARY").filter(|it| !it.is_empty()) else {
        return;
    };
    let outcome = fs::OpenOptions::new()
        .append(true)
        .create(true)
        .open(&path)
        .and_then(|mut file| file.write_all(summary.as_bytes()));
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
    use crate::facts::Facts;
    use crate::findings::Run;
    use crate::level::Level;
    use crate::profile::Profile;

    fn metrics_to(path: &Path) -> ReportFiles {
        ReportFiles {
            files: vec![ReportFile {
                what: "metrics",
                render: |_| "up 1\n".to_owned(),
                path: path.to_owned(),
                trouble: None,
            }],
        }
    }

    #[test]
    fn a_pipe_or_device_is_written_once_at_the_end() {
        let run = Run::judged(
            Facts::default(),
            &Profile::default(),
            Run::BUILT_IN_PROFILE,
            Level::Quick,
        );
        // Writing to this device always fails, which tells whether it was tried.
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
