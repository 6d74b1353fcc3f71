"""The matrix: rows are sound, refusals have ways out that work, and known traps are in it."""

from dataclasses import fields, replace

import pytest

from rlmix.config import names
from rlmix.plan.capabilities import (
    NOTE,
    REFUSED,
    UNKNOWN,
    WORKS,
    Combination,
    Row,
    judge,
    refusal_text,
)
from rlmix.plan.engine_args import sglang_flags
from rlmix.plan.matrix import ROWS

NVFP4_B200 = Combination(
    accelerator="b200", architecture="sm100", weights="nvfp4", activations="bf16", kv="fp8",
    attention="trtllm_mha", linear_attention="flashinfer", state="bf16", moe="flashinfer_cutedsl",
)  # fmt: skip
FP8_H100 = replace(
    NVFP4_B200, accelerator="h100", architecture="sm90", weights="fp8", activations="fp8",
    attention="fa3", state="fp32", moe="triton",
)  # fmt: skip
BF16_A100 = replace(
    FP8_H100, accelerator="a100", architecture="sm80", weights="bf16", activations="bf16",
    attention="flashinfer", linear_attention="triton",
)  # fmt: skip
BF16_RTX = replace(BF16_A100, accelerator="rtx_pro_6000", architecture="sm120")
BF16_NPU = replace(
    BF16_A100, accelerator="ascend_910c", architecture="npu", attention="ascend", kv="bf16",
    linear_attention="ascend", state="bf16", moe="auto",
)  # fmt: skip
BF16_CPU = replace(
    BF16_NPU, accelerator="cpu", architecture="cpu", attention="torch_native",
    linear_attention="none", state="none", is_hybrid=False,
)  # fmt: skip
WORKING = {
    "sm100": NVFP4_B200, "sm90": FP8_H100, "sm80": BF16_A100, "sm120": BF16_RTX, "npu": BF16_NPU,
    "cpu": BF16_CPU,
}  # fmt: skip
"""Architecture -> a combination of the public mixed run, or of a recipe."""
REFUSALS = [row for row in ROWS if row.verdict == REFUSED]


def verdict(combination: Combination) -> str:
    return judge(combination, ROWS).verdict


def names_of(combination: Combination) -> set[str]:
    return {row.name for row in judge(combination, ROWS).refusals}


def witness(row: Row) -> Combination:
    """A combination that the row refuses, as close to a working one as can be."""
    architecture = row.when.get("architecture", ("sm90",))[0]
    chosen = {key: values[0] for key, values in row.when.items()}
    version = row.since if row.since != "0" else "0.5.9" if row.before else "0.5.23"
    return replace(WORKING[architecture], version=version, **chosen)


@pytest.mark.parametrize("combination", WORKING.values(), ids=WORKING)
def test_combinations_that_somebody_ran_are_not_refused(combination: Combination) -> None:
    assert verdict(combination) in (WORKS, NOTE)
    assert judge(combination, ROWS).evidence


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.name)
def test_every_refusal_has_changes_that_lead_out_of_it(row: Row) -> None:
    seen = witness(row)
    assert row in judge(seen, ROWS).refusals
    assert row.instead
    for change in row.instead:
        changed = replace(seen, **change)
        # The cause is gone, nothing new came, and what was wrong besides has ways out as well.
        assert names_of(changed) <= names_of(seen) - {row.name}, change
        while others := judge(changed, ROWS).refusals:
            changed = replace(changed, **others[0].instead[0])
            assert others[0].name not in names_of(changed)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_rows_have_a_reason_a_public_source_and_fields_that_exist(row: Row) -> None:
    assert row.verdict in (WORKS, NOTE, REFUSED)
    assert len(row.reason) > 20
    assert all(source.startswith("https://") for source in row.source.split())
    known = {field.name for field in fields(Combination)}
    assert set(row.when) <= known
    values = {
        "weights": names.FORMATS,
        "activations": names.ACTIVATION_FORMATS,
        "kv": names.KV_FORMATS,
        "attention": names.ATTENTIONS,
        "linear_attention": names.LINEAR_ATTENTIONS,
        "state": names.STATE_FORMATS,
        "moe": sglang_flags()["moe-runner-backend"],
        "architecture": tuple(WORKING),
    }
    for key, allowed in values.items():
        assert set(row.when.get(key, ())) <= set(allowed), key  # type: ignore[arg-type]


def test_deep_gemm_on_a_workstation_is_unproven_and_not_refused() -> None:
    # SGLang 0.5.23 has a path of its own for it (deep_gemm_sm120.py).
    judged = judge(replace(BF16_RTX, weights="fp8", activations="fp8", moe="deep_gemm"), ROWS)
    assert judged.refusals == ()
    assert judged.evidence == ()
    assert "deep-gemm-workstation" in {row.name for row in judged.notes}


def test_row_names_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize(
    ("combination", "name"),
    [
        (replace(BF16_A100, attention="triton"), "fp8-kv-triton-sm80"),
        (replace(BF16_RTX, attention="trtllm_mha"), "fp8-kv-trtllm-sm120"),
        (replace(BF16_A100, linear_attention="flashinfer"), "flashinfer-gdn-sm80"),
        (replace(BF16_RTX, linear_attention="flashinfer"), "flashinfer-gdn-sm120"),
        (replace(NVFP4_B200, state="fp32"), "flashinfer-gdn-sm100-state"),
        (replace(NVFP4_B200, moe="flashinfer_trtllm_routed"), "trtllm-is-w4a4"),
        (replace(NVFP4_B200, attention="fa3"), "fa3-needs-hopper"),
        (replace(NVFP4_B200, attention="torch_native"), "hybrid-sm100"),
        (replace(BF16_RTX, attention="torch_native"), "hybrid-sm120"),
        (replace(FP8_H100, activations="bf16"), "fp8-is-w8a8"),
        (replace(FP8_H100, moe="flashinfer_cutlass"), "fp8-blocks-become-triton"),
        (replace(BF16_A100, weights="fp8"), "fp8-experts-sm80"),
        (replace(NVFP4_B200, consistency="exact"), "exact-attention"),
        (
            replace(
                NVFP4_B200,
                activations="nvfp4",
                moe="flashinfer_trtllm",
                record_experts="true",
            ),
            "routing-inside-the-kernel",
        ),
    ],
)
def test_known_traps_are_refused(combination: Combination, name: str) -> None:
    assert name in names_of(combination)


@pytest.mark.parametrize(
    ("combination", "name"),
    [
        (NVFP4_B200, "w4a16-without-qat"),
        (BF16_A100, "fp8-kv-flashinfer-sm80"),
        (BF16_RTX, "fp8-kv-flashinfer-sm120"),
        (
            replace(NVFP4_B200, weights="fp8", activations="fp8", moe="triton"),
            "deep-gemm-fp8-blackwell",
        ),
    ],
)
def test_known_risks_are_noted(combination: Combination, name: str) -> None:
    judgement = judge(combination, ROWS)
    assert judgement.refusals == ()
    assert name in {row.name for row in judgement.notes}


def test_one_format_means_other_activations_on_other_chips() -> None:
    w4a4 = {"weights": "nvfp4", "activations": "nvfp4"}
    w4a16 = {"weights": "nvfp4", "activations": "bf16"}
    assert verdict(replace(NVFP4_B200, **w4a4, moe="flashinfer_trtllm_routed")) != REFUSED
    assert verdict(replace(BF16_RTX, **w4a4, moe="flashinfer_cutlass")) != REFUSED
    assert verdict(replace(BF16_RTX, **w4a16, moe="marlin")) != REFUSED
    for below in (FP8_H100, BF16_A100):
        assert verdict(replace(below, **w4a16, moe="marlin")) != REFUSED
        assert verdict(replace(below, **w4a4, moe="marlin")) == REFUSED


def test_facts_about_old_versions_end_with_them() -> None:
    combination = replace(BF16_RTX, attention="triton")
    assert "fp8-kv-triton-sm120-old" in names_of(replace(combination, version="0.5.9"))
    assert names_of(replace(combination, version="0.5.10")) == set()
    b300 = replace(NVFP4_B200, accelerator="b300", activations="nvfp4", moe="flashinfer_trtllm")
    notes = {
        v: {r.name for r in judge(replace(b300, version=v), ROWS).notes}
        for v in ("0.5.12", "0.5.23")
    }
    assert "b300-draft-graphs" in notes["0.5.12"]
    assert "b300-draft-graphs" not in notes["0.5.23"]


def test_kernels_of_parts_that_a_model_lacks_do_not_matter() -> None:
    dense = replace(BF16_A100, is_moe=False, is_hybrid=False, moe="none", linear_attention="none",
                    state="none")  # fmt: skip
    assert names_of(dense) == set()


def test_what_nobody_ran_is_unknown_and_not_refused() -> None:
    assert verdict(replace(NVFP4_B200, attention="fa4")) == UNKNOWN


def test_a_refusal_names_chip_cause_and_ways_out() -> None:
    seen = replace(BF16_A100, attention="triton")
    (row,) = judge(seen, ROWS).refusals
    assert refusal_text("a100", seen, row) == (
        "pools.a100: kv=fp8 attention=triton on a100 (sm80): Triton has no conversion to E4M3 "
        "below SM89 (fp8e4nv), so it can neither write nor read an FP8 KV cache; set "
        "pools.a100.attention=flashinfer or pools.a100.kv=bf16 "
        "(https://github.com/sgl-project/sglang/issues/38291)"
    )
