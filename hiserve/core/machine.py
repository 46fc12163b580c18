"""Cores, memory and devices of this machine, found without torch."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from hiserve.errors import ResourceError

GIB = 2**30

# Files of a control group, versions 2 and 1: limit, usage, statistics, and the name of the reclaimable cache in these.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine, as ``resolve`` needs it."""

    cores: int  # CPU cores this process may use
    memory_bytes: int  # memory still available to it, control-group limits included
    cuda_memory_bytes: tuple[int, ...]  # memory of each CUDA device, all of it
    shm_bytes: int = 0  # free in /dev/shm
    # Bytes of pages in the segment that a former server left under ``--host-cache-name``; 0 without one. The memory of
    # such segments counts as available.
    kept_bytes: int = 0


def probe(root: Path = Path("/"), platform: str = sys.platform) -> Machine:
    """Returns cores and available memory, control-group limits included, CUDA memory and room for shared memory.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` are.
        platform: As ``sys.platform``.

    Raises:
        ResourceError: The system is not Linux, whose ``/proc``, memfd and parent-death signals the engine needs.
    """
    if platform != "linux":
        raise ResourceError(
            f"hiserve serves models on Linux; this system is {platform}. Run it on Linux: in a virtual machine, a "
            "container or WSL 2."
        )
    groups = root / "sys/fs/cgroup"
    return Machine(
        cores=_cores(groups),
        memory_bytes=_available_memory(root / "proc/meminfo", groups),
        cuda_memory_bytes=_cuda_memory(),
        shm_bytes=_free_bytes(root / "dev/shm"),
    )


def _cores(groups: Path) -> int:
    """CPU cores this process may use; part of one counts as one."""
    cores = len(os.sched_getaffinity(0))
    if (path := groups / "cpu.max").is_file():
        quota, period = path.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    return cores


def _available_memory(meminfo: Path, groups: Path) -> int:
    available = _read_table(meminfo)["MemAvailable:"] * 1024
    for limit, usage, stat, reclaimable in _MEMORY_FILES:
        if (groups / limit).is_file() and (text := (groups / limit).read_text().strip()) != "max":
            used = int((groups / usage).read_text()) - _read_table(groups / stat)[reclaimable]
            available = min(available, int(text) - used)
    return max(0, available)


def _free_bytes(place: Path) -> int:
    """Free bytes of a file system; 0 if the path does not exist."""
    try:
        status = os.statvfs(place)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _read_table(path: Path) -> dict[str, int]:
    """Reads lines of a name, a number and perhaps a unit."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}


def free_cuda_bytes() -> int:
    """Returns the free memory of the first CUDA device; 0 if it cannot be read.

    NVML needs no context on the device, which would take memory. A worker sees only its own device.
    """
    driver, devices = _cuda_devices()
    nvml = _library("libnvidia-ml.so.1")
    if not devices or nvml is None or nvml.nvmlInit_v2() != 0:
        return 0
    bus, handle, memory = ctypes.create_string_buffer(64), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    found = (
        driver.cuDeviceGetPCIBusId(bus, len(bus), devices[0]) == 0  # of the first device that this process sees
        and nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle)) == 0
        and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
    )
    nvml.nvmlShutdown()
    return int(memory[1]) if found else 0  # total, free, used


def _cuda_memory() -> tuple[int, ...]:
    """Total memory of each CUDA device in bytes, by the driver."""
    driver, devices = _cuda_devices()
    found = []
    for device in devices:
        total = ctypes.c_size_t()
        if driver.cuDeviceTotalMem_v2(ctypes.byref(total), device) != 0:
            break  # later devices would get other numbers
        found.append(total.value)
    return tuple(found)


def _cuda_devices() -> tuple[Any, list[ctypes.c_int]]:
    """Returns the driver and the CUDA devices that this process sees, in order; none without a driver."""
    driver, count = _library("libcuda.so.1"), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None, []
    devices = [ctypes.c_int() for _ in range(count.value)]
    if any(driver.cuDeviceGet(ctypes.byref(device), number) != 0 for number, device in enumerate(devices)):
        return None, []
    return driver, devices


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
