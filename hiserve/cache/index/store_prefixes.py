"""The part of the contract that concerns the store beyond the host: ``PrefixCache.store``."""

from __future__ import annotations

from hiserve.cache.index.nodes import Node, Tail
from hiserve.cache.index.prefixes import Prefixes
from hiserve.cache.index.store_sync import RunOp, StoreSync
from hiserve.cache.index.tail_uploads import TailUploads
from hiserve.cache.index.tier_pages import TierPages
from hiserve.cache.index.uploads import Uploads
from hiserve.core.transfers import PageCopy


class StorePrefixes:
    """Prefetches of prefixes that a store has, and uploads of those that it lacks; ``PrefixCache.complete`` ends both.

    Frames of tails count as pages, except where pages of prompts are meant.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        host: TierPages[Node | Tail],
        sync: StoreSync,
        uploads: Uploads,
        tail_uploads: TailUploads | None,
    ) -> None:
        self._prefixes = prefixes
        self._host = host
        self._sync = sync
        self._uploads = uploads
        self._tail_uploads = tail_uploads

    @property
    def num_available_on_host(self) -> int:
        """Host pages that a prefetch can take now."""
        return self._host.num_available

    @property
    def is_host_partial(self) -> bool:
        """Whether host pages are not usable yet (``PrefixCache.grow_host``)."""
        return self._host.pages.num_ready < self._host.pages.num_pages

    def missing(self, tenant: bytes, key: bytes) -> tuple[int, int, list[bytes]]:
        """Returns what of a prompt is cached, and what is not. Changes nothing.

        Returns:
            The pages before its deepest resume point, those of its cached history, at least as many, and the digests of the
            pages behind the resume point.
        """
        return self._prefixes.missing(tenant, key)

    def num_frames_before(self, num_pages: int) -> int:
        """Returns the frames of the tail at a boundary of a prompt, behind so many pages; 0 where boundaries need none."""
        return 0 if self._tail_uploads is None else self._tail_uploads.num_frames_before(num_pages)

    def back_up(self, tenant: bytes, key: bytes, num_pages: int, num_more: int) -> bool | None:
        """Queues the cached ones of the first pages of a prompt for offload, if the host lacks some of them.

        Args:
            tenant: Of the prompt.
            key: The whole prompt, packed.
            num_pages: Pages of the prompt.
            num_more: Host pages that a prefetch behind them takes.

        Returns:
            Whether the host has them all; None if it has no room for the others.
        """
        return self._prefixes.back_up(tenant, key, num_pages, num_more)

    def prefetch_of(self, digest: bytes, *, of_tail: bool = False) -> int:
        """Returns the number of the prefetch of a page, or of the tail behind it; 0 without one.

        A prefetch whose prefix left the host does not count.
        """
        return self._sync.arriving_by(digest, of_tail=of_tail)

    def begin_prefetch(
        self, tenant: bytes, key: bytes, max_pages: int, num_more: int = 0, *, tail_at: int = 0
    ) -> RunOp | None:
        """Begins to fetch up to ``max_pages`` pages that a store has after the cached ones of a prompt.

        Args:
            tenant: Of the prompt.
            key: The whole prompt, packed.
            max_pages: Most pages to fetch; with ``tail_at``, all between the cached ones and the boundary.
            num_more: Pages that the store has after those; counted as left out when the prefetch cannot begin.
            tail_at: Pages of the prompt before the boundary whose tail is fetched too; 0 fetches none.

        Returns:
            What to fetch; its host pages stay taken until ``complete``. None if the rest of the prompt is less than
            a page, is in flight, or has no room (``PrefixCacheStats.not_prefetched``).
        """
        rest = self._prefixes.rest_of(tenant, key, max_pages, tail_at)
        if rest is None:
            return None
        return self._sync.begin_prefetch(*rest, num_more, num_frames=self.num_frames_before(tail_at))

    def abort_prefetch(self, op: int) -> None:
        """Unlocks the prefix of a prefetch; its pages will not be inserted, and stay taken until ``complete``."""
        self._sync.abort_prefetch(op)

    @property
    def has_uploads(self) -> bool:
        """Whether ``begin_uploads`` has anything to do."""
        return self._uploads.has_uploads or (self._tail_uploads is not None and self._tail_uploads.has_uploads)

    @property
    def num_to_upload(self) -> int:
        """Pages whose upload has not begun."""
        return self._uploads.num_waiting + (0 if self._tail_uploads is None else self._tail_uploads.num_waiting)

    @property
    def num_not_uploaded(self) -> int:
        """Pages whose upload will never begin."""
        num_frames = 0 if self._tail_uploads is None else self._tail_uploads.num_not_uploaded
        return self._uploads.num_not_uploaded + num_frames

    def begin_uploads(self) -> tuple[list[RunOp], list[PageCopy]]:
        """Begins uploads to the store, parents before children, tails behind their history, each once.

        Returns:
            Uploads from host pages, and copies to staging pages of the host for what a full host lacks. Both lock
            their pages until ``complete``; after a copy, a later call returns its upload.
        """
        uploads, copies = self._uploads.take()
        if self._tail_uploads is not None:
            tails, stages = self._tail_uploads.take()
            uploads, copies = uploads + tails, copies + stages
        return uploads, copies

    def end_upload(self, op: int, *, is_stage: bool, ok: bool) -> None:
        """Ends an upload, or a copy to staging pages; of ``PrefixCache.complete``."""
        if self._tail_uploads is not None and op in self._tail_uploads:
            self._tail_uploads.end(op, ok=ok)
        elif is_stage:
            self._uploads.end_stage(op, ok=ok)
        else:
            self._uploads.end_upload(op)
