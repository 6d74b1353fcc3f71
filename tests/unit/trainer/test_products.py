"""BF16 products by float32 kernels, against float64 and against what torch does by itself."""

import pytest
import torch
import torch.nn.functional as F

from rlmix.trainer import products
from rlmix.trainer.products import WideProducts


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """So that small matrices are cut as long ones are."""
    monkeypatch.setattr(products, "PIECE", 16)


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def in_float64(function, inputs):
    """Output and gradients of `function` on the same numbers, without a rounding."""
    wide = [x.double().requires_grad_() for x in inputs]
    return gradients(function, wide)


def gradients(function, inputs):
    out = function(*inputs)
    toward = numbers(*out.shape, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, toward)]


def in_bf16(function, inputs):
    with WideProducts():
        return gradients(function, [x.clone().requires_grad_() for x in inputs])


def by_expert(rows, matrices):
    """The product of two groups of rows, 30 and 40 long, each with its own matrix."""
    if rows.dtype == torch.bfloat16:
        ends = torch.tensor([30, 70], dtype=torch.int32)
        return torch._grouped_mm(rows, matrices, offs=ends)
    return torch.cat([rows[:30] @ matrices[0], rows[30:] @ matrices[1]])


CASES = {
    "matrix": (torch.matmul, [(50, 40), (40, 24)]),
    "layer": (F.linear, [(3, 20, 40), (24, 40)]),
    "layer with a bias": (F.linear, [(50, 40), (24, 40), (24,)]),
    "batch of matrices": (torch.matmul, [(2, 3, 20, 40), (2, 3, 40, 24)]),
    "experts": (by_expert, [(70, 40), (2, 40, 24)]),
    "fused attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 33, 16)] * 3,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_float64_rounded_once(name):
    function, shapes = CASES[name]
    inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    for found, exact in zip(in_bf16(function, inputs), in_float64(function, inputs), strict=True):
        assert found.dtype == torch.bfloat16
        largest = exact.abs().max()
        # Eight bits: a rounding is at most 2**-8 of the number; float32 sums are exact beside it.
        bound = exact.abs() * 2.0**-8 + largest * 1e-5
        if name == "fused attention":
            # Its backward pass starts from the rounded output.
            bound = bound + largest * 2.0**-8
        assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("name", CASES)
def test_torch_itself_is_not_closer_to_float64(name):
    function, shapes = CASES[name]
    inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    native = gradients(function, [x.clone().requires_grad_() for x in inputs])
    mine, exact = in_bf16(function, inputs), in_float64(function, inputs)
    for by_torch, found, true in zip(native, mine, exact, strict=True):
        error, its_error = (found.double() - true).norm(), (by_torch.double() - true).norm()
        assert error <= its_error * 1.05


def test_grouped_query_attention_shares_keys_between_heads():
    shapes = [(1, 4, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16)]
    inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    for found, exact in zip(in_bf16(attend, inputs), in_float64(attend, inputs), strict=True):
        assert float((found.double() - exact).abs().max()) < 0.01 * float(exact.abs().max())


@pytest.mark.parametrize("shape", [(7, 7), (1, 1, 7, 7), (1, 2, 7, 7)])
def test_attention_takes_masks_for_all_heads_and_for_each(shape):
    inputs = [numbers(1, 2, 7, 16, seed=seed) for seed in range(3)]
    mask = torch.zeros(shape).masked_fill(torch.ones(shape).triu(1).bool(), -1e9)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))

    for found, exact in zip(in_bf16(attend, inputs), in_float64(attend, inputs), strict=True):
        assert float((found.double() - exact).abs().max()) < 0.02 * float(exact.abs().max())


def test_rows_without_an_expert_and_experts_without_rows():
    rows, matrices = numbers(10, 8), numbers(3, 8, 4, seed=1)
    ends = torch.tensor([6, 6, 10], dtype=torch.int32)
    rows.requires_grad_()
    matrices.requires_grad_()
    with WideProducts():
        out = torch._grouped_mm(rows, matrices, offs=ends)
        out.sum().backward()
    assert torch.equal(out[:6], (rows[:6].float() @ matrices[0].float()).bfloat16())
    assert torch.equal(out[6:], (rows[6:].float() @ matrices[2].float()).bfloat16())
    assert float(matrices.grad[1].abs().max()) == 0.0


def test_other_dtypes_and_an_empty_sum_are_left_alone():
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    with WideProducts():
        assert torch.equal(a @ b, torch.mm(a, b))
        assert torch.equal(numbers(3, 0) @ numbers(0, 5), torch.zeros(3, 5).bfloat16())
        assert (numbers(0, 4) @ numbers(4, 5)).shape == (0, 5)
