//! `verify_strips` and `compare_elements`, the report that they fill, and the checksum of a strip.

use super::operand::Element;
use super::{Blocks, Done, Launch, Output, memory_time_ns};
use crate::cuda::result::{INVALID_VALUE, Outcome};

const STRIP_ROWS: usize = 16;
const STRIP_WORDS: usize = 256;

const THREADS: u64 = 256;
const WARPS_PER_BLOCK: u64 = THREADS / 32;

/// The SM of an element record where none is known.
const NO_SM: u32 = u32::MAX;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Header {
    checked: u64,
    mismatches: u64,
    nonfinite: u64,
    recorded: u32,
    capacity: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Record {
    row: u32,
    column: u32,
    sweep: u32,
    sm: u32,
    expected: u64,
    got: u64,
}

/// The report in device memory.
pub(super) struct Report<'launch> {
    header: &'launch mut Header,
    records: &'launch mut [Record],
    sweep: u32,
}

impl<'launch> Report<'launch> {
    pub(super) fn at(launch: &Launch<'launch>, address: u64, sweep: u32) -> Outcome<Self> {
        // SAFETY: the report is the kernel's own while it runs, and any bits are numbers.
        unsafe {
            let header = &mut launch.device_slice::<Header>(address, 1)?[0];
            let records = launch.device_slice(
                address + size_of::<Header>() as u64,
                header.capacity as usize,
            )?;
            Ok(Self {
                header,
                records,
                sweep,
            })
        }
    }

    fn mismatch(&mut self, place: (usize, usize), sm: u32, expected: u64, got: u64) {
        self.header.mismatches += 1;
        if let Some(record) = self.records.get_mut(self.header.recorded as usize) {
            let short = |it: usize| u32::try_from(it).unwrap_or(u32::MAX);
            *record = Record {
                row: short(place.0),
                column: short(place.1),
                sweep: self.sweep,
                sm,
                expected,
                got,
            };
            self.header.recorded += 1;
        }
    }
}

/// The kernels' `kind`: how words are read when NaN and infinity are looked for.
fn nonfinite(words: &[u32], kind: u32) -> u64 {
    let count = |words: &mut dyn Iterator<Item = &u32>, exponent: u32| {
        words.filter(|it| **it & exponent == exponent).count() as u64
    };
    match kind {
        1 => count(&mut words.iter(), 0x7F80_0000),
        // The high words of FP64.
        2 => count(&mut words.iter().skip(1).step_by(2), 0x7FF0_0000),
        _ => 0,
    }
}

const ROW_WEIGHTS: [u32; STRIP_ROWS] = [
    0x7E83_826A,
    0xF0F5_F482,
    0xD74E_52ED,
    0xEDF2_F1BD,
    0xADD6_F58E,
    0x7C70_444E,
    0xB9BE_BD55,
    0xE6B2_6F4B,
    0x6BEB_EAD0,
    0xA5DC_B1BF,
    0xF181_DBFB,
    0x4E53_4DE0,
    0x49AA_5F64,
    0x5BF6_8096,
    0x4060_D54A,
    0xD145_A9F2,
];

/// `__dp4a` of unsigned bytes.
fn byte_product(word: u32, weights: u32) -> u32 {
    (0..32)
        .step_by(8)
        .map(|shift| (word >> shift & 0xFF) * (weights >> shift & 0xFF))
        .sum()
}

/// The checksum of the strip whose first row is `words[..256]` and whose rows lie `pitch` words
/// apart.
fn strip_checksum(words: &[u32], pitch: usize) -> u64 {
    let mut polynomials = [0u32; STRIP_WORDS];
    let mut bytes = [0u32; STRIP_WORDS];
    for (row, weights) in words.chunks(pitch).zip(ROW_WEIGHTS) {
        for ((polynomial, bytes), word) in polynomials.iter_mut().zip(&mut bytes).zip(row) {
            *polynomial = polynomial.wrapping_mul(0xD68C_F43B).wrapping_add(*word);
            *bytes += byte_product(*word, weights);
        }
    }
    let columns = polynomials.into_iter().zip(bytes);
    (1u32..)
        .zip(columns)
        .fold(0u64, |sum, (place, (polynomial, bytes))| {
            let x = place.wrapping_mul(0x9E37_79B9);
            let x = (x ^ x >> 15).wrapping_mul(0x2C1B_3C6D);
            let weight = (x ^ x >> 12) >> 2 | 0x4000_0001;
            let turned = weight.rotate_left(16) | 1;
            sum.wrapping_add(u64::from(polynomial) * u64::from(weight))
                .wrapping_add(u64::from(bytes) * u64::from(turned))
        })
}

/// A result that is verified strip by strip.
pub(super) struct Strips<'launch> {
    words: &'launch [u32],
    /// Words of a row.
    pitch: usize,
}

impl<'launch> Strips<'launch> {
    pub(super) fn of(
        launch: &Launch<'launch>,
        result: u64,
        rows: usize,
        pitch: usize,
    ) -> Outcome<Self> {
        // SAFETY: the result is only read, and any bits are words.
        let words = unsafe { launch.device_read::<u32>(result, rows * pitch)? };
        Ok(Self { words, pitch })
    }

    fn count(&self) -> usize {
        self.words
            .len()
            .checked_div(self.pitch)
            .unwrap_or(0)
            .div_euclid(STRIP_ROWS)
            * (self.pitch / STRIP_WORDS)
    }

    /// First row and first word of a strip.
    fn place(&self, strip: usize) -> (usize, usize) {
        let columns = self.pitch / STRIP_WORDS;
        (strip / columns * STRIP_ROWS, strip % columns * STRIP_WORDS)
    }

    fn checksum(&self, strip: usize) -> u64 {
        let (row, word) = self.place(strip);
        strip_checksum(&self.words[row * self.pitch + word..], self.pitch)
    }

    fn nonfinite(&self, kind: u32) -> u64 {
        // Rows and words after the last whole strip belong to no strip.
        let rows = self.words.chunks_exact(self.pitch.max(1));
        let whole_rows = rows.len() / STRIP_ROWS * STRIP_ROWS;
        let whole_words = self.pitch / STRIP_WORDS * STRIP_WORDS;
        rows.take(whole_rows)
            .map(|row| nonfinite(&row[..whole_words], kind))
            .sum()
    }

    /// Compares every strip; `sm_of` a strip's first row and word is the one that reads it.
    pub(super) fn compare(
        &self,
        launch: &Launch<'launch>,
        checksums: u64,
        report: &mut Report<'launch>,
        sm_of: impl Fn(usize, usize, usize) -> u32,
    ) -> Outcome {
        // SAFETY: the checksums are only read, and any bits are numbers.
        let checksums = unsafe { launch.device_read::<u64>(checksums, self.count())? };
        for (strip, expected) in checksums.iter().enumerate() {
            let got = self.checksum(strip);
            report.header.checked += 1;
            if got != *expected {
                let (row, word) = self.place(strip);
                report.mismatch((row, word), sm_of(strip, row, word), *expected, got);
            }
        }
        Ok(())
    }
}

/// `verify_strips(result, rows: u32, words: u32, kind: u32, checksums, nonfinite_count, report, sweep: u32)`.
pub(super) fn strips(launch: &Launch<'_>) -> Outcome<Done> {
    // SAFETY: the parameters are those above; those without a type are addresses.
    let (result, rows, pitch, kind, checksums, nonfinite_count, report, sweep) = unsafe {
        (
            launch.parameter::<u64>(0)?,
            launch.parameter::<u32>(1)? as usize,
            launch.parameter::<u32>(2)? as usize,
            launch.parameter::<u32>(3)?,
            launch.parameter::<u64>(4)?,
            launch.parameter::<u64>(5)?,
            launch.parameter::<u64>(6)?,
            launch.parameter::<u32>(7)?,
        )
    };
    if launch.threads_per_block() != THREADS {
        return Err(INVALID_VALUE);
    }
    let strips = Strips::of(launch, result, rows, pitch)?;
    let mut outputs = Vec::new();
    if report == 0 {
        // SAFETY: the checksums are the kernel's own while it runs.
        let out = unsafe { launch.device_slice::<u64>(checksums, strips.count())? };
        for (strip, checksum) in out.iter_mut().enumerate() {
            *checksum = strips.checksum(strip);
        }
        let wrong = strips.nonfinite(kind);
        if wrong != 0 {
            // SAFETY: as above.
            let count = unsafe { launch.device_slice::<u64>(nonfinite_count, 1)? };
            count[0] += wrong;
        }
        outputs.push(Output {
            address: checksums,
            element_size: 8,
            elements: strips.count() as u64,
            row_length: strips.count() as u64,
            blocks: Blocks::InOrder {
                elements: WARPS_PER_BLOCK,
            },
        });
    } else {
        let mut report = Report::at(launch, report, sweep)?;
        report.header.nonfinite += strips.nonfinite(kind);
        let warps = launch.blocks() * WARPS_PER_BLOCK;
        strips.compare(launch, checksums, &mut report, |strip, _, _| {
            launch.sm_of_block(strip as u64 % warps / WARPS_PER_BLOCK)
        })?;
    }
    Ok(Done {
        outputs,
        gpu_time_ns: memory_time_ns(4 * strips.words.len() as u64),
    })
}

/// `compare_elements(result, reference, pitch_words: u32, row0: u32, rows: u32, word0: u32, words: u32, kind: u32, tile_sm, tile_rows: u32, tile_words: u32, report, sweep: u32)`.
pub(super) fn elements(launch: &Launch<'_>) -> Outcome<Done> {
    // SAFETY: the parameters at these places are addresses or u32, as above.
    let address = |place| unsafe { launch.parameter::<u64>(place) };
    // SAFETY: as above.
    let number = |place| unsafe { launch.parameter::<u32>(place).map(|it| it as usize) };
    let (pitch, first_row, rows) = (number(2)?, number(3)?, number(4)?);
    let (first_word, words, kind) = (number(5)?, number(6)?, number(7)?);
    let (tile_sm, tile_rows, tile_words) = (address(8)?, number(9)?.max(1), number(10)?.max(1));
    if launch.threads_per_block() != THREADS || first_word + words > pitch {
        return Err(INVALID_VALUE);
    }
    let mut report = Report::at(
        launch,
        address(11)?,
        u32::try_from(number(12)?).unwrap_or(0),
    )?;
    // SAFETY: both results are only read, and any bits are words.
    let (result, reference) = unsafe {
        (
            launch.device_read::<u32>(address(0)?, (first_row + rows) * pitch)?,
            launch.device_read::<u32>(address(1)?, (first_row + rows) * pitch)?,
        )
    };
    let kind = u32::try_from(kind).unwrap_or(0);
    let size = if kind == 2 { 2 } else { 1 };
    let bits = |words: &[u32]| {
        words
            .iter()
            .rev()
            .fold(0u64, |bits, word| bits << 32 | u64::from(*word))
    };
    for row in first_row..first_row + rows {
        for word in (first_word..first_word + words).step_by(size) {
            let place = row * pitch + word;
            let (got, expected) = (
                &result[place..place + size],
                &reference[place..place + size],
            );
            let bad = nonfinite(got, kind);
            report.header.checked += 1;
            report.header.nonfinite += bad;
            if got == expected && bad == 0 {
                continue;
            }
            let tile = row / tile_rows * (pitch / tile_words) + word / tile_words;
            let sm = if tile_sm == 0 {
                NO_SM
            } else {
                // SAFETY: the map is only read.
                let map = unsafe { launch.device_read::<u32>(tile_sm + 4 * tile as u64, 1)? };
                map[0]
            };
            report.mismatch((row, word / size), sm, bits(expected), bits(got));
        }
    }
    Ok(Done {
        outputs: Vec::new(),
        gpu_time_ns: memory_time_ns((8 * rows * words) as u64),
    })
}

/// 32-bit words of an element of the result of such operands.
pub(super) fn words_of_element(operand: Element) -> usize {
    if operand == Element::F64 { 2 } else { 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_a_gpu() {
        // `verify_strips` wrote it on an NVIDIA H200: random FP32 of seed 77 (SplitMix64, exponent
        // field 124 to 127).
        let word = |index: u64| {
            let z = 77u64.wrapping_add((index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            let w = z ^ z >> 31;
            let bits = (w >> 63) << 31 | (124 + (w >> 61 & 3)) << 23 | w >> 38 & 0x7F_FFFF;
            u32::try_from(bits).unwrap()
        };
        let strip: Vec<u32> = (0..4096).map(word).collect();
        assert_eq!(strip_checksum(&strip, STRIP_WORDS), 0x50A8_7F00_E8BF_07A3);
    }

    #[test]
    fn nan_and_infinity_are_counted_by_their_exponents() {
        let infinity = f32::INFINITY.to_bits();
        let words = [infinity, f32::NAN.to_bits(), f32::MAX.to_bits(), 0];
        assert_eq!(nonfinite(&words, 1), 2);
        assert_eq!(nonfinite(&words, 0), 0);
        // Only the high word of an FP64 has its exponent.
        assert_eq!(nonfinite(&[0, 0xFFF0_0000, u32::MAX, 0x7FEF_FFFF], 2), 1);
    }
}
