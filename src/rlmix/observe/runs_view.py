"""How `rlmix runs` shows what `runs` found."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmix.observe import figures
from rlmix.observe.closing_table import closing_view
from rlmix.observe.runs import LogFile, RunRow

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_STATE_STYLE = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "interrupted": "yellow",
    "lost": "red",
}


def runs_table(
    rows: Sequence[RunRow], *, root: Path, unreadable: Mapping[str, str]
) -> "RenderableType":
    """One line per run, newest first, then those that cannot be read, with the reason."""
    from rich.console import Group
    from rich.text import Text

    notes = [Text(f"{name}: {reason}", style="yellow") for name, reason in unreadable.items()]
    if not rows:
        return Group(Text(f"no run in {root} yet; start one with `rlmix train`"), *notes)
    table = _table("run", "state", "steps|right", "reward|right", "age|right", "attempts|right")
    for row in rows:
        table.add_row(
            row.name,
            Text(row.state.value, style=_STATE_STYLE[row.state.value]),
            str(row.steps),
            figures.decimal(row.reward),
            figures.age(row.age_s),
            str(row.attempts),
        )
    return Group(table, *notes)


def logs_table(logs: Sequence[LogFile], *, now_s: float) -> "RenderableType":
    """Process, size, last write and path of each log."""
    from rich.text import Text

    if not logs:
        return Text("no log yet")
    table = _table("process", "bytes|right", "written|right", "path")
    for log in logs:
        written = figures.age(now_s - log.modified_s)
        table.add_row(log.process, figures.count(log.size_bytes), f"{written} ago", str(log.path))
    return table


def run_view(document: Mapping[str, Any]) -> "RenderableType":
    """The document of `runs.show_run`: state, closing table if there is one, last events."""
    from rich.console import Group
    from rich.text import Text

    state = document["state"]
    parts: list[RenderableType] = [
        Text.assemble(
            (document["name"], "bold"),
            "  ",
            (state, _STATE_STYLE[state]),
            f"  {document['steps']} steps, last reward {figures.decimal(document['reward'])}, "
            f"started {figures.age(document['age_s'])} ago, {document['attempts']} attempt(s)",
        )
    ]
    if document["pid"]:
        parts.append(Text(f"process {document['pid']}"))
    if document["overrides"]:
        parts.append(Text("overrides: " + " ".join(document["overrides"])))
    if document["summary"]:
        parts.append(closing_view(document["summary"]))
    else:
        parts.append(Text(f"run directory {document['path']}"))
    for event in document["last_events"]:
        line = f"{figures.duration(event['run_s']):>9} {event['kind']}: {event['reason']}"
        parts.append(Text(line, style="dim"))
    return Group(*parts)


def _table(*columns: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        title, _, side = column.partition("|")
        table.add_column(title, justify="right" if side else "left", overflow="fold")
    return table
