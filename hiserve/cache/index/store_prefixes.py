"""The part of the contract that concerns the store beyond the host: ``PrefixCache.store``."""

from __future__ import annotations

from hiserve.cache.index.nodes import Node, Tail
from hiserve.cache.index.prefixes import Prefixes
from hiserve.cache.index.store_sync import RunOp, StoreSync, Uploads
from hiserve.cache.index.tier_pages import TierPages
from hiserve.core.transfers import PageCopy


class StorePrefixes:
    """Prefetches of prefixes that a store has, and uploads of pages that it lacks; ``PrefixCache.complete`` ends both."""

    def __init__(self, prefixes: Prefixes, host: TierPages[Node | Tail], sync: StoreSync, uploads: Uploads) -> None:
        self._prefixes = prefixes
        self._host = host
        self._sync = sync
        self._uploads = uploads

    @property
    def num_available_on_host(self) -> int:
        """Host pages that a prefetch can take now."""
        return self._host.num_available

    def missing(self, tenant: bytes, key: bytes) -> tuple[int, list[bytes]]:
        """Returns how many pages of a prompt are cached, and the digests of the next ones. Changes nothing."""
        return self._prefixes.missing(tenant, key)

    def prefetch_of(self, digest: bytes) -> int:
        """Returns the number of the prefetch of a page, or 0; a prefetch whose prefix left the host does not count."""
        return self._sync.arriving_by(digest)

    def begin_prefetch(self, tenant: bytes, key: bytes, max_pages: int, num_more: int = 0) -> RunOp | None:
        """Begins to fetch up to ``max_pages`` pages that a store has after the cached prefix of a prompt.

        Args:
            tenant: Of the prompt.
            key: The whole prompt, packed.
            max_pages: Most pages to fetch.
            num_more: Pages that the store has after those; counted as left out when the prefetch cannot begin.

        Returns:
            The run to fetch, whose host pages stay taken until ``complete``. None if the rest of the prompt is less than
            a page, is in flight, or has no room (``PrefixCacheStats.not_prefetched``).
        """
        rest = self._prefixes.rest_of(tenant, key, max_pages)
        return None if rest is None else self._sync.begin_prefetch(*rest, num_more)

    def abort_prefetch(self, op: int) -> None:
        """Unlocks the prefix of a prefetch; its pages will not be inserted, and stay taken until ``complete``."""
        self._sync.abort_prefetch(op)

    @property
    def has_uploads(self) -> bool:
        """Whether ``begin_uploads`` has anything to do."""
        return self._uploads.has_uploads

    @property
    def num_to_upload(self) -> int:
        """Pages whose upload has not begun."""
        return self._uploads.num_waiting

    def begin_uploads(self) -> tuple[list[RunOp], list[PageCopy]]:
        """Begins uploads of new pages to the store, parents before children, each page once.

        Returns:
            Uploads from host pages, and copies to staging pages of the host for pages that a full host lacks. Both lock
            their pages until ``complete``; after a copy, a later call returns its upload.
        """
        return self._uploads.take()
