"""Pins host memory for the device."""

from __future__ import annotations

import errno
import resource
from typing import Any

import torch

from hiserve.cache.storage.segment import GIB

_PORTABLE = 1  # every device of this process may copy to and from the memory
_MAPPED = 2  # kernels may read and write it by its own address


class CudaRegistrar:
    """Registers memory with CUDA, from any thread.

    A refusal is also what CUDA reports at that thread's next launch, so register from threads that launch nothing.

    Args:
        device: Index of the device whose context is used.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, num_bytes: int) -> None:
        """Pins memory of this process.

        Raises:
            OSError: CUDA or a limit on locked memory refuses.
        """
        with torch.cuda.device(self._device):
            error = self._cuda.cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)
        if error != self._cuda.cudaError.success:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.3g} GiB"
            fact = f"it cannot be pinned: {self._cuda.cudaGetErrorString(error)}, and ulimit -l is {locked}"
            raise OSError(errno.ENOMEM, fact)

    def unregister(self, address: int) -> None:
        """Unpins what was pinned at this address."""
        with torch.cuda.device(self._device):
            error = self._cuda.cudaHostUnregister(address)
        assert error == self._cuda.cudaError.success, f"unpinning {address:#x}: {self._cuda.cudaGetErrorString(error)}"
