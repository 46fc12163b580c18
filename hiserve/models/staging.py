"""Stored tensors that are converted on the device: those of several parameters are read at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from hiserve.models.checkpoint import StoredTensor
from hiserve.models.names import TensorSource
from hiserve.models.reading import TORCH_DTYPES, plan_chunks, read_chunks
from hiserve.models.shard_weights import read_part

MAX_STAGED_BYTES = 2 << 30  # of stored tensors that are on the device at once, if one parameter does not need more

NO_CUTS: Mapping[Any, TensorSource] = MappingProxyType({})

K = TypeVar("K", bound=Hashable)


def cut_pieces(table: Mapping[str, Sequence[TensorSource]]) -> dict[str, TensorSource]:
    """Returns the pieces of a table that are parts of their tensors, by the names of these."""
    return {piece.source: piece for pieces in table.values() for piece in pieces if piece.cut is not None}


def stage(
    wanted: Mapping[str, Mapping[K, StoredTensor]], device: torch.device, cut: Mapping[K, TensorSource] = NO_CUTS
) -> Iterator[tuple[str, dict[K, Tensor]]]:
    """Yields each parameter, in order, with its tensors as they are stored, on the device, or the parts ``cut`` of them.

    Raises:
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    names: list[str] = []
    total = 0
    for name, tensors in wanted.items():
        num_bytes = sum(_dtype(each).itemsize * torch.Size(each.shape).numel() for each in tensors.values())
        if names and total + num_bytes > MAX_STAGED_BYTES:
            yield from _read({each: wanted[each] for each in names}, device, cut).items()
            names, total = [], 0
        names.append(name)
        total += num_bytes
    if names:
        yield from _read({each: wanted[each] for each in names}, device, cut).items()


def _read(
    wanted: Mapping[str, Mapping[K, StoredTensor]], device: torch.device, cut: Mapping[K, TensorSource]
) -> dict[str, dict[K, Tensor]]:
    staged: dict[str, dict[K, Tensor]] = {}
    whole, parts = [], []
    for name, tensors in wanted.items():
        staged[name] = {}
        for key, tensor in tensors.items():
            shape = cut[key].part if key in cut else tensor.shape
            target = staged[name][key] = torch.empty(shape, dtype=_dtype(tensor), device=device)
            if key in cut:
                parts.append((tensor, cut[key], target))
            else:
                whole.append((tensor, target))
    read_chunks(plan_chunks(whole), device)
    for tensor, piece, target in parts:
        read_part(tensor, piece, target)
    return staged


def _dtype(tensor: StoredTensor) -> torch.dtype:
    return TORCH_DTYPES[tensor.dtype]
