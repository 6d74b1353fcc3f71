"""What each process of a parallel layout holds of a model, with the bits of one process.

Query heads, the inner channels of dense layers and, where there are enough, key heads are split
over the tensor parallel ranks; whole experts over the expert parallel ranks. Embedding, norms,
router and head are on every rank. Invariant: a rank's part of a row-parallel product is a whole
number of the tree's leaves, and no expert is ever cut, so no sum changes its order.
"""

# N query heads, D head dim, E experts, I inner size, H hidden

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rlmix.numerics.consistent.contract import TREE_LEAVES
from rlmix.numerics.consistent.model import LayerTensors, ModelSpec, ModelTensors, Ranks

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How many processes share a model: `max(tensor, experts)`, the smaller number dividing the
    larger. Tensor ranks are neighbours. Expert ranks are as far apart as they can be, so that each
    group of them holds every expert once; a layout with more tensor than expert ranks holds every
    expert on several ranks, and they compute it twice."""

    tensor: int
    experts: int

    def __post_init__(self) -> None:
        small, large = sorted((self.tensor, self.experts))
        if small < 1 or large % small:
            raise ValueError(
                f"parallel layout: tensor={self.tensor}, experts={self.experts}; the smaller must "
                "be at least 1 and divide the larger"
            )

    @property
    def world(self) -> int:
        return max(self.tensor, self.experts)

    def tensor_ranks(self, rank: int) -> list[int]:
        """The tensor parallel group that `rank` is in, in order."""
        first = rank // self.tensor * self.tensor
        return list(range(first, first + self.tensor))

    def expert_ranks(self, rank: int) -> list[int]:
        """The expert parallel group that `rank` is in, in order."""
        apart = self.world // self.experts
        return list(range(rank % apart, self.world, apart))


def check_layout(spec: ModelSpec, layout: Layout, *, num_experts: int, inner: int | None) -> None:
    """Say what keeps a model from being exact in a layout.

    Args:
        spec: of the whole model.
        num_experts: 0 in a dense model.
        inner: channels inside a dense layer; None: the model has no dense layer.
    Raises:
        ValueError: with every obstacle.
    """
    tensor, experts = layout.tensor, layout.experts
    problems = []
    if TREE_LEAVES % tensor:
        problems.append(f"tensor={tensor} does not divide the tree's {TREE_LEAVES} leaves")
    if spec.num_heads % tensor:
        problems.append(f"tensor={tensor} does not divide {spec.num_heads} query heads")
    if spec.num_kv_heads % tensor and tensor % spec.num_kv_heads:
        problems.append(f"tensor={tensor} and {spec.num_kv_heads} key heads do not divide")
    if spec.num_heads * spec.head_dim % TREE_LEAVES:
        problems.append(f"{spec.num_heads * spec.head_dim} attention channels are not 4 runs")
    if inner is not None and inner % TREE_LEAVES:
        problems.append(f"{inner} inner channels are not {TREE_LEAVES} runs")
    if experts > 1 and (num_experts == 0 or num_experts % experts or experts & (experts - 1)):
        problems.append(
            f"experts={experts} does not divide {num_experts} experts or is no power of two"
        )
    if problems:
        raise ValueError(f"parallel layout: {'; '.join(problems)}; use tensor=1, experts=1")


def shard_spec(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """`spec` with the heads of one rank; the same for every rank."""
    return replace(
        spec,
        num_heads=spec.num_heads // layout.tensor,
        num_kv_heads=max(1, spec.num_kv_heads // layout.tensor),
    )


def kv_heads_of(spec: ModelSpec, layout: Layout, rank: int) -> range:
    """Key heads of the whole model that `rank` holds. With more tensor ranks than key heads,
    neighbouring ranks hold the same one."""
    index = rank % layout.tensor
    count = max(1, spec.num_kv_heads // layout.tensor)
    first = index * spec.num_kv_heads // layout.tensor
    return range(first, first + count)


def shard_tensors(
    tensors: ModelTensors, spec: ModelSpec, layout: Layout, *, rank: int
) -> ModelTensors:
    """The tensors of one rank, cut out of the whole model's; copies, but for those that every rank
    has. `shard_spec` goes with them.

    Raises:
        ValueError: see `check_layout`.
    """
    experts = next((len(layer.router) for layer in tensors.layers if layer.router is not None), 0)
    inner = next((layer.down.shape[1] for layer in tensors.layers if layer.router is None), None)
    check_layout(spec, layout, num_experts=experts, inner=inner)
    if layout.world == 1:
        return tensors
    layers = tuple(_shard_layer(layer, spec, layout, rank) for layer in tensors.layers)
    return replace(tensors, layers=layers)


def _shard_layer(layer: LayerTensors, spec: ModelSpec, layout: Layout, rank: int) -> LayerTensors:
    index, size = rank % layout.tensor, layout.tensor
    kv_heads = kv_heads_of(spec, layout, rank)
    dim, num_heads = spec.head_dim, spec.num_heads
    heads = range(index * num_heads // size, (index + 1) * num_heads // size)
    # Rows of qkv and of the norms: queries, keys, values, head by head.
    keys = [num_heads + head for head in kv_heads]
    rotated = torch.tensor([*heads, *keys])
    all_heads = torch.tensor([*heads, *keys, *(head + spec.num_kv_heads for head in keys)])
    qkv = layer.qkv.unflatten(0, (-1, dim)).index_select(0, all_heads).flatten(0, 1)
    cut = replace(
        layer,
        qkv=qkv,
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.index_select(0, rotated),
        out=layer.out[:, heads.start * dim : heads.stop * dim].clone(),
    )
    if layer.router is None:
        inner = layer.down.shape[1]
        span = slice(index * inner // size, (index + 1) * inner // size)
        gate, up = layer.gate_up.chunk(2)
        return replace(
            cut, gate_up=torch.cat((gate[span], up[span])), down=layer.down[:, span].clone()
        )
    ours = experts_of(len(layer.router), layout, rank)
    return replace(
        cut,
        gate_up=layer.gate_up[ours.start : ours.stop].clone(),
        down=layer.down[ours.start : ours.stop].clone(),
    )


def experts_of(num_experts: int, layout: Layout, rank: int) -> range:
    """Experts that `rank` holds."""
    index = layout.expert_ranks(rank).index(rank)
    count = num_experts // layout.experts
    return range(index * count, (index + 1) * count)


def ranks_of(layout: Layout, rank: int, *, num_experts: int, store: Any, timeout_s: float) -> Ranks:
    """Process groups of one rank over the loopback interface; every rank must call this.

    Args:
        store: a torch store that all ranks share.
        timeout_s: how long one exchange may take before it fails.
    """
    tensor, experts = layout.tensor_ranks(rank), layout.expert_ranks(rank)
    return Ranks(
        tensor=gloo_group(store, "tensor", tensor, rank, timeout_s=timeout_s),
        experts=gloo_group(store, "experts", experts, rank, timeout_s=timeout_s),
        first_expert=experts_of(num_experts, layout, rank).start,
    )


def gloo_group(
    store: Any, name: str, members: list[int], rank: int, *, timeout_s: float, host: str = LOOPBACK
) -> Any | None:
    """A gloo group of `members` that touches no global state of `torch.distributed`; None when
    `rank` is the only one.

    Args:
        name: of this kind of group; groups of one kind have different members.
        host: address of this process that the others reach.
    """
    if len(members) == 1:
        return None
    import torch.distributed as dist

    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    # By default gloo resolves the machine's name, which may fail, or listen on a public address.
    options._devices = [gloo.create_device(hostname=host)]
    prefix = dist.PrefixStore(f"{name}-{'-'.join(map(str, members))}", store)
    return gloo(prefix, members.index(rank), len(members), options)


def named_tensors(tensors: ModelTensors) -> dict[str, Tensor]:
    """Every distinct tensor by a name, for sending; a tied head is not among them."""
    found = {"embedding": tensors.embedding, "final_norm": tensors.final_norm}
    if tensors.head is not tensors.embedding:
        found["head"] = tensors.head
    for number, layer in enumerate(tensors.layers):
        for name in LayerTensors.__dataclass_fields__:
            tensor = getattr(layer, name)
            if tensor is not None:
                found[f"{number}.{name}"] = tensor
    return found


def tensors_from_names(found: dict[str, Tensor]) -> ModelTensors:
    """The inverse of `named_tensors`."""
    num_layers = 1 + max(int(name.split(".")[0]) for name in found if "." in name)
    names = LayerTensors.__dataclass_fields__

    def layer(number: int) -> LayerTensors:
        fields: dict[str, Any] = {name: found.get(f"{number}.{name}") for name in names}
        return LayerTensors(**fields)

    return ModelTensors(
        embedding=found["embedding"],
        layers=tuple(layer(number) for number in range(num_layers)),
        final_norm=found["final_norm"],
        head=found.get("head", found["embedding"]),
    )
