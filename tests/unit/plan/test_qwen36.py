"""The reference experiments: what they promise, what they cost, and what is refused about them."""

import json
from pathlib import Path

import pytest

from rlmix.core.errors import PlanError
from rlmix.plan.comparison import compare
from rlmix.plan.model_facts import REFERENCE, bundled_facts
from rlmix.plan.runplan import RunPlan
from tests.unit.plan.qwen36 import configured, planned

ROOT = Path(__file__).parents[3]
POOLS = ("b300", "b200", "h200_fp8", "h100_fp8", "h200_bf16", "h100_bf16", "a100", "rtx_pro_6000")


def refusals(*overrides: str, experiment: str = "qwen36_mixed") -> list[str]:
    with pytest.raises(PlanError) as caught:
        planned(*overrides, experiment=experiment)
    lines = str(caught.value).splitlines()
    if len(lines) > 1:
        assert lines[0] == f"{len(lines) - 1} problems"
    return [line.strip() for line in lines[1:] or lines]


def test_the_mixed_run_is_eight_pools_on_six_accelerators() -> None:
    plan = planned()
    assert tuple(plan.pools) == POOLS
    assert len({pool.accelerator for pool in plan.pools.values()}) == 6
    assert {name: (pool.weights, pool.activations) for name, pool in plan.pools.items()} == {
        "b300": ("nvfp4", "bf16"),
        "b200": ("nvfp4", "bf16"),
        "h200_fp8": ("fp8", "fp8"),
        "h100_fp8": ("fp8", "fp8"),
        "h200_bf16": ("bf16", "bf16"),
        "h100_bf16": ("bf16", "bf16"),
        "a100": ("bf16", "bf16"),
        "rtx_pro_6000": ("bf16", "bf16"),
    }
    assert {pool.kv for pool in plan.pools.values()} == {"fp8"}
    assert {pool.gpus for pool in plan.pools.values()} == {8}
    assert (plan.trainer.device, plan.trainer.gpus) == ("b200", 32)
    assert plan.trainer.views == ("bf16", "fp8", "nvfp4:experts")


def test_its_algorithm_and_tasks_are_those_of_the_reference() -> None:
    config = configured()
    algo = config.algo
    assert (algo.importance, algo.centering, algo.top_p, algo.top_k, algo.replay) == (
        "mis",
        True,
        0.97,
        64,
        True,
    )
    assert config.tasks.source == "mimo"
    judged = config.eval
    assert (judged.data, judged.subset, judged.k) == ("swe_bench_pro_v2", "all+hard", 4)
    evaluation = planned().evaluation
    assert evaluation is not None
    assert (evaluation.n, evaluation.weights, evaluation.every_steps) == (4, "bf16", 0)
    assert config.session.max_context_tokens == 262_144


def test_pools_have_room_for_every_session() -> None:
    config = configured()
    sessions = config.session.workers * config.session.concurrency
    assert sessions == 1344
    assert sum(pool.concurrency for pool in planned().pools.values()) == 1728
    for twin in ("qwen36_b200", "qwen36_b200_nvfp4"):
        (pool,) = planned(experiment=twin).pools.values()
        assert pool.concurrency == sessions


@pytest.mark.parametrize(
    ("experiment", "formats"),
    [("qwen36_b200", ("bf16", "bf16", "bf16")), ("qwen36_b200_nvfp4", ("nvfp4", "bf16", "fp8"))],
)
def test_twins_differ_in_their_pools_only(experiment: str, formats: tuple[str, ...]) -> None:
    mixed, twin = configured(), configured(experiment=experiment)
    (pool,) = twin.pools.values()
    assert (pool.weights, pool.activations, pool.kv) == formats
    twin.pools, twin.plan = mixed.pools, mixed.plan
    assert twin == mixed


def test_prices_add_up() -> None:
    plan = planned()
    assert {name: round(pool.usd_per_hour, 2) for name, pool in plan.pools.items()} == {
        "b300": 48.0,
        "b200": 40.0,
        "h200_fp8": 35.6,
        "h100_fp8": 21.68,
        "h200_bf16": 35.6,
        "h100_bf16": 21.68,
        "a100": 13.68,
        "rtx_pro_6000": 16.32,
    }
    assert plan.trainer.usd_per_hour == 32 * 5.0
    assert plan.usd_per_hour == pytest.approx(232.56 + 160.0)
    assert plan.tokens_per_s == pytest.approx(
        sum(pool.tokens_per_s or 0 for pool in plan.pools.values())
    )
    assert plan.usd_per_mtok == pytest.approx(232.56 / 3600 / (plan.tokens_per_s or 1) * 1e6)


def test_against_the_homogeneous_run_in_all_and_pool_by_pool() -> None:
    plan, other = planned(), planned(experiment="qwen36_b200")
    against = compare(plan, other, experiment="qwen36_b200")
    assert against.usd_per_hour == 42 * 5.0 + 160.0
    assert against.pools_usd_per_hour == {"b200": 210.0}
    assert against.saved_frac == pytest.approx(1 - 392.56 / 370.0)
    assert tuple(against.pool_cost_frac) == POOLS
    b300 = plan.pools["b300"].modelled
    assert b300 is not None
    assert b300.usd_per_mtok is not None
    assert against.pool_cost_frac["b300"] == pytest.approx(
        b300.usd_per_mtok / (other.usd_per_mtok or 1)
    )
    # NVFP4 on Blackwell is the cheapest token, BF16 on the workstation card the dearest.
    assert min(against.pool_cost_frac, key=lambda n: against.pool_cost_frac[n]) == "b300"
    assert max(against.pool_cost_frac, key=lambda n: against.pool_cost_frac[n]) == "rtx_pro_6000"


def test_speeds_are_told_at_three_lengths_and_fall_with_them() -> None:
    for pool in planned().pools.values():
        assert [speed.context_tokens for speed in pool.by_context] == [8192, 32_768, 262_144]
        rates = [speed.tokens_per_s for speed in pool.by_context]
        assert rates == sorted(rates, reverse=True)
    assert max(pool.speed for pool in planned().pools.values()) == 1.0


def test_long_sessions_fit_every_pool() -> None:
    for name, pool in planned().pools.items():
        assert pool.budget is not None
        assert pool.budget.requests["262144"] >= 1, name
        assert pool.budget.kv_tokens >= 262_144, name
        assert pool.evidence, name


def test_a_plan_of_real_servers_survives_json() -> None:
    plan = planned("inventory=qwen36_mixed")
    assert RunPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize(
    ("override", "cause", "alternative"),
    [
        ("pools.a100.attention=triton", "no conversion to E4M3", "pools.a100.attention=flashinfer"),
        (
            "pools.rtx_pro_6000.attention=trtllm_mha",
            "takes no E4M3 cache",
            "pools.rtx_pro_6000.attention=flashinfer",
        ),
        (
            "pools.h100_bf16.tp=1",
            "bf16 weights take 65.4 GiB of the 63.7 GiB",
            "pools.h100_bf16.tp=2",
        ),
        ("pools.h200_fp8.tp=8", "FP8 blocks of 128 do not divide", "pools.h200_fp8.tp=1"),
    ],
)
def test_what_cannot_run_is_refused_with_cause_and_alternative(
    override: str, cause: str, alternative: str
) -> None:
    (line,) = refusals(override)
    assert line.startswith(".".join(override.split(".")[:2]))
    assert cause in line
    assert alternative in line
    planned(override, alternative)


def test_all_problems_are_told_at_once() -> None:
    lines = refusals(
        "pools.a100.attention=triton",
        "pools.rtx_pro_6000.attention=trtllm_mha",
        "pools.h100_bf16.tp=1",
        "pools.h200_fp8.tp=8",
        "pools.b200.moe=flashinfer_trtll",
        "+pools.b300.engine_args.pagesize=64",
        "+pools.b300.engine_args.tp-size=2",
        "+pools.b300.engine_args.enable-mixed-chunk=3",
        "+pools.b300.engine_args.schedule-policy=nice",
        "inventory=qwen36_mixed",
    )
    assert sorted({line.split(":")[0] for line in lines}) == [
        "pools.a100",
        "pools.b200.moe",
        "pools.b300.engine_args.enable-mixed-chunk",
        "pools.b300.engine_args.pagesize",
        "pools.b300.engine_args.schedule-policy",
        "pools.b300.engine_args.tp-size",
        "pools.h100_bf16.tp",
        "pools.h200_bf16.replicas",
        "pools.h200_fp8.replicas",
        "pools.h200_fp8.tp",
        "pools.rtx_pro_6000",
    ]


def test_a_context_longer_than_the_model_was_made_for_is_refused() -> None:
    lines = refusals(
        "session.max_context_tokens=300000", "trainer.micro_batch_tokens=300000",
        experiment="qwen36_b200",
    )  # fmt: skip
    assert lines[0].startswith("pools.b200") or "was made for 262144" in lines[0]
    assert any("session.max_context_tokens=262144" in line for line in lines)


def test_a_trainer_that_cannot_hold_its_share_is_refused() -> None:
    lines = refusals("trainer.ranks=2")
    assert lines[0].startswith("trainer.ranks: got 2 on b200: 274 GiB of weights and optimizer")
    assert lines[0].endswith("raise trainer.ranks")


def test_a_chip_without_a_price_is_refused_until_it_has_one() -> None:
    (line,) = refusals("+pool@pools.npu=sglang_ascend_910c_bf16")
    assert line.endswith("set accelerators.ascend_910c.usd_per_hour=PRICE")


def test_risky_choices_are_planned_with_a_warning() -> None:
    said = "\n".join(planned("pools.h200_bf16.tp=4", "pools.b200.kv=bf16").warnings)
    assert "h200_bf16: 2 KV heads on tp=4 are stored 2 times" in said
    assert "rtx_pro_6000: tp=2 on rtx_pro_6000 sums over PCIe 5" in said
    assert "b300, b200: reinforcement learning on W4A16 samples" in said
    assert "b200: nothing is known against nvfp4/bf16 with trtllm_mha" in said


def test_too_many_requests_for_the_memory_are_warned_of() -> None:
    said = "\n".join(planned("pools.h100_fp8.max_running=64").warnings)
    assert "h100_fp8: 45 requests of 32768 tokens fit at a time" in said


def test_facts_come_without_a_network() -> None:
    assert bundled_facts(configured().model.path) == bundled_facts(REFERENCE)


@pytest.mark.parametrize("capability", ["7.5", "8.6", "8.9", "11.0"])
def test_a_chip_without_a_launch_profile_is_refused_by_name(capability: str) -> None:
    (line, *others) = refusals(f'accelerators.a100.compute_capability="{capability}"')
    assert line.startswith(f"accelerators.a100.compute_capability: got {capability}")
    assert "8.0, 9.0, 10.x or 12.x" in line
    assert others == []


@pytest.mark.parametrize("page", ["README.md", "docs/plan.md"])
@pytest.mark.parametrize("experiment", ["qwen36_mixed", "qwen36_b200", "qwen36_b200_nvfp4"])
def test_pages_tell_what_the_plan_says(page: str, experiment: str) -> None:
    plan = planned(experiment=experiment)
    lines = (ROOT / page).read_text().splitlines()
    (row,) = (line for line in lines if line.startswith(f"| `{experiment}` |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1].split()[0] == str(sum(pool.gpus for pool in plan.pools.values()))
    assert cells[2] == f"{plan.usd_per_hour:.2f}"
    assert cells[-1] == f"{plan.usd_per_mtok:.3f}"
