"""Scaling of a run as the loop starts it: embedded engines, control endpoint, next attempt."""

import asyncio
import sys
from dataclasses import dataclass, field, replace

import pytest
from safetensors.torch import load_file

from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.core.errors import ConfigError
from rlmix.loop.fleets import training_fleet
from rlmix.loop.live_scaling import LiveScaling, open_groups
from rlmix.loop.progress import Progress
from rlmix.loop.rollout import Rollout
from rlmix.loop.stream import TaskStream
from rlmix.model.bundle import resolve_model
from rlmix.observe.run_dir import RunDir
from rlmix.plan.build import TOKEN_VARIABLE, build_plan
from rlmix.scaling.control import ControlClient
from rlmix.weights.publish import publish_version

pytestmark = pytest.mark.slow

MODEL = resolve_model("bundled:tiny")
LIMIT_S = 180.0


@dataclass
class Training:
    """What scaling reads of the training loop."""

    phase: str = "sampling"
    progress: Progress = field(default_factory=Progress)
    is_stepping: bool = False
    waited_s: float = 0.0
    last_metrics: dict[str, float] = field(default_factory=dict)


class OneMachine:
    """A Ray of the run's own."""

    is_joined = False
    own_machine = "here"

    def machines(self):
        return []

    def avoid(self, machine_ids):
        assert not machine_ids


class Attempt:
    """One attempt of a run, with a fleet of embedded engines behind a real router."""

    def __init__(self, stage, run):
        self.stage, self.run = stage, run
        self.config = load_config("train", ["experiment=tiny", "loop.sessions_per_step=8"]).config
        facts = facts_of(self.config)
        self.plan = build_plan(self.config, facts=facts, python=sys.executable)
        self.scaling = LiveScaling(self.plan, self.config, run)
        self.counts = self.scaling.starting_replicas()

    async def start(self):
        specs = training_fleet(
            self.plan, self.config, self.run, model_dir=MODEL, counts=self.counts
        ).replicas
        fleet = self.stage.make_fleet(
            *[replace(spec, boot_timeout_s=LIMIT_S) for spec in specs],
            store=self.run.weights, canary_prompts=((5, 6, 7),), stall_timeout_s=LIMIT_S,
        )  # fmt: skip
        await fleet.start(0)
        self.rollout = Rollout(
            stream=TaskStream(["t"], seed=0), run_session=None, group_size=4,
            max_open_groups=open_groups(self.config), concurrency=1, max_staleness=4,
        )  # fmt: skip
        await self.scaling.start(
            fleet=fleet, router=self.stage.router, rollout=self.rollout, loop=Training(),
            cluster=OneMachine(), on_held=lambda held: None, show=dict,
        )  # fmt: skip
        return ControlClient.of_run(self.run.path)

    async def stop(self):
        await self.scaling.stop()
        await self.stage.fleet.stop()


async def over(client, name):
    async with asyncio.timeout(LIMIT_S):
        while True:
            operation = await asyncio.to_thread(client.operation, name)
            if operation["status"] in ("done", "failed", "cancelled"):
                return operation
            await asyncio.sleep(0.1)


def ready(document):
    return {name: pool["ready"] for name, pool in document["pools"].items()}


def test_a_pool_grows_through_the_endpoint_and_the_next_attempt_has_it_from_the_start(
    stage, tmp_path, monkeypatch
):
    publish_version(
        load_file(MODEL / "model.safetensors"), version=0, store=tmp_path / "runs" / "w",
        views=["bf16", "nvfp4"], model_files=MODEL,
    )  # fmt: skip

    async def scenario(run):
        # For the engines; the router of the stage is there already and asks for none.
        monkeypatch.setenv(TOKEN_VARIABLE, "key")
        run.weights.rmdir()
        (tmp_path / "runs" / "w").rename(run.weights)
        first = Attempt(stage, run)
        assert first.counts == {"b200": 1, "a100": 1}
        client = await first.start()
        document = await asyncio.to_thread(client.pools)
        assert ready(document) == {"b200": 1, "a100": 1}
        assert document["pools"]["a100"]["load"] == 0.0
        assert document["usd_per_hour"] == pytest.approx(5.0 + 1.71)
        assert document["machines"] == []
        with pytest.raises(ConfigError, match="a Ray of its own on one machine"):
            await asyncio.to_thread(client.leave, "gpu-1", None, "notice")
        await asyncio.to_thread(client.scale, "up", {"a100": 2}, "by hand")
        assert (await over(client, "up"))["status"] == "done"
        document = await asyncio.to_thread(client.pools)
        assert ready(document) == {"b200": 1, "a100": 2}
        assert document["usd_per_hour"] == pytest.approx(5.0 + 2 * 1.71)
        settings = {"loop.sessions_per_step": 16, "scaling.drain_s": 1.0}
        await asyncio.to_thread(client.change_settings, settings)
        assert first.rollout._max_open_groups == 2 * 16 // 4

        # The controller ends while another change is under way.
        await asyncio.to_thread(client.scale, "more", {"a100": 3, "b200": 1}, "by hand")
        await first.stop()
        # The next one ends before its pools serve, and has not forgotten the change.
        assert Attempt(stage, run).counts == {"b200": 1, "a100": 2}
        second = Attempt(stage, run)
        assert second.counts == {"b200": 1, "a100": 2}
        assert (second.config.loop.sessions_per_step, second.config.scaling.drain_s) == (16, 1.0)
        client = await second.start()
        assert (await over(client, "more"))["status"] == "done"
        assert ready(await asyncio.to_thread(client.pools)) == {"b200": 1, "a100": 3}

        # A pool goes altogether and comes back; a growth that is cancelled leaves nothing.
        for name, number in (("none", 0), ("back", 1)):
            await asyncio.to_thread(client.scale, name, {"b200": number}, "by hand")
            assert (await over(client, name))["status"] == "done"
            assert ready(await asyncio.to_thread(client.pools)) == {"b200": number, "a100": 3}
        await asyncio.to_thread(client.scale, "no", {"b200": 2}, "by hand")
        with pytest.raises(ConfigError, match="no is under way"):
            await asyncio.to_thread(client.scale, "other", {"a100": 2}, "by hand")
        await asyncio.to_thread(client.cancel, "no", "by hand")
        assert (await over(client, "no"))["status"] == "cancelled"
        document = await asyncio.to_thread(client.pools)
        assert {name: pool["replicas"] for name, pool in document["pools"].items()} == {
            "b200": 1, "a100": 3,
        }  # fmt: skip
        await second.stop()

    async def whole():
        with RunDir.create(tmp_path / "runs", "r") as run:
            async with stage:
                await scenario(run)
            return (run.path / "events.jsonl").read_text()

    events = asyncio.run(whole())
    for kind in ("scale_done", "settings_changed", "scale_left_open", "scale_restarted"):
        assert f'"kind":"{kind}"' in events
    assert sorted(stage.kinds("a100-1")).count("replica_ready") == 2
