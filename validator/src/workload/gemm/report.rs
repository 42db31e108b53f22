//! The report that verifying kernels write into the device's memory.

use crate::cuda::{CudaFailure, DeviceMemory};

use super::shape::REPORT_CAPACITY;

/// Header of a report, in 64-bit words: checked, mismatches, nonfinite, recorded and capacity.
pub(super) const HEADER_WORDS: usize = 4;

/// What was counted since the report was cleared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) checked: u64,
    pub(super) mismatches: u64,
    pub(super) nonfinite: u64,
}

impl std::ops::Add for Counts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            checked: self.checked + other.checked,
            mismatches: self.mismatches + other.mismatches,
            nonfinite: self.nonfinite + other.nonfinite,
        }
    }
}

/// A strip or an element that differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) row: u32,
    /// Of strips in words, of elements in elements.
    pub(super) column: u32,
    /// The launch's parameters: the product's number, cut to 32 bits.
    pub(super) product: u32,
    pub(super) sm: Option<u32>,
    pub(super) expected: u64,
    pub(super) got: u64,
}

/// A report as the host read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) counts: Counts,
    pub(super) records: Vec<Record>,
    /// Every mismatch has its record.
    pub(super) complete: bool,
}

/// Clears the report at `offset`.
pub(super) fn clear(memory: &DeviceMemory<'_, '_>, offset: u64) -> Result<(), CudaFailure> {
    let mut header = [0; 32];
    header[28..].copy_from_slice(&REPORT_CAPACITY.to_le_bytes());
    memory.write(offset, &header)
}

/// Reads the report at `offset`, after all work in the stream.
pub(super) fn read(memory: &DeviceMemory<'_, '_>, offset: u64) -> Result<Report, CudaFailure> {
    let mut header = [0; 32];
    memory.read(offset, &mut header)?;
    let recorded = word32(&header, 24);
    let mut records = vec![0; 32 * recorded.min(REPORT_CAPACITY) as usize];
    memory.read(offset + 32, &mut records)?;
    Ok(parse(&header, &records))
}

fn parse(header: &[u8; 32], records: &[u8]) -> Report {
    let counts = Counts {
        checked: word64(header, 0),
        mismatches: word64(header, 8),
        nonfinite: word64(header, 16),
    };
    Report {
        counts,
        records: records.as_chunks::<32>().0.iter().map(record).collect(),
        // A full list may lack some.
        complete: word32(header, 24) < REPORT_CAPACITY,
    }
}

fn record(bytes: &[u8; 32]) -> Record {
    let sm = word32(bytes, 12);
    Record {
        row: word32(bytes, 0),
        column: word32(bytes, 4),
        product: word32(bytes, 8),
        sm: (sm != u32::MAX).then_some(sm),
        expected: word64(bytes, 16),
        got: word64(bytes, 24),
    }
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_as_kernels_write_it() {
        let mut header = [0; 32];
        header[0] = 9;
        header[8] = 2;
        header[16] = 1;
        header[24] = 1;
        let mut bytes = [0; 32];
        bytes[0] = 16;
        bytes[5] = 1;
        bytes[8] = 7;
        bytes[12..16].copy_from_slice(&[0xff; 4]);
        bytes[16] = 0xab;
        bytes[31] = 0x80;
        let report = parse(&header, &bytes);
        assert_eq!(report.counts.checked, 9);
        assert_eq!((report.counts.mismatches, report.counts.nonfinite), (2, 1));
        assert!(report.complete);
        let expected = Record {
            row: 16,
            column: 256,
            product: 7,
            sm: None,
            expected: 0xab,
            got: 1 << 63,
        };
        assert_eq!(report.records, [expected]);
    }
}
