"""Matrices of 4-bit values, two a byte, with a scale for each 32 of a row (DeepSeek-V4's experts).

They are unpacked when they are read, and are then of the model's type; see ``conversion`` for the values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models.block_scales import SCALE_SUFFIX
from hiserve.models.checkpoint import StoredTensor
from hiserve.models.conversion import mxfp4_pairs, unpack_mxfp4
from hiserve.models.names import MXFP4_GROUP, TensorSource
from hiserve.models.shard_weights import cut_whole
from hiserve.models.staging import stage

FP4 = "I8"  # how the format names two values a byte
_SCALE_DTYPE = "F8_E8M0"


def check_packed(held: Mapping[str, StoredTensor], piece: TensorSource, param: str) -> None:
    """Checks that a packed matrix has its size and its scales; ``param`` is the setting that names the checkpoint.

    Raises:
        ModelError: It has not.
    """
    tensor = held[piece.source]
    folder = str(tensor.path.parent)
    if len(piece.shape) != 2 or piece.shape[1] % MXFP4_GROUP:
        raise ModelError(
            f"tensor {piece.source} holds {FP4} for {list(piece.shape)}; only matrices with rows of a multiple of {MXFP4_GROUP} "
            f"values are packed. Give another checkpoint than {folder!r}.",
            param=param,
        )
    rows, columns = piece.shape
    if tensor.shape != (rows, columns // 2):
        raise ModelError(
            f"tensor {piece.source} has shape {list(tensor.shape)}; config.json asks for {[rows, columns // 2]}, two values a "
            f"byte. Take both files in {folder!r} from one checkpoint.",
            param=param,
        )
    scale, wanted = held.get(piece.source + SCALE_SUFFIX), (rows, columns // MXFP4_GROUP)
    if scale is None or scale.shape != wanted or scale.dtype != _SCALE_DTYPE:
        found = "lacks them" if scale is None else f"has {scale.dtype} {list(scale.shape)}"
        raise ModelError(
            f"tensor {piece.source} holds packed values, whose scales are {_SCALE_DTYPE} {list(wanted)}, and {folder!r} {found}. "
            "Is the download complete?",
            param=param,
        )


def read_packed(
    held: Mapping[str, StoredTensor], packed: Sequence[tuple[TensorSource, Tensor]], device: torch.device
) -> None:
    """Reads packed matrices, each whole, into their parts of parameters.

    Args:
        held: The tensors of the checkpoint, by name; ``check_packed`` has accepted these.
        packed: Tensors, and parts of parameters of a floating type.
        device: Of the parts.

    Raises:
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    pairs: dict[torch.dtype, Tensor] = {}
    parts = {piece.source: (piece, part) for piece, part in packed}
    wanted = {source: {name: held[name] for name in (source, source + SCALE_SUFFIX)} for source in parts}
    for source, staged in stage(wanted, device):
        piece, part = parts[source]
        if part.dtype not in pairs:
            pairs[part.dtype] = mxfp4_pairs(part.dtype).to(device)
        codes, scales = (each.view(torch.uint8) for each in staged.values())
        whole = unpack_mxfp4(codes.view(codes.shape[0], -1, MXFP4_GROUP // 2), scales, pairs[part.dtype])
        part.copy_(cut_whole(whole, (piece,)))
