"""What every test process needs, whatever started it."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Gives SIGINT its usual handler, and processes that share the machine one thread of torch each.

    Shells start background jobs with SIGINT ignored, and so would tests and their children. OpenMP's threads wait for each
    other in a loop: more of them than cores slow all tests down. What is set here holds for torch, which is not imported yet.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        atexit.register(os._exit, 0)  # the first is called last: taking all modules apart would take 4 s of CPU
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Makes one item of the long cases of a test where they are left out: 7,900 of them would take 8 s of CPU in each process.

    The one that is made shows that the parameters fit the test; it is left out then, as each of them was.
    """
    yield
    if "not long" not in metafunc.config.option.markexpr:
        return
    if any(metafunc.definition.iter_markers("long")):
        del metafunc._calls[1:]
        return
    is_long = [any(mark.name == "long" for mark in call.marks) for call in metafunc._calls]
    if any(is_long):
        first = is_long.index(True)
        metafunc._calls = [call for index, call in enumerate(metafunc._calls) if index == first or not is_long[index]]


def pytest_sessionstart() -> None:
    """Collects no garbage until the tests are collected: nearly all that is made stays, and 15 times it would take 0.5 s of CPU to see."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keeps what collecting has made, which stays to the end, out of garbage collections: a full one takes 0.3 s of CPU with it."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Lets it go where the interpreter is taken apart: libraries report at the end what is left of them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        gc.enable()
        gc.unfreeze()
