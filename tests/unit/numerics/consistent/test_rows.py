"""Norm, rotation, gate, router, experts."""

import math

import pytest
import torch
from torch import Tensor

from rlmix.numerics.consistent.experts import choose_experts, combine, expert_mlps, expert_shares
from rlmix.numerics.consistent.pointwise import rms_norm, rope, rope_table, swiglu


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_norm_divides_by_the_root_of_the_mean_square_and_rounds_after_the_weight() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 3.0])
    root = math.sqrt(12.5)
    expected = torch.tensor([[3 / root, 12 / root]])
    assert torch.allclose(rms_norm(x, weight, eps=0.0), expected, rtol=1e-6)
    rounded = rms_norm(x, weight, eps=0.0, round_to=torch.bfloat16)
    assert torch.equal(rounded, expected.bfloat16().float())


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 31])
def test_rows_do_not_see_each_other(rows: int) -> None:
    x, weight = random(64, 96), random(96, seed=1)
    table = rope_table(64, head_dim=32, theta=10000.0)
    heads = random(64, 3, 32, seed=2)
    assert torch.equal(rms_norm(x[:rows], weight, eps=1e-6), rms_norm(x, weight, eps=1e-6)[:rows])
    assert torch.equal(swiglu(x[:rows]), swiglu(x)[:rows])
    assert torch.equal(rope(heads[:rows], table[:, :rows]), rope(heads, table)[:rows])


def test_rotation_turns_channel_pairs_by_position_times_frequency() -> None:
    table = rope_table(4, head_dim=4, theta=100.0)
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]])
    turned = rope(x, table[:, 3:4])
    # Pair (0, 2) turns by 3, pair (1, 3) by 3 / 100^(1/2) = 0.3.
    expected = [math.cos(3), -math.sin(0.3), math.sin(3), math.cos(0.3)]
    assert torch.allclose(turned, torch.tensor([[expected]]), atol=1e-7)
    assert table.dtype == torch.float32


def test_the_gate_is_silu_and_extreme_inputs_stay_finite() -> None:
    gate_up = torch.tensor([[0.0, 1.0, -200.0, 200.0, 2.0, 2.0, 2.0, 2.0]])
    expected = torch.tensor([[0.0, 2 / (1 + math.exp(-1)), 0.0, 400.0]])
    assert torch.allclose(swiglu(gate_up), expected)


def test_gradients_of_row_operators_are_those_of_float64() -> None:
    x = random(5, 3, 32).double().requires_grad_()
    weight = random(3, 32, seed=1).double().requires_grad_()
    table = rope_table(5, head_dim=32, theta=10000.0)
    inverse = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    normed = x * inverse * weight
    first, second = normed.chunk(2, dim=-1)
    cosines, sines = table.double()[:, :, None]
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    gate, up = turned.chunk(2, dim=-1)
    grad = random(5, 3, 16, seed=3)
    (torch.nn.functional.silu(gate) * up).backward(grad.double())
    x32, weight32 = (t.detach().float().requires_grad_() for t in (x, weight))
    ours = swiglu(rope(rms_norm(x32, weight32, eps=1e-6), table))
    ours.backward(grad)
    assert float((x32.grad - x.grad).abs().max()) < 5e-6
    assert float((weight32.grad - weight.grad).abs().max()) < 2e-5


def test_equal_logits_go_to_the_lower_expert() -> None:
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, -5.0, 2.0]])
    assert choose_experts(logits, top_k=5).tolist() == [[1, 3, 5, 0, 2]]
    many = torch.cat((logits, torch.full((1, 20), -0.0)), dim=1)
    assert choose_experts(many, top_k=6).tolist() == [[1, 3, 5, 0, 2, 6]]


@pytest.mark.parametrize("experts", [8, 16, 17, 128])
def test_choosing_is_a_stable_descending_sort(experts: int) -> None:
    logits = (random(200, experts) * 2).round() / 2  # many ties
    expected = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :4]
    assert torch.equal(choose_experts(logits, top_k=4), expected)


def test_shares_sum_to_one_over_the_chosen_or_over_all() -> None:
    logits = torch.tensor([[math.log(1), math.log(2), math.log(5)]])
    ids = torch.tensor([[2, 1]])
    chosen = expert_shares(logits, ids, renormalise=True)
    assert torch.allclose(chosen, torch.tensor([[5 / 7, 2 / 7]]))
    assert torch.allclose(
        expert_shares(logits, ids, renormalise=False), torch.tensor([[5 / 8, 2 / 8]])
    )


def dense_experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every token by every expert, then the chosen ones; in x's dtype."""
    gate, up = torch.einsum("th,eih->tei", x, gate_up).chunk(2, dim=-1)
    outputs = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, down)
    return outputs.gather(1, ids[..., None].expand(-1, -1, outputs.shape[-1]))


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_experts_forward_and_backward_are_those_of_float64(tokens: int) -> None:
    experts, hidden, inner = 5, 32, 48
    x, logits = random(tokens, hidden), random(tokens, experts, seed=1)
    gate_up = random(experts, 2 * inner, hidden, seed=2) / 6
    down = random(experts, hidden, inner, seed=3) / 7
    grad = random(tokens, hidden, seed=4)
    ids = choose_experts(logits, top_k=2)
    ours = [t.clone().requires_grad_() for t in (x, logits, gate_up, down)]
    outputs = expert_mlps(ours[0], ids, ours[2], ours[3])
    shares = expert_shares(ours[1], ids, renormalise=True)
    result = combine(outputs, shares, residual=ours[0])
    result.backward(grad)
    exact = [t.double().requires_grad_() for t in (x, logits, gate_up, down)]
    exact_shares = exact[1].gather(1, ids).softmax(-1)
    dense = dense_experts(exact[0], ids, exact[2], exact[3])
    expected = exact[0] + (dense * exact_shares[..., None]).sum(1)
    expected.backward(grad.double())
    assert float((result - expected).detach().abs().max()) < 1e-5
    for mine, theirs in zip(ours, exact, strict=True):
        assert float((mine.grad - theirs.grad).abs().max()) < 2e-5


def test_a_tokens_experts_do_not_depend_on_the_mix_of_tokens() -> None:
    experts, hidden, inner = 6, 32, 48
    x = random(120, hidden)
    gate_up, down = random(experts, 2 * inner, hidden, seed=2), random(experts, hidden, inner)
    ids = choose_experts(random(120, experts, seed=1), top_k=2)
    ids[40:] = torch.tensor([0, 3])  # most tokens crowd into two experts: computed one by one
    whole = expert_mlps(x, ids, gate_up, down, round_to=torch.bfloat16)
    for rows in (slice(0, 1), slice(3, 6), slice(0, 40), slice(39, 120)):
        part = expert_mlps(x[rows], ids[rows], gate_up, down, round_to=torch.bfloat16)
        assert torch.equal(part, whole[rows])


def test_experts_of_two_processes_add_up_to_those_of_one() -> None:
    experts, hidden, inner = 6, 32, 48
    x, ids = random(20, hidden), choose_experts(random(20, experts, seed=1), top_k=3)
    gate_up, down = random(experts, 2 * inner, hidden, seed=2), random(experts, hidden, inner)
    parts = [
        expert_mlps(x, ids, gate_up[e : e + 3], down[e : e + 3], first_expert=e) for e in (0, 3)
    ]
    assert torch.equal(parts[0] + parts[1], expert_mlps(x, ids, gate_up, down))


def test_experts_are_added_in_the_order_of_their_rank() -> None:
    # 2^25 + 1 = 2^25 in float32, so the order 1, 2^25, -2^25 gives 0 and the other way round 1.
    outputs = torch.tensor([[[1.0], [2.0**25], [-(2.0**25)]], [[2.0**25], [-(2.0**25)], [1.0]]])
    result = combine(outputs, torch.ones(2, 3), residual=torch.zeros(2, 1))
    assert result.flatten().tolist() == [0.0, 1.0]
