"""Logprobs over the vocabulary, and the machine's self-check."""

import math
from dataclasses import replace

import pytest
import torch

from rlmix.numerics.consistent.attention import attend, plan_attention
from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.head import (
    VOCAB_TILE,
    head_logits,
    kept_normaliser,
    scores_of_logits,
    vocab_scores,
    vocab_tiles,
)
from rlmix.numerics.consistent.selfcheck import self_check


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_three_equal_logits_have_a_third_each() -> None:
    found = vocab_scores(
        torch.zeros(1, 4), torch.zeros(3, 4), torch.tensor([[0, 2]]), temperature=0.5
    )
    assert found.scores_PK.tolist() == [[0.0, 0.0]]
    assert found.normaliser_P.item() == pytest.approx(math.log(3), abs=1e-6)
    assert found.entropy_P.item() == pytest.approx(math.log(3), abs=1e-6)


@pytest.mark.parametrize("vocab", [593, 2 * VOCAB_TILE + 77])
def test_the_trainer_and_the_engine_get_the_same_bits(vocab: int) -> None:
    hidden, weight = random(21, 64), random(vocab, 64, seed=1)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, vocab, (21, 5), generator=generator)
    trainer = vocab_scores(hidden, weight, ids, temperature=0.8)
    for rows in (slice(0, 1), slice(4, 9), slice(0, 21)):
        logits = head_logits(hidden[rows], weight)
        engine = scores_of_logits(logits, ids[rows], temperature=0.8)
        assert torch.equal(engine.scores_PK, trainer.scores_PK[rows])
        assert torch.equal(engine.normaliser_P, trainer.normaliser_P[rows])
        assert torch.equal(engine.entropy_P, trainer.entropy_P[rows])


def test_a_tail_of_one_id_is_computed_with_the_tile_before_it() -> None:
    assert list(vocab_tiles(VOCAB_TILE + 1)) == [(0, VOCAB_TILE + 1)]
    assert list(vocab_tiles(2 * VOCAB_TILE + 65))[1:] == [
        (VOCAB_TILE, 2 * VOCAB_TILE),
        (2 * VOCAB_TILE, 2 * VOCAB_TILE + 65),
    ]
    assert list(vocab_tiles(7)) == [(0, 7)]
    # Alone, MKL would add the last column of 31 rows otherwise than that of 4.
    hidden, weight = random(31, 96), random(VOCAB_TILE + 1, 96, seed=1)
    last = torch.full((31, 1), VOCAB_TILE)
    trainer = vocab_scores(hidden, weight, last, temperature=1.0)
    for row in range(31):
        logits = head_logits(hidden[row : row + 1], weight)
        assert logits[0, VOCAB_TILE] == trainer.scores_PK[row, 0]


@pytest.mark.parametrize("vocab", [593, VOCAB_TILE + 77])
def test_forward_and_backward_are_those_of_float64(vocab: int) -> None:
    hidden, weight = random(3, 64).requires_grad_(), random(vocab, 64, seed=1).requires_grad_()
    ids = torch.tensor([[0, vocab - 1], [5, 5], [vocab - 2, 7]])
    found = vocab_scores(hidden, weight, ids, temperature=2.0)
    logprobs = found.scores_PK - found.normaliser_P[:, None]
    (logprobs * torch.tensor([1.0, -2.0])).sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    expected = (exact[0] @ exact[1].t() / 2.0).log_softmax(-1)
    (expected.gather(1, ids) * torch.tensor([1.0, -2.0])).sum().backward()
    assert torch.allclose(logprobs.double(), expected.gather(1, ids), atol=1e-5)
    entropy = -(expected.exp() * expected).sum(-1)
    assert torch.allclose(found.entropy_P.double(), entropy, atol=1e-5)
    assert torch.allclose(hidden.grad.double(), exact[0].grad, atol=1e-5)
    assert torch.allclose(weight.grad.double(), exact[1].grad, atol=1e-5)


def test_a_kept_sets_normaliser_does_not_depend_on_its_padding() -> None:
    scores = random(4, 10)
    kept = torch.arange(10) < torch.tensor([[10], [3], [1], [7]])
    expected = kept_normaliser(scores, kept)
    for width in (11, 64, 65, 200):
        padded = torch.nn.functional.pad(scores, (0, width - 10), value=9.0)
        found = kept_normaliser(padded, torch.nn.functional.pad(kept, (0, width - 10)))
        assert torch.equal(found, expected)
    alone = kept_normaliser(scores[1:2, :3], kept[1:2, :3])
    assert torch.equal(alone, expected[1:2])
    assert expected[2].item() == scores[2, 0].item()


def test_this_machine_passes_the_self_check_in_under_a_second() -> None:
    found = self_check(
        linear_shapes=[(128, 256), (128, 8), (128, 593)],
        row_parallel_shapes=[(128, 128)],
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        tiling=CPU_TILING,
    )
    assert found.failures == ()
    assert found.is_exact
    assert found.num_comparisons > 50


def test_the_self_check_finds_a_trim_that_the_library_adds_in_another_order() -> None:
    if not torch.backends.mkl.is_available():
        pytest.skip("which widths differ is MKL's choice")
    found = self_check(
        linear_shapes=[],
        row_parallel_shapes=[],
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        tiling=replace(CPU_TILING, trims=(192,)),
    )
    assert any(failure.startswith("attention") for failure in found.failures)


def test_threads_that_add_otherwise_than_one_thread_are_found() -> None:
    """The engine has one thread: agreeing with oneself is not enough for a trainer with three."""
    queries, keys = random(1, 40, 5, 40), random(1, 1, CPU_TILING.padded(40), 40, seed=1)
    plan = plan_attention(torch.arange(40)[None], groups=5, tiling=CPU_TILING)
    one = attend(queries, keys, keys, plan)
    torch.set_num_threads(3)
    try:
        three = attend(queries, keys, keys, plan)
        found = self_check(
            linear_shapes=[],
            row_parallel_shapes=[],
            num_heads=5,
            num_kv_heads=1,
            head_dim=40,
            tiling=CPU_TILING,
        )
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    name = "attention: 3 threads differ from one (40 rows)"
    assert (name in found.failures) == (not torch.equal(one, three))
