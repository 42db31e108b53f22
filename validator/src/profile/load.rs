//! Reads profiles: YAML, `extends`, and errors that name file, line and field.

use std::path::Path;

use super::Profile;

/// Why a profile cannot be used. The text names file, line, column, the offending text and the nearest valid name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileError(pub String);

impl std::fmt::Display for ProfileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ProfileError {}

/// Reads a profile file and those that it extends.
pub fn load(path: &Path) -> Result<Profile, ProfileError> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        ProfileError(format!("cannot read profile {}: {error}", path.display()))
    })?;
    parse(&text, &path.display().to_string())
}

/// Parses one profile's text; `name` stands for the file in errors. `extends` is left as it is.
pub fn parse(text: &str, name: &str) -> Result<Profile, ProfileError> {
    serde_yaml::from_str(text).map_err(|error| ProfileError(format!("{name}: {error}")))
}
