"""What somebody has run: combinations of the public mixed-fleet run and of SGLang's recipes."""

from rlmix.plan.capabilities import NOTE, WORKS, Row
from rlmix.plan.matrix.sources import COOKBOOK, STITCH, STITCH_B200

NPU_RECIPE = "https://github.com/sgl-project/sglang/pull/38678"

ROWS: tuple[Row, ...] = (
    Row(
        name="seen-nvfp4-w4a16-blackwell",
        verdict=WORKS,
        when={
            "architecture": ("sm100",),
            "weights": ("nvfp4",),
            "activations": ("bf16",),
            "kv": ("fp8",),
            "attention": ("trtllm_mha",),
            "moe": ("flashinfer_cutedsl",),
        },
        reason="B200 and B300 pools of the public mixed-fleet run",
        source=STITCH,
    ),
    Row(
        name="seen-bf16-b200",
        verdict=WORKS,
        when={
            "architecture": ("sm100",),
            "weights": ("bf16",),
            "kv": ("bf16",),
            "attention": ("trtllm_mha",),
            "moe": ("triton",),
        },
        reason="the homogeneous BF16 control of the public mixed-fleet run",
        source=STITCH_B200,
    ),
    Row(
        name="seen-fp8-hopper",
        verdict=WORKS,
        when={
            "architecture": ("sm90",),
            "weights": ("fp8",),
            "activations": ("fp8",),
            "kv": ("fp8",),
            "attention": ("fa3",),
            "moe": ("triton", "deep_gemm"),
        },
        reason="FP8 pools of the public mixed-fleet run",
        source=STITCH,
    ),
    Row(
        name="seen-bf16-hopper",
        verdict=WORKS,
        when={
            "architecture": ("sm90",),
            "weights": ("bf16",),
            "kv": ("fp8",),
            "attention": ("fa3",),
            "moe": ("triton",),
        },
        reason="BF16 pools of the public mixed-fleet run",
        source=STITCH,
    ),
    Row(
        name="seen-bf16-others",
        verdict=WORKS,
        when={
            "architecture": ("sm80", "sm120"),
            "weights": ("bf16",),
            "kv": ("fp8",),
            "attention": ("flashinfer",),
            "moe": ("triton",),
        },
        reason="A100 and RTX PRO 6000 pools of the public mixed-fleet run",
        source=STITCH,
    ),
    Row(
        name="recipe-bf16-kv",
        verdict=WORKS,
        when={
            "architecture": ("sm80", "sm90", "sm100", "sm120"),
            "weights": ("bf16",),
            "kv": ("bf16",),
            "attention": ("fa3", "flashinfer", "triton", "trtllm_mha"),
            "moe": ("triton",),
        },
        reason="what SGLang picks for BF16 checkpoints, or falls back to",
        source=COOKBOOK,
    ),
    Row(
        name="recipe-fp8",
        verdict=WORKS,
        when={
            "architecture": ("sm90", "sm100"),
            "weights": ("fp8",),
            "activations": ("fp8",),
            "kv": ("bf16",),
            "attention": ("fa3", "trtllm_mha"),
        },
        reason="SGLang's recipe for FP8 checkpoints",
        source=COOKBOOK,
    ),
    Row(
        name="recipe-nvfp4",
        verdict=WORKS,
        when={
            "architecture": ("sm100",),
            "weights": ("nvfp4",),
            "activations": ("nvfp4",),
            "attention": ("trtllm_mha",),
        },
        reason="SGLang's recipe for NVFP4 checkpoints on B200 and B300",
        source=COOKBOOK,
    ),
    Row(
        name="recipe-npu",
        verdict=WORKS,
        when={
            "architecture": ("npu",),
            "weights": ("bf16",),
            "kv": ("bf16",),
            "attention": ("ascend",),
        },
        reason="the recipe for this model on Atlas 800I A3",
        source=NPU_RECIPE,
    ),
    Row(
        name="npu-never-run-here",
        verdict=NOTE,
        when={"architecture": ("npu",)},
        reason="NPU support is built apart from the CUDA wheel, and rlmix can neither emulate nor "
        "verify it; kept sets and weight updates are unproven there",
        source=NPU_RECIPE,
    ),
)
