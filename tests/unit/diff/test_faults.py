"""Planted faults: the right operator and the right class for each, and nothing beside it."""

from functools import cache

import pytest

from rlmix.diff.faults import FROZEN, Fault, planted
from rlmix.diff.judge import replay
from rlmix.diff.lab import ground, sides, text
from rlmix.diff.later_faults import LATER, PAIRS
from rlmix.diff.program import run, trace
from tests.unit.diff.lab import limits

ALL = FROZEN + LATER


def named(name: str) -> Fault:
    return next(fault for fault in ALL if fault.name == name)


@cache
def laboratory(is_moe: bool):
    """(ground, trainer, float64, the trainer's trace); nothing changes them."""
    found = ground(is_moe=is_moe)
    trainer, reference = sides(found)
    return found, trainer, reference, trace(trainer, text())


def findings(is_moe: bool, *faults: Fault) -> set[tuple[str, str]]:
    """(operator, class) of everything that the diagnosis names."""
    found, trainer, reference, seen = laboratory(is_moe)
    told = replay(trainer, planted(found, *faults), reference, seen.steps, limits())
    return {(one.place.name, one.judgement.cause) for one in told}


def fits(found: tuple[str, str], fault: Fault) -> bool:
    return found[0] == fault.operator and found[1] in (fault.cause, *fault.also)


@pytest.mark.parametrize(
    ("fault", "is_moe"),
    [(fault, True) for fault in ALL]
    # The others are planted into a dense model by scripts/diff_faults.py.
    + [(fault, False) for fault in ALL[::3] if not fault.needs_experts],
    ids=lambda value: value.name if isinstance(value, Fault) else ("moe" if value else "dense"),
)
def test_a_planted_fault_is_named_and_nothing_else(fault: Fault, is_moe: bool) -> None:
    told = findings(is_moe, fault)
    assert told
    assert all(fits(one, fault) for one in told), told


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
def test_without_a_fault_nothing_differs_and_nothing_is_named(is_moe: bool) -> None:
    found = ground(is_moe=is_moe)
    trainer, _ = sides(found)
    assert bool((run(found.side, text()) == run(trainer, text())).all())
    assert findings(is_moe) == set()


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_two_faults_at_once_are_both_named(pair: tuple[str, str]) -> None:
    first, second = (named(name) for name in pair)
    told = findings(True, first, second)
    assert {first.operator, second.operator} == {operator for operator, _ in told}
    for fault in (first, second):
        assert any(fits(one, fault) for one in told), (fault.name, told)


@pytest.mark.parametrize("fault", FROZEN, ids=lambda fault: fault.name)
def test_a_planted_fault_moves_logprobs_or_is_too_small_to(fault: Fault) -> None:
    found, _, _, seen = laboratory(True)
    gap = (run(planted(found, fault), text()) - seen.logprobs_T).abs().mean()
    assert float(gap) > 0 or fault.cause == "order"
