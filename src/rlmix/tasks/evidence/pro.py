"""What the parser of a SWE-bench Pro task wrote: `{"tests": [{"name": ..., "status": ...}]}`."""

import json

from rlmix.tasks.evidence.report import Status, TestReport, collect

WORDS = {
    "PASSED": Status.PASS,
    "FAILED": Status.FAIL,
    "ERROR": Status.FAIL,
    "SKIPPED": Status.SKIP,
    "XFAIL": Status.XFAIL,
}


def parse_pro(document: bytes) -> TestReport:
    """Outcomes by name; a status that the benchmark does not know is a failure."""
    try:
        tests = json.loads(document)["tests"]
        pairs = [(str(test["name"]), WORDS.get(str(test["status"]), Status.FAIL)) for test in tests]
    except (ValueError, KeyError, TypeError, RecursionError):
        return collect((), "the parser's document has no list of tests with name and status")
    return collect(pairs)
