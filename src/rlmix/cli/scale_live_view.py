"""How `rlmix scale pools` shows the pools of a running run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


def live_view(document: Mapping[str, Any]) -> "RenderableType":
    """Pool by pool, the operation under way, what the policy sees."""
    from rich.console import Group
    from rich.text import Text

    from rlmix.cli.scale_view import new_table

    table = new_table("pool", "replicas", "ready", "target", "load", "version", "USD/h", "state")
    for name, pool in document["pools"].items():
        load, version = pool["load"], pool["version"]
        table.add_row(
            name,
            str(pool["replicas"]),
            str(pool["ready"]),
            str(pool["target"]),
            "-" if load is None else f"{load:.0%}",
            "-" if version is None else f"v{version}",
            f"{pool['usd_per_hour']:.2f}",
            _state(pool),
        )
    machines = new_table("machine", "address", "id", "replicas", "state")
    for machine in document["machines"]:
        machines.add_row(
            machine["host"],
            machine["address"],
            machine["id"][:8],
            " ".join(machine["replicas"]),
            "leaves" if machine["is_leaving"] else "",
        )
    modelled = ", modelled: the accelerators are emulated" if document["is_modelled"] else ""
    lines = [
        f"{document['run']}: step {document['step']}, {document['phase']}; "
        f"{document['usd_per_hour']:.2f} USD/h for all pools{modelled}",
        _policy_line(document),
        *(progress_line(one) for one in document["operations"][-3:]),
    ]
    if "note" in document:
        lines.append(f"! {document['note']}")
    tables = [table, machines] if document["machines"] else [table]
    return Group(*tables, *(Text(line) for line in lines if line))


def progress_line(operation: Mapping[str, Any]) -> str:
    """One operation in one line."""
    asked = " ".join(
        f"{pool} {operation['replicas_from'][pool]}>{target}"
        for pool, target in operation["targets"].items()
    )
    steps = ", ".join(
        f"{name} {one['step'].replace('_', ' ')}" for name, one in operation["replicas"].items()
    )
    reason = operation["reason"].splitlines()
    return (
        f"{operation['id']}: {asked}, {operation['status'].replace('_', ' ')}"
        f"{f' ({steps})' if steps else ''}{f': {reason[0]}' if reason else ''}"
    )


def _state(pool: Mapping[str, Any]) -> str:
    parts = [
        f"{pool['starting']} starting" if pool["starting"] else "",
        f"{pool['draining']} draining" if pool["draining"] else "",
        "in quarantine" if pool["is_held"] else "",
    ]
    return ", ".join(part for part in parts if part)


def _policy_line(document: Mapping[str, Any]) -> str:
    policy = document["policy"]
    mode = "pools change by themselves" if document["auto"] else "pools change on request only"
    if not policy:
        return f"{mode} (scaling.auto)"
    return (
        f"{mode} (scaling.auto); the trainer needs {60 * policy['needed_per_s']:.1f} "
        f"trajectories/min, pools can {60 * policy['supply_per_s']:.1f}, it waits "
        f"{policy['trainer_wait_frac']:.0%} of its time"
    )
