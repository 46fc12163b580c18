"""Stored tensors that are converted on the device: those of several parameters are read at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from hiserve.models.checkpoint import StoredTensor
from hiserve.models.reading import TORCH_DTYPES, plan_chunks, read_chunks

MAX_STAGED_BYTES = 2 << 30  # of stored tensors that are on the device at once, if one parameter does not need more

K = TypeVar("K", bound=Hashable)


def stage(
    wanted: Mapping[str, Mapping[K, StoredTensor]], device: torch.device
) -> Iterator[tuple[str, dict[K, Tensor]]]:
    """Yields each parameter, in order, with its tensors as they are stored, on the device.

    Raises:
        OSError: A file cannot be read; ``EOFError``: it is shorter than it was.
    """
    names: list[str] = []
    total = 0
    for name, tensors in wanted.items():
        num_bytes = sum(_dtype(each).itemsize * torch.Size(each.shape).numel() for each in tensors.values())
        if names and total + num_bytes > MAX_STAGED_BYTES:
            yield from _read({each: wanted[each] for each in names}, device).items()
            names, total = [], 0
        names.append(name)
        total += num_bytes
    if names:
        yield from _read({each: wanted[each] for each in names}, device).items()


def _read(wanted: Mapping[str, Mapping[K, StoredTensor]], device: torch.device) -> dict[str, dict[K, Tensor]]:
    staged = {
        name: {key: torch.empty(each.shape, dtype=_dtype(each), device=device) for key, each in tensors.items()}
        for name, tensors in wanted.items()
    }
    targets = [(tensor, staged[name][key]) for name, tensors in wanted.items() for key, tensor in tensors.items()]
    read_chunks(plan_chunks(targets), device)
    return staged


def _dtype(tensor: StoredTensor) -> torch.dtype:
    return TORCH_DTYPES[tensor.dtype]
