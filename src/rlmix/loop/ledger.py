"""`sessions.jsonl`: a line when a session begins, one when it ends, and what becomes of groups.

Invariant: every session that was begun has exactly one end in the same attempt, unless the attempt
itself ended without notice; then the next one hands its place out again.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlmix.core.trajectory import Outcome, Trajectory
from rlmix.observe.jsonl import JsonlWriter

LEDGER_FILE = "sessions.jsonl"
BEGUN, FINISHED, VOID, CUT_OFF = "begun", "finished", "void", "cut_off"
ENDS = (FINISHED, VOID, CUT_OFF)
TRAINED, STALE, TOO_VOID = "trained", "stale", "too_void"


class SessionLedger:
    """Written by the rollout; closed with the run."""

    def __init__(self, folder: Path, *, attempt: int) -> None:
        self._writer = JsonlWriter(folder / LEDGER_FILE)
        self._attempt = attempt

    def begun(self, session: str) -> None:
        self._append(session=session, what=BEGUN)

    def ended(self, session: str, trajectory: Trajectory) -> None:
        """With its verdict, or void with the reason."""
        is_void = trajectory.outcome is Outcome.VOID
        self._append(
            session=session,
            what=VOID if is_void else FINISHED,
            reason=trajectory.void_reason or trajectory.stop_reason.value,
            rehomed=trajectory.rehomed,
            pools=sorted({turn.pool for turn in trajectory.turns}),
        )

    def cut_off(self, session: str) -> None:
        """The rollout ended under it."""
        self._append(session=session, what=CUT_OFF)

    def group(self, group: str, what: str) -> None:
        """`trained`, or why it was not."""
        self._append(group=group, what=what)

    def close(self) -> None:
        self._writer.close()

    def _append(self, **fields: Any) -> None:
        self._writer.append({**fields, "attempt": self._attempt})


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """All sessions of a run over all attempts."""

    begun: int
    finished: int
    rehomed: int
    """Finished, after a move to another replica."""
    void: int
    cut_off: int
    """Under way when the rollout ended in order."""
    lost_with_controller: int
    """Under way when an attempt ended without notice; the next one hands their places out again."""
    missing: int
    """Begun in an attempt that ended in order, and never ended."""
    twice: int
    """Begun or ended more than once in one attempt, or ended without having begun."""
    groups: Mapping[str, int]
    """What became of groups -> how many."""

    @property
    def is_sound(self) -> bool:
        ends = self.finished + self.void + self.cut_off + self.lost_with_controller
        return self.missing == 0 and self.twice == 0 and self.begun == ends

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_sound": self.is_sound}


def account(lines: Iterable[Mapping[str, Any]], *, ended_in_order: Iterable[int]) -> Account:
    """Add a ledger up.

    Args:
        ended_in_order: numbers of the attempts that ended themselves; the others were killed.
    """
    begun: Counter[tuple[int, str]] = Counter()
    ends: defaultdict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    groups: Counter[str] = Counter()
    for line in lines:
        if "group" in line:
            groups[line["what"]] += 1
            continue
        key = (int(line["attempt"]), str(line["session"]))
        if line["what"] == BEGUN:
            begun[key] += 1
        else:
            ends[key].append(line)
    in_order = set(ended_in_order)
    open_keys = [key for key in begun if key not in ends]
    missing = sum(key[0] in in_order for key in open_keys)
    kinds = Counter(found[0]["what"] for found in ends.values())
    return Account(
        begun=len(begun),
        finished=kinds[FINISHED],
        rehomed=sum(f[0]["what"] == FINISHED and f[0]["rehomed"] > 0 for f in ends.values()),
        void=kinds[VOID],
        cut_off=kinds[CUT_OFF],
        lost_with_controller=len(open_keys) - missing,
        missing=missing,
        twice=sum(number > 1 for number in begun.values())
        + sum(len(found) > 1 or key not in begun for key, found in ends.items()),
        groups=dict(groups),
    )
