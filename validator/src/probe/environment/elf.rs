//! The headers of an ELF file: names, needed libraries, search folders, GPU code.

use std::fs::File;
use std::path::Path;

use object::elf;
use object::read::elf::{Dyn as _, ElfFile64, FileHeader as _, SectionHeader as _};
use object::{Endianness, ReadCache};

use super::fat_binary;
use validator_core::facts::DeviceCode;

/// The dynamic section of a library, as far as the loader's search depends on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Dynamic {
    pub(super) soname: Option<String>,
    pub(super) needed: Vec<String>,
    /// `DT_RPATH`; without effect where there is a [`Self::runpath`].
    pub(super) rpath: Vec<String>,
    pub(super) runpath: Option<Vec<String>>,
}

/// Reads the dynamic section; the rest of the file is not read.
pub(super) fn dynamic(path: &Path) -> Result<Dynamic, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let cache = ReadCache::new(file);
    let elf = ElfFile64::<Endianness, _>::parse(&cache).map_err(|error| error.to_string())?;
    let endian = elf.endian();
    let sections = elf
        .elf_header()
        .sections(endian, &cache)
        .map_err(|error| error.to_string())?;
    let mut dynamic = Dynamic::default();
    let Some((entries, strings)) = sections
        .dynamic(endian, &cache)
        .map_err(|error| error.to_string())?
    else {
        return Ok(dynamic);
    };
    let strings = sections
        .strings(endian, &cache, strings)
        .map_err(|error| error.to_string())?;
    for entry in entries {
        let Some(tag) = entry.tag32(endian) else {
            continue;
        };
        let text = || {
            let bytes = strings.get(entry.val32(endian)?).ok()?;
            String::from_utf8(bytes.to_vec()).ok()
        };
        let folders = || {
            let text = text().unwrap_or_default();
            text.split(':')
                .filter(|it| !it.is_empty())
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        match tag {
            elf::DT_NEEDED => dynamic.needed.extend(text()),
            elf::DT_SONAME => dynamic.soname = text(),
            elf::DT_RPATH => dynamic.rpath = folders(),
            elf::DT_RUNPATH => dynamic.runpath = Some(folders()),
            _ => {}
        }
    }
    Ok(dynamic)
}

/// The targets of all fat binaries of a library: their headers are read, the code is not.
pub(super) fn device_code(path: &Path, name: &str) -> Result<DeviceCode, String> {
    let file = File::open(path).map_err(|error| error.to_string())?;
    let again = file.try_clone().map_err(|error| error.to_string())?;
    let cache = ReadCache::new(file);
    let elf = ElfFile64::<Endianness, _>::parse(&cache).map_err(|error| error.to_string())?;
    let endian = elf.endian();
    let sections = elf
        .elf_header()
        .sections(endian, &cache)
        .map_err(|error| error.to_string())?;
    let mut code = DeviceCode {
        library: name.to_owned(),
        ..DeviceCode::default()
    };
    for section in sections.iter() {
        let section_name = sections.section_name(endian, section).unwrap_or_default();
        let relocatable = match section_name {
            b".nv_fatbin" => false,
            b"__nv_relfatbin" => true,
            _ => continue,
        };
        if let Some((offset, size)) = section.file_range(endian) {
            fat_binary::read(&again, offset, size, relocatable, &mut code)?;
        }
    }
    Ok(code)
}

/// The file is an ELF file of this byte order and width.
pub(super) fn is_elf(path: &Path) -> bool {
    use std::io::Read as _;
    let mut magic = [0; 4];
    File::open(path)
        .and_then(|mut file| file.read_exact(&mut magic))
        .is_ok()
        && magic == *b"\x7fELF"
}

#[cfg(test)]
mod tests {
    use super::{dynamic, is_elf};
    use std::path::Path;

    #[test]
    fn this_test_needs_the_c_library() {
        let own = std::env::current_exe().expect("a path");
        let dynamic = dynamic(&own).expect("an ELF file");
        assert!(
            dynamic.needed.iter().any(|it| it == "libc.so.6"),
            "{dynamic:?}"
        );
        assert!(is_elf(&own));
    }

    #[test]
    fn what_is_no_elf_file_is_an_error() {
        assert!(dynamic(Path::new("/etc/passwd")).is_err());
        assert!(!is_elf(Path::new("/etc/passwd")));
        assert!(dynamic(Path::new("/nowhere")).is_err());
    }
}
