"""The engine's end of a pushed weight update: groups that a pusher joins, and what comes through.

A group has the pusher as rank 0 and one engine's ranks behind it, never a second engine, so that a
member that is lost costs one replica. Calls block and are made in a thread; every wait has the
group's limit. Invariant: nothing here touches weights in use; a push is whole or an error.
"""

# The pusher's side of the same wire is `rlmix.weights.push`.

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rlmix.core.errors import WeightSyncError

JOIN_LIMIT_S = 60.0
"""For meeting the pusher, and for one bucket to arrive."""

FLATTENED = "flattened_bucket"
"""SGLang's name for a push whose tensors travel as one run of bytes, in the order of `names`."""


class WeightGroups:
    """The groups that one engine rank has joined, by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._groups

    def join(self, name: str, *, address: str, port: int, rank: int, world_size: int) -> None:
        """Meet the pusher at its store; gloo only, as everything here computes on a CPU.

        Raises:
            WeightSyncError: the group exists, or the pusher was not there within the limit.
        """
        from torch.distributed import PrefixStore, TCPStore
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

        if name in self._groups:
            raise WeightSyncError(f"weights: group {name!r} exists; destroy it first")
        limit = timedelta(seconds=JOIN_LIMIT_S)
        try:
            store = TCPStore(address, port, world_size, is_master=False, timeout=limit)
            group, _ = _new_process_group_helper(
                world_size,
                rank,
                [],
                Backend("gloo"),
                PrefixStore(name, store),
                group_name=name,  # type: ignore[arg-type]
                backend_options=None,
                timeout=limit,
            )
        except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError.
            raise WeightSyncError(f"weights: group {name!r} did not form: {error}") from error
        self._groups[name] = group

    def leave(self, name: str) -> None:
        """Forget a group; one that is unknown is nobody's fault."""
        self._groups.pop(name, None)

    def receive(
        self,
        name: str,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        load_format: str | None,
    ) -> dict[str, Tensor]:
        """One bucket out of a group, its tensors by name.

        Raises:
            WeightSyncError: the lists disagree, a dtype is unknown, or the pusher broke off.
        """
        tensors = empty_tensors(names, dtypes, shapes)
        try:
            if load_format == FLATTENED:
                size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
                flat = torch.empty(size, dtype=torch.uint8)
                self._broadcast(name, flat)
                return cut_bucket(flat, tensors)
            for tensor in tensors.values():
                self._broadcast(name, tensor)
        except RuntimeError as error:
            raise WeightSyncError(f"weights: group {name!r}: the push broke off: {error}") from None
        return tensors

    def _broadcast(self, name: str, tensor: Tensor) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        self._groups[name].broadcast([tensor], options).wait()


def empty_tensors(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """Uninitialised CPU tensors as a push announces them.

    Raises:
        WeightSyncError: lists of different lengths, a repeated name, an unknown dtype.
    """
    if not len(names) == len(dtypes) == len(shapes) or len(set(names)) != len(names):
        raise WeightSyncError(
            f"weights: a push names {len(names)} tensors ({len(set(names))} different), "
            f"{len(dtypes)} dtypes and {len(shapes)} shapes"
        )
    tensors = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = getattr(torch, str(dtype).removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise WeightSyncError(f"weights: {name} is pushed as {dtype!r}, which is no dtype")
        tensors[name] = torch.empty([int(length) for length in shape], dtype=kind)
    return tensors


def cut_bucket(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a flattened bucket: uint8 [bytes of all], cut in the order of `like`."""
    tensors = {}
    start = 0
    for name, tensor in like.items():
        end = start + tensor.numel() * tensor.element_size()
        # A copy, because a view of another dtype needs an aligned start.
        tensors[name] = flat[start:end].clone().view(tensor.dtype).reshape(tensor.shape)
        start = end
    return tensors
