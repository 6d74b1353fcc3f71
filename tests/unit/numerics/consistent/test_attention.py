"""One attention, however it is called."""

import pytest
import torch
from torch import Tensor

from rlmix.numerics.consistent.attention import attend, gather_pages, plan_attention, tiles_of
from rlmix.numerics.consistent.contract import CPU_TILING, Tiling
from rlmix.numerics.consistent.oracle import attend_f64

SMALL = Tiling(kv_tile=32, trims=(16,), query_tile=8, probs=torch.float32)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(
    *, length: int, batch: int = 2, heads: int = 4, kv_heads: int = 2, dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(batch, length, heads, dim, seed=0),
        random(batch, kv_heads, length, dim, seed=1),
        random(batch, kv_heads, length, dim, seed=2),
    )


def whole(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> Tensor:
    positions = torch.arange(q.shape[1])[None]
    plan = plan_attention(positions, groups=q.shape[2] // k.shape[1], tiling=tiling)
    return attend(q, k, v, plan)


@pytest.mark.parametrize("length", [1, 2, 17, 63, 64, 65, 129, 256, 257, 530])
@pytest.mark.parametrize("tiling", [CPU_TILING, SMALL])
def test_forward_and_backward_are_those_of_float64(length: int, tiling: Tiling) -> None:
    tensors = inputs(length=length)
    grad = random(*tensors[0].shape, seed=3)
    ours = [tensor.clone().requires_grad_() for tensor in tensors]
    result = whole(*ours, tiling)
    result.backward(grad)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    expected = attend_f64(*exact, torch.arange(length)[None])
    expected.backward(grad.double())
    assert float((result - expected).detach().abs().max()) < 3e-6
    for mine, theirs in zip(ours, exact, strict=True):
        assert torch.isfinite(mine.grad).all()
        assert float((mine.grad - theirs.grad).abs().max()) < 2e-5


def test_bf16_inputs_are_computed_in_float32_and_rounded_once() -> None:
    q, k, v = (tensor.bfloat16() for tensor in inputs(length=90))
    result = whole(q, k, v, CPU_TILING)
    held = whole(q.float(), k.float(), v.float(), CPU_TILING)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, held.bfloat16())


@pytest.mark.parametrize("probs", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (4, 1, 64), (9, 3, 16)])
def test_decoding_and_chunks_give_the_bits_of_the_whole(
    probs: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    tiling = Tiling(kv_tile=256, trims=(64, 128), query_tile=64, probs=probs)
    q, k, v = inputs(length=400, heads=heads, kv_heads=kv_heads, dim=dim)
    expected = whole(q, k, v, tiling)
    groups = heads // kv_heads
    room = torch.full((2, kv_heads, 512, dim), 3.0)  # a cache with old numbers in it
    keys, values = room.clone(), room.clone()
    keys[:, :, :400], values[:, :, :400] = k, v
    for first, last in [(0, 1), (63, 64), (64, 65), (127, 130), (255, 257), (100, 300), (399, 400)]:
        positions = torch.arange(first, last)[None]
        plan = plan_attention(positions, groups=groups, tiling=tiling)
        assert torch.equal(attend(q[:, first:last], keys, values, plan), expected[:, first:last])


def test_a_batch_of_other_lengths_changes_no_bit() -> None:
    q, k, v = inputs(length=600)
    expected = whole(q, k, v, CPU_TILING)
    positions = torch.tensor([[3], [599]])
    plan = plan_attention(positions, groups=2, tiling=CPU_TILING)
    rows = torch.stack((q[0, 3:4], q[1, 599:600]))
    result = attend(rows, torch.nn.functional.pad(k, (0, 0, 0, 8)), v, plan)
    assert torch.equal(result[0, 0], expected[0, 3])
    assert torch.equal(result[1, 0], expected[1, 599])


def test_speed_settings_change_no_bit() -> None:
    q, k, v = inputs(length=300)
    expected = whole(q, k, v, CPU_TILING)
    for query_tile, trims in [(16, (64, 128)), (300, (64, 128)), (64, ()), (32, (128,))]:
        tiling = Tiling(kv_tile=256, trims=trims, query_tile=query_tile, probs=torch.float32)
        assert torch.equal(whole(q, k, v, tiling), expected)


def test_another_key_tile_is_another_result_from_its_edge_on() -> None:
    q, k, v = inputs(length=300)
    other = Tiling(kv_tile=128, trims=(64,), query_tile=64, probs=torch.float32)
    differs = (whole(q, k, v, other) != whole(q, k, v, CPU_TILING)).flatten(2).any(-1)[0]
    assert not differs[:128].any()
    assert differs[128:].any()


def test_the_order_of_pages_changes_no_bit() -> None:
    q, k, v = inputs(length=96, batch=1)
    expected = whole(q, k, v, SMALL)
    order = torch.tensor([[4, 0, 5, 2, 1, 3]])
    pools = []
    for tensor in (k, v):
        pool = torch.zeros(6, 2, 16, 16)
        for page, where in enumerate(order[0].tolist()):
            pool[where] = tensor[0, :, 16 * page : 16 * page + 16]
        pools.append(pool)
    plan = plan_attention(torch.arange(96)[None], groups=2, tiling=SMALL)
    keys, values = (gather_pages(pool, order) for pool in pools)
    assert torch.equal(attend(q, keys, values, plan), expected)


def test_tiles_without_visible_keys_are_not_computed() -> None:
    plan = plan_attention(torch.arange(300)[None], groups=2, tiling=CPU_TILING)
    assert list(tiles_of(plan)) == [
        (0, 128, 0, 128),
        (128, 256, 0, 256),
        (256, 300, 0, 256),
        (256, 300, 256, 320),
    ]


def test_tiles_keep_large_scores_apart() -> None:
    """A key with a huge score in one tile silences the other tile, and nothing overflows."""
    q = torch.full((1, 70, 2, 16), 30.0)
    k, v = random(1, 2, 70, 16, seed=1), random(1, 2, 70, 16, seed=2)
    k[:, :, 40] = 30.0
    result = whole(q, k, v, SMALL)
    assert torch.isfinite(result).all()
    assert torch.equal(result[0, 60, 0], v[0, 0, 40])


def test_trims_must_be_shorter_than_the_tile() -> None:
    with pytest.raises(ValueError, match="kv_tile=32"):
        Tiling(kv_tile=32, trims=(32,), query_tile=8, probs=torch.float32)
