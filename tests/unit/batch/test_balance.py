"""Groups under a budget, alike in size where several ranks share them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmix.batch.balance import split_documents, split_rows
from rlmix.batch.sharing import share_turns
from rlmix.core.errors import DataError

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def padded(group, lengths):
    return len(group) * max(lengths[index] for index in group)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 5))
def test_rows_are_all_there_within_the_budget_and_a_multiple_of_the_ranks(lengths, num_ranks):
    groups = split_rows(lengths, max_tokens=100, num_ranks=num_ranks)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(group and padded(group, lengths) <= 100 for group in groups)
    alone = split_rows(lengths, max_tokens=100, num_ranks=1)
    wanted = -(-len(alone) // num_ranks) * num_ranks
    assert len(groups) == (wanted if wanted <= len(lengths) else len(alone))


@given(lengths=LENGTHS, num_ranks=st.integers(1, 5))
def test_documents_are_all_there_within_the_budget_and_nearly_equal(lengths, num_ranks):
    groups = split_documents(lengths, max_tokens=100, num_ranks=num_ranks)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    totals = [sum(lengths[index] for index in group) for group in groups]
    assert all(0 < total <= 100 for total in totals)
    assert len(groups) % num_ranks == 0 or len(groups) == len(lengths)
    if totals:
        # The last document that went into the fullest group met no emptier one.
        assert max(totals) - min(totals) <= max(lengths)


def test_the_fourth_group_halves_the_work_of_two_ranks():
    lengths = [10, 10, 10, 10, 10, 4, 4, 4]
    assert split_rows(lengths, max_tokens=20, num_ranks=1) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Three groups would leave one rank idle for a round: a budget of 10 tokens gives none less.
    assert split_rows([10] * 5, max_tokens=20, num_ranks=2) == [[0], [1], [2, 3], [4]]
    assert split_documents([7, 5, 4, 3, 1], max_tokens=12, num_ranks=2) == [[0, 3], [1, 2, 4]]


def test_a_sample_above_the_budget_is_named_with_the_key():
    for split in (split_rows, split_documents):
        with pytest.raises(DataError, match=r"101 tokens does not fit.*micro_batch_tokens=100"):
            split([5, 101], max_tokens=100, num_ranks=2)


@given(
    kinds=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20),
    num_ranks=st.integers(1, 4),
)
def test_turns_compute_every_micro_batch_once_in_rounds_of_one_kind(kinds, num_ranks):
    costs, needs = [cost for cost, _ in kinds], [need for _, need in kinds]
    turns = share_turns(costs, needs, num_ranks=num_ranks)
    leaves = [turn.leaf for rank in turns for turn in rank if turn.leaf is not None]
    assert sorted(leaves) == list(range(len(kinds)))
    for together in zip(*turns, strict=True):
        assert len({turn.needs_gradient for turn in together}) == 1
        assert any(turn.leaf is not None for turn in together)
        assert all(needs[t.leaf] == t.needs_gradient for t in together if t.leaf is not None)


def test_rounds_hold_neighbours_in_cost_and_take_turns_in_who_is_first():
    turns = share_turns([1, 8, 6, 2, 5], [True] * 5, num_ranks=2)
    assert [[turn.leaf for turn in rank] for rank in turns] == [[1, 3, 0], [2, 4, None]]
