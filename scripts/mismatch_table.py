#!/usr/bin/env python
"""How far each emulated pool's logprobs are from the trainer's on fixed tokens, and which part of
its numbers adds what.

    python scripts/mismatch_table.py [--quick] [--model FOLDER] [--sessions N]

Sessions are sampled once from the float32 model (seed fixed), then scored by the embedded engine's
own forward under each profile: prompts in one chunk, everything else token by token. The reference
is the float32 forward, which agrees with Transformers (and so with the trainer) to 1e-5.

A profile is built up in rungs: float32; results rounded to BF16; the accelerator's order of
addition and tiles; its weights; its activations; its KV cache with its attention kernel. `d` is
log p(pool) - log p(reference) of a sampled token; k3 = mean(exp(d) - 1 - d).
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlmix.config.compose import load_config
from rlmix.engine.embedded.attention import Chunk
from rlmix.engine.embedded.forward import Forward, Step
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer
from rlmix.numerics.view_config import quantization_config
from rlmix.numerics.views import encode_view
from rlmix.tasks.generate import build_task

# B sessions, T tokens of a session, V vocabulary

TURN_TOKENS, MAX_TOKENS = 40, 400
SAMPLED_FROM = Profile(
    accelerator="cpu", weights="bf16", activations="fp32", kv="fp32", attention="triton"
)
PARTS = ("rounding", "kernels", "weights", "activations", "kv")

OTHERS = (
    ("b200", "bf16", "bf16", "bf16", "trtllm_mha"),
    ("h100", "bf16", "bf16", "bf16", "fa3"),
    ("a100", "bf16", "bf16", "bf16", "flashinfer"),
    ("rtx_pro_6000", "bf16", "bf16", "bf16", "flashinfer"),
    ("h100", "bf16", "bf16", "fp8", "fa3"),
    ("h100", "fp8", "fp8", "bf16", "fa3"),
    ("a100", "fp8", "bf16", "bf16", "flashinfer"),
    ("b200", "fp8", "fp8", "bf16", "trtllm_mha"),
    ("b200", "nvfp4", "bf16", "bf16", "trtllm_mha"),
    ("b200", "nvfp4", "nvfp4", "bf16", "trtllm_mha"),
    ("b200", "nvfp4", "nvfp4", "fp8", "trtllm_mha"),
    ("rtx_pro_6000", "nvfp4", "nvfp4", "fp8", "flashinfer"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    token_ids: tuple[int, ...]
    num_prompt: int
    sampled: tuple[int, ...]
    """Positions of the tokens that the model sampled."""


def write_views(model: Path, root: Path) -> dict[str, Path]:
    """One folder for each weight view of a BF16 model."""
    state = load_file(model / "model.safetensors")
    folders = {}
    for view in ("bf16", "fp8", "nvfp4"):
        folders[view] = root / view
        folders[view].mkdir(parents=True)
        config = {**read_config(model), "quantization_config": quantization_config(view)}
        config = {key: value for key, value in config.items() if value is not None}
        (folders[view] / "config.json").write_text(json.dumps(config))
        save_file(encode_view(state, view), folders[view] / "model.safetensors")
    return folders


class Scorer:
    """The engine's forward of one profile, driven by hand."""

    def __init__(self, folders: dict[str, Path], profile: Profile, *, num_sessions: int) -> None:
        folder = folders[profile.weights]
        self._shape = read_shape(read_config(folder))
        self._weights = load_weights(folder, shape=self._shape, profile=profile)
        self.cache = KvCache(self._shape, num_slots=num_sessions, context_length=MAX_TOKENS + 1)
        self._forward = Forward(self._shape, profile, self.cache)

    def prompt(self, slot: int, token_ids: Sequence[int]) -> Tensor:
        """Logits [V] after a prompt."""
        chunk = Chunk(slot=slot, start=0, num_tokens=len(token_ids), needs_logits=True)
        step = Step(
            token_ids_T=torch.tensor(token_ids),
            positions_T=torch.arange(len(token_ids)),
            num_decoding=0,
            longest_decoding=0,
            chunks=(chunk,),
        )
        return self._forward.logits(self._weights, step)[0]

    def next(self, token_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits [B, V] after one more token in slots 0, 1, ..."""
        step = Step(
            token_ids_T=torch.tensor(token_ids),
            positions_T=torch.tensor(positions),
            num_decoding=len(token_ids),
            longest_decoding=max(positions) + 1,
            chunks=(),
        )
        return self._forward.logits(self._weights, step)


def sample_sessions(model: Path, folders: dict[str, Path], *, num_sessions: int) -> list[Session]:
    """Sessions of the float32 model at temperature 1: turns of commands, answered by a fixed line
    of output."""
    renderer = ChatRenderer(model)
    scorer = Scorer(folders, SAMPLED_FROM, num_sessions=1)
    draws = torch.Generator().manual_seed(0)
    sessions = []
    for number in range(num_sessions):
        task = build_task(split="eval", seed=0, index=number)
        ids = list(renderer.prompt_ids(task.public.issue))
        num_prompt, sampled, in_turn = len(ids), [], 0
        logits = scorer.prompt(0, ids)
        while len(ids) < MAX_TOKENS - TURN_TOKENS:
            token = int(torch.multinomial(torch.softmax(logits, -1), 1, generator=draws))
            sampled.append(len(ids))
            new = [token]
            in_turn += 1
            has_ended = token in renderer.stop_token_ids
            if has_ended or in_turn == TURN_TOKENS:
                line = f"line {len(sampled)}\n"
                new += renderer.observation_ids(0, line, ended_with_stop=has_ended)
                in_turn = 0
            for token in new:
                ids.append(token)
                logits = scorer.next([token], [len(ids) - 1])[0]
        sessions.append(
            Session(token_ids=tuple(ids), num_prompt=num_prompt, sampled=tuple(sampled))
        )
    return sessions


def logprobs(folders: dict[str, Path], profile: Profile, sessions: Sequence[Session]) -> Tensor:
    """float32 [sampled tokens of all sessions], session by session."""
    scorer = Scorer(folders, profile, num_sessions=len(sessions))
    found: list[dict[int, float]] = []
    for slot, session in enumerate(sessions):
        logits = scorer.prompt(slot, session.token_ids[: session.num_prompt])
        first = session.token_ids[session.num_prompt]
        found.append({session.num_prompt: float(torch.log_softmax(logits, -1)[first])})
    # A session that is through repeats its last token, so that the slots stay 0..B-1.
    longest = max(len(session.token_ids) - session.num_prompt for session in sessions)
    for ahead in range(longest - 1):
        places = [min(s.num_prompt + ahead, len(s.token_ids) - 2) for s in sessions]
        given = [s.token_ids[place] for s, place in zip(sessions, places, strict=True)]
        rows = torch.log_softmax(scorer.next(given, places), -1)
        for session, place, row, held in zip(sessions, places, rows, found, strict=True):
            held[place + 1] = float(row[session.token_ids[place + 1]])
    return torch.tensor(
        [
            held[place]
            for session, held in zip(sessions, found, strict=True)
            for place in session.sampled
        ]
    )


def rungs(
    accelerator: str, weights: str, activations: str, kv: str, attention: str
) -> list[Profile]:
    """Profiles from rounded results to the pool's own, a part of PARTS more in each."""
    steps = (
        ("cpu", "bf16", "bf16", "bf16", "flashinfer"),
        (accelerator, "bf16", "bf16", "bf16", "flashinfer"),
        (accelerator, weights, "bf16", "bf16", "flashinfer"),
        (accelerator, weights, activations, "bf16", "flashinfer"),
        (accelerator, weights, activations, kv, attention),
    )
    names = ("accelerator", "weights", "activations", "kv", "attention")
    return [Profile(**dict(zip(names, step, strict=True))) for step in steps]


def measure(
    folders: dict[str, Path], sessions: Sequence[Session], pools: Sequence[tuple[str, ...]]
) -> list[dict[str, float]]:
    """For each pool mean |d|, k3 and max |d| against the reference, and for each part the mean |d|
    to the rung below."""
    known: dict[Profile, Tensor] = {}

    def score(profile: Profile) -> Tensor:
        if profile not in known:
            known[profile] = logprobs(folders, profile, sessions)
        return known[profile]

    rows = []
    for pool in pools:
        ladder = [score(SAMPLED_FROM), *(score(profile) for profile in rungs(*pool))]
        d = ladder[-1] - ladder[0]
        row = {
            "mean": float(d.abs().mean()),
            "k3": float((d.expm1() - d).mean()),
            "max": float(d.abs().max()),
        }
        for part, below, above in zip(PARTS, ladder[:-1], ladder[1:], strict=True):
            row[part] = float((above - below).abs().mean())
        rows.append(row)
    return rows


def table(pools: Sequence[tuple[str, ...]], rows: Sequence[dict[str, float]]) -> str:
    """Markdown, differences in millinats."""
    columns = ("mean", "max", *PARTS)
    lines = [
        "| accelerator | weights | activations | KV | attention | mean d | max d | k3 | "
        + " | ".join(PARTS)
        + " |",
        "| " + " | ".join(["---"] * (8 + len(PARTS))) + " |",
    ]
    for pool, row in zip(pools, rows, strict=True):
        mean, most, *parts = (f"{1000 * row[column]:.2f}" for column in columns)
        cells = (*pool, mean, most, f"{row['k3']:.1e}", *parts)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def default_pools() -> tuple[tuple[str, str, str, str, str], ...]:
    """(accelerator, weights, activations, KV, attention) of the pools that `rlmix train` starts."""
    return tuple(
        (pool.accelerator, pool.weights, pool.activations, pool.kv, pool.attention)
        for pool in load_config().config.pools.values()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="default pools only, 4 sessions")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--model", default="bundled:tiny", help="model folder in BF16")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = resolve_model(arguments.model)
    num_sessions = 4 if arguments.quick else arguments.sessions
    pools = default_pools() if arguments.quick else default_pools() + OTHERS
    started_s = time.perf_counter()
    with TemporaryDirectory() as scratch:
        folders = write_views(model, Path(scratch))
        sessions = sample_sessions(model, folders, num_sessions=num_sessions)
        rows = measure(folders, sessions, pools)
    num_tokens = sum(len(session.sampled) for session in sessions)
    print(table(pools, rows))
    print(
        f"\n{num_tokens} sampled tokens of {num_sessions} sessions, differences in 1e-3 nats, "
        f"{time.perf_counter() - started_s:.0f} s, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
