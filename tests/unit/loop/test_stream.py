"""The task order: deterministic, complete, and resumable."""

import pytest

from rlmix.core.errors import DataError
from rlmix.loop.stream import TaskStream

TASKS = ["a", "b", "c", "d"]


def test_an_epoch_hands_out_every_task_once_and_the_next_epoch_again():
    stream = TaskStream(TASKS, seed=1)
    first = [stream.take().task_id for _ in range(4)]
    second = [stream.take().task_id for _ in range(4)]
    assert sorted(first) == TASKS
    assert sorted(second) == TASKS


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    def order(seed: int) -> list[str]:
        stream = TaskStream([str(i) for i in range(50)], seed=seed)
        return [stream.take().task_id for _ in range(50)]

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_a_returned_ticket_comes_next_with_a_new_group_name():
    stream = TaskStream(TASKS, seed=1)
    first, second = stream.take(), stream.take()
    stream.give_back(first)
    again = stream.take()
    assert (again.index, again.task_id, again.attempt) == (0, first.task_id, 1)
    assert {first.group_id, again.group_id} == {"g000000", "g000000r1"}
    stream.finish(second)
    assert stream.take().index == 2


def test_a_restored_stream_repeats_what_was_open_and_nothing_that_was_done():
    stream = TaskStream(TASKS, seed=1)
    done, open_one, open_two = stream.take(), stream.take(), stream.take()
    stream.finish(done)
    restored = TaskStream(TASKS, seed=1)
    restored.restore(stream.state())
    assert [restored.take().index for _ in range(3)] == [open_one.index, open_two.index, 3]


def test_the_uninterrupted_and_the_resumed_run_use_the_same_tasks():
    straight = TaskStream(TASKS, seed=9)
    reference = [straight.take() for _ in range(10)]
    first = TaskStream(TASKS, seed=9)
    for ticket in [first.take() for _ in range(4)]:
        first.finish(ticket)
    in_flight = [first.take() for _ in range(3)]
    second = TaskStream(TASKS, seed=9)
    second.restore(first.state())
    resumed = [second.take() for _ in range(6)]
    assert [t.task_id for t in resumed] == [t.task_id for t in reference[4:]]
    assert [t.index for t in resumed[:3]] == [t.index for t in in_flight]


def test_an_empty_source_is_refused():
    with pytest.raises(DataError, match=r"tasks\.limit"):
        TaskStream([], seed=0)
