//! Reads one GPU, field by field, inside the worker.
//!
//! Left out because no check judges by them: utilisation rates (they are averages over up to a
//! second, and the call can wait for the next sample), encoder and decoder statistics, PCIe
//! throughput (samples for 20 ms each), accounting, supported clocks (hundreds of values).

use serde::Serialize;

use super::calls::{Called, Failure};
use super::driver::{Device, FabricInfo, PciIdentity};
use super::protocol::Output;
use crate::process_stat;
use validator_core::facts::{
    Clocks, ClocksEventReasons, ComputeCapability, ComputeMode, EccErrors, EccMode, FabricState,
    GpuFacts, GpuProcess, LoadCounters, MemoryUse, MigDevice, MigMode, NvLink, PcieLink, Power,
    Reading, RecoveryAction, RepairStatus, RetiredPages, RowRemapperHistogram, RowRemapping,
    SensorSample, Temperature, Utilization, ViolationTimes,
};

// Source of all numbers: nvml.h.
const FIELD_MEMORY_TEMPERATURE: u32 = 82;
const FIELD_NVLINK_REPLAYS: u32 = 161;
const FIELD_NVLINK_RECOVERIES: u32 = 162;
const FIELD_NVLINK_CRC_ERRORS: u32 = 163;
const FIELD_NVLINK_SPEED: u32 = 164;
/// The scope of a link's field that stands for the sum over all links. Source: nvml.h, at
/// `NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY`.
const ALL_LINKS: u32 = u32::MAX;
/// NVLink 5: how often a link went from up into recovery and was lost, and how often it went into
/// recovery at all.
const FIELD_NVLINK_FAILED_RECOVERIES: u32 = 214;
const FIELD_NVLINK_RECOVERY_EVENTS: u32 = 215;
const FIELD_NVLINK_EFFECTIVE_ERRORS: u32 = 219;
const FIELD_NVLINK_SYMBOL_ERRORS: u32 = 221;
const FIELD_GPU_RECOVERY_ACTION: u32 = 230;
const CLOCK_SM: u32 = 1;
const CLOCK_MEMORY: u32 = 2;
const SENSOR_GPU: u32 = 0;
const THRESHOLD_SHUTDOWN: u32 = 0;
const THRESHOLD_SLOWDOWN: u32 = 1;
const THRESHOLD_MEMORY_MAX: u32 = 2;
const THRESHOLD_GPU_MAX: u32 = 3;
const CORRECTED: u32 = 0;
const UNCORRECTED: u32 = 1;
const VOLATILE: u32 = 0;
const AGGREGATE: u32 = 1;
const LOCATION_DRAM: u32 = 2;
const LOCATION_SRAM: u32 = 7;
const POLICY_POWER: u32 = 0;
const POLICY_THERMAL: u32 = 1;
const POLICY_SYNC_BOOST: u32 = 2;
const POLICY_RELIABILITY: u32 = 5;
const RETIRED_FOR_SINGLE_BIT: u32 = 0;
const RETIRED_FOR_DOUBLE_BIT: u32 = 1;
const NVLINK_ERROR_REPLAY: u32 = 0;
const NVLINK_ERROR_RECOVERY: u32 = 1;
const NVLINK_ERROR_CRC_FLIT: u32 = 2;
const NVLINK_ERROR_CRC_DATA: u32 = 3;
/// `NVML_NVLINK_STATE_ACTIVE`, which is also `NVML_FEATURE_ENABLED`, and `NVML_NVLINK_STATE_SLEEP`:
/// the low-power state of an idle link, out of which traffic wakes it. A link in any other state
/// carries nothing.
const NVLINK_USABLE_STATES: [u32; 2] = [1, 2];
/// `NVML_NVLINK_MAX_LINKS`; a driver that knows fewer answers invalid argument.
const NVLINK_LINKS_MAXIMUM: u32 = 18;

/// Reads one GPU and tells every field as soon as it is known.
pub(super) struct GpuReader<'a> {
    pub(super) device: &'a Device<'a>,
    pub(super) index: u32,
    pub(super) output: &'a Output,
    /// Version of the driver: what its library should have, and how it numbers some fields.
    pub(super) driver: DriverNumber,
}

/// Branch and minor number of a driver; `None` where the version could not be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DriverNumber {
    pub(super) branch: Option<u32>,
    pub(super) minor: Option<u32>,
}

impl DriverNumber {
    pub(super) fn of(version: &str) -> Self {
        let mut parts = version.split('.').map(|part| part.parse().ok());
        Self {
            branch: parts.next().flatten(),
            minor: parts.next().flatten(),
        }
    }

    /// Fields for time lost to hardware thermal slowdown and to the power brake.
    ///
    /// NVIDIA renumbered fields 251 to 273 between 580.65 and 580.82, so that the number depends on
    /// the driver.
    // Source: docs.nvidia.com/deploy/nvml-api/known-issues.html.
    fn hardware_slowdown_fields(self) -> Option<[u32; 2]> {
        match (self.branch?, self.minor?) {
            (branch, _) if branch < 555 => None,
            (branch, minor) if (branch, minor) < (580, 82) => Some([252, 253]),
            _ => Some([270, 271]),
        }
    }
}

impl GpuReader<'_> {
    /// Who the GPU is, and everything that work on it would change. Identity first, so that a GPU
    /// that hangs later has its name.
    pub(super) fn read_at_rest(&self) {
        self.identity();
        self.modes();
        self.tell("memory", self.memory());
        self.load();
    }

    /// Everything else, most of which takes longer.
    pub(super) fn read_health(&self) {
        self.memory_health();
        self.links();
    }

    /// Whose readings these are.
    pub(super) fn read_uuid(&self) {
        self.tell("uuid", self.device.uuid());
    }

    /// What the driver reads from the board's flash memory.
    pub(super) fn read_inforom(&self) {
        self.tell("inforom_valid", self.device.validate_inforom());
    }

    /// What changes under load. A sensor that does not answer now is missing from this sample
    /// alone.
    pub(super) fn sample(&self) -> SensorSample {
        let device = self.device;
        let memory_c = self.field(FIELD_MEMORY_TEMPERATURE).ok();
        SensorSample {
            t: 0.0,
            power_mw: device.power_usage_mw().ok(),
            sm_mhz: device.clock_mhz(CLOCK_SM).ok(),
            memory_mhz: device.clock_mhz(CLOCK_MEMORY).ok(),
            gpu_c: device.temperature(SENSOR_GPU).ok().map(u32::cast_signed),
            // The field is 0 on memory that has no sensor.
            memory_c: memory_c
                .filter(|it| *it != 0)
                .and_then(|it| i32::try_from(it).ok()),
            reasons: self.clocks_event_reasons().ok().map(|it| it.0),
            utilization_percent: device.gpu_utilization_percent().ok(),
        }
    }

    /// What a load must not move.
    pub(super) fn counters(&self) -> LoadCounters {
        LoadCounters {
            ecc_volatile: self.reading(self.ecc_errors(VOLATILE)),
            ecc_aggregate: self.reading(self.ecc_errors(AGGREGATE)),
            pcie_replays: self.reading(self.device.pcie_replay_counter().map(u64::from)),
            row_remapping: self.reading(self.row_remapping()),
            retired_pages: self.reading(self.retired_pages()),
            violations: self.reading(self.violations()),
        }
    }

    /// Who uses the GPU, and how much of its memory.
    pub(super) fn users(&self) -> GpuFacts {
        GpuFacts {
            processes: self.reading(self.processes()),
            memory: self.reading(self.memory()),
            compute_mode: self.reading(self.device.compute_mode().map(compute_mode)),
            ..GpuFacts::default()
        }
    }

    /// The memory, and where `with_lists` all processes, own ones included. The reason where a call
    /// failed.
    pub(super) fn users_of_all(
        &self,
        with_lists: bool,
    ) -> Result<(MemoryUse, Option<Vec<GpuProcess>>), String> {
        let memory = self.memory().map_err(|it| it.to_string())?;
        let processes = with_lists.then(|| self.all_processes()).transpose();
        Ok((memory, processes.map_err(|it| it.to_string())?))
    }

    pub(super) fn compute_mode_now(&self) -> Reading<ComputeMode> {
        self.reading(self.device.compute_mode().map(compute_mode))
    }

    pub(super) fn power_limit_mw(&self) -> Option<u32> {
        self.device.enforced_power_limit_mw().ok()
    }

    fn reading<T>(&self, called: Called<T>) -> Reading<T> {
        match called {
            Ok(value) => Reading::Value(value),
            Err(failure) => failure.reading(self.driver.branch),
        }
    }

    fn identity(&self) {
        let device = self.device;
        self.read_uuid();
        self.pci();
        self.tell("name", device.name());
        self.tell("serial", device.serial());
        self.tell("minor_number", device.minor_number());
        self.tell("compute_capability", self.compute_capability());
        self.tell("vbios_version", device.vbios_version());
        self.tell("board_part_number", device.board_part_number());
        self.tell("gsp_firmware_version", device.gsp_firmware_version());
        self.tell("virtualization_mode", self.virtualization_mode());
    }

    fn modes(&self) {
        let device = self.device;
        self.tell(
            "persistence_mode",
            device.persistence_mode().map(|it| it != 0),
        );
        self.tell("compute_mode", device.compute_mode().map(compute_mode));
        self.tell("ecc_mode", self.ecc_mode());
        let mig = self.mig_mode();
        let mig_is_on = mig.as_ref().is_ok_and(|it| it.current);
        let mig_is_off = mig.as_ref().is_ok_and(|it| !it.current);
        self.tell("mig", mig.clone());
        match mig {
            Ok(_) if mig_is_on => self.tell("mig_devices", self.mig_devices()),
            Ok(_) if mig_is_off => self.tell("mig_devices", Ok(Vec::<MigDevice>::new())),
            Ok(_) => {}
            Err(failure) => self.tell("mig_devices", Err::<Vec<MigDevice>, _>(failure)),
        }
    }

    fn memory_health(&self) {
        let device = self.device;
        self.tell("ecc_volatile", self.ecc_errors(VOLATILE));
        self.tell("ecc_aggregate", self.ecc_errors(AGGREGATE));
        self.tell("sram_threshold_exceeded", device.sram_threshold_exceeded());
        self.tell("row_remapping", self.row_remapping());
        self.tell("retired_pages", self.retired_pages());
        self.tell("repair_status", self.repair_status());
        self.tell("unrepairable_memory", device.unrepairable_memory());
        self.tell("inforom_image_version", device.inforom_image_version());
        self.tell("recovery_action", self.recovery_action());
    }

    fn links(&self) {
        self.tell("pcie", self.pcie());
        self.tell(
            "pcie_replays",
            self.device.pcie_replay_counter().map(u64::from),
        );
        self.tell_reading("nvlinks", &self.nvlinks());
        self.tell_reading("fabric", &self.fabric());
    }

    fn load(&self) {
        self.tell("clocks", self.clocks());
        self.tell("clocks_event_reasons", self.clocks_event_reasons());
        self.tell("violations", self.violations());
        self.tell("temperature", self.temperature());
        self.tell("power", self.power());
        self.tell("performance_state", self.device.performance_state());
        let not_asked =
            Reading::<Utilization>::NotRead("not asked, no check judges by it".to_owned());
        self.tell_reading("utilization", &not_asked);
        self.tell("processes", self.processes());
    }

    fn tell<T: Serialize>(&self, field: &str, called: Called<T>) {
        self.tell_reading(field, &self.reading(called));
    }

    fn tell_reading<T: Serialize>(&self, field: &str, reading: &Reading<T>) {
        self.output.gpu(self.index, field, reading);
    }

    /// `None` where the GPU or driver has no such thing; everything else that goes wrong spoils the
    /// whole reading, so that a part which was not read is never taken for one that does not exist.
    fn optional<T>(&self, called: Called<T>) -> Called<Option<T>> {
        match called {
            Ok(value) => Ok(Some(value)),
            Err(failure) if failure.is_not_supported(self.driver.branch) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// A value that people are told and no check judges by: `None`, too, where the library lacks
    /// the function.
    fn told_only<T>(&self, called: Called<T>) -> Called<Option<T>> {
        match called {
            Err(failure) if failure.is_missing_function() => Ok(None),
            called => self.optional(called),
        }
    }

    fn pci(&self) {
        match self.device.pci() {
            Ok(pci) => {
                self.tell("pci_address", Ok(pci_address(&pci)));
                let device_id = u16::try_from(pci.device_id >> 16).unwrap_or_default();
                self.tell("pci_device_id", Ok(device_id));
                self.tell("pci_subsystem_id", Ok(pci.subsystem_id));
            }
            Err(failure) => {
                self.tell("pci_address", Err::<String, _>(failure.clone()));
                self.tell("pci_device_id", Err::<u16, _>(failure.clone()));
                self.tell("pci_subsystem_id", Err::<u32, _>(failure));
            }
        }
    }

    fn compute_capability(&self) -> Called<ComputeCapability> {
        let (major, minor) = self.device.compute_capability()?;
        Ok(ComputeCapability {
            major: u32::try_from(major).unwrap_or_default(),
            minor: u32::try_from(minor).unwrap_or_default(),
        })
    }

    fn virtualization_mode(&self) -> Called<String> {
        // Source: nvml.h, nvmlGpuVirtualizationMode_t.
        self.device.virtualization_mode().map(|mode| match mode {
            0 => "none".to_owned(),
            1 => "pass_through".to_owned(),
            2 => "vgpu".to_owned(),
            3 => "host_vgpu".to_owned(),
            4 => "host_vsga".to_owned(),
            other => format!("unknown ({other})"),
        })
    }

    fn ecc_mode(&self) -> Called<EccMode> {
        let (current, pending) = self.device.ecc_mode()?;
        Ok(EccMode {
            current: current != 0,
            pending: pending != 0,
        })
    }

    fn mig_mode(&self) -> Called<MigMode> {
        let (current, pending) = self.device.mig_mode()?;
        Ok(MigMode {
            current: current != 0,
            pending: pending != 0,
        })
    }

    fn mig_devices(&self) -> Called<Vec<MigDevice>> {
        let mut devices = Vec::new();
        for index in 0..self.device.max_mig_device_count()? {
            let device = match self.device.mig_device(index) {
                Ok(device) => device,
                Err(failure) if failure.status() == Some(super::driver::ERROR_NOT_FOUND) => {
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            devices.push(MigDevice {
                uuid: device.uuid()?,
                name: device.name()?,
                memory_total_bytes: device.memory()?.total,
            });
        }
        Ok(devices)
    }

    pub(super) fn memory(&self) -> Called<MemoryUse> {
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
    fn ecc_errors(&self, counter: u32) -> Called<EccErrors> {
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

    fn row_remapping(&self) -> Called<RowRemapping> {
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

    fn retired_pages(&self) -> Called<RetiredPages> {
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

    fn recovery_action(&self) -> Called<RecoveryAction> {
        let action = self.field(FIELD_GPU_RECOVERY_ACTION)?;
        Ok(recovery_action(action))
    }

    fn field(&self, field: u32) -> Called<u64> {
        let mut values = self.device.field_values(&[(field, 0)])?;
        values.remove(0)
    }

    /// Generation and width of the PCIe link as they are now.
    pub(super) fn current_pcie_link(&self) -> Option<(u32, u32)> {
        let generation = self.device.current_pcie_link_generation().ok()?;
        Some((generation, self.device.current_pcie_link_width().ok()?))
    }

    fn pcie(&self) -> Called<PcieLink> {
        let device = self.device;
        Ok(PcieLink {
            current_generation: device.current_pcie_link_generation()?,
            current_width: device.current_pcie_link_width()?,
            max_generation: device.max_pcie_link_generation()?,
            max_width: device.max_pcie_link_width()?,
            gpu_max_generation: self.told_only(device.gpu_max_pcie_link_generation())?,
        })
    }

    /// Every link that the GPU has; a GPU all of whose links are refused has no NVLink.
    fn nvlinks(&self) -> Reading<Vec<NvLink>> {
        let mut states = Vec::new();
        for link in 0..NVLINK_LINKS_MAXIMUM {
            match self.device.nvlink_state(link) {
                Ok(state) => states.push(Some(state)),
                Err(failure) if self.has_no_such_link(&failure) => states.push(None),
                Err(failure) => return failure.reading(self.driver.branch),
            }
        }
        let mut links = links_of(&states);
        if links.is_empty() {
            return Reading::NotSupported;
        }
        let read = self
            .add_nvlink_errors(&mut links)
            .and_then(|()| self.add_nvlink_fields(&mut links));
        match read {
            Ok(()) => Reading::Value(links),
            Err(failure) => Reading::NotRead(failure.to_string()),
        }
    }

    fn has_no_such_link(&self, failure: &Failure) -> bool {
        failure.is_not_supported(self.driver.branch)
            || failure.status() == Some(super::driver::ERROR_INVALID_ARGUMENT)
    }

    /// The error counters of the active links. A counter of one link takes NVML over 2 ms, so that
    /// the sums over all links are asked first, in one call: a sum of zero says the same of every
    /// link.
    fn add_nvlink_errors(&self, links: &mut [NvLink]) -> Called<()> {
        const SUMS: [u32; 3] = [
            FIELD_NVLINK_REPLAYS,
            FIELD_NVLINK_RECOVERIES,
            FIELD_NVLINK_CRC_ERRORS,
        ];
        let sums = self
            .device
            .field_values(&SUMS.map(|field| (field, ALL_LINKS)));
        let mut sums = self.optional(sums)?.unwrap_or_default().into_iter();
        let mut next = || sums.next().map_or(Ok(None), |sum| self.optional(sum));
        let (replays, recoveries, crc_errors) = (next()?, next()?, next()?);
        for link in links.iter_mut().filter(|it| it.active) {
            let count = |sum: Option<u64>, counter| match sum {
                Some(0) => Ok(Some(0)),
                Some(_) | None => {
                    self.optional(self.device.nvlink_error_counter(link.link, counter))
                }
            };
            link.replay_errors = count(replays, NVLINK_ERROR_REPLAY)?;
            link.recovery_errors = count(recoveries, NVLINK_ERROR_RECOVERY)?;
            link.crc_flit_errors = count(crc_errors, NVLINK_ERROR_CRC_FLIT)?;
            // Where the driver sums a link's CRC errors, its count of errors in data holds those
            // that forward error correction repaired, which every healthy link collects.
            if crc_errors.is_none() {
                link.crc_data_errors = count(None, NVLINK_ERROR_CRC_DATA)?;
            }
        }
        Ok(())
    }

    /// Speed, and the error counts of NVLink 5.
    fn add_nvlink_fields(&self, links: &mut [NvLink]) -> Called<()> {
        let active: Vec<u32> = links
            .iter()
            .filter(|it| it.active)
            .map(|it| it.link)
            .collect();
        let Some(first) = active.first() else {
            return Ok(());
        };
        let of_links = |field| self.field_of_links(field, *first, &active);
        let mut speeds = of_links(FIELD_NVLINK_SPEED)?.into_iter();
        let mut failed_recoveries = of_links(FIELD_NVLINK_FAILED_RECOVERIES)?.into_iter();
        let mut recovery_events = of_links(FIELD_NVLINK_RECOVERY_EVENTS)?.into_iter();
        let mut effective_errors = of_links(FIELD_NVLINK_EFFECTIVE_ERRORS)?.into_iter();
        let mut symbol_errors = of_links(FIELD_NVLINK_SYMBOL_ERRORS)?.into_iter();
        for link in links.iter_mut().filter(|it| it.active) {
            link.speed_mbps = speeds.next().flatten();
            // The counter of older links, all recoveries of NVLink 5, and its failed ones count the
            // same events.
            link.recovery_errors = link
                .recovery_errors
                .max(failed_recoveries.next().flatten())
                .max(recovery_events.next().flatten());
            link.effective_errors = effective_errors.next().flatten();
            link.symbol_errors = symbol_errors.next().flatten();
        }
        Ok(())
    }

    /// A field of every active link, in a call of its own, since a field that a driver refuses can
    /// spoil the others of its call. The first link tells whether there is such a field; nothing is
    /// told of any link where there is none.
    fn field_of_links(&self, field: u32, first: u32, links: &[u32]) -> Called<Vec<Option<u64>>> {
        let mut probed = self.device.field_values(&[(field, first)])?;
        if self.optional(probed.remove(0))?.is_none() {
            return Ok(Vec::new());
        }
        let asked: Vec<(u32, u32)> = links.iter().map(|link| (field, *link)).collect();
        let values = self.device.field_values(&asked)?;
        values.into_iter().map(|it| self.optional(it)).collect()
    }

    fn fabric(&self) -> Reading<FabricState> {
        match self.device.fabric() {
            Ok(info) => fabric_state(&info),
            Err(failure) => failure.reading(self.driver.branch),
        }
    }

    fn clocks(&self) -> Called<Clocks> {
        let device = self.device;
        Ok(Clocks {
            sm_mhz: device.clock_mhz(CLOCK_SM)?,
            memory_mhz: device.clock_mhz(CLOCK_MEMORY)?,
            max_sm_mhz: self.optional(device.max_clock_mhz(CLOCK_SM))?,
            max_memory_mhz: self.optional(device.max_clock_mhz(CLOCK_MEMORY))?,
        })
    }

    /// Renamed in R535; older drivers know the old name only.
    fn clocks_event_reasons(&self) -> Called<ClocksEventReasons> {
        match self.device.clocks_event_reasons() {
            Err(failure) if failure.is_missing_function() => self.device.clocks_throttle_reasons(),
            other => other,
        }
        .map(ClocksEventReasons)
    }

    fn violations(&self) -> Called<ViolationTimes> {
        let policy = |policy| self.optional(self.device.violation_ns(policy));
        let mut times = ViolationTimes {
            power_ns: policy(POLICY_POWER)?,
            thermal_ns: policy(POLICY_THERMAL)?,
            sync_boost_ns: policy(POLICY_SYNC_BOOST)?,
            reliability_ns: policy(POLICY_RELIABILITY)?,
            ..ViolationTimes::default()
        };
        if let Some([thermal, power_brake]) = self.driver.hardware_slowdown_fields() {
            let asked = [(thermal, 0), (power_brake, 0)];
            let mut values = self.device.field_values(&asked)?.into_iter();
            let mut next = || values.next().map_or(Ok(None), |value| self.optional(value));
            times.hw_thermal_ns = next()?;
            times.hw_power_brake_ns = next()?;
        }
        Ok(times)
    }

    fn temperature(&self) -> Called<Temperature> {
        let device = self.device;
        let threshold = |threshold| {
            let read = self.optional(device.temperature_threshold(threshold));
            // GPUs that speak of T.Limit instead answer "invalid argument" on some drivers.
            match read {
                Err(failure) if failure.status() == Some(super::driver::ERROR_INVALID_ARGUMENT) => {
                    Ok(None)
                }
                other => other.map(|it| it.map(u32::cast_signed).filter(|it| is_threshold(*it))),
            }
        };
        let memory = self.optional(self.field(FIELD_MEMORY_TEMPERATURE))?;
        Ok(Temperature {
            gpu_c: device.temperature(SENSOR_GPU)?.cast_signed(),
            // The field is 0 on memory that has no sensor.
            memory_c: memory.filter(|it| *it != 0).map(degrees),
            slowdown_c: threshold(THRESHOLD_SLOWDOWN)?,
            shutdown_c: threshold(THRESHOLD_SHUTDOWN)?,
            gpu_max_c: threshold(THRESHOLD_GPU_MAX)?,
            memory_max_c: threshold(THRESHOLD_MEMORY_MAX)?,
            tlimit_c: self.optional(device.margin_temperature_c())?,
        })
    }

    fn power(&self) -> Called<Power> {
        let device = self.device;
        let range = self.optional(device.power_limit_range_mw())?;
        Ok(Power {
            draw_mw: self.optional(device.power_usage_mw())?,
            limit_mw: device.enforced_power_limit_mw()?,
            default_limit_mw: self.optional(device.default_power_limit_mw())?,
            min_limit_mw: range.map(|(min, _)| min),
            max_limit_mw: range.map(|(_, max)| max),
        })
    }

    /// Those of others.
    fn processes(&self) -> Called<Vec<GpuProcess>> {
        let mut processes = self.all_processes()?;
        processes.retain(|it| !is_own_process(it.pid));
        Ok(processes)
    }

    /// Those of others while a worker of this validator works the GPU; none where the driver does
    /// not say.
    pub(super) fn processes_beside_a_worker(&self) -> Vec<GpuProcess> {
        let all = self.all_processes().unwrap_or_default();
        beside_a_worker(all, is_own_process)
    }

    /// A process that both computes and draws is listed once, as one that draws.
    pub(super) fn all_processes(&self) -> Called<Vec<GpuProcess>> {
        let mut processes: Vec<GpuProcess> = Vec::new();
        let graphics = self.optional(self.device.graphics_processes())?;
        let listed = [
            (true, graphics.unwrap_or_default()),
            (false, self.device.compute_processes()?),
        ];
        for (graphics, list) in listed {
            for (pid, used_memory_bytes) in list {
                if !processes.iter().any(|it| it.pid == pid) {
                    processes.push(GpuProcess {
                        pid,
                        name: process_name(pid),
                        used_memory_bytes,
                        graphics,
                    });
                }
            }
        }
        Ok(processes)
    }
}

/// Of the processes on a GPU that a worker works, those of others. Where none of them is our own,
/// the driver counts processes in another namespace than ours, and the worker is the one that holds
/// most of the memory.
fn beside_a_worker(
    mut processes: Vec<GpuProcess>,
    is_own: impl Fn(u32) -> bool,
) -> Vec<GpuProcess> {
    let count = processes.len();
    processes.retain(|it| !is_own(it.pid));
    if processes.len() == count {
        let memory = |it: &(usize, &GpuProcess)| it.1.used_memory_bytes;
        let worker = processes.iter().enumerate().max_by_key(memory);
        if let Some((worker, _)) = worker {
            processes.remove(worker);
        }
    }
    processes
}

/// The links up to the last one that answers, by their numbers. One that is refused below another
/// that answers is a link that the GPU should have; those above the last may never have been made.
fn links_of(states: &[Option<u32>]) -> Vec<NvLink> {
    let count = states
        .iter()
        .rposition(Option::is_some)
        .map_or(0, |it| it + 1);
    (0..)
        .zip(&states[..count])
        .map(|(link, state)| NvLink {
            link,
            active: state.is_some_and(|it| NVLINK_USABLE_STATES.contains(&it)),
            ..NvLink::default()
        })
        .collect()
}

/// A number that no `i32` holds is no temperature either; it must look too hot rather than not
/// read.
fn degrees(celsius: u64) -> i32 {
    i32::try_from(celsius).unwrap_or(i32::MAX)
}

/// Drivers answer 0, offsets from another threshold or plain nonsense for thresholds that a GPU
/// does not keep. Below 40 C a GPU would slow down when idle, and above 150 C silicon does not
/// live.
fn is_threshold(celsius: i32) -> bool {
    (40..=150).contains(&celsius)
}

/// This worker, the validator that started it, or another of its workers.
fn is_own_process(pid: u32) -> bool {
    let validator = std::os::unix::process::parent_id();
    pid == std::process::id() || pid == validator || process_stat::parent(pid) == Some(validator)
}

/// The name of an executable, else of its thread; `None` for a process that this one cannot see.
fn process_name(pid: u32) -> Option<String> {
    let executable = std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let name = executable
        .as_deref()
        .and_then(|path| path.file_name())
        .map(|name| name.to_string_lossy().into_owned());
    name.or_else(|| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        Some(comm.trim_end().to_owned())
    })
}

fn pci_address(pci: &PciIdentity) -> String {
    format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device)
}

// Source: nvml.h, nvmlComputeMode_t.
fn compute_mode(number: u32) -> ComputeMode {
    match number {
        0 => ComputeMode::Default,
        1 => ComputeMode::ExclusiveThread,
        2 => ComputeMode::Prohibited,
        3 => ComputeMode::ExclusiveProcess,
        other => ComputeMode::Unknown(other),
    }
}

// Source: nvml.h, nvmlDeviceGpuRecoveryAction_t.
fn recovery_action(number: u64) -> RecoveryAction {
    match number {
        0 => RecoveryAction::None,
        1 => RecoveryAction::GpuReset,
        2 => RecoveryAction::NodeReboot,
        3 => RecoveryAction::DrainP2p,
        4 => RecoveryAction::DrainAndReset,
        other => RecoveryAction::Unknown(u32::try_from(other).unwrap_or(u32::MAX)),
    }
}

fn fabric_state(info: &FabricInfo) -> Reading<FabricState> {
    // Source: nvml.h, NVML_GPU_FABRIC_STATE_*.
    let state = match info.state {
        0 => return Reading::NotSupported,
        1 => "not_started".to_owned(),
        2 => "in_progress".to_owned(),
        3 => "completed".to_owned(),
        other => format!("unknown ({other})"),
    };
    let status = match info.status {
        0 => "success".to_owned(),
        other => super::calls::status_name(other),
    };
    let uuid_is_set = info.cluster_uuid.iter().any(|byte| *byte != 0);
    Reading::Value(FabricState {
        state,
        status,
        clique_id: Some(info.clique_id),
        cluster_uuid: uuid_is_set.then(|| uuid_text(&info.cluster_uuid)),
        unhealthy: info.health_mask.map(unhealthy_parts),
    })
}

fn uuid_text(bytes: &[u8; 16]) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for (position, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&position) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The parts of a fabric health mask that say unhealthy.
// Source: nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: two bits for each part, 1 is true; four bits of
// configuration at bit 8, where 0 is not supported and 1 is none wrong.
fn unhealthy_parts(mask: u32) -> Vec<String> {
    const PARTS: [(u32, &str); 4] = [
        (0, "degraded bandwidth"),
        (2, "route recovery in progress"),
        (4, "route unhealthy"),
        (6, "access timeout recovery"),
    ];
    let mut unhealthy: Vec<String> = PARTS
        .iter()
        .filter(|(shift, _)| mask >> shift & 0x3 == 1)
        .map(|(_, part)| (*part).to_owned())
        .collect();
    match mask >> 8 & 0xf {
        0 | 1 => {}
        2 => unhealthy.push("incorrect configuration: system GUID".to_owned()),
        3 => unhealthy.push("incorrect configuration: chassis serial number".to_owned()),
        4 => unhealthy.push("incorrect configuration: no partition".to_owned()),
        5 => unhealthy.push("incorrect configuration: insufficient NVLinks".to_owned()),
        other => unhealthy.push(format!("incorrect configuration ({other})")),
    }
    unhealthy
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_not_taken_for_somebody_else() {
        let process = |(pid, mib): (u32, u64)| GpuProcess {
            pid,
            used_memory_bytes: Some(mib << 20),
            ..GpuProcess::default()
        };
        let beside = |listed: &[(u32, u64)], own: u32| -> Vec<u32> {
            let all = listed.iter().copied().map(process).collect();
            let others = beside_a_worker(all, |pid| pid == own);
            others.into_iter().map(|it| it.pid).collect()
        };
        assert_eq!(beside(&[(40, 77_000)], 40), [0_u32; 0]);
        assert_eq!(beside(&[(40, 500), (50, 77_000)], 40), [50]);
        // Numbers of another namespace, which say nothing of whose they are.
        assert_eq!(beside(&[(9040, 77_000)], 40), [0_u32; 0]);
        assert_eq!(beside(&[(9050, 500), (9040, 77_000)], 40), [9050]);
        assert_eq!(beside(&[], 40), [0_u32; 0]);
    }

    #[test]
    fn a_healthy_mask_names_nothing() {
        // Every two-bit part "false" (2), configuration "none" (1).
        assert!(unhealthy_parts(0b0001_1010_1010).is_empty());
        assert!(unhealthy_parts(0).is_empty());
    }

    #[test]
    fn a_mask_names_each_unhealthy_part() {
        assert_eq!(
            unhealthy_parts(0b0101_1001_1001),
            [
                "degraded bandwidth",
                "route unhealthy",
                "incorrect configuration: insufficient NVLinks"
            ]
        );
    }

    #[test]
    fn the_slowdown_fields_follow_the_driver() {
        let fields = |version| DriverNumber::of(version).hardware_slowdown_fields();
        assert_eq!(fields("580.65.06"), Some([252, 253]));
        assert_eq!(fields("570.86.15"), Some([252, 253]));
        assert_eq!(fields("580.82.07"), Some([270, 271]));
        assert_eq!(fields("590.44.01"), Some([270, 271]));
        assert_eq!(fields("535.104.05"), None);
        assert_eq!(fields("?"), None);
    }

    #[test]
    fn a_refused_link_below_one_that_answers_is_a_link_that_is_down() {
        let active = |states: &[Option<u32>]| -> Vec<bool> {
            links_of(states).iter().map(|it| it.active).collect()
        };
        assert_eq!(
            active(&[Some(1), None, Some(0), Some(1), None]),
            [true, false, false, true]
        );
        assert_eq!(links_of(&[None, Some(1)])[1].link, 1);
        assert_eq!(links_of(&[None, None]), []);
        // Asleep is usable; a state that this version does not know is not.
        assert_eq!(active(&[Some(2), Some(3)]), [true, false]);
    }

    #[test]
    fn a_temperature_beyond_all_numbers_is_hot() {
        assert_eq!(degrees(1 << 40), i32::MAX);
        assert_eq!(degrees(95), 95);
    }

    #[test]
    fn nonsense_is_no_threshold() {
        assert!([40, 89, 95, 150].into_iter().all(is_threshold));
        let offset = 0xffff_fffe_u32.cast_signed();
        assert!(![0, 39, 151, offset].into_iter().any(is_threshold));
    }

    #[test]
    fn a_fabric_that_is_not_there_is_not_supported() {
        let mut info = FabricInfo {
            cluster_uuid: [0; 16],
            status: 0,
            clique_id: 0,
            state: 0,
            health_mask: None,
        };
        assert_eq!(fabric_state(&info), Reading::NotSupported);
        info.state = 3;
        info.status = 999;
        let Reading::Value(state) = fabric_state(&info) else {
            panic!("no state")
        };
        assert_eq!(
            (state.state.as_str(), state.status.as_str()),
            ("completed", "NVML_ERROR_UNKNOWN")
        );
    }
}
