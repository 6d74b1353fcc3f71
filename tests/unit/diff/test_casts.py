"""Where Transformers rounds, said independently: float64 sums with casts give its operators' bits.

So the difference of a BF16 pool to it is in its casts, and what order adds to them is small.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlmix.diff.program import Registers, Side, Text, trace
from rlmix.diff.trainer_side import TrainerSide
from rlmix.model.bundle import resolve_model

MOST = 1e-3
"""Share of an operator's numbers that another order of sums may tip into the next BF16 number."""


@pytest.fixture(scope="module")
def trainer() -> TrainerSide:
    return TrainerSide.load(resolve_model("bundled:tiny"), numerics="native", temperature=1.0)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text.of(torch.randint(0, 200, (48,), generator=torch.Generator().manual_seed(5)))


def cast(values: Tensor) -> Tensor:
    return values.bfloat16().double()


def rounded_once(reference: Side, name: str) -> Callable[[int, Registers], dict[str, Tensor]]:
    def operator(layer: int, r: Registers) -> dict[str, Tensor]:
        found = reference.operators[name](layer, r)
        return {key: cast(v) if key != "experts" else v for key, v in found.items()}

    return operator


def act(_: int, r: Registers) -> dict[str, Tensor]:
    gate, up = r["gate_up"].double().chunk(2, dim=-1)
    return {"inner": cast(cast(gate * gate.sigmoid()) * up)}


def combine(_: int, r: Registers) -> dict[str, Tensor]:
    weighted = cast(r["outputs"].double() * r["shares"].double()[:, :, None])
    return {"hidden": cast(r["hidden"].double() + cast(weighted.sum(1)))}


def apart(operator: Callable[[int, Registers], dict[str, Tensor]], steps, name: str) -> float:
    shares = []
    for step in (one for one in steps if one.place.name == name):
        found = operator(step.place.layer, step.inputs)
        for key in step.outputs.keys() - {"experts"}:
            shares.append((found[key].float() != step.outputs[key]).double().mean())
    return float(torch.stack(shares).mean())


@pytest.mark.parametrize("name", ["qkv", "router", "route", "gate_up", "down"])
def test_transformers_products_are_float64_rounded_once(
    trainer: TrainerSide, text: Text, name: str
) -> None:
    steps = trace(trainer.side, text).steps
    assert apart(rounded_once(trainer.reference, name), steps, name) < MOST
    never = trainer.reference.operators[name]
    assert apart(never, steps, name) > 0.5, "without the cast hardly a number is the same"


@pytest.mark.parametrize(("name", "operator"), [("act", act), ("combine", combine)])
def test_transformers_rounds_inside_where_a_fused_kernel_does_not(
    trainer: TrainerSide, text: Text, name: str, operator: Callable
) -> None:
    steps = trace(trainer.side, text).steps
    assert apart(operator, steps, name) < MOST
    fused = rounded_once(trainer.reference, name)
    assert apart(fused, steps, name) > 0.1, "one cast at the end gives other numbers"
