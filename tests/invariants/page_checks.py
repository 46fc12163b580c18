"""Where every page of a device pool is, at any moment."""

from __future__ import annotations

import numpy as np

from hiserve.cache.index.prefix_cache import PrefixCache
from hiserve.engine.planner import Planner


def check_pages(planner: Planner, cache: PrefixCache) -> None:
    """Free, tree and rows partition the pool (INV-17, INV-19), and the lengths of every row are in order."""
    rows = planner._rows
    rows.check()
    private = [rows.tables.pages[r, rows.num_published[r] : rows.tables.num_pages[r]] for r in rows.active.tolist()]
    tree = [node.pages for node in cache.tree.nodes()]
    free = cache.device.pages.free_pages()
    everything = np.concatenate([free, *private, *tree])
    assert np.array_equal(np.sort(everything), np.arange(1, cache.device.pages.num_pages))
    unlocked = sum(node.pages.size for node in cache.tree.nodes() if node.num_locks == 0)
    assert unlocked == cache.device.num_evictable
    assert free.size == cache.device.pages.num_free
