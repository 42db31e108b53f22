//! Which library files the dynamic loader would find, read from its own sources.

use super::sysroot::{Sysroot, file_name};
use crate::driver_libraries::WELL_KNOWN_LIBRARY_FOLDERS;
use validator_core::facts::{LibraryFile, Reading};

/// Folders that the loader looks at last on 64-bit systems, besides those of its cache.
const DEFAULT_FOLDERS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// The loader's configuration: `LD_LIBRARY_PATH`, then its cache.
#[derive(Clone, Debug, Default)]
pub(crate) struct LoaderPath {
    /// `LD_LIBRARY_PATH`, in order; empty components (the working folder) left out.
    pub(crate) environment: Vec<String>,
    /// Name and path of 64-bit libraries in `/etc/ld.so.cache`, in order.
    cache: Vec<(String, String)>,
}

impl LoaderPath {
    pub(crate) fn read(root: &Sysroot, ld_library_path: Option<&str>) -> Self {
        let environment = ld_library_path
            .unwrap_or_default()
            .split([':', ';'])
            .filter(|folder| folder.starts_with('/'))
            .map(|folder| root.inside(folder))
            .collect();
        let cache = root.bytes("/etc/ld.so.cache").unwrap_or_default();
        Self {
            environment,
            cache: parse_cache(&cache),
        }
    }

    /// The files of this name, as the loader would find them one after another if each one before
    /// were not there.
    pub(crate) fn files(&self, root: &Sysroot, name: &str) -> Reading<Vec<LibraryFile>> {
        let from_environment = self
            .environment
            .iter()
            .map(|folder| format!("{}/{name}", folder.trim_end_matches('/')));
        let from_cache = self
            .cache
            .iter()
            .filter(|(library, _)| library == name)
            .map(|(_, path)| path.clone());
        let from_folders = DEFAULT_FOLDERS
            .iter()
            .chain(&WELL_KNOWN_LIBRARY_FOLDERS)
            .map(|folder| format!("{folder}/{name}"));
        let mut files: Vec<LibraryFile> = Vec::new();
        let environment_count = self.environment.len();
        let paths = from_environment.chain(from_cache).chain(from_folders);
        for (position, path) in paths.enumerate() {
            // The variable is this process's own, so that its folders may lie outside of a sysroot.
            let outside = || {
                (position < environment_count)
                    .then(|| Sysroot::default().resolve(&path))
                    .flatten()
            };
            let Some(resolved) = root.resolve(&path).or_else(outside) else {
                continue;
            };
            // /lib64 and /usr/lib64 are often the same folder; the first way to a file is the
            // loader's.
            if files.iter().any(|file| file.resolved == resolved) {
                continue;
            }
            let version = version_in_name(file_name(&resolved));
            files.push(LibraryFile {
                path,
                resolved,
                version,
            });
        }
        Reading::Value(files)
    }

    /// The cache names this library.
    pub(crate) fn in_cache(&self, name: &str) -> bool {
        self.cache.iter().any(|(library, _)| library == name)
    }

    /// Folders of the libraries in the cache.
    pub(crate) fn cache_folders(&self) -> impl Iterator<Item = String> + '_ {
        let folders = self
            .cache
            .iter()
            .filter_map(|(_, path)| path.rsplit_once('/'));
        folders.map(|(folder, _)| folder.to_owned())
    }

    /// Whether a search for libcuda can end in this folder (links resolved).
    pub(crate) fn selects(&self, root: &Sysroot, folder: &str) -> bool {
        let by_environment = self
            .environment
            .iter()
            .any(|it| root.resolve(it).as_deref() == Some(folder));
        by_environment
            || self
                .cache
                .iter()
                .filter(|(library, _)| library == "libcuda.so.1")
                .filter_map(|(_, path)| path.rsplit_once('/'))
                .any(|(it, _)| root.resolve(it).as_deref() == Some(folder))
    }
}

/// `libcuda.so.580.159.04` gives `580.159.04`; `libcuda.so.1` has no version in its name.
pub(crate) fn version_in_name(name: &str) -> Option<String> {
    let (_, version) = name.split_once(".so.")?;
    let is_version = version.contains('.')
        && version
            .split('.')
            .all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()));
    is_version.then(|| version.to_owned())
}

/// Entries of `/etc/ld.so.cache` for this kind of machine: 64-bit x86 or ARM libraries.
///
/// The format of glibc 2.2 and newer, which may follow one of an older format: a header with the
/// number of entries, entries of 24 bytes, strings. Offsets count from the header. A file that is
/// cut off or none of these gives what can be read of it.
// Source: glibc, sysdeps/generic/dl-cache.h.
pub(super) fn parse_cache(bytes: &[u8]) -> Vec<(String, String)> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    const HEADER_BYTES: usize = 48;
    const ENTRY_BYTES: usize = 24;
    /// ELF library for x86-64, and for 64-bit ARM: the flag's upper byte.
    const MACHINES: [u32; 2] = [0x0300, 0x0a00];
    let Some(start) = bytes
        .windows(MAGIC.len())
        .position(|window| window == MAGIC)
    else {
        return Vec::new();
    };
    let bytes = bytes.get(start..).unwrap_or_default();
    let number = |at: usize| {
        let four: [u8; 4] = bytes.get(at..at.checked_add(4)?)?.try_into().ok()?;
        Some(u32::from_le_bytes(four))
    };
    let text = |offset: u32| {
        let rest = bytes.get(usize::try_from(offset).ok()?..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        String::from_utf8(rest.get(..end)?.to_vec()).ok()
    };
    let count = number(MAGIC.len()).unwrap_or(0) as usize;
    (0..count)
        .map_while(|index| {
            let at = HEADER_BYTES.checked_add(index.checked_mul(ENTRY_BYTES)?)?;
            Some((number(at)?, number(at + 4)?, number(at + 8)?))
        })
        .filter(|(flags, _, _)| MACHINES.contains(&(flags & 0xff00)))
        .filter_map(|(_, name, path)| Some((text(name)?, text(path)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::sysroot::tests::tree;
    use super::*;

    fn cache(entries: &[(u32, &str, &str)]) -> Vec<u8> {
        let mut strings = Vec::new();
        let mut table = Vec::new();
        let strings_at = 48 + entries.len() * 24;
        for (flags, name, path) in entries {
            table.extend(flags.to_le_bytes());
            for text in [name, path] {
                let offset = u32::try_from(strings_at + strings.len()).expect("a small file");
                table.extend(offset.to_le_bytes());
                strings.extend(text.as_bytes());
                strings.push(0);
            }
            table.extend([0; 12]);
        }
        let mut bytes = b"ld.so-1.7.0\0\0\0\0\0".to_vec();
        bytes.extend(b"glibc-ld.so.cache1.1");
        bytes.extend(u32::try_from(entries.len()).expect("few").to_le_bytes());
        bytes.extend([0; 24]);
        bytes.extend(table);
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn the_cache_of_the_loader() {
        let bytes = cache(&[
            (
                0x0303,
                "libcuda.so.1",
                "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            ),
            (
                0x0003,
                "libcuda.so.1",
                "/usr/lib/i386-linux-gnu/libcuda.so.1",
            ),
            (0x0a03, "libx.so.1", "/usr/lib/aarch64-linux-gnu/libx.so.1"),
        ]);
        assert_eq!(
            parse_cache(&bytes),
            [
                (
                    "libcuda.so.1".to_owned(),
                    "/usr/lib/x86_64-linux-gnu/libcuda.so.1".to_owned()
                ),
                (
                    "libx.so.1".to_owned(),
                    "/usr/lib/aarch64-linux-gnu/libx.so.1".to_owned()
                ),
            ]
        );
        assert_eq!(parse_cache(&bytes[..80]), []);
    }

    #[test]
    fn this_machines_cache_names_its_c_library() {
        let entries =
            parse_cache(&std::fs::read("/etc/ld.so.cache").expect("the loader has a cache"));
        assert!(
            entries
                .iter()
                .any(|(name, path)| name == "libc.so.6" && path.ends_with("/libc.so.6"))
        );
    }

    #[test]
    fn the_loaders_order() {
        let (folder, root) = tree(&[
            (
                "/usr/local/cuda-13.0/compat/libcuda.so.1",
                "->libcuda.so.580.65.06",
            ),
            ("/usr/local/cuda-13.0/compat/libcuda.so.580.65.06", ""),
            (
                "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
                "->libcuda.so.570.86.15",
            ),
            ("/usr/lib/x86_64-linux-gnu/libcuda.so.570.86.15", ""),
        ]);
        let bytes = cache(&[(0x0303, "libcuda.so.1", "/lib/x86_64-linux-gnu/libcuda.so.1")]);
        std::fs::create_dir_all(folder.path().join("etc")).expect("a folder");
        std::fs::write(folder.path().join("etc/ld.so.cache"), bytes).expect("a file");
        let path = LoaderPath::read(&root, Some(":/usr/local/cuda-13.0/compat/:relative"));
        // The variable of a process on a tree that stands for a machine names folders of the tree.
        let below_the_tree = format!("{}/usr/local/cuda-13.0/compat", folder.path().display());
        assert!(
            LoaderPath::read(&root, Some(&below_the_tree))
                .selects(&root, "/usr/local/cuda-13.0/compat")
        );
        let Reading::Value(files) = path.files(&root, "libcuda.so.1") else {
            panic!("not read")
        };
        let versions: Vec<_> = files.iter().map(|it| it.version.as_deref()).collect();
        assert_eq!(versions, [Some("580.65.06"), Some("570.86.15")]);
        assert!(path.selects(&root, "/usr/local/cuda-13.0/compat"));
        assert!(!path.selects(&root, "/usr/local/cuda-12.0/compat"));
    }

    proptest! {
        #[test]
        fn nothing_panics(tail in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = b"glibc-ld.so.cache1.1".to_vec();
            bytes.extend(tail);
            let _ = parse_cache(&bytes);
        }
    }
}
