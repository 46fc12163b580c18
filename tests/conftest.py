"""What every test process needs, whatever started it."""

from __future__ import annotations

import gc
import os
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Gives SIGINT its usual handler, and processes that share the machine one thread of torch each.

    Shells start background jobs with SIGINT ignored, and so would tests and their children. OpenMP's threads wait for each
    other in a loop: more of them than cores slow all tests down. What is set here holds for torch, which is not imported yet.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keeps what collecting has made, which stays to the end, out of garbage collections: a full one takes 0.3 s of CPU with it."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Lets it go: libraries report at the end what is left of them."""
    gc.unfreeze()
