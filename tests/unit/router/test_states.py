"""Health as a table of what happens and what follows."""

import pytest

from rlmix.router.states import Health, HealthRecord, HealthRules, ProgressWatch

RULES = HealthRules(
    window_s=10.0, suspect_faults=2, dead_faults=4, max_restarts=1, restart_window_s=100.0
)

TIMELINE = [
    # second, event -> state
    (0, "fault", "healthy"),
    (1, "fault", "suspect"),
    (2, "success", "suspect"),
    (3, "success", "healthy"),
    (4, "fault", "healthy"),
    (20, "fault", "healthy"),  # the older fault is out of the window
    (21, "fault", "suspect"),
    (40, "calm", "healthy"),
    (50, "died", "dead"),
    (51, "ready", "restarting"),  # never straight to healthy
    (52, "starting", "restarting"),
    (53, "ready", "stale"),
    (54, "behind", "stale"),
    (55, "ready", "healthy"),
    (60, "fault", "healthy"),
    (61, "fault", "suspect"),
    (62, "fault", "suspect"),
    (63, "fault", "retired"),  # four faults and no answer: its second death within 100 s
    (64, "ready", "retired"),
]


def test_a_life_replayed():
    record = HealthRecord(RULES)
    seen = []
    for at_s, event, _ in TIMELINE:
        if event == "fault":
            record.fault(now_s=at_s, reason="500")
        elif event == "success":
            record.success(now_s=at_s)
        elif event == "calm":
            record.calm(now_s=at_s)
        elif event == "died":
            record.died(now_s=at_s, reason="refused")
        else:
            record.answered(is_ready=event != "starting", is_behind=event == "behind", now_s=at_s)
        seen.append((at_s, event, record.state.value))
    assert seen == TIMELINE


def test_deaths_long_apart_do_not_retire():
    record = HealthRecord(RULES)
    for at_s in (0, 200, 400):
        assert record.died(now_s=at_s, reason="x") is Health.DEAD
        for _ in range(3):
            record.answered(is_ready=True, is_behind=False, now_s=at_s + 1)
        assert record.state is Health.HEALTHY


@pytest.mark.parametrize(
    ("is_busy", "progress", "turns_moved", "stalled_s"),
    [
        (True, 5.0, False, 30.0),  # the same counter as before
        (True, None, False, 30.0),  # no answer at all
        (True, 6.0, False, 0.0),
        (True, 5.0, True, 0.0),
        (False, 5.0, False, 0.0),  # nothing was asked of it, or it is paused
    ],
)
def test_liveness_is_tokens_advancing(is_busy, progress, turns_moved, stalled_s):
    watch = ProgressWatch(moved_s=0.0, progress=5.0)
    found = watch.stalled_s(now_s=30.0, is_busy=is_busy, progress=progress, turns_moved=turns_moved)
    assert found == stalled_s
