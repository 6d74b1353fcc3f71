"""How `rlmix train --cfg plan` draws a plan."""

import shlex
from typing import TYPE_CHECKING

from rlmix.plan.runplan import PoolPlan, RunPlan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def plan_view(plan: RunPlan) -> "RenderableType":
    """Pools, other processes, commands, warnings."""
    from rich.console import Group
    from rich.text import Text

    modelled = " (modelled)" if plan.is_modelled else ""
    parts: list[RenderableType] = [
        _pools(plan),
        Text(f"{plan.usd_per_hour:.2f} USD per hour{modelled}; nothing was started.\n"),
        _others(plan),
        _commands(plan),
    ]
    parts += [Text(f"! {warning}", style="yellow") for warning in plan.warnings]
    return Group(*parts)


def _table(title: str) -> "Table":
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)


def _pools(plan: RunPlan) -> "Table":
    speeds = [pool.modelled for pool in plan.pools.values() if pool.modelled]
    reference = f"{speeds[0].model}, {speeds[0].context_tokens} tokens" if speeds else "reference"
    emulated = [pool.is_emulated for pool in plan.pools.values()]
    table = _table("pools (accelerators are emulated)" if all(emulated) else "pools")
    for name in ("pool", "weights/kv", "attention"):
        table.add_column(name, no_wrap=True)
    for name in ("n", "reqs", "USD/h", "tokens/s*", "USD/M*"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, pool in plan.pools.items():
        table.add_row(
            name if name == pool.accelerator else f"{name} ({pool.accelerator})",
            f"{pool.weights}/{pool.kv}",
            pool.attention,
            str(pool.replicas),
            str(pool.concurrency),
            f"{pool.usd_per_hour:.2f}",
            *_reference(pool),
        )
    table.caption = f"* one accelerator with {reference}: modelled, not measured"
    table.caption_justify = "left"
    return table


def _reference(pool: PoolPlan) -> tuple[str, str]:
    if pool.modelled is None:
        return "no room", "-"
    return f"{pool.modelled.tokens_per_s:,.0f}", f"{pool.modelled.usd_per_mtok:.3f}"


def _others(plan: RunPlan) -> "Table":
    trainer, workers = plan.trainer, plan.workers
    table = _table("other processes")
    table.add_column("process", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_row(
        "trainer",
        f"{trainer.ranks} rank on {trainer.device}, {trainer.compute}, {trainer.optimizer} "
        f"lr {trainer.lr:g}; publishes {', '.join(trainer.views)}",
    )
    table.add_row("router", "one process, ports chosen by the system")
    table.add_row(
        "task workers",
        f"{workers.workers} x {workers.concurrency} sessions, sandbox {workers.sandbox}",
    )
    return table


def _commands(plan: RunPlan) -> "Text":
    """One line each, so that it can be copied."""
    from rich.text import Text

    commands = {name: pool.argv for name, pool in plan.pools.items()}
    commands["router"] = plan.router.argv
    lines = [f"{name}: {_readable(argv)}" for name, argv in commands.items()]
    title = "commands (fields in braces are filled in at the start)"
    return Text("\n".join([title, *lines, ""]), style="dim")


def _readable(argv: tuple[str, ...]) -> str:
    return " ".join(part if part.startswith("{") else shlex.quote(part) for part in argv)
