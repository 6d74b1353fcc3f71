"""What a run remembers of its scale operations, and where the next attempt takes over."""

from dataclasses import replace

import pytest

from rlmix.core.errors import DataError
from rlmix.scaling.history import (
    KEPT_OPERATIONS,
    STATE_FILE,
    ScaleState,
    read_state,
    restart,
    write_state,
)
from rlmix.scaling.operation import Happened, Outcome, Step, advance, begin, cancel

CONFIGURED = {"h100": 1, "a100": 1}


def begun(name="x"):
    return begin(
        name, {"h100": 2, "a100": 0}, replicas_from=CONFIGURED,
        added={"h100-1": "h100"}, removed={"a100-0": "a100"}, drain_s=5.0, now_s=1.0, known={},
    )[0]  # fmt: skip


def finished(operation):
    for replica, one in list(operation.replicas.items()):
        while not operation.replicas[replica].step.is_final:
            step = operation.replicas[replica].step
            happened = Happened(replica=replica, step=step, outcome=Outcome.DONE)
            operation, _ = advance(operation, happened, now_s=2.0)
        assert one.pool
    return operation


FRESH = ScaleState(configured=CONFIGURED, targets=CONFIGURED)


def test_a_state_survives_its_file(tmp_path):
    state = FRESH.with_operation(finished(begun())).with_operation(begun("y"))
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert read_state(tmp_path).running.id == "y"
    assert read_state(tmp_path / "other") == ScaleState()
    (tmp_path / STATE_FILE).write_text("{}")
    with pytest.raises(DataError, match="delete it"):
        read_state(tmp_path)


def test_a_finished_operation_moves_the_targets_and_one_that_was_undone_does_not():
    assert FRESH.with_operation(finished(begun())).targets == {"h100": 2, "a100": 0}
    undone, _ = cancel(begun(), reason="no", now_s=2.0)
    assert FRESH.with_operation(finished(undone)).targets == CONFIGURED


def test_a_replica_that_moved_is_no_loss_and_machines_that_leave_are_remembered(tmp_path):
    operation, _ = begin(
        "leave-1", {"h100": 1}, replicas_from={"h100": 1}, added={}, removed={},
        moved={"h100-0": "h100"}, drain_s=5.0, now_s=1.0, known={},
    )  # fmt: skip
    assert FRESH.with_operation(finished(operation)).targets == CONFIGURED
    gone = Happened(replica="h100-0", step=Step.CLOSING, outcome=Outcome.LOST)
    undone, _ = advance(cancel(operation, reason="no", now_s=2.0)[0], gone, now_s=3.0)
    assert FRESH.with_operation(undone).targets == CONFIGURED
    state = replace(FRESH.with_operation(operation), leaving={"node": "leave-1"})
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    # The next attempt has its replicas elsewhere from the start.
    next_one = restart(state, CONFIGURED)
    assert (next_one.replicas, next_one.state.leaving) == (CONFIGURED, {"node": "leave-1"})


def test_old_operations_leave_the_state_and_the_one_under_way_stays():
    state = FRESH.with_operation(begun("running"))
    for number in range(KEPT_OPERATIONS + 5):
        state = state.with_operation(finished(begun(f"n{number}")))
    assert len(state.operations) == KEPT_OPERATIONS
    assert state.running.id == "running"
    assert f"n{KEPT_OPERATIONS + 4}" in state.operations
    assert "n0" not in state.operations


def test_the_next_attempt_starts_with_the_pools_as_they_were_scaled():
    state = FRESH.with_operation(finished(begun()))
    again = restart(state, CONFIGURED)
    assert again.replicas == {"h100": 2, "a100": 0}
    assert (again.again, again.operation_id) == ({}, "")
    # A number that was changed by hand wins.
    assert restart(state, {"h100": 3, "a100": 1}).replicas == {"h100": 3, "a100": 0}


def test_an_operation_under_way_is_continued_its_removals_hold_from_the_start():
    again = restart(FRESH.with_operation(begun()), CONFIGURED)
    assert again.replicas == {"h100": 1, "a100": 0}
    assert (again.again, again.operation_id) == ({"h100": 2, "a100": 0}, "x")
    assert "x" not in again.state.operations  # So that it can be begun again under its name.
    # A controller that dies again before that still knows it.
    assert restart(again.to_keep(), CONFIGURED) == again
    # If nobody would serve at the start, everybody starts.
    only, _ = begin(
        "x", {"h100": 1, "a100": 0}, replicas_from={"h100": 0, "a100": 1},
        added={"h100-0": "h100"}, removed={"a100-0": "a100"}, drain_s=5.0, now_s=1.0, known={},
    )  # fmt: skip
    state = ScaleState(configured={"h100": 0, "a100": 1}).with_operation(only)
    assert restart(state, {"h100": 0, "a100": 1}).replicas == {"h100": 0, "a100": 1}


def test_a_number_given_by_hand_wins_over_an_operation_under_way():
    state = FRESH.with_operation(begun())
    part = restart(state, {"h100": 3, "a100": 1})
    assert (part.replicas, part.again) == ({"h100": 3, "a100": 0}, {"a100": 0})
    assert restart(part.to_keep(), {"h100": 3, "a100": 1}) == part
    none = restart(state, {"h100": 3, "a100": 2})
    assert (none.replicas, none.again) == ({"h100": 3, "a100": 2}, {})
    assert none.state.operations["x"].status.value == "cancelled"
    assert none.to_keep() == none.state


def test_an_operation_that_was_being_undone_is_undone():
    undoing, _ = cancel(begun(), reason="no", now_s=2.0)
    assert not undoing.status.is_final
    again = restart(FRESH.with_operation(undoing), CONFIGURED)
    assert (again.replicas, again.again) == (CONFIGURED, {})
    assert again.state.operations["x"].status.value == "cancelled"
    assert again.state.running is None
    assert Step.BOOTING not in [one.step for one in again.state.operations["x"].replicas.values()]
