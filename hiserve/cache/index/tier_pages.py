"""The pages of one tier: free and evictable ones, the shares of tenants, and those announced to routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from hiserve.cache.index.allocator import PageAllocator
from hiserve.cache.index.eviction import Eviction, T, TenantShares
from hiserve.cache.index.nodes import Node
from hiserve.cache.index.reports import PrefixEvents, Tier, TierListener
from hiserve.core.plan import Int32Array
from hiserve.ipc.cache_stats import TierStats

# The digest of the page before a run (None at the start of a prefix), digests, packed tokens.
Announce = Callable[[bytes | None, list[bytes], bytes], None]


class ResumablePages:
    """Keeps readable pages back until a prompt can be resumed at or behind them on this tier.

    Pages are announced parents first, and retracted once the last tail behind them is gone.

    Args:
        announce: Called with runs of pages that became of use.
        retract: Called with pages that no longer are.
    """

    def __init__(self, announce: Announce, retract: Callable[[list[bytes]], None]) -> None:
        self._announce = announce
        self._retract = retract
        self._pages: dict[bytes, tuple[bytes | None, bytes]] = {}  # readable ones: the page before, tokens
        self._num_behind: dict[bytes, int] = {}  # of each page: its tail, and announced pages after it; no zeros
        self._tails: set[bytes] = set()

    def is_announced(self, digest: bytes) -> bool:
        """Whether a page is announced."""
        return digest in self._pages and digest in self._num_behind

    def insert(self, parent: bytes | None, digests: list[bytes], key: bytes) -> None:
        """Adds a run of pages that became readable; arguments as of ``TierListener.stored``."""
        size, before = len(key) // len(digests), parent
        for index, digest in enumerate(digests):
            self._pages[digest] = before, key[index * size : (index + 1) * size]
            before = digest
        for index, digest in enumerate(digests):
            if digest in self._num_behind:  # its tail was there first, or it was loaded after a page behind it
                self._announce_path(digest, digests[index - 1] if index else parent)

    def remove(self, digests: list[bytes]) -> None:
        """Removes pages that became unreadable, parents first; their tails may leave later."""
        retracted: list[bytes] = []
        for digest in reversed(digests):
            parent, _ = self._pages.pop(digest)
            if digest in self._num_behind:
                retracted.append(digest)
                retracted += self._release(parent)
        if retracted:
            self._retract(retracted)

    def add_tail(self, digest: bytes) -> None:
        """Records that the tier has a tail behind a page, which it lacked, and can give it."""
        assert digest not in self._tails, f"the tail behind {digest.hex()} is recorded twice"
        self._tails.add(digest)
        self._announce_path(None, digest)

    def remove_tail(self, digest: bytes) -> None:
        """Records that the tier lacks a tail behind a page."""
        if digest in self._tails:
            self._tails.discard(digest)
            if retracted := self._release(digest):
                self._retract(retracted)

    def _announce_path(self, last: bytes | None, digest: bytes | None) -> None:
        """Counts one more behind a page, and tells it and the pages before it, with ``last`` after them, if they were not."""
        path = [] if last is None else [last]
        while digest is not None:
            count = self._num_behind.get(digest, 0)
            self._num_behind[digest] = count + 1
            if count or digest not in self._pages:
                break
            path.append(digest)
            digest, _ = self._pages[digest]
        if path:
            path.reverse()
            parent, _ = self._pages[path[0]]
            self._announce(parent, path, b"".join(self._pages[each][1] for each in path))

    def _release(self, digest: bytes | None) -> list[bytes]:
        """Counts one less behind a page; returns it and the pages before it that are no longer of use, last first."""
        retracted: list[bytes] = []
        while digest is not None:
            self._num_behind[digest] -= 1
            if self._num_behind[digest]:
                break
            del self._num_behind[digest]
            if digest not in self._pages:
                break
            retracted.append(digest)
            digest, _ = self._pages[digest]
        return retracted


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
        resumable: Keeps readable pages back until they are of use; None where each boundary is a resume point.
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
        self.resumable: ResumablePages | None = None
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
        if self.resumable is None and self._listener is None:
            self.events.publish(node.digests[start:] if start else node.digests)
            return
        announce = self._announce if self.resumable is None else self.resumable.insert
        announce(*_run(node, start, node.num_pages))

    def remove(self, digests: list[bytes]) -> None:
        """Records that pages are no longer readable here."""
        if self.resumable is None:
            self._retract(digests)
        else:
            self.resumable.remove(digests)

    def notify(self, node: Node) -> None:
        """Reports the readable pages of a node to the listener alone."""
        assert self._listener is not None
        end = node.num_pages
        if self.resumable is not None:
            end = sum(map(self.resumable.is_announced, node.digests))  # the first so many
        if end:
            self._listener.stored(self._tier, *_run(node, 0, end))

    def _announce(self, parent: bytes | None, digests: list[bytes], key: bytes) -> None:
        self.events.publish(digests)
        if self._listener is not None:
            self._listener.stored(self._tier, parent, digests, key)

    def _retract(self, digests: list[bytes]) -> None:
        self.events.remove(digests)
        if self._listener is not None:
            self._listener.removed(self._tier, digests)

    def require_tails(self) -> ResumablePages:
        """Tells from now on only pages with a tail at or behind them; returns the place to record tails."""
        self.resumable = ResumablePages(self._announce, self._retract)
        return self.resumable

    def free(self, pages: Int32Array, last_step: NDArray[np.int64] | int) -> None:
        """Returns pages; forwards up to ``last_step`` may still touch them."""
        self.last_step[pages] = last_step
        self.pages.free(pages)


def _run(node: Node, start: int, end: int) -> tuple[bytes | None, list[bytes], bytes]:
    """Returns the digest before the pages ``[start, end)`` of a node (None at the start of a prefix), theirs, and their tokens."""
    assert node.parent is not None
    parent = node.digests[start - 1] if start else None if node.parent.is_root else node.parent.digests[-1]
    size = len(node.key) // node.num_pages
    return parent, node.digests[start:end], node.key[start * size : end * size]
