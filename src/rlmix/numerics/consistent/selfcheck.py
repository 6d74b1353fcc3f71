"""Does this machine keep what the operators rely on? Asked before anything is called exact.

Elementwise operations keep their promises everywhere; matrix products and row sums are only known
to treat equal rows equally because somebody looked. This looks: at the shapes of the model in
question, with the threads of this process, in well under a second.
"""

# M rows, K inputs, N outputs

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.numerics.consistent.attention import attend, plan_attention
from rlmix.numerics.consistent.contract import TREE_LEAVES, Tiling, min_rows
from rlmix.numerics.consistent.head import VOCAB_TILE, vocab_tiles
from rlmix.numerics.consistent.linear import linear, row_parallel_linear
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors

REFERENCE_ROWS = 96
EXTRA_ROWS = (1, 2, 3, 4, 5, 7, 11, 12, 17, 19, 27, 33, 95)
"""Numbers of rows that met another kernel in some library or with some number of threads."""

MAX_OUTPUTS = 2 * VOCAB_TILE
"""Wider products are looked at up to here; the head is multiplied in tiles anyway."""

THREADED_ROWS = (REFERENCE_ROWS, 509)
"""Rows whose product with several threads is compared with that of one: the engine has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfCheck:
    """What was found; `failures` is empty when the premise holds."""

    failures: tuple[str, ...]
    num_comparisons: int
    seconds: float
    isa: str
    blas: str
    threads: int

    @property
    def is_exact(self) -> bool:
        return not self.failures

    def refusal(self) -> str:
        """One sentence for a user; only where something failed."""
        return (
            f"this machine ({self.isa}, {self.blas}, threads={self.threads}) does not add equal "
            f"rows equally, so nothing here can be exact: {self.failures[0]}, and "
            f"{len(self.failures) - 1} more of {self.num_comparisons} comparisons failed"
        )


def check_model(
    tensors: ModelTensors, spec: ModelSpec, *, tiling: Tiling, processes: int = 1
) -> SelfCheck:
    """`self_check` with the shapes of a whole model.

    Args:
        processes: among which its outputs and sums are split.
    Raises:
        ValueError: the model's sums cannot be cut into TREE_LEAVES.
    """
    vocab, hidden = tensors.head.shape
    tiles = {last - first for first, last in vocab_tiles(vocab)}
    undivided_shapes = [(hidden, width) for width in sorted(tiles)]
    linear_shapes, row_parallel_shapes = [], []
    for layer in tensors.layers:
        linear_shapes.append(_sizes(layer.qkv))
        row_parallel_shapes.append(_sizes(layer.out))
        if layer.router is None:
            linear_shapes.append(_sizes(layer.gate_up))
            row_parallel_shapes.append(_sizes(layer.down))
        else:
            undivided_shapes += [_sizes(w) for w in (layer.router, layer.gate_up, layer.down)]
    uneven = sorted({inputs for inputs, _ in row_parallel_shapes if inputs % TREE_LEAVES})
    if uneven:
        raise ValueError(
            f"the model adds over {', '.join(map(str, uneven))} channels (attention outputs or "
            f"inner channels of a dense layer), which are not {TREE_LEAVES} equal runs"
        )
    return self_check(
        linear_shapes=linear_shapes,
        row_parallel_shapes=row_parallel_shapes,
        undivided_shapes=undivided_shapes,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        tiling=tiling,
        processes=processes,
    )


def _sizes(weight: Tensor) -> tuple[int, int]:
    """Inputs and outputs of a weight, or of each of several."""
    return weight.shape[-1], weight.shape[-2]


def self_check(
    *,
    linear_shapes: Sequence[tuple[int, int]],
    row_parallel_shapes: Sequence[tuple[int, int]],
    undivided_shapes: Sequence[tuple[int, int]] = (),
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tiling: Tiling,
    processes: int = 1,
) -> SelfCheck:
    """Compare few rows with many, bit for bit, and this process's threads with one.

    Args:
        linear_shapes: (inputs, outputs) of every product whose outputs processes may share.
        row_parallel_shapes: the same for products cut into TREE_LEAVES.
        undivided_shapes: those that every process does whole (experts, routers, the head).
        processes: a part of the outputs is compared with the whole where there are several; parts
            of narrow products meet another kernel on some machines.
    """
    started_s = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    checks: list[tuple[str, bool]] = []
    with torch.inference_mode():
        for inputs, outputs in dict.fromkeys(linear_shapes):
            checks += _check_linear(inputs, outputs, generator)
            if processes > 1:
                checks += _check_part(inputs, outputs, processes, generator)
        for inputs, outputs in dict.fromkeys(undivided_shapes):
            checks += _check_linear(inputs, outputs, generator)
        for inputs, outputs in dict.fromkeys(row_parallel_shapes):
            checks += _check_tree(inputs, outputs, generator)
        checks += _check_attention(num_heads, num_kv_heads, head_dim, tiling, generator)
        checks += _check_exp(generator)
    failures = tuple(name for name, holds in checks if not holds)
    return SelfCheck(
        failures=failures,
        num_comparisons=len(checks),
        seconds=time.perf_counter() - started_s,
        isa=torch.backends.cpu.get_cpu_capability(),
        blas="mkl" if torch.backends.mkl.is_available() else "other",
        threads=torch.get_num_threads(),
    )


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _check_linear(inputs: int, outputs: int, generator: torch.Generator) -> list[tuple[str, bool]]:
    outputs = min(outputs, MAX_OUTPUTS)
    x, weight = _random(generator, REFERENCE_ROWS, inputs), _random(generator, outputs, inputs)
    whole = linear(x, weight)
    checks = [
        (
            f"linear {inputs}x{outputs}: {rows} rows differ from {REFERENCE_ROWS}",
            torch.equal(linear(x[-rows:], weight), whole[-rows:]),
        )
        for rows in EXTRA_ROWS
    ]
    few = x[: min_rows()]
    batched = torch.bmm(few[None].expand(3, -1, -1), weight.t()[None].expand(3, -1, -1))
    name = f"linear {inputs}x{outputs}: a batched product differs"
    checks.append((name, torch.equal(batched[2], whole[: min_rows()])))
    many = _random(generator, max(THREADED_ROWS), inputs)
    what = f"linear {inputs}x{outputs}"
    checks += _check_threads(what, lambda rows: linear(many[:rows], weight), THREADED_ROWS)
    return checks


def _check_part(
    inputs: int, outputs: int, processes: int, generator: torch.Generator
) -> list[tuple[str, bool]]:
    outputs = min(outputs, MAX_OUTPUTS)
    x, weight = _random(generator, REFERENCE_ROWS, inputs), _random(generator, outputs, inputs)
    part = outputs // processes
    found = F.linear(x, weight[:part])
    name = f"linear {inputs}x{outputs}: {part} of the outputs alone differ"
    return [(name, torch.equal(found, linear(x, weight)[:, :part]))]


def _check_threads(
    what: str, compute: Callable[[int], Tensor], sizes: Sequence[int]
) -> Iterator[tuple[str, bool]]:
    """Does `compute(size)` give with this process's threads what it gives with one?"""
    threads = torch.get_num_threads()
    if threads == 1:
        return
    for size in sizes:
        found = compute(size)
        torch.set_num_threads(1)
        try:
            expected = compute(size)
        finally:
            torch.set_num_threads(threads)
        yield (
            f"{what}: {threads} threads differ from one ({size} rows)",
            torch.equal(found, expected),
        )


def _check_tree(inputs: int, outputs: int, generator: torch.Generator) -> list[tuple[str, bool]]:
    x, weight = _random(generator, REFERENCE_ROWS, inputs), _random(generator, outputs, inputs)
    whole = row_parallel_linear(x, weight, leaves=TREE_LEAVES)
    checks = [
        (
            f"row-parallel {inputs}x{outputs}: {rows} rows differ from {REFERENCE_ROWS}",
            torch.equal(row_parallel_linear(x[:rows], weight, leaves=TREE_LEAVES), whole[:rows]),
        )
        for rows in EXTRA_ROWS
    ]
    middle = inputs // 2
    left, right = (
        row_parallel_linear(x[:, span].contiguous(), weight[:, span].contiguous(), leaves=2)
        for span in (slice(0, middle), slice(middle, None))
    )
    what = f"row-parallel {inputs}x{outputs}"
    checks.append((f"{what}: two processes differ from one", torch.equal(left + right, whole)))
    many = _random(generator, max(THREADED_ROWS), inputs)
    checks += _check_threads(
        what,
        lambda rows: row_parallel_linear(many[:rows], weight, leaves=TREE_LEAVES),
        THREADED_ROWS,
    )
    return checks


def _check_attention(
    num_heads: int, num_kv_heads: int, head_dim: int, tiling: Tiling, generator: torch.Generator
) -> list[tuple[str, bool]]:
    length = tiling.kv_tile + tiling.query_tile + 3
    groups = num_heads // num_kv_heads
    queries = _random(generator, 1, length, num_heads, head_dim)
    keys = _random(generator, 1, num_kv_heads, tiling.padded(length), head_dim)
    values = _random(generator, 1, num_kv_heads, tiling.padded(length), head_dim)

    def rows(first: int, last: int, tiling: Tiling = tiling) -> Tensor:
        positions = torch.arange(first, last)[None]
        plan = plan_attention(positions, groups=groups, tiling=tiling)
        return attend(queries[:, first:last], keys, values, plan)

    # All queries in one tile need every key tile whole; alone, a query meets the trims.
    whole = rows(0, length, replace(tiling, query_tile=length))
    edges = {0, 1, length - 1, tiling.kv_tile - 1, tiling.kv_tile, *tiling.trims}
    edges |= {trim - 1 for trim in tiling.trims}
    checks = [
        (
            f"attention: position {at} decoded alone differs from the whole sequence",
            torch.equal(rows(at, at + 1), whole[:, at : at + 1]),
        )
        for at in sorted(edges)
    ]
    checks.append(("attention: tiles of queries differ", torch.equal(rows(0, length), whole)))
    for first, last in ((5, 5 + min_rows() + 1), (tiling.kv_tile - 7, length)):
        name = f"attention: the chunk {first}:{last} differs from the whole sequence"
        checks.append((name, torch.equal(rows(first, last), whole[:, first:last])))
    checks += _check_threads("attention", lambda last: rows(0, last), (40, length))
    return checks


def _check_exp(generator: torch.Generator) -> list[tuple[str, bool]]:
    values = _random(generator, 512)
    whole = values.exp()
    return [
        (f"exp: {count} numbers differ from 512", torch.equal(values[:count].exp(), whole[:count]))
        for count in EXTRA_ROWS
    ]
