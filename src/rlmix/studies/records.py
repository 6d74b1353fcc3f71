"""Records of both studies: how they are written, chosen and averaged.

Invariant: a record is one JSON document with `arm`, `fleet`, `seed` and `curves` ([update, value]
by name); it is complete or absent.
"""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmix.observe.jsonl import write_atomically
from rlmix.studies.collapse import smoothed

Record = Mapping[str, Any]

SIGNIFICANT_DIGITS = 4


def short(value: float) -> float:
    """As records keep it."""
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


def write_record(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(record, separators=(",", ":")) + "\n").encode())


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every complete record, in the order of names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def those_with(records: Sequence[Record], **wanted: object) -> list[Record]:
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def those_of_age(records: Sequence[Record], *, fresh: bool) -> list[Record]:
    """Of the token study: with samplers that got new weights at every update, or later."""
    return [r for r in records if (r["refresh_every"] == 1) == fresh]


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(texts) + " |" for texts in lines)


def values_of(record: Record, key: str) -> list[float]:
    """A curve without its updates."""
    return [value for _, value in record["curves"][key]]


def mean_and_span(values: Sequence[float], digits: int) -> str:
    """`0.98 (0.97 to 0.99)`: over seeds; one seed has no span."""
    text = f"{statistics.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text


def mean_curve(
    records: Sequence[Record], key: str, *, window_steps: int, most_points: int = 80
) -> list[tuple[float, float]]:
    """(update, mean over the records of the smoothed curve), to the end of the shortest."""
    curves = [smoothed(values_of(record, key), window_steps) for record in records]
    shortest = min(map(len, curves))
    steps = range(0, shortest, max(1, shortest // most_points))
    return [(float(i + 1), statistics.mean(curve[i] for curve in curves)) for i in steps]
