"""Kernels of gated-delta-net layers and the format of their state."""

from rlmix.plan.capabilities import NOTE, REFUSED, Row
from rlmix.plan.matrix.sources import sglang, srt

GDN = srt("layers/attention/linear/gdn_backend.py")
GDN_FLASHINFER = srt("layers/attention/linear/kernels/gdn_flashinfer.py")
HOOK = srt("arg_groups/attention_hook.py")
CUDA = ("sm80", "sm90", "sm100", "sm120")

ROWS: tuple[Row, ...] = (
    Row(
        name="no-recurrent-kernel",
        verdict=REFUSED,
        when={"architecture": CUDA, "linear_attention": ("none",)},
        reason="the model has gated-delta-net layers and needs a kernel and a state format",
        source=GDN,
        instead=({"linear_attention": "triton", "state": "fp32"},),
    ),
    Row(
        name="no-state-format",
        verdict=REFUSED,
        when={"architecture": CUDA, "state": ("none",)},
        reason="the model has recurrent state, and the server's default follows the checkpoint",
        source=GDN,
        instead=({"linear_attention": "triton", "state": "fp32"},),
    ),
    Row(
        name="flashinfer-gdn-sm80",
        verdict=REFUSED,
        when={"architecture": ("sm80",), "linear_attention": ("flashinfer",)},
        reason="FlashInfer's gated-delta-net kernels need SM90 or newer",
        source=GDN_FLASHINFER,
        instead=({"linear_attention": "triton"},),
    ),
    Row(
        name="flashinfer-gdn-sm100-state",
        verdict=REFUSED,
        when={
            "architecture": ("sm100",),
            "linear_attention": ("flashinfer",),
            "state": ("fp32", "fp16"),
        },
        reason="FlashInfer decodes gated-delta-net layers on SM100 with BF16 state only, and the "
        "server refuses to start",
        source=HOOK,
        instead=({"state": "bf16"}, {"linear_attention": "triton"}),
    ),
    Row(
        name="flashinfer-gdn-sm90-state",
        verdict=NOTE,
        when={
            "architecture": ("sm90",),
            "linear_attention": ("flashinfer",),
            "state": ("bf16", "fp16"),
        },
        reason="SGLang validated the Hopper kernels with FP32 state; BF16 state is known from one "
        "public run",
        source=GDN,
    ),
    Row(
        name="flashinfer-gdn-sm120",
        verdict=REFUSED,
        when={"architecture": ("sm120",), "linear_attention": ("flashinfer",)},
        reason="prefill wants FP32 states and decode demands BF16 on SM120, so one of them fails",
        source=sglang(36532),
        instead=({"linear_attention": "triton", "state": "fp32"},),
    ),
    Row(
        name="ascend-gdn-elsewhere",
        verdict=REFUSED,
        when={"architecture": CUDA, "linear_attention": ("ascend",)},
        reason="the ascend kernels run on Ascend NPUs only",
        source=srt("hardware_backend/npu/utils.py"),
        instead=({"linear_attention": "triton", "state": "fp32"},),
    ),
    Row(
        name="npu-gdn",
        verdict=REFUSED,
        when={
            "architecture": ("npu",),
            "linear_attention": ("none", "triton", "flashinfer"),
        },
        reason="NPUs have kernels of their own for gated-delta-net layers",
        source="https://github.com/sgl-project/sglang/pull/14391",
        instead=({"linear_attention": "ascend", "state": "bf16"},),
    ),
    Row(
        name="exact-flashinfer-gdn",
        verdict=REFUSED,
        when={"consistency": ("exact",), "linear_attention": ("flashinfer",)},
        reason="deterministic inference keeps gated-delta-net layers on Triton",
        source=GDN,
        instead=({"linear_attention": "triton"},),
    ),
)
