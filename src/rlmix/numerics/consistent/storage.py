"""How an engine stores expert weights so that decoding reads them faster, bit for bit the same.

A product of few rows with weights stored output by output, as checkpoints have them, waits for
memory; stored input by input it does not (a tenth of a decoding step of the bundled policy).
Whether the library then still adds in the same order is asked for each shape, since for narrow
products it does not; where it says no, the weights stay as they are.
"""

# E experts, M rows, K inputs, N outputs

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.numerics.consistent.contract import min_rows
from rlmix.numerics.consistent.model import LayerTensors, ModelTensors

PROBED_ROWS = (0, 1, 2, 3, 4, 5, 7, 9, 12, 13, 20, 28, 29, 60, 92, 124, 252)
"""Rows beyond `min_rows` that are compared; kernels change at multiples of 4, 8, 16 and 32."""


def for_decoding(tensors: ModelTensors) -> ModelTensors:
    """The same model with expert weights stored input by input, where that changes no bit."""
    return replace(tensors, layers=tuple(_restored(layer) for layer in tensors.layers))


def _restored(layer: LayerTensors) -> LayerTensors:
    if layer.router is None:
        return layer
    return replace(layer, gate_up=_by_inputs(layer.gate_up), down=_by_inputs(layer.down))


def _by_inputs(weight_ENK: Tensor) -> Tensor:
    outputs, inputs = weight_ENK.shape[1:]
    if not storage_is_free(inputs, outputs, threads=torch.get_num_threads()):
        return weight_ENK
    return weight_ENK.transpose(1, 2).contiguous().transpose(1, 2)


@functools.cache
def storage_is_free(inputs: int, outputs: int, *, threads: int) -> bool:
    """Whether products of this shape have the same bits however the weight is stored, batched or
    one by one, with this process's `threads`."""
    generator = torch.Generator().manual_seed(0)
    weight_2NK = torch.randn(2, outputs, inputs, generator=generator)
    stored = weight_2NK.transpose(1, 2).contiguous().transpose(1, 2)
    with torch.inference_mode():
        for extra in PROBED_ROWS:
            rows = torch.randn(2, min_rows() + extra, inputs, generator=generator)
            batched, expected = (
                torch.bmm(rows, weight.transpose(1, 2)) for weight in (stored, weight_2NK)
            )
            single = F.linear(rows[1], stored[1])
            if not torch.equal(batched, expected) or not torch.equal(single, expected[1]):
                return False
    return True
