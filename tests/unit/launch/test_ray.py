"""The local Ray: actors answer, their output has a home, and nothing stays behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlmix.core.errors import EngineError, LaunchError
from rlmix.launch.process import ChildProcess
from rlmix.launch.ray import RayCluster
from rlmix.launch.reaper import run_processes

pytestmark = pytest.mark.slow


def test_a_process_that_imported_ray_before_is_told_at_once(tmp_path: Path) -> None:
    """Its Ray would ask for a token that the process does not know, for minutes."""
    program = (
        "import ray, sys; from pathlib import Path; from rlmix.launch.ray import RayCluster;"
        "RayCluster.start('test', num_cpus=1, log_dir=Path(sys.argv[1]))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "LaunchError: launch: ray was imported in this process before rlmix" in done.stderr
    assert list(tmp_path.iterdir()) == []


class Counter:
    """Plain methods: one at a time."""

    def __init__(self, start: int, *, step: int) -> None:
        if step == 0:
            raise ValueError("step must not be 0")
        self.value = start
        self.step = step

    def add(self) -> int:
        before = self.value
        time.sleep(0.02)
        self.value = before + self.step
        return self.value

    def word(self) -> str:
        print("a line on stdout", flush=True)
        print("a line on stderr", file=sys.stderr, flush=True)
        return os.environ["WORD"]

    def fail(self, kind: str) -> None:
        raise EngineError("engine: x") if kind == "ours" else KeyError("bug")


class Sleeper:
    """Coroutine methods: all at once; owns a child like a replica does."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.cancelled = 0
        self.child: ChildProcess | None = None

    async def nap(self, duration_s: float) -> None:
        try:
            await asyncio.sleep(duration_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def num_cancelled(self) -> int:
        return self.cancelled

    async def start_child(self) -> tuple[int, int]:
        self.child = ChildProcess.start(
            ["sleep", "600"], name="s", log_path=Path(self.folder) / "sleep.log"
        )
        return os.getpid(), self.child.pid


def send_classes_by_value() -> None:
    """Actors cannot import this file. Only after a cluster was started: see `launch.ray`."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    started = RayCluster.start("test", num_cpus=16, log_dir=tmp_path_factory.mktemp("logs"))
    send_classes_by_value()
    yield started
    assert started.stop() <= 3  # Ray's node agents may need the reaper
    assert started.stop() == 0


def test_plain_methods_run_one_at_a_time(cluster):
    counter = cluster.spawn(Counter, name="counter", args=(10,), kwargs={"step": 2})

    async def scenario():
        return await asyncio.gather(*[counter.call("add") for _ in range(5)])

    assert sorted(asyncio.run(scenario())) == [12, 14, 16, 18, 20]  # none was lost


def test_output_goes_to_the_named_log_and_the_environment_is_set(cluster):
    counter = cluster.spawn(
        Counter, name="talker", args=(0,), kwargs={"step": 1}, env={"WORD": "yes"}
    )
    assert asyncio.run(counter.call("word")) == "yes"
    text = (cluster.log_dir / "talker.log").read_text()
    assert "a line on stdout\n" in text
    assert "a line on stderr\n" in text


def test_errors_keep_their_type_and_bugs_their_remote_traceback(cluster):
    counter = cluster.spawn(Counter, name="failing", args=(0,), kwargs={"step": 1})
    with pytest.raises(EngineError, match="engine: x"):
        asyncio.run(counter.call("fail", "ours"))
    with pytest.raises(KeyError) as caught:
        asyncio.run(counter.call("fail", "bug"))
    assert "test_ray.py" in "".join(caught.value.__notes__)
    broken = cluster.spawn(Counter, name="broken", args=(0,), kwargs={"step": 0})
    for _ in range(2):
        with pytest.raises(ValueError, match="step must not be 0"):
            asyncio.run(broken.call("add"))


def test_cancelling_the_caller_or_its_limit_cancels_the_remote_coroutine(cluster, tmp_path):
    sleeper = cluster.spawn(Sleeper, name="sleeper", args=(str(tmp_path),))

    async def scenario():
        assert await sleeper.call("num_cancelled") == 0  # it is up
        with pytest.raises(TimeoutError):
            await sleeper.call("nap", 600, timeout_s=0.5)
        task = asyncio.create_task(sleeper.call("nap", 600))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if await sleeper.call("num_cancelled") == 2:
                return True
            await asyncio.sleep(0.02)
        return False

    assert asyncio.run(scenario())


def test_a_killed_actor_takes_its_child_along_and_its_calls_say_so(cluster, tmp_path, capfd):
    sleeper = cluster.spawn(Sleeper, name="victim", args=(str(tmp_path),))

    async def scenario():
        actor_pid, child_pid = await sleeper.call("start_child")
        waiting = asyncio.create_task(sleeper.call("nap", 600))
        await asyncio.sleep(0.1)
        started_s = time.monotonic()
        os.kill(actor_pid, signal.SIGKILL)
        with pytest.raises(LaunchError, match="actor victim is gone"):
            await waiting
        noticed_s = time.monotonic() - started_s
        while Path(f"/proc/{child_pid}").exists() and time.monotonic() - started_s < 20:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0)  # Ray's own comment on the death would come in this time
        return noticed_s, Path(f"/proc/{child_pid}").exists()

    noticed_s, child_lives = asyncio.run(scenario())
    assert not child_lives
    assert noticed_s < 20.0
    assert capfd.readouterr() == ("", "")


DRIVER = """
import asyncio, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_ray import Sleeper, send_classes_by_value
from rlmix.launch.ray import RayCluster
folder = Path(sys.argv[1])
cluster = RayCluster.start(
    "driver", num_cpus=4, log_dir=folder,
    on_lost=[sys.executable, "-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()",
             str(folder / "lost")],
)
send_classes_by_value()
try:
    sleeper = cluster.spawn(Sleeper, name="sleeper", args=(str(folder),))
    pids = asyncio.run(sleeper.call("start_child"))
    (folder / "up").write_text(f"{cluster.tag} {cluster.temp_dir} {pids[0]} {pids[1]}")
    time.sleep(600)
except KeyboardInterrupt:
    cluster.stop()
    (folder / "stopped").write_text("")
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_a_driver_that_was_interrupted_or_killed(tmp_path, signum):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(Path(__file__).parent)],
        start_new_session=True,
    )
    up = tmp_path / "up"
    while not up.exists() or not up.read_text():
        assert driver.poll() is None
        time.sleep(0.05)
    tag, temp_dir, actor_pid, child_pid = up.read_text().split()
    running = run_processes(tag, temp_dir)
    assert {int(actor_pid), int(child_pid)} <= set(running)
    assert len(running) >= 6  # gcs, raylet, agents, the actor, its child
    if signum == signal.SIGINT:
        os.killpg(driver.pid, signum)  # as the terminal does: the whole foreground group
    else:
        driver.kill()
    started_s = time.monotonic()
    driver.wait(timeout=20)
    while (left := run_processes(tag, temp_dir)) and time.monotonic() - started_s < 30:
        time.sleep(0.05)
    assert left == []
    while Path(temp_dir).exists() and time.monotonic() - started_s < 30:
        time.sleep(0.05)
    assert not Path(temp_dir).exists()
    assert (tmp_path / "stopped").exists() == (signum == signal.SIGINT)
    # What the driver could not do itself is done for it, and only then.
    lost = tmp_path / "lost"
    while signum == signal.SIGKILL and not lost.exists() and time.monotonic() - started_s < 30:
        time.sleep(0.05)
    assert lost.exists() == (signum == signal.SIGKILL)
    print(f"{signum.name}: all gone after {time.monotonic() - started_s:.1f} s")
