"""report.json, report.md and report.html of a comparison."""

import json
from collections.abc import Iterator
from pathlib import Path

from rlmix.diff.report_data import DiffReport, PoolFinding
from rlmix.diff.report_figures import bars, by_position, heat_map, scatter


def write_report(found: DiffReport, folder: Path) -> None:
    """Write all three; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(found.to_dict(), indent=2) + "\n")
    (folder / "report.md").write_text(markdown(found))
    (folder / "report.html").write_text(html(found))


def markdown(found: DiffReport) -> str:
    """The comparison as a page."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: DiffReport) -> Iterator[str]:
    yield "# Logprobs of trainer and pools"
    yield ""
    yield (
        f"{found.source}; {found.tokens} tokens, {found.mismatch_count} differ. Noise floor of the "
        f"trainer: {found.noise_floor:.3g} nats."
    )
    for obstacle in found.obstacles:
        yield f"\n**Not comparable** ({obstacle.cause}): {obstacle.sentence}"
    yield ""
    yield "| pool | tokens | differ | mean abs | max abs | k3 | verdict | class | share | limit |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for pool in found.pools:
        yield _row(pool)
    for pool in found.pools:
        yield from _pool_lines(pool)
    yield ""
    yield f"Not tested: {'; '.join(found.not_tested)}."
    yield ""
    yield "Machine: " + ", ".join(f"{name} {value}" for name, value in found.machine.items()) + "."


def _row(pool: PoolFinding) -> str:
    gap, share = pool.total, pool.by_class.get(pool.main_class, 0.0)
    limit = "none differ" if pool.must_be_equal else f"{pool.tolerance_nats:g}"
    cells = (
        pool.name, str(gap.tokens), str(gap.mismatch_count), f"{gap.mean_abs:.4g}",
        f"{gap.max_abs:.4g}", f"{gap.k3_kl:.2g}", pool.verdict, pool.main_class, f"{share:.0%}",
        f"{limit}: {'ok' if pool.is_within else 'above'}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _pool_lines(pool: PoolFinding) -> Iterator[str]:
    yield ""
    yield f"## {pool.name}"
    yield ""
    yield f"`{pool.numerics}`"
    yield ""
    yield "| edge | differ | mean abs | max abs | mean | k3 | k3 reverse |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, gap in {"total": pool.total, **pool.edges}.items():
        yield (
            f"| {name.replace('_', ' - ')} | {gap.mismatch_count} | {gap.mean_abs:.3g} | "
            f"{gap.max_abs:.3g} | {gap.signed_mean:+.2g} | {gap.k3_kl:.2g} | {gap.k3_reverse:.2g} |"
        )
    if pool.hints:
        yield ""
        yield from (f"* hint: {hint}" for hint in pool.hints)
    if pool.causes:
        yield ""
        yield "| operator | layers | class | share | alone | left | sure | evidence | next |"
        yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for cause in pool.causes:
        layers = ", ".join(map(str, cause.layers)) if cause.layers != (-1,) else "-"
        yield (
            f"| {cause.operator} | {layers} | {cause.cause} | {cause.share:.1%} | "
            f"{cause.alone:.2g} | {cause.left:.2g} | {cause.confidence:.2f} | {cause.evidence} | "
            f"{cause.next_experiment} |"
        )


def html(found: DiffReport) -> str:
    """One page without scripts or other files: the figures, then the Markdown as it is."""
    from html import escape

    parts = [
        "<!doctype html><meta charset=utf-8><title>diff-logprobs</title>",
        "<style>body{font:15px sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
        "svg{max-width:100%;height:auto}pre{white-space:pre-wrap}figure{margin:1em 0}</style>",
        "<h1>Logprobs of trainer and pools</h1>",
        bars(found.pools),
    ]
    for pool in found.pools:
        parts.append(f"<h2>{escape(pool.name)}</h2>")
        parts.append(scatter(pool))
        parts.append(by_position(pool))
        if pool.heat_LT is not None:
            parts.append(heat_map(pool))
    parts.append(f"<h2>In words</h2><pre>{escape(markdown(found))}</pre>")
    return "\n".join(parts)
