"""Sessions over worker processes: balance, death, silence."""

import asyncio
from dataclasses import dataclass

from rlmix.core.trajectory import Outcome, StopReason, Trajectory
from rlmix.launch.handle import InProcessHandle
from rlmix.loop.workers import WorkerPool


@dataclass(frozen=True)
class Spec:
    session_id: str
    group_id: str = "g"
    task_id: str = "t"


class EchoWorker:
    """Answers each session after one loop turn; remembers how many it ran at once."""

    def __init__(self) -> None:
        self.running = 0
        self.peak = 0
        self.is_closed = False

    async def run(self, spec: Spec) -> Trajectory:
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(0.05 if spec.session_id == "slow" else 0.001)
        self.running -= 1
        return Trajectory(
            session_id=spec.session_id,
            group_id=spec.group_id,
            task_id=spec.task_id,
            prompt_ids=(1,),
            turns=(),
            stop_reason=StopReason.SUBMITTED,
            outcome=Outcome.PASS,
            reward=1.0,
        )

    async def close(self) -> None:
        self.is_closed = True


class Fixture:
    def __init__(self, num_workers: int = 2, session_limit_s: float = 5.0) -> None:
        self.workers: list[EchoWorker] = []
        self.handles: list[InProcessHandle] = []
        self.events: list[str] = []
        self.pool = WorkerPool(
            self.spawn,
            num_workers=num_workers,
            session_limit_s=session_limit_s,
            on_event=lambda kind, reason, **fields: self.events.append(kind),
        )

    def spawn(self, index: int) -> InProcessHandle:
        self.workers.append(EchoWorker())
        self.handles.append(InProcessHandle(self.workers[-1], name=f"worker_{index}"))
        return self.handles[-1]


def test_sessions_are_spread_evenly_over_the_workers():
    async def scenario():
        fixture = Fixture()
        await asyncio.gather(*(fixture.pool.run(Spec(str(i))) for i in range(10)))
        return [worker.peak for worker in fixture.workers]

    assert asyncio.run(scenario()) == [5, 5]


def test_sessions_of_a_dead_worker_are_void_and_the_worker_is_replaced_once():
    async def scenario():
        fixture = Fixture()
        fixture.handles[0].kill()
        first = await asyncio.gather(*(fixture.pool.run(Spec(str(i))) for i in range(4)))
        second = await asyncio.gather(*(fixture.pool.run(Spec(str(i))) for i in range(4)))
        return first, second, fixture

    first, second, fixture = asyncio.run(scenario())
    assert [t.outcome for t in first].count(Outcome.VOID) == 1
    assert {t.void_reason for t in first if t.outcome is Outcome.VOID} == {"worker_lost"}
    assert all(t.outcome is Outcome.PASS for t in second)
    assert fixture.events == ["worker_replaced"]
    assert len(fixture.workers) == 3


def test_a_session_without_an_answer_is_void_after_the_limit():
    async def scenario():
        fixture = Fixture(num_workers=1, session_limit_s=0.01)
        return await fixture.pool.run(Spec("slow")), fixture.events

    trajectory, events = asyncio.run(scenario())
    assert (trajectory.outcome, trajectory.void_reason) == (Outcome.VOID, "worker_overdue")
    assert events == ["session_overdue"]


def test_closing_reaches_every_worker_also_past_a_dead_one():
    async def scenario():
        fixture = Fixture(num_workers=3)
        fixture.handles[1].kill()
        await fixture.pool.close()
        return [worker.is_closed for worker in fixture.workers], fixture.events

    closed, events = asyncio.run(scenario())
    assert closed == [True, False, True]
    assert events == ["worker_not_closed"]
