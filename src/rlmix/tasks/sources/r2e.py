"""R2E-Gym: hidden tests lie in the image, and an exact map says how each must end."""

import json
import re

from rlmix.tasks.record import Base, GoldRecord, HiddenRecord, ImageRef, SourceTask, TaskRecord
from rlmix.tasks.sources.rows import Row

WORKDIR = "/testbed"
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
TESTS, SCRIPT = "/r2e_tests", "/testbed/run_tests.sh"
PASSED = {"PASSED", "XFAIL", "XPASS"}


def read_r2e(row: Row, *, source: str, revision: str) -> SourceTask | None:
    name, image, commit = row.text("repo_name"), row.text("docker_image"), row.text("commit_hash")
    row.task_id = f"{name}-{commit[:12]}"
    if commit and not _COMMIT.fullmatch(commit):
        row.refuse("commit_hash", f"{commit[:60]!r} is no commit id")
    prompt = _issue(row.text("problem_statement"))
    expected = _expected(row)
    if row.problems:
        return None
    required = tuple(test for test, status in expected.items() if status in PASSED)
    if not required:
        row.refuse("expected_output_json", "no test is expected to pass")
        return None
    return SourceTask(
        public=TaskRecord(
            task_id=row.task_id,
            source=source,
            revision=revision,
            repository=name,
            language="python",
            prompt=prompt,
            image=ImageRef(ref=image),
            workdir=WORKDIR,
            base=Base(kind="tree"),
        ),
        hidden=HiddenRecord(
            task_id=row.task_id,
            test_command=f"bash {SCRIPT}",
            runner="pytest",
            fail_to_pass=required,
            name_style="last_parts",
            image_paths=(TESTS, SCRIPT, f"{WORKDIR}/r2e_tests"),
            # Upstream links the folder into the repository before the agent starts; here it comes
            # when the diff is judged.
            from_image={TESTS: "r2e_tests", SCRIPT: "run_tests.sh"},
        ),
        # The commit is the fix itself; its content is in the row, as objects rather than a diff.
        gold=GoldRecord(task_id=row.task_id, patch="", commit=commit),
    )


def _issue(text: str) -> str:
    """The text between the set's own marks."""
    inner = text.partition("[ISSUE]")[2].partition("[/ISSUE]")[0].strip()
    return inner or text


def _expected(row: Row) -> dict[str, str]:
    text = row.text("expected_output_json")
    try:
        expected = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        row.refuse("expected_output_json", f"no valid JSON: {error}")
        return {}
    if not isinstance(expected, dict) or not all(isinstance(v, str) for v in expected.values()):
        row.refuse("expected_output_json", "not a map from test to status")
        return {}
    return expected
