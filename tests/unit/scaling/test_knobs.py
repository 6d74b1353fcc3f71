"""Which arguments are tuned: none that decides numbers."""

from dataclasses import replace
from typing import Any

import pytest

from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.config.schema.train import TrainConfig
from rlmix.engine.sglang.launch import flags_of
from rlmix.plan.build import build_plan, plan_faults
from rlmix.plan.engine_args import sglang_flags
from rlmix.scaling.knobs import POOL_KEYS, knobs_of, numeric_flags, with_settings

IDENTITY = (
    "accelerator", "weights", "scope", "activations", "kv", "attention", "linear_attention",
    "state", "moe", "tp", "engine", "is_emulated",
)  # fmt: skip
"""Of a pool's plan: everything that the numerics key is made of."""


def load(experiment: str) -> TrainConfig:
    return load_config("train", [f"experiment={experiment}"]).config


@pytest.mark.parametrize("experiment", ["qwen36_mixed", "tiny_sglang", "tiny"])
def test_no_value_of_any_knob_changes_the_numerics_key(experiment: str) -> None:
    config = load(experiment)
    facts = facts_of(config)
    tried = 0
    for name, pool in config.pools.items():
        alone = replace(config, pools={name: replace(pool, replicas=1)})
        before = build_plan(alone, facts=facts, python="python").pools[name]
        knobs = knobs_of(pool, config.accelerators[pool.accelerator])
        for knob, values in knobs.items():
            assert knob in POOL_KEYS or (knob in sglang_flags() and knob not in numeric_flags())
            for value in values:
                other = with_settings(alone.pools[name], ((knob, value),))
                changed = replace(config, pools={name: other})
                if faults := [fault for fault in plan_faults(changed, facts) if knob in fault]:
                    # A batch may be too large for the memory; then it is not started.
                    assert knob in POOL_KEYS, faults
                    continue
                after = build_plan(changed, facts=facts, python="python").pools[name]
                for part in IDENTITY:
                    assert getattr(after, part) == getattr(before, part), (name, knob, part)
                assert numbers(after.argv) == numbers(before.argv), (name, knob, value)
                assert after.env == before.env
                assert after.argv != before.argv or knob == "memory_frac", (name, knob, value)
                tried += 1
    assert tried >= 2


def numbers(argv: tuple[str, ...]) -> dict[str, Any]:
    # Room for states, and on a CPU for tokens, follows from the batch.
    named = numeric_flags() - {"max-mamba-cache-size", "max-total-tokens"}
    return {flag: value for flag, value in flags_of(argv).items() if flag in named}


def test_real_pools_have_the_arguments_that_decide_speed_and_embedded_ones_their_batch() -> None:
    config = load("qwen36_mixed")
    h100 = config.pools["h100_fp8"]
    knobs = knobs_of(h100, config.accelerators["h100"])
    assert {"max_running", "memory_frac", "schedule-policy", "chunked-prefill-size",
            "schedule-conservativeness", "cuda-graph-max-bs-decode",
            "radix-eviction-policy"} <= set(knobs)  # fmt: skip
    # Chunks above the validated size are not tried, and what the pool has is no candidate.
    assert max(knobs["chunked-prefill-size"]) <= 8192
    assert h100.max_running not in knobs["max_running"]
    b200 = config.pools["b200"]
    # Its attention kernel wants pages of its own.
    assert b200.attention == "trtllm_mha"
    assert "page-size" not in knobs_of(b200, config.accelerators["b200"])
    tiny = load("tiny")
    assert set(knobs_of(tiny.pools["b200"], tiny.accelerators["b200"])) == {"max_running"}


def test_settings_go_where_they_belong() -> None:
    pool = load("qwen36_mixed").pools["h100_fp8"]
    changed = with_settings(
        replace(pool, engine_args={"schedule-policy": "fcfs", "log-level": "info"}),
        (("max_running", 7), ("schedule-policy", "lpm")),
    )
    assert changed.max_running == 7
    assert changed.memory_frac == pool.memory_frac
    assert changed.engine_args == {"schedule-policy": "lpm", "log-level": "info"}
