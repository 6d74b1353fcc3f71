"""Weight files of a model folder, written by several processes out of the parts of a model.

Which tensor lies in which file depends on the tensors alone, never on how many write: any number of
writers makes the same bytes. File k belongs to writer k modulo their number; all read the parts of
as many files as there are writers, each keeps and encodes its own, so a writer holds one file and
one part.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class HeldFiles:
    """One writer's share of a model, in memory, for writing later."""

    num_files: int
    """Of all writers together."""
    files: "Mapping[int, Tensors]"

    def write(self, folder: Path, writers: Writers = ALONE) -> Written:
        """Every writer calls it; raises what any of them met."""
        names = file_names(self.num_files)
        try:
            mine = [_write_file(folder, names[k], held) for k, held in self.files.items()]
        except Exception as error:
            writers.agree(error)
            raise
        return _joined(writers.agree(mine))


def hold_files(
    state: "Tensors | StateParts", *, shard_bytes: int = SHARD_BYTES, writers: Writers = ALONE
) -> HeldFiles:
    """This writer's share of a state as it is now. Every writer calls it."""
    held: dict[int, Tensors] = {}
    parts = as_parts(state)
    plan = plan_files(parts.layout, shard_bytes)
    _each_file(parts, plan, writers, encode=dict, finish=held.__setitem__)
    return HeldFiles(len(plan), held)


def write_files(
    state: StateParts,
    folder: Path,
    *,
    encode: "Callable[[Tensors], Tensors]",
    shard_bytes: int = SHARD_BYTES,
    writers: Writers = ALONE,
) -> Written:
    """Encode and write a state, file by file. Every writer calls it.

    Args:
        encode: what lies on disk for the BF16 tensors of a unit.
        shard_bytes: of BF16 tensors in one file; what is encoded may be smaller. A unit that is
            larger has a file of its own.
    Raises:
        Exception: what any writer met; all raise it.
    """
    plan = plan_files(state.layout, shard_bytes)
    names = file_names(len(plan))
    mine: list[tuple[str, FileEntry, dict[str, int]]] = []

    def finish(number: int, tensors: "Tensors") -> None:
        mine.append(_write_file(folder, names[number], tensors))

    try:
        _each_file(state, plan, writers, encode=encode, finish=finish)
    except Exception as error:
        writers.agree(error)
        raise
    return _joined(writers.agree(mine))


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
    *,
    encode: "Callable[[Tensors], Tensors]",
    finish: "Callable[[int, Tensors], None]",
) -> None:
    """`finish(number, tensors)` for each file of this writer.

    An error here does not end the reading: the others need this writer for their parts.
    """
    failure: Exception | None = None
    for start in range(0, len(plan), writers.size):
        turn = plan[start : start + writers.size]
        mine: dict[str, Tensor] = {}
        for units in zip_longest(*turn, fillvalue=()):
            held: dict[str, Tensor] = {}
            for owner, unit in enumerate(units):
                for part in unit:
                    tensors = state.read(part)
                    if owner == writers.rank:
                        held |= tensors
            if failure is None and held:
                try:
                    mine |= encode(held)
                except Exception as error:
                    failure = error
        if failure is None and writers.rank < len(turn):
            try:
                finish(start + writers.rank, mine)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure


def _write_file(
    folder: Path, name: str, tensors: "Tensors"
) -> tuple[str, FileEntry, dict[str, int]]:
    """(file, entry, bytes of each tensor)"""
    from safetensors.torch import save_file

    path = folder / name
    save_file(dict(tensors), path, metadata={"format": "pt"})
    sync_path(path)
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in tensors.items()}
    return name, hash_file(path), sizes


def _joined(found: list[list[tuple[str, FileEntry, dict[str, int]]]]) -> Written:
    files = sorted((name, entry, sizes) for part in found for name, entry, sizes in part)
    total = sum(size for _, _, sizes in files for size in sizes.values())
    weight_map = {key: name for name, _, sizes in files for key in sizes}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Written({name: entry for name, entry, _ in files}, json.dumps(index, indent=2).encode())
