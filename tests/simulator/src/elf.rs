//! A copy of a shared library that lacks some symbols, to stand for a driver that is too old for a
//! call.

use anyhow::{Context, Result, ensure};
use std::path::Path;

/// Copies a library and renames the given dynamic symbols in its string table, so that `dlsym` does
/// not find them.
///
/// The hash tables still file the symbol under its old name's hash; a look-up of the old name
/// compares the names and misses, and no program looks up the new one.
pub(crate) fn copy_without_symbols(library: &Path, copy: &Path, symbols: &[String]) -> Result<()> {
    let mut bytes =
        std::fs::read(library).with_context(|| format!("read {}", library.display()))?;
    for symbol in symbols {
        let count = rename(&mut bytes, symbol);
        ensure!(
            count > 0,
            "the simulator's library exports no symbol `{symbol}`"
        );
    }
    std::fs::write(copy, bytes).with_context(|| format!("write {}", copy.display()))
}

/// Overwrites the first letter wherever the whole name stands alone between two NULs, as in a
/// string table.
fn rename(bytes: &mut [u8], symbol: &str) -> usize {
    let pattern = [b"\0", symbol.as_bytes(), b"\0"].concat();
    let positions: Vec<usize> = bytes
        .windows(pattern.len())
        .enumerate()
        .filter(|(_, window)| *window == pattern.as_slice())
        .map(|(position, _)| position + 1)
        .collect();
    for position in &positions {
        bytes[*position] = b'#';
    }
    positions.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_names_are_renamed_and_longer_ones_are_kept() {
        let mut bytes = b"\0nvmlInit\0nvmlInit_v2\0nvmlInitWithFlags\0".to_vec();
        assert_eq!(rename(&mut bytes, "nvmlInit"), 1);
        assert_eq!(bytes, b"\0#vmlInit\0nvmlInit_v2\0nvmlInitWithFlags\0");
        assert_eq!(rename(&mut bytes, "nvmlShutdown"), 0);
    }
}
