"""A live ``hiserve serve`` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.forks import Fork
from tests.helpers.waiting import PATIENCE_S

# A server that chooses the number of drafts measures at start what they cost, 1.5 s of CPU. Servers of tests draft so many,
# or none unless a test says so.
DRAFTS = ("--spec", "auto", "--spec-steps", "3")
PLAIN = ("--spec", "off")
COMMAND = (sys.executable, "-c", "import sys; from hiserve.cli import main; sys.exit(main())")


def _get(url: str) -> httpx.Response:
    """Asks a server. Without ``verify=False``, httpx reads the certificates of all authorities each time: 29 ms of CPU."""
    return httpx.get(url, timeout=PATIENCE_S, verify=False)


@dataclass
class Live:
    """A running server.

    Attributes:
        url: Where it listens.
        process: The API process.
        log: What it wrote to standard error.
    """

    url: str
    process: subprocess.Popen[str] | Fork
    log: Path

    def info(self) -> dict[str, Any]:
        """Asks for ``/server_info``."""
        return dict(_get(f"{self.url}/server_info").raise_for_status().json())

    def counter(self, name: str, **labels: str) -> float:
        """Sums the series of a metric that carry these labels."""
        total = 0.0
        for line in _get(f"{self.url}/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.startswith(name + "{") and all(f'{key}="{text}"' in series for key, text in labels.items()):
                total += float(value)
        return total

    def wait_idle(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Waits until no request is anywhere and no copy between tiers holds pages; returns ``/server_info``."""
        deadline = time.monotonic() + timeout_s
        while True:
            info = self.info()
            busy = info["num_inflight"] + info["num_queued"]
            for stats in (worker["stats"] for worker in info["workers"]):
                busy += stats["running"] + stats["waiting"]
                busy += sum(stats["cache"][kind]["num_in_flight"] for kind in ("loads", "offloads"))
            if not busy:
                return info
            assert time.monotonic() < deadline, f"still busy: {info}"
            time.sleep(0.05)

    @contextlib.contextmanager
    def stopped(self, pid: int | None = None) -> Iterator[None]:
        """Its worker is stopped: it ends nothing that it holds meanwhile.

        Args:
            pid: The worker, where not everybody may ask for it.
        """
        pid = pid or self.pids()[-1]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def pids(self) -> list[int]:
        """All processes of the server."""
        processes = self.info()["processes"]
        return [processes["api"], processes["scheduler"], *(worker["pid"] for worker in processes["workers"])]


@contextlib.contextmanager
def serve(
    folder: Path,
    *flags: str,
    command: Sequence[str] = COMMAND,
    environment: dict[str, str] | None = None,
    is_fork: bool = True,
) -> Iterator[Live]:
    """Starts a server on a free port and ends it, processes and all.

    Args:
        folder: For its log.
        flags: Of ``hiserve serve``; they win over ``PLAIN``.
        command: What stands for ``hiserve``.
        environment: Variables beside those of this process.
        is_fork: Its processes are forks of one that has imported what they run, which saves 3 s of CPU. Not for tests
            of how processes start or how large they are, nor for commands of other programs.
    """
    log = folder / "serve.log"
    with log.open("w") as sink:
        line = [*command, "serve", "--port", "0", *PLAIN, *flags]
        variables = os.environ | (environment or {})
        process: subprocess.Popen[str] | Fork
        read, write = os.pipe()
        if is_fork:
            process = Fork(line, write, sink.fileno(), variables)
        else:
            process = subprocess.Popen(line, stdout=write, stderr=sink, text=True, env=variables)
        os.close(write)
        output = os.fdopen(read)
    try:
        first = output.readline()
        assert first.startswith("listening on "), f"{first!r}; {log.read_text()}"
        yield Live(first.removeprefix("listening on ").strip(), process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            output.close()
