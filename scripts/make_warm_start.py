"""Makes the bundled warm start: tokenizer, then supervised learning on demonstrations.

Phase 1 (`skill`) learns clean sessions; phase 2 (`spread`) mixes in plausible wrong decisions, so
that rewards have something to sharpen. `--quick` makes a small one in seconds, for the test.

    python scripts/make_warm_start.py --out src/rlmix/model/warm_start
"""

import argparse
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from rlmix.model.chat import ChatRenderer, tool_text
from rlmix.model.tiny import new_tiny_model
from rlmix.model.tokenizer import (
    END,
    PAD,
    SPECIAL_TOKENS,
    build_tokenizer,
    frequent_words,
    save_tokenizer,
)
from rlmix.tasks.demonstrations import CLEAN, Demonstration, Spread, demonstrate
from rlmix.tasks.generate import build_task

SHIPPED_SPREAD = Spread(
    guess_frac=0.25,
    wrong_fix_frac=0.27,
    wrong_place_frac=0.08,
    half_done_frac=0.35,
    slip_frac=0.10,
)
CORPUS_SPREAD = Spread(
    guess_frac=0.30,
    wrong_fix_frac=0.30,
    wrong_place_frac=0.08,
    half_done_frac=0.40,
    slip_frac=0.10,
)
"""For the vocabulary only, and fixed: changing it would renumber the tokens."""
CONTEXT_WEIGHT = 0.2
"""Loss weight of tokens that the policy reads but does not write; they teach it to copy."""
DEMO_SEED = 1_000_003
"""Task seed of the demonstrations; runs use small seeds, so RL meets other tasks."""
SORT_WINDOW = 8
"""Batches that are drawn together and cut by length, to waste little on padding."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    name: str
    steps: int
    batch: int
    peak_lr: float
    spread: Spread
    context_weight: float
    first_index: int
    """Index of the first demonstration task, so that no task is used twice."""


def demonstration(index: int, spread: Spread) -> Demonstration:
    task = build_task(split="train", seed=DEMO_SEED, index=index)
    return demonstrate(task, rng=Random(f"demo/{index}"), spread=spread)


def encode(
    demo: Demonstration, renderer: ChatRenderer, context_weight: float
) -> tuple[list[int], list[float]]:
    """Ids and the loss weight of each id."""
    ids = renderer.prompt_ids(demo.issue)
    weights = [context_weight] * len(ids)
    for turn in demo.turns:
        written = [*renderer.content_ids(turn.command), renderer.stop_token_ids[0]]
        read = renderer.observation_ids(turn.exit_code, turn.output, ended_with_stop=True)
        ids += written + read
        weights += [1.0 if turn.is_learned else 0.0] * len(written)
        weights += [context_weight] * len(read)
    return ids, weights


def batches(
    phase: Phase, renderer: ChatRenderer, digest: "hashlib._Hash"
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(ids [B, T] int64, weights [B, T] float32, attention mask [B, T]) for every step."""
    index, rng, ready = phase.first_index, Random(phase.name), []
    for _ in range(phase.steps):
        if not ready:
            rows = []
            for _ in range(phase.batch * SORT_WINDOW):
                rows.append(
                    encode(demonstration(index, phase.spread), renderer, phase.context_weight)
                )
                digest.update(np.asarray(rows[-1][0], dtype=np.int32).tobytes())
                index += 1
            rows.sort(key=lambda row: len(row[0]))
            ready = [rows[at : at + phase.batch] for at in range(0, len(rows), phase.batch)]
            rng.shuffle(ready)
        rows = ready.pop()
        longest = max(len(ids) for ids, _ in rows)
        ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
        weights_BT = torch.zeros(len(rows), longest)
        mask_BT = torch.zeros(len(rows), longest, dtype=torch.long)
        for row, (ids, weights) in enumerate(rows):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            weights_BT[row, : len(ids)] = torch.tensor(weights)
            mask_BT[row, : len(ids)] = 1
        yield ids_BT, weights_BT, mask_BT


def learning_rate(step: int, phase: Phase) -> float:
    """Linear rise over 5 % of the steps, then a cosine down to 5 %."""
    rise = max(1, phase.steps // 20)
    if step < rise:
        return phase.peak_lr * (step + 1) / rise
    progress = (step - rise) / max(1, phase.steps - rise)
    return phase.peak_lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


def run_phase(
    model: torch.nn.Module, phase: Phase, renderer: ChatRenderer, digest: "hashlib._Hash"
) -> list[float]:
    """Trains in place; returns the loss on written tokens (nats a token) of every step.

    With several ranks each takes every n-th row of a batch; gradients are summed, so the result
    does not depend on the number of ranks but for rounding.
    """
    is_shared = torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if is_shared else 0
    num_ranks = torch.distributed.get_world_size() if is_shared else 1
    weights_of = list(model.parameters())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=phase.peak_lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    losses: list[float] = []
    started = time.monotonic()
    num_tokens = 0
    for step, (ids_BT, weights_BT, mask_BT) in enumerate(batches(phase, renderer, digest)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, phase)
        num_tokens += int(mask_BT.sum())
        ids_BT, mask_BT = ids_BT[rank::num_ranks], mask_BT[rank::num_ranks]
        denominator = weights_BT[:, 1:].sum()
        num_written = (weights_BT[:, 1:] == 1.0).sum()
        weights_BT = weights_BT[rank::num_ranks, 1:]
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        loss_BT = torch.nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none"
        ).view(len(ids_BT), -1)
        loss = (loss_BT * weights_BT).sum() / denominator
        loss.backward()
        if is_shared:
            flat = sum_over_ranks(torch.cat([weight.grad.flatten() for weight in weights_of]))
            parts = flat.split([weight.numel() for weight in weights_of])
            for weight, part in zip(weights_of, parts, strict=True):
                weight.grad.copy_(part.view_as(weight))
        torch.nn.utils.clip_grad_norm_(weights_of, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        written = (loss_BT.detach() * (weights_BT == 1.0)).sum()
        losses.append(float(sum_over_ranks(written) / num_written))
        if rank == 0 and (step % 50 == 0 or step == phase.steps - 1):
            spent_s = time.monotonic() - started
            print(
                f"{phase.name} step {step}/{phase.steps} loss {np.mean(losses[-50:]):.4f} "
                f"{num_tokens / spent_s:.0f} tok/s {spent_s:.0f} s",
                flush=True,
            )
    return losses


def corpus_words(num_demos: int) -> list[str]:
    texts: list[str] = []
    for index in range(num_demos):
        demo = demonstration(10_000_000 + index, CORPUS_SPREAD)
        texts.append(demo.issue)
        for turn in demo.turns:
            texts += [turn.command, tool_text(turn.exit_code, turn.output)]
    return frequent_words(texts, min_count=max(3, num_demos // 200))


def save_model(model: torch.nn.Module, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    for extra in ("generation_config.json",):
        (folder / extra).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--skill-steps", type=int, default=2400)
    parser.add_argument("--spread-steps", type=int, default=200)
    parser.add_argument("--skill-from", type=Path, help="folder of a finished phase 1")
    parser.add_argument("--quick", action="store_true", help="30 + 10 small steps")
    args = parser.parse_args()
    if args.skill_from and args.skill_from.resolve() == args.out.resolve():
        raise SystemExit("--skill-from and --out must differ")
    if args.ranks == 1:
        make(0, args, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(make, args=(args, f"{folder}/store"), nprocs=args.ranks)


def make(rank: int, args: argparse.Namespace, store: str | None) -> None:
    """One rank's work; rank 0 writes the files."""
    torch.set_num_threads(1)
    if store is not None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks
        )
    steps = (30, 10) if args.quick else (args.skill_steps, args.spread_steps)
    batch = 8 if args.quick else 32
    started = time.monotonic()

    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        words = corpus_words(200 if args.quick else 4000)
        save_tokenizer(build_tokenizer(words), args.out)
    if store is not None:
        torch.distributed.barrier()
    renderer = ChatRenderer(args.out)
    digest = hashlib.sha256()
    skill = Phase(
        name="skill",
        steps=steps[0],
        batch=batch,
        peak_lr=2e-3,
        spread=CLEAN,
        context_weight=CONTEXT_WEIGHT,
        first_index=0,
    )
    spread = Phase(
        name="spread",
        steps=steps[1],
        batch=batch,
        peak_lr=5e-4,
        spread=SHIPPED_SPREAD,
        context_weight=0.05,
        first_index=5_000_000,
    )
    if args.skill_from:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(args.skill_from, dtype=torch.float32)
        first = json.loads((args.skill_from / "manifest.json").read_text())
        digest.update(first["data_sha256"].encode())
        history = first["phases"]
        spent_s = float(first["wall_s"])
    else:
        model = new_tiny_model(
            vocab_size=renderer.vocab_size,
            pad_id=SPECIAL_TOKENS.index(PAD),
            end_id=SPECIAL_TOKENS.index(END),
            seed=args.seed,
        )
        history, spent_s = [], 0.0
    model.train()
    for phase in [spread] if args.skill_from else [skill, spread]:
        if phase.steps == 0:
            continue
        losses = run_phase(model, phase, renderer, digest)
        history.append(
            asdict(phase)
            | {"loss_first": float(np.mean(losses[:5])), "loss_last": float(np.mean(losses[-5:]))}
        )
    if store is not None:
        torch.distributed.destroy_process_group()
    if rank != 0:
        return
    save_model(model, args.out)
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(args.out.iterdir())
        if path.name != "manifest.json"
    }
    manifest = {
        "seed": args.seed,
        "demonstration_seed": DEMO_SEED,
        "data_sha256": digest.hexdigest(),
        "phases": history,
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "wall_s": round(spent_s + time.monotonic() - started, 1),
        "ranks": args.ranks,
        "torch": torch.__version__,
        "files_sha256": files,
    }
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
