"""Whole numbers as one of 207 codes and, where they are large, some raw bits.

Small numbers have a code each; a large one's code tells its sign, its length in bits and the two
bits after the leading one, which is what an entropy coder can make use of. The bits below are as
good as random and are written as they are.
"""

from dataclasses import dataclass, field

import numpy as np

SMALL = 64
"""Numbers below this size have a code of their own."""
FIRST_LARGE = 2 * SMALL - 1
LENGTHS = range(7, 17)
"""Bits of a large number's size: 64 to 32,768."""
TOP_BITS = 3
"""The leading one and two more are in the code."""


@dataclass(slots=True)
class RawBits:
    """The raw bits of a sequence of numbers, by length; filled by `code`, emptied by `values`."""

    _parts: dict[int, list[np.ndarray]] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)

    def code(self, numbers: np.ndarray) -> np.ndarray:
        """Codes of int16 numbers, uint8 [N]; keeps their raw bits."""
        wide = numbers.astype(np.int32)
        sizes = np.abs(wide)
        codes = np.where(wide > 0, 2 * wide - 1, -2 * wide)
        large = np.flatnonzero(sizes >= SMALL)
        if len(large):
            size = sizes[large]
            length = np.frexp(size.astype(np.float64))[1]
            raw_bits = length - TOP_BITS
            top = (size >> raw_bits) & 3
            negative = (wide[large] < 0).astype(np.int32)
            codes[large] = FIRST_LARGE + ((length - LENGTHS[0]) * 4 + top) * 2 + negative
            rest = size & ((1 << raw_bits) - 1)
            for number in np.unique(length):
                self._parts.setdefault(int(number), []).append(rest[length == number])
        return codes.astype(np.uint8)

    def values(self, codes: np.ndarray) -> np.ndarray:
        """int16 [N] of codes, in the order in which they were coded.

        Raises:
            ValueError: a code that means nothing, or fewer raw bits than codes.
        """
        wide = codes.astype(np.int32)
        found = np.where(wide % 2 == 1, (wide + 1) // 2, -(wide // 2))
        large = np.flatnonzero(wide >= FIRST_LARGE)
        if len(large):
            kind = wide[large] - FIRST_LARGE
            length = kind // 8 + LENGTHS[0]
            if length.max() > LENGTHS[-1]:
                raise ValueError(f"code {int(wide.max())} means nothing")
            sizes = ((4 + kind // 2 % 4) << (length - TOP_BITS)).astype(np.int32)
            for number in np.unique(length):
                sizes[length == number] |= self._take(int(number), int((length == number).sum()))
            found[large] = np.where(kind % 2 == 1, -sizes, sizes)
        return found.astype(np.int16)

    def _take(self, length: int, count: int) -> np.ndarray:
        place = self._places.get(length, 0)
        (held,) = self._parts.get(length, [np.zeros(0, dtype=np.int32)])
        if place + count > len(held):
            raise ValueError(f"{len(held)} numbers of {length} bits, more are asked for")
        self._places[length] = place + count
        return held[place : place + count]

    def packed(self) -> bytes:
        """How many numbers there are of each length (uint64), and their bits."""
        counts, blocks = [], []
        for length in LENGTHS:
            held = np.concatenate(self._parts.get(length, [np.zeros(0, dtype=np.int32)]))
            counts.append(len(held))
            bits = (held[:, None] >> np.arange(length - TOP_BITS)) & 1
            blocks.append(np.packbits(bits.astype(np.uint8)).tobytes())
        return np.array(counts, dtype="<u8").tobytes() + b"".join(blocks)

    @classmethod
    def unpacked(cls, data: bytes) -> "RawBits":
        """Inverse of `packed`.

        Raises:
            ValueError: another number of bytes than the counts say.
        """
        head = 8 * len(LENGTHS)
        counts = np.frombuffer(data[:head], dtype="<u8").astype(np.int64)
        widths = np.array(LENGTHS) - TOP_BITS
        sizes = -(-counts * widths // 8)
        if len(counts) != len(LENGTHS) or head + int(sizes.sum()) != len(data):
            raise ValueError("the raw bits have another size than their counts say")
        parts, place = {}, head
        for length, count, width, size in zip(LENGTHS, counts, widths, sizes, strict=True):
            packed = np.frombuffer(data[place : place + size], dtype=np.uint8)
            bits = np.unpackbits(packed, count=int(count * width)).reshape(-1, width)
            parts[length] = [(bits.astype(np.int32) << np.arange(width)).sum(axis=1)]
            place += int(size)
        return cls(_parts=parts)
