//! Samples as a column for each sensor: eight burned GPUs have eight hundred, and names with each
//! would be most of the facts.

use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::SensorSample;

/// One sensor over time; `null` was not read.
type Column = Vec<Option<i64>>;

/// Samples of one GPU's sensors: the nth entry of every column belongs to the nth sample. A column
/// of which nothing was read is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SensorColumns {
    /// Milliseconds since the load began; negative before the first product.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_ms: Option<Column>,
    /// The times in facts of format 1, where every column holds its first number and then the
    /// difference of each number from the last one before it that was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    t_ms: Option<Column>,
    /// Milliwatts, averaged by the driver or instantaneous as the GPU has it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub power_mw: Column,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sm_mhz: Column,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_mhz: Column,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_c: Column,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_c: Column,
    /// Bits of NVML's clocks event reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Column,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub utilization_percent: Column,
}

pub(super) fn serialize<S: Serializer>(
    samples: &[SensorSample],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    SensorColumns::from(samples).serialize(serializer)
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<SensorSample>, D::Error> {
    SensorColumns::deserialize(deserializer)?
        .of_this_format()
        .samples()
        .map_err(D::Error::custom)
}

impl From<&[SensorSample]> for SensorColumns {
    #[expect(clippy::cast_possible_truncation, reason = "milliseconds of a burn")]
    fn from(samples: &[SensorSample]) -> Self {
        let column = |of: fn(&SensorSample) -> Option<i64>| {
            let column: Column = samples.iter().map(of).collect();
            let is_read = column.iter().any(Option::is_some);
            if is_read { column } else { Vec::new() }
        };
        Self {
            time_ms: Some(column(|it| Some((f64::from(it.t) * 1000.0).round() as i64))),
            t_ms: None,
            power_mw: column(|it| it.power_mw.map(i64::from)),
            sm_mhz: column(|it| it.sm_mhz.map(i64::from)),
            memory_mhz: column(|it| it.memory_mhz.map(i64::from)),
            gpu_c: column(|it| it.gpu_c.map(i64::from)),
            memory_c: column(|it| it.memory_c.map(i64::from)),
            reasons: column(|it| it.reasons.map(u64::cast_signed)),
            utilization_percent: column(|it| it.utilization_percent.map(i64::from)),
        }
    }
}

/// The numbers of a column, each as `T`.
fn numbers<T: TryFrom<i64>>(
    name: &str,
    column: &Column,
    count: usize,
) -> Result<Vec<Option<T>>, String> {
    if column.is_empty() {
        return Ok(std::iter::repeat_with(|| None).take(count).collect());
    }
    if column.len() != count {
        return Err(format!(
            "samples have {count} times and {} values in {name}, expected as many or none",
            column.len()
        ));
    }
    let number = |value: &Option<i64>| {
        let Some(value) = *value else { return Ok(None) };
        T::try_from(value)
            .map(Some)
            .map_err(|_| format!("samples have {value} in {name}, which is no such number"))
    };
    column.iter().map(number).collect()
}

/// Makes the differences of format 1 the numbers that they were made of.
fn add_up(column: &mut Column) {
    let mut last = 0_i64;
    for value in column.iter_mut().flatten() {
        last = last.wrapping_add(*value);
        *value = last;
    }
}

fn at<T: Copy>(column: &[Option<T>], index: usize) -> Option<T> {
    column.get(index).copied().flatten()
}

impl SensorColumns {
    /// The same as this version writes them.
    fn of_this_format(mut self) -> Self {
        if self.time_ms.is_none()
            && let Some(mut times) = self.t_ms.take()
        {
            let sensors = [
                &mut times,
                &mut self.power_mw,
                &mut self.sm_mhz,
                &mut self.memory_mhz,
                &mut self.gpu_c,
                &mut self.memory_c,
                &mut self.reasons,
                &mut self.utilization_percent,
            ];
            sensors.into_iter().for_each(add_up);
            self.time_ms = Some(times);
        }
        self
    }

    /// The samples, unless a column is shorter or longer than that of the times or leaves its
    /// range.
    fn samples(&self) -> Result<Vec<SensorSample>, String> {
        let (Some(times), None) = (&self.time_ms, &self.t_ms) else {
            return Err("samples have no time_ms".to_owned());
        };
        let count = times.len();
        let power_mw = numbers("power_mw", &self.power_mw, count)?;
        let sm_mhz = numbers("sm_mhz", &self.sm_mhz, count)?;
        let memory_mhz = numbers("memory_mhz", &self.memory_mhz, count)?;
        let gpu_c = numbers("gpu_c", &self.gpu_c, count)?;
        let memory_c = numbers("memory_c", &self.memory_c, count)?;
        let reasons = numbers::<i64>("reasons", &self.reasons, count)?;
        let utilization = numbers("utilization_percent", &self.utilization_percent, count)?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            reason = "milliseconds of a burn"
        )]
        let sample = |index: usize| {
            let t_ms = at(times, index).ok_or("samples have no time: null in time_ms")?;
            Ok(SensorSample {
                t: (t_ms as f64 / 1000.0) as f32,
                power_mw: at(&power_mw, index),
                sm_mhz: at(&sm_mhz, index),
                memory_mhz: at(&memory_mhz, index),
                gpu_c: at(&gpu_c, index),
                memory_c: at(&memory_c, index),
                reasons: at(&reasons, index).map(i64::cast_unsigned),
                utilization_percent: at(&utilization, index),
            })
        };
        (0..count).map(sample).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::SensorLog;

    #[test]
    fn samples_come_back_as_they_were() {
        let sample = |index: u16| SensorSample {
            t: (f32::from(index) - 3.0) / 8.0,
            power_mw: (!index.is_multiple_of(3)).then_some(690_000 + u32::from(index)),
            gpu_c: Some(i32::from(index) - 2),
            reasons: Some(4),
            ..SensorSample::default()
        };
        let log = SensorLog {
            samples: (0..20).map(sample).collect(),
            ..SensorLog::default()
        };
        let text = serde_json::to_string(&log).expect("JSON");
        assert!(
            text.contains(r#""time_ms":[-375,-250,-125,0,125,"#),
            "{text}"
        );
        assert!(!text.contains("memory_c"), "{text}");
        let read: SensorLog = serde_json::from_str(&text).expect("read back");
        assert_eq!(read, log);
    }

    fn read(samples: &str) -> serde_json::Result<SensorLog> {
        let mut log = serde_json::to_value(SensorLog::default()).expect("JSON");
        log["samples"] = serde_json::from_str(samples).expect("JSON");
        serde_json::from_value(log)
    }

    #[test]
    fn columns_that_are_no_samples_are_refused() {
        assert!(read(r#"{"time_ms": [1, 2], "gpu_c": [40, null]}"#).is_ok());
        for (senseless, expected) in [
            (
                r#"{"time_ms": [1, 2], "gpu_c": [40]}"#,
                "2 times and 1 values in gpu_c",
            ),
            (
                r#"{"time_ms": [1], "power_w": [4]}"#,
                "unknown field `power_w`",
            ),
            (r#"{"time_ms": [null]}"#, "null in time_ms"),
            (r#"{"time_ms": [1], "sm_mhz": [-1]}"#, "-1 in sm_mhz"),
            (
                r#"{"time_ms": [1], "gpu_c": [9223372036854775807]}"#,
                "9223372036854775807 in gpu_c",
            ),
            (r#"{"gpu_c": []}"#, "no time_ms"),
            (r#"{"time_ms": [1], "t_ms": [1]}"#, "no time_ms"),
        ] {
            let error = read(senseless).expect_err(senseless).to_string();
            assert!(error.contains(expected), "{senseless}: {error}");
        }
    }

    #[test]
    fn differences_of_format_1_are_read() {
        let old =
            r#"{"t_ms": [-375, 125, 300], "gpu_c": [40, null, -2], "power_mw": [null, 5, 1]}"#;
        let new =
            r#"{"time_ms": [-375, -250, 50], "gpu_c": [40, null, 38], "power_mw": [null, 5, 6]}"#;
        assert_eq!(read(old).expect("old"), read(new).expect("new"));
        assert!(read(r#"{"t_ms": [1], "sm_mhz": [-1]}"#).is_err());
    }

    /// The facts of eight GPUs are 55 KB without a burn (tests/facts/h200x8.facts.json), and the
    /// counters and results of one 3 KB a GPU: the curves must not be more than 4 KB a GPU if all
    /// are to be below 112 KB. With names at every number they are 12 KB a GPU.
    #[test]
    fn the_curves_of_a_gpu_are_small() {
        let samples: Vec<SensorSample> = (0..100_u16)
            .map(|index| {
                let noise = u32::from(index) * 7919 % 97;
                SensorSample {
                    t: f32::from(index) * 0.612,
                    power_mw: Some(690_123 + noise * 41),
                    sm_mhz: Some(1425 + noise % 4 * 15),
                    memory_mhz: Some(3201),
                    gpu_c: Some(40 + i32::from(index / 4)),
                    memory_c: Some(50 + i32::from(index / 4)),
                    reasons: Some(4),
                    utilization_percent: Some(100),
                }
            })
            .collect();
        let bytes = serde_json::to_string(&SensorColumns::from(&samples[..]))
            .expect("JSON")
            .len();
        assert!(bytes < 4000, "{bytes} bytes");
    }
}
