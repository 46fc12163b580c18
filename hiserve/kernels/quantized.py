"""Weights in 8 and 4 bits, in plain torch: their layout, the values that they stand for, and products with these."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hiserve.core.quantization import TILE_ROWS, QuantSpec

LARGEST = 448.0  # of E4M3
MIDDLE = 8  # the zero point of ``int``
PAIRED = 128  # columns in 8 bits whose halves are interleaved


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight ``[rows, columns]``; all tensors are contiguous and on one device.

    In 8 bits a value is its code times the scale of its row, or of its block. If columns are a multiple of 128, the bytes of
    each 128 are those of its two halves in turn: a number of 16 bits then holds a column of both. In 4 bits it is its code less a zero point,
    times the scale of its row and group of columns. Codes of 4 bits lie in tiles, which kernels read at once: of each
    ``2 * spec.half_tile`` columns of 64 rows, a number of 16 bits has a column of each quarter, the first in its lowest bits.
    Tiles are filled up with zeros.

    Attributes:
        spec: Of the storage.
        shape: Rows and columns.
        codes: float8_e4m3fn ``[rows, columns]``; or uint8 ``[ceil(rows / 64), ceil(columns / (2 * half)), 64, half]``.
        scales: float32 ``[rows]`` or ``[ceil(rows / 128), ceil(columns / 128)]``; in 4 bits of any type, ``[groups, rows]``.
        zeros: uint8 ``[groups, rows]``, zero points of ``uint``; None of other kinds.
        order: int32 ``[columns]``, the input of each column, of weights whose columns were sorted by group; else None.
    """

    spec: QuantSpec
    shape: tuple[int, int]
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.codes.device

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in (self.codes, self.scales, self.zeros, self.order) if each is not None)


def pack_codes(codes: Tensor, spec: QuantSpec) -> Tensor:
    """Returns 4-bit codes, uint8 ``[rows, columns]`` of 0 to 15, in the tiles of ``QuantizedWeight.codes``."""
    (rows, columns), half = codes.shape, spec.half_tile
    filled = F.pad(codes, (0, -columns % (2 * half), 0, -rows % TILE_ROWS))
    quarters = filled.view(-1, TILE_ROWS, filled.shape[1] // (2 * half), 4, half // 2)
    pairs = torch.stack((quarters[..., 0, :], quarters[..., 2, :]), -1)
    pairs |= torch.stack((quarters[..., 1, :], quarters[..., 3, :]), -1) << 4
    return pairs.flatten(-2).transpose(1, 2).contiguous()


def unpack_codes(weight: QuantizedWeight) -> Tensor:
    """Returns the 4-bit codes of a weight as ``pack_codes`` took them."""
    (rows, columns), tiles = weight.shape, weight.codes.transpose(1, 2)
    low, high = tiles.view(*tiles.shape[:3], -1, 2).unbind(-1)
    quarters = torch.stack((low & 15, low >> 4, high & 15, high >> 4), -2)
    return quarters.reshape(tiles.shape[0] * TILE_ROWS, -1)[:rows, :columns]


def join_halves(codes: Tensor) -> Tensor:
    """Returns codes of 8 bits ``[rows, columns]`` in the order of ``QuantizedWeight.codes``."""
    rows, columns = codes.shape
    if columns % PAIRED:
        return codes
    halves = codes.view(torch.uint8).view(rows, columns // PAIRED, 2, PAIRED // 2)
    return halves.transpose(2, 3).reshape(rows, columns).view(codes.dtype)


def split_halves(codes: Tensor) -> Tensor:
    """Returns codes as ``join_halves`` took them."""
    rows, columns = codes.shape
    if columns % PAIRED:
        return codes
    pairs = codes.view(torch.uint8).view(rows, columns // PAIRED, PAIRED // 2, 2)
    return pairs.transpose(2, 3).reshape(rows, columns).view(codes.dtype)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the values ``[rows, columns]`` of a weight, each rounded once from float32, or from float64 for float64."""
    wide = torch.promote_types(dtype, torch.float32)
    if weight.spec.bits == 8:
        codes = split_halves(weight.codes)
        return (codes.to(wide) * spread_scales(weight.scales, weight.spec.group, weight.shape)).to(dtype)
    group = weight.spec.group[1]
    zeros = MIDDLE if weight.zeros is None else weight.zeros.to(wide).repeat_interleave(group, 0).T
    values = (unpack_codes(weight).to(wide) - zeros) * weight.scales.to(wide).repeat_interleave(group, 0).T
    if weight.order is None:
        return values.to(dtype)
    return torch.empty(weight.shape, dtype=dtype, device=weight.device).index_copy_(
        1, weight.order.long(), values.to(dtype)
    )


def spread_scales(scales: Tensor, group: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Returns scales as they broadcast to a weight of 8 bits: ``[rows, 1]``, or those of blocks ``[rows, columns]``."""
    if scales.dim() == 1:
        return scales[:, None]
    spread = scales.repeat_interleave(group[0], 0)[: shape[0]]
    return spread.repeat_interleave(group[1], 1)[:, : shape[1]]


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, *, is_after_attention: bool = False
) -> Tensor:
    """Projects ``[T, columns]`` of any floating type, which inputs keep, and adds an optional ``[rows]``.

    The whole weight is spelled out for each product.
    """
    return F.linear(x, dequantize(weight, x.dtype), bias)


def quantize(weight: Tensor, spec: QuantSpec) -> QuantizedWeight:
    """Rounds ``[rows, columns]`` of any floating type as a spec says; of 4 bits those without zero points.

    In 8 bits the largest value of a row or a block becomes the largest of E4M3. In 4 bits the largest value of a group
    becomes, with its sign, the code of largest magnitude, -8: so all 16 codes are used.
    """
    rows, columns = weight.shape
    wide, (of_rows, group) = weight.float(), spec.group
    if spec.bits == 8:
        largest = wide.abs().amax(1)
        if group:
            filled = F.pad(wide.abs(), (0, -columns % group, 0, -rows % of_rows))
            largest = filled.view(-(-rows // of_rows), of_rows, -(-columns // group), group).amax((1, 3))
        scales = largest / LARGEST
        scales = torch.where(scales > 0, scales, 1.0)
        small = (wide / spread_scales(scales, spec.group, (rows, columns))).clamp_(-LARGEST, LARGEST)
        return QuantizedWeight(spec, (rows, columns), join_halves(small.to(torch.float8_e4m3fn)), scales)
    groups = wide.view(rows, columns // group, group)
    scales = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -MIDDLE
    scales = torch.where(scales == 0, 1.0, scales).to(torch.bfloat16)
    codes = (groups / scales.float()).round_().add_(MIDDLE).clamp_(0, 15).to(torch.uint8)
    packed = pack_codes(codes.view(rows, columns), spec)
    return QuantizedWeight(spec, (rows, columns), packed, scales[..., 0].T.contiguous())
