"""Groups in flight: the open-group bound, the staleness bound, voids, failures."""

import asyncio

import pytest

from rlmix.core.errors import EngineError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan
from rlmix.loop.rollout import Rollout
from rlmix.loop.stream import TaskStream, Ticket


def trajectory(ticket: Ticket, member: int, *, version: int = 0, void: bool = False) -> Trajectory:
    turn = Turn(
        output_ids=(1, 2),
        sampler_logprobs=(-0.1, -0.2),
        version_spans=(VersionSpan(version=version, start=0, end=2),),
    )
    return Trajectory(
        session_id=f"{ticket.group_id}.{member}",
        group_id=ticket.group_id,
        task_id=ticket.task_id,
        prompt_ids=(5,),
        turns=(turn,),
        stop_reason=StopReason.ENGINE_LOST if void else StopReason.SUBMITTED,
        outcome=Outcome.VOID if void else Outcome.PASS,
        reward=0.0 if void else 1.0,
    )


def make(run_session, **changes) -> tuple[Rollout, TaskStream]:
    stream = TaskStream([f"t{i}" for i in range(100)], seed=0)
    settings = {"group_size": 4, "max_open_groups": 3, "concurrency": 6, "max_staleness": 2}
    settings |= {"void_pause_s": 0.0}
    return Rollout(stream=stream, run_session=run_session, **(settings | changes)), stream


def test_at_most_the_allowed_groups_and_sessions_are_open():
    running = peak = 0

    async def session(ticket, member, attempt):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0)
        running -= 1
        return trajectory(ticket, member)

    async def scenario():
        rollout, stream = make(session)
        rollout.start()
        groups = []
        for _ in range(5):
            groups += await rollout.take(2, trainer_version=0)
            assert stream.num_open <= 3
        await rollout.stop()
        return groups

    groups = asyncio.run(scenario())
    assert len(groups) == 10
    assert all(len(group.members) == 4 for group in groups)
    assert peak == 6


def test_a_group_older_than_the_bound_is_dropped_counted_and_sampled_again():
    versions = {}

    async def session(ticket, member, attempt):
        versions[ticket.group_id] = 3 if ticket.attempt else 0
        return trajectory(ticket, member, version=versions[ticket.group_id])

    async def scenario():
        rollout, _ = make(session, max_open_groups=1)
        rollout.start()
        await asyncio.sleep(0.01)
        # Version 3 against tokens of version 0 is a lag of 3, one more than allowed.
        group = (await rollout.take(1, trainer_version=3))[0]
        await rollout.stop()
        return group, rollout.counts.stale_groups

    group, stale = asyncio.run(scenario())
    assert group.ticket.index == 0
    assert group.ticket.attempt == 1
    assert stale == 1


def test_a_lag_equal_to_the_bound_is_still_admitted():
    async def session(ticket, member, attempt):
        return trajectory(ticket, member, version=1)

    async def scenario():
        rollout, _ = make(session)
        rollout.start()
        groups = await rollout.take(1, trainer_version=3)
        await rollout.stop()
        return groups, rollout.counts.stale_groups

    groups, stale = asyncio.run(scenario())
    assert groups[0].ticket.attempt == 0
    assert stale == 0


def test_a_void_session_is_retried_once_and_leaves_the_group_baseline_when_void_again():
    calls = {}

    async def session(ticket, member, attempt):
        calls[member] = attempt
        return trajectory(ticket, member, void=member == 1 or (member == 2 and attempt == 0))

    async def scenario():
        rollout, _ = make(session, max_open_groups=1)
        rollout.start()
        group = (await rollout.take(1, trainer_version=0))[0]
        counts = rollout.drain_counts()
        await rollout.stop()
        return group, counts

    group, counts = asyncio.run(scenario())
    assert [m.outcome for m in group.members].count(Outcome.VOID) == 1
    assert len(group.valid) == 3
    assert counts.voids >= 3
    assert counts.retries >= 2
    assert counts.void_reasons["engine_lost"] == counts.voids


def test_a_group_with_one_valid_member_is_sampled_again():
    async def session(ticket, member, attempt):
        return trajectory(ticket, member, void=ticket.attempt == 0 and member > 0)

    async def scenario():
        rollout, _ = make(session, max_open_groups=1, void_retries=0)
        rollout.start()
        group = (await rollout.take(1, trainer_version=0))[0]
        await rollout.stop()
        return group, rollout.counts.void_groups

    group, void_groups = asyncio.run(scenario())
    assert group.ticket.attempt == 1
    assert void_groups == 1


def test_a_bug_in_a_session_stops_the_run_instead_of_hanging_it():
    async def session(ticket, member, attempt):
        if member == 2:
            raise KeyError("bug")
        await asyncio.sleep(60)

    async def scenario():
        rollout, _ = make(session)
        rollout.start()
        try:
            with pytest.raises(KeyError, match="bug"):
                await asyncio.wait_for(rollout.take(1, trainer_version=0), timeout=5)
        finally:
            await rollout.stop()
        return len(asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1


def test_stopping_returns_what_was_in_flight_to_the_stream():
    async def session(ticket, member, attempt):
        await asyncio.sleep(60)

    async def scenario():
        rollout, stream = make(session)
        rollout.start()
        await asyncio.sleep(0.01)
        await rollout.stop()
        return stream

    stream = asyncio.run(scenario())
    assert stream.num_open == 0
    assert [index for index, _ in stream.state()["pending"]] == [0, 1, 2]


def test_sampling_that_only_gives_voids_ends_with_the_reason():
    async def session(ticket, member, attempt):
        return trajectory(ticket, member, void=True)

    async def scenario():
        rollout, _ = make(session, max_void_groups_in_a_row=5)
        rollout.start()
        try:
            await asyncio.wait_for(rollout.take(1, trainer_version=0), timeout=5)
        finally:
            await rollout.stop()

    with pytest.raises(EngineError, match=r"5 groups in a row .* engine_lost"):
        asyncio.run(scenario())
