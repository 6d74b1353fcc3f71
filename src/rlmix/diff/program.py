"""A decoder as a sequence of named operators, so that two sides can be compared one by one.

Both sides give the same names to what they compute. An operator reads registers (tensors by name)
and writes registers; a side is a function for each name. So one text can be run through a side
with every intermediate kept, one operator can be run on another side's inputs, and a hybrid can be
made of two sides. Invariant: a side's operators are the ones its real forward uses, and running
them in order gives the logprobs of that forward; `assembly` of a report says whether to the bit.
"""

# T tokens of one text, N query heads, G key heads, D head dim, E experts, K experts per token

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Registers = Mapping[str, Tensor]
Operator = Callable[[int, Registers], dict[str, Tensor]]
"""(layer, registers) -> the registers that it writes. Whole-model operators get layer -1."""

READS: Mapping[str, tuple[str, ...]] = {
    "embed": ("ids",),
    "input_norm": ("hidden",),
    "qkv": ("normed",),
    "qk_norm": ("heads",),
    "rope": ("heads", "positions"),
    "kv": ("heads", "positions"),
    "attention": ("heads", "positions"),
    "out_proj": ("attended", "hidden"),
    "post_norm": ("hidden",),
    "router": ("normed",),
    "route": ("router",),
    "gate_up": ("normed", "experts"),
    "act": ("gate_up", "experts"),
    "down": ("inner", "experts", "hidden"),
    "combine": ("outputs", "shares", "hidden"),
    "final_norm": ("hidden",),
    "head": ("normed",),
    "logprob": ("logits", "targets"),
}
"""Operator -> registers that it reads. `experts` is absent in dense layers. Registers: ids,
positions, targets int64 [T]; hidden, normed [T, H]; heads [T, N + 2 G, D], queries, keys, values;
attended [T, N * D]; router [T, E]; experts int64 [T, K], shares [T, K]; gate_up [T, (K,) 2 I];
inner [T, (K,) I]; outputs [T, K, H]; logits [T, V]; logprobs [T]."""

WRITES: Mapping[str, tuple[str, ...]] = {
    "embed": ("hidden",),
    "input_norm": ("normed",),
    "qkv": ("heads",),
    "qk_norm": ("heads",),
    "rope": ("heads",),
    "kv": ("heads",),
    "attention": ("attended",),
    "out_proj": ("hidden",),
    "post_norm": ("normed",),
    "router": ("router",),
    "route": ("experts", "shares"),
    "gate_up": ("gate_up",),
    "act": ("inner",),
    "down": ("outputs", "hidden"),
    "combine": ("hidden",),
    "final_norm": ("normed",),
    "head": ("logits",),
    "logprob": ("logprobs",),
}
"""Operator -> registers that it may write; `down` writes outputs with experts, else hidden."""

ATTENTION_PART = ("input_norm", "qkv", "qk_norm", "rope", "kv", "attention", "out_proj")
EXPERT_PART = ("post_norm", "router", "route", "gate_up", "act", "down", "combine")
DENSE_PART = ("post_norm", "gate_up", "act", "down")
NORMS = ("input_norm", "qk_norm", "post_norm", "final_norm")
PRODUCTS = ("qkv", "out_proj", "router", "gate_up", "down", "head")
"""Operators that multiply with a weight matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What the operators of a model look like."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    """Inner channels of an expert, or of the dense MLP."""
    vocab_size: int
    num_experts: int
    top_k: int
    moe_layers: frozenset[int]
    has_qk_norm: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two that are compared."""

    name: str
    shape: Shape
    operators: Mapping[str, Operator]
    settings: Mapping[str, str | float]
    """What it says of itself: epsilon, theta, temperature, formats, kernels ..."""
    weights: Mapping[str, Tensor]
    """By Hugging Face name, float32, as it multiplies with them; empty where unknown."""

    def with_operators(self, name: str, operators: Mapping[str, Operator]) -> "Side":
        """The side with some operators replaced."""
        return replace(self, name=name, operators={**self.operators, **operators})


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """What both sides are asked about."""

    ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    scored_from: int
    """First token whose logprob counts; what lies before is a prompt."""

    @classmethod
    def of(cls, ids: "Tensor | list[int]", *, scored_from: int = 1) -> "Text":
        ids_T = torch.as_tensor(ids, dtype=torch.int64)
        return cls(ids_T=ids_T, positions_T=torch.arange(len(ids_T)), scored_from=scored_from)


@dataclass(frozen=True, slots=True)
class Place:
    """One operator of one layer."""

    name: str
    layer: int
    """-1: of the whole model."""

    def __str__(self) -> str:
        return self.name if self.layer < 0 else f"layers.{self.layer}.{self.name}"


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a trace: what went in and what came out."""

    place: Place
    inputs: Registers
    outputs: Registers


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A text's way through a side."""

    steps: tuple[Step, ...]
    logprobs_T: Tensor
    """float32 [T - 1]: of each token but the first."""

    def at(self, place: Place) -> Step:
        return next(step for step in self.steps if step.place == place)


def places(shape: Shape) -> Iterator[Place]:
    """All operators in the order in which they run."""
    yield Place("embed", -1)
    for layer in range(shape.num_layers):
        part = EXPERT_PART if layer in shape.moe_layers else DENSE_PART
        for name in (*ATTENTION_PART, *part):
            if name != "qk_norm" or shape.has_qk_norm:
                yield Place(name, layer)
    yield from (Place(name, -1) for name in ("final_norm", "head", "logprob"))


def run_operator(side: Side, place: Place, registers: Registers) -> dict[str, Tensor]:
    """What one operator of a side makes of some registers."""
    with torch.no_grad():
        return side.operators[place.name](place.layer, registers)


def start_of(text: Text) -> dict[str, Tensor]:
    """Registers before the first operator. The last token has no target and asks for itself."""
    targets_T = torch.cat((text.ids_T[1:], text.ids_T[-1:]))
    return {"ids": text.ids_T, "positions": text.positions_T, "targets": targets_T}


def run(side: Side, text: Text) -> Tensor:
    """Logprobs of a text's tokens from the second on, float32 [T - 1]."""
    return run_whole(side, text)["logprobs"][:-1]


def run_whole(side: Side, text: Text) -> dict[str, Tensor]:
    """The registers at the end of a text's way through a side, `logits` among them."""
    registers = start_of(text)
    for place in places(side.shape):
        registers |= run_operator(side, place, registers)
        if place.name == "combine":
            del registers["experts"]  # The next layer may be dense.
    return registers


def trace(side: Side, text: Text) -> Trace:
    """The same with everything kept: float32 tensors of T times the widest operator each."""
    registers = start_of(text)
    steps = []
    for place in places(side.shape):
        inputs = {name: registers[name] for name in READS[place.name] if name in registers}
        outputs = run_operator(side, place, registers)
        steps.append(Step(place, inputs, outputs))
        registers |= outputs
        if place.name == "combine":
            del registers["experts"]
    return Trace(steps=tuple(steps), logprobs_T=registers["logprobs"][:-1])


def swapped(side: Side, other: Side, names: tuple[str, ...]) -> Side:
    """`side` with the named operators taken from `other`."""
    return side.with_operators(
        f"{side.name} with {', '.join(names)} of {other.name}",
        {name: other.operators[name] for name in names},
    )
