"""One attention for training, prefill, chunked prefill, decoding and paged keys.

Keys are taken in tiles that start at fixed positions. Of each tile a row gets its largest score m,
the sum l of exp(score - m), and the mean o of the values under those weights; tiles are then joined
in order: share_t = l_t exp(m_t - max m) / sum, result = sum of share_t o_t, all in float32. A tile
without a visible key has share 0 and adds nothing, so it may be skipped. Invariant: a row's bits
depend on its own query, its position and the keys up to it, and on nothing else.
"""

# B batch, T query positions, L keys, N heads, G query heads per key head, D head dim,
# Z = B * key heads, R = query positions of a tile * G

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlmix.numerics.consistent.contract import MASKED, Tiling, min_rows, rounded

BLOCK_SCORES = 1 << 18
"""Scores computed at once: 1 MiB, which the probabilities take over; about the second-level cache
of a core."""

KEPT_SCORES = 1 << 23
"""Up to so many scores of a call (32 MiB) their probabilities are kept for the gradient, which
spares it a product and a softmax of seven and two; more, and memory would grow with the square of
the length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyTile:
    """Keys first:last, as far as one tile of queries needs them."""

    first: int
    last: int
    masked_from: int
    """Column of the tile from which on some query may not see; before it all see."""
    mask: Tensor | None
    """float32 [B or 1, 1, positions, 1, last - first - masked_from], 0 or MASKED."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryTile:
    first: int
    last: int
    """Query positions first:last of the padded queries."""
    keys: tuple[KeyTile, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """Which tiles a call computes and what they hide; the same for every layer of a step."""

    tiling: Tiling
    num_queries: int
    num_padded: int
    """Queries computed: enough that no product is too small; the added ones repeat the last."""
    num_keys: int
    """Keys that are read; what lies beyond a row's position must be finite."""
    groups: int
    tiles: tuple[QueryTile, ...]

    @property
    def scores_per_head(self) -> int:
        """Computed scores of one key head."""
        return self.groups * sum(
            (tile.last - tile.first) * sum(keys.last - keys.first for keys in tile.keys)
            for tile in self.tiles
        )


def plan_attention(positions_BT: Tensor, *, groups: int, tiling: Tiling) -> AttentionPlan:
    """Plan a call in which query (b, t) sees the keys 0..positions[b, t] of its own row b.

    Args:
        positions_BT: int64 [B, T], or [1, T] when all rows of the batch agree.
        groups: query heads per key head.
    """
    num_queries = positions_BT.shape[1]
    least = -(-min_rows() // groups)
    rest = num_queries % tiling.query_tile
    missing = least - (rest or tiling.query_tile)
    if missing > 0:
        last_B1 = positions_BT[:, -1:].expand(-1, missing)
        positions_BT = torch.cat((positions_BT, last_B1), dim=1)
    starts = range(0, num_queries, tiling.query_tile)
    ends = [*starts[1:], positions_BT.shape[1]]
    tiles = [
        QueryTile(first=first, last=last, keys=_key_tiles(positions_BT[:, first:last], tiling))
        for first, last in zip(starts, ends, strict=True)
    ]
    return AttentionPlan(
        tiling=tiling,
        num_queries=num_queries,
        num_padded=positions_BT.shape[1],
        num_keys=max(tile.keys[-1].last for tile in tiles),
        groups=groups,
        tiles=tuple(tiles),
    )


def _key_tiles(positions_BR: Tensor, tiling: Tiling) -> tuple[KeyTile, ...]:
    nearest, farthest = int(positions_BR.min()), int(positions_BR.max())
    return tuple(
        _key_tile(positions_BR, first, farthest, nearest, tiling)
        for first in range(0, farthest + 1, tiling.kv_tile)
    )


def _key_tile(
    positions_BR: Tensor, first: int, farthest: int, nearest: int, tiling: Tiling
) -> KeyTile:
    last = first + tiling.width(min(farthest + 1 - first, tiling.kv_tile))
    if last <= nearest + 1:
        return KeyTile(first=first, last=last, masked_from=last - first, mask=None)
    visible = max(first, nearest + 1)
    is_ahead = torch.arange(visible, last) > positions_BR[..., None]
    mask = torch.zeros(is_ahead.shape).masked_fill_(is_ahead, MASKED)
    return KeyTile(first=first, last=last, masked_from=visible - first, mask=mask[:, None, :, None])


@dataclass(frozen=True, slots=True)
class _Block:
    """Key heads that are computed together: of some sequences, or some of one sequence."""

    heads: slice
    """Of the Z heads of the call."""
    batch: slice
    """The sequences they belong to."""


def _blocks(num_heads: int, batch: int, tile: QueryTile, groups: int) -> list[_Block]:
    """At most BLOCK_SCORES scores each, where that is not less than one head."""
    rows = (tile.last - tile.first) * groups
    width = max(keys.last - keys.first for keys in tile.keys)
    room = max(1, BLOCK_SCORES // (rows * width))
    if batch == 1:
        return [_Block(slice(z, z + room), slice(0, 1)) for z in range(0, num_heads, room)]
    heads = num_heads // batch
    step = max(1, room // heads)
    return [
        _Block(slice(b * heads, (b + step) * heads), slice(b, b + step))
        for b in range(0, batch, step)
    ]


def is_one_block(plan: AttentionPlan, *, num_heads: int) -> bool:
    """Whether a call of one query tile computes all its key heads at once."""
    rows = (plan.tiles[0].last - plan.tiles[0].first) * plan.groups
    width = max(keys.last - keys.first for keys in plan.tiles[0].keys)
    return len(plan.tiles) == 1 and num_heads * rows * width <= BLOCK_SCORES


def _masked_scores(
    queries_ZRD: Tensor, keys_ZLD: Tensor, tile: KeyTile, batch: slice, groups: int
) -> Tensor:
    """[Z, R, width] of the scaled queries of a block."""
    scores = torch.bmm(queries_ZRD, keys_ZLD[:, tile.first : tile.last].transpose(1, 2))
    if tile.mask is not None:
        mask = tile.mask if tile.mask.shape[0] == 1 else tile.mask[batch]
        positions = scores.shape[1] // groups
        seen = scores.view(mask.shape[0], -1, positions, groups, scores.shape[-1])
        seen[..., tile.masked_from :].add_(mask)
    return scores


def _rows_of(by_head_ZPD: Tensor, tile: QueryTile, block: _Block, groups: int) -> Tensor:
    return by_head_ZPD[block.heads, tile.first * groups : tile.last * groups]


def _shares(largest: list[Tensor], sums: list[Tensor]) -> list[Tensor]:
    """What each tile counts for, [Z, R, 1] each; empty when one tile counts for all."""
    if not largest:
        return []
    top = largest[0]
    for other in largest[1:]:
        top = torch.maximum(top, other)
    weights = [(m - top).exp_().mul_(s) for m, s in zip(largest, sums, strict=True)]
    total = weights[0]
    for weight in weights[1:]:
        total = total + weight
    return [weight.div_(total) for weight in weights]


def attend_tile(
    queries_ZRD: Tensor,
    keys_ZLD: Tensor,
    values_ZLD: Tensor,
    tile: QueryTile,
    plan: AttentionPlan,
    batch: slice,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The rows' results [Z, R, D], and the shares of their key tiles; `kept` gets each tile's
    probabilities.

    Args:
        queries_ZRD: scaled, of a block of key heads; keys_ZLD, values_ZLD: of the same.
        batch: the sequences of the block.
    """
    largest, sums, means = [], [], []
    for keys in tile.keys:
        scores = _masked_scores(queries_ZRD, keys_ZLD, keys, batch, plan.groups)
        if len(tile.keys) > 1:
            largest.append(scores.amax(-1, keepdim=True))
        probs = torch.softmax(scores, -1, out=scores)
        if len(tile.keys) > 1:
            # exp(m - m) = 1 is the largest term, so the largest probability is 1 / l.
            sums.append(probs.amax(-1, keepdim=True).reciprocal_())
        if kept is not None:
            kept.append(probs)
        probs = rounded(probs, plan.tiling.probs)
        means.append(torch.bmm(probs, values_ZLD[:, keys.first : keys.last]))
    shares = _shares(largest, sums)
    result = means[0]
    if shares:
        result = result.mul_(shares[0])
        for mean, share in zip(means[1:], shares[1:], strict=True):
            result.add_(mean.mul_(share))
    return result, shares


def _queries_by_head(q_BTND: Tensor, plan: AttentionPlan, num_kv_heads: int) -> Tensor:
    """float32 [Z, padded positions * G, D], scaled by 1 / sqrt(D)."""
    batch, num_queries, _, dim = q_BTND.shape
    shape = (batch, num_kv_heads, plan.num_padded, plan.groups, dim)
    out = torch.empty(shape, dtype=torch.float32)
    by_head = q_BTND.reshape(batch, num_queries, num_kv_heads, plan.groups, dim).transpose(1, 2)
    torch.mul(by_head.float(), dim**-0.5, out=out[:, :, :num_queries])
    if plan.num_padded > num_queries:
        out[:, :, num_queries:] = 0
    return out.view(batch * num_kv_heads, -1, dim)


def _queries_from_heads(by_head_ZPD: Tensor, plan: AttentionPlan, batch: int) -> Tensor:
    """[B, T, N, D] back from the layout above."""
    dim = by_head_ZPD.shape[-1]
    split = by_head_ZPD.view(batch, -1, plan.num_padded, plan.groups, dim)
    kept = split[:, :, : plan.num_queries].transpose(1, 2)
    return kept.reshape(batch, plan.num_queries, -1, dim)


def _keys_by_head(keys_BHLD: Tensor, num_keys: int) -> Tensor:
    """float32 [Z, num_keys, D]: a view where the caller's tensor allows, else a padded copy."""
    batch, heads, length, dim = keys_BHLD.shape
    if length >= num_keys and keys_BHLD.dtype == torch.float32:
        seen = keys_BHLD[:, :, :num_keys]
        if seen.stride(-1) == 1 and seen.stride(0) == heads * seen.stride(1):
            return seen.flatten(0, 1)
    out = torch.zeros((batch, heads, num_keys, dim), dtype=torch.float32)
    length = min(length, num_keys)
    out[:, :, :length].copy_(keys_BHLD[:, :, :length])
    return out.view(batch * heads, num_keys, dim)


class _Attention(torch.autograd.Function):
    """Keeps queries, keys, values, results, shares, and the probabilities of a small call; those of
    a large one are computed again backwards."""

    @staticmethod
    def forward(
        ctx: Any, q_BTND: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, plan: AttentionPlan
    ) -> Tensor:
        num_scores = len(q_BTND) * k_BHLD.shape[1] * plan.scores_per_head
        ctx.kept = [] if num_scores <= KEPT_SCORES else None
        result_ZPD, saved, shares = _forward(q_BTND, k_BHLD, v_BHLD, plan, ctx.kept)
        ctx.plan, ctx.batch, ctx.shares = plan, len(q_BTND), shares
        ctx.dtypes, ctx.num_keys = (q_BTND.dtype, k_BHLD.dtype, v_BHLD.dtype), k_BHLD.shape[2]
        ctx.save_for_backward(*saved, result_ZPD)
        return _queries_from_heads(result_ZPD, plan, len(q_BTND))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, results = ctx.saved_tensors
        plan, batch = ctx.plan, ctx.batch
        num_kv_heads = len(keys) // batch
        grad_ZPD = _queries_by_head(grads[0], plan, num_kv_heads).mul_(queries.shape[-1] ** 0.5)
        grad_queries = torch.zeros(queries.shape)
        grad_keys = torch.zeros(keys.shape)
        grad_values = torch.zeros(values.shape)
        pending = iter(ctx.shares)
        kept = None if ctx.kept is None else iter(ctx.kept)
        for tile in plan.tiles:
            for block in _blocks(len(keys), batch, tile, plan.groups):
                query, grad, result, grad_query = (
                    _rows_of(tensor, tile, block, plan.groups)
                    for tensor in (queries, grad_ZPD, results, grad_queries)
                )
                along = (grad * result).sum(-1, keepdim=True)
                shares = next(pending)
                for number, part in enumerate(tile.keys):
                    span = (block.heads, slice(part.first, part.last))
                    if kept is None:
                        scores = _masked_scores(
                            query, keys[block.heads], part, block.batch, plan.groups
                        )
                        probs = torch.softmax(scores, -1, out=scores)
                    else:
                        probs = next(kept)
                    if shares:
                        probs = probs * shares[number]
                    grad_values[span].baddbmm_(probs.transpose(1, 2), grad)
                    grad_scores = torch.bmm(grad, values[span].transpose(1, 2))
                    grad_scores.sub_(along).mul_(probs)
                    grad_query.baddbmm_(grad_scores, keys[span])
                    grad_keys[span].baddbmm_(grad_scores.transpose(1, 2), query)
        grad_queries.mul_(queries.shape[-1] ** -0.5)
        dtypes = ctx.dtypes
        return (
            _queries_from_heads(grad_queries, plan, batch).to(dtypes[0]),
            _key_grad(grad_keys, batch, ctx.num_keys).to(dtypes[1]),
            _key_grad(grad_values, batch, ctx.num_keys).to(dtypes[2]),
            None,
        )


def _key_grad(grad_ZLD: Tensor, batch: int, num_keys: int) -> Tensor:
    """[B, key heads, num_keys, D] from the padded or shortened keys of the call."""
    grad_BHLD = grad_ZLD.view(batch, -1, *grad_ZLD.shape[1:])
    missing = num_keys - grad_BHLD.shape[2]
    if missing > 0:
        return torch.nn.functional.pad(grad_BHLD, (0, 0, 0, missing))
    return grad_BHLD[:, :, :num_keys]


def _forward(
    q_BTND: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    plan: AttentionPlan,
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], list[list[Tensor]]]:
    queries = _queries_by_head(q_BTND, plan, k_BHLD.shape[1])
    keys = _keys_by_head(k_BHLD, plan.num_keys)
    values = _keys_by_head(v_BHLD, plan.num_keys)
    blocks = [_blocks(len(keys), len(q_BTND), tile, plan.groups) for tile in plan.tiles]
    if len(blocks) == 1 and len(blocks[0]) == 1:
        batch = slice(0, len(q_BTND))
        result, share = attend_tile(queries, keys, values, plan.tiles[0], plan, batch, kept)
        return result, (queries, keys, values), [share]
    results, shares = torch.empty(queries.shape), []
    for tile, tile_blocks in zip(plan.tiles, blocks, strict=True):
        for block in tile_blocks:
            query = _rows_of(queries, tile, block, plan.groups)
            heads = block.heads
            result, share = attend_tile(
                query, keys[heads], values[heads], tile, plan, block.batch, kept
            )
            _rows_of(results, tile, block, plan.groups).copy_(result)
            shares.append(share)
    return results, (queries, keys, values), shares


def attend(
    q_BTND: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    plan: AttentionPlan,
    *,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """Softmax attention, each query over the keys up to its position.

    Args:
        q_BTND: float32 or bfloat16 [B, T, heads, D], rotated, not scaled.
        k_BHLD, v_BHLD: [B, key heads, L, D] in the order of positions, rotated; key head h serves
            the query heads h * G to h * G + G - 1. Any strides; float32 with L at least
            `plan.num_keys` is read in place, anything else is copied. Beyond a row's position
            they may hold any finite number.
        plan: from `plan_attention`, for positions and groups of this call.
        round_to: the result is a number of this dtype, held in q's; None: q's own.
    Returns:
        [B, T, heads, D] of q's dtype. The gradient computes scores again and is float32 inside; it
        ignores the rounding of probabilities.
    """
    if torch.is_grad_enabled() and (q_BTND.requires_grad or k_BHLD.requires_grad):
        result = _Attention.apply(q_BTND, k_BHLD, v_BHLD, plan)
    else:
        whole_ZPD, _, _ = _forward(q_BTND, k_BHLD, v_BHLD, plan)
        result = _queries_from_heads(whole_ZPD, plan, len(q_BTND))
    return rounded(result, round_to).to(q_BTND.dtype)


def gather_pages(pool: Tensor, tables: Tensor) -> Tensor:
    """Keys (or values) of each sequence in order of position, out of a paged pool.

    Args:
        pool: [pages, key heads, page size, D].
        tables: int64 [B, pages per sequence]; page i holds positions i * page size onwards. Entries
            beyond a sequence's length may name any page with finite contents.
    Returns:
        [B, key heads, pages per sequence * page size, D].
    """
    batch, per_sequence = tables.shape
    gathered = pool.index_select(0, tables.reshape(-1))
    split = gathered.view(batch, per_sequence, *pool.shape[1:]).transpose(1, 2)
    return split.reshape(batch, pool.shape[1], -1, pool.shape[3])


def tiles_of(plan: AttentionPlan) -> Iterator[tuple[int, int, int, int]]:
    """(first query, last query, first key, last key) of every product, for tests and reports."""
    for tile in plan.tiles:
        for keys in tile.keys:
            yield tile.first, tile.last, keys.first, keys.last
