"""The pages of one tier: which are free, who has them, and who hears of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.eviction import Eviction
from hiserve.cache.index.node import Node
from hiserve.cache.index.prefix_events import PrefixEvents
from hiserve.cache.index.tenant_shares import TenantShares
from hiserve.core.plan import Int32Array


class Tier(StrEnum):
    """Where pages lie."""

    DEVICE = "device"
    HOST = "host"


class TierListener(Protocol):
    """Hears, in order, of every page that a tier can give from now on, or cannot any more."""

    def stored(self, tier: Tier, parent: bytes | None, digests: list[bytes], key: bytes) -> None:
        """A run of pages can be read.

        Args:
            tier: Where.
            parent: Digest of the page before the run, which the tier has, too; None at the start of a prefix.
            digests: Of the run.
            key: Its packed tokens.
        """

    def removed(self, tier: Tier, digests: list[bytes]) -> None:
        """Pages cannot be read any more. The list changes after the call."""

    def cleared(self) -> None:
        """Nothing can be read on any tier any more, but for what is stored from now on."""


class TierPages:
    """The pages of one tier.

    Args:
        tier: Which.
        num_pages: Pages in the pool, page 0 included, which is never handed out.
        eviction: Decides which unlocked leaf goes first.
        num_ready: Pages below this can be used already; all, unless given.
        listener: Hears what ``events`` collects, as it happens and with the tokens.

    Attributes:
        pages: Which are free.
        eviction: Holds every node of the tier that may lose its tail.
        shares: Whose pages they are, and whose go next.
        events: Pages that can be read on this tier, or cannot any more.
        num_evictable: Pages that eviction could free, in time.
        num_evicted: Pages it did free.
        num_reserved: Of the free and evictable ones, those that are left for staged uploads (see ``Uploads``).
        last_step: int64 ``[num_pages]``. Of a free page, the last step whose forward may touch it.
    """

    def __init__(
        self,
        tier: Tier,
        num_pages: int,
        eviction: Eviction,
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

    def insert(self, node: Node, start: int = 0) -> None:
        """Tells that the pages of a node, from the one at ``start`` on, can be read here."""
        self.events.publish(node.digests[start:])
        self.notify(node, start)

    def notify(self, node: Node, start: int = 0) -> None:
        """Tells the listener alone."""
        if self._listener is not None:
            assert node.parent is not None
            parent = None if node.parent.is_root else node.parent.digests[-1]
            if start:
                parent = node.digests[start - 1]
            key = node.key[start * len(node.key) // node.num_pages :]
            self._listener.stored(self._tier, parent, node.digests[start:], key)

    def remove(self, digests: list[bytes]) -> None:
        """Tells that pages cannot be read here any more."""
        self.events.remove(digests)
        if self._listener is not None:
            self._listener.removed(self._tier, digests)

    def free(self, pages: Int32Array, last_step: NDArray[np.int64] | int) -> None:
        """Returns pages; forwards up to ``last_step`` may still touch them."""
        self.last_step[pages] = last_step
        self.pages.free(pages)
