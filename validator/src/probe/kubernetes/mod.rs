//! Kubernetes, from the node's inside (the kubelet's sockets) and from the API server.

pub(crate) mod client;
pub(crate) mod credentials;
mod requests;

pub(crate) use requests::{
    ApiRequest, GET_NODE, PATCH_NODE, PATCH_NODE_STATUS, Purpose, role_yaml,
};

use crate::facts::Facts;
use crate::profile::Profile;

/// This node's name in the cluster where nobody else says it: the profile's, else the host's, which is what kubelets
/// call themselves by default. In a container the host's name is the pod's.
pub(crate) fn node_name_here(profile: &Profile, facts: &Facts) -> Result<String, String> {
    if let Some(name) = profile
        .kubernetes
        .node_name
        .clone()
        .or_else(|| std::env::var("NODE_NAME").ok().filter(|it| !it.is_empty()))
    {
        return Ok(name);
    }
    if facts.host.in_container.value() != Some(&false) {
        return Err(
            "the node's name is not known in this container: set NODE_NAME from the downward API (spec.nodeName)"
                .to_owned(),
        );
    }
    match facts.host.hostname.value() {
        Some(name) => Ok(name.to_lowercase()),
        None => Err("the node's name is not known: set NODE_NAME".to_owned()),
    }
}
