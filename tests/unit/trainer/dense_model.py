"""The tiny policy and its loss written out plainly in float64, to hold the trainer against.

Transformers keeps norms, the softmax of attention, routing and the rotary angles in float32
whatever the model's dtype; nothing here does. Every expert is computed for every token, every
softmax runs over the whole vocabulary or over one token's kept set, and one session is looked at
at a time.
"""

# B rows, T tokens, D hidden size, N heads, E experts, V vocabulary

import math
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

EPSILON = 1e-6
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, TOP_K, ROPE_BASE = 4, 2, 16, 2, 10_000.0


class DenseModel:
    """Float64 weights under the trainer's parameter names, with the few methods `Policy` calls."""

    def __init__(self, parameters):
        self.weights = {
            name: tensor.detach().double().clone().requires_grad_()
            for name, tensor in parameters.items()
        }

    def eval(self):
        return self

    def named_parameters(self):
        return self.weights.items()

    def get_output_embeddings(self):
        return SimpleNamespace(weight=self.weights["model.embed_tokens.weight"], bias=None)

    def base_model(self, *, input_ids, attention_mask, use_cache):
        return SimpleNamespace(last_hidden_state=self.hidden(input_ids))

    def __call__(self, *, input_ids, use_cache):
        return SimpleNamespace(logits=self.logits(input_ids))

    def logits(self, ids_BT: Tensor) -> Tensor:
        return self.hidden(ids_BT) @ self.weights["model.embed_tokens.weight"].T

    def hidden(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.weights["model.embed_tokens.weight"][ids_BT]
        for layer in range(2):
            prefix = f"model.layers.{layer}."
            w = {k[len(prefix) :]: v for k, v in self.weights.items() if k.startswith(prefix)}
            x_BTD = x_BTD + attention(normed(x_BTD, w["input_layernorm.weight"]), w)
            x_BTD = x_BTD + experts(normed(x_BTD, w["post_attention_layernorm.weight"]), w)
        return normed(x_BTD, self.weights["model.norm.weight"])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()


def rotated(x_BNTH: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    speeds = ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
    angles_TH = torch.arange(x_BNTH.shape[2], dtype=torch.float64)[:, None] * speeds
    first, second = x_BNTH[..., :half], x_BNTH[..., half:]
    cos, sin = angles_TH.cos(), angles_TH.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(x_BTD: Tensor, w: dict[str, Tensor]) -> Tensor:
    def heads(name, count):
        return (x_BTD @ w[f"self_attn.{name}.weight"].T).unflatten(-1, (count, HEAD_DIM))

    q = rotated(normed(heads("q_proj", NUM_HEADS), w["self_attn.q_norm.weight"]).transpose(1, 2))
    k = rotated(normed(heads("k_proj", NUM_KV_HEADS), w["self_attn.k_norm.weight"]).transpose(1, 2))
    v = heads("v_proj", NUM_KV_HEADS).transpose(1, 2)
    k, v = (t.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return mixed.transpose(1, 2).flatten(2) @ w["self_attn.o_proj.weight"].T


def experts(x_BTD: Tensor, w: dict[str, Tensor]) -> Tensor:
    gates_BTE = (x_BTD @ w["mlp.gate.weight"].T).softmax(-1)
    least_BT1 = gates_BTE.topk(TOP_K, dim=-1).values[..., -1:]
    gates_BTE = gates_BTE * (gates_BTE >= least_BT1)
    gates_BTE = gates_BTE / gates_BTE.sum(-1, keepdim=True)
    gate, up = torch.einsum("btd,eid->btei", x_BTD, w["mlp.experts.gate_up_proj"]).chunk(2, -1)
    inner = gate * gate.sigmoid() * up
    return torch.einsum("bte,btei,edi->btd", gates_BTE, inner, w["mlp.experts.down_proj"])


def dense_session(model, sample, algo):
    """(log-ratios of the sampled tokens, their losses before any rule about sequences)."""
    ids = torch.from_numpy(sample.ids.astype(np.int64))[None]
    logits_TV = model.logits(ids)[0] / algo.temperature
    log_ratios, losses = [], []
    for t in np.flatnonzero(sample.mask):
        slots = slice(sample.kept_offsets[t], sample.kept_offsets[t + 1])
        kept = torch.from_numpy(sample.kept_ids[slots].astype(np.int64))
        q = torch.from_numpy(sample.kept_logprobs[slots]).double().exp()
        z = logits_TV[t - 1]
        folded = 0.0
        if sample.kept_exact:
            candidates, logp = kept, z[kept] - z[kept].exp().sum().log()
        else:  # the tail of q is rho times the trainer's
            candidates, logp = torch.arange(len(z)), z - z.exp().sum().log()
            p = logp.detach().exp()
            outside = torch.ones_like(p, dtype=torch.bool)
            outside[kept] = False
            rho = (1 - q.sum()) / p[outside].sum()
            q = torch.where(outside, rho * p, torch.zeros_like(p).index_put((kept,), q))
            is_trusted = algo.low <= 1 / rho <= algo.high
            # sum over v of p grad log p is 0: this moves the value of the loss, not its gradient
            folded = float(is_trusted) * (p * logp.detach()).sum()
        ratios = logp.detach().exp() / q
        weights = ratios * ((ratios >= algo.low) & (ratios <= algo.high))
        place = int((candidates == int(sample.ids[t])).nonzero()[0, 0])
        own = float(logp[place].detach()) - float(sample.sampler_logprobs[t])
        own_weight = math.exp(own) if algo.low <= math.exp(own) <= algo.high else 0.0
        score = own_weight * logp[place] - (q * weights * logp).sum() + folded
        log_ratios.append(own)
        losses.append(-sample.advantage * score)
    return np.array(log_ratios), torch.stack(losses)


def is_dropped(log_ratios, advantage, algo):
    """The rules about sequences, each as one line of arithmetic."""
    if algo.veto and min(np.exp(log_ratios)) < algo.veto:
        return True
    low, high = algo.sequence_low, algo.sequence_high
    return {
        "none": False,
        "product": not low <= math.prod(np.exp(log_ratios)) <= high,
        "geometric": not low <= math.prod(np.exp(log_ratios)) ** (1 / len(log_ratios)) <= high,
        "k3": np.mean(np.exp(log_ratios) - 1 - log_ratios) > high,
        "opsm": advantage < 0 and -np.mean(log_ratios) > high,
    }[algo.sequence_mask]


def dense_loss(model, samples, algo):
    """(loss of a step as the textbook has it, number of dropped sessions)."""
    total, num_dropped = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        log_ratios, losses = dense_session(model, sample, algo)
        if is_dropped(log_ratios, sample.advantage, algo):
            num_dropped += 1
            continue
        total = total + (losses.mean() if algo.average == "sequences" else losses.sum())
    count = len(samples) if algo.average == "sequences" else sum(int(s.mask.sum()) for s in samples)
    return total / count, num_dropped
