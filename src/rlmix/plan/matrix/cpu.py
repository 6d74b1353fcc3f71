"""Real servers on a machine without an accelerator, from the published CUDA wheel: BF16 only."""

from rlmix.plan.accelerators import CPU
from rlmix.plan.capabilities import REFUSED, WORKS, Row
from rlmix.plan.matrix.sources import srt

BACKENDS = srt("layers/attention/attention_registry.py")
AMX = "https://github.com/sgl-project/sglang/pull/28171"

ROWS: tuple[Row, ...] = (
    Row(
        name="cpu-is-bf16",
        verdict=REFUSED,
        when={"architecture": (CPU,), "weights": ("fp8", "nvfp4")},
        reason="quantised products on a CPU need Intel AMX and a build of their own; emulate them "
        "with engine=embedded",
        source=AMX,
        instead=({"weights": "bf16", "activations": "bf16"},),
    ),
    Row(
        name="cpu-bf16-activations",
        verdict=REFUSED,
        when={"architecture": (CPU,), "activations": ("fp8", "nvfp4", "fp32")},
        reason="products are taken in BF16 there; emulate others with engine=embedded",
        source=AMX,
        instead=({"activations": "bf16", "weights": "bf16"},),
    ),
    Row(
        name="cpu-bf16-kv",
        verdict=REFUSED,
        when={"architecture": (CPU,), "kv": ("fp8",)},
        reason="the attention of a CPU without Intel AMX reads no FP8 cache",
        source=BACKENDS,
        instead=({"kv": "bf16"},),
    ),
    Row(
        name="cpu-torch-native",
        verdict=REFUSED,
        when={
            "architecture": (CPU,),
            "attention": ("trtllm_mha", "fa3", "fa4", "flashinfer", "triton", "ascend"),
        },
        reason="the published wheel has one attention that runs on a CPU",
        source=BACKENDS,
        instead=({"attention": "torch_native"},),
    ),
    Row(
        name="cpu-no-experts-record",
        verdict=REFUSED,
        when={"architecture": (CPU,), "record_experts": ("true",)},
        reason="the record of experts lies in pinned memory, which needs CUDA",
        source=srt("layers/moe/routed_experts_capturer.py"),
        instead=({"record_experts": "false"},),
    ),
    Row(
        name="cpu-native-order",
        verdict=REFUSED,
        when={"architecture": (CPU,), "consistency": ("exact",)},
        reason="deterministic inference refuses torch_native",
        source=srt("arg_groups/attention_hook.py"),
        instead=({"consistency": "native"},),
    ),
    Row(
        name="seen-bf16-cpu",
        verdict=WORKS,
        when={
            "architecture": (CPU,),
            "weights": ("bf16",),
            "activations": ("bf16",),
            "kv": ("bf16",),
            "attention": ("torch_native",),
        },
        reason="the tiny policy in the tests of rlmix, on every change",
        source=BACKENDS,
    ),
)
