"""What follows from the kind of an accelerator: its kernels and the formats it multiplies in.

The figures themselves (memory, rates, prices) are YAML, `conf/accelerators/`. Invariant: engines
choose kernels by architecture, so the capability matrix speaks of architectures and names a chip
only where one differs from its siblings.
"""

from rlmix.config.schema.pools import AcceleratorConfig

NPU, CPU = "npu", "cpu"
ARCHITECTURES = ("sm80", "sm90", "sm100", "sm120", NPU, CPU)
NO_LABEL = "none"
"""Ray label of what is no accelerator: servers run on the machine's own CPU."""
BLACKWELL_MINORS = {10: "sm100", 12: "sm120"}
"""B300 has compute capability 10.3 and takes the kernels of 10.0."""


def architecture(chip: AcceleratorConfig) -> str:
    """`sm80`, `sm90`, `sm100`, `sm120`, `npu` for a chip without CUDA, `cpu` for none at all."""
    if chip.compute_capability is None:
        return CPU if chip.ray_label == NO_LABEL else NPU
    major, minor = (int(part) for part in chip.compute_capability.split("."))
    return BLACKWELL_MINORS.get(major, f"sm{major}{minor}")


def peak_tflops(chip: AcceleratorConfig, activations: str) -> float:
    """Peak rate of products whose operands are in a format, 1e12 operations a second. Products
    follow the activations: weights in a narrower format are unpacked to theirs first."""
    rates = {"fp8": chip.fp8_tflops, "nvfp4": chip.nvfp4_tflops}
    return rates.get(activations) or chip.bf16_tflops


def multiplies(chip: AcceleratorConfig, weights: str) -> bool:
    """False when the chip stores a format that its tensor cores do not compute in."""
    rates = {"fp8": chip.fp8_tflops, "nvfp4": chip.nvfp4_tflops}
    return rates.get(weights, chip.bf16_tflops) is not None
