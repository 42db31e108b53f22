//! What the sentinel sees of a GPU's health while it works it, and which of it is a finding.

use crate::facts::{ClocksEventReasons, EccErrors, GemmDetail, LoadCounters, Reading, WorkloadRun};
use crate::reference::{XidClass, xid};
use crate::wrong_products::{wrong_copies, wrong_operands, wrong_reference, wrong_results};

/// Readings in a row, a second apart, in which hardware slows the GPU down: one alone may be a
/// moment's power brake.
// Source: this project's own choice.
const SLOW_READINGS: u32 = 5;
/// Hardware reduces the clocks: for heat, or because the board or the power supply requests it.
// Source: nvml.h, nvmlClocksEventReasons.
const HARDWARE_REASONS: u64 = ClocksEventReasons::HW_SLOWDOWN
    | ClocksEventReasons::HW_THERMAL_SLOWDOWN
    | ClocksEventReasons::HW_POWER_BRAKE_SLOWDOWN;

/// What was seen of one GPU so far.
#[derive(Clone, Debug, Default)]
pub struct Health {
    uncorrectable_at_first: Option<u64>,
    slow_readings: u32,
}

impl Health {
    /// Takes a reading of a second; returns a finding.
    pub fn condition(
        &mut self,
        is_working: bool,
        reasons: Option<u64>,
        counters: &LoadCounters,
    ) -> Option<String> {
        let slow = ClocksEventReasons(reasons.unwrap_or_default() & HARDWARE_REASONS);
        if is_working && slow.0 != 0 {
            self.slow_readings += 1;
        } else {
            self.slow_readings = 0;
        }
        if self.slow_readings >= SLOW_READINGS {
            let names = slow.names().join(", ");
            return Some(format!(
                "hardware has slowed the GPU down for {SLOW_READINGS} s: {names}"
            ));
        }
        let now = uncorrectable(&counters.ecc_volatile)?;
        let first = *self.uncorrectable_at_first.get_or_insert(now);
        (now > first).then(|| format!("{} new uncorrectable ECC errors", now - first))
    }
}

fn uncorrectable(errors: &Reading<EccErrors>) -> Option<u64> {
    let errors = errors.value()?;
    let parts = [errors.sram_uncorrectable, errors.dram_uncorrectable];
    let sum = || parts.iter().flatten().copied().reduce(u64::saturating_add);
    errors.total_uncorrectable.or_else(sum)
}

/// The finding of an Xid; none where a foreign application, and not the GPU, may be its cause.
pub fn of_xid(number: u32, is_alone: bool) -> Option<String> {
    let class = xid(number).map(|it| it.class);
    let is_finding = match class {
        Some(XidClass::Informational) => false,
        // The worker's kernels do nothing wrong, so that on a GPU of its own the GPU did.
        Some(XidClass::Application | XidClass::Unknown) | None => is_alone,
        Some(
            XidClass::Contained
            | XidClass::Reset
            | XidClass::Reboot
            | XidClass::Hardware
            | XidClass::Software
            | XidClass::NvlinkBySeverity,
        ) => true,
    };
    is_finding.then(|| format!("Xid {number}"))
}

/// The finding of wrong results.
pub fn of_run(run: &WorkloadRun) -> Option<String> {
    if run.mismatches == 0 {
        return None;
    }
    if let Some(finding) = gemm_detail(run).and_then(|it| of_products(&it)) {
        return Some(finding);
    }
    let first = run.first_mismatches.first().map_or(String::new(), |it| {
        format!(
            ", the first at address {}: {} instead of {}",
            it.address, it.observed, it.expected
        )
    });
    Some(format!(
        "{} values differ from the expected ones{first}",
        run.mismatches
    ))
}

/// The detail of a run of workload `gemm`.
pub fn gemm_detail(run: &WorkloadRun) -> Option<GemmDetail> {
    let detail = run.detail.get(GemmDetail::NAME)?;
    serde_json::from_value(detail.clone()).ok()
}

/// What the burn's checks would name first.
fn of_products(detail: &GemmDetail) -> Option<String> {
    let copies = detail.copies.as_ref().and_then(wrong_copies);
    let wrong = detail.wrong.as_deref();
    copies.or_else(|| {
        let products = wrong?;
        wrong_results(products)
            .or_else(|| wrong_operands(products))
            .or_else(|| wrong_reference(products))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Precision, PrecisionRun, RequestedWork, WorkerEnd};
    use crate::worker_id::WorkerId;

    fn counters(uncorrectable: u64) -> LoadCounters {
        LoadCounters {
            ecc_volatile: Reading::Value(EccErrors {
                total_uncorrectable: Some(uncorrectable),
                ..EccErrors::default()
            }),
            ..LoadCounters::default()
        }
    }

    #[test]
    fn only_new_ecc_errors_are_a_finding() {
        let mut health = Health::default();
        for (count, finding) in [
            (7, None),
            (7, None),
            (9, Some("2 new uncorrectable ECC errors".to_owned())),
        ] {
            assert_eq!(health.condition(true, None, &counters(count)), finding);
        }
        let unread = LoadCounters::default();
        assert_eq!(Health::default().condition(true, None, &unread), None);
    }

    #[test]
    fn a_slowdown_of_five_seconds_at_work_is_a_finding() {
        let mut health = Health::default();
        let thermal = Some(ClocksEventReasons::HW_THERMAL_SLOWDOWN);
        let none = LoadCounters::default();
        for _ in 0..4 {
            assert_eq!(health.condition(true, thermal, &none), None);
        }
        assert_eq!(
            health.condition(true, Some(ClocksEventReasons::SW_POWER_CAP), &none),
            None
        );
        for _ in 0..20 {
            assert_eq!(
                health.condition(false, thermal, &none),
                None,
                "it is not at work"
            );
        }
        for _ in 0..4 {
            assert_eq!(health.condition(true, thermal, &none), None);
        }
        let finding = health.condition(true, thermal, &none).expect("five");
        assert!(finding.contains("hw_thermal_slowdown"), "{finding}");
    }

    #[test]
    fn an_applications_xid_is_a_finding_only_where_no_application_but_the_worker_is() {
        assert_eq!(of_xid(79, false), Some("Xid 79".to_owned()));
        assert_eq!(of_xid(31, false), None);
        assert_eq!(of_xid(31, true), Some("Xid 31".to_owned()));
    }

    #[test]
    fn wrong_products_are_named_by_their_precision() {
        let id = WorkerId::new("gemm", &["GPU-a"], 0);
        let end = Reading::Value(WorkerEnd::Finished);
        let mut run = WorkloadRun::empty(id, RequestedWork::default(), end);
        let named = |change: &dyn Fn(&mut PrecisionRun), run: &mut WorkloadRun| {
            let mut products = PrecisionRun::empty(Precision::Bf16, "sm_90a");
            change(&mut products);
            run.mismatches = crate::wrong_products::errors(&products);
            let detail = GemmDetail {
                wrong: Some(Box::new(products)),
                ..GemmDetail::default()
            };
            let detail = serde_json::to_value(&detail).expect("JSON");
            run.detail.insert(GemmDetail::NAME.to_owned(), detail);
            of_run(run)
        };
        assert_eq!(named(&|_| {}, &mut run), None);
        for (change, text) in [
            (
                &(|it: &mut PrecisionRun| it.mismatches = 2) as &dyn Fn(&mut PrecisionRun),
                "bf16: 2 blocks of results are wrong",
            ),
            (&|it| it.nonfinite = 1, "1 results are not finite"),
            (
                &|it| it.reference.operand_mismatches = 4,
                "bf16: operands in the GPU's memory differ",
            ),
            (
                &|it| it.reference.freivalds_worst = f64::NAN,
                "bf16: the reference product is wrong",
            ),
        ] {
            let finding = named(change, &mut run).expect("a finding");
            assert!(finding.contains(text), "{finding}");
        }
    }

    #[test]
    fn wrong_values_are_a_finding() {
        let id = WorkerId::new("memory", &["GPU-a"], 0);
        let end = Reading::Value(WorkerEnd::Finished);
        let mut run = WorkloadRun::empty(id, RequestedWork::default(), end);
        assert_eq!(of_run(&run), None);
        run.mismatches = 3;
        assert_eq!(
            of_run(&run),
            Some("3 values differ from the expected ones".to_owned())
        );
    }
}
