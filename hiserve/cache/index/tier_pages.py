"""The pages of one tier: free and evictable ones, the shares of tenants, and what routers are told of them."""

from __future__ import annotations

from typing import Generic

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.eviction import Eviction, T, TenantShares
from hiserve.cache.index.nodes import Node
from hiserve.cache.index.reports import PrefixEvents, Tier, TierListener
from hiserve.core.plan import Int32Array
from hiserve.ipc.cache_stats import TierStats


class TierPages(Generic[T]):
    """The pages of one tier.

    Args:
        num_pages: Pages in the pool, page 0 included, which is never allocated.
        eviction: The nodes of the tier whose last pages may be evicted, and the tails.
        num_ready: Usable pages are below this; default: all.
        listener: Called with every change, with the tokens.

    Attributes:
        pages: The free pages.
        shares: Pages of each account.
        events: Pages that became readable, or unreadable, since the last report.
        num_evictable: Pages that eviction can free.
        num_evicted: Pages that eviction has freed.
        num_reserved: Free and evictable pages left for staged uploads (see ``Uploads``).
        last_step: int64 ``[num_pages]``. Of a free page, the last step whose forward may touch it.
    """

    def __init__(
        self,
        tier: Tier,
        num_pages: int,
        eviction: Eviction[T],
        num_ready: int | None = None,
        listener: TierListener | None = None,
    ) -> None:
        self._tier = tier
        self._listener = listener
        self.pages = PageAllocator(num_pages, num_ready)
        self.eviction = eviction
        self.shares = TenantShares(self.pages)
        self.events = PrefixEvents()
        self.num_evictable = 0
        self.num_evicted = 0
        self.num_reserved = 0
        self.last_step: NDArray[np.int64] = np.zeros(num_pages, dtype=np.int64)

    @property
    def num_available(self) -> int:
        """Pages that may be taken to cache something."""
        return max(0, self.pages.num_free + self.num_evictable - self.num_reserved)

    @property
    def num_unused(self) -> int:
        """Of them, those that are free."""
        return max(0, self.pages.num_free - self.num_reserved)

    def stats(self) -> TierStats:
        """Returns the counts; page 0 is not counted."""
        pages = self.pages
        return TierStats(pages.num_ready - 1, pages.num_free, self.num_evictable, self.num_evicted)

    def insert(self, node: Node, start: int = 0) -> None:
        """Records that the pages of a node, from the one at ``start`` on, are readable here."""
        digests = node.digests[start:] if start else node.digests
        self.events.publish(digests)
        if self._listener is not None:
            self.notify(node, start)

    def notify(self, node: Node, start: int = 0) -> None:
        """Reports the pages of a node, from the one at ``start`` on, to the listener alone."""
        assert self._listener is not None and node.parent is not None
        parent = None if node.parent.is_root else node.parent.digests[-1]
        if start:
            parent = node.digests[start - 1]
        key = node.key[start * len(node.key) // node.num_pages :]
        self._listener.stored(self._tier, parent, node.digests[start:], key)

    def remove(self, digests: list[bytes]) -> None:
        """Records that pages are no longer readable here."""
        self.events.remove(digests)
        if self._listener is not None:
            self._listener.removed(self._tier, digests)

    def free(self, pages: Int32Array, last_step: NDArray[np.int64] | int) -> None:
        """Returns pages; forwards up to ``last_step`` may still touch them."""
        self.last_step[pages] = last_step
        self.pages.free(pages)
