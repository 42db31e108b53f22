//! What a profile demands of a package's version.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Bounds of a version, separated by commas: `">=2.6,<2.12"`, `"==2.11.0"`, `"2.11"` for every
/// 2.11.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema)]
#[schemars(with = "String")]
pub struct VersionRequirement {
    text: String,
    bounds: Vec<(Bound, Vec<u32>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound {
    AtLeast,
    MoreThan,
    AtMost,
    LessThan,
    Equal,
    NotEqual,
    /// The parts that are written.
    Prefix,
}

impl VersionRequirement {
    /// Whether `version` meets every bound; `None` where it is no version by number.
    pub fn is_met_by(&self, version: &str) -> Option<bool> {
        let found = release_numbers(version)?;
        Some(self.bounds.iter().all(|(bound, wanted)| {
            let order = compare(&found, wanted);
            match bound {
                Bound::AtLeast => order.is_ge(),
                Bound::MoreThan => order.is_gt(),
                Bound::AtMost => order.is_le(),
                Bound::LessThan => order.is_lt(),
                Bound::Equal => order.is_eq(),
                Bound::NotEqual => order.is_ne(),
                Bound::Prefix => found.starts_with(wanted),
            }
        }))
    }
}

/// `2.11.0+cu126` is 2, 11, 0; what follows the numbers (`rc1`, `a0`, a local version) is left out.
fn release_numbers(version: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in version.split('+').next()?.split('.') {
        let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
        let Ok(number) = digits.parse() else { break };
        numbers.push(number);
        if digits.len() < part.len() {
            break;
        }
    }
    (!numbers.is_empty()).then_some(numbers)
}

/// Missing parts count as zero.
fn compare(left: &[u32], right: &[u32]) -> std::cmp::Ordering {
    let part = |numbers: &[u32], index: usize| numbers.get(index).copied().unwrap_or(0);
    (0..left.len().max(right.len()))
        .map(|index| part(left, index).cmp(&part(right, index)))
        .find(|order| order.is_ne())
        .unwrap_or(std::cmp::Ordering::Equal)
}

impl std::str::FromStr for VersionRequirement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const OPERATORS: [(&str, Bound); 6] = [
            (">=", Bound::AtLeast),
            ("<=", Bound::AtMost),
            ("==", Bound::Equal),
            ("!=", Bound::NotEqual),
            (">", Bound::MoreThan),
            ("<", Bound::LessThan),
        ];
        let expected = || {
            format!(
                "`{text}` is not a version requirement, expected one like \">=2.6\", \">=2.6,<2.12\" or \"2.11\""
            )
        };
        let mut bounds = Vec::new();
        for part in text.split(',') {
            let part = part.trim();
            let (bound, version) = OPERATORS
                .iter()
                .find_map(|(sign, bound)| Some((*bound, part.strip_prefix(sign)?.trim())))
                .unwrap_or((Bound::Prefix, part));
            let numbers: Option<Vec<u32>> = version
                .split('.')
                .map(|number| number.parse().ok())
                .collect();
            bounds.push((bound, numbers.ok_or_else(expected)?));
        }
        Ok(Self {
            text: text.to_owned(),
            bounds,
        })
    }
}

impl std::fmt::Display for VersionRequirement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl Serialize for VersionRequirement {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for VersionRequirement {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::VersionRequirement;

    #[test]
    fn bounds_are_compared_by_number() {
        for (requirement, version, met) in [
            (">=2.6", "2.11.0+cu126", Some(true)),
            (">=2.6", "2.5.1", Some(false)),
            (">=2.6,<2.12", "2.12.0", Some(false)),
            ("2.11", "2.11.3", Some(true)),
            ("2.1", "2.11.3", Some(false)),
            ("==2.11", "2.11.0", Some(true)),
            ("!=2.11.0", "2.11.0", Some(false)),
            (">2.11", "2.11.0rc1", Some(false)),
            ("<=3.12", "3.12", Some(true)),
            (">=2.6", "nightly", None),
        ] {
            let parsed: VersionRequirement = requirement.parse().expect(requirement);
            assert_eq!(parsed.is_met_by(version), met, "{requirement} {version}");
        }
    }

    #[test]
    fn what_is_no_requirement_is_refused() {
        for text in ["", ">=", "~=2.6", "2.x", ">=2.6,", "latest"] {
            assert!(text.parse::<VersionRequirement>().is_err(), "{text}");
        }
    }
}
