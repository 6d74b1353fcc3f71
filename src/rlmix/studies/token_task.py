"""A task of tokens whose reward never saturates and to which each token adds only a little.

A session is one of a few prompts and a fixed number of tokens. A token is good when its residue is
the one that prompt, position and previous token ask for; the reward is a coin that lands +1 more
often the more tokens were good. What is asked for depends on the prefix, and how well the session
went so far is visible to the policy, so that a bad prefix is a state of its own: errors compound,
as they do in an agent's session.

Invariant: everything is a pure function of ids and of the generator that is passed in.
"""

# N sessions, L positions

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

NUM_PROMPTS = 8
LENGTH = 32
VOCABULARY = 16
NUM_STANDINGS = 8
"""Buckets of how many tokens were good so far, against half of them."""
RESIDUES = 4
"""A token is good by its remainder: a quarter of the vocabulary is, so chance is 0.25."""
TOKENS_PER_STANDING = 1.5
LOWEST_CHANCE = 0.1
"""Chance of reward +1 with no good token; all good: 1 - LOWEST_CHANCE."""

NUM_FEATURES = NUM_PROMPTS + LENGTH + VOCABULARY + NUM_STANDINGS
"""Columns of the policy's first matrix: 64, four blocks of NVFP4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Where N sessions stand before their next token."""

    prompts_N: Tensor
    """int64 [N], 0 to NUM_PROMPTS - 1."""
    previous_N: Tensor
    """int64 [N], the token before; 0 at the start."""
    num_good_N: Tensor
    """int64 [N]."""
    position: int


def start(prompts_N: Tensor) -> State:
    """Sessions that have no token yet."""
    zeros_N = torch.zeros_like(prompts_N)
    return State(prompts_N=prompts_N, previous_N=zeros_N, num_good_N=zeros_N, position=0)


def features(state: State) -> Tensor:
    """int64 [N, 4]: which columns of the first matrix are 1 (prompt, position, token, standing)."""
    behind_N = state.num_good_N - state.position / 2
    standing_N = (behind_N / TOKENS_PER_STANDING).round().long() + NUM_STANDINGS // 2
    position_N = torch.full_like(state.prompts_N, state.position)
    return torch.stack(
        (
            state.prompts_N,
            NUM_PROMPTS + position_N,
            NUM_PROMPTS + LENGTH + state.previous_N,
            NUM_PROMPTS + LENGTH + VOCABULARY + standing_N.clamp(0, NUM_STANDINGS - 1),
        ),
        dim=1,
    )


def wanted_residue(state: State) -> Tensor:
    """int64 [N]: the remainder that makes the next token good."""
    turn_N = 3 * state.prompts_N + state.position * (state.prompts_N + 1)
    return (turn_N + state.previous_N % 2) % RESIDUES


def advance(state: State, tokens_N: Tensor) -> State:
    """The state after one more token."""
    is_good_N = tokens_N % RESIDUES == wanted_residue(state)
    return State(
        prompts_N=state.prompts_N,
        previous_N=tokens_N,
        num_good_N=state.num_good_N + is_good_N.long(),
        position=state.position + 1,
    )


def chance_of_success(num_good_N: Tensor) -> Tensor:
    """float32 [N]: probability of reward +1."""
    return LOWEST_CHANCE + (1 - 2 * LOWEST_CHANCE) * num_good_N / LENGTH


def rewards(num_good_N: Tensor, generator: Generator) -> Tensor:
    """float32 [N], +1 or -1."""
    coin_N = torch.rand(num_good_N.shape, generator=generator)
    return torch.where(coin_N < chance_of_success(num_good_N), 1.0, -1.0)
