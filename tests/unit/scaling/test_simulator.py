"""The simulator: worked times, conservation, determinism, traces, scaling at work."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import DataError
from rlmix.router.step_model import StepModel
from rlmix.router.strategies import Ask, Weights, choose_replica, shortest_delay
from rlmix.scaling.policy import FleetLimits, PolicyRules, PoolLimits
from rlmix.scaling.service import ReplicaModel, SessionShape
from rlmix.scaling.simulated_replicas import Face, LoadTable, Pool, Replica, Session
from rlmix.scaling.simulated_trainer import Group
from rlmix.scaling.simulator import Outcome, Scenario, simulate
from rlmix.scaling.swap import SwapRules
from rlmix.scaling.traces import read_trace, write_trace

SHAPE = SessionShape(
    turns=10.0, output_tokens=100.0, new_tokens=0.0, context_tokens=1000.0, tool_s=5.0
)
RULES = PolicyRules(
    headroom_frac=0.1,
    surplus_frac=0.3,
    out_delay_s=60.0,
    in_delay_s=300.0,
    in_cold_starts=3.0,
    zero_delay_s=1800.0,
    most_changes=8,
    wait_high_frac=0.1,
    kv_high_frac=0.98,
    queued_high_frac=0.5,
    reprefill_high_frac=0.3,
)


def model(pool: str, *, speed: float = 1.0, view: str = "bf16", price: float = 3.0) -> ReplicaModel:
    """A batch of 20 takes (10 + 20) ms a step at speed 1: 53.3 sessions, 6.67 turns a second."""
    return ReplicaModel(
        pool=pool,
        accelerator=pool,
        view=view,
        gpus=1,
        usd_per_hour=price,
        max_running=20,
        kv_tokens=1_000_000,
        state_tokens=0.0,
        max_context_tokens=100_000,
        step_s=lambda batch, context: (0.01 + 0.001 * batch) / speed,
        prefill_token_s=1e-5 / speed,
        router_model=StepModel(
            base_s=0.01 / speed, request_s=0.001 / speed, token_s=0.0, prefill_token_s=1e-5 / speed
        ),
        cold_start_s=120.0,
    )


TABLES = {
    name: LoadTable(one, SHAPE)
    for name, one in {
        "fast": model("fast", speed=2.0, view="nvfp4", price=5.0),
        "slow": model("slow"),
    }.items()
}

SCENARIO = Scenario(
    name="test",
    replicas={"fast": 2, "slow": 3},
    shape=SHAPE,
    prompt_tokens=200,
    turns_spread=0.3,
    sessions_per_step=64,
    group_size=8,
    max_staleness=8,
    step_s=32.0,
    trainer_usd_per_hour=20.0,
    burst_factor=1.0,
    max_sessions=20_000,
    duration_s=7200.0,
    warm_up_s=1800.0,
    losses_per_day=0.0,
    drain_s=60.0,
    queue_timeout_s=600.0,
    every_s=30.0,
    rules=None,
    limits=FleetLimits(pools={}),
    seed=7,
    batch_frac=0.0,
)

BOTH = pytest.mark.parametrize("batch_frac", [0.0, 0.02])
"""Each session at its own moment, and many at a time."""


def run(record: list[Any] | None = None, **changes: Any) -> Outcome:
    return simulate(
        replace(SCENARIO, **changes), TABLES, record=None if record is None else record.append
    )


def accounted(outcome: Outcome, *, lost: int) -> int:
    return outcome.trained + outcome.stale + lost + outcome.open_sessions + outcome.buffered


def test_sessions_share_a_replica_and_end_when_their_turns_are_done() -> None:
    table = LoadTable(model("slow"), replace(SHAPE, tool_s=0.0))
    replica = Replica("slow-0", Pool(table))
    group = Group(size=2, version=0, started_s=0.0)
    first = Session(number=0, turns=10.0, context_tokens=1000.0, group=group)
    second = Session(number=1, turns=3.0, context_tokens=1000.0, group=group)
    replica.add(first, now_s=0.0)
    # Alone: 100 steps of 11 ms a turn.
    assert replica.next_end_s(now_s=0.0) == pytest.approx(11.0)
    replica.add(second, now_s=1.1)
    # Two: 1.2 s a turn for each; the second ends after 3, when the first has had 1 + 3.
    assert replica.next_end_s(now_s=1.1) == pytest.approx(1.1 + 3.6)
    assert replica.finish(now_s=4.7) == [second]
    assert replica.next_end_s(now_s=4.7) == pytest.approx(4.7 + 6.6)
    # One and a half turns later it is taken off: 4.5 are left, and the one cut off.
    assert replica.take_all(now_s=4.7 + 1.65) == [first]
    assert first.turns == pytest.approx(4.5 + 0.5)
    assert replica.next_end_s(now_s=7.0) is None


@BOTH
def test_a_fleet_with_room_steps_as_fast_as_the_trainer_and_costs_its_price(
    batch_frac: float,
) -> None:
    outcome = run(batch_frac=batch_frac)
    # 2 x 5 + 3 x 3 + 20 = 39 USD an hour, 3600 / 32 = 112.5 steps.
    assert outcome.usd_per_hour == pytest.approx(39.0)
    assert outcome.updates_per_h == pytest.approx(112.5, rel=0.01)
    assert outcome.usd_per_update == pytest.approx(39.0 / 112.5, rel=0.01)
    assert outcome.trainer_wait_frac < 0.01
    assert outcome.replicas == pytest.approx({"fast": 2.0, "slow": 3.0})
    assert outcome.staleness <= 8.0


@BOTH
def test_a_fleet_that_is_too_small_makes_the_trainer_wait_at_its_own_rate(
    batch_frac: float,
) -> None:
    outcome = run(replicas={"slow": 2}, batch_frac=batch_frac)
    # Two replicas finish 2 x 0.667 sessions a second; 64 take 48 s.
    assert outcome.updates_per_h == pytest.approx(3600.0 / 48.0, rel=0.06)
    assert outcome.trainer_wait_frac == pytest.approx(1.0 - 32.0 / 48.0, abs=0.05)


@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_every_session_is_finished_moved_or_lost_and_counted(seed: int, batch_frac: float) -> None:
    lines: list[dict[str, Any]] = []
    # Sixty losses a day and replica; no replica of a view is waited for.
    outcome = run(lines, seed=seed, losses_per_day=60.0, queue_timeout_s=10.0, warm_up_s=0.0,
                  replicas={"fast": 1, "slow": 2}, batch_frac=batch_frac)  # fmt: skip
    losses = [line for line in lines if line["kind"] == "lose"]
    assert outcome.started == accounted(outcome, lost=outcome.lost_sessions)
    assert outcome.started == sum(line["kind"] == "session" for line in lines)
    assert outcome.rehomed == sum(line["sessions"] for line in losses) > 0
    # The only replica of a view takes its sessions along; others hand theirs over.
    assert outcome.lost_sessions > 0
    assert outcome.lost_sessions < outcome.rehomed


@BOTH
def test_sessions_wait_for_a_replica_of_their_view_when_one_is_coming(batch_frac: float) -> None:
    outcome = run(
        losses_per_day=60.0, warm_up_s=0.0, replicas={"fast": 1, "slow": 2}, batch_frac=batch_frac
    )
    assert outcome.rehomed > 0
    assert outcome.lost_sessions == 0
    assert outcome.started == accounted(outcome, lost=0)


@BOTH
def test_one_seed_gives_one_history(batch_frac: float) -> None:
    first: list[Any] = []
    second: list[Any] = []
    changes = {
        "losses_per_day": 20.0,
        "rules": RULES,
        "burst_factor": 2.0,
        "batch_frac": batch_frac,
    }
    assert run(first, **changes) == run(second, **changes)
    assert first == second
    assert run(**changes, seed=8) != run(**changes)


@BOTH
def test_a_trace_that_came_out_gives_the_same_simulation_when_put_in(
    tmp_path: Path, batch_frac: float
) -> None:
    lines: list[dict[str, Any]] = []
    before = run(lines, losses_per_day=30.0, batch_frac=batch_frac)
    path = tmp_path / "trace.jsonl"
    assert write_trace(path, lines) == len(lines)
    trace = tuple(read_trace(path))
    assert {line["kind"] for line in trace} == {"session", "lose"}
    after = run(trace=trace, seed=99, losses_per_day=5.0, batch_frac=batch_frac)
    assert replace(after, events=0) == replace(before, events=0)


def test_a_trace_with_a_line_that_says_too_little_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, [{"at_s": 0.0, "kind": "note"}, {"at_s": 1.0, "kind": "step_s", "value": 0}])
    with pytest.raises(DataError, match="line 2: step_s needs at_s and value above 0"):
        read_trace(path)
    with pytest.raises(DataError, match="there is no such file"):
        read_trace(tmp_path / "none.jsonl")


@BOTH
def test_pools_follow_a_trainer_that_gets_faster_and_slower_again(batch_frac: float) -> None:
    lines: list[dict[str, Any]] = []
    changes = {
        "burst_factor": 3.0,
        "duration_s": 21_600.0,
        "replicas": {"fast": 1, "slow": 2},
        "batch_frac": batch_frac,
    }
    scaled = run(lines, rules=RULES, **changes)
    fixed = run(**changes)
    held = []
    for line in lines:
        if line["kind"] == "scale" and line["status"] == "done":
            held.append((line["at_s"], line["from"], line["targets"]))
    grown = [at_s for at_s, was, now in held if sum(now.values()) > sum(was.values())]
    shrunk = [at_s for at_s, was, now in held if sum(now.values()) < sum(was.values())]
    # The burst is from 8,400 to 15,000 s; three cold starts and 300 s pass before anything goes.
    assert any(8_400 < at_s < 15_000 for at_s in grown)
    assert any(at_s > 15_360 for at_s in shrunk)
    assert scaled.updates_per_h > 1.25 * fixed.updates_per_h
    assert scaled.lost_sessions == 0
    assert scaled.started == accounted(scaled, lost=0)


def test_a_scaled_fleet_exchanges_dear_replicas_for_cheap_ones_and_loses_no_session() -> None:
    """Three slow ones make 3 x 0.667 sessions a second for 9 USD/h; fast ones 1.33 for 5 each."""
    lines: list[dict[str, Any]] = []
    changes: dict[str, Any] = {
        "replicas": {"fast": 1, "slow": 3},
        "limits": FleetLimits(pools={"slow": PoolLimits(floor=0, may_be_zero=True)}),
        "step_s": 32.0,
        "duration_s": 14_400.0,
        "batch_frac": 0.02,
    }
    swap = SwapRules(payback_s=7200.0, drain_s=60.0)
    kept = run(rules=replace(RULES, surplus_frac=0.9), **changes)
    swapped = run(lines, rules=replace(RULES, surplus_frac=0.9, swap=swap), **changes)
    done = [line for line in lines if line["kind"] == "scale" and line["status"] == "done"]
    assert any(line["targets"].get("fast", 0) > line["from"].get("fast", 0) for line in done)
    assert swapped.usd_per_hour < kept.usd_per_hour - 0.3
    assert swapped.updates_per_h == pytest.approx(kept.updates_per_h, rel=0.03)
    assert swapped.lost_sessions == 0
    assert swapped.started == accounted(swapped, lost=0)


def test_the_emptiest_of_each_pool_stands_for_all_its_replicas() -> None:
    draw = random.Random(3)
    pools = [Pool(table) for table in TABLES.values()]
    number = 0
    for pool in pools:
        for _ in range(5):
            replica = pool.new()
            pool.open(replica)
            for _ in range(draw.randint(0, 60)):
                before = len(replica.sessions)
                session = Session(number=number, turns=5.0, context_tokens=1000.0, group=None)
                number += 1
                replica.add(session, now_s=0.0)
                pool.moved(replica, before)
    ask, weights = Ask(context_tokens=200, output_tokens=100.0), Weights(busy_frac=0.0)
    few = [Face(one) for pool in pools if (one := pool.emptiest()) is not None]
    every = [Face(one) for pool in pools for one in pool.replicas.values()]
    chosen = [
        choose_replica(faces, strategy=shortest_delay, ask=ask, weights=weights)
        for faces in (few, every)
    ]
    assert isinstance(chosen[0], Face)
    assert isinstance(chosen[1], Face)
    assert chosen[0].pool == chosen[1].pool
    assert chosen[0].num_sessions == chosen[1].num_sessions


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"replicas": {"slow": 2}},
        {"replicas": {"fast": 1, "slow": 2}, "losses_per_day": 40.0, "duration_s": 9_000.0},
        {"replicas": {"fast": 1, "slow": 2}, "rules": RULES, "burst_factor": 3.0,
         "duration_s": 9_000.0},
    ],
    ids=["with room", "too small", "with losses", "scaled"],
)  # fmt: skip
def test_sessions_taken_together_give_what_each_alone_gives(changes: dict[str, Any]) -> None:
    """Within 3 % of the exact simulation, which draws other sessions: rates, price and costs; two
    hundredths of the trainer's time; a tenth of a version."""
    exact, together = run(**changes), run(**changes, batch_frac=0.02)

    for name in ("updates_per_h", "usd_per_update", "usd_per_hour", "started", "trained"):
        assert getattr(together, name) == pytest.approx(getattr(exact, name), rel=0.03), name
    assert together.trainer_wait_frac == pytest.approx(exact.trainer_wait_frac, abs=0.02)
    assert together.staleness == pytest.approx(exact.staleness, abs=0.1)
    # What it is for: an event is a moment, and not a session.
    assert together.events < exact.events / 2


def test_an_unknown_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="no model for pool b200"):
        run(replicas={"b200": 1})
