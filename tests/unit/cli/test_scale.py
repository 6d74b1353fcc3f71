"""`rlmix scale pools` as a user calls it: plans, simulations, traces, refusals."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmix.cli.scale import split_arguments
from rlmix.cli.scale_live import is_over

Run = Callable[..., subprocess.CompletedProcess[str]]
SHORT = ("scaling.simulate.hours=1", "loop.sessions_per_step=64", "scaling.simulate.turns_spread=0")


def test_a_bare_pool_name_scales_and_everything_else_is_config() -> None:
    arguments = ["h100=3", "a100=0", "pools.b200.tp=1", "experiment=tiny", "+x=1", "pools=two"]
    assert split_arguments(arguments) == (
        {"h100": 3, "a100": 0},
        ["pools.b200.tp=1", "experiment=tiny", "+x=1", "pools=two"],
    )


def test_a_machine_is_left_when_its_replicas_are_though_a_growth_that_they_joined_goes_on() -> None:
    grows = {"step": "booting", "is_move": False}
    operation = {"status": "running", "replicas": {"h100-2": grows}}
    for step, is_left in (("draining", False), ("stopping", False), ("gone", True)):
        operation["replicas"] = {"h100-2": grows, "h100-0": {"step": step, "is_move": True}}
        assert is_over(operation, is_departure=True) is is_left
        assert not is_over(operation, is_departure=False)
    assert is_over({**operation, "status": "failed"}, is_departure=True)


def test_a_dry_run_plans_for_the_demand_and_starts_nothing(rlmix: Run, tmp_path: Path) -> None:
    done = rlmix("scale", "pools", "--dry-run", "--json", "h100=3", "loop.sessions_per_step=256")
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert document["pools"]["h100"]["replicas"] == 3
    assert document["pools"]["h100"]["usd_per_hour"] == pytest.approx(3 * 2.71)
    assert document["is_modelled"]
    today, best = document["today"], document["best"]
    assert today["usd_per_hour"] == pytest.approx(6.0 + 5.0 + 4.45 + 3 * 2.71 + 1.71 + 2.04)
    assert document["saved_usd_per_hour"] == pytest.approx(
        today["usd_per_hour"] - best["usd_per_hour"]
    )
    assert best["supply_per_s"] >= best["needed_per_s"]
    # Floors hold: every pool keeps one.
    assert min(best["replicas"].values()) == 1
    assert "nothing was changed" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_limits_that_leave_demand_uncovered_are_named(rlmix: Run) -> None:
    done = rlmix("scale", "pools", "--dry-run", "--json", "scaling.budget_usd_per_hour=25",
                 "loop.sessions_per_step=4096")  # fmt: skip
    document = json.loads(done.stdout)
    assert "at their limit: budget (25 USD/h)" in document["best"]["missing"]
    assert document["best"]["usd_per_hour"] <= 25.0


def test_a_simulation_sets_fleets_side_by_side_and_its_trace_can_be_replayed(
    rlmix: Run, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    first = rlmix("scale", "pools", "--simulate", "--json", *SHORT, "--trace-out", str(trace))
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    names = [fleet["name"] for fleet in document["fleets"]]
    assert names == [
        "mixed", "mixed_scaled", "planned", "b200_bf16", "b200_bf16_fp8kv", "b200_nvfp4_fp8kv",
    ]  # fmt: skip
    for fleet in document["fleets"]:
        assert fleet["updates_per_h"] > 0
        assert fleet["usd_per_update"] > fleet["pools_usd_per_update"] > 0
    assert document["trace_lines"] == len(trace.read_text().splitlines()) > 100
    assert "Modelled, not measured." in first.stderr
    again = rlmix("scale", "pools", "--simulate", "--json", *SHORT, "--trace-in", str(trace))
    replayed = json.loads(again.stdout)["fleets"][0]
    same = document["fleets"][0]
    keys = ("usd_per_update", "updates_per_h", "started", "trained", "rehomed")
    assert {key: replayed[key] for key in keys} == {key: same[key] for key in keys}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["foo=3", "--dry-run"], "foo=3: no pool 'foo'; pools are b300, b200"),
        (["--dry-run", "--simulate"], "choose one of them"),
        (["--leave", "gpu-1", "h100=2"], "--leave and --stay go alone"),
        (["--leave", "gpu-1", "--stay", "gpu-1"], "--leave and --stay go alone"),
        (["--within", "30"], "--within is the time of a machine that goes; give --leave"),
        (["--dry-run", "--leave", "gpu-1"], "are for a running run"),
        (["--dry-run", "--trace-out", "x"], "need --simulate"),
        (["--simulate", "--trace-in", "none.jsonl"], "there is no such file"),
        (["h100=2"], "no run is running in runs; start one with `rlmix train`"),
        ([], "no run is running in runs"),
        (["--run", "x"], "no run 'x' in runs; there is no run there"),
        (["--run", "http://127.0.0.1:1"], "set RLMIX_CONTROL_KEY to the key in control.json"),
        (["--watch", "--dry-run"], "are for a running run"),
        (["h100=-1"], "h100=-1: replicas of a pool are a whole number from 0 to 10000"),
        (["h100=1.5", "--dry-run"], "h100=1.5: replicas of a pool are a whole number"),
        (["h100=99999999999999999999"], "replicas of a pool are a whole number"),
        (["h100=1", "h100=2"], "h100=2: pool h100 is named twice"),
        (["--watch", "h100=2"], "--watch only shows"),
        (["--cancel", "x", "h100=2"], "--cancel goes alone"),
        (["--id", "x"], "--id names a change"),
        (["--dry-run", "scaling.surplus_frac=0"], "scaling.surplus_frac: got 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_requests_are_refused_with_one_sentence(
    rlmix: Run, arguments: list[str], said: str
) -> None:
    done = rlmix("scale", "pools", *arguments, "--json")
    assert done.returncode == 2
    assert said in json.loads(done.stdout)["error"]
