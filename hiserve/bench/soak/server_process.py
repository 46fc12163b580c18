"""A server that was started for a soak: its processes, and the files that they leave."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import yaml

from hiserve.cache.storage.segment import SHARED_MEMORY, segment_path
from hiserve.config.options import Options, flat
from hiserve.errors import EngineError

PROGRAM = (sys.executable, "-m", "hiserve.cli")
STOP_S = 30.0
DEAD_S = 15.0  # longer than a child waits for a parent (`ipc/child.py`)
ROLES = ("api", "scheduler", "worker")
MAX_SHOWN = 5


class RunningServer:
    """A running ``hiserve serve``.

    Attributes:
        url: As given.
        log: What it wrote to standard error.
    """

    def __init__(self, process: asyncio.subprocess.Process, url: str, folder: Path, config: Options) -> None:
        self._process = process
        self._folder = folder
        self._config = config
        self._seen: set[int] = set()
        self._shared: set[Path] = set()
        self.url = url
        self.log = folder / "serve.log"

    def processes(self) -> dict[int, str]:
        """Returns its processes now, by number, and the role of each: children of the API and their children."""
        found: dict[int, str] = {}
        level = [self._process.pid]
        for role in ROLES:
            found |= dict.fromkeys(level, role)
            level = [child for pid in level for child in children(pid)]
        self._seen.update(found)
        for pid in found:
            self._shared |= shared_files(pid)
        return found

    async def stop(self) -> list[str]:
        """Ends it and returns its left-overs: processes, sockets and other files, shared memory."""
        self.processes()
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        left = []
        try:
            await asyncio.wait_for(self._process.wait(), self._config.server.drain_timeout_s + STOP_S)
        except TimeoutError:
            left.append(f"the server did not end within {STOP_S:g} s of its drain timeout")
            self._process.kill()
            await self._process.wait()
        if self._process.returncode:
            left.append(f"the server ended with {self._process.returncode}")
        return left + await self._orphans() + await self._files()

    async def _orphans(self) -> list[str]:
        """Gives its processes a moment to be gone; ends those that are not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEAD_S
        while (alive := [pid for pid in self._seen if is_alive(pid)]) and loop.time() < deadline:
            await asyncio.sleep(0.05)
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        return [f"process {pid} outlived the server" for pid in alive]

    async def _files(self) -> list[str]:
        """Gives a process that was never seen, whose parent was killed while it started, a moment to remove what it has."""
        name = self._config.cache.host_cache_name
        kept = {segment_path(name)} if name is not None else set()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + DEAD_S
        while True:
            left = [
                *temporary(self._folder).glob("hiserve-*"),
                *(path for path in self._shared - kept if path.exists()),
            ]
            if not left or loop.time() >= deadline:
                break
            await asyncio.sleep(0.05)
        return [f"{path} was left behind" for path in left[:MAX_SHOWN]]


@asynccontextmanager
async def start(config: Options, program: Sequence[str] = PROGRAM) -> AsyncIterator[RunningServer]:
    """Starts a server on a free port, with everything temporary in a folder of its own, and kills what is left of it.

    Raises EngineError.
    """
    with tempfile.TemporaryDirectory(prefix="hiserve-soak-") as name:
        folder = Path(name)
        temporary(folder).mkdir()
        given = flat(config) | {"host": "127.0.0.1", "port": 0}
        settings = {key: value for key, value in msgspec.to_builtins(given).items() if value not in (None, [], ())}
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
        with (folder / "serve.log").open("wb") as log:
            # The variable is set for the server alone; env becomes it.
            command = (
                "env",
                f"TMPDIR={temporary(folder)}",
                *program,
                "serve",
                "--config",
                str(folder / "settings.yaml"),
            )
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            if not line.startswith("listening on "):
                said = (folder / "serve.log").read_text(errors="replace").splitlines()
                raise EngineError(f"the server did not start: {' '.join(said[-1:])}")
            yield RunningServer(process, line.removeprefix("listening on ").strip(), folder, config)
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def temporary(folder: Path) -> Path:
    """Returns where a server puts sockets and the like."""
    return folder / "tmp"


def children(pid: int) -> list[int]:
    """Returns the children of a process, over all its threads; none if it is gone."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def shared_files(pid: int) -> set[Path]:
    """Returns the files of shared memory that a process maps."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return {path for path in paths if not path.name.endswith("(deleted)")}
