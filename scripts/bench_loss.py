#!/usr/bin/env python
"""Measures the policy loss over large vocabularies: peak memory and time, ours and others.

    python scripts/bench_loss.py [--quick] [--json] [--tokens 4096,16384] [--vocabs 151936]
        [--hidden 64] [--contestants ours,dense] [--rivals PYTHON] [--rivals-up-to 4096]

Every contestant makes the clipped loss of the same tokens from the same float32 hidden states and
head, and the gradients of both, in a process of its own on one thread. `_mib` is that process's
peak resident memory (torch itself included), `_s` its CPU seconds for loss and gradients, so that a
busy machine disturbs them little; loss and gradients of all contestants must agree.

ours        blocks of tokens by ids, all but the first recomputed in the backward pass; entropy too
kept        ours with mis and score centering over recorded kept sets (another loss: the default)
dense       plain PyTorch: all logits, log_softmax, gather
in_forward  plain PyTorch for 256 tokens at a time, gradients formed at once
liger       liger_kernel's fused linear GRPO loss, one sequence of 1,024 tokens at a time
trl         trl's chunked logprob under our loss

`peak_ratio` and `time_ratio` are dense over ours (above 1 is in our favour) at the largest size
that dense was run at. Dense runs where its memory is free. liger and trl run with
`--rivals`, the interpreter of an environment with torch, liger-kernel, triton and trl.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEQUENCE = 1024
"""Tokens of one sequence: Liger takes whole ones."""
SLOTS = 16
"""Kept ids of each token."""
TOKENS, VOCABS = (4096, 16384, 65536), (151_936, 248_320)
QUICK_TOKENS, QUICK_VOCABS = (2048,), (151_936,)
SCORE_SPREAD = 3.0
"""Standard deviation of a token's scores, nats, whatever the hidden size."""
TEMPERATURE, LOW, HIGH = 0.8, 0.8, 1.2
IN_FORWARD_TOKENS = 256
DENSE_COPIES = 3.2
"""[tokens, vocabulary] float32 tensors that plain PyTorch holds at once, and a margin."""
EVERYWHERE = ("ours", "kept", "dense")
SMALL_ONLY = ("in_forward", "liger", "trl")
RIVALS = ("liger", "trl")
SAME_FRAC = 1e-3
"""Relative difference allowed between losses and gradients of contestants, all in float32."""


class Inputs:
    """One step's tokens: the same numbers in every process."""

    def __init__(self, *, tokens: int, vocab: int, hidden: int) -> None:
        import torch

        torch.set_num_threads(1)
        make = torch.Generator().manual_seed(tokens + vocab)
        spread = SCORE_SPREAD * TEMPERATURE / math.sqrt(hidden)
        self.hidden_PH = torch.randn(tokens, hidden, generator=make).requires_grad_()
        self.head_VH = torch.randn(vocab, hidden, generator=make).mul_(spread).requires_grad_()
        self.sampled_P = torch.randint(0, vocab, (tokens,), generator=make)
        self.noise_P = 0.2 * torch.randn(tokens, generator=make)
        self.kept_PK = torch.randint(0, vocab, (tokens, SLOTS), generator=make)
        self.kept_PK[:, 0] = self.sampled_P
        self.advantages_B = torch.randn(tokens // SEQUENCE, generator=make)
        with torch.no_grad():
            # A sampler whose logprobs are near: scores of normal numbers of this spread have this
            # normaliser on average. (Computing it would leave a mark on the peak.)
            scores_P = (self.hidden_PH * self.head_VH[self.sampled_P]).sum(1) / TEMPERATURE
            variance_P = (spread / TEMPERATURE) ** 2 * self.hidden_PH.square().sum(1)
            self.sampler_P = scores_P - math.log(vocab) - variance_P / 2 + self.noise_P

    @property
    def advantages_P(self) -> Any:
        return self.advantages_B.repeat_interleave(SEQUENCE)


def clipped_loss(inputs: Inputs, logprobs_P: Any, rows: slice = slice(None)) -> Any:
    from rlmix.algos.losses import token_terms

    terms = token_terms(
        logprobs_P,
        inputs.sampler_P[rows],
        inputs.advantages_P[rows],
        importance="ppo",
        low=LOW,
        high=HIGH,
        centering=False,
    )
    return terms.loss_T.sum() / len(inputs.sampler_P)


def plain_logprobs(inputs: Inputs, hidden_PH: Any, sampled_P: Any) -> Any:
    import torch.nn.functional as F

    logprobs_PV = (F.linear(hidden_PH, inputs.head_VH) / TEMPERATURE).log_softmax(dim=1)
    return logprobs_PV.gather(1, sampled_P[:, None])[:, 0]


def dense(inputs: Inputs) -> float:
    loss = clipped_loss(inputs, plain_logprobs(inputs, inputs.hidden_PH, inputs.sampled_P))
    loss.backward()
    return loss.item()


def in_forward(inputs: Inputs) -> float:
    import torch

    total, grads = 0.0, []
    for first in range(0, len(inputs.sampled_P), IN_FORWARD_TOKENS):
        rows = slice(first, first + IN_FORWARD_TOKENS)
        hidden_PH = inputs.hidden_PH[rows].detach().requires_grad_()
        loss = clipped_loss(inputs, plain_logprobs(inputs, hidden_PH, inputs.sampled_P[rows]), rows)
        loss.backward()
        total += loss.item()
        grads.append(hidden_PH.grad)
    inputs.hidden_PH.grad = torch.cat(grads)
    return total


def ours(inputs: Inputs) -> float:
    from rlmix.algos.chunked_head import head_scores

    found = head_scores(
        inputs.hidden_PH, inputs.head_VH, inputs.sampled_P[:, None], temperature=TEMPERATURE
    )
    loss = clipped_loss(inputs, found.scores_PK[:, 0] - found.normaliser_P)
    loss.backward()
    return loss.item()


def kept(inputs: Inputs) -> float:
    import torch

    from rlmix.algos.chunked_head import head_scores
    from rlmix.algos.losses import token_terms
    from rlmix.algos.support import Support, on_kept_set

    found = head_scores(
        inputs.hidden_PH, inputs.head_VH, inputs.kept_PK, temperature=TEMPERATURE, kept_scores=0
    )
    is_slot_PK = torch.ones_like(inputs.kept_PK, dtype=torch.bool)
    trainer_P, trainer_PK = on_kept_set(found.scores_PK[:, 0], found.scores_PK, is_slot_PK)
    sampler_PK = (trainer_PK.detach() + 0.2).log_softmax(1)
    terms = token_terms(
        trainer_P,
        sampler_PK[:, 0],
        inputs.advantages_P,
        importance="mis",
        low=0.5,
        high=5.0,
        centering=True,
        support=Support(trainer_PK, sampler_PK, is_exact=True),
    )
    loss = terms.loss_T.sum() / len(inputs.sampler_P)
    loss.backward()
    return loss.item()


def liger(inputs: Inputs) -> float:
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    shape = (len(inputs.advantages_B), SEQUENCE)
    criterion = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=False,
        use_ref_model=False,
        chunk_size=1,
        epsilon_low=1 - LOW,
        epsilon_high=HIGH - 1,
        temperature=TEMPERATURE,
    )
    loss, _ = criterion(
        inputs.hidden_PH.view(*shape, -1),
        inputs.head_VH,
        inputs.sampled_P.view(shape),
        torch.ones(shape),
        inputs.advantages_B,
        old_per_token_logps=inputs.sampler_P.view(shape),
    )
    loss.backward()
    return loss.item()


def trl(inputs: Inputs) -> float:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    logprobs_P, *_ = ChunkedLogProbFunction.apply(
        inputs.hidden_PH, inputs.head_VH, None, inputs.sampled_P, TEMPERATURE, chunk, None, 1.0,
        ("entropy",),
    )  # fmt: skip
    loss = clipped_loss(inputs, logprobs_P)
    loss.backward()
    return loss.item()


CONTESTANTS: dict[str, Callable[[Inputs], float]] = {
    "ours": ours,
    "kept": kept,
    "dense": dense,
    "in_forward": in_forward,
    "liger": liger,
    "trl": trl,
}


def one(name: str, tokens: int, vocab: int, hidden: int) -> dict[str, Any]:
    """Inside the contestant's own process."""
    contestant = CONTESTANTS[name]
    try:
        # Imports and first calls; a vocabulary so small that it leaves no mark on the peak.
        contestant(Inputs(tokens=SEQUENCE, vocab=4096, hidden=hidden))
    except ImportError as error:
        return {"missing": f"{name} cannot be imported: {error}"}
    inputs = Inputs(tokens=tokens, vocab=vocab, hidden=hidden)
    begin_s, begin_wall_s = time.process_time(), time.perf_counter()
    loss = contestant(inputs)
    return {
        "s": time.process_time() - begin_s,
        "wall_s": time.perf_counter() - begin_wall_s,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "loss": loss,
        "grads": [float(leaf.grad.norm()) for leaf in (inputs.hidden_PH, inputs.head_VH)],
    }


def free_mib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("MemAvailable"))
    return int(kib) / 1024


def measure(name: str, *, tokens: int, vocab: int, args: argparse.Namespace) -> dict[str, Any]:
    """`one` in a new process. This one stays small: a child's peak begins at its parent's."""
    if name == "dense":
        needed = DENSE_COPIES * tokens * vocab * 4 / 2**20 + 1024
        if needed > free_mib():
            return {"missing": f"dense needs {needed:,.0f} MiB, {free_mib():,.0f} are free"}
    if name in RIVALS and args.rivals is None:
        return {"missing": f"{name} needs --rivals"}
    python = args.rivals if name in RIVALS else sys.executable
    source = Path(__file__).parents[1] / "src"
    command = [python, __file__, "--one", name, str(tokens), str(vocab), str(args.hidden)]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)},
    )
    if found.returncode:
        last = found.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"missing": f"{name} ended with {found.returncode}: {last[0]}"}
    answer: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    return answer


def check_same(found: dict[str, dict[str, Any]], where: str) -> None:
    reference = found["ours"]
    for name, other in found.items():
        if name == "kept" or "missing" in other:
            continue  # Another loss, or none.
        pairs = zip(
            (reference["loss"], *reference["grads"]), (other["loss"], *other["grads"]), strict=True
        )
        for mine, theirs in pairs:
            if not abs(mine - theirs) <= SAME_FRAC * max(abs(mine), abs(theirs)):
                raise SystemExit(
                    f"bench_loss: ours and {name} do not compute the same at {where}: "
                    f"{mine:.6g} and {theirs:.6g}"
                )


def run(args: argparse.Namespace) -> dict[str, Any]:
    rows, not_run = [], []
    for tokens in args.tokens:
        for vocab in args.vocabs:
            where = f"{tokens} x {vocab}"
            fits = EVERYWHERE + (SMALL_ONLY if tokens <= args.rivals_up_to else ())
            names = [name for name in fits if name in args.contestants]
            found = {}
            for name in names:
                found[name] = measure(name, tokens=tokens, vocab=vocab, args=args)
                print(f"{where} {name} {json.dumps(found[name])}", file=sys.stderr, flush=True)
                if "missing" in found[name]:
                    not_run.append(f"{where}: {found[name]['missing']}")
            if "missing" in found["ours"]:
                raise SystemExit(f"bench_loss: {not_run[-1]}")
            check_same(found, where)
            row: dict[str, Any] = {"tokens": tokens, "vocab": vocab}
            for name in EVERYWHERE + SMALL_ONLY:
                for unit in ("mib", "s", "wall_s"):
                    row[f"{name}_{unit}"] = found.get(name, {}).get(unit)
            rows.append(row)
    return {"hidden": args.hidden, "rows": rows, "not_run": not_run, **ratios(rows)}


def ratios(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Dense over ours at the largest size that dense was run at; None where it was at none."""
    held = [row for row in rows if row["dense_mib"]]
    if not held:
        return {"peak_ratio": None, "time_ratio": None}
    row = max(held, key=lambda row: row["tokens"] * row["vocab"])
    return {
        "peak_ratio": row["dense_mib"] / row["ours_mib"],
        "time_ratio": row["dense_s"] / row["ours_s"],
    }


def table(document: dict[str, Any]) -> str:
    lines = [f"{'tokens':>7} {'vocab':>7}" + "".join(f"{n:>18}" for n in CONTESTANTS)]
    for row in document["rows"]:
        cells = (
            f"{row[f'{n}_mib']:>9,.0f} M {row[f'{n}_s']:>5.1f} s" if row[f"{n}_mib"] else "-"
            for n in CONTESTANTS
        )
        lines.append(f"{row['tokens']:>7} {row['vocab']:>7}" + "".join(f"{c:>18}" for c in cells))
    for name in ("peak_ratio", "time_ratio"):
        value = document[name]
        lines.append(
            f"{name} (dense over ours): " + ("not run" if value is None else f"{value:.1f}")
        )
    return "\n".join([*lines, *document["not_run"]])


def sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--tokens", type=sizes, help="multiples of 1024")
    parser.add_argument("--vocabs", type=sizes)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--contestants", type=lambda text: text.split(","), default=[*CONTESTANTS])
    parser.add_argument("--rivals", help="python of an environment with liger-kernel and trl")
    parser.add_argument("--rivals-up-to", type=int, default=4096, help="tokens")
    parser.add_argument("--one", nargs=4, metavar=("NAME", "TOKENS", "VOCAB", "HIDDEN"))
    args = parser.parse_args()
    if args.one:
        name, *numbers = args.one
        print(json.dumps(one(name, *map(int, numbers))))
        return
    args.tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    args.vocabs = args.vocabs or (QUICK_VOCABS if args.quick else VOCABS)
    unknown = [name for name in args.contestants if name not in CONTESTANTS]
    if unknown or "ours" not in args.contestants:
        parser.error(f"--contestants: ours and any of {', '.join(CONTESTANTS)}; got {unknown}")
    wrong = [tokens for tokens in args.tokens if tokens < 1 or tokens % SEQUENCE]
    if wrong:
        parser.error(f"--tokens {wrong[0]}: must be a multiple of {SEQUENCE}")
    document = run(args)
    print(json.dumps(document) if args.json else table(document))


if __name__ == "__main__":
    main()
