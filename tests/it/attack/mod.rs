//! Attacks that once succeeded, by class. docs/threat-model.md names who may do what; each test
//! names its row.
//!
//! The long random ones run where `GPU_BRINGUP_ATTACK_TRIALS` sets the number of trials of a
//! command; CI makes few.

mod kills;
mod old_reports;
mod predictable_names;
mod sick_node;
mod signals;
mod simulation;

/// How many random trials a test makes: `default`, or as many as the nightly job sets.
pub(crate) fn trials(default: usize) -> usize {
    let asked = std::env::var("GPU_BRINGUP_ATTACK_TRIALS").ok();
    asked.map_or(default, |it| it.parse().expect("a number of trials"))
}

/// The seed of a random test, which its failure prints: another one each night, the same in every
/// run of CI.
pub(crate) fn seed() -> u64 {
    let asked = std::env::var("GPU_BRINGUP_ATTACK_SEED").ok();
    asked.map_or(20_261_123, |it| it.parse().expect("a seed"))
}

/// A generator that is good enough to choose moments.
// Source: Marsaglia, Xorshift RNGs (2003), the triple 13, 7, 17.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
