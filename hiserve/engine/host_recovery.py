"""Takes over the host pages that a former process left."""

from __future__ import annotations

import logging

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.cache.storage.host import HostPool

TOUCH_TIMEOUT_S = 600.0

logger = logging.getLogger(__name__)


def recover_host_pages(host: HostPool, cache: PrefixCache) -> int:
    """Makes findable what the segment holds, once the memory of these pages is ready; the rest may follow later.

    Args:
        host: Just made; its records must not have been used.
        cache: Just made, with no host page ready.

    Returns:
        Pages adopted; none, where their memory cannot be had any more.
    """
    runs = host.recover()
    if runs and not host.prefault.wait(1 + max(int(run.pages.max()) for run in runs), TOUCH_TIMEOUT_S):
        host.clear()
        runs = []
    cache.grow_host(max(1, host.num_ready_pages))
    num_pages = cache.recover(runs)
    logger.info("adopted %d of %d pages of the host cache", num_pages, host.num_pages - 1)
    return num_pages
