//! A command under every layout on the healthy machine.

use super::{healthy_node, uuids_of};
use crate::facts::{Facts, Layout, LayoutEnd, LayoutFacts, LayoutGpuUse, LayoutRun, Reading};
use crate::layouts::gpus_of;

/// Eight healthy H200s after a command that used every GPU that it was given.
pub fn laid_out_node() -> Facts {
    let mut facts = healthy_node();
    let uuids = uuids_of(&facts);
    let run = |layout| {
        let given = gpus_of(layout, &uuids).unwrap_or_default();
        let use_of = |(pid, uuid): (u32, &String)| {
            let gpu = LayoutGpuUse {
                own: [pid].into(),
                others: [].into(),
                peak_bytes: 2 << 30,
                left_bytes: Some(0),
            };
            (uuid.clone(), gpu)
        };
        LayoutRun {
            visible_devices: given.join(","),
            gpus: (2000..).zip(&given).map(use_of).collect(),
            end: Reading::Value(LayoutEnd::Exited { status: 0 }),
            seconds: 12.0,
            rounds: 60,
            oom_kills: Reading::Value(0),
            ..LayoutRun::of(layout, given)
        }
    };
    facts.load.layouts = Some(Box::new(LayoutFacts {
        command: vec!["python".to_owned(), "train.py".to_owned()],
        time_limit_s: 600.0,
        busy: Vec::new(),
        runs: Layout::EACH.into_iter().map(run).collect(),
    }));
    facts
}
