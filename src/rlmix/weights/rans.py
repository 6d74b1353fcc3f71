"""Range asymmetric numeral systems: symbols to close to their entropy, in lanes that NumPy steps
through together.

The coder of Duda (arXiv 1311.2540) with 32-bit states and 16-bit words. Symbol i belongs to lane
i mod L, so that one NumPy operation moves L states. Pure functions of arrays; the same bytes on
every machine.
"""

import numpy as np

from rlmix.core.errors import WeightSyncError

SCALE_BITS = 14
"""Frequencies of a table add up to 2^14: what rounding them costs was below 0.5 % of a delta, and
64 decoding tables of that size (1 MiB) stay in a core's cache."""

LOWEST_STATE = 1 << 16
WORD_BITS = 16
NUM_SYMBOLS = 256


def normalise(counts: np.ndarray) -> np.ndarray:
    """Frequencies that add up to 2^SCALE_BITS, at least 1 for every symbol that occurs.

    Args:
        counts: int64 [256]; not all zero.
    Returns:
        uint32 [256].
    """
    total = 1 << SCALE_BITS
    occurs = counts > 0
    frequencies = np.zeros(NUM_SYMBOLS, dtype=np.int64)
    shares = counts[occurs] * (total / counts.sum())
    frequencies[occurs] = np.maximum(np.floor(shares).astype(np.int64), 1)
    # What rounding left over or took too much goes to the most frequent symbols, which feel it
    # least.
    excess = int(frequencies.sum()) - total
    for symbol in np.argsort(-frequencies, kind="stable"):
        if excess == 0:
            break
        change = min(excess, int(frequencies[symbol]) - 1) if excess > 0 else excess
        frequencies[symbol] -= change
        excess -= change
    return frequencies.astype(np.uint32)


def num_lanes(num_symbols: int) -> int:
    """Lanes for a stream: each costs 4 bytes, so short streams have few."""
    lanes = 16
    while lanes < 8192 and num_symbols > lanes * 4096:
        lanes *= 2
    return lanes


def encode(symbols: np.ndarray, tables: np.ndarray, frequencies: np.ndarray) -> bytes:
    """Code `symbols`.

    Args:
        symbols: uint8 [N].
        tables: uint8 [N], which row of `frequencies` each symbol is coded with.
        frequencies: uint32 [T, 256], rows from `normalise`.
    Returns:
        The states (uint32 [lanes]) and then the words (uint16), little-endian.
    """
    lanes = num_lanes(len(symbols))
    starts = (np.cumsum(frequencies, axis=1) - frequencies).astype(np.uint64).reshape(-1)
    sizes = frequencies.astype(np.uint64).reshape(-1)
    limits = sizes << np.uint64(32 - SCALE_BITS)
    states = np.full(lanes, LOWEST_STATE, dtype=np.uint64)
    words: list[np.ndarray] = []
    for begin in range((len(symbols) - 1) // lanes * lanes, -1, -lanes) if len(symbols) else ():
        end = min(begin + lanes, len(symbols))
        keys = tables[begin:end].astype(np.int32) * NUM_SYMBOLS + symbols[begin:end]
        active = states[: end - begin]
        full = active >= limits[keys]
        words.append(active[full].astype("<u2"))
        active[full] >>= np.uint64(WORD_BITS)
        size = sizes[keys]
        quotient = active // size
        # (x // f) * 2^b + x % f + start, with the remainder taken from the quotient.
        active += quotient * (np.uint64(1 << SCALE_BITS) - size) + starts[keys]
    words.reverse()
    return states.astype("<u4").tobytes() + b"".join(block.tobytes() for block in words)


def decode(data: bytes, tables: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """The symbols, uint8 [N]; arguments as for `encode`.

    Raises:
        WeightSyncError: the stream does not end where its symbols do: it is damaged.
    """
    num_symbols = len(tables)
    lanes = num_lanes(num_symbols)
    states = np.frombuffer(data, dtype="<u4", count=lanes).astype(np.uint64)
    words = np.frombuffer(data, dtype="<u2", offset=4 * lanes).astype(np.uint64)
    starts = (np.cumsum(frequencies, axis=1) - frequencies).astype(np.uint64).reshape(-1)
    sizes = frequencies.astype(np.uint64).reshape(-1)
    alphabet = np.arange(NUM_SYMBOLS, dtype=np.uint8)
    found = np.concatenate(
        [np.repeat(alphabet, row) for row in frequencies.astype(np.int64)]
        or [np.zeros(0, dtype=np.uint8)]
    )
    symbols = np.empty(num_symbols, dtype=np.uint8)
    mask = np.uint64((1 << SCALE_BITS) - 1)
    place = 0
    for begin in range(0, num_symbols, lanes):
        end = min(begin + lanes, num_symbols)
        table = tables[begin:end].astype(np.int32)
        active = states[: end - begin]
        slot = active & mask
        symbol = found[(table << SCALE_BITS) + slot.astype(np.int32)]
        symbols[begin:end] = symbol
        keys = table * NUM_SYMBOLS + symbol
        active >>= np.uint64(SCALE_BITS)
        active *= sizes[keys]
        active += slot - starts[keys]
        low = np.flatnonzero(active < LOWEST_STATE)
        if place + len(low) > len(words):
            raise WeightSyncError("weights: a delta's code ends too early; it is damaged")
        active[low] = (active[low] << np.uint64(WORD_BITS)) | words[place : place + len(low)]
        place += len(low)
    if place != len(words) or (states != LOWEST_STATE).any():
        raise WeightSyncError(
            "weights: a delta's code does not end with its symbols; it is damaged"
        )
    return symbols
