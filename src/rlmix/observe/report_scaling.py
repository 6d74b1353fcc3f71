"""Scale operations in the report: marks on the plot of replicas, and a table of what was done."""

from collections.abc import Mapping
from html import escape
from typing import Any

from rlmix.observe import figures
from rlmix.observe.report_charts import card
from rlmix.observe.report_data import ReportData
from rlmix.observe.report_tables import table

MAX_OPERATIONS = 100
ENDS = ("scale_done", "scale_cancelled", "scale_failed")
KINDS = ("scale_started", "scale_restarted", "scale_rolling_back", "scale_left_open", *ENDS)


def operations_of(data: ReportData) -> dict[str, list[Mapping[str, Any]]]:
    """Operation -> its events, the steps of its replicas left out, oldest first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for event in data.events:
        if event.get("kind") in KINDS and "operation" in event:
            found.setdefault(str(event["operation"]), []).append(event)
    return found


def asked(event: Mapping[str, Any]) -> str:
    """`h100 1>2, a100 1>0`."""
    before = event.get("from", {})
    pairs = event.get("targets", {}).items()
    return ", ".join(f"{pool} {before.get(pool, '?')}>{target}" for pool, target in pairs)


def scale_marks(data: ReportData) -> list[tuple[float, str]]:
    """(minutes of run time, text) of every operation's beginning and end."""
    marks = []
    for name, events in operations_of(data).items():
        for event in events:
            if event["kind"] != "scale_restarted" and "run_s" in event:
                what = str(event["kind"]).removeprefix("scale_").replace("_", " ")
                text = f"{name}: {asked(event)}, {what}"
                marks.append((float(event["run_s"]) / 60, text))
    return marks


def scaling_card(data: ReportData) -> str:
    """One line for each operation."""
    rows, classes = [], []
    operations = operations_of(data)
    for name, events in list(operations.items())[-MAX_OPERATIONS:]:
        first, last = events[0], events[-1]
        status = str(last["kind"]).removeprefix("scale_").replace("_", " ")
        took_s = last["run_s"] - first["run_s"] if last["kind"] in ENDS else None
        why = first.get("reason", "")
        if status in ("failed", "cancelled"):
            why = f"{why}; {last.get('reason', '')}"
        rows.append(
            [
                figures.duration(first.get("run_s")),
                escape(name),
                escape(asked(last)),
                escape(status),
                figures.MISSING if took_s is None else figures.duration(took_s),
                escape(str(why)),
            ]
        )
        classes.append("trouble" if status in ("failed", "left open") else "")
    if not rows:
        return ""
    head = ["run time", "operation", "pools", "status", "took|num", "why"]
    body = f'<div class="scroll">{table(head, rows, row_classes=classes)}</div>'
    return card(
        "Scale operations",
        "Each adds replicas (boot, catch up, verify, rotate in), removes some (close, drain, stop) "
        "or both; what failed was undone.",
        body,
        is_wide=True,
    )
