"""Takes the pages of a former process into the index."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.storage.host import HostPool
from hiserve.core.request import MAX_RETAIN_S

logger = logging.getLogger(__name__)

TOUCH_TIMEOUT_S = 600.0


def recover_host_pages(host: HostPool, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> int:
    """Inserts the valid pages of the segment into the index, once their memory is ready; other pages may follow later.

    Args:
        host: Just made; its records must not have been used.
        cache: Just made, with no host page ready.
        clock: Of ``Retainer``. Pages that a record retains longer than any request can ask are retained so long.

    Returns:
        Recovered pages; none where their memory cannot be had any more.
    """
    runs = host.recover()
    tails = host.tails()
    last = max(
        (int(pages.max()) for pages in (*(run.pages for run in runs), *(tail.frames for tail in tails))), default=0
    )
    if runs and not host.prefault.wait(1 + last, TOUCH_TIMEOUT_S):
        host.clear()
        runs, tails = [], []
    cache.grow_host(max(1, host.num_ready_pages))
    latest_s = math.ceil(clock() + MAX_RETAIN_S)
    num_pages = cache.recover(replace(run, retained_until_s=min(run.retained_until_s, latest_s)) for run in runs)
    if cache.tails is not None:  # none of them is retained longer than its history
        num_pages += cache.tails.recover(tails)
    logger.info("adopted %d of %d pages of the host cache", num_pages, host.num_pages - 1)
    return num_pages
