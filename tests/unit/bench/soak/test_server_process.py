"""What a server of a soak leaves behind is told, unless its processes remove it in a moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hiserve.bench.soak import server_process
from hiserve.bench.soak.server_process import RunningServer, temporary
from hiserve.config.options import make_options


class Ended:
    """A server that ended at once; its number is that of no process."""

    pid, returncode = 2**22 + 1, 0

    def send_signal(self, number: int) -> None:
        raise ProcessLookupError

    async def wait(self) -> int:
        return self.returncode


async def left_by(folder: Path) -> list[str]:
    process: Any = Ended()
    return await RunningServer(process, "http://nowhere", folder, make_options(model="nano")).stop()


async def test_files_that_a_process_removes_late_are_no_left_overs(tmp_path: Path) -> None:
    """Of a process whose parent was killed while it started, nobody knows."""
    temporary(tmp_path).mkdir()
    path = temporary(tmp_path) / "hiserve-late"
    path.touch()
    asyncio.get_running_loop().call_later(0.1, path.unlink)
    assert await left_by(tmp_path) == []
    assert not path.exists()


async def test_files_that_stay_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "DEAD_S", 0.05)
    temporary(tmp_path).mkdir()
    for number in range(server_process.MAX_SHOWN + 1):
        (temporary(tmp_path) / f"hiserve-{number}").touch()
    found = await left_by(tmp_path)
    assert len(found) == server_process.MAX_SHOWN and all(line.endswith("was left behind") for line in found)
