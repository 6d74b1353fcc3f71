"""One cell of the token study: one correction on one fleet from one seed, start to end.

Plain stochastic gradient descent on float32 weights; sampler weights are refreshed only every
`refresh_every` updates. The loss is `rlmix.algos.losses`, as in a real run, with every candidate
recorded (the vocabulary is small), so that no sum has to be modelled.

Invariant: a cell is a function of its `Cell`; the sessions of step n are drawn from generators
that depend on seed and step alone, never on the arm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from rlmix.algos.advantages import group_advantages
from rlmix.algos.corrections import centering_term
from rlmix.algos.losses import policy_loss
from rlmix.algos.support import Support, full_logprobs, on_kept_set
from rlmix.studies import token_task as task
from rlmix.studies.token_policy import (
    EXACT,
    Decoder,
    Kernel,
    Weights,
    initial_weights,
    session_logits,
)
from rlmix.studies.token_samplers import FLEETS, pool_weights

GROUPS = 36
GROUP_SIZE = 8
"""288 sessions for each update: 48 for each pool of six."""
WARMUP_STEPS = 300
WARMUP_SESSIONS = 64
WARMUP_LR = 3e-3
CORRUPTED_FRAC = 0.35
"""Tokens of the warm start's teacher that are drawn at random: it leaves something to learn."""
HEAD = 8
"""Likeliest candidates of the sampler beside whose rest the tail ratio is measured; a real run's
head is 64 of a large vocabulary."""
EVAL_EVERY = 25
EVAL_SESSIONS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """The keys of `conf/algo` that the study's loss needs."""

    importance: str
    low: float
    high: float
    centering: bool
    top_p: float
    replay: bool
    scale: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    arm: str
    correction: Correction
    fleet: str
    """A key of `token_samplers.FLEETS`."""
    refresh_every: int
    lr: float
    steps: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sessions:
    """What samplers hand to the trainer, [N, L] and [N, L, V]."""

    features_NL4: Tensor
    tokens_NL: Tensor
    logprobs_NLV: Tensor
    """Of the distribution that was sampled from: -inf outside a kept set."""
    num_good_N: Tensor


@torch.no_grad()
def sample(
    weights: Weights, kernel: Kernel, prompts_N: Tensor, *, top_p: float, generator: Generator
) -> Sessions:
    """Whole sessions from one pool."""
    state, decoder = task.start(prompts_N), Decoder(weights, kernel)
    features, tokens, logprobs = [], [], []
    for _ in range(task.LENGTH):
        seen_N4 = task.features(state)
        logprobs_NV = _kept(decoder.logits(seen_N4).log_softmax(1), top_p)
        tokens_N = torch.multinomial(logprobs_NV.exp(), 1, generator=generator)[:, 0]
        features.append(seen_N4)
        tokens.append(tokens_N)
        logprobs.append(logprobs_NV)
        state = task.advance(state, tokens_N)
    return Sessions(
        features_NL4=torch.stack(features, 1),
        tokens_NL=torch.stack(tokens, 1),
        logprobs_NLV=torch.stack(logprobs, 1),
        num_good_N=state.num_good_N,
    )


def _kept(logprobs_NV: Tensor, top_p: float) -> Tensor:
    """The smallest set of tokens that holds `top_p`, renormalised; the rest -inf."""
    if top_p >= 1.0:
        return logprobs_NV
    sorted_NV, order_NV = logprobs_NV.exp().sort(dim=1, descending=True)
    before_NV = sorted_NV.cumsum(1) - sorted_NV
    is_out_NV = torch.zeros_like(before_NV, dtype=torch.bool)
    is_out_NV.scatter_(1, order_NV, before_NV >= top_p)
    return logprobs_NV.masked_fill(is_out_NV, float("-inf")).log_softmax(1)


def warm_start(seed: int) -> dict[str, Tensor]:
    """Weights that imitate a teacher who errs; the same for every arm and fleet of a seed."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    weights = {k: w.requires_grad_() for k, w in initial_weights(generator).items()}
    optimizer = torch.optim.Adam(list(weights.values()), lr=WARMUP_LR)
    for _ in range(WARMUP_STEPS):
        state = task.start(_prompts(WARMUP_SESSIONS, generator))
        features, tokens = [], []
        for _ in range(task.LENGTH):
            features.append(task.features(state))
            tokens.append(_teacher(state, generator))
            state = task.advance(state, tokens[-1])
        logits_NLV = session_logits(weights, torch.stack(features, 1))
        loss = -full_logprobs(logits_NLV.flatten(0, 1), torch.stack(tokens, 1).flatten()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


def _teacher(state: task.State, generator: Generator) -> Tensor:
    size = state.prompts_N.shape
    block_N = torch.randint(task.VOCABULARY // task.RESIDUES, size, generator=generator)
    good_N = task.wanted_residue(state) + task.RESIDUES * block_N
    any_N = torch.randint(task.VOCABULARY, size, generator=generator)
    return torch.where(torch.rand(size, generator=generator) < CORRUPTED_FRAC, any_N, good_N)


def _prompts(number: int, generator: Generator) -> Tensor:
    return torch.randint(task.NUM_PROMPTS, (number,), generator=generator)


def run_cell(cell: Cell, on_row: Callable[[dict[str, Any]], None]) -> None:
    """Train one cell; `on_row` gets the record of every update.

    A row: step; `reward/mean` and `sampler/good_frac` of the sessions trained on;
    `trainer/good_frac` every `EVAL_EVERY` steps, of fresh sessions from the trainer's own weights;
    `mismatch/kl` exact over the vocabulary, `mismatch/k3_kl`, `correction/*` and `loss/grad_norm`.
    Ends early where the gradient is not finite, with `failed` in the last row.
    """
    weights = {k: w.requires_grad_() for k, w in warm_start(cell.seed).items()}
    kinds = FLEETS[cell.fleet]
    held: list[dict[str, Tensor]] = []
    for step in range(cell.steps):
        if step % cell.refresh_every == 0:
            held = [pool_weights(weights, kind) for kind in kinds]
        generator = torch.Generator().manual_seed(1_000_003 * (cell.seed + 1) + step)
        prompts_N = _prompts(GROUPS, generator).repeat_interleave(GROUP_SIZE)
        # Session i goes to pool i modulo the number of pools: groups are spread over the fleet.
        parts = [
            sample(
                pool, kind.kernel, prompts_N[i :: len(kinds)],
                top_p=cell.correction.top_p, generator=generator,
            )
            for i, (kind, pool) in enumerate(zip(kinds, held, strict=True))
        ]  # fmt: skip
        sessions = _in_order(parts)
        rewards_N = task.rewards(sessions.num_good_N, generator)
        row = _update(weights, sessions, rewards_N, cell)
        row = {"step": step + 1, "reward/mean": float(rewards_N.mean())} | row
        row["sampler/good_frac"] = float(sessions.num_good_N.float().mean()) / task.LENGTH
        if (step + 1) % EVAL_EVERY == 0 or step == 0:
            row["trainer/good_frac"] = trainer_score(weights)
        on_row(row)
        if "failed" in row:
            return


def trainer_score(weights: Weights) -> float:
    """Share of good tokens in fresh sessions from the trainer's own weights, 0 to 1."""
    generator = torch.Generator().manual_seed(7)
    prompts_N = torch.arange(EVAL_SESSIONS) % task.NUM_PROMPTS
    held = {name: weight.detach() for name, weight in weights.items()}
    found = sample(held, EXACT, prompts_N, top_p=1.0, generator=generator)
    return float(found.num_good_N.float().mean()) / task.LENGTH


def _in_order(parts: list[Sessions]) -> Sessions:
    """Sessions of all pools in the order of their prompts, so that groups are whole again."""

    def join(name: str) -> Tensor:
        return torch.stack([getattr(part, name) for part in parts], 1).flatten(0, 1)

    return Sessions(**{name: join(name) for name in Sessions.__dataclass_fields__})


def tail_ratio(trainer_TV: Tensor, sampler_TV: Tensor) -> float:
    """Mean over tokens of the sampler's mass outside its own head over the trainer's there.

    Args:
        trainer_TV, sampler_TV: logprobs over the whole vocabulary.
    """
    head_TK = sampler_TV.topk(HEAD, dim=1).indices
    head = Support(trainer_TV.gather(1, head_TK), sampler_TV.gather(1, head_TK), is_exact=False)
    # The kind of weights does not enter the ratio.
    term = centering_term(head, kind="none", low=0.0, high=1.0)
    return float(term.tail_ratio_T.mean())


def _update(
    weights: dict[str, Tensor], sessions: Sessions, rewards_N: Tensor, cell: Cell
) -> dict[str, Any]:
    correction = cell.correction
    advantages = [
        group_advantages(group.numpy(), scale=correction.scale)
        for group in rewards_N.split(GROUP_SIZE)
    ]
    advantages_N = torch.cat([torch.as_tensor(a, dtype=torch.float32) for a in advantages])
    tokens_T = sessions.tokens_NL.flatten()
    sampler_TV = sessions.logprobs_NLV.flatten(0, 1)
    logits_TV = session_logits(weights, sessions.features_NL4).flatten(0, 1)
    logits_T = logits_TV.gather(1, tokens_T[:, None])[:, 0]
    kept_TV = torch.isfinite(sampler_TV)
    if not correction.replay:
        kept_TV = torch.ones_like(kept_TV)
    trainer_T, trainer_TV = on_kept_set(logits_T, logits_TV, kept_TV)
    sampler_T = sampler_TV.gather(1, tokens_T[:, None])[:, 0]
    loss, metrics = policy_loss(
        trainer_T,
        sampler_T,
        advantages_N.repeat_interleave(task.LENGTH),
        torch.ones_like(tokens_T, dtype=torch.bool),
        importance=correction.importance,
        low=correction.low,
        high=correction.high,
        denominator=float(len(tokens_T)),
        centering=correction.centering,
        support=Support(
            trainer_logprobs_TK=trainer_TV, sampler_logprobs_TK=sampler_TV, is_exact=True
        )
        if correction.centering
        else None,
    )
    gradients = torch.autograd.grad(loss, list(weights.values()))
    grad_norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    p_TV, q_TV = trainer_TV.detach(), sampler_TV
    both_TV = torch.isfinite(p_TV) & torch.isfinite(q_TV)
    kl_TV = torch.where(both_TV, q_TV.exp() * (q_TV - p_TV), 0.0)
    entropy_TV = torch.where(both_TV, -q_TV.exp() * q_TV, 0.0)
    if correction.top_p >= 1.0:
        metrics["correction/head_tail_ratio"] = tail_ratio(p_TV, q_TV)
    row = metrics | {
        "loss/grad_norm": grad_norm,
        "mismatch/kl": float(kl_TV.sum(1).mean()),
        "sampler/entropy": float(entropy_TV.sum(1).mean()),
    }
    if not math.isfinite(grad_norm):
        return row | {"failed": "gradient is not finite"}
    with torch.no_grad():
        for weight, gradient in zip(weights.values(), gradients, strict=True):
            weight.sub_(gradient, alpha=cell.lr)
    return row
