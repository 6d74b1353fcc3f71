"""What a report is made of, read from a run directory as far as it is there.

Invariant: whatever is missing or damaged becomes a note for the reader, never an exception; a
report is most wanted for a run that went wrong.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rlmix.core.errors import DataError
from rlmix.observe.jsonl import read_jsonl
from rlmix.observe.manifest import Manifest, read_manifest
from rlmix.observe.svg import Points

_POOL_KEY = re.compile(
    r"(?:reward/by_pool/(?P<a>.+)|mismatch/by_pool/(?P<b>.+)/k3_kl"
    r"|cost/by_pool/(?P<c>.+)_usd|pools/(?P<d>.+)/replicas)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFacts:
    """One pool over the whole run; None means not known."""

    name: str
    accelerator: str
    is_emulated: bool | None
    formats: str
    """Weights / activations / KV as planned, e.g. `nvfp4 / bf16 / fp8`."""
    numerics_keys: tuple[str, ...]
    replicas: int | None
    sessions: int
    tokens: int
    reward: float | None
    """Over valid sessions that the pool served."""
    k3_kl: float | None
    """Mean over steps."""
    usd: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    path: Path
    manifest: Manifest | None
    metrics: Sequence[dict[str, Any]]
    events: Sequence[dict[str, Any]]
    index: Sequence[dict[str, Any]]
    """Lines of `trajectories/index.jsonl`."""
    plan: dict[str, Any]
    summary: dict[str, Any]
    notes: tuple[str, ...]
    """What could not be read, for the reader."""

    def column(self, key: str, *, scale: float = 1.0) -> Points:
        """(step, value x scale) of every step that has the number."""
        return [
            (float(row["step"]), scale * row[key])
            for row in self.metrics
            if isinstance(row.get(key), (int, float))
        ]

    def over_time(self, key: str) -> Points:
        """(minutes of run time, value)."""
        return [
            (row["time/run_s"] / 60, float(row[key]))
            for row in self.metrics
            if isinstance(row.get(key), (int, float)) and "time/run_s" in row
        ]

    @property
    def pool_names(self) -> list[str]:
        """In the plan's order; pools that only the metrics know come last."""
        names = dict.fromkeys(self.plan.get("pools", {}))
        for row in self.metrics:
            for key in row:
                match = _POOL_KEY.fullmatch(key)
                if match:
                    names.setdefault(next(group for group in match.groups() if group))
        return list(names)

    @property
    def resumed_at(self) -> list[tuple[float, str]]:
        """(step, text) of the steps from which a later attempt went on."""
        attempts = self.manifest.attempts if self.manifest else ()
        return [
            (attempt.from_step + 0.5, f"resumed after step {attempt.from_step}")
            for attempt in attempts[1:]
        ]

    def counts(self, field: str) -> Counter[str]:
        """Sum of one of the index's count tables over all training steps."""
        total: Counter[str] = Counter()
        for entry in self.index:
            if entry.get("kind", "step") == "step":
                total.update(entry.get(field, {}))
        return total

    def pools(self) -> list[PoolFacts]:
        return [self._pool(name) for name in self.pool_names]

    def _pool(self, name: str) -> PoolFacts:
        planned = self.plan.get("pools", {}).get(name, {})
        served = [
            entry["pools"][name]
            for entry in self.index
            if entry.get("kind", "step") == "step" and name in entry.get("pools", {})
        ]
        keys = dict.fromkeys(key for part in served for key in part.get("numerics_keys", ()))
        valid = sum(part.get("valid", 0) for part in served)
        formats = [planned.get(part) for part in ("weights", "activations", "kv")]
        costs = [value for _, value in self.column(f"cost/by_pool/{name}_usd")]
        k3 = [value for _, value in self.column(f"mismatch/by_pool/{name}/k3_kl")]
        return PoolFacts(
            name=name,
            accelerator=str(planned.get("accelerator", name)),
            is_emulated=_is_emulated(planned, list(keys)),
            formats=" / ".join(str(part) for part in formats if part),
            numerics_keys=tuple(keys),
            replicas=planned.get("replicas"),
            sessions=sum(part.get("sessions", 0) for part in served),
            tokens=sum(part.get("tokens", 0) for part in served),
            reward=sum(part["reward_sum"] for part in served) / valid if valid else None,
            k3_kl=sum(k3) / len(k3) if k3 else None,
            usd=sum(costs) if costs else None,
        )


def read_report_data(path: Path) -> ReportData:
    notes: list[str] = []
    try:
        manifest = read_manifest(path)
    except DataError as error:
        manifest = None
        notes.append(str(error))
    metrics = [row for row in _lines(path / "metrics.jsonl", notes) if "step" in row]
    if not metrics:
        notes.append("metrics.jsonl has no step: there is nothing to plot yet")
    elif len(metrics) < 3:
        notes.append(f"metrics.jsonl has only {len(metrics)} step(s): plots show single points")
    return ReportData(
        path=path,
        manifest=manifest,
        metrics=metrics,
        events=_lines(path / "events.jsonl", notes),
        index=_lines(path / "trajectories" / "index.jsonl", notes),
        plan=read_document(path / "plan.json", notes),
        summary=read_document(path / "summary.json", notes, is_expected=False),
        notes=tuple(notes),
    )


def _is_emulated(planned: dict[str, Any], keys: Sequence[str]) -> bool | None:
    """What the replicas said about themselves; before they did, what engine was planned."""
    if keys:
        return any(key.endswith("/emulated") for key in keys)
    if "is_emulated" in planned:
        return bool(planned["is_emulated"])
    return planned["engine"] == "embedded" if "engine" in planned else None


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    try:
        if not path.exists():
            notes.append(f"{path.name} is missing")
        for record in read_jsonl(path):
            records.append(record)
    except (DataError, OSError) as error:
        notes.append(f"{error}; the lines after it are left out")
    return records


def read_document(path: Path, notes: list[str], *, is_expected: bool = True) -> dict[str, Any]:
    try:
        document = orjson.loads(path.read_bytes())
        return document if isinstance(document, dict) else {}
    except FileNotFoundError:
        if is_expected:
            notes.append(f"{path.name} is missing")
    except (orjson.JSONDecodeError, OSError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
    return {}
