"""Parts of tensors: rows are read in place, as they are contiguous in the file; columns are copied out of a map of it.

Weights that stay in 8 and 4 bits are read whole, one parameter after the other, then cut: their parts are those of scales, zero points
and tiles. So are numbers of 4 bits that are spelled out, one tensor after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.kernels.quantized import QuantizedWeight, join_halves, pack_codes, split_halves, unpack_codes
from hiserve.models.checkpoint import StoredTensor
from hiserve.models.names import TensorSource
from hiserve.models.reading import TORCH_DTYPES


def is_scattered(piece: TensorSource) -> bool:
    """Whether the part of a tensor that a parameter has lies in several places: columns, parts of matrices, of sections of rows."""
    return piece.cut is not None and (piece.cut.dim > 0 or bool(piece.cut.others))


def held_parts(
    held: Mapping[str, StoredTensor], table: Mapping[str, tuple[TensorSource, ...]]
) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint, by name, in place of those of which a table has some rows these rows.

    Tensors of other shapes than a table says are whole: they have two values a byte.
    """
    rows = {}
    for piece in (piece for pieces in table.values() for piece in pieces):
        tensor = held.get(piece.source)
        if piece.cut is None or is_scattered(piece) or tensor is None:
            continue
        if tensor.shape == piece.shape:
            num_bytes = piece.num_elements // piece.shape[0] * TORCH_DTYPES[tensor.dtype].itemsize
            begin = tensor.begin + piece.cut.begin * num_bytes
            rows[piece.source] = msgspec.structs.replace(tensor, shape=piece.part, begin=begin)
    return {**held, **rows}


def read_scattered(held: Mapping[str, StoredTensor], wanted: Sequence[tuple[TensorSource, Tensor]]) -> None:
    """Copies parts of tensors to their targets, on any device; raises as ``read_part``."""
    for piece, target in wanted:
        read_part(held[piece.source], piece, target)


def read_part(tensor: StoredTensor, piece: TensorSource, target: Tensor) -> None:
    """Copies the part of a tensor that a piece has to its target, on any device.

    Raises:
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    cut, stored = piece.cut, TORCH_DTYPES[tensor.dtype]
    assert cut is not None, piece.source
    size = piece.num_elements * stored.itemsize
    try:
        mapped = np.memmap(tensor.path, dtype=np.uint8, mode="c", offset=tensor.begin, shape=(size,))
    except ValueError:
        raise EOFError(f"{tensor.path.name} ends before byte {tensor.begin + size}") from None
    with torch.inference_mode():
        whole = torch.from_numpy(mapped).view(stored).view(piece.shape)
        parts = target.view(piece.part).split_with_sizes([end - begin for begin, end in cut.parts], cut.dim)
        for (begin, end), part in zip(cut.parts, parts, strict=True):
            part.copy_(whole.narrow(cut.dim, begin, end - begin))


def cut_whole(whole: Tensor, pieces: tuple[TensorSource, ...]) -> Tensor:
    """Returns a rank's part of a parameter of the whole model, which is drawn alike for every number of ranks, or was read."""
    parts, start = [], 0
    for piece in pieces:
        num_rows = piece.num_elements // (piece.shape[-1] if len(piece.shape) > 1 else 1)
        part, cut = whole[start : start + num_rows], piece.cut
        if cut is not None and piece.is_interleaved:  # what is drawn is not: all gates come first
            begin, end = cut.begin // 2, cut.end // 2
            part = torch.cat([each.narrow(cut.dim, begin, end - begin) for each in part.chunk(2, cut.dim)], cut.dim)
        elif cut is not None:
            part = torch.cat([part.narrow(cut.dim, begin, end - begin) for begin, end in cut.parts], cut.dim)
        parts.append(part)
        start += num_rows
    return torch.cat(parts)


def cut_quantized(weight: QuantizedWeight, pieces: tuple[TensorSource, ...], *, param: str) -> QuantizedWeight:
    """Returns a rank's part of a quantized parameter of the whole model: the same values, as no block or group is cut.

    Raises:
        ModelError: Columns are cut that are sorted by group. ``param`` is the setting that names the checkpoint.
    """
    if all(piece.cut is None for piece in pieces):
        return weight
    if weight.order is not None and any(piece.cut is not None and piece.cut.dim == 1 for piece in pieces):
        raise ModelError(
            f"the inputs of {pieces[0].source} are sorted by group (g_idx), and no rank of --tp has whole groups of them. Give a "
            "checkpoint without act-order.",
            param=param,
        )
    spec, (of_rows, of_columns) = weight.spec, weight.spec.group
    if spec.bits == 8:
        codes = join_halves(_part_of(split_halves(weight.codes), pieces))
        scales = _part_of(weight.scales, pieces, max(1, of_rows), of_columns)
        return QuantizedWeight(spec, (codes.shape[0], codes.shape[1]), codes, scales)
    codes = _part_of(unpack_codes(weight), pieces)
    scales = _part_of(weight.scales.T, pieces, 1, of_columns).T.contiguous()
    zeros = None if weight.zeros is None else _part_of(weight.zeros.T, pieces, 1, of_columns).T.contiguous()
    return QuantizedWeight(spec, (codes.shape[0], codes.shape[1]), pack_codes(codes, spec), scales, zeros, weight.order)


def _part_of(whole: Tensor, pieces: tuple[TensorSource, ...], of_rows: int = 1, of_columns: int = 1) -> Tensor:
    """Returns a rank's part of a tensor with an element for so many rows and columns of a parameter; 0 is all columns."""
    parts, start = [], 0
    for piece in pieces:
        num_rows, cut = -(-piece.shape[0] // of_rows), piece.cut
        part = whole[start : start + num_rows]
        if cut is not None and (cut.dim == 0 or of_columns):
            unit = of_columns if cut.dim else of_rows
            assert cut.begin % unit == 0 and cut.end % unit == 0, f"{piece.source} is cut at {cut} in units of {unit}"
            part = part.narrow(cut.dim, cut.begin // unit, (cut.end - cut.begin) // unit)
        parts.append(part)
        start += num_rows
    return torch.cat(parts)
