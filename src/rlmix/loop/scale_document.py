"""What a running run says of its pools: the document of `rlmix scale pools`. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlmix.core.machine import Machine
from rlmix.plan.runplan import RunPlan
from rlmix.pools.spec import ReplicaStatus
from rlmix.scaling.history import ScaleState, operation_to_dict

SHOWN_OPERATIONS = 5
"""The last ones."""


def scale_document(
    *,
    run: str,
    phase: str,
    step: int,
    plan: RunPlan,
    statuses: Sequence[ReplicaStatus],
    targets: Mapping[str, int],
    state: ScaleState,
    is_auto: bool,
    policy: Mapping[str, float | None],
    machines: Sequence[Machine],
) -> dict[str, Any]:
    """JSON values; `load` is the share of the pool's places that is taken, None where none serves,
    prices are those of what is held now. `machines` is empty where the run has the one machine."""
    pools = {}
    for name, pool in plan.pools.items():
        mine = [s for s in statuses if s.pool == name and not s.state.is_final]
        ready = [s for s in mine if s.is_routed and not s.is_leaving]
        routed = [s for s in mine if s.is_routed]
        busy = sum(s.running + s.queued for s in routed)
        versions = [s.version for s in ready if s.version is not None]
        pools[name] = {
            "replicas": len(mine),
            "ready": len(ready),
            "target": targets[name],
            "load": busy / (len(routed) * pool.max_running) if routed else None,
            "usd_per_hour": len(mine) * pool.usd_per_replica_hour,
            "starting": len([s for s in mine if not (s.is_routed or s.is_leaving or s.is_held)]),
            "draining": len([s for s in mine if s.is_leaving]),
            "is_held": any(s.is_held for s in mine),
            "running": sum(s.running for s in mine),
            "queued": sum(s.queued for s in mine),
            "tokens_per_s": sum(s.tokens_per_s for s in mine),
            "version": min(versions) if versions else None,
            "accelerator": pool.accelerator,
            "is_emulated": pool.is_emulated,
        }
    operations = list(state.operations.values())[-SHOWN_OPERATIONS:]
    return {
        "run": run,
        "phase": phase,
        "step": step,
        "pools": pools,
        "usd_per_hour": sum(pool["usd_per_hour"] for pool in pools.values()),
        "operations": [operation_to_dict(one) for one in operations],
        "auto": is_auto,
        "policy": dict(policy),
        "is_modelled": plan.is_modelled,
        "machines": [
            {
                "id": machine.id,
                "address": machine.address,
                "host": machine.host,
                "is_leaving": machine.id in state.leaving,
                "replicas": [s.name for s in statuses if s.is_on(machine)],
            }
            for machine in machines
        ],
    }


def operation_line(state: ScaleState) -> str:
    """The operation under way in one line; empty: none."""
    operation = state.running
    if operation is None:
        return ""
    asked = " ".join(
        f"{pool} {operation.replicas_from[pool]}>{target}"
        for pool, target in operation.targets.items()
    )
    steps = ", ".join(
        f"{name} {one.step.value.replace('_', ' ')}"
        for name, one in operation.replicas.items()
        if not one.step.is_final
    )
    status = operation.status.value.replace("_", " ")
    return f"{operation.id} {status}: {asked} ({operation.progress_frac:.0%}; {steps})"
