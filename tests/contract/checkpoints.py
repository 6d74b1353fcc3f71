"""Random checkpoints that every engine can serve, and what they say about a text.

Qwen3, dense and with experts, small but with the sizes that real kernels want (head_dim 64,
channels in multiples of 128). Two versions of each with unrelated weights, published as a run does.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlmix.engine.scripted import HashPolicy
from rlmix.numerics.views import split_experts
from rlmix.weights.publish import publish_version

VOCAB = 264
"""No multiple of 64: SGLang pads it to 320 inside, and must not show that."""
CONTEXT = 1024
SPREAD = 3
"""Times the usual initialisation: a distribution that is neither flat nor certain."""

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 263,
}
EXPERTS = {
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}

GREEDY_DEFAULTS = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.01}
"""generation_config.json: an engine that fills in what a request leaves out samples greedily."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Two versions of one model, `folders[version]`."""

    store: Path
    folders: dict[int, Path]

    def logprobs(self, version: int, ids: list[int], *, num_new: int, temperature: float):
        """float64 [num_new, V]: the distributions that the last `num_new` ids came from."""
        return reference_logprobs(self.folders[version], ids, num_new, temperature)

    def noise_nats(self) -> float:
        """How far rounding to BF16 moves Transformers' own logprobs on average, measured."""
        ids = np.random.default_rng(1).integers(0, VOCAB - 1, (4, 64))
        gaps = []
        for row in ids.tolist():
            exact, rounded = (
                reference_logprobs(self.folders[0], row, 48, 1.0, dtype=dtype)
                for dtype in (torch.float32, torch.bfloat16)
            )
            chosen = np.arange(48), row[-48:]
            gaps.append(np.abs(exact[chosen] - rounded[chosen]).mean())
        return float(np.mean(gaps))


def build(kind: str, root: Path) -> Checkpoint:
    """`dense` or `moe`, under `root`."""
    side = root / "side"
    side.mkdir(parents=True)
    folders = {}
    for version in (0, 1):
        model = _model(kind, seed=17 + version)
        if version == 0:
            _write_side_files(model, side)
        publish_version(
            # One matrix an expert, as on every disk: an engine that meets fused ones
            # serves whatever lay in its memory.
            dict(split_experts({name: t.detach() for name, t in model.state_dict().items()})),
            version=version,
            store=root / "store",
            views=("bf16",),
            model_files=side,
        )
        folders[version] = root / "store" / "bf16" / f"v{version:06d}"
    return Checkpoint(store=root / "store", folders=folders)


def _model(kind: str, *, seed: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    if kind == "moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SPREAD)
    return model.bfloat16().eval()


def _write_side_files(model, folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, default=str))
    (folder / "generation_config.json").write_text(json.dumps(GREEDY_DEFAULTS))
    words = {f"w{number}": number for number in range(VOCAB - 1)} | {"<end>": VOCAB - 1}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="w0"
    ).save_pretrained(folder)


@functools.cache
def _reference_model(folder: Path, dtype: torch.dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def reference_logprobs(
    folder: Path, ids: list[int], num_new: int, temperature: float, dtype=torch.float32
):
    """float64 [num_new, V] of Transformers."""
    logits = _reference_model(folder, dtype)(torch.tensor([ids])).logits[0].double()
    return torch.log_softmax(logits[-num_new - 1 : -1] / temperature, -1).numpy()


class HashReference:
    """The scripted engine's distributions, in the same form."""

    def __init__(self) -> None:
        self._policy = HashPolicy(vocab_size=VOCAB)

    def logprobs(self, version: int, ids: list[int], *, num_new: int, temperature: float):
        start = len(ids) - num_new
        return np.stack(
            [
                self._policy.logprobs(ids[:end], version=version, temperature=temperature)
                for end in range(start, len(ids))
            ]
        ).astype(np.float64)
