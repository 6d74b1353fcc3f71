import numpy as np
import pytest

from rlmix.engine.sampling import UniformStream, sample, sample_truncated


def logprobs(*rows):
    return np.log(np.array(rows, dtype=np.float64)).astype(np.float32)


def cut(rows, *, top_p=1.0, top_k=None, uniforms=None):
    count = len(rows)
    return sample_truncated(
        rows,
        logprobs_BV=rows,
        temperatures_B=np.ones(count),
        top_ps_B=np.full(count, top_p),
        top_ks_B=np.full(count, top_k or rows.shape[1]),
        uniforms_B=np.full(count, 0.5) if uniforms is None else np.asarray(uniforms),
    )


def kept(sets, row=0):
    return sets.ids_M[sets.offsets[row] : sets.offsets[row + 1]].tolist()


def test_top_p_keeps_a_token_while_the_likelier_ones_hold_at_most_top_p():
    row = logprobs([0.1, 0.5, 0.15, 0.25])
    # Sorted: 0.5 (id 1), 0.25 (3), 0.15 (2), 0.1 (0); mass before each: 0, 0.5, 0.75, 0.9.
    assert kept(cut(row, top_p=0.4)[1]) == [1]
    assert kept(cut(row, top_p=0.51)[1]) == [1, 3]
    assert kept(cut(row, top_p=0.8)[1]) == [1, 2, 3]
    assert kept(cut(row, top_p=0.95)[1]) == [0, 1, 2, 3]


def test_top_k_and_top_p_apply_together_on_the_full_distribution():
    row = logprobs([0.4, 0.3, 0.2, 0.1])
    assert kept(cut(row, top_k=2)[1]) == [0, 1]
    # top_p = 0.6 of the whole, not of the two: mass before the second is 0.4, so it stays.
    assert kept(cut(row, top_k=2, top_p=0.6)[1]) == [0, 1]
    assert kept(cut(row, top_k=3, top_p=0.65)[1]) == [0, 1]


def test_kept_logprobs_are_renormalised_and_belong_to_the_kept_ids():
    _, sets = cut(logprobs([0.1, 0.5, 0.15, 0.25]), top_k=2)
    np.testing.assert_allclose(np.exp(sets.logprobs_M), [2 / 3, 1 / 3], atol=1e-6)


def test_the_draw_follows_the_uniform_number_through_the_kept_set():
    row = logprobs([0.1, 0.5, 0.15, 0.25])
    rows = np.repeat(row, 4, axis=0)
    # Kept ids 1 and 3 with 2/3 and 1/3.
    ids, sets = cut(rows, top_k=2, uniforms=[0.0, 0.66, 0.67, 0.9999])
    assert ids.tolist() == [1, 1, 3, 3]
    np.testing.assert_allclose(np.exp(sets.sampled_logprobs_B), [2 / 3, 2 / 3, 1 / 3, 1 / 3], 1e-6)


def test_ties_at_the_last_place_keep_the_lower_ids_and_never_more_than_top_k():
    row = logprobs([0.2, 0.2, 0.2, 0.2, 0.2])
    assert kept(cut(row, top_k=3)[1]) == [0, 1, 2]
    assert kept(cut(row, top_k=1)[1]) == [0]


def test_sets_larger_than_the_first_look_are_found_whole():
    flat = np.full((2, 300), -np.log(300), dtype=np.float32)
    flat[1, 7] = np.log(0.99)
    flat[1, np.arange(300) != 7] = np.log(0.01 / 299)
    _, sets = cut(flat, top_p=0.5)
    # 300 equal tokens: the mass before number n is (n - 1) / 300.
    assert 150 <= len(kept(sets, 0)) <= 152
    assert kept(sets, 1) == [7]


@pytest.mark.parametrize("seed", range(5))
def test_random_rows_agree_with_a_dense_oracle(seed):
    generator = np.random.default_rng(seed)
    count, size = 7, 97
    logits = generator.standard_normal((count, size)) * generator.uniform(0.5, 5)
    rows = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    top_ps = generator.uniform(0.1, 1.0, count)
    top_ks = generator.integers(1, size + 1, count)
    ids, sets = sample_truncated(
        rows,
        logprobs_BV=rows,
        temperatures_B=np.ones(count),
        top_ps_B=top_ps,
        top_ks_B=top_ks,
        uniforms_B=generator.random(count),
    )
    for row in range(count):
        probs = np.exp(rows[row].astype(np.float64))
        order = np.argsort(-probs, kind="stable")
        before = probs[order].cumsum() - probs[order]
        expected = order[(before <= top_ps[row]) & (np.arange(size) < top_ks[row])]
        assert kept(sets, row) == sorted(expected.tolist())
        assert ids[row] in expected
        start, end = sets.offsets[row], sets.offsets[row + 1]
        assert abs(np.exp(sets.logprobs_M[start:end].astype(np.float64)).sum() - 1) < 1e-6


def test_a_row_is_drawn_alike_whatever_shares_its_batch():
    generator = np.random.default_rng(3)
    logits = generator.standard_normal((6, 50)) * 3
    rows = (logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32)
    uniforms = generator.random(6)
    together, sets = cut(rows, top_p=0.9, uniforms=uniforms)
    for row in range(6):
        alone, own = cut(rows[row : row + 1], top_p=0.9, uniforms=uniforms[row : row + 1])
        assert alone[0] == together[row]
        assert kept(own) == kept(sets, row)
        assert sample(rows[row : row + 1], uniforms[row : row + 1]) == sample(rows, uniforms)[row]


def test_frequencies_follow_the_distribution():
    probs = np.array([0.05, 0.6, 0.1, 0.25])
    rows = np.repeat(logprobs(probs), 4000, axis=0)
    uniforms = np.random.default_rng(0).random(4000)
    counts = np.bincount(sample(rows, uniforms), minlength=4) / 4000
    # Standard error at most sqrt(0.25 / 4000) = 0.008.
    np.testing.assert_allclose(counts, probs, atol=0.03)
    ids, _ = cut(rows, top_k=2, uniforms=uniforms)
    np.testing.assert_allclose((ids == 1).mean(), 0.6 / 0.85, atol=0.03)


def test_uniform_numbers_belong_to_seed_and_position():
    stream, again = UniformStream(7), UniformStream(7)
    numbers = [stream.at(position) for position in range(200)]
    assert again.at(150) == numbers[150]
    assert len(set(numbers)) == 200
    assert UniformStream(8).at(0) != numbers[0]
    assert all(0 <= number < 1 for number in numbers)


def test_recorded_logprobs_are_rounded_once_however_large_the_logits_are():
    generator = np.random.default_rng(5)
    logits = (generator.standard_normal((50, 200)) * 30 + 90).astype(np.float32)
    tempered = logits / np.float32(0.7)
    shifted = tempered - tempered.max(axis=1, keepdims=True)
    rows = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(np.float32)
    _, sets = sample_truncated(
        logits,
        logprobs_BV=rows,
        temperatures_B=np.full(50, 0.7),
        top_ps_B=np.full(50, 1.0),
        top_ks_B=np.full(50, 6),
        uniforms_B=np.full(50, 0.5),
    )
    for row in range(50):
        slots = slice(sets.offsets[row], sets.offsets[row + 1])
        exact = logits[row, sets.ids_M[slots]].astype(np.float64) / 0.7
        exact -= exact.max()
        exact -= np.log(np.exp(exact).sum())
        assert sets.logprobs_M[slots].tolist() == exact.astype(np.float32).tolist()
