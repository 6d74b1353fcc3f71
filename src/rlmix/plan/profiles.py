"""How a real SGLang server is started on each kind of accelerator: arguments and environment.

Pure. Invariant: everything that decides numbers is named, also where it is what SGLang would pick
today, so that a new version cannot change them in silence; no choice is left at `auto` on CUDA.
Flag names and choices are those of SGLang 0.5.23 (`plan/engine_args.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlmix.config.schema.pools import PoolConfig, records_experts
from rlmix.config.schema.train import TrainConfig
from rlmix.plan.accelerators import CPU, NPU
from rlmix.plan.memory import STATE_SLOTS_PER_REQUEST
from rlmix.plan.model_facts import ModelFacts

KV_DTYPES = {"bf16": "bf16", "fp8": "fp8_e4m3"}
STATE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
QUANTIZATION = {"fp8": "fp8", "nvfp4": "modelopt_fp4"}
"""Weight view -> `--quantization`; BF16 has none."""
PAGE_TOKENS = {"trtllm_mha": 64, "fa4": 128, "ascend": 128}
"""Attention kernel -> tokens of a KV page that it wants; others take 1, which loses no prefix."""
FP8_GEMM = {"sm90": "deep_gemm", "sm100": "deep_gemm", "sm120": "cutlass", "sm80": "triton"}
"""Architecture -> dense FP8 product. SM80 runs Marlin whatever is asked for."""
NVFP4_GEMM = {"sm90": "marlin", "sm80": "marlin", "sm120": "flashinfer_cutlass"}
BF16_GEMM = {"sm100": "cutedsl"}
CHUNKED_PREFILL_TOKENS = 8192
"""Largest chunk at which FlashInfer's gated-delta-net prefill of SM100 was validated."""
CPU_CACHE_SHARE = 2
"""Tokens of cache on a CPU, as a multiple of what full requests take: the rest keeps prefixes.
Sized in tokens, because a share of the machine's memory would be filled with zeros at the start."""
STATE_TRACK_TOKENS = 256
"""A prefix of a hybrid model is found again at multiples of this."""
MIN_MASK_TOKENS = 4096
"""Smallest cap on a recorded kept set: ties at the cutoff keep more tokens than top-k."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Command and environment of one server."""

    argv: tuple[str, ...]
    env: dict[str, str]


def sglang_launch(
    pool: PoolConfig, config: TrainConfig, facts: ModelFacts, *, architecture: str, python: str
) -> Launch:
    """The server of one replica. `{model_path}`, `{port}` and `{weight_version}` are filled in at
    every start; the port is one that is free on the replica's machine. Keys are in neither
    arguments nor environment: they are made at the start of a run (`engine.sglang.serve`)."""
    arguments: dict[str, Any] = {
        "model-path": "{model_path}",
        "host": config.net.bind,
        "port": "{port}",
        "weight-version": "{weight_version}",
        "random-seed": config.run.seed,
        "tp-size": pool.tp,
        "dtype": "bfloat16",
        "load-format": "safetensors",
        "kv-cache-dtype": KV_DTYPES[pool.kv],
        "context-length": config.session.max_context_tokens,
        "attention-backend": pool.attention,
        "page-size": PAGE_TOKENS.get(pool.attention, 1),
        "mem-fraction-static": pool.memory_frac,
        "chunked-prefill-size": CHUNKED_PREFILL_TOKENS,
        "max-running-requests": pool.max_running,
        "cuda-graph-max-bs-decode": pool.max_running,
        "sampling-backend": "ascend" if architecture == NPU else "pytorch",
        "sampling-defaults": "openai",
        "sampling-mask-max-tokens": max(MIN_MASK_TOKENS, 2 * config.algo.top_k),
        "enable-metrics": True,
        # An idle scheduler would poll, and take a core.
        "sleep-on-idle": True,
        "log-level-http": "warning",
        "skip-server-warmup": True,
    }
    arguments |= _products(pool, facts, architecture, is_exact=_is_exact(config))
    arguments |= _recurrent(pool, facts)
    if architecture == NPU:
        arguments["device"] = "npu"
    elif architecture == CPU:
        arguments |= _on_cpu(pool, config)
    elif pool.tp > 1:
        # Otherwise switched on for some chips only, which sums in another order.
        arguments["enforce-disable-flashinfer-allreduce-fusion"] = True
    if pool.ep > 1:
        arguments["ep-size"] = pool.ep
    if _is_exact(config):
        arguments |= _deterministic(pool, architecture)
    if records_experts(pool, routing_replay=config.algo.routing_replay) and facts.is_moe:
        arguments["enable-return-routed-experts"] = True
    arguments |= {str(key): value for key, value in pool.engine_args.items()}
    return Launch(
        argv=(python, "-m", "sglang.launch_server", *_flags(arguments)),
        env=_environment(pool, architecture)
        | (_deterministic_environment(pool, architecture) if _is_exact(config) else {}),
    )


def _on_cpu(pool: PoolConfig, config: TrainConfig) -> dict[str, Any]:
    """What a machine without an accelerator needs: it proves the protocol, not speed."""
    tokens = CPU_CACHE_SHARE * pool.max_running * config.session.max_context_tokens
    return {
        "device": "cpu",
        "max-total-tokens": tokens,
        "disable-overlap-schedule": True,
        "cuda-graph-max-bs-decode": False,
    }


def _deterministic(pool: PoolConfig, architecture: str) -> dict[str, Any]:
    """Sums that do not depend on the batch, and norms, activations and logprobs as FSDP trainers
    compute them. SGLang sets what follows from the first by itself; it is named all the same."""
    chosen: dict[str, Any] = {
        "enable-deterministic-inference": True,
        "rl-on-policy-target": "fsdp",
    }
    if architecture not in (NPU, CPU) and pool.tp > 1:
        chosen["disable-custom-all-reduce"] = True
    return chosen


def _deterministic_environment(pool: PoolConfig, architecture: str) -> dict[str, str]:
    if architecture == NPU:
        return {"HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1"}
    env = {"SGLANG_FLASHINFER_MOE_FUSED_FINALIZE": "0"}
    if architecture != CPU and pool.tp > 1:
        env["NCCL_ALGO"] = "allreduce:tree"
    return env


def _products(
    pool: PoolConfig, facts: ModelFacts, architecture: str, *, is_exact: bool
) -> dict[str, Any]:
    """Which kernels multiply."""
    chosen: dict[str, Any] = {}
    if pool.weights in QUANTIZATION:
        chosen["quantization"] = QUANTIZATION[pool.weights]
    if facts.is_moe:
        chosen["moe-runner-backend"] = pool.moe
        # Some runners switch it off by themselves, others do not.
        chosen["disable-shared-experts-fusion"] = True
    if architecture in (NPU, CPU):
        return chosen
    chosen["bf16-gemm-backend"] = "torch" if is_exact else BF16_GEMM.get(architecture, "torch")
    if pool.weights == "fp8":
        chosen["fp8-gemm-backend"] = FP8_GEMM[architecture]
    if pool.weights == "nvfp4":
        chosen["fp4-gemm-backend"] = (
            "marlin" if pool.moe == "marlin" else NVFP4_GEMM.get(architecture, "flashinfer_cutedsl")
        )
    return chosen


def _recurrent(pool: PoolConfig, facts: ModelFacts) -> dict[str, Any]:
    """Gated-delta-net layers: kernels, and a pool of states of known size."""
    if not facts.is_hybrid:
        return {}
    is_npu = pool.linear_attention == "ascend"
    kernels = {
        # The base stays triton: SGLang tracks states for its prefix cache only then.
        "linear-attn-backend": "triton",
        "linear-attn-prefill-backend": pool.linear_attention,
        "linear-attn-decode-backend": pool.linear_attention,
    }
    return {
        **({} if is_npu else kernels),
        "mamba-ssm-dtype": STATE_DTYPES[pool.state],
        "mamba-radix-cache-strategy": "extra_buffer",
        "mamba-track-interval": STATE_TRACK_TOKENS,
        "max-mamba-cache-size": STATE_SLOTS_PER_REQUEST * pool.max_running,
    }


def _environment(pool: PoolConfig, architecture: str) -> dict[str, str]:
    """Variables that decide numbers or health, named whether or not they are SGLang's defaults."""
    env = {
        "PYTHONUNBUFFERED": "1",
        # Many processes share a machine; thread pools of its size in each only wait.
        "OMP_NUM_THREADS": "1",
        # A view is a folder on this machine; nothing is looked up elsewhere.
        "HF_HUB_OFFLINE": "1",
        # A health probe would wait for a generation and mark a paused server as sick.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # Logprobs after temperature, as the trainer takes them.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_MAMBA_CONV_DTYPE": "bfloat16",
    }
    if architecture == CPU:
        return env | {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if architecture == NPU:
        return env | {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    if pool.weights == "fp8":
        env["SGLANG_ENABLE_JIT_DEEPGEMM"] = "1"
        env["SGLANG_FORCE_FP8_MARLIN"] = "1" if architecture == "sm80" else "0"
    if pool.weights == "nvfp4":
        is_w4a16 = pool.activations == "bf16" and pool.moe != "marlin"
        env["SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16"] = "1" if is_w4a16 else "0"
        env["SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION"] = "0"
        # The fused finalisation adds with atomics, in no fixed order.
        env["SGLANG_FLASHINFER_MOE_FUSED_FINALIZE"] = "0"
    return env


def _is_exact(config: TrainConfig) -> bool:
    return config.numerics.consistency == "exact"


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    parts: list[str] = []
    for name, value in arguments.items():
        if value is True:
            parts.append(f"--{name}")
        elif isinstance(value, list | tuple):
            parts += [f"--{name}", *map(str, value)]
        elif value is not False:
            parts += [f"--{name}", str(value)]
    return parts
