"""A parent hears everything its child said, learns how it ended, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hiserve.errors import ResourceError
from hiserve.ipc import channel
from hiserve.ipc import child as child_module
from hiserve.ipc.child import ChildProcess
from hiserve.ipc.codec import Frames
from tests.helpers.processes import is_alive, wait_dead
from tests.helpers.waiting import PATIENCE_S

TALKER = """
import signal, sys
from hiserve.ipc.child import connect_to_parent
link, frames = connect_to_parent(sys.argv[1], signal.SIGKILL)
for number in range(200):
    assert link.try_send([str(number).encode()])
link.close(linger_ms=5000)
sys.exit(int(frames[0]))
"""

# Stacks of threads count, touched or not: on a machine of 32 cores libraries' threads have more than a gigabyte.
GREEDY = """
import mmap
from hiserve.ipc.child import bound_memory
MIB = 2**20
threads = mmap.mmap(-1, 2048 * MIB, flags=mmap.MAP_PRIVATE)
bound_memory(512 * MIB)
mmap.mmap(-1, 128 * MIB, flags=mmap.MAP_PRIVATE)
try:
    mmap.mmap(-1, 1024 * MIB, flags=mmap.MAP_PRIVATE)
except OSError:
    print("bounded")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "an endpoint was left behind"


async def test_the_last_words_of_a_child_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_BATCH", 4)
    monkeypatch.setattr(child_module, "DRAIN_S", PATIENCE_S)
    heard: list[Frames] = []

    def slowly(batch: list[Frames]) -> None:
        if not heard:
            wait_dead([child.pid])  # long before it is heard out
        heard.extend(batch)

    child = await ChildProcess.start([sys.executable, "-c", TALKER], slowly)
    child.send([b"4"])
    assert await child.wait() == "exit code 4"
    assert [int(frames[0]) for frames in heard] == list(range(200))


async def test_a_child_that_never_connects_is_reaped() -> None:
    child = await ChildProcess.start([sys.executable, "-c", "raise SystemExit(3)"], lambda _: None)
    child.send([b"hello"])
    assert await child.wait() == "exit code 3"


async def test_a_killed_child_is_told_from_one_that_ended_itself() -> None:
    child = await ChildProcess.start([sys.executable, "-c", "import time; time.sleep(60)"], lambda _: None)
    assert is_alive(child.pid)
    child.kill()
    assert await child.wait() == "killed by SIGKILL"
    child.kill()
    wait_dead([child.pid])


async def test_a_command_that_does_not_exist_leaves_nothing() -> None:
    with pytest.raises(ResourceError, match=r"/does/not/exist cannot be started.*No such file"):
        await ChildProcess.start(["/does/not/exist"], lambda _: None)


def test_memory_is_bounded_beyond_what_a_process_has() -> None:
    done = subprocess.run([sys.executable, "-c", GREEDY], capture_output=True, text=True, check=False)
    assert done.stdout == "bounded\n", done.stderr
