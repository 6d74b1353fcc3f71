"""Numbers worked by hand; the group of the docs is (1, 0, 0, 1) and (1, 1, 0, 0, 0)."""

import numpy as np
import pytest
import torch

from rlmix.algos.advantages import group_advantages, has_signal


def test_advantage_is_the_reward_minus_the_group_mean():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    assert group_advantages(rewards, scale="none").tolist() == [0.5, -0.5, -0.5, 0.5]


def test_std_scale_divides_by_the_population_standard_deviation():
    # mean 0.4, population std sqrt(0.24) = 0.4898979
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    advantages = group_advantages(rewards, scale="std").tolist()
    expected = [0.6 / (0.24**0.5 + 1e-6)] * 2 + [-0.4 / (0.24**0.5 + 1e-6)] * 3
    assert advantages == pytest.approx(expected, rel=1e-12)


def test_leave_one_out_compares_with_the_others_only():
    # member 0 against mean(0, 0, 1) = 1/3; member 1 against mean(1, 0, 1) = 2/3
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    advantages = group_advantages(rewards, scale="none", baseline="leave_one_out").tolist()
    assert advantages == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3], rel=1e-12)


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_advantages_of_a_group_sum_to_zero(scale, baseline):
    generator = torch.Generator().manual_seed(3)
    rewards = torch.rand(7, generator=generator, dtype=torch.float64)
    advantages = group_advantages(rewards, scale=scale, baseline=baseline)
    assert float(advantages.sum()) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [1.0], [0.0, 0.0]])
def test_a_group_without_signal_is_exactly_zero(scale, rewards):
    # 0.1 is not a binary fraction: its mean over three rounds, and must not leak a push
    advantages = group_advantages(torch.tensor(rewards), scale=scale)
    assert advantages.tolist() == [0.0] * len(rewards)
    assert not has_signal(torch.tensor(rewards))


def test_numpy_and_torch_agree_and_keep_their_kind():
    rewards = np.array([1.0, 0.0, 0.5, 0.25], dtype=np.float32)
    ours = group_advantages(rewards, scale="std")
    assert isinstance(ours, np.ndarray)
    assert ours.dtype == np.float32
    assert ours == pytest.approx(group_advantages(torch.tensor(rewards), scale="std").numpy())


def test_order_of_members_only_permutes_the_advantages():
    rewards = torch.tensor([1.0, 0.0, 0.5])
    swapped = group_advantages(rewards[[2, 0, 1]], scale="std")
    assert swapped.tolist() == group_advantages(rewards, scale="std")[[2, 0, 1]].tolist()


def test_empty_groups_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match="at least one valid member"):
        group_advantages(torch.tensor([]), scale="none")
    with pytest.raises(ValueError, match="scale='max' is unknown; use one of none, std"):
        group_advantages(torch.tensor([1.0]), scale="max")
    with pytest.raises(ValueError, match="baseline='none' is unknown"):
        group_advantages(torch.tensor([1.0]), scale="none", baseline="none")
