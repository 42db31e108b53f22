//! CUDA versions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A CUDA version, written `"12.8"` or `"12.8.1"`; compared by major and minor, then update where
/// both name one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, JsonSchema)]
#[schemars(with = "String")]
pub struct CudaVersion {
    pub major: u32,
    pub minor: u32,
    pub update: Option<u32>,
}

impl CudaVersion {
    /// From `cuDriverGetVersion`: 1000 x major + 10 x minor.
    pub fn from_driver_number(number: u32) -> Self {
        Self {
            major: number / 1000,
            minor: number % 1000 / 10,
            update: None,
        }
    }
}

impl std::str::FromStr for CudaVersion {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || format!("`{text}` is not a CUDA version, expected one like \"12.8\" or \"12.8.1\"");
        let parts: Vec<u32> = text
            .split('.')
            .map(|part| part.parse().map_err(|_| expected()))
            .collect::<Result<_, _>>()?;
        match parts[..] {
            [major, minor] => Ok(Self {
                major,
                minor,
                update: None,
            }),
            [major, minor, update] | [major, minor, update, _] => Ok(Self {
                major,
                minor,
                update: Some(update),
            }),
            _ => Err(expected()),
        }
    }
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        self.update.map_or(Ok(()), |update| write!(f, ".{update}"))
    }
}

impl Serialize for CudaVersion {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CudaVersion {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}
