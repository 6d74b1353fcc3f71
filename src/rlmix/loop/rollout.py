"""Keeps sessions in flight while the trainer works, and hands it finished groups.

Who fills the queue: one asyncio task per open group, each running its sessions through the
workers. What unblocks it: `take` consuming groups, which lowers the number of open ones.

Two rules bound staleness, both explicit. Admission before sampling: at most `max_open_groups`
groups are open (being sampled, or finished and not yet trained on). Admission before training:
a group whose oldest token is more than `max_staleness` versions behind the trainer is dropped,
counted, and its task is sampled again. The second rule is the guarantee, the first the economy.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rlmix.batch.groups import MIN_MEMBERS, group_lag
from rlmix.core.errors import EngineError
from rlmix.core.trajectory import Outcome, Trajectory
from rlmix.loop.ledger import STALE, TOO_VOID, TRAINED, SessionLedger
from rlmix.loop.step_metrics import serving_pool
from rlmix.loop.stream import TaskStream, Ticket

RunSession = Callable[[Ticket, int, int], Awaitable[Trajectory]]
"""(ticket, member index, attempt) -> finished session; never raises for infrastructure faults."""


VOID_PAUSE_S = 1.0
"""Before a void session is tried again: what broke needs a moment to come back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
    """All sessions of one ticket, voids included."""

    ticket: Ticket
    members: tuple[Trajectory, ...]

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        return tuple(m for m in self.members if m.outcome is not Outcome.VOID)


@dataclass(slots=True)
class RolloutCounts:
    """What happened since the last `drain_counts`; nothing is dropped without a number here."""

    sessions: int = 0
    voids: int = 0
    retries: int = 0
    stale_groups: int = 0
    void_groups: int = 0
    tokens: int = 0
    void_reasons: dict[str, int] = field(default_factory=dict)


class Rollout:
    """Owns the tasks that sample groups; `stop` cancels and awaits every one of them."""

    def __init__(
        self,
        *,
        stream: TaskStream,
        run_session: RunSession,
        group_size: int,
        max_open_groups: int,
        concurrency: int,
        max_staleness: int,
        void_retries: int = 1,
        void_pause_s: float = VOID_PAUSE_S,
        max_void_groups_in_a_row: int = 32,
        ledger: SessionLedger | None = None,
    ) -> None:
        """
        Args:
            ledger: told of every session and group; None: nobody is.
        """
        self._stream = stream
        self._run_session = run_session
        self._group_size = group_size
        self._max_open_groups = max_open_groups
        self._slots = asyncio.Semaphore(concurrency)
        self._max_staleness = max_staleness
        self._void_retries = void_retries
        self._void_pause_s = void_pause_s
        self._max_void_groups_in_a_row = max_void_groups_in_a_row
        self._ledger = ledger
        self._void_groups_in_a_row = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling: dict[int, Ticket] = {}
        self._ready: list[FinishedGroup] = []
        self._changed = asyncio.Event()
        self._filling = False
        self._failure: BaseException | None = None
        self.counts = RolloutCounts()
        self.sessions_running = 0
        self.sessions_finished = 0
        self.sessions_taken = 0
        self.finished_by_pool: Counter[str] = Counter()
        """Valid sessions by the pool that sampled most of each, since the start."""

    def open_more(self, max_open_groups: int) -> None:
        """Change how many groups may be open; fewer takes effect as groups end."""
        self._max_open_groups = max_open_groups
        self._fill()

    def start(self) -> None:
        self._filling = True
        self._fill()

    async def stop(self) -> None:
        """Cancel what is being sampled; its tickets go back to the stream."""
        self._filling = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ticket in self._sampling.values():
            self._stream.give_back(ticket)
        self._sampling.clear()

    @property
    def sessions_towards_next(self) -> int:
        """Sessions finished and not yet taken for a step."""
        return self.sessions_finished - self.sessions_taken

    async def take(self, num_groups: int, *, trainer_version: int) -> list[FinishedGroup]:
        """Wait for `num_groups` groups fresh enough for `trainer_version`, oldest first.

        Raises what a session raised when that was a bug of ours rather than a fault.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            self._drop_inadmissible(trainer_version)
            if len(self._ready) >= num_groups:
                taken, self._ready = self._ready[:num_groups], self._ready[num_groups:]
                for group in taken:
                    self._stream.finish(group.ticket)
                    self._note(group, TRAINED)
                    self.sessions_taken += len(group.members)
                self._fill()
                return taken
            self._changed.clear()
            await self._changed.wait()

    def drain_counts(self) -> RolloutCounts:
        counts, self.counts = self.counts, RolloutCounts()
        return counts

    def _drop_inadmissible(self, trainer_version: int) -> None:
        kept: list[FinishedGroup] = []
        for group in self._ready:
            lag = group_lag(group.members, trainer_version=trainer_version)
            if len(group.valid) < MIN_MEMBERS or lag is None:
                self.counts.void_groups += 1
                self._note(group, TOO_VOID)
                self._void_groups_in_a_row += 1
                self._check_hopeless(group)
            elif lag > self._max_staleness:
                self.counts.stale_groups += 1
                self._note(group, STALE)
            else:
                kept.append(group)
                continue
            self.sessions_taken += len(group.members)
            self._stream.give_back(group.ticket)
        if len(kept) != len(self._ready):
            self._ready = kept
            self._fill()

    def _note(self, group: FinishedGroup, what: str) -> None:
        if self._ledger is not None:
            self._ledger.group(group.ticket.group_id, what)

    async def _recorded(self, ticket: Ticket, index: int, attempt: int) -> Trajectory:
        """Run a session between two lines of the ledger."""
        ledger = self._ledger
        if ledger is None:
            return await self._run_session(ticket, index, attempt)
        name = f"{ticket.group_id}.{index}" + (f"r{attempt}" if attempt else "")
        ledger.begun(name)
        try:
            trajectory = await self._run_session(ticket, index, attempt)
        except BaseException:
            ledger.cut_off(name)
            raise
        ledger.ended(name, trajectory)
        return trajectory

    def _check_hopeless(self, group: FinishedGroup) -> None:
        """Sampling again and again without an end would hide what is broken."""
        if self._void_groups_in_a_row < self._max_void_groups_in_a_row:
            return
        reasons = sorted({m.void_reason or m.stop_reason.value for m in group.members})
        raise EngineError(
            f"rollout: {self._void_groups_in_a_row} groups in a row had fewer than {MIN_MEMBERS} "
            f"valid sessions; last reasons: {'; '.join(reasons)}; see events.jsonl and logs/"
        )

    def _fill(self) -> None:
        while self._filling and self._stream.num_open < self._max_open_groups:
            ticket = self._stream.take()
            task = asyncio.create_task(self._sample(ticket), name=f"group {ticket.group_id}")
            self._tasks.add(task)
            self._sampling[ticket.index] = ticket
            task.add_done_callback(self._group_done)

    def _group_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._changed.set()

    async def _sample(self, ticket: Ticket) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                members = [
                    group.create_task(self._member(ticket, index))
                    for index in range(self._group_size)
                ]
        except* Exception as errors:
            raise errors.exceptions[0] from None
        del self._sampling[ticket.index]
        if sum(member.result().outcome is not Outcome.VOID for member in members) >= MIN_MEMBERS:
            self._void_groups_in_a_row = 0
        self._ready.append(
            FinishedGroup(ticket=ticket, members=tuple(member.result() for member in members))
        )
        self._changed.set()

    async def _member(self, ticket: Ticket, index: int) -> Trajectory:
        attempt = 0
        while True:
            async with self._slots:
                self.sessions_running += 1
                try:
                    trajectory = await self._recorded(ticket, index, attempt)
                finally:
                    self.sessions_running -= 1
            self.counts.sessions += 1
            self.counts.tokens += trajectory.num_sampled_tokens
            if trajectory.outcome is not Outcome.VOID:
                self.sessions_finished += 1
                self.finished_by_pool[serving_pool(trajectory)] += 1
                return trajectory
            self.counts.voids += 1
            reason = trajectory.stop_reason.value
            self.counts.void_reasons[reason] = self.counts.void_reasons.get(reason, 0) + 1
            if attempt >= self._void_retries:
                self.sessions_finished += 1
                return trajectory
            attempt += 1
            self.counts.retries += 1
            await asyncio.sleep(self._void_pause_s)
