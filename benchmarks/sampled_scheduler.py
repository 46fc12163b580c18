"""The scheduler process under a sampling timer: ``... sampled_scheduler OUT.json ENDPOINT``.

The clock runs on the CPU time of the main thread, so that what it counts are shares of that; from one SIGUSR2
to the next. The threads of zmq take CPU time beside it: a clock of the process would count that to what the main thread does
meanwhile, most of all to the calls after each send. It writes the file at the end.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import hiserve
from hiserve.scheduler.process import main

EVERY_NS = 1_000_000  # of CPU time; the kernel looks at its own ticks, 1 to 4 ms apart
FOLDER = Path(hiserve.__file__).parent


class _Event(ctypes.Structure):
    """C's ``struct sigevent``: which signal a timer sends, to the process."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_rest", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """C's ``struct itimerspec``: seconds and nanoseconds of the interval, and until the first signal."""

    _fields_ = (("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2))


class Clock:
    """Counts at each of its ticks which module of ours the process is in, or called what it is in.

    Attributes:
        ticks: So far.
        modules: Ticks by module, such as ``scheduler/ledger.py``.
        cpu_s: CPU time of the main thread while it ran, in seconds.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self.modules: Counter[str] = Counter()
        self.cpu_s = 0.0

    def listen(self) -> None:
        """Runs from one SIGUSR2 to the next. Called from the main thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        timer, event = ctypes.c_void_p(), _Event(signal=signal.SIGPROF)
        code = libc.timer_create(time.CLOCK_THREAD_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer))
        assert code == 0, f"a timer of this thread cannot be made: error {ctypes.get_errno()}"

        def start(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGUSR2, stop)
            self.cpu_s = -time.thread_time()
            every = (ctypes.c_long * 2)(0, EVERY_NS)
            libc.timer_settime(timer, 0, ctypes.byref(_Times(every, every)), None)

        def stop(number: int, frame: FrameType | None) -> None:
            libc.timer_settime(timer, 0, ctypes.byref(_Times()), None)
            self.cpu_s += time.thread_time()

        signal.signal(signal.SIGPROF, self._tick)
        signal.signal(signal.SIGUSR2, start)

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
        told = {"ticks": clock.ticks, "modules": clock.modules, "cpu_s": clock.cpu_s}
        Path(sys.argv[1]).write_text(json.dumps(told))
    sys.exit(code)
