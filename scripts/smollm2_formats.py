#!/usr/bin/env python
"""Number formats on real pretrained weights: SmolLM2-135M-Instruct, trainer against its formats.

    python scripts/smollm2_formats.py [--tokens 240] [--json]

Both sides compute with the consistent operators, so nothing but the format differs: exact mode
(which must be 0), FP8 and NVFP4 weights, FP8 cache; and Transformers' own forward in BF16. For each
the differences of the logprobs and what the diagnosis names. Weights as in
`scripts/smollm2_exact.py`, which fetches them on first use. Exit code 1 when exact mode differs or
a format is named wrongly.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from smollm2_exact import model_folder, prepare, sequences
from torch import Tensor

from rlmix.config.compose import load_config
from rlmix.diff.exact_side import exact_side
from rlmix.diff.faults import FROZEN, Ground, planted
from rlmix.diff.findings import Thresholds
from rlmix.diff.judge import replay
from rlmix.diff.program import Side, Text, run, trace
from rlmix.diff.statistics import gap
from rlmix.diff.trainer_side import TrainerSide
from rlmix.numerics.consistent.model import tensors_of
from rlmix.numerics.views import decode_view, encode_view
from rlmix.trainer.exact import spec_of
from rlmix.trainer.operators import TransformersOperators

LAYERS = 2
"""Layers whose operators are probed; a verdict needs no more, and probing reads whole matrices."""
EXPECTED = {
    "fp8 weights": "quantisation",
    "nvfp4 weights": "quantisation",
    "fp8 kv": "quantisation",
}


def limits() -> Thresholds:
    diff = load_config().config.diff
    return Thresholds(**{name: getattr(diff, name) for name in Thresholds.__dataclass_fields__})


def sides(trainer: TrainerSide) -> Mapping[str, Side]:
    """The same model in other formats."""
    policy: Any = trainer.policy
    spec = spec_of(policy.model.config, round_to=torch.bfloat16)
    theta = float(policy.model.config.rope_parameters["rope_theta"])

    def of(state: Mapping[str, Tensor], name: str) -> Side:
        tensors = tensors_of(state, spec)
        return exact_side(tensors, spec, name=name, theta=theta, temperature=1.0)

    state = {name: tensor.detach() for name, tensor in policy.model.named_parameters()}
    plain = tensors_of(state, spec)
    same = exact_side(plain, spec, name="exact", theta=theta, temperature=1.0)
    ground = Ground(side=same, tensors=plain, spec=spec, theta=theta, temperature=1.0)
    cache = next(fault for fault in FROZEN if fault.name == "kv_fp8")
    native = replace(same, operators=TransformersOperators(policy, temperature=1.0).table())
    return {
        "exact": same,
        "bf16, Transformers": native,
        "fp8 kv": planted(ground, cache),
        "fp8 weights": of(decode_view(encode_view(policy.state(), "fp8"), "fp8"), "fp8"),
        "nvfp4 weights": of(decode_view(encode_view(policy.state(), "nvfp4"), "nvfp4"), "nvfp4"),
    }


@torch.no_grad()
def measure(folder: Path, *, num_tokens: int) -> list[dict[str, Any]]:
    trainer = TrainerSide.load(folder, numerics="exact", temperature=1.0)
    ids = sequences(folder, num_tokens=num_tokens)
    texts = [Text.of(one) for one in ids]
    known = limits()
    base = torch.cat([run(trainer.side, text) for text in texts])
    seen = trace(trainer.side, texts[-1])
    probed = [step for step in seen.steps if step.place.layer < LAYERS]
    rows = []
    for name, side in sides(trainer).items():
        started_s = time.perf_counter()
        told = replay(trainer.side, side, trainer.reference, probed, known)
        found = torch.cat([run(side, text) for text in texts])
        numbers = gap(base.numpy(), found.numpy()).to_dict()
        causes = sorted({f"{one.place.name}: {one.judgement.cause}" for one in told})
        rows.append(
            {
                "format": name,
                **numbers,
                "causes": causes,
                "seconds": time.perf_counter() - started_s,
            }
        )
    return rows


def is_wrong(row: Mapping[str, Any]) -> bool:
    if row["format"] == "exact":
        return bool(row["mismatch_count"] or row["causes"])
    wanted = EXPECTED.get(row["format"])
    return wanted is not None and {cause.split(": ")[1] for cause in row["causes"]} != {wanted}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=240, help="of all four texts together")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = model_folder()
    prepare(folder)
    rows = measure(folder, num_tokens=options.tokens)
    if options.json:
        print(json.dumps(rows))
    else:
        print("| format | tokens | differ | mean abs | max abs | k3 | named |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for row in rows:
            print(
                f"| {row['format']} | {row['tokens']} | {row['mismatch_count']} | "
                f"{row['mean_abs']:.3g} | {row['max_abs']:.3g} | {row['k3_kl']:.2g} | "
                f"{', '.join(row['causes']) or 'nothing'} |"
            )
    return int(any(is_wrong(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
