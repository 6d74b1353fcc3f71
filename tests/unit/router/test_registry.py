"""Places are taken before connections, waiters are served in order, the lost stay lost."""

import asyncio

import pytest

from rlmix.router.registry import Registry
from rlmix.router.states import ReplicaState
from rlmix.router.strategies import STRATEGIES, Ask, Refusal
from rlmix.router.upstream import ReplicaRecord, Upstream

ASK = Ask()


def record(name="a", **changes) -> ReplicaRecord:
    facts = {
        "name": name, "pool": "p", "url": f"http://{name}", "numerics_key": "k", "speed": 1.0,
        "max_running": 1, "version": 0, "state": ReplicaState.READY, **changes,
    }  # fmt: skip
    return ReplicaRecord(**facts)


def make_registry(*records: ReplicaRecord, observe_speeds=False, **options) -> Registry:
    options = {"admit_batches": 1.0, **options}
    strategy = STRATEGIES["shortest_delay"]
    registry = Registry(strategy=strategy, observe_speeds=observe_speeds, **options)
    for one in records:
        registry.put(one)
    return registry


def test_a_burst_sees_its_own_members():
    async def scenario():
        registry = make_registry(record("a", max_running=5), record("b", max_running=5))
        places = [await registry.take_place(ASK, timeout_s=0) for _ in range(6)]
        return [place.name for place in places]

    assert asyncio.run(scenario()) == ["a", "b", "a", "b", "a", "b"]


def test_waiters_are_served_in_order_as_places_come_free():
    async def scenario():
        registry = make_registry(record("a"))
        first = await registry.take_place(ASK, timeout_s=0)
        order = []

        async def wait(number):
            place = await registry.take_place(ASK, timeout_s=5)
            order.append(number)
            registry.give_place(place, ASK.total_tokens)

        tasks = [asyncio.create_task(wait(i)) for i in range(3)]
        await asyncio.sleep(0)
        assert registry.num_waiting == 3
        registry.give_place(first, ASK.total_tokens)
        await asyncio.gather(*tasks)
        return order, registry.upstreams["a"].in_flight, registry.num_waiting

    assert asyncio.run(scenario()) == ([0, 1, 2], 0, 0)


def test_a_waiter_for_a_version_that_is_full_does_not_hold_up_those_behind_it():
    async def scenario():
        registry = make_registry(record("new", version=5), record("old", version=4))
        on_new = await registry.take_place(Ask(min_version=5), timeout_s=0)
        on_old = await registry.take_place(ASK, timeout_s=0)
        strict = asyncio.create_task(registry.take_place(Ask(min_version=5), timeout_s=5))
        easy = asyncio.create_task(registry.take_place(ASK, timeout_s=5))
        await asyncio.sleep(0)
        registry.give_place(on_old, ASK.total_tokens)
        assert (await easy).name == "old"
        assert not strict.done()
        registry.give_place(on_new, ASK.total_tokens)
        return (await strict).name

    assert asyncio.run(scenario()) == "new"


def test_a_cancelled_waiter_leaves_no_place_taken():
    async def scenario():
        registry = make_registry(record("a"))
        first = await registry.take_place(ASK, timeout_s=0)
        waiting = asyncio.create_task(registry.take_place(ASK, timeout_s=5))
        await asyncio.sleep(0)
        registry.give_place(
            first, ASK.total_tokens
        )  # the waiter has the place now, and has not woken up
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return registry.upstreams["a"].in_flight, registry.num_waiting

    assert asyncio.run(scenario()) == (0, 0)


def test_the_wait_ends_with_the_reason():
    async def scenario():
        empty = make_registry()
        full = make_registry(record("a"))
        await full.take_place(ASK, timeout_s=0)
        old = make_registry(record("a"))
        return [
            await empty.take_place(ASK, timeout_s=0.01),
            await full.take_place(ASK, timeout_s=0.01),
            await old.take_place(Ask(min_version=1), timeout_s=60),
        ]

    assert asyncio.run(scenario()) == [Refusal.NONE_READY, Refusal.ALL_FULL, Refusal.TOO_OLD]


def test_a_waiter_gets_the_replica_that_becomes_ready():
    async def scenario():
        registry = make_registry(record("a", state=ReplicaState.STARTING))
        waiting = asyncio.create_task(registry.take_place(ASK, timeout_s=5))
        await asyncio.sleep(0)
        registry.put(record("a"))
        return (await waiting).name

    assert asyncio.run(scenario()) == "a"


def test_losing_a_replica_cancels_what_is_under_way_and_only_a_new_record_brings_it_back():
    async def scenario():
        registry = make_registry(record("a"))
        before = registry.upstreams["a"]
        task = asyncio.create_task(asyncio.sleep(60))
        before.requests.add(task)
        registry.put(record("a", state=ReplicaState.QUARANTINED))
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert not before.keeps_sessions
        assert await registry.take_place(ASK, timeout_s=0) is Refusal.NONE_READY
        after = registry.put(record("a", url="http://elsewhere"))
        assert after is not before
        assert before.is_lost
        return await registry.take_place(ASK, timeout_s=0)

    place = asyncio.run(scenario())
    assert isinstance(place, Upstream)
    assert place.url == "http://elsewhere"


def test_an_updated_record_keeps_the_replicas_requests_and_history():
    registry = make_registry(record("a"))
    before = registry.upstreams["a"]
    before.observe_turn(2.0, 4.0)
    after = registry.put(record("a", version=7, state=ReplicaState.DRAINING))
    assert after is before
    assert (after.version, after.turns, after.keeps_sessions) == (7, 1, True)


def test_speeds_follow_observation_only_when_asked():
    # 400 steps each of batch 1: a takes half of b's time, and prior and observation weigh the same.
    # Common scale: 1.5e-3 and 3e-3 seconds of a planned 1e-3, geometric mean 2.12; so a is at
    # (2.12 + 1.5) / 2 and b at (2.12 + 3) / 2.
    for observe, ratio in [(False, 1.0), (True, (2.1213 + 3.0) / (2.1213 + 1.5))]:
        registry = make_registry(record("a"), record("b"), observe_speeds=observe)
        for name, turn_s in [("a", 0.6), ("b", 1.2)]:
            registry.upstreams[name].observe_turn(turn_s, 1.0, output_tokens=400)
        registry.refresh_speeds()
        a, b = (registry.upstreams[name].model.step_s(1, 0) for name in "ab")
        assert b / a == pytest.approx(ratio, rel=1e-3)


def test_the_busy_share_is_learned_from_turns_and_pauses():
    registry = make_registry()
    for _ in range(2000):
        registry.observe_session(model_s=1.0, tool_s=3.0)
    assert registry.busy_frac == pytest.approx(0.25, abs=0.01)


def test_a_full_queue_refuses_at_once():
    async def scenario():
        registry = make_registry(record("a"), max_waiting=1)
        await registry.take_place(ASK, timeout_s=0)
        waiting = asyncio.create_task(registry.take_place(ASK, timeout_s=60))
        await asyncio.sleep(0)
        refused = await asyncio.wait_for(registry.take_place(ASK, timeout_s=60), 5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return refused, registry.num_waiting

    assert asyncio.run(scenario()) == (Refusal.ALL_FULL, 0)


def test_a_session_that_must_keep_its_view_does_not_hold_up_others():
    async def scenario():
        registry = make_registry(record("a", view="fp8"), record("b", view="bf16"))
        on_fp8 = await registry.take_place(Ask(view="fp8"), timeout_s=0)
        on_bf16 = await registry.take_place(Ask(view="bf16"), timeout_s=0)
        strict = asyncio.create_task(registry.take_place(Ask(view="fp8"), timeout_s=5))
        easy = asyncio.create_task(registry.take_place(ASK, timeout_s=5))
        await asyncio.sleep(0)
        registry.give_place(on_bf16, ASK.total_tokens)
        assert (await easy).name == "b"
        assert not strict.done()
        registry.give_place(on_fp8, ASK.total_tokens)
        return (await strict).name

    assert asyncio.run(scenario()) == "a"


def test_a_large_request_that_waited_half_its_patience_is_not_starved_by_small_ones():
    async def scenario():
        now_s = [0.0]
        one = record("a", max_running=4, max_total_tokens=1000)
        registry = make_registry(one, clock=lambda: now_s[0])
        small = Ask(context_tokens=300, output_tokens=0)
        places = [await registry.take_place(small, timeout_s=0) for _ in range(3)]
        large = asyncio.create_task(
            registry.take_place(Ask(context_tokens=900, output_tokens=0), timeout_s=20)
        )
        await asyncio.sleep(0)
        late = asyncio.create_task(registry.take_place(small, timeout_s=20))
        await asyncio.sleep(0)
        registry.give_place(places[0], 300)
        await late  # Not yet half of its patience: the small one slips in.
        now_s[0] = 11.0
        later = asyncio.create_task(registry.take_place(small, timeout_s=20))
        await asyncio.sleep(0)
        for place in (places[1], places[2]):
            registry.give_place(place, 300)
        await asyncio.sleep(0)
        assert not later.done()  # There is room for it, and it is promised.
        registry.give_place(await late, 300)
        await asyncio.wait_for(large, 5)
        registry.give_place(await large, 900)
        return (await asyncio.wait_for(later, 5)).name

    assert asyncio.run(scenario()) == "a"


def test_an_earlier_deadline_goes_first():
    async def scenario():
        registry = make_registry(record("a"))
        first = await registry.take_place(ASK, timeout_s=0)
        order = []

        async def wait(name, deadline_s):
            place = await registry.take_place(Ask(deadline_s=deadline_s), timeout_s=30)
            order.append(name)
            registry.give_place(place, ASK.total_tokens)

        tasks = [
            asyncio.create_task(wait(name, deadline_s))
            for name, deadline_s in [("patient", None), ("later", 20.0), ("soon", 2.0)]
        ]
        await asyncio.sleep(0)
        registry.give_place(first, ASK.total_tokens)
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(scenario()) == ["soon", "later", "patient"]


def test_a_session_leaves_a_living_home_only_for_more_than_the_margin():
    registry = make_registry(
        record("slow", max_running=100), record("fast", max_running=100), break_affinity_s=10.0
    )
    slow, fast = registry.upstreams["slow"], registry.upstreams["fast"]
    for _ in range(49):
        slow.take(0)
    # 100 tokens at a step of (49 + 1) ms: 5 s at home, 0.1 s and no prefix elsewhere.
    ask = Ask(context_tokens=1000, output_tokens=100, cached_on="slow", cached_tokens=1000)
    assert registry.better_home(slow, ask) is None
    for _ in range(56):
        slow.take(0)
    # 100 run, 6 wait: 10 s and 0.6 s of queue; elsewhere 0.1 s and 1,000 tokens of prefill, 0.1 s.
    assert registry.better_home(slow, ask) is fast
    assert registry.better_home(fast, ask) is None


def test_a_context_that_outgrew_its_home_goes_where_it_fits():
    registry = make_registry(
        record("short", max_context_tokens=1000), record("long", max_context_tokens=9000)
    )
    short, long = registry.upstreams["short"], registry.upstreams["long"]
    assert registry.better_home(short, Ask(context_tokens=999)) is None
    assert registry.better_home(short, Ask(context_tokens=1000)) is long


def test_the_group_packs_into_one_pool_or_spreads_over_all():
    for placement, expected in [("pack", ["p", "p", "p", "p"]), ("spread", ["p", "q", "p", "q"])]:
        registry = make_registry(
            record("a", pool="p", max_running=9, speed=3.0),
            record("b", pool="q", max_running=9),
            placement=placement,
            break_affinity_s=60.0,
        )
        pools = []
        for _ in range(4):
            place = asyncio.run(registry.take_place(ASK, timeout_s=0, group_id="g"))
            registry.groups.placed("g", place.pool)
            pools.append(place.pool)
        assert sorted(pools) == sorted(expected)


def test_a_new_replica_is_filled_over_its_ramp_unless_it_is_the_only_one():
    now_s = [0.0]
    registry = make_registry(record("old", max_running=100), ramp_s=10.0, clock=lambda: now_s[0])
    now_s[0] = 100.0
    registry.put(record("new", max_running=100, speed=100.0))

    def place() -> str:
        chosen = asyncio.run(registry.take_place(ASK, timeout_s=0))
        chosen.placed()
        return chosen.name

    assert [place() for _ in range(12)] == ["new"] * 10 + ["old"] * 2  # a tenth of its batch
    now_s[0] = 105.0
    assert [place() for _ in range(45)] == ["new"] * 40 + ["old"] * 5  # half of it
    registry.remove("old")
    assert place() == "new"
