"""The attention of an engine's step: few operations, the same bits."""

import pytest
import torch

from rlmix.numerics.consistent.attention import attend, plan_attention
from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.serving import CacheAttention, PromptChunk, plan_step

HEADS, KV_HEADS, DIM, SLOTS, CAPACITY = 6, 2, 16, 5, 640


@pytest.mark.parametrize("round_to", [None, torch.bfloat16])
@pytest.mark.parametrize("positions", [[7], [3, 300, 255], [511, 0, 64, 127]])
def test_decoding_rows_beside_a_chunk_have_the_bits_of_attend(
    round_to: torch.dtype | None, positions: list[int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 2, SLOTS, KV_HEADS, CAPACITY, DIM, generator=generator)
    chunk = PromptChunk(slot=len(positions), start=30, num_tokens=9)
    rows = torch.tensor([*positions, *range(30, 39)])
    slots = torch.tensor([*range(len(positions)), *[chunk.slot] * 9])
    queries = torch.randn(len(rows), HEADS, DIM, generator=generator)
    new = torch.randn(len(rows), 2 * KV_HEADS, DIM, generator=generator)
    step = plan_step(rows, num_decoding=len(positions), chunks=[chunk], groups=3, tiling=CPU_TILING)
    heads = torch.arange(2 * KV_HEADS)
    part = heads // KV_HEADS * SLOTS * KV_HEADS + heads % KV_HEADS
    index = ((slots[:, None] * KV_HEADS + part) * CAPACITY + rows[:, None]).reshape(-1)
    attention = CacheAttention(cache, step, index, round_to=round_to)
    with torch.inference_mode():
        found = attention(1, queries, new)
    for row, (slot, position) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True)):
        assert torch.equal(cache[1, :, slot, :, position].flatten(0, 1), new[row])
        plan = plan_attention(torch.tensor([[position]]), groups=3, tiling=CPU_TILING)
        keys, values = cache[1, :, slot : slot + 1]
        alone = attend(queries[row][None, None], keys, values, plan, round_to=round_to)
        assert torch.equal(found[row], alone[0, 0]), (slot, position)
