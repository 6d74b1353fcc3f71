"""Every attempt of an evaluation, once: one line per finished attempt, written before it counts.

Invariant: an attempt that is in the ledger is never made again, whatever killed the evaluation;
one that is not there leaves nothing behind that counts. A ledger belongs to one question (tasks,
agent, limits), told by its header; another question is refused.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlmix.core.errors import ConfigError
from rlmix.observe.jsonl import JsonlWriter, read_jsonl
from rlmix.observe.lock import LOCK_FILE, RunLock

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt at one task."""

    task_id: str
    number: int
    """From 0."""
    outcome: str
    """`pass`, `fail` or `void`."""
    detail: str
    diff_bytes: int
    agent_s: float
    verify_s: float
    stop_reason: str = ""
    """Why the agent's session ended; empty where there was none."""
    void_reason: str = ""
    tries: int = 1
    """How often it was made, void ones included."""
    timed_out: bool = False
    num_tests: int = 0
    num_tokens: int = 0
    num_turns: int = 0
    model_s: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.task_id, self.number


ATTEMPTS_FILE = "attempts.jsonl"


def read_attempts(folder: Path) -> list[Attempt]:
    """Attempts of an evaluation, in the order in which they ended."""
    return [Attempt(**record) for record in read_jsonl(folder / ATTEMPTS_FILE)]


def _read_question(head: Path) -> dict[str, Any]:
    try:
        found = json.loads(head.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{head} is damaged; give another name with run.name, or remove it")
    return found


def _check_question(head: Path, wanted: dict[str, Any]) -> None:
    found = _read_question(head)
    if found != wanted:
        names = sorted(k for k in found | wanted if found.get(k) != wanted.get(k))
        raise ConfigError(
            f"{head.parent} holds another evaluation: {', '.join(names)} differ; give it "
            "another name with run.name, or ask the same question"
        )


class Ledger:
    """The attempts of one evaluation, on disk."""

    def __init__(self, folder: Path, question: dict[str, Any]) -> None:
        """Open or continue.

        Raises:
            ConfigError: the folder holds another question's attempts, or something else, or a
                live process works on it.
        """
        self.folder = folder
        head = folder / "question.json"
        wanted = {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(question))}
        if head.is_file():
            _check_question(head, wanted)
        else:
            mine = ("question.part", LOCK_FILE)
            if folder.exists() and any(path.name not in mine for path in folder.iterdir()):
                raise ConfigError(
                    f"{folder} holds something that is no evaluation; give this one another name "
                    "with run.name"
                )
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock.acquire(folder)
        if head.is_file():  # Maybe since just now, of another process.
            try:
                _check_question(head, wanted)
            except ConfigError:
                self._lock.release()
                raise
        else:
            part = head.with_suffix(".part")
            part.write_text(json.dumps(wanted, indent=1, sort_keys=True) + "\n")
            os.replace(part, head)
        self.attempts: dict[tuple[str, int], Attempt] = {}
        for attempt in read_attempts(folder):
            self.attempts.setdefault(attempt.key, attempt)
        self._writer = JsonlWriter(folder / ATTEMPTS_FILE)

    def add(self, attempt: Attempt) -> None:
        """Write an attempt; the second of the same key is a bug."""
        assert attempt.key not in self.attempts, f"attempt {attempt.key} was made before"
        self._writer.append(asdict(attempt))
        self.attempts[attempt.key] = attempt

    def close(self) -> None:
        self._writer.close()
        self._lock.release()
