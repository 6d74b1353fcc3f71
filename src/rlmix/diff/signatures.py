"""Stage 2: what the differences of logprobs alone hint at. Hints, never verdicts: order, casts, a
wrong epsilon and a stale layer all look alike here."""

from collections.abc import Iterator

import numpy as np


def signatures(
    d_P: np.ndarray, logprobs_P: np.ndarray, positions_P: np.ndarray, *, tile: int
) -> Iterator[str]:
    """One sentence for each pattern that is there.

    Args:
        d_P: first side minus second, nats; logprobs_P: of the first side.
        positions_P: of the tokens in their texts.
    """
    differs = d_P != 0
    if not differs.any():
        return
    size = np.abs(d_P)
    first = int(positions_P[differs].min())
    if first % tile == 0 and first and not differs[positions_P < first].any():
        yield f"the first difference is at position {first}, a multiple of {tile}: a tile's edge?"
    elif first > positions_P.min() + tile and differs[positions_P >= first].mean() > 0.9:
        yield (
            f"nothing differs before position {first} and almost everything from there on: "
            "a token, position or mask that changes there?"
        )
    mean, spread = float(d_P.mean()), float(d_P.std())
    if abs(mean) > 1e-3 and spread < 0.2 * abs(mean):
        yield f"a constant offset of {mean:+.4g} nats: renormalised over a kept set?"
    elif len(d_P) >= 32 and float(logprobs_P.std()) > 0:
        correlation = float(np.corrcoef(d_P, logprobs_P)[0, 1])
        if abs(correlation) > 0.8:
            yield (
                f"differences go with the logprob (correlation {correlation:+.2f}): another "
                "temperature, or shifted targets?"
            )
    if len(d_P) >= 32 and ((d_P >= 0).all() or (d_P <= 0).all()) and size.max() < 0.05:
        yield "all differences have one sign and are small: ids that do not exist, or a bound?"
    order = positions_P.argsort(kind="stable")
    half = len(order) // 2
    early, late = size[order[:half]].mean(), size[order[half:]].mean()
    if half >= 32 and late > 4 * max(early, 1e-12):
        yield f"later tokens differ {late / max(early, 1e-12):.1f} times as much as early ones"
    heavy = np.sort(size)[-max(1, len(size) // 100) :].sum() / size.sum()
    if len(size) >= 100 and heavy > 0.5:
        yield f"1 % of the tokens carry {heavy:.0%} of the difference: routing flips, or few states"
