"""`report.html`: one file that shows a run, opens offline and asks nothing of anybody.

Everything is inside it (style sheet, SVG charts), there is no script, and a content policy forbids
the browser to load anything. It can be written at any time, also for a run that is still going or
that went wrong; what is missing is said at the top.
"""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rlmix.observe import (
    figures,
    report_alarms,
    report_charts,
    report_costs,
    report_scaling,
    report_tables,
)
from rlmix.observe.jsonl import write_atomically
from rlmix.observe.report_data import ReportData, read_report_data
from rlmix.observe.report_evaluations import evaluation_cards
from rlmix.observe.run_state import read_run_state

REPORT_FILE = "report.html"
REWARD_STEPS = 3
"""First and last reward are means of so many steps, as in the closing table."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory and return its path.

    Args:
        run_dir: a run directory; files may be missing, short or damaged.
    """
    path = run_dir / REPORT_FILE
    write_atomically(path, report_html(run_dir).encode("utf-8", "replace"))
    return path


def report_html(run_dir: Path) -> str:
    data = read_report_data(run_dir)
    name = data.manifest.name if data.manifest else run_dir.name
    style = (Path(__file__).parent / "report.css").read_text()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>rlmix run {escape(name)}</title><style>{style}</style></head><body><main>"
        f"{_head(data, name)}{_tiles(data)}"
        f"{_sections(data)}"
        "<footer>Written by rlmix from metrics.jsonl, events.jsonl and "
        "trajectories/index.jsonl of this run directory; `rlmix runs report` writes it again. "
        "Hover a point or bar for its numbers.</footer></main></body></html>\n"
    )


def _sections(data: ReportData) -> str:
    facts = _stack(report_tables.evaluation_card(data), report_tables.facts_card(data))
    learning = [
        *report_charts.learning_cards(data),
        *evaluation_cards(data),
        facts,
        report_tables.stop_reasons_card(data),
    ]
    marks = report_scaling.scale_marks(data)
    fleet = [*report_charts.fleet_cards(data, marks=marks), report_tables.pools_card(data)]
    fleet += [report_costs.unit_costs_card(data), report_scaling.scaling_card(data)]
    return (
        _section("Learning", learning)
        + _section("Numerics and correction", report_charts.correction_cards(data))
        + _section("Alarms", report_alarms.alarm_cards(data))
        + _section("Fleet, cost and time", fleet)
        + _section("What happened", [report_tables.events_card(data)])
    )


def _stack(*cards: str) -> str:
    return f'<div class="stack">{"".join(cards)}</div>'


def _section(title: str, cards: list[str]) -> str:
    return f'<h2>{escape(title)}</h2><div class="cards">{"".join(cards)}</div>'


def _head(data: ReportData, name: str) -> str:
    # The owner writes the report while it still holds the lock; its summary knows better.
    state = data.summary.get("exit_reason") or read_run_state(data.path).value
    created = ""
    if data.manifest:
        from datetime import UTC, datetime

        moment = datetime.fromtimestamp(data.manifest.created_s, UTC)
        created = f'<span class="sub">started {moment:%Y-%m-%d %H:%M} UTC</span>'
    head = (
        f"<header><h1>{escape(name)}</h1>"
        f'<span class="state {escape(state)}">{escape(state)}</span>{created}</header>'
    )
    notes = list(data.notes)
    if any(pool.is_emulated for pool in data.pools()):
        notes.insert(
            0,
            "The accelerators of this run are emulated: their number formats are computed for "
            "real, on a CPU; costs are modelled, and no speed here is a GPU's.",
        )
    if not notes:
        return head
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'{head}<div class="note"><ul>{items}</ul></div>'


def _tiles(data: ReportData) -> str:
    rewards = [value for _, value in data.column("reward/mean")]
    costs = [value for _, value in data.column("cost/step_usd")]
    evaluation: Mapping[str, Any] = data.summary.get("eval") or {}
    run_s = next((event["run_s"] for event in reversed(data.events) if "run_s" in event), None)
    outcomes = data.counts("outcomes")
    tiles = [
        (str(int(data.metrics[-1]["step"])) if data.metrics else "0", "optimizer steps"),
        (
            _arrow(_mean(rewards[:REWARD_STEPS]), _mean(rewards[-REWARD_STEPS:])),
            f"training reward, first and last {REWARD_STEPS} steps",
        ),
        (
            _arrow(evaluation.get("warm_start"), evaluation.get("trained")),
            "held-out pass rate, warm start and trained",
        ),
        (figures.count(sum(outcomes.values())), f"sessions, {outcomes['void']} void"),
        (
            figures.usd(data.summary.get("cost_usd", sum(costs) if costs else None)),
            "cost, modelled" if any(pool.is_emulated for pool in data.pools()) else "cost",
        ),
        (figures.duration(run_s), "run time"),
    ]
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _arrow(first: float | None, last: float | None) -> str:
    if first is None and last is None:
        return figures.MISSING
    return f"{figures.decimal(first)} \u2192 {figures.decimal(last)}"
