//! The loader picks one set of GPU libraries, the right one.
//!
//! ## Why
//! A folder in `LD_LIBRARY_PATH` is searched before the libraries that a wheel brings along. Mixed
//! copies of cuBLAS, cuDNN or NCCL end in "undefined symbol", wrong versions or crashes, and a
//! `stubs` folder in a libcuda that has no functions.
//!
//! ## How it is judged
//! The rules of the dynamic loader (RPATH, `LD_LIBRARY_PATH`, RUNPATH, its cache, default folders)
//! are applied to the files on the disk, for programs without libraries of their own and for the
//! GPU packages of each Python environment:
//!
//! - `fail`: libcuda or NVML is a stub;
//! - `warn`: a `stubs` folder is searched, a library comes from `LD_LIBRARY_PATH` although the
//!   environment brings its own, two major versions of one library come into one process, a compat
//!   libcuda hides an older or newer one, a library that a package needs is not found;
//! - `pass` where nothing of this was found. Skipped where no GPU library was found.
//!
//! ## What to do
//! Remove the folder from `LD_LIBRARY_PATH`. Packages that bring their own libraries need none
//! there.
//!
//! ## Source
//! ld.so(8), <https://man7.org/linux/man-pages/man8/ld.so.8.html>

use std::collections::{BTreeMap, BTreeSet};

use crate::check::{Check, Judge};
use crate::environment::installed::{self, name_of};
use crate::facts::{Facts, LibrarySearch, PythonEnvironment, ResolvedLibrary};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "library_resolution",
    stage: Stage::Host,
    level: Level::Standard,
    judge: Judge::Host(judge),
    documentation_url: "https://man7.org/linux/man-pages/man8/ld.so.8.html",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let seen = installed::seen(facts, profile)?;
    let mut tally = Tally::default();
    judge_libraries("programs of this machine", &seen.libraries, &mut tally);
    let loads_stub = tally.worst() == Some(Verdict::Fail);
    for folder in seen.stub_folders.iter().filter(|_| !loads_stub) {
        tally.warn(format!(
            "the loader searches {folder}, whose libraries have no functions"
        ));
    }
    for environment in seen.pythons.iter().filter(|it| !it.libraries.is_empty()) {
        judge_environment(environment, &mut tally);
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::skip("no GPU library was found"));
    Ok(match worst {
        Some(Verdict::Fail | Verdict::Warn) => outcome.remedy(
            "remove the folder from LD_LIBRARY_PATH and /etc/ld.so.conf.d, and install the missing package of the same CUDA major version",
        ),
        _ => outcome,
    })
}

/// Stubs and compat libraries concern every program.
fn judge_libraries(whose: &str, libraries: &[ResolvedLibrary], tally: &mut Tally) {
    let found = libraries
        .iter()
        .filter_map(|it| Some((it, it.resolved.as_deref()?)));
    let mut count = 0;
    for (library, resolved) in found {
        count += 1;
        let name = &library.name;
        if is_stub(resolved) {
            tally.fail(format!("{name} of {whose} is the stub {resolved}"));
        } else if is_compat(resolved) && !library.shadowed.is_empty() {
            tally.warn(format!(
                "{name} of {whose} is that of the compat package, {resolved}, before {}",
                library.shadowed.join(", ")
            ));
        }
    }
    if count > 0 && tally.worst().is_none() {
        tally.pass(format!(
            "{whose}: {count} GPU libraries, each from one place"
        ));
    }
}

fn is_stub(path: &str) -> bool {
    path.contains("/stubs/") && (path.contains("/libcuda.") || path.contains("/libnvidia-ml."))
}

fn is_compat(path: &str) -> bool {
    path.contains("/compat/") && path.contains("/libcuda.")
}

fn judge_environment(environment: &PythonEnvironment, tally: &mut Tally) {
    let name = name_of(environment);
    let mut own = Tally::default();
    let mut majors: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for library in &environment.libraries {
        let Some(resolved) = library.resolved.as_deref() else {
            own.warn(format!(
                "{} of {name} needs {}, which the loader does not find",
                library.required_by, library.name
            ));
            continue;
        };
        let mine = |path: &str| path.starts_with(&format!("{}/", environment.prefix));
        let hidden = library.shadowed.iter().find(|it| mine(it));
        if let Some(hidden) = hidden.filter(|_| !mine(resolved)) {
            own.warn(format!(
                "{} of {name} comes from {resolved} by {}, before its own {hidden}",
                library.name,
                library.found_by.name()
            ));
        }
        if library.found_by != LibrarySearch::NotFound
            && let Some((stem, major)) = library.name.split_once(".so.")
        {
            let major = major.split('.').next().unwrap_or(major);
            majors.entry(stem).or_default().insert(major);
        }
    }
    for (stem, majors) in majors.iter().filter(|(_, it)| it.len() > 1) {
        let majors: Vec<&str> = majors.iter().copied().collect();
        own.warn(format!(
            "packages of {name} load {stem} of the major versions {} into one process",
            majors.join(" and ")
        ));
    }
    if own.worst().is_none() {
        own.pass(format!(
            "{name}: {} GPU libraries, each from one place",
            environment.libraries.len()
        ));
    }
    tally.add(own);
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{
        EnvironmentFacts, Facts, LibrarySearch, PythonEnvironment, ResolvedLibrary,
    };
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn library(name: &str, path: Option<&str>, by: LibrarySearch) -> ResolvedLibrary {
        ResolvedLibrary {
            name: name.to_owned(),
            path: path.map(str::to_owned),
            resolved: path.map(str::to_owned),
            found_by: by,
            required_by: "libtorch_cuda.so".to_owned(),
            ..ResolvedLibrary::default()
        }
    }

    fn judge(host: Vec<ResolvedLibrary>, python: Vec<ResolvedLibrary>) -> Finding {
        let facts = Facts {
            environment: Some(EnvironmentFacts {
                libraries: host,
                pythons: vec![PythonEnvironment {
                    prefix: "/opt/venv".to_owned(),
                    libraries: python,
                    ..PythonEnvironment::default()
                }],
                ..EnvironmentFacts::default()
            }),
            ..healthy_node()
        };
        judge_host_check(&CHECK, &facts, "{}")
    }

    #[test]
    fn one_place_for_each_passes_and_nothing_is_skipped() {
        let own = library(
            "libcudnn.so.9",
            Some("/opt/venv/lib/libcudnn.so.9"),
            LibrarySearch::Rpath,
        );
        assert_eq!(judge(Vec::new(), vec![own]).verdict, Verdict::Pass);
        assert_eq!(judge(Vec::new(), Vec::new()).verdict, Verdict::Skip);
    }

    #[test]
    fn every_mix_is_named() {
        let cuda = |path| library("libcuda.so.1", Some(path), LibrarySearch::LdLibraryPath);
        let finding = judge(
            vec![cuda("/usr/local/cuda/lib64/stubs/libcuda.so")],
            Vec::new(),
        );
        assert_eq!(finding.verdict, Verdict::Fail, "{}", finding.summary);
        assert!(finding.summary.contains("is the stub"));

        let mut compat = cuda("/usr/local/cuda-12.8/compat/libcuda.so.570.86.15");
        compat
            .shadowed
            .push("/usr/lib64/libcuda.so.580.65.06".to_owned());
        assert_eq!(judge(vec![compat], Vec::new()).verdict, Verdict::Warn);

        let mut shadowing = library(
            "libcudnn.so.9",
            Some("/usr/lib64/libcudnn.so.9"),
            LibrarySearch::LdLibraryPath,
        );
        shadowing
            .shadowed
            .push("/opt/venv/lib/libcudnn.so.9".to_owned());
        let finding = judge(Vec::new(), vec![shadowing]);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(
            finding.summary.contains("before its own"),
            "{}",
            finding.summary
        );

        let two = [12, 13].map(|major| {
            library(
                &format!("libcudart.so.{major}"),
                Some("/opt/venv/lib/libcudart.so"),
                LibrarySearch::Rpath,
            )
        });
        let finding = judge(Vec::new(), two.to_vec());
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(finding.summary.contains("12 and 13"), "{}", finding.summary);

        let missing = library("libnccl.so.2", None, LibrarySearch::NotFound);
        let finding = judge(Vec::new(), vec![missing]);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(
            finding.summary.contains("does not find"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn a_searched_stubs_folder_is_named() {
        let mut facts = healthy_node();
        facts.environment = Some(EnvironmentFacts {
            stub_folders: vec!["/usr/local/cuda/lib64/stubs".to_owned()],
            ..EnvironmentFacts::default()
        });
        let finding = judge_host_check(&CHECK, &facts, "{}");
        assert_eq!(finding.verdict, Verdict::Warn);
    }
}
