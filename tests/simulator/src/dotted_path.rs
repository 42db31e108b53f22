//! Values at dotted paths of a scenario: `gpus.3.memory`, `host.files./etc/hosts`.

use serde_json::{Map, Value};

/// The path of the whole scenario.
pub(crate) const WHOLE: &str = "";

/// Maps whose entries are named freely; giving null for an entry removes it, except a file, which
/// null keeps from being there.
const FREE_MAPS: [&str; 11] = [
    "host.files",
    "host.limits",
    "host.units",
    "host.toolkits",
    "host.environment",
    "host.module_parameters",
    "nvml.returns",
    "cuda.returns",
    "cublaslt.returns",
    "processes",
    "gpus",
];

/// Sets the value at a dotted path, making the maps on the way; a map given for a map is merged
/// into it.
pub(crate) fn set_path(root: &mut Value, path: &str, new: Value) {
    if path == WHOLE {
        *root = new;
        return;
    }
    let free = FREE_MAPS
        .iter()
        .find_map(|map| Some((*map, path.strip_prefix(map)?.strip_prefix('.')?)))
        .filter(|(map, _)| *map != "gpus");
    if let Some((map, key)) = free
        && new.is_null()
        && !["host.files", "host.limits"].contains(&map)
    {
        if let Some(entries) = walk(root, map.split('.')).as_object_mut() {
            entries.shift_remove(key);
        }
        return;
    }
    let target = match free {
        // An entry's name may hold dots (`13.0`, `nvidia-persistenced.service`): the longest one
        // that exists, else the whole rest.
        Some((map, rest)) => {
            let entries = walk(root, map.split('.'));
            let existing = entries.as_object().and_then(|entries| {
                entries
                    .keys()
                    .filter(|key| {
                        rest.strip_prefix(key.as_str())
                            .is_some_and(|tail| tail.starts_with('.'))
                    })
                    .max_by_key(|key| key.len())
                    .cloned()
            });
            match existing {
                Some(key) => {
                    let tail = rest[key.len() + 1..].to_owned();
                    walk(
                        entries,
                        std::iter::once(key.as_str()).chain(tail.split('.')),
                    )
                }
                None if map == "processes" => walk(entries, rest.split('.')),
                None => walk(entries, std::iter::once(rest)),
            }
        }
        None => walk(root, path.split('.')),
    };
    merge(target, new);
}

fn walk<'value, 'segment>(
    root: &'value mut Value,
    segments: impl Iterator<Item = &'segment str>,
) -> &'value mut Value {
    segments.fold(root, |value, segment| {
        if let (Value::Array(_), Ok(index)) = (&*value, segment.parse::<usize>()) {
            let Value::Array(items) = value else {
                unreachable!("matched as an array above")
            };
            if index >= items.len() {
                items.resize(index + 1, Value::Null);
            }
            return &mut items[index];
        }
        if !value.is_object() {
            *value = Value::Object(Map::new());
        }
        let Value::Object(fields) = value else {
            unreachable!("made a map above")
        };
        fields.entry(segment.to_owned()).or_insert(Value::Null)
    })
}

fn merge(target: &mut Value, new: Value) {
    match (target, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in new {
                if value.is_null() && old.get(&key).is_some_and(Value::is_object) {
                    old.shift_remove(&key);
                } else {
                    merge(old.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (target, new) => *target = new,
    }
}
