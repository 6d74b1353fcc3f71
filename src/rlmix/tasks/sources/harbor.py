"""Harbor task folders: `task.toml`, `instruction.md`, `tests/`, `solution/`, `environment/`.

Two kinds of tests are read. A folder in the layout of SWE-bench Pro V2 has `tests/config.json` with
lists of names, `run_script.sh` and `parser.py`; any other one has `tests/test.sh`, whose exit code
and reward file decide, so its rewards are weak.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlmix.core.errors import DataError
from rlmix.tasks.record import (
    Base,
    GoldRecord,
    HiddenRecord,
    ImageRef,
    Limits,
    SourceTask,
    TaskRecord,
)
from rlmix.tasks.sources.patches import is_diff, language_of, paths_in
from rlmix.tasks.sources.rows import Row

NEEDED = ("instruction.md", "task.toml")
WORKDIR = "/app"
PRO_SCRIPTS = ("run_script.sh", "parser.py")
SOLVE = "solution/solve.sh"
OUTSIDE = ("/tests", "/logs", "/solution")
"""Folders of the harness: an agent finds them empty, its judge fills them."""
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([MGTmgt])i?[Bb]?\s*")
MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}


def task_folders(path: Path) -> list[Path]:
    """Folders below `path` with a `task.toml`, sorted by name.

    Raises:
        DataError: there is none.
    """
    found = sorted(file.parent for file in path.rglob("task.toml"))
    if not found:
        raise DataError(f"tasks.path={path}: no folder there holds a task.toml (Harbor layout)")
    return found


def folder_rows(path: Path) -> Iterator[tuple[Path, Row]]:
    """One row per task folder; its columns are the files, by relative path."""
    for folder in task_folders(path):
        row = Row(file=str(folder), number=0, values={}, task_id=folder.name)
        for file in sorted(folder.rglob("*")):
            if not file.is_file() or file.is_symlink():
                continue
            name = file.relative_to(folder).as_posix()
            try:
                with file.open(encoding="utf-8", newline="") as stream:
                    row.values[name] = stream.read()
            except UnicodeDecodeError:
                row.values[name] = file.read_bytes()
        yield folder, row


def read_harbor(row: Row, *, source: str, revision: str) -> SourceTask | None:
    for name in NEEDED:
        row.text(name)
    settings = _settings(row)
    limits = _limits(row, settings)
    patch = row.text("tests/test_patch.patch", needed=False)
    gold = row.text("solution/gold_patch.diff", needed=False)
    for column, diff in (("tests/test_patch.patch", patch), ("solution/gold_patch.diff", gold)):
        if diff.strip() and not is_diff(diff):
            row.refuse(column, "holds no git diff")
    config = _config(row)
    # Other adapters keep a config.json as well; only Pro's has a script and a parser beside it.
    is_pro = source != "harbor" or all(f"tests/{name}" in row.values for name in PRO_SCRIPTS)
    if config is not None and is_pro:
        hidden: HiddenRecord = _pro(row, config, patch)
    else:
        hidden = _plain(row, patch, settings)
    image = _text(settings, "environment", "docker_image") or _from_dockerfile(row)
    if row.problems:
        return None
    return SourceTask(
        public=TaskRecord(
            task_id=row.task_id,
            source=source,
            revision=revision,
            repository=str((config or {}).get("repo", "")),
            language=language_of(paths_in(gold) or paths_in(patch)),
            prompt=row.values["instruction.md"],
            image=ImageRef(ref=image) if image else None,
            workdir=_workdir(row),
            base=Base(kind="tree"),
            limits=limits,
            writable=OUTSIDE if hidden.runner == "harbor" else (),
        ),
        hidden=hidden,
        gold=_gold(row, gold),
    )


def _gold(row: Row, patch: str) -> GoldRecord | None:
    """The diff, else the folder of the script that makes the fix."""
    if patch.strip():
        return GoldRecord(task_id=row.task_id, patch=patch)
    if SOLVE not in row.values:
        return None
    names = [SOLVE, *(n for n in row.values if n.startswith("solution/") and n != SOLVE)]
    script = {f"/{name}": as_text(row.values[name]) for name in names}
    return GoldRecord(task_id=row.task_id, patch="", script=script)


def as_text(content: str | bytes) -> str:
    """A file as JSON can hold it; bytes that are no UTF-8 survive."""
    return content if isinstance(content, str) else content.decode("utf-8", "surrogateescape")


def _settings(row: Row) -> dict[str, Any]:
    text = row.values.get("task.toml")
    try:
        return tomllib.loads(text) if isinstance(text, str) else {}
    except tomllib.TOMLDecodeError as error:
        row.refuse("task.toml", f"no valid TOML: {error}")
        return {}


def _config(row: Row) -> dict[str, Any] | None:
    if "tests/config.json" not in row.values:
        return None
    try:
        config = json.loads(row.values["tests/config.json"])
    except (ValueError, TypeError) as error:
        row.refuse("tests/config.json", f"no valid JSON: {error}")
        return {}
    if not isinstance(config, dict):
        row.refuse("tests/config.json", "not an object")
        return {}
    return config


def _pro(row: Row, config: dict[str, Any], patch: str) -> HiddenRecord:
    """The layout of SWE-bench Pro V2: lists may be JSON or Python literals."""
    inner = Row(row.file, row.number, config, row.task_id, row.problems)
    required = inner.names("fail_to_pass" if "fail_to_pass" in config else "FAIL_TO_PASS")
    kept_name = "pass_to_pass" if "pass_to_pass" in config else "PASS_TO_PASS"
    kept = inner.names(kept_name, needed=False) if kept_name in config else ()
    selected = (
        inner.names("selected_test_files_to_run", needed=False)
        if "selected_test_files_to_run" in config
        else ()
    )
    row.text("tests/run_script.sh")
    row.text("tests/parser.py")
    return pro_hidden(
        row.task_id,
        run_script=row.values.get("tests/run_script.sh", ""),
        parser=row.values.get("tests/parser.py", ""),
        selected=selected,
        patch=patch,
        required=required,
        kept=kept,
    )


def pro_hidden(
    task_id: str,
    *,
    run_script: str,
    parser: str,
    selected: tuple[str, ...],
    patch: str,
    required: tuple[str, ...],
    kept: tuple[str, ...],
) -> HiddenRecord:
    """Both editions of SWE-bench Pro: a script prints, a parser of the same instance reads."""
    return HiddenRecord(
        task_id=task_id,
        test_command=",".join(selected),
        runner="pro",
        hidden_patch=patch,
        files={"run_script.sh": run_script, "parser.py": parser},
        fail_to_pass=required,
        pass_to_pass=kept,
        image_paths=OUTSIDE,
    )


def _plain(row: Row, patch: str, settings: dict[str, Any]) -> HiddenRecord:
    row.text("tests/test.sh")
    files = {
        f"/{name}": as_text(content)
        for name, content in row.values.items()
        if name.startswith("tests/") and name != "tests/test_patch.patch"
    }
    env = _part(_part(settings, "verifier"), "env")
    for name, value in env.items():
        if not isinstance(value, str) or "${" in value:
            row.refuse("task.toml", f"verifier.env.{name} = {value!r} asks for a value of the host")
    return HiddenRecord(
        task_id=row.task_id,
        test_command="/tests/test.sh",
        runner="harbor",
        hidden_patch=patch,
        files=files,
        image_paths=OUTSIDE,
        env={str(name): str(value) for name, value in env.items()},
    )


def _limits(row: Row, settings: dict[str, Any]) -> Limits:
    environment = _part(settings, "environment")
    return Limits(
        cpus=_number(row, environment, "cpus"),
        memory_mib=_mib(row, environment, "memory"),
        disk_mib=_mib(row, environment, "storage"),
        agent_s=int(_number(row, _part(settings, "agent"), "timeout_sec") or Limits().agent_s),
        verify_s=int(_number(row, _part(settings, "verifier"), "timeout_sec") or Limits().verify_s),
    )


def _part(settings: dict[str, Any], name: str) -> dict[str, Any]:
    part = settings.get(name, {})
    return part if isinstance(part, dict) else {}


def _mib(row: Row, environment: dict[str, Any], name: str) -> int:
    """`memory_mb = 4096`, or `memory = "4G"` of older schemas."""
    if f"{name}_mb" in environment:
        return int(_number(row, environment, f"{name}_mb"))
    value = environment.get(name, "")
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if value == "" or match is None:
        if value != "":
            row.refuse("task.toml", f"{name} = {value!r}; allowed: such as '4G' or '512M'")
        return 0
    return int(float(match[1]) * MIB[match[2].upper()])


def _number(row: Row, part: dict[str, Any], name: str) -> float:
    """A number of at least 0; 0 where there is none."""
    value = part.get(name, 0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < 1e9:
        row.refuse("task.toml", f"{name} = {value!r} is no number from 0 on")
        return 0.0
    return float(value)


def _text(settings: dict[str, Any], part: str, name: str) -> str:
    value = _part(settings, part).get(name, "")
    return value if isinstance(value, str) else ""


def _dockerfile(row: Row) -> list[str]:
    text = row.values.get("environment/Dockerfile", "")
    return [line.strip() for line in text.split("\n")] if isinstance(text, str) else []


def _from_dockerfile(row: Row) -> str:
    lines = [line.split() for line in _dockerfile(row) if line.upper().startswith("FROM ")]
    return lines[-1][1] if lines and len(lines[-1]) > 1 else ""


def _workdir(row: Row) -> str:
    places = [line.split(None, 1)[1] for line in _dockerfile(row) if line.startswith("WORKDIR ")]
    return places[-1] if places and places[-1].startswith("/") else WORKDIR
