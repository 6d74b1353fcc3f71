"""The token task and its policy against numbers worked by hand."""

import torch

from rlmix.studies import token_task as task
from rlmix.studies.token_policy import EXACT, Decoder, Kernel, initial_weights, session_logits


def test_the_wanted_residue_depends_on_prompt_position_and_previous_token() -> None:
    state = task.State(
        prompts_N=torch.tensor([0, 1, 2]),
        previous_N=torch.tensor([5, 4, 7]),
        num_good_N=torch.tensor([0, 0, 0]),
        position=3,
    )
    # 3c + t(c+1) + prev mod 2: 0+3+1 = 4, 3+6+0 = 9, 6+9+1 = 16; modulo 4.
    assert task.wanted_residue(state).tolist() == [0, 1, 0]


def test_only_a_good_token_counts_and_becomes_the_previous_one() -> None:
    state = task.start(torch.tensor([1, 1]))
    # Prompt 1 at position 0 wants residue 3.
    after = task.advance(state, torch.tensor([11, 12]))
    assert after.num_good_N.tolist() == [1, 0]
    assert after.previous_N.tolist() == [11, 12]
    assert after.position == 1


def test_the_standing_is_the_distance_from_half_of_the_tokens_good() -> None:
    def standing(num_good: int, position: int) -> int:
        state = task.State(
            prompts_N=torch.tensor([0]),
            previous_N=torch.tensor([0]),
            num_good_N=torch.tensor([num_good]),
            position=position,
        )
        before = task.NUM_PROMPTS + task.LENGTH + task.VOCABULARY
        return int(task.features(state)[0, 3]) - before

    # (good - position/2) / 1.5 rounded, plus 4, kept between 0 and 7.
    assert standing(0, 0) == 4
    assert standing(8, 16) == 4
    assert standing(11, 16) == 6
    assert standing(32, 32) == 7
    assert standing(0, 32) == 0


def test_a_reward_is_plus_one_with_a_chance_between_a_tenth_and_nine_tenths() -> None:
    chances = task.chance_of_success(torch.tensor([0, 16, 32]))
    assert torch.allclose(chances, torch.tensor([0.1, 0.5, 0.9]))
    many = task.rewards(torch.full((20_000,), 32), torch.Generator().manual_seed(0))
    assert set(many.tolist()) == {1.0, -1.0}
    # 0.9 of them, give or take five standard errors (0.0021 each).
    assert abs(float((many > 0).float().mean()) - 0.9) < 0.011


def some_sessions() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = initial_weights(generator)
    state = task.start(torch.arange(6))
    seen = []
    for _ in range(task.LENGTH):
        seen.append(task.features(state))
        state = task.advance(state, torch.randint(16, (6,), generator=generator))
    return weights, torch.stack(seen, 1)


def decoded(weights: dict[str, torch.Tensor], seen: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    decoder = Decoder(weights, kernel)
    return torch.stack([decoder.logits(seen[:, i]) for i in range(seen.shape[1])], 1)


def test_decoding_with_exact_numerics_is_the_whole_pass() -> None:
    weights, seen = some_sessions()
    whole = session_logits(weights, seen)
    assert torch.allclose(decoded(weights, seen, EXACT), whole, atol=2e-6)


def test_each_liberty_of_a_kernel_adds_to_the_distance_from_the_trainer() -> None:
    weights, seen = some_sessions()
    whole = session_logits(weights, seen)

    def distance(**liberties: object) -> float:
        kernel = Kernel(**{"rounds_to_bf16": True, "tile": 64} | liberties)  # type: ignore[arg-type]
        return float((decoded(weights, seen, kernel) - whole).abs().mean())

    rounded = distance()
    assert 1e-5 < rounded < 0.02
    assert distance(tile=16) != rounded, "another order of additions is another number"
    assert distance(kv="fp8") > 1.2 * rounded
    assert distance(activations="fp8") > 2 * rounded
