//! The image's root file system has room for a node's work.
//!
//! ## Why
//! Container images, logs and the scratch files of jobs go to the root volume. A node that comes up
//! nearly full evicts its first pods.
//!
//! ## How it is judged
//! At level image only. At least 15 % of the root file system must be free, or what the profile
//! sets (`image.free_disk_minimum_percent`): below 15 % for images kubelet begins to evict. The
//! instance's volume may be larger than the image's, never smaller.
//!
//! ## What to do
//! Remove what the image does not need (package caches, CUDA toolkits that no job uses), or give it
//! a larger volume.
//!
//! ## Source
//! Kubernetes, Node-pressure Eviction, default `imagefs.available<15%`,
//! <https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/#hard-eviction-thresholds>

use crate::check::{Check, Judge};
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "image_free_disk",
    stage: Stage::Host,
    level: Level::Image,
    judge: Judge::Host(judge),
    documentation_url: "https://kubernetes.io/docs/concepts/scheduling-eviction/node-pressure-eviction/",
};

/// kubelet's default for `imagefs.available`; see the source above.
const FREE_MINIMUM_PERCENT: u32 = 15;

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let disk = queries::image(facts)?
        .root_disk
        .required("free space of the root file system")?;
    if disk.total_bytes == 0 {
        return Err(Outcome::error("the root file system reports a size of 0"));
    }
    let minimum = profile
        .image
        .free_disk_minimum_percent
        .unwrap_or(FREE_MINIMUM_PERCENT);
    let percent = u128::from(disk.free_bytes) * 100 / u128::from(disk.total_bytes);
    let seen = format!(
        "{percent} % of the root file system are free ({} of {} MiB)",
        disk.free_bytes >> 20,
        disk.total_bytes >> 20
    );
    if percent >= u128::from(minimum) {
        return Ok(Outcome::pass(seen));
    }
    Ok(
        Outcome::fail(format!("only {seen}, at least {minimum} % are needed"))
            .expected(format!("{minimum} %"))
            .observed(format!("{percent} %"))
            .remedy("remove what the image does not need, or give it a larger volume"),
    )
}

#[cfg(test)]
mod tests {
    use crate::facts::{DiskSpace, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_image, image_of, judge_image_check};

    fn judge(free_gib: u64, profile: &str) -> Finding {
        let mut facts = healthy_image();
        image_of(&mut facts).root_disk = Reading::Value(DiskSpace {
            free_bytes: free_gib << 30,
            total_bytes: 100 << 30,
        });
        judge_image_check(&super::CHECK, &facts, profile)
    }

    #[test]
    fn fifteen_percent_are_enough() {
        assert_eq!(judge(15, "{}").verdict, Verdict::Pass);
        let finding = judge(14, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "only 14 % of the root file system are free (14336 of 102400 MiB), at least 15 % are needed"
        );
    }

    #[test]
    fn a_profile_may_ask_for_another_part() {
        let half = "image: {free_disk_minimum_percent: 50}";
        assert_eq!(judge(49, half).verdict, Verdict::Fail);
        assert_eq!(judge(50, half).verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_it_was_not_read() {
        let mut facts = healthy_image();
        image_of(&mut facts).root_disk = Reading::default();
        assert_eq!(
            judge_image_check(&super::CHECK, &facts, "{}").verdict,
            Verdict::Error
        );
        image_of(&mut facts).root_disk = Reading::Value(DiskSpace::default());
        assert_eq!(
            judge_image_check(&super::CHECK, &facts, "{}").verdict,
            Verdict::Error
        );
    }
}
