//! The files of a profile: itself and those that it extends. A run on another machine needs all of
//! them, in the same places relative to each other.

use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, ensure};

/// One file to copy, and its place inside the remote folder.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProfileFile {
    pub(crate) from: PathBuf,
    pub(crate) to: PathBuf,
}

/// More than the validator follows, so that its own error about the depth is the one that is seen.
const MOST_FILES: usize = 8;

/// The profile first, then what it extends. A file that is not there is left to the validator's
/// error.
pub(crate) fn collect(profile: &Path) -> anyhow::Result<Vec<ProfileFile>> {
    let working_folder = std::env::current_dir().context("the working folder is gone")?;
    let mut files = vec![normalize(&working_folder.join(profile))];
    while let Some(next) = extended_by(&files[files.len() - 1])? {
        if !next.is_file() || files.contains(&next) {
            break;
        }
        files.push(next);
        ensure!(
            files.len() <= MOST_FILES,
            "{} extends more than {MOST_FILES} files in a row",
            profile.display()
        );
    }
    let places = places(&files, &working_folder);
    Ok(files
        .into_iter()
        .zip(places)
        .map(|(from, to)| ProfileFile { from, to })
        .collect())
}

/// Reports name the profile's path, so it keeps the one that was given wherever that lies below the
/// working folder.
fn places(files: &[PathBuf], working_folder: &Path) -> Vec<PathBuf> {
    let below: Option<Vec<PathBuf>> = files
        .iter()
        .map(|file| {
            file.strip_prefix(working_folder)
                .ok()
                .map(Path::to_path_buf)
        })
        .collect();
    below.unwrap_or_else(|| {
        let without_root =
            |file: &PathBuf| Path::new("profile").join(file.strip_prefix("/").unwrap_or(file));
        files.iter().map(without_root).collect()
    })
}

fn extended_by(file: &Path) -> anyhow::Result<Option<PathBuf>> {
    let text = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let text = String::from_utf8_lossy(&text);
    Ok(extends(&text).map(|name| normalize(&file.parent().unwrap_or(file).join(name))))
}

/// The value of the top-level `extends` key, without a YAML parser: the validator is the one that
/// reads profiles.
fn extends(text: &str) -> Option<&str> {
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix("extends:"))?
        .trim();
    let value = match value.chars().next()? {
        quote @ ('"' | '\'') => value[1..].split(quote).next()?,
        _ => value.split(" #").next()?.trim(),
    };
    (!value.is_empty()).then_some(value)
}

/// Removes `.` and `..` by the text alone.
fn normalize(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            _ => plain.push(part),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{extends, normalize, places};

    #[test]
    fn the_extended_profile_is_found_as_people_write_it() {
        assert_eq!(
            extends("name: a\nextends: base.yaml  # ours\n"),
            Some("base.yaml")
        );
        assert_eq!(
            extends("extends: \"../base profile.yaml\"\n"),
            Some("../base profile.yaml")
        );
        assert_eq!(extends("extends: 'a.yaml'"), Some("a.yaml"));
        assert_eq!(
            extends("checks:\n  extends: no.yaml\n#extends: no.yaml\nextends:\n"),
            None
        );
    }

    #[test]
    fn files_keep_their_places_to_each_other() {
        let files = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        let inside = files(&["/home/me/manifests/p5.yaml", "/home/me/base.yaml"]);
        assert_eq!(
            places(&inside, Path::new("/home/me")),
            files(&["manifests/p5.yaml", "base.yaml"])
        );
        let outside = files(&["/home/me/p5.yaml", "/etc/gpu/base.yaml"]);
        assert_eq!(
            places(&outside, Path::new("/home/me")),
            files(&["profile/home/me/p5.yaml", "profile/etc/gpu/base.yaml"])
        );
        assert_eq!(
            normalize(Path::new("/a/./b/../c.yaml")),
            Path::new("/a/c.yaml")
        );
    }
}
