"""The tables of docs/algorithms.md as numbers, so that page and tests cannot drift apart."""

from pathlib import Path

import torch

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def table(*header: str) -> list[list[str]]:
    """Rows of the table with this header (its first cells), as text."""
    lines = PAGE.read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if cells(line)[: len(header)] == list(header)]
    assert len(starts) == 1, (header, starts)
    rows = []
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(cells(line))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]


def numbers(text: str) -> list[float]:
    """`-.5, 2` as the page writes it, with a true minus."""
    return [float(part.replace("\N{MINUS SIGN}", "-")) for part in text.split(",")]


def four_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(p, q, value) of the worked prefix, float64 [4]."""
    rows = {row[0]: row[1:] for row in table("token", "A", "B", "C", "D")}
    names = ("p, trainer", "q, sampler", "value")
    return tuple(  # type: ignore[return-value]
        torch.tensor([float(cell) for cell in rows[name]], dtype=torch.float64) for name in names
    )


def two_sequences() -> tuple[torch.Tensor, torch.Tensor]:
    """(log-ratios, sequence ids) of the worked sessions, float64 and int64 [6]."""
    ratios = [numbers(row[1]) for row in table("sequence", "r")]
    flat = torch.tensor([r for row in ratios for r in row], dtype=torch.float64)
    ids = torch.arange(len(ratios)).repeat_interleave(torch.tensor([len(r) for r in ratios]))
    return flat.log(), ids
