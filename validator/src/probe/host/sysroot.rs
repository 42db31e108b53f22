//! Files of the machine, or of a tree that stands for one.

use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// No file that is read here is larger; of one that is, the start is enough to see that it is none
/// of ours.
const LARGEST_FILE_BYTES: u64 = 8 << 20;
/// As many links in a row as Linux follows.
const LINKS_MAXIMUM: usize = 40;

/// The machine's root folder, or the one that stands for it. Links are followed inside of it only.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sysroot {
    folder: Option<PathBuf>,
}

impl Sysroot {
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// This is the machine itself, so that programs and the network speak of it, too.
    pub(crate) fn is_this_machine(&self) -> bool {
        self.folder.is_none()
    }

    /// Where `path` of the machine lies, links resolved inside the sysroot.
    pub(crate) fn real_path(&self, path: &str) -> PathBuf {
        let resolved = self.resolve(path);
        self.outside(resolved.as_deref().unwrap_or(path))
    }

    /// Where `path` of the machine lies, links left as they are.
    pub(crate) fn unresolved_path(&self, path: &str) -> PathBuf {
        self.outside(path)
    }

    fn outside(&self, path: &str) -> PathBuf {
        self.folder.as_ref().map_or_else(
            || PathBuf::from(path),
            |folder| folder.join(path.trim_start_matches('/')),
        )
    }

    /// The path within the machine of a path that lies below this sysroot; others are as they are.
    pub(crate) fn inside(&self, path: &str) -> String {
        self.folder
            .as_deref()
            .and_then(|folder| Path::new(path).strip_prefix(folder).ok())
            .map_or_else(
                || path.to_owned(),
                |within| format!("/{}", within.display()),
            )
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.real_path(path).exists()
    }

    pub(crate) fn is_folder(&self, path: &str) -> bool {
        self.real_path(path).is_dir()
    }

    /// The file's text; bytes that are none are replaced.
    pub(crate) fn text(&self, path: &str) -> Result<String> {
        let bytes = self.bytes(path)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The bytes of a regular file. A pipe or a device in its place may block for ever, and holds
    /// nothing of ours.
    pub(crate) fn bytes(&self, path: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = self.file(path)?;
        file.take(LARGEST_FILE_BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// A regular file that may be of any size.
    pub(crate) fn file(&self, path: &str) -> Result<std::fs::File> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(self.real_path(path))?;
        if !file.metadata()?.is_file() {
            return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(file)
    }

    /// The text without the white space around it; `None` where there is no such file or it cannot
    /// be read.
    pub(crate) fn line(&self, path: &str) -> Option<String> {
        self.text(path).ok().map(|text| text.trim().to_owned())
    }

    /// The names in a folder, sorted, so that the order is the same on every file system.
    pub(crate) fn names(&self, folder: &str) -> Result<Vec<String>> {
        let mut names: Vec<String> = std::fs::read_dir(self.real_path(folder))?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        Ok(names)
    }

    /// What a link points to, as it is written.
    pub(crate) fn link_target(&self, path: &str) -> Option<String> {
        let target = std::fs::read_link(self.outside(path)).ok()?;
        target.to_str().map(str::to_owned)
    }

    /// `path` with all links resolved; `None` when it does not exist, or links lead in a circle.
    pub(crate) fn resolve(&self, path: &str) -> Option<String> {
        if self.folder.is_none() {
            let resolved = std::fs::canonicalize(path).ok()?;
            return resolved.to_str().map(str::to_owned);
        }
        let mut resolved = String::new();
        let mut left: Vec<String> = components(path);
        let mut links = 0;
        while let Some(component) = left.pop() {
            if component == ".." {
                resolved.truncate(resolved.rfind('/').unwrap_or(0));
                continue;
            }
            let next = format!("{resolved}/{component}");
            match self.link_target(&next) {
                Some(target) => {
                    links += 1;
                    if links > LINKS_MAXIMUM {
                        return None;
                    }
                    if target.starts_with('/') {
                        resolved.clear();
                    }
                    left.extend(components(&target));
                }
                None => resolved = next,
            }
        }
        let resolved = if resolved.is_empty() {
            "/".to_owned()
        } else {
            resolved
        };
        self.outside(&resolved).exists().then_some(resolved)
    }

    /// Paths that match a pattern in which a component may hold one `*`; bounded, sorted.
    pub(crate) fn matching(&self, pattern: &str) -> Vec<String> {
        const PATHS_MAXIMUM: usize = 256;
        let mut paths = vec![String::new()];
        for component in pattern.split('/').filter(|it| !it.is_empty()) {
            let mut next = Vec::new();
            for path in &paths {
                let Some((before, after)) = component.split_once('*') else {
                    next.push(format!("{path}/{component}"));
                    continue;
                };
                let folder = if path.is_empty() { "/" } else { path };
                let names = self.names(folder).unwrap_or_default();
                next.extend(
                    names
                        .into_iter()
                        .filter(|name| {
                            name.len() >= before.len() + after.len()
                                && name.starts_with(before)
                                && name.ends_with(after)
                        })
                        .map(|name| format!("{path}/{name}")),
                );
            }
            next.truncate(PATHS_MAXIMUM);
            paths = next;
        }
        paths.retain(|path| self.exists(path));
        paths
    }
}

/// The parts of a path, last first.
fn components(path: &str) -> Vec<String> {
    path.split('/')
        .filter(|component| !component.is_empty() && *component != ".")
        .rev()
        .map(str::to_owned)
        .collect()
}

/// An error as a fragment that names the file: `permission denied opening /dev/kmsg`.
pub(crate) fn io_reason(error: &Error, path: &str) -> String {
    match error.kind() {
        ErrorKind::NotFound => format!("no such file: {path}"),
        ErrorKind::PermissionDenied => format!("permission denied opening {path}"),
        _ => format!("cannot read {path}: {error}"),
    }
}

/// The name of a file or folder in a path.
pub(crate) fn file_name(path: &str) -> &str {
    Path::new(path)
        .file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A tree for a test; a content that starts with `->` makes a link.
    pub(crate) fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Sysroot) {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for (path, content) in files {
            let path = folder.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            match content.strip_prefix("->") {
                Some(target) => symlink(target, &path).expect("a link"),
                None => std::fs::write(&path, content).expect("a file"),
            }
        }
        let root = Sysroot::new(Some(folder.path().to_owned()));
        (folder, root)
    }

    #[test]
    fn paths_below_the_sysroot_are_the_machines() {
        let root = Sysroot::new(Some(PathBuf::from("/node/root")));
        assert_eq!(root.inside("/node/root/usr/lib"), "/usr/lib");
        assert_eq!(root.inside("/node/rooted/usr/lib"), "/node/rooted/usr/lib");
        assert_eq!(Sysroot::default().inside("/usr/lib"), "/usr/lib");
    }

    #[test]
    fn links_stay_inside_the_sysroot() {
        let (_folder, root) = tree(&[
            ("/usr/local/cuda-12.8/version.json", "{}"),
            ("/etc/alternatives/cuda", "->/usr/local/cuda-12.8"),
            ("/usr/local/cuda", "->/etc/alternatives/cuda"),
            ("/opt/out", "->../../../../etc"),
            ("/opt/circle", "->circle"),
        ]);
        assert_eq!(
            root.resolve("/usr/local/cuda").as_deref(),
            Some("/usr/local/cuda-12.8")
        );
        assert_eq!(
            root.text("/usr/local/cuda/version.json").ok().as_deref(),
            Some("{}")
        );
        assert_eq!(root.resolve("/opt/out").as_deref(), Some("/etc"));
        assert_eq!(root.resolve("/opt/circle"), None);
        assert_eq!(root.resolve("/nowhere"), None);
    }

    #[test]
    fn a_pipe_and_a_device_are_refused_and_not_waited_for() {
        let (folder, root) = tree(&[("/etc/x", "")]);
        let pipe = folder.path().join("etc/pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .expect("a pipe");
        let error = root.text("/etc/pipe").expect_err("no file");
        assert_eq!(
            io_reason(&error, "/etc/pipe"),
            "cannot read /etc/pipe: not a regular file"
        );
        assert!(root.bytes("/etc").is_err());
        assert!(Sysroot::default().text("/dev/null").is_err());
    }

    #[test]
    fn patterns_match_names() {
        let (_folder, root) = tree(&[
            ("/usr/local/cuda-12.8/x", ""),
            ("/usr/local/cuda-13.0/x", ""),
            ("/usr/local/lib/x", ""),
        ]);
        assert_eq!(
            root.matching("/usr/local/cuda*/x"),
            ["/usr/local/cuda-12.8/x", "/usr/local/cuda-13.0/x"]
        );
        assert_eq!(root.matching("/usr/*/nothing"), Vec::<String>::new());
    }
}
