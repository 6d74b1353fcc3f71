"""The SWE-bench family: SWE-bench, Verified, Lite, Multilingual, SWE-Gym, SWE-rebench, SWE-smith.

Columns as their dataset cards give them. Test commands come from the row where it has one, else
from the conventions of the harness for that repository; a row for which neither says how its tests
run is refused, not guessed.
"""

import re
import shlex

from rlmix.tasks.evidence.runners import runner_of
from rlmix.tasks.record import Base, GoldRecord, HiddenRecord, ImageRef, SourceTask, TaskRecord
from rlmix.tasks.sources.patches import is_diff, language_of, paths_in, tests_among
from rlmix.tasks.sources.rows import Row

WORKDIR = "/testbed"
_DJANGO_NAME = re.compile(r"^\w+ \([\w.]+\)$")
_REPOSITORY = re.compile(r"^[\w.-]+/[\w-][\w.-]*$")
_COMMIT = re.compile(r"^[0-9a-f]{7,40}$")
UNREAD_REPOSITORIES = {"sympy/sympy": "bin/test"}
"""Repositories whose own runner nobody here reads."""


IMAGES = {
    "swe_bench": ("swebench/sweb.eval.x86_64.{id}:latest", "_1776_"),
    "swe_gym": ("xingyaoww/sweb.eval.x86_64.{id}:latest", "_s_"),
}
"""Image name by set, and what stands for the `__` of an instance id, where rows name no image."""


def read_swe_bench(row: Row, *, source: str, revision: str) -> SourceTask | None:
    """SWE-bench, SWE-Gym and SWE-rebench rows."""
    row.task_id = row.text("instance_id")
    repository, base = row.text("repo"), row.text("base_commit")
    patch, test_patch = row.text("patch"), row.text("test_patch")
    prompt = row.text("problem_statement")
    required = row.names("FAIL_TO_PASS")
    kept = row.names("PASS_TO_PASS", needed=False)
    if repository and not _REPOSITORY.match(repository):
        row.refuse("repo", f"{repository!r} is not owner/name")
    if base and not _COMMIT.match(base):
        row.refuse("base_commit", f"{base!r} is no commit id")
    for column, diff in (("patch", patch), ("test_patch", test_patch)):
        if diff and not is_diff(diff):
            row.refuse(column, "holds no git diff")
    command, style = _command(row, repository, test_patch, required)
    ref = _image(row, source)
    if row.problems:
        return None
    paths = paths_in(patch)
    return SourceTask(
        public=TaskRecord(
            task_id=row.task_id,
            source=source,
            revision=revision,
            repository=repository,
            language=language_of(paths),
            prompt=prompt,
            image=ref,
            workdir=f"/{repository.partition('/')[2]}" if source == "swe_rebench" else WORKDIR,
            base=Base(kind="commit", commit=base),
        ),
        hidden=HiddenRecord(
            task_id=row.task_id,
            test_command=command,
            hidden_patch=test_patch,
            fail_to_pass=required,
            pass_to_pass=kept,
            name_style=style,
        ),
        gold=GoldRecord(task_id=row.task_id, patch=patch),
    )


def _image(row: Row, source: str) -> ImageRef | None:
    for column in ("docker_image", "image_name", "image"):
        if isinstance(row.values.get(column), str) and row.values[column]:
            return ImageRef(ref=row.values[column])
    if source not in IMAGES:
        return None
    pattern, mark = IMAGES[source]
    return ImageRef(ref=pattern.format(id=row.task_id.lower().replace("__", mark)))


def _command(
    row: Row, repository: str, test_patch: str, required: tuple[str, ...]
) -> tuple[str, str]:
    """(test command, name style)."""
    config = row.values.get("install_config")
    if config:
        own = row.inner("install_config").values.get("test_cmd")
        lines = own if isinstance(own, list) else [own]
        texts = [line for line in lines if isinstance(line, str) and line.strip()]
        if len(texts) < len(lines) or not texts:
            row.refuse("install_config", "test_cmd is neither a text nor a list of texts")
            return "", "same"
        command = " && ".join(texts)
        if runner_of(command) is None:
            row.refuse("install_config", f"nobody reads the runner of {command!r}")
        return command, "without_timing"
    files = tests_among(paths_in(test_patch))
    if repository in UNREAD_REPOSITORIES:
        row.refuse("repo", f"nobody reads its runner {UNREAD_REPOSITORIES[repository]}")
        return "", "same"
    if repository == "django/django":
        if any(not _DJANGO_NAME.match(name) for name in required):
            bad = next(name for name in required if not _DJANGO_NAME.match(name))
            row.refuse("FAIL_TO_PASS", f"{bad!r} is a docstring, not `method (class)`")
        labels = [_django_label(path) for path in files if path.endswith(".py")]
        if not labels:
            row.refuse("test_patch", "names no test file")
        return _django_command(labels), "django"
    python = [path for path in files if path.endswith(".py")]
    if not python or not all("::" in name or " " not in name for name in required):
        row.refuse(
            "test_patch",
            "names no Python test file, and the row says no test command (install_config.test_cmd)",
        )
        return "", "same"
    return f"python -m pytest -rA --tb=short {shlex.join(python)}", "same"


def _django_label(path: str) -> str:
    return path.removeprefix("tests/").removesuffix(".py").replace("/", ".")


def _django_command(labels: list[str]) -> str:
    options = "--verbosity 2 --settings=test_sqlite --parallel 1"
    return f"./tests/runtests.py {options} {shlex.join(dict.fromkeys(labels))}"


def read_swe_smith(row: Row, *, source: str, revision: str) -> SourceTask | None:
    """SWE-smith: `patch` makes the bug, and the fix is the parent of the image's HEAD."""
    row.task_id = row.text("instance_id")
    repository, patch = row.text("repo"), row.text("patch")
    required = row.names("FAIL_TO_PASS")
    kept = row.names("PASS_TO_PASS", needed=False)
    image = row.text("image_name")
    prompt = row.text("problem_statement")
    if patch and not is_diff(patch):
        row.refuse("patch", "holds no git diff")
    files = tuple(dict.fromkeys(name.split("::")[0] for name in (*required, *kept)))
    if required and not all("::" in name for name in required):
        row.refuse("FAIL_TO_PASS", f"{required[0]!r} is no pytest id, and no command is known")
    gone = sorted(set(files) & set(paths_in(patch)))
    if gone:
        row.refuse("patch", f"the bug lies in {gone[0]}, a test file that the task removes")
    if row.problems:
        return None
    failing = tuple(dict.fromkeys(name.split("::")[0] for name in required))
    return SourceTask(
        public=TaskRecord(
            task_id=row.task_id,
            source=source,
            revision=revision,
            repository=repository.removeprefix("swesmith/").partition(".")[0].replace("__", "/"),
            language=language_of(paths_in(patch)),
            prompt=prompt,
            image=ImageRef(ref=image),
            workdir=WORKDIR,
            base=Base(kind="tree"),
        ),
        hidden=HiddenRecord(
            task_id=row.task_id,
            test_command=f"python -m pytest -rA --tb=short {shlex.join(failing)}",
            fail_to_pass=required,
            pass_to_pass=tuple(name for name in kept if name.split("::")[0] in failing),
        ),
        gold=GoldRecord(task_id=row.task_id, patch=patch, is_reversed=True),
    )
