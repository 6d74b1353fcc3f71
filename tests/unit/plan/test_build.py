"""From a checked configuration to commands, prices and warnings."""

import dataclasses
import functools
import json
import math

import pytest

from rlmix.config.compose import load_config
from rlmix.core.errors import PlanError
from rlmix.model.bundle import resolve_model
from rlmix.plan.build import build_plan
from rlmix.plan.model_facts import ModelFacts, facts_from_config
from rlmix.plan.runplan import RunPlan


@functools.cache
def tiny_facts() -> ModelFacts:
    config = json.loads((resolve_model("bundled:tiny") / "config.json").read_text())
    return facts_from_config("bundled:tiny", config)


def plan(*overrides: str) -> RunPlan:
    return build_plan(
        load_config("train", overrides).config, facts=tiny_facts(), python="/opt/python"
    )


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(f"--{name}") + 1]


def test_default_plan_costs_one_of_each_accelerator_per_hour() -> None:
    default = plan()
    prices = [pool.usd_per_hour for pool in default.pools.values()]
    assert prices == [6.00, 5.00, 4.45, 2.71, 1.71, 2.04]
    assert round(default.usd_per_hour, 2) == 21.91
    assert default.is_modelled


def test_price_of_a_pool_counts_replicas_and_may_be_set_by_pool_or_accelerator() -> None:
    pools = plan(
        "pools.h100.replicas=3",
        "pools.h100.max_running=32",
        "pools.a100.usd_per_hour=1",
        "accelerators.h200.usd_per_hour=4",
    ).pools
    assert round(pools["h100"].usd_per_hour, 2) == 8.13
    assert pools["h100"].usd_per_replica_hour == 2.71
    assert (pools["h100"].gpus, pools["h100"].concurrency) == (3, 96)
    assert pools["a100"].usd_per_hour == 1
    assert pools["h200"].usd_per_hour == 4


def test_commands_of_replicas_carry_the_pools_formats_and_their_own_names() -> None:
    first, second = (r for r in plan("pools.h100.replicas=2").replicas() if r.pool == "h100")
    assert (first.name, second.name) == ("h100-0", "h100-1")
    assert first.argv[:3] == ("/opt/python", "-m", "rlmix.engine.embedded")
    said = {name: flag(second.argv, name) for name in ("accelerator", "weights", "kv", "attention")}
    assert said == {"accelerator": "h100", "weights": "fp8", "kv": "fp8", "attention": "fa3"}
    assert flag(second.argv, "replica") == "h100-1"
    assert flag(second.argv, "model-path") == "{model_path}"
    assert flag(second.argv, "port") == "0"
    assert second.env["OMP_NUM_THREADS"] == "1"


def test_the_engines_accept_their_commands() -> None:
    from rlmix.engine.arguments import server_parser

    parser = server_parser(prog="embedded", description="")
    numbers = [f"pools.{name}.max_running=24" for name in plan().pools]
    for replica in plan("session.max_context_tokens=640", *numbers).replicas():
        arguments = parser.parse_args(list(replica.argv[3:]))
        assert arguments.replica == replica.name
        assert arguments.max_running_requests == 24
        assert arguments.context_length == 640


def test_the_router_accepts_its_command() -> None:
    from rlmix.router.__main__ import parse_arguments

    arguments = parse_arguments(list(plan("router.queue_timeout_s=7").router.argv[3:]))
    assert (arguments.policy, arguments.speeds) == ("shortest_delay", "observed")
    assert (arguments.queue_timeout_s, arguments.token_env) == (7.0, "RLMIX_TOKEN")


def test_the_trainer_publishes_one_view_for_each_format_in_use() -> None:
    assert plan().trainer.views == ("bf16", "fp8", "nvfp4")
    assert plan("pools=two").trainer.views == ("bf16", "nvfp4")


def test_the_shape_counts_the_parameters_that_the_model_file_holds() -> None:
    data = (resolve_model("bundled:tiny") / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    assert tiny_facts().params == sum(math.prod(entry["shape"]) for entry in tensors)


def test_memory_is_weights_and_a_full_cache() -> None:
    # BF16 weights; 24 requests x 512 tokens x 384 elements of 1 byte.
    pool = plan("session.max_context_tokens=512", "pools.a100.max_running=24").pools["a100"]
    assert tiny_facts().kv_elements == 384
    assert pool.memory_gib * 2**30 == 2 * tiny_facts().params + 24 * 512 * 384


def test_a_plan_survives_json() -> None:
    original = plan()
    assert RunPlan.from_dict(json.loads(json.dumps(original.to_dict()))) == original


def test_the_plan_document_has_the_keys_that_scripts_rely_on() -> None:
    document = plan().to_dict()
    assert {"pools", "trainer", "usd_per_hour", "warnings"} <= set(document)
    assert set(document["pools"]["b300"]) >= {
        "accelerator", "weights", "kv", "replicas", "gpus", "argv", "env", "usd_per_hour",
        "memory_gib", "concurrency",
    }  # fmt: skip


def warnings_of(*overrides: str) -> str:
    return "\n".join(plan(*overrides).warnings)


def test_what_leaves_a_difference_in_exact_mode_is_told() -> None:
    exact = "experiment=exact"
    assert "another order than this trainer" in warnings_of(exact, "pools.h100.engine=sglang")
    assert "weights.pause=retract has none" in warnings_of(exact, "weights.pause=in_place")
    assert "exact mode" not in warnings_of(exact)
    assert "exact mode" not in warnings_of("weights.pause=in_place")


def test_emulation_is_always_said() -> None:
    assert "b200, a100: emulated on this machine's CPU" in warnings_of("pools=two")


def test_formats_that_a_chip_only_stores_are_said() -> None:
    w4a16 = [f"pools.{name}.{key}" for name in ("h100", "a100") for key in (
        "weights=nvfp4", "activations=bf16", "moe=marlin",
    )]  # fmt: skip
    said = warnings_of(*w4a16)
    assert "h100: h100 has no nvfp4 tensor cores" in said
    assert "a100: a100 has no nvfp4 tensor cores" in said
    assert "b200: b200 has no" not in said


@pytest.mark.parametrize(
    ("overrides", "cause", "way_out"),
    [
        (["pools.h100.activations=bf16"], "(W8A8) from SM89 on", "pools.h100.activations=fp8"),
        (["pools.a100.weights=fp8"], "none of which runs on SM80", "pools.a100.weights=bf16"),
        (["pools.a100.activations=fp8"], "BF16 weights", "pools.a100.activations=bf16"),
        (["pools.b200.activations=fp8"], "(W4A4) or BF16 (W4A16)", "pools.b200.activations=bf16"),
        (
            ["pools.h200.weights=nvfp4", "pools.h200.activations=nvfp4"],
            "through Marlin only",
            "pools.h200.moe=marlin",
        ),
    ],
)
def test_emulated_pools_stand_for_numbers_that_a_real_one_has(
    overrides: list[str], cause: str, way_out: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(*overrides)
    assert cause in str(caught.value)
    assert way_out in str(caught.value)


def test_every_variant_of_the_number_formats_can_be_emulated_where_its_chip_has_it() -> None:
    found = plan(
        "pools.b200.activations=nvfp4", "pools.b200.moe=flashinfer_trtllm_routed",
        "pools.b300.weights=fp8", "pools.b300.activations=fp8", "pools.b300.moe=triton",
        "pools.a100.activations=fp32", "pools.rtx_pro_6000.weights=nvfp4",
        "pools.rtx_pro_6000.moe=marlin",
    )  # fmt: skip
    assert {name: pool.activations for name, pool in found.pools.items()} == {
        "b300": "fp8", "b200": "nvfp4", "h200": "fp8", "h100": "fp8", "a100": "fp32",
        "rtx_pro_6000": "bf16",
    }  # fmt: skip


def test_an_fp8_cache_that_the_real_chip_refuses_is_said_when_it_is_emulated() -> None:
    said = warnings_of("pools.a100.attention=triton")
    assert "a100: kv=fp8 with attention=triton works here only because it is emulated" in said
    assert "issues/38291" in said
    assert "only because it is emulated" not in warnings_of()
    assert "because it is" not in warnings_of("pools.a100.attention=triton", "pools.a100.kv=bf16")


def test_more_sessions_than_the_pools_can_work_on_is_said() -> None:
    many = ("session.workers=2", "session.concurrency=320")
    assert "640 sessions at a time" in warnings_of(*many)
    assert "sessions at a time" not in warnings_of("session.workers=1", "session.concurrency=1")


def test_other_doubtful_choices_are_said() -> None:
    said = warnings_of(
        "algo=grpo", "net.bind=0.0.0.0", "sandbox.allow_unisolated=true", "pools.h100.replicas=0"
    )
    assert "uncorrected policy gradients collapse" in said
    assert "net.bind=0.0.0.0: servers can be reached from other machines" in said
    assert "commands run with your rights" in said
    assert "h100: 0 replicas" in said


def test_more_than_the_accelerators_memory_is_said() -> None:
    said = warnings_of("session.max_context_tokens=4096", "pools.h100.max_running=60000")
    assert "h100: weights and a full cache take" in said


def test_a_model_of_unknown_shape_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"model.path=my/model.*num_hidden_layers"):
        facts_from_config("my/model", {"hidden_size": 8})


def test_pools_record_experts_when_they_are_replayed_unless_a_pool_is_told_not_to() -> None:
    switch = "--enable-return-routed-experts"
    assert not any(switch in pool.argv for pool in plan().pools.values())
    recording = plan("algo.routing_replay=true", "pools.h100.record_experts=false").pools
    assert [name for name, pool in recording.items() if switch not in pool.argv] == ["h100"]


def test_routing_replay_of_a_model_without_experts_is_refused_by_the_plan() -> None:
    facts = dataclasses.replace(tiny_facts(), experts=0)
    config = load_config("train", ["algo.routing_replay=true"]).config
    with pytest.raises(PlanError, match=r"algo\.routing_replay: got true, but bundled:tiny has no"):
        build_plan(config, facts=facts, python="/opt/python")
