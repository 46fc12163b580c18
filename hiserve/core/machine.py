"""What this machine offers, found without torch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from hiserve.core.resolve import Machine

# Files of a control group, versions 2 and 1: limit, usage, and what of the usage is cache that gives way.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def probe(root: Path = Path("/")) -> Machine:
    """Returns cores and available memory, control-group limits included, CUDA memory and room for shared memory.

    Args:
        root: Where ``proc``, ``sys`` and ``dev`` are.
    """
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
    """Room in a file system; none where there is no such place."""
    try:
        status = os.statvfs(place)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def _read_table(path: Path) -> dict[str, int]:
    """Reads lines of a name, a number and perhaps a unit."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}


def _cuda_memory() -> int:
    """Total memory of the first CUDA device in bytes, asked of the driver; 0 without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    device, total = ctypes.c_int(), ctypes.c_size_t()
    found = driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
    if not found or driver.cuDeviceTotalMem_v2(ctypes.byref(total), device) != 0:
        return 0
    return total.value
