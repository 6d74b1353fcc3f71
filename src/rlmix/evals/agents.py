"""Agents that need no model: the reference, nothing, and diffs or commands from a file.

Each answers one attempt with the diff that is judged.
"""

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlmix.core.errors import ConfigError
from rlmix.sandbox.protocol import SandboxBackend, WorkTreeError
from rlmix.tasks.benchmark import BenchTask

NAMES = "gold, empty, scripted:FILE, predictions:FILE, policy, endpoint:URL"
ID_COLUMNS = ("instance_id", "task_id", "id")
PATCH_COLUMNS = ("model_patch", "patch", "diff")
COMMAND_S = 300.0
CAPTURE_S = 120.0
"""Beside an agent's own time, for its sandbox to start and for what it left to be recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What an agent leaves of one attempt."""

    diff: bytes
    stop_reason: str = ""
    num_tokens: int = 0
    num_turns: int = 0
    model_s: float = 0.0
    """Waiting for the model, in all."""
    is_missing: bool = False
    """There was no answer for this task and attempt; it counts as failed."""
    fault: str = ""
    """The agent left nothing that could be judged; counts as failed."""
    void_reason: str = ""
    """A fault that the agent cannot have caused; the attempt is void."""


class Agent(Protocol):
    """Answers attempts."""

    @property
    def name(self) -> str: ...

    @property
    def task_ids(self) -> frozenset[str] | None:
        """Tasks that it has an answer for; None: all."""
        ...

    @property
    def works_in_sandbox(self) -> bool:
        """False: it brings its diffs along, and nothing of it runs beside a repository."""
        ...

    async def answer(self, task: BenchTask, number: int, backend: SandboxBackend) -> Answer: ...


class GoldAgent:
    """Submits the reference fix."""

    name = "gold"
    task_ids = None
    works_in_sandbox = False

    async def answer(self, task: BenchTask, number: int, backend: SandboxBackend) -> Answer:
        return Answer(diff=task.gold, is_missing=not task.gold)


class EmptyAgent:
    """Submits nothing; the tests are run all the same, so that a task solved by nothing shows."""

    name = "empty"
    task_ids = None
    works_in_sandbox = False

    async def answer(self, task: BenchTask, number: int, backend: SandboxBackend) -> Answer:
        return Answer(diff=b"")


class PredictionsAgent:
    """Submits diffs that were made elsewhere, in the forms that public evaluators take."""

    name = "predictions"
    works_in_sandbox = False

    def __init__(self, file: Path) -> None:
        self._diffs = read_predictions(file)
        self.task_ids: frozenset[str] | None = frozenset(self._diffs)

    def most_of(self, task_ids: Iterable[str]) -> int:
        """Diffs of the one of these tasks that has most."""
        return max((len(self._diffs.get(task_id, ())) for task_id in task_ids), default=0)

    async def answer(self, task: BenchTask, number: int, backend: SandboxBackend) -> Answer:
        diffs = self._diffs.get(task.public.task_id, [])
        if number >= len(diffs):
            return Answer(diff=b"", is_missing=True)
        return Answer(diff=diffs[number])


class ScriptedAgent:
    """Runs the commands that a file lists for each task, in a sandbox as a model would."""

    name = "scripted"
    works_in_sandbox = True

    def __init__(self, file: Path) -> None:
        document = _document(file)
        if not isinstance(document, dict) or not all(
            isinstance(lines, list) and all(isinstance(line, str) for line in lines)
            for lines in document.values()
        ):
            raise ConfigError(
                f"agent=scripted:{file}: must be one JSON object from task id to a list of commands"
            )
        self._commands: dict[str, list[str]] = document
        self.task_ids: frozenset[str] | None = frozenset(document)

    async def answer(self, task: BenchTask, number: int, backend: SandboxBackend) -> Answer:
        commands = self._commands.get(task.public.task_id)
        if commands is None:
            return Answer(diff=b"", is_missing=True)
        sandbox = await backend.create(await backend.prepare(task.public.repository))
        try:
            reason, until_s = "commands_over", time.monotonic() + task.agent_s
            for command in commands:
                left_s = until_s - time.monotonic()
                if left_s > 0:
                    done = await sandbox.run(command, min(left_s, COMMAND_S))
                if time.monotonic() >= until_s:
                    reason = "time_limit"  # What is there by then is judged all the same.
                    break
                if done.submitted:
                    reason = "submitted"
                    break
            return Answer(diff=await sandbox.capture_diff(), stop_reason=reason)
        except WorkTreeError as error:
            return Answer(diff=b"", fault=str(error))
        finally:
            await sandbox.destroy()


def open_agent(text: str) -> Agent:
    """The agent that `text` names, of those that need no model.

    Raises:
        ConfigError: unknown, or its file cannot be used.
    """
    kind, _, place = text.partition(":")
    if kind == "gold" and not place:
        return GoldAgent()
    if kind == "empty" and not place:
        return EmptyAgent()
    if kind in ("scripted", "predictions") and place:
        agent = ScriptedAgent if kind == "scripted" else PredictionsAgent
        return agent(Path(place).expanduser())
    raise ConfigError(f"agent={text!r}; allowed: {NAMES}")


def check_agent(text: str) -> None:
    """Refuse what names no agent.

    Raises:
        ConfigError: unknown, or its file or URL cannot be used.
    """
    kind, _, place = text.partition(":")
    if kind == "endpoint" and place:
        from rlmix.evals.endpoint import base_url

        base_url(place)
    elif text != "policy":
        open_agent(text)


def file_digest(text: str) -> str:
    """SHA-256 of the file that an agent's name gives, else empty: another one is another agent."""
    kind, _, place = text.partition(":")
    if kind not in ("scripted", "predictions"):
        return ""
    return hashlib.sha256(Path(place).expanduser().read_bytes()).hexdigest() if place else ""


def read_predictions(file: Path) -> dict[str, list[bytes]]:
    """Diffs per task id, in the order of the file: attempts of a task follow each other.

    JSON list or JSONL of objects with an id and a patch, or one JSON object from id to patch (or
    to such an object). Bytes are kept as they are; nothing is stripped.

    Raises:
        ConfigError: another form, with what is wrong.
    """
    document = _document(file)
    if isinstance(document, dict):
        rows = [
            {"instance_id": name, **(value if isinstance(value, dict) else {"patch": value})}
            for name, value in document.items()
        ]
    elif isinstance(document, list):
        rows = document
    else:
        raise ConfigError(
            f"agent=predictions:{file}: holds a {type(document).__name__}; allowed: a list of "
            "objects, one object per line, or one object from id to patch"
        )
    found: dict[str, list[bytes]] = {}
    for number, row in enumerate(rows):
        row = row if isinstance(row, dict) else {}
        name = next((row[c] for c in ID_COLUMNS if isinstance(row.get(c), str)), None)
        patch = next((row[c] for c in PATCH_COLUMNS if c in row), None)
        if name is None or not (patch is None or isinstance(patch, str)):
            raise ConfigError(
                f"agent=predictions:{file}: entry {number} needs a text in one of "
                f"{', '.join(ID_COLUMNS)} and one in one of {', '.join(PATCH_COLUMNS)}"
            )
        try:
            diff = (patch or "").encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"agent=predictions:{file}: entry {number} ({name}): its patch holds no text: "
                f"{error}"
            ) from None
        found.setdefault(name, []).append(diff)
    return found


def _document(file: Path) -> Any:
    try:
        text = file.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise ConfigError(f"agent: {file} cannot be read: {error.strerror}") from None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ConfigError(f"agent: {file} is neither JSON nor JSON Lines: {error}") from None
