"""The ranks of one trainer, as one of them sees the others.

Two ways to talk: the mesh, which FSDP2 uses on the device (gloo on CPUs, NCCL on accelerators), and
a gloo group for facts, on which Python objects travel. Invariant: every rank makes the same calls
in the same order; a rank that is gone makes the others' next call fail instead of waiting.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from rlmix.core.errors import TrainerError
from rlmix.numerics.consistent.reduction import gather_objects
from rlmix.numerics.consistent.shard import LOOPBACK, gloo_group
from rlmix.weights.writers import ALONE, Writers

EXCHANGE_LIMIT_S = 1800.0
"""Longest that a rank waits for another: a micro-batch of a long session more or less, and the
publication that rank 0 writes while the others wait for their next call."""

CPU = "cpu"
CUDA = "cuda"
"""Torch's name for every accelerator that the plan knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among the trainer's ranks."""

    rank: int
    size: int
    device: torch.device
    group: Any | None
    """Gloo, of all ranks; None for one rank."""
    mesh: Any | None
    """One-dimensional device mesh for FSDP2; None for one rank."""
    store: Any | None
    """Keeps the rendezvous alive on rank 0."""

    def writers(self) -> Writers:
        """For what is written while nobody talks about anything else."""
        return Writers(rank=self.rank, size=self.size, group=self.group)

    def new_writers(self) -> Writers:
        """For checkpoints: with a group of their own, since they are written while others talk.
        Every rank must call this."""
        if self.size == 1:
            return ALONE
        import torch.distributed as dist

        limit = timedelta(seconds=EXCHANGE_LIMIT_S)
        group = dist.new_group(backend="gloo", timeout=limit)
        return Writers(rank=self.rank, size=self.size, group=group)

    def gather(self, mine: object) -> list[Any]:
        """Every rank's object on every rank, in the order of ranks."""
        return gather_objects(mine, self.group)


def alone(device: str = CPU) -> World:
    """A trainer of one rank."""
    return World(rank=0, size=1, device=_device(device, 0), group=None, mesh=None, store=None)


def open_store(host: str = LOOPBACK) -> tuple[Any, str, int]:
    """(store, host, port): where the ranks meet. Rank 0 makes it, before anybody joins."""
    import torch.distributed as dist

    store = dist.TCPStore(host, 0, None, True, timedelta(seconds=EXCHANGE_LIMIT_S), False)
    return store, host, store.port


def join(
    address: tuple[str, int],
    *,
    rank: int,
    size: int,
    device: str = CPU,
    host: str = LOOPBACK,
    store: Any | None = None,
) -> World:
    """Meet the other ranks; every rank must call this.

    Args:
        address: where `open_store` of rank 0 listens.
        device: `cpu`, or any other name for an accelerator.
        host: address of this machine that the others reach.
        store: rank 0's own.
    Raises:
        TrainerError: the device is not there.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    found = _device(device, int(os.environ.get("LOCAL_RANK", rank)))
    client = store or dist.TCPStore(*address, None, False, timedelta(seconds=EXCHANGE_LIMIT_S))
    if host == LOOPBACK:
        # By default gloo resolves the machine's name, which may fail, or listen on a public
        # address. Other addresses are the network's business: set GLOO_SOCKET_IFNAME there.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend="gloo" if found.type == CPU else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("mesh", client),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=EXCHANGE_LIMIT_S),
    )
    group = gloo_group(
        client, "facts", list(range(size)), rank, timeout_s=EXCHANGE_LIMIT_S, host=host
    )
    return World(
        rank=rank,
        size=size,
        device=found,
        group=group,
        mesh=init_device_mesh(found.type, (size,)),
        store=store,
    )


def _device(name: str, index: int) -> torch.device:
    if name == CPU:
        return torch.device(CPU)
    if not torch.cuda.is_available():
        raise TrainerError(
            f"trainer: trainer.device={name}, but torch {torch.__version__} finds no accelerator "
            "on this machine; set trainer.device=cpu, or start where one is"
        )
    device = torch.device(CUDA, index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def by_leaf(parts: list[Mapping[int, Any]]) -> list[Any]:
    """What all ranks computed, in the order of the step's micro-batches."""
    found = {leaf: value for part in parts for leaf, value in part.items()}
    return [found[leaf] for leaf in sorted(found)]
