"""Checks workloads on a machine that is late with everything: ``python -m tests.helpers.late_freeze SEED NAME ...``.

Some methods are always late. Beside them, every thread is late at random moments: the seed says how often and how long.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from types import CodeType, FrameType

sleep = time.sleep

import tools.freeze.__main__ as freeze  # noqa: E402 - installs its clock before hiserve is imported
from hiserve.cache.storage.checksums import Checksums  # noqa: E402
from hiserve.cache.storage.file_store import FileStore  # noqa: E402
from hiserve.cache.storage.prefault import Populate  # noqa: E402
from hiserve.cache.storage.transfer import ThreadTransfers, TransferQueue  # noqa: E402
from hiserve.engine.executor import Executor  # noqa: E402
from tools.freeze import wire  # noqa: E402

LATE_S = {
    (Populate, "__call__"): 0.3,  # many steps
    (ThreadTransfers, "_execute"): 0.003,
    (TransferQueue, "end"): 0.003,
    (Checksums, "_take"): 0.003,
    (FileStore, "exists"): 0.003,
    (FileStore, "get"): 0.003,
    (FileStore, "put"): 0.003,
    (FileStore, "clear"): 0.3,
    (Executor, "_launch"): 0.001,
}
ROOT = Path(__file__).parents[2]
# In these files each call, return and call of a system function is a moment at which a thread may be late.
FILES = (
    f"{ROOT}/hiserve/cache/storage/",
    f"{ROOT}/hiserve/engine/executor.py",
    f"{ROOT}/hiserve/engine/tier_transfers.py",
    f"{ROOT}/tools/freeze/device.py",
)
PACES = ((0.0, 0.0), (0.3, 0.0005), (0.05, 0.005), (0.005, 0.1))  # share of the moments, seconds at most
MOST_S = 2.0  # of all random delays of one thread
NUMBERS = count()  # of threads
# Before the program of the server: its engine is late with its state, by more than the server waits for it.
LATE_STATE = """
import asyncio
from hiserve.scheduler.client import EngineClient
prompt = EngineClient.status
async def late(*args, **kwargs):
    await asyncio.sleep(2.5)
    return await prompt(*args, **kwargs)
EngineClient.status = late
"""


def delay(owner: type, name: str, seconds: float) -> None:
    """Makes a method wait in real time before it does anything."""
    prompt = getattr(owner, name)

    def late(*args: object, **kwargs: object) -> object:
        sleep(seconds)
        return prompt(*args, **kwargs)

    setattr(owner, name, late)


class Delays(threading.local):
    """Random delays of one thread, called by the interpreter at each moment."""

    def __init__(self, seed: str) -> None:
        self._random = Random(f"{seed} {next(NUMBERS)}")
        self._share, self._most_s = self._random.choice(PACES)
        self._left_s = MOST_S

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Waits, or does not."""
        if self._left_s > 0 and _is_moment(frame.f_code) and self._random.random() < self._share:
            late_s = self._random.uniform(0, self._most_s)
            self._left_s -= late_s
            sleep(late_s)


@cache
def _is_moment(code: CodeType) -> bool:
    return code.co_filename.startswith(FILES)  # strings: while the interpreter ends, a path can no longer be made


if __name__ == "__main__":
    for (owner, name), seconds in LATE_S.items():
        delay(owner, name, seconds)
    wire.PATIENT = (*wire.PATIENT[:2], LATE_STATE + wire.PATIENT[2])
    delays = Delays(sys.argv.pop(1))
    threading.setprofile(delays)
    sys.setprofile(delays)
    sys.argv[1:1] = ["check"]
    sys.exit(freeze.main())
