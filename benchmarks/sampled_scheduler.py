"""The scheduler process under a sampling timer: ``... sampled_scheduler OUT.json ENDPOINT``.

The clock runs on the CPU time of the process, so that what it counts are shares of that; from SIGUSR2 on. It writes the
file at the end.
"""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import hiserve
from hiserve.scheduler.process import main

EVERY_S = 0.001
FOLDER = Path(hiserve.__file__).parent


class Clock:
    """Counts at each of its ticks which module of ours the process is in, or called what it is in.

    Attributes:
        ticks: So far.
        modules: Ticks by module, such as ``scheduler/ledger.py``.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self.modules: Counter[str] = Counter()

    def listen(self) -> None:
        signal.signal(signal.SIGPROF, self._tick)
        signal.signal(signal.SIGUSR2, lambda *_: signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S))

    def _tick(self, number: int, frame: FrameType | None) -> None:
        self.ticks += 1
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(FOLDER):
                self.modules[str(path.relative_to(FOLDER))] += 1
                return
            frame = frame.f_back


if __name__ == "__main__":
    clock = Clock()
    clock.listen()
    try:
        code = main(sys.argv[2])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        told = {"ticks": clock.ticks, "modules": dict(clock.modules)}
        Path(sys.argv[1]).write_text(json.dumps(told))
    sys.exit(code)
