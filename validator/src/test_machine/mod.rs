//! A healthy machine for tests: each test breaks one thing of it.

mod gpu;
mod host;

use crate::check::{self, Check};
use crate::facts::Facts;
use crate::findings::Finding;
use crate::level::Level;

/// Eight healthy H200s as a p5en.48xlarge has them, at level extended.
pub(crate) fn healthy_node() -> Facts {
    let mut facts = Facts {
        level: Level::Extended,
        ..Facts::default()
    };
    host::add_host_and_cuda(&mut facts);
    facts.gpus = (0..8).map(gpu::healthy_gpu).collect();
    facts
}

/// The findings of one check about every subject, host first, then in the order of the GPUs.
pub(crate) fn judge_check(check: &Check, facts: &Facts, profile_yaml: &str) -> Vec<Finding> {
    let profile =
        crate::profile::parse(profile_yaml, "test profile").expect("the test's profile is valid");
    check::judge(facts, &profile, Level::Extended)
        .into_iter()
        .filter(|it| it.check == check.id)
        .collect()
}

/// The one finding of a check that judges the host.
pub(crate) fn judge_host_check(check: &Check, facts: &Facts, profile_yaml: &str) -> Finding {
    let mut findings = judge_check(check, facts, profile_yaml);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings.remove(0)
}
