"""JUnit XML, which pytest, Gradle, Maven and many others write.

Invariant: the document comes from a sandbox; one that declares a document type is refused, so no
entity is ever expanded.
"""

from collections.abc import Iterator
from xml.etree import ElementTree

from rlmix.tasks.evidence.report import Status, TestReport, collect


def parse_junit(document: bytes) -> TestReport:
    """Outcomes by name: `file::Class::test` where the case names its file (pytest's `xunit1`
    family), else `classname.name`, else `name`."""
    if b"\0" in document:
        return collect((), "the XML is no UTF-8, which every runner writes")
    if b"<!DOCTYPE" in document or b"<!ENTITY" in document:
        return collect((), "the XML declares a document type, which no runner does")
    try:
        root = ElementTree.fromstring(document)
    except (ElementTree.ParseError, ValueError) as error:
        return collect((), f"the XML cannot be read: {error}")
    pairs = list(_cases(root))
    return collect(pairs, _fault(root, len(pairs)))


def _cases(root: ElementTree.Element) -> Iterator[tuple[str, Status]]:
    for case in root.iter("testcase"):
        yield _name(case), _status(case)


def _name(case: ElementTree.Element) -> str:
    name, classname, file = (case.get(key, "") for key in ("name", "classname", "file"))
    if not file:
        return f"{classname}.{name}" if classname else name
    module = file.removesuffix(".py").replace("/", ".")
    inner = classname.removeprefix(module).strip(".")
    return "::".join([file, *(inner.split(".") if inner else []), name])


def _status(case: ElementTree.Element) -> Status:
    tags = {child.tag for child in case}
    if tags & {"failure", "error"}:
        return Status.FAIL
    skipped = case.find("skipped")
    if skipped is None:
        return Status.PASS
    return Status.XFAIL if skipped.get("type") == "pytest.xfail" else Status.SKIP


def _fault(root: ElementTree.Element, num_cases: int) -> str:
    suites = [root] if root.tag == "testsuite" else root.findall("testsuite")
    counts = [suite.get("tests") for suite in suites]
    if not suites:
        return "the XML holds no test suite"
    if all(count is not None and count.isdecimal() for count in counts):
        counted = sum(map(int, counts))  # type: ignore[arg-type]
        # pytest counts a test and its failing tear-down as two.
        if num_cases > counted:
            return f"{num_cases} cases are listed, the suites count {counted}"
    return ""
