"""The pages of a tier that are announced to routers where boundaries need tails: those with a tail at or behind them."""

from __future__ import annotations

from collections.abc import Callable

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
