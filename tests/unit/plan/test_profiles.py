"""Launch profiles: flags that SGLang 0.5.23 has, numbers pinned, nothing left to chance."""

import pytest

from rlmix.core.errors import PlanError
from rlmix.plan.build import build_plan
from rlmix.plan.engine_args import KEYS, NOT_OURS, sglang_flags
from rlmix.plan.model_facts import facts_from_config
from tests.unit.plan.qwen36 import configured, planned

PLAN = planned()
POOLS = list(PLAN.pools)


def parsed(argv: tuple[str, ...]) -> dict[str, str | bool]:
    """Flag -> value, as SGLang's own parser would read it; fails on what it would refuse."""
    known = sglang_flags()
    found: dict[str, str | bool] = {}
    words = list(argv[argv.index("sglang.launch_server") + 1 :])
    while words:
        name = words.pop(0).removeprefix("--")
        assert name in known, f"SGLang 0.5.23 has no --{name}"
        assert name not in found, f"--{name} twice"
        choices = known[name]
        if choices is True:
            found[name] = True
            continue
        value = words.pop(0)
        assert not value.startswith("--"), f"--{name} has no value"
        assert not isinstance(choices, list) or value in choices, f"--{name} {value}"
        found[name] = value
    return found


def flags(pool: str) -> dict[str, str | bool]:
    return parsed(PLAN.pools[pool].argv)


def test_the_list_of_flags_is_that_of_the_version() -> None:
    known = sglang_flags()
    assert len(known) > 500
    assert known["enable-metrics"] is True
    assert "cutlass" in (known["moe-runner-backend"] or ())
    assert known["chunked-prefill-size"] == "int"
    assert set(KEYS) | set(NOT_OURS) <= set(known)


@pytest.mark.parametrize("pool", POOLS)
def test_every_argument_is_one_that_sglang_takes(pool: str) -> None:
    assert flags(pool)["model-path"] == "{model_path}"


@pytest.mark.parametrize("pool", POOLS)
def test_nothing_that_decides_numbers_is_left_to_the_server(pool: str) -> None:
    given = flags(pool)
    pinned = {
        "dtype", "kv-cache-dtype", "attention-backend", "moe-runner-backend", "page-size",
        "bf16-gemm-backend", "linear-attn-prefill-backend", "linear-attn-decode-backend",
        "mamba-ssm-dtype", "mamba-radix-cache-strategy", "disable-shared-experts-fusion",
        "chunked-prefill-size", "tp-size", "sampling-backend", "sampling-defaults",
    }  # fmt: skip
    assert pinned <= set(given)
    assert "auto" not in given.values()
    weights = PLAN.pools[pool].weights
    assert ("quantization" in given) == (weights != "bf16")
    assert ("fp8-gemm-backend" in given) == (weights == "fp8")
    assert ("fp4-gemm-backend" in given) == (weights == "nvfp4")


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_serves_256k_with_an_fp8_cache(pool: str) -> None:
    given = flags(pool)
    assert (given["context-length"], given["kv-cache-dtype"]) == ("262144", "fp8_e4m3")
    # Top-k 64 with ties; SGLang's own default is the smallest cap.
    assert given["sampling-mask-max-tokens"] == "4096"
    assert given["max-running-requests"] == given["cuda-graph-max-bs-decode"]
    # 3 slots of state for a request and 2 to track the prefix cache.
    assert int(given["max-mamba-cache-size"]) == 5 * int(given["max-running-requests"])


def test_profiles_differ_where_chips_do() -> None:
    seen = {
        pool: tuple(
            flags(pool).get(name)
            for name in ("attention-backend", "page-size", "moe-runner-backend", "mamba-ssm-dtype")
        )
        for pool in ("b200", "h100_fp8", "a100", "rtx_pro_6000")
    }
    assert seen == {
        "b200": ("trtllm_mha", "64", "flashinfer_cutedsl", "bfloat16"),
        "h100_fp8": ("fa3", "1", "triton", "float32"),
        "a100": ("flashinfer", "1", "triton", "float32"),
        "rtx_pro_6000": ("flashinfer", "1", "triton", "float32"),
    }
    assert flags("a100")["linear-attn-decode-backend"] == "triton"
    assert flags("h100_fp8")["fp8-gemm-backend"] == "deep_gemm"
    assert flags("b200")["fp4-gemm-backend"] == "flashinfer_cutedsl"


def test_w4a16_is_a_switch_in_the_environment_and_w4a4_says_that_it_is_off() -> None:
    switch = "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16"
    assert PLAN.pools["b300"].env[switch] == "1"
    assert switch not in PLAN.pools["h100_fp8"].env
    w4a4 = planned("pools.b200.activations=nvfp4", "pools.b200.moe=flashinfer_trtllm_routed")
    assert w4a4.pools["b200"].env[switch] == "0"
    marlin = planned("pools.b200.moe=marlin").pools["b200"]
    assert marlin.env[switch] == "0"
    assert parsed(marlin.argv)["fp4-gemm-backend"] == "marlin"


def test_pools_over_several_accelerators_sum_in_one_way() -> None:
    fused = "enforce-disable-flashinfer-allreduce-fusion"
    assert flags("h100_bf16")[fused] is True
    assert fused not in flags("h200_bf16")


EXACT = (
    "numerics.consistency=exact",
    "trainer.packing=rows",
    "pools.b200.attention=flashinfer",
    "pools.b200.linear_attention=triton",
    "+pool@pools.h100=sglang_h100_bf16",
    "pools.h100.kv=bf16",
    "pools.h100.linear_attention=triton",
    "pools.h100.max_running=16",
)


def test_exact_numerics_switch_determinism_on_for_each_accelerator() -> None:
    plan = planned(*EXACT, experiment="qwen36_b200")
    for name, attention in (("b200", "flashinfer"), ("h100", "fa3")):
        given = parsed(plan.pools[name].argv)
        assert given["enable-deterministic-inference"] is True
        assert given["rl-on-policy-target"] == "fsdp"
        assert given["attention-backend"] == attention
        assert given["bf16-gemm-backend"] == "torch"
        assert given["kv-cache-dtype"] == "bf16"
        assert plan.pools[name].env["SGLANG_FLASHINFER_MOE_FUSED_FINALIZE"] == "0"
    # Two H100s add up over the network; one B200 does not.
    assert parsed(plan.pools["h100"].argv)["disable-custom-all-reduce"] is True
    assert plan.pools["h100"].env["NCCL_ALGO"] == "allreduce:tree"
    assert "disable-custom-all-reduce" not in parsed(plan.pools["b200"].argv)
    assert "NCCL_ALGO" not in plan.pools["b200"].env
    assert not {"enable-deterministic-inference", "rl-on-policy-target"} & set(flags("b200"))


def test_exact_numerics_on_an_npu_make_its_collectives_deterministic() -> None:
    npu = planned(
        *EXACT,
        "+pool@pools.npu=sglang_ascend_910c_bf16",
        "accelerators.ascend_910c.usd_per_hour=1.5",
        experiment="qwen36_b200",
    ).pools["npu"]
    assert parsed(npu.argv)["enable-deterministic-inference"] is True
    assert npu.env["HCCL_DETERMINISTIC"] == "strict"
    assert "NCCL_ALGO" not in npu.env


def test_experts_are_split_where_the_pool_says_so() -> None:
    plan = planned("pools.h100_bf16.ep=2")
    assert parsed(plan.pools["h100_bf16"].argv)["ep-size"] == "2"
    assert "ep-size" not in flags("h100_bf16")


def test_routing_replay_asks_for_the_experts() -> None:
    plan = planned("algo.routing_replay=true")
    assert all("--enable-return-routed-experts" in pool.argv for pool in plan.pools.values())
    assert "enable-return-routed-experts" not in flags("b200")
    plan = planned("algo.routing_replay=true", "pools.b200.record_experts=false")
    assert "--enable-return-routed-experts" not in plan.pools["b200"].argv


def test_ascend_has_its_own_profile_and_wants_a_price() -> None:
    plan = planned(
        "+pool@pools.npu=sglang_ascend_910c_bf16", "accelerators.ascend_910c.usd_per_hour=1.5"
    )
    npu = plan.pools["npu"]
    given = parsed(npu.argv)
    assert (given["device"], given["attention-backend"], given["page-size"]) == (
        "npu",
        "ascend",
        "128",
    )
    assert given["sampling-backend"] == "ascend"
    assert not any(name.startswith("linear-attn") or "gemm" in name for name in given)
    assert npu.usd_per_hour == 6.0
    assert any("npu: NPU support is built apart" in warning for warning in plan.warnings)


def test_a_dense_model_needs_no_runner() -> None:
    config = configured("pools.b200.moe=none", experiment="qwen36_b200")
    dense = facts_from_config(
        "dense",
        {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    )  # fmt: skip
    given = parsed(build_plan(config, facts=dense, python="python").pools["b200"].argv)
    assert not {"moe-runner-backend", "mamba-ssm-dtype", "linear-attn-backend"} & set(given)


def test_further_arguments_reach_the_server() -> None:
    plan = planned(
        "+pools.b200.engine_args.decode-log-interval=1000",
        "+pools.b200.engine_args.page-size=128",
        "+pools.b200.engine_args.disable-cuda-graph=true",
    )
    given = parsed(plan.pools["b200"].argv)
    assert given["decode-log-interval"] == "1000"
    assert given["page-size"] == "128"
    assert given["disable-cuda-graph"] is True


def fault(argument: str) -> str:
    """What is said about one further argument of pool a100."""
    with pytest.raises(PlanError) as caught:
        planned(f"+pools.a100.engine_args.{argument}")
    key, _, said = str(caught.value).partition(": ")
    assert key == f"pools.a100.engine_args.{argument.split('=')[0]}"
    return said


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("prefill-attention-backend=triton", "follows from pools.a100.attention"),
        ("max-mamba-cache-size=10", "follows from pools.a100.max_running"),
        ("dp-size=2", "accelerators are pools.a100.tp"),
        ("pp-size=2", "accelerators are pools.a100.tp"),
        ("config=more.yaml", "override the plan unseen"),
        ("speculative-algorithm=EAGLE", "no draft model"),
        ("dtype=float16", "stays BF16"),
        ("enable-lora=7", "is a switch"),
        ("log-requests-level=9", "takes 0, 1, 2, 3"),
        ("chunked-prefill-size=many", "takes a whole number"),
        ("chunked-prefill-size=null", "takes a whole number"),
        ("schedule-conservativeness=[1,2]", "takes a number"),
        ("served-model-name={a:1}", "takes one number or text"),
        ("cuda-graph-bs-decode=[]", "takes one or more words"),
    ],
)
def test_an_argument_that_would_make_the_plan_untrue_is_refused(argument: str, said: str) -> None:
    assert said in fault(argument)


@pytest.mark.parametrize("flag", ["api-key", "admin-api-key", "ssl-keyfile-password"])
def test_a_secret_is_refused_and_not_repeated(flag: str) -> None:
    said = fault(f"{flag}=hunter2")
    assert "a secret would stand in the plan" in said
    assert "hunter2" not in said


def test_several_words_of_one_argument_stay_apart() -> None:
    argv = planned("+pools.b200.engine_args.cuda-graph-bs-decode=[1,8,32]").pools["b200"].argv
    start = argv.index("--cuda-graph-bs-decode")
    assert argv[start + 1 : start + 4] == ("1", "8", "32")
