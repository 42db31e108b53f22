//! Where driver libraries lie.

/// Folders in which a driver library is looked for by path when the loader does not find it by name.
///
/// In this order: Debian and Ubuntu on both architectures, Red Hat and Amazon Linux, the container toolkit's older
/// mounts, GKE's and the GPU operator's driver containers, WSL.
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

/// What to give to the loader for a library, in the order of trying: its name, then every path where it lies.
pub(crate) fn candidates(name: &str) -> Vec<String> {
    let paths = WELL_KNOWN_LIBRARY_FOLDERS
        .iter()
        .map(|folder| format!("{folder}/{name}"))
        .filter(|path| std::path::Path::new(path).exists());
    std::iter::once(name.to_owned()).chain(paths).collect()
}

/// The file of a library that this process has loaded, by the start of its name.
pub(crate) fn loaded_path(name_start: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .find(|path| {
            path.rsplit('/')
                .next()
                .is_some_and(|file| file.starts_with(name_start))
        })
        .map(str::to_owned)
}
