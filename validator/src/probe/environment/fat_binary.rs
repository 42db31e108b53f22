//! Fat binaries: the architectures of the GPU code in a library.
//!
//! The layout was read from libraries of torch 2.15.0, NCCL, JAX, CuPy, vLLM and ONNX Runtime, and
//! its counts are those of cuobjdump 13.5.37. All numbers are little endian. A section holds fat
//! binaries without gaps:
//!
//! - header, 16 bytes: magic `0xba55ed50`, u16 version 1, u16 length of the header, u64 length of
//!   all entries;
//! - entry: +0 u16 kind (1 PTX, 2 machine code), +4 u32 length of the entry's header, +8 u64 length
//!   of its payload, +24 u16 minor and +26 u16 major version, +28 u32 architecture, +40 u64 flags
//!   (`0x100000` suffix `a`, `0x200000` suffix `f`).

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use validator_core::facts::{DeviceCode, PtxCode};

const MAGIC: u32 = 0xba55_ed50;
const HEADER_BYTES: u64 = 16;
/// As far into an entry as is read.
const ENTRY_BYTES: u64 = 48;
const KIND_PTX: u16 = 1;
const KIND_MACHINE_CODE: u16 = 2;
const FLAG_EXACT: u64 = 0x10_0000;
const FLAG_FAMILY: u64 = 0x20_0000;
/// Far more than any library has: a torch has some thousands.
const FAT_BINARIES_MAXIMUM: u32 = 200_000;

/// Adds the fat binaries of a section to `code`.
pub(super) fn read(
    file: &File,
    offset: u64,
    size: u64,
    relocatable: bool,
    code: &mut DeviceCode,
) -> Result<(), String> {
    let unknown = |at: u64| format!("unknown layout of fat binaries at offset {at:#x}");
    let end = offset.checked_add(size).ok_or_else(|| unknown(offset))?;
    let mut at = offset;
    while has(HEADER_BYTES, at, end) && code.fat_binaries < FAT_BINARIES_MAXIMUM {
        let header: [u8; 16] = bytes(file, at)?;
        let magic = u32_at(&header, 0);
        if magic == 0 {
            // Padding up to the next multiple of 8.
            at = at.saturating_add(8);
            continue;
        }
        let header_bytes = u64::from(u16_at(&header, 6));
        if magic != MAGIC || header_bytes < HEADER_BYTES {
            return Err(unknown(at));
        }
        let entries = at.checked_add(header_bytes).ok_or_else(|| unknown(at))?;
        let next = entries
            .checked_add(u64_at(&header, 8))
            .filter(|next| *next <= end)
            .ok_or_else(|| unknown(at))?;
        read_entries(file, entries, next, relocatable, code)?;
        code.fat_binaries += 1;
        at = next;
    }
    Ok(())
}

fn read_entries(
    file: &File,
    start: u64,
    end: u64,
    relocatable: bool,
    code: &mut DeviceCode,
) -> Result<(), String> {
    let mut at = start;
    let mut seen: Vec<String> = Vec::new();
    while has(ENTRY_BYTES, at, end) {
        let entry: [u8; 48] = bytes(file, at)?;
        let header_bytes = u64::from(u32_at(&entry, 4));
        let next = at
            .checked_add(header_bytes)
            .and_then(|it| it.checked_add(u64_at(&entry, 8)))
            .filter(|next| *next <= end && header_bytes >= ENTRY_BYTES)
            .ok_or_else(|| format!("unknown layout of a fat binary's entry at offset {at:#x}"))?;
        add_entry(&entry, relocatable, code, &mut seen);
        at = next;
    }
    if at == end {
        Ok(())
    } else {
        Err(format!(
            "unknown layout of a fat binary that ends at offset {end:#x}"
        ))
    }
}

/// Counts an entry once for each fat binary.
fn add_entry(entry: &[u8; 48], relocatable: bool, code: &mut DeviceCode, seen: &mut Vec<String>) {
    let flags = u64_at(entry, 40);
    let suffix = if flags & FLAG_EXACT != 0 {
        "a"
    } else if flags & FLAG_FAMILY != 0 {
        "f"
    } else {
        ""
    };
    let number = u32_at(entry, 28);
    let (name, is_ptx) = match u16_at(entry, 0) {
        KIND_PTX => (format!("compute_{number}{suffix}"), true),
        KIND_MACHINE_CODE => (format!("sm_{number}{suffix}"), false),
        _ => return,
    };
    let is_first = !seen.contains(&name);
    if is_ptx {
        let version = (u16_at(entry, 26), u16_at(entry, 24));
        let version = format!("{}.{}", version.0, version.1);
        let ptx = code.ptx.entry(name.clone()).or_insert_with(|| PtxCode {
            relocatable_only: true,
            ..PtxCode::default()
        });
        ptx.fat_binaries += u32::from(is_first);
        ptx.relocatable_only &= relocatable;
        if newer(&version, &ptx.version) {
            ptx.version = version;
        }
    } else {
        *code.machine_code.entry(name.clone()).or_default() += u32::from(is_first);
    }
    if is_first {
        seen.push(name);
    }
}

fn newer(version: &str, than: &str) -> bool {
    let numbers =
        |text: &str| -> Vec<u32> { text.split('.').map_while(|it| it.parse().ok()).collect() };
    numbers(version) > numbers(than)
}

fn bytes<const N: usize>(file: &File, at: u64) -> Result<[u8; N], String> {
    let mut bytes = [0; N];
    file.read_exact_at(&mut bytes, at)
        .map_err(|error| format!("cannot read {N} bytes at offset {at:#x}: {error}"))?;
    Ok(bytes)
}

/// There is room for so many bytes; offsets come from the file and may be any number.
fn has(bytes: u64, at: u64, end: u64) -> bool {
    end.checked_sub(at).is_some_and(|left| left >= bytes)
}

fn u16_at<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_le_bytes(number_at(bytes, at))
}

fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_le_bytes(number_at(bytes, at))
}

fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from_le_bytes(number_at(bytes, at))
}

/// Offsets are those of the layout above, which lie within what was read.
fn number_at<const N: usize, const BYTES: usize>(bytes: &[u8; N], at: usize) -> [u8; BYTES] {
    let number = bytes.get(at..).and_then(<[u8]>::first_chunk);
    number.copied().unwrap_or([0; BYTES])
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write as _;

    use proptest::prelude::*;

    use super::*;

    /// One entry: kind, architecture, flags, PTX or container version.
    pub(in crate::probe::environment) type Entry = (u16, u32, u64, (u16, u16));

    /// A section with one fat binary for each list of entries, as the compiler lays it out.
    pub(in crate::probe::environment) fn section(binaries: &[&[Entry]]) -> Vec<u8> {
        const ENTRY_HEADER: u32 = 72;
        const PAYLOAD: usize = 16;
        let mut section = Vec::new();
        for entries in binaries {
            let mut body = Vec::new();
            for (kind, architecture, flags, (major, minor)) in *entries {
                let mut entry = vec![0; ENTRY_HEADER as usize];
                entry[0..2].copy_from_slice(&kind.to_le_bytes());
                entry[2..4].copy_from_slice(&0x0101_u16.to_le_bytes());
                entry[4..8].copy_from_slice(&ENTRY_HEADER.to_le_bytes());
                entry[8..16].copy_from_slice(&(PAYLOAD as u64).to_le_bytes());
                entry[24..26].copy_from_slice(&minor.to_le_bytes());
                entry[26..28].copy_from_slice(&major.to_le_bytes());
                entry[28..32].copy_from_slice(&architecture.to_le_bytes());
                entry[40..48].copy_from_slice(&flags.to_le_bytes());
                body.extend(entry);
                body.extend([0xaa; PAYLOAD]);
            }
            section.extend(MAGIC.to_le_bytes());
            section.extend(1_u16.to_le_bytes());
            section.extend(16_u16.to_le_bytes());
            section.extend((body.len() as u64).to_le_bytes());
            section.extend(body);
        }
        section
    }

    fn read_bytes(bytes: &[u8], relocatable: bool) -> Result<DeviceCode, String> {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(b"head").expect("written");
        file.write_all(bytes).expect("written");
        let mut code = DeviceCode::default();
        read(&file, 4, bytes.len() as u64, relocatable, &mut code)?;
        Ok(code)
    }

    #[test]
    fn every_architecture_is_counted_once_for_each_fat_binary() {
        let bytes = section(&[
            &[
                (2, 80, 0x11, (1, 7)),
                (2, 90, 0x10_0011, (1, 7)),
                (1, 90, 0x11, (8, 8)),
            ],
            &[
                (2, 80, 0x8011, (1, 8)),
                (2, 103, 0x20_0011, (1, 8)),
                (1, 90, 0x11, (9, 0)),
                (7, 1, 0, (0, 0)),
            ],
        ]);
        let code = read_bytes(&bytes, false).expect("fat binaries");
        assert_eq!(code.fat_binaries, 2);
        let names: Vec<(&str, u32)> = code
            .machine_code
            .iter()
            .map(|(name, count)| (&name[..], *count))
            .collect();
        assert_eq!(names, [("sm_103f", 1), ("sm_80", 2), ("sm_90a", 1)]);
        let ptx = &code.ptx["compute_90"];
        assert_eq!(
            (ptx.fat_binaries, &ptx.version[..], ptx.relocatable_only),
            (2, "9.0", false)
        );
        let code = read_bytes(&bytes, true).expect("fat binaries");
        assert!(code.ptx["compute_90"].relocatable_only);
    }

    #[test]
    fn another_layout_is_an_error_and_not_an_empty_list() {
        let mut bytes = section(&[&[(2, 80, 0, (1, 7))]]);
        bytes[16 + 4] = 200;
        assert!(read_bytes(&bytes, false).is_err());
        assert!(read_bytes(b"something else!!", false).is_err());
    }

    proptest! {
        #[test]
        fn nothing_panics_and_nothing_hangs(
            at in 0_usize..200,
            byte in any::<u8>(),
        ) {
            let mut bytes = section(&[&[(2, 80, 0, (1, 7)), (1, 90, 0, (8, 0))], &[(2, 75, 0, (1, 7))]]);
            if let Some(place) = bytes.get_mut(at) {
                *place = byte;
            }
            let _ = read_bytes(&bytes, false);
        }
    }
}
