//! Members of JSON documents from outside.

use serde_json::Value;

/// The value at a JSON pointer (RFC 6901); null where there is none.
pub(crate) fn at<'v>(value: &'v Value, pointer: &str) -> &'v Value {
    value.pointer(pointer).unwrap_or(&Value::Null)
}
