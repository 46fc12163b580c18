"""What this machine offers, found without torch."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from hiserve.config import Machine

_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def probe() -> Machine:
    """Returns cores, available memory (control-group limits included) and CUDA memory."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_available_memory(),
        cuda_memory_bytes=_cuda_memory(),
    )


def _available_memory() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, usage in _CGROUP_LIMITS:
        if Path(limit).is_file() and (text := Path(limit).read_text().strip()) != "max":
            available = min(available, int(text) - int(Path(usage).read_text()))
    return max(0, available)


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
