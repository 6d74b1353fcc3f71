"""The arithmetic of `scripts/bench_router.py`; the runs themselves are no test."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.insert(0, str(SCRIPTS))
    try:
        specification = importlib.util.spec_from_file_location(
            "bench_router", SCRIPTS / "bench_router.py"
        )
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(SCRIPTS))


def run(makespan_s: float, **more: object) -> dict[str, object]:
    return {"makespan_s": makespan_s, "timeouts": 1, **more}


def test_the_ratio_is_the_median_over_seeds_of_the_best_rival_in_each(bench: ModuleType) -> None:
    found = bench.compare(
        {
            "ours": [run(10.0), run(10.0), run(20.0)],
            "oracle": [run(10.0), run(8.0), run(16.0)],
            "sglang_router_cache_aware": [run(12.0), run(30.0), run(40.0)],
            "sglang_router_round_robin": [run(20.0), run(15.0), run(30.0)],
            "sglang_router_manual": [run(1.0), run(1.0), run(1.0)],
            "smg_least_load": [run(2.0), run(2.0), run(2.0)],
        }
    )
    # 1.2, 1.5 and 1.5 by seed; neither smg nor the policy that needs a key counts.
    assert found["ratio_best"] == 1.5
    assert found["ratio_oracle"] == 1.25
    assert found["ratios"]["smg_least_load"] == 0.2
    assert (found["ours"]["makespan_s"], found["ours"]["timeouts"]) == (10.0, 3)
    assert set(found["others"]) == {
        "sglang_router_cache_aware", "sglang_router_round_robin", "sglang_router_manual",
        "smg_least_load",
    }  # fmt: skip


def test_shares_are_compared_with_speeds_one_replica_at_a_time(bench: ModuleType) -> None:
    runs = [
        run(1.0, placed_share={"fast": 0.7, "slow": 0.3}, token_share={"fast": 0.8, "slow": 0.2}),
        run(1.0, placed_share={"fast": 0.9, "slow": 0.1}, token_share={"fast": 1.0}),
    ]
    found = bench.shares_off(runs, {"fast": 3.0, "slow": 1.0})
    assert found["capacity"] == {"fast": 0.75, "slow": 0.25}
    # 0.8 and 0.2 sessions: a fifth too few on the slow one; 0.1 of the tokens: three fifths.
    assert found["placed_share_off_frac"] == pytest.approx(0.2)
    assert found["token_share_off_frac"] == pytest.approx(0.6)


def test_the_oracle_places_by_speed_and_keeps_sessions_until_they_end(bench: ModuleType) -> None:
    contestants = sys.modules["bench_router_contestants"]
    speeds = {"a": 4.0, "b": 2.0, "c": 1.0}
    oracle = contestants.StickyOracle({name: name for name in speeds}, speeds)
    places = {f"s{index}": oracle.url_of(f"s{index}") for index in range(7)}
    assert Counter(places.values()) == {"a": 4, "b": 2, "c": 1}
    assert all(oracle.url_of(session) == place for session, place in places.items())
    gone = next(session for session, place in places.items() if place == "c")
    oracle.ended(gone)
    assert oracle.url_of("new") == "c"


def test_the_roofline_taken_apart_is_the_roofline_of_the_plan(bench: ModuleType) -> None:
    from rlmix.plan.model_facts import REFERENCE, bundled_facts
    from rlmix.plan.speed import Numbers, decode_step_s

    contestants = sys.modules["bench_router_contestants"]
    chip = contestants.chips()["h100"]
    numbers = Numbers(weights="fp8", activations="fp8", kv="fp8", state="fp32")
    steps = contestants.step_times(chip, numbers, tp=1)
    facts = bundled_facts(REFERENCE)
    # One request here stands for four.
    for batch in (1, 6):
        planned = decode_step_s(
            facts, chip, numbers, tp=1, batch=4 * batch, context_tokens=20_000
        )  # fmt: skip
        modelled = steps.decode_s(batch, batch * 20_000) - contestants.LAUNCH_S
        assert modelled == pytest.approx(planned, rel=1e-6)


def test_the_fleet_spans_an_order_of_magnitude_and_four_two_one_is_exact(
    bench: ModuleType,
) -> None:
    contestants = sys.modules["bench_router_contestants"]
    speeds = {s.name: contestants.speed_of(s) for s, _ in contestants.plan_specs(time_scale=1.0)}
    assert 6 < speeds["b300"] / speeds["rtx_pro_6000"] < 14
    ratio = [contestants.speed_of(spec) for spec, _ in contestants.ratio_specs(time_scale=1.0)]
    assert [value / ratio[-1] for value in ratio] == pytest.approx([4, 2, 1])
