//! The IMEX service runs where memory is shared between the nodes of a rack.
//!
//! ## Why
//! On a rack-scale system (GB200, GB300) the daemon `nvidia-imex` exports and imports memory over
//! NVLink between nodes. Without it, collectives over several nodes fail at their start
//! or fall back to the network, while every GPU of the node works.
//!
//! ## How it is judged
//! Where the GPUs are of a rack-scale model and registered with a fabric that has a cluster UUID:
//! service `nvidia-imex` must be active where it is enabled (`fail`). Where it is installed, not
//! enabled and not active, and the node has channels (`/dev/nvidia-caps-imex-channels`), that is a
//! `warn`: on Kubernetes the driver for dynamic resource allocation starts a daemon for each
//! workload, and the host's must be off.
//!
//! Skipped on all other GPUs, in containers, and where the service is not installed.
//!
//! ## What to do
//! `systemctl enable --now nvidia-imex`, and read `/var/log/nvidia-imex.log`;
//! `nvidia-imex-ctl -N` shows the domain's nodes.
//!
//! ## Source
//! NVIDIA IMEX Service for NVLink Networks,
//! <https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/>.

use crate::check::{Check, Judge};
use crate::expect;
use crate::facts::Facts;
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;

pub(crate) const CHECK: Check = Check {
    id: "imex_service",
    stage: Stage::Host,
    level: Level::Quick,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/multi-node-nvlink-systems/imex-guide/",
};

const SERVICE: &str = "nvidia-imex";
const CHANNELS: &str = "/dev/nvidia-caps-imex-channels/";

fn judge(facts: &Facts, _: &Profile) -> Judgement {
    let in_a_rack = facts
        .gpus
        .iter()
        .any(|gpu| expect::is_rack_scale(gpu) && expect::is_in_a_cluster(gpu));
    if !in_a_rack {
        return Ok(Outcome::skip(
            "no GPU is registered with a fabric that spans nodes",
        ));
    }
    let state = queries::service(facts, SERVICE)?;
    let observed = queries::describe_service(state);
    let summary = format!("service {SERVICE} is {observed}");
    let has_channels = facts
        .host
        .device_nodes
        .value()
        .is_some_and(|nodes| nodes.iter().any(|it| it.path.starts_with(CHANNELS)));
    let outcome = match (state.active, state.enabled) {
        (true, _) => return Ok(Outcome::pass(summary)),
        (false, true) => Outcome::fail(summary),
        (false, false) if state.installed && has_channels => Outcome::warn(format!(
            "{summary}, and the node has channels for memory that is shared between nodes"
        )),
        (false, false) => return Ok(Outcome::skip(summary)),
    };
    Ok(outcome.expected("active").observed(observed).remedy(
        "systemctl enable --now nvidia-imex, and read /var/log/nvidia-imex.log; not where Kubernetes' driver for dynamic \
         resource allocation starts a daemon for each workload",
    ))
}

#[cfg(test)]
mod tests {
    use crate::facts::{DeviceNode, Facts, Reading, ServiceState};
    use crate::findings::Verdict;
    use crate::test_machine::{healthy_node, judge_host_check};

    fn tray(state: Option<(bool, bool)>, channels: bool) -> Facts {
        let mut facts = healthy_node();
        for gpu in &mut facts.gpus {
            gpu.name = Reading::Value("NVIDIA GB200".to_owned());
            gpu.pci_device_id = Reading::Value(0x2941);
            if let Reading::Value(fabric) = &mut gpu.fabric {
                fabric.cluster_uuid = Some("2b7a4c10-95e3-4f0a-8d61-7c3e5a9b1f02".to_owned());
            }
        }
        let state = state.map_or_else(ServiceState::default, |(enabled, active)| ServiceState {
            installed: true,
            enabled,
            active,
        });
        facts
            .host
            .services
            .insert(super::SERVICE.to_owned(), Reading::Value(state));
        if channels && let Reading::Value(nodes) = &mut facts.host.device_nodes {
            nodes.push(DeviceNode {
                path: format!("{}channel0", super::CHANNELS),
                accessible: true,
                mode: 0o666,
            });
        }
        facts
    }

    #[test]
    fn a_daemon_that_should_run_and_does_not_fails() {
        let verdict = |facts: &Facts| judge_host_check(&super::CHECK, facts, "{}").verdict;
        assert_eq!(verdict(&tray(Some((true, false)), true)), Verdict::Fail);
        assert_eq!(verdict(&tray(Some((true, true)), true)), Verdict::Pass);
        assert_eq!(verdict(&tray(Some((false, false)), true)), Verdict::Warn);
        assert_eq!(verdict(&tray(Some((false, false)), false)), Verdict::Skip);
        assert_eq!(verdict(&healthy_node()), Verdict::Skip);
    }
}
