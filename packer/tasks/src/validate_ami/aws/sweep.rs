//! Removes the leftovers of killed runs: instances, and volumes that outlived theirs.

use super::access;
use super::cli::Cli;
use super::instance::{id_of, living, terminate};
use super::tags::{self, is_leftover};
use xtask::say;

/// Ends leftovers; with `all`, also what others may still work with.
pub(super) fn sweep(cli: &Cli, all: bool) -> anyhow::Result<()> {
    let now = tags::now()?;
    let any_run = format!("Name=tag-key,Values={}", tags::RUN);
    let instances = living(cli, &any_run)?;
    let (leftovers, in_use): (Vec<_>, Vec<_>) = instances
        .iter()
        .partition(|instance| all || is_leftover(instance, &now));
    let ids: Vec<String> = leftovers.into_iter().filter_map(id_of).collect();
    if !ids.is_empty() {
        terminate(cli, &ids)?;
        say!("terminated {}", ids.join(", "));
    }
    for instance in &in_use {
        say!(
            "left {} alone: it belongs to {} until {}",
            id_of(instance).unwrap_or_default(),
            tags::value(instance, tags::STARTED_BY).unwrap_or("somebody"),
            tags::value(instance, tags::DEADLINE).unwrap_or("an unknown time"),
        );
    }
    access::remove_abandoned();
    let volumes = remove_volumes(cli, &any_run)?;
    if ids.is_empty() && volumes == 0 {
        say!("nothing was left behind");
    }
    Ok(())
}

/// Volumes end with their instance, unless the image states otherwise for one of its own.
fn remove_volumes(cli: &Cli, filter: &str) -> anyhow::Result<usize> {
    let answer = cli.read(&[
        "ec2",
        "describe-volumes",
        "--filters",
        filter,
        "Name=status,Values=available",
    ])?;
    let volumes = answer["Volumes"].as_array().into_iter().flatten();
    let ids: Vec<&str> = volumes.filter_map(|it| it["VolumeId"].as_str()).collect();
    for id in &ids {
        cli.change(&["ec2", "delete-volume", "--volume-id", id])?;
        say!("deleted {id}");
    }
    Ok(ids.len())
}
