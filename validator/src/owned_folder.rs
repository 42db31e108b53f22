//! Folders for state, locks and run files: opened once, checked by descriptor, and read and written
//! below that descriptor.
//!
//! Root acts on these files, so that a folder which another user can write to is refused, and a
//! link, pipe or device in the place of a file is never followed, waited for or read without end.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, fstat, openat, statat, unlinkat};

/// No state, run file or quarantine mark is larger.
const LARGEST_FILE_BYTES: u64 = 1 << 20;
/// Files in such a folder: two for each runner, one for each burn, one lock for each GPU.
const ENTRIES_MAXIMUM: usize = 10_000;
/// Write permission of group and others.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// An open folder that belongs to this user or to root and that no other user can write to.
#[derive(Debug)]
pub(crate) struct OwnedFolder {
    folder: OwnedFd,
    path: PathBuf,
}

impl OwnedFolder {
    /// Opens the folder; `None` where there is none.
    pub(crate) fn open(path: &Path) -> io::Result<Option<Self>> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = match openat(CWD, path, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(rustix::io::Errno::NOENT) => return Ok(None),
            Err(rustix::io::Errno::LOOP) => {
                return Err(refused("it is a symbolic link".to_owned()));
            }
            Err(rustix::io::Errno::NOTDIR) if path.is_symlink() => {
                return Err(refused("it is a symbolic link".to_owned()));
            }
            Err(error) => return Err(error.into()),
        };
        let found = fstat(&folder)?;
        check_owner(found.st_uid)?;
        if found.st_mode & WRITABLE_BY_OTHERS != 0 {
            return Err(refused(format!(
                "other users can write to it (mode {:04o}); chmod go-w removes that right",
                found.st_mode & 0o7777
            )));
        }
        let path = path.to_owned();
        Ok(Some(Self { folder, path }))
    }

    /// Opens the folder and creates it first where it is missing, for this user alone.
    pub(crate) fn create(path: &Path, mode: u32) -> io::Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(path)?;
        Self::open(path)?.ok_or_else(|| ErrorKind::NotFound.into())
    }

    pub(crate) fn path_of(&self, name: impl AsRef<OsStr>) -> PathBuf {
        self.path.join(name.as_ref())
    }

    /// Whether there is anything of this name, a link without a target included.
    pub(crate) fn contains(&self, name: &OsStr) -> io::Result<bool> {
        match statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
        use std::os::unix::ffi::OsStrExt as _;
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.folder)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name.to_owned());
            }
            if names.len() > ENTRIES_MAXIMUM {
                return Err(refused(format!(
                    "it holds more than {ENTRIES_MAXIMUM} files"
                )));
            }
        }
        names.sort();
        Ok(names)
    }

    /// The content of a regular file of this user or root.
    pub(crate) fn read(&self, name: &OsStr) -> io::Result<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = match openat(&self.folder, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(rustix::io::Errno::LOOP) => {
                return Err(refused("it is a symbolic link".to_owned()));
            }
            Err(error) => return Err(error.into()),
        };
        let found = fstat(&file)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(refused("it is not a regular file".to_owned()));
        }
        check_owner(found.st_uid)?;
        let mut bytes = Vec::new();
        File::from(file)
            .take(LARGEST_FILE_BYTES + 1)
            .read_to_end(&mut bytes)?;
        if bytes.len() as u64 > LARGEST_FILE_BYTES {
            return Err(refused(format!(
                "it is larger than {} KiB",
                LARGEST_FILE_BYTES >> 10
            )));
        }
        Ok(bytes)
    }

    /// When the file was written last.
    pub(crate) fn modified(&self, name: &OsStr) -> Option<jiff::Timestamp> {
        let found = statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        jiff::Timestamp::from_second(found.st_mtime).ok()
    }

    /// Replaces the file as a whole.
    pub(crate) fn write(&self, name: &OsStr, content: &[u8]) -> io::Result<()> {
        replace_in(&self.path_by_descriptor(), name, content, 0o644)
    }

    /// A file to lock, which is created where it is missing.
    pub(crate) fn open_lock(&self, name: &OsStr) -> io::Result<File> {
        let flags =
            OFlags::CREATE | OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.folder, name, flags, Mode::RUSR | Mode::WUSR)?;
        let found = fstat(&file)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(refused("it is not a regular file".to_owned()));
        }
        Ok(File::from(file))
    }

    /// A new file of this user, in the place of whatever has this name.
    pub(crate) fn create_file(&self, name: &OsStr) -> io::Result<File> {
        self.remove(name)?;
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.folder, name, flags, Mode::RUSR | Mode::WUSR)?;
        Ok(File::from(file))
    }

    /// Removes a file; one that is missing is removed already.
    pub(crate) fn remove(&self, name: &OsStr) -> io::Result<()> {
        match unlinkat(&self.folder, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The opened folder for calls that take a path: whatever is moved to its place is not it.
    fn path_by_descriptor(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.folder.as_raw_fd()))
    }
}

/// Writes a file under a random name that did not exist, and renames it: a reader sees the old
/// content or the new.
pub(crate) fn replace_in(folder: &Path, name: &OsStr, content: &[u8], mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".");
    let mut temporary = tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".tmp")
        // As with any new file, less what the umask takes.
        .permissions(std::fs::Permissions::from_mode(mode))
        .tempfile_in(folder)
        .map_err(|error| without_path(&error))?;
    temporary.write_all(content)?;
    temporary
        .persist(folder.join(name))
        .map_err(|error| error.error)?;
    Ok(())
}

/// An error without the path that `tempfile` adds: the random name is of no use to a reader.
fn without_path(error: &io::Error) -> io::Error {
    let text = error.to_string();
    let reason = text.rsplit_once(" at path ").map_or(&*text, |(it, _)| it);
    io::Error::new(error.kind(), reason)
}

fn check_owner(owner: u32) -> io::Result<()> {
    let own = rustix::process::geteuid().as_raw();
    if owner == own || owner == 0 {
        return Ok(());
    }
    Err(refused(format!(
        "it belongs to user {owner}, and neither to this user ({own}) nor to root"
    )))
}

fn refused(reason: String) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, reason)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn folder() -> (tempfile::TempDir, OwnedFolder) {
        let temporary = tempfile::tempdir().expect("a folder");
        let folder = OwnedFolder::create(&temporary.path().join("state"), 0o700).expect("made");
        (temporary, folder)
    }

    fn reason<T: std::fmt::Debug>(result: io::Result<T>) -> String {
        result.expect_err("refused").to_string()
    }

    #[test]
    fn a_folder_that_others_can_write_to_or_reach_by_a_link_is_refused() {
        let (temporary, _folder) = folder();
        let path = temporary.path().join("state");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o1777)).expect("chmod");
        let text = reason(OwnedFolder::open(&path));
        assert!(
            text.contains("other users can write to it (mode 1777)"),
            "{text}"
        );
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
        let link = temporary.path().join("link");
        symlink(&path, &link).expect("linked");
        assert_eq!(reason(OwnedFolder::open(&link)), "it is a symbolic link");
        assert!(
            OwnedFolder::open(&temporary.path().join("none"))
                .expect("told")
                .is_none()
        );
    }

    #[test]
    fn only_regular_files_of_a_sensible_size_are_read() {
        let (temporary, folder) = folder();
        let path = temporary.path().join("state");
        folder.write("a".as_ref(), b"text").expect("written");
        assert_eq!(folder.read("a".as_ref()).expect("read"), b"text");
        rustix::fs::mknodat(
            CWD,
            path.join("pipe"),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .expect("a pipe");
        assert_eq!(
            reason(folder.read("pipe".as_ref())),
            "it is not a regular file"
        );
        symlink("/dev/zero", path.join("zero")).expect("linked");
        assert_eq!(
            reason(folder.read("zero".as_ref())),
            "it is a symbolic link"
        );
        assert!(folder.contains("zero".as_ref()).expect("told"));
        let large = File::create(path.join("large")).expect("made");
        large.set_len(LARGEST_FILE_BYTES + 1).expect("grown");
        assert_eq!(
            reason(folder.read("large".as_ref())),
            "it is larger than 1024 KiB"
        );
    }

    #[test]
    fn a_link_in_the_place_of_a_file_is_replaced_and_its_target_is_kept() {
        let (temporary, folder) = folder();
        let target = temporary.path().join("precious");
        std::fs::write(&target, "precious").expect("written");
        let path = temporary.path().join("state");
        for name in ["state.json", "log"] {
            symlink(&target, path.join(name)).expect("linked");
        }
        folder.write("state.json".as_ref(), b"{}").expect("written");
        let mut log = folder.create_file("log".as_ref()).expect("created");
        log.write_all(b"log").expect("written");
        assert_eq!(std::fs::read(&target).expect("read"), b"precious");
        assert_eq!(folder.read("state.json".as_ref()).expect("read"), b"{}");
        symlink(&target, path.join("lock")).expect("linked");
        assert!(folder.open_lock("lock".as_ref()).is_err());
        let names = folder.names().expect("listed");
        assert_eq!(names, ["lock", "log", "state.json"]);
    }
}
