//! Memory errors and what the board did about them: ECC counters, remapped rows, retired pages,
//! repairs.

use super::call::{
    Call, Failure, Handle, INVALID_ARGUMENT, NOT_SUPPORTED, Out, enabled, nvml, set_list,
    supported, version_of,
};
use crate::gpu::{EccCounts, Gpu};
use nvml_wrapper_sys::bindings as sys;
use std::ffi::c_uint;

const CORRECTED: c_uint = sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED;
const UNCORRECTED: c_uint = sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
const VOLATILE: c_uint = sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC;
const AGGREGATE: c_uint = sys::nvmlEccCounterType_enum_NVML_AGGREGATE_ECC;

/// The counters since the driver's start or of the board's life; boards without ECC, or with ECC
/// off, have none.
fn counts(gpu: &Gpu, counter: c_uint) -> Result<EccCounts, Failure> {
    if gpu.ecc.mode != Some(true) {
        return Err(NOT_SUPPORTED);
    }
    match counter {
        VOLATILE => Ok(gpu.ecc.volatile),
        AGGREGATE => Ok(gpu.ecc.aggregate),
        _ => Err(INVALID_ARGUMENT),
    }
}

/// Errors of a kind as [SRAM, DRAM].
fn by_place(counts: &EccCounts, kind: c_uint) -> Result<[u64; 2], Failure> {
    match kind {
        CORRECTED => Ok([counts.sram_correctable, counts.dram_correctable]),
        UNCORRECTED => Ok([counts.sram_uncorrectable(), counts.dram_uncorrectable]),
        _ => Err(INVALID_ARGUMENT),
    }
}

/// A counter by place. Boards that count SRAM as a whole know the places SRAM and DRAM; older ones
/// know each kind of SRAM, where the simulator books every SRAM error on the L2 cache.
pub(super) fn counter(
    gpu: &Gpu,
    kind: c_uint,
    counter: c_uint,
    place: c_uint,
) -> Result<u64, Failure> {
    let [sram, dram] = by_place(&counts(gpu, counter)?, kind)?;
    match place {
        sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_DRAM => Ok(dram),
        sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_SRAM if gpu.ecc.sram_status => Ok(sram),
        _ if gpu.ecc.sram_status
            && place < sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_COUNT =>
        {
            Err(NOT_SUPPORTED)
        }
        sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_L2_CACHE => Ok(sram),
        sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_L1_CACHE
        | sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_REGISTER_FILE
        | sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_TEXTURE_MEMORY
        | sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_CBU => Ok(0),
        sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_TEXTURE_SHM
        | sys::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_SRAM => Err(NOT_SUPPORTED),
        _ => Err(INVALID_ARGUMENT),
    }
}

/// All errors of a kind.
pub(super) fn total(gpu: &Gpu, kind: c_uint, counter: c_uint) -> Result<u64, Failure> {
    let [sram, dram] = by_place(&counts(gpu, counter)?, kind)?;
    Ok(sram + dram)
}

/// Retired pages of a cause.
pub(super) fn retired_pages(gpu: &Gpu, cause: c_uint) -> Result<u32, Failure> {
    let pages = supported(gpu.retired_pages.as_ref())?;
    match cause {
        sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS => {
            Ok(pages.single_bit)
        }
        sys::nvmlPageRetirementCause_enum_NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR => Ok(pages.double_bit),
        _ => Err(INVALID_ARGUMENT),
    }
}

/// Made-up addresses of retired pages, each another 4 KiB page.
fn page_addresses(call: &Call, device: Handle, cause: c_uint) -> Result<Vec<u64>, Failure> {
    let count = retired_pages(call.gpu(device)?.gpu, cause)?;
    let base = 0x1000 + u64::from(cause) * 0x1000_0000;
    Ok((0..u64::from(count))
        .map(|page| base + page * 0x1000)
        .collect())
}

/// The argument of `nvmlDeviceGetRemappedRows_v2`, as `nvidia-ml-py` 13.615 lays it out.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct RemappedRowsV2 {
    correctable_active: c_uint,
    correctable_inactive: c_uint,
    uncorrectable_active: c_uint,
    uncorrectable_inactive: c_uint,
    pending: c_uint,
    failure: c_uint,
}

/// The argument of `nvmlDeviceGetUnrepairableMemoryFlag_v1`, as `nvidia-ml-py` 13.615 lays it out.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct UnrepairableMemoryV1 {
    version: c_uint,
    unrepairable: c_uint,
}

nvml! {
    fn nvmlDeviceGetEccMode(device: Handle, current: Out<c_uint>, pending: Out<c_uint>) |call| {
        let ecc = &call.device(device)?.gpu.ecc;
        let mode = supported(ecc.mode)?;
        current.set(enabled(mode))?;
        pending.set(enabled(ecc.pending.unwrap_or(mode)))
    }

    fn nvmlDeviceGetDefaultEccMode(device: Handle, out: Out<c_uint>) |call| {
        supported(call.gpu(device)?.gpu.ecc.mode)?;
        out.set(enabled(true))
    }

    fn nvmlDeviceGetTotalEccErrors(device: Handle, kind: c_uint, counter: c_uint, out: Out<u64>) |call| {
        out.set(total(call.device(device)?.gpu, kind, counter)?)
    }

    fn nvmlDeviceGetDetailedEccErrors(
        device: Handle,
        kind: c_uint,
        counter: c_uint,
        out: Out<sys::nvmlEccErrorCounts_t>,
    ) |call| {
        let [sram, dram] = by_place(&counts(call.gpu(device)?.gpu, counter)?, kind)?;
        out.set(sys::nvmlEccErrorCounts_t { l1Cache: 0, l2Cache: sram, deviceMemory: dram, registerFile: 0 })
    }

    fn nvmlDeviceGetMemoryErrorCounter(
        device: Handle,
        kind: c_uint,
        counter_type: c_uint,
        place: c_uint,
        out: Out<u64>,
    ) |call| {
        out.set(counter(call.device(device)?.gpu, kind, counter_type, place)?)
    }

    fn nvmlDeviceGetSramEccErrorStatus(device: Handle, out: Out<sys::nvmlEccSramErrorStatus_t>) |call| {
        let gpu = call.gpu(device)?.gpu;
        if !gpu.ecc.sram_status || gpu.ecc.mode != Some(true) {
            return Err(NOT_SUPPORTED);
        }
        let (volatile, aggregate, sources) = (&gpu.ecc.volatile, &gpu.ecc.aggregate, &gpu.ecc.sram_sources);
        out.set_versioned(1, sys::nvmlEccSramErrorStatus_t {
            version: version_of::<sys::nvmlEccSramErrorStatus_t>(1),
            aggregateUncParity: aggregate.sram_uncorrectable_parity,
            aggregateUncSecDed: aggregate.sram_uncorrectable_secded,
            aggregateCor: aggregate.sram_correctable,
            volatileUncParity: volatile.sram_uncorrectable_parity,
            volatileUncSecDed: volatile.sram_uncorrectable_secded,
            volatileCor: volatile.sram_correctable,
            aggregateUncBucketL2: sources.l2,
            aggregateUncBucketSm: sources.sm,
            aggregateUncBucketPcie: sources.pcie,
            aggregateUncBucketMcu: sources.microcontroller,
            aggregateUncBucketOther: sources.other,
            bThresholdExceeded: u32::from(gpu.ecc.sram_threshold_exceeded),
        })
    }

    fn nvmlDeviceGetRetiredPages(device: Handle, cause: c_uint, count: Out<c_uint>, addresses: Out<u64>) |call| {
        set_list(count, addresses, &page_addresses(call, device, cause)?)
    }

    fn nvmlDeviceGetRetiredPages_v2(
        device: Handle,
        cause: c_uint,
        count: Out<c_uint>,
        addresses: Out<u64>,
        timestamps: Out<u64>,
    ) |call| {
        let pages = page_addresses(call, device, cause)?;
        set_list(count, addresses, &pages)?;
        for index in 0..pages.len() {
            timestamps.element(index).set(1_700_000_000)?;
        }
        Ok(())
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(device: Handle, out: Out<c_uint>) |call| {
        out.set(enabled(supported(call.gpu(device)?.gpu.retired_pages.as_ref())?.pending))
    }

    fn nvmlDeviceGetRemappedRows(
        device: Handle,
        correctable: Out<c_uint>,
        uncorrectable: Out<c_uint>,
        pending: Out<c_uint>,
        failure: Out<c_uint>,
    ) |call| {
        let rows = supported(call.gpu(device)?.gpu.row_remapping)?;
        correctable.set(rows.correctable)?;
        uncorrectable.set(rows.uncorrectable)?;
        pending.set(enabled(rows.pending))?;
        failure.set(enabled(rows.failure))
    }

    fn nvmlDeviceGetRemappedRows_v2(device: Handle, out: Out<RemappedRowsV2>) |call| {
        let rows = supported(call.gpu(device)?.gpu.row_remapping)?;
        out.set(RemappedRowsV2 {
            correctable_active: rows.correctable,
            correctable_inactive: 0,
            uncorrectable_active: rows.uncorrectable,
            uncorrectable_inactive: 0,
            pending: enabled(rows.pending),
            failure: enabled(rows.failure),
        })
    }

    fn nvmlDeviceGetRowRemapperHistogram(device: Handle, out: Out<sys::nvmlRowRemapperHistogramValues_t>) |call| {
        let banks = supported(call.gpu(device)?.gpu.row_remapping)?.histogram;
        out.set(sys::nvmlRowRemapperHistogramValues_t {
            max: banks.max,
            high: banks.high,
            partial: banks.partial,
            low: banks.low,
            none: banks.none,
        })
    }

    fn nvmlDeviceGetRepairStatus(device: Handle, out: Out<sys::nvmlRepairStatus_t>) |call| {
        let repair = supported(call.gpu(device)?.gpu.repair)?;
        out.set_versioned(1, sys::nvmlRepairStatus_t {
            version: version_of::<sys::nvmlRepairStatus_t>(1),
            bChannelRepairPending: enabled(repair.channel_pending),
            bTpcRepairPending: enabled(repair.tpc_pending),
        })
    }

    fn nvmlDeviceGetUnrepairableMemoryFlag_v1(device: Handle, out: Out<UnrepairableMemoryV1>) |call| {
        let repair = supported(call.gpu(device)?.gpu.repair)?;
        out.set_versioned(1, UnrepairableMemoryV1 {
            version: version_of::<UnrepairableMemoryV1>(1),
            unrepairable: enabled(repair.unrepairable_memory),
        })
    }
}
