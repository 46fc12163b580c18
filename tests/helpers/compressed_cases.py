"""Steps of rows with compressed rows, a window and chosen ones, in memory whose unowned parts are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from hiserve.core.forward import StateRows
from hiserve.core.row_shapes import PackedPages, PackedShape, packed_key, packed_row
from hiserve.kernels.compress_reference import CarriedInputs, Compression, StepTokens
from hiserve.kernels.compressed_ops import CompressedOps
from hiserve.kernels.row_codecs import store_packed
from hiserve.kernels.union_rows import ChosenRows, RangeRows, rows_at

NOBODY = 2**31 - 1  # in a table: no page
KINDS = ("none", "heavy", "chosen")  # what a token sees besides its window


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Tokens of some rows; row b computes ``new[b]`` tokens behind ``cached[b]``."""

    cached: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def positions(self) -> Tensor:
        pairs = zip(self.cached, self.new, strict=True)
        return torch.cat([torch.arange(cached, cached + new) for cached, new in pairs])

    @property
    def token_rows(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(self.new)), torch.tensor(self.new))

    @property
    def starts(self) -> Tensor:
        return torch.tensor((0, *self.new)).cumsum(0).int()

    def paged(self, width: int, page_rows: int, ratio: int, window: int | None, dtype: torch.dtype) -> RangeRows:
        """Returns random rows in pages in random order; rows that no token sees, and tables of them, are not there."""
        lengths = [(cached + new) // ratio for cached, new in zip(self.cached, self.new, strict=True)]
        pages = [-(-length // page_rows) for length in lengths]
        order = torch.randperm(sum(pages)).add_(1).split(pages)
        table = torch.full((len(self.new), max([1, *pages])), NOBODY, dtype=torch.int32)
        pool = torch.full(((sum(pages) + 1) * page_rows, width), torch.nan, dtype=dtype)
        for row, (mine, length) in enumerate(zip(order, lengths, strict=True)):
            first = 0 if window is None else max(0, self.cached[row] + 1 - window)
            seen = torch.arange(first, length)
            pool[mine[seen // page_rows] * page_rows + seen % page_rows] = torch.randn(len(seen), width, dtype=dtype)
            table[row, first // page_rows : pages[row]] = mine[first // page_rows :]
        most = max([1, *lengths])
        return RangeRows(pool, table, self.token_rows, self.positions, page_rows, most, ratio, window)


class CompressedStep:
    """Random steps of one shape, of one token a row, on any device.

    Args:
        context: Tokens of each row.
        most: Rows that an index chooses.
        packs_rows: Rows and keys are packed.
    """

    def __init__(
        self,
        *,
        width: int = 512,
        num_heads: int = 64,
        index_width: int = 128,
        num_rows: int = 4,
        context: int = 700,
        most: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        packs_rows: bool = False,
    ) -> None:
        self.width, self.num_heads, self.index_width, self.most = width, num_heads, index_width, most
        self.num_rows, self.context, self.dtype, self.device = num_rows, context, dtype, torch.device(device)
        self.packs_rows = packs_rows

    def randn(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.dtype)

    def places(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Returns positions, the last of each row, and the rows of tokens."""
        rows = torch.arange(num_tokens, device=self.device) * self.num_rows // num_tokens
        last = torch.bincount(rows, minlength=self.num_rows).cumsum(0)
        return self.context - last[rows] + torch.arange(num_tokens, device=self.device), rows

    def range(self, ratio: int, width: int, num_tokens: int, window: int | None = None) -> RangeRows:
        positions, token_rows = self.places(num_tokens)
        most, page_rows = self.context // ratio, 128 // ratio
        pages = -(-self.context // 128)
        order = torch.randperm(self.num_rows * pages, device=self.device) + 1
        pool = self.randn((self.num_rows * pages + 1) * page_rows, width)
        table = order.view(self.num_rows, pages).int()
        rows = RangeRows(pool, table, token_rows, positions, page_rows, most, ratio, window)
        shape = packed_key(width) if width == self.index_width else packed_row(width, min(64, width // 4))
        return packed_rows(rows, shape, page_rows) if self.packs_rows and shape is not None else rows

    def attend(self, ops: CompressedOps, num_tokens: int, others: Sequence[str] = KINDS) -> list[tuple[Tensor, Tensor]]:
        """Attends over a window, beside nothing else, all compressed rows, or chosen ones."""
        window = self.range(1, self.width, num_tokens, 128)
        q, sink = self.randn(num_tokens, self.num_heads, self.width), torch.randn(self.num_heads, device=self.device)
        cos, sin = torch.randn(2, num_tokens, min(32, self.width // 4), device=self.device)
        found = []
        for other in others:
            beside: list[RangeRows | ChosenRows] = []
            if other == "heavy":
                beside = [self.range(128, self.width, num_tokens)]
            if other == "chosen":
                some = self.range(4, self.width, num_tokens)
                slots = torch.randint(-1, len(some.pool), (num_tokens, self.most), device=self.device)
                beside = [ChosenRows(some.pool, slots, some.packed)]
            found.append(ops.attend(q, [window, *beside], sink, self.width**-0.5, (cos, sin)))
        return found

    def choose(self, ops: CompressedOps) -> Tensor:
        keys = self.range(4, self.index_width, self.num_rows)
        q = self.randn(self.num_rows, self.num_heads, self.index_width)
        weights = torch.randn(self.num_rows, self.num_heads, device=self.device)
        return ops.choose_rows(q, weights, keys, self.most, self.index_width**-0.5)

    def compress(self, ops: CompressedOps, ratio: int, num_series: int) -> tuple[Tensor, CarriedInputs]:
        """Returns the pool of rows, unpacked, and the rings."""
        target, wide = self.range(ratio, self.width, self.num_rows), num_series * self.width
        how = Compression(torch.randn(ratio, wide, device=self.device), self.randn(self.width), 1e-6, num_series)
        ring = torch.randn(self.num_rows + 1, num_series * ratio + 8, 2 * wide, device=self.device)
        carried = CarriedInputs(ring, torch.zeros(3, 4 if num_series > 1 else 0, 2 * wide, device=self.device))
        row = torch.arange(self.num_rows, device=self.device)
        nothing = torch.zeros_like(row)
        state = StateRows(row + 1, target.positions, nothing + 1, target.positions + 1, nothing, nothing)
        tokens = StepTokens(torch.arange(self.num_rows + 1, device=self.device).int(), state)
        angles = torch.randn(2, self.num_rows, min(32, self.width // 4), device=self.device)
        values, scores = self.randn(self.num_rows, 2 * wide + 8)[:, 8:].split(wide, 1)
        ops.compress(values, scores, how, carried, tokens, target, (angles[0], angles[1]))
        every = torch.arange(len(target.pool), device=self.device)
        return rows_at(target, every[None], self.dtype)[0], carried


_Source = TypeVar("_Source", RangeRows, ChosenRows)


def packed_rows(source: _Source, shape: PackedShape, page_rows: int) -> _Source:
    """Returns the same rows, packed; the bytes of those that nobody sees are no numbers."""
    pages, seen = PackedPages(shape, page_rows), (~source.pool.isnan().any(1)).nonzero()[:, 0]
    pool = torch.full((len(source.pool), shape.row_bytes), 255, dtype=torch.uint8, device=source.pool.device)
    store_packed(pool, seen, source.pool[seen], pages)
    return replace(source, pool=pool, packed=pages)


def random_compression(width: int, ratio: int, num_series: int, dtype: torch.dtype) -> Compression:
    bias = torch.randn(ratio, num_series * width, dtype=dtype)
    return Compression(bias, torch.rand(width, dtype=dtype) + 0.5, 1e-6, num_series)


class Compressed:
    """One request whose rows are made step by step, by one implementation.

    Args:
        values: ``[L, num_series * n]``, of all tokens, as are scores.
        turns: Angles of each token, ``[L, m]``.
    """

    def __init__(
        self,
        how: Compression,
        values: Tensor,
        scores: Tensor,
        turns: Tensor,
        *,
        ring: int,
        page_rows: int = 4,
        num_kept: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.how, self.values, self.scores, self.turns = how, values, scores, turns
        length, width = values.shape
        self.num_rows = length // how.ratio
        num_pages = -(-self.num_rows // page_rows)
        self.table = torch.full((3, num_pages + 1), NOBODY, dtype=torch.int32)
        self.table[1, :num_pages] = torch.randperm(num_pages) + 1
        self.page_rows = page_rows
        size = ((num_pages + 1) * page_rows, how.norm.shape[0])
        self.pool = torch.full(size, torch.nan, dtype=dtype or values.dtype)
        wide = how.bias.dtype
        self.carried = CarriedInputs(
            torch.full((4, ring, 2 * width), torch.nan, dtype=wide),
            torch.full((3, num_kept, 2 * width), torch.nan, dtype=wide),
        )

    def step(self, compress, start: int, end: int, num_draft: int = 0, snap_at: int = 0, state_len: int = 0) -> None:  # type: ignore[no-untyped-def]
        """Computes tokens ``start`` to ``end``, of permanent row 2, between an empty row and one of a token of nobody."""
        count = end - start
        own = torch.arange(start, end)
        positions, token_rows = torch.cat((own, own.new_zeros(1))), torch.cat((own * 0 + 1, own.new_full((1,), 2)))
        state = StateRows(
            rows=torch.tensor([0, 2, 0]),
            starts=torch.tensor([0, start, 0]),
            state_lens=torch.tensor([0, state_len, 0]),
            state_ends=torch.tensor([0, end - num_draft, 0]),
            snap_at=torch.tensor([0, snap_at, 0]),
            snap_slots=torch.tensor([0, int(snap_at > 0), 0]),
        )
        table = self.table.clone()
        table[2] = 0
        most = max(1, end // self.how.ratio)
        target = RangeRows(self.pool, table, token_rows, positions, self.page_rows, most, self.how.ratio)
        tokens = StepTokens(torch.tensor([0, 0, count, count + 1], dtype=torch.int32), state)
        first = positions // self.how.ratio * self.how.ratio
        turns = self.turns[first].cos(), self.turns[first].sin()
        compress(self.values[positions], self.scores[positions], self.how, self.carried, tokens, target, turns)

    def rows(self, end: int) -> Tensor:
        """Returns the rows of the first ``end`` tokens."""
        row = torch.arange(end // self.how.ratio)
        return self.pool[self.table[1, row // self.page_rows].long() * self.page_rows + row % self.page_rows]


def made_by_hand(values: Tensor, scores: Tensor, how: Compression, turns: Tensor) -> Tensor:
    """Returns all rows of one request, by the rule as it is written down, a row and an element at a time where it matters."""
    width, ratio, rows = how.norm.shape[0], how.ratio, []
    for row in range(values.shape[0] // ratio):
        parts, weights = [], []
        for series in range(how.num_series):
            for place in range(ratio):
                position = (row - how.num_series + 1 + series) * ratio + place
                if position >= 0:
                    mine = slice(series * width, (series + 1) * width)
                    parts.append(values[position, mine])
                    weights.append((scores[position] + how.bias[place])[mine].exp())
        shares = torch.stack(weights)
        made = (torch.stack(parts) * shares).sum(0) / shares.sum(0)
        made = made / (made.square().mean() + how.eps).sqrt() * how.norm
        angles, turned = turns[row * ratio], made.clone()
        for pair in range(angles.shape[0]):
            even = width - 2 * angles.shape[0] + 2 * pair
            turn = torch.polar(torch.ones_like(angles[pair]), angles[pair])
            found = torch.complex(made[even], made[even + 1]) * turn
            turned[even], turned[even + 1] = found.real, found.imag
        rows.append(turned)
    return torch.stack(rows) if rows else values.new_zeros((0, width))


def slots_at_ends(source: RangeRows) -> Tensor:
    """Returns the slot of the row that ends with each token, int64 ``[T]``; 0, which belongs to no row, where none does."""
    row, offset = source.positions // source.ratio, source.positions % source.ratio
    is_end = offset == source.ratio - 1
    pages = source.table[source.token_rows, torch.where(is_end, row // source.page_rows, 0)].long()
    return torch.where(is_end, pages * source.page_rows + row % source.page_rows, 0)
