"""Whole sequences in the trainer and any way of stepping give the same bits.

`RLMIX_CONSISTENT_EXAMPLES` sets how many combinations are drawn (1,000 by hand, see
docs/consistency.md).
"""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlmix.numerics.consistent.contract import CPU_TILING, Tiling
from rlmix.numerics.consistent.head import head_logits, scores_of_logits, vocab_scores
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors, tensors_of, train_hidden
from rlmix.numerics.consistent.serving import for_decoding
from tests.unit.numerics.consistent.shapes import VOCAB, new_model, new_spec, new_state
from tests.unit.numerics.consistent.stepwise import PagedEngine, Piece, SlotEngine

EXAMPLES = int(os.environ.get("RLMIX_CONSISTENT_EXAMPLES", "24"))
SMALL_TILING = Tiling(kv_tile=32, trims=(16,), query_tile=8, probs=torch.float32)
BF16_PROBS = Tiling(kv_tile=32, trims=(), query_tile=16, probs=torch.bfloat16)
MODELS = {
    (is_moe, round_to): new_model(is_moe=is_moe, round_to=round_to)
    for is_moe in (False, True)
    for round_to in (None, torch.bfloat16)
}
TEMPERATURE = 0.7


def trainer_logprobs(
    tensors: ModelTensors, spec: ModelSpec, table: Tensor, ids_BT: Tensor, tiling: Tiling
) -> Tensor:
    """[B, T - 1] logprobs of ids_BT[:, 1:]."""
    hidden = train_hidden(tensors, spec, ids_BT, table, tiling=tiling)
    wanted = ids_BT[:, 1:].reshape(-1, 1)
    found = vocab_scores(
        hidden[:, :-1].flatten(0, 1), tensors.head, wanted, temperature=TEMPERATURE
    )
    return (found.scores_PK[:, 0] - found.normaliser_P).view(len(ids_BT), -1)


def engine_logprobs(hidden: Tensor, head: Tensor, ids: Tensor) -> Tensor:
    logits = head_logits(hidden, head)
    found = scores_of_logits(logits, ids[:, None], temperature=TEMPERATURE)
    return found.scores_PK[:, 0] - found.normaliser_P


def play(engine: SlotEngine, ids: list[Tensor], plan: np.random.Generator) -> list[Tensor]:
    """Feed all sequences in random mixes of chunks and single tokens; hidden states of each."""
    done, outputs = [0] * len(ids), [[] for _ in ids]
    while any(at < len(seq) for at, seq in zip(done, ids, strict=True)):
        pieces = []
        for number, seq in enumerate(ids):
            left = len(seq) - done[number]
            if left == 0 or plan.random() < 0.3:
                continue
            count = 1 if plan.random() < 0.5 else int(plan.integers(1, left + 1))
            start = done[number]
            pieces.append(Piece(sequence=number, start=start, ids=seq[start : start + count]))
        plan.shuffle(pieces)
        if not pieces:
            continue
        for piece, hidden in zip(pieces, engine.step(pieces), strict=True):
            outputs[piece.sequence].append(hidden)
            done[piece.sequence] += len(piece.ids)
    return [torch.cat(parts) for parts in outputs]


@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 100)
@given(
    is_moe=st.booleans(),
    round_to=st.sampled_from([None, torch.bfloat16]),
    tiling=st.sampled_from([CPU_TILING, SMALL_TILING, BF16_PROBS]),
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=4),
    page_size=st.sampled_from([0, 1, 3, 16, 64]),
    is_stored_anew=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_mix_of_chunks_pages_and_batches_gives_the_trainers_bits(
    is_moe: bool,
    round_to: torch.dtype | None,
    tiling: Tiling,
    lengths: list[int],
    page_size: int,
    is_stored_anew: bool,
    seed: int,
) -> None:
    tensors, spec, table = MODELS[is_moe, round_to]
    plan = np.random.default_rng(seed)
    ids = [torch.from_numpy(plan.integers(0, VOCAB, length)) for length in lengths]
    batch = torch.zeros(len(ids), max(lengths), dtype=torch.int64)
    for row, seq in zip(batch, ids, strict=True):
        row[: len(seq)] = seq
    with torch.no_grad():
        trained = trainer_logprobs(tensors, spec, table, batch, tiling)
    held = for_decoding(tensors) if is_stored_anew else tensors
    room = {"num_sequences": len(ids), "capacity": 128}
    if page_size:
        engine: SlotEngine = PagedEngine(
            held, spec, table, tiling, page_size=page_size, seed=seed, **room
        )
    else:
        engine = SlotEngine(held, spec, table, tiling, **room)
    for number, hidden in enumerate(play(engine, ids, plan)):
        sampled = engine_logprobs(hidden[:-1], held.head, ids[number][1:])
        expected = trained[number, : len(sampled)]
        assert int((sampled != expected).sum()) == 0


@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("round_to", [None, torch.bfloat16])
def test_six_hundred_tokens_decoded_one_by_one_cross_every_tile_edge(
    is_moe: bool, round_to: torch.dtype | None
) -> None:
    tensors, spec, table = MODELS[is_moe, round_to]
    ids = torch.randint(0, VOCAB, (600,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = train_hidden(tensors, spec, ids[None], table, tiling=CPU_TILING)[0]
    engine = SlotEngine(tensors, spec, table, CPU_TILING, num_sequences=1, capacity=768)
    (prompt,) = engine.step([Piece(sequence=0, start=0, ids=ids[:40])])
    rows = [prompt]
    for at in range(40, 600):
        rows += engine.step([Piece(sequence=0, start=at, ids=ids[at : at + 1])])
    assert torch.equal(torch.cat(rows), whole)


def test_two_threads_give_the_bits_of_one_forwards_and_backwards() -> None:
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for is_moe in (False, True):
                spec = new_spec(is_moe=is_moe, round_to=torch.bfloat16)
                state = new_state(spec, seed=1)
                state = {name: value.requires_grad_() for name, value in state.items()}
                table = MODELS[is_moe, torch.bfloat16][2]
                ids = torch.randint(0, VOCAB, (3, 90), generator=torch.Generator().manual_seed(4))
                logprobs = trainer_logprobs(tensors_of(state, spec), spec, table, ids, CPU_TILING)
                logprobs.sum().backward()
                results.append([logprobs.detach(), *(value.grad for value in state.values())])
    finally:
        torch.set_num_threads(before)
    for one, two in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
