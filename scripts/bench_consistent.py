#!/usr/bin/env python
"""Measures the consistent operators beside what they replace: what does logdiff 0 cost?

    python scripts/bench_consistent.py [--quick] [--json] [--head-dims 64,128]
        [--lengths 512,1024] [--dtypes float32,bfloat16]

Attention, per length and dtype, against three others: "eager" read as the explicit masked softmax
(as Transformers computes it), "eager" read as PyTorch's fused kernel run without graphs (sdpa;
nothing here is compiled or captured), and the plain batch-invariant loop (fixed small tiles, every
tile computed); forward, forward + backward, and one decoded token for eight sequences. Then the
bundled policy: a training step's forward and backward, and a decoding step of the embedded engine
in exact and in native mode. Seconds are CPU seconds of one thread, the least of several interleaved
runs. A ratio above 1 is in our favour for `forward_ratio`, `train_ratio`, `decode_ratio`,
`ungraphed_ratio`, `ungraphed_train_ratio` and `naive_ratio` (theirs over ours); `sdpa_ratio`,
`model_ratio`, `model_float32_ratio` and `decode_model_ratio` are ours over theirs.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.engine.embedded.exact import ExactForward
from rlmix.engine.embedded.forward import Forward, Step
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.model.bundle import resolve_model
from rlmix.numerics.consistent.attention import AttentionPlan, attend, plan_attention
from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.head import vocab_scores
from rlmix.numerics.consistent.model import ModelSpec, tensors_of, train_hidden
from rlmix.numerics.consistent.pointwise import rope_table
from rlmix.trainer.policy import Policy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTHS = (512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS = (512, 1024)
HEADS, KV_HEADS = 9, 3
LONG_HEADS, LONG_KV_HEADS = 3, 1
"""From LONG on; eager attention would need over 10 GB for nine heads."""
LONG = 8192
NAIVE_LONGEST = 2048
"""The plain loop takes minutes beyond."""
DECODE_BATCH = 8

Timed = dict[str, Callable[[], object]]


def interleaved(runs: Timed, *, repeats: int) -> dict[str, float]:
    """Least CPU seconds of each, measured in turn, so that a busy spell meets all of them."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(repeats):
        for name, run in runs.items():
            started_s = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - started_s)
    return best


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """[B, N, T, D]: scores, mask, softmax in float32, product; as Transformers' eager path."""
    groups = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q, keys.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask
    probs = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(probs, values)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The plain batch-invariant loop: tiles of 16 queries and 64 keys, none skipped."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.float().repeat_interleave(groups, 1) for t in (k, v))
    queries = q.float() * q.shape[-1] ** -0.5
    positions = torch.arange(q.shape[2])
    rows = []
    for first in range(0, q.shape[2], 16):
        query = queries[:, :, first : first + 16]
        top = torch.full((*query.shape[:3], 1), -1e30)
        total, acc = torch.zeros_like(top), torch.zeros_like(query)
        for start in range(0, k.shape[2], 64):
            scores = query @ keys[:, :, start : start + 64].transpose(2, 3)
            ahead = positions[start : start + 64] > positions[first : first + 16, None]
            scores = scores.masked_fill(ahead, -1e30)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            probs, decay = (scores - new_top).exp(), (top - new_top).exp()
            total = total * decay + probs.sum(-1, keepdim=True)
            acc = acc * decay + probs.to(v.dtype).float() @ values[:, :, start : start + 64]
            top = new_top
        rows.append(acc / total)
    return torch.cat(rows, dim=2).to(q.dtype)


def ours(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
    return attend(q.transpose(1, 2), k, v, plan).transpose(1, 2)


def attention_row(tokens: int, dtype_name: str, *, head_dim: int, repeats: int) -> dict[str, Any]:
    dtype = DTYPES[dtype_name]
    heads, kv_heads = (LONG_HEADS, LONG_KV_HEADS) if tokens >= LONG else (HEADS, KV_HEADS)
    shapes = ((1, heads, tokens, head_dim), *[(1, kv_heads, tokens, head_dim)] * 2)
    q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for shape in shapes)
    grad = torch.randn(shapes[0]).to(dtype)
    ahead = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mask = torch.zeros(tokens, tokens).masked_fill_(ahead, float("-inf")).to(dtype)[None, None]
    groups = heads // kv_heads
    plan = plan_attention(torch.arange(tokens)[None], groups=groups, tiling=CPU_TILING)
    forward: Timed = {
        "ours": lambda: ours(q, k, v, plan),
        "eager": lambda: eager(q, k, v, mask),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }

    def train(run: Callable[[], Any]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(run(), (q, k, v), grad)

    with torch.no_grad():
        forward_s = interleaved(forward, repeats=repeats)
        if tokens <= NAIVE_LONGEST:
            forward_s |= interleaved({"naive": lambda: naive(q, k, v)}, repeats=1)
    train_s = interleaved({name: train(run) for name, run in forward.items()}, repeats=repeats)
    decode_s = decode_seconds(tokens, dtype, heads, kv_heads, head_dim, repeats=4 * repeats)
    return {
        "tokens": tokens,
        "dtype": dtype_name,
        "head_dim": head_dim,
        "heads": f"{heads}/{kv_heads}",
        "forward_ratio": forward_s["eager"] / forward_s["ours"],
        "train_ratio": train_s["eager"] / train_s["ours"],
        "ungraphed_ratio": forward_s["sdpa"] / forward_s["ours"],
        "ungraphed_train_ratio": train_s["sdpa"] / train_s["ours"],
        "sdpa_ratio": forward_s["ours"] / forward_s["sdpa"],
        "sdpa_train_ratio": train_s["ours"] / train_s["sdpa"],
        "decode_ratio": decode_s["eager"] / decode_s["ours"],
        "sdpa_decode_ratio": decode_s["ours"] / decode_s["sdpa"],
        "naive_ratio": forward_s["naive"] / forward_s["ours"] if "naive" in forward_s else None,
        "forward_s": forward_s,
        "train_s": train_s,
        "decode_s": decode_s,
    }


def decode_seconds(
    tokens: int, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, *, repeats: int
) -> dict[str, float]:
    """One token of each of DECODE_BATCH sequences of `tokens`; ours reads a float32 cache."""
    q = torch.randn(DECODE_BATCH, heads, 1, head_dim).to(dtype)
    k, v = (torch.randn(DECODE_BATCH, kv_heads, tokens, head_dim).to(dtype) for _ in "kv")
    held_k, held_v = k.float(), v.float()
    mask = torch.zeros(1, 1, 1, tokens, dtype=dtype)
    positions = torch.full((DECODE_BATCH, 1), tokens - 1)
    plan = plan_attention(positions, groups=heads // kv_heads, tiling=CPU_TILING)
    with torch.no_grad():
        return interleaved(
            {
                "ours": lambda: ours(q, held_k, held_v, plan),
                "eager": lambda: eager(q, k, v, mask),
                "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            },
            repeats=repeats,
        )


def spec_of(folder: Path) -> ModelSpec:
    shape = read_shape(read_config(folder))
    return ModelSpec(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_eps=shape.rms_eps,
        top_k=shape.top_k,
        norm_topk_prob=shape.norm_topk_prob,
        round_to=torch.bfloat16,
    )


def training(folder: Path, *, rows: int, length: int, repeats: int) -> dict[str, float]:
    """CPU seconds of forward and backward of a micro-batch, a fifth of the tokens scored."""
    policies = {name: Policy.load(folder, attention=name) for name in ("sdpa", "eager")}
    # Where a CPU has no BF16 instructions, this is the rival: BF16 products take ten times longer.
    policies["sdpa_float32"] = Policy.load(folder, attention="sdpa")
    policies["sdpa_float32"].model.float()
    exact_model = policies["sdpa"].model
    spec = spec_of(folder)
    shape = read_shape(read_config(folder))
    table = rope_table(length, head_dim=spec.head_dim, theta=shape.rope_theta)
    ids = torch.randint(7, shape.vocab_size, (rows, length))
    scored = torch.randperm(rows * length)[: rows * length // 5]
    sampled = torch.randint(7, shape.vocab_size, (len(scored),))

    def native(policy: Policy) -> Callable[[], object]:
        def run() -> None:
            logits = policy.logits(policy.hidden(ids).flatten(0, 1)[scored])
            logprobs = logits.gather(1, sampled[:, None])[:, 0] - logits.logsumexp(1)
            logprobs.sum().backward()
            policy.model.zero_grad()

        return run

    def exact() -> None:
        tensors = tensors_of(dict(exact_model.named_parameters()), spec)
        hidden = train_hidden(tensors, spec, ids, table, tiling=CPU_TILING)
        found = vocab_scores(
            hidden.flatten(0, 1)[scored], tensors.head, sampled[:, None], temperature=1.0
        )
        (found.scores_PK[:, 0] - found.normaliser_P).sum().backward()
        exact_model.zero_grad()

    runs: Timed = {"exact": exact, **{name: native(policy) for name, policy in policies.items()}}
    return interleaved(runs, repeats=repeats)


def decoding(folder: Path, *, batch: int, context: int, repeats: int) -> dict[str, float]:
    """CPU seconds of one decoding step: the embedded engine in exact and in native mode, and
    Transformers with sdpa."""
    from transformers import DynamicCache

    shape = read_shape(read_config(folder))
    profiles = {
        name: Profile(
            weights="bf16",
            accelerator="cpu",
            activations="bf16",
            kv="bf16",
            attention="triton",
            consistency=name,
        )
        for name in ("exact", "native")
    }
    weights = {
        name: load_weights(folder, shape=shape, profile=profile)
        for name, profile in profiles.items()
    }
    room = {"num_slots": batch, "context_length": shape.context_length}
    cache = KvCache(shape, **room)
    native = Forward(shape, profiles["native"], cache)
    exact = ExactForward(shape, profiles["exact"], weights["exact"], **room)
    for used in (cache, exact.cache):
        used.values.copy_(torch.randn(used.values.shape).bfloat16())
    ids = torch.randint(7, shape.vocab_size, (batch,))
    step = Step(
        token_ids_T=ids,
        positions_T=torch.full((batch,), context),
        num_decoding=batch,
        longest_decoding=context + 1,
        chunks=(),
    )
    model = Policy.load(folder, attention="sdpa").model
    past = DynamicCache()
    with torch.no_grad():
        model(torch.randint(7, shape.vocab_size, (batch, context)), cache=past)

    def transformers_step() -> None:
        model(ids[:, None], cache=past)
        past.crop(-1)

    with torch.inference_mode():
        found = interleaved(
            {
                "exact": lambda: exact.logits(weights["exact"], step),
                "native": lambda: native.logits(weights["native"], step),
                "transformers": transformers_step,
            },
            repeats=repeats,
        )
    return {**found, "decode_model_ratio": found["exact"] / found["native"]}


def measure(
    *, quick: bool, head_dims: list[int], lengths: list[int], dtypes: list[str]
) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = resolve_model("bundled:tiny")
    rows = [
        attention_row(
            tokens, dtype, head_dim=head_dim, repeats=2 if tokens >= 4096 else 3 if quick else 5
        )
        for head_dim in head_dims
        for dtype in dtypes
        for tokens in lengths
    ]
    train_s = training(folder, rows=16, length=256, repeats=3 if quick else 8)
    batches = (8,) if quick else (1, 8, 32)
    decode = [
        {"batch": batch, **decoding(folder, batch=batch, context=200, repeats=60)}
        for batch in batches
    ]
    return {
        "rows": rows,
        "model_ratio": train_s["exact"] / train_s["sdpa"],
        "model_float32_ratio": train_s["exact"] / train_s["sdpa_float32"],
        "model_train_s": train_s,
        "model_decode_s": decode,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
    }


def show(found: dict[str, Any]) -> None:
    print(
        "attention, theirs over ours: explicit eager (forward, forward + backward, decode), fused "
        "kernel without graphs (forward, forward + backward), plain loop (forward); ours over "
        "theirs: sdpa (forward, forward + backward, decode)"
    )
    for row in found["rows"]:
        plain = f"{row['naive_ratio']:6.1f}" if row["naive_ratio"] else "     -"
        print(
            f"  {row['tokens']:5} {row['dtype']:8} d{row['head_dim']:<3} {row['heads']:>4} heads"
            f"  {row['forward_ratio']:5.2f} {row['train_ratio']:5.2f} {row['decode_ratio']:5.2f}"
            f"  {row['ungraphed_ratio']:5.2f} {row['ungraphed_train_ratio']:5.2f}"
            f"  {plain}  {row['sdpa_ratio']:5.2f} {row['sdpa_train_ratio']:5.2f}"
            f" {row['sdpa_decode_ratio']:5.2f}"
        )
    seconds = ", ".join(f"{k} {1e3 * v:.0f} ms" for k, v in found["model_train_s"].items())
    print(
        f"bundled policy, forward + backward: {seconds}; exact over sdpa {found['model_ratio']:.2f}"
        f", over sdpa in float32 {found['model_float32_ratio']:.2f}"
    )
    for row in found["model_decode_s"]:
        names = ("exact", "native", "transformers")
        seconds = ", ".join(f"{name} {1e3 * row[name]:.2f} ms" for name in names)
        print(
            f"bundled policy, one decoding step of {row['batch']}: {seconds}; exact over native "
            f"{row['decode_model_ratio']:.2f}"
        )
    print(f"load {found['load']:.1f}, {found['threads']} thread, {found['isa']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--quick", action="store_true", help="short lengths, under a minute")
    parser.add_argument("--head-dims", default="64", help="comma separated, default 64")
    parser.add_argument("--lengths", help="comma separated, default 512 to 8192")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma separated")
    options = parser.parse_args()
    default = QUICK_LENGTHS if options.quick else LENGTHS
    found = measure(
        quick=options.quick,
        head_dims=[int(dim) for dim in options.head_dims.split(",")],
        lengths=[int(n) for n in options.lengths.split(",")] if options.lengths else list(default),
        dtypes=options.dtypes.split(","),
    )
    if options.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
