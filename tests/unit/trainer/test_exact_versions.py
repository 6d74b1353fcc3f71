"""A change of weights while an exact engine samples: what came after it is the new trainer's."""

import numpy as np
import pytest
import torch

from rlmix.batch.packing import pack_samples
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.trainer.exact import ExactPolicy
from rlmix.trainer.policy import Policy
from tests.unit.trainer.exactness import (
    TEMPERATURE,
    Ask,
    exact_profile,
    new_scheduler,
    prompt,
    request_of,
    sample_of,
    write_policy,
)

ASKS = (
    Ask(prompt=prompt(1, 560), tokens=20),  # two steps of prompt: the change finds it half done
    Ask(prompt=prompt(2, 1), tokens=40),
    Ask(prompt=prompt(3, 250), tokens=30),
    Ask(prompt=prompt(3, 250) + prompt(4, 5), tokens=20),  # its prefix was cached by old weights
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("versions")
    return [write_policy(root / str(seed), is_moe=True, seed=seed) for seed in (0, 1)]


def served(folders, *, mode: str, steps: int):
    """Requests that new weights meet after some steps."""
    scheduler = new_scheduler(folders[0], exact_profile())
    requests = [request_of(ask, number) for number, ask in enumerate(ASKS)]
    for request in requests:
        scheduler.submit(request)
    for _ in range(steps):
        scheduler.step()
    scheduler.pause(mode)
    shape = read_shape(read_config(folders[1]))
    weights = load_weights(folders[1], shape=shape, profile=exact_profile())
    scheduler.replace_weights(weights, version=1)
    scheduler.resume()
    while scheduler.has_work:
        scheduler.step()
    return requests


@torch.no_grad()
def differences(folder, requests, *, version: int) -> tuple[int, int]:
    """Of the tokens of one version: those whose logprobs differ, and all."""
    policy = Policy.load(folder, make=ExactPolicy)
    differ = total = 0
    for request in requests:
        (batch,) = pack_samples([sample_of(request)], max_tokens=1500)
        found = policy.token_logprobs(batch, temperature=TEMPERATURE, replay=True)
        is_of = np.concatenate([np.full(s.end - s.start, s.version) for s in request.spans])
        is_of = torch.from_numpy(is_of == version)
        sampler = torch.from_numpy(batch.sampler_logprobs_P)
        differ += int((found.trainer_P != sampler)[is_of].sum())
        total += int(is_of.sum())
    return differ, total


@pytest.mark.parametrize("steps", [1, 2, 12])
def test_after_a_retraction_every_token_is_the_new_trainers(steps, folders):
    torch.set_num_threads(1)
    requests = served(folders, mode="retract", steps=steps)
    assert differences(folders[0], requests, version=0)[0] == 0
    differ, total = differences(folders[1], requests, version=1)
    assert differ == 0
    assert total > 50


def test_keys_of_older_weights_leave_a_difference_and_the_plan_says_so(folders):
    """`weights.pause=in_place`, also where no token of the older version was sampled."""
    torch.set_num_threads(1)
    requests = served(folders, mode="in_place", steps=1)
    assert differences(folders[1], requests, version=1)[0] > 0
