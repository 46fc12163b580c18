"""Device memory that the ranks of one host map into each other's address space, by CUDA's handles for processes.

Each rank has a ``CUDA_VISIBLE_DEVICES`` of its own: a handle opens memory of a device that the process does not see otherwise. Where CUDA refuses, no rank
has the memory.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from hiserve.distributed.shard import Shard

_HANDLE_BYTES = 64
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Store(Protocol):
    """Of torch: all ranks have it."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a value."""

    def get(self, key: str, /) -> bytes:
        """Returns a value, as soon as it is set."""


class Driver(Protocol):
    """Calls on the current device. Each raises ``RuntimeError`` if CUDA refuses."""

    def allocate(self, num_bytes: int) -> int:
        """Returns the address of new memory, of zeros."""

    def free(self, address: int) -> None:
        """Frees it, after all that use it."""

    def handle_of(self, address: int) -> bytes:
        """Returns a handle of memory from ``allocate``, for other processes."""

    def open(self, handle: bytes) -> int:
        """Maps the memory of another process; returns the address."""

    def close(self, address: int) -> None:
        """Ends that."""


class PeerMemory:
    """As many bytes on the device of each rank, mapped by all of them.

    Attributes:
        addresses: Where each rank's bytes begin, in this process.
    """

    def __init__(self, driver: Driver, shard: Shard, addresses: list[int]) -> None:
        self.addresses = addresses
        self._driver, self._shard = driver, shard

    def close(self) -> None:
        """Ends the mapping. The first rank, which ends last, frees its bytes; the others' may be mapped there, and end with their process.

        Raises:
            RuntimeError: CUDA refuses.
        """
        for rank, address in enumerate(self.addresses):
            if rank != self._shard.rank:
                self._driver.close(address)
        if self._shard.rank == 0:
            self._driver.free(self.addresses[0])


def map_memory(driver: Driver, store: Store, shard: Shard, num_bytes: int) -> PeerMemory | str:
    """Allocates bytes on each rank and maps those of all; every rank calls this.

    Args:
        driver: Of this rank's device.
        store: Of all ranks.
        shard: Of this rank.
        num_bytes: Of each rank.

    Returns:
        The same on all ranks: the memory, which no rank has written then; or why one of them cannot map it.
    """
    own, failure = 0, ""
    opened: dict[int, int] = {}
    try:
        own = driver.allocate(num_bytes)
        store.set(f"handle {shard.rank}", driver.handle_of(own).hex())
    except RuntimeError as error:
        failure = str(error)
        store.set(f"handle {shard.rank}", "")
    for rank in range(shard.size):
        handle = bytes.fromhex(store.get(f"handle {rank}").decode())
        if rank != shard.rank and handle and not failure:
            try:
                opened[rank] = driver.open(handle)
            except RuntimeError as error:
                failure = str(error)
    store.set(f"failure {shard.rank}", failure)
    failures = [store.get(f"failure {rank}").decode() for rank in range(shard.size)]
    if any(failures):
        for address in opened.values():
            driver.close(address)
        store.set(f"closed {shard.rank}", "")
        for rank in range(shard.size):
            store.get(f"closed {rank}")  # before it is freed
        if own:
            driver.free(own)
        return next(f"rank {rank}: {each}" for rank, each in enumerate(failures) if each)
    return PeerMemory(driver, shard, [opened.get(rank, own) for rank in range(shard.size)])


class CudaDriver:
    """The driver of the current device, which has a context; see ``Driver``."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._check("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        try:
            self._check("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            self._check("cuCtxSynchronize")
        except RuntimeError:
            self.free(address.value)
            raise
        return address.value

    def free(self, address: int) -> None:
        self._check("cuMemFree_v2", ctypes.c_uint64(address))

    def handle_of(self, address: int) -> bytes:
        handle = _Handle()
        self._check("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._check("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_PEER_ACCESS))
        return address.value

    def close(self, address: int) -> None:
        self._check("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _check(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise RuntimeError(f"{name} answered {code}")


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which calls take by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * _HANDLE_BYTES),)
