"""The KV cache of running requests: one slot per request, running requests in slots 0..n-1.

Values are rounded to the pool's KV format when they are written and held in float32, which
changes no bit and spares every decode step the conversion. Invariant: whatever lies beyond a
request's length is finite, so a masked position contributes exactly 0.
"""

import numpy as np
import torch
from torch import Tensor

from rlmix.engine.embedded.shape import ModelShape

LENGTH_STEP = 32
"""Attention looks at a multiple of this many positions: MKL's results for a position then do not
depend on how long the other requests of the batch are."""


class KvCache:
    """Keys and values of `num_slots` requests, and one scratch slot that padding rows write to."""

    def __init__(self, shape: ModelShape, *, num_slots: int, context_length: int) -> None:
        self.capacity = -(-context_length // LENGTH_STEP) * LENGTH_STEP
        self.num_slots = num_slots
        self._kv_heads = shape.num_kv_heads
        # numpy asks the system for zero pages, which cost no memory until they are written;
        # torch.zeros would write them all.
        self.values = torch.from_numpy(
            np.zeros(
                (
                    shape.num_layers,
                    2,
                    num_slots + 1,
                    shape.num_kv_heads,
                    self.capacity,
                    shape.head_dim,
                ),
                dtype=np.float32,
            )
        )
        """float32 [layers, keys/values, slots + 1, kv heads, positions, head dim]."""
        heads = torch.arange(shape.num_kv_heads) * self.capacity
        all_slots = (num_slots + 1) * shape.num_kv_heads * self.capacity
        self._head_starts = torch.cat((heads, heads + all_slots))

    def write_index(self, slots_T: Tensor, positions_T: Tensor) -> Tensor:
        """int64 [T * 2 * kv heads]: where a layer's new keys, then its values, of each row go in
        the layer's cache, seen as [2 * slots * heads * positions, D]."""
        starts = slots_T * (self._kv_heads * self.capacity) + positions_T
        return (starts[:, None] + self._head_starts).reshape(-1)

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        """Copy a slot's first tokens to another slot."""
        self.values[:, :, target, :, :num_tokens] = self.values[:, :, source, :, :num_tokens]

    def read(self, slot: int, start: int, end: int, *, dtype: torch.dtype) -> Tensor:
        """A copy of positions start:end, [layers, 2, kv heads, end - start, D]."""
        return self.values[:, :, slot, :, start:end].to(dtype, copy=True)

    def write(self, slot: int, start: int, values: Tensor) -> None:
        """Fill positions from `start` with what `read` gave."""
        self.values[:, :, slot, :, start : start + values.shape[3]] = values

    def clear(self, slot: int, *, num_tokens: int) -> None:
        """Overwrite a slot's first tokens, which may not be finite."""
        self.values[:, :, slot, :, :num_tokens] = 0

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()
