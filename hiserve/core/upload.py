"""Copies host arrays to the device, asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 8
# CUDA sends copies up to this size within its command stream. The copy engine executes larger ones, and may be busy with
# pages: on an H200 60 kB took 37 ms beside a load of 2 GiB, and 34 us by a kernel that reads over the link.
_MAX_COPY_BYTES = 8 << 10

_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to the device through one staging buffer, pinned on CUDA, without a host sync.

    Concurrent loads of pages do not delay it.

    Args:
        arrays: Of int32, int64, float64 or bool; any shape. They may change after the call.
        device: Of the result.

    Returns:
        One tensor for each array, of its shape and type; views of one buffer.
    """
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = staging.numpy()
    for array, start in zip(arrays, starts, strict=True):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    is_short = end <= _MAX_COPY_BYTES or device.type != "cuda"
    moved = staging.to(device, non_blocking=True) if is_short else _read_across(staging, device)
    return [
        moved[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]


def _read_across(staging: Tensor, device: torch.device) -> Tensor:
    """Copies pinned memory, a whole number of words, by a kernel of the device."""
    moved = torch.bitwise_or(mapped(staging.view(torch.int64), device), 0).view(torch.uint8)
    # torch tracks copies, not kernels, that read pinned memory: this copy keeps the staging buffer until here.
    moved[:_ALIGNMENT_BYTES].copy_(staging[:_ALIGNMENT_BYTES], non_blocking=True)
    return moved


def mapped(pinned: Tensor, device: torch.device) -> Tensor:
    """Returns pinned memory, int32 or int64 ``[n]``, as a tensor that kernels of the device read over the link."""
    return torch.as_tensor(_Mapped(pinned), device=device)


class _Mapped:
    """Pinned memory, as torch takes memory of a device from other libraries."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": f"<i{pinned.itemsize}",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }
