//! The XML of JUnit reports.
//!
//! The crate junit-report writes it and leaves out what readers count by: `skipped` on suites, all
//! totals on the root, and properties. They are added in a second pass over its XML.

use anyhow::{Context as _, ensure};
use junit_report::{Duration, Report, TestSuite};
use quick_xml::events::{BytesStart, Event};

/// Names and values of a suite's properties, which were passed through `text::xml`.
pub(super) type Properties = Vec<(String, String)>;

type Writer = quick_xml::Writer<Vec<u8>>;

/// The report of these suites, one element a line, UTF-8.
pub(super) fn document(suites: Vec<(TestSuite, Properties)>) -> anyhow::Result<String> {
    let (suites, properties): (Vec<_>, Vec<_>) = suites.into_iter().unzip();
    let mut report = Report::new();
    report.add_testsuites(suites);
    let mut written = Vec::new();
    report.write_xml(&mut written)?;
    complete(&written, &report, &properties).context("the JUnit report could not be completed")
}

fn complete(xml: &[u8], report: &Report, properties: &[Properties]) -> anyhow::Result<String> {
    let mut reader = quick_xml::Reader::from_reader(xml);
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 1);
    let mut left = report.testsuites().iter().zip(properties);
    loop {
        match reader.read_event()? {
            Event::Eof => break,
            Event::Start(tag) if is(&tag, "testsuites") => {
                writer.write_event(Event::Start(with_totals(tag, report.testsuites())))?;
            }
            Event::Start(tag) if is(&tag, "testsuite") => {
                let (suite, properties) = left.next().context("a suite too many")?;
                writer.write_event(Event::Start(with_skipped(tag, suite)))?;
                write_properties(&mut writer, properties)?;
            }
            Event::Empty(tag) if is(&tag, "testsuite") => {
                let (suite, properties) = left.next().context("a suite too many")?;
                let tag = with_skipped(tag, suite);
                writer.write_event(Event::Start(tag.borrow()))?;
                write_properties(&mut writer, properties)?;
                writer.write_event(Event::End(tag.to_end()))?;
            }
            other => writer.write_event(other)?,
        }
    }
    ensure!(left.next().is_none(), "a suite is missing");
    let mut text = String::from_utf8(writer.into_inner())?;
    text.push('\n');
    Ok(text)
}

fn is(tag: &BytesStart<'_>, name: &str) -> bool {
    tag.name().as_ref() == name.as_bytes()
}

fn with_skipped<'a>(mut tag: BytesStart<'a>, suite: &TestSuite) -> BytesStart<'a> {
    tag.push_attribute(("skipped", suite.skipped().to_string().as_str()));
    tag
}

fn with_totals<'a>(mut tag: BytesStart<'a>, suites: &[TestSuite]) -> BytesStart<'a> {
    let total = |of: fn(&TestSuite) -> usize| suites.iter().map(of).sum::<usize>().to_string();
    let time: Duration = suites.iter().map(TestSuite::time).sum();
    for (name, value) in [
        ("name", "gpu-validator".to_owned()),
        ("tests", total(TestSuite::tests)),
        ("failures", total(TestSuite::failures)),
        ("errors", total(TestSuite::errors)),
        ("skipped", total(TestSuite::skipped)),
        ("time", time.as_seconds_f64().to_string()),
    ] {
        tag.push_attribute((name, value.as_str()));
    }
    tag
}

/// Readers want the properties before the test cases.
fn write_properties(writer: &mut Writer, properties: &Properties) -> anyhow::Result<()> {
    if properties.is_empty() {
        return Ok(());
    }
    let element = writer.create_element("properties");
    element.write_inner_content(|writer| {
        for (name, value) in properties {
            writer
                .create_element("property")
                .with_attribute(("name", name.as_str()))
                .with_attribute(("value", value.as_str()))
                .write_empty()?;
        }
        Ok(())
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use junit_report::TestCase;

    use super::*;

    #[test]
    fn suites_have_their_counts_and_properties_also_without_a_test_case() {
        let mut suite = TestSuite::new("one");
        suite.add_testcase(TestCase::skipped("left out"));
        suite.add_testcase(TestCase::success("right", Duration::milliseconds(1500)));
        let properties = |value: &str| vec![("name".to_owned(), value.to_owned())];
        let text = document(vec![
            (suite, properties("first")),
            (TestSuite::new("two"), properties("second")),
        ])
        .expect("a report");
        let xml = roxmltree::Document::parse(&text).expect("well-formed XML");
        let root = xml.root_element();
        let totals = [
            ("tests", "2"),
            ("skipped", "1"),
            ("errors", "0"),
            ("time", "1.5"),
        ];
        for (name, value) in totals {
            assert_eq!(root.attribute(name), Some(value), "{name}: {text}");
        }
        let suites: Vec<_> = root
            .children()
            .filter(roxmltree::Node::is_element)
            .collect();
        let skipped = suites.iter().map(|it| it.attribute("skipped"));
        assert!(skipped.eq([Some("1"), Some("0")]), "{text}");
        for (suite, expected) in suites.iter().zip(["first", "second"]) {
            let first = suite.first_element_child().expect("an element");
            assert!(first.has_tag_name("properties"), "{text}");
            let property = first.first_element_child().expect("a property");
            assert_eq!(property.attribute("value"), Some(expected));
        }
    }

    #[test]
    fn xml_that_does_not_hold_the_suites_is_an_error() {
        let mut report = Report::new();
        report.add_testsuite(TestSuite::new("one"));
        let properties = [Properties::new()];
        for (xml, expected) in [
            ("<testsuites></testsuites>", "a suite is missing"),
            (
                "<testsuites><testsuite/><testsuite/></testsuites>",
                "a suite too many",
            ),
            ("<testsuites></other>", "other"),
        ] {
            let error = complete(xml.as_bytes(), &report, &properties).expect_err(xml);
            assert!(format!("{error:#}").contains(expected), "{error:#}");
        }
    }
}
