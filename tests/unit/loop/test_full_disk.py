"""A weights folder that takes no more bytes costs a version, and not the run."""

import asyncio
import json
import resource

import pytest
from safetensors.torch import load_file

from rlmix.config.compose import load_config
from rlmix.launch.handle import InProcessHandle
from rlmix.loop.progress import Progress
from rlmix.loop.training import TrainingLoop
from rlmix.model.bundle import resolve_model
from rlmix.observe.run_dir import RunDir
from rlmix.pools.fleet import Fleet
from rlmix.pools.spec import FleetSpec
from rlmix.weights.publish import publish_version
from rlmix.weights.store import list_versions

MODEL = resolve_model("bundled:tiny")
SMALL_BYTES = 200_000
"""Room for every file of a run but those with weights, which have megabytes."""


class Publisher:
    """The part of a trainer that writes versions."""

    def __init__(self, store):
        self.store = store
        self.state = load_file(MODEL / "model.safetensors")

    def publish(self, version):
        return publish_version(
            self.state, version=version, store=self.store, views=["bf16"], model_files=MODEL
        )


@pytest.fixture
def file_limit():
    """Set the size beyond which the kernel refuses to write a file; None: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes):
        chosen = soft if num_bytes is None else num_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (chosen, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def make_loop(run, *, step, published):
    fleet = Fleet(
        FleetSpec(
            replicas=(), store=run.weights, pause_mode="retract", max_parallel_boots=1,
            max_restarts=0, restart_window_s=1.0, restart_delay_s=1.0, loads_every_s=1.0,
            stall_timeout_s=1.0,
        ),
        spawn=None, router=None, on_event=run.events.append,
    )  # fmt: skip
    loop = TrainingLoop(
        config=load_config("train", ["experiment=tiny", "loop.max_staleness=2"]).config, run=run,
        trainer=InProcessHandle(Publisher(run.weights), name="trainer"), fleet=fleet,
        rollout=None, stream=None, costs=None, alarms=None,
        progress=Progress(step=step, published_version=published),
    )  # fmt: skip
    ordered = []
    loop.on_published = ordered.append
    return loop, ordered


def failures(run):
    lines = (run.path / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == "publish_failed"]


def test_within_the_staleness_bound_the_next_step_publishes(tmp_path, file_limit):
    with RunDir.create(tmp_path, "r") as run:
        loop, ordered = make_loop(run, step=3, published=2)
        file_limit(SMALL_BYTES)
        assert asyncio.run(loop.publish(3)) == {}
        file_limit(None)
        assert list_versions(run.weights, "bf16") == []
        (failure,) = failures(run)
        assert (failure["step"], failure["behind"]) == (3, 1)
        assert asyncio.run(loop.publish(4))["weights/version"] == 4.0
        assert (list_versions(run.weights, "bf16"), ordered) == ([4], [4])
        assert loop.progress.published_version == 4


def test_beyond_it_the_trainer_waits_for_room(tmp_path, file_limit, monkeypatch):
    monkeypatch.setattr("rlmix.loop.training.DISK_RETRY_S", 0.05)

    async def scenario(run):
        loop, ordered = make_loop(run, step=3, published=0)
        file_limit(SMALL_BYTES)
        task = asyncio.create_task(loop.publish(3))
        async with asyncio.timeout(60):
            while len(failures(run)) < 2:
                await asyncio.sleep(0.01)
            assert loop.phase in ("waiting for room in the weights folder", "publishing weights")
            file_limit(None)
            await task
        return ordered

    with RunDir.create(tmp_path, "r") as run:
        assert asyncio.run(scenario(run)) == [3]
