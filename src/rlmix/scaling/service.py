"""How many turns a second one replica serves with a number of sessions on it. Pure arithmetic.

Sessions take turns between the model and their sandbox: a closed queue of two stations. The model
station's time depends on its batch, so the batch is the fixed point of
`sessions = batch * (1 + tool_s / turn_s(batch))`. Beyond the batch that fits, requests wait; caches
of sessions that no longer fit are computed again with every turn.

Invariant: with the KV cache large enough, one more session never lowers the rate of the replica.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rlmix.router.step_model import StepModel

BISECTIONS = 20
"""Halvings of the batch's interval: a millionth of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionShape:
    """What sessions of one kind ask of an engine."""

    turns: float
    output_tokens: float
    """Sampled in a turn."""
    new_tokens: float
    """Prompt tokens that a turn brings beyond the cached prefix."""
    context_tokens: float
    """Of a turn, on the mean over the session."""
    tool_s: float
    """Outside the model, between two turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaModel:
    """One replica of a pool: what it can, and what it costs. Modelled or fitted, never a claim."""

    pool: str
    accelerator: str
    view: str
    """Weight view that it reads."""
    gpus: int
    usd_per_hour: float
    """Of the whole replica."""
    max_running: int
    """Requests that it decodes at a time."""
    kv_tokens: int
    """Tokens of context that its cache holds."""
    state_tokens: float
    """Tokens of cache that the recurrent state of a waiting session takes the room of."""
    max_context_tokens: int
    step_s: Callable[[float, float], float]
    """(batch, context tokens of each) -> seconds of one decoding step."""
    prefill_token_s: float
    router_model: StepModel
    """What the router takes for it."""
    cold_start_s: float
    """From asking for it until it serves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One replica under a load, in the steady state."""

    sessions: float
    running: float
    """Requests being decoded."""
    in_flight: float
    """Requests decoded or waiting in the engine."""
    turns_per_s: float
    reprefill_frac: float
    """Share of the prefilled tokens that were cached once."""
    kv_used_frac: float
    """Of the cache; above 1: sessions that do not fit."""

    @property
    def queued(self) -> float:
        return max(0.0, self.in_flight - self.running)


def most_running(model: ReplicaModel, shape: SessionShape) -> float:
    """Requests of this shape that it decodes at a time; below 1: none fits."""
    each = shape.context_tokens + shape.output_tokens
    return min(float(model.max_running), model.kv_tokens / max(each, 1.0))


def serve(model: ReplicaModel, shape: SessionShape, sessions: float) -> Served:
    """The replica with `sessions` sessions of one shape on it.

    Args:
        sessions: 0 or more.
    Returns:
        All zero where no request fits.
    """
    most = most_running(model, shape)
    if sessions <= 0 or most < 1.0 or shape.context_tokens > model.max_context_tokens:
        return Served(
            sessions=sessions, running=0.0, in_flight=sessions, turns_per_s=0.0,
            reprefill_frac=0.0, kv_used_frac=0.0,
        )  # fmt: skip
    waiting = max(0.0, sessions - model.max_running)
    held = sessions * shape.context_tokens + waiting * model.state_tokens
    missing = max(0.0, 1.0 - model.kv_tokens / held)
    uncached = shape.new_tokens + missing * shape.context_tokens

    def turn_s(batch: float) -> float:
        decode_s = shape.output_tokens * model.step_s(batch, shape.context_tokens)
        # Decoding stands still while the others of the batch prefill.
        return decode_s + batch * uncached * model.prefill_token_s

    high = min(most, sessions)
    if high * (1.0 + shape.tool_s / turn_s(high)) > sessions:
        low = 0.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2.0
            if middle * (1.0 + shape.tool_s / turn_s(max(middle, 1e-9))) < sessions:
                low = middle
            else:
                high = middle
    rate = high / turn_s(high)
    return Served(
        sessions=sessions,
        running=high,
        in_flight=max(high, sessions - rate * shape.tool_s),
        turns_per_s=rate,
        reprefill_frac=missing * shape.context_tokens / uncached if uncached else 0.0,
        kv_used_frac=held / model.kv_tokens,
    )


def best_load(model: ReplicaModel, shape: SessionShape) -> Served:
    """The load at which it serves most: its batch full, or its cache full."""
    most = most_running(model, shape)
    if most < 1.0 or shape.context_tokens > model.max_context_tokens:
        return serve(model, shape, 0.0)
    full_s = shape.output_tokens * model.step_s(most, shape.context_tokens)
    full_s += most * shape.new_tokens * model.prefill_token_s
    of_batch = most * (1.0 + shape.tool_s / full_s)
    of_cache = (model.kv_tokens + model.max_running * model.state_tokens) / (
        shape.context_tokens + model.state_tokens
    )
    loads = (of_batch, min(of_batch, max(of_cache, most)))
    return max((serve(model, shape, load) for load in loads), key=lambda one: one.turns_per_s)


def trajectories_per_s(model: ReplicaModel, shape: SessionShape) -> float:
    """What one replica of it can finish at best; 0 where the shape does not fit."""
    return best_load(model, shape).turns_per_s / max(shape.turns, 1.0)
