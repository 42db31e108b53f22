//! GPUs of one model have one VBIOS version, and one that the profile allows.
//!
//! ## Why
//! A card that was replaced often comes with another VBIOS: other power and clock tables, a
//! firmware fault that the others do not have. In a job that waits for the slowest GPU this is a
//! slow node.
//!
//! ## How it is judged
//! With `gpus.vbios` in the profile, the VBIOS of each GPU must be one of that list. Without it,
//! GPUs of the same name must agree; different versions are a warning, since every one of them may
//! be right. Skipped when there is nothing to compare.
//!
//! ## What to do
//! Obtain the board's VBIOS from the machine's vendor, and update the odd one.
//!
//! ## Source
//! azurehpc-health-checks and FAIR's gcm compare VBIOS versions; NVML `nvmlDeviceGetVbiosVersion`,
//! <https://docs.nvidia.com/deploy/nvml-api/>

use std::collections::BTreeMap;

use crate::check::{Check, Judge};
use crate::facts::{Facts, Reading};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries::{self, counted};
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "vbios_uniform",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    if facts.gpus.is_empty() {
        return Err(queries::reported_by(
            "gpu_count",
            "NVML lists no GPU",
            profile,
        ));
    }
    let mut tally = Tally::default();
    // VBIOS versions by model, each with its GPUs.
    let mut models: BTreeMap<&str, BTreeMap<&str, Vec<String>>> = BTreeMap::new();
    for gpu in &facts.gpus {
        let name = queries::name_of(gpu);
        let version = match &gpu.vbios_version {
            Reading::NotSupported => continue,
            // NVML tells nothing of a lost GPU; gpu_count and the GPU's own checks report it.
            Reading::NotRead(_) if gpu.lost.is_some() => continue,
            Reading::NotRead(reason) => {
                tally.error(format!(
                    "VBIOS version of {name} could not be read: {reason}"
                ));
                continue;
            }
            Reading::Value(version) => version.as_str(),
        };
        let model = gpu
            .name
            .value()
            .map_or("GPU of unknown name", String::as_str);
        models
            .entry(model)
            .or_default()
            .entry(version)
            .or_default()
            .push(name);
    }
    let allowed = &profile.gpus.vbios;
    if allowed.is_empty() {
        compare_within_models(&models, &mut tally);
    } else {
        compare_with_profile(&models, allowed, &mut tally);
    }
    let worst = tally.worst();
    let outcome = tally.outcome(Outcome::skip(
        "there are no two GPUs of one model to compare",
    ));
    Ok(match worst {
        Some(Verdict::Warn | Verdict::Fail) => outcome
            .remedy("obtain the board's VBIOS from the machine's vendor, and update the odd one"),
        _ => outcome,
    })
}

fn compare_within_models(models: &BTreeMap<&str, BTreeMap<&str, Vec<String>>>, tally: &mut Tally) {
    for (model, versions) in models {
        let gpus: usize = versions.values().map(Vec::len).sum();
        if gpus < 2 {
            continue;
        }
        if let [version] = versions.keys().collect::<Vec<_>>()[..] {
            tally.pass(format!("{gpus} {model} have VBIOS {version}"));
            continue;
        }
        let list: Vec<String> = versions
            .iter()
            .map(|(version, gpus)| match &gpus[..] {
                [gpu] => format!("{version} on {gpu}"),
                gpus => format!("{version} on {}", counted(gpus.len(), "GPU")),
            })
            .collect();
        tally.warn(format!(
            "{model} have different VBIOS versions: {}",
            list.join(", ")
        ));
    }
}

fn compare_with_profile(
    models: &BTreeMap<&str, BTreeMap<&str, Vec<String>>>,
    allowed: &[String],
    tally: &mut Tally,
) {
    for (version, gpus) in models.values().flatten() {
        if allowed.iter().any(|it| it == version) {
            tally.pass(format!(
                "{} have VBIOS {version}",
                counted(gpus.len(), "GPU")
            ));
        } else {
            for gpu in gpus {
                tally.fail(format!(
                    "VBIOS of {gpu} is {version}, the profile requires {}",
                    allowed.join(" or ")
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_host_check(&super::CHECK, facts, profile)
    }

    fn node() -> Facts {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            gpu.vbios_version = Reading::Value("96.00.A5.00.1A".to_owned());
        }
        facts
    }

    #[test]
    fn passes_when_all_agree() {
        let finding = judge(&node(), "{}");
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(finding.summary, "8 NVIDIA H200 have VBIOS 96.00.A5.00.1A");
    }

    #[test]
    fn warns_of_an_odd_one() {
        let mut facts = node();
        facts.gpus[6].vbios_version = Reading::Value("96.00.99.00.05".to_owned());
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(
            finding.summary.contains("96.00.A5.00.1A on 7 GPUs"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn other_models_have_other_versions() {
        let mut facts = node();
        facts.gpus[6].vbios_version = Reading::Value("94.02.42.00.01".to_owned());
        facts.gpus[6].name = Reading::Value("NVIDIA A10G".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn the_profile_may_name_what_is_right() {
        let facts = node();
        assert_eq!(
            judge(&facts, "gpus: {vbios: [96.00.99.00.05, 96.00.A5.00.1A]}").verdict,
            Verdict::Pass
        );
        let finding = judge(&facts, "gpus: {vbios: [96.00.99.00.05]}");
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn one_gpu_has_nothing_to_agree_with() {
        let mut facts = node();
        facts.gpus.truncate(1);
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
        assert_eq!(
            judge(&facts, "gpus: {vbios: [96.00.A5.00.1A]}").verdict,
            Verdict::Pass
        );
        facts.gpus.clear();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Skip);
    }

    #[test]
    fn errs_when_one_was_not_read() {
        let mut facts = node();
        facts.gpus[0].vbios_version = Reading::NotRead("unknown error".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }
}
