"""Which combinations of chip, formats and kernels work in SGLang, and why others do not.

Pure: rows of facts in, a judgement on one combination out. The rows are data in `plan.matrix`, each
with a reason and a public source. Invariant: a refusal names the chip, the cause and a change that
works; tests apply every such change and judge again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SGLANG_VERSION = "0.5.23"
"""The version whose source the rows and the launch profiles were read in."""

WORKS = "works"
NOTE = "note"
REFUSED = "refused"
UNKNOWN = "unknown"
"""Verdicts; `unknown`: nothing is known against it, and nobody is known to have run it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One pool as the matrix sees it. Fields have the names of the pool's keys."""

    accelerator: str
    architecture: str
    weights: str
    activations: str
    kv: str
    attention: str
    linear_attention: str
    state: str
    moe: str
    consistency: str = "native"
    record_experts: str = "false"
    is_moe: bool = True
    is_hybrid: bool = True
    version: str = SGLANG_VERSION


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One fact about a set of combinations."""

    name: str
    verdict: str
    when: Mapping[str, tuple[str, ...]]
    """Field -> values; all named fields must match, others are free."""
    reason: str
    source: str
    instead: tuple[Mapping[str, str], ...] = ()
    """Changes of pool keys, each of which works; the best first. Every refusal has one."""
    since: str = "0"
    before: str | None = None
    """SGLang versions that the fact is about: from `since` on, and below `before`."""

    def matches(self, combination: Combination) -> bool:
        if not _version(self.since) <= _version(combination.version):
            return False
        if self.before is not None and _version(combination.version) >= _version(self.before):
            return False
        if not combination.is_moe and "moe" in self.when:
            return False
        if not combination.is_hybrid and {"linear_attention", "state"} & set(self.when):
            return False
        return all(getattr(combination, key) in values for key, values in self.when.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    verdict: str
    """The worst of the rows that match."""
    refusals: tuple[Row, ...]
    notes: tuple[Row, ...]
    evidence: tuple[Row, ...]
    """Rows that say it works."""


def judge(combination: Combination, rows: Sequence[Row]) -> Judgement:
    """Everything that the rows say about a combination."""
    matching = [row for row in rows if row.matches(combination)]
    by_verdict = {
        verdict: tuple(row for row in matching if row.verdict == verdict)
        for verdict in (REFUSED, NOTE, WORKS)
    }
    worst = UNKNOWN
    if by_verdict[REFUSED]:
        worst = REFUSED
    elif by_verdict[NOTE] and by_verdict[WORKS]:
        worst = NOTE
    elif by_verdict[WORKS]:
        worst = WORKS
    return Judgement(
        verdict=worst,
        refusals=by_verdict[REFUSED],
        notes=by_verdict[NOTE],
        evidence=by_verdict[WORKS],
    )


def refusal_text(pool: str, combination: Combination, row: Row) -> str:
    """One line: where, on which chip, why, and what works."""
    asked = [
        f"{key}={getattr(combination, key)}"
        for key in ("weights", "activations", "kv", "attention", "linear_attention", "state", "moe")
        if key in row.when
    ]
    changes = " or ".join(
        " ".join(f"pools.{pool}.{key}={value}" for key, value in change.items())
        for change in row.instead
    )
    chip = f"{combination.accelerator} ({combination.architecture})"
    what = " ".join(asked) or "this"
    return f"pools.{pool}: {what} on {chip}: {row.reason}; set {changes} ({row.source})"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())
