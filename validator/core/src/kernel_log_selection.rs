//! Chooses the records of a kernel log that are kept in the facts, one after another and in bounded
//! memory.
//!
//! Messages about a GPU come first, repeats are kept as counts, and the first and the last of each
//! kind are kept whole. So a log of a hundred thousand lines is judged as one of a hundred.

use std::collections::{BTreeMap, VecDeque};

use crate::facts::KernelLogRecord;
use crate::kernel_log_events::{KernelEvent, hardware_error_part, is_flood, is_relevant, parse};

/// Of a message, so many characters are kept.
const TEXT_CHARACTERS_KEPT: usize = 1_000;
/// Of one kind of message about one device, the first and the last ones that are kept whole. An Xid
/// of many jobs names its processes, which `kernel_log_xid` counts.
const FIRST_OF_A_KIND: usize = 5;
const LAST_OF_A_KIND: usize = 20;

/// How much evidence about a GPU a message has. Under the limit of records the last ones go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Priority {
    /// An event of a GPU, a switch or the driver.
    Gpu,
    /// What else the driver prints.
    Driver,
    /// Errors of the PCIe bus, which may be of any device.
    Bus,
}

/// One kept message.
#[derive(Debug)]
struct Kept {
    order: u64,
    seconds: f64,
    text: String,
    repeats: u64,
}

/// The messages of one kind about one device.
#[derive(Debug, Default)]
struct Kind {
    first: Vec<Kept>,
    last: VecDeque<Kept>,
    repeats: u64,
}

impl Kind {
    fn push(&mut self, kept: Kept) {
        if self.first.len() < FIRST_OF_A_KIND {
            self.first.push(kept);
            return;
        }
        if self.last.len() == LAST_OF_A_KIND {
            self.last.pop_front();
            self.repeats += 1;
        }
        self.last.push_back(kept);
    }

    fn len(&self) -> usize {
        self.first.len() + self.last.len()
    }

    fn count(&self) -> u64 {
        self.repeats + u64::try_from(self.len()).unwrap_or(u64::MAX)
    }

    fn last_mut(&mut self) -> Option<&mut Kept> {
        self.last.back_mut().or(self.first.last_mut())
    }

    fn into_records(mut self) -> impl Iterator<Item = Kept> {
        if let Some(oldest) = self.last.front_mut() {
            oldest.repeats = self.repeats;
        }
        self.first.into_iter().chain(self.last)
    }
}

/// A selection under way: push every record of the log, then finish it.
#[derive(Debug, Default)]
pub struct Selection {
    kinds: BTreeMap<(Priority, String), Kind>,
    pushed: u64,
    flood: bool,
    /// Where the last record went, so that a fragment that continues it belongs to it.
    last: Option<(Priority, String)>,
    /// Distinct kinds that were not kept, by whether they are about a GPU.
    dropped_gpu: u64,
    dropped_others: u64,
    maximum: usize,
}

/// What a selection chose.
#[derive(Debug, Default, PartialEq)]
pub struct Selected {
    /// Oldest first; `age_s` is not set.
    pub records: Vec<KernelLogRecord>,
    pub gpu_records_dropped: u64,
    pub others_dropped: u64,
}

impl Selection {
    pub fn with_maximum(maximum: usize) -> Self {
        Self {
            maximum,
            ..Self::default()
        }
    }

    /// Takes the next record in the log's order; returns whether it belongs in the facts.
    pub fn push(&mut self, seconds: f64, text: &str) -> bool {
        let flood = is_flood(text);
        // Of the call history after a GSP time-out, the first line of a run stands for all.
        let is_kept = is_relevant(text) && !(flood && self.flood);
        self.flood = flood;
        self.last = None;
        if !is_kept {
            return false;
        }
        let key = kind_of(text);
        self.pushed += 1;
        // Memory stays bounded whatever is logged: too many kinds of the lowest priority are
        // counted and not kept.
        if !self.kinds.contains_key(&key) && self.kinds.len() >= self.maximum {
            let least = self.kinds.last_key_value().map(|(key, _)| key.clone());
            let Some(least) = least.filter(|least| least.0 > key.0) else {
                self.count_dropped(key.0, 1);
                return false;
            };
            let kind = self.kinds.remove(&least);
            self.count_dropped(least.0, kind.map_or(0, |it| it.count()));
        }
        self.kinds.entry(key.clone()).or_default().push(Kept {
            order: self.pushed,
            seconds,
            text: text.chars().take(TEXT_CHARACTERS_KEPT).collect(),
            repeats: 0,
        });
        self.last = Some(key);
        true
    }

    /// Takes a fragment that continues the record before.
    pub fn extend_last(&mut self, text: &str) {
        let last = self.last.as_ref().and_then(|key| self.kinds.get_mut(key));
        if let Some(last) = last.and_then(Kind::last_mut) {
            let room = TEXT_CHARACTERS_KEPT.saturating_sub(last.text.chars().count());
            last.text.extend(text.chars().take(room));
        }
    }

    fn count_dropped(&mut self, priority: Priority, count: u64) {
        if priority == Priority::Gpu {
            self.dropped_gpu += count;
        } else {
            self.dropped_others += count;
        }
    }

    pub fn finish(mut self) -> Selected {
        let mut kept = Vec::new();
        for ((priority, _), kind) in std::mem::take(&mut self.kinds) {
            if kept.len() + kind.len() > self.maximum {
                // A kind of which the beginning and the end are kept is reported; one of which
                // nothing is kept is not.
                let mut records: Vec<Kept> = kind.into_records().collect();
                let Some(mut newest) = records.pop() else {
                    continue;
                };
                let others = records.iter().map(|it| it.repeats + 1).sum::<u64>();
                if kept.len() < self.maximum {
                    newest.repeats += others;
                    kept.push(newest);
                } else {
                    self.count_dropped(priority, others + newest.repeats + 1);
                }
                continue;
            }
            kept.extend(kind.into_records());
        }
        kept.sort_by_key(|it| it.order);
        let records = kept.into_iter().map(|it| KernelLogRecord {
            age_s: None,
            at_s: Some(it.seconds),
            text: it.text,
            repeats: it.repeats,
        });
        Selected {
            records: records.collect(),
            gpu_records_dropped: self.dropped_gpu,
            others_dropped: self.dropped_others,
        }
    }
}

/// What counts as a repeat: the same event of the same device, else the same words with other
/// numbers.
fn kind_of(text: &str) -> (Priority, String) {
    if let Some(address) = hardware_error_part(text).and_then(|it| it.pci_address) {
        return (Priority::Bus, format!("hardware error {address}"));
    }
    let Some(event) = parse(text) else {
        let priority = if text.contains("NVRM:") || text.contains("nvidia") {
            Priority::Driver
        } else {
            Priority::Bus
        };
        return (priority, without_numbers(text));
    };
    let address = event.pci_address().unwrap_or_default().to_owned();
    let (priority, name) = match &event {
        // Its text carries the verdict, and differs.
        KernelEvent::Xid(xid) => (
            Priority::Gpu,
            format!(
                "xid {} {:?} {:?} {:?}",
                xid.number,
                xid.nvlink.as_ref().map(|it| it.fatal),
                xid.requested_recovery(),
                xid.unit()
            ),
        ),
        KernelEvent::Sxid(sxid) => (
            Priority::Gpu,
            format!("sxid {} {:?} {}", sxid.number, sxid.fatal, sxid.continues),
        ),
        KernelEvent::Aer { severity, .. } => {
            let announced = text.contains("received");
            (Priority::Bus, format!("aer {severity:?} {announced}"))
        }
        KernelEvent::SlotLinkDown { .. } => (Priority::Bus, "link down".to_owned()),
        KernelEvent::SlotLinkUp { .. } => (Priority::Bus, "link up".to_owned()),
        KernelEvent::HungTask { .. } => (Priority::Gpu, format!("hung {}", without_numbers(text))),
        KernelEvent::KernelCrash | KernelEvent::Lockup { .. } => {
            (Priority::Gpu, format!("crash {}", without_numbers(text)))
        }
        KernelEvent::Unparsed { .. } => (Priority::Gpu, without_numbers(text)),
        KernelEvent::FallenOffBus { .. } => (Priority::Gpu, "lost".to_owned()),
        KernelEvent::ResetRequired { .. } => (Priority::Gpu, "reset required".to_owned()),
        KernelEvent::RebootRequired => (Priority::Gpu, "reboot required".to_owned()),
        KernelEvent::DriverLoaded => (Priority::Gpu, "loaded".to_owned()),
        KernelEvent::GpuInitializationFailed { .. } => (Priority::Gpu, "initialization".to_owned()),
        KernelEvent::GpuEnumerated { .. } => (Priority::Gpu, "enumerated".to_owned()),
        KernelEvent::ApiMismatch => (Priority::Driver, "mismatch".to_owned()),
        KernelEvent::NouveauBound { .. } => (Priority::Driver, "nouveau".to_owned()),
    };
    (priority, format!("{name} {address}"))
}

/// The words of a message, so that messages that differ in numbers are of one kind.
fn without_numbers(text: &str) -> String {
    const WORDS_KEPT: usize = 12;
    let words = text.split_whitespace().map(|word| {
        let has_digit = word.chars().any(|it| it.is_ascii_digit());
        if has_digit { "#" } else { word }
    });
    words.take(WORDS_KEPT).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::KERNEL_LOG_RECORDS_KEPT;

    fn select(lines: impl IntoIterator<Item = String>) -> Selected {
        let mut selection = Selection::with_maximum(KERNEL_LOG_RECORDS_KEPT);
        for (index, line) in lines.into_iter().enumerate() {
            selection.push(f64::from(u32::try_from(index).expect("few lines")), &line);
        }
        selection.finish()
    }

    const XID: &str = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.";

    #[test]
    fn a_fatal_xid_in_the_middle_of_a_flood_is_kept() {
        let noise = |it: u32| {
            format!("pcieport 0000:00:03.0: AER: Corrected error received: 0000:03:00.0 ({it})")
        };
        let lines = (0..100_000).map(|it| {
            if it == 50_000 {
                XID.to_owned()
            } else {
                noise(it)
            }
        });
        let selected = select(lines);
        assert!(selected.records.iter().any(|it| it.text == XID));
        assert_eq!(
            (selected.gpu_records_dropped, selected.others_dropped),
            (0, 0)
        );
        let told: u64 = selected.records.iter().map(|it| it.repeats + 1).sum();
        assert_eq!(told, 100_000, "every message is counted");
        assert!(selected.records.len() < 100);
    }

    #[test]
    fn distinct_noise_never_displaces_a_gpu() {
        let word = |it: u32| {
            let letters = it
                .to_string()
                .bytes()
                .map(|digit| char::from(digit - b'0' + b'a'))
                .collect::<String>();
            format!("NVRM: something {letters} happened")
        };
        let lines = (0..10_000).map(|it| {
            if it == 9_000 {
                XID.to_owned()
            } else {
                word(it)
            }
        });
        let selected = select(lines);
        assert!(selected.records.iter().any(|it| it.text == XID));
        assert_eq!(selected.gpu_records_dropped, 0);
        assert!(selected.others_dropped > 0);
        assert!(selected.records.len() <= KERNEL_LOG_RECORDS_KEPT);
    }

    #[test]
    fn first_and_last_of_a_kind_are_whole_and_in_order() {
        let line = |it: u32| format!("NVRM: Xid (PCI:0000:3b:00): 13, pid={it}, name=python3, x");
        let selected = select((0..100).map(line));
        let texts: Vec<&str> = selected.records.iter().map(|it| it.text.as_str()).collect();
        assert_eq!(texts.len(), FIRST_OF_A_KIND + LAST_OF_A_KIND);
        assert_eq!(texts[0], line(0));
        assert_eq!(texts[24], line(99));
        assert_eq!(selected.records[5].repeats, 75);
        assert!(
            selected
                .records
                .is_sorted_by(|one, next| one.at_s <= next.at_s)
        );
    }

    #[test]
    fn fragments_continue_what_was_kept() {
        let mut selection = Selection::with_maximum(10);
        assert!(selection.push(1.0, "NVRM: GPU 0000:3b:00.0: "));
        selection.extend_last("RmInitAdapter failed!");
        assert!(!selection.push(2.0, "usb 1-1: x"));
        selection.extend_last("more");
        let selected = selection.finish();
        assert_eq!(
            selected.records[0].text,
            "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed!"
        );
    }
}
