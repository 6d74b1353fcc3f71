#!/usr/bin/env python
"""Measures the trainer's step on the bundled policy: with the products that `trainer/products.py`
chooses for this CPU, and with torch's own BF16 ones.

    python scripts/bench_step.py [--sessions N] [--repeat N] [--json]

Sessions are random: 100 to 180 tokens of which 30 are sampled, kept sets of nine. Both ways see the
same ones, in turns, from the same weights. Seconds are CPU seconds of one thread, the median.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from rlmix.config.compose import load_config
from rlmix.core.sample import TrainSample
from rlmix.model.bundle import resolve_model
from rlmix.trainer.policy import Policy
from rlmix.trainer.products import has_bf16_products
from rlmix.trainer.rank import TrainerRank
from rlmix.trainer.spec import AlgoSpec, OptimizerSpec, TrainerSpec

VOCABULARY = 593
SAMPLED, KEPT = 30, 9


def session(generator: np.random.Generator, number: int) -> TrainSample:
    length = int(generator.integers(100, 181))
    ids = generator.integers(0, VOCABULARY, length).astype(np.int32)
    mask = np.zeros(length, dtype=bool)
    mask[generator.choice(np.arange(60, length), SAMPLED, replace=False)] = True
    logprobs = np.zeros(length, dtype=np.float32)
    kept_ids, kept_logprobs = [], []
    for t in np.flatnonzero(mask):
        others = np.setdiff1d(generator.permutation(VOCABULARY)[: KEPT - 1], ids[t])
        kept_ids.append(np.concatenate([[ids[t]], others]))
        shares = generator.dirichlet(np.full(len(kept_ids[-1]), 3.0))
        kept_logprobs.append(np.log(shares).astype(np.float32))
        logprobs[t] = kept_logprobs[-1][0]
    sizes = np.zeros(length, dtype=np.int64)
    sizes[mask] = [len(kept) for kept in kept_ids]
    return TrainSample(
        session_id=f"s{number}",
        ids=ids,
        mask=mask,
        sampler_logprobs=logprobs,
        advantage=(0.5, -0.5, 0.25, -0.25)[number % 4],
        versions=np.where(mask, 0, -1).astype(np.int32),
        pools=np.where(mask, 0, -1).astype(np.int16),
        pool_names=("b200",),
        kept_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        kept_ids=np.concatenate(kept_ids).astype(np.int32),
        kept_logprobs=np.concatenate(kept_logprobs).astype(np.float32),
    )


class OwnProducts(Policy):
    """As torch multiplies by itself."""

    def products(self) -> Any:
        return nullcontext()


def make_rank(folder: Path) -> TrainerRank:
    config = load_config(overrides=[]).config
    fields = {name: getattr(config.algo, name) for name in AlgoSpec.__dataclass_fields__
              if hasattr(config.algo, name)}  # fmt: skip
    spec = TrainerSpec(
        # Random sessions are far from the policy: nothing is masked, so that all has a gradient.
        algo=AlgoSpec(**{**fields, "low": 1e-30, "high": 1e30}),
        optimizer=OptimizerSpec(
            name="adamw", lr=1e-6, beta1=0.9, beta2=0.98, weight_decay=0.0, grad_clip=1.0,
            warmup_steps=0,
        ),
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        threads=1, seed=0, checkpoints_dir=str(folder / "checkpoints"), keep_checkpoints=1,
        weights_store=str(folder / "weights"), views=("bf16",),
    )  # fmt: skip
    return TrainerRank(spec)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    generator = np.random.default_rng(0)
    samples = [session(generator, number) for number in range(asked.sessions)]
    tokens = sum(len(sample.ids) for sample in samples)
    with tempfile.TemporaryDirectory(prefix="rlmix-bench-step-") as name:
        ranks = {}
        for way in ("torch's own", "chosen"):
            ranks[way] = make_rank(Path(name) / way)
            ranks[way].load(resolve_model("bundled:tiny"))
        policy, _ = ranks["torch's own"]._parts()
        policy.__class__ = OwnProducts
        seconds: dict[str, list[float]] = {way: [] for way in ranks}
        norms: dict[str, float] = {}
        for turn in range(asked.repeat + 1):
            for way, rank in ranks.items():
                started_s = time.process_time()
                result = rank.train_step(samples, step=turn + 1, version=0)
                if turn == 0:
                    norms[way] = result.metrics["loss/grad_norm"]
                else:
                    seconds[way].append(time.process_time() - started_s)
    found = {way: round(statistics.median(times), 2) for way, times in seconds.items()}
    document = {
        "has_bf16_products": has_bf16_products(),
        "sessions": asked.sessions,
        "tokens": tokens,
        "cpu_s": found,
        "first_grad_norm": norms,
        "times_faster": round(found["torch's own"] / found["chosen"], 2),
    }
    if asked.json:
        print(json.dumps(document, indent=1))
        return 0
    table = Table(title=f"One step of {asked.sessions} sessions, {tokens} tokens")
    for column in ("products", "CPU s", "gradient norm of the first step"):
        table.add_column(column)
    for way, cpu_s in found.items():
        table.add_row(way, str(cpu_s), f"{norms[way]:.5f}")
    Console().print(table)
    has_them = "multiplies" if has_bf16_products() else "does not multiply"
    print(f"{document['times_faster']} times faster; this CPU {has_them} BF16 by itself")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
