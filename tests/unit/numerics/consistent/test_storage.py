"""Expert weights stored for decoding."""

import torch

from rlmix.numerics.consistent.experts import choose_experts, expert_mlps
from rlmix.numerics.consistent.model import LayerTensors
from rlmix.numerics.consistent.storage import for_decoding, storage_is_free
from tests.unit.numerics.consistent.shapes import EXPERTS, HIDDEN, INNER, new_model


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
    tensors, _, _ = new_model(is_moe=True, round_to=torch.bfloat16)
    down = for_decoding(tensors).layers[0].down
    is_free = storage_is_free(INNER, HIDDEN, threads=torch.get_num_threads())
    assert (down.stride(1) == 1) == is_free
    assert (down.stride(2) == 1) != is_free


def test_a_dense_model_stays_as_it_is() -> None:
    tensors, _, _ = new_model(is_moe=False, round_to=None)
    assert for_decoding(tensors).layers[0] is tensors.layers[0]
