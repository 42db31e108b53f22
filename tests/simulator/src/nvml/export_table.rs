//! `nvmlInternalGetExportTable`: the table of unnamed functions that `nvidia-smi` takes much of
//! what it shows from.
//!
//! The table is not documented. Its identifier and slots are facts that NVIDIA's own mock of NVML
//! found out with `nvidia-smi` 580.65.06 (<https://github.com/NVIDIA/k8s-test-infra>,
//! `pkg/gpu/mocknvml/bridge/internal.go`, 2026-11); those of 535.261.03 were found in the same way,
//! by which slot is called between which named functions.

use super::call::{
    self, Answer, Call, Handle, HandleKind, INVALID_ARGUMENT, NOT_SUPPORTED, Out, TextIn, TextOut,
    answer, characters, supported,
};
use super::power::margin_c;
use super::processes::{Kind, processes};
use super::system::process_name;
use super::topology;
use crate::gpu::Architecture;
use nvml_wrapper_sys::bindings as sys;
use std::ffi::{c_char, c_uint, c_void};

/// The one table that `nvidia-smi` requests, 6c3efec4-8fc9-4e6c-a327-ee696e12f7c4 as its bytes lie
/// in memory.
const IDENTIFIER: [u8; 16] = [
    0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
];

/// Slots, the first of which holds the table's size in bytes.
const SLOTS: usize = 512;

type Slot = extern "C" fn(usize, usize, usize, usize) -> u32;

#[repr(C)]
struct Table {
    size: usize,
    slots: [Slot; SLOTS - 1],
}

static TABLE: Table = Table {
    size: size_of::<Table>(),
    slots: slots(),
};

/// What is called through a slot; the function of byte offset 648 has number 81.
extern "C" fn slot<const N: usize>(a: usize, b: usize, c: usize, _: usize) -> u32 {
    answer("nvmlInternalGetExportTable", |call| {
        answer_slot(N, call, [a, b, c])
    })
}

macro_rules! slots {
    ($table:ident, $($row:literal)*) => {
        $(slots!(@row $table, $row, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);)*
    };
    (@row $table:ident, $row:literal, $($column:literal)*) => {
        // The function of number N is the table's entry N - 1, after its size.
        $($table[($row * 16 + $column as usize).saturating_sub(1)] = slot::<{ $row * 16 + $column }>;)*
    };
}

const fn slots() -> [Slot; SLOTS - 1] {
    let mut table: [Slot; SLOTS - 1] = [slot::<0>; SLOTS - 1];
    slots!(table, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31);
    table
}

/// A process as slots 213 to 215 list it: `nvmlProcessDetail_v1_t` with its name.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct ListedProcess {
    detail: sys::nvmlProcessDetail_v1_t,
    name: [c_char; 4096],
}

/// What `nvidia-smi` calls; arguments are as they lie in registers.
fn answer_slot(slot: usize, call: &Call, [a, b, c]: [usize; 3]) -> Answer {
    let device = Handle::from_register(a);
    match slot {
        // The nearest common ancestor of two addresses (texts such as `00000000:00:1B.0`), for
        // `topo -m`: 0 for one switch to 4 for the system, where the named function counts from 10
        // to 50.
        23 => {
            let ancestor = topology::of_addresses(call, &text_at(a)?, &text_at(b)?)?;
            at::<c_uint>(c).set(ancestor / 10 - 1)
        }
        // A GPU's handle by its number; `nvidia-smi` calls the named function as well.
        81 => {
            let gpus = call.visible_gpus();
            let index = gpus.get(a).copied().ok_or(INVALID_ARGUMENT)?;
            at(b).set(Handle::new(HandleKind::Gpu, index, 0))
        }
        213 => list_processes(call, device, Kind::Compute, b, c),
        215 => list_processes(call, device, Kind::Graphics, b, c),
        // The GPU's part number, into so many bytes.
        231 => {
            let number = supported(call.gpu(device)?.gpu.gpu_part_number.as_ref())?;
            let place = TextOut::from_pointer(std::ptr::with_exposed_provenance_mut(b));
            place.set(c_uint::try_from(c).unwrap_or(0), number)
        }
        // How far the GPU is below the temperature that it throttles at.
        240 => {
            let device = call.gpu(device)?;
            at(b).set(supported(margin_c(call, device))?)
        }
        // Processes of MPS: none. Addressing mode: none. Sparse operation mode of 535 and of 580:
        // off, and none on Blackwell.
        214 | 242 => at::<c_uint>(b).set(0),
        243 | 249 if call.gpu(device)?.gpu.architecture < Architecture::Blackwell => {
            at::<c_uint>(b).set(0)
        }
        // Every other query of a GPU returns a value that the captures show as `N/A` (relaxed
        // ordering, atomics, the host's maximum of the link, deferred clocks, voltage, NUMA node).
        _ if device.of_kind(HandleKind::Gpu).is_some() => Err(NOT_SUPPORTED),
        // Slot 26 writes to a debug log. `topo -m` ends where any of these fails.
        _ => Ok(()),
    }
}

/// A pointer that the caller passes in a register.
fn at<T>(register: usize) -> Out<T> {
    Out::from_pointer(std::ptr::with_exposed_provenance_mut(register))
}

fn text_at(register: usize) -> Result<String, call::Failure> {
    TextIn::from_pointer(std::ptr::with_exposed_provenance(register)).get()
}

/// Writes as many processes as the caller has room for, and how many these are.
fn list_processes(call: &Call, device: Handle, kind: Kind, count: usize, list: usize) -> Answer {
    let count = at::<c_uint>(count);
    let room = count.get()? as usize;
    let processes = processes(call, device, kind)?;
    let list = at::<ListedProcess>(list);
    for (index, process) in processes.iter().take(room).enumerate() {
        let name = process_name(call, process.pid).unwrap_or_default();
        list.element(index).set(ListedProcess {
            detail: sys::nvmlProcessDetail_v1_t {
                pid: process.pid,
                usedGpuMemory: process.usedGpuMemory,
                gpuInstanceId: process.gpuInstanceId,
                computeInstanceId: process.computeInstanceId,
                usedGpuCcProtectedMemory: 0,
            },
            name: characters(&name),
        })?;
    }
    count.set(c_uint::try_from(processes.len().min(room)).unwrap_or(0))
}

#[allow(unsafe_code, reason = "exported under NVML's name")]
#[unsafe(no_mangle)]
extern "C" fn nvmlInternalGetExportTable(
    table: Out<*const c_void>,
    identifier: Out<[u8; 16]>,
) -> u32 {
    call::with_call("nvmlInternalGetExportTable", |_| {
        if identifier.get()? != IDENTIFIER {
            return Err(NOT_SUPPORTED);
        }
        table.set((&raw const TABLE).cast())
    })
}
