//! Applies every check to every subject, and the profile's severities to the outcomes.

use std::cell::LazyCell;
use std::collections::HashSet;

use crate::after_load::{self, worse_of};
use crate::check::{Check, Entry, Judge, JudgeEnvironment, JudgeGpu};
use crate::diagnosis;
use crate::environment::subjects;
use crate::facts::{Facts, Framework, GpuFacts};
use crate::findings::{Finding, GpuSubject, Judgement, Outcome, Run, Subject, Verdict};
use crate::level::{Level, Stage};
use crate::profile::{Profile, Severity};
use crate::queries;

/// Judges `facts` by every check: the only way from facts to findings.
///
/// The findings are the same set of (check, subject) for the same machine whatever is wrong with
/// it: what does not apply or was not reached is there as `skip` or `error`.
pub fn judge(facts: &Facts, profile: &Profile, level: Level) -> Vec<Finding> {
    let mut findings = Vec::new();
    let after = after_load::facts_after(facts);
    let unlisted = queries::unlisted_gpus(facts);
    let is_of_this_kind =
        |entry: &&Entry| entry.check.level != Level::Image || level == Level::Image;
    for entry in crate::checks::ALL.iter().filter(is_of_this_kind) {
        match entry.check.judge {
            Judge::Host(judge_host) => {
                let outcome = outcome_of(entry.check, facts, profile, level, || {
                    let after = of_both_readings(entry.check, after.as_ref());
                    worse_of(
                        judge_host(facts, profile),
                        after.map(|after| judge_host(after, profile)),
                    )
                });
                findings.push(finding(entry.check, facts, Subject::Host, outcome));
            }
            Judge::EachGpu(judge_gpu) => {
                let one_by_one =
                    |facts| -> JudgeGpu<'_> { Box::new(move |gpu| judge_gpu(gpu, facts, profile)) };
                findings.extend(judge_each_gpu(
                    entry.check,
                    one_by_one,
                    (facts, &unlisted),
                    after.as_ref(),
                    profile,
                    level,
                ));
            }
            Judge::EachGpuAmongAll(among_all) => {
                findings.extend(judge_each_gpu(
                    entry.check,
                    |facts| among_all(facts, profile),
                    (facts, &unlisted),
                    after.as_ref(),
                    profile,
                    level,
                ));
            }
            Judge::EachEnvironment(framework, judge_environment) => {
                findings.extend(judge_each_environment(
                    entry.check,
                    framework,
                    judge_environment,
                    facts,
                    profile,
                    level,
                ));
            }
        }
    }
    // A stable sort keeps the order of the checks within a subject.
    let unlisted: HashSet<&GpuSubject> = unlisted.iter().collect();
    findings.sort_by_cached_key(|it| subject_rank(facts, &unlisted, &it.subject));
    findings
}

fn judge_each_gpu<'f>(
    check: &Check,
    judge_gpus: impl Fn(&'f Facts) -> JudgeGpu<'f>,
    (facts, unlisted): (&'f Facts, &[GpuSubject]),
    after: Option<&'f Facts>,
    profile: &Profile,
    level: Level,
) -> Vec<Finding> {
    let judge_one = |gpu: &GpuFacts, judge_gpu: &JudgeGpu<'_>| {
        if check.id != REPORTS_LOST_GPU && a_lost_gpu_is_reported(gpu, profile) {
            return Ok(Outcome::skip(format!(
                "this GPU is lost, which {REPORTS_LOST_GPU} reports"
            )));
        }
        judge_gpu(gpu)
    };
    // Only where a GPU is judged.
    let judge_before = LazyCell::new(|| judge_gpus(facts));
    let after = of_both_readings(check, after);
    let judge_after = LazyCell::new(|| after.map(|it| (it, judge_gpus(it))));
    let listed = facts.gpus.iter().enumerate().map(|(index, gpu)| {
        let outcome = outcome_of(check, facts, profile, level, || {
            let after = judge_after
                .as_ref()
                .and_then(|(after, judge_gpu)| Some(judge_one(after.gpus.get(index)?, judge_gpu)));
            worse_of(judge_one(gpu, &judge_before), after)
        });
        finding(check, facts, Subject::Gpu(GpuSubject::of(gpu)), outcome)
    });
    let unlisted = unlisted.iter().cloned().map(|subject| {
        let outcome = outcome_of(check, facts, profile, level, || {
            Err(queries::reported_by(
                "gpu_count",
                "NVML does not list this GPU",
                profile,
            ))
        });
        finding(check, facts, Subject::Gpu(subject), outcome)
    });
    let findings: Vec<Finding> = listed.chain(unlisted).collect();
    if !findings.is_empty() {
        return findings;
    }
    let outcome = outcome_of(check, facts, profile, level, || {
        Err(queries::reported_by(
            "gpu_count",
            "no GPU was found",
            profile,
        ))
    });
    vec![finding(check, facts, Subject::Host, outcome)]
}

/// A Python environment that is demanded and absent is a subject, too: of the check that judges
/// environments as such.
fn judge_each_environment(
    check: &Check,
    framework: Option<Framework>,
    judge_environment: JudgeEnvironment,
    facts: &Facts,
    profile: &Profile,
    level: Level,
) -> Vec<Finding> {
    let about = |subject: Subject, judgement: Judgement| {
        let outcome = outcome_of(check, facts, profile, level, || judgement);
        finding(check, facts, subject, outcome)
    };
    let environments = match subjects::judged(facts, profile, framework) {
        Ok(environments) => environments,
        Err(outcome) => return vec![about(Subject::Host, Err(outcome))],
    };
    let mut findings: Vec<Finding> = environments
        .into_iter()
        .map(|it| {
            let judgement = judge_environment(it, facts, profile);
            about(Subject::Environment(subjects::of(it)), judgement)
        })
        .collect();
    if framework.is_none() {
        let absent = subjects::absent(facts, profile).into_iter();
        findings.extend(absent.map(|it| {
            let text = "there is no Python environment here, and the profile demands one";
            about(Subject::Environment(it), Ok(Outcome::fail(text)))
        }));
    }
    if findings.is_empty() {
        let nothing = subjects::nothing(framework);
        findings.push(about(Subject::Host, Err(nothing)));
    }
    findings
}

/// The second reading, for a check that judges the state of the node. What happened under load is
/// the same in both.
fn of_both_readings<'a>(check: &Check, after: Option<&'a Facts>) -> Option<&'a Facts> {
    after.filter(|_| check.stage != Stage::Load)
}

/// The check that fails for a lost GPU.
const REPORTS_LOST_GPU: &str = "gpu_reachable";

/// A lost GPU answers nothing more: one failure is enough, and an error of every other check would
/// bury it. Where the profile softens that failure, the other checks are judged, so that a lost GPU
/// is never green.
fn a_lost_gpu_is_reported(gpu: &GpuFacts, profile: &Profile) -> bool {
    let stays_a_failure = profile
        .checks
        .get(REPORTS_LOST_GPU)
        .is_none_or(|it| it.severity == Severity::Fail);
    gpu.lost.is_some() && stays_a_failure
}

/// Applies level and profile around one judgement.
fn outcome_of(
    check: &Check,
    facts: &Facts,
    profile: &Profile,
    level: Level,
    judge: impl FnOnce() -> Judgement,
) -> (Outcome, Option<String>) {
    let setting = profile.checks.get(check.id);
    if let Some(setting) = setting.filter(|it| it.severity == Severity::Off) {
        return (
            Outcome::skip(format!("turned off by the profile: {}", setting.reason)),
            None,
        );
    }
    if level == Level::Image {
        if let Some(outcome) = not_judged_of_an_image(check, facts) {
            return (outcome, None);
        }
    } else if level < check.level {
        let reason = format!(
            "judged at level {} and above, this run is {level}",
            check.level
        );
        return (Outcome::skip(reason), None);
    }
    if level != Level::Image && facts.level < check.level {
        let reason = format!(
            "these facts were collected at level {}, this check needs {}",
            facts.level, check.level
        );
        return (Outcome::error(reason), None);
    }
    let mut outcome = judge().unwrap_or_else(|outcome| outcome);
    let overridden =
        setting.and_then(|it| override_severity(&mut outcome, it.severity, &it.reason));
    (outcome, overridden)
}

/// Why level image does not judge `check`; `None` where it does.
///
/// What needs a GPU is judged as at level quick on a build instance that has one. That it has none
/// must have been seen.
fn not_judged_of_an_image(check: &Check, facts: &Facts) -> Option<Outcome> {
    /// Judged at every level: whether the run itself was whole.
    const OF_THE_RUN: &str = "run_complete";
    if check.id == OF_THE_RUN {
        return None;
    }
    if check.level == Level::Image {
        return facts.host.image.is_none().then(|| {
            Outcome::error(format!(
                "these facts were collected at level {}, which does not read an image's disk",
                facts.level
            ))
        });
    }
    if check.level > Level::Quick {
        let reason = format!(
            "judged at level {} and above, this run is {}",
            check.level,
            Level::Image
        );
        return Some(Outcome::skip(reason));
    }
    match queries::pci_gpus(facts) {
        Ok(gpus) if gpus.is_empty() => Some(Outcome::skip(
            "this build instance has no GPU: level image judges the driver by its files",
        )),
        Ok(_) => None,
        Err(outcome) => Some(outcome),
    }
}

/// Changes `fail` to `warn` or `warn` to `fail`. An `error` stays: a profile cannot make up for not
/// having looked.
fn override_severity(outcome: &mut Outcome, severity: Severity, reason: &str) -> Option<String> {
    let wanted = match (severity, outcome.verdict) {
        (Severity::Warn, Verdict::Fail) => Verdict::Warn,
        (Severity::Fail, Verdict::Warn) => Verdict::Fail,
        _ => return None,
    };
    let overridden = format!(
        "{} became {wanted} by the profile: {reason}",
        outcome.verdict
    );
    outcome.verdict = wanted;
    Some(overridden)
}

fn finding(
    check: &Check,
    facts: &Facts,
    subject: Subject,
    (outcome, overridden): (Outcome, Option<String>),
) -> Finding {
    Finding {
        check: check.id.to_owned(),
        subject,
        verdict: outcome.verdict,
        summary: outcome.summary,
        expected: outcome.expected,
        observed: outcome.observed,
        remedy: outcome.remedy,
        recommended_action: diagnosis::recommended_action(
            check.id,
            outcome.verdict,
            outcome.recommended_action,
            outcome.busy,
        ),
        cause: outcome.cause,
        evidence: outcome.evidence.into_vec(),
        busy: outcome.busy,
        overridden,
        time_s: share_of_probe_time(check, facts),
    }
}

/// The wall time of the stage's probes, shared evenly among its checks: what JUnit's `time` can
/// honestly say, since judging itself takes microseconds.
fn share_of_probe_time(check: &Check, facts: &Facts) -> f64 {
    let probes: &[&str] = match check.stage {
        Stage::Host => &["host"],
        Stage::Gpu => &["nvml", "inforom", "cuda", "kubernetes"],
        Stage::Load => &["load"],
    };
    let total_ms: f64 = probes
        .iter()
        .filter_map(|it| facts.timings_ms.get(*it))
        .sum();
    let checks = crate::checks::ALL
        .iter()
        .filter(|it| it.check.stage == check.stage)
        .count();
    #[expect(clippy::cast_precision_loss, reason = "a handful of checks")]
    let share_ms = total_ms / checks.max(1) as f64;
    share_ms / 1000.0
}

/// A GPU that is not listed would be searched for in vain for each of its findings.
fn subject_rank(facts: &Facts, unlisted: &HashSet<&GpuSubject>, subject: &Subject) -> usize {
    let gpus = facts.gpus.len();
    match subject {
        Subject::Host => 0,
        Subject::Gpu(subject) if unlisted.contains(subject) => gpus + 1,
        Subject::Gpu(subject) => subject
            .position_in(facts)
            .map_or(gpus + 1, |position| position + 1),
        Subject::Environment(subject) => {
            let pythons = facts.environment.iter().flat_map(|it| &it.pythons);
            let mut positions = pythons.enumerate();
            let position = positions.find(|(_, it)| it.prefix == subject.path);
            gpus + 2 + position.map_or(usize::MAX / 2, |(position, _)| position)
        }
    }
}

/// The ids of all checks, as `checks:` of a profile may name them.
pub fn check_ids() -> impl Iterator<Item = &'static str> + Clone {
    crate::checks::ALL.iter().map(|entry| entry.check.id)
}

impl Run {
    /// Judges `facts` by `profile`: everything that a report is made of.
    pub fn judged(facts: Facts, profile: &Profile, profile_name: &str, level: Level) -> Self {
        Self {
            findings: judge(&facts, profile, level),
            incomplete: facts.interrupted.clone(),
            facts,
            profile: profile_name.to_owned(),
            level,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::judge;
    use crate::check::{Judge, title};
    use crate::checks::ALL;
    use crate::facts::{Facts, GpuFacts, KubernetesFacts, MigDevice, MigMode, Reading};
    use crate::findings::{ExitStatus, Finding, Subject, Verdict};
    use crate::level::Level;
    use crate::profile::Profile;
    use crate::test_machine::{
        VERDICT_SEEN, healthy_image, healthy_node, healthy_single_h200, healthy_t4,
        make_model_unknown, node_with,
    };

    fn judge_all(facts: &Facts) -> Vec<Finding> {
        judge(facts, &Profile::default(), Level::Extended)
    }

    #[test]
    fn every_id_equals_its_file_name_and_occurs_once() {
        let mut ids = BTreeSet::new();
        for entry in ALL {
            assert_eq!(entry.check.id, entry.file_name);
            assert!(ids.insert(entry.check.id), "{} twice", entry.check.id);
        }
    }

    #[test]
    fn checks_are_listed_by_stage_then_id() {
        assert!(ALL.is_sorted_by_key(|entry| (entry.check.stage, entry.check.id)));
    }

    #[test]
    fn every_check_explains_itself() {
        for entry in ALL {
            assert!(!title(entry).is_empty(), "{}", entry.file_name);
            for section in ["Why", "How it is judged", "What to do", "Source"] {
                assert!(
                    entry
                        .documentation
                        .contains(&format!("\n//! ## {section}\n")),
                    "{} lacks the section {section}",
                    entry.file_name
                );
            }
            assert!(entry.check.documentation_url.starts_with("https://"));
        }
    }

    /// A check that cannot object is worth nothing, and one that cannot pass is a nuisance. Runs
    /// the tests of all checks once more, in a process of their own, and reads which verdicts they
    /// saw.
    #[test]
    #[expect(
        clippy::disallowed_methods,
        reason = "only another process can look at all tests of this one, in whatever order they ran"
    )]
    fn every_check_is_seen_to_pass_and_to_object() {
        /// An incomplete run was not looked at to the end, which is an error and never a failure.
        const ONLY_ERR: [&str; 1] = ["run_complete"];
        let tests = std::env::current_exe().expect("a test knows its binary");
        let run = std::process::Command::new(tests)
            .args(["checks::", "--skip", "commands::"])
            .args(["--nocapture", "--test-threads=1"])
            .output()
            .expect("the test binary starts");
        let said = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success(), "the checks' own tests fail:\n{said}");
        let mut seen: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        // The test harness writes to the same lines.
        for (_, line) in said.lines().filter_map(|it| it.split_once(VERDICT_SEEN)) {
            let mut words = line.split_whitespace();
            if let (Some(check), Some(verdict)) = (words.next(), words.next()) {
                seen.entry(check).or_default().insert(verdict);
            }
        }
        for entry in ALL {
            let verdicts = seen.remove(entry.check.id).unwrap_or_default();
            let can_only_err = ONLY_ERR.contains(&entry.check.id) && verdicts.contains("error");
            assert!(
                can_only_err || verdicts.contains("fail") || verdicts.contains("warn"),
                "no test sees {} fail or warn, only {verdicts:?}",
                entry.check.id
            );
            assert!(
                verdicts.contains("pass"),
                "no test sees {} pass, only {verdicts:?}",
                entry.check.id
            );
        }
    }

    #[test]
    fn nothing_passes_when_nothing_was_read() {
        let mut facts = Facts {
            level: Level::Extended,
            ..Facts::default()
        };
        for (gpus, kubernetes) in [(0, None), (2, None), (2, Some(KubernetesFacts::default()))] {
            facts.gpus = vec![GpuFacts::default(); gpus];
            facts.kubernetes = kubernetes;
            let passed: Vec<Finding> = judge_all(&facts)
                .into_iter()
                .filter(|it| matches!(it.verdict, Verdict::Pass | Verdict::Warn))
                .collect();
            assert!(passed.is_empty(), "with {gpus} GPUs: {passed:#?}");
        }
    }

    fn judge_image(facts: &Facts, profile: &str) -> crate::findings::Run {
        let profile = crate::parse_profile(profile, "test profile").expect("a profile");
        crate::findings::Run::judged(facts.clone(), &profile, "test profile", Level::Image)
    }

    #[test]
    fn an_image_passes_without_a_gpu_once_its_driver_was_judged() {
        let run = judge_image(&healthy_image(), "{}");
        let objections: Vec<_> = run
            .findings
            .iter()
            .filter(|it| !matches!(it.verdict, Verdict::Pass | Verdict::Skip))
            .collect();
        assert!(objections.is_empty(), "{objections:#?}");
        assert_eq!(run.exit_status(), ExitStatus::Passed);
        let off = "checks: {image_kernel_modules: {severity: off, reason: nobody knows}}";
        let run = judge_image(&healthy_image(), off);
        assert_eq!(run.exit_status(), ExitStatus::NotJudged);
    }

    #[test]
    fn a_gpu_in_the_build_instance_is_judged_with_the_image() {
        let mut facts = healthy_node();
        facts.level = Level::Image;
        facts.host.image = healthy_image().host.image;
        facts.gpus[0].persistence_mode = Reading::Value(false);
        let run = judge_image(&facts, "{}");
        assert_eq!(run.counts().fail, 1, "{:#?}", run.findings);
        facts.host.pci_devices = Reading::NotRead("no such file".to_owned());
        assert_eq!(
            judge_image(&facts, "{}").exit_status(),
            ExitStatus::NotJudged
        );
    }

    #[test]
    fn what_only_an_image_has_is_judged_at_no_other_level() {
        let images = |findings: &[Finding]| {
            let names = findings.iter().map(|it| it.check.as_str());
            names.filter(|it| it.starts_with("image_")).count()
        };
        assert_eq!(images(&judge_all(&healthy_node())), 0);
        let run = judge_image(&healthy_node(), "{}");
        assert!(images(&run.findings) > 0);
        assert_eq!(run.exit_status(), ExitStatus::NotJudged);
    }

    #[test]
    fn nothing_of_an_image_passes_when_nothing_was_read() {
        for image in [None, Some(crate::facts::ImageFacts::default())] {
            let mut facts = Facts {
                level: Level::Image,
                ..Facts::default()
            };
            facts.host.image = image;
            let run = judge_image(&facts, "{}");
            assert_eq!(run.counts().judged(), 0, "{:#?}", run.findings);
            assert_eq!(run.exit_status(), ExitStatus::NotJudged);
        }
    }

    /// The findings of the checks that judge each GPU, about the first GPU.
    fn about_the_first_gpu(facts: &Facts) -> Vec<Finding> {
        let each_gpu = |id: &str| {
            ALL.iter().any(|it| {
                it.check.id == id
                    && matches!(
                        it.check.judge,
                        Judge::EachGpu(_) | Judge::EachGpuAmongAll(_)
                    )
            })
        };
        let first = crate::findings::GpuSubject::of(&facts.gpus[0]);
        judge_all(facts)
            .into_iter()
            .filter(|it| each_gpu(&it.check))
            .filter(|it| it.subject == Subject::Gpu(first.clone()))
            .collect()
    }

    /// Ids of the checks that say something else than pass or skip of the first GPU.
    fn objections(mut facts: Facts) -> Vec<String> {
        facts.host.uptime_s = Reading::Value(86_400.0);
        about_the_first_gpu(&facts)
            .into_iter()
            .filter(|it| !matches!(it.verdict, Verdict::Pass | Verdict::Skip))
            .map(|it| format!("{} {}: {}", it.check, it.verdict, it.summary))
            .collect()
    }

    #[test]
    fn a_healthy_gpu_gives_no_reason_to_object() {
        let none: [String; 0] = [];
        assert_eq!(objections(healthy_node()), none);
        assert_eq!(objections(node_with(healthy_t4())), none);
        assert_eq!(objections(node_with(healthy_single_h200())), none);
        let mut with_mig = healthy_node();
        with_mig.gpus[0].mig = Reading::Value(MigMode {
            current: true,
            pending: true,
        });
        with_mig.gpus[0].mig_devices = Reading::Value(vec![MigDevice::default(); 7]);
        with_mig.gpus[0].row_remapping = Reading::NotSupported;
        assert_eq!(objections(with_mig), none);
    }

    #[test]
    fn of_a_healthy_gpu_of_an_unknown_model_only_the_model_is_remarked_upon() {
        let mut gpu = healthy_t4();
        make_model_unknown(&mut gpu);
        let objections = objections(node_with(gpu));
        assert_eq!(objections.len(), 1, "{objections:#?}");
        assert!(objections[0].starts_with("gpu_model warn"));
    }

    #[test]
    fn a_virtual_gpu_that_tells_little_is_not_broken() {
        let mut gpu = GpuFacts::default();
        for field in reading_fields() {
            gpu = with_reading(&gpu, &field, &serde_json::json!("not_supported"));
        }
        let healthy = healthy_t4();
        let gpu = GpuFacts {
            uuid: healthy.uuid,
            name: Reading::Value("GRID T4-8C".to_owned()),
            memory: healthy.memory,
            processes: healthy.processes,
            virtualization_mode: Reading::Value("vgpu".to_owned()),
            ..gpu
        };
        let objections = objections(node_with(gpu));
        assert!(objections.is_empty(), "{objections:#?}");
    }

    /// Replaces readings in the GPU's serialized form, so that a new field cannot be forgotten
    /// here.
    fn with_reading(gpu: &GpuFacts, field: &str, reading: &serde_json::Value) -> GpuFacts {
        let mut json = serde_json::to_value(gpu).expect("facts are JSON");
        json[field] = reading.clone();
        serde_json::from_value(json).expect("still facts")
    }

    /// Names of the fields of [`GpuFacts`] that are readings.
    fn reading_fields() -> Vec<String> {
        let json = serde_json::to_value(GpuFacts::default()).expect("facts are JSON");
        let serde_json::Value::Object(fields) = json else {
            panic!("a GPU is an object")
        };
        fields
            .into_iter()
            .filter(|(_, value)| value.get("not_read").is_some())
            .map(|(name, _)| name)
            .collect()
    }

    #[test]
    fn nothing_is_judged_when_nothing_is_supported() {
        let mut facts = healthy_node();
        let mut gpu = GpuFacts::default();
        for field in reading_fields() {
            gpu = with_reading(&gpu, &field, &serde_json::json!("not_supported"));
        }
        facts.gpus[0] = gpu;
        let judged: Vec<Finding> = about_the_first_gpu(&facts)
            .into_iter()
            .filter(|it| it.verdict.judged())
            .collect();
        assert!(judged.is_empty(), "{judged:#?}");
    }

    /// A value that a GPU did not report must not vanish between the checks: each takes it for
    /// another's business.
    #[test]
    fn every_unread_value_is_an_error_somewhere() {
        // Values that only explain or excuse, and values that host checks judge over all GPUs.
        const NOT_JUDGED_BY_ITSELF: [&str; 13] = [
            "board_part_number",
            "gsp_firmware_version",
            "inforom_image_version",
            "minor_number",
            "pci_address",
            "pci_device_id",
            "pci_subsystem_id",
            "serial",
            "utilization",
            "vbios_version",
            "virtualization_mode",
            // Judged where MIG is on.
            "mig_devices",
            // An H200 remaps rows instead.
            "retired_pages",
        ];
        let mut facts = healthy_node();
        facts.host.uptime_s = Reading::Value(86_400.0);
        let healthy = facts.gpus[0].clone();
        for field in reading_fields() {
            if NOT_JUDGED_BY_ITSELF.contains(&field.as_str()) {
                continue;
            }
            let not_read = serde_json::json!({"not_read": "no answer"});
            facts.gpus[0] = with_reading(&healthy, &field, &not_read);
            let errors = about_the_first_gpu(&facts)
                .into_iter()
                .filter(|it| it.verdict == Verdict::Error)
                .count();
            assert!(errors > 0, "nothing says that {field} was not read");
        }
    }

    /// What the checks that judge each GPU say of the GPU at `address`.
    fn verdicts_about(facts: &Facts, profile: &str, address: &str) -> BTreeSet<Verdict> {
        let profile = crate::parse_profile(profile, "test profile").expect("a profile");
        judge(facts, &profile, Level::Extended)
            .into_iter()
            .filter(|it| match &it.subject {
                Subject::Gpu(gpu) => gpu.pci_address.as_deref() == Some(address),
                Subject::Host | Subject::Environment(_) => false,
            })
            .map(|it| it.verdict)
            .collect()
    }

    #[test]
    fn an_unlisted_gpu_is_skipped_only_while_gpu_count_fails_for_it() {
        let mut facts = healthy_node();
        let lost = facts.gpus.remove(3);
        let address = lost.pci_address.value().expect("it has an address");
        let said = verdicts_about(&facts, "{}", address);
        assert_eq!(said, BTreeSet::from([Verdict::Skip]));
        let softened = "checks: {gpu_count: {severity: warn, reason: known}}";
        let said = verdicts_about(&facts, softened, address);
        assert_eq!(said, BTreeSet::from([Verdict::Error]));
    }

    #[test]
    fn gpus_that_a_container_was_not_given_are_no_subjects() {
        let mut facts = healthy_node();
        let others = facts.gpus.remove(3);
        facts.host.in_container = Reading::Value(true);
        let address = others.pci_address.value().expect("it has an address");
        assert_eq!(verdicts_about(&facts, "{}", address), BTreeSet::new());
    }
}
