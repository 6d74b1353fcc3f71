"""Real servers on a CPU, and the accelerators that each real server is given."""

import json

import pytest

from rlmix.cli.train import facts_of
from rlmix.config.checks import check_train
from rlmix.config.compose import load_config
from rlmix.core.errors import PlanError
from rlmix.engine.sglang.launch import MODULE, flags_of
from rlmix.plan.build import build_plan
from rlmix.plan.engine_args import sglang_flags
from rlmix.plan.runplan import RunPlan
from tests.unit.plan.qwen36 import configured, planned
from tests.unit.plan.test_placement import QWEN, node, with_nodes


def small(*overrides: str) -> RunPlan:
    config = load_config("train", ["experiment=tiny_sglang", *overrides]).config
    return build_plan(config, facts=facts_of(config), python="python", sglang_python="/s/python")


def refusal(*overrides: str) -> str:
    with pytest.raises(PlanError) as caught:
        small(*overrides)
    return str(caught.value)


def test_the_cpu_profile_is_what_runs_in_the_tests() -> None:
    pool = small().pools["sglang"]
    assert pool.argv[:3] == ("/s/python", *MODULE)
    flags = flags_of(pool.argv)
    assert set(flags) <= set(sglang_flags())
    assert {
        "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch",
        "disable-overlap-schedule": True, "kv-cache-dtype": "bf16", "dtype": "bfloat16",
        "sleep-on-idle": True, "skip-server-warmup": True, "host": "127.0.0.1",
    }.items() <= flags.items()  # fmt: skip
    # Twice what 8 requests of 384 tokens take.
    assert flags["max-total-tokens"] == "6144"
    assert not {"cuda-graph-max-bs-decode", "bf16-gemm-backend", "quantization"} & set(flags)
    assert pool.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert (pool.env["CUDA_VISIBLE_DEVICES"], pool.env["OMP_NUM_THREADS"]) == ("", "1")
    assert (pool.is_emulated, pool.gpus, pool.usd_per_hour, pool.budget) == (False, 0, 0, None)


def test_no_plan_asks_for_a_key_or_trusts_code() -> None:
    for plan in (small(), planned()):
        for pool in plan.pools.values():
            if pool.engine != "embedded":
                assert not {"api-key", "admin-api-key", "trust-remote-code"} & set(
                    flags_of(pool.argv)
                )
                assert "--sleep-on-idle" in pool.argv
            assert not [name for name in pool.env if name.endswith(("KEY", "TOKEN"))]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("pools.sglang.weights=fp8",), "set pools.sglang.weights=bf16"),
        (("pools.sglang.kv=fp8",), "set pools.sglang.kv=bf16"),
        (("pools.sglang.attention=fa3",), "set pools.sglang.attention=torch_native"),
        (("pools.sglang.tp=2",), "pools.sglang.tp: got 2 on cpu, which has one; use 1"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_with_a_way_out(
    overrides: tuple[str, ...], said: str
) -> None:
    assert said in refusal(*overrides)


def test_a_hybrid_model_is_refused_on_a_cpu() -> None:
    with pytest.raises(PlanError, match="no CPU kernels for the gated-delta-net layers"):
        planned(
            "+pool@pools.cpu=sglang_cpu", "pools.cpu.state=bf16",
            "pools.cpu.linear_attention=triton", experiment="qwen36_b200",
        )  # fmt: skip


def test_on_one_machine_accelerators_are_counted_through_after_the_trainer_s() -> None:
    config = configured(
        "trainer.device=b200", "trainer.ranks=8", "trainer.micro_batch_tokens=131072",
        "session.max_context_tokens=131072", experiment="qwen36_b200",
    )  # fmt: skip
    config.pools["b200"].replicas, config.pools["b200"].tp = 3, 2
    plan = build_plan(config, facts=QWEN, python="python")
    assert plan.pools["b200"].gpu_ids == ((8, 9), (10, 11), (12, 13))
    visible = [replica.env["CUDA_VISIBLE_DEVICES"] for replica in plan.replicas()]
    assert visible == ["8,9", "10,11", "12,13"]
    # The pool's own environment is that of all its replicas, and names none.
    assert "CUDA_VISIBLE_DEVICES" not in plan.pools["b200"].env
    assert RunPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_with_an_inventory_every_machine_counts_from_0() -> None:
    config = configured("pools.h100_bf16.replicas=3", experiment="qwen36_mixed")
    config.pools = {"h100_bf16": config.pools["h100_bf16"]}
    config.trainer.device = "cpu"
    plan = build_plan(
        with_nodes(config, small=node("h100", gpus=4, count=2)), facts=QWEN, python="python"
    )
    pool = plan.pools["h100_bf16"]
    assert pool.nodes == ("small-0", "small-0", "small-1")
    assert pool.gpu_ids == ((0, 1), (2, 3), (0, 1))


def test_an_external_pool_names_a_server_for_each_replica() -> None:
    def said(*overrides: str) -> list[str]:
        config = load_config("train", ["experiment=tiny_sglang"]).config
        pool = config.pools["sglang"]
        pool.engine, pool.urls = "sglang_external", list(overrides)
        return [str(problem) for problem in check_train(config)]

    assert said("http://10.0.0.7:30000") == []
    (line,) = said()
    assert line.startswith("pools.sglang.urls: got 0 different addresses for pools.sglang.replicas")
    (line,) = said("http://a:1", "http://b:1")
    assert "got 2 different addresses" in line
    config = load_config("train", ["experiment=tiny_sglang"]).config
    config.pools["b200"].urls = ["http://a:1"]
    (line,) = [str(problem) for problem in check_train(config)]
    assert "with engine=embedded, which rlmix starts itself" in line


def test_an_external_pool_s_plan_is_the_command_that_its_servers_should_have_had() -> None:
    plan = small("pools.sglang.engine=sglang_external", "pools.sglang.urls=[http://10.0.0.7:30000]")
    pool = plan.pools["sglang"]
    assert pool.urls == ("http://10.0.0.7:30000",)
    assert pool.argv == small().pools["sglang"].argv
