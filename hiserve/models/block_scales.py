"""FP8 checkpoints whose weights have a scale for each block of 128 by 128 (DeepSeek-V3, arXiv:2412.19437).

Weights are multiplied by their scales when they are read, and are then of the model's type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from hiserve.errors import ModelError
from hiserve.models.checkpoint import StoredTensor
from hiserve.models.names import TensorSource
from hiserve.models.quantize import BLOCK

FP8 = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"
_SCALE_DTYPES = ("F32", "BF16", "F8_E8M0")  # the last are powers of 2
_SCALED_DTYPES = (FP8, "I8")  # the second are ``packed_rows``
_STRIPE = 16 * BLOCK  # rows that are multiplied at once

Scaled = list[tuple[StoredTensor, Tensor, Tensor]]


def scale_names(held: Mapping[str, StoredTensor]) -> set[str]:
    """Returns the names of the scales of FP8 and packed weights among the tensors of a checkpoint."""
    return {
        source + SCALE_SUFFIX
        for source, tensor in held.items()
        if tensor.dtype in _SCALED_DTYPES and source + SCALE_SUFFIX in held
    }


def check_scale(held: Mapping[str, StoredTensor], piece: TensorSource, param: str) -> None:
    """Checks that an FP8 weight has scales; ``param`` is the setting that names the checkpoint.

    Raises:
        ModelError: They are missing, of another shape or type, or the weight is no matrix.
    """
    folder = str(held[piece.source].path.parent)
    if len(piece.shape) != 2:
        raise ModelError(
            f"tensor {piece.source} holds {FP8} in the shape {list(piece.shape)}; only matrices have scales of blocks. "
            f"Give a checkpoint with a tensor for each matrix instead of {folder!r}.",
            param=param,
        )
    scale = held.get(piece.source + SCALE_SUFFIX)
    if scale is None:
        raise ModelError(
            f"tensor {piece.source} holds {FP8}, and {folder!r} lacks its scales, {piece.source}{SCALE_SUFFIX}. Is the "
            "download complete?",
            param=param,
        )
    wanted = _num_blocks(piece.shape)
    if scale.shape != wanted or scale.dtype not in _SCALE_DTYPES:
        raise ModelError(
            f"tensor {piece.source}{SCALE_SUFFIX} holds {scale.dtype} {list(scale.shape)}; {' or '.join(_SCALE_DTYPES)} "
            f"{list(wanted)} is wanted, one scale for each block of {BLOCK} by {BLOCK}. Give another checkpoint than "
            f"{folder!r}.",
            param=param,
        )


def scaled_weights(
    held: Mapping[str, StoredTensor], wanted: Collection[tuple[str, Tensor]], device: torch.device
) -> Scaled:
    """Returns for each FP8 weight the tensor of its scales, memory for them, and the part of a parameter that it fills.

    Args:
        held: The tensors of the checkpoint, by name. That of the scales of a weight ``[n, m]`` is
            ``[ceil(n / BLOCK), ceil(m / BLOCK)]``, of one of ``_SCALE_DTYPES``.
        wanted: Names of tensors with their parts of parameters, each of the tensor's shape and of any floating type.
        device: Of the memory for scales, which is float32 and not yet written.
    """
    found = []
    for source, weight in wanted:
        if held[source].dtype == FP8:
            scale = held[source + SCALE_SUFFIX]
            found.append((scale, torch.empty(scale.shape, dtype=torch.float32, device=device), weight))
    return found


def multiply(weights: Scaled) -> None:
    """Multiplies weights in place by their scales, which have been read; each product is rounded once."""
    for _, scales, weight in weights:
        wide = torch.promote_types(weight.dtype, torch.float32)
        for first in range(0, weight.shape[0], _STRIPE):
            part = weight[first : first + _STRIPE]
            factors = scales[first // BLOCK : (first + _STRIPE) // BLOCK]
            factors = factors.repeat_interleave(BLOCK, 0)[: part.shape[0]]
            part.copy_(part.to(wide) * factors.repeat_interleave(BLOCK, 1)[:, : part.shape[1]])


def _num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)
