"""How `rlmix train --cfg plan` draws a plan."""

import shlex
from typing import TYPE_CHECKING

from rlmix.plan.runplan import PoolPlan, RunPlan
from rlmix.plan.tasks import task_lines

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def plan_view(plan: RunPlan) -> "RenderableType":
    """Pools, memory, other processes, commands, warnings."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_pools(plan)]
    if any(pool.budget for pool in plan.pools.values()):
        parts += [_placement(plan), _memory(plan)]
    modelled = " (modelled)" if plan.is_modelled else ""
    parts.append(Text(f"{plan.usd_per_hour:.2f} USD per hour{modelled}; nothing was started."))
    parts += [Text(line) for line in _totals(plan)]
    parts += [Text(""), _others(plan), _commands(plan)]
    if plan.tasks is not None:
        parts += [Text(line) for line in task_lines(plan.tasks)]
    parts += [Text(f"! {warning}", style="yellow") for warning in plan.warnings]
    return Group(*parts)


def _table(title: str, *, words: tuple[str, ...], numbers: tuple[str, ...]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(words):
        # Long names of pools fold, so that no number loses digits.
        table.add_column(name, no_wrap=index > 0, overflow="ellipsis" if index else "fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.caption_justify = "left"
    return table


def _pools(plan: RunPlan) -> "Table":
    is_emulated = all(pool.is_emulated for pool in plan.pools.values())
    compared = () if plan.against is None else ("ratio+",)
    table = _table(
        "pools (accelerators are emulated)" if is_emulated else "pools",
        words=("pool", "weights/kv", "attention") if is_emulated else ("pool", "weights/act/kv"),
        numbers=("n", "reqs", "USD/h", "tokens/s*", "USD/M*", *compared),
    )
    for name, pool in plan.pools.items():
        formats = [f"{pool.weights}/{pool.activations}/{pool.kv}"]
        if is_emulated:
            formats = [f"{pool.weights}/{pool.kv}", pool.attention]
        row = [
            _title(name, pool),
            *formats,
            str(pool.replicas) if pool.tp == 1 else f"{pool.replicas}x{pool.tp}",
            str(pool.concurrency),
            f"{pool.usd_per_hour:.2f}",
            *_reference(pool),
        ]
        if plan.against is not None:
            ratio = plan.against.pool_cost_frac.get(name)
            row.append("-" if ratio is None else f"{ratio:.2f}")
        table.add_row(*row)
    table.caption = _caption(plan)
    return table


def _caption(plan: RunPlan) -> str:
    speeds = [pool.modelled for pool in plan.pools.values() if pool.modelled]
    reference = f"{speeds[0].model}, {speeds[0].context_tokens} tokens" if speeds else "reference"
    caption = f"* one replica with {reference}: modelled, not measured"
    if plan.against is not None:
        caption += f"\n+ price of a token over that of {plan.against.experiment}"
    return caption


def _title(name: str, pool: PoolPlan) -> str:
    return name if name.startswith(pool.accelerator) else f"{name} ({pool.accelerator})"


def _reference(pool: PoolPlan) -> tuple[str, str]:
    if pool.modelled is None:
        # On a CPU nothing is modelled; elsewhere the model does not fit.
        return "no room" if pool.is_emulated or pool.budget else "-", "-"
    usd = pool.modelled.usd_per_mtok
    return f"{pool.modelled.tokens_per_s:,.0f}", "-" if usd is None else f"{usd:.3f}"


def _placement(plan: RunPlan) -> "Table":
    table = _table(
        "kernels and places",
        words=("pool", "attention", "moe", "linear/state"),
        numbers=(),
    )
    table.add_column("where", overflow="fold")
    for name, pool in plan.pools.items():
        counted = {node: pool.nodes.count(node) for node in dict.fromkeys(pool.nodes)}
        where = " ".join(f"{node}:{count}" for node, count in counted.items())
        table.add_row(
            name,
            pool.attention,
            pool.moe,
            f"{pool.linear_attention}/{pool.state}",
            where or f"label {pool.ray_label}",
        )
    return table


def _memory(plan: RunPlan) -> "Table":
    """Budgets of one replica."""
    budgets = {name: pool.budget for name, pool in plan.pools.items() if pool.budget}
    contexts = list(dict.fromkeys(c for budget in budgets.values() for c in budget.requests))
    table = _table(
        "memory of one replica, GiB",
        words=("pool",),
        numbers=("all", "share", "weights", "state", "kv", *(_short(c) for c in contexts)),
    )
    for name, budget in budgets.items():
        sizes = (
            budget.total_gib,
            budget.share_gib,
            budget.weights_gib,
            budget.state_gib,
            budget.kv_gib,
        )
        fits = (str(budget.requests[context]) for context in contexts)
        table.add_row(name, *(f"{size:.0f}" for size in sizes), *fits)
    table.caption = f"{', '.join(_short(c) for c in contexts)}: requests of that length that fit"
    return table


def _short(tokens: str) -> str:
    return f"{int(tokens) // 1024}K"


def _totals(plan: RunPlan) -> list[str]:
    """Where the money goes, and how that stands against the other plan."""
    lines = []
    if plan.trainer.gpus:
        pools = plan.usd_per_hour - plan.trainer.usd_per_hour
        lines.append(
            f"pools {pools:.2f} on {sum(pool.gpus for pool in plan.pools.values())} accelerators, "
            f"trainer {plan.trainer.usd_per_hour:.2f} on {plan.trainer.gpus}"
        )
    if plan.tokens_per_s and plan.usd_per_mtok:
        lines.append(
            f"all pools {plan.tokens_per_s:,.0f} tokens/s, {plan.usd_per_mtok:.3f} USD per million "
            "(modelled)"
        )
    if plan.unused:
        left = ", ".join(f"{count} on {node}" for node, count in plan.unused.items())
        lines.append(f"unused: {left}")
    if (against := plan.against) is not None:
        change = f"{abs(against.saved_frac):.0%} {'less' if against.saved_frac >= 0 else 'more'}"
        if abs(against.saved_frac) < 0.005:
            change = "the same"
        pools_usd = ", ".join(f"{n} {usd:.2f}" for n, usd in against.pools_usd_per_hour.items())
        lines.append(
            f"against {against.experiment}: {against.usd_per_hour:.2f} USD per hour (pools: "
            f"{pools_usd}); this plan costs {change}"
        )
        if plan.usd_per_mtok and against.usd_per_mtok and against.tokens_per_s:
            ratio = plan.usd_per_mtok / against.usd_per_mtok
            lines.append(
                f"  its pools: {against.tokens_per_s:,.0f} tokens/s, {against.usd_per_mtok:.3f} "
                f"USD per million; a token here costs {ratio:.2f} of one there (modelled)"
            )
    return lines


def _others(plan: RunPlan) -> "Table":
    trainer, workers = plan.trainer, plan.workers
    table = _table("other processes", words=("process",), numbers=())
    table.add_column("what", overflow="fold")
    ranks = f"{trainer.ranks} rank{'s' if trainer.ranks > 1 else ''}"
    memory = ""
    if trainer.gpus:
        memory = (
            f"; {trainer.rank_gib:.0f} GiB each (modelled), {trainer.memory_gib:.0f} GiB of "
            "weights and optimizer in all; by part: "
            + ", ".join(f"{part} {size:.1f}" for part, size in trainer.rank_parts_gib.items())
            + f"; a micro-batch of {trainer.most_tokens:,} tokens is the longest that fits; "
            f"{trainer.tokens_per_s:,.0f} tokens/s"
        )
    table.add_row(
        "trainer",
        f"{ranks} on {trainer.device}, {trainer.compute}, {trainer.optimizer} "
        f"lr {trainer.lr:g}; publishes {', '.join(trainer.views)}{memory}",
    )
    table.add_row("router", "one process, ports chosen by the system")
    table.add_row(
        "task workers",
        f"{workers.workers} x {workers.concurrency} sessions, sandbox {workers.sandbox}",
    )
    if (evaluation := plan.evaluation) is not None:
        every = evaluation.every_steps
        when = f"every {every} steps" if every else "of checkpoints, by rlmix eval"
        table.add_row(
            "evaluation",
            f"{evaluation.data} ({evaluation.subset}), pass@{evaluation.k} of {evaluation.n} "
            f"samples, {evaluation.weights}, {when}; not in the price",
        )
    return table


def _commands(plan: RunPlan) -> "Text":
    """One line each, so that it can be copied; real servers with their environment."""
    from rich.text import Text

    lines = []
    for name, pool in plan.pools.items():
        env = "" if pool.is_emulated else "".join(f"{k}={v} " for k, v in pool.env.items())
        lines.append(f"{name}: {env}{_readable(pool.argv)}")
    lines.append(f"router: {_readable(plan.router.argv)}")
    title = "commands (fields in braces are filled in at the start)"
    return Text("\n".join([title, *lines, ""]), style="dim")


def _readable(argv: tuple[str, ...]) -> str:
    return " ".join(part if part.startswith("{") else shlex.quote(part) for part in argv)
