//! Quantities as people write them: `2GiB`, `80GB`, `3s`, `250ms`, `1000 launches`.

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// A number of bytes; written as a number, or with a unit (`KiB MiB GiB TiB` are powers of 1024,
/// `KB MB GB TB` of 1000).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

const BYTE_UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];

impl Bytes {
    /// Reads `2GiB`, `0.5 GiB` or `1024`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (number, unit) = BYTE_UNITS
            .iter()
            .find_map(|(suffix, unit)| text.strip_suffix(suffix).map(|number| (number, *unit)))
            .unwrap_or((text, 1));
        scaled(number, unit)
            .map(Self)
            .ok_or_else(|| format!("`{text}` is not a size such as 2GiB or 80GB"))
    }
}

/// A decimal number times a unit, exactly, or nothing when it is not a whole number of the smallest
/// unit.
fn scaled(number: &str, unit: u64) -> Option<u64> {
    let (whole, fraction) = number.trim().split_once('.').unwrap_or((number.trim(), ""));
    let digits = u32::try_from(fraction.len()).ok()?;
    let denominator = 10u128.checked_pow(digits)?;
    let numerator: u128 = format!("{whole}{fraction}").parse().ok()?;
    let product = numerator.checked_mul(u128::from(unit))?;
    (product % denominator == 0)
        .then(|| u64::try_from(product / denominator).ok())
        .flatten()
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BytesVisitor;
        impl Visitor<'_> for BytesVisitor {
            type Value = Bytes;
            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("a size such as 2GiB, 80GB or a number of bytes")
            }
            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                Bytes::parse(text).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(BytesVisitor)
    }
}

/// A time; written with its unit (`250ms`, `3s`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub Duration);

impl Time {
    pub fn as_ns(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{}us", self.0.as_micros()))
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_duration(&text).map(Self).map_err(de::Error::custom)
    }
}

/// When a change takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Trigger {
    /// This long after the node was prepared.
    AtNs(u64),
    /// Once this many kernels were launched on the GPU that the change is about (the first one,
    /// where there are several).
    AfterLaunches(u64),
    /// Once the GPU was under load for this long, all loads together.
    AfterLoadNs(u64),
    /// Once the GPU is so hot, in degrees Celsius.
    AtTemperatureC(i32),
}

/// Reads `3s`, `250ms`, `2min`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let units = [
        ("ms", 1_000_000),
        ("us", 1_000),
        ("min", 60_000_000_000),
        ("s", 1_000_000_000),
        ("h", 3_600_000_000_000),
    ];
    units
        .iter()
        .find_map(|(suffix, unit)| scaled(text.strip_suffix(suffix)?, *unit))
        .map(Duration::from_nanos)
        .ok_or_else(|| format!("`{text}` is not a time such as 3s or 250ms"))
}

/// Reads `1000 launches`.
pub fn parse_launches(text: &str) -> Result<u64, String> {
    text.trim()
        .strip_suffix("launches")
        .or_else(|| text.trim().strip_suffix("launch"))
        .and_then(|number| number.trim().parse().ok())
        .ok_or_else(|| format!("`{text}` is neither a number of launches such as `1000 launches`, nor a time such as `1s of load`, nor a temperature such as `70 C`"))
}

/// Reads what comes `after:` something on the GPU: `1000 launches`, `1.5s of load`, or `70 C`.
pub fn parse_after(text: &str) -> Result<Trigger, String> {
    let degrees = text.trim().strip_suffix('C');
    if let Some(degrees) = degrees.and_then(|it| it.trim().parse().ok()) {
        return Ok(Trigger::AtTemperatureC(degrees));
    }
    let Some(time) = text.trim().strip_suffix("of load") else {
        return parse_launches(text).map(Trigger::AfterLaunches);
    };
    let ns = u64::try_from(parse_duration(time)?.as_nanos());
    ns.map(Trigger::AfterLoadNs)
        .map_err(|_| format!("`{text}` is too long"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact() {
        assert_eq!(Bytes::parse("2GiB"), Ok(Bytes(2 << 30)));
        assert_eq!(
            Bytes::parse("615.5 MiB"),
            Ok(Bytes(615 * (1 << 20) + (1 << 19)))
        );
        assert_eq!(Bytes::parse("80GB"), Ok(Bytes(80_000_000_000)));
        assert_eq!(Bytes::parse("512"), Ok(Bytes(512)));
        assert!(Bytes::parse("0.3B").is_err());
        assert!(Bytes::parse("two GiB").is_err());
        assert!(Bytes::parse("99999999999TiB").is_err());
    }

    #[test]
    fn times_and_launches_are_read() {
        assert_eq!(parse_duration("3s"), Ok(Duration::from_secs(3)));
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("1.5min"), Ok(Duration::from_secs(90)));
        assert!(parse_duration("3").is_err());
        assert_eq!(parse_launches("1000 launches"), Ok(1000));
        assert!(parse_launches("1000").is_err());
        assert_eq!(
            parse_after("1000 launches"),
            Ok(Trigger::AfterLaunches(1000))
        );
        assert_eq!(
            parse_after("1.5s of load"),
            Ok(Trigger::AfterLoadNs(1_500_000_000))
        );
        assert_eq!(parse_after("70 C"), Ok(Trigger::AtTemperatureC(70)));
        assert!(parse_after("1.5s").is_err());
        assert!(parse_after("warm C").is_err());
    }
}
