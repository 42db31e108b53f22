//! One value that a probe tried to read.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One value that a probe tried to read. The default is "nothing has looked yet", never a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reading<T> {
    /// It was read.
    Value(T),
    /// The hardware or the driver reports that it has no such thing (`NVML_ERROR_NOT_SUPPORTED`, no
    /// such file by design).
    NotSupported,
    /// It could not be read, and this is why, as a lowercase fragment:
    /// `permission denied opening /dev/kmsg`.
    NotRead(String),
}

/// Why a judgement lacks a value. Converts into the outcome of the check: an `error`, or a `skip`
/// where hardware may lack it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// The value and the reason, as a lowercase fragment.
    pub summary: String,
    /// The hardware or the driver has no such value, so that there is nothing to judge.
    pub not_applicable: bool,
}

impl Unread {
    fn not_read(summary: String) -> Self {
        Self {
            summary,
            not_applicable: false,
        }
    }

    fn not_applicable(summary: String) -> Self {
        Self {
            summary,
            not_applicable: true,
        }
    }
}

impl<T> Default for Reading<T> {
    fn default() -> Self {
        Self::NotRead("not probed".to_owned())
    }
}

impl<T> Reading<T> {
    /// The value, if it was read.
    pub fn value(&self) -> Option<&T> {
        match self {
            Self::Value(value) => Some(value),
            Self::NotSupported | Self::NotRead(_) => None,
        }
    }

    /// The value, where a judgement cannot be made without one; otherwise the `error` outcome with
    /// the reason.
    ///
    /// `what` names the value as a person would: `persistence mode`.
    pub fn required(&self, what: &str) -> Result<&T, Unread> {
        match self {
            Self::Value(value) => Ok(value),
            Self::NotSupported => Err(Unread::not_read(format!(
                "{what} could not be read: the driver answers not supported"
            ))),
            Self::NotRead(reason) => Err(Unread::not_read(format!(
                "{what} could not be read: {reason}"
            ))),
        }
    }

    /// The value, where hardware without it is simply not judged: `NotSupported` becomes a `skip`,
    /// `NotRead` stays an `error`. Use [`Reading::required`] where the GPU model is known to have
    /// it.
    pub fn applicable(&self, what: &str) -> Result<&T, Unread> {
        match self {
            Self::NotSupported => Err(Unread::not_applicable(format!(
                "this GPU or driver has no {what}"
            ))),
            Self::Value(_) | Self::NotRead(_) => self.required(what),
        }
    }

    /// [`Reading::required`] where the hardware is known to have the value, [`Reading::applicable`]
    /// elsewhere.
    pub fn required_if(&self, known_to_have_it: bool, what: &str) -> Result<&T, Unread> {
        if known_to_have_it {
            self.required(what)
        } else {
            self.applicable(what)
        }
    }

    /// The reading of a part or a function of this value.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Reading<U> {
        match self {
            Self::Value(value) => Reading::Value(f(value)),
            Self::NotSupported => Reading::NotSupported,
            Self::NotRead(reason) => Reading::NotRead(reason),
        }
    }
}

impl<T, E: std::fmt::Display> From<Result<T, E>> for Reading<T> {
    fn from(result: Result<T, E>) -> Self {
        match result {
            Ok(value) => Self::Value(value),
            Err(error) => Self::NotRead(format!("{error:#}")),
        }
    }
}
