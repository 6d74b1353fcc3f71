"""The plots of the report. Each is a card: title, one sentence on how to read it, legend, chart.

A plot without data says which metric it needed, so that an empty place is never a riddle.
"""

from collections.abc import Callable, Sequence
from html import escape

from rlmix.observe import figures, svg
from rlmix.observe.report_data import ReportData
from rlmix.observe.svg import Axes, Points, Series

RUNNING_MEAN_STEPS = 5
TIME_PARTS = {
    "time/wait_s": "waiting for sessions",
    "time/batch_s": "building the batch",
    "time/train_s": "training",
    "time/publish_s": "publishing weights",
    "time/checkpoint_s": "checkpoint",
    "time/eval_s": "evaluation",
}
"""Wall time inside a step, by metric, in the order drawn; what is not measured is the rest."""


def learning_cards(data: ReportData) -> list[str]:
    return [_reward(data), _reward_by_pool(data)]


def correction_cards(data: ReportData) -> list[str]:
    return [_mismatch(data), _masked(data), _tail_ratio(data), _staleness(data)]


def fleet_cards(data: ReportData, *, marks: Sequence[tuple[float, str]]) -> list[str]:
    """Args:
    marks: (minutes of run time, text) of scale operations.
    """
    return [_replicas(data, marks), _cost(data), _time_split(data)]


def card(title: str, hint: str, body: str, *, is_wide: bool = False) -> str:
    return (
        f'<section class="card{" wide" if is_wide else ""}"><h3>{escape(title)}</h3>'
        f'<p class="hint">{escape(hint)}</p>{body}</section>'
    )


def running_mean(points: Points, width: int) -> Points:
    """Mean of each point and up to `width - 1` before it."""
    means = []
    for end in range(1, len(points) + 1):
        part = points[max(0, end - width) : end]
        means.append((points[end - 1][0], sum(y for _, y in part) / len(part)))
    return means


def _chart(series: Sequence[Series], drawn: str, needed: str, *, blocks: bool = False) -> str:
    """Legend and chart, or the sentence that says what is missing."""
    present = [line for line in series if line.points]
    if not present or not drawn:
        key = f"<code>{escape(needed)}</code>"
        return f'<p class="empty">No data: no step in metrics.jsonl has {key}.</p>'
    swatch = svg.block_swatch if blocks else svg.key_swatch
    keys = "".join(
        f"<span>{swatch(line.slot)}{escape(line.name)}</span>"
        for line in present
        if len(present) > 1
    )
    legend = f'<div class="legend">{keys}</div>' if keys else ""
    return legend + drawn


def _lines(
    data: ReportData,
    series: Sequence[Series],
    *,
    y_label: str,
    needed: str,
    number: Callable[[float], str],
    y_low: float | None = None,
    y_high: float | None = None,
    is_log: bool = False,
    height: int = 250,
) -> str:
    axes = Axes(
        x_label="optimizer step",
        y_label=y_label,
        y_low=y_low,
        y_high=y_high,
        is_log=is_log,
        marks=data.resumed_at,
        height=height,
    )
    return _chart(series, svg.line_chart(series, axes, number=number), needed)


def _reward(data: ReportData) -> str:
    points = data.column("reward/mean")
    series = [
        Series(name="mean of the step", points=points, slot=5),
        Series(
            name=f"mean of {RUNNING_MEAN_STEPS} steps",
            points=running_mean(points, RUNNING_MEAN_STEPS),
            slot=0,
            is_thick=True,
        ),
    ]
    body = _lines(
        data,
        series,
        y_label="reward (0 to 1)",
        needed="reward/mean",
        number=figures.decimal,
        height=400,
    )
    return card(
        "Reward",
        "Share of valid sessions whose hidden tests pass. Training tasks change from step to "
        "step; the closing evaluation uses fixed held-out tasks.",
        body,
    )


def _reward_by_pool(data: ReportData) -> str:
    everywhere = Series(name="all pools", points=data.column("reward/mean"), slot=-1)
    by_pool = [
        Series(
            name=name,
            points=running_mean(data.column(f"reward/by_pool/{name}"), RUNNING_MEAN_STEPS),
            slot=slot,
        )
        for slot, name in enumerate(data.pool_names)
    ]
    present = [series for series in by_pool if series.points]
    values = [y for series in present for _, y in series.points]
    panels = []
    for series in present:
        axes = Axes(
            x_label="step",
            y_label="reward",
            width=300,
            height=150,
            y_low=max(0.0, min(values) - 0.05),
            y_high=min(1.0, max(values) + 0.05),
        )
        reference = Series(
            name="all pools", points=running_mean(everywhere.points, RUNNING_MEAN_STEPS), slot=-1
        )
        drawn = svg.line_chart([reference, series], axes, number=figures.decimal)
        panels.append(f"<div><h4>{escape(series.name)}</h4>{drawn}</div>")
    body = f'<div class="panels">{"".join(panels)}</div>'
    if not panels:
        body = _chart([], "", "reward/by_pool/<pool>")
    return card(
        "Reward by pool",
        f"Mean of {RUNNING_MEAN_STEPS} steps; the grey line is all pools together. A pool that "
        "stays below it samples worse, or gets harder tasks.",
        body,
    )


def _mismatch(data: ReportData) -> str:
    series = [
        Series(name=name, points=data.column(f"mismatch/by_pool/{name}/k3_kl"), slot=slot)
        for slot, name in enumerate(data.pool_names)
    ]
    if not any(line.points for line in series):
        series = [Series(name="all pools", points=data.column("mismatch/k3_kl"), slot=0)]
    noise = data.column("mismatch/noise_floor_k3")
    series.append(Series(name="trainer alone", points=noise, slot=-1))
    body = _lines(
        data,
        series,
        y_label="k3 KL (nats per token)",
        needed="mismatch/by_pool/<pool>/k3_kl",
        number=figures.small,
        is_log=True,
        height=280,
    )
    return card(
        "Mismatch between trainer and samplers",
        "k3 estimate on the sampled tokens, logarithmic; values of exactly 0 are not drawn. "
        "Number formats set the level, staleness adds to it.",
        body,
    )


def _masked(data: ReportData) -> str:
    points = data.column("correction/masked_frac", scale=100)
    body = _lines(
        data,
        [Series(name="masked", points=points, slot=0)],
        y_label="masked tokens (%)",
        needed="correction/masked_frac",
        number=lambda value: f"{value:.2f} %",
        y_low=0.0,
    )
    return card(
        "Masked share",
        "Sampled tokens left out of the loss, because trainer and sampler disagree on them.",
        body,
    )


def _tail_ratio(data: ReportData) -> str:
    body = _lines(
        data,
        [
            Series(name="of the centering", points=data.column("correction/sc_tail_ratio"), slot=0),
            Series(
                name="of recorded heads", points=data.column("correction/head_tail_ratio"), slot=1
            ),
        ],
        y_label="SC tail ratio",
        needed="correction/sc_tail_ratio",
        number=figures.decimal,
    )
    return card(
        "Score-centering tail ratio",
        "Probability outside the recorded candidates, sampler over trainer: 1 is consistent; far "
        "from 1 the centering rests on a poor model of the tail. With kept sets it is 1 by "
        "definition; heads of the whole vocabulary, recorded on few turns, are then the alarm.",
        body,
    )


def _staleness(data: ReportData) -> str:
    series = [
        Series(name="oldest token", points=data.column("staleness/max_versions"), slot=1),
        Series(name="mean", points=data.column("staleness/mean_versions"), slot=0),
    ]
    body = _lines(
        data,
        series,
        y_label="versions behind",
        needed="staleness/mean_versions",
        number=lambda value: f"{value:.2f}",
        y_low=0.0,
    )
    return card(
        "Staleness",
        "How many weight versions the trainer was ahead of the tokens that it trained on.",
        body,
    )


def _replicas(data: ReportData, marks: Sequence[tuple[float, str]]) -> str:
    series = [
        Series(name=name, points=data.over_time(f"pools/{name}/replicas"), slot=slot)
        for slot, name in enumerate(data.pool_names)
    ]
    axes = Axes(x_label="run time (min)", y_label="replicas", y_low=0.0, x_step=0.01, marks=marks)
    drawn = svg.stacked_steps(
        [line for line in series if line.points], axes, number=lambda value: f"{value:.0f}"
    )
    return card(
        "Replicas over time",
        "Replicas that serve in each pool, stacked; one reading per step. Lines mark where a scale "
        "operation begins and ends.",
        _chart(series, drawn, "pools/<pool>/replicas", blocks=True),
    )


def _cost(data: ReportData) -> str:
    series = [
        Series(name=name, points=data.column(f"cost/by_pool/{name}_usd"), slot=slot)
        for slot, name in enumerate(data.pool_names)
    ]
    if not any(line.points for line in series):
        series = [Series(name="all pools", points=data.column("cost/step_usd"), slot=0)]
    modelled = any(pool.is_emulated for pool in data.pools())
    axes = Axes(
        x_label="optimizer step",
        y_label="cost (USD per step)",
        y_low=0.0,
        marks=data.resumed_at,
    )
    drawn = svg.stacked_bars([s for s in series if s.points], axes, number=figures.usd)
    return card(
        "Cost per step by pool" + (" (modelled)" if modelled else ""),
        "Replica-seconds times the hourly price, idle time included."
        + (" The accelerators are emulated: nobody was charged this." if modelled else ""),
        _chart(series, drawn, "cost/by_pool/<pool>_usd", blocks=True),
    )


def _time_split(data: ReportData) -> str:
    whole = dict(data.column("time/step_s"))
    parts = [
        Series(name=name, points=data.column(key), slot=slot)
        for slot, (key, name) in enumerate(TIME_PARTS.items())
    ]
    parts = [part for part in parts if part.points]
    wait = dict(data.column("time/trainer_wait_frac"))
    if not parts and wait:
        waits = [(step, share * whole[step]) for step, share in wait.items() if step in whole]
        parts = [Series(name="waiting for sessions", points=waits, slot=0)]
    known = [sum(dict(part.points).get(step, 0.0) for part in parts) for step in whole]
    rest = [
        (step, max(0.0, seconds - measured))
        for (step, seconds), measured in zip(whole.items(), known, strict=True)
    ]
    if whole:
        parts.append(Series(name="rest of the step", points=rest, slot=7))
    axes = Axes(
        x_label="optimizer step", y_label="time (s)", y_low=0.0, marks=data.resumed_at, width=1160
    )
    drawn = svg.stacked_bars(parts, axes, number=lambda value: f"{value:.2f} s")
    return card(
        "Time split",
        "Wall time of each optimizer step. Sampling goes on during all of it; waiting means that "
        "the trainer had no full batch. Parts that overlap can add up to more than the step.",
        _chart(parts, drawn, "time/step_s", blocks=True),
        is_wide=True,
    )
