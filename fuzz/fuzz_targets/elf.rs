//! ELF files: any user's Python environment has some.
//!
//! `cargo +nightly fuzz run --features validator elf -- -timeout=10 -rss_limit_mb=1024`

#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use validator::fuzzing::ElfReader;

thread_local! {
    static READER: RefCell<ElfReader> = RefCell::new(ElfReader::new().expect("a file in memory"));
}

fuzz_target!(|bytes: &[u8]| {
    READER.with_borrow_mut(|it| it.read(bytes).expect("memory can be written"));
});
