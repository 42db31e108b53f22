//! A container has the shared memory and the locked memory that jobs on GPUs need.
//!
//! ## Why
//! NCCL and the workers of data loaders exchange data through `/dev/shm`, of which Docker gives a
//! container 64 MiB: a job dies with a bus error minutes after its start. Registration of memory
//! with a network adapter fails at the limit of locked memory.
//!
//! ## How it is judged
//! In a container: `warn` when `/dev/shm` has less than 1 GiB, and when a container with several
//! GPUs may lock less than 1 GiB. A mount without a size of its own has half of the host's memory,
//! as Linux gives it.
//!
//! Skipped outside of containers.
//!
//! ## What to do
//! `--shm-size=1g --ulimit memlock=-1`, or `--ipc=host`; in Kubernetes an `emptyDir` volume of
//! medium `Memory` at `/dev/shm`.
//!
//! ## Source
//! NVIDIA NCCL, Troubleshooting, "Docker",
//! <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html>, which
//! recommends both options; docker run, `--shm-size`,
//! <https://docs.docker.com/reference/cli/docker/container/run/>.

use crate::check::{Check, Judge};
use crate::facts::{Facts, Reading};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "container_limits",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
};

/// NCCL's documentation: `--shm-size=1g`.
const SHARED_MEMORY_MINIMUM_MIB: u64 = 1024;
/// NCCL's documentation requests no limit at all; below this even one registration of NCCL's
/// buffers fails (this project's own choice).
const LOCKED_MEMORY_MINIMUM_MIB: u64 = 1024;

const REMEDY: &str =
    "start the container with --shm-size=1g --ulimit memlock=-1, or with --ipc=host";

fn judge(facts: &Facts, _: &Profile) -> Judgement {
    if !queries::in_container(facts) {
        return Ok(Outcome::skip("this is no container"));
    }
    let shared = limit(&facts.host.shared_memory_mib, "the size of /dev/shm")?;
    let locked = limit(&facts.host.locked_memory_mib, "the limit of locked memory")?;
    let small_shm = shared.filter(|mib| *mib < SHARED_MEMORY_MINIMUM_MIB);
    let little_locked =
        locked.filter(|mib| *mib < LOCKED_MEMORY_MINIMUM_MIB && facts.gpus.len() > 1);
    let mut objections = Vec::new();
    if let Some(mib) = small_shm {
        objections.push(format!(
            "/dev/shm has {mib} MiB, NCCL and data loaders need at least {SHARED_MEMORY_MINIMUM_MIB}"
        ));
    }
    if let Some(mib) = little_locked {
        objections.push(format!(
            "only {mib} MiB of memory can be locked, too little to register buffers with a network adapter"
        ));
    }
    if objections.is_empty() {
        return Ok(Outcome::pass(format!(
            "/dev/shm: {}, locked memory: {}",
            in_words(shared),
            in_words(locked)
        )));
    }
    Ok(Outcome::warn(objections.join("; "))
        .expected(format!("at least {SHARED_MEMORY_MINIMUM_MIB} MiB of each"))
        .observed(format!(
            "/dev/shm {}, locked memory {}",
            in_words(shared),
            in_words(locked)
        ))
        .remedy(REMEDY))
}

/// The limit, `None` where there is none. Facts of older versions have neither.
fn limit(reading: &Reading<u64>, what: &str) -> Result<Option<u64>, Outcome> {
    match reading {
        Reading::NotSupported => Ok(None),
        _ if *reading == Reading::default() => Err(Outcome::skip(format!("{what} was not read"))),
        _ => Ok(Some(*reading.required(what)?)),
    }
}

fn in_words(limit: Option<u64>) -> String {
    limit.map_or_else(|| "no limit".to_owned(), |mib| format!("{mib} MiB"))
}

#[cfg(test)]
mod tests {
    use crate::facts::Reading;
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_node, judge_host_check};

    fn verdict(in_container: bool, shared: Reading<u64>, locked: Reading<u64>) -> Verdict {
        let mut facts = healthy_node();
        facts.host.in_container = Reading::Value(in_container);
        facts.host.shared_memory_mib = shared;
        facts.host.locked_memory_mib = locked;
        judge_host_check(&super::CHECK, &facts, "{}").verdict
    }

    #[test]
    fn dockers_defaults_are_too_small_for_jobs() {
        let unlimited = || Reading::NotSupported;
        let of = Reading::Value;
        assert_eq!(verdict(true, of(64), unlimited()), Verdict::Warn);
        assert_eq!(verdict(true, of(1024), of(8)), Verdict::Warn);
        assert_eq!(verdict(true, of(1024), unlimited()), Verdict::Pass);
        assert_eq!(verdict(true, unlimited(), unlimited()), Verdict::Pass);
        assert_eq!(verdict(true, Reading::default(), of(8)), Verdict::Skip);
        let unread = || Reading::NotRead("permission denied".to_owned());
        assert_eq!(verdict(true, unread(), of(8)), Verdict::Error);
        assert_eq!(verdict(false, of(64), of(8)), Verdict::Skip);
    }
}
