"""Products of BF16 matrices on CPUs that have no instruction for them.

Without AVX512-BF16 or AMX, torch multiplies BF16 matrices element by element: 46 times slower than
float32 ones on an EPYC with AVX2, where that was nine tenths of a training step. Here both sides
become float32, which holds every BF16 number, go through the float32 kernel, and the sum is rounded
to BF16 once. The instruction computes the same; only the order of the sum is another, as between
any two kernels. The fused attention keeps its shares in float32 as well, which torch would round.

Invariant: no float32 copy of a whole long operand: rows, long sums and heads go piece by piece.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PIECE = 8192
"""Rows, or terms of a sum, that are float32 at a time."""

_ATEN: Any = torch.ops.aten


def wide_products(device: torch.device) -> AbstractContextManager[Any]:
    """Within: matrix products of BF16 tensors take the way above where it is the faster one."""
    return WideProducts() if device.type == "cpu" and not has_bf16_products() else nullcontext()


def has_bf16_products() -> bool:
    """Whether this CPU multiplies BF16 matrices by itself. Of others than x86 it is believed."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    facts: Any = torch.cpu
    return bool(facts._is_avx512_bf16_supported() or facts._is_amx_tile_supported())


class WideProducts(TorchDispatchMode):
    """Replaces products of BF16 tensors, forward and backward; the rest is untouched."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        replacement = _REPLACED.get(func)
        options = kwargs or {}
        if replacement is not None and _are_bf16(args):
            found = replacement(*args, **options)
            if found is not None:
                return found
        return func(*args, **options)


def _are_bf16(args: tuple[Any, ...]) -> bool:
    first = next(a for a in args if isinstance(a, Tensor))
    return type(first) is Tensor and first.dtype == torch.bfloat16


def _mm(a_MK: Tensor, b_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Like `aten.mm`: [M, N] BF16. A bias joins the sum before it is rounded, as in the kernel."""
    out_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    for rows in _pieces(len(a_MK)):
        total = None
        for terms in _pieces(len(b_KN)):
            a, b = a_MK[rows, terms].float(), b_KN[terms].float()
            total = a @ b if total is None else total.addmm_(a, b)
        if total is None:
            total = torch.zeros(out_MN[rows].shape)
        out_MN[rows] = total if bias_N is None else total + bias_N.float()
    return out_MN


def _addmm(bias: Tensor, a_MK: Tensor, b_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    return _mm(a_MK, b_KN, bias) if beta == alpha == 1 and bias.dim() == 1 else None


def _bmm(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    """Like `aten.bmm`, a matrix at a time: attention's squares are large."""
    out_BMN = a_BMK.new_empty(len(a_BMK), a_BMK.shape[1], b_BKN.shape[2])
    for out, a, b in zip(out_BMN, a_BMK, b_BKN, strict=True):
        out.copy_(a.float() @ b.float())
    return out_BMN


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor | None:
    """Like `aten._grouped_mm` for rows of a matrix by group (experts forward), and for terms of a
    sum by group (their weights' gradient)."""
    if offs is None or bias is not None or out_dtype not in (None, torch.bfloat16) or a.dim() != 2:
        return None
    ends = offs.tolist()
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    if b.dim() == 3:
        # Rows behind the last group belong to nobody; the kernel leaves them unset as well.
        out = a.new_zeros(a.shape[0], b.shape[2])
        for rows, matrix in zip(groups, b, strict=True):
            if rows.start < rows.stop:
                out[rows] = _mm(a[rows], matrix)
        return out
    out = a.new_zeros(len(groups), a.shape[0], b.shape[1])
    for found, terms in zip(out, groups, strict=True):
        if terms.start < terms.stop:
            found.copy_(_mm(a[:, terms], b[terms]))
    return out


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The fused attention, a head at a time: (output, log of the sums)."""
    if _has_masked_heads(kwargs.get("attn_mask")):
        return None
    options = _with_float_mask(kwargs)
    parts = []
    for q, k, v in _heads(key.shape[1], query, key, value):
        out, logsumexp = _FUSED(q.float(), k.float(), v.float(), *args, **options)
        parts.append((out.to(torch.bfloat16), logsumexp))
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, 1), torch.cat(sums, 1)


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    if _has_masked_heads(kwargs.get("attn_mask")):
        return None
    options = _with_float_mask(kwargs)
    parts = []
    for g, q, k, v, o, s in _heads(key.shape[1], grad, query, key, value, out, logsumexp):
        wide = (g.float(), q.float(), k.float(), v.float(), o.float())
        found = _FUSED_BACKWARD(*wide, s, *args, **options)
        parts.append([gradient.to(torch.bfloat16) for gradient in found])
    return tuple(torch.cat(gradients, 1) for gradients in zip(*parts, strict=True))


def _heads(count: int, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """The tensors' heads [batch, heads, ...] by key head."""
    return map(list, zip(*(tensor.chunk(count, dim=1) for tensor in tensors), strict=True))


def _has_masked_heads(mask: Tensor | None) -> bool:
    """Whether heads have masks of their own."""
    return mask is not None and not (mask.dim() == 2 or mask.shape[1] == 1)


def _with_float_mask(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    mask = kwargs.get("attn_mask")
    if mask is None or mask.dtype != torch.bfloat16:
        return dict(kwargs)
    return {**kwargs, "attn_mask": mask.float()}


def _pieces(length: int) -> list[slice]:
    return [slice(begin, begin + PIECE) for begin in range(0, length, PIECE)]


_FUSED = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_FUSED_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default

_REPLACED: Mapping[Any, Callable[..., Any]] = {
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN._grouped_mm.default: _grouped_mm,
    _FUSED: _attention,
    _FUSED_BACKWARD: _attention_backward,
}
"""Operator -> what stands for it; that gives None for a call it does not know."""
