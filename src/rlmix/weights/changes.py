"""What changed between two tensors of the same shape, close to the entropy of the change.

A step of AdamW at a learning rate of 1e-6 moves a BF16 weight by one unit in the last place with a
probability that depends on the size of that unit, so on the weight's old exponent, which the reader
has. Elements are therefore sorted by their old exponent, in chunks, and each (chunk, exponent) is
coded with one of 64 tables, chosen by how much of it changed: four elements a symbol where changes
are rare and small, one where they are not. See docs/weights.md for what was compared.

Invariant: `apply(old, encode(old, new)) == new`, bit for bit, for any two arrays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from rlmix.core.errors import WeightSyncError
from rlmix.weights import rans
from rlmix.weights.log_codes import RawBits

CHUNK = 1 << 18
"""Elements coded with one set of tables: fits into a core's cache, and rows of an embedding that a
step did not touch lie in chunks of their own."""

QUADS = 47
"""Tables below this number code four elements a symbol, the others one."""
LARGE_TABLE = 63
"""For what a symbol of four elements cannot say: changes by more than one unit."""
NUM_TABLES = 64
UNCHANGED = 255
"""Instead of a table: nothing of this (chunk, exponent) changed."""

ZSTD_LEVEL = 9
SINGLES_FRAC = 0.15
"""From this share of changed elements on, or a tenth of it in large changes, an element is a symbol
of its own."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a format's bits are read: sign and magnitude, and the exponent as context."""

    bits: int
    context_shift: int
    """Magnitude >> this: elements of one context have units in the last place of one size."""


KINDS = {
    "BF16": Kind(16, 7),
    "F16": Kind(16, 10),
    "F8_E4M3": Kind(8, 3),
    "U8": Kind(4, 0),
}
"""Data types of safetensors that are coded here; uint8 is two E2M1 codes (NVFP4). All others are
rare and small (scales): XOR, byte planes, zstd."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coded:
    """One encoded sequence of arrays."""

    data: bytes
    num_elements: int
    num_changed: int


def encode(pairs: Sequence[tuple[np.ndarray, np.ndarray]], kind: Kind) -> Coded:
    """Code the change of several arrays together.

    Args:
        pairs: (old, new), unsigned integers [N] of the kind's width; nibbles are given as uint8
            with two of them in each.
    """
    contexts: list[np.ndarray] = []
    choices: list[np.ndarray] = []
    symbols: list[np.ndarray] = []
    tables: list[np.ndarray] = []
    large: list[np.ndarray] = []
    raw, large_raw = RawBits(), RawBits()
    num_elements = num_changed = 0
    for old, new in _chunks(pairs, kind):
        changes = (_ordered(new, kind) - _ordered(old, kind)).astype(np.int16)
        context, order, lengths = _sorted_contexts(old, kind)
        changes = changes[order]
        ends = np.cumsum(lengths)
        chosen = np.empty(len(context), dtype=np.uint8)
        for index, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            part = changes[end - length : end]
            table = _choose_table(part)
            chosen[index] = table
            if table == UNCHANGED:
                continue
            if table < QUADS:
                coded, larger = _to_quads(part)
                large.append(larger)
            else:
                coded = raw.code(part)
            symbols.append(coded)
            tables.append(np.full(len(coded), table, dtype=np.uint8))
        contexts.append(context)
        choices.append(chosen)
        num_elements += len(changes)
        num_changed += int(np.count_nonzero(changes))
    # At the end, so that a reader who has everything else knows how many there are.
    symbols.append(large_raw.code(_joined(large, np.int16)))
    tables.append(np.full(len(symbols[-1]), LARGE_TABLE, dtype=np.uint8))
    all_symbols, all_tables = _joined(symbols, np.uint8), _joined(tables, np.uint8)
    used = np.unique(all_tables)
    counts = np.stack(
        [
            np.bincount(all_symbols[all_tables == table], minlength=rans.NUM_SYMBOLS)
            for table in used
        ]
        or [np.zeros(rans.NUM_SYMBOLS, dtype=np.int64)]
    )
    frequencies = np.zeros((NUM_TABLES, rans.NUM_SYMBOLS), dtype=np.uint32)
    for table, row in zip(used, counts, strict=False):
        frequencies[table] = rans.normalise(row)
    compact = frequencies[used] if len(used) else frequencies[:1]
    rows = np.zeros(256, dtype=np.uint8)
    rows[used] = np.arange(len(used))
    parts = (
        used.tobytes(),
        _packed(frequencies[used].astype("<u2")),
        _packed(_joined(choices, np.uint8)),
        len(symbols[-1]).to_bytes(8, "little"),
        raw.packed(),
        large_raw.packed(),
        rans.encode(all_symbols, rows[all_tables], compact),
    )
    return Coded(
        data=b"".join(len(section).to_bytes(8, "little") + section for section in parts),
        num_elements=num_elements,
        num_changed=num_changed,
    )


def apply(olds: Sequence[np.ndarray], data: bytes, kind: Kind) -> Iterator[np.ndarray]:
    """The new arrays, in order; each like its old one.

    Raises:
        WeightSyncError: the data does not fit the old arrays.
    """
    try:
        yield from _apply(olds, data, kind)
    except (ValueError, IndexError, zstandard.ZstdError) as error:
        raise WeightSyncError(f"weights: a delta does not fit its base: {error}") from error


def _apply(olds: Sequence[np.ndarray], data: bytes, kind: Kind) -> Iterator[np.ndarray]:
    used_bytes, freqs, chosen_bytes, count_bytes, raw, large_raw, code = sections(data, 7)
    used = np.frombuffer(used_bytes, dtype=np.uint8)
    frequencies = _unpacked(freqs, "<u2").reshape(-1, rans.NUM_SYMBOLS).astype(np.uint32)
    choices = _unpacked(chosen_bytes, np.uint8)
    num_large = int.from_bytes(count_bytes, "little")
    rows = np.zeros(256, dtype=np.uint8)
    rows[used] = np.arange(len(used))
    # First pass: which table each symbol was coded with follows from the old values alone.
    place, tables = 0, []
    for old in _each_chunk(olds, kind):
        lengths = np.bincount(_context(old, kind), minlength=1)
        lengths = lengths[lengths > 0]
        chosen = choices[place : place + len(lengths)]
        place += len(lengths)
        coded = chosen != UNCHANGED
        counts = np.where(chosen < QUADS, -(-lengths // 4), lengths)[coded]
        tables.append(np.repeat(rows[chosen[coded]], counts))
    if place != len(choices):
        raise ValueError(f"{place} groups of elements, the delta has {len(choices)}")
    tables.append(np.full(num_large, rows[LARGE_TABLE], dtype=np.uint8))
    symbols = rans.decode(code, _joined(tables, np.uint8), frequencies)
    cursor = _Cursor(
        choices=choices,
        symbols=symbols,
        raw=RawBits.unpacked(raw),
        large=RawBits.unpacked(large_raw).values(symbols[len(symbols) - num_large :]),
    )
    for old in olds:
        parts = [_apply_chunk(part, cursor, kind) for part in _each_chunk([old], kind)]
        new = _joined(parts, parts[0].dtype if parts else old.dtype)
        yield _nibbles_to_bytes(new) if kind.bits == 4 else new


@dataclass(slots=True)
class _Cursor:
    """What is left to be read of the streams."""

    choices: np.ndarray
    symbols: np.ndarray
    raw: RawBits
    large: np.ndarray
    choice: int = 0
    symbol: int = 0
    larger: int = 0


def _apply_chunk(old: np.ndarray, cursor: _Cursor, kind: Kind) -> np.ndarray:
    _, order, lengths = _sorted_contexts(old, kind)
    changes = np.zeros(len(old), dtype=np.int16)
    begin = 0
    for length in lengths:
        table = cursor.choices[cursor.choice]
        cursor.choice += 1
        if table != UNCHANGED:
            count = -(-length // 4) if table < QUADS else length
            coded = cursor.symbols[cursor.symbol : cursor.symbol + count]
            cursor.symbol += count
            if table < QUADS:
                part = _QUAD_VALUES[coded].reshape(-1)[:length]
                places = np.flatnonzero(part == LARGE)
                part[places] = cursor.large[cursor.larger : cursor.larger + len(places)]
                cursor.larger += len(places)
            else:
                part = cursor.raw.values(coded)
            changes[begin : begin + length] = part
        begin += length
    unsorted = np.empty_like(changes)
    unsorted[order] = changes
    return _from_ordered(_ordered(old, kind) + unsorted, kind).astype(old.dtype)


LARGE = np.int16(2)
"""In a symbol of four elements: more than one unit. A change of +2 has no digit of its own."""


def _quad_values() -> np.ndarray:
    """int16 [256, 4]: the changes that a symbol stands for; digits 0, +1, -1, large."""
    digits = np.array([0, 1, -1, LARGE], dtype=np.int16)
    symbol = np.arange(256)
    return np.stack([digits[symbol >> 2 * place & 3] for place in range(4)], axis=1)


_QUAD_VALUES = _quad_values()


def _to_quads(changes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(symbols, the changes that are large)."""
    digits = np.where(changes == -1, 2, changes).astype(np.uint16)
    is_large = (changes > 1) | (changes < -1)
    digits[is_large] = 3
    padded = np.zeros(-(-len(digits) // 4) * 4, dtype=np.uint8)
    padded[: len(digits)] = digits
    quads = padded.reshape(-1, 4)
    symbols = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    return symbols, changes[is_large]


def _choose_table(changes: np.ndarray) -> int:
    """By the share that changed, two tables for each factor of two; or by the mean change."""
    num_changed = int(np.count_nonzero(changes))
    if num_changed == 0:
        return UNCHANGED
    size = np.abs(changes.astype(np.int32))
    num_large = int(np.count_nonzero(size > 1))
    share = num_changed / len(changes)
    if share < SINGLES_FRAC and num_large < len(changes) * SINGLES_FRAC / 10:
        return min(int(-2.0 * np.log2(share)), QUADS - 1)
    mean = min(float(size.mean()), 1000.0)
    return QUADS + min(max(int(1.5 * np.log2(mean + 0.1) + 5.0), 0), LARGE_TABLE - QUADS - 1)


def _ordered(words: np.ndarray, kind: Kind) -> np.ndarray:
    """int16, growing with the value: sign and magnitude to two's complement. Minus zero gets the
    place of the number that two's complement has and sign and magnitude lack."""
    sign = 1 << (kind.bits - 1)
    wide = words.astype(np.int32)
    negative = np.where(wide == sign, -sign, sign - wide)
    return np.where(wide < sign, wide, negative).astype(np.int16)


def _from_ordered(ordered: np.ndarray, kind: Kind) -> np.ndarray:
    """Inverse of `_ordered`, for values modulo 2^bits."""
    sign = 1 << (kind.bits - 1)
    wide = ordered.astype(np.int32) & (2 * sign - 1)
    back = np.where(wide == sign, sign, 3 * sign - wide)
    return np.where(wide < sign, wide, back)


def _context(words: np.ndarray, kind: Kind) -> np.ndarray:
    magnitude = words & ((1 << (kind.bits - 1)) - 1)
    return (magnitude >> kind.context_shift).astype(np.uint8)


def _sorted_contexts(words: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(contexts that occur, order that sorts elements by them, how many there are of each)."""
    context = _context(words, kind)
    counts = np.bincount(context, minlength=1)
    present = np.flatnonzero(counts)
    return present.astype(np.uint8), np.argsort(context, kind="stable"), counts[present]


def _chunks(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]], kind: Kind
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for old, new in pairs:
        yield from zip(_each_chunk([old], kind), _each_chunk([new], kind), strict=True)


def _each_chunk(arrays: Sequence[np.ndarray], kind: Kind) -> Iterator[np.ndarray]:
    step = CHUNK // 2 if kind.bits == 4 else CHUNK
    for array in arrays:
        for begin in range(0, len(array), step):
            part = array[begin : begin + step]
            yield _bytes_to_nibbles(part) if kind.bits == 4 else part


def _bytes_to_nibbles(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)


def _nibbles_to_bytes(nibbles: np.ndarray) -> np.ndarray:
    return (nibbles[0::2] | nibbles[1::2] << 4).astype(np.uint8)


def _joined(parts: Sequence[np.ndarray], dtype: np.typing.DTypeLike) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _packed(array: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(planes(array))


def _unpacked(data: bytes, dtype: np.typing.DTypeLike) -> np.ndarray:
    raw = zstandard.ZstdDecompressor().decompress(data)
    return from_planes(raw, np.dtype(dtype))


def planes(array: np.ndarray) -> bytes:
    """First bytes of all elements, then second bytes, and so on."""
    width = array.dtype.itemsize
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1, width).T.tobytes()


def from_planes(raw: bytes, dtype: np.dtype) -> np.ndarray:
    """Inverse of `planes`."""
    split = np.frombuffer(raw, dtype=np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(split.T).reshape(-1).view(dtype)


def sections(data: bytes, count: int) -> list[bytes]:
    """Cut what was framed as length (uint64) and bytes, `count` times.

    Raises:
        ValueError: the data ends elsewhere.
    """
    found, place = [], 0
    for _ in range(count):
        size = int.from_bytes(data[place : place + 8], "little")
        found.append(data[place + 8 : place + 8 + size])
        place += 8 + size
    if place != len(data):
        raise ValueError(f"{len(data)} bytes, its parts end at {place}")
    return found
