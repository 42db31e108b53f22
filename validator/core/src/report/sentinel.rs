//! The JUnit report of a sentinel: a test case for each GPU.

use junit_report::{Duration, TestCase, TestResult, TestSuite};

use super::junit_xml::document;
use super::text::{one_line, xml};
use crate::sentinel::policy::State;
use crate::sentinel::status::{GpuStatus, Status};

/// The JUnit report, UTF-8.
pub fn sentinel_junit(status: &Status) -> anyhow::Result<String> {
    let simulated = status.simulated.as_ref().map_or("", |_| "SIMULATED ");
    let mut suite = TestSuite::new(&format!("{simulated}gpu-validator sentinel"));
    for gpu in &status.gpus {
        suite.add_testcase(case(gpu));
    }
    suite.set_system_out(&xml(&status.text()));
    document(vec![(suite, Vec::new())])
}

/// A GPU of which nothing was verified has not passed.
fn case(gpu: &GpuStatus) -> TestCase {
    let attribute = |text: &str| xml(&one_line(text));
    let name = attribute(&format!("sentinel_health {} {}", gpu.name, gpu.uuid));
    let mut case = TestCase::success(&name, Duration::ZERO);
    case.classname = Some("gpu-validator.sentinel".to_owned());
    if let Some(finding) = &gpu.finding {
        case.result = TestResult::Failure {
            type_: "fail".to_owned(),
            message: attribute(finding),
            cause: Some(xml(finding)),
        };
    } else if gpu.bytes_verified == 0 {
        let reason = if gpu.reason.is_empty() {
            gpu.state.name().to_owned()
        } else {
            format!("{}: {}", gpu.state.name(), gpu.reason)
        };
        let message = attribute(&format!("nothing was verified, the GPU is {reason}"));
        case.result = match gpu.state {
            State::Unknown => TestResult::Error {
                type_: "error".to_owned(),
                message,
                cause: None,
            },
            _ => TestResult::SkippedWithCause {
                type_: "skip".to_owned(),
                message,
                cause: None,
            },
        };
    }
    case
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faulty_gpu_fails_one_that_was_not_worked_is_skipped_and_one_without_reading_is_an_error() {
        let gpu = |uuid: &str, state, bytes_verified, finding: Option<&str>| GpuStatus {
            uuid: uuid.to_owned(),
            state,
            bytes_verified,
            finding: finding.map(str::to_owned),
            ..GpuStatus::default()
        };
        let status = Status {
            gpus: vec![
                gpu("GPU-a", State::Working, 8, None),
                gpu("GPU-b", State::Ill, 8, Some("3 values \u{1b} differ")),
                gpu("GPU-c", State::Away, 0, None),
                gpu("GPU-d", State::Unknown, 0, None),
            ],
            ..Status::default()
        };
        let text = sentinel_junit(&status).expect("a report");
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(text.contains("failures=\"1\""), "{text}");
        assert!(text.contains("errors=\"1\""), "{text}");
        assert_eq!(text.matches("<testcase").count(), 4, "{text}");
        assert_eq!(text.matches("<skipped").count(), 1, "{text}");
    }
}
