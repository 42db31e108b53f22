//! Profiles on disk.

use std::path::Path;

use validator_core::profile::{Profile, ProfileError, ProfileFiles, SIZE_LIMIT_BYTES, too_large};

/// Reads the profile at `path` and the profiles that it extends.
pub(crate) fn load(path: &Path) -> Result<Profile, ProfileError> {
    validator_core::load_profile(path, &Disk)
}

struct Disk;

impl ProfileFiles for Disk {
    fn read(&self, path: &Path) -> Result<String, String> {
        read_text(path)
    }

    fn is_same(&self, one: &Path, other: &Path) -> bool {
        matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
    }
}

fn read_text(path: &Path) -> Result<String, String> {
    use std::io::Read as _;
    use std::os::unix::fs::FileTypeExt as _;
    let name = path.display().to_string();
    let cannot_read = |reason: &str| format!("cannot read profile {name}: {reason}");
    // Opening a named pipe waits for its writer, which may never come. The shell's `<(…)` has one.
    let is_pipe = std::fs::metadata(path).is_ok_and(|it| it.file_type().is_fifo());
    if is_pipe && !path.starts_with("/dev/fd") && path != Path::new("/dev/stdin") {
        return Err(cannot_read("it is a named pipe"));
    }
    let file = std::fs::File::open(path).map_err(|error| cannot_read(&error.to_string()))?;
    if file.metadata().is_ok_and(|it| it.is_dir()) {
        return Err(cannot_read("it is a directory"));
    }
    let mut bytes = Vec::new();
    // One byte more than the limit, so that a file without an end (a pipe, /dev/zero) ends here.
    file.take(SIZE_LIMIT_BYTES as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| cannot_read(&error.to_string()))?;
    if bytes.len() > SIZE_LIMIT_BYTES {
        return Err(too_large(&name));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = error.as_bytes().get(..error.utf8_error().valid_up_to());
        let line = String::from_utf8_lossy(valid.unwrap_or_default())
            .matches('\n')
            .count()
            + 1;
        format!("{name}:{line}: the profile is not UTF-8 text")
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::{Profile, load};

    fn write(
        folder: &tempfile::TempDir,
        name: &str,
        bytes: impl AsRef<[u8]>,
    ) -> std::path::PathBuf {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("the temporary folder is writable");
        path
    }

    #[test]
    fn files_that_are_no_text_are_refused() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let missing = load(&folder.path().join("none.yaml"))
            .expect_err("missing")
            .0;
        assert!(
            missing.contains("none.yaml") && missing.contains("No such file"),
            "{missing}"
        );
        assert!(
            load(folder.path())
                .expect_err("a directory")
                .0
                .contains("directory")
        );
        let binary = write(&folder, "binary.yaml", b"gpus:\n  count: 8\n# \xff\xfe\n");
        assert!(
            load(&binary)
                .expect_err("binary")
                .0
                .contains("binary.yaml:3: the profile is not UTF-8")
        );
        let pipe = folder.path().join("pipe.yaml");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .expect("a named pipe");
        let waiting = load(&pipe).expect_err("a pipe without a writer").0;
        assert!(waiting.contains("named pipe"), "{waiting}");
        let endless = load(Path::new("/dev/zero")).expect_err("endless").0;
        assert!(endless.contains("larger than 256 KiB"), "{endless}");
        assert_eq!(
            load(&write(&folder, "empty.yaml", "")),
            Ok(Profile::default())
        );
    }

    #[test]
    fn no_bytes_panic() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        runner
            .run(&prop::collection::vec(any::<u8>(), 0..200), |bytes| {
                let _ = load(&write(&folder, "random.yaml", &bytes));
                Ok(())
            })
            .expect("never panics");
    }
}
