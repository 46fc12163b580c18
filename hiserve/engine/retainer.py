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
        clock: Monotonic seconds.
    """

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._is_used = False

    def retain(self, lock: PrefixLock, retain: Retain) -> None:
        """Retains prefixes of a locked one."""
        for num_tokens, ttl_s in retain:
            self._is_used = True
            self._cache.retain(lock, num_tokens, math.ceil(self._clock() + ttl_s))

    def expire(self) -> None:
        """Ends what is retained until now."""
        if self._is_used:
            self._cache.expire(int(self._clock()))
