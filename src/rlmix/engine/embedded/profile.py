"""How an accelerator computes, beyond the format of its weights and its KV cache.

Four effects are reproduced, each real: in which format the inputs of quantised layers are, where
results are rounded to BF16, in which format the attention kernel multiplies and how it walks over
the cache, and in which order the products of a dot product are added. Invariant: a profile changes
rounding only; with exact arithmetic every profile computes the same function.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmix.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("bf16", "fp8", "nvfp4", "fp32")
KV_FORMATS = ("bf16", "fp8", "fp32")

QUERY_FP8_BACKENDS = ("fa3", "fa4", "trtllm_mha")
"""With an FP8 cache these kernels multiply in FP8: the query and the unnormalised probabilities are
cast to E4M3, unscaled."""
QUERY_BF16_BACKENDS = ("flashinfer", "triton", "torch_native")
"""These dequantise keys and values and multiply in BF16."""

EXACT_FORMATS = (("bf16", "bf16", "bf16"), ("bf16", "fp32", "fp32"))
"""Weights, activations and KV of exact mode."""

_BLOCK, _GROUP = 16, 128
"""Channels that share an NVFP4 scale, and an FP8 scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """How one accelerator's kernels cut their work. The numbers stand for "another kernel"; they
    are chosen by us and measured on no chip."""

    blocks: int
    """Runs that the eight blocks of 16 channels of a group of 128 are cut into; a dot product
    takes a block from each run in turn."""
    channels: int
    """The same for the 16 channels of a block."""
    prefill_tile: int
    """Cached positions that attention of prompts handles at once: 32, 64, 96 or 128. MKL's sums
    over so few do not depend on how many there are."""
    decode_tile: int
    fp8_scales: str = "fp32"
    """`ue8m0`: DeepGEMM, which multiplies dense FP8 layers, takes powers of two only."""
    marlin: tuple[str, ...] = ()
    """Weight formats that meet BF16 inputs (W8A16, W4A16) through Marlin, which holds their float32
    scales in BF16."""


KERNELS = {
    "b300": Kernels(blocks=4, channels=8, prefill_tile=128, decode_tile=64, fp8_scales="ue8m0"),
    "b200": Kernels(blocks=2, channels=8, prefill_tile=128, decode_tile=128, fp8_scales="ue8m0"),
    "h200": Kernels(blocks=4, channels=4, prefill_tile=128, decode_tile=96, marlin=("nvfp4",)),
    "h100": Kernels(blocks=2, channels=4, prefill_tile=128, decode_tile=96, marlin=("nvfp4",)),
    "a100": Kernels(blocks=1, channels=2, prefill_tile=64, decode_tile=64, marlin=("fp8", "nvfp4")),
    "rtx_pro_6000": Kernels(
        blocks=4, channels=2, prefill_tile=64, decode_tile=32, marlin=("nvfp4",)
    ),
    "cpu": Kernels(blocks=1, channels=1, prefill_tile=128, decode_tile=128),
}
"""Accelerator -> kernels. H100 and H200 have the same number of the same multiprocessors and take
the same attention kernels, so they share their tiles. Their orders differ, because Triton cuts
products of experts by a table for each device's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What decides an engine's rounding."""

    accelerator: str
    weights: str
    activations: str
    """Format of what quantised layers are multiplied with: `fp8` (W8A8), `nvfp4` (W4A4) or `bf16`.
    With each of them results are rounded to BF16 where a GPU kernel writes its output. `fp32`:
    nothing is rounded, for oracles."""
    kv: str
    """`bf16`, `fp8` (E4M3, scale 1, saturating) or `fp32` (not rounded, for oracles)."""
    attention: str
    moe: str = "grouped"
    """Runner of the experts; only `deep_gemm` changes numbers, see `expert_fp8_scales`."""
    consistency: str = "native"
    """`exact`: the consistent operators compute everything, as the trainer does; what this chip's
    kernels would do otherwise (their orders and tiles) is not reproduced."""

    def __post_init__(self) -> None:
        backends = QUERY_FP8_BACKENDS + QUERY_BF16_BACKENDS
        allowed = {
            "accelerator": tuple(KERNELS),
            "activations": ACTIVATIONS,
            "kv": KV_FORMATS,
            "attention": backends,
            "consistency": ("native", "exact"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                raise ConfigError(
                    f"embedded engine: {name}={value!r}; it reproduces {', '.join(values)}"
                )
        if self.activations in ("fp8", "nvfp4") and self.activations != self.weights:
            raise ConfigError(
                f"embedded engine: activations={self.activations} with weights={self.weights}; "
                f"kernels multiply {self.activations} with {self.activations} only: use "
                f"weights={self.activations} or activations=bf16"
            )
        formats = (self.weights, self.activations, self.kv)
        if self.is_exact and formats not in EXACT_FORMATS:
            raise ConfigError(
                f"embedded engine: consistency=exact with weights={self.weights} "
                f"activations={self.activations} kv={self.kv}; exact operators remove differences "
                "of order, not of format: use bf16 for all three (or fp32 for activations and kv), "
                "or consistency=native"
            )

    @property
    def is_exact(self) -> bool:
        return self.consistency == "exact"

    @property
    def kernels(self) -> Kernels:
        return KERNELS[self.accelerator]

    @property
    def fp8_scales(self) -> str:
        """Scales of dense FP8 layers and of their inputs: `fp32` or `ue8m0`."""
        return self.kernels.fp8_scales

    @property
    def expert_fp8_scales(self) -> str:
        """Those of experts, which other runners than DeepGEMM multiply with float32 scales."""
        return self.kernels.fp8_scales if self.moe == "deep_gemm" else "fp32"

    @property
    def is_marlin(self) -> bool:
        """Whether Marlin multiplies the quantised weights."""
        return self.activations == "bf16" and self.weights in self.kernels.marlin

    @property
    def rounds_to_bf16(self) -> bool:
        """Whether kernels write BF16."""
        return self.activations != "fp32"

    @property
    def rounds_query_to_fp8(self) -> bool:
        return self.kv == "fp8" and self.attention in QUERY_FP8_BACKENDS

    @property
    def probability_format(self) -> str:
        """Format of the attention probabilities when they meet the values: fp8, bf16 or fp32."""
        if self.rounds_query_to_fp8:
            return "fp8"
        return "bf16" if self.rounds_to_bf16 else "fp32"

    def channel_order(self, num_channels: int) -> "Tensor | None":
        """int64 permutation in which channels are stored, so that dot products over them add in
        this order; None to keep them as they are. Channels that share a scale stay together."""
        import torch

        kernels = self.kernels
        if (kernels.blocks, kernels.channels) == (1, 1) or num_channels % _BLOCK:
            return None
        in_block = torch.arange(_BLOCK).view(kernels.channels, -1).t().reshape(-1)
        parts = []
        for first in range(0, num_channels, _GROUP):
            blocks = torch.arange(min(_GROUP, num_channels - first) // _BLOCK)
            if len(blocks) % kernels.blocks == 0:
                blocks = blocks.view(kernels.blocks, -1).t().reshape(-1)
            parts.append(first + blocks * _BLOCK)
        return (torch.cat(parts)[:, None] + in_block).reshape(-1)
