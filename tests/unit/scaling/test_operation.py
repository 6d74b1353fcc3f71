"""A scale operation: order of steps, deadline, loss, cancel, rollback, one id for one request."""

import itertools
import random

import pytest

from rlmix.core.errors import ConfigError
from rlmix.scaling.operation import (
    Happened,
    Operation,
    Outcome,
    Status,
    Step,
    Task,
    advance,
    begin,
    cancel,
    check_deadlines,
    join,
    stay,
)


def start(
    added: dict[str, str] | None = None,
    removed: dict[str, str] | None = None,
    *,
    known: dict[str, Operation] | None = None,
    operation_id: str = "op-1",
) -> tuple[Operation, tuple[Task, ...]]:
    added = {"h100-2": "h100"} if added is None else added
    removed = {"a100-0": "a100"} if removed is None else removed
    replicas_from = {"h100": 2, "a100": 1}
    targets = {"h100": 2 + len(added), "a100": 1 - len(removed)}
    return begin(
        operation_id,
        targets,
        replicas_from=replicas_from,
        added=added,
        removed=removed,
        drain_s=30.0,
        now_s=0.0,
        known=known or {},
    )


def tell(
    operation: Operation,
    replica: str,
    step: Step,
    outcome: Outcome = Outcome.DONE,
    reason: str = "",
) -> tuple[Operation, tuple[Task, ...]]:
    return advance(
        operation,
        Happened(replica=replica, step=step, outcome=outcome, reason=reason),
        now_s=10.0,
    )


def steps(tasks: tuple[Task, ...]) -> list[tuple[str, Step]]:
    return [(task.replica, task.step) for task in tasks]


def test_a_new_replica_serves_only_after_boot_catch_up_and_verification() -> None:
    operation, tasks = start(removed={})
    asked = steps(tasks)
    for step in (Step.BOOTING, Step.CATCHING_UP, Step.VERIFYING, Step.ROTATING_IN):
        assert operation.status is Status.RUNNING
        operation, tasks = tell(operation, "h100-2", step)
        asked += steps(tasks)
    assert [step for _, step in asked] == [
        Step.BOOTING, Step.CATCHING_UP, Step.VERIFYING, Step.ROTATING_IN,
    ]  # fmt: skip
    assert operation.status is Status.DONE
    assert operation.to_event() == {
        "operation": "op-1",
        "status": "done",
        "targets": {"h100": 3, "a100": 1},
        "from": {"h100": 2, "a100": 1},
        "progress": 1.0,
        "replicas": {"h100-2": "serving"},
        "reason": "",
    }


def test_a_drained_replica_stops_and_an_undrained_one_re_homes_at_the_deadline() -> None:
    operation, tasks = start(added={})
    assert steps(tasks) == [("a100-0", Step.CLOSING)]
    operation, tasks = tell(operation, "a100-0", Step.CLOSING)
    assert steps(tasks) == [("a100-0", Step.DRAINING)]
    drained, tasks = tell(operation, "a100-0", Step.DRAINING)
    assert steps(tasks) == [("a100-0", Step.STOPPING)]
    assert check_deadlines(operation, now_s=39.0) == (operation, ())
    late, tasks = check_deadlines(operation, now_s=40.0)
    assert steps(tasks) == [("a100-0", Step.REHOMING)]
    late, tasks = tell(late, "a100-0", Step.REHOMING)
    assert steps(tasks) == [("a100-0", Step.STOPPING)]
    for one in (drained, late):
        done, tasks = tell(one, "a100-0", Step.STOPPING)
        assert (done.status, tasks) == (Status.DONE, ())


def test_news_of_a_step_that_is_over_is_ignored() -> None:
    operation, _ = start(removed={})
    operation, _ = tell(operation, "h100-2", Step.BOOTING)
    assert tell(operation, "h100-2", Step.BOOTING) == (operation, ())
    assert tell(operation, "h100-9", Step.BOOTING) == (operation, ())


def test_a_failed_growth_rolls_back_and_opens_what_was_closing() -> None:
    operation, _ = start()
    operation, _ = tell(operation, "a100-0", Step.CLOSING)
    operation, tasks = tell(operation, "h100-2", Step.BOOTING, Outcome.FAILED, "no such device")
    assert set(steps(tasks)) == {("h100-2", Step.STOPPING), ("a100-0", Step.REOPENING)}
    assert operation.status is Status.ROLLING_BACK
    operation, _ = tell(operation, "h100-2", Step.STOPPING)
    operation, _ = tell(operation, "a100-0", Step.REOPENING)
    assert (operation.status, operation.reason) == (Status.FAILED, "no such device")
    assert operation.replicas["a100-0"].step is Step.SERVING
    assert operation.replicas["h100-2"].step is Step.GONE


def test_cancelling_stops_what_boots_and_drains_what_serves_already() -> None:
    operation, _ = start(added={"h100-2": "h100", "h100-3": "h100"}, removed={})
    for step in (Step.BOOTING, Step.CATCHING_UP, Step.VERIFYING, Step.ROTATING_IN):
        operation, _ = tell(operation, "h100-2", step)
    operation, tasks = cancel(operation, reason="asked for", now_s=20.0)
    assert set(steps(tasks)) == {("h100-2", Step.CLOSING), ("h100-3", Step.STOPPING)}
    for replica, step in (
        ("h100-3", Step.STOPPING),
        ("h100-2", Step.CLOSING),
        ("h100-2", Step.DRAINING),
        ("h100-2", Step.STOPPING),
    ):
        operation, _ = tell(operation, replica, step)
    assert (operation.status, operation.reason) == (Status.CANCELLED, "asked for")
    assert cancel(operation, reason="again", now_s=30.0) == (operation, ())


def test_a_spot_loss_ends_a_removal_and_fails_a_growth() -> None:
    removal, _ = start(added={})
    removal, tasks = tell(removal, "a100-0", Step.CLOSING, Outcome.LOST, "taken back")
    assert (removal.status, tasks) == (Status.DONE, ())
    growth, _ = start(removed={})
    growth, _ = tell(growth, "h100-2", Step.BOOTING, Outcome.LOST, "taken back")
    assert (growth.status, growth.reason) == (Status.FAILED, "taken back")


def test_the_same_id_is_the_same_operation_and_one_runs_at_a_time() -> None:
    first, _ = start()
    assert start(known={"op-1": first}) == (first, ())
    with pytest.raises(ConfigError, match="an id stands for one request"):
        start(added={}, known={"op-1": first})
    with pytest.raises(ConfigError, match=r"op-1 is under way .0% done"):
        start(known={"op-1": first}, operation_id="op-2")
    done, _ = start(added={}, removed={}, operation_id="op-3")
    assert done.status is Status.DONE


def test_chosen_replicas_must_lead_to_the_targets() -> None:
    with pytest.raises(ConfigError, match=r"pool h100 has 2 replicas, and .1 do not make 5"):
        begin(
            "op",
            {"h100": 5},
            replicas_from={"h100": 2},
            added={"h100-2": "h100"},
            removed={},
            drain_s=1.0,
            now_s=0.0,
            known={},
        )


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_it_ends_and_nothing_unverified_serves(seed: int) -> None:
    draw = random.Random(seed)
    operation, tasks = start(
        added={f"h100-{i}": "h100" for i in range(2, 5)}, removed={"a100-0": "a100"}
    )
    pending, verified, served = list(tasks), set(), set()
    for now_s in itertools.count(0.0, 5.0):
        if operation.status.is_final:
            break
        if draw.random() < 0.03:
            operation, more = cancel(operation, reason="drawn", now_s=now_s)
            pending += more
        operation, more = check_deadlines(operation, now_s=now_s)
        pending += more
        task = pending.pop(draw.randrange(len(pending)))
        outcome = draw.choices(tuple(Outcome), (0.85, 0.1, 0.05))[0]
        if task.step is operation.replicas[task.replica].step and outcome is Outcome.DONE:
            verified |= {task.replica} if task.step is Step.VERIFYING else set()
            served |= {task.replica} if task.step is Step.ROTATING_IN else set()
        operation, more = advance(
            operation,
            Happened(replica=task.replica, step=task.step, outcome=outcome, reason="drawn"),
            now_s=now_s,
        )
        pending += more
        assert now_s < 1000.0
    assert served <= verified
    if operation.status is not Status.DONE:
        assert all(one.step is Step.GONE for one in operation.replicas.values() if one.is_growth)


def moving(**known: Operation) -> tuple[Operation, tuple[Task, ...]]:
    return begin(
        "leave-1", {"h100": 2}, replicas_from={"h100": 2}, added={}, removed={},
        moved={"h100-0": "h100"}, drain_s=20.0, now_s=0.0, known=known,
    )  # fmt: skip


def test_a_replica_that_moves_drains_like_one_that_goes_and_its_pool_keeps_its_number() -> None:
    operation, tasks = moving()
    assert steps(tasks) == [("h100-0", Step.CLOSING)]
    operation, tasks = tell(operation, "h100-0", Step.CLOSING)
    assert steps(tasks) == [("h100-0", Step.DRAINING)]
    # Draining since 10 s: its own 20 s are over at 30.
    assert check_deadlines(operation, now_s=29.9)[1] == ()
    operation, tasks = check_deadlines(operation, now_s=30.0)
    assert steps(tasks) == [("h100-0", Step.REHOMING)]
    operation, _ = tell(operation, "h100-0", Step.REHOMING)
    operation, _ = tell(operation, "h100-0", Step.STOPPING)
    assert (operation.status, operation.targets) == (Status.DONE, {"h100": 2})


def test_a_machine_that_leaves_joins_what_is_under_way_and_no_rollback_brings_it_back() -> None:
    operation, _ = start()
    operation, tasks = join(
        operation, {"h100-0": "h100", "a100-0": "a100"}, drain_s=5.0, now_s=10.0
    )
    # a100-0 is on its way out already.
    assert steps(tasks) == [("h100-0", Step.CLOSING)]
    assert not operation.replicas["a100-0"].is_move
    operation, _ = tell(operation, "h100-0", Step.CLOSING)
    operation, tasks = cancel(operation, reason="no", now_s=11.0)
    assert sorted(steps(tasks)) == [("a100-0", Step.REOPENING), ("h100-2", Step.STOPPING)]
    assert operation.replicas["h100-0"].step is Step.DRAINING
    # Its own deadline, not the 30 s of the operation.
    assert steps(check_deadlines(operation, now_s=15.0)[1]) == [("h100-0", Step.REHOMING)]


def test_a_machine_that_stays_after_all_opens_what_still_drains() -> None:
    operation, _ = moving()
    operation, _ = tell(operation, "h100-0", Step.CLOSING)
    operation, tasks = stay(operation, ["h100-0", "h100-1"], reason="stays", now_s=11.0)
    assert steps(tasks) == [("h100-0", Step.REOPENING)]
    operation, _ = tell(operation, "h100-0", Step.REOPENING)
    assert operation.status is Status.DONE
    # What is being stopped is not opened any more.
    operation, _ = moving()
    operation, _ = tell(operation, "h100-0", Step.CLOSING)
    operation, _ = tell(operation, "h100-0", Step.DRAINING)
    assert stay(operation, ["h100-0"], reason="stays", now_s=11.0) == (operation, ())
