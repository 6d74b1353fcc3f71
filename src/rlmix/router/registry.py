"""The replicas that the router knows, and the queue in front of them.

Who fills the queue: requests of new (or moved) sessions that no replica can take now. What unblocks
it: a replica that becomes ready or newer, and every answer, which frees a place.

Invariant: a place is taken before a connection is made, in the same step that chose the replica,
so that a burst of new sessions sees its own members and spreads.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from rlmix.router.groups import GroupTable
from rlmix.router.states import HealthRules, ReplicaState
from rlmix.router.step_model import bounded, common_scale
from rlmix.router.strategies import (
    Ask,
    Refusal,
    Strategy,
    Weights,
    choose_replica,
    expected_delay_s,
    fits,
    may_serve_view,
    rank,
    should_move,
)
from rlmix.router.upstream import ReplicaRecord, Upstream
from rlmix.router.waiting import Waiter, WaitingRoom

WAITS_FOR = (Refusal.NONE_READY, Refusal.ALL_FULL)
"""Refusals that time may cure while the request waits here."""

MEMORY_TURNS = 256.0
"""Of the means over all sessions."""


class Registry:
    """All replicas by name, and the queue in front of them."""

    def __init__(
        self,
        *,
        strategy: Strategy,
        observe_speeds: bool,
        placement: str = "free",
        break_affinity_s: float = float("inf"),
        staleness_s: float = 0.0,
        ramp_s: float = 0.0,
        max_waiting: int = 1 << 30,
        admit_batches: float = 4.0,
        rules: HealthRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._strategy = strategy
        self._observe_speeds = observe_speeds
        self._break_affinity_s = break_affinity_s
        self._staleness_s = staleness_s
        self._ramp_s = ramp_s
        self._max_waiting = max_waiting
        self._admit_batches = admit_batches
        self._rules = rules
        self._clock = clock
        self._upstreams: dict[str, Upstream] = {}
        self._room = WaitingRoom()
        self._registered = asyncio.Event()
        self.groups = GroupTable(placement)
        self.busy_frac = 0.5
        """Share of an open session's time that it spends in the model; see `observe_session`."""
        self.mean_output_tokens = 256.0
        """Of a turn, over all sessions."""
        self.mean_uncached_tokens = 0.0
        """Prompt tokens of a turn that were not cached, over all sessions."""
        self._model_s = 1.0
        self._tool_s = 1.0

    @property
    def upstreams(self) -> Mapping[str, Upstream]:
        return self._upstreams

    @property
    def num_waiting(self) -> int:
        return len(self._room)

    @property
    def weights(self) -> Weights:
        return Weights(
            busy_frac=self.busy_frac,
            uncached_tokens=self.mean_uncached_tokens,
            admit_batches=self._admit_batches,
            staleness_s=self._staleness_s,
        )

    def put(self, record: ReplicaRecord) -> Upstream:
        """Add a replica, replace it (its URL changed, or it was lost), or change its facts."""
        known = self._upstreams.get(record.name)
        if known is not None and (known.url != record.url or known.is_lost):
            known.lose()
            known = None
        if known is None:
            known = Upstream(record, rules=self._rules, ramp_s=self._ramp_s, clock=self._clock)
            self._upstreams[record.name] = known
        else:
            known.update(record)
        if record.state in (ReplicaState.DEAD, ReplicaState.QUARANTINED):
            known.lose()
        self._registered.set()
        self._registered = asyncio.Event()
        self.refresh_speeds()
        self.serve_waiters()
        return known

    def remove(self, name: str) -> bool:
        known = self._upstreams.pop(name, None)
        if known is None:
            return False
        known.lose()
        self.serve_waiters()
        return True

    async def wait_for(self, name: str, *, timeout_s: float) -> Upstream | None:
        """The replica of that name, waiting for it to be registered."""
        try:
            async with asyncio.timeout(timeout_s):
                while name not in self._upstreams:
                    await self._registered.wait()
        except TimeoutError:
            return None
        return self._upstreams[name]

    async def take_place(
        self, ask: Ask, *, timeout_s: float, group_id: str = ""
    ) -> Upstream | Refusal:
        """A replica for a session without a home, with one request already counted there.

        Waits up to `timeout_s` when nothing is ready or all are full, lowest rank first;
        `TOO_OLD` is answered at once, because a client that backs off waits better, and so is
        everything when the queue is full.
        """
        now_s = self._clock()
        if not len(self._room):
            chosen = self._choose(ask, group_id)
            if chosen not in WAITS_FOR:
                return chosen
        if len(self._room) >= self._max_waiting:
            return Refusal.ALL_FULL
        waiter = self._room.add(
            ask,
            group_id=group_id,
            rank=rank(enqueued_s=now_s, patience_s=timeout_s, deadline_s=ask.deadline_s),
            promised_from_s=now_s + timeout_s / 2,
        )
        self.serve_waiters()
        try:
            await asyncio.wait((waiter.place,), timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.place.done() and isinstance(place := waiter.place.result(), Upstream):
                self.give_place(place, ask.total_tokens)
            raise
        finally:
            if not waiter.place.done():
                self._room.remove(waiter)
        if waiter.place.done():
            answer = waiter.place.result()
            assert isinstance(answer, Upstream | Refusal)
            return answer
        return self._choose(ask, group_id)

    def give_place(self, upstream: Upstream, tokens: int) -> None:
        """A request there has ended."""
        upstream.give(tokens)
        if len(self._room):
            self.serve_waiters()

    def better_home(self, home: Upstream, ask: Ask) -> Upstream | None:
        """Where a session would be done so much sooner that computing its prefix anew pays."""
        weights = self.weights
        at_home_s = expected_delay_s(home, ask, weights)
        if fits(home, ask):
            if at_home_s <= self._break_affinity_s and ask.deadline_s is None:
                return None
            if self._break_affinity_s == float("inf") and ask.deadline_s is None:
                return None
        best = choose_replica(
            (one for one in self._upstreams.values() if one is not home),
            strategy=self._strategy,
            ask=ask,
            weights=weights,
        )
        if isinstance(best, Refusal) or not best.health.is_alive:
            return None
        if not fits(home, ask):
            return best
        moves = should_move(home, best, ask=ask, weights=weights, margin_s=self._break_affinity_s)
        return best if moves else None

    def observe_session(self, *, model_s: float, tool_s: float | None) -> None:
        """A turn took `model_s`, after the session had been away for `tool_s` (None: its first).

        Exponential sums with a memory of about 200 turns, over all sessions.
        """
        keep = 1.0 - 1.0 / 200.0
        self._model_s = self._model_s * keep + model_s
        if tool_s is not None:
            self._tool_s = self._tool_s * keep + tool_s
        self.busy_frac = self._model_s / (self._model_s + self._tool_s)

    def observe_turn(self, *, output_tokens: int | None, uncached_tokens: int | None) -> None:
        """A turn had so many sampled tokens, and so many to prefill; None: nobody said."""
        if output_tokens is not None:
            change = output_tokens - self.mean_output_tokens
            self.mean_output_tokens += change / MEMORY_TURNS
        if uncached_tokens is not None:
            change = uncached_tokens - self.mean_uncached_tokens
            self.mean_uncached_tokens += change / MEMORY_TURNS

    def refresh_speeds(self) -> None:
        """Fit every replica's times anew; cheap, called on changes and every second."""
        alive = [one for one in self._upstreams.values() if not one.is_lost]
        if not self._observe_speeds:
            for one in self._upstreams.values():
                one.model = one.prior
            return
        ratios = []
        for one in alive:
            if one.fit.steps > 0 and one.fit.mean_batch > 0:
                batch = one.fit.mean_batch
                planned_s = one.prior.step_s(batch, batch * one.mean_context_tokens)
                ratios.append((one.fit.mean_step_s / max(planned_s, 1e-12), one.fit.steps))
        scale = common_scale(ratios)
        for one in alive:
            prior = one.prior.scaled(scale)
            context = one.mean_context_tokens
            fitted = one.fit.model(prior, context_tokens=context)
            batch = one.fit.mean_batch or 1.0
            one.model = bounded(fitted, prior, batch=batch, context_tokens=context)

    def serve_waiters(self) -> None:
        """Give places to those who wait; called when anything has changed."""
        if len(self._room):
            self._room.serve(self._choose_for, self._best_for, now_s=self._clock())

    def _choose_for(self, waiter: Waiter, promised: frozenset[str]) -> Upstream | Refusal | None:
        chosen = self._choose(waiter.ask, waiter.group_id, promised)
        return None if chosen in WAITS_FOR else chosen

    def _best_for(self, waiter: Waiter) -> str | None:
        """The replica that will have room for the waiter soonest: the emptiest that ever can."""
        ask = waiter.ask
        able = [
            one
            for one in self._upstreams.values()
            if one.state.takes_new_sessions
            and fits(one, ask)
            and may_serve_view(one, ask)
            and (ask.min_version is None or one.version >= ask.min_version)
        ]
        if not able:
            return None
        return min(able, key=lambda one: (one.in_flight / one.max_running, one.name)).name

    def _choose(
        self, ask: Ask, group_id: str, closed: frozenset[str] = frozenset()
    ) -> Upstream | Refusal:
        preference = self.groups.preference(group_id)
        chosen = choose_replica(
            self._upstreams.values(),
            strategy=self._strategy,
            ask=ask,
            weights=self.weights,
            prefer=None if preference is None else lambda one: preference(one.pool),
            margin_s=self._break_affinity_s,
            closed=closed,
        )
        if isinstance(chosen, Upstream):
            chosen.take(ask.total_tokens)
        return chosen
