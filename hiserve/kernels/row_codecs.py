"""Rows in 8 bits, byte by byte as ``core.row_shapes`` lays them out, in plain torch.

These are the numbers of released engines: a row of DeepSeek-V4 has 448 in tiles of 64, each with a power of two as its scale,
then 64 in bfloat16, which were rotated. A key of its index has 128, and one scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hiserve.core.forward import LatentKV, LayerKV
from hiserve.core.row_shapes import LEAST_EXPONENT, PackedPages, PackedShape

LARGEST = 448.0  # of E4M3
LEAST = 1e-4  # the least magnitude that a scale follows


def pages_of(pool: Tensor, shape: PackedShape | None, page_rows: int) -> PackedPages | None:
    """Returns how a pool ``[slots, ...]`` holds rows in pages of so many: memory of bytes holds packed ones."""
    if pool.dtype != torch.uint8:
        return None
    assert shape is not None and pool.shape[-1] == shape.row_bytes, (pool.shape, shape)
    return PackedPages(shape, page_rows)


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
        # Of what is not finite no number is read: its scale is infinite.
        factors = largest.nan_to_num_(nan=torch.inf, posinf=torch.inf).clamp_(min=LEAST) * (1 / LARGEST)
        if (
            shape.has_pairs
        ):  # up to a number of bfloat16, whose products with numbers are then rounded once, in any kernel
            factors = ((factors.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        small, scales = wide / factors[..., None], factors.view(torch.uint8)
    else:
        exponents = scale_exponents(largest)
        small = torch.ldexp(wide, -exponents[..., None])
        scales = (exponents + 127).clamp_(0, 255).to(torch.uint8)
        scales = torch.nn.functional.pad(scales, (0, shape.scale_bytes - shape.num_tiles))
    small = small.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    if shape.has_pairs:
        small = small.view(len(small), 2, shape.scaled // 2).transpose(1, 2)
    small = small.flatten(1)
    values = torch.cat((small, narrow[:, shape.scaled :].contiguous().view(torch.uint8)), 1)
    place = (slots // pages.page_rows, slots % pages.page_rows)
    for parts, new in zip(_parts(pool, pages), (values, scales), strict=True):
        parts.index_put_(place, new)


def load_packed(pool: Tensor, slots: Tensor, pages: PackedPages) -> Tensor:
    """Returns the rows of slots, float32 ``[*slots.shape, shape.width]``; zeros for slot -1. As ``store_packed``."""
    shape, is_none, place = pages.shape, slots < 0, slots.clamp(min=0).flatten()
    values, scales = (each[place // pages.page_rows, place % pages.page_rows] for each in _parts(pool, pages))
    bits = values[:, : shape.scaled]
    if shape.has_pairs:
        bits = bits.reshape(len(bits), shape.scaled // 2, 2).transpose(1, 2)
    small = bits.contiguous().view(torch.float8_e4m3fn).float().view(-1, shape.num_tiles, shape.tile)
    if shape.has_wide_scales:
        scaled = small * scales.view(torch.float32)[..., None]
    else:
        scaled = torch.ldexp(small, scales[:, : shape.num_tiles, None].to(torch.int32) - 127)
    plain = values[:, shape.scaled :].contiguous().view(torch.bfloat16).float()
    rows = torch.cat((scaled.flatten(1), plain), 1)
    return rows.view(*slots.shape, shape.width).masked_fill_(is_none[..., None], 0)


def scale_exponents(largest: Tensor) -> Tensor:
    """Returns the least e, int32, with ``largest <= 448 * 2**e``, up to the rounding of 1/448; of bits, so that it is exact."""
    bits = (largest.float().clamp(min=LEAST) * (1 / LARGEST)).view(torch.int32)
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(torch.int32)


def store_heads(kv: LayerKV, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Writes keys and values into their slots in 8 bits: a head of a token has the least power of 2 that lets it fit as its scale.

    Args:
        kv: The layer's pool, with scales.
        slots: int64 ``[T]``.
        k: ``[T, num_kv_heads, head_dim]``, any floating type.
        v: Like ``k``.

    Returns:
        Keys and values as they are read from the pool, of the type they had: for what reads those of the step itself.
    """
    assert kv.scales is not None
    planes, scales = (kv.k, kv.v), kv.scales.new_zeros((*slots.shape, kv.scales.shape[1])).view(torch.uint8)
    rounded = []
    for which, (pool, x) in enumerate(zip(planes, (k, v), strict=True)):
        wide = x.float()
        # Of what is not finite no number is read: its scale is infinite.
        exponents = scale_exponents(wide.nan_to_num(nan=torch.inf, posinf=torch.inf).abs().amax(-1))
        exponents = exponents.clamp_(min=LEAST_EXPONENT)
        small = (wide * _powers_of_2(-exponents)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        pool.index_copy_(0, slots, small.view(torch.uint8))
        scales[:, which : 2 * x.shape[1] : 2] = (exponents + 127).to(torch.uint8)
        rounded.append((small.float() * _powers_of_2(exponents)).to(x.dtype))
    kv.scales.index_copy_(0, slots, scales.view(torch.int32))
    return rounded[0], rounded[1]


def load_heads(kv: LayerKV, slots: Tensor | slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of slots, ``[*slots.shape, num_kv_heads, head_dim]``; of packed ones as they were stored."""
    if isinstance(kv, LatentKV) and kv.packed is not None:
        rows = load_latents(kv, slots, dtype)[..., None, :]
        return rows, rows[..., : kv.to_keys.shape[2]]
    if kv.scales is None:
        return kv.k[slots].to(dtype), kv.v[slots].to(dtype)
    scales, num_heads = kv.scales[slots].view(torch.uint8).to(torch.int32) - 127, kv.k.shape[1]
    k, v = (
        _widened(pool[slots]).mul_(_powers_of_2(scales[..., which : 2 * num_heads : 2])).to(dtype)
        for which, pool in enumerate((kv.k, kv.v))
    )
    return k, v


def load_latents(kv: LatentKV, slots: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """Returns the rows of slots, ``[*slots.shape, rank + rope_dim]``; of packed ones as ``store_packed``."""
    if kv.packed is None:
        return kv.k[slots, 0].to(dtype)
    if isinstance(slots, slice):
        slots = torch.arange(slots.start, slots.stop, device=kv.k.device)
    return load_packed(kv.k[:, 0], slots, kv.packed).to(dtype)


def _widened(bits: Tensor) -> Tensor:
    """Returns finite numbers of E4M3 as float32. On a CPU torch's own conversion takes ten times as long."""
    wide = bits.to(torch.int16)
    return ((wide & 128) << 8 | (wide & 127) << 7).view(torch.float16).float().mul_(256.0)  # exponents differ by 8


def _powers_of_2(exponents: Tensor) -> Tensor:
    """Returns float32 ``[..., 1]`` of exponents from -126 on; infinite from 128 on."""
    return ((exponents + 127) << 23).view(torch.float32)[..., None]


def _parts(pool: Tensor, pages: PackedPages) -> tuple[Tensor, Tensor]:
    """Returns views of the numbers and of the scales of all rows, ``[num_pages, page_rows, bytes]`` each."""
    shape, page_rows = pages
    page_bytes = page_rows * shape.row_bytes
    assert pool.dtype == torch.uint8 and pool.numel() % page_bytes == 0, f"{pool.numel()} bytes, pages of {page_bytes}"
    parts = pool.view(-1, page_bytes).split_with_sizes(
        (page_rows * shape.value_bytes, page_rows * shape.scale_bytes), 1
    )
    values, scales = (each.view(each.shape[0], page_rows, -1) for each in parts)
    return values, scales
