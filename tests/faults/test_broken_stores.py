"""Stores that are full, slow, broken or full of lies, and bits that flip: they cost hits, and no token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from hiserve.bench.soak.faults import inject
from hiserve.config.options import make_options
from tests.e2e.live import Live
from tests.faults.harness import Crowd, check_idle, open_files, serving, worker_pid
from tests.helpers.waiting import PATIENCE_S

SEED = 51
# A file system of its own, which nobody else sees: its size, where it is mounted, the command in it.
NAMESPACE = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"', "sh")


def with_file_system(size: str, folder: Path) -> tuple[str, ...]:
    """What stands before a command that finds a file system of this size in a folder."""
    made = (*NAMESPACE, size, str(folder))
    tried = subprocess.run([*made, "true"], capture_output=True, check=False)
    assert not tried.returncode, (
        f"a full file system is mounted in a user namespace, which this machine does not allow: {tried.stderr.decode()}"
        "Allow it (sysctl kernel.unprivileged_userns_clone=1, or a container that may unshare)."
    )
    return made


def fill(path: Path) -> None:
    """Writes a file until there is no room for more."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    left = os.statvfs(path.parent).f_bavail
    assert left == 0, f"{left} blocks are left"


def stats_of(live: Live) -> dict[str, Any]:
    """What the only worker's cache did."""
    (replica,) = httpx.get(f"{live.url}/cache/stats", timeout=PATIENCE_S).raise_for_status().json()["replicas"]
    return dict(replica)


async def talk(live: Live, seed: int, answered: int, **options: Any) -> Crowd:
    """Lets a crowd have so many answers, and sees that the worker is the same as before and nothing is held."""
    worker, files = worker_pid(live), open_files(live)
    async with Crowd(live.url, seed, **options).talking() as crowd:
        await crowd.until("answered", answered)
    await asyncio.to_thread(check_idle, live, files)
    assert worker_pid(live) == worker
    return crowd


@pytest.mark.long
async def test_a_store_that_may_write_nothing_more(tmp_path: Path) -> None:
    """The limit of a file's size: writes fail as on a full disk, from one moment to the next."""
    with serving(tmp_path, "--store", f"file:{tmp_path}/store") as live:
        await talk(live, SEED, 8)
        stored = stats_of(live)["uploads"]["num_fulfilled"]
        assert stored > 0
        resource.prlimit(worker_pid(live), resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        await talk(live, SEED + 1, 10)
        found = stats_of(live)
        assert sum(found["uploads"]["unfulfilled"].values()) > 0, found["uploads"]
        assert found["tiers"]["store"]["last_error"], found["tiers"]["store"]


async def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    """Far smaller than ``--store-gib`` promises."""
    store = tmp_path / "store"
    store.mkdir(0o700)
    with serving(
        tmp_path, "--store", f"file:{store}", before=with_file_system("200k", store), worker="hiserve.engine.worker"
    ) as live:
        await talk(live, SEED + 2, 12)
        found = stats_of(live)
        assert found["uploads"]["num_fulfilled"] > 0 and sum(found["uploads"]["unfulfilled"].values()) > 0
        assert "space" in found["tiers"]["store"]["last_error"]


async def test_a_shared_memory_that_is_full_when_a_worker_starts_again(tmp_path: Path) -> None:
    with serving(
        tmp_path,
        "--host-cache-name",
        "full",
        "--host-cache-gib",
        "0.022",
        before=with_file_system("30m", Path("/dev/shm")),
    ) as live:
        shared = Path(f"/proc/{live.process.pid}/root/dev/shm")
        assert (shared / "hiserve-full").exists()
        await talk(live, SEED + 3, 6)
        fill(shared / "filler")
        before = worker_pid(live)
        async with Crowd(live.url, SEED + 4).talking() as crowd:
            await crowd.until("answered", 3)
            subprocess.run(["kill", "-9", str(before)], check=True)
            await crowd.until("answered", 8)
        assert worker_pid(live) != before
        assert stats_of(live)["loads"]["num_fulfilled"] > 0


@pytest.mark.parametrize(
    ("worker", "flags"),
    [
        pytest.param("stall_s=0.02,failing=0.3,lying=0.3", ("--store-prefetch", "wait"), marks=pytest.mark.wide),
        pytest.param("stall_s=0.1", ("--store-prefetch-timeout-s", "0.05"), marks=pytest.mark.long),
    ],
    ids=["slow, failing and lying", "stalled"],
)
async def test_a_store_that_cannot_be_relied_on(tmp_path: Path, worker: str, flags: tuple[str, ...]) -> None:
    with serving(tmp_path, "--store", f"file:{tmp_path}/store", *flags, worker=f"tests.faults.worker {worker}") as live:
        for index in range(3):  # what the device and the host lose has to come from the store
            await talk(live, SEED + 5 + index, 12)
            httpx.post(f"{live.url}/flush_cache", timeout=PATIENCE_S).raise_for_status()
        prefetches = stats_of(live)["prefetches"]
        assert prefetches["num_wanted"] > 0 and sum(prefetches["unfulfilled"].values()) > 0, prefetches


@pytest.mark.wide  # in every run: test_everything_at_once.py
async def test_bits_that_flip_in_what_is_cached(tmp_path: Path) -> None:
    """On the host and in the store, again and again, while users talk."""
    rng = np.random.default_rng(SEED)
    store = f"file:{tmp_path}/store"
    config = make_options(store=store)
    with serving(tmp_path, "--store", store, "--cache-verify", "all", "--store-prefetch", "wait") as live:
        processes = live.info()["processes"]
        roles = {processes["scheduler"]: "scheduler", worker_pid(live): "worker"}

        async def flip() -> None:
            while True:
                await asyncio.sleep(rng.exponential(0.1))
                for fault in ("flip-host", "flip-store"):
                    await asyncio.to_thread(inject, fault, config, roles, rng)

        flipping = asyncio.create_task(flip())
        await talk(live, SEED + 6, 30)
        flipping.cancel()
        assert stats_of(live)["loads"]["unfulfilled"]["checksum"] > 0
