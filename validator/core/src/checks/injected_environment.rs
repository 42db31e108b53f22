//! The environment injects no debugger or profiler into CUDA programs.
//!
//! ## Why
//! Variables left over from a debugging session load a library into every CUDA program, serialise
//! every kernel, stop at an exception or write core dumps: jobs get slow, hang or fill the disk,
//! and no reading of the GPU is wrong.
//!
//! ## How it is judged
//! Warns when one of the variables below is set, switches to anything but 0, unless the profile
//! lists it under `environment.allowed`. Fails when a variable of `environment.required` is not set
//! to exactly that value. It is the environment of this validator that is judged: run it from where
//! jobs start. Its own check kernel and burn run without what is listed here, so that no GPU is
//! blamed for it; `LD_PRELOAD` and `LD_AUDIT` alone stay.
//!
//! `CUDA_INJECTION32_PATH`, `CUDA_INJECTION64_PATH`, `NSIGHT_CUDA_DEBUGGER`, `CUDA_AUTO_BOOST`,
//! `CUDA_PROFILE`, `COMPUTE_PROFILE`, `OPENCL_PROFILE`, `CUDA_ENABLE_COREDUMP_ON_EXCEPTION`,
//! `CUDA_COREDUMP_FILE`, `CUDA_DEVICE_WAITS_ON_EXCEPTION` (DCGM's list),
//! `CUDA_ENABLE_LIGHTWEIGHT_COREDUMP`, `CUDA_LAUNCH_BLOCKING`, `CUDA_FORCE_JIT`,
//! `CUDA_FORCE_PTX_JIT`, `CUDA_DISABLE_JIT`, `CUDA_DISABLE_PTX_JIT`, `NVIDIA_TF32_OVERRIDE`,
//! `CUBLAS_EMULATE_SINGLE_PRECISION`, `CUBLAS_EMULATE_DOUBLE_PRECISION`,
//! `CUBLAS_EMULATION_STRATEGY`, `LD_PRELOAD`, `LD_AUDIT`, `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` and
//! `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` (a share of MPS that was meant for one job limits every job).
//!
//! ## What to do
//! Find who sets it (`/etc/environment`, `/etc/profile.d`, the runner's or the unit's
//! `Environment=`) and remove it.
//!
//! ## Source
//! DCGM's deployment check "Environment Variables"; CUDA Environment Variables,
//! <https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables>; cuBLAS,
//! floating point emulation, <https://docs.nvidia.com/cuda/cublas/#floating-point-emulation>

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::reference::INJECTED_VARIABLES;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "injected_environment",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
};

/// Switches, which are off at 0 as they are by default.
const SWITCHES: [&str; 9] = [
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION",
    "CUDA_ENABLE_LIGHTWEIGHT_COREDUMP",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_FORCE_JIT",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_DISABLE_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUBLAS_EMULATE_SINGLE_PRECISION",
    "CUBLAS_EMULATE_DOUBLE_PRECISION",
];

/// A share of the whole GPU limits nothing.
const WHOLE_SHARE: (&str, &str) = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100");

fn has_effect(name: &str, value: &str) -> bool {
    let is_off = value == "0" && SWITCHES.contains(&name) || (name, value) == WHOLE_SHARE;
    !value.is_empty() && !is_off
}

/// Whether every probe keeps this variable, so that its absence from the facts means that it was
/// not set.
fn is_always_looked_at(name: &str) -> bool {
    name == "CUDA_VISIBLE_DEVICES" || INJECTED_VARIABLES.iter().any(|(it, _)| *it == name)
}

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let environment = facts.host.environment.required("the environment")?;
    let mut tally = Tally::default();
    for (name, wanted) in &profile.environment.required {
        match environment.get(name) {
            Some(value) if value == wanted => tally.pass(format!("{name} is {value}")),
            Some(value) => tally.fail(format!(
                "{name} is `{value}`, the profile requires `{wanted}`"
            )),
            None if is_always_looked_at(name) => tally.fail(format!(
                "{name} is not set, the profile requires `{wanted}`"
            )),
            None => tally.error(format!(
                "{name}, which the profile requires, is not set or was not read"
            )),
        }
    }
    let mut injected = INJECTED_VARIABLES
        .iter()
        .filter(|(name, _)| !profile.environment.allowed.iter().any(|it| it == name))
        .filter(|(name, _)| !profile.environment.required.contains_key(*name))
        .filter_map(|(name, effect)| Some((name, effect, environment.get(*name)?)))
        .filter(|(name, _, value)| has_effect(name, value))
        .peekable();
    if injected.peek().is_none() {
        tally.pass("no variable injects a debugger or profiler into CUDA programs");
    }
    for (name, effect, value) in injected {
        tally.warn(format!("{name} is set to `{value}`: it {effect}"));
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::error("no variable was judged"));
    Ok(match worst {
        Some(Verdict::Fail) => outcome.remedy("set it where jobs start, or change environment.required of the profile"),
        Some(Verdict::Warn) => outcome.remedy(
            "remove it from /etc/environment, /etc/profile.d or the unit that starts jobs, or list it under \
             environment.allowed of the profile",
        ),
        _ => outcome,
    })
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn node_with(variables: &[(&str, &str)]) -> Facts {
        let mut facts = healthy_node();
        facts.host.environment = Reading::Value(
            variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        );
        facts
    }

    #[test]
    fn passes_with_a_clean_environment() {
        assert_eq!(judge(&healthy_node(), "{}").verdict, Verdict::Pass);
        let facts = node_with(&[("CUDA_VISIBLE_DEVICES", "0"), ("CUDA_LAUNCH_BLOCKING", "")]);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn warns_of_every_variable_of_the_list() {
        for (name, _) in super::INJECTED_VARIABLES {
            let finding = judge(&node_with(&[(name, "1")]), "{}");
            assert_eq!(finding.verdict, Verdict::Warn, "{name}");
            assert!(finding.summary.starts_with(name), "{}", finding.summary);
        }
    }

    #[test]
    fn the_documentation_names_every_variable_of_the_list() {
        let documentation = include_str!("injected_environment.rs");
        for (name, _) in super::INJECTED_VARIABLES {
            let mentioned = documentation
                .lines()
                .filter(|line| line.starts_with("//!"))
                .any(|line| line.contains(&format!("`{name}`")));
            assert!(mentioned, "{name}");
        }
    }

    #[test]
    fn a_switch_that_is_off_has_no_effect() {
        for (name, _) in super::INJECTED_VARIABLES {
            let finding = judge(&node_with(&[(name, "0")]), "{}");
            let is_off = finding.verdict == Verdict::Pass;
            assert_eq!(is_off, super::SWITCHES.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_profile_may_allow_one() {
        let facts = node_with(&[("CUDA_LAUNCH_BLOCKING", "1")]);
        let profile = "environment: {allowed: [CUDA_LAUNCH_BLOCKING]}";
        assert_eq!(judge(&facts, profile).verdict, Verdict::Pass);
    }

    #[test]
    fn a_profile_may_ask_for_one() {
        let profile = "environment: {required: {CUDA_LAUNCH_BLOCKING: '0'}}";
        for (value, verdict) in [("0", Verdict::Pass), ("1", Verdict::Fail)] {
            let facts = node_with(&[("CUDA_LAUNCH_BLOCKING", value)]);
            assert_eq!(judge(&facts, profile).verdict, verdict);
        }
        let finding = judge(&healthy_node(), profile);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "CUDA_LAUNCH_BLOCKING is not set, the profile requires `0`"
        );
    }

    #[test]
    fn a_variable_that_the_facts_do_not_hold_may_be_set_all_the_same() {
        let finding = judge(
            &healthy_node(),
            "environment: {required: {NCCL_SOCKET_IFNAME: eth0}}",
        );
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let mut facts = healthy_node();
        facts.host.environment = Reading::NotRead("not probed".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }
}
