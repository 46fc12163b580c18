"""Rows in 8 bits, byte by byte as ``core.row_shapes`` lays them out, in plain torch.

These are the numbers of released engines: a row of DeepSeek-V4 has 448 in tiles of 64, each with a power of two as its scale,
then 64 in bfloat16, which were rotated. A key of its index has 128, and one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.row_shapes import WIDE_SCALE_BYTES, PackedPages

LARGEST = 448.0  # of E4M3
LEAST = 1e-4  # the least magnitude that a scale follows


def store_packed(pool: Tensor, slots: Tensor, rows: Tensor, pages: PackedPages) -> None:
    """Writes rows into their slots.

    Args:
        pool: uint8, contiguous: whole pages.
        slots: int64 ``[T]``: row ``slot % page_rows`` of page ``slot // page_rows``.
        rows: ``[T, shape.width]``, any floating type; rounded to bfloat16 first.
        pages: Of the pool.
    """
    shape, narrow = pages.shape, rows.to(torch.bfloat16)
    wide = narrow[:, : shape.scaled].float().view(-1, shape.num_tiles, shape.tile)
    largest = wide.abs().amax(-1)
    if shape.has_wide_scales:
        factors = largest.clamp_(min=LEAST) * (1 / LARGEST)
        small, scales = wide / factors[..., None], factors.view(torch.uint8)
    else:
        exponents = scale_exponents(largest)
        small = torch.ldexp(wide, -exponents[..., None])
        scales = (exponents + 127).clamp_(0, 255).to(torch.uint8)
        scales = torch.nn.functional.pad(scales, (0, shape.scale_bytes - shape.num_tiles))
    small = small.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    values = torch.cat((small, narrow[:, shape.scaled :].contiguous().view(torch.uint8)), 1)
    first, second = _places(pool, slots, pages)
    flat = pool.view(-1)
    flat.index_copy_(0, _spread(first, shape.value_bytes), values.flatten())
    flat.index_copy_(0, _spread(second, shape.scale_bytes), scales.flatten())


def load_packed(pool: Tensor, slots: Tensor, pages: PackedPages) -> Tensor:
    """Returns the rows of slots, float32 ``[*slots.shape, shape.width]``; zeros for slot -1. As ``store_packed``."""
    shape, is_none, flat = pages.shape, slots < 0, pool.view(-1)
    first, second = _places(pool, slots.clamp(min=0).flatten(), pages)
    values = flat[_spread(first, shape.value_bytes)].view(-1, shape.value_bytes)
    scales = flat[_spread(second, shape.num_tiles * (WIDE_SCALE_BYTES if shape.has_wide_scales else 1))]
    small = values[:, : shape.scaled].contiguous().view(torch.float8_e4m3fn).float()
    small = small.view(-1, shape.num_tiles, shape.tile)
    if shape.has_wide_scales:
        scaled = small * scales.view(torch.float32).view(-1, shape.num_tiles, 1)
    else:
        scaled = torch.ldexp(small, scales.view(-1, shape.num_tiles, 1).to(torch.int32) - 127)
    plain = values[:, shape.scaled :].contiguous().view(torch.bfloat16).float()
    rows = torch.cat((scaled.flatten(1), plain), 1)
    return rows.view(*slots.shape, shape.width).masked_fill_(is_none[..., None], 0)


def scale_exponents(largest: Tensor) -> Tensor:
    """Returns the least e, int32, with ``largest <= 448 * 2**e``, up to the rounding of 1/448; of bits, so that it is exact."""
    bits = (largest.float().clamp(min=LEAST) * (1 / LARGEST)).view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def _places(pool: Tensor, slots: Tensor, pages: PackedPages) -> tuple[Tensor, Tensor]:
    """Returns where the numbers and the scales of rows begin, among all bytes."""
    (shape, page_rows), page_bytes = pages, pages.page_rows * pages.shape.row_bytes
    assert pool.dtype == torch.uint8 and pool.numel() % page_bytes == 0, f"{pool.numel()} bytes, pages of {page_bytes}"
    page, row = slots // page_rows * page_bytes, slots % page_rows
    return page + row * shape.value_bytes, page + page_rows * shape.value_bytes + row * shape.scale_bytes


def _spread(first: Tensor, count: int) -> Tensor:
    """Returns ``count`` adjacent indices from each first one, in one row."""
    return (first[:, None] + torch.arange(count, device=first.device)).flatten()
