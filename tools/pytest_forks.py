"""Runs tests in forks of the process that collects them: ``pytest -p tools.pytest_forks --forks 3``.

Test files are compiled and imported once, and the forks share that memory. Each takes the next file that no fork has, as
long as there is one, and sends what becomes of its tests to the first process, which has the terminal and writes the
results. A fork that dies is a failure of the test that it ran; another runs what is left of its file at the end.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import pytest
from _pytest import junitxml

NUMBER_BYTES = 2  # of a file
QUEUE_BYTES = 2**16  # what a pipe holds


@dataclass
class Fork:
    """A process that runs tests, as the first process knows it."""

    pid: int
    handle: int  # of the process; can be read when it has ended
    messages: int  # the end of a pipe from which its lines are read, without waiting
    unread: bytearray = field(
        default_factory=bytearray
    )  # of them, those that were not passed on, and the start of the next
    last: str | None = None  # the test that it began last
    is_idle: bool = True  # that test has ended
    has_failed: bool = False  # one of its tests


class Messages:
    """A plugin of a fork: sends each call of these hooks to the first process, a line of JSON with the hook's name and arguments."""

    def __init__(self, config: pytest.Config, sent: int) -> None:
        self._config = config
        self._sent = sent
        self._has_begun = False

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._has_begun = True
        self._send("pytest_runtest_logstart", nodeid=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("pytest_runtest_logreport", report=data)

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("pytest_runtest_logfinish", nodeid=nodeid, location=location)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if not self._has_begun:  # a new plugin is called for all warnings before it, too
            return
        message = f"{warning_message.category.__name__}: {warning_message.message}"
        about = {"message": message, "filename": warning_message.filename, "lineno": warning_message.lineno}
        self._send("pytest_warning_recorded", warning_message=about, when=when, nodeid=nodeid)

    def pytest_internalerror(self, excrepr: object) -> None:
        print(excrepr, file=sys.stderr)

    def _send(self, hook: str, **arguments: Any) -> None:
        left = memoryview(json.dumps([hook, arguments]).encode() + b"\n")
        while left:
            left = left[os.write(self._sent, left) :]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run the tests in this many forks")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Gives torch one thread, before anything imports it: a fork has no other threads of its parent, and shares the cores."""
    if early_config.known_args_namespace.forks:
        os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Ends this process, and its forks, as soon as all that was registered is called: taking modules apart takes 4 s of CPU."""

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1 if hasattr(sys, "last_value") else int(session.exitstatus))  # 1: an exception that nothing caught

    if session.config.option.forks < 0:
        raise pytest.UsageError(f"--forks is {session.config.option.forks}, at least 0")
    if session.config.option.forks:
        atexit.register(end)  # what is registered first is called last


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs all tests. A fork returns too when it has run its own, and ends as pytest does."""
    option = session.config.option
    if not option.forks or option.collectonly or session.testsfailed:
        return None
    left = session.items
    while left:
        forks = start_forks(session, left, option.forks)
        if forks is None:
            return True
        begun = gather(session, forks)
        left = [item for item in left if item.nodeid not in begun]
    return True


def start_forks(session: pytest.Session, items: Iterable[pytest.Item], num_forks: int) -> list[Fork] | None:
    """Starts forks, which run tests; in a fork, returns None after that."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    files = list(by_file.values())
    numbers = b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in range(len(files)))
    assert len(numbers) <= QUEUE_BYTES, f"{len(files)} files, of which a pipe takes {QUEUE_BYTES // NUMBER_BYTES}"
    queue, end = os.pipe()
    os.write(end, numbers)
    os.close(end)
    forks: list[Fork] = []
    for _ in range(num_forks):
        received, sent = os.pipe()
        os.set_blocking(received, False)
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            for each in [received, *(fork.messages for fork in forks)]:
                os.close(each)  # or a fork would not notice that the first process is gone
            become_fork(session, sent)
            run_tests(queue, files)
            vars(sys).pop("last_value", None)  # pytest's, of a test that failed, also of one that was expected to
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends now in any case
            return None
        os.close(sent)
        forks.append(Fork(pid, os.pidfd_open(pid), received))
    os.close(queue)
    return forks


def become_fork(session: pytest.Session, sent: int) -> None:
    """Makes this process, just forked, one that tells the first process of its tests, and leaves the terminal to it."""
    config, plugins = session.config, session.config.pluginmanager
    session.testsfailed = 0
    os.setpgid(0, 0)  # Ctrl-C reaches the first process alone, which passes it on once
    random.seed()
    config.workerinput = {}  # type: ignore[attr-defined]  # as in a process of pytest-xdist: results are not its own
    junitxml.pytest_unconfigure(config)
    capture: Any = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of all forks
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what its terminal shows
    capture.start_global_capturing()
    capture.suspend_global_capture()
    plugins.register(Messages(config, sent))


def run_tests(queue: int, files: list[list[pytest.Item]]) -> None:
    """Runs the tests of one file after the other, each taken from the queue when it is begun."""
    while number := os.read(queue, NUMBER_BYTES):
        items = files[int.from_bytes(number, "big")]
        session: Any = items[0].session  # no item, but of all that follow it is known to share the session's fixtures
        for item, following in zip(items, [*items[1:], session], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def gather(session: pytest.Session, forks: list[Fork]) -> set[str]:
    """Reports what forks say until all have ended; returns the tests that were begun.

    Raises:
        pytest.Session.Failed: As many tests failed as ``--maxfail`` allows.
    """
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # files of several forks take turns
    begun: set[str] = set()
    running = list(forks)
    try:
        while running:
            ready = wait([each for fork in running for each in (fork.messages, fork.handle)])
            for fork in list(running):
                for hook, arguments in messages_of(fork):
                    pass_on(session.config, fork, hook, arguments)
                    if hook == "pytest_runtest_logstart":
                        begun.add(arguments["nodeid"])
                if fork.handle in ready:
                    running.remove(fork)
                    see_end(session, fork)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        interrupt(session, running)
    return begun


def messages_of(fork: Fork) -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns what a fork has said, without what its death has cut, or Ctrl-C while it was read.

    Never waits for the rest of a line: a child of a fork that was killed may keep the pipe open.
    """
    while True:
        while (end := fork.unread.find(b"\n")) >= 0:
            line = bytes(fork.unread[:end])
            del fork.unread[: end + 1]
            with suppress(json.JSONDecodeError):
                yield json.loads(line)
        try:
            part = os.read(fork.messages, QUEUE_BYTES)
        except BlockingIOError:
            return
        if not part:
            return
        fork.unread += part


def pass_on(config: pytest.Config, fork: Fork, hook: str, arguments: dict[str, Any]) -> None:
    """Calls a hook of the first process as a fork called it."""
    match hook:
        case "pytest_runtest_logstart":
            fork.last, fork.is_idle = arguments["nodeid"], False
        case "pytest_runtest_logreport":
            data = arguments["report"]
            if isinstance(data["longrepr"], list):  # of a skipped test: pytest asks for a tuple
                data["longrepr"] = tuple(data["longrepr"])
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            fork.has_failed |= report.failed
            config.hook.pytest_runtest_logreport(report=report)
        case "pytest_runtest_logfinish":
            fork.is_idle = True
            config.hook.pytest_runtest_logfinish(**arguments)
        case "pytest_warning_recorded":
            warning = warnings.WarningMessage(category=Warning, **arguments.pop("warning_message"))
            config.hook.pytest_warning_recorded.call_historic(
                kwargs={**arguments, "warning_message": warning, "location": None}
            )


def see_end(session: pytest.Session, fork: Fork) -> None:
    """Reports a fork that did not end as one does.

    Raises:
        RuntimeError: It had begun no test.
    """
    code = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
    os.close(fork.handle)
    os.close(fork.messages)
    if fork.is_idle and code == int(fork.has_failed):
        return
    reason = f"signal {-code}" if code < 0 else f"exit code {code}"
    if fork.last is None:
        raise RuntimeError(f"a process for tests ended with {reason} before its first test")
    when = "after" if fork.is_idle else "in"
    location = next(item.location for item in session.items if item.nodeid == fork.last)
    text = f"the process ended with {reason} {when} this test"
    report = pytest.TestReport(fork.last, location, {}, "failed", text, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def interrupt(session: pytest.Session, forks: Iterable[Fork]) -> None:
    """Ends forks as Ctrl-C does, so that fixtures are torn down; reports the tests that had ended."""
    for fork in forks:
        for hook, arguments in messages_of(fork):
            pass_on(session.config, fork, hook, arguments)
        os.close(fork.messages)
        os.kill(fork.pid, signal.SIGINT)
    for fork in forks:
        os.waitpid(fork.pid, 0)
        os.close(fork.handle)
