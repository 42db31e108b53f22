//! Numbers in sentences.

/// `1 GPU`, `8 GPUs`.
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
