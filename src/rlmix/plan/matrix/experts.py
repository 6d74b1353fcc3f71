"""MoE kernels ("runners") by weight format."""

from rlmix.plan.capabilities import NOTE, REFUSED, Row
from rlmix.plan.matrix.sources import flashinfer, sglang, srt, vllm

MOE_HOOK = srt("arg_groups/moe_hook.py")
FP8 = srt("layers/quantization/fp8.py")
MODELOPT = srt("layers/quantization/modelopt_quant.py")
BLACKWELL = ("flashinfer_trtllm", "flashinfer_trtllm_routed")
CUDA = ("sm80", "sm90", "sm100", "sm120")
AUTO = "what auto picks changes with the version, and the numbers with it"
NVFP4_RUNNERS = (*BLACKWELL, "flashinfer_cutlass", "flashinfer_cutedsl", "marlin")

ROWS: tuple[Row, ...] = (
    Row(
        name="trtllm-gen-is-sm100",
        verdict=REFUSED,
        when={"architecture": ("sm80", "sm90"), "moe": BLACKWELL, "weights": ("bf16", "fp8")},
        reason="the trtllm-gen MoE kernels exist for SM100 and SM103 only",
        source=srt("arg_groups/overrides.py"),
        instead=({"moe": "triton"},),
    ),
    Row(
        name="trtllm-gen-is-sm100-workstation",
        verdict=REFUSED,
        when={"architecture": ("sm120",), "moe": BLACKWELL, "weights": ("bf16", "fp8")},
        reason="the trtllm-gen MoE kernels exist for SM100 and SM103 only; SM120 has no tcgen05",
        source=srt("arg_groups/overrides.py"),
        instead=({"moe": "triton"},),
    ),
    Row(
        name="trtllm-nvfp4-workstation",
        verdict=REFUSED,
        when={
            "architecture": ("sm120",),
            "moe": (*BLACKWELL, "flashinfer_cutedsl"),
            "weights": ("nvfp4",),
        },
        reason="these NVFP4 MoE kernels exist for SM100 and SM103 only; SM120 has no tcgen05",
        source=srt("arg_groups/overrides.py"),
        instead=(
            {"moe": "flashinfer_cutlass", "activations": "nvfp4"},
            {"moe": "marlin", "activations": "bf16"},
        ),
    ),
    Row(
        name="nvfp4-below-blackwell-is-marlin",
        verdict=REFUSED,
        when={
            "architecture": ("sm80", "sm90"),
            "weights": ("nvfp4",),
            "moe": (*BLACKWELL, "flashinfer_cutlass", "flashinfer_cutedsl", "triton", "deep_gemm"),
        },
        reason="below Blackwell SGLang serves NVFP4 experts through Marlin only, weights unpacked "
        "to BF16 in registers",
        source=MODELOPT,
        instead=({"moe": "marlin", "activations": "bf16"},),
    ),
    Row(
        name="nvfp4-triton-blackwell",
        verdict=REFUSED,
        when={
            "architecture": ("sm100",),
            "weights": ("nvfp4",),
            "moe": ("triton", "deep_gemm", "cutlass"),
        },
        reason="this runner has no NVFP4 kernel",
        source=MODELOPT,
        instead=({"moe": "flashinfer_cutedsl"},),
    ),
    Row(
        name="nvfp4-triton-workstation",
        verdict=REFUSED,
        when={
            "architecture": ("sm120",),
            "weights": ("nvfp4",),
            "moe": ("triton", "deep_gemm", "cutlass"),
        },
        reason="this runner has no NVFP4 kernel",
        source=MODELOPT,
        instead=(
            {"moe": "flashinfer_cutlass", "activations": "nvfp4"},
            {"moe": "marlin", "activations": "bf16"},
        ),
    ),
    Row(
        name="fp8-blocks-become-triton",
        verdict=REFUSED,
        when={
            "architecture": ("sm90", "sm100", "sm120"),
            "weights": ("fp8",),
            "moe": ("flashinfer_cutlass", "flashinfer_cutedsl"),
        },
        reason="this runner has no kernel for 128 x 128 FP8 blocks, and SGLang would run Triton "
        "without saying so",
        source=FP8,
        instead=({"moe": "triton"},),
    ),
    Row(
        name="fp8-marlin-experts",
        verdict=REFUSED,
        when={
            "architecture": ("sm90", "sm100", "sm120"),
            "weights": ("fp8",),
            "moe": ("marlin",),
        },
        reason="SGLang has no Marlin kernel for FP8 experts",
        source=FP8,
        instead=({"moe": "triton"},),
    ),
    Row(
        name="fp8-experts-sm80",
        verdict=REFUSED,
        when={
            "architecture": ("sm80",),
            "weights": ("fp8",),
            "moe": (*NVFP4_RUNNERS, "triton", "deep_gemm", "cutlass", "auto"),
        },
        reason="dense FP8 layers run as W8A16 through Marlin, but FP8 experts have Triton, "
        "DeepGEMM and CUTLASS kernels only, none of which runs on SM80",
        source=sglang(38291),
        instead=(
            {"weights": "bf16", "moe": "triton", "activations": "bf16"},
            {"weights": "nvfp4", "moe": "marlin", "activations": "bf16"},
        ),
    ),
    Row(
        name="deep-gemm-fp8-blackwell",
        verdict=NOTE,
        when={"architecture": ("sm100",), "weights": ("fp8",)},
        reason="DeepGEMM rounds FP8 scales to powers of two here (UE8M0): those of dense layers, "
        "and those of experts with moe=deep_gemm. So B200 and H100 serve different numbers from "
        "one FP8 view, and a pushed update needs the same step or gives garbage",
        source=sglang(13067),
    ),
    Row(
        name="fp8-accuracy-blackwell",
        verdict=NOTE,
        when={"architecture": ("sm100",), "weights": ("fp8",), "moe": BLACKWELL},
        reason="Qwen3.5-35B-A3B-FP8 lost accuracy with this runner and BF16 state, and a larger "
        "sibling scored near zero without an error on B300",
        source=f"{sglang(21317)} {sglang(25863)}",
    ),
    Row(
        name="deep-gemm-workstation",
        verdict=NOTE,
        when={"architecture": ("sm120",), "weights": ("fp8",), "moe": ("deep_gemm",)},
        reason="0.5.23 has a DeepGEMM path for FP8 experts on SM120, which rounds their scales to "
        "powers of two; vLLM failed to load FP8 blocks through DeepGEMM here",
        source=f"{srt('layers/moe/moe_runner/deep_gemm_sm120.py')} {vllm(51884)}",
    ),
    Row(
        name="deep-gemm-is-fp8",
        verdict=REFUSED,
        when={
            "weights": ("bf16",),
            "moe": ("deep_gemm", "marlin", "flashinfer_cutedsl", "cutlass"),
        },
        reason="this runner has no BF16 kernel in SGLang",
        source=srt("layers/quantization/unquant.py"),
        instead=({"moe": "triton"},),
    ),
    Row(
        name="routing-inside-the-kernel",
        verdict=REFUSED,
        when={"moe": ("flashinfer_trtllm",), "record_experts": ("true",)},
        reason="this runner routes inside its kernel and records no experts, and routing replay "
        "would get zeros without an error",
        source="https://github.com/vllm-project/vllm/pull/44214",
        instead=({"moe": "flashinfer_trtllm_routed"}, {"record_experts": "false"}),
    ),
    Row(
        name="bf16-trtllm-graph",
        verdict=NOTE,
        when={"architecture": ("sm100",), "weights": ("bf16",), "moe": BLACKWELL},
        reason="BF16 experts with this runner met an illegal access under piecewise CUDA graphs; "
        "Triton is the runner that was validated for BF16 weight updates",
        source=sglang(26715),
    ),
    Row(
        name="nvfp4-trtllm-corrupts",
        verdict=NOTE,
        when={"architecture": ("sm100",), "weights": ("nvfp4",), "moe": BLACKWELL},
        reason="this runner corrupted another NVFP4 model where CUTLASS was right, and its tile of "
        "192 gave NaN before FlashInfer 0.6.18 (0.5.23 pins 0.7.2)",
        source=f"{sglang(26324)} {flashinfer(4486)}",
    ),
    Row(
        name="b300-draft-graphs",
        verdict=NOTE,
        when={"accelerator": ("b300",), "moe": BLACKWELL},
        reason="capturing graphs picked a kernel that B300 does not have in 0.5.12",
        source=sglang(25563),
        since="0.5.12",
        before="0.5.13",
    ),
    Row(
        name="nvfp4-cutlass-workstation",
        verdict=NOTE,
        when={"architecture": ("sm120",), "weights": ("nvfp4",), "moe": ("flashinfer_cutlass",)},
        reason="the grouped NVFP4 product gave invalid output on SM120, and CUDA graphs sporadic "
        "illegal accesses with cuDNN before 9.23.1",
        source=f"{flashinfer(2723)} {vllm(35566)}",
    ),
    Row(
        name="fp8-triton-shared-memory",
        verdict=NOTE,
        when={"architecture": ("sm120",), "weights": ("fp8",), "moe": ("triton",)},
        reason="default tiles of the FP8 Triton MoE kernel exceed the 101,376 bytes of shared "
        "memory of this chip; it needs tuned ones",
        source=sglang(21782),
    ),
    Row(
        name="npu-runner",
        verdict=REFUSED,
        when={"architecture": ("npu",), "moe": (*NVFP4_RUNNERS, "triton", "deep_gemm", "cutlass")},
        reason="CUDA runners do not exist on NPUs; auto takes the ascend runner",
        source=srt("arg_groups/overrides.py"),
        instead=({"moe": "auto"},),
    ),
    Row(
        name="auto-runner-bf16",
        verdict=REFUSED,
        when={"architecture": CUDA, "weights": ("bf16",), "moe": ("auto",)},
        reason=AUTO,
        source=MOE_HOOK,
        instead=({"moe": "triton"},),
    ),
    Row(
        name="auto-runner-fp8",
        verdict=REFUSED,
        when={"architecture": CUDA[1:], "weights": ("fp8",), "moe": ("auto",)},
        reason=AUTO,
        source=MOE_HOOK,
        instead=({"moe": "triton"},),
    ),
    Row(
        name="auto-runner-nvfp4",
        verdict=REFUSED,
        when={"architecture": ("sm100",), "weights": ("nvfp4",), "moe": ("auto",)},
        reason=AUTO,
        source=MOE_HOOK,
        instead=(
            {"moe": "flashinfer_cutedsl", "activations": "bf16"},
            {"moe": "flashinfer_trtllm_routed", "activations": "nvfp4"},
        ),
    ),
    Row(
        name="auto-runner-nvfp4-workstation",
        verdict=REFUSED,
        when={"architecture": ("sm120",), "weights": ("nvfp4",), "moe": ("auto",)},
        reason=AUTO,
        source=MOE_HOOK,
        instead=(
            {"moe": "flashinfer_cutlass", "activations": "nvfp4"},
            {"moe": "marlin", "activations": "bf16"},
        ),
    ),
    Row(
        name="auto-runner-nvfp4-below-blackwell",
        verdict=REFUSED,
        when={"architecture": ("sm80", "sm90"), "weights": ("nvfp4",), "moe": ("auto",)},
        reason=AUTO,
        source=MOE_HOOK,
        instead=({"moe": "marlin", "activations": "bf16"},),
    ),
)
