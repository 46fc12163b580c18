"""Carries host arrays to the device, asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 8
# CUDA sends so much along with its commands; more is left to the copy engine, which may be busy with pages: on an H200
# 60 kB took 37 ms beside a load of 2 GiB, and 34 us where a kernel read them across the link.
_MAX_COPY_BYTES = 8 << 10

_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to the device through one staging buffer, pinned on CUDA, without a host sync.

    Pages that are loaded meanwhile do not hold it up.

    Args:
        arrays: Of int32, int64, float64 or bool; any shape. They may change after the call.
        device: Where to.

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
    words = torch.as_tensor(_Mapped(staging), device=device)
    moved = torch.bitwise_or(words, 0).view(torch.uint8)
    # torch knows of copies, not of kernels, that read pinned memory: it keeps this until the stream has come here.
    moved[:_ALIGNMENT_BYTES].copy_(staging[:_ALIGNMENT_BYTES], non_blocking=True)
    return moved


class _Mapped:
    """Pinned memory as the device sees it, as words.

    Args:
        staging: uint8 ``[n]``, n a multiple of ``_ALIGNMENT_BYTES``.
    """

    def __init__(self, staging: Tensor) -> None:
        self._staging = staging
        self.__cuda_array_interface__ = {
            "shape": (staging.numel() // _ALIGNMENT_BYTES,),
            "typestr": "<i8",
            "data": (staging.data_ptr(), False),
            "version": 2,
        }
