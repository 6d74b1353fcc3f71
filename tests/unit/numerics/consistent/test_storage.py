"""Weights stored for decoding."""

import pytest
import torch

from rlmix.numerics.consistent.contract import CPU_TILING, TREE_LEAVES
from rlmix.numerics.consistent.experts import choose_experts, expert_mlps
from rlmix.numerics.consistent.linear import linear, row_parallel_linear
from rlmix.numerics.consistent.model import LayerTensors, train_hidden
from rlmix.numerics.consistent.serving import for_decoding
from rlmix.numerics.consistent.storage import by_inputs, is_by_inputs, storage_is_free
from tests.unit.numerics.consistent.shapes import EXPERTS, HIDDEN, VOCAB, new_model
from tests.unit.numerics.consistent.stepwise import Piece, SlotEngine


def mlps(layer: LayerTensors, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, HIDDEN, generator=generator)
    ids = choose_experts(torch.randn(rows, EXPERTS, generator=generator), top_k=2)
    return expert_mlps(x, ids, layer.gate_up, layer.down, round_to=torch.bfloat16)


def test_experts_stored_for_decoding_say_the_same_for_one_token_and_for_hundreds() -> None:
    tensors, _, _ = new_model(is_moe=True, round_to=torch.bfloat16)
    stored = for_decoding(tensors)
    for before, after in zip(tensors.layers, stored.layers, strict=True):
        assert torch.equal(before.gate_up, after.gate_up)
        for rows in (1, 2, 5, 9, 33, 200, 700):
            assert torch.equal(mlps(before, rows), mlps(after, rows)), rows


def test_weights_are_stored_anew_exactly_where_the_library_does_not_mind() -> None:
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    for outputs, inputs in ((8, 128), (256, 128), (64, 96)):
        weight = torch.randn(outputs, inputs, generator=generator)
        stored = by_inputs(weight)
        assert torch.equal(stored, weight)
        assert is_by_inputs(stored) == storage_is_free(inputs, outputs, threads=threads)


def test_products_do_not_see_how_a_weight_is_stored() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(256, 128, generator=generator)
    stored = (by_inputs(weight), by_inputs(weight, leaves=TREE_LEAVES))
    for rows in (1, 3, 4, 6, 50, 300):
        x = torch.randn(rows, 128, generator=generator)
        assert torch.equal(linear(x, stored[0]), linear(x, weight))
        summed = (row_parallel_linear(x, w, leaves=TREE_LEAVES) for w in (stored[1], weight))
        assert torch.equal(*summed)


@pytest.mark.parametrize("is_moe", [False, True])
def test_a_whole_model_stored_for_decoding_has_the_bits_of_the_trainers(is_moe: bool) -> None:
    tensors, spec, table = new_model(is_moe=is_moe, round_to=torch.bfloat16)
    ids = torch.randint(0, VOCAB, (1, 70), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = train_hidden(tensors, spec, ids, table, tiling=CPU_TILING)[0]
    engine = SlotEngine(
        for_decoding(tensors), spec, table, CPU_TILING, num_sequences=1, capacity=128
    )
    rows = engine.step([Piece(sequence=0, start=0, ids=ids[0, :40])])
    for at in range(40, 70):
        rows += engine.step([Piece(sequence=0, start=at, ids=ids[0, at : at + 1])])
    assert torch.equal(torch.cat(rows), whole)
