"""Writes the tables of `docs/accelerators.md` from the YAML and the capability matrix.

    .venv/bin/python scripts/capability_reference.py

The test `tests/unit/plan/test_capability_reference.py` holds the page up to date.
"""

from pathlib import Path

from rlmix.config.compose import load_config
from rlmix.plan.accelerators import architecture
from rlmix.plan.capabilities import Row
from rlmix.plan.matrix import ROWS

PAGE = Path(__file__).parents[1] / "docs" / "accelerators.md"
CHIPS = ("<!-- chips begin -->\n", "<!-- chips end -->\n")
MATRIX = ("<!-- rows begin -->\n", "<!-- rows end -->\n")


def chips() -> str:
    """The accelerators as Markdown."""
    head = (
        "| name | kernels | GB | TB/s | BF16 | FP8 | NVFP4 | link | Ray label | USD/h | price |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    )
    rows = []
    for name, chip in load_config().config.accelerators.items():
        rates = (chip.bf16_tflops, chip.fp8_tflops, chip.nvfp4_tflops)
        cells = [
            f"`{name}`",
            architecture(chip),
            f"{chip.memory_gb:g}",
            f"{chip.bandwidth_tb_s:g}",
            *("-" if rate is None else f"{rate:g}" for rate in rates),
            chip.link,
            chip.ray_label,
            "-" if chip.usd_per_hour is None else f"{chip.usd_per_hour:.2f}",
            chip.price_source,
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    return head + "".join(rows)


def matrix() -> str:
    """The rows as Markdown: refusals first, then notes, then what was seen to work."""
    head = (
        "| row | verdict | when | because | set instead | source |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    order = ("refused", "note", "works")
    ranked = sorted(ROWS, key=lambda row: order.index(row.verdict))
    return head + "".join(_line(row) for row in ranked)


def _line(row: Row) -> str:
    when = "; ".join(f"{key}={'/'.join(values)}" for key, values in row.when.items())
    since = f"; from {row.since}" if row.since != "0" else ""
    before = f"; before {row.before}" if row.before else ""
    ways = " or ".join(" ".join(f"{k}={v}" for k, v in way.items()) for way in row.instead)
    links = " ".join(f"[{index}]({url})" for index, url in enumerate(row.source.split(), start=1))
    cells = [f"`{row.name}`", row.verdict, f"{when}{since}{before}", row.reason, ways or "-", links]
    return f"| {' | '.join(cells)} |\n"


def page(text: str) -> str:
    """`docs/accelerators.md` with the tables as they should be."""
    for (begin, end), table in ((CHIPS, chips()), (MATRIX, matrix())):
        head, rest = text.split(begin)
        text = f"{head}{begin}{table}{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
