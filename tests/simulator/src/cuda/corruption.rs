//! Wrong numbers: spoils what a kernel wrote, as the scenario asks.

use super::kernels::Output;
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

/// Blocks are dealt to SMs in turn; those of the broken SM have their lowest mantissa or integer bit wrong.
fn spoil_sm(output: &Output, sm: u32, sm_count: u32) {
    let per_block = output.elements_per_block.max(1);
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
            let (row, column) = (
                element / row_length / TILE * TILE,
                element % row_length / TILE * TILE,
            );
            for row in row..(row + TILE).min(output.elements.div_ceil(row_length)) {
                for column in column..(column + TILE).min(row_length) {
                    flip(
                        output,
                        (row * row_length + column).min(output.elements - 1),
                        bit,
                    );
                }
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
