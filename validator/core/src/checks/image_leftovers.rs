//! Nothing of the build instance is left in the image.
//!
//! ## Why
//! Everybody who may start the image can read all of its disk. A key that was left lets them in
//! somewhere, host keys that are the same on every instance let anyone pose as any of them, and
//! cloud-init's state keeps an instance from being set up.
//!
//! ## How it is judged
//! At level image only. Secrets (authorized keys, private keys, credentials of AWS, Docker, Git and
//! a runner, variables that hold a secret in files that every shell or unit reads), identities
//! (host keys, machine id, cloud-init's state, the CDI specification of the build instance's GPUs,
//! reports of its validation) and shell histories fail. Package caches are a warning: they only
//! take room. Empty files and folders count as gone, and so does what the profile names under
//! `image.leftovers_allowed`. A folder that cannot be listed is an `error`: run as root.
//!
//! ## What to do
//! Remove it as the last step before the validation; `packer/provisioners/clean-image.sh` removes
//! all that is judged here.
//!
//! ## Source
//! AWS, Guidelines for shared Linux AMIs,
//! <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/building-shared-amis.html>; systemd, Safely
//! Building Images, <https://systemd.io/BUILDING_IMAGES/>

use crate::check::{Check, Judge};
use crate::facts::{Facts, Leftover, LeftoverKind};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "image_leftovers",
    stage: Stage::Host,
    level: Level::Image,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/building-shared-amis.html",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let leftovers = queries::image(facts)?
        .leftovers
        .required("the leftovers of the build")?;
    let allowed = &profile.image.leftovers_allowed;
    let mut tally = Tally::default();
    for leftover in leftovers.iter().filter(|it| !allowed.contains(&it.path)) {
        let text = describe(leftover);
        if leftover.kind == LeftoverKind::Cache {
            tally.warn(text);
        } else {
            tally.fail(text);
        }
    }
    let worst = tally.worst();
    let nothing =
        Outcome::pass("no secret, identity, history or cache of the build instance is left");
    let outcome = tally.outcome(nothing);
    Ok(if matches!(worst, Some(Verdict::Fail | Verdict::Warn)) {
        outcome.remedy(
            "remove it as the last step of the build, and change every secret that was left",
        )
    } else {
        outcome
    })
}

fn describe(leftover: &Leftover) -> String {
    let path = &leftover.path;
    match leftover.kind {
        LeftoverKind::Secret => format!("a secret is left in {path}"),
        LeftoverKind::Identity => format!("{path} is the build instance's own"),
        LeftoverKind::History => format!("{path} holds the commands that were typed"),
        LeftoverKind::Cache => format!("{path} only takes room"),
    }
}

#[cfg(test)]
mod tests {
    use crate::facts::{Leftover, LeftoverKind, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_image, image_of, judge_image_check};

    fn judge(leftovers: &[(&str, LeftoverKind)], profile: &str) -> Finding {
        let mut facts = healthy_image();
        let leftovers = leftovers.iter().map(|(path, kind)| Leftover {
            path: (*path).to_owned(),
            kind: *kind,
        });
        image_of(&mut facts).leftovers = Reading::Value(leftovers.collect());
        judge_image_check(&super::CHECK, &facts, profile)
    }

    #[test]
    fn passes_when_nothing_is_left() {
        assert_eq!(judge(&[], "{}").verdict, Verdict::Pass);
    }

    #[test]
    fn fails_for_secrets_identities_and_histories_and_warns_of_caches() {
        let key = ("/root/.ssh/authorized_keys", LeftoverKind::Secret);
        let cache = ("/var/cache/dnf/x", LeftoverKind::Cache);
        let finding = judge(&[key, cache], "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "a secret is left in /root/.ssh/authorized_keys"
        );
        for kind in [LeftoverKind::Identity, LeftoverKind::History] {
            assert_eq!(judge(&[("/x", kind)], "{}").verdict, Verdict::Fail);
        }
        assert_eq!(judge(&[cache], "{}").verdict, Verdict::Warn);
    }

    #[test]
    fn a_profile_may_allow_one() {
        let allowed = "image: {leftovers_allowed: [/root/.ssh/authorized_keys]}";
        let key = ("/root/.ssh/authorized_keys", LeftoverKind::Secret);
        assert_eq!(judge(&[key], allowed).verdict, Verdict::Pass);
        let other = ("/home/x/.ssh/authorized_keys", LeftoverKind::Secret);
        assert_eq!(judge(&[key, other], allowed).verdict, Verdict::Fail);
    }

    #[test]
    fn errs_when_nobody_could_look() {
        let mut facts = healthy_image();
        image_of(&mut facts).leftovers =
            Reading::NotRead("permission denied opening /root".to_owned());
        let finding = judge_image_check(&super::CHECK, &facts, "{}");
        assert_eq!(finding.verdict, Verdict::Error);
    }
}
