"""Counts the test cases of JUnit files with parsers that others wrote, and compares them with our JSON report.

Arguments: pairs of a JUnit file and the JSON report of the same run. Prints a line for each pair; exits with 1 when any
reader disagrees, cannot read a file, or misses an attribute that a known consumer needs.
"""

import json
import sys

import junitparser
import lxml.etree
from junit2htmlreport import parser as junit2html


def count_json(path):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    verdicts = [finding["verdict"] for finding in report["findings"]]
    if not verdicts:
        raise ValueError("no findings in the JSON report, so nothing would be compared")
    counted = {verdict: verdicts.count(verdict) for verdict in ("pass", "warn", "fail", "error", "skip")}
    claimed = {verdict: report["counts"].get(verdict) for verdict in counted}
    if claimed != counted:
        raise ValueError(f"the JSON report's own counts are {claimed}, its findings {counted}")
    return len(verdicts), counted["fail"], counted["error"], counted["skip"]


def count_strict_xml(path):
    """What EnricoMi/publish-unit-test-result-action does: lxml, recovering from nothing."""
    tree = lxml.etree.parse(path, lxml.etree.XMLParser(recover=False, resolve_entities=False, no_network=True))
    suites, cases = tree.findall(".//testsuite"), tree.findall(".//testcase")
    for element in suites + cases:
        # dorny/test-reporter prints NaN where there is no time.
        if not float(element.get("time", "nan")) >= 0:
            raise ValueError(f"<{element.tag} name={element.get('name')!r}> has no time")
    for case in cases:
        for attribute in ("name", "classname"):
            if not case.get(attribute):
                raise ValueError(f"<testcase name={case.get('name')!r}> has no {attribute}")
        # GitHub's annotations name it: a file of the reader's repository, or none.
        if case.get("file", "relative").startswith(("/", "validator/")):
            raise ValueError(f"<testcase name={case.get('name')!r}> has the file {case.get('file')!r}")
    return (len(cases), *(len([case for case in cases if case.find(kind) is not None]) for kind in ("failure", "error", "skipped")))


def count_attributes(path):
    """The sums that the suites claim for themselves."""
    suites = lxml.etree.parse(path).findall(".//testsuite")
    return tuple(sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped"))


def count_junitparser(path):
    xml = junitparser.JUnitXml.fromfile(path)
    results = [case.result for suite in xml for case in suite]
    kinds = (junitparser.Failure, junitparser.Error, junitparser.Skipped)
    return (len(results), *(len([result for result in results if any(isinstance(it, kind) for it in result)]) for kind in kinds))


def count_junit2html(path):
    report = junit2html.Junit(path)
    if not report.html():
        raise ValueError("junit2html rendered nothing")
    suites = report.suites
    cases = [case for suite in suites for case in suite.all()]
    skipped = sum(len(suite.skipped()) for suite in suites)
    # junit2html has one word, failed, for failures and errors; how it tells them apart is the element's type.
    failed = sum(len(suite.failed()) for suite in suites)
    return len(cases), failed, skipped


def compare(junit, report):
    expected = count_json(report)
    tests, failures, errors, skips = expected
    for name, count in (
        ("a strict parser", count_strict_xml),
        ("the suites' own attributes", count_attributes),
        ("junitparser", count_junitparser),
    ):
        found = count(junit)
        if found != expected:
            raise ValueError(f"{name} counts {found} (tests, failures, errors, skips), our JSON says {expected}")
    found = count_junit2html(junit)
    if found != (tests, failures + errors, skips):
        raise ValueError(f"junit2html counts {found} (tests, failed, skips), our JSON says {(tests, failures + errors, skips)}")
    return expected


def main(arguments):
    wrong = 0
    for junit, report in zip(arguments[::2], arguments[1::2], strict=True):
        try:
            counts = "%d tests, %d failures, %d errors, %d skips" % compare(junit, report)
            print(f"{junit}: {counts}, the same for all readers")
        except Exception as error:  # Whatever a reader stumbles over is a finding about our file.
            print(f"{junit}: {type(error).__name__}: {error}", file=sys.stderr)
            wrong += 1
    return 1 if wrong or not arguments else 0


sys.exit(main(sys.argv[1:]))
