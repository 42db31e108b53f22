//! What `CUDA_VISIBLE_DEVICES` names, read as the driver reads it.
//!
//! NVIDIA documents the numbers and the UUIDs, and little of the rest. The rules were observed with
//! driver 580.159.04 on two H200s: `tests/simulator/captures/cuda-visible-devices.json` has every
//! value that was tried and what it left.

/// Why CUDA offers less than a value seems to name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Garbled {
    /// Nothing is named at all.
    Empty,
    /// This entry ends the list, and why.
    Ended { entry: String, why: &'static str },
    /// This entry names a device that was named before: CUDA does not initialise.
    Twice { entry: String },
}

const NAMES_NOTHING: &str = "names no GPU of this machine";
const ANOTHER_KIND: &str = "is of another kind than the first, a number or a UUID";
const SPACE: &str = "begins with a space";

/// The positions in `uuids` of the devices that the value names, all of them.
///
/// `uuids` are the GPUs (or, for a list of MIG devices, those) that CUDA could offer. Numbers count
/// in CUDA's own order, which may be another; but a number is valid in both or in neither.
pub(crate) fn named(value: &str, uuids: &[&str]) -> Result<Vec<usize>, Garbled> {
    if value.trim().is_empty() {
        return Err(Garbled::Empty);
    }
    let by_uuid = is_uuid(value);
    let mut positions = Vec::new();
    for entry in value.split(',') {
        let ended = |why| Garbled::Ended {
            entry: entry.to_owned(),
            why,
        };
        if !is_uuid(entry) && is_uuid(entry.trim_start()) {
            return Err(ended(SPACE));
        }
        if is_uuid(entry) != by_uuid {
            return Err(ended(ANOTHER_KIND));
        }
        let position = if by_uuid {
            position_of(entry, uuids)
        } else {
            number(entry).filter(|it| *it < uuids.len())
        };
        let position = position.ok_or_else(|| ended(NAMES_NOTHING))?;
        if positions.contains(&position) {
            return Err(Garbled::Twice {
                entry: entry.to_owned(),
            });
        }
        positions.push(position);
    }
    Ok(positions)
}

/// The first entry decides for all: `GPU-` in just this case, and without a space before it.
fn is_uuid(entry: &str) -> bool {
    entry.starts_with("GPU-") || entry.starts_with("MIG-")
}

/// The one UUID that begins like the entry, which has a digit at least. Dashes and case do not
/// matter, nor does text after a whole UUID.
fn position_of(entry: &str, uuids: &[&str]) -> Option<usize> {
    let entry = digits(entry);
    if entry.len() <= "GPU-".len() {
        return None;
    }
    let mut fitting = uuids
        .iter()
        .enumerate()
        .filter(|(_, uuid)| digits(uuid).starts_with(&entry));
    let (first, _) = fitting.next()?;
    fitting.next().is_none().then_some(first)
}

/// `GPU-` or `MIG-` and the digits of a whole UUID, without dashes.
fn digits(uuid: &str) -> String {
    let (kind, rest) = uuid.split_at_checked(4).unwrap_or((uuid, ""));
    let digits = rest.chars().filter(|it| *it != '-').take(32);
    kind.chars()
        .chain(digits.map(|it| it.to_ascii_lowercase()))
        .collect()
}

/// As C's `strtoul` reads it, cut to 32 bits: spaces and a sign before the digits, and any text
/// after them.
fn number(entry: &str) -> Option<usize> {
    let entry = entry.trim_start();
    let (negative, entry) = match entry.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, entry.strip_prefix('+').unwrap_or(entry)),
    };
    let end = entry.find(|it: char| !it.is_ascii_digit());
    let digits = &entry[..end.unwrap_or(entry.len())];
    if digits.is_empty() {
        return None;
    }
    // Too great a number is the greatest.
    let number = digits.parse::<u64>().unwrap_or(u64::MAX);
    let number = if negative {
        number.wrapping_neg()
    } else {
        number
    };
    #[expect(clippy::cast_possible_truncation, reason = "as the driver does")]
    let number = number as i32;
    usize::try_from(number).ok()
}

impl std::fmt::Display for Garbled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Empty => f.write_str("it is empty, so CUDA offers no GPU"),
            Self::Ended { entry, why } => {
                write!(f, "`{entry}` {why}, so CUDA ignores it and all that follow")
            }
            Self::Twice { entry } => write!(
                f,
                "`{entry}` names a GPU for the second time, so CUDA does not initialise"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Capture {
        uuids: Vec<String>,
        values: Vec<Asked>,
    }

    #[derive(Deserialize)]
    struct Asked {
        value: String,
        #[serde(default)]
        devices: Vec<usize>,
    }

    fn capture() -> Capture {
        let text = include_str!("../../../tests/simulator/captures/cuda-visible-devices.json");
        serde_json::from_str(text).expect("the capture of a real machine")
    }

    #[test]
    fn values_are_read_as_the_driver_reads_them() {
        let Capture { uuids, values } = capture();
        let uuids: Vec<&str> = uuids.iter().map(String::as_str).collect();
        for Asked { value, devices } in &values {
            match named(value, &uuids) {
                Ok(named) => assert_eq!(named, *devices, "{value:?}"),
                // The driver offered less than was named: what stands before the entry that ends
                // the list.
                Err(Garbled::Ended { entry, .. }) => {
                    let before = value.split(',').take_while(|it| *it != entry).count();
                    assert_eq!(before, devices.len(), "{value:?}");
                }
                Err(Garbled::Empty | Garbled::Twice { .. }) => {
                    assert!(devices.is_empty(), "{value:?}");
                }
            }
        }
        assert!(values.len() > 100);
        // Observed on one H100: without a digit not even the only GPU is named.
        assert!(named("GPU-", &uuids[..1]).is_err());
        assert_eq!(named("GPU-2", &uuids[..1]), Ok(vec![0]));
    }

    #[test]
    fn a_list_of_mig_devices_names_those() {
        let uuids = ["MIG-11111111-0000", "MIG-22222222-0000"];
        assert_eq!(named("MIG-2", &uuids), Ok(vec![1]));
        assert!(named("GPU-2", &uuids).is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_value_panics(value in "\\PC{0,40}") {
            let _ = named(&value, &["GPU-1", "", "GPU-é"]);
        }
    }
}
