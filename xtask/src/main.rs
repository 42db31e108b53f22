//! `cargo xtask <task>`: everything a developer or an image builder runs.
fn main() {}
