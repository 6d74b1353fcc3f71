"""The tables of the report: numbers that a plot would hide."""

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from rlmix.observe import figures, svg
from rlmix.observe.closing_table import evaluation_lines
from rlmix.observe.report_charts import card
from rlmix.observe.report_data import PoolFacts, ReportData

MAX_EVENTS = 300
_TROUBLE = ("_lost", "_failed", "_refused", "_repaired", "_quarantined", "_superseded", "_raised")


def evaluation_card(data: ReportData) -> str:
    evaluation = data.summary.get("eval")
    body = table(
        None, [[escape(label), escape(text)] for label, text in evaluation_lines(evaluation)]
    )
    if evaluation and evaluation.get("ci95") and evaluation.get("difference") is not None:
        low, high = evaluation["ci95"]
        body += svg.interval_chart(
            low,
            evaluation["difference"],
            high,
            label="trained minus warm start, pass rate on the same held-out tasks",
        )
    return card(
        "Closing evaluation",
        "Both policies on the same fixed held-out tasks with the same seeds; the 95 % interval "
        "is paired.",
        body,
    )


def stop_reasons_card(data: ReportData) -> str:
    reasons, outcomes = data.counts("stop_reasons"), data.counts("outcomes")
    voids = data.counts("void_reasons")
    body = _shares("why the session ended", reasons) + _shares("verdict", outcomes)
    if voids:
        body += _shares("why it is void", voids)
    body = f'<div class="shares">{body}</div>'
    if not reasons:
        body = '<p class="empty">No trajectory was written.</p>'
    return card(
        "How sessions ended",
        "All training sessions. A void session is an infrastructure fault: it is counted here "
        "and is never a reward of 0.",
        body,
    )


def pools_card(data: ReportData) -> str:
    pools = data.pools()
    if not pools:
        return card("Pools", "", '<p class="empty">No pool is known.</p>', is_wide=True)
    head = [
        "pool",
        "accelerator",
        "weights / act. / KV",
        "replicas|num",
        "sessions|num",
        "tokens|num",
        "reward|num",
        "k3 KL|num",
        "cost|num",
        "numerics key",
    ]
    rows = [
        [
            escape(pool.name),
            escape(_accelerator(pool)),
            escape(pool.formats or figures.MISSING),
            str(pool.replicas if pool.replicas is not None else figures.MISSING),
            figures.count(pool.sessions),
            figures.count(pool.tokens),
            figures.decimal(pool.reward),
            figures.small(pool.k3_kl),
            figures.usd(pool.usd),
            "<br>".join(f"<code>{escape(key)}</code>" for key in pool.numerics_keys)
            or "served no token",
        ]
        for pool in pools
    ]
    return card(
        "Pools",
        "What each pool computed with, and what it did over the whole run. The numerics key is "
        "what its replicas reported and what every sample carries. Replicas as planned.",
        table(head, rows),
        is_wide=True,
    )


def facts_card(data: ReportData) -> str:
    rows: list[list[str]] = []
    manifest = data.manifest
    if manifest:
        git = manifest.software.get("git") or {}
        revision = str(git.get("revision", "not a checkout"))[:12]
        packages = manifest.software.get("packages", {})
        machine = manifest.machine
        rows += [
            ["run id", f"<code>{escape(manifest.run_id)}</code>"],
            [
                "rlmix",
                escape(
                    f"{manifest.software.get('rlmix')}, git {revision}"
                    f"{' with local changes' if git.get('is_dirty') else ''}"
                ),
            ],
            ["Python", escape(str(manifest.software.get("python")))],
            ["packages", escape(", ".join(f"{name} {v}" for name, v in packages.items()))],
            [
                "machine",
                escape(
                    f"{machine.get('cpu_cores')} cores, {machine.get('memory_gib')} GiB, "
                    f"{machine.get('system')}, {machine.get('arch')}"
                ),
            ],
        ]
        for attempt in manifest.attempts:
            ended = attempt.ended_s
            length = figures.duration(ended - attempt.started_s) if ended else "no end recorded"
            reason = attempt.exit_reason or "no exit reason"
            text = f"from step {attempt.from_step}, {length}, {reason}"
            rows.append([f"attempt {attempt.number}", escape(text)])
    overrides = data.path / "overrides.txt"
    if overrides.is_file():
        given = overrides.read_text().split("\n")
        text = " ".join(f"<code>{escape(line)}</code>" for line in given if line)
        rows.append(["overrides", text or "none"])
    return card("Run facts", "From manifest.json.", table(None, rows))


def events_card(data: ReportData) -> str:
    if not data.events:
        return card("Events", "", '<p class="empty">events.jsonl has no event.</p>', is_wide=True)
    kinds = Counter(str(event.get("kind")) for event in data.events)
    counts = ", ".join(f"{kind} {number}" for kind, number in kinds.most_common())
    newest = data.events[-MAX_EVENTS:]
    left_out = len(data.events) - len(newest)
    rows, classes = [], []
    for event in newest:
        kind = str(event.get("kind"))
        rows.append(
            [
                figures.duration(event.get("run_s")),
                escape(kind),
                escape(str(event.get("reason", ""))),
                _fields(event),
            ]
        )
        classes.append("trouble" if kind.endswith(_TROUBLE) else "")
    hint = f"Kinds: {counts}." + (f" The oldest {left_out} are left out." if left_out else "")
    head = ["run time", "event", "reason", "facts"]
    return card(
        "Events and faults",
        hint,
        f'<div class="scroll tall">{table(head, rows, row_classes=classes)}</div>',
        is_wide=True,
    )


def table(
    head: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    *,
    row_classes: Sequence[str] | None = None,
) -> str:
    """An HTML table of cells that are HTML already; `name|num` aligns a column right."""
    kinds = [title.partition("|")[2] for title in head or ()]
    lines = []
    if head:
        cells = "".join(
            f'<th class="{kind}">{escape(title.partition("|")[0])}</th>'
            for title, kind in zip(head, kinds, strict=True)
        )
        lines.append(f"<thead><tr>{cells}</tr></thead>")
    lines.append("<tbody>")
    for number, row in enumerate(rows):
        row_class = f' class="{row_classes[number]}"' if row_classes and row_classes[number] else ""
        cells = ""
        for column, cell in enumerate(row):
            kind = kinds[column] if kinds else ""
            name = kind or ("nowrap" if column < (2 if head else 1) else "")
            tag = "td" if head or column else "th"
            cells += f'<{tag} class="{name}">{cell}</{tag}>'
        lines.append(f"<tr{row_class}>{cells}</tr>")
    lines.append("</tbody>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _accelerator(pool: PoolFacts) -> str:
    return f"{pool.accelerator} (emulated)" if pool.is_emulated else pool.accelerator


def _shares(title: str, counts: Counter[str]) -> str:
    total = sum(counts.values())
    rows = [
        [
            escape(name.replace("_", " ")),
            str(number),
            figures.percent(number / total),
            f'<span class="share" style="width:{110 * number / total:.0f}px"></span>',
        ]
        for name, number in counts.most_common()
    ]
    return table([title, "sessions|num", "share|num", ""], rows)


def _fields(event: dict[str, Any]) -> str:
    own = ("unix_s", "run_s", "attempt", "kind", "reason")
    shown = ", ".join(f"{key}={value}" for key, value in event.items() if key not in own)
    return f"<code>{escape(shown)}</code>" if shown else ""
