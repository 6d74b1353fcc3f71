"""The `quantization_config` section of a view folder's config.json, written and read.

Sections are what SGLang 0.5.23 parses. Modules that stay BF16 are named by parts of their paths,
which its loaders compare at dots, so that they hold with and without a `model.language_model.`
before them and for fused names; compressed-tensors needs regular expressions for that.
"""

import re
from collections.abc import Mapping
from typing import Any

from rlmix.core.errors import DataError
from rlmix.numerics.view_spec import VIEWS, ViewSpec, parse_view

_NVFP4_GROUP = {"num_bits": 4, "type": "float", "group_size": 16}


def quantization_config(view: str | ViewSpec) -> dict[str, Any] | None:
    """The section of a view; None for bf16."""
    spec = parse_view(view)
    if spec.view == "bf16":
        return None
    return _SECTIONS[spec.convention](spec)


def _blocks(spec: ViewSpec) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(spec.unquantised_modules),
    }


def _modelopt(spec: ViewSpec) -> dict[str, Any]:
    """As ModelOpt's exporter writes it for NVFP4. There is no `input_scale` in a view: engines
    then scale activations by 1."""
    group = {"dynamic": False, **_NVFP4_GROUP}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {
            "group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}
        },
        "ignore": list(spec.unquantised_modules),
    }


def _channels(spec: ViewSpec) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    return _compressed(
        spec,
        kind="float-quantized",
        weights={**common, "strategy": "channel", "dynamic": False},
        activations={**common, "strategy": "token", "dynamic": True},
    )


def _compressed_nvfp4(spec: ViewSpec) -> dict[str, Any]:
    """Weights only: with `input_activations`, SGLang would expect an `input_global_scale` for each
    matrix and compute with uninitialised memory where there is none."""
    weights = {**_NVFP4_GROUP, "strategy": "tensor_group", "symmetric": True, "dynamic": False}
    weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    return _compressed(spec, kind="nvfp4-pack-quantized", weights=weights, activations=None)


def _compressed(
    spec: ViewSpec, *, kind: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None, "format": kind}},
        "ignore": [
            rf"re:(.*\.)?{re.escape(module)}(\..*)?$" for module in spec.unquantised_modules
        ],
    }


_SECTIONS = {
    "blocks": _blocks,
    "modelopt": _modelopt,
    "channels": _channels,
    "compressed-tensors": _compressed_nvfp4,
}


def spec_of_config(config: Mapping[str, Any]) -> ViewSpec:
    """What a model folder's config.json declares. 4-over-6 leaves no trace: its tensors are
    ordinary NVFP4.

    Raises:
        DataError: a quantisation that is none of ours.
    """
    section = config.get("quantization_config")
    if section is None:
        return parse_view("bf16")
    view = _view(section)
    if view is None:
        raise DataError(
            f"config.json: quantization_config has quant_method={section.get('quant_method')!r}, "
            f"quant_algo={section.get('quant_algo')!r}, format={section.get('format')!r}, "
            f"weight_block_size={section.get('weight_block_size')!r}; views are {', '.join(VIEWS)}"
        )
    ignored = section.get("modules_to_not_convert") or section.get("ignore") or ()
    is_experts = any("self_attn" in module for module in ignored)
    return parse_view(f"{view}:experts" if is_experts else view)


def view_of_config(config: Mapping[str, Any]) -> str:
    """bf16, fp8 or nvfp4. Raises: as `spec_of_config`."""
    return spec_of_config(config).view


def _view(section: Mapping[str, Any]) -> str | None:
    method = section.get("quant_method")
    if method == "fp8" and section.get("weight_block_size") == [128, 128]:
        return "fp8:blocks"
    if method == "modelopt" and section.get("quant_algo") == "NVFP4":
        return "nvfp4:modelopt"
    if method == "compressed-tensors":
        return {
            "nvfp4-pack-quantized": "nvfp4:compressed-tensors",
            "float-quantized": "fp8:channels",
        }.get(str(section.get("format")))
    return None
