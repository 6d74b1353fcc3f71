"""Texts of a finished run: what its pools recorded, beside the weights that sampled them."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

import numpy as np

from rlmix.core.candidates import Candidates
from rlmix.core.errors import DataError
from rlmix.core.trajectory import Trajectory, Turn
from rlmix.diff.texts import Recorded
from rlmix.observe.trajectories import read_trajectories
from rlmix.weights.store import list_versions, version_dir


def bf16_versions(run: Path) -> dict[int, Path]:
    """Version -> folder of its BF16 weights, those still there."""
    store = run / "weights"
    return {
        version: version_dir(store, "bf16", version) for version in list_versions(store, "bf16")
    }


def recorded_texts(
    run: Path, pools: Sequence[str], *, versions: Sequence[int], most: int
) -> tuple[int, list[Recorded]]:
    """The newest version that sessions of every asked pool begin with, and `most` texts of each.

    Raises:
        DataError: no session begins with a version whose weights are still there.
    """
    found: dict[int, dict[str, list[Recorded]]] = {}
    for path in sorted((run / "trajectories").glob("step_*.jsonl"), reverse=True):
        for trajectory in read_trajectories(path):
            text = recorded_of(trajectory)
            if text is None or text.version not in versions or text.pool not in pools:
                continue
            assert text.version is not None
            found.setdefault(text.version, {}).setdefault(text.pool, []).append(text)
    for version in sorted(found, reverse=True):
        if set(found[version]) == set(pools):
            return version, [one for texts in found[version].values() for one in texts[:most]]
    some = max(found, key=lambda version: len(found[version]), default=None)
    if some is None:
        raise DataError(
            f"{run}: no session begins with a version whose BF16 weights are still there "
            f"({', '.join(map(str, versions)) or 'none'}); keep more with weights.keep"
        )
    return some, [one for texts in found[some].values() for one in texts[:most]]


def recorded_of(trajectory: Trajectory) -> Recorded | None:
    """A session up to the first turn that another pool or version had a part in; None when that
    is the first turn, or nothing was sampled."""
    turns = list(takewhile(_same_as(trajectory.turns), trajectory.turns))
    if not turns:
        return None
    ids = list(trajectory.prompt_ids)
    sampled: list[int] = []
    logprobs: list[float] = []
    prefilled: list[tuple[int, int]] = []
    for turn in turns:
        prefilled.append((turn.cached_tokens, len(ids)))
        sampled += range(len(ids), len(ids) + len(turn.output_ids))
        logprobs += turn.sampler_logprobs
        ids += [*turn.output_ids, *turn.observation_ids]
    return Recorded(
        name=trajectory.session_id,
        pool=turns[0].pool,
        ids=tuple(ids[: sampled[-1] + 1]),
        sampled=tuple(sampled),
        logprobs_P=np.array(logprobs, dtype=np.float32),
        prefilled=tuple(prefilled),
        kept=_joined(turns),
        version=turns[0].version_spans[0].version,
    )


def _same_as(turns: Sequence[Turn]) -> Callable[[Turn], bool]:
    """Whether the first one's pool and version sampled a turn, whole, and it was recorded alike."""

    def facts(turn: Turn) -> tuple[str, frozenset[int], bool]:
        versions = frozenset(span.version for span in turn.version_spans)
        return turn.pool, versions, turn.kept is not None and turn.kept_exact

    wanted = facts(turns[0]) if turns else None

    def is_same(turn: Turn) -> bool:
        return facts(turn) == wanted and len(facts(turn)[1]) == 1 and bool(turn.output_ids)

    return is_same


def _joined(turns: Sequence[Turn]) -> Candidates | None:
    """Exact kept sets of all turns, one after another."""
    sets = [turn.kept for turn in turns if turn.kept is not None and turn.kept_exact]
    if not sets:
        return None
    sizes = np.concatenate([one.sizes for one in sets])
    return Candidates(
        offsets=np.concatenate(([0], sizes.cumsum())).astype(np.int64),
        ids=np.concatenate([one.ids for one in sets]),
        logprobs=np.concatenate([one.logprobs for one in sets]),
    )
