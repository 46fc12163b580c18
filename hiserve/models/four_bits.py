"""Tensors of checkpoints whose weights have 4 bits: which there are, what they must be, and what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hiserve.core.quantization import Quantization
from hiserve.errors import ModelError
from hiserve.kernels.quantized import MIDDLE
from hiserve.models.checkpoint import StoredTensor

WEIGHT = ".weight"
# Parts of a weight, by the last part of a tensor's name.
_COMPRESSED = {
    "weight_packed": "codes",
    "weight_scale": "scales",
    "weight_zero_point": "zeros",
    "weight_g_idx": "groups",
    "weight_shape": "shape",
}
_AWQ = {"qweight": "codes", "scales": "scales", "qzeros": "zeros"}
_GPTQ = _AWQ | {"g_idx": "groups"}
_PARTS = {"compressed-tensors": _COMPRESSED, "awq": _AWQ, "gptq": _GPTQ, "gptq_v2": _GPTQ}

_NUM = 8  # values of 4 bits in a whole number of 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # place among 8 of each value of a number, from its lowest bits on
_SCALE_DTYPES = ("F16", "BF16", "F32")
_DTYPES = ("I8", "I32", "I64", *_SCALE_DTYPES)

Parts = dict[str, StoredTensor]


@dataclass(frozen=True, slots=True, eq=False)
class FourBits:
    """A weight ``[rows, columns]`` value by value, its columns in the order in which groups are adjacent.

    Attributes:
        codes: uint8 ``[rows, columns]``, 0 to 15.
        scales: ``[groups, rows]``, as they are stored.
        zeros: uint8 ``[groups, rows]``, 0 to 16; None if all are 8.
        order: int32 ``[columns]``, the input of each column; None if it is the column itself.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None


def packed_weights(held: Mapping[str, StoredTensor], quantization: Quantization | None) -> dict[str, Parts]:
    """Returns the tensors of each weight in 4 bits by their part, and weights by the name that one of 16 bits would have."""
    found: dict[str, Parts] = {}
    parts = {} if quantization is None else _parts_of(quantization)
    for name, tensor in held.items():
        module, _, last = name.rpartition(".")
        if last in parts:
            found.setdefault(module + WEIGHT, {})[parts[last]] = tensor
    return found


def packed_names(held: Mapping[str, StoredTensor], quantization: Quantization | None) -> set[str]:
    """Returns the names of all of these tensors."""
    parts = {} if quantization is None else _parts_of(quantization)
    return {name for name in held if name.rpartition(".")[2] in parts}


def _parts_of(quantization: Quantization) -> dict[str, str]:
    spec = quantization.linears
    return {} if spec is None or spec.bits != 4 else _PARTS.get(quantization.method, {})


def check_packed_weight(
    parts: Parts, name: str, shape: tuple[int, ...], quantization: Quantization, *, param: str
) -> None:
    """Checks the tensors of a weight in 4 bits.

    Args:
        parts: Of the weight.
        name: Its name.
        shape: That config.json asks for.
        quantization: Of the checkpoint.
        param: The setting that names the checkpoint.

    Raises:
        ModelError: One is missing, or has another shape or type.
    """
    spec = quantization.linears
    assert spec is not None
    if len(shape) != 2 or shape[1] % spec.group[1] or shape[0] % _NUM:
        raise ModelError(
            f"{name} has weights of 4 bits for {list(shape)}: a scale for each {spec.group[1]} inputs does not divide them, or "
            f"outputs are not a multiple of {_NUM}. Take config.json and weights from one checkpoint.",
            param=param,
        )
    spelling = {part: last for last, part in _parts_of(quantization).items()}
    for part, tensor in parts.items():
        if tensor.dtype not in _DTYPES:
            raise ModelError(
                f"tensor {name.removesuffix('weight')}{spelling[part]} holds {tensor.dtype}; {', '.join(_DTYPES)} are supported "
                "there. Give another checkpoint.",
                param=param,
            )
    for part, (wanted, dtypes) in _wanted(quantization, *shape).items():
        found = parts.get(part)
        if found is None and part == "groups":
            continue
        if found is None:
            raise ModelError(
                f"{name} has weights of 4 bits, and the checkpoint lacks {name.removesuffix('weight')}{spelling[part]}. Is the "
                "download complete?",
                param=param,
            )
        if found.shape != wanted or found.dtype not in dtypes:
            raise ModelError(
                f"tensor {name.removesuffix('weight')}{spelling[part]} holds {found.dtype} {list(found.shape)}; "
                f"{' or '.join(dtypes)} {list(wanted)} is wanted. Take config.json and weights from one checkpoint.",
                param=param,
            )


def _wanted(
    quantization: Quantization, rows: int, columns: int
) -> Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Returns shape and types of the parts, which must be there but for the groups of columns."""
    spec = quantization.linears
    assert spec is not None
    groups, numbers, order = columns // spec.group[1], ("I32",), {"groups": ((columns,), ("I32", "I64"))}
    if quantization.method == "compressed-tensors":
        zeros = {"zeros": ((rows // _NUM, groups), numbers)} if spec.kind == "uint" else {}
        return {"codes": ((rows, columns // _NUM), numbers), "scales": ((rows, groups), _SCALE_DTYPES)} | zeros | order
    codes = (columns, rows // _NUM) if quantization.method == "awq" else (columns // _NUM, rows)
    return {
        "codes": (codes, numbers),
        "scales": ((groups, rows), _SCALE_DTYPES),
        "zeros": ((groups, rows // _NUM), numbers),
    } | order


def unpack_weight(parts: Mapping[str, Tensor], name: str, quantization: Quantization, *, param: str) -> FourBits:
    """Returns what the tensors of a weight stand for; arguments as for ``check_packed_weight``, with their contents.

    Raises:
        ModelError: Groups differ in size, or zero points of a symmetric format are not in the middle.
    """
    spec, method = quantization.linears, quantization.method
    assert spec is not None
    zeros = parts.get("zeros")
    if method == "compressed-tensors":
        codes, scales = _spread(parts["codes"], 1), parts["scales"].T
        if zeros is not None and spec.kind == "int":  # some are not packed, and are 0 in the middle
            zeros = _spread(zeros.flatten(), 0) if zeros.dtype == torch.int32 else zeros + MIDDLE
        elif zeros is not None:
            zeros = _spread(zeros, 0).T
    else:
        assert zeros is not None
        scales = parts["scales"]
        if method == "awq":
            codes, zeros = _spread(parts["codes"], 1, _AWQ_ORDER).T, _spread(zeros, 1, _AWQ_ORDER)
        else:
            codes, zeros = _spread(parts["codes"], 0).T, _spread(zeros, 1) + (1 if method == "gptq" else 0)
    if spec.kind == "int" and zeros is not None:
        if bool((zeros != MIDDLE).any()):
            raise ModelError(
                f"{name} has zero points other than {MIDDLE}, but config.json says that weights are symmetric. Set sym or symmetric to false.",
                param=param,
            )
        zeros = None
    order = None
    if "groups" in parts:
        order = _order(parts["groups"], spec.group[1], name, param)
        codes = codes if order is None else codes.index_select(1, order)
    zeros = None if zeros is None else zeros.contiguous()
    return FourBits(codes.contiguous(), scales.contiguous(), zeros, order)


def _spread(numbers: Tensor, dim: int, order: tuple[int, ...] = tuple(range(_NUM))) -> Tensor:
    """Returns the 4-bit values of whole numbers, uint8, eight times as many along a dimension."""
    places = [order.index(place) for place in range(_NUM)]
    values = torch.stack([(numbers >> 4 * place & 15).to(torch.uint8) for place in places], dim + 1)
    return values.flatten(dim, dim + 1)


def _order(groups: Tensor, size: int, name: str, param: str) -> Tensor | None:
    """Returns the columns sorted by their group, or None if they are.

    Raises:
        ModelError: A group has another number of columns than others.
    """
    adjacent = torch.arange(len(groups), device=groups.device) // size
    if torch.equal(groups.long(), adjacent):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), adjacent):
        raise ModelError(
            f"the groups of {name} do not have {size} inputs each, which config.json says. Take both from one checkpoint.",
            param=param,
        )
    return order.int()
