"""What the report says of prices: of a trajectory and of 1,000 trained tokens, step by step."""

from rlmix.observe import figures, svg
from rlmix.observe.report_charts import card
from rlmix.observe.report_data import ReportData
from rlmix.observe.report_tables import table
from rlmix.observe.svg import Axes, Series


def unit_costs_card(data: ReportData) -> str:
    """A line over the steps, and the means of the run; empty for runs that wrote no such keys."""
    points = data.column("cost/per_1k_tokens_usd")
    if not points:
        return ""
    axes = Axes(
        x_label="optimizer step",
        y_label="USD per 1,000 trained tokens",
        y_low=0.0,
        marks=data.resumed_at,
    )
    chart = svg.line_chart(
        [Series(name="all pools", points=points, slot=0)], axes, number=figures.usd
    )
    rows = [["all pools", *_means(data, "cost/trajectory_usd", "cost/per_1k_tokens_usd")]]
    for name in data.pool_names:
        keys = (f"cost/trajectory_by_pool/{name}_usd", f"cost/per_1k_tokens_by_pool/{name}_usd")
        rows.append([name, *_means(data, *keys)])
    head = ["pool", "a trajectory|num", "1,000 trained tokens|num"]
    modelled = any(pool.is_emulated for pool in data.pools())
    return card(
        "What training data costs" + (" (modelled)" if modelled else ""),
        "All replica-seconds of a step over what it trained: booting, idle, draining and "
        "quarantined replicas are paid for, dropped and void sessions are in the price. The table "
        "has means over steps.",
        chart + table(head, rows),
    )


def _means(data: ReportData, *keys: str) -> list[str]:
    cells = []
    for key in keys:
        values = [value for _, value in data.column(key)]
        cells.append(figures.usd(sum(values) / len(values)) if values else figures.MISSING)
    return cells
