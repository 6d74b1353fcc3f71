"""A small engine for the tests: caches in slots or in pages, mixed steps, any chunking."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.numerics.consistent.attention import attend, gather_pages, plan_attention
from rlmix.numerics.consistent.contract import Tiling
from rlmix.numerics.consistent.model import ALONE, ModelSpec, ModelTensors, Ranks, run_layers

PAGE_JUNK = 7.5
"""What unused cache positions hold: finite, and far from any key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """The next tokens of one sequence."""

    sequence: int
    start: int
    ids: Tensor


class SlotEngine:
    """Keys and values of sequences in slots of a contiguous cache."""

    def __init__(
        self,
        tensors: ModelTensors,
        spec: ModelSpec,
        table: Tensor,
        tiling: Tiling,
        *,
        num_sequences: int,
        capacity: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.tensors, self.spec, self.table, self.tiling = tensors, spec, table, tiling
        self.groups = spec.num_heads // spec.num_kv_heads
        shape = (spec.num_layers, 2, num_sequences, spec.num_kv_heads, capacity, spec.head_dim)
        self.cache = torch.full(shape, PAGE_JUNK)

    def write(self, layer: int, piece: Piece, keys: Tensor, values: Tensor) -> None:
        span = slice(piece.start, piece.start + len(piece.ids))
        self.cache[layer, 0, piece.sequence, :, span] = keys.transpose(0, 1)
        self.cache[layer, 1, piece.sequence, :, span] = values.transpose(0, 1)

    def read(self, layer: int, sequences: list[int]) -> tuple[Tensor, Tensor]:
        seen = self.cache[layer]
        if sequences == list(range(sequences[0], sequences[0] + len(sequences))):
            seen = seen[:, sequences[0] : sequences[0] + len(sequences)]
        else:
            seen = seen[:, sequences]
        return seen[0], seen[1]

    @torch.inference_mode()
    def step(self, pieces: list[Piece]) -> list[Tensor]:
        """Final hidden states of each piece's tokens. Pieces of one token attend together."""
        positions = [torch.arange(p.start, p.start + len(p.ids)) for p in pieces]
        singles = [number for number, piece in enumerate(pieces) if len(piece.ids) == 1]
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece.ids))

        def attend_rows(layer: int, queries: Tensor, new: Tensor) -> Tensor:
            keys, values = new.chunk(2, dim=1)
            out = torch.empty(queries.shape)
            for number, piece in enumerate(pieces):
                rows = slice(starts[number], starts[number + 1])
                self.write(layer, piece, keys[rows], values[rows])
            for number, piece in enumerate(pieces):
                if number in singles:
                    continue
                rows = slice(starts[number], starts[number + 1])
                out[rows] = self.attend_group(
                    layer, queries[rows][None], [piece.sequence], positions[number][None]
                )[0]
            if singles:
                rows = [starts[number] for number in singles]
                sequences = [pieces[number].sequence for number in singles]
                where = torch.stack([positions[number] for number in singles])
                out[rows] = self.attend_group(layer, queries[rows][:, None], sequences, where)[:, 0]
            return out

        rotations = self.table[:, torch.cat(positions)]
        ids = torch.cat([piece.ids for piece in pieces])
        hidden = run_layers(self.tensors, self.spec, ids, rotations, attend_rows, ranks=self.ranks)
        return [hidden[starts[n] : starts[n + 1]] for n in range(len(pieces))]

    def attend_group(
        self, layer: int, queries: Tensor, sequences: list[int], positions: Tensor
    ) -> Tensor:
        plan = plan_attention(positions, groups=self.groups, tiling=self.tiling)
        keys, values = self.read(layer, sequences)
        return attend(queries, keys, values, plan, round_to=self.spec.round_to)


class PagedEngine(SlotEngine):
    """The same with pages in an order of their own, shared pool, gathered before attention."""

    def __init__(self, *args: object, page_size: int, seed: int, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        layers, _, sequences, heads, capacity, dim = self.cache.shape
        per_sequence = -(-capacity // page_size)
        self.page_size = page_size
        order = torch.randperm(
            sequences * per_sequence, generator=torch.Generator().manual_seed(seed)
        )
        self.tables = order.view(sequences, per_sequence)
        pages = (layers, 2, sequences * per_sequence, heads, page_size, dim)
        self.pool = torch.full(pages, PAGE_JUNK)

    def write(self, layer: int, piece: Piece, keys: Tensor, values: Tensor) -> None:
        for row in range(len(piece.ids)):
            page, offset = divmod(piece.start + row, self.page_size)
            where = int(self.tables[piece.sequence, page])
            self.pool[layer, 0, where, :, offset] = keys[row]
            self.pool[layer, 1, where, :, offset] = values[row]

    def read(self, layer: int, sequences: list[int]) -> tuple[Tensor, Tensor]:
        tables = self.tables[sequences]
        return gather_pages(self.pool[layer, 0], tables), gather_pages(self.pool[layer, 1], tables)
