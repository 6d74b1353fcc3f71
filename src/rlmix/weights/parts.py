"""A model's tensors part by part, so that nobody who writes them holds the whole model.

A part is what lies together in memory: one tensor, or the experts that are one tensor there and
many on disk. Invariant: every writer reads the same parts in the same order, because reading a
part of a sharded model is an exchange between all of them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class StateParts(Protocol):
    """Tensors by their names in a Hugging Face checkpoint, read when they are asked for."""

    @property
    def layout(self) -> "Sequence[Mapping[str, Tensor]]":
        """The tensors of each part, without memory (device `meta`)."""
        ...

    def read(self, part: int) -> "Mapping[str, Tensor]":
        """The whole tensors of a part, on the CPU."""
        ...


class HeldParts:
    """A state that lies in memory; satisfies `StateParts`."""

    def __init__(self, state: "Mapping[str, Tensor]") -> None:
        self._state = state
        self._names = list(state)

    @property
    def layout(self) -> "Sequence[Mapping[str, Tensor]]":
        return [{name: tensor.to("meta")} for name, tensor in self._state.items()]

    def read(self, part: int) -> "Mapping[str, Tensor]":
        name = self._names[part]
        return {name: self._state[name]}


def as_parts(state: "Mapping[str, Tensor] | StateParts") -> StateParts:
    return HeldParts(state) if isinstance(state, Mapping) else state
