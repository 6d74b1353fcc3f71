"""Keys and values of finished contexts, and their routes, found again by their token ids.

A radix tree: each node holds a run of token ids and their keys and values, so contexts that start
alike share what they have in common. Invariant: a node's values were computed by the current
weights from exactly the ids on its path from the root; `clear` is called when weights change.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.routes import RouteCache, Routes

TOKEN_AXIS = 3
"""Of a node's values, [layers, 2, kv heads, tokens, D]."""


class _Node:
    __slots__ = ("children", "ids", "parent", "routes", "used", "values")

    def __init__(
        self,
        ids: np.ndarray,
        values: Tensor,
        routes: Routes | None,
        parent: "_Node | None",
        used: int,
    ) -> None:
        self.ids = ids
        self.values = values
        self.routes = routes
        self.parent = parent
        self.used = used
        self.children: dict[int, _Node] = {}


class PrefixCache:
    """Prefixes per salt, at most `max_tokens` of them, the least recently used dropped first."""

    def __init__(
        self, cache: KvCache, *, dtype: torch.dtype, routes: RouteCache | None = None
    ) -> None:
        """`dtype` must hold every value of the cache exactly: bfloat16 does for BF16 and E4M3.
        With `routes`, those of a prefix are kept and filled in with its keys and values."""
        self._cache = cache
        self._routes = routes
        self._dtype = dtype
        self._roots: dict[str, _Node] = {}
        self._clock = itertools.count(1)
        self.num_tokens = 0

    def load(self, slot: int, ids: np.ndarray, *, salt: str) -> int:
        """Fill a slot with the longest known prefix of `ids`; returns its length.

        The last id is never taken from the cache: its forward gives the next token's logits.
        """
        position = 0
        for node, length in self._walk(ids[:-1], salt=salt):
            self._cache.write(slot, position, node.values.narrow(TOKEN_AXIS, 0, length))
            if self._routes is not None and node.routes is not None:
                self._routes.fill(slot, position, node.routes.part(0, length))
            position += length
        return position

    def match(self, ids: np.ndarray, *, salt: str) -> int:
        """How many tokens `load` would fill."""
        return sum(length for _, length in self._walk(ids[:-1], salt=salt))

    def store(self, slot: int, ids: np.ndarray, *, salt: str) -> None:
        """Remember a slot's values for `ids`, which must be the ids they were computed from."""
        node = self._roots.get(salt)
        if node is None:
            empty = self._cache.read(slot, 0, 0, dtype=self._dtype)
            node = self._roots[salt] = _Node(ids[:0], empty, None, None, 0)
        position = 0
        while position < len(ids):
            child = node.children.get(int(ids[position]))
            if child is None:
                values = self._cache.read(slot, position, len(ids), dtype=self._dtype)
                routes = None
                if self._routes is not None:
                    routes = self._routes.read(slot, position, len(ids))
                leaf = _Node(ids[position:].copy(), values, routes, node, next(self._clock))
                node.children[int(ids[position])] = leaf
                self.num_tokens += len(leaf.ids)
                return
            length = _common_length(child.ids, ids[position:])
            child.used = next(self._clock)
            if length < len(child.ids):
                if position + length == len(ids):
                    return
                child = self._split(child, length)
            node = child
            position += length

    def shrink(self, max_tokens: int) -> None:
        """Drop least recently used ends of contexts until at most `max_tokens` remain."""
        while self.num_tokens > max_tokens:
            leaves = [node for node in self._nodes() if not node.children]
            leaves.sort(key=lambda node: node.used)
            for leaf in leaves:
                if self.num_tokens <= max_tokens:
                    return
                assert leaf.parent is not None
                del leaf.parent.children[int(leaf.ids[0])]
                self.num_tokens -= len(leaf.ids)

    def clear(self) -> None:
        self._roots.clear()
        self.num_tokens = 0

    def _walk(self, ids: np.ndarray, *, salt: str) -> Iterator[tuple[_Node, int]]:
        """Nodes along `ids` and how much of each matches."""
        node = self._roots.get(salt)
        position = 0
        while node is not None and position < len(ids):
            node = node.children.get(int(ids[position]))
            if node is None:
                return
            length = _common_length(node.ids, ids[position:])
            node.used = next(self._clock)
            yield node, length
            if length < len(node.ids):
                return
            position += length

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a node in two; returns the upper part, which takes its place."""
        parent = node.parent
        assert parent is not None
        upper = _Node(
            node.ids[:length],
            node.values.narrow(TOKEN_AXIS, 0, length).clone(),
            None if node.routes is None else node.routes.part(0, length),
            parent,
            node.used,
        )
        parent.children[int(node.ids[0])] = upper
        rest = len(node.ids) - length
        node.values = node.values.narrow(TOKEN_AXIS, length, rest).clone()
        if node.routes is not None:
            node.routes = node.routes.part(length, len(node.ids))
        node.ids = node.ids[length:]
        node.parent = upper
        upper.children[int(node.ids[0])] = node
        return upper

    def _nodes(self) -> Iterator[_Node]:
        """Every node that holds tokens."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _common_length(first: np.ndarray, second: np.ndarray) -> int:
    shorter = min(len(first), len(second))
    differ = first[:shorter] != second[:shorter]
    return int(differ.argmax()) if differ.any() else shorter
