"""The same tilings as Triton kernels: linear and attention for GPUs.

Triton is imported when a kernel is asked for, so this file can be read anywhere. What the kernels
promise is structure, not the CPU's bits: the K loop of `linear` takes fixed blocks in order and
never splits K over programs, so rows and columns may be tiled at will; attention takes key tiles
at fixed positions, gives each its own largest score and sum, and joins them in order, so a query
alone, in a chunk or in a whole sequence meets the same additions. Products take the inputs' dtype
and add in float32; the probabilities are cast to the dtype of the values.

Their structure is tested through Triton's interpreter where Triton is installed; no result here
comes from a GPU.
"""

# M rows, K inputs, N outputs; attention letters as in attention.py

import functools
from typing import Any

import torch
from torch import Tensor

from rlmix.numerics.consistent.contract import MASKED

BLOCK_K = 32
"""Inputs added at a time: changes bits, so it is fixed. Blocks of rows and columns are not."""


@functools.cache
def _kernels(is_interpreted: bool) -> tuple[Any, Any]:
    """The two kernels. The interpreter multiplies BF16 wrongly, so there inputs go to float32,
    which holds every BF16 product exactly."""
    import triton
    import triton.language as tl

    @triton.jit
    def linear_kernel(
        x_ptr,
        weight_ptr,
        y_ptr,
        rows,
        outputs,
        inputs,
        UPCAST: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_INPUTS: tl.constexpr,
    ):
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_INPUTS)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, inputs, BLOCK_INPUTS):
            is_input = first + k < inputs
            x = tl.load(
                x_ptr + m[:, None] * inputs + first + k[None, :],
                mask=(m[:, None] < rows) & is_input[None, :],
                other=0.0,
            )
            weight = tl.load(
                weight_ptr + n[None, :] * inputs + first + k[:, None],
                mask=(n[None, :] < outputs) & is_input[:, None],
                other=0.0,
            )
            if UPCAST:
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            total += tl.dot(x, weight, input_precision="ieee")
        tl.store(
            y_ptr + m[:, None] * outputs + n[None, :],
            total,
            mask=(m[:, None] < rows) & (n[None, :] < outputs),
        )

    @triton.jit
    def attention_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        positions_ptr,
        out_ptr,
        queries,
        num_keys,
        scale,
        HEADS: tl.constexpr,
        GROUPS: tl.constexpr,
        DIM: tl.constexpr,
        UPCAST: tl.constexpr,
        MASKED_SCORE: tl.constexpr,
        BLOCK_Q: tl.constexpr,
        KV_TILE: tl.constexpr,
    ):
        head = tl.program_id(1) % HEADS
        batch = tl.program_id(1) // HEADS
        kv_row = (batch * (HEADS // GROUPS) + head // GROUPS) * num_keys
        t = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, DIM)
        is_query = t < queries
        rows = (batch * queries + t) * HEADS + head
        q = tl.load(q_ptr + rows[:, None] * DIM + d[None, :], mask=is_query[:, None], other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        position = tl.load(positions_ptr + batch * queries + t, mask=is_query, other=0)
        top = tl.full((BLOCK_Q,), MASKED_SCORE, dtype=tl.float32)
        total = tl.zeros((BLOCK_Q,), dtype=tl.float32)
        mean = tl.zeros((BLOCK_Q, DIM), dtype=tl.float32)
        for first in range(0, tl.max(position, 0) + 1, KV_TILE):
            keys = first + tl.arange(0, KV_TILE)
            exists = keys < num_keys
            place = (kv_row + keys)[:, None] * DIM + d[None, :]
            k = tl.load(k_ptr + place, mask=exists[:, None], other=0.0)
            v = tl.load(v_ptr + place, mask=exists[:, None], other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(keys[None, :] <= position[:, None], scores, MASKED_SCORE)
            tile_top = tl.max(scores, 1)
            probs = tl.exp(scores - tile_top[:, None])
            tile_total = tl.sum(probs, 1)
            if UPCAST:
                tile_mean = tl.dot(probs, v.to(tl.float32), input_precision="ieee")
            else:
                tile_mean = tl.dot(probs.to(v.dtype), v, input_precision="ieee")
            new_top = tl.maximum(top, tile_top)
            # A tile without a visible key has weight exp(MASKED - top) = 0 and adds nothing.
            keep, add = tl.exp(top - new_top), tl.exp(tile_top - new_top)
            total = total * keep + tile_total * add
            mean = mean * keep[:, None] + tile_mean * add[:, None]
            top = new_top
        out = mean / total[:, None]
        tl.store(out_ptr + rows[:, None] * DIM + d[None, :], out, mask=is_query[:, None])

    return linear_kernel, attention_kernel


def linear_triton(
    x_MK: Tensor, weight_NK: Tensor, *, block_m: int, block_n: int, is_interpreted: bool = False
) -> Tensor:
    """x W^T, float32 [M, N]; the same bits for any `block_m` and `block_n`.

    Args:
        x_MK, weight_NK: float32, bfloat16 or float16, contiguous.
        is_interpreted: True under TRITON_INTERPRET=1.
    Raises:
        ImportError: Triton is not installed.
    """
    import triton

    rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    y_MN = torch.empty(rows, outputs, dtype=torch.float32, device=x_MK.device)
    grid = (triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n))
    kernel = _kernels(is_interpreted)[0]
    kernel[grid](
        x_MK.contiguous(),
        weight_NK.contiguous(),
        y_MN,
        rows,
        outputs,
        inputs,
        UPCAST=is_interpreted,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_INPUTS=BLOCK_K,
    )
    return y_MN


def attend_triton(
    q_BTND: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    positions_BT: Tensor,
    *,
    kv_tile: int,
    block_q: int,
    is_interpreted: bool = False,
) -> Tensor:
    """Attention forward, float32 [B, T, N, D]; the same bits for any `block_q`.

    Args:
        q_BTND, k_BHLD, v_BHLD: one dtype, contiguous; D a power of two of at least 16.
        positions_BT: int64 or int32, on the same device.
        kv_tile, block_q: powers of two of at least 16.
    Raises:
        ImportError: Triton is not installed.
    """
    import triton

    batch, queries, heads, dim = q_BTND.shape
    out = torch.empty(q_BTND.shape, dtype=torch.float32, device=q_BTND.device)
    kernel = _kernels(is_interpreted)[1]
    kernel[(triton.cdiv(queries, block_q), batch * heads)](
        q_BTND.contiguous(),
        k_BHLD.contiguous(),
        v_BHLD.contiguous(),
        positions_BT.contiguous(),
        out,
        queries,
        k_BHLD.shape[2],
        dim**-0.5,
        HEADS=heads,
        GROUPS=heads // k_BHLD.shape[1],
        DIM=dim,
        UPCAST=is_interpreted,
        MASKED_SCORE=MASKED,
        BLOCK_Q=block_q,
        KV_TILE=kv_tile,
    )
    return out
