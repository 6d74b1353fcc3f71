"""Which samples share a micro-batch, so that no rank waits for another for long.

Invariants: every sample is in exactly one group; no group exceeds the budget; with several ranks
the number of groups is a multiple of theirs wherever there are samples enough; the result depends
on the lengths only.
"""

from collections.abc import Sequence

from rlmix.core.errors import DataError


def split_rows(lengths: Sequence[int], *, max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Indices grouped so that count times longest stays within `max_tokens`, longest first.

    Sorting by length keeps padding small; ties keep their order. With several ranks the smallest
    budget is taken that gives no more groups than a multiple of their number, so that groups of a
    round are alike.
    """
    groups = _rows(lengths, max_tokens=max_tokens)
    wanted = _multiple(len(groups), num_ranks)
    if num_ranks == 1 or not groups or wanted > len(lengths):
        return groups
    least, most = max(lengths), max_tokens
    while least < most:
        middle = (least + most) // 2
        if len(_rows(lengths, max_tokens=middle)) <= wanted:
            most = middle
        else:
            least = middle + 1
    groups = _rows(lengths, max_tokens=most)
    while len(groups) < wanted:
        # One budget may give too few groups and the next too many; then the largest is halved.
        largest = max(
            range(len(groups)),
            key=lambda place: (len(groups[place]) > 1) * _size(groups[place], lengths),
        )
        group = groups[largest]
        half = len(group) // 2
        groups[largest : largest + 1] = [group[:half], group[half:]]
    return groups


def split_documents(lengths: Sequence[int], *, max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Indices grouped so that the lengths of a group add up to at most `max_tokens`.

    Longest first, each into the group with the fewest tokens so far, with as few groups as that
    takes (a multiple of the ranks): groups come out nearly equal.
    Source: Graham, Bounds on Multiprocessing Timing Anomalies (1969), "longest processing time".
    """
    order = _longest_first(lengths, max_tokens=max_tokens)
    if not order:
        return []
    count = _multiple(-(-sum(lengths) // max_tokens), num_ranks)
    while True:
        count = min(count, len(order))
        groups: list[list[int]] = [[] for _ in range(count)]
        totals = [0] * count
        for index in order:
            place = min(range(count), key=lambda place: (totals[place], place))
            groups[place].append(index)
            totals[place] += lengths[index]
        if max(totals) <= max_tokens:
            return groups
        count += num_ranks


def _rows(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for index in _longest_first(lengths, max_tokens=max_tokens):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and (len(groups[-1]) + 1) * longest <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _longest_first(lengths: Sequence[int], *, max_tokens: int) -> list[int]:
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if order and lengths[order[0]] > max_tokens:
        raise DataError(
            f"batch: a sample of {lengths[order[0]]} tokens does not fit into "
            f"trainer.micro_batch_tokens={max_tokens}; raise it, or lower "
            "session.max_context_tokens"
        )
    return order


def _size(group: Sequence[int], lengths: Sequence[int]) -> int:
    return len(group) * lengths[group[0]]


def _multiple(count: int, num_ranks: int) -> int:
    return -(-count // num_ranks) * num_ranks
