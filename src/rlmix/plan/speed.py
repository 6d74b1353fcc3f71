"""How fast an accelerator should decode: a roofline, computed and never measured.

A decoding step reads every weight that its tokens touch and the whole cache of its requests, reads
and writes their recurrent state, and multiplies. The slower of moving and multiplying decides.
Kernel launches, prefill and imbalance are left out, so the numbers compare accelerators; expect
real engines to be two to three times slower.
"""

from dataclasses import dataclass

from rlmix.config.schema.pools import AcceleratorConfig
from rlmix.plan.accelerators import peak_tflops
from rlmix.plan.memory import RUNTIME_BYTES, STATE_SLOTS_PER_REQUEST, kv_bytes_held
from rlmix.plan.model_facts import ModelFacts

BANDWIDTH_REACHED_FRAC = 0.6
"""Share of the memory bandwidth that decode kernels reach."""
FLOPS_REACHED_FRAC = 0.4
"""Share of the peak matrix rate that they reach."""
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """The formats that decide how many bytes a step moves."""

    weights: str
    """The view, as `numerics.view_spec` reads it."""
    activations: str
    kv: str
    state: str
    """Of the recurrent state; any format for models without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelledSpeed:
    """Decode speed of one replica at full load."""

    model: str
    context_tokens: int
    batch: int
    """Requests at a time: as many as fit, up to the limit asked for."""
    tokens_per_s: float
    usd_per_mtok: float | None
    """Price of a million sampled tokens; None without a price."""


def modelled_speed(
    facts: ModelFacts,
    chip: AcceleratorConfig,
    numbers: Numbers,
    *,
    tp: int,
    memory_frac: float,
    context_tokens: int,
    max_batch: int,
    usd_per_hour: float | None,
) -> ModelledSpeed | None:
    """Decode speed of one replica of `tp` accelerators; None when not even one request fits.

    Args:
        usd_per_hour: price of one accelerator.
    """
    room = tp * (chip.memory_gb * 1e9 * memory_frac - RUNTIME_BYTES)
    room -= facts.weight_bytes(numbers.weights)
    request = kv_bytes_held(facts, kv=numbers.kv, tp=tp) * context_tokens
    request += STATE_SLOTS_PER_REQUEST * facts.state_bytes(numbers.state)
    batch = min(max_batch, int(room // request))
    if batch < 1:
        return None
    step_s = decode_step_s(facts, chip, numbers, tp=tp, batch=batch, context_tokens=context_tokens)
    tokens_per_s = batch / step_s
    usd_per_s = None if usd_per_hour is None else tp * usd_per_hour / SECONDS_PER_HOUR
    return ModelledSpeed(
        model=facts.name,
        context_tokens=context_tokens,
        batch=batch,
        tokens_per_s=tokens_per_s,
        usd_per_mtok=None if usd_per_s is None else 1e6 * usd_per_s / tokens_per_s,
    )


def decode_step_s(
    facts: ModelFacts,
    chip: AcceleratorConfig,
    numbers: Numbers,
    *,
    tp: int,
    batch: int,
    context_tokens: int,
) -> float:
    """Seconds of one step that samples one token for each of `batch` requests."""
    moved = step_bytes(facts, numbers, batch=batch, context_tokens=context_tokens, tp=tp)
    flops = batch * (2 * facts.active_params + facts.attention_flops * context_tokens)
    move_s = moved / (BANDWIDTH_REACHED_FRAC * tp * chip.bandwidth_tb_s * 1e12)
    rate = peak_tflops(chip, numbers.activations)
    return max(move_s, flops / (FLOPS_REACHED_FRAC * tp * rate * 1e12))


def step_bytes(
    facts: ModelFacts, numbers: Numbers, *, batch: int, context_tokens: int, tp: int = 1
) -> float:
    """Bytes that one decoding step moves, on all accelerators together."""
    experts = facts.expert_layers * experts_read(facts, batch)
    weights = facts.dense_bytes(numbers.weights) + experts * facts.expert_bytes(numbers.weights)
    cache = context_tokens * kv_bytes_held(facts, kv=numbers.kv, tp=tp)
    return weights + batch * (cache + 2 * facts.state_bytes(numbers.state))


def experts_read(facts: ModelFacts, batch: int) -> float:
    """Expected number of distinct experts that a layer reads, if all are equally likely: E - E (1
    - k/E)^B. Real routing is skewed, so this is an upper bound."""
    if not facts.experts:
        return 0.0
    missed_frac = (1.0 - facts.experts_per_token / facts.experts) ** batch
    return facts.experts * (1.0 - missed_frac)
