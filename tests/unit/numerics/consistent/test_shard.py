"""Tensor parallel 1, 2, 4 and expert parallel 1, 2 as gloo processes: the bits of one process."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rlmix.numerics.consistent.contract import Tiling
from rlmix.numerics.consistent.model import train_hidden
from rlmix.numerics.consistent.shard import (
    Layout,
    check_layout,
    experts_of,
    kv_heads_of,
    named_tensors,
    ranks_of,
    shard_spec,
    shard_tensors,
    tensors_from_names,
)
from tests.unit.numerics.consistent.processes import run_on_ranks
from tests.unit.numerics.consistent.shapes import EXPERTS, VOCAB, new_model, new_spec
from tests.unit.numerics.consistent.stepwise import Piece, SlotEngine

TILING = Tiling(kv_tile=32, trims=(16,), query_tile=8, probs=torch.float32)
LAYOUTS = [Layout(tensor=t, experts=e) for t, e in ((2, 1), (4, 1), (1, 2), (2, 2), (4, 2))]
MODELS = [(moe, dtype) for moe in (False, True) for dtype in (None, torch.bfloat16)]
IDS = np.random.default_rng(5).integers(0, VOCAB, (2, 45))
STEPS = [[(0, 0, 30), (1, 0, 7)], [(0, 30, 31), (1, 7, 40)], [(1, 40, 45)], [(0, 31, 45)]]
"""(sequence, first, last) of the pieces of each step: chunks, single tokens, mixed."""


def name_of(is_moe: bool, dtype: torch.dtype | None, layout: Layout) -> str:
    return f"moe={is_moe} {dtype} tensor={layout.tensor} experts={layout.experts}"


def stepped_on_a_rank(rank: int, store: Any) -> dict[str, np.ndarray]:
    """Hidden states of both sequences for every model and layout that `rank` takes part in."""
    found = {}
    for is_moe, dtype in MODELS:
        tensors, spec, table = new_model(is_moe=is_moe, round_to=dtype)
        for layout in LAYOUTS:
            if rank >= layout.world or (layout.experts > 1 and not is_moe):
                continue
            name = name_of(is_moe, dtype, layout)
            engine = SlotEngine(
                shard_tensors(tensors, spec, layout, rank=rank),
                shard_spec(spec, layout),
                table,
                TILING,
                num_sequences=2,
                capacity=64,
                ranks=ranks_of(
                    layout,
                    rank,
                    num_experts=EXPERTS,
                    store=dist.PrefixStore(name, store),
                    timeout_s=60,
                ),
            )
            rows = [[], []]
            for step in STEPS:
                pieces = [
                    Piece(sequence=s, start=a, ids=torch.from_numpy(IDS[s, a:b]))
                    for s, a, b in step
                ]
                for piece, hidden in zip(pieces, engine.step(pieces), strict=True):
                    rows[piece.sequence].append(hidden)
            found[name] = torch.stack([torch.cat(parts) for parts in rows]).numpy()
    return found


def test_two_and_four_processes_give_the_bits_of_one_for_dense_and_moe() -> None:
    answers = run_on_ranks(stepped_on_a_rank, world=4)
    num_compared = 0
    for is_moe, dtype in MODELS:
        tensors, spec, table = new_model(is_moe=is_moe, round_to=dtype)
        with torch.no_grad():
            one = train_hidden(tensors, spec, torch.from_numpy(IDS), table, tiling=TILING)
        for layout in LAYOUTS:
            if layout.experts > 1 and not is_moe:
                continue
            name = name_of(is_moe, dtype, layout)
            for rank in range(layout.world):
                assert int((answers[rank][name] != one.numpy()).sum()) == 0, (name, rank)
                num_compared += 1
    # (2 + 4) ranks of a dense model, (2 + 4 + 2 + 2 + 4) of one with experts, two dtypes each.
    assert num_compared == 2 * 6 + 2 * 14


def test_a_plain_sum_of_bf16_partial_products_is_not_the_product() -> None:
    """What a layout would do without the tree: the reason for all of this."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator).bfloat16()
    weight = torch.randn(64, 128, generator=generator).bfloat16()
    halves = x[:, :64] @ weight[:, :64].t() + x[:, 64:] @ weight[:, 64:].t()
    assert int((halves != x @ weight.t()).sum()) > 100


def test_groups_hold_every_head_and_every_expert_once() -> None:
    layout = Layout(tensor=4, experts=2)
    assert [layout.tensor_ranks(rank) for rank in (0, 3)] == [[0, 1, 2, 3]] * 2
    assert [layout.expert_ranks(rank) for rank in range(4)] == [[0, 2], [1, 3]] * 2
    assert [experts_of(6, layout, rank) for rank in range(4)] == [range(3)] * 2 + [range(3, 6)] * 2
    layout = Layout(tensor=2, experts=4)
    assert [layout.tensor_ranks(rank) for rank in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert layout.expert_ranks(2) == [0, 1, 2, 3]


def test_with_more_ranks_than_key_heads_neighbours_hold_the_same_one() -> None:
    spec = new_spec(is_moe=False, round_to=None)  # 4 query heads, 2 key heads
    layout = Layout(tensor=4, experts=1)
    assert [kv_heads_of(spec, layout, rank) for rank in range(4)] == [
        range(0, 1),
        range(0, 1),
        range(1, 2),
        range(1, 2),
    ]
    assert shard_spec(spec, layout).num_kv_heads == 1
    assert shard_spec(spec, layout).num_heads == 1


def test_the_rows_of_a_rank_are_its_heads() -> None:
    tensors, spec, _ = new_model(is_moe=False, round_to=None)
    part = shard_tensors(tensors, spec, Layout(tensor=2, experts=1), rank=1)
    whole, ours, dim = tensors.layers[0].qkv, part.layers[0].qkv, spec.head_dim
    # Of 4 query, 2 key and 2 value heads: queries 2 and 3, key 1, value 1.
    assert torch.equal(ours, torch.cat([whole[h * dim : h * dim + dim] for h in (2, 3, 5, 7)]))
    assert part.head is tensors.head


def test_names_carry_a_model_and_bring_it_back() -> None:
    tensors, _, _ = new_model(is_moe=True, round_to=None)
    tied = replace(tensors, head=tensors.embedding)
    assert "head" not in named_tensors(tied)
    back = tensors_from_names(named_tensors(tied))
    assert back.head is back.embedding
    assert back.layers[1].down is tied.layers[1].down


def test_layouts_that_cannot_be_exact_are_refused_with_every_reason() -> None:
    spec = new_spec(is_moe=True, round_to=None, heads=9, kv_heads=3)
    with pytest.raises(ValueError, match=r"tensor=2 does not divide 9.*tensor=2 and 3.*experts=4"):
        check_layout(spec, Layout(tensor=2, experts=4), num_experts=6, inner=None)
    with pytest.raises(ValueError, match="divide the larger"):
        Layout(tensor=2, experts=3)
    with pytest.raises(ValueError, match="4 leaves"):
        check_layout(spec, Layout(tensor=3, experts=1), num_experts=0, inner=96)
