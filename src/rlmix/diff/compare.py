"""The command's work: sample, gate, score, split, diagnose.

Everything happens in this process, one pool after another; nothing is downloaded and no server is
started. Invariant: no verdict comes out of statistics alone, and what could not be compared is an
obstacle, never a number.
"""

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlmix.diff.diagnose import Diagnosis, causes_of, replayed
from rlmix.diff.findings import Thresholds
from rlmix.diff.gate import (
    Obstacle,
    setting_obstacles,
    shift_obstacle,
    text_obstacles,
    weight_obstacles,
)
from rlmix.diff.pool import EmbeddedPool, PoolAsk, write_view
from rlmix.diff.report_data import DiffReport, PoolFinding, gap_of
from rlmix.diff.signatures import signatures
from rlmix.diff.statistics import Gap, gap
from rlmix.diff.texts import Recorded, positions_of
from rlmix.diff.trainer_side import TrainerSide
from rlmix.model.chat import ChatRenderer
from rlmix.numerics.views import encode_view

TRAINER_PREFILL, PREFILL_DECODE, DECODE_RECORDED = (
    "trainer_prefill", "prefill_decode", "decode_recorded",
)  # fmt: skip
GROUPED_BY = ("accelerator", "view", "activations", "kv", "attention")
NOISE_TEXTS = 4
"""Texts that the trainer scores again for its noise floor."""
NOT_TESTED = (
    "backward passes and gradients",
    "several processes of one replica (tensor and expert parallel)",
    "real accelerators: embedded pools emulate number formats on the CPU",
    "texts longer than those sampled here",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffAsk:
    """What to compare."""

    model: Path
    """Folder with tokenizer and chat template; also the weights where `weights` is None."""
    pools: tuple[PoolAsk, ...]
    numerics: str
    """As in `TrainerSpec`."""
    temperature: float
    sessions: int
    session_tokens: int
    seed: int
    diagnose: bool
    least_share: float
    limits: Thresholds
    source: str
    """Where the texts come from, for people."""
    weights: Path | None = None
    """Folder of BF16 weights and config.json; None: the model's own."""
    recorded: tuple[Recorded, ...] = ()
    """Texts of a run, at least one of each pool; empty: the pools sample now."""


def compare(ask: DiffAsk, *, say: Callable[[str], None] = lambda _: None) -> DiffReport:
    """Sample from every pool, and compare what it recorded with the trainer.

    Args:
        say: gets a line for a person before each part.
    Raises:
        TrainerError, ConfigError, WeightSyncError: a side cannot be loaded.
    """
    torch.set_num_threads(1)
    say("loading the trainer")
    weights = ask.weights or ask.model
    trainer = TrainerSide.load(weights, numerics=ask.numerics, temperature=ask.temperature)
    renderer = ChatRenderer(ask.model)
    state = trainer.policy.state()
    findings, obstacles, noise_texts = [], [], []
    with tempfile.TemporaryDirectory(prefix="rlmix-diff-") as scratch:
        for pool_ask in ask.pools:
            folder = write_view(weights, state, pool_ask.view, Path(scratch) / pool_ask.view)
            pool = EmbeddedPool(pool_ask, folder, temperature=ask.temperature)
            if ask.recorded:
                texts = [text for text in ask.recorded if text.pool == pool_ask.name]
            else:
                say(f"pool {pool_ask.name}: sampling")
                texts = pool.sample(
                    renderer, sessions=ask.sessions, tokens=ask.session_tokens, seed=ask.seed
                )
            noise_texts += texts[:1]
            found = [
                *setting_obstacles(trainer.side.settings, pool.settings(), name=pool_ask.name),
                *text_obstacles(texts, vocab_size=trainer.side.shape.vocab_size),
                *weight_obstacles(
                    encode_view(state, pool_ask.view), pool.weights.raw, name=pool_ask.name
                ),
            ]
            obstacles += found
            if not found:
                say(f"pool {pool_ask.name}: scoring and diagnosing")
                findings.append(_compare_pool(ask, trainer, pool, texts, obstacles))
        say("noise floor")
        noise = noise_of(trainer, noise_texts[:NOISE_TEXTS])
    return _report(ask, findings, obstacles, noise)


def noise_of(trainer: TrainerSide, texts: Sequence[Recorded]) -> dict[str, float]:
    """What two evaluations of the same weights differ by, mean |nats|, for three ways to do it
    again: the same call, each text alone instead of batched, the other attention."""
    base = torch.cat(trainer.score(list(texts)))
    alone = torch.cat([trainer.score([text])[0] for text in texts])
    again = torch.cat(trainer.score(list(texts)))
    otherwise = torch.cat(trainer.score(list(texts), otherwise=True))

    def mean(other: Tensor) -> float:
        return float((other - base).double().abs().mean())

    return {
        "the same call again": mean(again),
        "alone instead of batched": mean(alone),
        "the other attention": mean(otherwise),
    }


def _compare_pool(
    ask: DiffAsk,
    trainer: TrainerSide,
    pool: EmbeddedPool,
    texts: list[Recorded],
    obstacles: list[Obstacle],
) -> PoolFinding:
    shape = trainer.side.shape
    scored = trainer.score(texts)
    if any(text.kept is not None for text in texts):
        trainer_P = torch.cat(replayed(trainer.side, texts))
    else:
        whole = zip(scored, texts, strict=True)
        trainer_P = torch.cat([row[positions_of(text)] for row, text in whole])
    recorded_P = torch.cat([torch.from_numpy(text.logprobs_P) for text in texts])
    positions_P = np.concatenate([np.array(text.sampled) for text in texts])
    shifted = {shift: _shifted(scored, texts, shift) for shift in (-1, 0, 1)}
    wrong = shift_obstacle(recorded_P[_inner(texts)], shifted)
    if wrong is not None:
        obstacles.append(wrong)
    prefill_P = torch.cat(replayed(pool.side(shape, prefilled=None), texts))
    decode_P = torch.cat(
        [replayed(pool.side(shape, prefilled=text.prefilled), [text])[0] for text in texts]
    )

    def edge(first: Tensor, second: Tensor) -> Gap:
        return gap(first.numpy(), second.numpy(), positions_P)

    total = edge(trainer_P, recorded_P)
    told = None
    if ask.diagnose and total.mismatch_count:
        told = _diagnose(ask, trainer, pool, texts, scored)
    d_P = (trainer_P.double() - recorded_P.double()).numpy()
    tile = ask.limits.tile
    return PoolFinding(
        name=pool.ask.name,
        numerics=_numerics(pool.ask),
        groups={key: str(getattr(pool.ask, key)) for key in GROUPED_BY},
        total=total,
        edges={
            TRAINER_PREFILL: edge(trainer_P, prefill_P),
            PREFILL_DECODE: edge(prefill_P, decode_P),
            DECODE_RECORDED: edge(decode_P, recorded_P),
        },
        tolerance_nats=pool.ask.tolerance_nats,
        must_be_equal=ask.numerics != "native",
        causes=() if told is None else told.causes,
        hints=tuple(signatures(d_P, trainer_P.double().numpy(), positions_P, tile=tile)),
        assembly_max_abs=None if told is None else told.assembly_max_abs,
        first_difference=None if told is None else told.first_difference,
        heat_LT=None if told is None else told.heat_LT,
        trainer_P=trainer_P.numpy(),
        recorded_P=recorded_P.numpy(),
        positions_P=positions_P,
        is_judged=ask.diagnose,
    )


def _diagnose(
    ask: DiffAsk,
    trainer: TrainerSide,
    pool: EmbeddedPool,
    texts: list[Recorded],
    scored: list[Tensor],
) -> Diagnosis:
    """The worst text by mean difference decides."""
    gaps = [
        float((row[positions_of(text)] - torch.from_numpy(text.logprobs_P)).abs().mean())
        for row, text in zip(scored, texts, strict=True)
    ]
    worst = texts[int(np.argmax(gaps))]
    return causes_of(
        trainer.side,
        pool.side(trainer.side.shape, prefilled=worst.prefilled),
        trainer.reference,
        worst,
        ask.limits,
        least_share=ask.least_share,
    )


def _inner(texts: Sequence[Recorded]) -> Tensor:
    """bool over all sampled tokens: those that have a neighbour on either side in their text."""
    kept = [
        torch.tensor([1 < place < len(text.ids) - 1 for place in text.sampled]) for text in texts
    ]
    return torch.cat(kept)


def _shifted(scored: Sequence[Tensor], texts: Sequence[Recorded], shift: int) -> Tensor:
    """The trainer's logprobs of the tokens `shift` places after the sampled ones."""
    parts = []
    for row, text in zip(scored, texts, strict=True):
        inner = [place for place in text.sampled if 1 < place < len(text.ids) - 1]
        parts.append(row[torch.tensor(inner, dtype=torch.int64) - 1 + shift])
    return torch.cat(parts)


def _numerics(ask: PoolAsk) -> str:
    parts = (ask.accelerator, ask.weights, ask.activations, ask.kv, ask.attention, ask.consistency)
    return "/".join((*parts, "emulated"))


def _report(
    ask: DiffAsk,
    findings: Sequence[PoolFinding],
    obstacles: Sequence[Obstacle],
    noise: dict[str, float],
) -> DiffReport:
    return DiffReport(
        source=ask.source,
        total=gap_of(findings),
        noise=noise,
        pools=tuple(findings),
        obstacles=tuple(obstacles),
        not_tested=NOT_TESTED if ask.diagnose else (*NOT_TESTED, "causes (diff.diagnose=false)"),
        machine={
            "cpu": platform.machine(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
        },
    )
