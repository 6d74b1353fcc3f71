"""The pusher's end of a weight update through a process group: buckets of a view folder, and the
group that carries them to one engine.

What is pushed is what lies in the view folder, tensor by tensor, in the names and format of the
checkpoint, so an engine gets the same bytes whichever way they travel. Calls block; every wait has
the group's limit. The engine's end is `rlmix.engine.receiver`, or SGLang.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmix.core.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = ("gloo", "nccl")

BUCKET_BYTES = 1 << 30
"""Of one push: large enough that the HTTP request beside it costs nothing, small enough that
sender and engine have room for it beside their weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Some tensors of a checkpoint, pushed together."""

    tensors: "Mapping[str, Tensor]"
    """By checkpoint name, on the CPU."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def announcement(self) -> dict[str, Any]:
        """The fields of a push that say what will come; `flattened_bucket` is one run of bytes."""
        return {
            "names": list(self.tensors),
            "dtypes": [
                str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors.values()
            ],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
            "load_format": "flattened_bucket",
        }

    def flat(self) -> "Tensor":
        """uint8 [num_bytes]: all tensors' bytes in order."""
        import torch

        parts = [t.contiguous().reshape(-1).view(torch.uint8) for t in self.tensors.values()]
        return torch.cat(parts)


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of the tensors in a model folder, without reading one.

    Raises:
        WeightSyncError: no weight file, or one that cannot be read.
    """
    return frozenset(_files_by_name(folder))


def check_names(pushed: frozenset[str], served: frozenset[str]) -> None:
    """Refuse a push whose tensors are not those of the checkpoint that the engine started from.

    SGLang ignores a name that its model does not have and reports success, so this is the only
    place that can tell.

    Raises:
        WeightSyncError: names up to three that are missing or unknown.
    """
    unknown, missing = sorted(pushed - served), sorted(served - pushed)
    if unknown or missing:
        raise WeightSyncError(
            f"weights: a push must hold the {len(served)} tensors that the engine started with; "
            f"unknown: {_some(unknown)}; missing: {_some(missing)}"
        )


def read_buckets(folder: Path, *, max_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """The tensors of a model folder in buckets of at most `max_bytes` (or one tensor), by name, so
    that what an engine fuses (an expert's gate and up) mostly arrives together.

    Raises:
        WeightSyncError: no weight file, or one that cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    held: dict[str, Tensor] = {}
    size = 0
    files = _files_by_name(folder)
    handles: dict[Path, Any] = {}
    try:
        for name in sorted(files):
            file = files[name]
            if file not in handles:
                handles[file] = safe_open(file, framework="pt").__enter__()
            tensor = handles[file].get_tensor(name)
            more = tensor.numel() * tensor.element_size()
            if held and size + more > max_bytes:
                yield Bucket(tensors=held)
                held, size = {}, 0
            held[name] = tensor
            size += more
    except (SafetensorError, OSError) as error:
        raise WeightSyncError(f"weights: {folder} cannot be read: {error}") from error
    finally:
        for handle in handles.values():
            handle.__exit__(None, None, None)
    if held:
        yield Bucket(tensors=held)


def _files_by_name(folder: Path) -> dict[str, Path]:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"weights: {folder} has no .safetensors file")
    names: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                names.update(dict.fromkeys(handle.keys(), file))
        except (SafetensorError, OSError) as error:
            raise WeightSyncError(f"weights: {file} cannot be read: {error}") from error
    return names


class PushGroup:
    """The pusher, rank 0, and the ranks of one engine behind it."""

    def __init__(self, *, host: str, world_size: int, backend: str, limit_s: float) -> None:
        """Listen at `host` on a port of the system's choice; `meet` forms the group.

        Args:
            world_size: the pusher and every rank of the engine: 1 + its tensor parallelism.
            backend: `gloo`, or `nccl` where this process has a GPU of its own.
            limit_s: for forming the group, and for each bucket.
        """
        import torch
        from torch.distributed import TCPStore

        if backend not in BACKENDS:
            raise WeightSyncError(
                f"weights: backend={backend!r}; a push goes through {', '.join(BACKENDS)}"
            )
        if backend == "nccl" and not torch.cuda.is_available():
            raise WeightSyncError(
                "weights: backend=nccl pushes from a GPU of this process's own, and it sees none; "
                "use weights.transport=disk"
            )
        self._backend = backend
        self._world_size = world_size
        self._limit = timedelta(seconds=limit_s)
        self._store = TCPStore(
            host, 0, world_size, is_master=True, wait_for_workers=False, timeout=self._limit
        )
        self._group: Any = None
        self.host = host
        self.port = self._store.port
        self.name = f"rlmix-{os.getpid()}-{self.port}"
        """No other group of the machine has it."""

    def invitation(self) -> dict[str, Any]:
        """Body of `/init_weights_update_group`; the engine joins while `meet` waits."""
        return {
            "master_address": self.host,
            "master_port": self.port,
            "rank_offset": 1,
            "world_size": self._world_size,
            "group_name": self.name,
            "backend": self._backend,
        }

    def meet(self) -> None:
        """Wait for the engine's ranks.

        Raises:
            WeightSyncError: they did not come within the limit.
        """
        from torch.distributed import PrefixStore
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper

        try:
            self._group, _ = _new_process_group_helper(
                self._world_size,
                0,
                [],
                Backend(self._backend),
                PrefixStore(self.name, self._store),
                group_name=self.name,  # type: ignore[arg-type]
                backend_options=None,
                timeout=self._limit,
            )
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(
                f"weights: the engine did not join group {self.name}: {error}"
            ) from error

    def send(self, flat: "Tensor") -> None:
        """Broadcast a bucket's bytes; returns when every rank has them.

        Raises:
            WeightSyncError: a rank is gone, or the limit is over.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        if self._backend == "nccl":
            flat = flat.cuda()
        try:
            self._group.broadcast([flat], options).wait()
        except RuntimeError as error:
            raise WeightSyncError(f"weights: group {self.name} broke off: {error}") from error

    def close(self) -> None:
        """Let go of the group, so that who waits for it fails at once where possible."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError, AttributeError):
                group.abort()


def _some(names: Sequence[str]) -> str:
    return (
        ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "none"
    )
