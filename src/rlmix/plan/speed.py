"""How fast an accelerator should decode: a roofline, computed and never measured.

A decoding step reads every weight that its tokens touch and the whole cache of its requests, and
multiplies. The slower of the two decides. Kernel launches, prefill and imbalance are left out, so
the numbers compare accelerators; expect real engines to be two to three times slower.
"""

from dataclasses import dataclass

from rlmix.config.schema.pools import AcceleratorConfig
from rlmix.plan.model_shape import BYTES_PER_ELEMENT, ModelShape

BANDWIDTH_REACHED_FRAC = 0.6
"""Share of the memory bandwidth that decode kernels reach."""
FLOPS_REACHED_FRAC = 0.4
"""Share of the peak matrix rate that they reach."""
MEMORY_USED_FRAC = 0.88
"""Share of the memory that an engine gives to weights and cache."""
RUNTIME_BYTES = 2e9
"""Memory of the engine itself."""
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelledSpeed:
    """Decode speed of one replica at full load."""

    model: str
    context_tokens: int
    batch: int
    """Requests at a time: as many as fit, up to the limit asked for."""
    tokens_per_s: float
    usd_per_mtok: float
    """Price of a million sampled tokens."""


def modelled_speed(
    shape: ModelShape,
    accelerator: AcceleratorConfig,
    *,
    weights: str,
    kv: str,
    tp: int,
    context_tokens: int,
    max_batch: int,
    usd_per_hour: float,
) -> ModelledSpeed | None:
    """Decode speed of one replica of `tp` accelerators; None when not even one request fits.

    Args:
        usd_per_hour: price of one accelerator.
    """
    room = tp * accelerator.memory_gb * 1e9 * MEMORY_USED_FRAC - RUNTIME_BYTES
    room -= shape.weight_bytes(weights)
    batch = min(max_batch, int(room // shape.request_bytes(kv, context_tokens)))
    if batch < 1:
        return None
    step_s = decode_step_s(
        shape,
        accelerator,
        weights=weights,
        kv=kv,
        tp=tp,
        batch=batch,
        context_tokens=context_tokens,
    )
    tokens_per_s = batch / step_s
    return ModelledSpeed(
        model=shape.name,
        context_tokens=context_tokens,
        batch=batch,
        tokens_per_s=tokens_per_s,
        usd_per_mtok=1e6 * tp * usd_per_hour / SECONDS_PER_HOUR / tokens_per_s,
    )


def decode_step_s(
    shape: ModelShape,
    accelerator: AcceleratorConfig,
    *,
    weights: str,
    kv: str,
    tp: int,
    batch: int,
    context_tokens: int,
) -> float:
    """Seconds of one step that samples one token for each of `batch` requests."""
    read = step_bytes(shape, weights=weights, kv=kv, batch=batch, context_tokens=context_tokens)
    flops = batch * (2 * shape.active_params + shape.attention_flops * context_tokens)
    read_s = read / (BANDWIDTH_REACHED_FRAC * tp * accelerator.bandwidth_tb_s * 1e12)
    compute_s = flops / (FLOPS_REACHED_FRAC * tp * peak_tflops(accelerator, weights) * 1e12)
    return max(read_s, compute_s)


def step_bytes(
    shape: ModelShape, *, weights: str, kv: str, batch: int, context_tokens: int
) -> float:
    """Bytes that one decoding step reads."""
    plain = (shape.head + shape.other) * BYTES_PER_ELEMENT["bf16"]
    quantised = shape.linear + shape.expert * shape.expert_layers * experts_read(shape, batch)
    cache = batch * shape.request_bytes(kv, context_tokens)
    return plain + quantised * BYTES_PER_ELEMENT[weights] + cache


def experts_read(shape: ModelShape, batch: int) -> float:
    """Expected number of distinct experts that a layer reads, if all are equally likely: E - E (1
    - k/E)^B. Real routing is skewed, so this is an upper bound."""
    if not shape.experts:
        return 0.0
    missed_frac = (1.0 - shape.experts_per_token / shape.experts) ** batch
    return shape.experts * (1.0 - missed_frac)


def peak_tflops(accelerator: AcceleratorConfig, weights: str) -> float:
    """Peak rate with weights in a format; formats that the chip cannot multiply in are unpacked
    to BF16 first."""
    rates = {
        "bf16": accelerator.bf16_tflops,
        "fp8": accelerator.fp8_tflops,
        "nvfp4": accelerator.nvfp4_tflops,
    }
    return rates[weights] or accelerator.bf16_tflops


def is_weight_only(accelerator: AcceleratorConfig, weights: str) -> bool:
    """True when the chip stores a format that it cannot multiply in."""
    rates = {"fp8": accelerator.fp8_tflops, "nvfp4": accelerator.nvfp4_tflops}
    return weights in rates and rates[weights] is None
