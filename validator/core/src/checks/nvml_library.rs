//! NVML, the driver's management library, loads and responds.
//!
//! ## Why
//! `nvidia-smi`, DCGM, the Kubernetes device plugin and this validator see GPUs through NVML only.
//! Without it no tool can count, monitor or allocate a GPU.
//!
//! ## How it is judged
//! `nvmlInit` must succeed. It fails when the driver is loaded and no `libnvidia-ml.so.1` is on the
//! loader's path, or one that the loader cannot load (an empty file, for instance) while the
//! driver's lies elsewhere. Any other refusal means that NVML could not be queried (the reason is
//! in the text; a library of another version is named by `driver_components_match`). It warns when
//! a call hung or the probing process crashed on the way: what was read stands, but programs that
//! use NVML will hang or crash as well. It warns, too, when the library lies in a folder where the
//! loader does not search: this validator tries such folders, other programs do not.
//!
//! ## What to do
//! Install the driver's libraries of exactly the module's version. A hanging call: check for Xids
//! and a GPU that is lost, then reset that GPU or reboot.
//!
//! ## Source
//! NVML API Reference, <https://docs.nvidia.com/deploy/nvml-api/>; DCGM's deployment check "NVML
//! Library".

use crate::check::{Check, Judge};
use crate::facts::{Facts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "nvml_library",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deploy/nvml-api/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let nvml = &facts.nvml;
    let trouble = nvml.probe_trouble.join("; ");
    if nvml.initialized != Reading::Value(true) {
        queries::loaded_driver(facts, profile)?;
        if queries::lacks_control_node(facts) {
            let reason = format!("NVML finds no {}", queries::CONTROL_NODE);
            return Err(queries::reported_by("device_nodes", &reason, profile));
        }
        if facts
            .host
            .libnvidia_ml_files
            .value()
            .is_some_and(Vec::is_empty)
        {
            return Ok(Outcome::fail(
                "kernel module nvidia is loaded, but no libnvidia-ml.so.1 is on the loader's path",
            )
            .expected("libnvidia-ml.so.1 of the driver's version")
            .remedy(
                "install the driver's libraries of exactly the module's version, then run ldconfig",
            ));
        }
        let reason = match &nvml.initialized {
            Reading::NotRead(reason) => reason.as_str(),
            Reading::NotSupported => "not supported",
            Reading::Value(_) => "nvmlInit did not succeed",
        };
        let mut summary = format!("NVML could not be queried: {reason}");
        if !trouble.is_empty() {
            summary = format!("{summary} ({trouble})");
        }
        return Ok(Outcome::error(summary).remedy(
            "run nvidia-smi; after a driver upgrade without reboot, reboot; for a hang check for Xids: dmesg | grep NVRM",
        ));
    }
    if !trouble.is_empty() {
        return Ok(Outcome::warn(format!("NVML returned an error: {trouble}"))
            .expected("every call returns")
            .remedy(
                "check for Xids and a lost GPU: dmesg | grep NVRM; then reset that GPU or reboot",
            ));
    }
    if let Some(by_path) = &nvml.loaded_by_path {
        let unloadable = nvml.unloadable.as_deref();
        return Ok(queries::not_on_loader_path(
            "libnvidia-ml.so.1",
            by_path,
            unloadable,
        ));
    }
    Ok(Outcome::pass(
        match nvml.nvml_version.value().or(nvml.driver_version.value()) {
            Some(version) => format!("NVML {version} answers"),
            None => "NVML answers".to_owned(),
        },
    ))
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_node, judge_host_check, unload_driver};

    fn judge(facts: &Facts) -> Finding {
        judge_host_check(&super::CHECK, facts, "{}")
    }

    #[test]
    fn passes_when_it_answers() {
        let finding = judge(&healthy_node());
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(finding.summary, "NVML 13.580.159.04 answers");
    }

    #[test]
    fn fails_when_the_library_is_not_installed() {
        let mut facts = healthy_node();
        facts.nvml.initialized = Reading::NotRead("libnvidia-ml.so.1: cannot open".to_owned());
        facts.host.libnvidia_ml_files = Reading::Value(Vec::new());
        assert_eq!(judge(&facts).verdict, Verdict::Fail);
    }

    #[test]
    fn errs_when_it_refuses_or_was_not_asked() {
        let mut facts = healthy_node();
        facts.nvml.initialized = Reading::NotRead("driver/library version mismatch".to_owned());
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Error);
        assert_eq!(
            finding.summary,
            "NVML could not be queried: driver/library version mismatch"
        );
        for reading in [Reading::default(), Reading::Value(false)] {
            facts.nvml.initialized = reading;
            assert_eq!(judge(&facts).verdict, Verdict::Error);
        }
    }

    #[test]
    fn warns_when_a_call_hung() {
        let mut facts = healthy_node();
        facts.nvml.probe_trouble = vec!["killed after 5 s in nvmlDeviceGetTemperature".to_owned()];
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(
            finding.summary.contains("nvmlDeviceGetTemperature"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn warns_when_programs_do_not_find_it() {
        let mut facts = healthy_node();
        facts.nvml.loaded_by_path = Some("/usr/local/nvidia/lib64/libnvidia-ml.so.1".to_owned());
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Warn);
        assert!(
            finding.summary.contains("lies in /usr/local/nvidia/lib64,"),
            "{}",
            finding.summary
        );
    }

    #[test]
    fn fails_when_programs_find_a_file_that_does_not_load() {
        let mut facts = healthy_node();
        facts.nvml.loaded_by_path = Some("/usr/lib64/libnvidia-ml.so.1".to_owned());
        let error = "/usr/lib/libnvidia-ml.so.1: file too short";
        facts.nvml.unloadable = Some(error.to_owned());
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert!(finding.summary.contains(error), "{}", finding.summary);
    }

    #[test]
    fn leaves_missing_nodes_to_their_own_check() {
        let mut facts = healthy_node();
        facts.nvml.initialized = Reading::NotRead("driver not loaded".to_owned());
        facts.gpus.clear();
        assert_eq!(judge(&facts).verdict, Verdict::Error);
        if let Reading::Value(nodes) = &mut facts.host.device_nodes {
            nodes.retain(|node| node.path != "/dev/nvidiactl");
        }
        let finding = judge(&facts);
        assert_eq!(finding.verdict, Verdict::Skip);
        assert!(
            finding.summary.ends_with("which device_nodes reports"),
            "{}",
            finding.summary
        );
        for in_container in [false, true] {
            facts.host.in_container = Reading::Value(in_container);
            let reported = judge_host_check(&super::super::device_nodes::CHECK, &facts, "{}");
            assert!(reported.verdict >= Verdict::Error, "{reported:?}");
        }
    }

    #[test]
    fn leaves_a_missing_driver_to_its_own_check() {
        let mut facts = healthy_node();
        facts.nvml.initialized = Reading::NotRead("no library".to_owned());
        unload_driver(&mut facts);
        assert_eq!(judge(&facts).verdict, Verdict::Skip);
    }
}
