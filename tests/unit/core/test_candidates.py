"""Three tokens: sets {5, 9}, {}, {7, 1, 2}."""

import pickle

import numpy as np
import pytest

from rlmix.core.candidates import Candidates

LOG = np.log
SETS = Candidates.of(
    [(5, 9), (), (7, 1, 2)], [(LOG(0.75), LOG(0.25)), (), (LOG(0.5), LOG(0.25), LOG(0.25))]
)


def test_lists_become_flat_arrays_and_lists_again():
    assert len(SETS) == 3
    assert SETS.offsets.tolist() == [0, 2, 2, 5]
    assert SETS.ids.tolist() == [5, 9, 7, 1, 2]
    assert SETS.sizes.tolist() == [2, 0, 3]
    assert SETS.tokens.tolist() == [0, 0, 2, 2, 2]
    assert (SETS.ids.dtype, SETS.logprobs.dtype) == (np.int32, np.float32)
    assert SETS.num_bytes == 4 * 4 + 5 * 4 + 5 * 4
    assert Candidates.of(*SETS.lists()) == SETS


def test_mass_is_the_probability_of_each_set_and_0_of_an_empty_one():
    assert SETS.mass().tolist() == pytest.approx([1, 0, 1], abs=1e-7)
    # One bad token must not hide behind, nor spill over to, its neighbours.
    spoilt = Candidates.of([(1,), (2,), (3,)], [(0.0,), (np.nan,), (LOG(0.5),)])
    assert spoilt.mass().tolist() == pytest.approx([1, np.nan, 0.5], nan_ok=True)


def test_find_tells_the_slot_of_an_id_in_its_own_set_and_how_often_it_is_there():
    slots, counts = SETS.find(np.array([9, 9, 2]))
    assert slots.tolist() == [1, -1, 4]
    assert counts.tolist() == [1, 0, 1]
    twice = Candidates.of([(4, 4)], [(LOG(0.5), LOG(0.5))])
    assert twice.find(np.array([4]))[1].tolist() == [2]


def test_a_slice_and_a_join_are_inverse():
    parts = [SETS.slice(0, 1), SETS.slice(1, 2), SETS.slice(2, 3)]
    assert parts[2].lists()[0] == [[7, 1, 2]]
    assert Candidates.joined(parts) == SETS
    assert len(Candidates.joined([])) == 0
    assert SETS.slice(1, 1) == Candidates.joined([])


def test_equality_is_by_value_and_by_bit():
    same = Candidates.of(*SETS.lists())
    assert same == SETS
    assert same is not SETS
    nudged = np.nextafter(SETS.logprobs, np.float32(-1))
    assert Candidates(offsets=SETS.offsets, ids=SETS.ids, logprobs=nudged) != SETS
    assert SETS.slice(0, 1) != SETS
    assert SETS != "sets"


def test_a_pickle_is_small_equal_and_still_read_only():
    data = pickle.dumps(SETS, protocol=pickle.HIGHEST_PROTOCOL)
    assert len(data) < SETS.num_bytes + 150
    again = pickle.loads(data)
    assert again == SETS
    for values in (SETS.ids, again.ids, again.offsets, again.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 3


@pytest.mark.parametrize(
    ("offsets", "ids", "message"),
    [
        ([0, 2], [1], "do not ascend from 0 to 1 slots"),
        ([1, 1], [1], "do not ascend"),
        ([0, 2, 1], [1], "do not ascend"),
        ([], [1], "do not ascend"),
        ([0, 1], [1, 2], "2 candidate ids, 1 logprobs"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(offsets, ids, message):
    with pytest.raises(ValueError, match=message):
        Candidates(offsets=np.array(offsets), ids=np.array(ids), logprobs=np.array([0.0]))


def test_lists_of_different_lengths_are_refused_with_their_position():
    with pytest.raises(ValueError, match="position 1: 2 candidate ids, 1 logprobs"):
        Candidates.of([(1,), (2, 3)], [(0.0,), (0.0,)])
    with pytest.raises(ValueError, match="1 candidate sets, 2 sets of logprobs"):
        Candidates.of([(1,)], [(0.0,), (0.0,)])
