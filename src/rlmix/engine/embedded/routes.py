"""Which experts every cached position was routed to, one slot per request beside the KV cache.

Invariant: a slot's routes belong to the keys and values in the same slot of the KV cache; whatever
moves, keeps or fills those does the same here. A layer without experts holds zeros, as in SGLang.
"""

# T rows of the step, N positions, L layers, K experts per token

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rlmix.engine.embedded.shape import ModelShape


def id_dtype(num_experts: int) -> type[np.unsignedinteger] | type[np.signedinteger]:
    """The smallest type for an expert's id: one byte up to 256 experts."""
    return np.uint8 if num_experts <= 256 else np.int16


@dataclass(frozen=True, slots=True)
class Routes:
    """Routes of consecutive positions."""

    ids: np.ndarray
    """uint8 or int16 [N, L, K], each token's experts from the largest share to the smallest."""
    shares: np.ndarray
    """float32 [N, L, K], what each expert's output was multiplied with."""

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, end: int) -> "Routes":
        """A copy of positions start:end, so that the rest can be freed."""
        return Routes(self.ids[start:end].copy(), self.shares[start:end].copy())

    def followed_by(self, other: "Routes") -> "Routes":
        return Routes(
            np.concatenate((self.ids, other.ids)), np.concatenate((self.shares, other.shares))
        )


class RouteCache:
    """Routes of `num_slots` requests, and one scratch slot that padding rows write to."""

    def __init__(self, shape: ModelShape, *, num_slots: int, capacity: int) -> None:
        self._moe_layers = sorted(shape.moe_layers)
        size = (num_slots + 1, capacity, shape.num_layers, shape.top_k)
        self._ids = np.zeros(size, dtype=id_dtype(shape.num_experts))
        self._shares = np.zeros(size, dtype=np.float32)

    def write(
        self, slots_T: Tensor, positions_T: Tensor, routes: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Take one step's routes.

        Args:
            slots_T, positions_T: int64 [T], where each row's keys and values went.
            routes: ids and shares, [T, K] each, of the layers with experts in their order.
        """
        slots, positions = slots_T.numpy(), positions_T.numpy()
        for layer, (ids_TK, shares_TK) in zip(self._moe_layers, routes, strict=True):
            self._ids[slots, positions, layer] = ids_TK.numpy()
            self._shares[slots, positions, layer] = shares_TK.numpy()

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        """Copy a slot's first tokens to another slot."""
        self._ids[target, :num_tokens] = self._ids[source, :num_tokens]
        self._shares[target, :num_tokens] = self._shares[source, :num_tokens]

    def read(self, slot: int, start: int, end: int) -> Routes:
        """A copy of positions start:end."""
        return Routes(self._ids[slot], self._shares[slot]).part(start, end)

    def fill(self, slot: int, start: int, routes: Routes) -> None:
        """Put what `read` gave at the positions from `start`."""
        end = start + len(routes)
        self._ids[slot, start:end] = routes.ids
        self._shares[slot, start:end] = routes.shares
