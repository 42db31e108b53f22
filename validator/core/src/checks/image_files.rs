//! The files that the profile requires are in the image.
//!
//! ## Why
//! What a node needs besides the driver (the validator itself, its profile, the container toolkit's
//! configuration) comes from several provisioners; one that was left out is noticed when the first
//! node does not join.
//!
//! ## How it is judged
//! At level image only. Each path of `image.files` in the profile must be a file that is not empty.
//! Skipped when the profile requires none.
//!
//! ## What to do
//! Run the provisioner that installs the file.
//!
//! ## Source
//! This project's own rule: the purpose of an image is stated in its profile.

use crate::check::{Check, Judge};
use crate::facts::{Facts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "image_files",
    stage: Stage::Host,
    level: Level::Image,
    judge: Judge::Host(judge),
    documentation_url: concat!(
        env!("CARGO_PKG_REPOSITORY"),
        "/blob/main/CHECKS.md#image_files"
    ),
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let image = queries::image(facts)?;
    let mut tally = Tally::default();
    for path in &profile.image.files {
        match image.files.get(path) {
            Some(Reading::Value(file)) if file.bytes > 0 => tally.pass(format!("{path} is there")),
            Some(Reading::Value(_)) => tally.fail(format!("{path} is empty")),
            Some(Reading::NotSupported) => tally.fail(format!("{path} is missing")),
            Some(Reading::NotRead(reason)) => tally.error(reason.clone()),
            None => tally.error(format!("{path} was not searched for")),
        }
    }
    Ok(tally.outcome(Outcome::skip("no files are configured in the profile")))
}

#[cfg(test)]
mod tests {
    use crate::facts::{ImageFile, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_image, image_of, judge_image_check};

    const ASKED: &str = "image: {files: [/usr/bin/gpu-validator]}";

    fn judge(file: Option<Reading<ImageFile>>, profile: &str) -> Finding {
        let mut facts = healthy_image();
        if let Some(file) = file {
            let path = "/usr/bin/gpu-validator".to_owned();
            image_of(&mut facts).files.insert(path, file);
        }
        judge_image_check(&super::CHECK, &facts, profile)
    }

    fn judge_file(bytes: u64) -> Verdict {
        let file = Reading::Value(ImageFile { bytes, mode: 0o755 });
        judge(Some(file), ASKED).verdict
    }

    #[test]
    fn passes_when_it_is_there_and_fails_when_it_is_not() {
        assert_eq!(judge_file(1), Verdict::Pass);
        assert_eq!(judge_file(0), Verdict::Fail);
        let finding = judge(Some(Reading::NotSupported), ASKED);
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(finding.summary, "/usr/bin/gpu-validator is missing");
    }

    #[test]
    fn errs_when_nobody_looked_and_skips_when_nobody_asks() {
        assert_eq!(judge(None, ASKED).verdict, Verdict::Error);
        assert_eq!(
            judge(Some(Reading::default()), ASKED).verdict,
            Verdict::Error
        );
        assert_eq!(judge(None, "{}").verdict, Verdict::Skip);
    }
}
