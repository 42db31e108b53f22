//! Whether the dynamic linker can link a package's libraries: versions and symbols that they need,
//! and that the libraries which the loader picks define.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;

use object::elf;
use object::read::elf::{ElfFile64, FileHeader as _, SectionHeader as _, Sym as _};
use object::{Endianness, ReadCache};

use validator_core::facts::{UnmetKind, UnmetNeed};

/// Beginnings of the names of GPU libraries' functions, and the library that defines them; the
/// longer of two beginnings comes first.
const FAMILIES: [(&str, &str); 12] = [
    ("nccl", "libnccl"),
    ("cudnn", "libcudnn"),
    ("cublasLt", "libcublasLt"),
    ("cublas", "libcublas"),
    ("cusparseLt", "libcusparseLt"),
    ("cusparse", "libcusparse"),
    ("cusolverMg", "libcusolverMg"),
    ("cusolver", "libcusolver"),
    ("cufft", "libcufft"),
    ("curand", "libcurand"),
    ("__nvJitLink", "libnvJitLink"),
    ("nvJitLink", "libnvJitLink"),
];

/// No library has more.
const SYMBOLS_MAXIMUM: usize = 2_000_000;

/// Far longer than any function's name: names that overlap would be read again and again.
const NAME_BYTES_MAXIMUM: usize = 4096;

/// What the linker reads of one file. Of symbols, those of [`FAMILIES`] alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Links {
    /// Versions that must be defined, by the library that has to define them:
    /// `libc.so.6` to `GLIBC_2.34`.
    versions_needed: BTreeMap<String, Vec<String>>,
    versions_defined: BTreeSet<String>,
    symbols_defined: BTreeSet<String>,
    symbols_needed: BTreeSet<String>,
}

impl Links {
    /// Versions that the file defines.
    pub(super) fn versions(self) -> BTreeSet<String> {
        self.versions_defined
    }
}

/// The library of [`FAMILIES`] that defines a function.
fn family(symbol: &str) -> Option<&'static str> {
    let mut families = FAMILIES.iter();
    families
        .find(|(beginning, _)| symbol.starts_with(beginning))
        .map(|(_, library)| *library)
}

fn is_of_a_family(name: &[u8]) -> bool {
    FAMILIES
        .iter()
        .any(|(beginning, _)| name.starts_with(beginning.as_bytes()))
}

/// Reads a file's versions and symbols.
pub(super) fn links(path: &Path) -> Result<Links, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let cache = ReadCache::new(file);
    read(&cache).map_err(|error| error.to_string())
}

fn read(cache: &ReadCache<File>) -> object::read::Result<Links> {
    let elf = ElfFile64::<Endianness, _>::parse(cache)?;
    let endian = elf.endian();
    let sections = elf.elf_header().sections(endian, cache)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut links = Links::default();
    if let Some((mut needs, strings)) = sections.gnu_verneed(endian, cache)? {
        let strings = sections.strings(endian, cache, strings)?;
        while let Some((need, mut versions)) = needs.next()? {
            let library = text(need.file(endian, strings)?);
            let of_library = links.versions_needed.entry(library).or_default();
            while let Some(version) = versions.next()? {
                // The loader only warns of a weak one.
                if version.vna_flags.get(endian) & elf::VER_FLG_WEAK == 0 {
                    of_library.push(text(version.name(endian, strings)?));
                }
            }
        }
    }
    if let Some((mut definitions, strings)) = sections.gnu_verdef(endian, cache)? {
        let strings = sections.strings(endian, cache, strings)?;
        while let Some((_, mut names)) = definitions.next()? {
            // The first name is the version's, further ones are those that it succeeds.
            if let Some(name) = names.next()? {
                links
                    .versions_defined
                    .insert(text(name.name(endian, strings)?));
            }
        }
    }
    let table = sections.symbols(endian, cache, elf::SHT_DYNSYM)?;
    if table.is_empty() || table.len() > SYMBOLS_MAXIMUM {
        return Ok(links);
    }
    // In one piece: a read for each of 100,000 names takes seconds.
    let names = sections
        .section(table.string_section())?
        .data(endian, cache)?;
    for symbol in table.iter() {
        let at = symbol.st_name(endian) as usize;
        // Nearly all of a million names are of no family: those are not read to their end.
        let Some(name) = names.get(at..).filter(|it| is_of_a_family(it)) else {
            continue;
        };
        let name = name.get(..NAME_BYTES_MAXIMUM).unwrap_or(name);
        let name = name.split(|it| *it == 0).next().unwrap_or_default();
        let Ok(name) = std::str::from_utf8(name) else {
            continue;
        };
        if !symbol.is_undefined(endian) {
            links.symbols_defined.insert(name.to_owned());
        } else if !symbol.is_weak() {
            links.symbols_needed.insert(name.to_owned());
        }
    }
    Ok(links)
}

/// A library of a process.
#[derive(Debug)]
pub(super) struct LinkedFile {
    pub(super) path: String,
    /// `libtorch_cuda.so`.
    pub(super) name: String,
    pub(super) links: Links,
    /// Names that it needs and the path that the loader picks; `None` where it finds none.
    pub(super) needed: Vec<(String, Option<String>)>,
    /// Whose needs are judged; `None` of a library of the machine.
    pub(super) package: Option<String>,
}

/// What the files of a package need and do not get, one entry for each library that does not
/// provide it.
pub(super) fn unmet(
    package: &str,
    files: &[LinkedFile],
    versions_of: impl Fn(&str) -> BTreeSet<String>,
) -> Vec<UnmetNeed> {
    let mut unmet: Vec<UnmetNeed> = Vec::new();
    for file in files
        .iter()
        .filter(|it| it.package.as_deref() == Some(package))
    {
        for (name, path) in &file.needed {
            match path {
                None => add(
                    &mut unmet,
                    file,
                    UnmetKind::MissingLibrary,
                    name,
                    None,
                    None,
                ),
                Some(path) => {
                    let wanted = file.links.versions_needed.get(name);
                    let defined = versions_of(path);
                    // A library without versions satisfies every one, with a warning.
                    for version in wanted.into_iter().flatten() {
                        if !defined.is_empty() && !defined.contains(version) {
                            let newest = newest_of_series(version, &defined);
                            let kind = UnmetKind::SymbolVersion;
                            add(&mut unmet, file, kind, version, Some(path), newest);
                        }
                    }
                }
            }
        }
        for symbol in &file.links.symbols_needed {
            if let Some(path) = lacks(files, symbol) {
                let kind = UnmetKind::UndefinedSymbol;
                add(&mut unmet, file, kind, symbol, Some(&path), None);
            }
        }
    }
    unmet
}

/// The library that should define a function and does not, where no other of the process does.
fn lacks(files: &[LinkedFile], symbol: &str) -> Option<String> {
    let library = family(symbol)?;
    if files
        .iter()
        .any(|it| it.links.symbols_defined.contains(symbol))
    {
        return None;
    }
    let is_library = |it: &&LinkedFile| it.name.split(".so").next() == Some(library);
    let mut providers = files.iter().filter(is_library);
    providers
        .find(|it| !it.links.symbols_defined.is_empty())
        .map(|it| it.path.clone())
}

/// One entry a kind and library that lacks it: of versions the newest, of symbols the first.
fn add(
    unmet: &mut Vec<UnmetNeed>,
    file: &LinkedFile,
    kind: UnmetKind,
    name: &str,
    found: Option<&str>,
    newest: Option<String>,
) {
    let is_same = |it: &&mut UnmetNeed| {
        it.kind == kind
            && it.found.as_deref() == found
            && (kind != UnmetKind::MissingLibrary || it.name == name)
            && (kind != UnmetKind::SymbolVersion || series(&it.name) == series(name))
    };
    let need = UnmetNeed {
        library: file.name.clone(),
        kind,
        name: name.to_owned(),
        found: found.map(str::to_owned),
        newest,
    };
    match unmet.iter_mut().find(is_same) {
        None => unmet.push(need),
        Some(known) if kind == UnmetKind::SymbolVersion && numbers(name) > numbers(&known.name) => {
            *known = need;
        }
        Some(_) => {}
    }
}

/// `GLIBC` of `GLIBC_2.34`.
fn series(version: &str) -> &str {
    version
        .rsplit_once('_')
        .map_or(version, |(series, _)| series)
}

fn numbers(version: &str) -> Vec<u32> {
    let numbers = version.rsplit('_').next().unwrap_or_default();
    numbers.split('.').map_while(|it| it.parse().ok()).collect()
}

/// `GLIBC_2.31`: the newest of the same series that a library defines.
fn newest_of_series(version: &str, defined: &BTreeSet<String>) -> Option<String> {
    let of_series = defined.iter().filter(|it| series(it) == series(version));
    of_series
        .filter(|it| !numbers(it).is_empty())
        .max_by_key(|it| numbers(it))
        .cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_needs_versions_that_the_c_library_defines() {
        let own = std::env::current_exe().expect("a path");
        let own = links(&own).expect("an ELF file");
        let wanted = &own.versions_needed["libc.so.6"];
        assert!(
            wanted.iter().all(|it| it.starts_with("GLIBC_")) && !wanted.is_empty(),
            "{wanted:?}"
        );
        let maps = std::fs::read_to_string("/proc/self/maps").expect("the loaded files");
        let libc = maps
            .split_whitespace()
            .find(|it| it.ends_with("/libc.so.6"));
        let libc = links(Path::new(libc.expect("libc.so.6 is loaded"))).expect("an ELF file");
        for version in wanted {
            assert!(libc.versions_defined.contains(version), "{version}");
        }
    }

    fn file(name: &str, needed: &str, versions: &[&str], symbols: [&[&str]; 2]) -> LinkedFile {
        let set = |texts: &[&str]| texts.iter().map(|it| (*it).to_owned()).collect();
        LinkedFile {
            path: format!("/v/{name}"),
            name: name.to_owned(),
            links: Links {
                versions_needed: BTreeMap::from([(
                    needed.to_owned(),
                    versions.iter().map(|it| (*it).to_owned()).collect(),
                )]),
                versions_defined: BTreeSet::new(),
                symbols_defined: set(symbols[0]),
                symbols_needed: set(symbols[1]),
            },
            needed: vec![(needed.to_owned(), Some(format!("/lib/{needed}")))],
            package: Some("torch".to_owned()),
        }
    }

    fn old_c_library(path: &str) -> BTreeSet<String> {
        let of = |texts: &[&str]| texts.iter().map(|it| (*it).to_owned()).collect();
        match path {
            "/lib/libc.so.6" => of(&["GLIBC_2.2.5", "GLIBC_2.9", "GLIBC_2.31", "GLIBC_PRIVATE"]),
            _ => BTreeSet::new(),
        }
    }

    #[test]
    fn the_newest_version_that_is_not_defined_is_named_once() {
        let none: [&[&str]; 2] = [&[], &[]];
        let files = [
            file(
                "libc10.so",
                "libc.so.6",
                &["GLIBC_2.2.5", "GLIBC_2.32"],
                none,
            ),
            file("libtorch_cpu.so", "libc.so.6", &["GLIBC_2.34"], none),
            // Nothing is known of this library's versions.
            file("libx.so", "libfree.so.1", &["FREE_9"], none),
        ];
        let found = unmet("torch", &files, old_c_library);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].library, "libtorch_cpu.so");
        assert_eq!(found[0].name, "GLIBC_2.34");
        assert_eq!(found[0].newest.as_deref(), Some("GLIBC_2.31"));
        assert_eq!(unmet("jaxlib", &files, old_c_library), []);
        let right = [file("libc10.so", "libc.so.6", &["GLIBC_2.9"], none)];
        assert_eq!(unmet("torch", &right, old_c_library), []);
    }

    #[test]
    fn a_function_that_an_older_library_lacks_is_named() {
        let torch = || {
            let needs: [&[&str]; 2] = [&[], &["ncclCommRegister", "ncclSend", "cudnnCreate"]];
            file("libtorch_cuda.so", "libnccl.so.2", &[], needs)
        };
        let nccl = |defined: &'static [&'static str]| LinkedFile {
            package: None,
            ..file("libnccl.so.2", "libc.so.6", &[], [defined, &[]])
        };
        let found = unmet("torch", &[torch(), nccl(&["ncclSend"])], old_c_library);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].name, "ncclCommRegister");
        assert_eq!(found[0].found.as_deref(), Some("/v/libnccl.so.2"));
        let new = nccl(&["ncclSend", "ncclCommRegister"]);
        assert_eq!(unmet("torch", &[torch(), new], old_c_library), []);
        // A file that defines none of them was not read whole.
        assert_eq!(unmet("torch", &[torch(), nccl(&[])], old_c_library), []);
    }

    #[test]
    fn a_library_that_is_not_found_is_named() {
        let mut lost = file("libtorch_cpu.so", "libgomp.so.1", &[], [&[], &[]]);
        lost.needed[0].1 = None;
        let found = unmet("torch", &[lost], old_c_library);
        assert_eq!(found[0].kind, UnmetKind::MissingLibrary);
        assert_eq!(found[0].name, "libgomp.so.1");
    }
}
