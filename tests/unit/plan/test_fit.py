"""What does not fit is told by what takes the room, with a change that fits."""

import re

import pytest

from rlmix.core.errors import PlanError
from tests.unit.plan.qwen36 import planned


def refusal(*overrides: str) -> str:
    with pytest.raises(PlanError) as caught:
        planned(*overrides)
    return str(caught.value)


def changes(text: str) -> list[tuple[str, ...]]:
    """The alternatives that a refusal names, each as the arguments to give."""
    last = text.rpartition("; set ")[2].removesuffix(" or less")
    return [tuple(change.split()) for change in last.split(" or ")]


@pytest.mark.parametrize(
    "asked",
    [
        ("pools.h100_bf16.tp=1",),
        ("pools.h100_bf16.memory_frac=0.3",),
        ("pools.h200_bf16.memory_frac=0.1",),
        ("pools.h100_bf16.max_running=4000",),
        ("pools.h100_bf16.memory_frac=0.3", "pools.h100_bf16.max_running=4000"),
        ("pools.h200_fp8.tp=8",),
        ("pools.a100.tp=3",),
    ],
)
def test_every_change_that_a_refusal_names_works(asked: tuple[str, ...]) -> None:
    for change in changes(refusal(*asked)):
        planned(*asked, *change)


def test_too_many_running_requests_are_the_cause_when_their_states_are() -> None:
    said = refusal("pools.h100_bf16.max_running=4000")
    # 5 slots of 64.4 MB (62.9 of state, 1.5 of convolution) for each request: 1,199 GiB.
    assert said.startswith("pools.h100_bf16.max_running: got 4000 on h100")
    assert "take 1199.3 GiB" in said
    (most,) = re.findall(r"max_running=(\d+) or less", said)
    planned(f"pools.h100_bf16.max_running={most}")
    assert "max_running" in refusal(f"pools.h100_bf16.max_running={int(most) + 1}")


def test_kv_heads_that_do_not_copy_evenly_are_not_called_copies() -> None:
    said = refusal("pools.a100.tp=3")
    assert "2 KV heads neither divide by 3 nor copy evenly" in said
    assert "stored" not in said


def test_a_model_that_no_size_holds_asks_for_larger_accelerators() -> None:
    assert refusal("pools.h100_bf16.memory_frac=0.02").endswith("take larger accelerators")
