"""The libraries of FlashInfer's kernels: compiled on their first use on a machine, beside the engine, then loaded."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress

from hiserve.errors import ConfigError

NICE = 10  # of the compilers: a start that computes meanwhile needs its cores more

logger = logging.getLogger(__name__)


class Libraries:
    """Compiles libraries in parallel, which takes a minute the first time, and loads them.

    Args:
        find: Returns a build for each library that this machine lacks.
        load: Loads the libraries, in about a second.
        waits: The constructor returns when they are loaded; else at once if there is something to compile.

    Raises:
        ConfigError: They cannot be compiled on this machine.
    """

    def __init__(
        self, find: Callable[[], Sequence[Callable[[], object]]], load: Callable[[], None], *, waits: bool
    ) -> None:
        self._load_all = load
        self._begin_s = time.perf_counter()
        self._is_loaded = self._is_broken = False
        with _advice():
            builds = find()
        if builds:
            logger.info("flashinfer compiles %d libraries that this machine never had, for a minute or so", len(builds))
        self._building = Building(builds)
        if waits or not builds:
            self._load()

    def is_ready(self) -> bool:
        """Whether they are loaded; the first call after the compilers have ended loads them."""
        if not self._is_loaded and not self._is_broken and self._building.is_done:
            try:
                self._load()
            except ConfigError as error:
                self._is_broken = True
                logger.warning("prompts stay with the backend that decodes, which is slower: %s", error)
        return self._is_loaded

    def _load(self) -> None:
        with _advice():
            self._building.wait()
            self._load_all()
        self._is_loaded = True
        logger.info("flashinfer's kernels were there after %.0f s", time.perf_counter() - self._begin_s)


@contextmanager
def _advice() -> Iterator[None]:
    """Converts errors of compilers to a ConfigError with a remedy."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"flashinfer cannot compile its kernels: {(str(error).splitlines() or [''])[0]}. "
            "Install nvcc and ninja, or use triton: --attention-backend triton.",
            param="attention_backend",
        ) from error


class Building:
    """Starts builds at once, each in a thread of its own. A process that ends does not wait for them.

    Each build waits for a compiler. Builds use no device, and no two of them write the same files.
    """

    def __init__(self, builds: Sequence[Callable[[], object]]) -> None:
        self._ends: list[Future[None]] = [Future() for _ in builds]
        for build, end in zip(builds, self._ends, strict=True):
            threading.Thread(target=_run, args=(build, end), name="compile", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether every build has ended, successfully or not."""
        return all(end.done() for end in self._ends)

    def wait(self) -> None:
        """Waits for every build.

        Raises:
            Exception: Of the first failed build, in the order given.
        """
        wait(self._ends)
        for end in self._ends:
            end.result()


def _run(build: Callable[[], object], end: Future[None]) -> None:
    with suppress(OSError):  # without permission the compilers keep the default priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # of this thread; its children inherit it
    try:
        build()
    except Exception as error:  # noqa: BLE001 - the future raises it in the caller of wait
        end.set_exception(error)
    else:
        end.set_result(None)
