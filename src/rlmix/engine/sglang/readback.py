"""What a real server says it runs with, held against the plan. Pure.

SGLang answers `/server_info` with its settings as resolved, and `/v1/loads` with the chip.
Invariant: what differs is told with both values; what it does not say (null, `auto`) is listed as
unverified, never taken for agreement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmix.core.accelerators import canonical
from rlmix.core.numerics_key import NumericsKey
from rlmix.engine.sglang.launch import flags_of

COMPARED = (
    "device", "dtype", "kv-cache-dtype", "quantization", "tp-size", "attention-backend",
    "moe-runner-backend", "linear-attn-prefill-backend", "linear-attn-decode-backend",
    "mamba-ssm-dtype", "bf16-gemm-backend", "fp8-gemm-backend", "fp4-gemm-backend", "page-size",
    "sampling-backend", "sampling-defaults", "context-length", "chunked-prefill-size",
    "enable-return-routed-experts", "enable-deterministic-inference",
)  # fmt: skip
"""Flags that decide numbers, or what a session may be. Their fields have underscores."""

SILENT = (None, "auto")
"""A value that says nothing."""

SAME = {"bf16": "bfloat16", "modelopt_fp4": "modelopt"}
"""Two names of one setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadBack:
    """The comparison of one server with its plan."""

    differences: tuple[str, ...]
    """One clause each, with both values; empty when the server is as planned."""
    unverified: tuple[str, ...]
    """Planned settings that the server does not report."""


def compare(
    argv: Sequence[str],
    info: Mapping[str, Any],
    loads: Mapping[str, Any],
    *,
    accelerator: str,
    version: str,
) -> ReadBack:
    """Args:
    argv: the planned command.
    info: the document of `/server_info`.
    loads: the document of `/v1/loads`.
    accelerator: name of the pool's chip.
    version: of SGLang.
    """
    planned = flags_of(argv)
    differences: list[str] = []
    unverified: list[str] = []

    def check(name: str, found: Any, expected: Any) -> None:
        if _plain(found) == _plain(expected):
            return
        if found in SILENT:
            unverified.append(f"{name}={expected}")
        else:
            differences.append(f"{name} is {found!r}, the plan says {expected!r}")

    check("version", info.get("version"), version)
    for flag in COMPARED:
        found = info.get(flag.replace("-", "_"))
        if flag in planned:
            check(flag, found, planned[flag])
        elif flag == "quantization" and found is not None:
            differences.append(f"quantization is {found!r}, the plan has none")
    if info.get("trust_remote_code"):
        differences.append("trust_remote_code is on, and rlmix runs no code of a checkpoint")
    found_chip = loads.get("accelerator")
    if found_chip is None:
        unverified.append(f"accelerator={accelerator}")
    else:
        check("accelerator", canonical(str(found_chip), [accelerator]) or found_chip, accelerator)
    check("accelerators", loads.get("num_accelerators"), planned.get("tp-size", "1"))
    differences += _too_small(info, loads, planned)
    return ReadBack(differences=tuple(differences), unverified=tuple(unverified))


def _too_small(
    info: Mapping[str, Any], loads: Mapping[str, Any], planned: Mapping[str, str | bool]
) -> list[str]:
    """What the server could not give of what was asked: requests at a time, room for a session."""
    short: list[str] = []
    wanted = planned.get("max-running-requests")
    for rank in loads.get("loads") or []:
        running = rank.get("max_running_requests")
        if running is not None and wanted is not None and running < int(wanted):
            short.append(f"max_running_requests is {running}, the plan says {wanted}")
    tokens, context = info.get("max_total_num_tokens"), planned.get("context-length")
    if tokens is not None and context is not None and tokens < int(context):
        short.append(f"its cache holds {tokens} tokens, less than the planned context {context}")
    return short


def numerics_of(expected: Mapping[str, str], info: Mapping[str, Any]) -> NumericsKey:
    """The label of what a real server computes in: the formats of its view, and the kernels that it
    says it took.

    Args:
        expected: the plan's fields: accelerator, weights, view, activations, kv, attention,
            linear_attention, state, moe, tp.
    """

    def said(field: str, planned: str) -> str:
        found = info.get(field)
        return planned if found in SILENT else str(found)

    return NumericsKey(
        accelerator=expected["accelerator"],
        weights=expected["weights"],
        view=expected["view"],
        activations=expected["activations"],
        kv=expected["kv"],
        attention=said("attention_backend", expected["attention"]),
        linear_attention=expected["linear_attention"],
        state_dtype=expected["state"],
        moe=said("moe_runner_backend", expected["moe"]),
        tp=int(expected["tp"]),
        engine="sglang",
        engine_version=str(info.get("version", "")),
        is_emulated=False,
    )


def _plain(value: Any) -> str:
    text = str(value)
    return SAME.get(text, text)
