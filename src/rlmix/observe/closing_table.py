"""The table a run ends with, and the same table again in `rlmix runs show`.

Its input is the document that `rlmix train --json` prints (design, section 7), so that it can be
drawn from a finished run's `summary.json` too. A key that is missing or null shows as `-`.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlmix.observe import figures

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table


NARROW_COLUMNS = 102
"""Below this width the accelerator and replica columns are left out."""
MAX_ALARMS = 5


class _ClosingView:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> Iterator["RenderableType"]:
        yield _facts(self._document)
        pools = self._document.get("pools")
        if pools:
            yield _pools(pools, is_wide=options.max_width >= NARROW_COLUMNS)


def closing_view(document: Mapping[str, Any]) -> "RenderableType":
    """Facts, closing evaluation and one row per pool, fitted to the console's width."""
    return _ClosingView(document)


def evaluation_lines(evaluation: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """(label, text) of the closing evaluation.

    Reads `warm_start`, `trained`, `difference`, `ci95` (low, high), `tasks`, `void`.
    """
    if not evaluation:
        return [("held-out tasks", "not evaluated")]
    low, high = evaluation.get("ci95") or (None, None)
    void = evaluation.get("void") or 0
    tasks = f"{evaluation.get('tasks', figures.MISSING)} tasks"
    difference = evaluation.get("difference")
    signed = figures.MISSING if difference is None else f"{difference:+.3f}"
    return [
        (
            "held-out pass rate",
            f"warm start {figures.decimal(evaluation.get('warm_start'))}, "
            f"trained {figures.decimal(evaluation.get('trained'))} "
            f"({tasks}{f', {void} void' if void else ''})",
        ),
        (
            "difference",
            f"{signed}, 95 % interval {_signed(low)} to {_signed(high)} (paired)",
        ),
    ]


def alarm_lines(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of `alarms` and `quarantined`: how many, then one line for each."""
    alarms = document.get("alarms")
    if not alarms:
        return [("alarms", figures.MISSING if alarms is None else "none")]
    standing = sum(alarm.get("cleared_step") is None for alarm in alarms)
    lines = [("alarms", f"{len(alarms)}, {standing} of them to the end")]
    for alarm in alarms[:MAX_ALARMS]:
        cleared = alarm.get("cleared_step")
        until = "to the end" if cleared is None else f"cleared at step {cleared}"
        lines.append(("", f"{alarm['text']}, since step {alarm['since_step']}, {until}"))
    if len(alarms) > MAX_ALARMS:
        lines.append(("", f"and {len(alarms) - MAX_ALARMS} more in the report"))
    if out := document.get("quarantined"):
        lines.append(("in quarantine", ", ".join(out)))
    return lines


def _signed(value: float | None) -> str:
    return figures.MISSING if value is None else f"{value:+.3f}"


def _facts(document: Mapping[str, Any]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_header=False,
        title_justify="left",
        title_style="bold",
        title=f"run {document.get('run', figures.MISSING)}: {document.get('exit_reason', 'ended')}",
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    first, last = document.get("reward_first"), document.get("reward_last")
    rows = [
        ("steps", str(document.get("steps", figures.MISSING))),
        ("training reward", f"first {figures.decimal(first)}, last {figures.decimal(last)}"),
        *evaluation_lines(document.get("eval")),
        *alarm_lines(document),
        (
            "cost",
            f"{figures.usd(document.get('cost_usd'))} (modelled)"
            if _is_modelled(document)
            else figures.usd(document.get("cost_usd")),
        ),
        ("wall time", figures.duration(document.get("wall_s"))),
        (
            "sessions",
            f"{document.get('sessions', figures.MISSING)} "
            f"({figures.percent(document.get('void_frac'))} void)",
        ),
        ("run directory", str(document.get("run_dir", figures.MISSING))),
        ("report", str(document.get("report") or figures.MISSING)),
    ]
    for label, text in rows:
        table.add_row(label, text)
    return table


def _is_modelled(document: Mapping[str, Any]) -> bool:
    """Unless every pool says that it is real, the price is that of an emulated accelerator."""
    pools = document.get("pools") or {}
    return not pools or any(pool.get("is_emulated", True) for pool in pools.values())


def _pools(pools: Mapping[str, Mapping[str, Any]], *, is_wide: bool) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("pool", no_wrap=True)
    if is_wide:
        table.add_column("accelerator", no_wrap=True)
    table.add_column("weights/kv", no_wrap=True)
    numbers = ("sessions", "tokens", "reward", "k3", "cost", "$/Mtok")
    for title in (*(("replicas",) if is_wide else ()), *numbers):
        table.add_column(title, justify="right", no_wrap=True)
    for name, pool in pools.items():
        table.add_row(*_pool_cells(name, pool, is_wide=is_wide))
    emulated = [name for name, pool in pools.items() if pool.get("is_emulated", True)]
    if emulated:
        which = "all accelerators" if len(emulated) == len(pools) else ", ".join(emulated)
        table.caption = f"reward, k3: last step; {which} emulated; cost modelled by list price"
        table.caption_justify = "left"
    return table


def _pool_cells(name: str, pool: Mapping[str, Any], *, is_wide: bool) -> list[str]:
    tokens, cost = pool.get("tokens"), pool.get("cost_usd")
    per_million = 1e6 * cost / tokens if tokens and cost is not None else None
    return [
        name,
        *([str(pool.get("accelerator", name))] if is_wide else []),
        f"{pool.get('weights', figures.MISSING)}/{pool.get('kv', figures.MISSING)}",
        *([str(pool.get("replicas", figures.MISSING))] if is_wide else []),
        figures.count(pool.get("sessions")),
        figures.count(tokens),
        figures.decimal(pool.get("reward")),
        figures.small(pool.get("k3_kl")),
        figures.usd(cost),
        figures.usd(per_million),
    ]
