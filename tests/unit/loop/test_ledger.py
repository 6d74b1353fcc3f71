"""The ledger of sessions adds up, and says when it does not."""

import asyncio

import pytest

from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan
from rlmix.loop.ledger import LEDGER_FILE, SessionLedger, account
from rlmix.loop.rollout import Rollout
from rlmix.loop.stream import TaskStream
from rlmix.observe.jsonl import read_jsonl

TURN = Turn(
    output_ids=(1,),
    sampler_logprobs=(-0.1,),
    version_spans=(VersionSpan(version=0, start=0, end=1),),
)


def trajectory(outcome=Outcome.PASS, **changes):
    return Trajectory(
        session_id="s", group_id="g", task_id="t", prompt_ids=(1,), turns=(TURN,),
        stop_reason=StopReason.SUBMITTED, outcome=outcome, reward=0.0, **changes,
    )  # fmt: skip


def lines(folder):
    return list(read_jsonl(folder / LEDGER_FILE))


def test_every_session_of_a_rollout_is_in_the_ledger_with_its_end(tmp_path):
    ledger = SessionLedger(tmp_path, attempt=1)
    never = asyncio.Event()

    async def run_session(ticket, member, attempt):
        if ticket.index == 2:
            await never.wait()  # Under way when the rollout stops.
        if ticket.index == 1 and member == 0 and attempt == 0:
            return trajectory(Outcome.VOID, void_reason="engine_lost")
        return trajectory(rehomed=1 if member == 1 else 0)

    async def scenario():
        rollout = Rollout(
            stream=TaskStream(["a", "b", "c"], seed=0), run_session=run_session, group_size=2,
            max_open_groups=3, concurrency=8, max_staleness=4, void_pause_s=0.0, ledger=ledger,
        )  # fmt: skip
        rollout.start()
        await rollout.take(2, trainer_version=0)
        await rollout.stop()

    asyncio.run(scenario())
    ledger.close()
    result = account(lines(tmp_path), ended_in_order=[1])
    # Two groups of two and one void that was tried again; taking them opened two more places.
    assert (result.finished, result.void, result.rehomed) == (4, 1, 2)
    assert result.cut_off == result.begun - 5 >= 2
    assert result.groups == {"trained": 2}
    assert result.is_sound


def write(folder, attempt, *entries):
    ledger = SessionLedger(folder, attempt=attempt)
    for what, session in entries:
        if what == "ended":
            ledger.ended(session, trajectory())
        else:
            getattr(ledger, what)(session)
    ledger.close()


def test_what_was_under_way_when_a_controller_died_is_lost_with_it_and_may_be_begun_again(tmp_path):
    write(tmp_path, 1, ("begun", "a"), ("ended", "a"), ("begun", "b"))
    write(tmp_path, 2, ("begun", "b"), ("ended", "b"))
    result = account(lines(tmp_path), ended_in_order=[2])
    assert (result.begun, result.finished, result.lost_with_controller) == (3, 2, 1)
    assert result.is_sound
    # The same lines of an attempt that ended in order: one is missing.
    assert account(lines(tmp_path), ended_in_order=[1, 2]).missing == 1


@pytest.mark.parametrize(
    "entries",
    [
        [("begun", "a"), ("ended", "a"), ("ended", "a")],
        [("begun", "a"), ("begun", "a"), ("ended", "a")],
        [("ended", "a")],
    ],
)
def test_what_is_counted_twice_or_out_of_nowhere_is_found(tmp_path, entries):
    write(tmp_path, 1, *entries)
    result = account(lines(tmp_path), ended_in_order=[1])
    assert result.twice == 1
    assert not result.is_sound
