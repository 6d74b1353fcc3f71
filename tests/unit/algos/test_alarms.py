"""Each rule over tables of steps: when it is raised, when it is not, when it clears."""

import pytest

from rlmix.algos.alarms import RULES, Alarm, AlarmMemory, AlarmRules, Rule, check_alarms

LIMITS = {
    "tail_ratio": 3.0,
    "ess": 0.8,
    "masked": 0.05,
    "k3": 0.05,
    "entropy": 0.1,
    "non_finite": 0.05,
    "pool_drift": 4.0,
    "pool_masked": 0.15,
    "pool_k3": 0.2,
    "pool_tolerance": 1.0,
}


def rules(**changes) -> AlarmRules:
    values = {
        "rules": {name: Rule(limit=limit, action="event") for name, limit in LIMITS.items()},
        "patience": 3,
        "min_tokens": 100,
        "head_min_tokens": 10,
        "window": 20,
        "drift_min_nats": 0.05,
        "drift_format_gap": 8.0,
        "tolerances_nats": {},
    }
    return AlarmRules(**(values | changes))


def onsets(steps, the_rules=None) -> dict[str, tuple[int, int]]:
    """Alarm -> (step at whose end it was raised, first step beyond the limit)."""
    memory, found = AlarmMemory(), {}
    for step, metrics in enumerate(steps, start=1):
        row = {"mismatch/tokens": 500.0, **metrics}
        standing, memory = check_alarms(the_rules or rules(), memory, row, step=step)
        memory = AlarmMemory.from_dict(memory.to_dict())  # As a checkpoint would carry it.
        for alarm in standing:
            found.setdefault(alarm.key, (step, alarm.since_step))
    return found


def series(key, *values):
    return [{key: value} for value in values]


def fleet(tokens=200.0, **mean_abs):
    return {
        f"mismatch/by_pool/{pool}/{name}": value
        for pool, nats in mean_abs.items()
        for name, value in (("mean_abs", nats), ("tokens", tokens))
    }


def test_the_limits_of_these_tests_are_those_of_the_rules():
    assert set(LIMITS) == set(RULES)


@pytest.mark.parametrize(
    ("name", "key", "healthy", "ill"),
    [
        ("tail_ratio", "correction/sc_tail_ratio", 3.0, 3.1),
        ("ess", "correction/ess_frac", 0.8, 0.79),
        ("masked", "correction/masked_frac", 0.05, 0.051),
        ("k3", "mismatch/k3_kl", 0.05, 0.051),
    ],
)
def test_a_limit_is_crossed_only_when_it_is_for_three_steps_in_a_row(name, key, healthy, ill):
    assert onsets(series(key, *[healthy] * 9)) == {}
    assert onsets(series(key, healthy, ill, ill, healthy, ill, ill, healthy)) == {}
    assert onsets(series(key, healthy, ill, ill, ill, ill)) == {name: (4, 2)}


def test_a_step_with_too_few_tokens_says_nothing_either_way():
    few = {"mismatch/k3_kl": 9.0, "mismatch/tokens": 99.0}
    many = {"mismatch/k3_kl": 9.0}
    assert onsets([few] * 9) == {}
    # It neither counts nor breaks the row.
    assert onsets([many, few, many, few, many]) == {"k3": (5, 1)}
    assert onsets([many, {}, many, {"mismatch/k3_kl": None}, many]) == {"k3": (5, 1)}


def test_an_alarm_clears_after_as_many_healthy_steps_and_may_come_again():
    memory, standing_at = AlarmMemory(), []
    values = [1, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1]
    for step, value in enumerate(values, start=1):
        row = {"mismatch/tokens": 500.0, "mismatch/k3_kl": float(value)}
        standing, memory = check_alarms(rules(), memory, row, step=step)
        standing_at += [(step, alarm.since_step) for alarm in standing]
    assert standing_at == [(step, 1) for step in range(3, 9)] + [(13, 11)]


def test_an_alarm_says_what_is_wrong_in_numbers():
    alarm = Alarm(
        name="pool_drift", pool="b200", value=34.21, threshold=4.0, since_step=7, action="event"
    )
    assert alarm.describe() == (
        "pool b200 is 34.2 times as far from the other pools as usual (limit 4)"
    )
    assert alarm.key == "pool_drift/b200"


def test_recorded_heads_are_asked_before_the_tail_model():
    exact = {"correction/sc_tail_ratio": 1.0}  # What a kept set says of itself.
    head = {"correction/head_tail_ratio": 9.0, "correction/head_tokens": 10.0}
    assert onsets([exact | head] * 3) == {"tail_ratio": (3, 1)}
    assert onsets([exact | head | {"correction/head_tokens": 9.0}] * 3) == {}


def test_a_step_without_heads_does_not_clear_a_tail_alarm():
    ill = {"correction/sc_tail_ratio": 1.0, "correction/head_tail_ratio": 9.0}
    ill |= {"correction/head_tokens": 10.0}
    none = {"correction/sc_tail_ratio": 1.0}
    assert onsets([ill, none, ill, none, ill]) == {"tail_ratio": (5, 1)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_says_nothing_and_breaks_nothing(value):
    far = {"mismatch/k3_kl": 9.0}
    assert onsets([far, {"mismatch/k3_kl": value}, far, far]) == {"k3": (4, 1)}
    steps = [fleet(**ORDINARY)] * 10 + [fleet(**ORDINARY | {"a100": value})] * 3
    assert onsets([*steps, *[fleet(**ORDINARY | {"a100": 0.060})] * 5]) == {
        "pool_drift/a100": (16, 14)
    }
    assert onsets([{"loss/entropy": value}] * 3 + [{"loss/entropy": 1.0}] * 9) == {}


def test_the_published_tail_ratios_raise_the_alarm_before_the_gradient_spike():
    # 1.2 rose to above 20 by step 40; the gradient's norm jumped at steps 44 and 45.
    rising = [1.2 * (20 / 1.2) ** (step / 40) for step in range(1, 45)]
    raised, _ = onsets(series("correction/sc_tail_ratio", *rising))["tail_ratio"]
    assert raised == 16


def test_entropy_is_compared_with_the_first_steps_of_the_run():
    learning = [0.17, 0.15, 0.16, *[0.06] * 9, *[0.017] * 4]
    assert onsets(series("loss/entropy", *learning)) == {}  # 0.06 is learning, .017 is above .016
    assert onsets(series("loss/entropy", *learning, 0.015, 0.015, 0.015)) == {"entropy": (19, 17)}


def test_two_lost_steps_of_twenty_are_too_many_and_one_is_not():
    steps = [0.0] * 10
    assert onsets(series("loss/is_non_finite", *steps, 1.0, *[0.0] * 30)) == {}
    found = onsets(series("loss/is_non_finite", *steps, 1.0, 0.0, 1.0, *[0.0] * 3))
    assert found == {"non_finite": (15, 13)}
    # Twenty-one steps apart the first is forgotten.
    assert onsets(series("loss/is_non_finite", 1.0, *[0.0] * 20, 1.0, *[0.0] * 9)) == {}


def test_limits_of_a_pool_name_the_pool():
    def row(masked, k3):
        return {
            "correction/by_pool/b200/masked_frac": masked,
            "mismatch/by_pool/b200/k3_kl": k3,
            "mismatch/by_pool/b200/tokens": 100.0,
            "correction/by_pool/h100/masked_frac": 1.0,
            "mismatch/by_pool/h100/k3_kl": 9.0,
            "mismatch/by_pool/h100/tokens": 99.0,
        }

    assert onsets([row(0.15, 0.2)] * 5) == {}
    assert onsets([row(0.16, 0.21)] * 3) == {
        "pool_masked/b200": (3, 1),
        "pool_k3/b200": (3, 1),
    }


def test_a_pool_is_judged_by_the_tolerance_that_admits_its_replicas():
    # 0.3 nats are 1.2 times a tolerance of 0.25 and 0.6 times one of 0.5; c100 has none.
    judged = rules(tolerances_nats={"b200": 0.25, "a100": 0.5})
    far = fleet(b200=0.3, a100=0.3, c100=0.3)
    assert onsets([far] * 3, judged) == {"pool_tolerance/b200": (3, 1)}
    assert onsets([far] * 2 + [fleet(b200=0.25, a100=0.3)] + [far] * 2, judged) == {}
    assert onsets([fleet(tokens=99.0, b200=9.0)] * 9, judged) == {}
    memory = AlarmMemory()
    for step in (1, 2, 3):
        standing, memory = check_alarms(judged, memory, {"mismatch/tokens": 500.0} | far, step=step)
    assert [alarm.describe() for alarm in standing] == [
        "pool b200 is 1.2 times its canary_tolerance_nats from the trainer (limit 1)"
    ]


ORDINARY = {"b300": 0.060, "b200": 0.064, "h200": 0.018, "h100": 0.016, "a100": 0.012}
"""A wide but ordinary gap between NVFP4, FP8 and BF16, all of it above the least distance."""


def test_the_ordinary_gap_of_formats_and_a_step_that_moves_all_pools_are_no_drift():
    assert onsets([fleet(**ORDINARY)] * 30) == {}
    far = {pool: 20 * nats for pool, nats in ORDINARY.items()}
    assert onsets([fleet(**ORDINARY)] * 10 + [fleet(**far)] * 10) == {}


def test_a_pool_that_leaves_its_usual_place_among_the_others_drifts():
    # a100 stood at 0.012 of the others' median 0.039: 0.31 times. 5 times that is 1.5 times.
    steps = [fleet(**ORDINARY)] * 10
    assert onsets([*steps, *[fleet(**ORDINARY | {"a100": 0.060})] * 5]) == {
        "pool_drift/a100": (13, 11)
    }
    assert onsets([*steps, *[fleet(**ORDINARY | {"a100": 0.047})] * 9]) == {}


def test_the_fault_of_one_pool_does_not_accuse_the_others():
    steps = [*[fleet(b200=0.02, a100=0.01)] * 5, *[fleet(b200=0.02, a100=0.4)] * 30]
    assert onsets(steps) == {"pool_drift/a100": (8, 6)}
    # Its past never takes the fault in: after 30 steps the alarm still stands.
    memory = AlarmMemory()
    for step, row in enumerate(steps, start=1):
        standing, memory = check_alarms(rules(), memory, row, step=step)
    assert [(alarm.key, alarm.since_step) for alarm in standing] == [("pool_drift/a100", 6)]


def test_a_pool_that_was_always_far_is_granted_no_more_than_a_format_explains():
    # 40 times the others while that is too near to count; 100 times is 12.5 times the gap of 8.
    steps = [fleet(b200=0.04, a100=0.001)] * 6 + [fleet(b200=0.1, a100=0.001)] * 3
    assert onsets(steps) == {"pool_drift/b200": (9, 7)}


def test_a_pool_that_is_wrong_from_the_first_step_has_no_past_to_hide_behind():
    # Without a past 8 times the others are granted; beyond 4 times that it drifts.
    assert onsets([fleet(b200=0.30, a100=0.01)] * 9) == {}
    assert onsets([fleet(b200=0.33, a100=0.01)] * 9) == {"pool_drift/b200": (3, 1)}


def test_small_distances_are_no_drift_however_large_their_ratio():
    steps = [fleet(b200=0.001, a100=0.001)] * 5
    assert onsets([*steps, *[fleet(b200=0.049, a100=0.001)] * 5]) == {}
    # Nor is rounding: the others count as the trainer's own noise when they are below it.
    noise = {"mismatch/noise_floor_mean_abs": 0.02}
    still = fleet(b200=0.02, a100=1e-9) | noise
    assert onsets([*[still] * 5, *[fleet(b200=0.07, a100=1e-9) | noise] * 5]) == {}


def test_a_single_pool_has_nobody_to_drift_from():
    assert onsets([*[fleet(b200=0.01)] * 5, *[fleet(b200=9.0)] * 5]) == {}


def test_a_forgotten_breach_needs_the_full_patience_again():
    row = {"mismatch/tokens": 500.0, "mismatch/k3_kl": 1.0}
    memory = AlarmMemory()
    for step in (1, 2, 3):
        standing, memory = check_alarms(rules(), memory, row, step=step)
    assert standing
    memory = memory.forget_breach("k3")
    counts = []
    for step in (4, 5, 6):
        standing, memory = check_alarms(rules(), memory, row, step=step)
        counts.append(len(standing))
    assert counts == [0, 0, 1]
