"""Small calls keep their probabilities for the gradient, large ones compute them again."""

import pytest
import torch
from torch import Tensor

from rlmix.numerics.consistent import attention
from rlmix.numerics.consistent.attention import attend, plan_attention
from rlmix.numerics.consistent.contract import CPU_TILING


def gradients(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, length, 4, 16), (2, 2, length, 16), (2, 2, length, 16))
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    plan = plan_attention(torch.arange(length)[None], groups=2, tiling=CPU_TILING)
    attend(*tensors, plan).square().sum().backward()
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


@pytest.mark.parametrize("length", [40, 300])
def test_both_ways_give_the_same_gradient(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = gradients(length)
    monkeypatch.setattr(attention, "KEPT_SCORES", 0)
    again = gradients(length)
    assert len(kept) == 3
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def test_scores_are_counted_as_they_are_computed() -> None:
    # 300 positions, 2 heads a key head: tiles of 128, 128 and 44 queries over 128, 256 and
    # 256 + 64 keys.
    plan = plan_attention(torch.arange(300)[None], groups=2, tiling=CPU_TILING)
    assert plan.scores_per_head == 2 * (128 * 128 + 128 * 256 + 44 * 320)
