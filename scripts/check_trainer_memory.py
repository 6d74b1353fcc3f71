#!/usr/bin/env python
"""Compares the trainer's planned memory with measured peaks of small models.

    python scripts/check_trainer_memory.py [--json] [--tolerance 0.15]

Each case in a process of its own on one thread, forked from one that has imported everything: a
random model is loaded, AdamW steps once on a short session, and again on one of so many tokens.
Measured is the peak of resident memory above what the process held after the same with a model of
almost nothing (torch, Transformers, kernels). Planned is `plan.trainer_memory` of the same
config.json. Exit 1 when one is further off than the tolerance.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

DENSE = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 2048,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 65536, "tie_word_embeddings": False,
}  # fmt: skip
MOE = {
    **DENSE, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LARGE_VOCABULARY = {**DENSE, "vocab_size": 32768}
CASES = {
    # name: (class of the config, sizes, tokens, recompute)
    "dense, 2K tokens, recomputed": ("Qwen3Config", DENSE, 2048, True),
    "dense, 2K tokens, all kept": ("Qwen3Config", DENSE, 2048, False),
    "experts, 1K tokens, recomputed": ("Qwen3MoeConfig", MOE, 1024, True),
    "experts, 1K tokens, all kept": ("Qwen3MoeConfig", MOE, 1024, False),
    "vocabulary of 32,768, 1K tokens": ("Qwen3Config", LARGE_VOCABULARY, 1024, True),
}
WARM = {"num_hidden_layers": 1, "vocab_size": 600}


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def import_all() -> None:
    """What a case would import, so that it is not measured and done once."""
    import long_step  # noqa: F401
    import torch
    from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

    import rlmix.batch.packing
    import rlmix.trainer.optimizer
    import rlmix.trainer.policy
    import rlmix.trainer.step  # noqa: F401

    torch.set_num_threads(1)


def build(kind: str, sizes: dict[str, Any], folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder
    )


def step(folder: Path, tokens: int, *, recomputes: bool) -> None:
    """One optimizer step over one session, as a rank does it."""
    import torch
    from long_step import sample_of

    from rlmix.batch.packing import pack_samples
    from rlmix.trainer.optimizer import MasterOptimizer
    from rlmix.trainer.policy import LONG_ATTENTION, Policy
    from rlmix.trainer.spec import AlgoSpec, OptimizerSpec
    from rlmix.trainer.step import run_micro_batches, step_denominator

    torch.set_num_threads(1)
    policy = Policy.load(folder, attention=LONG_ATTENTION)
    if recomputes:
        policy.recompute()
    spec = OptimizerSpec(
        name="adamw", lr=1e-6, beta1=0.9, beta2=0.95, weight_decay=0.0, grad_clip=1.0,
        warmup_steps=0,
    )  # fmt: skip
    optimizer = MasterOptimizer(policy.parameters(), spec)
    algo = AlgoSpec(
        importance="mis", low=0.5, high=5.0, centering=True, sequence_mask="none",
        sequence_low=0.5, sequence_high=2.0, veto=0.0, average="tokens", replay=True,
        routing_replay=False, temperature=1.0,
    )  # fmt: skip
    vocab = policy.model.get_output_embeddings().weight.shape[0]
    for length in (64, tokens):  # The second step has moments from its beginning.
        batches = pack_samples([sample_of(length, vocab, number=0)], max_tokens=length)
        with optimizer.accumulating():
            run_micro_batches(
                policy, batches, algo, denominator=step_denominator(batches, algo),
                trainer_version=0,
            )  # fmt: skip
        optimizer.step(grad_norm=optimizer.grad_norm())


def measure(name: str) -> dict[str, float]:
    kind, sizes, tokens, recomputes = CASES[name]
    with tempfile.TemporaryDirectory() as scratch:
        build(kind, {**sizes, **WARM}, Path(scratch) / "warm")
        build(kind, sizes, Path(scratch) / "model")
        step(Path(scratch) / "warm", 64, recomputes=recomputes)
        held = status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        step(Path(scratch) / "model", tokens, recomputes=recomputes)
        measured = status_bytes("VmHWM") - held
        planned = plan(Path(scratch) / "model", tokens, recomputes=recomputes)
    return {"measured_mib": measured / 2**20, **planned}


def plan(folder: Path, tokens: int, *, recomputes: bool) -> dict[str, float]:
    from rlmix.plan.model_facts import facts_from_file
    from rlmix.plan.trainer_memory import trainer_memory

    found = trainer_memory(
        facts_from_file("measured", folder / "config.json"),
        tokens=tokens,
        policy_tokens=tokens // 2,
        ranks=1,
        optimizer="adamw",
        recomputes=recomputes,
        offloads=False,
    )
    return {"planned_mib": found.total_bytes / 2**20} | {
        f"{part}_mib": size / 2**20 for part, size in found.parts().items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--only", help="cases whose names hold this")
    arguments = parser.parse_args()
    # Memory that is freed goes back at once, so that a peak is one of live tensors. The C library
    # reads this once, when a process begins.
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144",
                       "MALLOC_TRIM_THRESHOLD_": "262144"}  # fmt: skip
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import_all()
    rows = []
    for name in CASES:
        if arguments.only and arguments.only not in name:
            continue
        with multiprocessing.get_context("fork").Pool(1) as pool:
            row: dict[str, Any] = {"case": name, **pool.apply(measure, (name,))}
        row["ratio"] = row["planned_mib"] / row["measured_mib"]
        rows.append(row)
        print(
            f"{name:<36} planned {row['planned_mib']:>7,.0f} MiB, measured "
            f"{row['measured_mib']:>7,.0f} MiB, {row['ratio']:.2f}",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps({"rows": rows}))
    if any(abs(row["ratio"] - 1.0) > arguments.tolerance for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
