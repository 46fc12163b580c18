"""Checks workloads on a machine that is late with everything: ``python -m tests.helpers.late_freeze NAME ...``."""

from __future__ import annotations

import sys
import time

sleep = time.sleep

import tools.freeze.__main__ as freeze  # noqa: E402 - installs its clock before hiserve is imported
from hiserve.cache.storage.file_store import FileStore  # noqa: E402
from hiserve.cache.storage.prefault import Populate  # noqa: E402
from hiserve.cache.storage.transfer import ThreadTransfers, TransferQueue  # noqa: E402
from hiserve.engine.executor import Executor  # noqa: E402

LATE_S = {
    (Populate, "__call__"): 0.3,  # many steps
    (ThreadTransfers, "_execute"): 0.003,
    (TransferQueue, "end"): 0.003,
    (FileStore, "get"): 0.003,
    (FileStore, "put"): 0.003,
    (Executor, "_compute"): 0.001,
}


def delay(owner: type, name: str, seconds: float) -> None:
    """Makes a method wait in real time before it does anything."""
    prompt = getattr(owner, name)

    def late(*args: object, **kwargs: object) -> object:
        sleep(seconds)
        return prompt(*args, **kwargs)

    setattr(owner, name, late)


if __name__ == "__main__":
    for (owner, name), seconds in LATE_S.items():
        delay(owner, name, seconds)
    sys.argv[1:1] = ["check"]
    sys.exit(freeze.main())
