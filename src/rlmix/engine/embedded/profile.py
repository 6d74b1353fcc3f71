"""How an accelerator computes, beyond the format of its weights and its KV cache.

Three effects are reproduced, each real and each small: where activations are rounded to BF16, in
which format the attention kernel multiplies when the cache is FP8, and in which order the products
of a dot product are added. Invariant: a profile changes rounding only; with exact
arithmetic every profile computes the same function.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmix.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("bf16", "fp32")
KV_FORMATS = ("bf16", "fp8", "fp32")

SPLITS = {"b300": 16, "b200": 8, "h200": 4, "h100": 4, "a100": 2, "rtx_pro_6000": 32, "cpu": 1}
"""Accelerator -> into how many equal runs of channels a dot product is cut; products are added
run by run in turn. Chips of one generation share a number because they share kernels. The
numbers stand for "another kernel", they are not measured on the chips."""

QUERY_FP8_BACKENDS = ("fa3", "fa4", "trtllm_mha")
"""With an FP8 cache these kernels multiply in FP8: the query and the unnormalised probabilities are
cast to E4M3, unscaled."""
QUERY_BF16_BACKENDS = ("flashinfer", "triton", "torch_native")
"""These dequantise keys and values and multiply in BF16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What decides an engine's rounding."""

    accelerator: str
    weights: str
    activations: str
    """`bf16`: rounded where a GPU kernel writes its output; `fp32`: never, for oracles."""
    kv: str
    """`bf16`, `fp8` (E4M3, scale 1, saturating) or `fp32` (not rounded, for oracles)."""
    attention: str

    def __post_init__(self) -> None:
        backends = QUERY_FP8_BACKENDS + QUERY_BF16_BACKENDS
        allowed = {
            "accelerator": tuple(SPLITS),
            "activations": ACTIVATIONS,
            "kv": KV_FORMATS,
            "attention": backends,
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                raise ConfigError(
                    f"embedded engine: {name}={value!r}; it reproduces {', '.join(values)}"
                )

    @property
    def rounds_query_to_fp8(self) -> bool:
        return self.kv == "fp8" and self.attention in QUERY_FP8_BACKENDS

    @property
    def probability_format(self) -> str:
        """Format of the attention probabilities when they meet the values: fp8, bf16 or fp32."""
        return "fp8" if self.rounds_query_to_fp8 else self.activations

    def channel_order(self, num_channels: int) -> "Tensor | None":
        """int64 permutation in which channels are stored, so that dot products over them add in
        this order; None to keep them as they are."""
        import torch

        splits = SPLITS[self.accelerator]
        if splits == 1 or num_channels % splits:
            return None
        return torch.arange(num_channels).view(splits, -1).t().reshape(-1)
