"""Pins host memory for the device."""

from __future__ import annotations

import resource
from typing import Any

import torch

from hiserve.cache.pools.segment import GIB
from hiserve.errors import ResourceError

_PORTABLE = 1  # every device of this process may copy to and from the memory
_MAPPED = 2  # kernels may read and write it by its own address


class CudaRegistrar:
    """Registers memory with CUDA. May be used from any thread.

    Args:
        device: Index of the device whose context is used.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, num_bytes: int) -> None:
        """Pins memory of this process.

        Raises:
            ResourceError: CUDA or a limit on locked memory refuses.
        """
        with torch.cuda.device(self._device):
            error = self._cuda.cudaHostRegister(address, num_bytes, _PORTABLE | _MAPPED)
        if error != self._cuda.cudaError.success:
            limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
            locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / GIB:.3g} GiB"
            raise ResourceError(
                f"{num_bytes / GIB:.3g} GiB of the host cache cannot be pinned: {error}; locked memory is limited to "
                f"{locked} (ulimit -l). Raise that limit, or lower --host-cache-gib.",
                param="host_cache_gib",
            )

    def unregister(self, address: int) -> None:
        """Unpins what was pinned at this address."""
        with torch.cuda.device(self._device):
            error = self._cuda.cudaHostUnregister(address)
        assert error == self._cuda.cudaError.success, f"unpinning {address:#x}: {error}"
