"""Scales of FP8 checkpoints: of a weight, of each row, or of each block of 128 by 128 (DeepSeek-V3, arXiv:2412.19437).

Weights that do not stay in FP8 are multiplied by their scales when they are read, and are then of the model's type.
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
BLOCKS = (BLOCK, BLOCK)
_TITLES = {
    BLOCKS: f"one scale for each block of {BLOCK} by {BLOCK}",
    (1, 0): "one scale for each row",
    (0, 0): "one scale",
}

Places = Collection[tuple[TensorSource, Tensor]]  # tensors, each with its part of a parameter
Scaled = list[tuple[TensorSource, Tensor, Tensor]]


def scale_names(held: Mapping[str, StoredTensor]) -> set[str]:
    """Returns the names of the scales of FP8 and packed weights among the tensors of a checkpoint."""
    return {
        source + SCALE_SUFFIX
        for source, tensor in held.items()
        if tensor.dtype in _SCALED_DTYPES and source + SCALE_SUFFIX in held
    }


def check_scale(
    held: Mapping[str, StoredTensor], piece: TensorSource, param: str, group: tuple[int, int] = BLOCKS
) -> None:
    """Checks that an FP8 weight has scales, each of a ``group`` of rows and columns, where 0 is all.

    ``param`` is the setting that names the checkpoint.

    Raises:
        ModelError: They are missing, of another shape or type, or the weight is no matrix.
    """
    folder = str(held[piece.source].path.parent)
    if len(piece.shape) != 2:
        raise ModelError(
            f"tensor {piece.source} holds {FP8} in the shape {list(piece.shape)}; only matrices have scales. "
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
    wanted, *others = _shapes(piece.shape, group)
    if scale.shape not in (wanted, *others) or scale.dtype not in _SCALE_DTYPES:
        raise ModelError(
            f"tensor {piece.source}{SCALE_SUFFIX} holds {scale.dtype} {list(scale.shape)}; {' or '.join(_SCALE_DTYPES)} "
            f"{list(wanted)} is wanted, {_TITLES[group]}. Give another checkpoint than {folder!r}.",
            param=param,
        )


def check_values(scales: Mapping[str, Tensor], param: str) -> None:
    """Checks scales that have been read, of any floating type, by name; ``param`` as for ``check_scale``.

    Raises:
        ModelError: One is 0, NaN or infinite.
    """
    if not scales:
        return
    good = torch.stack([((wide := each.float()).isfinite() & (wide != 0)).all() for each in scales.values()])
    for name, is_good in zip(scales, good.tolist(), strict=True):
        if not is_good:
            raise ModelError(
                f"tensor {name} has a scale that is 0, NaN or infinite, and weights would be too. Fetch the checkpoint again.",
                param=param,
            )


def scaled_weights(held: Mapping[str, StoredTensor], places: Places, device: torch.device) -> Scaled:
    """Returns each FP8 weight, memory for all of its scales, and the part of a parameter that it, or its part, fills.

    Args:
        held: The tensors of the checkpoint, by name; ``check_scale`` has accepted those of scales.
        places: Parts of parameters are of any floating type.
        device: Of the memory for scales, which is float32 and not yet written.
    """
    return [
        (piece, torch.empty(held[piece.source + SCALE_SUFFIX].shape, dtype=torch.float32, device=device), weight)
        for piece, weight in places
        if held[piece.source].dtype == FP8
    ]


def multiply(weights: Scaled, param: str) -> None:
    """Multiplies weights in place by their scales, which have been read; each product is rounded once.

    Raises:
        ModelError: As ``check_values``.
    """
    check_values({piece.source + SCALE_SUFFIX: scales for piece, scales, _ in weights}, param)
    for piece, scales, weight in weights:
        wide = torch.promote_types(weight.dtype, torch.float32)
        has_blocks = scales.dim() == 2 and scales.shape == _num_blocks(piece.shape)
        rows, columns = (
            torch.cat([torch.arange(*span, device=scales.device) for span in piece.spans(dim)]) for dim in (0, 1)
        )
        if has_blocks:
            rows, factors = rows // BLOCK, scales.index_select(1, columns // BLOCK)
        else:
            factors = scales.flatten().expand(piece.shape[0])[:, None]
        for part, its in zip(torch.split(weight, _STRIPE), torch.split(rows, _STRIPE), strict=True):
            part.copy_(part.to(wide) * factors.index_select(0, its))


def _shapes(shape: tuple[int, ...], group: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes that scales of a weight may have, the usual one first."""
    if group == BLOCKS:
        return (_num_blocks(shape),)
    return ((shape[0], 1), (shape[0],)) if group[0] else ((), (1,), (1, 1))


def _num_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // BLOCK) for size in shape)
