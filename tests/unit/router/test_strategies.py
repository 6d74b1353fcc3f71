"""The placement policy: tables worked by hand, and what must hold for any fleet."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlmix.router.states import Health, ReplicaState
from rlmix.router.step_model import StepModel, relative_prior
from rlmix.router.strategies import (
    STRATEGIES,
    Ask,
    Refusal,
    Weights,
    choose_replica,
    expected_delay_s,
    ramp_room,
    rank,
    should_move,
)


@dataclass(frozen=True, kw_only=True)
class Fake:
    name: str
    pool: str = "p"
    view: str = ""
    state: ReplicaState = ReplicaState.READY
    health: Health = Health.HEALTHY
    version: int = 0
    model: StepModel = field(default_factory=lambda: relative_prior(1.0))
    max_running: int = 100
    in_flight: int = 0
    peers_in_flight: int = 0
    others: float = 0.0
    num_sessions: int = 0
    mean_context_tokens: float = 0.0
    waiting_tokens: float = 0.0
    reserved_tokens: int = 0
    max_total_tokens: int | None = None
    max_context_tokens: int | None = None
    ramp_room: int = 1 << 30


def at_speed(speed: float) -> StepModel:
    return relative_prior(speed)


def choose(*candidates, ask=None, busy_frac=0.5, policy="shortest_delay", **ask_fields):
    chosen = choose_replica(
        candidates,
        strategy=STRATEGIES[policy],
        ask=ask or Ask(**ask_fields),
        weights=Weights(busy_frac=busy_frac),
    )
    return chosen if isinstance(chosen, Refusal) else chosen.name


def test_the_delay_is_queue_and_prefill_and_tokens_at_the_step_of_the_batch_joined():
    # Step: 10 ms + 1 ms a request + 2 us a token of context. 9 requests of 1,000 tokens are there,
    # mine brings 500: 10 + 10 + 2 * 9.5 = 39 ms; 100 tokens take 3.9 s. Prefill: 3,000 tokens wait
    # and 400 of mine are not cached, at 0.1 ms: 0.34 s.
    model = StepModel(base_s=0.010, request_s=0.001, token_s=2e-6, prefill_token_s=1e-4)
    one = Fake(
        name="a", model=model, in_flight=9, num_sessions=9, mean_context_tokens=1000.0,
        waiting_tokens=3000.0,
    )  # fmt: skip
    ask = Ask(context_tokens=500, output_tokens=100, cached_on="a", cached_tokens=100)
    assert expected_delay_s(one, ask, Weights()) == pytest.approx(3.9 + 0.34)
    # A batch of 5: running 5 at 10 + 5 + 2 * 4.5 = 24 ms, 2.4 s a turn; 5 wait for 5 places.
    full = replace(one, max_running=5)
    assert expected_delay_s(full, ask, Weights()) == pytest.approx(2.4 + 2.4 + 0.34)
    # 5,500 KV tokens hold 5 requests of 1,000 and 100 to come, which is the same.
    tight = replace(one, max_total_tokens=5_500)
    assert expected_delay_s(tight, ask, Weights()) == pytest.approx(2.4 + 2.4 + 0.34)
    # The 9 others bring 50 tokens each to prefill meanwhile: 9 * 50 * 0.1 ms.
    busy = Weights(uncached_tokens=50.0)
    assert expected_delay_s(one, ask, busy) == pytest.approx(3.9 + 0.045 + 0.34)


def test_the_delay_is_work_and_mine_over_speed_when_only_speeds_are_known():
    # fast: (3 + 1) / 4 = 1; slow: (0 + 1) / 1 = 1; one more on fast makes 1.25.
    fast = Fake(name="fast", model=at_speed(4.0), in_flight=2, num_sessions=2)
    slow = Fake(name="slow")
    assert choose(fast, slow) == "fast"
    assert choose(replace(fast, in_flight=4, num_sessions=4), slow) == "slow"
    # Equal delays: the one with fewer sessions.
    assert choose(replace(fast, in_flight=3, num_sessions=3), slow) == "slow"


def test_the_prefix_is_worth_its_prefill_seconds():
    # 0.1 ms a token: 20,000 cached tokens are worth 2 s, 256 tokens at 1 ms for each request ahead
    # cost 0.256 s; so up to 7 more requests are stood for it.
    home = Fake(name="home", in_flight=7, num_sessions=7)
    other = Fake(name="other")
    facts = {"context_tokens": 20_000, "cached_on": "home", "cached_tokens": 20_000}
    assert choose(home, other, **facts) == "home"
    assert choose(replace(home, in_flight=8, num_sessions=8), other, **facts) == "other"


def test_sessions_in_their_sandbox_count_with_the_share_of_time_they_are_busy():
    # a: 2 in flight; b: 1 in flight and 4 idle, which weigh 0.4 at 0.1 and 2.0 at 0.5.
    a = Fake(name="a", in_flight=2, num_sessions=2)
    b = Fake(name="b", in_flight=1, num_sessions=5)
    assert choose(a, b, busy_frac=0.1) == "b"
    assert choose(a, b, busy_frac=0.5) == "a"


def test_a_burst_on_a_4_2_1_fleet_is_shared_4_2_1():
    fleet = {n: Fake(name=n, model=at_speed(s)) for n, s in [("a", 4.0), ("b", 2.0), ("c", 1.0)]}
    for _ in range(70):
        name = choose(*fleet.values())
        one = fleet[name]
        fleet[name] = replace(one, in_flight=one.in_flight + 1, num_sessions=one.num_sessions + 1)
    assert [fleet[n].num_sessions for n in "abc"] == [40, 20, 10]


TIMELINE = [
    # event, who gets the next session; (sessions + 1) / speed, then fewest sessions, then the name
    ("", "fast"),  # 1/4, 1/2, 1/1
    ("", "mid"),  # 2/4, 1/2: mid has fewer
    ("", "fast"),  # 2/4, 2/2
    ("", "fast"),  # 3/4, 2/2
    ("", "slow"),  # 4/4, 2/2, 1/1: slow has none
    ("fast updating", "mid"),  # 2/2, 2/1
    ("", "mid"),  # 3/2, 2/1
    ("fast ready", "fast"),  # 4/4, 4/2, 2/1
    ("fast dead", "slow"),  # 4/2, 2/1: slow has fewer
    ("", "mid"),  # 4/2, 3/1
]


def test_a_timeline_replayed():
    fleet = {
        n: Fake(name=n, model=at_speed(s)) for n, s in [("fast", 4.0), ("mid", 2.0), ("slow", 1.0)]
    }
    seen = []
    for event, _ in TIMELINE:
        if event:
            name, state = event.split()
            fleet[name] = replace(fleet[name], state=ReplicaState(state))
        name = choose(*fleet.values())
        one = fleet[name]
        fleet[name] = replace(one, in_flight=one.in_flight + 1, num_sessions=one.num_sessions + 1)
        seen.append(name)
    assert seen == [name for _, name in TIMELINE]


def test_the_baseline_ignores_speed():
    fast = Fake(name="fast", model=at_speed(10.0), num_sessions=2)
    slow = Fake(name="slow", num_sessions=1)
    assert choose(fast, slow, policy="least_sessions") == "slow"


@pytest.mark.parametrize("state", [s for s in ReplicaState if s is not ReplicaState.READY])
def test_only_ready_replicas_take_new_sessions(state):
    assert choose(Fake(name="a", state=state)) is Refusal.NONE_READY
    assert choose(Fake(name="a", state=state), Fake(name="b", model=at_speed(0.01))) == "b"


@pytest.mark.parametrize("health", [Health.SUSPECT, Health.STALE])
def test_the_suspect_and_the_stale_are_taken_only_when_nobody_else_can(health):
    doubtful = Fake(name="a", health=health, model=at_speed(100.0))
    assert choose(doubtful, Fake(name="b")) == "b"
    assert choose(doubtful, Fake(name="b", in_flight=400)) == "a"


@pytest.mark.parametrize("health", [Health.DEAD, Health.RESTARTING, Health.RETIRED])
def test_the_dead_are_never_taken(health):
    assert choose(Fake(name="a", health=health)) is Refusal.NONE_READY


def test_the_reason_for_refusing_says_whether_waiting_helps():
    old = Fake(name="old", version=2)
    full = Fake(name="full", version=3, max_running=1, in_flight=4)
    assert choose() is Refusal.NONE_READY
    assert choose(old, min_version=3) is Refusal.TOO_OLD
    assert choose(full, min_version=3) is Refusal.ALL_FULL
    assert choose(old, full, min_version=3) is Refusal.ALL_FULL
    assert choose(old, full) == "old"
    assert choose(old, full, min_version=2) == "old"


def test_kv_tokens_state_slots_and_context_length_are_guarded():
    # Four batches may run and wait; so may four times the KV tokens.
    kv = Fake(name="kv", max_total_tokens=2_500, reserved_tokens=8_000, in_flight=1)
    assert choose(kv, context_tokens=1_700) == "kv"  # 8,000 + 1,700 + 256
    assert choose(kv, context_tokens=1_800) is Refusal.ALL_FULL
    # Alone there, it is the engine's to judge.
    assert choose(replace(kv, reserved_tokens=0, in_flight=0), context_tokens=20_000) == "kv"
    shared = Fake(name="a", max_running=2, in_flight=5, peers_in_flight=2)
    assert choose(shared) == "a"
    assert choose(replace(shared, peers_in_flight=3)) is Refusal.ALL_FULL
    short = Fake(name="short", max_context_tokens=4_000, model=at_speed(100.0))
    long = Fake(name="long", max_context_tokens=100_000)
    assert choose(short, long, context_tokens=3_999) == "short"
    assert choose(short, long, context_tokens=4_000) == "long"
    assert choose(short, context_tokens=4_000) is Refusal.TOO_LONG


def test_a_strict_view_is_kept_and_a_preferred_one_is_left_when_it_must_be():
    fp8, bf16 = Fake(name="fp8", view="fp8"), Fake(name="bf16", view="bf16", model=at_speed(9.0))
    assert choose(fp8, bf16, view="fp8") == "fp8"
    assert choose(replace(fp8, in_flight=400), bf16, view="fp8") is Refusal.ALL_FULL
    assert choose(replace(fp8, state=ReplicaState.DEAD), bf16, view="fp8") is Refusal.NONE_READY
    gone = replace(fp8, state=ReplicaState.QUARANTINED)
    assert choose(gone, bf16, view="fp8") is Refusal.NO_VIEW
    assert choose(bf16, view="fp8") is Refusal.NO_VIEW
    loose = {"view": "fp8", "is_view_strict": False}
    assert choose(fp8, bf16, **loose) == "fp8"
    assert choose(replace(fp8, in_flight=400), bf16, **loose) == "bf16"
    assert choose(Fake(name="unsaid"), view="fp8") == "unsaid"


def test_a_version_behind_costs_its_seconds():
    old = Fake(name="old", version=3, in_flight=0)
    new = Fake(name="new", version=5, in_flight=4, num_sessions=4)

    # 256 tokens: old 0.256 s, new 1.28 s; two versions behind cost 2 * 0.6 s.
    def pick(staleness_s):
        return choose_replica(
            [old, new], strategy=STRATEGIES["shortest_delay"], ask=Ask(),
            weights=Weights(staleness_s=staleness_s),
        ).name  # fmt: skip

    assert (pick(0.0), pick(0.5), pick(0.6)) == ("old", "old", "new")


def test_a_move_must_pay_for_the_prefix_or_save_the_deadline():
    home = Fake(name="home", in_flight=40, num_sessions=40)
    best = Fake(name="best", in_flight=10, num_sessions=10)
    ask = Ask(context_tokens=10_000, output_tokens=100, cached_on="home", cached_tokens=10_000)
    # 4.1 s at home; 1.1 s and 1 s of prefill elsewhere.
    assert should_move(home, best, ask=ask, weights=Weights(), margin_s=1.9)
    assert not should_move(home, best, ask=ask, weights=Weights(), margin_s=2.1)
    for deadline_s, moves in [(5.0, False), (3.0, True), (1.0, False)]:
        late = replace(ask, deadline_s=deadline_s)
        assert should_move(home, best, ask=late, weights=Weights(), margin_s=9.0) is moves


@pytest.mark.parametrize(
    ("ready_for_s", "placed", "room"),
    [(0, 0, 10), (0, 10, 0), (5, 10, 40), (5, 60, 0), (10, 999, 1 << 30)],
)
def test_a_new_replica_is_filled_over_its_ramp(ready_for_s, placed, room):
    found = ramp_room(max_running=100, ready_for_s=ready_for_s, ramp_s=10.0, placed=placed)
    assert found == room


def test_whoever_waits_is_overtaken_by_nobody_who_comes_a_patience_later():
    first = rank(enqueued_s=0.0, patience_s=30.0, deadline_s=None)
    assert rank(enqueued_s=5.0, patience_s=30.0, deadline_s=2.0) < first  # urgent
    assert rank(enqueued_s=30.1, patience_s=30.0, deadline_s=0.0) > first
    assert rank(enqueued_s=0.0, patience_s=30.0, deadline_s=99.0) == first


@pytest.mark.parametrize(
    ("state", "keeps"),
    [("ready", True), ("updating", True), ("draining", True), ("starting", False),
     ("quarantined", False), ("dead", False)],
)  # fmt: skip
def test_which_states_keep_the_sessions_they_have(state, keeps):
    assert ReplicaState(state).keeps_sessions is keeps


fleets = st.lists(
    st.builds(
        Fake,
        name=st.text("abcdef", min_size=1, max_size=3),
        state=st.sampled_from(ReplicaState),
        version=st.integers(0, 3),
        health=st.sampled_from(Health),
        view=st.sampled_from(["", "fp8", "bf16"]),
        model=st.builds(
            StepModel,
            base_s=st.floats(0.0, 0.1),
            request_s=st.floats(0.0, 0.01),
            token_s=st.floats(0.0, 1e-5),
            prefill_token_s=st.floats(0.0, 1e-3),
        ),
        max_total_tokens=st.none() | st.integers(1, 5000),
        max_context_tokens=st.none() | st.integers(1, 2000),
        reserved_tokens=st.integers(0, 5000),
        ramp_room=st.integers(0, 2),
        max_running=st.integers(1, 8),
        in_flight=st.integers(0, 10),
        num_sessions=st.integers(0, 20),
    ),
    max_size=6,
    unique_by=lambda fake: fake.name,
)


asks = st.builds(
    Ask,
    context_tokens=st.integers(0, 3000),
    output_tokens=st.floats(1.0, 1000.0),
    min_version=st.none() | st.integers(0, 3),
    view=st.none() | st.sampled_from(["fp8", "bf16"]),
    deadline_s=st.none() | st.floats(0.0, 100.0),
)


def is_admissible(fake: Fake, ask: Ask) -> bool:
    """Spelled out anew, from the words of the contract."""
    has_kv = (
        fake.max_total_tokens is None
        or fake.in_flight == 0
        or fake.reserved_tokens + ask.total_tokens <= 4 * fake.max_total_tokens
    )
    return (
        fake.state is ReplicaState.READY
        and fake.health in (Health.HEALTHY, Health.SUSPECT, Health.STALE)
        and fake.version >= (ask.min_version or 0)
        and fake.in_flight < 4 * fake.max_running
        and (ask.view is None or fake.view in ("", ask.view))
        and (fake.max_context_tokens is None or ask.context_tokens < fake.max_context_tokens)
        and has_kv
    )


SLOW = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
"""The machine may be busy with others."""


@SLOW
@given(
    fleet=fleets,
    policy=st.sampled_from(sorted(STRATEGIES)),
    busy_frac=st.floats(0.0, 1.0),
    ask=asks,
    data=st.data(),
)
def test_any_choice_is_admissible_independent_of_order_and_monotone_in_load(
    fleet, policy, busy_frac, ask, data
):
    def pick(candidates):
        return choose(*candidates, busy_frac=busy_frac, ask=ask, policy=policy)

    chosen = pick(fleet)
    admissible = [fake for fake in fleet if is_admissible(fake, ask)]
    if isinstance(chosen, Refusal):
        assert not admissible
        return
    assert chosen in {fake.name for fake in admissible}
    assert pick(data.draw(st.permutations(fleet))) == chosen
    # More work on a replica that was not chosen never makes it the chosen one.
    loaded = data.draw(st.sampled_from(fleet))
    more = replace(
        loaded,
        in_flight=loaded.in_flight + data.draw(st.integers(0, 3)),
        num_sessions=loaded.num_sessions + 3,
        waiting_tokens=loaded.waiting_tokens + data.draw(st.integers(0, 1000)),
    )
    if more.in_flight != loaded.in_flight and loaded.in_flight == 0:
        more = replace(more, in_flight=0)  # The first request there is not bound by its KV tokens.
    again = pick([more if fake is loaded else fake for fake in fleet])
    if loaded.name != chosen:
        assert again == chosen


@SLOW
@given(fake=fleets.filter(bool).map(lambda fleet: fleet[0]), ask=asks, more=st.integers(1, 50))
def test_the_delay_never_falls_with_more_work(fake, ask, more):
    busier = replace(fake, in_flight=fake.in_flight + more, num_sessions=fake.num_sessions + more)
    before = expected_delay_s(fake, ask, Weights())
    assert expected_delay_s(busier, ask, Weights()) >= before - 1e-9 * max(1.0, before)
