"""What is done about an alarm: events, quarantine, stop, and what a resumed run still knows."""

import asyncio
import json
from typing import Any

from rlmix.config.compose import load_config
from rlmix.loop.alarms import AlarmWatch


class Routing:
    """Which pools take sessions; the fleet's answers without its processes."""

    def __init__(self, *pools: str) -> None:
        self.serving = set(pools)
        self.calls: list[str] = []

    async def quarantine(self, pool: str, reason: str) -> list[str]:
        self.calls.append(f"quarantine {pool}")
        self.serving.discard(pool)
        return [f"{pool}-0"]

    def release(self, pool: str) -> list[str]:
        self.calls.append(f"release {pool}")
        self.serving.add(pool)
        return [f"{pool}-0"]

    def serving_pools(self) -> frozenset[str]:
        return frozenset(self.serving)


class Scene:
    """A watch with its pools and events; `steps` feeds k3 of each pool."""

    def __init__(self, *overrides: str, state: Any = None, pools: Any = ("b200", "a100")) -> None:
        config = load_config(
            "train",
            [
                *(f"alarms.{name}" for name in ("patience=2", "min_tokens=10")),
                *(f"alarms.{name}_limit=1" for name in ("pool_k3", "k3")),
                *(f"alarms.{text}" for text in overrides),
            ],
        ).config
        self.routing = Routing(*pools)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.watch = AlarmWatch(
            config.alarms,
            pools=self.routing,
            on_event=lambda kind, reason, **facts: self.events.append(
                (kind, {"reason": reason, **facts})
            ),
            tolerances_nats={
                name: pool.canary_tolerance_nats for name, pool in config.pools.items()
            },
            state=state,
        )
        self.step = 0

    def steps(self, *rows: dict[str, float]) -> list[str]:
        """One answer per step."""

        async def run() -> list[str]:
            answers = []
            for row in rows:
                self.step += 1
                metrics = {"mismatch/tokens": 20.0, "mismatch/k3_kl": row.get("all", 0.0)}
                for pool in self.routing.serving:
                    metrics[f"mismatch/by_pool/{pool}/tokens"] = 10.0
                    metrics[f"mismatch/by_pool/{pool}/k3_kl"] = row.get(pool, 0.0)
                    metrics[f"mismatch/by_pool/{pool}/mean_abs"] = row.get(f"{pool} nats", 0.0)
                answers.append(await self.watch.after_step(self.step, metrics))
            return answers

        return asyncio.run(run())

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    def saved(self) -> Any:
        """The state as a checkpoint carries it."""
        return json.loads(json.dumps(self.watch.state()))


FAR, NEAR = {"b200": 2.0}, {}


def test_an_alarm_is_one_event_when_raised_and_one_when_it_clears():
    scene = Scene()
    assert scene.steps(NEAR, FAR, FAR, FAR, {"b200": 3.0}, NEAR, NEAR, NEAR) == [""] * 8
    assert scene.kinds() == ["alarm_raised", "alarm_cleared"]
    raised = scene.events[0][1]
    assert raised["reason"] == (
        "trainer and pool b200 are 2 nats apart by k3 (limit 1), since step 2"
    )
    assert (raised["alarm"], raised["pool"], raised["step"]) == ("pool_k3", "b200", 3)
    (record,) = scene.watch.records
    assert (record.since_step, record.raised_step, record.cleared_step) == (2, 3, 7)
    assert record.value == 3.0  # The worst.
    assert scene.routing.calls == []


def test_quarantine_takes_the_pool_out_once_and_never_gives_it_back_by_itself():
    scene = Scene("pool_k3_action=quarantine")
    scene.steps(FAR, FAR, *[NEAR] * 50)
    assert scene.routing.calls == ["quarantine b200"]
    assert scene.kinds() == ["alarm_raised", "pool_quarantined"]
    assert "pool b200 are 2 nats apart" in scene.events[1][1]["reason"]
    assert scene.events[1][1]["replicas"] == ["b200-0"]
    # Without tokens nothing says that the pool is well: its alarm stands.
    assert set(scene.watch.sentences()) == {"pool_k3/b200", "out/b200"}


def test_a_pool_beyond_the_tolerance_of_its_admission_is_taken_out():
    # canary_tolerance_nats is 0.5 of b200 (NVFP4) and 0.1 of a100 (BF16) in conf/pools.
    scene = Scene("pool_tolerance_action=quarantine")
    row = {"b200 nats": 0.6, "a100 nats": 0.09}
    scene.steps(row, row)
    assert scene.routing.calls == ["quarantine b200"]
    assert "1.2 times its canary_tolerance_nats" in scene.events[1][1]["reason"]


def test_the_last_pool_is_not_taken_out_and_the_run_goes_on_or_stops_as_asked():
    both = {"b200": 2.0, "a100": 2.0}
    goes_on = Scene("pool_k3_action=quarantine")
    assert goes_on.steps(both, both, both) == [""] * 3
    assert goes_on.routing.calls == ["quarantine a100"]
    assert goes_on.kinds().count("quarantine_refused") == 1
    stops = Scene("pool_k3_action=quarantine", "last_pool=stop", pools=("b200",))
    answers = stops.steps(FAR, FAR)
    assert answers[0] == ""
    assert "pool b200 are 2 nats apart by k3 (limit 1), since step 1" in answers[1]
    assert stops.routing.serving == {"b200"}


def test_of_two_pools_with_an_alarm_the_worse_one_is_taken_out():
    for far, out in (({"b200": 3.0, "a100": 2.0}, "b200"), ({"b200": 2.0, "a100": 3.0}, "a100")):
        scene = Scene("pool_k3_action=quarantine")
        scene.steps(far, far)
        assert scene.routing.calls == [f"quarantine {out}"]


def test_a_pool_that_was_the_last_to_serve_is_taken_out_once_another_one_is_back():
    scene = Scene("pool_k3_action=quarantine", pools=("b200",))
    scene.steps(FAR, FAR, FAR)
    assert scene.kinds() == ["alarm_raised", "quarantine_refused"]
    scene.routing.serving.add("a100")
    scene.steps(FAR, FAR)
    assert scene.routing.calls == ["quarantine b200"]
    assert scene.kinds()[2:] == ["pool_quarantined"]


def test_a_standing_alarm_that_is_resumed_with_another_action_is_raised_again_for_it():
    scene = Scene()
    scene.steps({"all": 1.5}, {"all": 1.5}, {"all": 1.5})
    same = Scene(state=scene.saved())
    same.steps({"all": 1.5}, {"all": 1.5})
    assert same.kinds() == []
    stops = Scene("k3_action=stop", state=scene.saved())
    assert [bool(answer) for answer in stops.steps({"all": 1.5}, {"all": 1.5})] == [False, True]
    assert [record.action for record in stops.watch.records] == ["event", "stop"]


def test_stop_says_what_diverged_since_when_and_what_to_do():
    scene = Scene("k3_action=stop")
    ill = {"all": 1.5}
    answers = scene.steps(NEAR, ill, ill)
    assert answers == [
        "",
        "",
        "alarms: the run diverged: trainer and samplers are 1.5 nats apart by k3 (limit 1), since "
        "step 2; lower trainer.lr, narrow algo.low and algo.high, or take the pool out, and "
        "resume; to go on as it is resume with alarms.k3_action=event",
    ]
    # Resumed on purpose it has the full patience, then it stops again.
    resumed = Scene("k3_action=stop", state=scene.saved())
    assert [bool(answer) for answer in resumed.steps(ill, ill)] == [False, True]
    assert [record.cleared_step for record in resumed.watch.records] == [3, None]


def test_a_released_pool_is_judged_afresh():
    scene = Scene("pool_k3_action=quarantine", "release_after_steps=3")
    scene.steps(FAR, FAR, NEAR, NEAR)
    assert scene.routing.calls == ["quarantine b200"]
    scene.steps(NEAR)
    assert scene.routing.calls == ["quarantine b200", "release b200"]
    assert scene.kinds() == ["alarm_raised", "pool_quarantined", "alarm_cleared", "pool_released"]
    assert scene.watch.sentences() == {}
    scene.steps(FAR)
    assert scene.routing.calls[2:] == []
    scene.steps(FAR)
    assert scene.routing.calls[2:] == ["quarantine b200"]


def test_a_resumed_run_still_knows_alarms_pasts_and_pools_that_are_out():
    scene = Scene("pool_k3_action=quarantine")
    scene.steps(FAR, FAR, {"all": 2.0})
    resumed = Scene("pool_k3_action=quarantine", state=scene.saved())
    asyncio.run(resumed.watch.hold_again())
    assert resumed.routing.calls == ["quarantine b200"]
    assert resumed.events[0][1]["reason"] == "in quarantine since step 2"
    # The second step of the row was in the attempt before.
    resumed.step = 3
    resumed.steps({"all": 2.0})
    assert [facts["alarm"] for kind, facts in resumed.events[1:]] == ["k3"]
    assert resumed.watch.records[0] == scene.watch.records[0]
    assert resumed.saved()["quarantined"] == {"b200": 2}
