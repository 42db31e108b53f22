//! The GPU's links: PCIe, NVLink, and the fabric of its NVSwitches.

use validator_core::facts::{FabricState, NvLink, PcieLink, Reading};

use super::super::calls::{Called, Failure};
use super::super::library::FabricInfo;
use super::super::status;
use super::GpuReader;

// Source of all numbers: nvml.h.
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

impl GpuReader<'_> {
    pub(super) fn links(&self) {
        self.report("pcie", self.pcie());
        self.report(
            "pcie_replays",
            self.device.pcie_replay_counter().map(u64::from),
        );
        self.report_reading("nvlinks", &self.nvlinks());
        self.report_reading("fabric", &self.fabric());
    }

    /// Generation and width of the PCIe link as they are now.
    pub(in crate::probe::nvml) fn current_pcie_link(&self) -> Option<(u32, u32)> {
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
            gpu_max_generation: self.informative(device.gpu_max_pcie_link_generation())?,
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
            || failure.status() == Some(status::ERROR_INVALID_ARGUMENT)
    }

    /// The error counters of the active links. A counter of one link takes NVML over 2 ms, so that
    /// the sums over all links are queried first, in one call: a sum of zero means zero on every
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
    /// spoil the others of its call. The first link shows whether there is such a field; nothing is
    /// reported of any link where there is none.
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
}

/// The links up to the last one that answers, by their numbers. One that is refused below another
/// that answers is a link that the GPU should have; those above the last may never have been made.
fn links_of(states: &[Option<u32>]) -> Vec<NvLink> {
    let count = states
        .iter()
        .rposition(Option::is_some)
        .map_or(0, |it| it + 1);
    (0..)
        .zip(states.iter().take(count))
        .map(|(link, state)| NvLink {
            link,
            active: state.is_some_and(|it| NVLINK_USABLE_STATES.contains(&it)),
            ..NvLink::default()
        })
        .collect()
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
        other => status::status_name(other),
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
