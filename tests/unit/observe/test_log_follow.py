"""Logs of pools and replicas, followed over restarts, and a stop asked from another machine."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rlmix.core.errors import ConfigError
from rlmix.observe import lock, runs
from rlmix.observe.log_follow import Follower, choose_logs, follow
from rlmix.observe.run_dir import RunDir
from rlmix.observe.run_state import RunState
from rlmix.observe.runs import is_over
from rlmix.observe.stop_request import STOP_FILE, request_stop, take_stop_request

NAMES = (
    "engine-h100-0", "engine-h100-1", "engine-h100_fp8-0", "replica-h100-0-1", "replica-h100-0-2",
    "replica-h100_fp8-0-1", "router", "trainer", "worker-0",
)  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with RunDir.create(tmp_path, "x") as run:
        for name in NAMES:
            (run.logs / f"{name}.log").write_text(f"{name} begins\n")
        return run.path


def chosen(path: Path, **asked: str) -> list[str]:
    return [log.process for log in choose_logs(path, **asked)]


def test_a_pool_s_logs_are_those_of_its_replicas_and_of_no_pool_that_begins_alike(
    path: Path,
) -> None:
    assert chosen(path) == sorted(NAMES)
    assert chosen(path, pool="h100") == [
        "engine-h100-0", "engine-h100-1", "replica-h100-0-1", "replica-h100-0-2",
    ]  # fmt: skip
    assert chosen(path, pool="h100_fp8") == ["engine-h100_fp8-0", "replica-h100_fp8-0-1"]
    expected = ["engine-h100-0", "replica-h100-0-1", "replica-h100-0-2"]
    assert chosen(path, replica="h100-0") == expected
    assert chosen(path, pool="h100", replica="0") == expected
    assert chosen(path, process="engine", replica="h100-0") == ["engine-h100-0"]


def test_an_unknown_replica_is_answered_with_those_that_are_there(path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"x: no log of --pool h100, --replica 7; there are those of h100-0, h10"
    ):
        choose_logs(path, pool="h100", replica="7")


def test_following_gives_whole_lines_of_old_and_new_files_and_ends_with_the_run(
    path: Path,
) -> None:
    logs = path / "logs"
    follower = Follower(lambda: choose_logs(path, pool="h100"))
    states = iter([False, False, False, True])

    def meanwhile() -> None:
        number = next(numbers)
        if number == 0:
            with (logs / "engine-h100-0.log").open("a") as file:
                file.write("first\nsec")
            (logs / "router.log").write_text("router begins\nnot of this pool\n")
        elif number == 1:
            with (logs / "engine-h100-0.log").open("a") as file:
                file.write("ond\n")
            (logs / "replica-h100-1-2.log").write_text("started again\n")
        else:
            # Written between the last look and the end: it must not be lost.
            (logs / "engine-h100-1.log").write_text("cut\n")

    numbers = iter(range(9))
    lines = list(follow(follower, is_over=lambda: next(states), sleep=lambda _: meanwhile()))
    assert lines == [
        ("engine-h100-0", "first"),
        ("engine-h100-0", "second"),
        ("replica-h100-1-2", "started again"),
        ("engine-h100-1", "cut"),
    ]


def test_a_stop_request_is_seen_once(path: Path) -> None:
    assert not take_stop_request(path)
    request_stop(path)
    request_stop(path)
    assert take_stop_request(path)
    assert not take_stop_request(path)


def test_a_run_of_another_machine_is_stopped_through_its_folder(tmp_path: Path) -> None:
    """The owner's host is another one and its lock is not seen here, as on some file systems."""
    run = RunDir.create(tmp_path, "far")
    attempt = run.manifest.attempts[-1]
    there = replace(attempt.owner, host="node7")
    (run.path / lock.LOCK_FILE).write_text(
        f'{{"pid": 1, "started_s": {there.started_s}, "host": "node7"}}'
    )
    run._lock.release()
    assert not is_over(run.path)

    def owner() -> None:
        while not take_stop_request(run.path):
            time.sleep(0.02)
        run.close("interrupted")

    thread = threading.Thread(target=owner)
    thread.start()
    result = runs.stop(run.path, limit_s=60)
    thread.join()
    assert (result.is_stopped, result.state) == (True, RunState.INTERRUPTED)
    assert is_over(run.path)


def test_a_machine_that_is_gone_is_said_to_be_and_the_request_does_not_wait_for_the_next_attempt(
    tmp_path: Path,
) -> None:
    run = RunDir.create(tmp_path, "gone")
    (run.path / lock.LOCK_FILE).write_text('{"pid": 1, "started_s": 1.0, "host": "node7"}')
    run._lock.release()
    result = runs.stop(run.path, limit_s=0.2)
    assert not result.is_stopped
    assert "or node7 is gone: then `rlmix train --resume gone` continues it" in result.message
    assert not (run.path / STOP_FILE).exists()
