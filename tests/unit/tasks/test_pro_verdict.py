"""Tasks of SWE-bench Pro: their own script and parser, run in the sandbox, judged by its rule."""

from dataclasses import replace

import pytest

from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.core.trajectory import Outcome
from rlmix.tasks.evidence.pro import parse_pro
from rlmix.tasks.evidence.report import Status

from .conftest import Court

RUN_SCRIPT = """#!/bin/bash
echo "running $1" >&2
for name in adds zero; do
  if bash "tests/$name.sh"; then echo "RESULT $name good"; else echo "RESULT $name bad"; fi
done
exit 3
"""
PARSER = """import json, sys
out, err, result = sys.argv[1:]
assert "running tests/adds.sh,tests/zero.sh" in open(err).read()
words = {"good": "PASSED", "bad": "FAILED"}
lines = [line.split() for line in open(out) if line.startswith("RESULT ")]
tests = [{"name": name, "status": words[word]} for _, name, word in lines]
json.dump({"tests": tests}, open(result, "w"))
"""
PUBLIC = PublicTask(
    task_id="pro",
    split="eval",
    issue="total.sh subtracts",
    history=(Commit(message="m", files={"total.sh": "echo $(($1 - $2))\n"}),),
)
HIDDEN = HiddenTask(
    task_id="pro",
    tests={
        "tests/adds.sh": '[ "$(bash total.sh 2 3)" = 5 ]\n',
        "tests/zero.sh": '[ "$(bash total.sh 0 0)" = 0 ]\n',
    },
    required_tests=("adds",),
    skippable_tests=("zero",),
    reference_diff="",
    test_command="tests/adds.sh,tests/zero.sh",
    scripts={"run_script.sh": RUN_SCRIPT, "parser.py": PARSER},
)
FIX = "sed -i 's/ - / + /' total.sh"


def test_the_fix_passes_whatever_the_scripts_exit_code_says(court: Court) -> None:
    verdict = court.judge(court.diff(FIX, PUBLIC), PUBLIC, HIDDEN)
    assert (verdict.outcome, verdict.detail) == (Outcome.PASS, "2 listed tests passed")
    assert (verdict.exit_code, verdict.num_executed) == (3, 2)


def test_another_edit_fails_and_names_the_test(court: Court) -> None:
    verdict = court.judge(court.diff("echo x > note", PUBLIC), PUBLIC, HIDDEN)
    assert verdict.detail == "1 of 2 listed tests passed; adds: fail"


def test_a_listed_test_that_never_ran_has_not_passed(court: Court) -> None:
    hidden = replace(HIDDEN, skippable_tests=("zero", "gone"))
    verdict = court.judge(court.diff(FIX, PUBLIC), PUBLIC, hidden)
    assert verdict.detail == "2 of 3 listed tests passed; gone: did not run"


TRICKS = {
    "a parser of one's own": (
        "mkdir -p tests; echo 'exit 0' > parser.py; echo 'echo 9' > total.sh",
        "adds: fail",
    ),
    "results written by what stays behind": (
        "printf '(setsid bash -c \"while :; do for d in /tmp/*/; do echo %s > "
        "\\$d/output.json; done; done\" &) >/dev/null 2>&1\\necho 7\\n' "
        "'{\\\\\"tests\\\\\":[]}' > total.sh",
        "listed tests passed",
    ),
    "out of time": ("echo 'sleep 100' > total.sh", "timed_out"),
}


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_earns_0(court: Court, name: str) -> None:
    edit, detail = TRICKS[name]
    limit_s = 2.0 if name == "out of time" else 20.0
    verdict = court.judge(court.diff(edit, PUBLIC), PUBLIC, HIDDEN, limit_s)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert detail in verdict.detail


def test_a_parser_that_breaks_says_what_it_said(court: Court) -> None:
    hidden = replace(HIDDEN, scripts={**HIDDEN.scripts, "parser.py": "raise SystemExit('no')\n"})
    verdict = court.judge(court.diff(FIX, PUBLIC), PUBLIC, hidden)
    assert verdict.detail == "the parser of the task read nothing: no?"


def test_documents_of_parsers_are_read_strictly() -> None:
    good = parse_pro(
        b'{"tests": [{"name": "a", "status": "PASSED"}, {"name": "a", "status": "X"}]}'
    )
    assert good.outcomes == {"a": frozenset({Status.PASS, Status.FAIL})}
    for broken in (b"", b"[]", b'{"tests": 3}', b'{"tests": [{"name": "a"}]}', b"[" * 99_999):
        assert parse_pro(broken).fault == (
            "the parser's document has no list of tests with name and status"
        )
