"""The report's section on evaluations beside the loop: the learning curve and what each scored."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlmix.observe import figures, svg
from rlmix.observe.jsonl import read_jsonl
from rlmix.observe.report_charts import card
from rlmix.observe.report_data import ReportData
from rlmix.observe.report_tables import table
from rlmix.observe.svg import Axes, Series

ROWS = "evaluations/evaluations.jsonl"
HINT = (
    "Versions of the policy on fixed tasks, in BF16 on engines of their own while the run goes on. "
    "Bands are 95 % intervals over tasks. The best one's score is the largest of several and so "
    "biased upwards: judge it anew to quote it."
)


def evaluation_cards(data: ReportData) -> list[str]:
    """The learning curve; empty for a run that evaluated nothing on its way."""
    rows = list({int(row["step"]): row for row in read_jsonl(data.path / ROWS)}.values())
    rows = sorted((row for row in rows if _number(row.get("pass_at_1"))), key=_step)
    if not rows:
        return []
    return [card("Learning curve", HINT, curve(rows) + _table(rows), is_wide=True)]


def curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """pass@1 with its interval, and pass@k, by step."""
    k = rows[-1]["k"]
    series = [
        Series(
            name="pass@1", slot=0, is_thick=True,
            points=[(_step(row), row["pass_at_1"]) for row in rows],
        ),
        Series(
            name="95 % interval", slot=-1, points=[(_step(row), row["ci95"][0]) for row in rows]
        ),
        Series(name="", slot=-1, points=[(_step(row), row["ci95"][1]) for row in rows]),
    ]  # fmt: skip
    if k > 1:
        points = [(_step(row), row["pass_at_k"]) for row in rows if _number(row["pass_at_k"])]
        series.append(Series(name=f"pass@{k}", slot=1, points=points))
    axes = Axes(
        x_label="optimizer step", y_label="pass rate", y_low=0.0, y_high=1.0, width=1150, height=320
    )
    keys = "".join(
        f"<span>{svg.key_swatch(line.slot)}{escape(line.name)}</span>"
        for line in series
        if line.name
    )
    drawn = svg.line_chart(series, axes, number=figures.decimal)
    return f'<div class="legend">{keys}</div>{drawn}'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    best = max(rows, key=lambda row: (row["pass_at_1"], -_step(row)))
    head = ["step|num", "pass@1|num", "95 %", "tasks|num", "void|num", "took|num", ""]
    cells = [
        [
            str(row["step"]),
            figures.decimal(row["pass_at_1"]),
            f"{figures.decimal(row['ci95'][0])} to {figures.decimal(row['ci95'][1])}",
            str(row["tasks"]),
            str(row["void"]),
            figures.duration(row["wall_s"]),
            "best" if row is best else "",
        ]
        for row in rows
    ]
    return table(head, cells)


def _step(row: Mapping[str, Any]) -> float:
    return float(row["step"])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value
