"""How `rlmix scale pools` shows plans and simulations of pools."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from rlmix.scaling.scenarios import Request


def dry_run_view(
    asked: "Request", document: Mapping[str, Any], *, is_changed: bool
) -> "RenderableType":
    """Both mixes pool by pool, and the difference."""
    from rich.console import Group
    from rich.text import Text

    table = new_table(
        "pool", "asked" if is_changed else "today", "best", "USD/h", "per min*", "USD*"
    )
    for name, pool in document["pools"].items():
        dollars = pool["usd_per_trajectory"]
        table.add_row(
            name,
            str(pool["replicas"]),
            str(pool["target"]),
            f"{pool['usd_per_hour']:.2f}",
            f"{60 * pool['per_s']:.2f}",
            "no room" if dollars is None else f"{dollars:.4f}",
        )
    today, best = document["today"], document["best"]
    lines = [
        "* trajectories a minute of today's replicas at full load, price of one: modelled",
        _fleet_line("today", today),
        _fleet_line("best", best),
        f"saving {document['saved_usd_per_hour']:.2f} USD/h; nothing was changed.",
    ]
    if today["supply_per_s"] < today["needed_per_s"]:
        lines.insert(2, "! today's mix does not meet the demand, so the saving is no saving")
    if best["missing"]:
        lines.append(f"! the demand cannot be met: {best['missing']}")
    return Group(table, *(Text(line) for line in lines))


def simulation_view(document: Mapping[str, Any]) -> "RenderableType":
    """One line per fleet, the cheapest update marked."""
    from rich.console import Group
    from rich.text import Text

    table = new_table("fleet", "GPUs", "USD/update", "pools", "updates/h", "wait", "stale", "lost")
    prices = [row["usd_per_update"] for row in document["fleets"] if row["usd_per_update"]]
    for row in document["fleets"]:
        price = row["usd_per_update"]
        mark = " <" if price is not None and price == min(prices) else ""
        pools = row["pools_usd_per_update"]
        table.add_row(
            row["name"] + mark,
            str(row["gpus"]),
            "-" if price is None else f"{price:.2f}",
            "-" if pools is None else f"{pools:.2f}",
            f"{row['updates_per_h']:.2f}",
            f"{row['trainer_wait_frac']:.0%}",
            f"{row['stale'] / max(1, row['started']):.0%}",
            str(row["lost_sessions"]),
        )
    lines = [
        f"{document['hours']:g} simulated hours, {document['context_tokens']:,.0f} tokens of mean "
        f"context, {document['trainer_step_s']:.0f} s a step. Modelled, not measured.",
        *(f"! {row['name']}: {row['missing']}" for row in document["fleets"] if row["missing"]),
    ]
    return Group(table, *(Text(line) for line in lines))


def _fleet_line(name: str, fleet: Mapping[str, Any]) -> str:
    return (
        f"{name}: {fleet['gpus']} accelerators, {fleet['usd_per_hour']:.2f} USD/h, "
        f"{60 * fleet['supply_per_s']:.2f} trajectories/min for {60 * fleet['needed_per_s']:.2f} "
        "needed"
    )


def new_table(first: str, *numbers: str) -> "Table":
    """A name on the left, numbers on the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
