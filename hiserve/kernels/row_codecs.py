"""Rows in 8 bits, byte by byte as released engines store them, in plain torch.

A page keeps the numbers of all its rows, then their scales. A row of DeepSeek-V4 has 448 numbers of E4M3 in tiles of 64, each
with a power of two as its scale, then 64 in bfloat16, which were rotated. A key of its index has 128 numbers and one scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 448.0  # of E4M3
LEAST = 1e-4  # the least magnitude that a scale follows


class PackedShape(NamedTuple):
    """Numbers of a row.

    Attributes:
        scaled: Numbers in 8 bits, a multiple of ``tile``.
        plain: Numbers in bfloat16, behind them.
        tile: Numbers of a scale.
    """

    scaled: int = 448
    plain: int = 64
    tile: int = 64

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.scaled + self.plain

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's numbers."""
        return self.scaled + 2 * self.plain

    @property
    def num_tiles(self) -> int:
        return self.scaled // self.tile

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales: one for each tile, and one that is 0."""
        return self.num_tiles + 1

    @property
    def row_bytes(self) -> int:
        return self.value_bytes + self.scale_bytes


PACKED_V4 = PackedShape()
INDEX_BYTES = 4  # of a key's scale, float32


def store_packed(pages: Tensor, slots: Tensor, rows: Tensor, page_rows: int, shape: PackedShape = PACKED_V4) -> None:
    """Writes rows into their slots.

    Args:
        pages: uint8 ``[num_pages, page_bytes]``, contiguous; ``page_bytes`` is at least ``page_rows * shape.row_bytes``.
        slots: int64 ``[T]``: row ``slot % page_rows`` of page ``slot // page_rows``.
        rows: ``[T, shape.width]``, any floating type; rounded to bfloat16 first.
        page_rows: Rows of a page.
        shape: Of a row.
    """
    narrow = rows.to(torch.bfloat16)
    wide = narrow[:, : shape.scaled].float().view(-1, shape.num_tiles, shape.tile)
    exponents = scale_exponents(wide.abs().amax(-1))
    small = torch.ldexp(wide, -exponents[..., None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    values = torch.cat(
        (small.view(torch.uint8).flatten(1), narrow[:, shape.scaled :].contiguous().view(torch.uint8)), 1
    )
    scales = torch.nn.functional.pad((exponents + 127).clamp_(0, 255).to(torch.uint8), (0, 1))
    first, second = _places(pages, slots, page_rows, shape.value_bytes, shape.scale_bytes)
    flat = pages.view(-1)
    flat.index_copy_(0, _spread(first, shape.value_bytes), values.flatten())
    flat.index_copy_(0, _spread(second, shape.scale_bytes), scales.flatten())


def load_packed(pages: Tensor, slots: Tensor, page_rows: int, shape: PackedShape = PACKED_V4) -> Tensor:
    """Returns the rows of slots, float32 ``[*slots.shape, shape.width]``; zeros for slot -1. Exact. As ``store_packed``."""
    is_none, flat = slots < 0, pages.view(-1)
    first, second = _places(pages, slots.clamp(min=0).flatten(), page_rows, shape.value_bytes, shape.scale_bytes)
    values = flat[_spread(first, shape.value_bytes)].view(-1, shape.value_bytes)
    exponents = flat[_spread(second, shape.num_tiles)].view(-1, shape.num_tiles, 1).to(torch.int32) - 127
    small = (
        values[:, : shape.scaled].contiguous().view(torch.float8_e4m3fn).float().view(-1, shape.num_tiles, shape.tile)
    )
    plain = values[:, shape.scaled :].contiguous().view(torch.bfloat16).float()
    rows = torch.cat((torch.ldexp(small, exponents).flatten(1), plain), 1)
    return rows.view(*slots.shape, shape.width).masked_fill_(is_none[..., None], 0)


def store_keys(pages: Tensor, slots: Tensor, keys: Tensor, page_rows: int) -> None:
    """Writes keys of an index, ``[T, n]``, in 8 bits each, with one float32 scale behind all keys of the page.

    ``pages`` are uint8 ``[num_pages, page_bytes]``, of at least ``page_rows * (n + 4)`` bytes.
    """
    wide = keys.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_(min=LEAST) / LARGEST
    small = (wide / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    first, second = _places(pages, slots, page_rows, keys.shape[1], INDEX_BYTES)
    flat = pages.view(-1)
    flat.index_copy_(0, _spread(first, keys.shape[1]), small.flatten())
    flat.index_copy_(0, _spread(second, INDEX_BYTES), scales.view(torch.uint8).flatten())


def load_keys(pages: Tensor, slots: Tensor, page_rows: int, width: int) -> Tensor:
    """Returns the keys of slots, float32 ``[*slots.shape, width]``; zeros for slot -1. As ``store_keys``."""
    is_none, flat = slots < 0, pages.view(-1)
    first, second = _places(pages, slots.clamp(min=0).flatten(), page_rows, width, INDEX_BYTES)
    small = flat[_spread(first, width)].view(torch.float8_e4m3fn).float().view(-1, width)
    scales = flat[_spread(second, INDEX_BYTES)].view(torch.float32)
    return (small * scales[:, None]).view(*slots.shape, width).masked_fill_(is_none[..., None], 0)


def scale_exponents(largest: Tensor) -> Tensor:
    """Returns the least e, int32, with ``largest <= 448 * 2**e``, up to the rounding of 1/448; of bits, so that it is exact."""
    bits = (largest.float().clamp(min=LEAST) * (1 / LARGEST)).view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def _places(pages: Tensor, slots: Tensor, page_rows: int, value_bytes: int, scale_bytes: int) -> tuple[Tensor, Tensor]:
    """Returns where the numbers and the scales of rows begin, among all bytes."""
    page_bytes = pages.shape[1]
    assert page_bytes >= page_rows * (value_bytes + scale_bytes), f"pages of {page_bytes} bytes, {page_rows} rows"
    page, row = slots // page_rows * page_bytes, slots % page_rows
    return page + row * value_bytes, page + page_rows * value_bytes + row * scale_bytes


def _spread(first: Tensor, count: int) -> Tensor:
    """Returns ``count`` adjacent indices from each first one, in one row."""
    return (first[:, None] + torch.arange(count, device=first.device)).flatten()
