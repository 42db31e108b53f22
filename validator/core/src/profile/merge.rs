//! The values of a profile over those of the one that it extends.

use serde_json::{Map, Value};

/// Keys that speak of one file and are not inherited.
const OWN: [&str; 3] = ["name", "description", "extends"];

/// Lays `child` over `base`; both are profiles as JSON, with every key there.
///
/// `written` is the child's file, as only it has which keys are written and which are defaults. A
/// scalar overrides, a mapping merges key by key, a list replaces, `null` clears a scalar or list
/// and leaves a mapping (a section whose lines are all commented out).
pub(super) fn merge(base: Value, child: &Value, written: &serde_yaml::Value) -> Value {
    let mut base = base;
    if let Value::Object(fields) = &mut base {
        for key in OWN {
            fields.insert(key.to_owned(), child[key].clone());
        }
    }
    overlay(&mut base, child, written);
    base
}

fn overlay(base: &mut Value, child: &Value, written: &serde_yaml::Value) {
    let (Value::Object(child), serde_yaml::Value::Mapping(written)) = (child, written) else {
        return;
    };
    if !base.is_object() {
        *base = Value::Object(Map::new());
    }
    let Value::Object(fields) = base else {
        return;
    };
    for (key, written) in written {
        let Some(key) = key.as_str() else { continue };
        let Some(value) = child.get(key) else {
            continue;
        };
        match (value, written) {
            (Value::Object(_), serde_yaml::Value::Null) => {}
            (Value::Object(_), serde_yaml::Value::Mapping(_)) if fields.contains_key(key) => {
                overlay(&mut fields[key], value, written);
            }
            _ => {
                fields.insert(key.to_owned(), value.clone());
            }
        }
    }
}
