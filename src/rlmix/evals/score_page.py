"""`report.html` of an evaluation: one file that opens offline and asks nothing of anybody."""

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from rlmix.evals.score_report import (
    REFERENCE_ROWS,
    engine_line,
    has_references,
    probe_line,
    shown,
    title,
)
from rlmix.observe.report_charts import card
from rlmix.observe.report_tables import table
from rlmix.observe.svg import interval_chart

MAX_TASK_ROWS = 1000


def page(found: Mapping[str, Any]) -> str:
    """The page of a report's document."""
    facts = found["facts"]
    style = (files("rlmix.observe") / "report.css").read_text()
    cards = [
        card("Score", SCORE_HINT, _scores(found), is_wide=True),
        card("By repository", "Means over tasks.", _groups(found["by_repository"])),
        card("By language", "Means over tasks.", _groups(found["by_language"])),
        card("How attempts ended", "Void attempts are faults of the machine.", _ends(found)),
    ]
    if has_references(found):
        rows = [[escape(cell) for cell in row] for row in REFERENCE_ROWS]
        cards.append(card("For comparison", "Not measured here.", table(REFERENCE_HEAD, rows)))
    if found.get("against"):
        cards.append(card("Against another evaluation", AGAINST_HINT, _against(found["against"])))
    tasks = card("Every task", "Passed of valid attempts.", _tasks(found), is_wide=True)
    depends = card("What this number depends on", "", _facts(facts), is_wide=True)
    name = escape(title(facts))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{name}</title><style>{style}</style></head><body><main>"
        f"<header><h1>{name}</h1></header>{_tiles(found)}"
        f'<div class="cards">{"".join(cards)}</div>'
        f'<h2>Tasks</h2><div class="cards">{tasks}</div>'
        f'<h2>Facts</h2><div class="cards">{depends}</div>'
        "<footer>Written by rlmix from attempts.jsonl of this folder.</footer></main></body>"
        "</html>\n"
    )


SCORE_HINT = "95 % intervals over tasks: attempts of one task are not independent."
AGAINST_HINT = "Second minus first on the same tasks."
REFERENCE_HEAD = ["what", "value", "source"]


def _tiles(found: Mapping[str, Any]) -> str:
    tiles = [
        (_rate(found["pass_at_1"]), "pass@1"),
        (_rate(found["pass_at_k"]), f"pass@{found['k']}"),
        (str(found["tasks"]), "tasks"),
        (str(found["attempts"]), f"attempts, {found['void']} void"),
        (str(found["timed_out"]), "tests timed out"),
        (str(found["empty"]), f"empty diffs, {found['patch_failed']} did not apply"),
    ]
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for value, label in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _scores(found: Mapping[str, Any]) -> str:
    head = ["", "value|num", "95 % interval", "by", "tasks|num", "void as failed|num"]
    rows, charts = [], ""
    for name, key, interval in (
        ("pass@1", "pass_at_1", "ci95"), (f"pass@{found['k']}", "pass_at_k", "ci95_k"),
    ):  # fmt: skip
        low, high = found[interval]
        facts = found["intervals"][key]
        rows.append(
            [
                name, _rate(found[key]), f"{_rate(low)} to {_rate(high)}", facts["method"],
                str(facts["tasks"]), _rate(found["void_as_failed"][key]),
            ]
        )  # fmt: skip
        if found[key] == found[key]:
            charts += interval_chart(low, found[key], high, label=name)
    lines = [engine_line(found["facts"]), probe_line(found["probes"])]
    return table(head, rows) + charts + "".join(f"<p>{escape(line)}</p>" for line in lines)


def _groups(groups: Mapping[str, Mapping[str, float]]) -> str:
    head = ["", "tasks|num", "pass@1|num", "any attempt|num", "void|num"]
    rows = [
        [
            escape(name), f"{row['tasks']:.0f}", _rate(row["pass_at_1"]), _rate(row["any"]),
            f"{row['void']:.0f}",
        ]
        for name, row in groups.items()
    ]  # fmt: skip
    return table(head, rows)


def _ends(found: Mapping[str, Any]) -> str:
    rows = [[escape(name), str(count)] for name, count in found["stop_reasons"].items()]
    return table(["ended because", "attempts|num"], rows)


def _against(against: Mapping[str, Any]) -> str:
    from rlmix.evals.comparison import sentence

    lines = [f"{against['first']} to {against['second']}"]
    for name, key in (("pass@1", "pass_at_1"), (f"pass@{against['k']}", "pass_at_k")):
        if against[key]:
            lines.append(sentence(name, against[key]))
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _tasks(found: Mapping[str, Any]) -> str:
    scores = found["task_scores"]
    rows = [
        [
            escape(one["task_id"]), escape(one["repository"]), escape(one["language"]),
            f"{one['passed']} of {one['valid']}", str(one["void"]),
        ]
        for one in scores[:MAX_TASK_ROWS]
    ]  # fmt: skip
    return table(["task", "repository", "language", "passed|num", "void|num"], rows)


def _facts(facts: Mapping[str, Any]) -> str:
    return table(["", ""], [[escape(name), escape(shown(value))] for name, value in facts.items()])


def _rate(value: float | None) -> str:
    return "\u2013" if value is None or value != value else f"{value:.3f}"
