"""Attention kernels and the KV cache."""

from rlmix.plan.capabilities import NOTE, REFUSED, Row
from rlmix.plan.matrix.sources import sglang, srt, vllm

REGISTRY = srt("layers/attention/attention_registry.py")
HOOK = srt("arg_groups/attention_hook.py")

ROWS: tuple[Row, ...] = (
    Row(
        name="fp8-kv-triton-sm80",
        verdict=REFUSED,
        when={"architecture": ("sm80",), "kv": ("fp8",), "attention": ("triton",)},
        reason="Triton has no conversion to E4M3 below SM89 (fp8e4nv), so it can neither write nor "
        "read an FP8 KV cache",
        source=sglang(38291),
        instead=({"attention": "flashinfer"}, {"kv": "bf16"}),
    ),
    Row(
        name="fp8-kv-fa3-sm80",
        verdict=REFUSED,
        when={"architecture": ("sm80",), "kv": ("fp8",), "attention": ("fa3",)},
        reason="FA3 multiplies in FP8 when the cache is FP8, and the chip has no FP8 tensor cores",
        source=REGISTRY,
        instead=({"attention": "flashinfer"}, {"kv": "bf16"}),
    ),
    Row(
        name="fp8-kv-flashinfer-sm80",
        verdict=NOTE,
        when={"architecture": ("sm80",), "kv": ("fp8",), "attention": ("flashinfer",)},
        reason="FP8 KV on SM80 is known from one public run only; compare its logprobs before "
        "trusting a long run",
        source=sglang(38291),
    ),
    Row(
        name="fp8-kv-trtllm-sm120",
        verdict=REFUSED,
        when={"architecture": ("sm120",), "kv": ("fp8",), "attention": ("trtllm_mha",)},
        reason="the TRT-LLM prefill kernel of SM120 takes no E4M3 cache, and the server refuses to "
        "start",
        source=HOOK,
        instead=({"attention": "flashinfer"}, {"kv": "bf16"}),
    ),
    Row(
        name="fp8-kv-flashinfer-sm120",
        verdict=NOTE,
        when={"architecture": ("sm120",), "kv": ("fp8",), "attention": ("flashinfer",)},
        reason="FlashInfer with FP8 KV and CUDA graphs gave random output on SM120 in vLLM, where "
        "Triton was right; the admission canaries must pass",
        source=vllm(41651),
    ),
    Row(
        name="fp8-kv-triton-sm120-old",
        verdict=REFUSED,
        when={"architecture": ("sm120",), "kv": ("fp8",), "attention": ("triton",)},
        reason="decode with FP8 KV through Triton failed on RTX PRO 6000 before 0.5.10",
        source="https://github.com/ai-dynamo/aiconfigurator/pull/975",
        instead=({"attention": "flashinfer"}, {"kv": "bf16"}),
        before="0.5.10",
    ),
    Row(
        name="fp8-kv-multiplies-in-fp8",
        verdict=NOTE,
        when={"kv": ("fp8",), "attention": ("fa3", "fa4", "trtllm_mha")},
        reason="with an FP8 cache this kernel casts the query to E4M3 too, so logprobs move more "
        "than the cache alone explains",
        source=srt("layers/attention/flashattention_backend.py"),
    ),
    Row(
        name="fp32-kv",
        verdict=REFUSED,
        when={"kv": ("fp32",)},
        reason="no SGLang kernel has an FP32 KV cache; it is for emulated reference pools",
        source=srt("arg_groups/fields/model.py"),
        instead=({"kv": "bf16"},),
    ),
    Row(
        name="fa3-needs-hopper",
        verdict=REFUSED,
        when={"architecture": ("sm100", "sm120"), "attention": ("fa3",)},
        reason="FA3 has kernels for SM80 and SM90 only",
        source=REGISTRY,
        instead=({"attention": "flashinfer"},),
    ),
    Row(
        name="hybrid-sm120",
        verdict=REFUSED,
        when={
            "architecture": ("sm120",),
            "attention": ("fa4", "torch_native"),
            "linear_attention": ("triton", "flashinfer"),
        },
        reason="models with gated-delta-net layers take triton, trtllm_mha or flashinfer on SM120",
        source=REGISTRY,
        instead=({"attention": "flashinfer"}, {"attention": "triton"}),
    ),
    Row(
        name="hybrid-sm100",
        verdict=REFUSED,
        when={
            "architecture": ("sm100",),
            "attention": ("torch_native",),
            "linear_attention": ("triton", "flashinfer"),
        },
        reason="models with gated-delta-net layers take trtllm_mha, fa4, flashinfer or triton on "
        "SM100",
        source=REGISTRY,
        instead=({"attention": "trtllm_mha"}, {"attention": "flashinfer"}),
    ),
    Row(
        name="fa4-below-blackwell",
        verdict=REFUSED,
        when={"architecture": ("sm80", "sm90"), "attention": ("fa4",)},
        reason="the FA4 path of this model is for Blackwell",
        source=REGISTRY,
        instead=({"attention": "flashinfer"},),
    ),
    Row(
        name="trtllm-sm80",
        verdict=REFUSED,
        when={"architecture": ("sm80",), "attention": ("trtllm_mha",)},
        reason="TRT-LLM attention needs SM90, SM100 or SM120",
        source=HOOK,
        instead=({"attention": "flashinfer"},),
    ),
    Row(
        name="torch-native-on-a-gpu",
        verdict=NOTE,
        when={
            "architecture": ("sm80", "sm90", "sm100", "sm120"),
            "attention": ("torch_native",),
        },
        reason="torch_native switches CUDA graphs off and is for checking, not for serving",
        source=HOOK,
    ),
    Row(
        name="ascend-attention-elsewhere",
        verdict=REFUSED,
        when={
            "architecture": ("sm80", "sm90", "sm100", "sm120"),
            "attention": ("ascend",),
        },
        reason="the ascend kernels run on Ascend NPUs only",
        source=srt("hardware_backend/npu/utils.py"),
        instead=({"attention": "flashinfer"},),
    ),
    Row(
        name="npu-attention",
        verdict=REFUSED,
        when={
            "architecture": ("npu",),
            "attention": ("trtllm_mha", "fa3", "fa4", "flashinfer", "triton", "torch_native"),
        },
        reason="on NPUs SGLang replaces every other kernel by ascend without asking",
        source=srt("hardware_backend/npu/utils.py"),
        instead=({"attention": "ascend"},),
    ),
    Row(
        name="npu-fp8-kv",
        verdict=REFUSED,
        when={"architecture": ("npu",), "kv": ("fp8",)},
        reason="the ascend kernels have no E4M3 cache",
        source=srt("hardware_backend/npu/utils.py"),
        instead=({"kv": "bf16"},),
    ),
    Row(
        name="exact-attention",
        verdict=REFUSED,
        when={"consistency": ("exact",), "attention": ("trtllm_mha", "torch_native")},
        reason="deterministic inference takes fa3, fa4, flashinfer, triton or ascend, and the "
        "server refuses this kernel",
        source=srt("arg_groups/choices.py"),
        instead=({"attention": "flashinfer"}, {"attention": "triton"}),
    ),
    Row(
        name="exact-flashinfer-no-prefix-cache",
        verdict=NOTE,
        when={"consistency": ("exact",), "attention": ("flashinfer",)},
        reason="deterministic inference switches the prefix cache off with flashinfer, so every "
        "turn prefills its whole context",
        source=HOOK,
    ),
)
