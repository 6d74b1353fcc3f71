"""Weight formats and the activations that kernels multiply them with."""

from rlmix.plan.capabilities import NOTE, REFUSED, Row
from rlmix.plan.matrix.sources import srt

MODELOPT = srt("layers/quantization/modelopt_quant.py")
FP8_UTILS = srt("layers/quantization/fp8_utils.py")
ENVIRON = srt("environ.py")

ROWS: tuple[Row, ...] = (
    Row(
        name="bf16-weights",
        verdict=REFUSED,
        when={"weights": ("bf16",), "activations": ("fp8", "nvfp4", "fp32")},
        reason="BF16 weights are multiplied with BF16 activations",
        source=srt("layers/quantization/unquant.py"),
        instead=({"activations": "bf16"},),
    ),
    Row(
        name="fp8-is-w8a8",
        verdict=REFUSED,
        when={
            "architecture": ("sm90", "sm100", "sm120"),
            "weights": ("fp8",),
            "activations": ("bf16", "nvfp4", "fp32"),
        },
        reason="FP8 blocks are multiplied with FP8 activations (W8A8) from SM89 on",
        source=FP8_UTILS,
        instead=({"activations": "fp8"},),
    ),
    Row(
        name="fp8-sm80-is-w8a16",
        verdict=REFUSED,
        when={
            "architecture": ("sm80",),
            "weights": ("fp8",),
            "activations": ("fp8", "nvfp4", "fp32"),
        },
        reason="without FP8 tensor cores Marlin unpacks FP8 weights and multiplies in BF16 (W8A16)",
        source=FP8_UTILS,
        instead=({"activations": "bf16"},),
    ),
    Row(
        name="nvfp4-never-fp8",
        verdict=REFUSED,
        when={"weights": ("nvfp4",), "activations": ("fp8", "fp32")},
        reason="NVFP4 weights are multiplied with NVFP4 (W4A4) or BF16 (W4A16) activations",
        source=MODELOPT,
        instead=({"activations": "bf16", "moe": "marlin"},),
    ),
    Row(
        name="marlin-is-w4a16",
        verdict=REFUSED,
        when={"weights": ("nvfp4",), "activations": ("nvfp4",), "moe": ("marlin",)},
        reason="Marlin unpacks NVFP4 weights and multiplies in BF16 (W4A16)",
        source=MODELOPT,
        instead=({"activations": "bf16"},),
    ),
    Row(
        name="trtllm-is-w4a4",
        verdict=REFUSED,
        when={
            "architecture": ("sm100",),
            "weights": ("nvfp4",),
            "activations": ("bf16",),
            "moe": ("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutlass"),
        },
        reason="this runner rounds activations to NVFP4 (W4A4); W4A16 has the CuTe DSL kernels "
        "(SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16=1)",
        source=ENVIRON,
        instead=({"moe": "flashinfer_cutedsl"}, {"activations": "nvfp4"}),
    ),
    Row(
        name="cutlass-is-w4a4-workstation",
        verdict=REFUSED,
        when={
            "architecture": ("sm120",),
            "weights": ("nvfp4",),
            "activations": ("bf16",),
            "moe": ("flashinfer_cutlass",),
        },
        reason="this runner rounds activations to NVFP4 (W4A4)",
        source=MODELOPT,
        instead=({"activations": "nvfp4"}, {"moe": "marlin"}),
    ),
    Row(
        name="w4a16-without-qat",
        verdict=NOTE,
        when={"weights": ("nvfp4",), "activations": ("bf16",)},
        reason="reinforcement learning on W4A16 samples without quantisation-aware training has "
        "been seen to diverge and crash elsewhere; it needs a correction (mis) and a watched k3",
        source="https://github.com/verl-project/verl/pull/5190",
    ),
    Row(
        name="w4a4-approximate-reciprocal",
        verdict=NOTE,
        when={"weights": ("nvfp4",), "activations": ("nvfp4",)},
        reason="FlashInfer quantises activations with approximate reciprocals, so no emulation "
        "reproduces these logprobs bit for bit",
        source="https://github.com/flashinfer-ai/flashinfer",
    ),
    Row(
        name="marlin-repacks",
        verdict=NOTE,
        when={"weights": ("nvfp4",), "moe": ("marlin",)},
        reason="Marlin repacks weights when it loads them; updates in place are unproven, so the "
        "pool updates from disk",
        source=MODELOPT,
    ),
    Row(
        name="npu-formats",
        verdict=REFUSED,
        when={"architecture": ("npu",), "weights": ("fp8", "nvfp4")},
        reason="rlmix plans BF16 on NPUs; SGLang's quantised formats there (modelslim) are not "
        "among the weight views",
        source="https://github.com/sgl-project/sglang/pull/38678",
        instead=({"weights": "bf16", "activations": "bf16"},),
    ),
)
