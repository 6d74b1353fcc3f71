"""Weight files of a model folder, written by several processes out of the parts of a model.

Which tensor lies in which file depends on the tensors alone, never on how many write: any number of
writers makes the same bytes. File k belongs to writer k modulo their number; all read the parts of
as many files as there are writers, once for all views; each keeps and encodes its own, so a writer
holds one file of each view and one part.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rlmix.weights.manifest import FileEntry, hash_file, sync_path
from rlmix.weights.parts import StateParts, as_parts
from rlmix.weights.writers import ALONE, Writers

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = Mapping[str, Tensor]

WEIGHTS_FILE = "model.safetensors"

SHARD_BYTES = 5 * 10**9
"""Five gigabytes, as Hugging Face cuts checkpoints."""

Unit = tuple[int, ...]
"""Numbers of parts that are encoded together, because some of their matrices share a scale."""


@dataclass(frozen=True, slots=True)
class Written:
    """The weight files of one folder, those of all writers."""

    entries: dict[str, FileEntry]
    index: bytes
    """What names the file of every tensor; it is not on disk yet."""
    seconds: float
    """Encoding and writing, of the slowest writer."""


class HeldFiles:
    """One writer's share of a model, in memory, for writing later."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._files: dict[int, Tensors] = {}
        self.failure: Exception | None = None

    def take(self, number: int, tensors: "Tensors") -> None:
        self._files[number] = {**self._files.get(number, {}), **tensors}

    def finish(self, number: int) -> None:
        """It stays in memory."""

    def write(self, folder: Path, writers: Writers = ALONE) -> Written:
        """Every writer calls it; raises what any of them met."""
        view = _View(folder, dict, self._names)
        for number, tensors in self._files.items():
            _guarded(view, partial(view.take, number, tensors))
            _guarded(view, partial(view.finish, number))
        return _joined(writers.agree(view.mine()))


def hold_files(
    state: "Tensors | StateParts", *, shard_bytes: int = SHARD_BYTES, writers: Writers = ALONE
) -> HeldFiles:
    """This writer's share of a state as it is now. Every writer calls it."""
    parts = as_parts(state)
    plan = plan_files(parts.layout, shard_bytes)
    held = HeldFiles(file_names(len(plan)))
    _each_file(parts, plan, writers, [held])
    if held.failure is not None:
        raise held.failure
    return held


def write_files(
    state: StateParts,
    views: "Sequence[tuple[Path, Callable[[Tensors], Tensors]]]",
    *,
    shard_bytes: int = SHARD_BYTES,
    writers: Writers = ALONE,
) -> list[Written | Exception]:
    """Encode and write a state in several views, file by file. Every writer calls it.

    Args:
        views: folder, and what lies on disk there for the BF16 tensors of a unit.
        shard_bytes: of BF16 tensors in one file; what is encoded may be smaller. A unit that is
            larger has a file of its own.
    Returns:
        For each view what all have written, or what the first of them met: the others go on.
    """
    plan = plan_files(state.layout, shard_bytes)
    takers = [_View(folder, encode, file_names(len(plan))) for folder, encode in views]
    _each_file(state, plan, writers, takers)
    found = writers.gather([taker.mine() for taker in takers])
    return [_outcome(shares) for shares in zip(*found, strict=True)]


def _outcome(shares: "Sequence[_Share | Exception]") -> Written | Exception:
    for share in shares:
        if isinstance(share, Exception):
            return share
    return _joined([share for share in shares if isinstance(share, _Share)])


@dataclass(frozen=True, slots=True)
class _Share:
    """What one writer wrote of one view."""

    files: list[tuple[str, FileEntry, dict[str, int]]]
    """Name, entry, bytes of each tensor."""
    seconds: float


class _View:
    """Encodes and writes one view's files of this writer."""

    def __init__(
        self, folder: Path, encode: "Callable[[Tensors], Tensors]", names: Sequence[str]
    ) -> None:
        self._folder = folder
        self._encode = encode
        self._names = names
        self._encoded: dict[str, Tensor] = {}
        self._files: list[tuple[str, FileEntry, dict[str, int]]] = []
        self._seconds = 0.0
        self.failure: Exception | None = None

    def take(self, number: int, tensors: "Tensors") -> None:
        started_s = time.perf_counter()
        self._encoded |= self._encode(tensors)
        self._seconds += time.perf_counter() - started_s

    def finish(self, number: int) -> None:
        from safetensors.torch import save_file

        started_s = time.perf_counter()
        path = self._folder / self._names[number]
        save_file(self._encoded, path, metadata={"format": "pt"})
        sync_path(path)
        sizes = {name: t.numel() * t.element_size() for name, t in self._encoded.items()}
        self._files.append((path.name, hash_file(path), sizes))
        self._encoded = {}
        self._seconds += time.perf_counter() - started_s

    def mine(self) -> _Share | Exception:
        return _Share(self._files, self._seconds) if self.failure is None else self.failure


def _joined(shares: Sequence[_Share]) -> Written:
    files = sorted(file for share in shares for file in share.files)
    total = sum(size for _, _, sizes in files for size in sizes.values())
    weight_map = {name: file for file, _, sizes in files for name in sizes}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Written(
        {file: entry for file, entry, _ in files},
        json.dumps(index, indent=2).encode(),
        max(share.seconds for share in shares),
    )


def plan_files(layout: "Sequence[Tensors]", shard_bytes: int) -> list[list[Unit]]:
    """The units of each file, in the order of the parts."""
    from rlmix.numerics.views import shared_scales, split_experts

    first = list(range(len(layout)))
    part_of = {
        name: number for number, part in enumerate(layout) for name, _ in split_experts(part)
    }
    for group in shared_scales(part_of):
        together = {first[part_of[name]] for name in group}
        if len(together) > 1:
            first = [min(together) if number in together else number for number in first]
    units: dict[int, list[int]] = {}
    for number, beginning in enumerate(first):
        units.setdefault(beginning, []).append(number)
    files: list[list[Unit]] = []
    left = 0
    for unit in units.values():
        size = sum(t.numel() * t.element_size() for part in unit for t in layout[part].values())
        if not files or size > left:
            files.append([])
            left = shard_bytes
        files[-1].append(tuple(unit))
        left -= size
    return files


def file_names(count: int) -> list[str]:
    if count == 1:
        return [WEIGHTS_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _each_file(
    state: StateParts,
    plan: Sequence[Sequence[Unit]],
    writers: Writers,
    takers: "Sequence[HeldFiles | _View]",
) -> None:
    """Give each taker the units of this writer's files, and tell it where a file ends."""
    for start in range(0, len(plan), writers.size):
        turn = plan[start : start + writers.size]
        mine = start + writers.rank
        for units in zip_longest(*turn, fillvalue=()):
            held: dict[str, Tensor] = {}
            for owner, unit in enumerate(units):
                for part in unit:
                    tensors = state.read(part)
                    if owner == writers.rank:
                        held |= tensors
            for taker in takers if held else ():
                _guarded(taker, partial(taker.take, mine, held))
        for taker in takers if mine < len(plan) else ():
            _guarded(taker, partial(taker.finish, mine))


def _guarded(taker: "HeldFiles | _View", work: Callable[[], None]) -> None:
    """An error does not end the reading: the others need this writer for their parts."""
    if taker.failure is None:
        try:
            work()
        except Exception as error:
            taker.failure = error
