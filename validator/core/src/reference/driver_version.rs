//! Driver versions, compared by number, never as text.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A driver version: `580.159.04`, `535.86`. Missing parts count as zero.
#[derive(Clone, Debug, JsonSchema)]
#[schemars(with = "String")]
pub struct DriverVersion {
    text: String,
    parts: [u32; 3],
}

impl DriverVersion {
    /// The branch: 580.
    pub fn branch(&self) -> u32 {
        self.parts[0]
    }
}

impl std::str::FromStr for DriverVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("`{text}` is not a driver version, expected one like 580.159.04");
        let mut parts = [0; 3];
        let mut count = 0;
        for part in text.split('.') {
            *parts.get_mut(count).ok_or_else(expected)? = part.parse().map_err(|_| expected())?;
            count += 1;
        }
        if count < 2 {
            return Err(expected());
        }
        Ok(Self {
            text: text.to_owned(),
            parts,
        })
    }
}

impl std::fmt::Display for DriverVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl PartialEq for DriverVersion {
    fn eq(&self, other: &Self) -> bool {
        self.parts == other.parts
    }
}

impl Eq for DriverVersion {}

impl PartialOrd for DriverVersion {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for DriverVersion {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.parts.cmp(&other.parts)
    }
}

impl Serialize for DriverVersion {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for DriverVersion {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::DriverVersion;

    fn version(text: &str) -> DriverVersion {
        text.parse().expect(text)
    }

    #[test]
    fn compares_by_number() {
        assert!(version("580.65.06") < version("580.159.04"));
        assert!(version("535.86") < version("535.86.10"));
        assert!(version("525.60.13") < version("535.54.03"));
        assert_eq!(version("455.23"), version("455.23.00"));
    }

    #[test]
    fn refuses_what_is_no_version() {
        for text in ["", "580", "580.x", "580.1.2.3", "v580.1", "580..1"] {
            assert!(text.parse::<DriverVersion>().is_err(), "{text}");
        }
    }
}
