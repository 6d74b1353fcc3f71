import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmix.batch.balance import split_rows
from rlmix.batch.packing import pack_samples, pool_names_of
from rlmix.core.errors import DataError
from rlmix.core.sample import TrainSample


def sample(name, length, policy, *, advantage=1.0, pool="h100", kept=None, exact=True):
    """A sample of `length` tokens, ids 100, 101, ..., with policy tokens at `policy`."""
    mask = np.zeros(length, dtype=bool)
    mask[policy] = True
    sizes = np.where(mask, kept or 0, 0)
    total = int(sizes.sum())
    return TrainSample(
        session_id=name,
        ids=np.arange(100, 100 + length, dtype=np.int32),
        mask=mask,
        sampler_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        advantage=advantage,
        versions=np.where(mask, 3, -1).astype(np.int32),
        pools=np.where(mask, 0, -1).astype(np.int16),
        pool_names=(pool,),
        kept_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32) if kept else None,
        kept_ids=np.arange(total, dtype=np.int32) if kept else None,
        kept_logprobs=np.full(total, -1.0, dtype=np.float32) if kept else None,
        kept_exact=exact,
    )


def test_short_rows_are_padded_and_policy_tokens_keep_their_place():
    samples = [sample("a", 3, [2]), sample("b", 5, [1, 4], pool="b200", advantage=-0.5)]
    (batch,) = pack_samples(samples, max_tokens=10)
    assert batch.session_ids == ("b", "a")  # longest first
    assert batch.ids_BT.tolist() == [[100, 101, 102, 103, 104], [100, 101, 102, 0, 0]]
    assert batch.rows_P.tolist() == [0, 0, 1]
    assert batch.cols_P.tolist() == [1, 4, 2]
    assert batch.sampled_P.tolist() == [101, 104, 102]
    assert batch.advantages_P.tolist() == [-0.5, -0.5, 1.0]
    assert pool_names_of(samples) == ("b200", "h100")
    assert batch.pools_P.tolist() == [0, 0, 1]
    assert batch.sequences_P.tolist() == [1, 1, 0]
    assert batch.num_tokens == 8
    assert batch.kept_ids_PK is None


def with_head(made, tokens, size):
    """The sample with a head of `size` ids at some of its policy tokens."""
    sizes = np.zeros(len(made.ids), dtype=np.int32)
    sizes[tokens] = size
    total = int(sizes.sum())
    return dataclasses.replace(
        made,
        head_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        head_ids=np.arange(total, dtype=np.int32) + 50,
        head_logprobs=np.full(total, -2.0, dtype=np.float32),
    )


def test_heads_are_given_for_the_few_tokens_that_have_one():
    bare = sample("a", 4, [1, 3], kept=3)
    watched = with_head(sample("b", 4, [1, 2, 3], kept=3), [2, 3], 2)
    wider = with_head(sample("c", 4, [1], kept=3), [1], 3)
    (batch,) = pack_samples([bare, watched, wider], max_tokens=12)
    assert batch.sequences_P.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.head_tokens_H.tolist() == [3, 4, 5]
    assert batch.head_ids_HK.tolist() == [[50, 51, 0], [52, 53, 0], [50, 51, 52]]
    assert np.isneginf(batch.head_logprobs_HK).tolist() == [
        [False, False, True],
        [False, False, True],
        [False, False, False],
    ]
    assert batch.kept_ids_PK.shape == (6, 3)
    (batch,) = pack_samples([bare], max_tokens=12)
    assert batch.head_tokens_H is None
    assert batch.head_ids_HK is None


def test_kept_sets_of_different_sizes_are_padded_with_minus_infinity():
    samples = [sample("a", 4, [1], kept=3), sample("b", 3, [1, 2], kept=1)]
    (batch,) = pack_samples(samples, max_tokens=100)
    assert batch.kept_ids_PK.tolist() == [[0, 1, 2], [0, 0, 0], [1, 0, 0]]
    assert np.isneginf(batch.kept_logprobs_PK).tolist() == [
        [False, False, False],
        [False, True, True],
        [False, True, True],
    ]


def test_samples_that_need_different_arithmetic_never_share_a_micro_batch():
    samples = [
        sample("plain", 4, [1]),
        sample("kept", 4, [1], kept=2),
        sample("head", 4, [1], kept=2, exact=False),
        sample("silent", 4, [1], kept=2, advantage=0.0),
    ]
    batches = pack_samples(samples, max_tokens=1000)
    assert sorted(b.session_ids for b in batches) == [("head",), ("kept",), ("plain",), ("silent",)]
    assert [b.session_ids for b in batches if not b.needs_gradient] == [("silent",)]
    assert [b.session_ids for b in batches if not b.kept_exact] == [("head",)]
    # Gradients are summed in the same order whatever came first.
    backwards = pack_samples(samples[::-1], max_tokens=1000)
    assert [b.session_ids for b in backwards] == [b.session_ids for b in batches]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(40, 200))
def test_every_sample_is_packed_once_and_no_micro_batch_exceeds_the_budget(lengths, max_tokens):
    samples = [sample(str(i), length, [1]) for i, length in enumerate(lengths)]
    batches = pack_samples(samples, max_tokens=max_tokens)
    assert sorted(name for b in batches for name in b.session_ids) == sorted(
        str(i) for i in range(len(lengths))
    )
    assert all(b.ids_BT.size <= max_tokens for b in batches)


def test_splitting_is_greedy_from_the_longest():
    assert split_rows([5, 9, 5, 8], max_tokens=18, num_ranks=1) == [[1, 3], [0, 2]]
    assert split_rows([], max_tokens=18, num_ranks=1) == []


def test_a_sample_longer_than_the_budget_names_the_key_to_change():
    with pytest.raises(DataError, match="a sample of 12 tokens does not fit into trainer"):
        pack_samples([sample("a", 12, [1])], max_tokens=11)


def test_a_policy_token_without_context_is_refused():
    with pytest.raises(DataError, match="session a: token 0 is a policy token"):
        pack_samples([sample("a", 3, [0])], max_tokens=11)
