"""Short forms of the places that rows cite."""

_TREE = "https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt"


def srt(path: str) -> str:
    """A file of SGLang 0.5.23."""
    return f"{_TREE}/{path}"


def sglang(number: int) -> str:
    return f"https://github.com/sgl-project/sglang/issues/{number}"


def vllm(number: int) -> str:
    return f"https://github.com/vllm-project/vllm/issues/{number}"


def flashinfer(number: int) -> str:
    return f"https://github.com/flashinfer-ai/flashinfer/issues/{number}"


STITCH = (
    "https://github.com/modal-projects/stitch/blob/3e3fed4ad07f6d17438ee372bbdb50dcba401959/"
    "cookbook/miles_disagg/configs/qwen3_6_35b_a3b_hetero.py"
)
"""The public mixed-fleet run of Qwen3.6-35B-A3B (a fork of SGLang)."""
STITCH_B200 = (
    "https://github.com/modal-projects/stitch/blob/ed38ddeec3c4a0fe46f772cf6696488133af6f41/"
    "cookbook/miles_disagg/configs/qwen3_6_35b_a3b_b200_bf16.py"
)
COOKBOOK = "https://docs.sglang.io/cookbook/autoregressive/Qwen/Qwen3.6.md"
"""SGLang's own recipes for the model."""
