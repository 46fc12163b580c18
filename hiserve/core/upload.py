"""Carries host arrays to the device in one asynchronous copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT_BYTES = 8

_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copies arrays to the device through one staging buffer, pinned on CUDA, without a host sync.

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
    moved = staging.to(device, non_blocking=True)
    return [
        moved[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, starts, strict=True)
    ]
