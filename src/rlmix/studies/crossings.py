"""How often each early warning spoke, by what became of the cell. For either study."""

from collections.abc import Callable, Mapping, Sequence

from rlmix.studies.collapse import VERDICTS, Outcome
from rlmix.studies.records import Record, markdown_table, values_of

Warnings = Mapping[str, tuple[str, float]]
"""Signal to its title and its line."""


def warning_titles(warnings: Warnings) -> list[str]:
    return [f"{title} above {threshold:g}" for title, threshold in warnings.values()]


def crossed(record: Record, key: str, threshold: float) -> bool | None:
    """Whether the signal was ever beyond the line; None where it was not measured."""
    if not record["curves"].get(key):
        return None
    return any(value > threshold for value in values_of(record, key))


def crossing_table(
    records: Sequence[Record], *, judge: Callable[[Record], Outcome], warnings: Warnings
) -> str:
    """Markdown: in how many cells of each verdict a signal was ever beyond its line."""
    rows = []
    for verdict in VERDICTS:
        cells = [record for record in records if judge(record).verdict == verdict]
        texts = [verdict, str(len(cells))]
        for key, (_, threshold) in warnings.items():
            found = [crossed(record, key, threshold) for record in cells]
            texts.append(f"{found.count(True)} of {len(found) - found.count(None)}")
        rows.append(texts)
    return markdown_table(["verdict", "cells", *warning_titles(warnings)], rows)
