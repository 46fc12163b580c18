"""What every test process needs, whatever started it."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

from tests.helpers.forks import start_server


def pytest_configure(config: pytest.Config) -> None:
    """Gives SIGINT its usual handler: shells start background jobs with SIGINT ignored, and so would tests and their children."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Makes one item of the long cases of a test where they are left out: 7,900 of them would take 8 s of CPU.

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


def pytest_sessionstart(session: pytest.Session) -> None:
    """Collects no garbage until the tests are collected: nearly all that is made stays, and 15 times it would take 0.5 s of CPU to see.

    Starts what the forks share meanwhile, which has a core of its own then.
    """
    gc.disable()
    if session.config.getoption("forks", 0) and not session.config.option.collectonly:
        start_server()


def pytest_collection_finish() -> None:
    """Keeps what collecting has made, which stays to the end, out of garbage collections: a full one takes 0.3 s of CPU with it."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Lets it go where the interpreter is taken apart: libraries report at the end what is left of them."""
    if not session.config.getoption("forks", 0):
        gc.enable()
        gc.unfreeze()
