"""The report's section on alarms: what was raised, and how far each pool is from the noise."""

from collections.abc import Mapping
from html import escape
from typing import Any

from rlmix.observe import figures
from rlmix.observe.report_charts import card
from rlmix.observe.report_data import ReportData
from rlmix.observe.report_tables import table

OUT_KINDS = ("pool_quarantined", "pool_released", "quarantine_refused")


def alarm_cards(data: ReportData) -> list[str]:
    return [_alarms(data), _noise(data)]


def _alarms(data: ReportData) -> str:
    """From events.jsonl, so that a run that died shows them too."""
    rows = [_alarm_row(event, data) for event in data.events if event.get("kind") == "alarm_raised"]
    head = ["alarm", "pool", "since|num", "raised|num", "cleared|num", "action", "what"]
    body = table(head, rows) if rows else '<p class="empty">No alarm was raised.</p>'
    out = [
        [str(event.get("step", figures.MISSING)), escape(event["kind"]), escape(event["reason"])]
        for event in data.events
        if event.get("kind") in OUT_KINDS
    ]
    if out:
        body += table(["after step|num", "pool", "why"], out)
    return card(
        "Alarms",
        "Rules over the metrics of the steps, with limits in conf/alarms. Steps that a later "
        "attempt ran again may be listed twice.",
        body,
        is_wide=True,
    )


def _alarm_row(event: Mapping[str, Any], data: ReportData) -> list[str]:
    cleared = [
        other["step"]
        for other in data.events
        if other.get("kind") == "alarm_cleared"
        and (other.get("alarm"), other.get("pool")) == (event.get("alarm"), event.get("pool"))
        and other.get("since_step") == event.get("since_step")
    ]
    return [
        escape(str(event.get("alarm"))),
        escape(event.get("pool") or "all"),
        str(event.get("since_step", figures.MISSING)),
        str(event.get("step", figures.MISSING)),
        str(cleared[-1]) if cleared else figures.MISSING,
        escape(str(event.get("action"))),
        escape(str(event.get("reason"))),
    ]


def _noise(data: ReportData) -> str:
    floor = _mean(data, "mismatch/noise_floor_mean_abs")
    floor_k3 = _mean(data, "mismatch/noise_floor_k3")
    head = [
        "pool",
        "mean difference|num",
        "times the noise|num",
        "k3|num",
        "masked|num",
        "outside|num",
        "ESS|num",
    ]
    rows = []
    for pool in [None, *data.pool_names]:
        group = "" if pool is None else f"by_pool/{pool}/"
        mean_abs = _mean(data, f"mismatch/{group}mean_abs")
        if mean_abs is None:
            continue
        times = mean_abs / floor if floor else None
        rows.append(
            [
                escape(pool or "all pools"),
                figures.small(mean_abs),
                figures.decimal(times, 1),
                figures.small(_mean(data, f"mismatch/{group}k3_kl")),
                figures.percent(_mean(data, f"correction/{group}masked_frac"), 2),
                figures.percent(_mean(data, f"correction/{group}outside_frac"), 2),
                figures.percent(_mean(data, f"correction/{group}ess_frac"), 1),
            ]
        )
    if not rows:
        body = (
            '<p class="empty">No data: no step in metrics.jsonl has '
            "<code>mismatch/mean_abs</code>.</p>"
        )
    else:
        own = ["trainer alone", figures.small(floor), "1.0" if floor else figures.MISSING]
        rows.append([*own, figures.small(floor_k3), *[figures.MISSING] * 3])
        body = table(head, rows)
    return card(
        "Mismatch beside the noise of the trainer",
        "Means over all steps, nats per sampled token. The last row is what two evaluations of "
        "the same weights differ by, with other batches and another order of sums: a pool near it "
        "cannot be told from the trainer.",
        body,
        is_wide=True,
    )


def _mean(data: ReportData, key: str) -> float | None:
    values = [value for _, value in data.column(key)]
    return sum(values) / len(values) if values else None
