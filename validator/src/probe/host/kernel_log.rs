//! Reads the kernel log: `/dev/kmsg`, else the journal, else `dmesg`.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::time::ClockId;

use super::sysroot::{Sysroot, io_reason};
use super::system::kernel_clock_s;
use crate::interrupt::Interrupt;
use crate::worker::listener::{ConversationEnd, read_output};
use crate::worker::process::{ProcessEnd, WorkerProcess};
use validator_core::facts::{
    KERNEL_LOG_RECORDS_KEPT, KernelLog, KernelLogEnd, KernelLogRecord, KernelLogSource, Reading,
};
use validator_core::kernel_log_selection::Selection;

/// The journal of a machine that has been up for months can take this long to go through.
const PROGRAM_DEADLINE: Duration = Duration::from_secs(5);
/// The kernel's own limit for one record with its properties is 8 KiB (`PRINTK_MESSAGE_MAX` and
/// dictionary).
const RECORD_BYTES: usize = 16 * 1024;
/// Reading the whole ring buffer takes milliseconds, unless something writes to it as fast as it is
/// read.
const KMSG_DEADLINE: Duration = Duration::from_secs(5);
/// A file below a sysroot can be a log of gigabytes: 100 MB take a second.
const SYSROOT_DEADLINE: Duration = Duration::from_secs(10);
/// A log whose first line is of this time is the kernel's from its start. So is one that begins
/// with the kernel's version.
const FIRST_MESSAGES_END_S: f64 = 1.0;
/// What journald writes when the kernel's ring buffer overran it: `Missed 42 kernel messages`.
// Source: systemd, catalog entry SD_MESSAGE_JOURNAL_MISSED.
const JOURNAL_MISSED_MESSAGE_ID: &str = "e9bf28e6e834481bb6f48f548ad13606";
const TEXT_CHARACTERS_KEPT: usize = 1_000;

pub(super) fn kernel_log(root: &Sysroot, interrupt: &Interrupt) -> Reading<KernelLog> {
    if !root.is_this_machine() {
        return kmsg_of_sysroot(root, interrupt);
    }
    match read_this_kmsg(interrupt) {
        Ok(log) if log.since_boot => Reading::Value(log),
        // The ring buffer forgot its beginning: the journal may have it.
        Ok(log) => match from_journal(interrupt).filter(|journal| journal.since_boot) {
            Some(journal) => Reading::Value(journal),
            None => Reading::Value(log),
        },
        Err(reason) => match from_journal(interrupt).or_else(|| from_dmesg(interrupt)) {
            Some(log) => Reading::Value(log),
            None => Reading::NotRead(reason),
        },
    }
}

/// The records that came since the log was read up to `end`, from where that came from.
pub(super) fn kernel_log_since(
    root: &Sysroot,
    end: KernelLogEnd,
    interrupt: &Interrupt,
) -> Reading<KernelLog> {
    let again = match end.source {
        _ if !root.is_this_machine() => kmsg_of_sysroot(root, interrupt),
        KernelLogSource::Kmsg => {
            read_this_kmsg(interrupt).map_or_else(Reading::NotRead, Reading::Value)
        }
        KernelLogSource::Journal => of_program("journalctl", from_journal(interrupt)),
        KernelLogSource::Dmesg => of_program("dmesg", from_dmesg(interrupt)),
    };
    let Reading::Value(log) = again else {
        return again;
    };
    log.since(end).map_or_else(
        || Reading::NotRead("the kernel log was written over since it was read before".to_owned()),
        Reading::Value,
    )
}

fn of_program(program: &str, log: Option<KernelLog>) -> Reading<KernelLog> {
    let unread = || Reading::NotRead(format!("{program} does not show the kernel log any more"));
    log.map_or_else(unread, Reading::Value)
}

fn read_this_kmsg(interrupt: &Interrupt) -> Result<KernelLog, String> {
    let deadline = Instant::now() + KMSG_DEADLINE;
    read_kmsg(Path::new("/dev/kmsg"), deadline, interrupt)
}

/// Reads all records that the kernel still has, without waiting for more. What it has not read at
/// the deadline is a gap.
fn read_kmsg(path: &Path, deadline: Instant, interrupt: &Interrupt) -> Result<KernelLog, String> {
    let name = "/dev/kmsg";
    let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
    let mut file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(nonblocking)
        .open(path)
        .map_err(|error| match error.kind() {
            ErrorKind::PermissionDenied => format!(
                "permission denied opening {name}: run as root or with CAP_SYSLOG, or set kernel.dmesg_restrict=0"
            ),
            _ => io_reason(&error, name),
        })?;
    let mut log = LogReader::default();
    let mut buffer = vec![0; RECORD_BYTES];
    loop {
        if interrupt.signal().is_some() {
            return Err("the run was interrupted".to_owned());
        }
        if Instant::now() >= deadline {
            log.lost_the_rest();
            break;
        }
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => log.kmsg_record(&String::from_utf8_lossy(
                buffer.get(..count).unwrap_or_default(),
            )),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // The record was overwritten before it was read; the next read goes on after the gap,
            // which the sequence numbers show.
            Err(error)
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) => {}
            Err(error) => return Err(io_reason(&error, name)),
        }
    }
    Ok(log.finish(KernelLogSource::Kmsg, monotonic_seconds()))
}

/// A plain file with records as `/dev/kmsg` gives them, one after another: read as a stream, since
/// a flood makes it large.
fn kmsg_of_sysroot(root: &Sysroot, interrupt: &Interrupt) -> Reading<KernelLog> {
    let file = match root.file("/dev/kmsg") {
        Ok(file) => file,
        Err(error) => return Reading::NotRead(io_reason(&error, "/dev/kmsg")),
    };
    let deadline = Instant::now() + SYSROOT_DEADLINE;
    let mut log = LogReader::default();
    if let Err(reason) = read_records(&mut log, BufReader::new(file), deadline, interrupt) {
        return Reading::NotRead(reason);
    }
    let uptime = super::system::uptime_s(root).value().copied();
    let now = uptime.unwrap_or(log.last_s);
    Reading::Value(log.finish(KernelLogSource::Kmsg, now))
}

/// What is not read at the deadline, and what is cut off a line that is longer than any record, is
/// a gap.
fn read_records(
    log: &mut LogReader,
    mut file: impl BufRead,
    deadline: Instant,
    interrupt: &Interrupt,
) -> Result<(), String> {
    let mut line = Vec::with_capacity(RECORD_BYTES);
    loop {
        if interrupt.signal().is_some() {
            return Err("the run was interrupted".to_owned());
        }
        if Instant::now() >= deadline {
            log.lost_the_rest();
            return Ok(());
        }
        line.clear();
        let count = file
            .by_ref()
            .take(RECORD_BYTES as u64)
            .read_until(b'\n', &mut line)
            .map_err(|error| io_reason(&error, "/dev/kmsg"))?;
        if count == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') && count == RECORD_BYTES {
            log.lost_the_rest();
        }
        if line.first() != Some(&b' ') {
            let text = String::from_utf8_lossy(&line);
            log.kmsg_record(text.trim_end_matches(['\n', '\r']));
        }
    }
}

/// Records and lines, as [`crate::fuzzing`] makes them.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn read_any(bytes: &[u8]) -> [KernelLog; 2] {
    let deadline = Instant::now() + SYSROOT_DEADLINE;
    let (mut records, mut lines) = (LogReader::default(), LogReader::default());
    let read = read_records(&mut records, bytes, deadline, &Interrupt::default());
    assert_eq!(read, Ok(()), "memory is readable");
    let text = String::from_utf8_lossy(bytes);
    text.lines().for_each(|it| lines.timed_line(it));
    let now = records.last_s;
    [
        records.finish(KernelLogSource::Kmsg, now),
        lines.finish(KernelLogSource::Dmesg, now),
    ]
}

fn from_journal(interrupt: &Interrupt) -> Option<KernelLog> {
    // Like -k, and journald's own messages about kernel messages that it missed.
    let missed = format!("MESSAGE_ID={JOURNAL_MISSED_MESSAGE_ID}");
    let arguments = [
        "-b",
        "-o",
        "short-monotonic",
        "--no-pager",
        "-q",
        "_TRANSPORT=kernel",
        "+",
        &missed,
    ];
    let log = from_program(
        "journalctl",
        &arguments,
        interrupt,
        KernelLogSource::Journal,
    )?;
    Some(log)
}

fn from_dmesg(interrupt: &Interrupt) -> Option<KernelLog> {
    from_program("dmesg", &[], interrupt, KernelLogSource::Dmesg)
}

/// `None` when the program is not there, does not end well and in time, or shows nothing: a journal
/// that a user may not read is empty, and no kernel's log is.
fn from_program(
    program: &str,
    arguments: &[&str],
    interrupt: &Interrupt,
    source: KernelLogSource,
) -> Option<KernelLog> {
    let arguments: Vec<_> = arguments.iter().map(Into::into).collect();
    let environment =
        [("LC_ALL", "C"), ("TZ", "UTC")].map(|(name, value)| (name, Some(value.to_owned())));
    let mut process = WorkerProcess::start_program(program, &arguments, &environment).ok()?;
    let mut log = LogReader::default();
    let mut on_line = |line: &str| log.timed_line(line);
    let end = read_output(&mut process, PROGRAM_DEADLINE, interrupt, &mut on_line);
    let ended_well = end == ConversationEnd::Closed(ProcessEnd::Exited(0));
    (ended_well && log.first_s.is_some()).then(|| log.finish(source, monotonic_seconds()))
}

/// The clock nearest to that of the kernel's time stamps, which counts from boot and not during
/// suspend, as this one does. But it is corrected by NTP and that one is not: they part by up to
/// some 50 millionths of the uptime.
fn monotonic_seconds() -> f64 {
    kernel_clock_s(ClockId::Monotonic)
}

struct LogReader {
    selection: Selection,
    first_s: Option<f64>,
    last_s: f64,
    /// The start of the first line, which in a whole log is the kernel's version.
    first_text: String,
    first_sequence: Option<u64>,
    last_sequence: Option<u64>,
    /// The time stamp before which records between the first and the last are missing.
    gap_until_s: Option<f64>,
}

impl Default for LogReader {
    fn default() -> Self {
        Self {
            selection: Selection::with_maximum(KERNEL_LOG_RECORDS_KEPT),
            first_s: None,
            last_s: 0.0,
            first_text: String::new(),
            first_sequence: None,
            last_sequence: None,
            gap_until_s: None,
        }
    }
}

impl LogReader {
    /// `6,1234,5678901,-;text` and, after a line end, properties that are not of interest.
    ///
    /// Priority and facility, sequence number, microseconds since boot, flags (`c`: a fragment of a
    /// line, `+`: what continues it), then perhaps more fields.
    fn kmsg_record(&mut self, record: &str) {
        let Some((prefix, message)) = record.split_once(';') else {
            return;
        };
        let mut fields = prefix.split(',').skip(1);
        let sequence = fields.next().and_then(|it| it.parse::<u64>().ok());
        let microseconds = fields.next().and_then(|it| it.parse::<u64>().ok());
        let (Some(sequence), Some(microseconds)) = (sequence, microseconds) else {
            return;
        };
        let continues = fields.next().is_some_and(|flags| flags.contains('+'));
        #[expect(clippy::cast_precision_loss, reason = "microseconds since boot")]
        let seconds = microseconds as f64 / 1e6;
        let is_after_a_gap = |last: u64| sequence.checked_sub(last).is_some_and(|it| it > 1);
        if self.last_sequence.is_some_and(is_after_a_gap) {
            self.gap_until_s = Some(seconds);
        }
        self.first_sequence.get_or_insert(sequence);
        self.last_sequence = Some(sequence);
        let text = unescape(message.lines().next().unwrap_or_default());
        if continues {
            self.selection.extend_last(&text);
            return;
        }
        self.record(seconds, &text);
    }

    /// There was more to read than there was time.
    fn lost_the_rest(&mut self) {
        self.gap_until_s = Some(self.last_s + 1e-6);
    }

    /// `[ 1234.567890] host kernel: text` of the journal, `[ 1234.567890] text` of `dmesg`.
    fn timed_line(&mut self, line: &str) {
        let Some((time, text)) = line.strip_prefix('[').and_then(|it| it.split_once("] ")) else {
            return;
        };
        let seconds = time.trim().parse().ok();
        let Some(seconds) = seconds.filter(|it: &f64| it.is_finite()) else {
            return;
        };
        let text = text
            .split_once(" kernel: ")
            .map_or(
                text,
                |(host, message)| {
                    if host.contains(' ') { text } else { message }
                },
            );
        if text.contains("]: Missed ") && text.ends_with(" kernel messages") {
            self.gap_until_s = Some(seconds);
            return;
        }
        self.record(seconds, text);
    }

    fn record(&mut self, seconds: f64, text: &str) {
        if self.first_s.is_none() {
            self.first_s = Some(seconds);
            self.first_text = text.chars().take(TEXT_CHARACTERS_KEPT).collect();
        }
        self.last_s = seconds;
        self.selection.push(seconds, text);
    }

    fn finish(self, source: KernelLogSource, now_s: f64) -> KernelLog {
        let age = |seconds: f64| (now_s - seconds).max(0.0);
        let begins_at_boot = match source {
            KernelLogSource::Kmsg => self.first_sequence.is_none_or(|first| first == 0),
            KernelLogSource::Journal | KernelLogSource::Dmesg => {
                self.first_text.starts_with("Linux version ")
                    || self
                        .first_s
                        .is_some_and(|first| first < FIRST_MESSAGES_END_S)
            }
        };
        let selected = self.selection.finish();
        let records = selected.records.into_iter().map(|it| KernelLogRecord {
            age_s: it.at_s.map(age),
            ..it
        });
        KernelLog {
            source,
            since_boot: begins_at_boot && self.gap_until_s.is_none(),
            oldest_record_age_s: self.first_s.map(age),
            oldest_record_at_s: self.first_s,
            newest_record_at_s: self.first_s.map(|_| self.last_s),
            gap_until_s: self.gap_until_s,
            records: records.collect(),
            records_dropped: selected.gpu_records_dropped,
            others_dropped: selected.others_dropped,
        }
    }
}

/// The kernel writes bytes that are no printable ASCII, and the backslash, as `\x1b`.
fn unescape(text: &str) -> String {
    if !text.contains("\\x") {
        return text.to_owned();
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, others)) = rest.split_first() {
        let escaped = rest.strip_prefix(b"\\x").and_then(|rest| {
            let (digits, rest) = rest.split_at_checked(2)?;
            let digits = std::str::from_utf8(digits).ok()?;
            Some((u8::from_str_radix(digits, 16).ok()?, rest))
        });
        if let Some((byte, others)) = escaped {
            bytes.push(byte);
            rest = others;
        } else {
            bytes.push(first);
            rest = others;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use proptest::prelude::*;

    use super::super::sysroot::tests::tree;
    use super::*;

    fn log(kmsg: &str) -> KernelLog {
        let (_folder, root) = tree(&[("/dev/kmsg", kmsg), ("/proc/uptime", "100.00 700.00\n")]);
        match kernel_log(&root, &Interrupt::default()) {
            Reading::Value(log) => log,
            other => panic!("{other:?}"),
        }
    }

    const XID: &str = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.";

    #[test]
    fn an_event_behind_megabytes_is_read() {
        // 8 MiB were the limit, and what came after was dropped without a word.
        let mut kmsg = String::with_capacity(10 << 20);
        let filler = "x".repeat(1000);
        for number in 0..9_500 {
            let _ = writeln!(kmsg, "6,{number},{number},-;usb 1-1: {filler}");
        }
        let _ = writeln!(kmsg, "4,9500,9500,-;{XID}");
        assert!(kmsg.len() > 9 << 20);
        let log = log(&kmsg);
        let last = log.records.last().expect("the event");
        assert_eq!(last.text, XID);
        assert!(log.since_boot, "nothing is missing");
    }

    #[test]
    fn what_is_lost_is_a_gap() {
        let record = "6,0,1,-;Linux version\n6,1,2,-;x\n";
        let read = |text: &str, deadline: Instant| {
            let mut log = LogReader::default();
            let interrupt = Interrupt::default();
            read_records(&mut log, text.as_bytes(), deadline, &interrupt).expect("read");
            log.finish(KernelLogSource::Kmsg, 100.0)
        };
        let later = Instant::now() + Duration::from_mins(1);
        assert!(read(record, later).since_boot);
        assert!(!read(record, Instant::now()).since_boot, "the deadline");
        let long = format!("{record}6,2,3,-;{}\n", "x".repeat(RECORD_BYTES));
        assert!(!read(&long, later).since_boot, "a line that is cut");
    }

    #[test]
    fn records_of_kmsg() {
        let log = log(&format!(
            "5,0,0,-;Linux version 6.8.0\n6,1,2000000,-;usb 1-1: x\n SUBSYSTEM=usb\n3,2,40000000,-,caller=T1;{XID}\n"
        ));
        assert!(log.since_boot);
        assert_eq!(log.oldest_record_age_s, Some(100.0));
        assert_eq!(
            log.records,
            [KernelLogRecord {
                age_s: Some(60.0),
                at_s: Some(40.0),
                text: XID.to_owned(),
                repeats: 0,
            }]
        );
    }

    #[test]
    fn a_ring_that_wrapped_or_has_gaps_does_not_reach_back_to_boot() {
        assert!(!log("6,17,1000000,-;x\n").since_boot);
        assert!(!log("6,0,1000000,-;x\n6,5,1000001,-;y\n").since_boot);
        assert!(log("6,0,1000000,-;x\n6,1,1000001,-;y\n").since_boot);
    }

    #[test]
    fn fragments_are_put_together_and_escapes_undone() {
        let log = log(
            "6,0,1000000,c;NVRM: GPU 0000:3b:00.0: \n6,1,1000001,+;RmInit\\x41dapter failed!\\x1b\n6,2,1000002,-;other\n6,3,1000003,+;more\n",
        );
        assert_eq!(log.records.len(), 1);
        assert_eq!(
            log.records[0].text,
            "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed!\u{1b}"
        );
    }

    #[test]
    fn a_flood_is_one_record_and_repeats_are_counted() {
        let mut text = String::new();
        for sequence in 0..3000 {
            writeln!(text, "3,{sequence},1000000,-;{XID} {sequence}").expect("a string grows");
        }
        let many = log(&text);
        assert_eq!(many.records_dropped, 0);
        assert_eq!(
            many.records.iter().map(|it| it.repeats + 1).sum::<u64>(),
            3000
        );
        assert!(many.records[0].text.ends_with(" 0"));
        assert!(
            many.records
                .last()
                .is_some_and(|it| it.text.ends_with(" 2999"))
        );
        let flood = log(
            "3,0,1,-;NVRM: GPU5 RPC history (CPU -> GSP):\n3,1,2,-;NVRM: GPU5 RPC history (CPU -> GSP):\n3,2,3,-;NVRM: Xid (PCI:0000:3b:00): 119, x\n",
        );
        assert_eq!(flood.records.len(), 2);
    }

    #[test]
    fn lines_of_journal_and_dmesg() {
        let mut reader = LogReader::default();
        reader.timed_line("[    0.000000] ip-10-0-0-1 kernel: Linux version");
        reader.timed_line(&format!("[   50.500000] ip-10-0-0-1 kernel: {XID}"));
        reader.timed_line(&format!("[   51.000000] {XID}"));
        reader.timed_line("-- No entries --");
        let log = reader.finish(KernelLogSource::Journal, 60.0);
        assert!(log.since_boot);
        assert_eq!(log.records.len(), 2);
        assert_eq!(
            log.records[0],
            KernelLogRecord {
                age_s: Some(9.5),
                at_s: Some(50.5),
                text: XID.to_owned(),
                repeats: 0,
            }
        );
    }

    #[test]
    fn a_log_reaches_back_to_boot_only_from_its_first_message_on() {
        let since_boot = |lines: &[&str]| {
            let mut reader = LogReader::default();
            for line in lines {
                reader.timed_line(line);
            }
            reader.finish(KernelLogSource::Dmesg, 600.0).since_boot
        };
        assert!(since_boot(&["[    0.000000] microcode: updated early"]));
        assert!(since_boot(&[
            "[    7.100000] host kernel: Linux version 6.8.0"
        ]));
        // A ring buffer that has wrapped within the first minute.
        assert!(!since_boot(&["[   12.500000] usb 1-1: new device"]));
        assert!(!since_boot(&[
            "[    0.000000] host kernel: Linux version 6.8.0",
            "[   33.000000] host systemd-journald[312]: Missed 42 kernel messages",
        ]));
    }

    #[test]
    fn a_log_that_never_ends_is_left_at_the_deadline() {
        let endless = Path::new("/dev/zero");
        let deadline = Instant::now() + Duration::from_millis(50);
        let log = read_kmsg(endless, deadline, &Interrupt::default()).expect("it opens");
        assert!(!log.since_boot);
        let interrupt = Interrupt::default();
        interrupt.request(15);
        let far = Instant::now() + Duration::from_mins(1);
        assert!(read_kmsg(endless, far, &interrupt).is_err());
    }

    #[test]
    fn no_log_is_not_an_empty_log() {
        let (_folder, root) = tree(&[]);
        assert_eq!(
            kernel_log(&root, &Interrupt::default()),
            Reading::NotRead("no such file: /dev/kmsg".to_owned())
        );
        let nowhere = Path::new("/nonexistent/kmsg");
        assert!(read_kmsg(nowhere, Instant::now(), &Interrupt::default()).is_err());
    }

    proptest! {
        #[test]
        fn nothing_panics(text in "\\PC{0,100}", sequence: u64, time: u64) {
            let mut reader = LogReader::default();
            reader.kmsg_record(&text);
            reader.kmsg_record(&format!("6,{sequence},{time},+;{text}"));
            reader.kmsg_record(&format!("6,{sequence},{time},-;{text}\\x4"));
            reader.timed_line(&format!("[{time}] {text}"));
            let _ = reader.finish(KernelLogSource::Kmsg, 1.0);
        }
    }
}
