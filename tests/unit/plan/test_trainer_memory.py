from dataclasses import replace

import pytest

from rlmix.core.errors import PlanError
from rlmix.plan.model_facts import REFERENCE, bundled_facts
from rlmix.plan.trainer_memory import (
    BLOCK_BYTES,
    most_that_fit,
    saved_width,
    trained_tokens_per_s,
    trainer_memory,
)
from tests.unit.plan.qwen36 import planned

QWEN36 = bundled_facts(REFERENCE)
DENSE = replace(
    QWEN36,
    embedding=1000 * 8, head=1000 * 8, attention=2 * 8 * 48, linear_attention=0,
    mlp=2 * 3 * 8 * 32, shared_expert=0, other=0, expert=0, expert_layers=0, experts=0,
    experts_per_token=0, expert_width=0, hidden=8, layers=2, attention_layers=2,
)  # fmt: skip
"""Two layers of hidden size 8: attention of 8 x 48 and an MLP of 3 x 8 x 32 each; 18,304 parameters
with an embedding and a head of 1000 x 8."""


def memory(facts=DENSE, **changes):
    asked = {
        "tokens": 100, "policy_tokens": 50, "ranks": 1, "optimizer": "adamw", "recomputes": True,
        "offloads": False,
    }  # fmt: skip
    return trainer_memory(facts, **{**asked, **changes})


def test_one_rank_holds_bf16_masters_sums_and_moments():
    found = memory()
    assert DENSE.params == 18_304
    assert found.weights_bytes == 2 * 18_304
    assert found.master_bytes == 4 * 18_304
    # Float32 sums, and the BF16 gradient of the embedding on its way into them.
    assert found.gradient_bytes == 4 * 18_304 + 2 * 8_000
    assert found.optimizer_bytes == 8 * 18_304
    assert memory(optimizer="sgd").optimizer_bytes == 0


def test_several_ranks_share_what_stays_and_gather_what_they_compute_with():
    found = memory(ranks=4)
    assert found.master_bytes == 18_304
    # Embedding and head, and two of the layers of 1,152 parameters.
    assert found.weights_bytes == 2 * (16_000 + 2 * 1_152)
    assert found.gradient_bytes == 18_304 + 6 * (16_000 + 1_152)
    offloaded = memory(ranks=4, offloads=True)
    assert (offloaded.master_bytes, offloaded.optimizer_bytes) == (0, 0)
    assert offloaded.gradient_bytes == 6 * (16_000 + 1_152)


def test_activations_are_counted_in_elements_a_token():
    # Norms 8 x 8, attention 2.5 x 48, MLP 4 x 32.
    assert saved_width(DENSE) == 64 + 120 + 128
    found = memory()
    assert found.kept_bytes == 2 * 100 * 8 * 2
    assert found.layer_bytes == 2 * 100 * 312 * 1.5
    assert memory(recomputes=False).kept_bytes == found.kept_bytes + 2 * 100 * 312
    # Hidden states of the policy's tokens and their gradient, the head's gradient twice, blocks.
    assert found.loss_bytes == 8 * 50 * 8 + 6 * 8_000 + BLOCK_BYTES
    assert found.total_bytes == sum(found.parts().values())


def test_the_longest_micro_batch_that_fits_is_on_the_line():
    def held(tokens):
        return memory(tokens=tokens, policy_tokens=tokens)

    room = held(5000).total_bytes
    assert most_that_fit(held, room + 1) == 5000
    assert most_that_fit(held, held(0).total_bytes - 1) == 0


def test_experts_multiply_what_a_token_moves():
    """Norms 8 x 2048; 16,384 a token through the gated-delta-net projections, 2.5 times; the shared
    expert 4 x 512; eight experts with three copies of 2,048 and four of 512."""
    expected = 8 * 2048 + 2.5 * 16_384 + 4 * 512 + 8 * (3 * 2048 + 4 * 512)
    assert saved_width(QWEN36) == pytest.approx(expected, rel=0.03)


def test_a_recomputed_step_takes_four_passes_instead_of_three():
    rates = [
        trained_tokens_per_s(QWEN36, tflops=1000.0, session_tokens=0, recomputes=recomputes)
        for recomputes in (True, False)
    ]
    assert rates[1] / rates[0] == pytest.approx(4 / 3)
    assert rates[1] == pytest.approx(0.4 * 1000e12 / (6 * QWEN36.active_params))


def test_thirty_two_b200_hold_256k_tokens_and_eight_only_with_offload():
    held = planned("trainer.ranks=32").trainer
    assert held.most_tokens >= 262_144
    assert sum(held.rank_parts_gib.values()) == pytest.approx(held.rank_gib)
    with pytest.raises(PlanError, match=r"got 8 on b200.*raise trainer\.ranks|lower the tokens"):
        planned("trainer.ranks=8")
    assert planned("trainer.ranks=8", "trainer.offload=true").trainer.most_tokens >= 262_144
    half = planned("trainer.ranks=8", "trainer.micro_batch_tokens=131072",
                   "session.max_context_tokens=131072").trainer  # fmt: skip
    assert 131_072 <= half.most_tokens < 262_144
