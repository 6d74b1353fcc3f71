"""Which replica a session goes to: pure functions of what is known about each replica.

Invariants: a session is never placed on a replica that is not ready, too old, full, too small for
it, or of another weight view than it must have; making a replica busier never makes it the chosen
one; whoever waits longest is never overtaken for good.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from rlmix.router.states import Health, ReplicaState
from rlmix.router.step_model import StepModel

LATE_WEIGHT = 4.0
"""A second after the deadline costs as much as this many before it."""


class Candidate(Protocol):
    """What a strategy may look at. Read only."""

    @property
    def name(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def view(self) -> str:
        """Weight view that it reads; empty when nobody said."""
        ...

    @property
    def state(self) -> ReplicaState: ...
    @property
    def health(self) -> Health: ...
    @property
    def version(self) -> int:
        """Weight version that the replica serves."""
        ...

    @property
    def model(self) -> StepModel:
        """Seconds of a step and of a prefilled token."""
        ...

    @property
    def max_running(self) -> int:
        """Requests that the engine runs at a time (batch or state slots, whichever is less)."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered, running or waiting in the engine."""
        ...

    @property
    def peers_in_flight(self) -> int:
        """Requests that other shards of this router have there."""
        ...

    @property
    def others(self) -> float:
        """Requests and sessions' work there that came from elsewhere, e.g. another shard."""
        ...

    @property
    def num_sessions(self) -> int:
        """Open sessions that live there, with or without a request under way."""
        ...

    @property
    def mean_context_tokens(self) -> float: ...
    @property
    def waiting_tokens(self) -> float:
        """Prompt tokens that wait there to be prefilled."""
        ...

    @property
    def reserved_tokens(self) -> int:
        """KV tokens that the requests under way will need."""
        ...

    @property
    def max_total_tokens(self) -> int | None:
        """KV tokens that it has; None when nobody said."""
        ...

    @property
    def max_context_tokens(self) -> int | None: ...
    @property
    def ramp_room(self) -> int:
        """New sessions that it may still take while it is new; large once it is not."""
        ...


class Refusal(StrEnum):
    """Why nothing was chosen."""

    NONE_READY = "none_ready"
    ALL_FULL = "all_full"
    TOO_OLD = "too_old"
    TOO_LONG = "too_long"
    """The context fits into no replica, ready or not."""
    NO_VIEW = "no_view"
    """No replica of the session's weight view is left, or will be back by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """What a request needs of a replica."""

    context_tokens: int = 0
    """Of the prompt; 0 when not known."""
    output_tokens: float = 256.0
    """Expected, not the limit."""
    min_version: int | None = None
    """Oldest weight version that it accepts; None accepts all."""
    view: str | None = None
    """Weight view that it must have (strict) or should have; None: any."""
    is_view_strict: bool = True
    deadline_s: float | None = None
    """Seconds from now after which its sample is worth little."""
    cached_on: str | None = None
    """Replica that has its prefix."""
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.context_tokens + int(self.output_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Prices in seconds."""

    busy_frac: float = 0.5
    """Share of an open session's time that it has a request under way, 0 to 1."""
    uncached_tokens: float = 0.0
    """Prompt tokens that a turn brings to prefill on the mean; decoding stands still meanwhile."""
    admit_batches: float = 4.0
    """A new session is placed while its replica has fewer than so many batches of requests, running
    and waiting. Sessions come back to their replica whatever it has to do, so one that waited here
    until a place is free would be overtaken by them for good; where it waits shortest counts."""
    prompt_frac: float = 0.125
    """Share of its prompt that counts as uncached for a session without a home: it stays for many
    turns and computes that once, so the whole of it would keep sessions from slow replicas."""
    staleness_s: float = 0.0
    """What one version behind the newest replica costs: a sample made there ages sooner."""


C = TypeVar("C", bound=Candidate)

Strategy = Callable[[Candidate, Ask, Weights], tuple[float, ...]]
"""Sort key; the smallest is chosen. The first number is in seconds for `shortest_delay`."""


def work(candidate: Candidate, busy_frac: float) -> float:
    """Requests to reckon with: a session between two turns is in a sandbox now and back in a
    moment, so it counts with the share of its time that it is seen to spend in the model.
    Counting requests alone would send every new session to whichever replica's agents happen to
    run their tests."""
    idle = max(0, candidate.num_sessions - candidate.in_flight)
    return candidate.in_flight + busy_frac * idle + candidate.others


def expected_delay_s(candidate: Candidate, ask: Ask, weights: Weights) -> float:
    """Seconds until this request's turn would be done there: what waits to be prefilled, its own
    uncached prompt, its tokens at the step time of the batch it joins, and what the others of that
    batch prefill meanwhile; beyond the engine's batch it queues for as long as that many turns
    take. KV tokens that are all taken make a smaller batch.

    Source: shortest expected delay for unequal servers, argmin (q + 1) / mu, arXiv:1509.03535, with
    a rate that depends on the batch.
    """
    model = candidate.model
    batch = work(candidate, weights.busy_frac) + 1.0
    mean_context = candidate.mean_context_tokens
    running = min(batch, most_running(candidate, ask))
    step_s = model.step_s(running, mean_context * (running - 1.0) + ask.context_tokens)
    others_s = (running - 1.0) * weights.uncached_tokens * model.prefill_token_s
    turn_s = ask.output_tokens * step_s + others_s
    queue_s = turn_s * (batch - running) / running
    cached = ask.cached_tokens if ask.cached_on == candidate.name else 0
    uncached = float(max(0, ask.context_tokens - cached))
    if ask.cached_on is None:
        uncached *= weights.prompt_frac
    return queue_s + (candidate.waiting_tokens + uncached) * model.prefill_token_s + turn_s


def most_running(candidate: Candidate, ask: Ask) -> float:
    """Requests that it can really run at a time: its batch, or as many as its KV tokens hold."""
    most = float(candidate.max_running)
    each = max(candidate.mean_context_tokens, 1.0) + ask.output_tokens
    if candidate.max_total_tokens is not None and candidate.mean_context_tokens > 0:
        most = min(most, candidate.max_total_tokens / each)
    return max(1.0, most)


def shortest_delay(candidate: Candidate, ask: Ask, weights: Weights) -> tuple[float, ...]:
    """Expected delay, and `LATE_WEIGHT` times what of it lies after the deadline; sessions decide
    between equals."""
    delay_s = expected_delay_s(candidate, ask, weights)
    late_s = 0.0 if ask.deadline_s is None else max(0.0, delay_s - max(ask.deadline_s, 0.0))
    return (delay_s + LATE_WEIGHT * late_s, float(candidate.num_sessions))


def least_sessions(candidate: Candidate, ask: Ask, weights: Weights) -> tuple[float, ...]:
    """Fewest sessions, whatever the speed: what routers for equal replicas do; a baseline."""
    del ask, weights
    return (float(candidate.num_sessions), float(candidate.in_flight))


STRATEGIES: Mapping[str, Strategy] = {
    "shortest_delay": shortest_delay,
    "least_sessions": least_sessions,
}


def has_room(candidate: Candidate, ask: Ask, admit_batches: float) -> bool:
    """Guards of one replica: running requests or state slots, and KV tokens; of `admit_batches`
    batches, since what waits in the engine takes neither yet."""
    in_flight = candidate.in_flight + candidate.peers_in_flight
    if in_flight >= admit_batches * candidate.max_running:
        return False
    limit = candidate.max_total_tokens
    # A single request that is larger than the limit is the engine's to judge, on an empty replica.
    needed = candidate.reserved_tokens + ask.total_tokens
    return limit is None or candidate.in_flight == 0 or needed <= admit_batches * limit


def fits(candidate: Candidate, ask: Ask) -> bool:
    """Long contexts only where they fit."""
    limit = candidate.max_context_tokens
    return limit is None or ask.context_tokens < limit


def choose_replica(
    candidates: Iterable[C],
    *,
    strategy: Strategy,
    ask: Ask,
    weights: Weights,
    prefer: Callable[[C], bool] | None = None,
    margin_s: float = 0.0,
    closed: frozenset[str] = frozenset(),
) -> C | Refusal:
    """The replica for a request without a home, or why there is none.

    Args:
        candidates: every replica that is known, in any state and order.
        prefer: replicas to take when their key is at most `margin_s` above the best one's.
        closed: replicas that are promised to somebody who has waited longer.
    Returns:
        The candidate with the smallest key, the first name among equals; one that is suspect,
        stale, or at its ramp's limit only when no other can. `TOO_OLD` only when
        some replica is ready and none of those is new enough: a new version is on its way, so
        asking again is right. `ALL_FULL` when waiting for an answer to free a place is right.
    """
    eligible: list[C] = []
    is_known = is_fitting = is_ready = is_new_enough = False
    for one in candidates:
        if not may_serve_view(one, ask):
            continue
        is_known = is_known or (
            one.state is not ReplicaState.QUARANTINED and one.health is not Health.RETIRED
        )
        if not fits(one, ask):
            continue
        is_fitting = True
        if not one.state.takes_new_sessions or not one.health.is_alive:
            continue
        is_ready = True
        if ask.min_version is not None and one.version < ask.min_version:
            continue
        is_new_enough = True
        if has_room(one, ask, weights.admit_batches) and one.name not in closed:
            eligible.append(one)
    if not eligible:
        if is_new_enough:
            return Refusal.ALL_FULL
        if is_ready:
            return Refusal.TOO_OLD
        if is_known and not is_fitting:
            return Refusal.TOO_LONG
        is_lost = not is_known and ask.view is not None and ask.is_view_strict
        return Refusal.NO_VIEW if is_lost else Refusal.NONE_READY
    best = _first_choices(eligible)
    keys = {one.name: _key(one, best, strategy, ask, weights) for one in best}
    if ask.view is not None and not ask.is_view_strict:
        same = [one for one in best if one.view == ask.view]
        best = same or best
    chosen = min(best, key=lambda one: keys[one.name])
    if prefer is not None:
        preferred = [one for one in best if prefer(one)]
        if preferred:
            liked = min(preferred, key=lambda one: keys[one.name])
            if keys[liked.name][0][0] <= keys[chosen.name][0][0] + margin_s:
                return liked
    return chosen


def may_serve_view(candidate: Candidate, ask: Ask) -> bool:
    """A view that nobody told is taken for any."""
    if ask.view is None or not ask.is_view_strict:
        return True
    return not candidate.view or not ask.view or candidate.view == ask.view


def _first_choices(eligible: Sequence[C]) -> Sequence[C]:
    """Without the suspect, the stale and the ramping, unless nothing else is left."""
    sound = [one for one in eligible if one.health is Health.HEALTHY] or eligible
    return [one for one in sound if one.ramp_room > 0] or sound


def _key(
    one: Candidate, among: Sequence[Candidate], strategy: Strategy, ask: Ask, weights: Weights
) -> tuple[tuple[float, ...], str]:
    key = strategy(one, ask, weights)
    if weights.staleness_s:
        newest = max(other.version for other in among)
        key = (key[0] + weights.staleness_s * (newest - one.version), *key[1:])
    return key, one.name


def should_move(home: C, best: C, *, ask: Ask, weights: Weights, margin_s: float) -> bool:
    """Break the affinity: the other replica, computing the whole prefix anew, would be done more
    than `margin_s` sooner; or it would make the deadline and the home would not."""
    at_home_s = expected_delay_s(home, ask, weights)
    elsewhere_s = expected_delay_s(best, ask, weights)
    if ask.deadline_s is not None and elsewhere_s <= ask.deadline_s < at_home_s:
        return True
    return at_home_s - elsewhere_s > margin_s


def ramp_room(
    *, max_running: int, ready_for_s: float, ramp_s: float, placed: int, floor_frac: float = 0.1
) -> int:
    """New sessions that a replica may take `ready_for_s` after it became ready: a tenth of its
    batch at once, all of it after `ramp_s`. Its caches are cold, and a herd would all prefill
    together."""
    if ramp_s <= 0 or ready_for_s >= ramp_s:
        return 1 << 30
    share = max(floor_frac, ready_for_s / ramp_s)
    return max(0, int(max(1.0, share * max_running)) - placed)


def rank(*, enqueued_s: float, patience_s: float, deadline_s: float | None) -> float:
    """Place in the queue: the earlier of the deadline and the end of patience. Nobody is overtaken
    by those who come after patience has passed, so nobody starves."""
    latest = enqueued_s + patience_s
    return latest if deadline_s is None else min(latest, enqueued_s + max(deadline_s, 0.0))
