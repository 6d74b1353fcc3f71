"""A prefix cache of bounded size that knows text, not tokens.

Prompts are compared as the bytes of their ids in JSON, in blocks: hashing 1.5 KB costs less than
reading it as numbers, and a fleet of these replicas must cost less than the router in front of it.
Invariant: a block is kept only together with everything in front of it; the least recently used
goes first, a prompt's end before its beginning.
"""

from collections import OrderedDict
from collections.abc import Sequence

import xxhash

BLOCK_BYTES = 1536
"""About 256 ids of five digits: engines with recurrent layers keep a state every 256 tokens."""


def blocks_of(text: bytes, *, state: int = 0, start: int = 0) -> list[int]:
    """One hash for each whole block of `text[start:]`; each also stands for all before it.

    Args:
        state: the hash of the block that ends at `start`, 0 at the beginning.
    """
    found = []
    view = memoryview(text)
    for at in range(start, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        state = xxhash.xxh3_64_intdigest(view[at : at + BLOCK_BYTES], state)
        found.append(state)
    return found


class PrefixCache:
    """Blocks by hash, least recently used first."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self._blocks: OrderedDict[int, float] = OrderedDict()
        self.held_tokens = 0.0

    def match(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are here."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def insert(self, blocks: Sequence[int], *, block_tokens: float, room_tokens: float) -> None:
        """Remember a prompt, and forget others until at most `room_tokens` are held."""
        held = self._blocks
        for block in reversed(blocks):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = block_tokens
                self.held_tokens += block_tokens
        room = min(room_tokens, self.capacity_tokens)
        while held and self.held_tokens > room:
            self.held_tokens -= held.popitem(last=False)[1]

    def clear(self) -> None:
        self._blocks.clear()
        self.held_tokens = 0.0
