"""Operators in order are the real forward, to the bit; otherwise nothing said of them counts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rlmix.diff.compare import DiffAsk, compare
from rlmix.diff.gate import setting_obstacles, shift_obstacle, text_obstacles, weight_obstacles
from rlmix.diff.lab import ground, sides, text
from rlmix.diff.pool import EmbeddedPool, PoolAsk, write_view
from rlmix.diff.program import Place, Text, places, run, swapped, trace
from rlmix.diff.shares import effects
from rlmix.diff.texts import Recorded
from rlmix.diff.trainer_side import TrainerSide
from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer
from tests.unit.diff.lab import limits

MODEL = resolve_model("bundled:tiny")
FORMATS = (
    ("b200", "nvfp4", "bf16", "fp8", "trtllm_mha", "flashinfer_cutedsl"),
    ("h100", "fp8", "fp8", "fp8", "fa3", "triton"),
    ("rtx_pro_6000", "bf16", "bf16", "bf16", "triton", "triton"),
)


def pool_ask(parts: tuple[str, ...], *, consistency: str = "native") -> PoolAsk:
    names = ("accelerator", "weights", "activations", "kv", "attention", "moe")
    return PoolAsk(
        name=parts[0],
        view=parts[1],
        consistency=consistency,
        max_running=4,
        tolerance_nats=0.5,
        **dict(zip(names, parts, strict=True)),
    )


def ask(*pools: PoolAsk, numerics: str = "native", diagnose: bool = True) -> DiffAsk:
    return DiffAsk(
        model=MODEL,
        pools=pools,
        numerics=numerics,
        temperature=1.0,
        sessions=2,
        session_tokens=48,
        seed=0,
        diagnose=diagnose,
        least_share=0.02,
        limits=limits(),
        source="the test",
    )


@pytest.fixture(scope="module")
def trainer() -> TrainerSide:
    return TrainerSide.load(MODEL, numerics="native", temperature=0.8)


def recorded(ids: list[int], **more: object) -> Recorded:
    fields = {"name": "t", "pool": "p", "ids": tuple(ids), "sampled": (1, 2)}
    fields |= {"logprobs_P": np.array([-1.0, -2.0], dtype=np.float32), **more}
    return Recorded(**fields)  # type: ignore[arg-type]


def test_the_trainers_operators_in_order_are_its_forward(trainer: TrainerSide) -> None:
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 590, (70,), generator=draws)
    (scored,) = trainer.score([recorded(ids.tolist())])
    assert torch.equal(run(trainer.side, Text.of(ids)), scored)


@pytest.mark.parametrize("parts", FORMATS, ids=lambda parts: parts[0])
def test_a_pools_operators_in_order_are_what_its_scheduler_recorded(
    parts: tuple[str, ...], trainer: TrainerSide, tmp_path
) -> None:
    one = pool_ask(parts)
    folder = write_view(MODEL, trainer.policy.state(), one.view, tmp_path / "view")
    pool = EmbeddedPool(one, folder, temperature=0.8)
    texts = pool.sample(ChatRenderer(MODEL), sessions=2, tokens=60, seed=3)
    for found in texts:
        assert found.prefilled is not None
        assert len(found.prefilled) > 1, "more than one turn, so a prefix was found in the cache"
        side = pool.side(trainer.side.shape, prefilled=found.prefilled)
        logprobs = run(side, Text.of(list(found.ids)))[torch.tensor(found.sampled) - 1]
        assert torch.equal(logprobs, torch.from_numpy(found.logprobs_P))


def test_formats_are_told_and_every_edge_adds_up() -> None:
    found = compare(ask(pool_ask(FORMATS[0]), pool_ask(FORMATS[2])))
    quantised, plain = found.pools
    assert (quantised.verdict, quantised.main_class) == ("operator path", "quantisation")
    assert quantised.by_class["quantisation"] > 0.8
    assert plain.main_class in ("order", "tiling", "cast")
    assert "quantisation" not in plain.by_class
    assert quantised.assembly_max_abs == plain.assembly_max_abs == 0
    assert quantised.total.mean_abs > 3 * plain.total.mean_abs
    assert found.noise_floor > 0
    for pool in found.pools:
        edges = pool.edges
        assert edges["decode_recorded"].mismatch_count == 0
        means = [edges[name].signed_mean for name in edges]
        assert sum(means) == pytest.approx(pool.total.signed_mean, abs=1e-6)
    kv = found.by_group()["kv"]
    assert {value: row["tokens"] for value, row in kv.items()} == {
        "fp8": quantised.total.tokens,
        "bf16": plain.total.tokens,
    }
    assert kv["fp8"]["mean_abs"] == pytest.approx(quantised.total.mean_abs)
    document = found.to_dict()
    assert set(document["by_pool"]["b200"]) >= {  # type: ignore[index]
        "mismatch_count", "mean_abs", "k3_kl", "verdict", "class", "share",
    }  # fmt: skip


def test_exact_mode_leaves_nothing_to_name() -> None:
    one = pool_ask(FORMATS[2], consistency="exact")
    found = compare(ask(one, numerics="exact"))
    assert (found.mismatch_count, found.noise_floor) == (0, 0.0)
    assert (found.pools[0].verdict, found.pools[0].causes) == ("none", ())
    assert found.is_within


def test_in_exact_mode_one_other_bit_is_too_much() -> None:
    found = compare(
        ask(pool_ask(FORMATS[2], consistency="exact"), numerics="exact", diagnose=False)
    )
    pool = found.pools[0]
    off = replace(pool, total=replace(pool.total, mismatch_count=1))
    assert pool.is_within
    assert not off.is_within


def test_shares_of_two_planted_operators_sum_to_one_and_swapping_both_leaves_nothing() -> None:
    found = ground(is_moe=True)
    trainer, _ = sides(found)
    other = found.side.with_operators(
        "off",
        {
            "act": lambda layer, r: {"inner": 1.02 * found.original("act")(layer, r)["inner"]},
            "head": lambda layer, r: {"logits": 1.01 * found.original("head")(layer, r)["logits"]},
        },
    )
    moves = effects(trainer, other, text(), torch.arange(50, 150), {"act": "cast", "head": "order"})
    assert sum(move.share for move in moves) == pytest.approx(1)
    assert all(move.alone > 0 and move.left > 0 for move in moves)
    one_class = {"act": "cast", "head": "cast"}
    same = effects(trainer, other, text(), torch.arange(50, 150), one_class)
    assert sum(move.share for move in same) == pytest.approx(1)
    both = run(swapped(other, trainer, ("act", "head")), text())
    assert torch.equal(both, run(trainer, text()))


def test_every_operator_of_a_layer_is_traced_once() -> None:
    found = ground(is_moe=True)
    steps = trace(found.side, text(tokens=20)).steps
    assert [step.place for step in steps] == list(places(found.side.shape))
    assert steps[0].place == Place("embed", -1)
    assert str(steps[1].place) == "layers.0.input_norm"


def test_what_is_not_the_same_question_is_said_before_anything_is_computed() -> None:
    first = {"temperature": 1.0, "rms_eps": 1e-6, "vocab_size": 10.0}
    told = list(setting_obstacles(first, {**first, "temperature": 0.7, "rms_eps": 1e-5}, name="p"))
    assert [one.cause for one in told] == ["hyper-parameter", "sampling"]
    (large,) = text_obstacles([recorded([1, 2, 12])], vocab_size=10)
    assert "token id 12" in large.sentence
    above = np.array([0.5, -1.0], dtype=np.float32)
    (positive,) = text_obstacles([recorded([1, 2, 3], logprobs_P=above)], vocab_size=10)
    assert positive.cause == "sampling"
    weights = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert (
        list(weight_obstacles(weights, {"a": torch.zeros(2), "b": torch.ones(2)}, name="p")) == []
    )
    (stale,) = weight_obstacles(weights, {**weights, "b": torch.tensor([1.0, 2.0])}, name="p")
    assert "first b" in stale.sentence


def test_logprobs_of_the_neighbours_are_found_out() -> None:
    draws = torch.Generator().manual_seed(0)
    own, before, after = (-torch.rand(60, generator=draws) * 4 for _ in range(3))
    scored = {-1: before, 0: own, 1: after}
    assert shift_obstacle(own + 0.01, scored) is None
    wrong = shift_obstacle(after + 0.01, scored)
    assert wrong is not None
    assert (wrong.cause, "+1" in wrong.sentence) == ("tokens", True)


def test_a_record_must_fit_its_ids() -> None:
    with pytest.raises(ValueError, match="each sampled token needs one"):
        recorded([1, 2, 3], sampled=(1,))
    with pytest.raises(ValueError, match="outside"):
        recorded([1, 2], sampled=(1, 2))
    with pytest.raises(ValueError, match="ascend"):
        recorded([1, 2, 3], sampled=(2, 1))
