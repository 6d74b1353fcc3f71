"""The placement policy: tables worked by hand, and what must hold for any fleet."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmix.router.strategies import (
    STRATEGIES,
    Refusal,
    ReplicaState,
    SpeedObservation,
    choose_replica,
    refine_speeds,
)


@dataclass(frozen=True, kw_only=True)
class Fake:
    name: str
    state: ReplicaState = ReplicaState.READY
    version: int = 0
    speed: float = 1.0
    max_running: int = 100
    in_flight: int = 0
    num_sessions: int = 0


def choose(*candidates, busy_frac=0.5, min_version=None, policy="shortest_delay"):
    chosen = choose_replica(
        candidates, strategy=STRATEGIES[policy], busy_frac=busy_frac, min_version=min_version
    )
    return chosen if isinstance(chosen, Refusal) else chosen.name


def test_the_delay_is_work_and_mine_over_speed():
    # fast: (3 + 1) / 4 = 1.0 s; slow: (0 + 1) / 1 = 1.0 s; one more on fast makes 1.25 s.
    fast = Fake(name="fast", speed=4.0, in_flight=2, num_sessions=2)
    slow = Fake(name="slow")
    assert choose(fast, slow) == "fast"
    assert choose(replace(fast, in_flight=4, num_sessions=4), slow) == "slow"
    # Equal delays: the one with fewer sessions.
    assert choose(replace(fast, in_flight=3, num_sessions=3), slow) == "slow"


def test_sessions_in_their_sandbox_count_with_the_share_of_time_they_are_busy():
    # a: 2 in flight; b: 1 in flight and 4 idle, which weigh 1.0 at 0.25 and 2.0 at 0.5.
    a = Fake(name="a", in_flight=2, num_sessions=2)
    b = Fake(name="b", in_flight=1, num_sessions=5)
    assert choose(a, b, busy_frac=0.1) == "b"
    assert choose(a, b, busy_frac=0.5) == "a"


def test_a_burst_on_a_4_2_1_fleet_is_shared_4_2_1():
    fleet = {n: Fake(name=n, speed=s) for n, s in [("a", 4.0), ("b", 2.0), ("c", 1.0)]}
    for _ in range(70):
        name = choose(*fleet.values())
        one = fleet[name]
        fleet[name] = replace(one, in_flight=one.in_flight + 1, num_sessions=one.num_sessions + 1)
    assert [fleet[n].num_sessions for n in "abc"] == [40, 20, 10]


def test_the_baseline_ignores_speed():
    fast = Fake(name="fast", speed=10.0, num_sessions=2)
    slow = Fake(name="slow", speed=1.0, num_sessions=1)
    assert choose(fast, slow, policy="least_sessions") == "slow"


@pytest.mark.parametrize("state", [s for s in ReplicaState if s is not ReplicaState.READY])
def test_only_ready_replicas_take_new_sessions(state):
    assert choose(Fake(name="a", state=state)) is Refusal.NONE_READY
    assert choose(Fake(name="a", state=state), Fake(name="b", speed=0.01)) == "b"


def test_the_reason_for_refusing_says_whether_waiting_helps():
    old, full = (
        Fake(name="old", version=2),
        Fake(name="full", version=3, max_running=1, in_flight=1),
    )
    assert choose() is Refusal.NONE_READY
    assert choose(old, min_version=3) is Refusal.TOO_OLD
    assert choose(full, min_version=3) is Refusal.ALL_FULL
    assert choose(old, full, min_version=3) is Refusal.ALL_FULL
    assert choose(old, full) == "old"
    assert choose(old, full, min_version=2) == "old"


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
        speed=st.floats(0.01, 100.0),
        max_running=st.integers(1, 8),
        in_flight=st.integers(0, 10),
        num_sessions=st.integers(0, 20),
    ),
    max_size=6,
    unique_by=lambda fake: fake.name,
)


@given(
    fleet=fleets,
    policy=st.sampled_from(sorted(STRATEGIES)),
    busy_frac=st.floats(0.0, 1.0),
    min_version=st.none() | st.integers(0, 3),
    data=st.data(),
)
def test_any_choice_is_admissible_independent_of_order_and_monotone_in_load(
    fleet, policy, busy_frac, min_version, data
):
    def pick(candidates):
        return choose(*candidates, busy_frac=busy_frac, min_version=min_version, policy=policy)

    chosen = pick(fleet)
    admissible = [
        fake
        for fake in fleet
        if fake.state is ReplicaState.READY
        and fake.version >= (min_version or 0)
        and fake.in_flight < fake.max_running
    ]
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
    )
    again = pick([more if fake is loaded else fake for fake in fleet])
    if loaded.name != chosen:
        assert again == chosen


def test_observation_moves_speeds_towards_what_was_seen_by_how_much_was_seen():
    # Equal priors, a seen three times as fast as b: shares 1.5 and 0.5 of the prior's share.
    def after(turns):
        return refine_speeds(
            {
                "a": SpeedObservation(prior=1.0, turns_per_s=3.0, turns=turns),
                "b": SpeedObservation(prior=1.0, turns_per_s=1.0, turns=turns),
                "new": SpeedObservation(prior=2.0, turns_per_s=None, turns=0),
            }
        )

    assert after(0) == {"a": 1.0, "b": 1.0, "new": 2.0}
    assert after(32) == pytest.approx({"a": 1.5**0.5, "b": 0.5**0.5, "new": 2.0})
    assert after(10**9) == pytest.approx({"a": 1.5, "b": 0.5, "new": 2.0})


def test_priors_that_are_right_stay_and_wrong_ones_move_at_most_fourfold():
    right = {
        "a": SpeedObservation(prior=10.0, turns_per_s=0.5, turns=1000),
        "b": SpeedObservation(prior=2.0, turns_per_s=0.1, turns=1000),
    }
    assert refine_speeds(right) == pytest.approx({"a": 10.0, "b": 2.0})
    wrong = {
        "a": SpeedObservation(prior=1.0, turns_per_s=1.0, turns=10**9),
        "b": SpeedObservation(prior=1.0, turns_per_s=1e-6, turns=10**9),
    }
    assert refine_speeds(wrong)["b"] == pytest.approx(0.25)


@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2),
        st.builds(
            SpeedObservation,
            prior=st.floats(1e-3, 1e3),
            turns_per_s=st.none() | st.floats(0.0, 1e6),
            turns=st.integers(0, 10**6),
        ),
    )
)
def test_refined_speeds_are_positive_and_within_the_bound(observations):
    speeds = refine_speeds(observations)
    assert speeds.keys() == observations.keys()
    for name, observation in observations.items():
        assert observation.prior / 4.001 <= speeds[name] <= observation.prior * 4.001
