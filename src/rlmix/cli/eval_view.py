"""What `rlmix eval` shows to people."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlmix.evals.score import Score

MAX_STUCK = 5


def plan_view(plan: Mapping[str, Any]) -> "RenderableType":
    from rich.table import Table

    from rlmix.evals.score_report import shown

    table = Table("what", "value", title="evaluation")
    for name, value in plan.items():
        text = f"{len(value)} repositories" if name == "repositories" else shown(value)
        table.add_row(name, text)
    return table


def score_view(result: "Score", document: Mapping[str, Any]) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from rlmix.evals.comparison import sentence
    from rlmix.evals.score_report import engine_line, probe_line, title

    k = result.k
    table = Table(
        "", "value", "95 % over tasks", "tasks", "void as failed", title=title(document["facts"])
    )
    rows = (
        ("pass@1", result.pass_at_1, result.pass_at_1_void_failed),
        (f"pass@{k}", result.pass_at_k, result.pass_at_k_void_failed),
    )
    for name, one, other in rows[: min(k, 2)]:  # With k = 1 both are the same.
        interval = f"{one.low:.3f} to {one.high:.3f}"
        table.add_row(name, f"{one.value:.3f}", interval, str(one.num_tasks), f"{other.value:.3f}")
    lines = [Text(engine_line(document["facts"])), Text(probe_line(document["probes"]))]
    if against := document.get("against"):
        lines.append(Text(f"{against['first']} against {against['second']}", style="bold"))
        for name, key in (("pass@1", "pass_at_1"), (f"pass@{against['k']}", "pass_at_k")):
            if against[key]:
                lines.append(Text(sentence(name, against[key])))
    if result.num_void:
        lines.append(Text(f"{result.num_void} attempts are void", style="yellow"))
    if not document["is_whole"]:
        stuck = [f"{one['task_id']} ({one['s']:.0f} s)" for one in document["stuck"][:MAX_STUCK]]
        text = f"stopped at the deadline in {', '.join(stuck)}; run it again to go on"
        lines.append(Text(text, style="yellow"))
    lines.append(Text(str(Path(document["folder"]) / "report.html")))
    return Group(table, *lines)
