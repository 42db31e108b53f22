//! CI's short version of fuzzing: the corpus of each target, and changes of it. The nightly
//! workflow lets a fuzzing engine search.

use std::path::Path;

use super::*;

/// Changed inputs of each target. Some seconds in an unoptimized build.
const CHANGED: usize = 2_000;
const LONGEST_BYTES: usize = 64 << 10;

/// A generator that is good enough to choose changes.
// Source: Marsaglia, Xorshift RNGs (2003), the triple 13, 7, 17.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap_or(0) % limit.max(1)
    }

    fn byte(&mut self) -> u8 {
        const TELLING: [u8; 12] = [
            0, 0xff, 0x7f, 0x80, b'\n', b'"', b'[', b'{', b':', b',', b'9', 0x1b,
        ];
        if self.below(2) == 0 {
            TELLING[self.below(TELLING.len())]
        } else {
            u8::try_from(self.below(256)).unwrap_or(0)
        }
    }

    /// Some bytes overwritten, removed, repeated or cut off.
    fn change(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let (from, length) = (self.below(bytes.len()), 1 + self.below(16));
            let to = (from + length).min(bytes.len());
            match self.below(5) {
                0 => bytes.truncate(from),
                1 => drop(bytes.drain(from..to)),
                2 => {
                    let again = bytes[from..to].to_vec();
                    bytes.splice(from..from, again);
                }
                3 => bytes.insert(from, self.byte()),
                _ => {
                    for byte in &mut bytes[from..to] {
                        *byte = self.byte();
                    }
                }
            }
        }
        bytes.truncate(LONGEST_BYTES);
    }
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus");
    let files = std::fs::read_dir(Path::new(folder).join(target)).expect("the corpus");
    let mut files: Vec<_> = files.map(|it| it.expect("an entry").path()).collect();
    files.sort();
    let read = |it: &PathBuf| std::fs::read(it).expect("a file of the corpus");
    let inputs: Vec<Vec<u8>> = files.iter().map(read).collect();
    assert!(!inputs.is_empty(), "fuzz/corpus/{target} is empty");
    inputs
}

fn try_inputs(target: &str, mut read: impl FnMut(&[u8])) {
    let corpus = corpus(target);
    for input in &corpus {
        read(input);
    }
    let mut random = Random(20_261_124);
    for _ in 0..CHANGED {
        let mut input = corpus[random.below(corpus.len())].clone();
        random.change(&mut input);
        // The input is in the message of a failure.
        let shown = String::from_utf8_lossy(&input).into_owned();
        let read = std::panic::AssertUnwindSafe(|| read(&input));
        assert!(
            std::panic::catch_unwind(read).is_ok(),
            "{target} with {shown:?}"
        );
    }
}

#[test]
fn lines_of_a_worker() {
    try_inputs("worker_lines", worker_lines);
}

#[test]
fn files_of_runs_jobs_and_quarantines() {
    try_inputs("state_files", state_files);
}

#[test]
fn records_of_the_kernel_log() {
    try_inputs("kmsg", kmsg);
}

#[test]
fn kubeconfigs() {
    try_inputs("kubeconfig", kubeconfig);
}

#[test]
fn answers_of_the_api_server() {
    try_inputs("api_answers", api_answers);
}

#[test]
fn messages_of_the_kubelet() {
    try_inputs("grpc_answers", grpc_answers);
}

#[test]
fn metadata_of_packages() {
    try_inputs("packages", packages);
}

#[test]
fn elf_files() {
    let mut reader = ElfReader::new().expect("a file in memory");
    try_inputs("elf", |bytes| {
        reader.read(bytes).expect("memory can be written");
    });
}

#[test]
fn sequence_numbers_at_the_end_of_their_range_are_read() {
    kmsg(b"6,18446744073709551615,1,-;first\n6,18446744073709551615,2,-;second\n6,0,3,-;third\n");
}

#[test]
fn counts_at_the_end_of_their_range_are_added_up() {
    let most = u64::MAX;
    api_answers(
        format!(
            r#"{{"status":{{"containerStatuses":[{{"restartCount":{most}}},{{"restartCount":{most}}}]}}}}"#
        )
        .as_bytes(),
    );
}
