"""The policy at work on a fleet of real engine processes: it orders when the trainer needs more."""

import asyncio
import time
from collections import Counter

import pytest

from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.loop.autoscale import Autoscaler, TrainerSeen
from rlmix.loop.scaler import PoolFacts, Scaler
from rlmix.plan.build import build_plan
from rlmix.scaling.history import ScaleState
from rlmix.scaling.modelled import fleet_limits
from rlmix.scaling.operation import Status


class Sessions:
    """Sessions that go through the router as fast as the fleet lets them; stands for a rollout."""

    def __init__(self, stage):
        self.stage = stage
        self.finished_by_pool = Counter()
        self.tasks = []

    def start(self, number):
        self.tasks = [asyncio.create_task(self.play(i)) for i in range(number)]

    async def play(self, index):
        for turn in range(10_000):
            status, headers = await self.stage.generate(f"s{index}.{turn}", tokens=8)
            if status == 200:
                self.finished_by_pool[headers["X-Rlmix-Replica"].rpartition("-")[0]] += 1
            await asyncio.sleep(0.05)

    async def stop(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Trainer:
    """Takes a batch every `step_s`, or waits."""

    def __init__(self):
        self.is_waiting = False
        self.waited_s = 0.0
        self.looked_s = time.monotonic()

    def seen(self):
        now_s = time.monotonic()
        if self.is_waiting:
            self.waited_s += now_s - self.looked_s
        self.looked_s = now_s
        metrics = {"time/step_s": 8.0, "time/wait_s": 0.0, "time/session_mean_s": 0.1,
                   "rollout/sessions": 8.0, "rollout/void_frac": 0.0}  # fmt: skip
        return TrainerSeen(is_stepping=True, waited_s=self.waited_s, metrics=metrics)


@pytest.fixture
def config():
    return load_config("train", [
        "experiment=tiny", "scaling.auto=true", "scaling.every_s=1", "scaling.out_delay_s=0",
        "pools.b200.max_replicas=1", "pools.a100.max_replicas=2", "loop.sessions_per_step=8",
    ]).config  # fmt: skip


def stand(stage, config):
    """(scaler, autoscaler, sessions, trainer) around a fleet of one b200 and one a100."""
    plan = build_plan(config, facts=facts_of(config), python="python")
    sessions, trainer = Sessions(stage), Trainer()

    def on_event(kind, reason, **fields):
        stage.events.append((kind, {"reason": reason, **fields}))

    scaler = Scaler(
        fleet=stage.fleet, router=stage.router,
        pools={
            name: PoolFacts(accelerator=pool.accelerator, gpus=pool.tp,
                            usd_per_hour=pool.usd_per_replica_hour, view=pool.weights)
            for name, pool in plan.pools.items()
        },
        limits=lambda: fleet_limits(config, plan), drain_s=lambda: 1.0, keeps_view=True,
        new_replica=lambda pool, index: stage.spec(f"{pool}-{index}", pool=pool),
        state=ScaleState(), save=lambda state: None, on_event=on_event,
    )  # fmt: skip
    autoscaler = Autoscaler(
        config=config, plan=plan, scaler=scaler, fleet=stage.fleet, rollout=sessions,
        trainer=trainer.seen, on_event=on_event,
    )  # fmt: skip
    return scaler, autoscaler, sessions, trainer


def play(stage, config, scenario):
    async def whole():
        async with stage:
            fleet = stage.make_fleet(
                *[stage.spec(f"{pool}-0", pool=pool) for pool in ("b200", "a100")]
            )
            await fleet.start(0)
            scaler, autoscaler, sessions, trainer = stand(stage, config)
            scaler.start()
            sessions.start(4)
            autoscaler.start()
            try:
                await scenario(scaler, autoscaler, trainer)
                autoscaler.raise_failure()
                scaler.raise_failure()
            finally:
                await autoscaler.stop()
                await scaler.stop()
                await sessions.stop()

    asyncio.run(whole())


def kinds(stage, kind):
    return [fields for found, fields in stage.events if found == kind]


def test_a_trainer_that_needs_more_gets_the_replica_that_may_be_had_and_limits_are_named(
    stage, config
):
    async def scenario(scaler, autoscaler, trainer):
        # 8 sessions in 8 s: one a second, and the fleet finishes tens of them.
        await stage.until(lambda: autoscaler.status.get("supply_per_s"), timeout_s=30)
        assert autoscaler.status["needed_per_s"] == pytest.approx(1.0)
        assert autoscaler.status["supply_per_s"] > 2.0
        assert scaler.state.operations == {}
        # The trainer takes 1,000 times as many and waits for them.
        config.loop.sessions_per_step, trainer.is_waiting = 8_000, True
        await stage.until(lambda: "auto-1" in scaler.state.operations, timeout_s=30)
        await stage.until(lambda: scaler.operation("auto-1").status is Status.DONE, timeout_s=30)
        assert scaler.operation("auto-1").targets == {"a100": 2}
        await stage.until(lambda: kinds(stage, "scale_blocked"), timeout_s=30)
        assert scaler.targets() == {"b200": 1, "a100": 2}

    play(stage, config, scenario)
    assert "supply below the" in kinds(stage, "scale_started")[0]["reason"]
    assert "ceiling of b200 (1)" in kinds(stage, "scale_blocked")[-1]["reason"]
    assert kinds(stage, "replica_ready")[-1]["replica"] == "a100-1"


def test_without_scaling_auto_it_says_what_is_needed_and_changes_nothing(stage, config):
    config.scaling.auto = False

    async def scenario(scaler, autoscaler, trainer):
        config.loop.sessions_per_step, trainer.is_waiting = 8_000, True
        await stage.until(
            lambda: (autoscaler.status.get("trainer_wait_frac") or 0) > 0.5, timeout_s=30
        )
        assert autoscaler.status["needed_per_s"] == pytest.approx(1_000.0)
        assert scaler.state.operations == {}

    play(stage, config, scenario)


def test_a_pool_that_a_person_made_smaller_is_not_grown_again_to_its_floor(stage, config):
    async def scenario(scaler, autoscaler, trainer):
        assert autoscaler.limits().pools["a100"].floor == 1
        await scaler.request({"a100": 0}, operation_id="hand", reason="not needed")
        await stage.until(lambda: scaler.operation("hand").status is Status.DONE, timeout_s=30)
        own = autoscaler.limits().pools["a100"]
        assert (own.floor, own.may_be_zero) == (0, True)
        for _ in range(2):
            before_s = autoscaler._next_s
            await stage.until(lambda b=before_s: autoscaler._next_s > b, timeout_s=30)
        assert list(scaler.state.operations) == ["hand"]

    play(stage, config, scenario)
