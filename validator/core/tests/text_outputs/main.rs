//! No escape sequence and no invisible character of a text from outside gets into a report: CI's
//! short version of the fuzz target of this name.

mod outputs;

use proptest::prelude::*;

#[test]
fn the_corpus() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fuzz/corpus/text_outputs"
    );
    let mut tried = 0;
    for file in std::fs::read_dir(folder).expect("the corpus") {
        let text = std::fs::read(file.expect("an entry").path()).expect("a file of the corpus");
        outputs::assert_visible(&String::from_utf8_lossy(&text));
        tried += 1;
    }
    assert!(tried > 0, "the corpus is empty");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_texts(texts in proptest::collection::vec(any::<String>(), 1..12)) {
        outputs::assert_visible(&texts.join("\0"));
    }
}
