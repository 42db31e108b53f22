//! The readers of foreign data, for any bytes: the targets below `fuzz/` call them, and the tests
//! here do with inputs that are the same in every run.
//!
//! None of them may panic, hang or take memory without bound. No input makes a reader open a file
//! that the input names or start a program.

use std::io::Write as _;
use std::path::PathBuf;

use validator_core::kernel_log_events::events;

use crate::commands::running_burns;
use crate::probe::{environment, host, kubernetes};
use crate::runner_hook::job_record::JobRecord;
use crate::runner_hook::quarantine::Quarantine;
use crate::worker::listener;

/// The lines of a worker.
pub fn worker_lines(bytes: &[u8]) {
    let _ = listener::hear_any(bytes);
}

/// Run files of burns, records of jobs, quarantine files.
pub fn state_files(bytes: &[u8]) {
    running_burns::read_any(bytes);
    if let Ok(record) = serde_json::from_slice::<JobRecord>(bytes) {
        let written = serde_json::to_vec(&record).expect("a record can be written");
        let again = serde_json::from_slice::<JobRecord>(&written);
        assert_eq!(again.ok(), Some(record), "and read again");
    }
    let mark = Quarantine::of_text(&String::from_utf8_lossy(bytes));
    assert!(!mark.reason.is_empty(), "a mark holds, whatever is in it");
}

/// Records of `/dev/kmsg`, lines of `dmesg` and of the journal, and the loader's cache.
pub fn kmsg(bytes: &[u8]) {
    for log in host::read_any(bytes) {
        assert!(events(&log.records).len() <= log.records.len());
        let numbers = log.records.iter().filter_map(|it| it.at_s);
        assert!(numbers.chain(log.newest_record_at_s).all(f64::is_finite));
    }
}

/// A kubeconfig.
pub fn kubeconfig(bytes: &[u8]) {
    kubernetes::readers::kubeconfig(bytes);
}

/// An answer of the API server.
pub fn api_answers(bytes: &[u8]) {
    kubernetes::readers::api(bytes);
}

/// A message of the kubelet or of a device plugin.
pub fn grpc_answers(bytes: &[u8]) {
    kubernetes::readers::grpc(bytes);
}

/// The metadata of Python packages.
pub fn packages(bytes: &[u8]) {
    environment::readers::packages(bytes);
}

/// An ELF file.
#[derive(Debug)]
pub struct ElfReader {
    file: std::fs::File,
    path: PathBuf,
}

impl ElfReader {
    /// One file in memory for all inputs: its readers take a path.
    pub fn new() -> std::io::Result<Self> {
        use std::os::fd::AsRawFd as _;
        let descriptor = rustix::fs::memfd_create("elf", rustix::fs::MemfdFlags::CLOEXEC)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()));
        let file = std::fs::File::from(descriptor);
        Ok(Self { file, path })
    }

    pub fn read(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        use std::io::Seek as _;
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(bytes)?;
        environment::readers::elf(&self.path);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
