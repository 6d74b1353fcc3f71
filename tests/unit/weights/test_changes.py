import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmix.core.errors import WeightSyncError
from rlmix.weights import changes, rans
from rlmix.weights.changes import KINDS
from rlmix.weights.log_codes import RawBits


def bits_per_symbol(counts):
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def test_rans_codes_skewed_symbols_within_two_hundredths_of_their_entropy():
    generator = np.random.default_rng(0)
    symbols = generator.choice(4, size=400_000, p=[0.9, 0.06, 0.03, 0.01]).astype(np.uint8)
    counts = np.bincount(symbols, minlength=256)
    frequencies = rans.normalise(counts)[None]
    assert frequencies.sum() == 1 << rans.SCALE_BITS
    tables = np.zeros(len(symbols), dtype=np.uint8)
    data = rans.encode(symbols, tables, frequencies)
    # 128 lanes of 4 bytes are in it, too.
    assert 8 * len(data) <= 1.02 * len(symbols) * bits_per_symbol(counts)
    assert np.array_equal(rans.decode(data, tables, frequencies), symbols)


def test_a_symbol_that_is_alone_costs_nothing_but_the_states():
    symbols = np.full(100_000, 7, dtype=np.uint8)
    tables = np.zeros(len(symbols), dtype=np.uint8)
    frequencies = rans.normalise(np.bincount(symbols, minlength=256))[None]
    assert len(rans.encode(symbols, tables, frequencies)) == 4 * rans.num_lanes(len(symbols))


def test_normalising_gives_every_symbol_that_occurs_a_place():
    counts = np.zeros(256, dtype=np.int64)
    counts[:100] = 1
    counts[200] = 10**9
    frequencies = rans.normalise(counts)
    assert (frequencies[:100] == 1).all()
    assert frequencies[200] == (1 << rans.SCALE_BITS) - 100
    assert frequencies[100:200].sum() == 0


@pytest.mark.parametrize("cut", [1, 2, 100])
def test_a_code_that_was_cut_is_refused(cut):
    generator = np.random.default_rng(1)
    symbols = generator.integers(0, 5, 5000).astype(np.uint8)
    tables = np.zeros(len(symbols), dtype=np.uint8)
    frequencies = rans.normalise(np.bincount(symbols, minlength=256))[None]
    data = rans.encode(symbols, tables, frequencies)
    with pytest.raises(WeightSyncError, match="too early"):
        rans.decode(data[: -2 * cut], tables, frequencies)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(0, 3000), max_size=4),
    share=st.sampled_from([0.0, 0.001, 0.04, 0.5, 1.0]),
    is_small=st.booleans(),
)
def test_any_change_of_any_format_comes_back_bit_for_bit(kind, seed, lengths, share, is_small):
    generator = np.random.default_rng(seed)
    dtype = np.uint16 if KINDS[kind].bits == 16 else np.uint8
    top = int(np.iinfo(dtype).max) + 1
    olds = [generator.integers(0, top, n).astype(dtype) for n in lengths]
    news = []
    for old in olds:
        moved = generator.random(len(old)) < share
        step = generator.choice([1, top - 1], len(old)) if is_small else generator.integers(0, top)
        news.append(np.where(moved, (old.astype(np.int64) + step) % top, old).astype(dtype))
    coded = changes.encode(list(zip(olds, news, strict=True)), KINDS[kind])
    found = list(changes.apply(olds, coded.data, KINDS[kind]))
    assert len(found) == len(news)
    assert all(np.array_equal(a, b) for a, b in zip(found, news, strict=True))
    width = 2 if KINDS[kind].bits == 4 else 1
    assert coded.num_elements == width * sum(lengths)


@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3", "U8"])
def test_every_code_can_become_every_other(kind):
    """Zeros of both signs, infinities and NaN among them."""
    codes = np.arange(1 << min(KINDS[kind].bits * (2 if kind == "U8" else 1), 16))
    dtype = np.uint16 if kind == "BF16" else np.uint8
    old, new = codes.astype(dtype), codes[::-1].astype(dtype)
    coded = changes.encode([(old, new)], KINDS[kind])
    (found,) = changes.apply([old], coded.data, KINDS[kind])
    assert np.array_equal(found, new)


def test_a_weight_that_moves_with_its_exponent_costs_less_than_positions_and_signs():
    """Half of the weights are 2^-9 and move by one unit with probability 1/4, half are 1 and stay.
    Positions alone would cost H(1/8) = 0.544 bits an element, and signs 1/8, 0.669 in all. Given
    the exponent it is half of H(1/4) + 1/4: 0.531."""
    generator = np.random.default_rng(2)
    size = 1 << 18
    is_small = generator.random(size) < 0.5
    old = np.where(is_small, 0x3B00, 0x3F80).astype(np.uint16)
    moved = is_small & (generator.random(size) < 0.25)
    step = np.where(generator.random(size) < 0.5, 1, -1)
    new = np.where(moved, old + step, old).astype(np.uint16)
    coded = changes.encode([(old, new)], KINDS["BF16"])
    assert 8 * len(coded.data) / size == pytest.approx(0.531, abs=0.02)


def test_nothing_changed_costs_next_to_nothing():
    old = np.random.default_rng(3).integers(0, 1 << 16, 500_000).astype(np.uint16)
    assert len(changes.encode([(old, old)], KINDS["BF16"]).data) < 500


def test_numbers_of_every_size_come_back_from_codes_and_raw_bits():
    numbers = np.arange(-(1 << 15), 1 << 15).astype(np.int16)
    np.random.default_rng(4).shuffle(numbers)
    raw = RawBits()
    codes = raw.code(numbers)
    assert codes.max() == 127 + ((16 - 7) * 4 + 0) * 2 + 1
    reader = RawBits.unpacked(raw.packed())
    halves = [reader.values(part) for part in (codes[:30_000], codes[30_000:])]
    assert np.array_equal(np.concatenate(halves), numbers)
    with pytest.raises(ValueError, match="more are asked for"):
        reader.values(codes[:100])


def test_a_large_number_is_its_sign_length_two_bits_and_the_rest():
    """-100 is 1100100 in binary: 7 bits, 10 after the leading one, 0100 as they are."""
    raw = RawBits()
    (code,) = raw.code(np.array([-100], dtype=np.int16))
    assert code == 127 + (0 * 4 + 0b10) * 2 + 1
    assert raw.packed()[80:] == bytes([0b00100000])
