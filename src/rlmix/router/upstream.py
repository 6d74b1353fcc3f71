"""One replica as the router sees it: the fleet's record, what is under way, what it has shown."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from rlmix.router.probe import Loads
from rlmix.router.states import Health, HealthRecord, HealthRules, ProgressWatch, ReplicaState
from rlmix.router.step_model import StepFit, StepModel, relative_prior
from rlmix.router.strategies import ramp_room

CONTEXT_MEMORY_TURNS = 64
"""The mean context follows about this many turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRecord:
    """What the fleet says about a replica; the body of `PUT /replicas/{name}`. Fields from `view`
    on may be left out: nothing is known then."""

    name: str
    pool: str
    url: str
    numerics_key: str
    speed: float
    """Prior, relative to the other replicas' (turns or tokens per second at full load)."""
    max_running: int
    version: int
    state: ReplicaState
    view: str = ""
    """Weight view that it reads."""
    max_total_tokens: int | None = None
    """KV tokens that it has."""
    max_context_tokens: int | None = None
    state_slots: int | None = None
    """Requests whose recurrent state fits."""
    prior: StepModel | None = None
    """Roofline of its accelerator, in seconds; it stands in for `speed`."""
    cache_salt: str = ""
    """Goes into every request that is sent there, so that no prefix cached under another salt is
    found: a replica that cannot flush its cache when its weights change gets a new one then."""
    token_env: str = ""
    """Variable of the router's environment with the key of a server that is not the run's own;
    the run's token is never sent there. Empty: the run's token is."""

    def authorization(self, own: str | None, environ: Mapping[str, str]) -> dict[str, str]:
        """The header that opens this replica; `own` is the run's."""
        value = own
        if self.token_env:
            key = environ.get(self.token_env)
            value = f"Bearer {key}" if key else None
        return {} if value is None else {"Authorization": value}


class Upstream:
    """A replica. A replacement at another URL, or after a loss, is another Upstream."""

    def __init__(
        self,
        record: ReplicaRecord,
        *,
        rules: HealthRules | None = None,
        ramp_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = record.name
        self.record = record
        self.health_record = HealthRecord(rules or HealthRules())
        self.in_flight = 0
        self.num_sessions = 0
        self.reserved_tokens = 0
        self.requests: set[asyncio.Task[object]] = set()
        """Requests under way; cancelled when the replica is lost."""
        self.turns = 0
        self.turn_s_sum = 0.0
        self.faults = 0
        self.errors = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.mean_context_tokens = 0.0
        self.fit = StepFit()
        self.model = self.prior
        self.loads = Loads()
        self.foreign = 0.0
        """Requests there that are not ours, as far as its own counts tell."""
        self.peers_in_flight = 0
        self.peers = 0.0
        """Work there that the other shards say they have."""
        self.clock = clock
        self.watch = ProgressWatch(moved_s=clock())
        self.watched_turns = 0
        self._ramp_s = ramp_s
        self._ready_at_s: float | None = None
        self._placed = 0
        self._turn_seen = 0
        self._note_ready()

    # --- facts of the record, as `strategies.Candidate` names them

    @property
    def pool(self) -> str:
        return self.record.pool

    @property
    def url(self) -> str:
        return self.record.url

    @property
    def numerics_key(self) -> str:
        return self.record.numerics_key

    @property
    def view(self) -> str:
        return self.record.view

    @property
    def version(self) -> int:
        return self.record.version

    @property
    def state(self) -> ReplicaState:
        if self.is_lost and self.record.state is not ReplicaState.QUARANTINED:
            return ReplicaState.DEAD
        return self.record.state

    @property
    def health(self) -> Health:
        return self.health_record.state

    @property
    def max_running(self) -> int:
        slots = self.record.state_slots
        return self.record.max_running if slots is None else min(self.record.max_running, slots)

    @property
    def max_total_tokens(self) -> int | None:
        return self.record.max_total_tokens or self.loads.max_total_tokens

    @property
    def max_context_tokens(self) -> int | None:
        return self.record.max_context_tokens

    @property
    def waiting_tokens(self) -> float:
        """As the replica last said; requests sent since then are counted by their own prompts."""
        return float(self.loads.waiting_tokens or 0)

    @property
    def others(self) -> float:
        """Work there that is not ours; see `strategies.Candidate`."""
        return max(self.foreign, self.peers)

    @property
    def prior(self) -> StepModel:
        return self.record.prior or relative_prior(self.record.speed)

    @property
    def speed(self) -> float:
        """Requests a second at full batch, relative to a request's share at prior speed 1."""
        batch = float(self.max_running)
        step_s = self.model.step_s(batch, batch * self.mean_context_tokens)
        return 1e-3 * batch / max(step_s, 1e-12)

    @property
    def is_lost(self) -> bool:
        """True until it is registered again, or its own probes brought it back."""
        return not self.health.is_alive

    @property
    def keeps_sessions(self) -> bool:
        return not self.is_lost and self.record.state.keeps_sessions

    @property
    def ramp_room(self) -> int:
        if self._ready_at_s is None or self._ramp_s <= 0:
            return 1 << 30
        return ramp_room(
            max_running=self.max_running,
            ready_for_s=self.clock() - self._ready_at_s,
            ramp_s=self._ramp_s,
            placed=self._placed,
        )

    # --- what happens to it

    def update(self, record: ReplicaRecord) -> None:
        self.record = record
        self._note_ready()

    def change(self, **changes: object) -> ReplicaRecord:
        """Its record with changes."""
        return replace(self.record, **changes)  # type: ignore[arg-type]

    def lose(self, reason: str = "given up by the fleet") -> None:
        """Nothing more goes there, and what is under way is given up."""
        self.health_record.died(now_s=self.clock(), reason=reason)
        self._ready_at_s = None
        for task in self.requests:
            task.cancel()

    def take(self, tokens: int) -> None:
        """A request is about to be sent."""
        self.in_flight += 1
        self.reserved_tokens += tokens

    def give(self, tokens: int) -> None:
        self.in_flight -= 1
        self.reserved_tokens -= tokens

    def placed(self) -> None:
        """A session was given this home."""
        self._placed += 1

    def observe_turn(
        self,
        turn_s: float,
        in_flight: float,
        *,
        context_tokens: int = 0,
        output_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """A turn was answered: `in_flight` is the mean number of requests there meanwhile."""
        self.turns += 1
        self.turn_s_sum += turn_s
        self.output_tokens += output_tokens or 0
        self.cached_tokens += cached_tokens or 0
        self.prompt_tokens += context_tokens
        if context_tokens:
            self._turn_seen += 1
            weight = 1.0 / min(self._turn_seen, CONTEXT_MEMORY_TURNS)
            self.mean_context_tokens += weight * (context_tokens - self.mean_context_tokens)
        batch = in_flight + self.others
        if batch > self.max_running:
            # It was queued for part of the time: Little's law takes that part out.
            turn_s, batch = turn_s * self.max_running / batch, float(self.max_running)
        self.fit.observe_turn(
            turn_s=turn_s,
            output_tokens=output_tokens or 256.0,
            uncached_tokens=float(max(0, context_tokens - (cached_tokens or context_tokens))),
            batch=max(batch, 1.0),
            prefill_token_s=self.model.prefill_token_s,
        )

    def observe_loads(self, loads: Loads, *, own: float) -> None:
        """A `/v1/loads` answer just came; `own` requests of ours were there meanwhile."""
        self.loads = loads
        if loads.running is not None:
            foreign = loads.running + (loads.waiting or 0) - own
            # Requests come and go between the two counts; a small difference says nothing.
            noise = 1.0 + 0.1 * own
            self.foreign = max(0.0, foreign - noise)
        if loads.moments is not None:
            self.fit.observe_moments(loads.moments)
        if loads.prefill_tokens is not None and loads.prefill_us is not None:
            self.fit.observe_prefill(loads.prefill_tokens, loads.prefill_us)

    def revived(self) -> None:
        """Its probes brought it back: empty caches, a new ramp."""
        self._note_ready()
        self.watch.moved_s = self.clock()

    def stalled_s(self, progress: float | None) -> float:
        """Seconds since anything moved there although requests of ours are under way."""
        turns_moved = self.turns != self.watched_turns
        self.watched_turns = self.turns
        is_busy = self.in_flight > 0 and self.record.state is ReplicaState.READY
        return self.watch.stalled_s(
            now_s=self.clock(),
            is_busy=is_busy and not self.loads.is_paused,
            progress=progress,
            turns_moved=turns_moved,
        )

    def _note_ready(self) -> None:
        if self.record.state is ReplicaState.READY and self._ready_at_s is None:
            self._ready_at_s = self.clock()
            self._placed = 0


RECORD_FIELDS = tuple(field.name for field in fields(ReplicaRecord))
