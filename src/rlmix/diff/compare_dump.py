"""Compares the trainer with texts out of a file, or two columns of one file."""

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlmix.diff.compare import noise_of
from rlmix.diff.diagnose import replayed, text_of
from rlmix.diff.dump_files import Dumped
from rlmix.diff.foreign import explain
from rlmix.diff.gate import Obstacle, setting_obstacles, text_obstacles
from rlmix.diff.program import run_whole
from rlmix.diff.report_data import Cause, DiffReport, PoolFinding, gap_of
from rlmix.diff.signatures import signatures
from rlmix.diff.statistics import gap
from rlmix.diff.texts import Recorded, positions_of
from rlmix.diff.trainer_side import TrainerSide

NOT_TESTED = (
    "the sampler's operators: they are not here, so causes are tried on the trainer's scores",
    "decoding against prefill on the other side",
    "the other side's weights",
)
MOST_EXPLAINED = 512
"""Tokens whose whole distributions are looked at; more would not make a cause surer."""


def compare_dump(
    dumped: Sequence[Dumped],
    *,
    source: str,
    model: Path | None,
    numerics: str,
    temperature: float,
    tolerances: Mapping[str, float],
    tolerance_nats: float,
    tile: int,
    prefill: Mapping[str, np.ndarray] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> DiffReport:
    """Compare recorded logprobs with the dump's own trainer, or with the model's.

    Args:
        model: folder of the weights that sampled; None: every text brings its trainer's logprobs.
        temperature: that of the trainer's scores.
        tolerances: pool -> nats; `tolerance_nats` for pools that it lacks.
        prefill: text name -> what the sampler says of the same tokens as a prompt; None: not known.
    """
    torch.set_num_threads(1)
    trainer = None
    noise: dict[str, float] = {}
    if model is not None:
        say("loading the trainer")
        trainer = TrainerSide.load(model, numerics=numerics, temperature=temperature)
    obstacles = list(_obstacles(dumped, trainer, temperature))
    pools: dict[str, list[Dumped]] = {}
    for one in dumped:
        pools.setdefault(one.recorded.pool, []).append(one)
    findings = []
    if not obstacles:
        for name, texts in pools.items():
            say(f"pool {name}: scoring")
            limit = tolerances.get(name, tolerance_nats)
            findings.append(_pool(name, texts, trainer, limit, tile=tile, prefill=prefill))
        if trainer is not None:
            say("noise floor")
            noise = noise_of(trainer, [one.recorded for one in dumped[:4]])
    return DiffReport(
        source=source,
        total=gap_of(findings),
        noise=noise,
        pools=tuple(findings),
        obstacles=tuple(obstacles),
        not_tested=NOT_TESTED if trainer is not None else (*NOT_TESTED, "the trainer's noise"),
        machine={"cpu": platform.machine(), "torch": torch.__version__},
    )


def _obstacles(
    dumped: Sequence[Dumped], trainer: TrainerSide | None, temperature: float
) -> list[Obstacle]:
    texts = [one.recorded for one in dumped]
    vocab_size = 2**31 if trainer is None else trainer.side.shape.vocab_size
    found = list(text_obstacles(texts, vocab_size=vocab_size))
    if trainer is not None:
        for one in dumped:
            if one.temperature is not None:
                told: dict[str, str | float] = {"temperature": float(one.temperature)}
                asked: dict[str, str | float] = {"temperature": temperature}
                found += setting_obstacles(asked, told, name=one.recorded.name)
    return found


def _pool(
    name: str,
    texts: Sequence[Dumped],
    trainer: TrainerSide | None,
    tolerance_nats: float,
    *,
    tile: int,
    prefill: Mapping[str, np.ndarray] | None,
) -> PoolFinding:
    recorded = [one.recorded for one in texts]
    recorded_P = np.concatenate([one.logprobs_P for one in recorded])
    positions_P = np.concatenate([np.array(one.sampled) for one in recorded])
    own = [one.trainer_P for one in texts]
    if trainer is None:
        trainer_P = np.concatenate([row for row in own if row is not None])
    elif any(one.kept is not None for one in recorded):
        trainer_P = torch.cat(replayed(trainer.side, recorded)).numpy()
    else:
        scored = trainer.score(recorded)
        rows = zip(scored, recorded, strict=True)
        trainer_P = torch.cat([row[positions_of(one)] for row, one in rows]).numpy()
    total = gap(trainer_P, recorded_P, positions_P)
    edges = {"trainer_recorded": total}
    if prefill is not None:
        prefill_P = np.concatenate([prefill[one.name] for one in recorded])
        edges = {
            "trainer_prefill": gap(trainer_P, prefill_P, positions_P),
            "prefill_recorded": gap(prefill_P, recorded_P, positions_P),
        }
    causes: tuple[Cause, ...] = ()
    if trainer is not None and total.mismatch_count:
        causes = _causes(trainer, recorded)
    d_P = trainer_P.astype(np.float64) - recorded_P.astype(np.float64)
    return PoolFinding(
        name=name,
        numerics="as recorded",
        groups={},
        total=total,
        edges=edges,
        tolerance_nats=tolerance_nats,
        must_be_equal=False,
        causes=causes,
        hints=tuple(signatures(d_P, trainer_P.astype(np.float64), positions_P, tile=tile)),
        assembly_max_abs=None,
        first_difference=None,
        heat_LT=None,
        trainer_P=trainer_P,
        recorded_P=recorded_P,
        positions_P=positions_P,
        is_judged=True,
    )


def _causes(trainer: TrainerSide, texts: Sequence[Recorded]) -> tuple[Cause, ...]:
    """Shifted targets first, then what `foreign.explain` tries."""
    logits, targets, recorded = [], [], []
    neighbours: dict[int, list[Tensor]] = {-1: [], 1: []}
    taken = 0
    for text in texts:
        if text.kept is not None or taken >= MOST_EXPLAINED:
            continue
        places = positions_of(text)[: MOST_EXPLAINED - taken]
        taken += len(places)
        rows = run_whole(trainer.side, text_of(text))["logits"]
        ids = torch.tensor(text.ids)
        logits.append(rows[places] / trainer.temperature)
        targets.append(ids[places + 1])
        recorded.append(torch.from_numpy(text.logprobs_P)[: len(places)])
        scored = trainer.score([text])[0]
        for shift, found in neighbours.items():
            found.append(scored[(places + shift).clamp(0, len(scored) - 1)])
    if not logits:
        return ()
    told = torch.cat(recorded).double()
    scores = torch.cat(logits)
    own = scores.log_softmax(-1).gather(1, torch.cat(targets)[:, None])[:, 0]
    gap_own = float((own - told).abs().mean())
    for shift, found in neighbours.items():
        left = float((torch.cat(found) - told).abs().mean())
        if left < 0.2 * gap_own:
            return (
                Cause(
                    operator="logprob",
                    layers=(-1,),
                    verdict="framework",
                    cause="tokens",
                    evidence=f"recorded logprobs are those of the tokens {shift:+d} further: that "
                    f"leaves {left:.3g} of {gap_own:.3g} nats",
                    confidence=0.95,
                    share=1 - left / gap_own,
                    alone=gap_own - left,
                    left=left,
                    next_experiment="look for a shift by one where labels are made",
                ),
            )
    return explain(scores, torch.cat(targets), told)
