//! Proves from the binary's own tables that it starts on an old glibc: readelf lists which
//! libraries it needs and which symbol versions it requires of them.

use std::path::Path;

use anyhow::{Context as _, ensure};
use xshell::cmd;

use crate::workspace;

/// A glibc version as its symbols carry it (`GLIBC_2.28`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

/// The libraries that every glibc machine has. The driver's are opened at run time and must not be
/// listed.
const ALLOWED_LIBRARIES: [&str; 8] = [
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
];

/// Fails when `binary` needs a library of its own or a glibc symbol newer than `oldest`.
pub(crate) fn verify(binary: &Path, oldest: Version) -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let readelf = |table: &str| {
        cmd!(shell, "readelf --wide {table} {binary}")
            .env("LC_ALL", "C")
            .quiet()
            .read()
            .context("readelf could not be run; install it (Debian and Ubuntu: apt-get install binutils)")
    };
    let libraries = needed_libraries(&readelf("--dynamic")?);
    let versions = symbol_versions(&readelf("--version-info")?);
    judge(&libraries, &versions, oldest).with_context(|| binary.display().to_string())?;
    let newest = versions
        .iter()
        .filter_map(|name| glibc_version(name))
        .max()
        .unwrap_or(oldest);
    eprintln!(
        "needs {} and no symbol newer than glibc {newest}",
        libraries.join(", ")
    );
    Ok(())
}

fn judge(libraries: &[String], versions: &[String], oldest: Version) -> anyhow::Result<()> {
    ensure!(
        !libraries.is_empty(),
        "no needed library is listed: not a dynamic executable, so it could not dlopen the driver"
    );
    ensure!(
        versions.iter().any(|name| glibc_version(name).is_some()),
        "no glibc symbol version is listed, so nothing was proven"
    );
    for library in libraries {
        ensure!(
            ALLOWED_LIBRARIES.contains(&library.as_str()),
            "needs {library}, which a bare machine may not have"
        );
    }
    for name in versions.iter().filter(|name| name.starts_with("GLIBC_")) {
        let version = glibc_version(name)
            .with_context(|| format!("needs {name}, which is not a plain glibc version"))?;
        ensure!(version <= oldest, "needs {name}, newer than glibc {oldest}");
    }
    Ok(())
}

/// The names in `Shared library: [libc.so.6]` lines.
fn needed_libraries(dynamic_section: &str) -> Vec<String> {
    dynamic_section
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_owned()))
        .collect()
}

/// The names in `Name: GLIBC_2.28` of the version needs section.
fn symbol_versions(version_info: &str) -> Vec<String> {
    let Some((_, needs)) = version_info.split_once("Version needs section") else {
        return Vec::new();
    };
    let names = needs
        .split("Name: ")
        .skip(1)
        .filter_map(|rest| rest.split_whitespace().next());
    let mut versions: Vec<String> = names.map(str::to_owned).collect();
    versions.sort();
    versions.dedup();
    versions
}

fn glibc_version(name: &str) -> Option<Version> {
    let (major, rest) = name.strip_prefix("GLIBC_")?.split_once('.')?;
    // `GLIBC_2.2.5` is the first x86_64 version; its patch level does not matter here.
    let minor = rest.split('.').next()?;
    Some(Version {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::{Version, glibc_version, judge, needed_libraries, symbol_versions};

    const DYNAMIC: &str = "Dynamic section at offset 0x2d8 contains 2 entries:
  Tag        Type                         Name/Value
 0x0000000000000001 (NEEDED)             Shared library: [libm.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x000000000000001e (FLAGS)              BIND_NOW
";
    const VERSION_INFO: &str = "Version symbols section '.gnu.version' contains 9 entries:
  000:   0 (*local*)       2 (GLIBC_2.99)
Version needs section '.gnu.version_r' contains 1 entry:
 Addr: 0x1  Offset: 0x1  Link: 4 (.dynstr)
  000000: Version: 1  File: libc.so.6  Cnt: 2
  0x0010:   Name: GLIBC_2.28  Flags: none  Version: 3
  0x0020:   Name: GLIBC_2.2.5  Flags: none  Version: 2
";
    const OLDEST: Version = Version {
        major: 2,
        minor: 28,
    };

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn readelf_output_is_understood() {
        assert_eq!(needed_libraries(DYNAMIC), ["libm.so.6", "libc.so.6"]);
        assert_eq!(symbol_versions(VERSION_INFO), ["GLIBC_2.2.5", "GLIBC_2.28"]);
        assert_eq!(
            glibc_version("GLIBC_2.2.5"),
            Some(Version { major: 2, minor: 2 })
        );
        assert_eq!(glibc_version("GLIBC_PRIVATE"), None);
    }

    #[test]
    fn what_an_old_machine_lacks_is_refused() {
        let libc = names(&["libc.so.6"]);
        judge(&libc, &names(&["GLIBC_2.28", "GCC_3.0"]), OLDEST).expect("2.28 itself is allowed");
        let text = |libraries: &[String], versions: &[&str]| {
            judge(libraries, &names(versions), OLDEST)
                .expect_err("must be refused")
                .to_string()
        };
        assert!(text(&libc, &["GLIBC_2.28", "GLIBC_2.34"]).contains("GLIBC_2.34"));
        assert!(text(&libc, &["GLIBC_2.28", "GLIBC_ABI_DT_RELR"]).contains("GLIBC_ABI_DT_RELR"));
        assert!(
            text(&names(&["libc.so.6", "libssl.so.3"]), &["GLIBC_2.28"]).contains("libssl.so.3")
        );
        assert!(text(&libc, &[]).contains("nothing was proven"));
        assert!(text(&[], &["GLIBC_2.28"]).contains("not a dynamic executable"));
    }
}
