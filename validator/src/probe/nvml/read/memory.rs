//! The GPU's memory: its use, its errors and their repair.

use validator_core::facts::{
    EccErrors, MemoryUse, RepairStatus, RetiredPages, RowRemapperHistogram, RowRemapping,
};

use super::super::calls::Called;
use super::GpuReader;

// Source of all numbers: nvml.h.
const CORRECTED: u32 = 0;
const UNCORRECTED: u32 = 1;
pub(super) const VOLATILE: u32 = 0;
pub(super) const AGGREGATE: u32 = 1;
const LOCATION_DRAM: u32 = 2;
const LOCATION_SRAM: u32 = 7;
const RETIRED_FOR_SINGLE_BIT: u32 = 0;
const RETIRED_FOR_DOUBLE_BIT: u32 = 1;

impl GpuReader<'_> {
    pub(super) fn memory_health(&self) {
        let device = self.device;
        self.report("ecc_volatile", self.ecc_errors(VOLATILE));
        self.report("ecc_aggregate", self.ecc_errors(AGGREGATE));
        self.report("sram_threshold_exceeded", device.sram_threshold_exceeded());
        self.report("row_remapping", self.row_remapping());
        self.report("retired_pages", self.retired_pages());
        self.report("repair_status", self.repair_status());
        self.report("unrepairable_memory", device.unrepairable_memory());
        self.report("inforom_image_version", device.inforom_image_version());
        self.report("recovery_action", self.recovery_action());
    }

    pub(in crate::probe::nvml) fn memory(&self) -> Called<MemoryUse> {
        let memory = self.device.memory()?;
        Ok(MemoryUse {
            total_bytes: memory.total,
            reserved_bytes: memory.reserved,
            used_bytes: memory.used,
            free_bytes: memory.free,
        })
    }

    /// A GPU without ECC, or with ECC turned off, has no counts at all, which is not supported
    /// rather than six times nothing.
    pub(super) fn ecc_errors(&self, counter: u32) -> Called<EccErrors> {
        let device = self.device;
        let count =
            |error, location| self.optional(device.memory_error_counter(error, counter, location));
        let total_correctable = device.total_ecc_errors(CORRECTED, counter)?;
        let total_uncorrectable = device.total_ecc_errors(UNCORRECTED, counter)?;
        Ok(EccErrors {
            sram_correctable: count(CORRECTED, LOCATION_SRAM)?,
            sram_uncorrectable: count(UNCORRECTED, LOCATION_SRAM)?,
            dram_correctable: count(CORRECTED, LOCATION_DRAM)?,
            dram_uncorrectable: count(UNCORRECTED, LOCATION_DRAM)?,
            total_correctable: Some(total_correctable),
            total_uncorrectable: Some(total_uncorrectable),
        })
    }

    pub(super) fn row_remapping(&self) -> Called<RowRemapping> {
        let (correctable_rows, uncorrectable_rows, pending, failure) =
            self.device.remapped_rows()?;
        let histogram = self.optional(self.device.row_remapper_histogram())?;
        Ok(RowRemapping {
            correctable_rows,
            uncorrectable_rows,
            pending,
            failure,
            histogram: histogram.map(|banks| RowRemapperHistogram {
                max: banks.max,
                high: banks.high,
                partial: banks.partial,
                low: banks.low,
                none: banks.none,
            }),
        })
    }

    pub(super) fn retired_pages(&self) -> Called<RetiredPages> {
        Ok(RetiredPages {
            single_bit: self.device.retired_page_count(RETIRED_FOR_SINGLE_BIT)?,
            double_bit: self.device.retired_page_count(RETIRED_FOR_DOUBLE_BIT)?,
            pending: self.device.retired_pages_pending()? != 0,
        })
    }

    fn repair_status(&self) -> Called<RepairStatus> {
        let (channel_repair_pending, tpc_repair_pending) = self.device.repair_status()?;
        Ok(RepairStatus {
            channel_repair_pending,
            tpc_repair_pending,
        })
    }
}
