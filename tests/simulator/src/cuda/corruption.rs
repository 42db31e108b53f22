//! Wrong numbers: spoils what a kernel wrote, as the scenario asks.

use super::kernels::{Blocks, Output, Tiles};
use crate::gpu::{Gpu, WrongResultKind, WrongResults};

/// The side of a tile, in elements, where a kernel does not say.
const TILE: u64 = 128;

/// Spoils the outputs of launch number `launch` of `kernel`. Whatever kind of fault it is, real bytes change.
pub(super) fn spoil(gpu: &Gpu, kernel: &str, launch: u64, outputs: &[Output]) {
    let Some(fault) = &gpu.wrong_results else {
        return;
    };
    let hit = fault
        .kernel
        .as_ref()
        .is_none_or(|part| kernel.contains(part.as_str()))
        && launch.is_multiple_of(fault.every_launches.max(1));
    if !hit {
        return;
    }
    for output in outputs.iter().filter(|it| it.elements > 0) {
        match fault.sm {
            Some(sm) => spoil_sm(output, sm, gpu.sm_count),
            None => spoil_output(output, fault, launch),
        }
    }
}

/// What the broken SM computes has its lowest mantissa or integer bit wrong.
fn spoil_sm(output: &Output, sm: u32, sm_count: u32) {
    let per_block = match &output.blocks {
        Blocks::InOrder { elements } => (*elements).max(1),
        Blocks::Tiles(tiles) => {
            let wrong = (0..).zip(&tiles.sm).filter(|(_, of)| **of == sm);
            return wrong.for_each(|(tile, _)| spoil_tile(output, tiles, tile, 0));
        }
    };
    // Blocks are dealt to SMs in turn.
    let blocks = output.elements.div_ceil(per_block);
    for block in (u64::from(sm)..blocks).step_by(sm_count.max(1) as usize) {
        let end = ((block + 1) * per_block).min(output.elements);
        for element in block * per_block..end {
            flip(output, element, 0);
        }
    }
}

fn spoil_output(output: &Output, fault: &WrongResults, launch: u64) {
    let bits = output.element_size as u64 * 8;
    let element = fault.element.unwrap_or_else(|| scatter(launch)) % output.elements;
    let bit = fault
        .bit
        .map_or_else(|| scatter(launch ^ 0x5bd1_e995), u64::from)
        % bits;
    let row_length = output.row_length.max(1);
    match fault.kind {
        WrongResultKind::Bit => flip(output, element, bit),
        WrongResultKind::Element => overwrite(output, element, 0x5a),
        WrongResultKind::SameEveryTime => {
            overwrite(
                output,
                fault.element.unwrap_or(output.elements / 2) % output.elements,
                0x3c,
            );
        }
        // All ones are a NaN in every floating-point format, and a wrong value in an integer one.
        WrongResultKind::Nan => overwrite(output, element, 0xff),
        WrongResultKind::Row => {
            let first = element / row_length * row_length;
            for element in first..(first + row_length).min(output.elements) {
                flip(output, element, bit);
            }
        }
        WrongResultKind::Tile => {
            let (row, column) = (element / row_length, element % row_length);
            let whole = Tiles {
                rows: TILE,
                columns: TILE,
                sm: Vec::new(),
            };
            let tiles = match &output.blocks {
                Blocks::Tiles(tiles) => tiles,
                Blocks::InOrder { .. } => &whole,
            };
            let tiles_in_a_row = row_length.div_ceil(tiles.columns);
            let tile = row / tiles.rows * tiles_in_a_row + column / tiles.columns;
            spoil_tile(output, tiles, tile, bit);
        }
    }
}

/// Flips this bit of every element of a tile, or of what is left of it at the matrix's edges.
fn spoil_tile(output: &Output, tiles: &Tiles, tile: u64, bit: u64) {
    let row_length = output.row_length.max(1);
    let tiles_in_a_row = row_length.div_ceil(tiles.columns);
    let (row, column) = (
        tile / tiles_in_a_row * tiles.rows,
        tile % tiles_in_a_row * tiles.columns,
    );
    for row in row..(row + tiles.rows).min(output.elements.div_ceil(row_length)) {
        for column in column..(column + tiles.columns).min(row_length) {
            let element = row * row_length + column;
            if element < output.elements {
                flip(output, element, bit);
            }
        }
    }
}

fn flip(output: &Output, element: u64, bit: u64) {
    with_byte(output, element, bit / 8, |byte| byte ^ 1 << (bit % 8));
}

/// Gives every byte of the element this value, or another one if it had it: a wrong value must differ from the right one.
fn overwrite(output: &Output, element: u64, value: u8) {
    for byte in 0..output.element_size as u64 {
        with_byte(output, element, byte, |old| {
            if old == value { value ^ 0x80 } else { value }
        });
    }
}

fn with_byte(output: &Output, element: u64, byte: u64, change: impl FnOnce(u8) -> u8) {
    let address = output.address + element * output.element_size as u64 + byte;
    if super::memory::holds(address, 1) {
        let pointer = address as *mut u8;
        // SAFETY: the allocation holds this byte, and the kernel that owns it has just ended.
        unsafe { pointer.write(change(pointer.read())) };
    }
}

/// An arbitrary but repeatable number for a launch (the finaliser of SplitMix64).
fn scatter(launch: u64) -> u64 {
    let mut x = launch.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
