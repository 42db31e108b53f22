//! Module images: PTX text and cubins, as far as a driver judges them before a kernel runs.

use super::result::{INVALID_IMAGE, NO_BINARY_FOR_GPU, Outcome, UNSUPPORTED_PTX_VERSION};
use std::ffi::{CStr, c_char, c_void};

/// What a module holds: the names of its kernels.
#[derive(Debug)]
pub(super) struct Image {
    pub(super) entries: Vec<String>,
}

/// PTX ISA versions by the CUDA version that brought them, newest last.
/// Source: PTX ISA release notes, "PTX ISA Version History",
/// <https://docs.nvidia.com/cuda/parallel-thread-execution/>.
const PTX_OF_CUDA: [((u32, u32), (u32, u32)); 22] = [
    ((10, 1), (6, 4)),
    ((10, 2), (6, 5)),
    ((11, 0), (7, 0)),
    ((11, 1), (7, 1)),
    ((11, 2), (7, 2)),
    ((11, 3), (7, 3)),
    ((11, 4), (7, 4)),
    ((11, 5), (7, 5)),
    ((11, 6), (7, 6)),
    ((11, 7), (7, 7)),
    ((11, 8), (7, 8)),
    ((12, 0), (8, 0)),
    ((12, 1), (8, 1)),
    ((12, 2), (8, 2)),
    ((12, 3), (8, 3)),
    ((12, 4), (8, 4)),
    ((12, 5), (8, 5)),
    ((12, 7), (8, 6)),
    ((12, 8), (8, 7)),
    ((12, 9), (8, 8)),
    ((13, 0), (9, 0)),
    ((13, 1), (9, 1)),
];

const ELF_MAGIC: [u8; 4] = [0x7f, b'E', b'L', b'F'];

/// Reads an image as `cuModuleLoadData` gets it: its format contains its length.
///
/// # Safety
/// `data` points to NUL-terminated PTX or to a whole cubin.
pub(super) unsafe fn read(
    data: *const c_void,
    cuda: [u32; 2],
    capability: [u32; 2],
) -> Outcome<Image> {
    if data.is_null() {
        return Err(INVALID_IMAGE);
    }
    // SAFETY: every image is at least this long.
    let start = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), 4) };
    if start == ELF_MAGIC {
        // SAFETY: an ELF file begins with its header.
        let header = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), 64) };
        let length = elf_length(header).ok_or(INVALID_IMAGE)?;
        // SAFETY: the header states this length of the file.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) };
        return read_cubin(bytes, capability);
    }
    // SAFETY: what is no ELF file is text with a NUL at its end.
    let text = unsafe { CStr::from_ptr(data.cast::<c_char>()) };
    read_ptx(text.to_str().map_err(|_| INVALID_IMAGE)?, cuda, capability)
}

fn read_ptx(text: &str, cuda: [u32; 2], capability: [u32; 2]) -> Outcome<Image> {
    let directive = |name: &str| {
        text.lines()
            .find_map(|line| line.trim().strip_prefix(name))
            .map(str::trim)
    };
    let (major, minor) = directive(".version")
        .and_then(|version| version.split_once('.'))
        .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
        .ok_or(INVALID_IMAGE)?;
    let newest = PTX_OF_CUDA
        .iter()
        .rev()
        .find(|(of, _)| *of <= (cuda[0], cuda[1]))
        .map(|row| row.1);
    if newest.is_none_or(|newest| (major, minor) > newest) {
        return Err(UNSUPPORTED_PTX_VERSION);
    }
    let target = directive(".target")
        .and_then(|it| it.split(',').next())
        .ok_or(INVALID_IMAGE)?
        .trim();
    let (number, exact) = target
        .strip_prefix("sm_")
        .and_then(|it| {
            it.strip_suffix('a')
                .map_or_else(|| Some((it, false)), |it| Some((it, true)))
        })
        .ok_or(INVALID_IMAGE)?;
    let number: u32 = number.parse().map_err(|_| INVALID_IMAGE)?;
    let device = capability[0] * 10 + capability[1];
    if number > device || (exact && number != device) {
        return Err(NO_BINARY_FOR_GPU);
    }
    let entries = text
        .split(".entry")
        .skip(1)
        .filter_map(|rest| {
            let name: String = rest
                .trim_start()
                .chars()
                .take_while(|c| c.is_alphanumeric() || *c == '_' || *c == '$')
                .collect();
            (!name.is_empty()).then_some(name)
        })
        .collect();
    Ok(Image { entries })
}

fn word(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_le_bytes(
        bytes.get(offset..offset + 8)?.try_into().ok()?,
    ))
}

fn half(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_le_bytes(
        bytes.get(offset..offset + 4)?.try_into().ok()?,
    ))
}

fn short(bytes: &[u8], offset: usize) -> Option<usize> {
    Some(u16::from_le_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?).into())
}

/// The end of the section and program header tables, which lie after everything else in a cubin.
fn elf_length(header: &[u8]) -> Option<usize> {
    let end = |offset: usize, size: usize, count: usize| {
        Some(
            usize::try_from(word(header, offset)?).ok()?
                + short(header, size)? * short(header, count)?,
        )
    };
    Some(end(0x28, 0x3a, 0x3c)?.max(end(0x20, 0x36, 0x38)?))
}

fn read_cubin(bytes: &[u8], capability: [u32; 2]) -> Outcome<Image> {
    // The low byte of e_flags is the capability up to CUDA 12; CUDA 13's own layout holds it one
    // byte higher.
    let flags = half(bytes, 0x30).ok_or(INVALID_IMAGE)?;
    let built_for = match flags & 0xff {
        0..=9 => flags >> 8 & 0xff,
        capability => capability,
    };
    let device = capability[0] * 10 + capability[1];
    let same_major = built_for / 10 == device / 10;
    if !same_major || built_for > device {
        return Err(NO_BINARY_FOR_GPU);
    }
    Ok(Image {
        entries: section_kernels(bytes).ok_or(INVALID_IMAGE)?,
    })
}

/// Each kernel of a cubin has a section `.text.<kernel>`.
fn section_kernels(bytes: &[u8]) -> Option<Vec<String>> {
    let table = usize::try_from(word(bytes, 0x28)?).ok()?;
    let size = short(bytes, 0x3a)?;
    let count = short(bytes, 0x3c)?;
    let section = |index: usize| bytes.get(table + index * size..table + (index + 1) * size);
    let names = section(short(bytes, 0x3e)?)?;
    let names = usize::try_from(word(names, 0x18)?).ok()?;
    let mut kernels = Vec::new();
    for index in 0..count {
        let start = names + usize::try_from(half(section(index)?, 0)?).ok()?;
        let name = CStr::from_bytes_until_nul(bytes.get(start..)?)
            .ok()?
            .to_str()
            .ok()?;
        if let Some(kernel) = name.strip_prefix(".text.") {
            kernels.push(kernel.to_owned());
        }
    }
    Some(kernels)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = ".version 6.4\n.target sm_70\n.address_size 64\n.visible .entry one(\n.param .u64 p)\n{ret;}\n.entry two() {ret;}";

    #[test]
    fn ptx_names_its_kernels() {
        assert_eq!(
            read_ptx(PTX, [12, 4], [9, 0]).unwrap().entries,
            ["one", "two"]
        );
    }

    #[test]
    fn ptx_newer_than_the_driver_is_refused() {
        let newer = PTX.replace("6.4", "9.0");
        assert_eq!(
            read_ptx(&newer, [12, 8], [9, 0]).unwrap_err(),
            UNSUPPORTED_PTX_VERSION
        );
        assert!(read_ptx(&newer, [13, 0], [9, 0]).is_ok());
    }

    #[test]
    fn ptx_for_a_newer_gpu_is_refused() {
        assert_eq!(
            read_ptx(&PTX.replace("sm_70", "sm_90"), [13, 0], [8, 0]).unwrap_err(),
            NO_BINARY_FOR_GPU
        );
        let exact = PTX.replace("sm_70", "sm_90a").replace("6.4", "8.0");
        assert!(read_ptx(&exact, [13, 0], [9, 0]).is_ok());
        assert_eq!(
            read_ptx(&exact, [13, 0], [10, 0]).unwrap_err(),
            NO_BINARY_FOR_GPU
        );
    }

    #[test]
    fn what_is_neither_is_refused() {
        assert_eq!(
            read_ptx("hello", [13, 0], [9, 0]).unwrap_err(),
            INVALID_IMAGE
        );
    }
}
