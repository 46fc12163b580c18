"""What the machine offers, read from a /proc and a /sys made for the test."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hiserve.core import machine as machine_module
from hiserve.core.machine import probe
from hiserve.errors import ResourceError

MIB = 2**20
GROUPS = "sys/fs/cgroup"


def machine(root: Path, available_mib: int, files: dict[str, str]) -> Path:
    """Writes a machine with some memory available, and the files of its control group."""
    meminfo = f"MemTotal: 99999999 kB\nMemAvailable:   {available_mib * 1024} kB\nHugePages_Total: 0\n"
    for name, text in {"proc/meminfo": meminfo, **{f"{GROUPS}/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_2(limit: str, usage_mib: int, inactive_mib: int) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{usage_mib * MIB}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive_mib * MIB}\nactive_file 7\n",
    }


def test_without_a_control_group_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert probe(machine(tmp_path, 700, {})).memory_bytes == 700 * MIB


def test_a_control_group_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    assert probe(machine(tmp_path, 700, version_2("max", 650, 0))).memory_bytes == 700 * MIB


def test_the_limit_of_a_control_group_less_what_is_used(tmp_path: Path) -> None:
    assert probe(machine(tmp_path, 700, version_2(str(500 * MIB), 100, 0))).memory_bytes == 400 * MIB


def test_cached_files_give_way(tmp_path: Path) -> None:
    assert probe(machine(tmp_path, 700, version_2(str(500 * MIB), 450, 400))).memory_bytes == 450 * MIB


def test_the_machine_may_have_less_than_the_limit(tmp_path: Path) -> None:
    assert probe(machine(tmp_path, 300, version_2(str(500 * MIB), 100, 0))).memory_bytes == 300 * MIB


def test_used_beyond_the_limit_is_nothing_left(tmp_path: Path) -> None:
    assert probe(machine(tmp_path, 300, version_2(str(500 * MIB), 600, 0))).memory_bytes == 0


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": str(500 * MIB),
        "memory/memory.usage_in_bytes": str(450 * MIB),
        "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {400 * MIB}\n",
    }
    assert probe(machine(tmp_path, 700, files)).memory_bytes == 450 * MIB


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("100000", 1), ("max", None), ("99999900000", None)])
def test_cores_are_those_of_the_process_within_the_quota(tmp_path: Path, quota: str, cores: int | None) -> None:
    expected = len(os.sched_getaffinity(0)) if cores is None else cores
    assert probe(machine(tmp_path, 700, {"cpu.max": f"{quota} 100000\n"})).cores == expected


def test_this_machine_has_cores_and_memory() -> None:
    found = probe()
    assert found.cores >= 1
    assert found.memory_bytes > 64 * MIB


def test_room_for_shared_memory_is_that_of_its_file_system(tmp_path: Path) -> None:
    root = machine(tmp_path, 700, {})
    assert probe(root).shm_bytes == 0
    (root / "dev/shm").mkdir(parents=True)
    status = os.statvfs(tmp_path)
    assert probe(root).shm_bytes == pytest.approx(status.f_bavail * status.f_frsize, rel=0.1)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_than_linux_is_one_clear_line(platform: str) -> None:
    with pytest.raises(ResourceError, match=f"this system is {platform}. Run it on Linux"):
        probe(platform=platform)


def driver(memory: list[int], failing: str = "") -> Any:
    """libcuda of a machine with some devices."""

    def get_count(count: Any) -> int:
        count._obj.value = len(memory)
        return 0

    def get(device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return int(failing == "get")

    def total_memory(total: Any, device: Any) -> int:
        total._obj.value = memory[device.value - 10]
        return 0

    return SimpleNamespace(
        cuInit=lambda _flags: int(failing == "init"),
        cuDeviceGetCount=get_count,
        cuDeviceGet=get,
        cuDeviceTotalMem_v2=total_memory,
    )


@pytest.mark.parametrize(
    ("library", "found"),
    [
        (driver([80 * MIB, 40 * MIB]), (80 * MIB, 40 * MIB)),
        (driver([]), ()),
        (driver([80 * MIB], failing="init"), ()),
        (driver([80 * MIB], failing="get"), ()),
        (None, ()),
    ],
)
def test_the_memory_of_every_device_is_asked_of_the_driver(
    library: Any, found: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "_library", lambda name: library if name == "libcuda.so.1" else None)
    assert probe(machine(tmp_path, 700, {})).cuda_memory_bytes == found
