"""A policy's tensors for a checkpoint, part by part; satisfies `weights.parts.StateParts`.

A part is one tensor of the model. Transformers fuses experts in memory; on disk, and for every
engine, they are one by one, so such a part has many tensors.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Place = tuple[list[str], Mapping[str, Tensor]]
"""A part: its names in memory, and its tensors by their names on disk, on `meta`."""


class PolicyParts:
    """Reads the model as it is at the moment of each `read`."""

    def __init__(
        self, model: "PreTrainedModel", *, is_sharded: bool, places: Sequence[Place] | None = None
    ) -> None:
        """
        Args:
            places: those of an earlier reader of the same model; None: they are found.
        """
        self._model = model
        self._is_sharded = is_sharded
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        self._state: dict[str, Any] = {
            name: tensor for name, tensor in sorted(model.state_dict().items()) if name not in tied
        }
        self.places = self._find_places() if places is None else places

    @property
    def layout(self) -> Sequence[Mapping[str, Tensor]]:
        """The tensors of each part by their names on disk, on `meta`."""
        return [found for _, found in self.places]

    def _find_places(self) -> list[Place]:
        empty = {name: self._on_meta(tensor) for name, tensor in self._state.items()}
        alone: list[Place] = [
            ([name], self._on_disk({name: tensor})) for name, tensor in empty.items()
        ]
        together = self._on_disk(empty)
        if _shapes(together) == _shapes({n: t for _, found in alone for n, t in found.items()}):
            return alone
        # A class that makes one tensor on disk out of several in memory.
        return [(list(empty), together)]

    @torch.no_grad()
    def read(self, part: int) -> Mapping[str, Tensor]:
        """A copy of a part's tensors, whole and on the CPU; of a sharded model in BF16, and every
        rank must call this."""
        names, _ = self.places[part]
        found = self._on_disk({name: self._whole(self._state[name]) for name in names})
        # Slices of one tensor share its memory, and weights that are not sharded change later.
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in found.items()}

    def _on_disk(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, Tensor] = revert_weight_conversion(self._model, state)
        return found

    def _whole(self, tensor: Any) -> Tensor:
        from torch.distributed.tensor import DTensor

        if not self._is_sharded:
            return tensor
        # Rounded before it travels: half the bytes, the same bits.
        tensor = tensor.to(torch.bfloat16)
        return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor

    def _on_meta(self, tensor: Any) -> Tensor:
        dtype = torch.bfloat16 if self._is_sharded else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
