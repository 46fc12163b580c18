"""The clock of retained prefixes: which tokens of a prompt are evicted last, and until when."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from hiserve.cache.index.prefix_cache import PrefixCache, PrefixLock
from hiserve.core.request import Retain


class Retainer:
    """Retains prefixes of requests that ask for it, from the end of their row on: before that, their locks do.

    Args:
        cache: Evicts them last.
        clock: Monotonic seconds, alike in all processes since the machine's start: those that the next process finds in the
            records of the host are its own times.
    """

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock

    def retain(self, lock: PrefixLock, retain: Retain) -> None:
        """Retains prefixes of a locked one."""
        for num_tokens, ttl_s in retain:
            self._cache.retain(lock, num_tokens, math.ceil(self._clock() + ttl_s))

    def expire(self) -> None:
        """Ends what is retained until now."""
        if self._cache.is_retaining:
            self._cache.expire(int(self._clock()))
