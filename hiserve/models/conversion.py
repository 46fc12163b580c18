"""Parameters whose elements a checkpoint packs, transposes or interleaves: read as they are stored, then converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hiserve.models.checkpoint import StoredTensor
from hiserve.models.names import MXFP4_GROUP, Form, TensorSource
from hiserve.models.staging import cut_pieces, stage

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_SCALE_BIAS = 127
_NO_SCALE = 255  # stands for NaN

Table = Mapping[str, tuple[TensorSource, ...]]


def read_converted(
    held: Mapping[str, StoredTensor], table: Table, parameters: Mapping[str, Tensor], device: torch.device
) -> None:
    """Fills every parameter of a table whose tensors are converted; arguments as for ``weights.read_parameters``.

    Raises:
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    converted = {name: pieces for name, pieces in table.items() if pieces[0].is_converted}
    wanted = {name: {piece.source: held[piece.source] for piece in pieces} for name, pieces in converted.items()}
    pairs = None  # of the packed ones
    for name, staged in stage(wanted, device, cut_pieces(converted)):
        first = converted[name][0]
        if first.form is Form.MXFP4 and pairs is None:
            pairs = mxfp4_pairs(parameters[name].dtype).to(device)
        _convert(first, list(staged.values()), parameters[name], pairs)


def _convert(first: TensorSource, parts: Sequence[Tensor], parameter: Tensor, pairs: Tensor | None) -> None:
    """Converts expert by expert, which bounds the memory."""
    count = first.shape[0]
    target = parameter.view(count, -1, *parameter.shape[1:]) if first.form is not Form.PLAIN else parameter
    for expert in range(count):
        rows = parts[0][expert]
        if first.form is Form.TRANSPOSED:
            rows = rows.mT
        elif first.form is Form.MXFP4:
            assert pairs is not None
            rows = unpack_mxfp4(rows, parts[1][expert], pairs)
        if first.is_interleaved:
            rows = rows.reshape(-1, 2, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)
        target[expert].copy_(rows)


def mxfp4_pairs(dtype: torch.dtype) -> Tensor:
    """Returns both values of each byte under each scale: ``[256 * 256, 2]``, scale by scale, on the CPU.

    Values are exact in bfloat16, float32 and float64 for scales up to 252; beyond these the largest are infinite.
    """
    exponents = torch.arange(256, dtype=torch.float64) - _SCALE_BIAS
    scales = torch.exp2(exponents).index_fill_(0, torch.tensor(_NO_SCALE), torch.nan)
    codes = torch.arange(256)
    values = torch.tensor(_FP4, dtype=torch.float64)[torch.stack((codes & 15, codes >> 4), -1)]
    return (scales[:, None, None] * values).to(dtype).flatten(0, 1)


def unpack_mxfp4(blocks: Tensor, scales: Tensor, pairs: Tensor) -> Tensor:
    """Returns the values ``[rows, groups * 32]`` of bytes ``[rows, groups, 16]`` with scales ``[rows, groups]``, uint8."""
    index = (scales.to(torch.int32)[..., None] * 256 + blocks).flatten()
    return pairs.index_select(0, index).view(blocks.shape[0], blocks.shape[1] * MXFP4_GROUP)
