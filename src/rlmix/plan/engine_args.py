"""What `pools.NAME.engine_args` may say to a real server, held against SGLang's own flags.

Pure. Invariant: what a plan says of a pool (its accelerators, memory, formats, kernels) stays true
whatever further arguments it has, and no secret gets into a plan.
"""

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from rlmix.config.schema.pools import PoolConfig

KEYS = {
    "attention-backend": "pools.NAME.attention",
    "context-length": "session.max_context_tokens",
    "decode-attention-backend": "pools.NAME.attention",
    "enable-deterministic-inference": "numerics.consistency",
    "enable-return-routed-experts": "pools.NAME.record_experts",
    "host": "net.bind",
    "kv-cache-dtype": "pools.NAME.kv",
    "linear-attn-backend": "pools.NAME.linear_attention",
    "linear-attn-decode-backend": "pools.NAME.linear_attention",
    "linear-attn-prefill-backend": "pools.NAME.linear_attention",
    "mamba-ssm-dtype": "pools.NAME.state",
    "max-mamba-cache-size": "pools.NAME.max_running",
    "max-running-requests": "pools.NAME.max_running",
    "mem-fraction-static": "pools.NAME.memory_frac",
    "model-path": "model.path",
    "moe-runner-backend": "pools.NAME.moe",
    "prefill-attention-backend": "pools.NAME.attention",
    "quantization": "pools.NAME.weights",
    "random-seed": "run.seed",
    "rl-on-policy-target": "numerics.consistency",
    "sampling-mask-max-tokens": "algo.top_k",
    "tp-size": "pools.NAME.tp",
}
"""Flag -> the key that it follows from."""

_ACCELERATORS = "a replica's accelerators are pools.NAME.tp; this would take or skip others"
_AT_START = "rlmix fills it in when a server starts"
_DRAFT = "rlmix trains and publishes no draft model"
_SECRET = (
    "a secret would stand in the plan, in the run's folder and in the process list; servers need "
    "none of their own"
)
_CODE = "rlmix runs no code that comes with a checkpoint or with a request"
_UNSEEN = "code that it names would change what a server computes, unseen by plan and numerics key"
_SAMPLING = "seeds and kept sets are validated with the one that the plan names"
NOT_OURS = {
    **dict.fromkeys(
        (
            "attn-cp-size", "attn-dp-size", "base-gpu-id", "dcp-size", "device", "dist-init-addr",
            "dp-size", "dwdp-size", "enable-dp-attention", "gpu-id-step", "moe-dp-size", "nnodes",
            "node-rank", "pp-size", "use-ray",
        ),
        _ACCELERATORS,
    ),
    **dict.fromkeys(("port", "weight-version"), _AT_START),
    **dict.fromkeys(("speculative-algorithm", "speculative-draft-model-path"), _DRAFT),
    **dict.fromkeys(("admin-api-key", "api-key", "ssl-keyfile-password"), _SECRET),
    **dict.fromkeys(("sampling-backend", "sampling-defaults"), _SAMPLING),
    **dict.fromkeys(
        ("enable-custom-logit-processor", "trust-remote-code", "trust-request-chat-template"), _CODE
    ),
    **dict.fromkeys(("custom-weight-loader", "forward-hooks"), _UNSEEN),
    "config": "a file of arguments would override the plan unseen; give them one by one",
    "disaggregation-mode": "a replica is one server that prefills and decodes",
    "dtype": "weight views are quantised from BF16, and what is not quantised stays BF16",
    "enable-metrics": "rlmix watches servers by them",
    "json-model-override-args": "the sizes and the policy are those of model.path",
    "load-format": "views are safetensors",
    "max-total-tokens": "the cache takes what memory_frac leaves, which the plan counts",
}  # fmt: skip
"""Flag -> why nobody but rlmix sets it."""

ONE_OF_KIND: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}


def argument_faults(name: str, pool: PoolConfig, *, is_moe: bool) -> list[str]:
    """What is wrong with `engine_args` and with names that become arguments, one line each."""
    faults = [
        f"pools.{name}.engine_args.{key}: {fault}"
        for key, value in pool.engine_args.items()
        if (fault := _fault(str(key), value, name))
    ]
    runners = sglang_flags()["moe-runner-backend"]
    if is_moe and isinstance(runners, list) and pool.moe not in runners:
        faults.append(
            f"pools.{name}.moe: got {pool.moe!r}; SGLang has {', '.join(map(str, runners))}"
        )
    return faults


def _fault(key: str, value: Any, pool: str) -> str:
    """What is wrong with one argument; empty when nothing is. Never repeats a secret's value."""
    if owner := KEYS.get(key):
        return f"this follows from {owner.replace('NAME', pool)}; change that instead"
    if why := NOT_OURS.get(key):
        return f"{why.replace('NAME', pool)}; leave it out"
    flags = sglang_flags()
    if key not in flags:
        return f"SGLang 0.5.23 has no --{key}; see `sglang serve --help`"
    kind = flags[key]
    got = f"got {value!r}"
    if kind is True:
        return (
            "" if isinstance(value, bool) else f"{got}, but --{key} is a switch; use true or false"
        )
    if isinstance(kind, list):
        known = [str(choice) for choice in kind]
        return "" if str(value) in known else f"{got}; --{key} takes {', '.join(known)}"
    if kind == "several":
        values = value if isinstance(value, list) else [value]
        is_sound = bool(values) and all(_is_word(each) for each in values)
        return "" if is_sound else f"{got}; --{key} takes one or more words, as [A, B]"
    if kind in ONE_OF_KIND:
        is_sound = isinstance(value, ONE_OF_KIND[kind]) and not isinstance(value, bool)
        what = "a whole number" if kind == "int" else "a number"
        return "" if is_sound else f"{got}; --{key} takes {what}"
    return "" if _is_word(value) else f"{got}; --{key} takes one number or text"


def _is_word(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


@functools.cache
def sglang_flags() -> Mapping[str, bool | str | list[str | int] | None]:
    """Every flag of SGLang 0.5.23 without its dashes -> True (a switch), its choices, `int`,
    `float`, `several` (words), or None for any one value."""
    text = resources.files("rlmix.plan").joinpath("sglang_flags.json").read_text()
    flags: dict[str, bool | str | list[str | int] | None] = json.loads(text)["flags"]
    return flags
