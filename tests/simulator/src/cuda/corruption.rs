//! Wrong numbers: corrupts the results of a kernel as in the scenario, and records it.

use super::kernels::{Blocks, CUBLASLT_PRODUCT, Output, Tiles};
use crate::gpu::{Gpu, WrongResultKind, WrongResultPlace, WrongResults};
use crate::node::Node;
use crate::wrong_results::{WrongArea, WrongResult, append};

/// The side of a tile, in elements, where a kernel does not report one.
const TILE: u64 = 128;
/// Elements of one column that are so many rows apart are always in one strip of a verification's
/// checksum.
const ROWS_APART: u64 = 8;

/// What happens to an element.
#[derive(Clone, Copy, Debug)]
enum Change {
    Flip { bit: u64 },
    Overwrite { byte: u8 },
    Infinity,
}

/// Elements, and the multiprocessor that computed them.
#[derive(Clone, Copy, Debug)]
struct Area {
    row: u64,
    column: u64,
    rows: u64,
    columns: u64,
    sm: Option<u32>,
}

/// A launch that shall be wrong.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strike {
    /// Its number among those of the kernels that the fault is about.
    launch: u64,
    /// The how manieth wrong one it is.
    number: u64,
    /// Where its first block runs.
    first_sm: u64,
    /// Whether it succeeds and writes nothing.
    pub(super) is_stale: bool,
}

/// Notes who multiplies, and decides whether the launch of `kernel` that is about to begin shall be
/// wrong.
pub(super) fn strike(
    node: &Node,
    gpu_index: usize,
    gpu: &Gpu,
    kernel: &str,
    first_sm: u64,
) -> Option<Strike> {
    let state = node.state().gpu(gpu_index);
    if kernel == CUBLASLT_PRODUCT || kernel.starts_with("gemm") {
        state.dynamics.note_product(kernel == CUBLASLT_PRODUCT);
    }
    let fault = gpu.wrong_results.as_ref()?;
    if !is_meant(fault, kernel) {
        return None;
    }
    let launch = state.count_spoilable_launch();
    let number = wrong_number(fault, launch)?;
    let is_hot = fault
        .from_temperature_c
        .is_none_or(|degrees| crate::dynamics::temperature_c(gpu, &state.dynamics) >= degrees);
    let load_ns = state.loaded_ns();
    let is_time = fault.from_load.is_none_or(|from| load_ns >= from.as_ns())
        && fault.until_load.is_none_or(|until| load_ns < until.as_ns());
    let is_stale = fault.kind == WrongResultKind::Stale;
    (is_hot && is_time).then_some(Strike {
        launch,
        number,
        first_sm,
        is_stale,
    })
}

/// The multiprocessor that the first block of a launch runs on. Small grids would leave most of
/// them without work; where a fault is about one, that one computes the first or the second block
/// in turn.
pub(super) fn first_sm(gpu: &Gpu, launches: u64) -> u64 {
    let of_one = gpu.wrong_results.as_ref().and_then(|fault| fault.sm);
    let count = u64::from(gpu.sm_count.max(1));
    of_one.map_or(0, |sm| u64::from(sm) + count - launches % 2)
}

/// Spoils the outputs of a launch of `kernel` that has just ended. Real bytes change.
pub(super) fn spoil(
    node: &Node,
    gpu_index: usize,
    gpu: &Gpu,
    kernel: &str,
    strike: Strike,
    outputs: &[Output],
) {
    let Some(fault) = &gpu.wrong_results else {
        return;
    };
    for output in outputs.iter().filter(|it| it.elements > 0) {
        let areas = match fault.kind {
            WrongResultKind::Stale => vec![everything(output)],
            WrongResultKind::Transposed => vec![transpose(output)],
            _ => {
                let (areas, change) = plan(output, fault, strike, gpu.sm_count);
                areas.iter().map(|it| apply(output, *it, change)).collect()
            }
        };
        let result = WrongResult {
            gpu: gpu_index,
            kernel: kernel.to_owned(),
            launch: strike.launch,
            areas,
        };
        if result.areas.is_empty() {
            continue;
        }
        // A node whose folder cannot be written to has no record; its results are wrong all the
        // same.
        let _ = append(node.folder(), &result);
    }
}

fn everything(output: &Output) -> WrongArea {
    let columns = output.row_length.max(1);
    WrongArea {
        row: 0,
        column: 0,
        rows: output.elements.div_ceil(columns),
        columns,
        sm: None,
        flipped_bits: 0,
    }
}

/// Exchanges rows and columns of the largest square at the output's start.
fn transpose(output: &Output) -> WrongArea {
    let area = everything(output);
    let side = area.rows.min(area.columns);
    for row in 0..side {
        for column in 0..row {
            let (one, other) = (row * area.columns + column, column * area.columns + row);
            if one < output.elements && other < output.elements {
                swap(output, one, other);
            }
        }
    }
    WrongArea {
        rows: side,
        columns: side,
        ..area
    }
}

fn swap(output: &Output, one: u64, other: u64) {
    for place in 0..output.element_size as u64 {
        let mut byte = 0;
        with_byte(output, one, place, |old| {
            byte = old;
            old
        });
        with_byte(output, other, place, |old| {
            std::mem::replace(&mut byte, old)
        });
        with_byte(output, one, place, |_| byte);
    }
}

/// Whether the fault is about this kernel.
fn is_meant(fault: &WrongResults, kernel: &str) -> bool {
    let Some(part) = &fault.kernel else {
        return true;
    };
    kernel.contains(part.as_str()) || (part == "gemm" && kernel == CUBLASLT_PRODUCT)
}

/// The how manieth wrong launch it is, if it is one.
fn wrong_number(fault: &WrongResults, launch: u64) -> Option<u64> {
    let since = launch.checked_sub(fault.first_launch)?;
    let every = fault.every_launches.max(1);
    since.is_multiple_of(every).then_some(since / every)
}

/// What of an output is changed, and how.
fn plan(
    output: &Output,
    fault: &WrongResults,
    strike: Strike,
    sm_count: u32,
) -> (Vec<Area>, Change) {
    let Strike { launch, number, .. } = strike;
    if let Some(sm) = fault.sm {
        // The lowest mantissa or integer bit of everything that it computes.
        let areas = areas_of_sm(output, sm, sm_count, strike.first_sm);
        return (areas, Change::Flip { bit: 0 });
    }
    let bits = output.element_size as u64 * 8;
    let (element, bit) = match fault.place {
        WrongResultPlace::Scattered => (scatter(launch), scatter(launch ^ 0x5bd1_e995)),
        WrongResultPlace::TileCorners => (tile_corner(output, number / bits), number),
    };
    let element = match (fault.kind, fault.element) {
        (_, Some(element)) => element,
        (WrongResultKind::SameEveryTime, None) => output.elements / 2,
        (_, None) => element,
    } % output.elements;
    let flip = Change::Flip {
        bit: fault.bit.map_or(bit, u64::from) % bits,
    };
    let row_length = output.row_length.max(1);
    let (row, column) = (element / row_length, element % row_length);
    let one = |row: u64| Area {
        row,
        column,
        rows: 1,
        columns: 1,
        sm: sm_of(output, row, column, sm_count),
    };
    match fault.kind {
        WrongResultKind::Bit => (vec![one(row)], flip),
        WrongResultKind::Element => (vec![one(row)], Change::Overwrite { byte: 0x5a }),
        WrongResultKind::SameEveryTime => (vec![one(row)], Change::Overwrite { byte: 0x3c }),
        // All ones are a NaN in every floating-point format, and a wrong value in an integer one.
        WrongResultKind::Nan => (vec![one(row)], Change::Overwrite { byte: 0xff }),
        WrongResultKind::Infinity => (vec![one(row)], Change::Infinity),
        WrongResultKind::TwoRows => (vec![one(row), one(row ^ ROWS_APART)], flip),
        WrongResultKind::Row => {
            let whole = Area {
                column: 0,
                columns: row_length,
                sm: None,
                ..one(row)
            };
            (vec![whole], flip)
        }
        WrongResultKind::Tile => {
            let tiles = tiles_of(output);
            let tile = tile_at(&tiles, row_length, row, column);
            (vec![area_of_tile(output, &tiles, tile, sm_count)], flip)
        }
        // These are not about places (`spoil`).
        WrongResultKind::Stale | WrongResultKind::Transposed => (Vec::new(), flip),
    }
}

/// The tiles that thread blocks compute, or else such as they commonly are.
fn tiles_of(output: &Output) -> Tiles {
    match &output.blocks {
        Blocks::Tiles(tiles) => tiles.clone(),
        Blocks::InOrder { .. } => Tiles {
            rows: TILE,
            columns: TILE,
            sm: Vec::new(),
        },
    }
}

fn tile_at(tiles: &Tiles, row_length: u64, row: u64, column: u64) -> u64 {
    row / tiles.rows * row_length.div_ceil(tiles.columns) + column / tiles.columns
}

/// A tile, or what is left of it at the matrix's edges.
fn area_of_tile(output: &Output, tiles: &Tiles, tile: u64, sm_count: u32) -> Area {
    let row_length = output.row_length.max(1);
    let tiles_in_a_row = row_length.div_ceil(tiles.columns);
    let row = tile / tiles_in_a_row * tiles.rows;
    let column = tile % tiles_in_a_row * tiles.columns;
    Area {
        row,
        column,
        rows: tiles.rows.min(output.elements.div_ceil(row_length) - row),
        columns: tiles.columns.min(row_length - column),
        sm: sm_of(output, row, column, sm_count),
    }
}

/// The multiprocessor that computed this element, where that is known; tiles without a list are
/// dealt in turn.
fn sm_of(output: &Output, row: u64, column: u64, sm_count: u32) -> Option<u32> {
    let Blocks::Tiles(tiles) = &output.blocks else {
        return None;
    };
    let tile = tile_at(tiles, output.row_length.max(1), row, column);
    if tiles.sm.is_empty() {
        return u32::try_from(tile % u64::from(sm_count.max(1))).ok();
    }
    tiles.sm.get(usize::try_from(tile).ok()?).copied()
}

/// Everything that this multiprocessor computes.
fn areas_of_sm(output: &Output, sm: u32, sm_count: u32, first_sm: u64) -> Vec<Area> {
    let row_length = output.row_length.max(1);
    let count = u64::from(sm_count.max(1));
    // The first block that it runs, where they are dealt in turn from `first_sm` on.
    let first = (u64::from(sm) + count - first_sm % count) % count;
    match &output.blocks {
        // Where the kernel does not report which block computes which tile, the first computes the
        // first one.
        Blocks::Tiles(tiles) if tiles.sm.is_empty() => {
            let rows_of_tiles = output.elements.div_ceil(row_length).div_ceil(tiles.rows);
            (first..rows_of_tiles * row_length.div_ceil(tiles.columns))
                .step_by(sm_count.max(1) as usize)
                .map(|tile| Area {
                    sm: Some(sm),
                    ..area_of_tile(output, tiles, tile, sm_count)
                })
                .collect()
        }
        Blocks::Tiles(tiles) => {
            let rows_of_tiles = output.elements.div_ceil(row_length).div_ceil(tiles.rows);
            (0..rows_of_tiles * row_length.div_ceil(tiles.columns))
                .map(|tile| area_of_tile(output, tiles, tile, sm_count))
                .filter(|area| area.sm == Some(sm))
                .collect()
        }
        // Blocks are dealt to SMs in turn.
        Blocks::InOrder { elements } => {
            let per_block = (*elements).max(1);
            let blocks = output.elements.div_ceil(per_block);
            (first..blocks)
                .step_by(sm_count.max(1) as usize)
                .map(|block| block * per_block)
                .map(|first| Area {
                    row: first / row_length,
                    column: first % row_length,
                    rows: 1,
                    columns: per_block.min(output.elements - first),
                    sm: Some(sm),
                })
                .collect()
        }
    }
}

/// One corner of a tile after the other, through all tiles, and again from the start.
fn tile_corner(output: &Output, number: u64) -> u64 {
    let tiles = tiles_of(output);
    let row_length = output.row_length.max(1);
    let rows_of_tiles = output.elements.div_ceil(row_length).div_ceil(tiles.rows);
    let count = rows_of_tiles * row_length.div_ceil(tiles.columns);
    let area = area_of_tile(output, &tiles, number / 4 % count, 1);
    let row = area.row + if number & 1 == 0 { 0 } else { area.rows - 1 };
    let column = area.column + if number & 2 == 0 { 0 } else { area.columns - 1 };
    row * row_length + column
}

fn apply(output: &Output, area: Area, change: Change) -> WrongArea {
    let row_length = output.row_length.max(1);
    let first = area.row * row_length + area.column;
    let before = value(output, first);
    for row in 0..area.rows {
        for column in 0..area.columns {
            let element = first + row * row_length + column;
            if element < output.elements {
                change_element(output, element, change);
            }
        }
    }
    WrongArea {
        row: area.row,
        column: area.column,
        rows: area.rows,
        columns: area.columns,
        sm: area.sm,
        flipped_bits: before ^ value(output, first),
    }
}

fn change_element(output: &Output, element: u64, change: Change) {
    let size = output.element_size as u64;
    match change {
        Change::Flip { bit } => {
            with_byte(output, element, bit / 8, |byte| byte ^ 1 << (bit % 8));
        }
        // A wrong value must differ from the right one.
        Change::Overwrite { byte } => {
            for place in 0..size {
                with_byte(output, element, place, |old| {
                    if old == byte { byte ^ 0x80 } else { byte }
                });
            }
        }
        Change::Infinity => {
            // FP64, FP32, and BF16 where elements are so short; integers get a value that is as
            // wrong.
            let infinity: u64 = match size {
                8 => f64::INFINITY.to_bits(),
                4 => f32::INFINITY.to_bits().into(),
                _ => 0x7f80,
            };
            for (place, new) in (0..size).zip(infinity.to_le_bytes()) {
                with_byte(output, element, place, |_| new);
            }
        }
    }
}

/// The bits of an element.
fn value(output: &Output, element: u64) -> u64 {
    (0..(output.element_size as u64).min(8)).fold(0, |bits, place| {
        let mut read = 0;
        with_byte(output, element, place, |byte| {
            read = byte;
            byte
        });
        bits | u64::from(read) << (8 * place)
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn output() -> Output {
        Output {
            address: 0,
            element_size: 4,
            elements: 512 * 512,
            row_length: 512,
            blocks: Blocks::Tiles(Tiles {
                rows: 128,
                columns: 256,
                sm: vec![5, 6, 7, 8, 5, 6, 7, 8],
            }),
        }
    }

    fn struck(number: u64) -> Strike {
        Strike {
            launch: number,
            number,
            first_sm: 0,
            is_stale: false,
        }
    }

    fn fault(text: &str) -> WrongResults {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_fault_of_products_is_about_those_of_cublaslt_too() {
        let fault = fault(r#"{"kind": "bit", "kernel": "gemm"}"#);
        assert!(is_meant(&fault, "gemm_sm90a_bf16") && is_meant(&fault, CUBLASLT_PRODUCT));
        assert!(!is_meant(&fault, "verify_strips"));
    }

    #[test]
    fn launches_are_wrong_from_the_first_one_on() {
        let fault = fault(r#"{"kind": "bit", "first_launch": 10, "every_launches": 3}"#);
        let numbers = [9, 10, 11, 13].map(|launch| wrong_number(&fault, launch));
        assert_eq!(numbers, [None, Some(0), None, Some(1)]);
    }

    #[test]
    fn every_bit_of_every_corner_has_its_turn() {
        let fault = fault(r#"{"kind": "bit", "place": "tile-corners"}"#);
        let mut places = std::collections::BTreeSet::new();
        for number in 0..32 * 4 * 8 {
            let (areas, change) = plan(&output(), &fault, struck(number), 132);
            let Change::Flip { bit } = change else {
                panic!("{change:?}")
            };
            assert_eq!(areas.len(), 1);
            let (row, column) = (areas[0].row, areas[0].column);
            assert!([0, 127].contains(&(row % 128)) && [0, 255].contains(&(column % 256)));
            places.insert((row, column, bit));
        }
        assert_eq!(places.len(), 32 * 4 * 8);
    }

    #[test]
    fn a_multiprocessor_is_wrong_in_all_of_its_tiles() {
        let fault = fault(r#"{"kind": "element", "sm": 6}"#);
        let (areas, _) = plan(&output(), &fault, struck(0), 132);
        let places: Vec<(u64, u64)> = areas.iter().map(|it| (it.row, it.column)).collect();
        assert_eq!(places, [(0, 256), (256, 256)]);
        assert!(areas.iter().all(|it| (it.rows, it.columns) == (128, 256)));
    }

    #[test]
    fn any_multiprocessor_computes_a_block_of_every_launch() {
        let catalogue = crate::Catalogue::shipped();
        for sm in [0, 77, 131] {
            let set = [format!("gpu.wrong_results={{kind: element, sm: {sm}}}")];
            let resolved = crate::resolve::resolve(&catalogue, "h200x1", &[], &set).unwrap();
            let scenario = crate::resolve::scenario_at_start(&resolved).unwrap();
            for launch in 0..4 {
                let first = first_sm(&scenario.gpus[0], launch);
                let blocks = [first % 132, (first + 1) % 132];
                assert!(blocks.contains(&sm), "{sm} {launch} {blocks:?}");
            }
        }
    }

    #[test]
    fn two_rows_lie_in_one_strip() {
        let fault = fault(r#"{"kind": "two-rows", "bit": 31}"#);
        for launch in 0..100 {
            let (areas, _) = plan(&output(), &fault, struck(launch), 132);
            assert_eq!(areas[0].column, areas[1].column);
            assert_eq!(areas[0].row / 16, areas[1].row / 16);
            assert_ne!(areas[0].row, areas[1].row);
        }
    }
}
