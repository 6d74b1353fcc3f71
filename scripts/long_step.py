#!/usr/bin/env python
"""One forward and backward pass of the trainer over sessions of many tokens: peak memory and time.

    python scripts/long_step.py [--tokens 8192,32768] [--document 4096] [--recompute]
        [--model bundled:tiny] [--json]

One session of so many random tokens, or as many of `--document` tokens packed one behind another;
every second token sampled by the policy, with kept sets of eight; mis and score centering as in a
default run, fused attention. Each size in a process of its own on one thread; `mib` is its peak
resident memory, `s` its CPU seconds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmix.core.sample import TrainSample

SLOTS = 8


def sample_of(tokens: int, vocab: int, *, number: int) -> "TrainSample":
    """A random session whose sampler was near some policy."""
    import numpy as np

    from rlmix.core.sample import TrainSample

    make = np.random.default_rng(tokens + number)
    ids = make.integers(0, vocab, tokens).astype(np.int32)
    mask = np.arange(tokens) % 2 == 1
    count = int(mask.sum())
    kept = (ids[mask][:, None] + np.arange(SLOTS) * 7) % vocab
    q = make.dirichlet(np.full(SLOTS, 3.0), count)
    logprobs = np.zeros(tokens, dtype=np.float32)
    logprobs[mask] = np.log(q[:, 0])
    return TrainSample(
        session_id=f"long-{number}",
        ids=ids,
        mask=mask,
        sampler_logprobs=logprobs,
        advantage=0.5,
        versions=np.where(mask, 0, -1).astype(np.int32),
        pools=np.where(mask, 0, -1).astype(np.int16),
        pool_names=("b200",),
        kept_offsets=np.concatenate([[0], np.cumsum(mask * SLOTS)]).astype(np.int32),
        kept_ids=kept.flatten().astype(np.int32),
        kept_logprobs=np.log(q).flatten().astype(np.float32),
        reward=1.0,
    )


def one(model: str, tokens: int, *, document: int, recomputes: bool) -> dict[str, Any]:
    import torch

    from rlmix.batch.packing import pack_samples
    from rlmix.model.bundle import resolve_model
    from rlmix.trainer.policy import LONG_ATTENTION, Policy
    from rlmix.trainer.spec import AlgoSpec
    from rlmix.trainer.step import run_micro_batches, step_denominator

    torch.set_num_threads(1)
    policy = Policy.load(resolve_model(model), attention=LONG_ATTENTION)
    policy.take_documents()
    if recomputes:
        policy.recompute()
    vocab = policy.model.get_output_embeddings().weight.shape[0]
    algo = AlgoSpec(
        importance="mis", low=0.5, high=5.0, centering=True, sequence_mask="none",
        sequence_low=0.5, sequence_high=2.0, veto=0.0, average="tokens", replay=True,
        routing_replay=False, temperature=1.0,
    )  # fmt: skip
    lengths = [min(document, tokens - first) for first in range(0, tokens, document)]
    samples = [sample_of(length, vocab, number=n) for n, length in enumerate(lengths)]
    batches = pack_samples(samples, max_tokens=tokens, layout="documents")
    begin_s = time.process_time()
    result = run_micro_batches(
        policy, batches, algo, denominator=step_denominator(batches, algo), trainer_version=0
    )
    if result.failure:
        raise SystemExit(f"long_step: {result.failure}")
    return {
        "tokens": tokens,
        "documents": len(samples),
        "recompute": recomputes,
        "sampled": sum(int(sample.mask.sum()) for sample in samples),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "s": time.process_time() - begin_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--document", type=int, help="tokens of each; default: all in one")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--model", default="bundled:tiny")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--one", type=int, metavar="TOKENS")
    args = parser.parse_args()
    if args.one:
        document = args.document or args.one
        found = one(args.model, args.one, document=document, recomputes=args.recompute)
        print(json.dumps(found))
        return
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        command = [sys.executable, __file__, "--model", args.model, "--one", str(tokens)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command += ["--document", str(args.document)] if args.document else []
        command += ["--recompute"] if args.recompute else []
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
        rows.append(json.loads(found.stdout.splitlines()[-1]))
        row = rows[-1]
        text = f"{tokens:>7} tokens {row['mib']:>8,.0f} MiB {row['s']:>7.1f} cpu-s"
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
