"""The libraries of FlashInfer's kernels: compiled on their first use on a machine, beside the engine, then loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hiserve.attention.compiling import Building
from hiserve.errors import ConfigError

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
