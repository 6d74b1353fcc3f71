"""What a comparison found, as data: frozen, and the same for terminal, JSON, Markdown and HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rlmix.diff.gate import Obstacle
from rlmix.diff.statistics import Gap, gap

NONE = "none"
"""Verdict and class where nothing differs."""
UNKNOWN = "inconclusive"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One operator that differs on the same inputs, over all its layers."""

    operator: str
    layers: tuple[int, ...]
    verdict: str
    cause: str
    evidence: str
    confidence: float
    share: float
    """Of the difference, 0 to 1; all operators together have 1."""
    alone: float
    """Nats that it moves the trainer's logprobs by, alone."""
    left: float
    """Nats left when the pool takes the trainer's operator."""
    next_experiment: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFinding:
    """One pool against the trainer."""

    name: str
    numerics: str
    groups: Mapping[str, str]
    """What pools are grouped by (accelerator, view, activations, kv, attention) -> value."""
    total: Gap
    """Trainer against recorded."""
    edges: Mapping[str, Gap]
    """trainer_prefill, prefill_decode, decode_recorded."""
    tolerance_nats: float
    must_be_equal: bool
    """Exact mode: a single other bit is too much."""
    causes: tuple[Cause, ...]
    hints: tuple[str, ...]
    assembly_max_abs: float | None
    """Largest difference of the operators in order to the real decode; None: not diagnosed."""
    first_difference: str | None
    """See `diagnose.Diagnosis`."""
    heat_LT: np.ndarray | None
    """float32 [layers, tokens of the traced text], relative distance of the residual stream."""
    trainer_P: np.ndarray
    recorded_P: np.ndarray
    positions_P: np.ndarray
    is_judged: bool
    """False: only measured, or not diagnosable from here."""

    @property
    def is_within(self) -> bool:
        if self.must_be_equal:
            return self.total.mismatch_count == 0
        return self.total.mean_abs <= self.tolerance_nats

    @property
    def by_class(self) -> dict[str, float]:
        """Class -> share, largest first."""
        found: dict[str, float] = {}
        for cause in self.causes:
            found[cause.cause] = found.get(cause.cause, 0.0) + cause.share
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    @property
    def main_class(self) -> str:
        if self.total.mismatch_count == 0:
            return NONE
        return next(iter(self.by_class), UNKNOWN)

    @property
    def verdict(self) -> str:
        if self.main_class in (NONE, UNKNOWN):
            return self.main_class
        return next(c.verdict for c in self.causes if c.cause == self.main_class)

    def to_dict(self) -> dict[str, object]:
        return {
            **self.total.to_dict(),
            "numerics": self.numerics,
            "groups": dict(self.groups),
            "verdict": self.verdict,
            "class": self.main_class,
            "share": self.by_class.get(self.main_class, 0.0),
            "by_class": self.by_class,
            "causes": [asdict(cause) for cause in self.causes],
            "edges": {name: gap.to_dict() for name, gap in self.edges.items()},
            "hints": list(self.hints),
            "tolerance_nats": 0.0 if self.must_be_equal else self.tolerance_nats,
            "is_within": self.is_within,
            "assembly_max_abs": self.assembly_max_abs,
            "first_difference": self.first_difference,
        }


def gap_of(pools: Sequence[PoolFinding]) -> Gap | None:
    """The gap over all tokens of all pools; None when nothing could be compared."""
    if not pools:
        return None
    return gap(
        np.concatenate([one.trainer_P for one in pools]),
        np.concatenate([one.recorded_P for one in pools]),
        np.concatenate([one.positions_P for one in pools]),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffReport:
    """A whole comparison."""

    source: str
    """Where the texts come from."""
    total: Gap | None
    """As `gap_of` gives it for the pools."""
    noise: Mapping[str, float]
    """What was done twice -> mean |difference|, nats."""
    pools: tuple[PoolFinding, ...]
    obstacles: tuple[Obstacle, ...]
    not_tested: tuple[str, ...]
    machine: Mapping[str, str]

    @property
    def tokens(self) -> int:
        return 0 if self.total is None else self.total.tokens

    @property
    def mismatch_count(self) -> int:
        return 0 if self.total is None else self.total.mismatch_count

    @property
    def noise_floor(self) -> float:
        """Nats: mean difference of two evaluations of the same weights by the trainer."""
        return max(self.noise.values(), default=0.0)

    @property
    def is_within(self) -> bool:
        return all(pool.is_within for pool in self.pools)

    @property
    def is_conclusive(self) -> bool:
        """False when a pool is beyond its limit and nobody can say why."""
        return all(p.is_within or p.main_class != UNKNOWN or not p.is_judged for p in self.pools)

    def by_group(self) -> dict[str, dict[str, dict[str, float]]]:
        """Key -> value -> tokens, tokens that differ and mean |d| of all pools that have it."""
        found: dict[str, dict[str, list[PoolFinding]]] = {}
        for pool in self.pools:
            for key, value in pool.groups.items():
                found.setdefault(key, {}).setdefault(value, []).append(pool)
        return {
            key: {value: _together(pools) for value, pools in values.items()}
            for key, values in found.items()
        }

    def to_dict(self) -> dict[str, object]:
        total = {} if self.total is None else self.total.to_dict()
        return {
            **total,
            "source": self.source,
            "tokens": self.tokens,
            "mismatch_count": self.mismatch_count,
            "mean_abs": 0.0 if self.total is None else self.total.mean_abs,
            "noise_floor": self.noise_floor,
            "noise": dict(self.noise),
            "by_group": self.by_group(),
            "by_pool": {pool.name: pool.to_dict() for pool in self.pools},
            "is_comparable": not self.obstacles,
            "obstacles": [asdict(obstacle) for obstacle in self.obstacles],
            "not_tested": list(self.not_tested),
            "machine": dict(self.machine),
        }


def _together(pools: list[PoolFinding]) -> dict[str, float]:
    tokens = sum(pool.total.tokens for pool in pools)
    return {
        "tokens": tokens,
        "mismatch_count": sum(pool.total.mismatch_count for pool in pools),
        "mean_abs": sum(pool.total.tokens * pool.total.mean_abs for pool in pools) / tokens,
    }
