"""What a replica asks of the machine that Ray puts it on, and how a refusal reads. Pure.

Ray finds machines by the label `ray.io/accelerator-type`, which it sets to the first accelerator
that it sees. Where that is wrong (two kinds in one machine, an A100 of which only you know that it
has 80 GB) name a custom resource for the accelerator instead: nodes have one unit of it for each
accelerator. Invariant: emulated pools ask for nothing unless a resource is named for them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rlmix.launch.handle import Needs

TYPE_LABEL = "ray.io/accelerator-type"
NO_LABEL = "none"
NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSeen:
    """One live node of the cluster."""

    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]


def needs_of(
    *,
    engine: str,
    accelerator: str,
    ray_label: str,
    num_accelerators: int,
    is_cuda: bool,
    resources: Mapping[str, str],
    is_joined: bool,
) -> Needs | None:
    """What one replica asks for; None: any machine will do.

    Args:
        ray_label: of the accelerator, or `none`.
        resources: accelerator -> custom resource that takes the place of the label.
        is_joined: the cluster was there before the run. In a Ray of the run's own there is one
            machine, and the plan says which of its accelerators a replica takes.
    """
    if engine == "sglang_external":
        return None
    is_real = engine == "sglang" and is_joined and ray_label != NO_LABEL
    gpus = float(num_accelerators) if is_real and is_cuda else 0.0
    if custom := resources.get(accelerator):
        return Needs(
            kind=accelerator, gpus=gpus, resources={custom: float(num_accelerators)}, labels={}
        )
    if not is_real:
        return None
    # Ray counts accelerators that are no GPUs under the names of their vendors.
    counted = {} if is_cuda else {"NPU": float(num_accelerators)}
    return Needs(kind=accelerator, gpus=gpus, resources=counted, labels={TYPE_LABEL: ray_label})


def bundle_of(needs: Needs | None, *, num_cpus: float) -> dict[str, float]:
    """The resources of one actor, as Ray's autoscaler takes them."""
    bundle = {"CPU": num_cpus} if num_cpus else {}
    if needs is not None:
        bundle |= {"GPU": needs.gpus} if needs.gpus else {}
        bundle |= needs.resources
    return bundle


def labels_without(labels: Mapping[str, str], machine_ids: Collection[str]) -> dict[str, str]:
    """A selector of Ray's for nodes with these labels that are none of those machines."""
    if not machine_ids:
        return dict(labels)
    return {**labels, NODE_LABEL: f"!in({', '.join(sorted(machine_ids))})"}


def not_placed(
    name: str,
    needs: Needs | None,
    nodes: Sequence[NodeSeen],
    *,
    num_cpus: float,
    limit_s: float,
) -> str:
    """The sentence for a process that found no machine: what it asked for, what there is."""
    bundle = bundle_of(needs, num_cpus=num_cpus)
    labels = {} if needs is None else needs.labels
    matching = [
        node for node in nodes if all(node.labels.get(key) == want for key, want in labels.items())
    ]
    asked = " and ".join(f"{amount:g} {resource}" for resource, amount in bundle.items())
    there = ", ".join(
        f"{_sum(matching, resource, 'total'):g} {resource} of which "
        f"{_sum(matching, resource, 'free'):g} are free"
        for resource in bundle
    )
    where = "".join(f" with {key}={want}" for key, want in labels.items())
    what = f" ({needs.kind})" if needs is not None else ""
    return (
        f"launch: no machine for {name}{what} after {limit_s:g} s: asked for {asked} on a node"
        f"{where}; {len(matching)} of {len(nodes)} nodes are such, with {there or 'nothing'}; add "
        "nodes, lower the pool's replicas, name the right launch.resources, or raise "
        "launch.place_timeout_s"
    )


def _sum(nodes: Sequence[NodeSeen], resource: str, side: str) -> float:
    return sum(float(getattr(node, side).get(resource, 0.0)) for node in nodes)
