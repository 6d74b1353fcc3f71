"""How `rlmix diff-logprobs` shows a comparison in a terminal."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from rlmix.diff.report_data import DiffReport, PoolFinding
    from rlmix.diff.statistics import Gap


MOST_TOLD = 3
"""Causes of a pool whose evidence is printed; the document has all."""


def diff_view(found: "DiffReport") -> "RenderableType":
    """Obstacles, numbers by pool, causes by pool, noise floor, what was not tested."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    for obstacle in found.obstacles:
        parts.append(Text(f"not comparable ({obstacle.cause}): {obstacle.sentence}", style="red"))
    if found.pools:
        parts += [_numbers(found), _more_numbers(found), _edges(found)]
    for pool in found.pools:
        if pool.causes:
            parts.append(_causes(pool))
            parts += [Text(f"  {c.operator}: {c.evidence}") for c in pool.causes[:MOST_TOLD]]
        parts += [Text(f"  hint: {hint}") for hint in pool.hints]
    parts += [Text(line) for line in _closing(found)]
    return Group(*parts)


def _rows(found: "DiffReport") -> "Iterator[tuple[str, Gap, str, bool]]":
    for pool in found.pools:
        limit = "none differ" if pool.must_be_equal else f"{pool.tolerance_nats:g}"
        yield pool.name, pool.total, limit, pool.is_within
    if found.total is not None:
        yield "all", found.total, "", found.is_within


def _numbers(found: "DiffReport") -> "Table":
    table = _table(
        "pool", "tokens", "differ", "mean |d|", "max |d|", "k3", "limit", "",
        title="trainer - recorded, nats",
    )  # fmt: skip
    for name, gap, limit, is_within in _rows(found):
        table.add_row(
            name,
            str(gap.tokens),
            str(gap.mismatch_count),
            f"{gap.mean_abs:.4g}",
            f"{gap.max_abs:.4g}",
            f"{gap.k3_kl:.2g}",
            limit,
            "ok" if is_within else "ABOVE",
        )
    return table


def _more_numbers(found: "DiffReport") -> "Table":
    table = _table(
        "pool", "p50 |d|", "p99 |d|", "mean d", "k3 reverse", "mean |dp|", "first", "stored as"
    )
    for name, gap, _, _ in _rows(found):
        table.add_row(
            name,
            f"{gap.p50_abs:.3g}",
            f"{gap.p99_abs:.3g}",
            f"{gap.signed_mean:+.2g}",
            f"{gap.k3_reverse:.2g}",
            f"{gap.prob_diff_mean:.2g}",
            "-" if gap.first_mismatch is None else str(gap.first_mismatch),
            gap.logprob_dtype,
        )
    return table


def _edges(found: "DiffReport") -> "Table":
    names = list(found.pools[0].edges)
    title = "where it arises: mean |d| of each edge, and tokens that differ"
    table = _table("pool", *(name.replace("_", " - ") for name in names), title=title)
    for pool in found.pools:
        edges = (pool.edges[name] for name in names)
        table.add_row(pool.name, *(f"{e.mean_abs:.3g} ({e.mismatch_count})" for e in edges))
    return table


def _causes(pool: "PoolFinding") -> "Table":
    share = pool.by_class.get(pool.main_class, 0.0)
    title = f"{pool.name}: {pool.verdict}, {pool.main_class} ({share:.0%})  {pool.numerics}"
    table = _table("operator", "class", "share", "alone", "left", "sure", title=title)
    for cause in pool.causes:
        table.add_row(
            cause.operator,
            cause.cause,
            f"{cause.share:.1%}",
            f"{cause.alone:.2g}",
            f"{cause.left:.2g}",
            f"{cause.confidence:.2f}",
        )
    return table


def _closing(found: "DiffReport") -> Iterator[str]:
    ways = ", ".join(f"{name} {value:.2g}" for name, value in found.noise.items())
    yield f"noise floor of the trainer: {found.noise_floor:.3g} nats ({ways})"
    for pool in found.pools:
        if pool.causes:
            yield f"{pool.name}: next: {pool.causes[0].next_experiment}"
        if pool.assembly_max_abs:
            yield (
                f"{pool.name}: its operators in order are {pool.assembly_max_abs:.2g} nats from "
                "what it recorded, so shares are approximate"
            )
    yield f"not tested: {'; '.join(found.not_tested)}"
    yield "machine: " + ", ".join(f"{name} {value}" for name, value in found.machine.items())


def _table(*columns: str, title: str | None = None) -> "Table":
    from rich.table import Table

    return Table(*columns, title=title, title_justify="left")
