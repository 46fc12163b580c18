"""Checks the names of a checkpoint's tensors, and each tensor, before it is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from hiserve.core.quantization import Quantization
from hiserve.errors import ModelError
from hiserve.models.block_scales import BLOCKS, FP8, check_scale
from hiserve.models.checkpoint import StoredTensor
from hiserve.models.four_bits import Parts, check_packed_weight
from hiserve.models.names import Form, TensorSource
from hiserve.models.packed_rows import FP4, check_packed
from hiserve.models.quantize import MADE
from hiserve.models.reading import TORCH_DTYPES

_WHOLE = ("I64", "I32")
_MAX_NAMES = 5


def check_tensor(
    held: Mapping[str, StoredTensor],
    four_bits: Mapping[str, Parts],
    piece: TensorSource,
    quantization: Quantization | None,
    *,
    param: str,
) -> None:
    """Checks the shape and the type of a tensor, and that those are there which belong to it.

    Args:
        held: The tensors of a checkpoint, by name.
        four_bits: Those of weights in 4 bits, as ``packed_weights`` returns them.
        piece: The tensor and its place in a parameter.
        quantization: Of the model.
        param: The setting that names the checkpoint.

    Raises:
        ModelError: It cannot be read.
    """
    if piece.source in four_bits:
        assert quantization is not None
        if piece.source in held:
            raise ModelError(
                f"the checkpoint has {piece.source} twice, in 4 bits and whole. Take all files from one checkpoint.",
                param=param,
            )
        check_packed_weight(four_bits[piece.source], piece.source, piece.shape, quantization, param=param)
        return
    spec = None if quantization is None else quantization.linears
    tensor = held[piece.source]
    folder = tensor.path.parent
    if quantization is not None and quantization.method == MADE and tensor.dtype in (FP8, FP4):
        raise ModelError(
            f"tensor {piece.source} holds {tensor.dtype}, and --quantize rounds weights that are whole. Leave it out.",
            param="quantize",
        )
    if tensor.dtype == FP4 and piece.form is Form.PLAIN and len(piece.shape) > 1:
        check_packed(held, piece, param)
        return
    if tensor.shape != piece.shape:
        raise ModelError(
            f"tensor {piece.source} has shape {list(tensor.shape)}; config.json asks for {list(piece.shape)}. Take both "
            f"files in {str(folder)!r} from one checkpoint.",
            param=param,
        )
    stored = TORCH_DTYPES.get(tensor.dtype)
    is_packed = piece.form is Form.MXFP4
    if piece.form is Form.NUMBERS:
        if tensor.dtype not in _WHOLE:
            raise ModelError(
                f"tensor {piece.source} holds {tensor.dtype}, and whole numbers ({' or '.join(_WHOLE)}) are supported there. Give "
                f"another checkpoint than {str(folder)!r}.",
                param=param,
            )
        return
    if tensor.dtype == FP8 and piece.form is Form.PLAIN:
        check_scale(held, piece, param, spec.group if spec is not None and spec.bits == 8 else BLOCKS)
    elif stored is None or tensor.dtype.startswith("F8") or stored.is_floating_point == is_packed:
        needed = "bytes (U8)" if is_packed else f"floating-point numbers, or {FP8} with scales of blocks,"
        raise ModelError(
            f"tensor {piece.source} holds {tensor.dtype}, and {needed} are supported there. Give another checkpoint than "
            f"{str(folder)!r}.",
            param=param,
        )


def compare(folder: Path, title: str, wanted: set[str], held: set[str], *, param: str) -> None:
    """Compares the names of tensors before anything is read.

    Args:
        folder: Of the checkpoint.
        title: Of the parameters, for messages.
        wanted: Names of the needed tensors.
        held: Names of the checkpoint's tensors, without ignored ones.
        param: The setting that names the checkpoint.

    Raises:
        ModelError: They differ.
    """
    missing, unexpected = wanted - held, held - wanted
    if missing:
        raise ModelError(f"{str(folder)!r} lacks {_named(missing)}. Is the download complete?", param=param)
    if unexpected:
        raise ModelError(
            f"{str(folder)!r} has {_named(unexpected)}, which {title} has no place for. Does config.json describe these files?",
            param=param,
        )


def _named(names: Collection[str]) -> str:
    shown = sorted(names)[:_MAX_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(shown)}{more}"
