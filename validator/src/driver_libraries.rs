//! The driver's libraries: where they lie, and whether they are simulated.

use std::ffi::{CStr, c_char};

use libloading::Library;

/// Folders in which a driver library is looked for by path when the loader does not find it by
/// name.
///
/// In this order: Debian and Ubuntu on both architectures, Red Hat and Amazon Linux, the container
/// toolkit's older mounts, GKE's and the GPU operator's driver containers, WSL.
pub(crate) const WELL_KNOWN_LIBRARY_FOLDERS: [&str; 12] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/usr/local/nvidia/lib64",
    "/home/kubernetes/bin/nvidia/lib64",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu",
    "/run/nvidia/driver/usr/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
];

/// A library that was loaded.
#[derive(Debug)]
pub(crate) struct Loaded<T> {
    pub(crate) library: T,
    /// The path by which it had to be loaded, since the loader does not find its name.
    pub(crate) by_path: Option<String>,
    /// The loader's error for its name, where it found a file that cannot be loaded.
    pub(crate) unloadable: Option<String>,
}

/// Loads a library by its name, as programs do, else by the paths where drivers put it.
pub(crate) fn load<T, E: std::fmt::Display>(
    name: &str,
    open: impl Fn(&str) -> Result<T, E>,
) -> Result<Loaded<T>, String> {
    let paths = WELL_KNOWN_LIBRARY_FOLDERS
        .iter()
        .map(|folder| format!("{folder}/{name}"))
        .filter(|path| std::path::Path::new(path).exists());
    load_first(name, paths, open)
}

fn load_first<T, E: std::fmt::Display>(
    name: &str,
    paths: impl Iterator<Item = String>,
    open: impl Fn(&str) -> Result<T, E>,
) -> Result<Loaded<T>, String> {
    let mut errors: Vec<String> = Vec::new();
    for path in std::iter::once(None).chain(paths.map(Some)) {
        match open(path.as_deref().unwrap_or(name)) {
            Ok(library) => {
                return Ok(Loaded {
                    library,
                    by_path: path,
                    unloadable: errors.into_iter().next().filter(|it| !is_missing(it)),
                });
            }
            Err(error) => errors.push(error.to_string()),
        }
    }
    Err(errors.join("; "))
}

/// Whether the loader reports that there is no such file at all.
// Source: dlopen(3), whose messages end as strerror(3) puts it.
pub(super) fn is_missing(error: &str) -> bool {
    error.contains("No such file or directory")
}

/// The file of a library that this process has loaded, by the start of its name.
pub(crate) fn loaded_path(name_start: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(|line| line.find('/').and_then(|at| line.get(at..)))
        .find(|path| {
            path.rsplit('/')
                .next()
                .is_some_and(|file| file.starts_with(name_start))
        })
        .map(str::to_owned)
}

/// The scenario of a simulated library, by the marker that only simulated libraries export.
#[expect(unsafe_code, reason = "calls a function of a loaded library")]
pub(crate) fn simulator_scenario(library: &Library) -> Option<String> {
    // SAFETY: only the simulator exports this name, as a C function without arguments that returns
    // a static string.
    let marker = unsafe {
        library.get::<unsafe extern "C" fn() -> *const c_char>(b"gpu_simulator_scenario\0")
    }
    .ok()?;
    // SAFETY: the signature is the simulator's, see above.
    let text = unsafe { marker() };
    // The marker's presence alone shows that the library is simulated; the name is for people.
    let unnamed = "unnamed".to_owned();
    if text.is_null() {
        return Some(unnamed);
    }
    // SAFETY: not null, and the simulator returns a string that ends in NUL and lives as long as
    // the library.
    let name = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    Some(name.into_owned())
        .filter(|it| !it.is_empty())
        .or(Some(unnamed))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "libcuda.so.1";

    fn loaded(found: &[&str]) -> Result<Loaded<String>, String> {
        let paths = ["/usr/lib64/libcuda.so.1", "/usr/lib/libcuda.so.1"].map(str::to_owned);
        load_first(NAME, paths.into_iter(), |name| {
            let is_found = found.contains(&name);
            is_found
                .then(|| name.to_owned())
                .ok_or_else(|| format!("{name}: cannot open: No such file or directory"))
        })
    }

    #[test]
    fn a_file_that_the_loader_finds_and_cannot_load_is_told_of() {
        let path = "/usr/lib/libcuda.so.1";
        let open = |error: &'static str| {
            load_first(NAME, std::iter::once(path.to_owned()), move |name| {
                (name == path).then_some(()).ok_or(error)
            })
        };
        let empty = "/opt/compat/libcuda.so.1: file too short";
        let loaded = open(empty).expect("it is found");
        assert_eq!(loaded.by_path.as_deref(), Some(path));
        assert_eq!(loaded.unloadable.as_deref(), Some(empty));
        let missing = "libcuda.so.1: cannot open shared object file: No such file or directory";
        let loaded = open(missing).expect("it is found");
        assert_eq!(loaded.unloadable, None);
    }

    #[test]
    fn a_library_that_only_its_path_finds_says_so() {
        let by_name = loaded(&[NAME, "/usr/lib64/libcuda.so.1"]).expect("it is found");
        assert_eq!((by_name.library.as_str(), by_name.by_path), (NAME, None));
        let by_path = loaded(&["/usr/lib/libcuda.so.1"]).expect("it is found");
        assert_eq!(by_path.by_path.as_deref(), Some("/usr/lib/libcuda.so.1"));
        let error = loaded(&[]).expect_err("nothing is there");
        assert!(error.contains("directory; /usr/lib64/"), "{error}");
    }
}
