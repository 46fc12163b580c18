"""Faults injected from outside: signals to the server's processes, bit flips in cached pages."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hiserve.bench.options import Fault
from hiserve.cache.storage.records import NO_CHECKSUM, PageState
from hiserve.cache.storage.segment import Segment, segment_path
from hiserve.config.options import Options
from hiserve.errors import ConfigError

MAX_FLIPPED = 4
NAME_LENGTH = 64  # of a page's file in a store
MEMFD = "/memfd:hiserve-host-cache"
# The process that a fault hits, and its signal.
SIGNALS: dict[Fault, tuple[str, signal.Signals]] = {
    "kill-worker": ("worker", signal.SIGKILL),
    "hang-worker": ("worker", signal.SIGSTOP),
    "kill-scheduler": ("scheduler", signal.SIGKILL),
}
# While these last, streams may end with an error.
FAILING: tuple[Fault, ...] = ("kill-scheduler",)


class InjectedFault(NamedTuple):
    """What a fault did.

    Attributes:
        what: In words; empty if there was nothing to strike.
        victim: The process that has to be replaced; 0 for none.
    """

    what: str
    victim: int = 0


def possible(config: Options, wanted: tuple[Fault, ...], recovery_limit_s: float) -> list[Fault]:
    """Returns the faults to inject.

    Args:
        config: The server's settings.
        wanted: Empty for all that its settings allow.
        recovery_limit_s: Longest time that a recovery may take.

    Raises:
        ConfigError: The settings do not allow one of them: it would go unnoticed, or has no target.
    """
    reasons: dict[Fault, str] = {}
    if config.cache.cache_verify != "all" or config.cache.host_cache_gib == 0:
        reasons["flip-host"] = "needs a host cache that is checked whenever it is read: --cache-verify all"
    if config.cache.store is None:
        reasons["flip-store"] = "needs --store"
    if not 0 < config.scheduler.step_timeout_s < recovery_limit_s:
        reasons["hang-worker"] = "needs a server that notices in time: --step-timeout-s, less than --recovery-limit"
    for fault in wanted:
        if fault in reasons:
            raise ConfigError(f"--faults {fault} {reasons[fault]}.", param="faults")
    every: tuple[Fault, ...] = (*SIGNALS, "flip-host", "flip-store")
    return list(wanted) or [fault for fault in every if fault not in reasons]


def inject(fault: Fault, config: Options, processes: dict[int, str], rng: np.random.Generator) -> InjectedFault:
    """Does one of them.

    Args:
        fault: Which.
        config: The server's settings.
        processes: Its processes and their roles.
        rng: Chooses among them, and among pages and bits.
    """
    if fault in SIGNALS:
        role, number = SIGNALS[fault]
        victims = [pid for pid, its in processes.items() if its == role]
        if not victims:
            return InjectedFault("")
        victim = int(rng.choice(victims))
        with suppress(ProcessLookupError):
            os.kill(victim, number)
            return InjectedFault(f"{number.name} to {role} {victim}", victim)
        return InjectedFault("")
    if fault == "flip-host":
        return InjectedFault(_flip_host(config, processes, rng))
    assert config.cache.store is not None
    return InjectedFault(_flip_store(Path(config.cache.store.removeprefix("file:")), rng))


def _flip_host(config: Options, processes: dict[int, str], rng: np.random.Generator) -> str:
    """Flips a bit in each of some pages that have their checksum, while no worker writes."""
    workers = [pid for pid, role in processes.items() if role == "worker"]
    fds = [fd for pid, role in processes.items() if role == "scheduler" for fd in _segments(pid, config)]
    if not fds:
        return ""
    with _stopped(workers):
        segment = Segment.attach(os.open(fds[int(rng.integers(len(fds)))], os.O_RDWR | os.O_CLOEXEC))
        is_sealed = (segment.records["state"] == PageState.VALID) & (segment.records["checksum"] != NO_CHECKSUM)
        pages = rng.permutation(np.flatnonzero(is_sealed))[:MAX_FLIPPED]
        places = rng.integers(segment.layout.page_bytes, size=pages.size)
        segment.pages[pages, places] ^= np.uint8(1 << int(rng.integers(8)))
        segment.close()
    return f"a bit in each of {pages.size} pages" if pages.size else ""


def _segments(pid: int, config: Options) -> list[str]:
    """Returns the descriptors of host segments that a process holds, as paths."""
    name = config.cache.host_cache_name
    wanted = MEMFD if name is None else str(segment_path(name))
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(path).startswith(wanted):
                found.append(str(path))
    return found


@contextmanager
def _stopped(pids: list[int]) -> Iterator[None]:
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _flip_store(folder: Path, rng: np.random.Generator) -> str:
    """Flips a bit in each of some files of a store."""
    files = sorted(path for path in folder.glob("*/*") if len(path.name) == NAME_LENGTH)
    num_flipped = 0
    for index in rng.permutation(len(files))[:MAX_FLIPPED]:
        with suppress(FileNotFoundError), files[index].open("r+b") as file:  # the store removes files, too
            place = int(rng.integers(max(1, os.fstat(file.fileno()).st_size)))
            file.seek(place)
            (byte,) = file.read(1) or b"\0"
            file.seek(place)
            file.write(bytes([byte ^ 1 << int(rng.integers(8))]))
            num_flipped += 1
    return f"a bit in each of {num_flipped} files" if num_flipped else ""
