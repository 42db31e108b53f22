//! What a mistyped name was probably meant to be.

/// The valid name nearest to `mistyped`, if one is near enough to be meant.
pub fn nearest_name<'a>(mistyped: &str, valid: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    /// Two of five letters wrong is still a typing error; below it, a suggestion misleads more than
    /// it helps.
    const SIMILAR: f64 = 0.6;
    let mistyped = mistyped.to_lowercase().replace('-', "_");
    valid
        .map(|name| {
            let plain = name.to_lowercase().replace('-', "_");
            (
                strsim::normalized_damerau_levenshtein(&mistyped, &plain),
                name,
            )
        })
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, name)| name)
}

/// `did you mean …?` where one name is near enough to be meant, and the valid names in any case.
pub(crate) fn nearest_name_hint<'a>(
    offending: &str,
    valid: impl Iterator<Item = &'a str> + Clone,
) -> String {
    let names: Vec<&str> = valid.clone().collect();
    let all = format!("valid here: {}", names.join(", "));
    match nearest_name(offending, valid) {
        Some(name) => format!("did you mean `{name}`? {all}"),
        None => all,
    }
}

#[cfg(test)]
mod tests {
    use super::nearest_name;

    #[test]
    fn finds_what_was_meant() {
        let names = [
            "persistence_daemon",
            "persistence_mode",
            "gpu_count",
            "ecc_mode",
            "mig_mode",
        ];
        let nearest = |mistyped| nearest_name(mistyped, names.into_iter());
        assert_eq!(nearest("persistance_mode"), Some("persistence_mode"));
        assert_eq!(nearest("persistence-mode"), Some("persistence_mode"));
        assert_eq!(nearest("gpu_cuont"), Some("gpu_count"));
        assert_eq!(nearest("GPU_COUNT"), Some("gpu_count"));
        assert_eq!(nearest("zzz"), None);
        assert_eq!(nearest(""), None);
        // One word has too little in common with any of them.
        assert_eq!(nearest("temperature"), None);
    }
}
