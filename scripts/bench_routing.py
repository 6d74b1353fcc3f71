#!/usr/bin/env python
"""Measures what routing replay does to the mismatch, on sessions that a run recorded.

    python scripts/bench_routing.py RUN_DIR [--json] [--model PATH]

RUN_DIR is a run with algo.routing_replay=true. The sessions of its first step (sampled by version
0, the weights of --model, so there is no lag) are scored twice by a BF16 trainer: with its own
routes and with the recorded ones. Per pool: tokens, share of token-layers in which the trainer's
router agrees, mean and largest absolute difference to the sampler in nats, k3.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import yaml

from rlmix.batch.packing import pack_samples, pool_names_of
from rlmix.batch.samples import to_sample
from rlmix.core.sample import TrainSample
from rlmix.model.bundle import resolve_model
from rlmix.observe.trajectories import read_trajectories
from rlmix.trainer.policy import Policy
from rlmix.trainer.routing import routing_metrics

MICRO_BATCH_TOKENS = 4096
FIRST_STEP = "trajectories/step_000001.jsonl"


@torch.no_grad()
def score(
    policy: Policy, samples: Sequence[TrainSample], *, temperature: float
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Per pool trainer minus sampler, float64 nats; and the routing metrics (empty without)."""
    names = pool_names_of(samples)
    batches = pack_samples(samples, max_tokens=MICRO_BATCH_TOKENS)
    found = [policy.token_logprobs(b, temperature=temperature, replay=True) for b in batches]
    gaps = np.concatenate(
        [
            f.trainer_P.double().numpy() - b.sampler_logprobs_P
            for f, b in zip(found, batches, strict=True)
        ]
    )
    pools = np.concatenate([batch.pools_P for batch in batches])
    tallies = [f.routing for f in found if f.routing is not None]
    metrics = routing_metrics(batches, tallies, pool_names=names) if tallies else {}
    return {name: gaps[pools == index] for index, name in enumerate(names)}, metrics


def measure(run: Path, folder: Path) -> dict[str, Any]:
    config = yaml.safe_load((run / "config.yaml").read_text())
    temperature = float(config["algo"]["temperature"])
    trajectories = read_trajectories(run / FIRST_STEP)
    samples = [to_sample(t, advantage=1.0) for t in trajectories if t.num_sampled_tokens]
    plain, _ = score(Policy.load(folder), samples, temperature=temperature)
    replayed, metrics = score(
        Policy.load(folder, replays_routing=True), samples, temperature=temperature
    )
    rows = [
        {
            "pool": name,
            "tokens": len(plain[name]),
            "agree_frac": metrics.get(f"routing/by_pool/{name}/agree_frac"),
            "without": _mismatch(plain[name]),
            "with": _mismatch(replayed[name]),
        }
        for name in plain
    ]
    return {"rows": rows, "replayed_frac": metrics["routing/replayed_frac"]}


def _mismatch(gaps: np.ndarray) -> dict[str, float]:
    return {
        "mean_abs": float(np.abs(gaps).mean()),
        "max_abs": float(np.abs(gaps).max()),
        "k3_kl": float((np.exp(gaps) - 1 - gaps).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--model", default="bundled:tiny", help="the policy's version 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(arguments.run, resolve_model(arguments.model))
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{'pool':16}{'tokens':>8}{'agree':>8}   mean |d|           k3                   max |d|")
    for row in result["rows"]:
        old, new = row["without"], row["with"]
        agree = "-" if row["agree_frac"] is None else f"{row['agree_frac']:.3f}"
        print(
            f"{row['pool']:16}{row['tokens']:8}{agree:>8}   {old['mean_abs']:.4f} -> "
            f"{new['mean_abs']:.4f}   {old['k3_kl']:.2e} -> {new['k3_kl']:.2e}   "
            f"{old['max_abs']:.3f} -> {new['max_abs']:.3f}"
        )
    print(f"replayed: {result['replayed_frac']:.4f} of the token-layers that reach a loss")


if __name__ == "__main__":
    main()
