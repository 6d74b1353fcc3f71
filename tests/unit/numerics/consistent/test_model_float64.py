"""A whole model, forward and backward, against a plain float64 one written without any of ours but
the attention oracle."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.head import vocab_scores
from rlmix.numerics.consistent.model import ModelSpec, tensors_of, train_hidden
from rlmix.numerics.consistent.oracle import attend_f64
from rlmix.numerics.consistent.pointwise import rope_table
from tests.unit.numerics.consistent.shapes import EXPERTS, VOCAB, new_spec, new_state

LENGTH, THETA = 90, 10000.0
BOUNDS = {None: (1e-5, 5e-6), torch.bfloat16: (0.15, 0.03)}
"""Largest difference of a logprob in nats, and of a gradient as a share of the parameter's largest.
A BF16 activation is off by up to 2^-9 of its size at each of a dozen roundings."""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x_TND: Tensor) -> Tensor:
    length, _, dim = x_TND.shape
    angles = torch.arange(length).double()[:, None] / THETA ** (torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(x_TND[..., : dim // 2], x_TND[..., dim // 2 :]) * turn
    return torch.cat((turned.real, turned.imag), -1)


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (x @ gate_up.t()).chunk(2, -1)
    return (gate / (1 + (-gate).exp()) * up) @ down.t()


def logprobs_f64(state: Mapping[str, Tensor], spec: ModelSpec, ids: Tensor) -> Tensor:
    """[T - 1] of ids[1:]."""
    x = state["model.embed_tokens.weight"][ids]
    for number in range(spec.num_layers):
        layer = {
            name.removeprefix(f"model.layers.{number}.").removesuffix(".weight"): value
            for name, value in state.items()
        }
        normed = norm(x, layer["input_layernorm"], spec.rms_eps)
        q, k, v = (
            (normed @ layer[f"self_attn.{part}_proj"].t()).unflatten(-1, (-1, spec.head_dim))
            for part in "qkv"
        )
        q = rotate(norm(q, layer["self_attn.q_norm"], spec.rms_eps))
        k = rotate(norm(k, layer["self_attn.k_norm"], spec.rms_eps))
        keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        attended = attend_f64(q[None], keys, values, torch.arange(len(ids))[None])[0]
        x = x + attended.flatten(1) @ layer["self_attn.o_proj"].t()
        normed = norm(x, layer["post_attention_layernorm"], spec.rms_eps)
        if spec.top_k == 0:
            gate_up = torch.cat((layer["mlp.gate_proj"], layer["mlp.up_proj"]))
            x = x + mlp(normed, gate_up, layer["mlp.down_proj"])
            continue
        logits = normed @ layer["mlp.gate"].t()
        best, chosen = logits.topk(spec.top_k, -1)
        shares = torch.zeros_like(logits).scatter(-1, chosen, best.softmax(-1))
        for expert in range(EXPERTS):
            said = mlp(
                normed,
                layer["mlp.experts.gate_up_proj"][expert],
                layer["mlp.experts.down_proj"][expert],
            )
            x = x + shares[:, expert : expert + 1] * said
    logits = norm(x, state["model.norm.weight"], spec.rms_eps) @ state["lm_head.weight"].t()
    return logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize(
    ("is_moe", "round_to"),
    # Not experts in BF16: where two are nearly equal, rounding takes the other one.
    [(False, None), (True, None), (False, torch.bfloat16)],
)
def test_forward_and_backward_of_a_whole_model_are_those_of_float64(
    is_moe: bool, round_to: torch.dtype | None
) -> None:
    spec = new_spec(is_moe=is_moe, round_to=round_to)
    start = {name: value.double() for name, value in new_state(spec, seed=3).items()}
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(6))
    exact = {name: value.clone().requires_grad_() for name, value in start.items()}
    expected = logprobs_f64(exact, spec, ids)
    expected.sum().backward()
    state = {name: value.float().requires_grad_() for name, value in start.items()}
    tensors = tensors_of(state, spec)
    table = rope_table(LENGTH, head_dim=spec.head_dim, theta=THETA)
    hidden = train_hidden(tensors, spec, ids[None], table, tiling=CPU_TILING)[0]
    found = vocab_scores(hidden[:-1], tensors.head, ids[1:, None], temperature=1.0)
    ours = found.scores_PK[:, 0] - found.normaliser_P
    ours.sum().backward()
    of_logprob, of_gradient = BOUNDS[round_to]
    assert float((ours - expected).detach().abs().max()) < of_logprob
    for name, value in state.items():
        assert value.grad is not None
        assert torch.isfinite(value.grad).all()
        theirs = exact[name].grad
        gap = float((value.grad.double() - theirs).abs().max() / theirs.abs().max())
        assert gap < of_gradient, name
