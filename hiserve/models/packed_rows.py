"""Matrices of 4-bit values, two a byte, with a scale for each 32 of a row (DeepSeek-V4's experts).

They are unpacked when they are read, and are then of the model's type; see ``conversion`` for the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models.block_scales import SCALE_SUFFIX
from hiserve.models.checkpoint import StoredTensor
from hiserve.models.conversion import MAX_STAGED_BYTES, mxfp4_pairs, unpack_mxfp4
from hiserve.models.names import MXFP4_GROUP, TensorSource
from hiserve.models.reading import TORCH_DTYPES, plan_chunks, read_chunks

FP4 = "I8"  # how the format names two values a byte
_SCALE_DTYPE = "F8_E8M0"

Packed = Sequence[tuple[str, Tensor]]


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
    held: Mapping[str, StoredTensor], packed: Packed, device: torch.device, staged_bytes: int = MAX_STAGED_BYTES
) -> None:
    """Reads packed matrices into their parts of parameters.

    Args:
        held: The tensors of the checkpoint, by name; ``check_packed`` has accepted these.
        packed: Names, and parts of parameters of as many rows and columns, of a floating type.
        device: Of the parts.
        staged_bytes: Of stored tensors that are on the device at once, if one matrix does not need more.

    Raises:
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    pairs: dict[torch.dtype, Tensor] = {}
    for group in _groups(held, packed, staged_bytes):
        names = [name for source, _ in group for name in (source, source + SCALE_SUFFIX)]
        staged = {
            name: torch.empty(held[name].shape, dtype=TORCH_DTYPES[held[name].dtype], device=device) for name in names
        }
        read_chunks(plan_chunks([(held[name], tensor) for name, tensor in staged.items()]), device)
        for source, part in group:
            if part.dtype not in pairs:
                pairs[part.dtype] = mxfp4_pairs(part.dtype).to(device)
            codes = staged[source].view(torch.uint8).view(part.shape[0], -1, MXFP4_GROUP // 2)
            part.copy_(unpack_mxfp4(codes, staged[source + SCALE_SUFFIX].view(torch.uint8), pairs[part.dtype]))


def _groups(held: Mapping[str, StoredTensor], packed: Packed, staged_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields matrices that are staged together, in their order."""
    found: list[tuple[str, Tensor]] = []
    total = 0
    for source, part in packed:
        num_bytes = part.numel() // 2 + part.numel() // MXFP4_GROUP
        if found and total + num_bytes > staged_bytes:
            yield found
            found, total = [], 0
        found.append((source, part))
        total += num_bytes
    if found:
        yield found
